"""Tells a node which samples of an epoch are read together: a group of blocks before they are asked for."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from frostline.config import LoaderSettings
from frostline.core import SampleTable
from frostline.datasets import Dataset
from frostline.errors import SettingError
from frostline.ordering import BlockOrder, Resumed, Shard
from frostline.stores.base.protocols import Place
from frostline.stores.reads.block_reads import BlockReads
from frostline.transport.protocol import ReadsBlocks, Transport

__all__ = ("BlockPrefetch", "BlockSource", "blocks_of")

# Places for which what nobody took is kept: a window may ask so far ahead of what it hands out.
_LATE = 1 << 12

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockSource:
    """What reads an epoch's samples in blocks.

    Attributes:
        open: makes the reads of a pass; None where neighbours are no faster together.
        order: order of an epoch; of any, since all have the same groups.
    """

    open: Callable[[], BlockReads | None]
    order: BlockOrder


def blocks_of(
    transport: Transport, data: Dataset, order: BlockOrder, settings: LoaderSettings, sharing: int
) -> BlockSource | None:
    """What reads a data set's samples in blocks; None where the node asks for each, or none is near another.

    Args:
        transport: to the node; one in this process can be told.
        data: data set whose samples are read.
        order: order of these.
        settings: settings of the window, half of whose bytes are for samples that were read so.
        sharing: how many processes share the epoch.

    Raises:
        SettingError: what is mixed does not fit.
    """
    if not isinstance(transport, ReadsBlocks):
        return None
    max_bytes = settings.window_bytes // 2
    found = BlockSource(open=partial(transport.blocks, data.url, data.manifest.reading, max_bytes), order=order)
    if found.open() is None:
        return None
    samples, blocks = data.samples, order.blocks
    mixed_bytes = samples.encoded_bytes * min(blocks.group, len(samples)) // max(1, len(samples) * sharing)
    if mixed_bytes > max_bytes:
        raise SettingError(
            f"{blocks.mixed} blocks of {blocks.samples} samples are {mixed_bytes / 1e6:.0f} MB, and half of "
            f"window_bytes is for them, which is {max_bytes / 1e6:.0f} MB: mix fewer, or raise window_bytes"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Places of an epoch whose samples were told together.

    Attributes:
        start: the first place.
        stop: the place after the last one.
        requests: told by then, these included.
    """

    start: int
    stop: int
    requests: int


class BlockPrefetch:
    """Walks through an epoch as many samples ahead of what is asked for as a group has. Not for several threads.

    So while a group is asked for, the blocks of the next one are read at the same pace: as many bytes are held all the
    time, and the link is never left alone.

    Args:
        reads: is told.
        blocks: blocks of the order.
        samples: the table that the order is one of.
        order: order of the epoch.
        shard: this process's part of it.
        is_wanted: which samples will be asked for, by their ids.
    """

    def __init__(
        self,
        reads: BlockReads,
        blocks: BlockOrder,
        samples: SampleTable,
        order: Resumed,
        shard: Shard,
        is_wanted: Callable[[_Ints], npt.NDArray[np.bool_]],
    ) -> None:
        self._reads = reads
        self._blocks = blocks
        self._samples = samples
        self._order = order
        self._shard = shard
        self._is_wanted = is_wanted
        self._told: deque[_Group] = deque()
        self._ahead = max(1, blocks.blocks.group // (shard.world_size * shard.workers))
        self._forgotten = 0
        self._stop = 0

    def upto(self, place: int) -> None:
        """All places before this one are asked for now."""
        stop = place + self._ahead
        while self._stop < len(self._shard) and self._stop < stop:
            self._tell()
        before = self._forgotten
        for group in self._told:
            if group.start < stop:
                share = min(1.0, (stop - group.start) / (group.stop - group.start))
                self._reads.begin(before + math.ceil(share * (group.requests - before)))
            before = group.requests
        while self._told and self._told[0].stop < place - _LATE:
            self._forgotten = self._told.popleft().requests
            self._reads.forget(self._forgotten)

    def _tell(self) -> None:
        """The samples of the next group that are this process's, and that it will ask for."""
        start = self._stop
        positions = self._shard.positions(start, min(start + self._blocks.blocks.group, len(self._shard)))
        groups = self._blocks.groups_at(self._order.original(positions))
        others = np.flatnonzero(groups != groups[0])
        rows = self._order.at(positions[: others[0]] if len(others) else positions)
        self._stop += len(rows)
        chosen = self._samples.take(rows[self._is_wanted(self._samples.ids_at(rows))])
        places = list(map(Place, chosen.objects, chosen.offsets.tolist(), chosen.lengths.tolist()))
        self._reads.expect(places, chosen.versions)
        self._told.append(_Group(start=start, stop=self._stop, requests=self._reads.told))
