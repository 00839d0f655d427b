"""Samples as columns: where the bytes of each one are, and its label."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

__all__ = (
    "CELLS",
    "OBJECTS",
    "READINGS",
    "UNPACKED",
    "URLS",
    "SampleTable",
    "Samples",
    "Targets",
    "Texts",
    "View",
    "read_as",
    "taken",
)

_AT_ONCE = 1 << 12


class Texts(Sequence[str]):
    """A sequence of texts that are made when they are asked for. Immutable, safe for threads; equal by what it holds.

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


def taken(texts: Sequence[str], rows: npt.NDArray[np.int64]) -> Sequence[str]:
    """The texts of the given rows of any sequence."""
    if isinstance(texts, Texts):
        return texts.take(rows)
    return [texts[row] for row in rows.tolist()]


_Numbers = npt.NDArray[np.int64]


class SampleTable(Protocol):
    """Samples of a data set, of which there may be a hundred million. Immutable, safe for threads.

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
    """Where the masks of samples are: columns of equal length, one row a sample.

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
            objects=taken(self.objects, rows),
            offsets=self.offsets[rows],
            lengths=self.lengths[rows],
            versions=taken(self.versions, rows),
            widths=self.widths[rows],
            heights=self.heights[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Columns of equal length, one row a sample.

    Attributes:
        ids: ``int64[n]``, not negative, unique in the data set and stable between builds of its manifest.
        objects: names of the objects, relative to the data set's root. Any sequence: it may lie in a file.
        offsets: ``int64[n]``, where the sample's bytes start in the object.
        lengths: ``int64[n]``, how many bytes the encoded sample has.
        labels: ``int64[n]``, index into the data set's classes; -1 where there is none.
        versions: the version of each object as it was listed (``stores.base.protocols.Entry.etag``), empty where the
            store has none; no column at all where nobody knows any.
        targets: where their masks are; None where the data set has none. They do not travel with a request.
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
            objects=taken(self.objects, rows),
            offsets=self.offsets[rows],
            lengths=self.lengths[rows],
            labels=self.labels[rows],
            versions=taken(self.versions, rows) if len(self.versions) else (),
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
    """Which random view of each sample is wanted: augmentation is seeded by (seed, epoch, sample id).

    Attributes:
        seed: seed of the job.
        epoch: or the number of the view, where a job has only some that return.
        recurs: it will be wanted again, so that its features are worth keeping; the pixels are the same either way.
    """

    seed: int
    epoch: int
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
    """What stands for a data set in the names of kept features: the same address is other bytes in another reading."""
    return url if reading == OBJECTS else f"{reading} of {url}"
