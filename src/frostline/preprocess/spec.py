"""Preprocessing as data: the steps from encoded bytes to the network's input, their JSON and their digest."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Literal

import PIL
from PIL import features

from frostline.errors import BadRequest, SettingError

__all__ = (
    "CenterCrop",
    "Decode",
    "Normalize",
    "Preprocess",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
    "Step",
)

Filter = Literal["bilinear", "bicubic"]

_MOST_SIDE = 4096
_MOST_STEPS = 16
_CHANNELS = {"RGB": 3, "L": 1}


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode the image to pixels of one mode; always the first step.

    Attributes:
        mode: ``RGB`` or ``L`` (grey); other images are converted to it as Pillow does.
    """

    mode: Literal["RGB", "L"] = "RGB"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, ("RGB", "L"))


@dataclass(frozen=True, slots=True)
class Resize:
    """Scale so that the shorter side has ``shorter`` pixels; the longer one is cut to a whole number."""

    shorter: int
    filter: Filter = "bilinear"

    def __post_init__(self) -> None:
        _side("shorter", self.shorter)
        _one_of("filter", self.filter, ("bilinear", "bicubic"))


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Cut out the middle square of ``size`` pixels; a smaller image stands on black."""

    size: int

    def __post_init__(self) -> None:
        _side("size", self.size)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """Cut out a random part and scale it to a square of ``size`` pixels, by torchvision's rule.

    Attributes:
        size: side of the result in pixels.
        least_area: least share of the image's area that is cut out.
        most_area: greatest share of it.
        least_ratio: least width over height of the part.
        most_ratio: greatest one.
        filter: of the scaling.
    """

    size: int
    least_area: float = 0.08
    most_area: float = 1.0
    least_ratio: float = 3 / 4
    most_ratio: float = 4 / 3
    filter: Filter = "bilinear"

    def __post_init__(self) -> None:
        _side("size", self.size)
        _between("least_area", self.least_area, 0.0001, 1)
        _between("most_area", self.most_area, self.least_area, 1)
        _between("least_ratio", self.least_ratio, 0.01, 100)
        _between("most_ratio", self.most_ratio, self.least_ratio, 100)
        _one_of("filter", self.filter, ("bilinear", "bicubic"))


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip:
    """Mirror left and right with probability ``p``."""

    p: float = 0.5

    def __post_init__(self) -> None:
        _between("p", self.p, 0, 1)


@dataclass(frozen=True, slots=True)
class Normalize:
    """``(x - mean) / std`` for each channel of pixels from 0 to 255, in float32; always the last step.

    torchvision's figures are for pixels from 0 to 1: multiply them by 255.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or not 1 <= len(values) <= max(_CHANNELS.values()):
                raise SettingError(f"{name} must have a number for each channel")
            object.__setattr__(self, name, tuple(_between(name, one, -1e6, 1e6) for one in values))
        if min(self.std) < 1e-6:
            raise SettingError("std must be above 0")


Step = Decode | Resize | CenterCrop | RandomResizedCrop | RandomHorizontalFlip | Normalize

_STEPS: dict[str, type[Step]] = {
    "center_crop": CenterCrop,
    "decode": Decode,
    "normalize": Normalize,
    "random_horizontal_flip": RandomHorizontalFlip,
    "random_resized_crop": RandomResizedCrop,
    "resize": Resize,
}
_NAMES = {kind: name for name, kind in _STEPS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """The steps from an encoded image to ``float32[C, H, W]``.

    Attributes:
        steps: ``Decode`` first, ``Normalize`` last, between them at least one crop, so that the size is known.
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not 3 <= len(self.steps) <= _MOST_STEPS:
            raise SettingError(f"preprocessing has 3 to {_MOST_STEPS} steps, not {len(self.steps)}")
        first, *between, last = self.steps
        if not isinstance(first, Decode) or not isinstance(last, Normalize):
            raise SettingError("preprocessing starts with Decode and ends with Normalize")
        if any(isinstance(step, Decode | Normalize) for step in between):
            raise SettingError("Decode and Normalize stand once in a preprocessing")
        if not len(last.mean) == len(last.std) == _CHANNELS[first.mode]:
            raise SettingError(f"mean and std need {_CHANNELS[first.mode]} numbers each for {first.mode}")
        _size(between)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the result."""
        height, width = _size(self.steps[1:-1])
        return _CHANNELS[self.mode], height, width

    @property
    def mode(self) -> str:
        """The mode of the decoded pixels."""
        first = self.steps[0]
        assert isinstance(first, Decode)
        return first.mode

    @property
    def is_random(self) -> bool:
        """The result depends on the view, so features cannot be kept from one epoch to the next."""
        return any(isinstance(step, RandomResizedCrop | RandomHorizontalFlip) for step in self.steps)

    @property
    def digest(self) -> str:
        """SHA-256 of the steps and of the decoder with its version: equal digests give equal pixels."""
        content = {**self.to_json(), "decoder": _decoder()}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {"steps": [{"step": _NAMES[type(step)], **_plain(step)} for step in self.steps]}

    @classmethod
    def from_json(cls, value: object) -> "Preprocess":
        """The inverse of ``to_json``; every field must be there and none beside them.

        Raises:
            BadRequest: naming the step or field that is wrong.
        """
        if not isinstance(value, dict) or set(value) != {"steps"} or not isinstance(value["steps"], list):
            raise BadRequest("preprocess must be an object with the list 'steps' and nothing else")
        if len(value["steps"]) > _MOST_STEPS:
            raise BadRequest(f"preprocess has more than {_MOST_STEPS} steps")
        try:
            return cls(steps=tuple(_step(one) for one in value["steps"]))
        except SettingError as error:
            raise BadRequest(f"preprocess: {error}") from error


def _plain(step: Step) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(step).items()}


def _step(value: object) -> Step:
    if not isinstance(value, dict) or not isinstance(value.get("step"), str):
        raise BadRequest("preprocess: every step is an object with its name as 'step'")
    kind = _STEPS.get(value["step"])
    if kind is None:
        raise BadRequest(f"preprocess: there is no step {value['step'][:40]!r}; the steps are {', '.join(_STEPS)}")
    expected = {"step", *(field.name for field in fields(kind))}
    if set(value) != expected:
        raise BadRequest(f"preprocess: the step {value['step']} has exactly the fields {', '.join(sorted(expected))}")
    return kind(**{name: one for name, one in value.items() if name != "step"})


def _size(steps: "tuple[Step, ...] | list[Step]") -> tuple[int, int]:
    size: int | None = None
    for step in steps:
        match step:
            case CenterCrop() | RandomResizedCrop():
                size = step.size
            case Resize() if size is not None:
                size = step.shorter
            case _:
                pass
    if size is None:
        raise SettingError("preprocessing needs CenterCrop or RandomResizedCrop, so that all samples have one size")
    return size, size


@cache
def _decoder() -> str:
    # The JPEG library decides the pixels as much as Pillow does.
    jpeg = features.version("libjpeg_turbo") or features.version("jpg")
    return f"Pillow {PIL.__version__}, JPEG {jpeg}"


def _side(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_SIDE:
        raise SettingError(f"{name} must be a whole number from 1 to {_MOST_SIDE}")


def _between(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"{name} must be a number")
    if not least <= value <= most or not math.isfinite(value):
        raise SettingError(f"{name} must lie from {least:g} to {most:g}")
    return float(value)


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingError(f"{name} must be {' or '.join(known)}")
