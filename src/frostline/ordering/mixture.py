"""Decides which sample of which data set stands at each position of a mixture, and where its epochs end."""

import hashlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.core.errors import SettingError
from frostline.ordering.orders import check_epoch, check_inside, check_number, permute_each, round_keys

__all__ = (
    "Interleaving",
    "MixtureOrder",
)

# A pattern of this many turns takes 0.4 MB and a tenth of a second.
_LONGEST = 1 << 16
_CLOSE = Fraction(1, 10**9)

_Rows = npt.NDArray[np.int64]


class Interleaving:
    """A pattern of turns that repeats without end. Immutable.

    After any number of turns each member has had its share of them to within less than one: Tijdeman's solution of
    the chairman assignment problem (Discrete Mathematics 32, 1980), which bounds the difference for ``k`` members by
    ``1 - 1 / (2k - 2)``. Each of a member's turns has a first and a last slot in which it keeps to the bound; of the
    turns that may come now the one with the earliest last slot does.

    Args:
        ratios: ratios of the members, above 0; their sum does not matter. Where whole numbers of up to 65,536
            together have these ratios, as 0.7 to 0.3 have in 7 to 3, they are kept exactly; else they are rounded to
            parts in 65,536, and ``shares`` says what was made of them.

    Raises:
        SettingError: a ratio is not above 0, or there are too many.
    """

    def __init__(self, ratios: Sequence[float]) -> None:
        self.counts = _whole(ratios)
        """Turns of each member in one pattern."""
        self.length = sum(self.counts)
        """Turns in the pattern."""
        self._members = np.array(_pattern(self.counts), np.int64)
        self._slots = [np.flatnonzero(self._members == member) for member in range(len(self.counts))]
        self._before = np.empty(self.length, np.int64)
        for slots in self._slots:
            self._before[slots] = np.arange(len(slots))

    def at(self, positions: _Rows) -> tuple[_Rows, _Rows]:
        """Whose turn it is at each position, and how many that member had before: ``int64[n]`` each."""
        rounds, slots = np.divmod(positions, self.length)
        members = self._members[slots]
        return members, rounds * np.array(self.counts, np.int64)[members] + self._before[slots]

    def position_of(self, member: int, turn: int) -> int:
        """The position of a member's turn of that number, from 0."""
        rounds, which = divmod(turn, self.counts[member])
        return rounds * self.length + int(self._slots[member][which])

    def turns_before(self, member: int, position: int) -> int:
        """How many turns a member has before a position."""
        rounds, slot = divmod(position, self.length)
        return rounds * self.counts[member] + int(np.searchsorted(self._slots[member], slot))


