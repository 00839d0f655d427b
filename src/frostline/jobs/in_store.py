"""Has a head trained on a node: what it is told, as one file of data, and the trained tensors taken back."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from frostline.core import Samples, TensorSpec
from frostline.core.declared import parse_json, refuse_unknown_fields
from frostline.core.errors import BadRequest, FrostlineError, NodeUnreachable, Refused, UnsafeArtifact
from frostline.core.events import Observer, PhaseStarted
from frostline.models.artifact import BROKEN, integer, metadata, text
from frostline.models.cuts import DTYPE_BYTES
from frostline.models.portable import PortableHead, head_from_json, head_to_json
from frostline.preprocess import Preprocess
from frostline.transport import BesideTraining, TrainsBeside
from frostline.wire.messages import error_from_json
from frostline.wire.recipes import Recipe, event_from_json

__all__ = (
    "Assignment",
    "Trained",
    "read_assignment",
    "train_beside",
    "write_assignment",
)


_FORMAT = 4
_KEY = "frostline.assignment"
_HEAD, _TRAIN, _HELD_OUT = "head.", "train.", "held_out."
_TEXTS = ("objects", "versions")
_NUMBERS = ("ids", "offsets", "lengths", "labels")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """What is to be trained, on what and how.

    Attributes:
        data: URL of the data set's root, which the node must serve.
        reading: the way that the bytes at its samples' addresses are found.
        train: the samples, with labels from 0 to below ``classes``.
        held_out: samples to score after each epoch; may be empty.
        classes: number of scores that the head gives.
        prefix: digest of the frozen part, which the node must hold.
        engine: engine that runs it there.
        cut: number of the frost line.
        inputs: tensors of one sample that cross it.
        preprocess: preprocessing of the training samples.
        plain_preprocess: preprocessing of the held-out samples.
        head: head to train.
        recipe: the recipe.
        views: random views of each sample, as in ``LoaderSettings``.
        max_skipped: samples that may be unreadable.
        allow_nonfinite: True goes on after Inf or NaN, as in ``LoaderSettings``.
    """

    data: str
    reading: str
    train: Samples
    held_out: Samples
    classes: int
    prefix: str
    engine: str
    cut: int
    inputs: tuple[TensorSpec, ...]
    preprocess: Preprocess
    plain_preprocess: Preprocess
    head: PortableHead
    recipe: Recipe
    views: int
    max_skipped: int
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        for samples in (self.train, self.held_out):
            if len(samples) and not 0 <= int(samples.labels.min()) <= int(samples.labels.max()) < self.classes:
                raise BadRequest(f"labels must be from 0 to below {self.classes}")
        if not len(self.train):
            raise BadRequest("there is no sample to train on")

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of what crosses the frost line for a sample."""
        return sum(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in self.inputs)


_ABOUT = (
    "format",
    "data",
    "reading",
    "classes",
    "prefix",
    "engine",
    "cut",
    "inputs",
    "preprocess",
    "plain_preprocess",
    "head",
    "recipe",
    "views",
    "max_skipped",
    "allow_nonfinite",
)


def write_assignment(assignment: Assignment) -> bytes:
    """The file: a safetensors archive whose metadata holds the graphs, the recipe and the rest as JSON."""
    head, tensors = head_to_json(assignment.head)
    about = {
        "format": _FORMAT,
        "data": assignment.data,
        "reading": assignment.reading,
        "classes": assignment.classes,
        "prefix": assignment.prefix,
        "engine": assignment.engine,
        "cut": assignment.cut,
        "inputs": [asdict(spec) for spec in assignment.inputs],
        "preprocess": assignment.preprocess.to_json(),
        "plain_preprocess": assignment.plain_preprocess.to_json(),
        "head": head,
        "recipe": assignment.recipe.to_json(),
        "views": assignment.views,
        "max_skipped": assignment.max_skipped,
        "allow_nonfinite": assignment.allow_nonfinite,
    }
    parts = {
        **{_HEAD + name: tensor for name, tensor in tensors.items()},
        **{_TRAIN + name: column for name, column in _columns(assignment.train).items()},
        **{_HELD_OUT + name: column for name, column in _columns(assignment.held_out).items()},
    }
    return save_tensors(parts, metadata={_KEY: json.dumps(about, separators=(",", ":"), allow_nan=False)})


def read_assignment(body: bytes) -> Assignment:
    """Read the file, from wherever it came.

    Raises:
        UnsafeArtifact: The file is no assignment, or names or declares something that is not allowed.
        BadRequest: The assignment asks for something that makes no sense.
    """
    try:
        return _read(parse_json(metadata(body)[_KEY]), load_tensors(body))
    except BROKEN as error:
        raise UnsafeArtifact(f"this is no training: {type(error).__name__}: {error}") from error


