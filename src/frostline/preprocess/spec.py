"""Preprocessing as data: the steps from encoded bytes to the network's input, their JSON and their digest."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Literal

import PIL
from PIL import features

from frostline.core import Levels, TensorSpec
from frostline.core.declared import Schemas
from frostline.core.errors import BadRequest, SettingError
from frostline.preprocess.sounds import sounds_name
from frostline.preprocess.steps import (
    CHANNELS,
    CenterCrop,
    ColorJitter,
    Decode,
    DecodeAudio,
    InputSlot,
    Mode,
    NamedInputs,
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
    place_inputs,
    unpack_inputs,
)
from frostline.preprocess.tokens import checked_content, tokenizers_name

__all__ = ("Preprocess", "decoder_name", "preprocess_schema", "step_from_json", "step_to_json")

_MAX_STEPS = 16
_MIN_STEPS = 3

_STEPS: dict[str, type[Step]] = {
    "center_crop": CenterCrop,
    "color_jitter": ColorJitter,
    "decode": Decode,
    "decode_audio": DecodeAudio,
    "named_inputs": NamedInputs,
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
_ALONE = SoleStep | NamedInputs
_MAX_WORDS = 50_000_000  # as many as an array may have numbers


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """The steps from an encoded image to ``float32[C, H, W]``, or from a text, a sound or an array to what it gives.

    Attributes:
        steps: ``Decode`` first, ``Normalize`` last, between them at least one crop or ``Squeeze``, so that the size is
            known. Where the data is a ready format, ``Stored`` is first, and alone where it holds 16-bit floats.
            ``Tokenize``, ``ReadArray``, ``DecodeAudio`` and ``NamedInputs`` are alone.
        tokenizer: JSON of the tokenizer, whose SHA-256 is in ``Tokenize``. It is no part of ``to_json``; empty where
            images are decoded, and where it has still to be attached.
    """

    steps: tuple[Step, ...]
    tokenizer: bytes = field(default=b"", repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.steps) > _MAX_STEPS:
            raise SettingError(f"preprocessing has up to {_MAX_STEPS} steps, not {len(self.steps)}")
        if self.steps and isinstance(self.steps[0], _ALONE):
            _check_alone(self.steps, self.tokenizer)
            self._check_inputs()
        elif self.steps and isinstance(self.steps[0], Stored):
            _check_stored(self.steps[0], self.steps[1:])
        else:
            _check_decoded(self.steps)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample: channels, height and width; 2 and the number of tokens; or that of other kinds."""
        first = self.steps[0]
        if isinstance(first, NamedInputs):
            return (self.input_slots[-1].end,)
        if isinstance(first, SoleStep):
            return first.shape
        stored = self.stored
        height, width = _size(self.steps[1:-1], None if stored is None else stored.side)
        return CHANNELS[self.mode], height, width

    @property
    def dtype(self) -> str:
        """Type of a sample's numbers: ``float32``, ``int64`` of tokens, or that of the array."""
        first = self.steps[0]
        return first.dtype if isinstance(first, _ALONE) else "float32"

    @property
    def sample(self) -> TensorSpec:
        """Shape and type of a sample."""
        return TensorSpec(self.shape, self.dtype)

    @property
    def shipped_from(self) -> int:
        """First cut at which a node needs the prefix: for texts already cut 1, as their tokenizer comes with it."""
        return 2 if self.tokens is None else 1

    @property
    def inputs(self) -> tuple[TensorSpec, ...] | Mapping[str, TensorSpec]:
        """Inputs of a network that takes such samples, as ``freeze`` takes them: one, or token ids and mask by name."""
        match self.steps[0]:
            case Tokenize() as tokens:
                return dict.fromkeys(tokens.names, TensorSpec((tokens.max_length,), "int64"))
            case NamedInputs():
                return {slot.name: slot.spec for slot in self.input_slots}
        return (self.sample,)

    @cached_property
    def tokens(self) -> Tokenize | None:
        """The step of text, be it of a part; None where there is none."""
        return next((part.steps[0] for part in self.parts if isinstance(part.steps[0], Tokenize)), None)

    @property
    def parts(self) -> "tuple[Preprocess, ...]":
        """The preprocessing of each part of a sample, where it has several; else this one alone."""
        return self._several or (self,)

    @cached_property
    def _several(self) -> "tuple[Preprocess, ...]":
        several = self.steps[0].steps if isinstance(self.steps[0], NamedInputs) else ()
        texts = [bool(steps) and isinstance(steps[0], Tokenize) for steps in several]
        content = {True: self.tokenizer, False: b""}
        return tuple(
            Preprocess(steps=steps, tokenizer=content[is_text]) for steps, is_text in zip(several, texts, strict=True)
        )

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of a sample's parts; none where it has one."""
        return self.steps[0].names if isinstance(self.steps[0], NamedInputs) else ()

    @cached_property
    def input_slots(self) -> tuple[InputSlot, ...]:
        """Where the network's inputs lie in the array of a sample that has several parts; none where it has one."""
        if not isinstance(self.steps[0], NamedInputs):
            return ()
        named = zip(self.steps[0].names, self.parts, strict=True)
        return place_inputs(pair for name, part in named for pair in _arguments(name, part).items())

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
    def mode(self) -> Mode:
        """The mode of the decoded pixels."""
        first = self.steps[0]
        assert isinstance(first, Decode | Stored)
        return first.mode

    @cached_property
    def is_turned(self) -> bool:
        """Images are turned as their EXIF data says."""
        first = self.steps[0]
        return isinstance(first, Decode) and first.orientation == "exif"

    def orient(self, *, is_turned: bool) -> "Preprocess":
        """The same for data whose own reader turns images as their EXIF data says, or does not.

        A step that says itself which it is stays as it is.
        """
        return replace(self, steps=_oriented(self.steps, "exif" if is_turned else "stored"))

    @cached_property
    def is_random(self) -> bool:
        """The result depends on the view, so features cannot be kept from one epoch to the next."""
        return any(isinstance(step, RandomStep) for part in self.parts for step in part.steps)

    @property
    def digest(self) -> str:
        """SHA-256 of the steps and of the decoder with its version: equal digests give equal samples."""
        content = {**self.to_json(), "decoder": self.decoder}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def decoder(self) -> str:
        """What decides the numbers beside the steps, with its version."""
        match self.steps[0]:
            case Tokenize():
                return tokenizers_name()
            case ReadArray():
                return "the numbers themselves"
            case DecodeAudio():
                return sounds_name()
            case NamedInputs():
                return ", ".join(part.decoder for part in self.parts)
        return decoder_name()

    def _check_inputs(self) -> None:
        """Refuse parts that no network takes together."""
        several = self.steps[0].steps if isinstance(self.steps[0], NamedInputs) else ()
        if len({step.tokenizer for steps in several for step in steps if isinstance(step, Tokenize)}) > 1:
            raise SettingError("texts of one sample have one tokenizer, of one max_length")
        names = [slot.name for slot in self.input_slots]
        if len(set(names)) != len(names):
            raise SettingError(f"two inputs have one name: {', '.join(names)}; give texts other names=")
        if any(part.stored for part in self.parts):
            raise SettingError("a ready format holds samples of one part")
        if self.input_slots and self.input_slots[-1].end > _MAX_WORDS:
            raise SettingError(f"the parts of a sample have up to {_MAX_WORDS} numbers of 64 bits together")

    def with_tokenizer(self, content: bytes) -> "Preprocess":
        """The same with the tokenizer that its step names.

        Raises:
            SettingError: The tokenizer is another one than the step names, or samples are images.
        """
        if self.tokens is None:
            raise SettingError("only texts have a tokenizer")
        if not content:
            raise SettingError("there is no tokenizer with the SHA-256 that the preprocessing names")
        return replace(self, tokenizer=content)

    def unpack(self, rows: Any) -> dict[str, Any]:
        """A batch's inputs by the names of the network's arguments: ``model(**inputs.unpack(batch.features))``.

        Args:
            rows: samples that have several parts, ``int64[n, ...]``: an array of NumPy, or a tensor of torch.
        """
        return unpack_inputs(self.input_slots, rows)

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
            return _preprocess_of(json.dumps(value["steps"]))
        except (SettingError, RecursionError) as error:
            raise BadRequest(f"preprocess: {error}") from error


