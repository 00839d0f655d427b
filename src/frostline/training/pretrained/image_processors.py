"""Says a network's ``preprocessor_config.json``, as transformers writes it, in preprocessing steps."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from frostline.errors import ModelError
from frostline.preprocess import CenterCrop, Decode, Normalize, Preprocess, Resize, Squeeze, Step

__all__ = ("Processor", "processor_of")

_FILTERS: Mapping[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}
_SQUEEZED_FROM = 384
"""From this side on ConvNeXt's processor crops nothing."""
_BROKEN = (AttributeError, LookupError, OSError, TypeError, ValueError, ZeroDivisionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """How a network's images are prepared.

    Attributes:
        preprocess: steps that come nearest to what the file says.
        otherwise: sentences on where they differ from it; mostly none.
    """

    preprocess: Preprocess
    otherwise: tuple[str, ...] = ()


def processor_of(file: Path) -> Processor:
    """Read the file of an image processor.

    Raises:
        ModelError: It is none, or says nothing that steps can say.
    """
    try:
        says = json.loads(file.read_text())
        # Where images and texts have one file, what is said of images stands in an object of its own.
        return _processor(says.get("image_processor", says))
    except _BROKEN as error:
        raise ModelError(f"{file} says no preparation of images that can be followed: {error}") from error


def _processor(says: Mapping[str, Any]) -> Processor:
    kernel = int(says.get("resample", 2))
    otherwise = []
    if kernel not in _FILTERS:
        otherwise.append(f"its images are resized by filter {kernel} of Pillow where it was made, and here by bicubic")
    levels = _levels(says)
    scaled = _scaled(says, _FILTERS.get(kernel, "bicubic"))
    steps = (Decode(mode="L" if len(levels.mean) == 1 else "RGB"), *scaled, levels)
    return Processor(preprocess=Preprocess(steps=steps), otherwise=tuple(otherwise))


def _scaled(says: Mapping[str, Any], kernel: Literal["bilinear", "bicubic"]) -> tuple[Step, ...]:
    """How an image becomes a square: its shorter side is scaled and the middle cut out, or all of it is squeezed."""
    size = says.get("size")
    shortest = size.get("shortest_edge") if isinstance(size, Mapping) else None
    if says.get("do_center_crop"):
        crop = CenterCrop(size=_square(says["crop_size"]))
        if shortest:
            return Resize(shorter=int(shortest), filter=kernel), crop
        whole = Squeeze(size=_square(size), filter=kernel)
        return (whole,) if whole.size == crop.size else (whole, crop)
    if shortest and "crop_pct" in says and int(shortest) < _SQUEEZED_FROM:
        shorter = int(int(shortest) / float(says["crop_pct"] or 0.875))
        return Resize(shorter=shorter, filter=kernel), CenterCrop(size=int(shortest))
    return (Squeeze(size=int(shortest) if shortest else _square(size), filter=kernel),)


def _square(size: object) -> int:
    if isinstance(size, int):
        return size
    if not isinstance(size, Mapping) or size.get("height") != size.get("width"):
        raise ValueError(f"images become squares here, and its size is {size}")
    return int(size["height"])


def _levels(says: Mapping[str, Any]) -> Normalize:
    """Mean and standard deviation on the scale of pixels, which the file says on a scale of its own."""
    factor = float(says.get("rescale_factor", 1 / 255)) if says.get("do_rescale", True) else 1.0
    moved = 1.0 if says.get("rescale_offset") else 0.0
    normalised = bool(says.get("do_normalize", True))
    mean = says["image_mean"] if normalised else [0.0, 0.0, 0.0]
    std = says["image_std"] if normalised else [1.0, 1.0, 1.0]
    return Normalize(
        mean=tuple((float(value) + moved) / factor for value in mean), std=tuple(float(value) / factor for value in std)
    )