def _whole(ratios: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers with these ratios."""
    if not 1 <= len(ratios) <= _LONGEST // 16:
        raise SettingError(f"a mixture has 1 to {_LONGEST // 16} members, not {len(ratios)}")
    if not all(0 < ratio < math.inf for ratio in ratios):
        raise SettingError(f"the ratios of a mixture are above 0, not {', '.join(f'{ratio:g}' for ratio in ratios)}")
    exact = [_simple(Fraction(ratio)) for ratio in ratios]
    common = math.lcm(*(ratio.denominator for ratio in exact))
    counts = [int(ratio * common) for ratio in exact]
    divisor = math.gcd(*counts)
    counts = [count // divisor for count in counts]
    return tuple(counts) if sum(counts) <= _LONGEST else _rounded([Fraction(ratio) for ratio in ratios])


def _simple(ratio: Fraction) -> Fraction:
    """What was meant by a number that a float holds only nearly, such as 0.7 or 1 / 3."""
    near = ratio.limit_denominator(_LONGEST)
    return near if abs(near - ratio) <= ratio * _CLOSE else ratio


def _rounded(ratios: Sequence[Fraction]) -> tuple[int, ...]:
    """Parts in 65,536, those with the largest remainders rounded up, and none without one."""
    total = sum(ratios)
    ideal = [ratio * _LONGEST / total for ratio in ratios]
    counts = [max(1, math.floor(count)) for count in ideal]
    while (left := _LONGEST - sum(counts)) != 0:
        step = 1 if left > 0 else -1
        changeable = [member for member, count in enumerate(counts) if count + step >= 1]
        furthest = max(changeable, key=lambda member: (step * (ideal[member] - counts[member]), -member))
        counts[furthest] += step
    return tuple(counts)


def _pattern(counts: Sequence[int]) -> list[int]:
    """One round of turns: of those that may come at a slot, the one that may wait the least."""
    length = sum(counts)
    waiting = [(_first_slot(0, count, length, len(counts)), member, 0) for member, count in enumerate(counts)]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    turns = []
    for slot in range(length):
        while waiting and waiting[0][0] <= slot:
            _, member, turn = heapq.heappop(waiting)
            heapq.heappush(ready, (_last_slot(turn, counts[member], length, len(counts)), member, turn))
        _, member, turn = heapq.heappop(ready)
        turns.append(member)
        if turn + 1 < counts[member]:
            first = _first_slot(turn + 1, counts[member], length, len(counts))
            heapq.heappush(waiting, (first, member, turn + 1))
    return turns


def _first_slot(turn: int, count: int, length: int, members: int) -> int:
    """The first slot, from 0, after which the member has not had more than its share and the bound."""
    parts = max(1, 2 * members - 2)
    return -(-length * (turn * parts + 1) // (count * parts)) - 1


def _last_slot(turn: int, count: int, length: int, members: int) -> int:
    """The last slot, from 0, before which the member has not had less than its share less the bound."""
    parts = max(1, 2 * members - 2)
    return length * ((turn + 1) * parts - 1) // (count * parts)


_ENDS = ("first", "all")
"""What ends an epoch of a mixture; see ``MixtureOrder.of``."""

_MAX = 1 << 62
_MASK = (1 << 64) - 1
_MIX = 0x4D4958  # "MIX": keeps the keys of members apart from those of epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOrder:
    """An ``EpochOrder`` over several data sets, whose rows are numbered one set after the other.

    Whose turn it is follows from the ratios (``Interleaving``). Each member has epochs and permutations of its own,
    which go on where the mixture's last epoch left them: none of its samples comes again before all have come.

    Attributes:
        pattern: pattern of turns.
        sizes: samples of each member.
        size: positions in an epoch of the mixture.
        seed: 0 to 2^63 - 1.
        epoch: epoch of the mixture, 0 to 2^63 - 1.
        shuffle: False leaves each member's samples in the order of its manifest.
    """

    pattern: Interleaving
    sizes: tuple[int, ...]
    size: int
    seed: int
    epoch: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.pattern.counts):
            raise SettingError(
                f"a mixture of {len(self.sizes)} data sets needs as many ratios, not {len(self.pattern.counts)}"
            )
        if min(self.sizes) < 1:
            raise SettingError(f"a mixture needs members with samples, and number {self.sizes.index(0)} has none")
        check_number("samples of all members", sum(self.sizes), _MAX)
        check_epoch(self.size, self.seed, self.epoch)

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        ratios: Sequence[float],
        *,
        seed: int,
        epoch: int,
        ends: str | int = "first",
        shuffle: bool = True,
    ) -> Self:
        """A mixture of data sets of these sizes.

        Args:
            sizes: samples of each.
            ratios: number of times that the turn of each comes, beside the others.
            seed: 0 to 2^63 - 1.
            epoch: 0 to 2^63 - 1.
            ends: an epoch ends when the ``first`` data set would have to begin again, or when ``all`` have been seen
                whole, the smaller ones several times; or after so many samples.
            shuffle: False leaves each data set's samples in the order of its manifest.

        Raises:
            SettingError: a figure that makes no sense.
        """
        pattern = Interleaving(ratios)
        unended = cls(pattern=pattern, sizes=tuple(sizes), size=0, seed=seed, epoch=epoch, shuffle=shuffle)
        return replace(unended, size=ends if isinstance(ends, int) else unended._end(ends))

    def __len__(self) -> int:
        return self.size

    @property
    def name(self) -> str:
        """See ``EpochOrder.name``."""
        terms = f"{self.pattern.counts} {self.sizes} {self.size} {self.shuffle}"
        return f"mixture {hashlib.sha256(terms.encode()).hexdigest()[:32]}"

    def in_epoch(self, epoch: int) -> Self:
        """See ``EpochOrder.in_epoch``."""
        return replace(self, epoch=epoch)

    def at(self, positions: _Rows) -> _Rows:
        """See ``EpochOrder.at``; the rows of the first data set come first, then those of the second."""
        members, rows = self.members_at(positions)
        firsts = np.cumsum((0, *self.sizes[:-1]), dtype=np.int64)
        return firsts[members] + rows

    def members_at(self, positions: _Rows) -> tuple[_Rows, _Rows]:
        """The data set's number and the row in it at each position: ``int64[n]`` each.

        Raises:
            IndexError: a position does not lie within the epoch.
        """
        check_inside(positions, self.size)
        members, turns = self.pattern.at(positions)
        rows = np.empty(len(positions), np.int64)
        for member in np.unique(members).tolist():
            some = members == member
            rows[some] = self._rows(member, turns[some])
        return members, rows

    def _end(self, ends: str) -> int:
        members = range(len(self.sizes))
        if ends == "first":
            return min(self.pattern.position_of(member, self.sizes[member]) for member in members)
        if ends == "all":
            return max(self.pattern.position_of(member, self.sizes[member] - 1) for member in members) + 1
        raise SettingError(f"ends must be {', '.join(_ENDS)} or a number of samples, not {ends!r}")

    def _rows(self, member: int, turns: _Rows) -> _Rows:
        """The rows of a member at its turns of this epoch, in its own epochs, which are many where it is small."""
        size = self.sizes[member]
        first, place = divmod(self.epoch * self.pattern.turns_before(member, self.size), size)
        epochs, places = np.divmod(place + turns, size)
        if not self.shuffle:
            return places
        found, which = np.unique(epochs, return_inverse=True)
        seed = round_keys(self.seed ^ _MIX, member)[0]
        keys = np.array([round_keys(seed, (first + number) & _MASK) for number in found.tolist()], np.uint64)
        return permute_each(places, which, np.full(len(found), size, np.int64), keys.reshape(len(found), -1))