@lru_cache(64)
def _preprocess_of(steps: str) -> Preprocess:
    """The same for all requests that say the same, whose shapes are then computed once."""
    return Preprocess(steps=tuple(map(step_from_json, json.loads(steps))))


def step_to_json(step: Step) -> dict[str, Any]:
    """A step as a dictionary of plain values."""
    if isinstance(step, NamedInputs):
        steps = [[step_to_json(inner) for inner in part] for part in step.steps]
        return {"step": _NAMES[NamedInputs], "names": list(step.names), "steps": steps}
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
    given = {name: field for name, field in value.items() if name != "step"}
    return kind(**({**given, "steps": _parts_from_json(given["steps"])} if kind is NamedInputs else given))


def _parts_from_json(value: object) -> tuple[tuple[Step, ...], ...]:
    """The steps of each part; none of these has parts of its own, so that nothing nests without end."""
    if not isinstance(value, list) or not all(isinstance(part, list) and 0 < len(part) <= _MAX_STEPS for part in value):
        raise BadRequest("preprocess: the steps of named_inputs are a list of steps for each part")
    if any(isinstance(step, dict) and step.get("step") == _NAMES[NamedInputs] for part in value for step in part):
        raise BadRequest("preprocess: a named input has no named inputs of its own")
    return tuple(tuple(map(step_from_json, part)) for part in value)