def _read(about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Assignment:
    if about["format"] != _FORMAT:
        raise UnsafeArtifact(f"this training is of format {about['format']}; this node reads format {_FORMAT}")
    refuse_unknown_fields(about, _ABOUT, "a training")
    return Assignment(
        data=text(about["data"]),
        reading=text(about["reading"]),
        train=_samples(_part(tensors, _TRAIN)),
        held_out=_samples(_part(tensors, _HELD_OUT)),
        classes=integer(about["classes"]),
        prefix=text(about["prefix"]),
        engine=text(about["engine"]),
        cut=integer(about["cut"]),
        inputs=tuple(_input(spec) for spec in about["inputs"]),
        preprocess=Preprocess.from_json(about["preprocess"]),
        plain_preprocess=Preprocess.from_json(about["plain_preprocess"]),
        head=head_from_json(about["head"], _part(tensors, _HEAD)),
        recipe=Recipe.from_json(about["recipe"]),
        views=integer(about["views"]),
        max_skipped=integer(about["max_skipped"]),
        allow_nonfinite=about["allow_nonfinite"] is True,
    )


def _input(value: Mapping[str, Any]) -> TensorSpec:
    refuse_unknown_fields(value, ("shape", "dtype"), "an input")
    shape = tuple(integer(size) for size in value["shape"])
    if value["dtype"] not in DTYPE_BYTES or any(size < 0 for size in shape):
        raise UnsafeArtifact(f"the training takes tensors of a shape or type that there is not: {str(value)[:100]}")
    return TensorSpec(shape, value["dtype"])


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _columns(samples: Samples) -> dict[str, torch.Tensor]:
    columns: dict[str, npt.NDArray[np.generic]] = {name: getattr(samples, name) for name in _NUMBERS}
    texts = {name: _joined(getattr(samples, name)) for name in _TEXTS}
    return {name: torch.from_numpy(column.copy()) for name, column in {**columns, **texts}.items()}


def _joined(texts: Sequence[str]) -> npt.NDArray[np.generic]:
    # No name and no version of an object holds a zero.
    return np.frombuffer("\0".join(texts).encode(errors="surrogateescape"), np.uint8)


def _samples(columns: Mapping[str, torch.Tensor]) -> Samples:
    numbers: dict[str, npt.NDArray[np.int64]] = {name: _numbers(columns[name]) for name in _NUMBERS}
    texts = {name: columns[name].numpy().tobytes().decode(errors="surrogateescape") for name in _TEXTS}
    has_rows = len(numbers["ids"]) > 0
    return Samples(
        objects=texts["objects"].split("\0") if has_rows else [],
        versions=texts["versions"].split("\0") if has_rows and texts["versions"] else (),
        targets=None,
        **numbers,
    )


def _numbers(column: torch.Tensor) -> npt.NDArray[np.int64]:
    if column.dtype != torch.int64 or column.dim() != 1:
        raise UnsafeArtifact("a column of the samples holds something else than numbers")
    return column.numpy()


# Names, shapes and places of the tensors in the answer.
_MAX_HEADER = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training on a node was.

    Attributes:
        is_whole: all epochs were trained; False where somebody asked for an end.
        head_s: seconds in which the head was trained, reading and the frozen layers not counted.
    """

    is_whole: bool
    head_s: float


def train_beside(transport: TrainsBeside, assignment: Assignment, on_event: Observer) -> Trained:
    """Train the head of an assignment on a node; its tensors, the user's own, hold what was learned afterwards.

    Raises:
        Refused: The node does not take it, or the training failed.
        Unavailable: The node is busy, or went away.
        KeyboardInterrupt: Ctrl-C; what was learned by then has come back.
    """
    on_event(PhaseStarted(name="sending the head"))
    with transport.train(assignment.prefix, write_assignment(assignment)) as training:
        last, is_interrupted = _followed(training, on_event)
        failure = _failure(last)
        if failure is not None:
            raise failure
        sizes = sum(assignment.head.tensors[name].nbytes for name in assignment.head.returning)
        _take_over(assignment, training.tensors(_bounded(last.get("bytes"), sizes), str(last.get("digest"))))
    if is_interrupted:
        raise KeyboardInterrupt
    return Trained(is_whole=last.get("is_whole") is True, head_s=_seconds(last.get("head_s")))


def _followed(training: BesideTraining, on_event: Observer) -> tuple[dict[str, Any], bool]:
    """Pass on what happens to its end; the first Ctrl-C asks for one, the second does not wait for it."""
    is_interrupted = False
    last: dict[str, Any] | None = None
    while True:
        try:
            for value in training:
                if value.get("event") in ("trained", "failed"):
                    last = value
                event = event_from_json(value)
                if event is not None:
                    on_event(event)
            break
        except KeyboardInterrupt:
            if is_interrupted:
                raise
            is_interrupted = True
            training.stop()
    if last is None:
        raise NodeUnreachable("the training broke off: the node, or the way to it, is gone")
    return last, is_interrupted


def _failure(last: dict[str, Any]) -> FrostlineError | None:
    if last.get("event") == "trained":
        return None
    return error_from_json(last) or Refused(f"the training failed: {str(last.get('message'))[:500]}")


def _bounded(nbytes: object, tensors: int) -> int:
    """The length of the answer, which holds the tensors and their names."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes <= tensors + _MAX_HEADER:
        raise Refused(f"the node announces {str(nbytes)[:50]} bytes of trained tensors, which these cannot have")
    return nbytes


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _take_over(assignment: Assignment, body: bytes) -> None:
    """Put what came back into the user's own tensors: all of it, or nothing."""
    own = {name: assignment.head.tensors[name] for name in assignment.head.returning}
    try:
        came = load_tensors(body)
    except (SafetensorError, ValueError) as error:
        raise Refused(f"the node's answer holds no tensors: {error}") from error
    if {name: (tensor.shape, tensor.dtype) for name, tensor in came.items()} != {
        name: (tensor.shape, tensor.dtype) for name, tensor in own.items()
    }:
        raise Refused("the node's answer holds other tensors than the head has")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(came[name])
