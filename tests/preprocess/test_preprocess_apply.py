"""Decoding gives torchvision's pixels, the same on every side, and bad images get a reason."""

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from frostline.core import View
from frostline.core.errors import BadRequest, SampleError, SettingError
from frostline.datasets.copy.layout import scale_image
from frostline.preprocess import (
    CenterCrop,
    ColorJitter,
    Decode,
    Normalize,
    Preprocess,
    RandomHorizontalFlip,
    Resize,
    Squeeze,
    array,
    imagenet,
    images,
    named_inputs,
)
from frostline.preprocess.apply import MAX_PIXELS, decode_into, pixels_into, pixels_needed
from frostline.preprocess.images import decoded_classes, size_of
from frostline.preprocess.steps import Stored

PIXELS = Normalize(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
SIZES = [(512, 384), (384, 512), (500, 375), (333, 256), (257, 256), (256, 256), (225, 224), (100, 80), (1000, 301)]


def picture(width, height, mode="RGB"):
    """Smooth colours with some grain: neither flat nor noise."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [
        127 + 90 * np.sin(x / 17 + c) * np.cos(y / (23 + c)) + 30 * ((x * 7 + y * 13 + c) % 3 - 1) for c in range(3)
    ]
    return Image.fromarray(np.clip(np.stack(waves, 2), 0, 255).astype(np.uint8)).convert(mode)


def encoded(image, kind="JPEG", **options):
    sink = BytesIO()
    image.save(sink, kind, **({"quality": 95} if kind == "JPEG" else {}), **options)
    return sink.getvalue()


def decoded(preprocess, data, *, id=1, view=None, max_pixels=10_000_000):
    out = np.full(preprocess.shape, np.nan, np.float32)
    decode_into(preprocess, data, out, id=id, view=view, max_pixels=max_pixels)
    return out


def pixels(shorter, crop, filter="bilinear"):
    return Preprocess(steps=(Decode(), Resize(shorter, filter), CenterCrop(crop), PIXELS))


FOUR = Normalize(mean=(120.0, 110.0, 100.0, 90.0), std=(60.0, 61.0, 62.0, 63.0))


def test_images_of_four_channels_are_prepared_as_torchvision_does():
    image = picture(300, 200).convert("RGBA")
    image.putalpha(picture(300, 200, "L"))
    preprocess = Preprocess(steps=(Decode(mode="RGBA"), Resize(100), CenterCrop(64), FOUR))
    found = decoded(preprocess, encoded(image, "PNG"))
    assert found.shape == (4, 64, 64)
    expected = by_torchvision(image, 100, 64)
    means, deviations = (np.array(values, np.float32)[:, None, None] for values in (FOUR.mean, FOUR.std))
    np.testing.assert_allclose(found, (expected - means) / deviations, atol=1e-5)


def test_alpha_stays_as_it_is_where_colours_are_changed():
    image = picture(40, 40).convert("RGBA")
    image.putalpha(picture(40, 40, "L"))
    step = ColorJitter(brightness=0.5, contrast=0.5, saturation=0.5, hue=0.3)
    steps = (Decode(mode="RGBA"), CenterCrop(40), step, Normalize(mean=(0.0,) * 4, std=(1.0,) * 4))
    found = decoded(Preprocess(steps=steps), encoded(image, "PNG"), view=View(seed=1, epoch=0))
    assert (found[3] == np.asarray(image.getchannel("A"))).all()
    assert not (found[:3] == np.asarray(image.convert("RGB")).transpose(2, 0, 1)).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_as_many_numbers_as_channels_are_asked_for(channels):
    few = Normalize(mean=(0.0,) * channels, std=(1.0,) * channels)
    with pytest.raises(SettingError, match="4 numbers each for RGBA"):
        Preprocess(steps=(Decode(mode="RGBA"), Resize(8), CenterCrop(8), few))


def by_hand(image, shorter, crop):
    """torchvision's rule, written out: the longer side is cut to a whole number, the corner rounded half to even."""
    width, height = image.size
    longer = int(shorter * max(width, height) / min(width, height))
    image = image.resize((shorter, longer) if width <= height else (longer, shorter), Image.Resampling.BILINEAR)
    width, height = image.size
    top, left = round((height - crop) / 2.0), round((width - crop) / 2.0)
    return np.asarray(image.crop((left, top, left + crop, top + crop))).transpose(2, 0, 1)


def by_torchvision(image, shorter, crop):
    transforms = pytest.importorskip("torchvision.transforms", exc_type=(ImportError, RuntimeError))
    steps = transforms.Compose([transforms.Resize(shorter), transforms.CenterCrop(crop)])
    return np.asarray(steps(image)).transpose(2, 0, 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("expected", [by_hand, by_torchvision])
def test_resize_and_crop_give_torchvisions_pixels(size, expected):
    data = encoded(picture(*size))
    for shorter, crop in ((256, 224), (232, 224), (41, 32), (255, 224)):
        whole = Image.open(BytesIO(data)).convert("RGB")
        assert np.array_equal(decoded(pixels(shorter, crop), data), expected(whole, shorter, crop))


@pytest.mark.parametrize("size", [(100, 80), (64, 300), (48, 48)])
@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
def test_a_squeezed_image_is_all_of_it_scaled_by_pillow(size, filter):
    image = picture(*size)
    data, preprocess = encoded(image, "PNG"), Preprocess(steps=(Decode(), Squeeze(48, filter), PIXELS))
    assert preprocess.shape == (3, 48, 48)
    assert Preprocess.from_json(preprocess.to_json()) == preprocess
    kernel = Image.Resampling.BICUBIC if filter == "bicubic" else Image.Resampling.BILINEAR
    expected = np.asarray(image.resize((48, 48), kernel)).transpose(2, 0, 1)
    needed = pixels_needed(preprocess, data)
    np.testing.assert_array_equal(decoded(preprocess, data, max_pixels=needed), expected)
    with pytest.raises(SampleError, match="pixels"):
        decoded(preprocess, data, max_pixels=needed - 1)


@pytest.mark.parametrize("size", [(100, 80), (79, 300), (301, 79)])
def test_pads_an_image_smaller_than_the_crop_with_black_as_torchvision_does(size):
    transforms = pytest.importorskip("torchvision.transforms", exc_type=(ImportError, RuntimeError))
    data = encoded(picture(*size), "PNG")
    crop_only = Preprocess(steps=(Decode(), CenterCrop(129), PIXELS))
    expected = np.asarray(transforms.CenterCrop(129)(picture(*size))).transpose(2, 0, 1)
    assert np.array_equal(decoded(crop_only, data), expected)


def test_imagenet_scales_as_torchvision_does_to_rounding():
    data = encoded(picture(512, 384))
    crop = by_hand(Image.open(BytesIO(data)), 256, 224).astype(np.float64)
    mean = np.array([0.485, 0.456, 0.406])[:, None, None]
    std = np.array([0.229, 0.224, 0.225])[:, None, None]
    assert np.allclose(decoded(imagenet(224), data), (crop / 255 - mean) / std, rtol=0, atol=2e-6)


def test_the_arithmetic_is_the_declared_one_to_the_bit():
    data = encoded(picture(64, 64), "PNG")
    preprocess = Preprocess(steps=(Decode(), CenterCrop(64), Normalize(mean=(127.0,) * 3, std=(120.0,) * 3)))
    expected = (np.asarray(picture(64, 64)).astype(np.float32) - np.float32(127)) / np.float32(120)
    assert np.array_equal(decoded(preprocess, data), expected.transpose(2, 0, 1))


KINDS = "L:JPEG CMYK:JPEG P:PNG RGBA:PNG LA:PNG 1:PNG RGB:WEBP RGB:BMP RGB:PPM RGB:TIFF"


@pytest.mark.parametrize(("mode", "kind"), [word.split(":") for word in KINDS.split()])
def test_other_kinds_of_images_are_converted_as_pillow_does(mode, kind):
    data = encoded(picture(40, 32, mode), kind)
    expected = np.asarray(Image.open(BytesIO(data)).convert("RGB").crop((4, 0, 36, 32))).transpose(2, 0, 1)
    assert np.array_equal(decoded(Preprocess(steps=(Decode(), CenterCrop(32), PIXELS)), data), expected)


def oriented(orientation, kind="JPEG", **options):
    """A picture whose EXIF data says how it is to be turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture(40, 32), kind, exif=exif, **options)


def as_stored(data, size=48):
    """What torchvision's folders give, without scaling: a square as large as the whole."""
    return padded(Image.open(BytesIO(data)).convert("RGB"), size)


def as_datasets(data, size=48):
    return padded(datasets.Image().decode_example({"bytes": data, "path": None}).convert("RGB"), size)


def padded(image, size):
    ground = Image.new("RGB", (size, size))
    ground.paste(image, ((size - image.width) // 2, (size - image.height) // 2))
    return np.asarray(ground).transpose(2, 0, 1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [*range(1, 9), 0, 9])
def test_images_are_turned_as_each_librarys_reader_does_it(kind, orientation):
    data = oriented(orientation, kind)
    for turn, reference in (("stored", as_stored), ("data", as_stored), ("exif", as_datasets)):
        steps = Preprocess(steps=(Decode(orientation=turn), CenterCrop(48), PIXELS))
        assert np.array_equal(decoded(steps, data), reference(data))
    width, height = (32, 40) if 5 <= orientation <= 8 else (40, 32)
    # Pillow turns a TIFF by itself.
    assert size_of(data, is_turned=True) == (width, height)
    assert size_of(data) == ((width, height) if kind == "TIFF" else (40, 32))
    assert pixels_needed(Preprocess(steps=(Decode(orientation="exif"), CenterCrop(16), PIXELS)), data) == 40 * 32


def test_what_a_data_set_resolves_is_part_of_the_digest_and_what_is_declared_stays():
    whole = pixels(32, 32)
    turned, as_is = whole.orient(is_turned=True), whole.orient(is_turned=False)
    assert len({whole.digest, turned.digest, as_is.digest}) == 3
    assert turned.orient(is_turned=False) == turned
    assert Preprocess.from_json(json.loads(json.dumps(turned.to_json()))) == turned
    both = named_inputs(left=whole, right=array((2,))).orient(is_turned=True)
    assert [part.is_turned for part in both.parts] == [True, False]


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [("PNG", np.uint16, {}), ("TIFF", np.uint16, {}), ("TIFF", np.int32, {}), ("TIFF", np.float32, {})],
)
@pytest.mark.parametrize("value_range", [(0, 65535), (1000, 2000), (2000, 1000), (-1.5, 4095.5)])
def test_values_of_many_bits_are_scaled_as_declared(kind, dtype, options, value_range):
    values = np.random.default_rng(0).integers(0, 65536, (130, 90)).astype(dtype)
    values[:2, :2] = [[0, 65535], [1000, 2000]]
    data = encoded(Image.fromarray(values), kind, **options)
    assert np.array_equal(np.asarray(Image.open(BytesIO(data))), values)
    black, white = value_range
    expected = np.rint((values.astype(np.float64) - black) / (white - black) * 255).clip(0, 255)
    for mode, channels in (("L", 1), ("RGB", 3)):
        last = Normalize(mean=(0.0,) * channels, std=(1.0,) * channels)
        steps = Preprocess(steps=(Decode(mode=mode, value_range=value_range), CenterCrop(90), last))
        ours = decoded(steps, data)
        assert np.abs(ours - expected[20:110]).max() <= 1  # one of a rounding that lies in the middle
        assert (ours != expected[20:110]).mean() < 0.01
    assert decoded(Preprocess.from_json(imagenet(32, value_range=value_range).to_json()), data).shape == (3, 32, 32)


def test_eight_bits_are_not_scaled_and_colours_of_sixteen_are_as_pillow_reads_them():
    plain = encoded(picture(40, 32, "L"), "PNG")
    narrow = Preprocess(steps=(Decode(value_range=(10, 20)), CenterCrop(32), PIXELS))
    assert np.array_equal(decoded(narrow, plain), decoded(Preprocess(steps=(Decode(), CenterCrop(32), PIXELS)), plain))


@pytest.mark.parametrize("value", [(1,), (0, 0), (0, float("inf")), (True, 2), "ab", 3, (0, 1, 2), [0, "1"]])
def test_a_scale_that_is_none_is_refused(value):
    with pytest.raises(SettingError, match="value_range is two different numbers"):
        Decode(value_range=value)


def test_a_truncated_image_is_skipped_with_its_reason():
    whole = encoded(picture(320, 240))
    for length in (len(whole) // 2, len(whole) - 400, 1000):
        with pytest.raises(SampleError, match=r"broken image: .*truncated"):
            decoded(imagenet(224), whole[:length])


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"GIF89a" + bytes(20), b"%!PS-Adobe-3.0 EPSF-3.0\n", b"text"])
def test_skips_a_broken_image_without_naming_memory_addresses(data):
    with pytest.raises(SampleError) as caught:
        decoded(imagenet(224), data)
    assert "0x" not in str(caught.value)


def test_values_of_many_bits_without_a_scale_are_refused_rather_than_clipped():
    deep = encoded(Image.fromarray(np.full((40, 40), 60_000, np.uint16)), "PNG")
    with pytest.raises(SampleError, match=r"more than 8 bits .* value_range=\(0, 65535\)"):
        decoded(imagenet(224), deep)


def bmp_saying(side):
    """A small image whose header says that it is large."""
    header = bytearray(encoded(Image.new("L", (8, 8)), "BMP"))
    header[18:26] = struct.pack("<ii", side, side)
    return bytes(header)


def test_refuses_a_decompression_bomb_from_its_header():
    bomb = encoded(Image.new("1", (9_000, 9_000)), "PNG")
    with pytest.raises(SampleError, match="too many pixels: it has 9000 x 9000"):
        decoded(imagenet(224), bomb)


def test_a_decompression_bomb_that_pillow_refuses_has_the_same_reason():
    bomb = bmp_saying(30_000)
    with pytest.raises(SampleError, match="too many pixels"):
        decoded(imagenet(224), bomb)
    with pytest.raises(SampleError, match="too many pixels"):
        decoded_classes(bomb, max_pixels=MAX_PIXELS)
    with pytest.raises(SampleError, match="too many pixels"):
        scale_image(bomb, 8)
    assert size_of(bomb) == (0, 0)
    assert pixels_needed(imagenet(224), bomb) == 0


def test_an_image_of_which_pillow_warns_is_judged_by_our_limit_alone():
    large = bmp_saying(10_000)  # a warning is an error here
    assert size_of(large) == (10_000, 10_000)
    with pytest.raises(SampleError, match="too many pixels: it has 10000 x 10000"):
        decoded(imagenet(224), large)
    line = encoded(Image.new("1", (10_000, 9_000)), "PNG")
    assert images.decode_image(line, Decode("L"), max_pixels=1 << 30).size == (10_000, 9_000)


@pytest.mark.parametrize("size", [(30_000, 1), (1, 30_000)])
def test_an_image_that_scaling_would_blow_up_is_refused(size):
    sliver = encoded(Image.new("RGB", size), "PNG")
    with pytest.raises(SampleError, match="too many pixels: scaled"):
        decoded(imagenet(224), sliver)


KINDS = ("GIF", "AVIF", "JPEG2000", "ICO")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_other_formats_give_the_pixels_that_pillow_gives(kind, mode):
    data = encoded(picture(48, 40).convert(mode), kind)
    for wanted in ("RGB", "L"):
        with Image.open(BytesIO(data)) as image:
            pixels = np.asarray(image.convert(wanted))
        assert np.array_equal(np.asarray(images.decode_image(data, Decode(wanted), max_pixels=5_000)), pixels)
    assert size_of(data) == (pixels.shape[1], pixels.shape[0])
    with pytest.raises(SampleError, match="too many pixels"):
        images.decode_image(data, Decode("RGB"), max_pixels=100)


def test_an_icon_with_a_larger_image_in_it_is_refused_before_it_is_decoded():
    file = BytesIO()
    picture(48, 48).save(file, "ICO", sizes=[(48, 48)])
    data = bytearray(file.getvalue())
    assert images.decode_image(bytes(data), Decode("RGB"), max_pixels=10_000).size == (48, 48)
    data[6:8] = bytes([16, 16])  # width and height of its first entry
    with pytest.raises(SampleError, match="the icon says"):
        images.decode_image(bytes(data), Decode("RGB"), max_pixels=10_000)
    assert size_of(bytes(data)) == (0, 0)


def test_an_image_of_a_plugin_that_is_not_installed_gets_a_sentence(monkeypatch):
    monkeypatch.setattr(images, "_reads_heif", lambda: False)
    with pytest.raises(SampleError, match="install pillow-heif"):
        images.decode_image(b"\0\0\0\x18ftypheic" + bytes(40), Decode("RGB"), max_pixels=100)


@pytest.mark.filterwarnings("ignore")  # Pillow warns of what it then refuses
@settings(max_examples=100)
@given(data=st.data(), kind=st.sampled_from([*KINDS, "JPEG", "PNG", "TIFF", "WEBP", "BMP", "PPM"]))
def test_damaged_images_are_only_skipped(data, kind):
    damaged = bytearray(encoded(picture(48, 40), kind))
    spots = data.draw(st.lists(st.tuples(st.integers(0, len(damaged) - 1), st.integers(0, 255)), max_size=8))
    for place, value in spots:
        damaged[place] = value
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    reason = reason_for(bytes(damaged))
    assert len(reason) < 200
    assert "\n" not in reason


def reason_for(data):
    try:
        decoded(pixels(32, 32), data, max_pixels=100_000)
    except SampleError as error:
        return str(error)
    return ""


VIEW = View(seed=3, epoch=1)


def test_a_random_view_depends_on_seed_epoch_and_sample_alone():
    augmented, data = imagenet(64, augment=True), encoded(picture(200, 150))
    one = decoded(augmented, data, id=7, view=VIEW)
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda _: decoded(augmented, data, id=7, view=VIEW), range(8)))
    assert all(np.array_equal(one, other) for other in again)
    for id, view in ((8, VIEW), (7, View(seed=4, epoch=1)), (7, View(seed=3, epoch=2))):
        assert not np.array_equal(one, decoded(augmented, data, id=id, view=view))


