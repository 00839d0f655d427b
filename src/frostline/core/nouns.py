"""The nouns: samples as columns, what a node answers for them, and how values look in notebooks."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol, Self, overload

import numpy as np
import numpy.typing as npt

from frostline.core.declared import Count

__all__ = (
    "CELLS",
    "EXACT",
    "FLOAT32",
    "OBJECTS",
    "READINGS",
    "REFERENCE",
    "UNPACKED",
    "URLS",
    "Closing",
    "FeatureBatch",
    "Levels",
    "PackedTensor",
    "Route",
    "SampleTable",
    "Samples",
    "ShownInNotebooks",
    "Skipped",
    "Targets",
    "Texts",
    "View",
    "array_dtype",
    "finite_rows",
    "is_finite",
    "read_as",
    "take_texts",
    "widen_bfloat16",
)


class Closing:
    """A context manager that closes itself at the end of its block."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A sample that could not be read or decoded, with the reason; ``changed`` if it was modified since."""

    id: int
    object: str
    reason: str
    changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTensor:
    """One tensor of a batch as it crosses the wire, made and read by ``wire.codecs``.

    Attributes:
        codec: the name; a lossless one where the batch's codec does not fit this tensor, such as a mask.
        shape: shape of one sample, unpacked.
        dtype: dtype of the tensor, unpacked.
        body: ``[n, *shape]`` in fewer bits; or, where ``bounds`` is given, the packed rows one after another as
            ``uint8[m]``.
        bounds: ``int64[n + 1]``, where each row of ``body`` starts and the last one ends; None where rows are plain.
        scale: ``float32[n, channels]``, which int8 values are multiplied by; else None.
    """

    codec: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    body: npt.NDArray[np.generic]
    bounds: npt.NDArray[np.int64] | None = None
    scale: npt.NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.body.nbytes + (0 if self.scale is None else self.scale.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureBatch:
    """Some rows of an answer, in the order of the request, without the samples that were skipped.

    Attributes:
        ids: ``int64[n]``.
        tensors: array ``[n, ...]`` for each tensor that crosses the cut; empty at cut 0, and while packed. Where
            encoded samples are handed out as rows, they are an array of ``bytes``.
        encoded: the encoded samples at cut 0 (buffers, not copied); empty at every other cut.
        skipped: the samples of this stretch of the request that could not be read.
        packed: the same tensors as they cross the wire, where a codec packed them; empty once they are unpacked.
        error: error of packing, as the sender measured it: root-mean-square error relative to the sample's own root
            mean square, of the worst sample and tensor; 0 where nothing is lost.
    """

    ids: npt.NDArray[np.int64]
    tensors: tuple[npt.NDArray[np.generic], ...] = ()
    encoded: Sequence[bytes | memoryview] = ()
    skipped: tuple[Skipped, ...] = ()
    packed: tuple[PackedTensor, ...] = ()
    error: float = 0.0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload: activations, packed or not, and encoded samples; not ids."""
        tensors = sum(map(_nbytes, self.tensors)) + sum(tensor.nbytes for tensor in self.packed)
        return tensors + sum(map(len, self.encoded))


def _nbytes(tensor: npt.NDArray[np.generic]) -> int:
    """Of rows that are encoded samples, what these have: the array itself holds no more than pointers to them."""
    return sum(map(len, tensor.tolist())) if tensor.dtype == object else tensor.nbytes


EXACT = "exact"
"""The codec that leaves activations as they are, and the accuracy of the user's own network, bit for bit."""

FLOAT32 = "float32"
"""The accuracy of 32-bit floats: codecs lose nothing, and engines sum the same numbers in another order at most."""

LOSSY = ("fp16", "bf16", "int8")
"""Accuracies that allow fewer bits than those of 32-bit floats, and the codecs' and engines' precisions; finest first.
"""

REFERENCE = "torch-eager"
"""The engine whose features are the user's own network's, bit for bit; every other one is measured against it."""


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """The cut at which a sample leaves the store side, and the codec that compresses it for the link.

    Attributes:
        cut: number of the cut (``Cut.number``).
        codec: name of the codec (``wire.codecs``); cut 0 always has ``exact``.
    """

    cut: int
    codec: str = EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The last step of a preprocessing, ``(level - mean) / std`` in float32 by channel, for an engine that runs it.

    Attributes:
        mean: a number for each channel.
        std: a number for each channel, above 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.mean) == len(self.std), "they were checked as a step"

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the SHA-256: levels that mean the same have the same."""
        content = json.dumps([[float(np.float32(value)) for value in some] for some in (self.mean, self.std)])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def into(self, pixels: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
        """Write what a network takes of one sample.

        Args:
            pixels: ``uint8[H, W, C]``.
            out: ``float32[C, H, W]``.
        """
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            plane = out[channel]
            np.subtract(pixels[:, :, channel], np.float32(mean), out=plane, dtype=np.float32)
            np.divide(plane, np.float32(std), out=plane)

    def apply(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """What a network takes of some samples, ``float32[n, C, H, W]`` of ``uint8[n, H, W, C]``."""
        rows, height, width, channels = pixels.shape
        out = np.empty((rows, channels, height, width), np.float32)
        for row in range(rows):
            self.into(pixels[row], out[row])
        return out


_BFLOAT16 = "bfloat16"
_CARRIER = np.dtype(np.uint16)
"""Nothing else crosses a cut as ``uint16``, so that who meets it in an answer knows what it means."""


def array_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype for tensors of a dtype; the bits of ``bfloat16`` are kept in ``uint16``.

    Args:
        name: torch's name of the tensor's dtype, such as ``float32``.
    """
    return _CARRIER if name == _BFLOAT16 else np.dtype(name)


