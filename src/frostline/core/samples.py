"""Samples as columns: where the bytes of each one are, and its label."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from frostline.core.texts import taken

__all__ = ("SampleTable", "Samples", "Targets", "View")

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
        versions: of each object as it was listed, empty where the store has none.
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
        seed: of the job.
        epoch: or the number of the view, where a job has only some that return.
        recurs: it will be wanted again, so that its features are worth keeping; the pixels are the same either way.
    """

    seed: int
    epoch: int
    recurs: bool = False
