"""Preprocessing as data: the steps from encoded bytes to the network's input, their JSON and their digest."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import PIL
from PIL import features

from frostline.core import Levels, TensorSpec, View
from frostline.errors import BadRequest, SettingError
from frostline.preprocess.sounds import sounds_name
from frostline.preprocess.steps import (
    CHANNELS,
    CenterCrop,
    ColorJitter,
    Decode,
    DecodeAudio,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomStep,
    ReadArray,
    Resize,
    SoleStep,
    Squeeze,
    Step,
    Stored,
    Tokenize,
)
from frostline.preprocess.tokens import checked_content, tokenizers_name

__all__ = (
    "Box",
    "Preprocess",
    "decoder_name",
    "draws",
    "middle",
    "no_draw",
    "random_box",
    "scaled_size",
    "step_from_json",
    "step_to_json",
)

_MAX_STEPS = 16
_MIN_STEPS = 3

_STEPS: dict[str, type[Step]] = {
    "center_crop": CenterCrop,
    "color_jitter": ColorJitter,
    "decode": Decode,
    "decode_audio": DecodeAudio,
    "normalize": Normalize,
    "random_horizontal_flip": RandomHorizontalFlip,
    "random_resized_crop": RandomResizedCrop,
    "read_array": ReadArray,
    "resize": Resize,
    "squeeze": Squeeze,
    "stored": Stored,
    "tokenize": Tokenize,
}
_NAMES = {kind: name for name, kind in _STEPS.items()}


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """The steps from an encoded image to ``float32[C, H, W]``, or from a text, a sound or an array to what it gives.

    Attributes:
        steps: ``Decode`` first, ``Normalize`` last, between them at least one crop or ``Squeeze``, so that the size is
            known. Where the data is a ready format, ``Stored`` is first, and alone where it holds 16-bit floats.
            ``Tokenize``, ``ReadArray`` and ``DecodeAudio`` are alone.
        tokenizer: JSON of the tokenizer, whose SHA-256 is in ``Tokenize``. It is no part of ``to_json``; empty where
            images are decoded, and where it has still to be attached.
    """

    steps: tuple[Step, ...]
    tokenizer: bytes = field(default=b"", repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.steps) > _MAX_STEPS:
            raise SettingError(f"preprocessing has up to {_MAX_STEPS} steps, not {len(self.steps)}")
        if self.steps and isinstance(self.steps[0], SoleStep):
            _check_alone(self.steps, self.tokenizer)
        elif self.steps and isinstance(self.steps[0], Stored):
            _check_stored(self.steps[0], self.steps[1:])
        else:
            _check_decoded(self.steps)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample: channels, height and width; 2 and the number of tokens; or that of arrays and sounds."""
        first = self.steps[0]
        if isinstance(first, SoleStep):
            return first.shape
        stored = self.stored
        height, width = _size(self.steps[1:-1], None if stored is None else stored.side)
        return CHANNELS[self.mode], height, width

    @property
    def dtype(self) -> str:
        """Type of a sample's numbers: ``float32``, ``int64`` of tokens, or that of the array."""
        first = self.steps[0]
        return first.dtype if isinstance(first, SoleStep) else "float32"

    @property
    def sample(self) -> TensorSpec:
        """Shape and type of a sample."""
        return TensorSpec(self.shape, self.dtype)

    @property
    def shipped_from(self) -> int:
        """First cut at which a node needs the prefix: for texts already cut 1, as their tokenizer comes with it."""
        return 2 if self.tokens is None else 1

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Inputs of a network that takes such samples, as ``freeze`` takes them: one image, or token ids and mask."""
        if self.tokens is None:
            return (self.sample,)
        return (TensorSpec((self.tokens.max_length,), "int64"),) * len(self.tokens.names)

    @cached_property
    def tokens(self) -> Tokenize | None:
        """The one step of text; None where samples are images."""
        first = self.steps[0]
        return first if isinstance(first, Tokenize) else None

    @property
    def are_images(self) -> bool:
        """Samples are images, as they are encoded or in a ready format."""
        return isinstance(self.steps[0], Decode | Stored)

    @cached_property
    def stored(self) -> Stored | None:
        """The first step, where pixels are taken from a ready format; None where images are decoded."""
        first = self.steps[0]
        return first if isinstance(first, Stored) else None

    @cached_property
    def levels(self) -> Levels | None:
        """What the pixels before the last step mean to the network; None where a ready format holds no pixels."""
        last = self.steps[-1]
        return Levels(mean=last.mean, std=last.std) if isinstance(last, Normalize) else None

    @cached_property
    def mode(self) -> str:
        """The mode of the decoded pixels."""
        first = self.steps[0]
        assert isinstance(first, Decode | Stored)
        return first.mode

    @cached_property
    def is_random(self) -> bool:
        """The result depends on the view, so features cannot be kept from one epoch to the next."""
        return any(isinstance(step, RandomStep) for step in self.steps)

    @property
    def digest(self) -> str:
        """SHA-256 of the steps and of the decoder with its version: equal digests give equal samples."""
        content = {**self.to_json(), "decoder": self._decoder}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def _decoder(self) -> str:
        """What decides the numbers beside the steps, with its version."""
        match self.steps[0]:
            case Tokenize():
                return tokenizers_name()
            case ReadArray():
                return "the numbers themselves"
            case DecodeAudio():
                return sounds_name()
        return decoder_name()

    def with_tokenizer(self, content: bytes) -> "Preprocess":
        """The same with the tokenizer that its step names.

        Raises:
            SettingError: it is another one, or samples are images.
        """
        if self.tokens is None:
            raise SettingError("only texts have a tokenizer")
        if not content:
            raise SettingError("there is no tokenizer with the SHA-256 that the preprocessing names")
        return replace(self, tokenizer=content)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {"steps": [step_to_json(step) for step in self.steps]}

    @classmethod
    def from_json(cls, value: object) -> "Preprocess":
        """The inverse of ``to_json``; every field must be there and none beside them.

        Raises:
            BadRequest: naming the step or field that is wrong.
        """
        if not isinstance(value, dict) or set(value) != {"steps"} or not isinstance(value["steps"], list):
            raise BadRequest("preprocess must be an object with the list 'steps' and nothing else")
        if len(value["steps"]) > _MAX_STEPS:
            raise BadRequest(f"preprocess has more than {_MAX_STEPS} steps")
        try:
            return cls(steps=tuple(step_from_json(step) for step in value["steps"]))
        except SettingError as error:
            raise BadRequest(f"preprocess: {error}") from error


def step_to_json(step: Step) -> dict[str, Any]:
    """A step as a dictionary of plain values."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(step).items()}
    return {"step": _NAMES[type(step)], **values}


