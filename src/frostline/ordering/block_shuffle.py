"""Decides an order in which neighbours are read together and come apart: blocks of them, mixed some at a time."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.errors import SettingError
from frostline.ordering.order import check_inside
from frostline.ordering.permutation import check_epoch, check_number, permute_at, permute_each, round_keys

__all__ = ("BlockOrder", "BlockShuffle")

_BLOCKS = 0x424C4F434B53  # "BLOCKS": keeps the keys within groups apart from those of epochs
_MAX_MIXED = 1 << 30
# Of the epoch's first group: what a link of 200 Mbit/s brings in a third of a second, of photographs of 60 kB.
_FIRST_MIXED = 8

_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShuffle:
    """A shuffle of neighbours that are read together; see ``BlockOrder``.

    Attributes:
        samples: neighbours in a block, which are read by one request. Take 1 to 2 MB of them: larger ones need more
            memory to be mixed as well, smaller ones more requests.
        mixed: blocks that are mixed with each other; ``samples * mixed`` of them are held in memory, as they are
            encoded. The more, the nearer it is to the full shuffle (``benchmarks/shuffles.py``).

    Raises:
        SettingError: a figure that makes no sense.
    """

    samples: int = 16
    mixed: int = 64

    def __post_init__(self) -> None:
        if self.samples < 1 or self.mixed < 1:
            raise SettingError(
                f"BlockShuffle takes 1 or more samples and mixed blocks, not {self.samples} and {self.mixed}"
            )
        check_number("samples times mixed of BlockShuffle", self.group, _MAX_MIXED)

    @property
    def group(self) -> int:
        """Samples that are mixed with each other."""
        return self.samples * self.mixed

    @property
    def edges(self) -> _Rows:
        """Where the epoch's first groups begin, which mix fewer blocks, and where those begin that mix all."""
        counts: list[int] = []
        while (count := _FIRST_MIXED << len(counts)) < self.mixed:
            counts.append(count)
        return np.cumsum([0, *counts], dtype=np.int64) * self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """An ``EpochOrder`` that draws blocks of neighbours, and then the samples of some blocks at a time.

    The listing is a ring, cut into blocks at another place each epoch, so that a sample has other neighbours. What
    fills no block comes last. Blocks are drawn by the permutation of ``Order``; ``mixed`` of them that follow each
    other are a group, whose samples are drawn by a permutation of the group's own. So each sample stands at one
    position, computed from it alone. An epoch's first groups have 8 blocks, 16, and so on, so that its first batch need
    not wait for a whole group. The order is part of the format: it never changes between versions.

    Attributes:
        size: samples in the epoch, 0 to 2^62.
        seed: 0 to 2^63 - 1.
        epoch: 0 to 2^63 - 1.
        blocks: how many neighbours stay together, and how many blocks are mixed.
    """

    size: int
    seed: int
    epoch: int
    blocks: BlockShuffle

    def __post_init__(self) -> None:
        check_epoch(self.size, self.seed, self.epoch)

    def __len__(self) -> int:
        return self.size

    @property
    def name(self) -> str:
        """See ``EpochOrder.name``."""
        return f"blocks of {self.blocks.samples}, {self.blocks.mixed} mixed"

    def in_epoch(self, epoch: int) -> Self:
        """See ``EpochOrder.in_epoch``."""
        return replace(self, epoch=epoch)

    def at(self, positions: _Rows) -> _Rows:
        """See ``EpochOrder.at``."""
        check_inside(positions, self.size)
        if not len(positions):
            return positions.astype(np.int64)
        samples = self.blocks.samples
        places, inside = np.divmod(self._mixed(positions.astype(np.int64)), samples)
        whole, cut = self.size // samples, round_keys(self.seed ^ _BLOCKS, self.epoch)[0] % self.size
        is_whole = places < whole
        places[is_whole] = permute_at(places[is_whole], whole, round_keys(self.seed, self.epoch))
        rows: _Rows = (places * samples + inside + cut) % self.size
        return rows

    def groups_at(self, positions: _Rows) -> _Rows:
        """``int64[n]``, the number of the group in which each position lies."""
        edges = self.blocks.edges
        late = len(edges) - 1 + (positions - edges[-1]) // self.blocks.group
        groups: _Rows = np.where(positions < edges[-1], np.searchsorted(edges, positions, side="right") - 1, late)
        return groups

    def _mixed(self, positions: _Rows) -> _Rows:
        """Where the positions go within their groups."""
        groups, which = np.unique(self.groups_at(positions), return_inverse=True)
        starts, stops = self._starts(groups), np.minimum(self._starts(groups + 1), self.size)
        seed = round_keys(self.seed ^ _BLOCKS, self.epoch)[1]
        keys = np.array([round_keys(seed, group) for group in groups.tolist()], np.uint64)
        sizes, mixed = stops - starts, starts[which]
        for size in np.unique(sizes).tolist():
            some = sizes[which] == size
            mixed[some] += permute_each((positions - starts[which])[some], which[some], np.full(len(sizes), size), keys)
        return mixed

    def _starts(self, groups: _Rows) -> _Rows:
        edges, last = self.blocks.edges, len(self.blocks.edges) - 1
        starts: _Rows = edges[np.minimum(groups, last)] + np.maximum(groups - last, 0) * self.blocks.group
        return starts
