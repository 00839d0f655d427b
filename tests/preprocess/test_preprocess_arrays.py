"""Images kept as arrays: the pixels that are there, and a sentence for whatever is no image."""

import gc
import io
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import frostline as fl
from frostline.core.errors import SampleError
from frostline.preprocess import CenterCrop, Decode, Normalize, Preprocess
from frostline.preprocess.apply import decode_into, pixels_needed
from frostline.preprocess.images import pixels_of, size_of_array
from support.images import image_folder, tiny_preprocess

PLAIN = Preprocess(steps=(Decode(), CenterCrop(8), Normalize(mean=(0.0,) * 3, std=(1.0,) * 3)))


def npy(array, **options):
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def png(array):
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


def decoded(encoded, **options):
    out = np.empty(PLAIN.shape, np.float32)
    decode_into(PLAIN, encoded, out, id=0, view=None, **options)
    return out


@pytest.mark.parametrize("shape", [(9, 12), (9, 12, 3), (9, 12, 4)])
def test_an_array_gives_the_pixels_of_an_image_that_holds_the_same(shape):
    array = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    assert np.array_equal(decoded(npy(array)), decoded(png(array)))
    assert pixels_needed(PLAIN, npy(array)) == pixels_needed(PLAIN, png(array)) == 9 * 12


def test_one_channel_may_be_written_as_such():
    array = np.random.default_rng(0).integers(0, 255, (9, 12, 1), np.uint8)
    assert np.array_equal(decoded(npy(array)), decoded(npy(array[:, :, 0])))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((8, 8), np.uint16),
        np.zeros((8, 8, 3), np.float32),
        np.zeros((8, 8, 2), np.uint8),
        np.zeros((8,), np.uint8),
        np.zeros((0, 8), np.uint8),
        np.zeros((3, 8, 8), np.uint8),
        np.asfortranarray(np.zeros((8, 8, 3), np.uint8)),
        np.zeros((8, 8), [("a", np.uint8)]),
    ],
)
def test_arrays_that_are_no_images_get_a_sentence(array):
    with pytest.raises(SampleError, match="is no image: one is uint8"):
        decoded(npy(array))


class Planted:
    def __reduce__(self):
        return pytest.fail, ("something was unpickled",)


def test_objects_in_an_array_are_never_unpickled():
    array = np.array([[Planted()]], object)
    with pytest.raises(SampleError, match="is no image"):
        decoded(npy(array, allow_pickle=True))
    with pytest.raises(SampleError):
        decoded(pickle.dumps(Planted()))


def test_a_header_is_no_longer_than_any_image_has():
    """It is parsed as Python's literals: of more bytes that takes long."""
    for length in (900, 1100, 60_000):
        padded = "{'descr': '|u1', 'fortran_order': False, 'shape': (8, 8, 3), }".ljust(length) + "\n"
        data = b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + bytes(192)
        if length < 1024:
            assert pixels_of(data).shape == (8, 8, 3)
            continue
        with pytest.raises(SampleError, match="its header cannot be read"):
            pixels_of(data)


def test_a_broken_array_gets_a_sentence_wherever_it_is_cut():
    data = npy(np.zeros((8, 8, 3), np.uint8))
    for length in (6, 9, 20, 100, len(data) - 1):
        with pytest.raises(SampleError, match="broken array"):
            decoded(data[:length])
    with pytest.raises(SampleError, match="too many pixels"):
        decoded(data, max_pixels=63)


@given(st.binary(max_size=200))
def test_whatever_follows_the_magic_gets_a_sentence(rest):
    for version in (b"\x01\x00", b"\x02\x00", b""):
        with pytest.raises(SampleError) as caught:
            pixels_of(b"\x93NUMPY" + version + rest)
        assert "\n" not in str(caught.value)


def test_a_folder_of_arrays_is_a_data_set(tmp_path):
    for path in image_folder(tmp_path, per_class=2).rglob("*.jpg"):
        np.save(path.with_suffix(".npy"), np.asarray(Image.open(path)))
        path.unlink()
    with fl.offload(None, fl.Dataset(tmp_path), preprocess=tiny_preprocess()) as job:
        [batch] = job.loader(6)
    assert len(batch.labels) == 6


def test_headers_are_read_by_many_threads_at_once():
    encoded = npy(np.zeros((40, 30, 3), np.uint8))

    def to_another_thread(phase, info):
        time.sleep(0)

    # In the middle of Python's parser, threads change only where the garbage collector runs something of Python's.
    gc.callbacks.append(to_another_thread)
    thresholds = gc.get_threshold()
    gc.set_threshold(5)
    try:
        with ThreadPoolExecutor(4) as threads:
            sizes = list(threads.map(lambda _: size_of_array(encoded), range(300)))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(to_another_thread)
    assert set(sizes) == {(30, 40)}