def widen_bfloat16(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same values as ``float32`` if the array holds the bits of bfloat16; otherwise the array itself."""
    if array.dtype != _CARRIER:
        return array
    bits = array.astype(np.uint32)
    np.left_shift(bits, 16, out=bits)
    return bits.view(np.float32)


# Bits of the least number of 16 bits that is none: infinity, of both signs.
_FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})
_INFINITE = {np.dtype(np.float16): (0x7C00, 0xFC00), _CARRIER: (0x7F80, 0xFF80)}


def is_finite(array: npt.NDArray[Any]) -> bool:
    """True if no number is Inf or NaN, found from the extremes, which is faster than a mask of all numbers."""
    if array.size == 0:
        return True
    if array.dtype in _INFINITE:
        bits, (positive, negative) = array.view(np.uint16), _INFINITE[array.dtype]
        return int(bits.view(np.int16).max()) < positive and int(bits.max()) < negative
    if array.dtype.kind != "f":
        return True
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(array.max()) and np.isfinite(array.min()))


def finite_rows(
    arrays: Sequence[npt.NDArray[Any]], rows: int, dtypes: Sequence[str] | None = None
) -> npt.NDArray[np.bool_]:
    """Which rows hold no Inf and no NaN, as ``bool[rows]``.

    Args:
        arrays: ``[rows, ...]`` each.
        rows: number of rows.
        dtypes: types of the first of them, in torch's words, which alone are looked at; None takes all, and all of
            ``uint16`` as ``bfloat16``, which masks are not.
    """
    found = np.ones(rows, np.bool_)
    floats = [array for array, dtype in zip(arrays, dtypes or (), strict=False) if dtype in _FLOATS]
    for array in arrays if dtypes is None else floats:
        if not is_finite(array):
            found &= np.array([is_finite(row) for row in array], np.bool_)
    return found


_AT_ONCE = 1 << 12


class Texts(Sequence[str]):
    """A sequence of texts that are made when they are read. Immutable and safe for threads; equal by its contents.

    Iterating makes some thousand at a time. Taking rows is much faster than indexing them one by one.
    """

    @abstractmethod
    def take(self, rows: npt.NDArray[np.int64]) -> Sequence[str]:
        """The texts of the given rows, in the given order."""

    @overload
    def __getitem__(self, row: int) -> str: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[str]: ...

    def __getitem__(self, row: int | slice) -> str | Sequence[str]:
        """One text, or those of a slice."""
        if isinstance(row, slice):
            return self.take(np.arange(*row.indices(len(self)), dtype=np.int64))
        place = row + len(self) if row < 0 else row
        if not 0 <= place < len(self):
            raise IndexError(f"row {row} lies outside the {len(self)} texts")
        return self.take(np.array([place], np.int64))[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self.take(np.arange(start, min(start + _AT_ONCE, len(self)), dtype=np.int64))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == two for mine, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal ones may be of other classes

    def __repr__(self) -> str:
        return f"<{len(self)} texts>"


def take_texts(texts: Sequence[str], rows: npt.NDArray[np.int64]) -> Sequence[str]:
    """The texts of the given rows of any sequence."""
    if isinstance(texts, Texts):
        return texts.take(rows)
    return [texts[row] for row in rows.tolist()]


_Numbers = npt.NDArray[np.int64]


class SampleTable(Protocol):
    """The samples of a data set, up to a hundred million. Immutable and safe for threads.

    Whole columns are views where they lie in memory or in a mapped file, and else computed at each access: ask for
    those of a few rows instead, or ``take`` them.
    """

    @property
    def ids(self) -> _Numbers:
        """See ``Samples``."""

    @property
    def objects(self) -> Sequence[str]:
        """See ``Samples``."""

    @property
    def offsets(self) -> _Numbers:
        """See ``Samples``."""

    @property
    def lengths(self) -> _Numbers:
        """See ``Samples``."""

    @property
    def labels(self) -> _Numbers:
        """See ``Samples``."""

    @property
    def versions(self) -> Sequence[str]:
        """See ``Samples``."""

    def __len__(self) -> int:
        """How many."""

    def take(self, rows: _Numbers) -> "Samples":
        """The given rows, in the given order, as columns of their own."""

    def ids_at(self, rows: _Numbers) -> _Numbers:
        """The ids of the given rows."""

    def labels_at(self, rows: _Numbers) -> _Numbers:
        """The labels of the given rows."""

    @property
    def encoded_bytes(self) -> int:
        """The bytes of all encoded samples together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """Places of the samples' masks: columns of equal length with one row per sample.

    Attributes:
        objects: names of the objects, relative to the data set's root; empty where a sample has no mask.
        offsets: ``int64[n]``, where the mask's bytes start in the object.
        lengths: ``int64[n]``, how many bytes the encoded mask has.
        versions: versions of each object as it was listed, empty where the store has none.
        widths: ``int64[n]``, of the sample's image in pixels, which its mask must have too; 0 where nobody knows it.
        heights: ``int64[n]``, the same.
    """

    objects: Sequence[str]
    offsets: _Numbers
    lengths: _Numbers
    versions: Sequence[str]
    widths: _Numbers
    heights: _Numbers

    def __len__(self) -> int:
        return len(self.objects)

    def take(self, rows: _Numbers) -> "Targets":
        """The given rows, in the given order (copies)."""
        return Targets(
            objects=take_texts(self.objects, rows),
            offsets=self.offsets[rows],
            lengths=self.lengths[rows],
            versions=take_texts(self.versions, rows),
            widths=self.widths[rows],
            heights=self.heights[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Columns of equal length with one row per sample.

    Attributes:
        ids: ``int64[n]``, not negative, unique in the data set and stable between builds of its manifest.
        objects: names of the objects, relative to the data set's root. Any sequence: it may lie in a file.
        offsets: ``int64[n]``, where the sample's bytes start in the object.
        lengths: ``int64[n]``, how many bytes the encoded sample has.
        labels: ``int64[n]``, index into the data set's classes; -1 where there is none.
        versions: the version of each object as it was listed (``stores.protocols.Entry.etag``), empty where the
            store has none; no column at all where nobody knows any.
        targets: the place where their masks are; None where the data set has none. They do not travel with a request.
    """

    ids: _Numbers
    objects: Sequence[str]
    offsets: _Numbers
    lengths: _Numbers
    labels: _Numbers
    versions: Sequence[str] = ()
    targets: Targets | None = None

    def __post_init__(self) -> None:
        sizes = {len(self.ids), len(self.objects), len(self.offsets), len(self.lengths), len(self.labels)}
        if len(self.versions):
            sizes.add(len(self.versions))
        if self.targets is not None:
            sizes.add(len(self.targets))
        if len(sizes) != 1:
            raise ValueError(f"the columns of Samples have different lengths: {sorted(sizes)}")

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: _Numbers) -> "Samples":
        """The given rows, in the given order (copies)."""
        return Samples(
            ids=self.ids[rows],
            objects=take_texts(self.objects, rows),
            offsets=self.offsets[rows],
            lengths=self.lengths[rows],
            labels=self.labels[rows],
            versions=take_texts(self.versions, rows) if len(self.versions) else (),
            targets=None if self.targets is None else self.targets.take(rows),
        )

    @property
    def masks(self) -> tuple[_Numbers, "Samples"]:
        """The rows that have a mask, and where those masks are: samples of their own, with the ids of their images."""
        if self.targets is None:
            return np.zeros(0, np.int64), self.take(np.zeros(0, np.int64))
        rows = np.flatnonzero(self.targets.lengths > 0)
        found = self.targets.take(rows)
        masks = Samples(
            ids=self.ids[rows],
            objects=found.objects,
            offsets=found.offsets,
            lengths=found.lengths,
            labels=np.full(len(rows), -1, np.int64),
            versions=found.versions if any(found.versions) else (),
        )
        return rows, masks

    def ids_at(self, rows: _Numbers) -> _Numbers:
        """See ``SampleTable.ids_at``."""
        return self.ids[rows]

    def labels_at(self, rows: _Numbers) -> _Numbers:
        """See ``SampleTable.labels_at``."""
        return self.labels[rows]

    @property
    def encoded_bytes(self) -> int:
        """The bytes of all encoded samples together."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A random augmentation of each sample, seeded by (seed, epoch, sample id).

    Attributes:
        seed: seed of the job.
        epoch: number of the epoch, or of the view where a job has only some that return.
        recurs: True if it will be wanted again, so that its features are worth keeping; the pixels are the same either
            way.
    """

    seed: Count
    epoch: Count
    recurs: bool = False


OBJECTS = "objects"
"""Bytes from ``offset`` of an object."""
CELLS = "cells"
"""A cell of a Parquet file: the object names file and column, the offset is the row."""
URLS = "urls"
"""The object is a URL of its own, within a root that the node serves."""
UNPACKED = "unpacked"
"""Bytes of a compressed tar, which the object names with its version, as they lie in it unpacked."""
READINGS = (OBJECTS, CELLS, URLS, UNPACKED)


def read_as(url: str, reading: str) -> str:
    """The name of a data set in the keys of cached features, which tells apart two ways to read the same address."""
    return url if reading == OBJECTS else f"{reading} of {url}"


class ShownInNotebooks:
    """Adds the method that notebooks ask for; a class of this kind says its rows."""

    __slots__ = ()

    def _rows(self) -> Iterable[tuple[str, object]]:
        """Names and values to show under the text of ``repr``; made without reading or asking anything."""
        return ()

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th scope="row" style="text-align: left">{escape(name)}</th>'
            f'<td style="text-align: left">{escape(str(value))}</td></tr>'
            for name, value in self._rows()
        )
        caption = f'<caption style="text-align: left">{escape(repr(self))}</caption>'
        return f"<table>{caption}<tbody>{rows}</tbody></table>"
