"""Plans what a pass asks for, segment by segment: neither what a cache holds nor what is known to be unreadable."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from frostline.cache import CachedIn
from frostline.core import Samples, SampleTable
from frostline.core.events import Observer
from frostline.loaders.fetch import fetch_asked
from frostline.loaders.row_source import BlockPrefetch, RowSource
from frostline.ordering import EpochOrder, Resumed, Shard
from frostline.prefetch.driver import Prefetcher
from frostline.prefetch.owned_requests import PlanRequests
from frostline.prefetch.requests import PlannedRequest, RequestSource, plan_requests
from frostline.prefetch.window import RampLengths, RampUp, Window
from frostline.stores.readahead import BlockReads

__all__ = ("RequestPlanner", "Segment", "Segments", "prefetcher_of", "requests_for")

# Places of an epoch whose rows are worked out at a time, so that an epoch of a hundred million begins at once.
_SEGMENT = 1 << 15

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Some places of an epoch that follow each other.

    Attributes:
        start: the first place.
        rows: ``int64[n]``, the row of the table at each place.
        ids: ``int64[n]``, ids of the samples there.
        held: the place where the cache held their features when the segment was looked at.
    """

    start: int
    rows: _Ints
    ids: _Ints
    held: CachedIn

    @property
    def stop(self) -> int:
        """The place after the last one."""
        return self.start + len(self.rows)

    def part(self, start: int, stop: int) -> "Segment":
        """The places from ``start`` up to ``stop``, which lie in it."""
        if (start, stop) == (self.start, self.stop):
            return self
        some = slice(start - self.start, stop - self.start)
        held = CachedIn(rows=self.held.rows[some], is_on_disk=self.held.is_on_disk[some])
        return Segment(start=start, rows=self.rows[some], ids=self.ids[some], held=held)

    def runs(self, start: int, stop: int, max_read_rows: int) -> "Iterator[Segment]":
        """The places from ``start`` up to ``stop`` that lie in it; in runs of a maximum where the disk holds some."""
        whole = self.part(max(start, self.start), min(stop, self.stop))
        if not whole.held.is_on_disk.any():
            yield whole
            return
        for first in range(whole.start, whole.stop, max_read_rows):
            yield whole.part(first, min(first + max_read_rows, whole.stop))


class Segments:
    """The segments of a pass that were planned and not handed out yet: what its threads have in common.

    The window's threads add segments, those that decode look into them, and the one that fills drops them.

    Args:
        samples: the table that the order is one of.
    """

    def __init__(self, samples: SampleTable) -> None:
        self._samples = samples
        self._segments: deque[Segment] = deque()

    def add(self, segment: Segment) -> None:
        """Add the segment behind the last one. For the window's threads, one at a time."""
        self._segments.append(segment)

    def samples_at(self, places: _Ints) -> Samples:
        """The samples at some places of one segment. Safe for several threads."""
        segment = next(segment for segment in self._now() if segment.start <= places[0] < segment.stop)
        return self._samples.take(segment.rows[places - segment.start])

    def runs(self, start: int, stop: int, max_read_rows: int) -> Iterator[Segment]:
        """The places from ``start`` up to ``stop``, in runs that lie in one segment each. For the thread that fills."""
        for segment in [segment for segment in self._now() if segment.start < stop and start < segment.stop]:
            yield from segment.runs(start, stop, max_read_rows)

    def drop(self, stop: int) -> None:
        """Drop what was handed out: all places below ``stop``. For the thread that fills."""
        while self._segments[0].stop <= stop and len(self._segments) > 1:
            self._segments.popleft()

    def _now(self) -> tuple[Segment, ...]:
        # A tuple at once, because the window's threads add segments meanwhile.
        return tuple(self._segments)


class RequestPlanner:
    """Plans the requests of one pass over one order. For the window's threads, one at a time; ``close`` for any.

    Args:
        source: the place where the rows come from.
        samples: the table that the order is one of.
        order: order of the epoch.
        shard: the process's part of it.

    Attributes:
        segments: segments that were planned. They are made as requests are drawn.
        asked: all places below this that must be asked for were drawn.
        owned: requests that divide the samples by the nodes that own them; None where any node will do.
    """

    def __init__(self, source: RowSource, samples: SampleTable, order: EpochOrder, shard: Shard) -> None:
        self._source = source
        self._samples = samples
        self._order = order
        self._shard = shard
        self._reads: BlockReads | None = None
        self.segments = Segments(samples)
        self.owned = None if source.owned is None else source.owned()
        self.asked = 0

    def requests(self, *, begins: bool) -> Iterator[PlannedRequest]:
        """The requests of the pass, in its order.

        Args:
            begins: the window asks for nothing before it.
        """
        request_source = self._source.request_source
        if begins and self._source.begins_short:
            request_source = RampUp(request_source, RampLengths.of(self._source.settings))
        ahead = self._blocks_ahead()
        for start in range(0, len(self._shard), _SEGMENT):
            segment = self._segment(start, min(start + _SEGMENT, len(self._shard)))
            self.segments.add(segment)
            held = segment.held
            missing = np.flatnonzero((held.rows < 0) & ~held.is_on_disk)
            plan = plan_requests if self.owned is None else self.owned.plan
            for request in requests_for(self._source, self._samples, segment, missing, request_source, plan):
                self.asked = max(self.asked, int(request.positions[-1]) + 1)
                if ahead is not None:
                    ahead.upto(self.asked)
                yield request

    def close(self) -> None:
        """Let go of blocks that were read ahead."""
        if self._reads is not None:
            self._reads.close()

    def _segment(self, start: int, stop: int) -> Segment:
        rows = self._order.at(self._shard.positions(start, stop))
        ids, cache = self._samples.ids_at(rows), self._source.cache
        held = CachedIn.empty(len(ids)) if cache is None else cache.find(ids)
        return Segment(start=start, rows=rows, ids=ids, held=held)

    def _blocks_ahead(self) -> BlockPrefetch | None:
        blocks, order = self._source.blocks, self._order
        if blocks is None or not isinstance(order, Resumed) or (reads := blocks.open()) is None:
            return None
        self._reads = reads
        return BlockPrefetch(reads, blocks.order, self._samples, order, self._shard, self._is_wanted)

    def _is_wanted(self, ids: _Ints) -> npt.NDArray[np.bool_]:
        """Which samples will be asked for."""
        cache = self._source.cache
        wanted = ~np.isin(ids, self._source.unreadable())
        if cache is not None:
            held = cache.find(ids)
            wanted &= (held.rows < 0) & ~held.is_on_disk
        return wanted


def requests_for(
    source: RowSource,
    samples: SampleTable,
    segment: Segment,
    places: _Ints,
    request_source: RequestSource,
    plan: PlanRequests = plan_requests,
) -> Iterator[PlannedRequest]:
    """Requests for the readable samples at some places, counted from the segment's first one."""
    readable = places[~np.isin(segment.ids[places], source.unreadable())]
    return plan(samples, segment.rows[readable], segment.start + readable, request_source)


def prefetcher_of(source: RowSource, window: Window, on_event: Observer) -> Prefetcher:
    """What makes the requests of a window."""
    return Prefetcher(
        window,
        partial(fetch_asked, source.fetch, fetch_from=source.fetch_from),
        threads=source.settings.last_requests,
        clock=time.monotonic,
        on_event=on_event,
        tuner=source.tuner,
    )
