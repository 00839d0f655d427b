"""What a node answers: activations at a cut, or encoded samples, with the ids they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ("FeatureBatch", "Skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A sample that could not be read or decoded, and why."""

    id: int
    object: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureBatch:
    """Some rows of an answer, in the order of the request, without the samples that were skipped.

    Attributes:
        ids: ``int64[n]``.
        tensors: one array ``[n, ...]`` for each tensor that crosses the cut; empty at cut 0.
        encoded: the encoded samples at cut 0 (buffers, not copied); empty at every other cut.
        skipped: the samples of this stretch of the request that could not be read.
    """

    ids: npt.NDArray[np.int64]
    tensors: tuple[npt.NDArray[np.generic], ...] = ()
    encoded: Sequence[bytes | memoryview] = ()
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload: activations and encoded samples, not ids."""
        return sum(tensor.nbytes for tensor in self.tensors) + sum(len(one) for one in self.encoded)
