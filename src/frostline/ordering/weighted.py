"""Decides which sample is drawn at each position by weights, with replacement: computed, never stored."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.errors import SettingError
from frostline.ordering.order import check_inside
from frostline.ordering.permutation import check_epoch, round_keys, words_at

__all__ = ("Weighted", "Weights", "weights_by_class")

_DRAW = 0x44524157  # "DRAW": keeps the keys of draws apart from those of permutations

_Rows = npt.NDArray[np.int64]
_Weights = npt.NDArray[np.float64]


class Weights:
    """How likely each row is, as running sums: 8 bytes a row, kept once for all epochs. Immutable.

    A row is found by inversion of the sums (Devroye, "Non-Uniform Random Variate Generation", 1986, section III.2):
    log n steps for a draw, where Walker's alias tables (ACM TOMS 3(3), 1977) need one. But tables are built row by
    row, and take 12 to 16 bytes each; sums are made in one pass of additions, whose order and so whose rounding is
    the same on every machine.

    Args:
        weights: ``float[n]``, not negative; what they sum to does not matter. A row of weight 0 is never drawn.

    Raises:
        SettingError: a weight is negative or not a number, or all are 0.
    """

    def __init__(self, weights: Sequence[float] | npt.NDArray[np.floating]) -> None:
        given = np.asarray(weights, np.float64)
        if given.ndim != 1 or not np.all(given >= 0):  # no comparison holds for what is no number
            raise SettingError("weights are one number a sample, none of them negative")
        self._sums: _Weights = np.cumsum(given)
        if not len(given) or not 0 < self._sums[-1] < np.inf:
            raise SettingError("the weights of all samples together must be above 0 and finite")
        self._last = int(np.searchsorted(self._sums, self._sums[-1], side="left"))
        self.digest = hashlib.sha256(self._sums.astype("<f8", copy=False).data).hexdigest()

    def __len__(self) -> int:
        return len(self._sums)

    def rows(self, words: npt.NDArray[np.uint64]) -> _Rows:
        """The row that each of these 64 random bits draws."""
        points = (words >> np.uint64(11)).astype(np.float64) * (2.0**-53 * self._sums[-1])
        found = np.searchsorted(self._sums, points, side="right")
        # The highest point may be rounded up to the sum of all.
        rows: _Rows = np.minimum(found, self._last).astype(np.int64, copy=False)
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """An ``EpochOrder`` of independent draws with replacement: a sample comes often, once or never in an epoch.

    Attributes:
        weights: weights of the rows.
        size: draws in the epoch.
        seed: 0 to 2^63 - 1.
        epoch: 0 to 2^63 - 1.
    """

    weights: Weights
    size: int
    seed: int
    epoch: int

    def __post_init__(self) -> None:
        check_epoch(self.size, self.seed, self.epoch)

    def __len__(self) -> int:
        return self.size

    @property
    def name(self) -> str:
        """See ``EpochOrder.name``."""
        return f"weighted {self.weights.digest[:32]}"

    def at(self, positions: _Rows) -> _Rows:
        """See ``EpochOrder.at``."""
        check_inside(positions, self.size)
        return self.weights.rows(words_at(positions, round_keys(self.seed ^ _DRAW, self.epoch)[0]))

    def in_epoch(self, epoch: int) -> Self:
        """See ``EpochOrder.in_epoch``."""
        return replace(self, epoch=epoch)


def weights_by_class(labels: _Rows, weights: Mapping[int, float]) -> _Weights:
    """Weights of samples that give each class its share of the draws, however many samples it has.

    Args:
        labels: ``int64[n]``.
        weights: weight of each label that occurs, shared by the samples of that label.

    Raises:
        SettingError: a label has no weight, or a weight has no sample to go to.
    """
    present, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
    missing = [label for label in present.tolist() if label not in weights]
    if missing:
        raise SettingError(f"label {missing[0]} has samples and no weight: give it one, 0 to leave it out")
    empty = [label for label, weight in weights.items() if weight and label not in set(present.tolist())]
    if empty:
        raise SettingError(f"label {empty[0]} has a weight and no samples")
    each: _Weights = np.array([weights[label] for label in present.tolist()], np.float64) / counts
    return each[which]
