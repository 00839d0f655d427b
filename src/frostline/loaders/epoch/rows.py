"""One pass over the rows of an epoch, in one process: planned, asked for, decoded and built into batches."""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from frostline.core import FeatureBatch, SampleTable
from frostline.core.features import array_dtype
from frostline.loaders.epoch.batch_builder import BatchBuilder, CachedRows
from frostline.loaders.epoch.batch_filler import Arrivals, FilledBatch
from frostline.loaders.epoch.fetch import fetch_asked
from frostline.loaders.epoch.local_stage import DecodePool, DeliveryDecoder
from frostline.loaders.epoch.request_planner import RequestPlanner, prefetcher_of
from frostline.loaders.epoch.retry import jitter
from frostline.loaders.epoch.row_source import RowSource
from frostline.ordering import EpochOrder, Shard
from frostline.prefetch.assemble import BatchAssembler
from frostline.prefetch.requests import Ask, PlannedRequest
from frostline.prefetch.window import Window
from frostline.processors import usable_cores

__all__ = ("EpochStream", "NextPass")

# Of pixels that a thread decodes at a time: as few as take far longer to decode than to hand on.
_PIECE_BYTES = 2 << 20

NextPass = Callable[[], tuple["EpochStream", AbstractContextManager[Arrivals]]]
"""Gives the rows of a pass, and what arrives of them."""


class EpochStream:
    """One pass over one order: its planner, its decoder and its builder, each for threads of one kind.

    The window's threads draw requests from the planner, one at a time; the threads of a pool decode what arrives; and
    one thread at a time builds batches.

    Args:
        source: where the rows come from.
        samples: the table that the order is one of.
        order: order of the epoch.
        shard: this process's part of it.

    Attributes:
        source: as given.
    """

    def __init__(self, source: RowSource, samples: SampleTable, order: EpochOrder, shard: Shard) -> None:
        self.source = source
        self._samples = samples
        self._shard = shard
        self._planner = RequestPlanner(source, samples, order, shard)
        self._cached = CachedRows(source, samples, self._planner.segments)

    def __len__(self) -> int:
        return len(self._shard)

    @property
    def asked(self) -> int:
        """All places below this that must be asked for were drawn from ``plan_requests``."""
        return self._planner.asked

    @property
    def nodes(self) -> int:
        """Nodes among which its requests choose by owner; 1 where any node will do."""
        return 1 if self._planner.owned is None else self._planner.owned.nodes

    def plan_requests(self, *, begins: bool = True) -> Iterator[PlannedRequest]:
        """What the epoch must ask for; see ``RequestPlanner``."""
        return self._planner.requests(begins=begins)

    def waits_for(self, before: "EpochStream") -> bool:
        """Its features are found where those of the epoch before are kept, if it is asked for after that."""
        cache = self.source.cache
        return cache is not None and cache is before.source.cache and cache.has_room

    def fetch(self, ask: Ask) -> Iterator[FeatureBatch]:
        """Make a request for some of its rows."""
        return fetch_asked(self.source.fetch, ask, self.source.fetch_from)

    @contextmanager
    def arrivals(self) -> Iterator[Arrivals]:
        """What the epoch must ask for, asked for by a window of its own."""
        window = Window(self.plan_requests(), self.source.settings, jitter=jitter, nodes=self.nodes)
        if window.is_done:
            yield Arrivals()
            return
        with prefetcher_of(self.source, window, self.source.observe) as prefetcher:
            yield Arrivals.of(prefetcher, prefetcher.taken())

    @contextmanager
    def decoding(self, arrivals: Arrivals) -> Iterator[Arrivals]:
        """The same decoded, as ``batches`` takes them."""
        arrivals = arrivals.in_order(self._planner.owned)
        if self.source.decode is None:
            yield arrivals
            return
        row_bytes = sum(math.prod(tensor.shape) * array_dtype(tensor.dtype).itemsize for tensor in self.source.tensors)
        rows = max(1, _PIECE_BYTES // max(1, row_bytes))
        decoder = DeliveryDecoder(self.source.decode, self._planner.segments.samples_at, arrivals.happened.put)
        with DecodePool(decoder.decoded, threads=len(usable_cores()), rows=rows) as decoding:
            yield replace(arrivals, deliveries=decoding.deliveries(arrivals.deliveries), decoding=decoding)

    def batches(self, assembler: BatchAssembler, arrivals: Arrivals) -> Generator[FilledBatch | None]:
        """The batches as their rows arrive; see ``BatchBuilder``. For any thread, one at a time.

        Args:
            assembler: assembler of the batches; empty.
            arrivals: arrivals of what ``plan_requests`` asked for, in order: ``arrivals``, or from a window
                that asks for more.
        """
        tell = arrivals.happened.put
        builder = BatchBuilder(self.source, self._samples, self._shard, self._planner, self._cached, assembler, tell)
        return builder.batches(arrivals.deliveries)

    def interrupt(self) -> None:
        """Free a thread that waits in ``batches`` for rows that were gone from the disk. Safe from any thread."""
        self._cached.interrupt()
