"""Samples as columns: where the bytes of each one are, and its label."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ("Samples", "View")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Columns of equal length, one row a sample.

    Attributes:
        ids: ``int64[n]``, not negative, unique in the data set and stable between builds of its manifest.
        objects: names of the objects, relative to the data set's root.
        offsets: ``int64[n]``, where the sample's bytes start in the object.
        lengths: ``int64[n]``, how many bytes the encoded sample has.
        labels: ``int64[n]``, index into the data set's classes; -1 where there is none.
        versions: of each object as it was listed (``stores.faces.Entry.etag``), empty where the store has none; no
            column at all where nobody knows any.
    """

    ids: npt.NDArray[np.int64]
    objects: Sequence[str]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    versions: Sequence[str] = ()

    def __post_init__(self) -> None:
        sizes = {len(self.ids), len(self.objects), len(self.offsets), len(self.lengths), len(self.labels)}
        if self.versions:
            sizes.add(len(self.versions))
        if len(sizes) != 1:
            raise ValueError(f"the columns of Samples have different lengths: {sorted(sizes)}")

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: npt.NDArray[np.int64]) -> "Samples":
        """The given rows, in the given order (copies)."""
        places = rows.tolist()
        return Samples(
            ids=self.ids[rows],
            objects=[self.objects[row] for row in places],
            offsets=self.offsets[rows],
            lengths=self.lengths[rows],
            labels=self.labels[rows],
            versions=[self.versions[row] for row in places] if self.versions else (),
        )

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
