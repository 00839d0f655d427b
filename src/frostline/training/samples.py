"""Finds out what samples are, images, sounds or arrays, by the words of ``--samples`` or by the data's own suffixes."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.lib import format as npy

from frostline.core import CELLS
from frostline.datasets import Dataset
from frostline.datasets.access import roots_of
from frostline.datasets.formats.folders import SOUND_SUFFIXES, suffix_of
from frostline.datasets.open import open_samples
from frostline.errors import SampleError, SettingError
from frostline.preprocess import Preprocess, array, audio
from frostline.preprocess.arrays import header_of
from frostline.preprocess.named_inputs import is_argument, unframed
from frostline.preprocess.sounds import LACKS_SOUND, has_sound_packages, is_sound, seconds_of

__all__ = ("IMAGES", "TEXTS", "by_input", "described", "described_parts", "preprocess_of")

IMAGES = "images"
"""The word for samples that a network's own preprocessing takes."""

TEXTS = "texts"
"""The word for a part of samples that a tokenizer takes."""

_SOUNDS = re.compile(r"(?P<kind>sounds|waves):(?P<seconds>\d+(?:\.\d+)?)(?:@(?P<rate>\d+))?")
_ARRAYS = re.compile(r"arrays:(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>float32|int64))?")
_WORDS = (
    "images, sounds:SECONDS (log-mel spectrograms), waves:SECONDS, both with @RATE if it is not 16000, or "
    "arrays:SHAPE such as arrays:12x5000, with :int64 if the network takes whole numbers"
)
# Sounds that say how long all are cut to or padded to, and the longest that nobody has to ask for.
_LISTENED_TO = 16
_MAX_SECONDS = 10.0
_HEAD_BYTES = 2048
_ARRAY_SUFFIX = ".npy"


def preprocess_of(samples: str) -> Preprocess | None:
    """The preprocessing of samples; None where the network's own takes them.

    Args:
        samples: words such as ``images``, ``sounds:2.5``, ``waves:1@8000`` or ``arrays:12x5000``.

    Raises:
        SettingError: the words say nothing of that kind, or a length makes no sense.
    """
    if samples == IMAGES:
        return None
    if (found := _SOUNDS.fullmatch(samples)) is not None:
        seconds, rate = float(found["seconds"]), int(found["rate"] or 16_000)
        if found["kind"] == "waves":
            return audio(seconds, sample_rate=rate, features="waveform")
        return audio(seconds, sample_rate=rate)
    if (found := _ARRAYS.fullmatch(samples)) is not None:
        shape = tuple(int(length) for length in found["shape"].split("x"))
        return array(shape, "int64" if found["dtype"] == "int64" else "float32")
    raise SettingError(f"--samples says {_WORDS}; not {samples!r}")


def described(data: Dataset, *, is_column_named: bool = False) -> str:
    """What the samples of a data set are, in words that ``preprocess_of`` takes.

    Names that end as sounds do are sounds, as long as the longest of some, and up to 10 seconds. Arrays that are no
    images have the shape of the first one. Everything else is taken for images, without reading any.

    Args:
        data: data set.
        is_column_named: the user named the column of Parquet files, so that its first cell is looked at.

    Raises:
        SettingError: a node listed the data, so that no sample can be read here; or none of the sounds is whole, or the
            packages for them are not installed.
        StoreError: the store failed.
    """
    suffix = "" if data.manifest.applied is not None else suffix_of(data.names[0])
    is_in_cells = is_column_named and data.manifest.reading == CELLS
    if suffix not in SOUND_SUFFIXES and suffix != _ARRAY_SUFFIX and not is_in_cells:
        return IMAGES
    if suffix in SOUND_SUFFIXES and not has_sound_packages():
        raise SettingError(LACKS_SOUND)
    if data.source.near:
        if suffix in SOUND_SUFFIXES:
            raise SettingError(
                "the node listed these sounds, and their length is not known here: say it (--samples sounds:SECONDS)"
            )
        return IMAGES
    first = _read(data, 0, _HEAD_BYTES if data.manifest.reading != CELLS else None)
    if is_sound(first):
        return f"sounds:{_longest(data, lambda row: _read(data, row, None)):g}"
    return _array_words(first) if first.startswith(npy.MAGIC_PREFIX) else IMAGES