def step_from_json(value: object) -> Step:
    """The inverse of ``step_to_json``.

    Raises:
        BadRequest: there is no such step, or it has other fields.
        SettingError: a field's value makes no sense.
    """
    if not isinstance(value, dict) or not isinstance(value.get("step"), str):
        raise BadRequest("preprocess: every step is an object with its name as 'step'")
    kind = _STEPS.get(value["step"])
    if kind is None:
        raise BadRequest(f"preprocess: there is no step {value['step'][:40]!r}; the steps are {', '.join(_STEPS)}")
    expected = {"step", *(field.name for field in fields(kind))}
    if set(value) != expected:
        raise BadRequest(f"preprocess: the step {value['step']} has exactly the fields {', '.join(sorted(expected))}")
    return kind(**{name: field for name, field in value.items() if name != "step"})


@cache
def decoder_name() -> str:
    """What decodes here, with its versions. The JPEG library decides the pixels as much as Pillow does."""
    jpeg = features.version("libjpeg_turbo") or features.version("jpg")
    return f"Pillow {PIL.__version__}, JPEG {jpeg}"


def _check_decoded(steps: tuple[Step, ...]) -> None:
    if len(steps) < _MIN_STEPS:
        raise SettingError(f"preprocessing has at least {_MIN_STEPS} steps, not {len(steps)}")
    first, *between, last = steps
    if not isinstance(first, Decode) or not isinstance(last, Normalize):
        raise SettingError("preprocessing starts with Decode and ends with Normalize")
    _check_rest(between, last, first.mode)
    if first.reduced and not isinstance(between[0], Resize):
        raise SettingError("reduced decoding needs Resize behind it, which says what size is enough")
    _size(between, None)


def _check_alone(steps: tuple[Step, ...], content: bytes) -> None:
    first, *rest = steps
    if rest:
        raise SettingError(f"{type(first).__name__} is the only step of its preprocessing")
    if content and isinstance(first, Tokenize):
        checked_content(content, first.tokenizer)


