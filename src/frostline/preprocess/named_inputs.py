"""Several inputs of a network by name: their parts as one record where they are stored, and as one array of 64 bits."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from frostline.core import TensorSpec
from frostline.errors import SampleError, SettingError

if TYPE_CHECKING:  # steps import this module
    from frostline.preprocess.steps import Step

__all__ = (
    "MAX_INPUTS",
    "InputPlace",
    "NamedInputs",
    "framed",
    "is_argument",
    "laid_out",
    "record_bytes",
    "unframed",
    "unpacked",
)

MAX_INPUTS = 8
"""The most parts of a sample."""

_MAX_NAME = 64
_LENGTH = np.dtype("<u4")
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class NamedInputs:
    """Make several inputs of a network, each of a part of its own; always the only step.

    Attributes:
        names: arguments of the network's ``forward``, one for each part; where the part is a text, the argument that
            takes its token ids.
        steps: steps from the encoded part to the input, for each part.
    """

    names: tuple[str, ...]
    steps: tuple[tuple["Step", ...], ...]

    def __post_init__(self) -> None:
        names: object = self.names  # of a stranger, where it comes from JSON
        if not isinstance(names, list | tuple) or not all(map(is_argument, names)):
            raise SettingError("names must be names of arguments, such as pixel_values and input_ids")
        if not 2 <= len(self.names) <= MAX_INPUTS or len(set(self.names)) != len(self.names):
            raise SettingError(f"a sample has from 2 to {MAX_INPUTS} named inputs, each of another name")
        if len(self.steps) != len(self.names):
            raise SettingError("each named input has steps of its own")
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "steps", tuple(map(tuple, self.steps)))

    @property
    def dtype(self) -> str:
        """Type of a sample's numbers, of which floats fill two in one."""
        return "int64"


def is_argument(name: object) -> bool:
    """Whether a value can be the name of an argument of a network's ``forward``."""
    return isinstance(name, str) and len(name) <= _MAX_NAME and name.isidentifier()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlace:
    """Where an input lies in a sample's array.

    Attributes:
        name: argument of the network's ``forward``.
        spec: shape and type of the input, without the batch.
        start: first 64-bit number that holds it.
    """

    name: str
    spec: TensorSpec
    start: int

    @property
    def end(self) -> int:
        """The 64-bit number behind the last; floats fill two in one, and the last may be half empty."""
        itemsize = np.dtype(self.spec.dtype).itemsize
        return self.start - (-math.prod(self.spec.shape) * itemsize // _WORD_BYTES)

    def of(self, rows: Any, dtype: Any) -> Any:
        """The input's numbers, as a view of them where that is possible.

        Args:
            rows: batch of samples ``int64[n, ...]``: an array of NumPy, or a tensor of torch.
            dtype: type of the input as NumPy or torch calls it.
        """
        numbers = rows[:, self.start : self.end]
        if self.spec.dtype != "int64":
            numbers = numbers.view(dtype)[:, : math.prod(self.spec.shape)]
        return numbers if len(self.spec.shape) == 1 else numbers.reshape(-1, *self.spec.shape)

    def within(self, row: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The input's numbers in the array of one sample, to be written to; what they do not fill becomes zero."""
        row[self.end - 1] = 0
        numbers = row[self.start : self.end].view(self.spec.dtype)
        return numbers[: math.prod(self.spec.shape)].reshape(self.spec.shape)


def laid_out(inputs: Iterable[tuple[str, TensorSpec]]) -> tuple[InputPlace, ...]:
    """Where inputs lie one behind the other."""
    places: list[InputPlace] = []
    for name, spec in inputs:
        places.append(InputPlace(name=name, spec=spec, start=places[-1].end if places else 0))
    return tuple(places)


def unpacked(places: Iterable[InputPlace], rows: Any) -> dict[str, Any]:
    """The inputs of a batch; see ``Preprocess.unpacked``."""
    kinds = import_module(type(rows).__module__.partition(".")[0])
    return {place.name: place.of(rows, getattr(kinds, place.spec.dtype)) for place in places}


def record_bytes(parts: int) -> int:
    """Bytes of a record beside those of its parts."""
    return parts * _LENGTH.itemsize


def framed(parts: Sequence[bytes | memoryview]) -> bytes:
    """One record of the encoded parts of a sample: their lengths as 32-bit numbers, then the parts."""
    return b"".join([np.array([len(part) for part in parts], _LENGTH).tobytes(), *parts])


def unframed(record: bytes | memoryview, parts: int) -> list[memoryview]:
    """The parts of a record, as views of it.

    Raises:
        SampleError: it has not as many parts.
    """
    view, start = memoryview(record), record_bytes(parts)
    if len(view) < start:
        raise SampleError(f"no record of {parts} parts: it has {len(view)} bytes")
    ends = [start, *(start + np.cumsum(np.frombuffer(view[:start], _LENGTH), dtype=np.int64)).tolist()]
    if ends[-1] != len(view):
        raise SampleError(f"no record of {parts} parts: they take {ends[-1]} bytes, and {len(view)} are there")
    return [view[begin:end] for begin, end in pairwise(ends)]
