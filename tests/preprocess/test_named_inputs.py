"""Several inputs by name: their parts as one record, their numbers as one array, their steps as one preprocessing."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline import preprocess
from frostline.core import TensorSpec
from frostline.core.errors import BadRequest, SampleError, SettingError
from frostline.preprocess import NamedInputs, Preprocess, ReadArray
from frostline.preprocess.apply import decode_into, pixels_needed
from frostline.preprocess.steps import frame_parts, place_inputs, unframe_parts
from support.pairs import SIDE, TOKENS, encoded_image, pair_inputs
from support.texts import tokenizer_of_words


def numbers(shape, dtype="float32"):
    return preprocess.array(shape, dtype)


def stored(values):
    """An array as ``numpy.save`` writes it."""
    from io import BytesIO

    file = BytesIO()
    np.save(file, values)
    return file.getvalue()


def made(declared, record):
    out = np.full(declared.shape, -1, declared.dtype)
    decode_into(declared, record, out, id=5, view=None)
    return out


@given(parts=st.lists(st.binary(max_size=50), min_size=1, max_size=8))
def test_a_record_gives_its_parts_back(parts):
    assert [bytes(part) for part in unframe_parts(frame_parts(parts), len(parts))] == parts


@given(record=st.binary(max_size=60), parts=st.integers(1, 8))
def test_what_is_no_record_is_refused_and_never_read_beyond(record, parts):
    try:
        found = unframe_parts(record, parts)
    except SampleError:
        return
    assert sum(map(len, found)) == len(record) - 4 * parts


@given(shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans()), min_size=2, max_size=8))
def test_every_input_comes_back_from_the_array_and_none_touches_another(shapes):
    specs = [TensorSpec((first, second), "int64" if whole else "float32") for first, second, whole in shapes]
    places = place_inputs((f"input_{place}", spec) for place, spec in enumerate(specs))
    rows = np.full((3, places[-1].end), -1, np.int64)
    meant = {}
    for number, place in enumerate(places):
        meant[place.name] = np.stack(
            [np.full(place.spec.shape, number + row / 2, place.spec.dtype) for row in range(3)]
        )
        for row in range(3):
            place.within(rows[row])[:] = meant[place.name][row]
    for place in places:
        found = place.of(rows, np.dtype(place.spec.dtype))
        assert found.dtype == place.spec.dtype
        np.testing.assert_array_equal(found, meant[place.name])


def test_each_part_is_decoded_as_it_is_alone():
    declared, image = pair_inputs(), encoded_image(np.random.default_rng(1))
    pixels, tokens = declared.parts
    record = frame_parts([image, b"the film was good"])
    row = made(declared, record)
    found = declared.unpack(row[None])
    np.testing.assert_array_equal(found["pixel_values"][0], made(pixels, image))
    ids, mask = made(tokens, b"the film was good")
    np.testing.assert_array_equal(found["input_ids"][0], ids)
    np.testing.assert_array_equal(found["attention_mask"][0], mask)
    tokens = TensorSpec((TOKENS,), "int64")
    pixels = TensorSpec((3, SIDE, SIDE))
    assert declared.inputs == {"pixel_values": pixels, "input_ids": tokens, "attention_mask": tokens}
    assert pixels_needed(declared, record) == max(map(pixels_needed, declared.parts, (image, b"the film was good")))


def test_a_half_filled_number_is_the_same_whatever_stood_there():
    declared = preprocess.named_inputs(a=numbers((3,)), b=numbers((1,)))
    record = frame_parts([stored(np.arange(3, dtype=np.float32)), stored(np.ones(1))])
    assert made(declared, record).tobytes() == b"".join([struct.pack("<4f", 0, 1, 2, 0), struct.pack("<2f", 1, 0)])


def test_a_broken_part_is_named():
    declared = preprocess.named_inputs(a=numbers((3,)), b=numbers((1,)))
    with pytest.raises(SampleError, match=r"^b: it is no array"):
        made(declared, frame_parts([stored(np.zeros(3)), b"nothing"]))
    with pytest.raises(SampleError, match="no record of 2 parts"):
        made(declared, b"\x00")
    assert pixels_needed(declared, b"\x00") == 0


def test_random_steps_of_a_part_make_the_whole_random():
    text = preprocess.text(tokenizer_of_words(), max_length=TOKENS)
    cropped = preprocess.named_inputs(pixel_values=preprocess.imagenet(SIDE, augment=True), input_ids=text)
    assert cropped.is_random
    assert not pair_inputs().is_random


def test_steps_travel_as_plain_values_and_the_tokenizer_beside_them():
    declared = pair_inputs()
    arrived = Preprocess.from_json(json.loads(json.dumps(declared.to_json())))
    assert arrived == declared
    assert arrived.digest == declared.digest
    assert arrived.with_tokenizer(declared.tokenizer).parts[1].tokenizer == declared.tokenizer
    assert declared.parts[0].tokenizer == b""
    other = preprocess.named_inputs(pixel_values=preprocess.imagenet(SIDE + 4), input_ids=declared.parts[1])
    assert other.digest != declared.digest


STEP = {"step": "read_array", "shape": [2], "dtype": "float32"}
INNER = {"step": "named_inputs", "names": ["c", "d"], "steps": [[STEP], [STEP]]}


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([[STEP], [INNER]], "no named inputs of its own"),
        ([[STEP], "x"], "a list of steps for each part"),
        ([[STEP], []], "a list of steps for each part"),
        ([[STEP]], "steps of its own"),
        ([[STEP], [STEP] * 17], "a list of steps for each part"),
        ([[STEP], [STEP, STEP]], "the only step"),
        (3, "a list of steps for each part"),
    ],
)
def test_a_stranger_cannot_nest_or_leave_out(steps, why):
    with pytest.raises(BadRequest, match=why):
        Preprocess.from_json({"steps": [{"step": "named_inputs", "names": ["a", "b"], "steps": steps}]})


@pytest.mark.parametrize(
    "names", [["a"], ["a", "a"], ["a", "b c"], "ab", ["a", 3], [f"n{place}" for place in range(9)]]
)
def test_names_are_those_of_arguments_and_differ(names):
    with pytest.raises(SettingError, match=r"named inputs|names of arguments|names must be a list"):
        NamedInputs(names, ((ReadArray((2,)),),) * len(names))


def test_what_no_network_takes_together_is_refused():
    text = preprocess.text(tokenizer_of_words(), max_length=TOKENS)
    other = preprocess.text(tokenizer_of_words("more"), max_length=TOKENS, names=("b", "mask_b"))
    with pytest.raises(SettingError, match="its token ids input_ids"):
        preprocess.named_inputs(caption=text, pixel_values=preprocess.imagenet(SIDE))
    with pytest.raises(SettingError, match="two inputs have one name"):
        preprocess.named_inputs(attention_mask=numbers((2,)), input_ids=text)
    with pytest.raises(SettingError, match="one tokenizer"):
        preprocess.named_inputs(input_ids=text, b=other)
    with pytest.raises(SettingError, match="several"):
        preprocess.named_inputs(a=numbers((2,)), b=pair_inputs())
    with pytest.raises(SettingError, match="pixel_values takes Preprocess"):
        preprocess.named_inputs(pixel_values=3, input_ids=text)
    with pytest.raises(SettingError, match="64 bits together"):
        preprocess.named_inputs(a=numbers((3, 10_000_000), "int64"), b=numbers((3, 10_000_000), "int64"))
