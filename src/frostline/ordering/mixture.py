"""Decides which sample of which data set stands at each position of a mixture, and where its epochs end."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.errors import SettingError
from frostline.ordering.interleaving import Interleaving
from frostline.ordering.order import check_inside
from frostline.ordering.permutation import check_epoch, check_number, permute_each, round_keys

__all__ = ("ENDS", "MixtureOrder")

ENDS = ("first", "all")
"""What ends an epoch of a mixture; see ``MixtureOrder.of``."""

_MAX = 1 << 62
_MASK = (1 << 64) - 1
_MIX = 0x4D4958  # "MIX": keeps the keys of members apart from those of epochs

_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOrder:
    """An ``EpochOrder`` over several data sets, whose rows are numbered one data set after the other.

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
            ratios: how often each one's turn comes, beside the others.
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
        raise SettingError(f"ends must be {', '.join(ENDS)} or a number of samples, not {ends!r}")

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
