"""Decides which part each row belongs to: by shares of every class, of groups or of all rows, by a seeded draw."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from frostline.core.errors import SettingError
from frostline.ordering.orders import check_number, draw_of_stretches, permute, permute_each, round_keys, width_of

__all__ = (
    "Labels",
    "count_labels",
    "places_by_label",
    "split_at_random",
    "split_by_class",
    "split_by_group",
)

_MASK = (1 << 64) - 1
_SPLIT = 0x53504C4954  # "SPLIT": keeps the keys of splits apart from those of epochs
_MAX_PARTS = 255
# Draws made at once.
_AT_ONCE = 1 << 20
# Labels that are counted and sorted at once: what is made of them stays within a core's cache (benchmarks/manifest.py).
_CACHED = 1 << 17
# Classes up to this many rows are drawn from by a permutation, larger ones a stretch at a time, which is ten times as
# fast and as even.
_PERMUTED = 1 << 16

_Number = TypeVar("_Number", bound=np.generic)

Pieces = Callable[[], Iterator[npt.NDArray[np.int64]]]
Places = Callable[[], Iterator[npt.NDArray[Any]]]
Parts = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labels:
    """The labels of a table's rows, counted.

    Attributes:
        first: the smallest label.
        counts: ``int64[k]``, how many rows have the label ``first``, ``first + 1``, ...
        is_ascending: rows stand in the order of their labels, so that the counts say it all.
        pieces: function that gives the labels of all rows in order, some at a time, each time it is called.
        places: function that gives what ``places_by_label`` does, where somebody kept it, in whole numbers of any
            width; None where it is to be worked out.
    """

    first: int
    counts: npt.NDArray[np.int64]
    is_ascending: bool
    pieces: Pieces
    places: Places | None = None

    def __len__(self) -> int:
        return int(self.counts.sum())


def count_labels(pieces: Pieces) -> Labels:
    """Count labels, which are small whole numbers, in one pass."""
    first, counts, is_ascending, last = 0, np.zeros(0, np.int64), True, None
    for labels in _cached(pieces):
        low = int(labels.min())
        found = np.bincount(labels - low)
        if len(counts):
            lower, upper = min(first, low), max(first + len(counts), low + len(found))
            both = np.zeros(upper - lower, np.int64)
            both[first - lower : first - lower + len(counts)] += counts
            both[low - lower : low - lower + len(found)] += found
            first, counts = lower, both
        else:
            first, counts = low, found.astype(np.int64)
        if is_ascending:
            is_ascending = (last is None or last <= labels[0]) and bool(np.all(labels[:-1] <= labels[1:]))
        last = labels[-1]
    return Labels(first=first, counts=counts, is_ascending=is_ascending, pieces=pieces)


def places_by_label(labels: Labels) -> Iterator[npt.NDArray[np.int64]]:
    """Where each row would stand if the rows were sorted by label, rows of one label in their order; some at a time."""
    next_of = np.cumsum(labels.counts) - labels.counts
    narrow = np.uint16 if len(labels.counts) <= 1 << 16 else np.int64  # short ones are sorted by their digits
    for found in _cached(labels.pieces):
        numbers = (found - labels.first).astype(narrow)
        order = np.argsort(numbers, kind="stable")
        counts = np.bincount(numbers, minlength=len(next_of))
        starts = np.cumsum(counts) - counts
        places = np.empty(len(numbers), np.int64)
        places[order] = np.arange(len(numbers)) + np.repeat(next_of - starts, counts)
        next_of += counts
        yield places


def split_by_class(labels: Labels, shares: Sequence[float], seed: int) -> Parts:
    """Divide every class by the same shares.

    Of each class every part but the first gets the nearest whole number, but at least one sample; the first part
    gets what is left, and never nothing. A class of one sample is in the first part. In a class of more than 65,536
    rows one is drawn from each of as many stretches as there are draws, all of one length but for one row.

    Args:
        labels: labels of the rows.
        shares: share of each part; they sum to 1.
        seed: 0 to 2^63 - 1.

    Returns:
        ``uint8[n]``, the number of each row's part.

    Raises:
        SettingError: the shares or the seed make no sense.
    """
    _check(shares, seed)
    parts = _by_label(labels, shares, seed)
    return parts if labels.is_ascending else _in_the_rows_order(labels, parts)


def split_at_random(size: int, shares: Sequence[float], seed: int) -> Parts:
    """Divide ``size`` rows by shares, whatever their class; else as ``split_by_class``."""
    everything = Labels(first=0, counts=np.array([size], np.int64), is_ascending=True, pieces=lambda: iter(()))
    return split_by_class(everything, shares, seed)


def split_by_group(groups: npt.NDArray[np.int64], shares: Sequence[float], seed: int) -> Parts:
    """Divide rows by shares so that all rows of a group are in one part.

    The groups are laid one after another in a seeded order, and each goes to the part in whose share of that line its
    middle lies. So a part is off its share by at most half a group at each of its ends. ``groups`` is ``int64[n]``, the
    number of each row's group, from 0 with none left out; else as ``split_by_class``.
    """
    _check(shares, seed)
    sizes = np.bincount(groups)
    drawn = permute(0, len(sizes), len(sizes), round_keys(seed ^ _SPLIT, 0))
    ends = np.cumsum(sizes[drawn])
    middles = (ends - sizes[drawn] / 2) / max(1, len(groups))
    part_of_group = np.zeros(len(sizes), np.uint8)
    part_of_group[drawn] = np.minimum(np.searchsorted(np.cumsum(shares), middles, side="right"), len(shares) - 1)
    return part_of_group[groups]


def _check(shares: Sequence[float], seed: int) -> None:
    check_number("seed", seed, (1 << 63) - 1)
    if not 1 <= len(shares) <= _MAX_PARTS:
        raise SettingError(f"a split has 1 to {_MAX_PARTS} parts, not {len(shares)}")
    if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6 or not shares[0]:
        said = ", ".join(f"{share:g}" for share in shares)
        raise SettingError(f"the shares of a split lie from 0 to 1, sum to 1, and the first is not 0; not {said}")


def _by_label(labels: Labels, shares: Sequence[float], seed: int) -> Parts:
    """The parts of the rows as they would be if the rows were sorted by label."""
    parts = np.zeros(len(labels), np.uint8)
    if not len(parts) or len(shares) == 1:
        return parts
    present = np.flatnonzero(labels.counts)
    sizes = labels.counts[present]
    starts = np.cumsum(sizes) - sizes
    kinds, kind_of = np.unique(sizes, return_inverse=True)
    ends = np.cumsum([_counts(int(size), shares)[1:] for size in kinds], axis=1, dtype=np.int64)[kind_of]
    widths = np.array([width_of(int(size)) if size <= _PERMUTED else 0 for size in kinds])[kind_of]
    for place in np.flatnonzero(widths == 0).tolist():
        (key, *_) = _keys_of(labels, int(present[place]), seed)
        _by_stretches(parts[starts[place] : starts[place] + sizes[place]], ends[place].tolist(), key)
    for width in np.unique(widths[widths > 0]).tolist():
        some = np.flatnonzero(widths == width)
        keys = np.array([_keys_of(labels, label, seed) for label in present[some].tolist()], np.uint64)
        for which, draws in _draws(ends[some, -1]):
            chosen = starts[some][which] + permute_each(draws, which, sizes[some], keys)
            parts[chosen] = 1 + np.sum(ends[some][which] <= draws[:, None], axis=1)
    return parts


def _keys_of(labels: Labels, place: int, seed: int) -> tuple[int, ...]:
    return round_keys(seed ^ _SPLIT, (labels.first + place) & _MASK)


def _by_stretches(parts: Parts, ends: Sequence[int], key: int) -> None:
    """Number the rows of one class: as many as all parts but the first have, and of these those of the later parts."""
    rows: npt.NDArray[np.int64] | None = None
    for number, taken in enumerate((0, *ends[:-1]), 1):
        size = len(parts) if rows is None else len(rows)
        drawn = draw_of_stretches(size, ends[-1] - taken, key + number)
        rows = drawn if rows is None else rows[drawn]
        parts[rows] = number


def _draws(counts: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """The draws 0, 1, ... of each label in turn, so many at a time: number of the label, and of the draw."""
    ends = np.cumsum(counts)
    for start in range(0, int(ends[-1]), _AT_ONCE):
        flat = np.arange(start, min(start + _AT_ONCE, int(ends[-1])), dtype=np.int64)
        which = np.searchsorted(ends, flat, side="right")
        yield which, flat - (ends - counts)[which]


def _counts(size: int, shares: Sequence[float]) -> list[int]:
    counts = [max(1, round(size * share)) if share > 0 else 0 for share in shares[1:]]
    while sum(counts) > size - 1:
        # The largest gives way first, and of equal ones the last.
        largest = max(range(len(counts)), key=lambda place: (counts[place], place))
        counts[largest] -= 1
    return [size - sum(counts), *counts]


def _in_the_rows_order(labels: Labels, sorted_parts: Parts) -> Parts:
    """The n-th row of a label gets the n-th part of that label."""
    parts, done = np.empty(len(sorted_parts), np.uint8), 0
    for places in _cached(labels.places or (lambda: places_by_label(labels))):
        parts[done : done + len(places)] = sorted_parts[places]
        done += len(places)
    return parts


def _cached(pieces: Callable[[], Iterator[npt.NDArray[_Number]]]) -> Iterator[npt.NDArray[_Number]]:
    """Yield the same numbers in pieces that fit a processor cache."""
    for piece in pieces():
        for start in range(0, len(piece), _CACHED):
            yield piece[start : start + _CACHED]
