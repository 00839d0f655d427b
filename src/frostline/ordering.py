"""Decides which sample stands at which position of an epoch: a permutation computed, never stored."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline.errors import SettingError

__all__ = ("Order", "split_by_class")

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_ROUNDS = 8
_MOST = 1 << 62
_SPLIT = 0x53504C4954  # "SPLIT": keeps the keys of splits apart from those of epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of one epoch, a pure function of (seed, epoch, position).

    A balanced Feistel network (Luby and Rackoff, "How to Construct Pseudorandom Permutations from
    Pseudorandom Functions", SIAM J. Comput. 17(2), 1988) permutes the next even power of two; positions
    that land outside are walked on until they land inside (Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", CT-RSA 2002, section 3). The round function is the finaliser of SplitMix64 (Steele,
    Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, figure 17). It shuffles;
    it keeps no secret. The permutation is part of the format: it never changes between versions.

    Attributes:
        size: samples in the epoch, 0 to 2^62.
        seed: 0 to 2^63 - 1.
        epoch: 0 to 2^63 - 1.
        shuffle: False leaves the samples in the order of the manifest.
    """

    size: int
    seed: int
    epoch: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        _check("size", self.size, _MOST)
        _check("seed", self.seed, (1 << 63) - 1)
        _check("epoch", self.epoch, (1 << 63) - 1)

    def __len__(self) -> int:
        return self.size

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The rows at the positions from ``start`` up to, not including, ``stop``.

        Returns:
            ``int64[stop - start]``, each below ``size``. Memory grows with the answer, not with ``size``.

        Raises:
            IndexError: the positions do not lie within 0 to ``size``.
        """
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"positions {start} to {stop} do not lie within 0 to {self.size}")
        positions = np.arange(start, stop, dtype=np.int64)
        if not self.shuffle:
            return positions
        return _permute(positions, self.size, _round_keys(self.seed, self.epoch))


def split_by_class(
    labels: npt.NDArray[np.int64], share: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Hold out a share of every class, by a seeded draw.

    Of each class the nearest whole number is held out, but at least one sample and never all of them; a
    class of one sample is not held out.

    Args:
        labels: ``int64[n]``, the class of each row.
        share: of each class to hold out, from 0 to below 1; 0 holds out nothing.
        seed: 0 to 2^63 - 1.

    Returns:
        The rows to train on and the rows held out, each ascending; together every row once.

    Raises:
        SettingError: the share or the seed makes no sense.
    """
    if not 0 <= share < 1:
        raise SettingError(f"the share to hold out lies from 0 to below 1, not {share}")
    _check("seed", seed, (1 << 63) - 1)
    held = np.zeros(len(labels), bool)
    for label in np.unique(labels).tolist():
        rows = np.flatnonzero(labels == label)
        count = _held_out(len(rows), share)
        drawn = _permute(np.arange(count, dtype=np.int64), len(rows), _round_keys(seed ^ _SPLIT, label & _MASK))
        held[rows[drawn]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _held_out(count: int, share: float) -> int:
    return min(max(1, round(count * share)), count - 1) if share > 0 else 0


def _permute(positions: npt.NDArray[np.int64], size: int, keys: tuple[int, ...]) -> npt.NDArray[np.int64]:
    half = (max(2, (size - 1).bit_length()) + 1) // 2
    values = _feistel(positions.astype(np.uint64), half, keys)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        walked = _feistel(values[outside], half, keys)
        values[outside] = walked
        outside = outside[walked >= size]
    return values.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    shift, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & low
    for key in keys:
        left, right = right, left ^ (_mixed(right + np.uint64(key)) & low)
    return (left << shift) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # Arithmetic on arrays of uint64 wraps around, as SplitMix64 wants it.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    state = _mix((_mix((seed + _GOLDEN) & _MASK) + epoch) & _MASK)
    return tuple(_mix((state + (number + 1) * _GOLDEN) & _MASK) for number in range(_ROUNDS))


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _check(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise SettingError(f"{name} must lie from 0 to {most}, not {value}")