def preprocess_schema() -> dict[str, Any]:
    """JSON Schema of ``Preprocess.to_json``."""
    kinds = []
    for name, kind in _STEPS.items():
        made = Schemas().object(kind, is_asked=True)
        made["properties"] = {"step": {"const": name}, **made["properties"]}
        kinds.append({**made, "required": list(made["properties"])})
    steps = {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": _MAX_STEPS}
    said = "decode first, normalize last, at least one crop between; or the stored pixels of a ready format first; or "
    steps["description"] = f"{said}read_array, decode_audio, tokenize or named_inputs alone."
    return {"type": "object", "properties": {"steps": steps}, "required": ["steps"], "additionalProperties": False}


@cache
def decoder_name() -> str:
    """What decodes here, with its versions. The JPEG library decides the pixels as much as Pillow does."""
    jpeg = features.version("libjpeg_turbo") or features.version("jpg")
    return f"Pillow {PIL.__version__}, JPEG {jpeg}"


def _oriented(steps: tuple[Step, ...], orientation: Literal["exif", "stored"]) -> tuple[Step, ...]:
    first, *rest = steps
    match first:
        case NamedInputs():
            first = replace(first, steps=tuple(_oriented(part, orientation) for part in first.steps))
        case Decode(orientation="data"):
            first = replace(first, orientation=orientation)
    return (first, *rest)


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


def _arguments(name: str, part: Preprocess) -> Mapping[str, TensorSpec]:
    """The arguments that take a part."""
    if not isinstance(part.inputs, Mapping):
        return {name: part.sample}
    first = next(iter(part.inputs))
    if first != name:
        raise SettingError(f"the text is called {name}, and its token ids {first}: give both one name")
    return part.inputs


def _check_stored(first: Stored, rest: tuple[Step, ...]) -> None:
    if first.dtype == "fp16":
        if rest:
            raise SettingError("a ready format of fp16 holds what the network takes: no step follows it")
        return
    if not rest or not isinstance(rest[-1], Normalize):
        raise SettingError("preprocessing ends with Normalize")
    _check_rest(rest[:-1], rest[-1], first.mode)


def _check_rest(between: Sequence[Step], last: Normalize, mode: Mode) -> None:
    if any(isinstance(step, Decode | Stored | Normalize | _ALONE) for step in between):
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
