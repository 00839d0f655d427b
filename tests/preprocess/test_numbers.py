"""Arrays of any numbers as samples: the numbers that NumPy wrote, and a sentence for whatever is another array."""

import io
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from frostline import preprocess
from frostline.core.errors import BadRequest, SampleError, SettingError
from frostline.preprocess import Applied, CenterCrop, Preprocess, ReadArray, imagenet
from frostline.preprocess.apply import decode_into, pixels_needed


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def read(encoded, shape, dtype="float32"):
    made = preprocess.array(shape, dtype)
    out = np.empty(made.shape, made.dtype)
    decode_into(made, encoded, out, id=0, view=None)
    return out


@given(arrays.arrays(np.float32, arrays.array_shapes(max_dims=5, max_side=4)), st.booleans())
def test_gives_the_numbers_that_were_saved(array, is_fortran):
    saved = npy(np.asarray(array, order="F" if is_fortran else "C"))
    assert read(saved, array.shape).tobytes() == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("kept", ["<f8", ">f4", "<f2", "u1", "i1", ">i8", "?"])
def test_any_numbers_become_floats(kept):
    array = np.array([[0, 1, 1], [1, 0, 100]]).astype(kept)
    assert np.array_equal(read(npy(array), (2, 3)), array.astype(np.float32))


@pytest.mark.parametrize("kept", ["u1", "<i4", ">i8", "?"])
def test_keeps_whole_numbers_unconverted(kept):
    array = np.array([0, 1, 7]).astype(kept)
    assert np.array_equal(read(npy(array), (3,), "int64"), array.astype(np.int64))


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((3, 2), np.float32), r"shape \[3, 2\].*\[2, 3\]"),
        (np.zeros((), np.float32), r"shape \[\]"),
        (np.zeros((2, 3), np.complex64), "holds complex64"),
        (np.zeros((2, 3), "M8[s]"), "holds datetime64"),
        (np.zeros((2, 3), "U4"), "holds str"),
        (np.zeros((2, 3), [("a", "f4")]), "holds void"),
    ],
)
def test_another_array_is_refused_by_a_sentence(array, said):
    with pytest.raises(SampleError, match=said):
        read(npy(array), (2, 3))


def test_refuses_fractions_where_whole_numbers_are_needed():
    for array in (np.zeros(3), np.zeros(3, np.uint64)):
        with pytest.raises(SampleError, match="which int64 cannot"):
            read(npy(array), (3,), "int64")


def test_objects_are_never_read():
    with pytest.raises(SampleError, match="holds object"):
        read(npy(np.array([print] * 3, object), allow_pickle=True), (3,))


def test_refuses_a_file_that_is_no_array_or_truncated():
    whole = npy(np.zeros((2, 3), np.float32))
    for encoded, said in [
        (b"", "no array"),
        (pickle.dumps(3), "no array"),
        (whole[:9], "header"),
        (whole[:-1], "takes"),
    ]:
        with pytest.raises(SampleError, match=said):
            read(encoded, (2, 3))
    with pytest.raises(SampleError, match="takes"):
        read(whole + b"\0", (2, 3))


def test_a_header_that_promises_more_than_there_is_costs_nothing():
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 20, 40)})
    with pytest.raises(SampleError, match="takes"):
        read(file.getvalue(), (1 << 20, 40))


def test_a_double_too_large_for_a_float_becomes_infinite():
    assert read(npy(np.array([1e300])), (1,))[0] == np.inf


def test_says_shape_and_type_of_a_sample():
    made = preprocess.array((4, 5, 6, 7))
    assert (made.shape, made.dtype, made.levels, made.is_random, made.stored) == (
        (4, 5, 6, 7),
        "float32",
        None,
        False,
        None,
    )
    assert [(spec.shape, spec.dtype) for spec in preprocess.array([9], "int64").inputs] == [((9,), "int64")]
    assert pixels_needed(made, npy(np.zeros((4, 5, 6, 7)))) == 0


def test_comes_back_from_its_json_and_has_a_digest_of_its_own():
    made = preprocess.array((3, 4))
    assert Preprocess.from_json(json.loads(json.dumps(made.to_json()))) == made
    digests = {made.digest, preprocess.array((4, 3)).digest, preprocess.array((3, 4), "int64").digest}
    assert len(digests) == 3


@pytest.mark.parametrize("shape", [(), (0,), (2, -1), (2.0,), 3, "ab", (True,), (1,) * 9, (1 << 25,), (1 << 13,) * 2])
def test_refuses_an_invalid_shape(shape):
    with pytest.raises(SettingError, match="shape"):
        preprocess.array(shape)


def test_refuses_a_type_that_networks_are_not_given():
    with pytest.raises(SettingError, match="dtype must be float32 or int64"):
        preprocess.array((3,), "float16")


def test_reading_an_array_allows_no_other_step():
    step = ReadArray((3,))
    for steps in [(step, CenterCrop(3)), (step, step), (*imagenet(32).steps[:-1], step, imagenet(32).steps[-1])]:
        with pytest.raises(SettingError):
            Preprocess(steps=steps)
    with pytest.raises(BadRequest, match="shape"):
        Preprocess.from_json({"steps": [{"step": "read_array", "shape": 3, "dtype": "float32"}]})


def test_a_ready_format_is_made_of_images():
    with pytest.raises(SettingError, match="made of images"):
        Applied.to(preprocess.array((3,)), "uint8")