def by_input(said: str | None, option: str) -> dict[str, str]:
    """What an option says of each input, as in ``pixel_values=image,input_ids=caption``; none where it names no input.

    Args:
        said: the option's value; None says nothing.
        option: name of the option, for the sentence.

    Raises:
        SettingError: an input has no name, or two have one, or nothing is said of it.
    """
    if said is None or "=" not in said:
        return {}
    pairs = [part.partition("=") for part in said.split(",")]
    found = {name.strip(): value.strip() for name, _, value in pairs}
    if len(found) != len(pairs) or not all(is_argument(name) and value for name, value in found.items()):
        raise SettingError(
            f"{option} says NAME=VALUE once for each input of the network, joined by commas, as in "
            f"pixel_values=image,input_ids=caption; not {said!r}"
        )
    return found


def described_parts(data: Dataset, names: Sequence[str], said: str | None, *, looks: bool) -> str:
    """What the parts of samples are, in words that ``by_input`` takes apart: ``pixel_values=images,input_ids=texts``.

    What ``input_ids`` is made of is a text. Arrays and sounds are known by the first sample, and all else is an image.

    Args:
        data: data set whose samples have several parts.
        names: inputs that are made of these parts.
        said: the user's words on some of them; None says nothing.
        looks: read the first sample; False where the network's library knows what it takes.

    Raises:
        SettingError: it says something of another input, or makes no sense.
        StoreError: the store failed.
    """
    asked = by_input(said, "--samples")
    unknown = [name for name in asked if name not in names]
    if unknown or (said is not None and not asked):
        raise SettingError(
            f"--samples says what inputs are by their names, as in {names[-1]}=arrays:12; --column names "
            f"{', '.join(names)}, and it is {said!r}"
        )
    for word in asked.values():
        if word != TEXTS:
            preprocess_of(word)  # which refuses what makes no sense before a node is started
    looks = looks and not data.source.near
    found = {name: TEXTS if name == "input_ids" else IMAGES for name in names}
    for place, name in enumerate(names):
        if looks and name not in asked and found[name] == IMAGES:
            found[name] = _part_words(data, place, len(names))
    return ",".join(f"{name}={word}" for name, word in {**found, **asked}.items())


def _part_words(data: Dataset, place: int, parts: int) -> str:
    def part(row: int) -> bytes:
        return bytes(unframed(_read(data, row, None), parts)[place])

    first = part(0)
    if is_sound(first):
        return f"sounds:{_longest(data, part):g}"
    return _array_words(first) if first.startswith(npy.MAGIC_PREFIX) else IMAGES


def _longest(data: Dataset, read: Callable[[int], bytes]) -> float:
    """The length of the longest of some sounds in seconds, in tenths."""
    rows = np.unique(np.linspace(0, len(data) - 1, min(len(data), _LISTENED_TO)).astype(np.int64))
    lengths = []
    for row in rows.tolist():
        with suppress(SampleError):  # it is skipped and named later
            lengths.append(seconds_of(read(row)))
    if not lengths:
        raise SettingError(f"none of {len(rows)} sounds of {data.url} can be read: say how long they are (--samples)")
    return min(_MAX_SECONDS, max(0.1, math.ceil(10 * max(lengths)) / 10))


def _array_words(first: bytes) -> str:
    try:
        shape, dtype = header_of(first)
    except SampleError:
        return IMAGES
    is_image = dtype == np.uint8 and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4)))
    if is_image or not shape:
        return IMAGES
    return f"arrays:{'x'.join(map(str, shape))}" + (":int64" if dtype.kind in "iu" and dtype.itemsize == 8 else "")


def _read(data: Dataset, row: int, max_bytes: int | None) -> bytes:
    """A sample's bytes, or the first of them."""
    sample = data.samples.take(np.array([row]))
    length = int(sample.lengths[0])
    store = open_samples(data.url, data.manifest.reading, roots=roots_of(data))
    wanted = length if max_bytes is None else min(length, max_bytes)
    return bytes(store.read(sample.objects[0], int(sample.offsets[0]), wanted))
