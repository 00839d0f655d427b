"""Reduced decoding is used only where it is declared and the size allows it, and stays near the full decode."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from frostline.core.errors import SettingError
from frostline.preprocess import CenterCrop, Decode, Normalize, Preprocess, RandomResizedCrop, Resize, imagenet
from frostline.preprocess.apply import decode_into

PIXELS = Normalize(mean=(0.0,) * 3, std=(1.0,) * 3)


def pixels(shorter, crop, *, reduced, mode="RGB"):
    last = PIXELS if mode == "RGB" else Normalize(mean=(0.0,), std=(1.0,))
    return Preprocess(steps=(Decode(mode, reduced), Resize(shorter), CenterCrop(crop), last))


def encoded(image, kind="JPEG", **options):
    sink = BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def smooth(width, height):
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 90 * np.sin(x / 31 + c) * np.cos(y / (37 + c)) for c in range(3)]
    return Image.fromarray(np.stack(waves, 2).astype(np.uint8))


def decoded(preprocess, data):
    out = np.empty(preprocess.shape, np.float32)
    decode_into(preprocess, data, out, id=1, view=None)
    return out


def by_pillow(data, scale, shorter, crop):
    """A JPEG at a scale of its own transform, then scaled and cut as ever."""
    image = Image.open(BytesIO(data))
    image.draft(None, (image.width // scale, image.height // scale))
    image = image.convert("RGB")
    longer = int(shorter * max(image.size) / min(image.size))
    image = image.resize((longer, shorter), Image.Resampling.BILINEAR)
    left, top = round((longer - crop) / 2), round((shorter - crop) / 2)
    return np.asarray(image.crop((left, top, left + crop, top + crop))).transpose(2, 0, 1)


@pytest.mark.parametrize(("shorter", "scale"), [(512, 1), (300, 1), (256, 2), (200, 2), (128, 4), (64, 8), (20, 8)])
def test_the_smallest_scale_that_is_large_enough_is_decoded(shorter, scale):
    data = encoded(smooth(768, 512), quality=92)
    ours = decoded(pixels(shorter, 16, reduced=True), data)
    assert np.array_equal(ours, by_pillow(data, scale, shorter, 16))
    whole = decoded(pixels(shorter, 16, reduced=False), data)
    assert np.array_equal(ours, whole) == (scale == 1)
    assert np.abs(ours - whole).mean() < 2


@pytest.mark.parametrize("size", [(767, 511), (511, 767), (1025, 257), (64, 64), (9, 900)])
def test_no_odd_size_is_scaled_up_or_leaves_the_shape(size):
    data = encoded(smooth(*size), quality=90)
    assert np.isfinite(decoded(pixels(32, 32, reduced=True), data)).all()
    assert np.isfinite(decoded(pixels(32, 32, reduced=True, mode="L"), data)).all()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "TIFF"])
def test_other_formats_are_decoded_whole(kind):
    data = encoded(smooth(200, 160), kind)
    assert np.array_equal(decoded(pixels(32, 32, reduced=True), data), decoded(pixels(32, 32, reduced=False), data))


def test_reduced_decoding_changes_the_digest():
    assert pixels(64, 64, reduced=True).digest != pixels(64, 64, reduced=False).digest


@pytest.mark.parametrize("second", [CenterCrop(32), RandomResizedCrop(32)])
def test_it_is_refused_where_no_resize_says_what_is_enough(second):
    with pytest.raises(SettingError, match="needs Resize"):
        Preprocess(steps=(Decode(reduced=True), second, PIXELS))


def test_presets_decode_in_full():
    assert imagenet(224).steps[0] == Decode(reduced=False)