def test_the_draws_never_change_between_versions():
    flip = Preprocess(steps=(Decode(), CenterCrop(8), RandomHorizontalFlip(0.5), PIXELS))
    plain = Preprocess(steps=(Decode(), CenterCrop(8), PIXELS))
    data = encoded(picture(8, 8), "PNG")
    upright = decoded(plain, data)
    flips = [not np.array_equal(decoded(flip, data, id=id, view=View(seed=0, epoch=0)), upright) for id in range(24)]
    assert "".join("x" if flip else "." for flip in flips) == "xx.x.....xxxx.xxx.xx...."


@given(
    id=st.integers(0, (1 << 63) - 1),
    seed=st.integers(0, (1 << 63) - 1),
    size=st.sampled_from([(9, 400), (400, 9), (64, 48)]),
)
def test_a_random_crop_always_fits_the_image(id, seed, size):
    augmented = imagenet(16, augment=True)
    out = decoded(augmented, encoded(picture(*size), "PNG"), id=id, view=View(seed=seed, epoch=0))
    assert np.isfinite(out).all()


def test_random_crops_cover_the_image_as_torchvisions_do():
    # A picture whose red is its column and whose green is its row tells where a crop lay.
    y, x = np.mgrid[0:200, 0:200]
    data = encoded(Image.fromarray(np.stack([x, y, x * 0], 2).astype(np.uint8)), "PNG")
    augmented = Preprocess(steps=(Decode(), *imagenet(32, augment=True).steps[1:2], PIXELS))
    crops = [decoded(augmented, data, id=id, view=VIEW) for id in range(300)]
    widths = np.array([(crop[0].max() - crop[0].min()) / 200 for crop in crops])
    heights = np.array([(crop[1].max() - crop[1].min()) / 200 for crop in crops])
    centres = np.array([crop[0].mean() / 200 for crop in crops])
    assert 0.45 < np.mean(widths * heights) < 0.60  # 0.54 drawn, some of it refused as too wide or high
    assert abs(centres.mean() - 0.5) < 0.03


def test_random_steps_without_a_view_are_refused():
    with pytest.raises(BadRequest, match="view"):
        decoded(imagenet(32, augment=True), encoded(picture(64, 64)))


GREY = Preprocess(steps=(Decode("L"), Resize(72), CenterCrop(64), Normalize(mean=(100.0,), std=(50.0,))))


@pytest.mark.parametrize(
    "preprocess", [imagenet(64), imagenet(64, augment=True), GREY], ids=["plain", "random", "grey"]
)
def test_pixels_before_the_last_step_are_the_decoded_image_to_the_bit(preprocess):
    data, view = encoded(picture(130, 97)), View(seed=3, epoch=1)
    channels, *sides = preprocess.shape
    kept = np.full((*sides, channels), 7, np.uint8)
    pixels_into(preprocess, data, kept, id=5, view=view)
    assert len(np.unique(kept)) > 100
    expected = decoded(preprocess, data, id=5, view=view)
    np.testing.assert_array_equal(preprocess.levels.apply(kept[None])[0], expected)


def test_takes_no_raw_pixels_where_they_are_kept_in_16_bits():
    stored = Preprocess(steps=(Stored(side=8, mode="RGB", dtype="fp16", applied="0" * 64),))
    assert stored.levels is None
