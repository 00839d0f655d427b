"""A mask goes the way that its image goes, and its numbers stay what they are."""

from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from frostline.core import View
from frostline.core.errors import BadRequest, SampleError
from frostline.preprocess import (
    CenterCrop,
    ColorJitter,
    Decode,
    Normalize,
    Preprocess,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Squeeze,
    imagenet,
)
from frostline.preprocess.apply import IGNORED, decode_into, mask_into

PLAIN = Normalize(mean=(0.0,) * 3, std=(1.0,) * 3)
WAYS = {
    "middle": (Resize(48), CenterCrop(40)),
    "enlarged": (Resize(200, "bicubic"), CenterCrop(160)),
    "squeezed": (Squeeze(40),),
    "squeezed, then the middle": (Squeeze(56, "bicubic"), CenterCrop(40)),
    "random": (RandomResizedCrop(64), RandomHorizontalFlip(0.5)),
    "random, then the middle": (RandomResizedCrop(64, 0.5), Resize(48), RandomHorizontalFlip(0.5), CenterCrop(32)),
    # Amounts of nothing change no colour, but colours draw all the same.
    "random, with colours before the flip": (RandomResizedCrop(64), ColorJitter(), RandomHorizontalFlip(0.5)),
    "flip first": (RandomHorizontalFlip(0.5), Resize(64), CenterCrop(64)),
}


def way(*steps):
    return Preprocess(steps=(Decode(), *steps, PLAIN))


def encoded(pixels, kind="PNG"):
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def as_array(values):
    file = BytesIO()
    np.save(file, values)
    return file.getvalue()


def masked(preprocess, data, *, id=1, view=None, size=(0, 0), max_pixels=1_000_000):
    out = np.full(preprocess.shape[1:], 7, np.uint16)
    mask_into(preprocess, data, out, id=id, view=view, size=size, max_pixels=max_pixels)
    return out


def as_it_is(classes, data=None):
    """What a mask gives where nothing is scaled or cut: squares alone."""
    return masked(way(CenterCrop(len(classes))), encoded(classes) if data is None else data)


def classes(side=24, maximum=256, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, maximum, (side, side)).astype(dtype)


@given(st.sampled_from(list(WAYS)), st.integers(30, 150), st.integers(30, 150), st.integers(0, 1 << 40))
def test_mask_and_image_show_the_same_part(name, width, height, seed):
    # Black and white patches: where scaling gave pure black or white, no edge is near, and the mask must say the same.
    patches = np.random.default_rng(seed % 97).integers(0, 2, (height // 16 + 1, width // 16 + 1))
    truth = patches.repeat(16, 0).repeat(16, 1)[:height, :width].astype(np.uint8)
    preprocess = way(*WAYS[name])
    view = View(seed=seed, epoch=3) if preprocess.is_random else None
    pixels = np.empty(preprocess.shape, np.float32)
    decode_into(preprocess, encoded((truth * 255)[..., None].repeat(3, 2)), pixels, id=seed, view=view)
    mask = masked(preprocess, encoded(truth), id=seed, view=view)
    is_pure = np.isin(pixels[0], (0, 255)) & (mask != IGNORED)
    assert np.array_equal(mask[is_pure], pixels[0][is_pure] // 255)
    assert is_pure.mean() > 0.2


def test_another_epoch_takes_another_part_of_both():
    truth = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    parts = [masked(imagenet(32, augment=True), as_array(truth), view=View(seed=0, epoch=epoch)) for epoch in range(3)]
    assert not np.array_equal(parts[0], parts[1])
    assert np.array_equal(parts[2], masked(imagenet(32, augment=True), as_array(truth), view=View(seed=0, epoch=2)))
    with pytest.raises(BadRequest, match="view"):
        masked(imagenet(32, augment=True), as_array(truth))


def test_a_palette_is_passed_over_and_its_indices_are_classes():
    found = classes(maximum=21)
    image = Image.fromarray(found)
    image.putpalette([(7 * place) % 256 for place in range(768)])
    assert image.mode == "P"
    file = BytesIO()
    image.save(file, "PNG")
    assert np.array_equal(as_it_is(found, file.getvalue()), found)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP"])
def test_grey_images_give_their_values(kind):
    found = classes()
    assert np.array_equal(as_it_is(found, encoded(found, kind)), found)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_read_whole(kind):
    found = classes(maximum=1 << 16, dtype=np.uint16)
    assert found.max() > 60_000
    assert np.array_equal(as_it_is(found, encoded(found, kind)), found)


def test_black_and_white_is_0_and_1():
    found = classes(maximum=2).astype(bool)
    assert np.array_equal(as_it_is(found, encoded(found)), found)


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int8, np.uint16, np.dtype(">u2"), np.int32, np.int64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_whole_numbers_are_masks(dtype, order):
    found = classes(maximum=2).astype(dtype, order=order)
    found[0, 1] = 1
    assert np.array_equal(as_it_is(found, as_array(found)), found)
    assert np.array_equal(as_it_is(found, as_array(np.ascontiguousarray(found)[..., None])), found)


def test_ignores_pixels_outside_a_small_mask():
    mask = masked(way(CenterCrop(10)), encoded(np.full((4, 20), 3, np.uint8)))
    assert (mask[3:7] == 3).all()
    assert (mask[:3] == IGNORED).all()
    assert (mask[7:] == IGNORED).all()


REFUSED = {
    "pixels of kind RGB are no classes: a mask has one whole number a pixel": encoded(np.zeros((8, 8, 3), np.uint8)),
    "an array of float32 [8, 8] is no mask": as_array(np.zeros((8, 8), np.float32)),
    "an array of uint8 [8, 8, 3] is no mask": as_array(np.zeros((8, 8, 3), np.uint8)),
    "-1 is no class: those of masks go from 0 to 65535": as_array(np.full((8, 8), -1, np.int64)),
    "65536 is no class": as_array(np.full((8, 8), 65_536, np.int32)),
    "the mask has 8 x 6 pixels and its image 8 x 8": encoded(np.zeros((6, 8), np.uint8)),
    "broken image": encoded(np.zeros((8, 8), np.uint8), "TIFF")[:-40],
    "not an image": b"nothing",
    "broken array": as_array(np.zeros((8, 8), np.uint8))[:-1],
    "too many pixels": as_array(np.zeros((10, 11), np.uint8)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_an_invalid_mask_is_a_one_sentence_error(reason):
    with pytest.raises(SampleError) as caught:
        masked(way(CenterCrop(8)), REFUSED[reason], size=(8, 8), max_pixels=100)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