def _check_stored(first: Stored, rest: tuple[Step, ...]) -> None:
    if first.dtype == "fp16":
        if rest:
            raise SettingError("a ready format of fp16 holds what the network takes: no step follows it")
        return
    if not rest or not isinstance(rest[-1], Normalize):
        raise SettingError("preprocessing ends with Normalize")
    _check_rest(rest[:-1], rest[-1], first.mode)


def _check_rest(between: Sequence[Step], last: Normalize, mode: str) -> None:
    if any(isinstance(step, Decode | Stored | Normalize | SoleStep) for step in between):
        raise SettingError("Decode and Normalize stand once in a preprocessing; Tokenize, ReadArray, DecodeAudio alone")
    if not len(last.mean) == len(last.std) == CHANNELS[mode]:
        raise SettingError(f"mean and std need {CHANNELS[mode]} numbers each for {mode}")


def _size(steps: Sequence[Step], size: int | None) -> tuple[int, int]:
    for step in steps:
        match step:
            case CenterCrop() | RandomResizedCrop() | Squeeze():
                size = step.size
            case Resize() if size is not None:
                size = step.shorter
            case ColorJitter() if size is None:
                # Its work and memory then have a bound, and it changes no pixels that are cut away.
                raise SettingError("ColorJitter stands behind CenterCrop, RandomResizedCrop or Squeeze")
            case _:
                pass
    if size is None:
        raise SettingError(
            "preprocessing needs CenterCrop, RandomResizedCrop or Squeeze, so that all samples have one size"
        )
    return size, size


Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; a part of it may lie beside the image."""


def scaled_size(step: Resize, size: tuple[int, int]) -> tuple[int, int]:
    """Width and height that an image of that width and height is scaled to."""
    width, height = size
    # torchvision cuts the longer side to a whole number; it does not round it.
    longer = int(step.shorter * max(width, height) / min(width, height))
    return (step.shorter, longer) if width <= height else (longer, step.shorter)


def middle(size: tuple[int, int], side: int) -> Box:
    """The middle square of an image."""
    left, top = (_offset(length, side) for length in size)
    return left, top, left + side, top + side


def random_box(step: RandomResizedCrop, size: tuple[int, int], draw: Callable[[], float]) -> Box:
    """A random part of an image, by torchvision's rule."""
    width, height = size
    for _ in range(10):
        area = width * height * (step.min_area + (step.max_area - step.min_area) * draw())
        minimum, maximum = math.log(step.min_ratio), math.log(step.max_ratio)
        ratio = math.exp(minimum + (maximum - minimum) * draw())
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(draw() * (height - h + 1)), int(draw() * (width - w + 1))
            return left, top, left + w, top + h
    return _widest_box(step, width, height)


def draws(preprocess: Preprocess, id: int, view: View | None) -> Callable[[], float]:
    """What gives a sample's next number from 0 to below 1, each time it is called.

    Raises:
        BadRequest: a step is random and there is no view.
    """
    if view is None:
        if preprocess.is_random:
            raise BadRequest("random preprocessing needs a view: seed and epoch")
        return no_draw
    # Philox is a counter turned into bits, the same on every machine and in every version of NumPy; the sample's
    # id stands in the counter's high word, so that the draws of two samples never overlap.
    bits = np.random.Philox(
        key=np.array([view.seed, view.epoch], np.uint64), counter=np.array([0, 0, 0, id], np.uint64)
    )
    return lambda: (int(bits.random_raw()) >> 11) * 2.0**-53


def no_draw() -> float:
    """Stands for the draws of a preprocessing that has none."""
    raise AssertionError("a preprocessing without random steps draws nothing")


def _offset(length: int, side: int) -> int:
    # torchvision rounds half to even where it cuts, and pads the shorter half first where the image is smaller.
    return round((length - side) / 2) if length >= side else -((side - length) // 2)


def _widest_box(step: RandomResizedCrop, width: int, height: int) -> Box:
    # No draw fitted: the middle of the image, as wide or high as the ratios allow.
    w, h = width, height
    if width / height < step.min_ratio:
        h = max(1, round(width / step.min_ratio))
    elif width / height > step.max_ratio:
        w = max(1, round(height * step.max_ratio))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
