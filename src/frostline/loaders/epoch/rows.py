"""The rows of one epoch for one process: prefetched rows and cached rows, merged in order into batches."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from frostline.cache import CachedIn, TieredCache
from frostline.core import FeatureBatch, SampleTable
from frostline.core.features import array_dtype
from frostline.errors import DataError
from frostline.events import Observer, SampleSkipped
from frostline.loaders.epoch.batch_filler import Arrivals, FilledBatch
from frostline.loaders.epoch.batch_finisher import Finish
from frostline.loaders.epoch.block_reads import BlockPrefetch
from frostline.loaders.epoch.fetch import fetch_each
from frostline.loaders.epoch.local_stage import DecodePool
from frostline.loaders.epoch.numpy_batch import Arrays
from frostline.loaders.epoch.retry import jitter
from frostline.loaders.epoch.row_source import RowSource
from frostline.ordering import EVEN, EpochOrder, Resumed, Shard
from frostline.prefetch.assemble import BatchAssembler, Column, Columns, Gathered, RowRange
from frostline.prefetch.driver import Prefetcher
from frostline.prefetch.owned_requests import PlanRequests
from frostline.prefetch.requests import Ask, Dealer, Delivery, PlannedRequest, RampLengths, RampUp, plan_requests
from frostline.prefetch.window import Window
from frostline.processors import usable_cores
from frostline.stores.reads.block_reads import BlockReads

__all__ = ("EpochStream", "NextPass")

# Rows are read from the disk so many at a time, in bytes and in rows, before they are copied into their batches.
_READ_BYTES = 16 << 20
_READ_ROWS = 1024
# Of pixels that a thread decodes at a time: as few as take far longer to decode than to hand on.
_PIECE_BYTES = 2 << 20
# Places of an epoch whose rows are worked out at a time, so that an epoch of a hundred million begins at once.
_SEGMENT = 1 << 15
# Of the columns that are put into batches: ids, labels, places, rows of the table, tensors.
_PLACES = 2

_Ints = npt.NDArray[np.int64]

NextPass = Callable[[], tuple["EpochStream", AbstractContextManager[Arrivals]]]
"""Gives the rows of a pass, and what arrives of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Segment:
    """Some places of an epoch that follow each other.

    Attributes:
        start: the first place.
        rows: ``int64[n]``, the row of the table at each place.
        ids: ``int64[n]``, of the samples there.
        held: where the cache held their features when the segment was looked at.
    """

    start: int
    rows: _Ints
    ids: _Ints
    held: CachedIn

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    def part(self, start: int, stop: int) -> "_Segment":
        if (start, stop) == (self.start, self.stop):
            return self
        some = slice(start - self.start, stop - self.start)
        held = CachedIn(rows=self.held.rows[some], is_on_disk=self.held.is_on_disk[some])
        return _Segment(start=start, rows=self.rows[some], ids=self.ids[some], held=held)

    def runs(self, start: int, stop: int, read_rows: int) -> "Iterator[_Segment]":
        """The places from ``start`` up to ``stop`` that lie in it; at most so many at a time where some are read."""
        whole = self.part(max(start, self.start), min(stop, self.stop))
        if not whole.held.is_on_disk.any():
            yield whole
            return
        for first in range(whole.start, whole.stop, read_rows):
            yield whole.part(first, min(first + read_rows, whole.stop))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """Rows of a run that come from one source, by their places in the run."""

    places: _Ints
    tensors: tuple[Column, ...]
    is_kept: bool = False


class EpochStream:
    """One pass over one order. Segments are made as the window asks for them, and dropped when they were handed out.

    Args:
        source: where the rows come from.
        samples: the table that the order is one of.
        order: order of the epoch.
        shard: this process's part of it.

    Attributes:
        source: as given.
        asked: all places below this that must be asked for have been drawn from ``plan_requests``.
    """

    def __init__(self, source: RowSource, samples: SampleTable, order: EpochOrder, shard: Shard) -> None:
        self.source = source
        self._samples = samples
        self._order = order
        self._shard = shard
        self.asked = 0
        self._groups = None if source.owned is None else source.owned()
        self._step = 0
        self._given = 0
        self._passed = 0  # all below this place was put into a batch, or cannot be read
        self._segments: deque[_Segment] = deque()
        self._reads: BlockReads | None = None
        self._tell: Observer = source.observe
        self._reading: Prefetcher | None = None
        self._is_interrupted = False
        row_bytes = 0 if source.cache is None else source.cache.row_bytes
        self._read_rows = max(1, min(_READ_ROWS, _READ_BYTES // max(1, row_bytes)))

    def __len__(self) -> int:
        return len(self._shard)

    def batches(self, assembler: BatchAssembler, arrivals: Arrivals) -> Generator[FilledBatch | None]:
        """The batches as their rows arrive; None where the next one lacks rows. For any thread, one at a time.

        Each says how far the epoch is when it is handed out: the position of the first sample that is not in a batch
        yet, though later ones may be where there is slack.

        Args:
            assembler: assembler of the batches; empty.
            arrivals: arrivals of what ``plan_requests`` asked for, in order: ``arrivals``, or from a window
                that asks for more.
        """
        self._tell = arrivals.happened.put
        try:
            with nullcontext() if self.source.finisher is None else self.source.finisher.started() as finish:
                for found in self._filled(assembler, arrivals.deliveries):
                    yield None if found is None else self._finished(found, assembler, finish)
        finally:
            if self._reads is not None:
                self._reads.close()

    def _finished(self, found: Columns, assembler: BatchAssembler, finish: Finish | None) -> FilledBatch:
        ids, labels, column, rows, *tensors = found
        self._given += 1
        places = column.astype(np.int64, copy=False)
        nbytes = sum(part.nbytes for part in (ids, labels, *tensors))
        targets = tensors.pop().astype(np.int64) if self.source.has_targets else None
        arrays = Arrays(
            features=tensors[0] if len(tensors) == 1 else tuple(tensors),
            labels=labels.astype(np.int64, copy=False),
            ids=ids.astype(np.int64, copy=False),
            targets=targets,
        )
        return FilledBatch(
            arrays=arrays if finish is None else finish(arrays, rows.astype(np.int64, copy=False)),
            nbytes=nbytes,
            places=places,
            position=self._position(places, assembler),
            kept=assembler.kept,
        )

    def interrupt(self) -> None:
        """Free a thread that waits in ``batches`` for rows that were gone from the disk. Safe from any thread."""
        self._is_interrupted = True
        if self._reading is not None:
            self._reading.close()

    def waits_for(self, before: "EpochStream") -> bool:
        """Its features are found where those of the epoch before are kept, if it is asked for after that."""
        cache = self.source.cache
        return cache is not None and cache is before.source.cache and cache.has_room

    def fetch(self, ask: Ask) -> Iterator[FeatureBatch]:
        """Make a request for some of its rows."""
        fetch = self.source.fetch if self.source.fetch_from is None else self.source.fetch_from(ask.nodes)
        return fetch_each(fetch, ask.samples, ask.route)

    @contextmanager
    def decoding(self, arrivals: Arrivals) -> Iterator[Arrivals]:
        """The same decoded, as ``batches`` takes them."""
        arrivals = arrivals.grouped(self._groups)
        if self.source.decode is None:
            yield arrivals
            return
        row_bytes = sum(math.prod(tensor.shape) * array_dtype(tensor.dtype).itemsize for tensor in self.source.tensors)
        rows = max(1, _PIECE_BYTES // max(1, row_bytes))
        with DecodePool(self._decoded, threads=len(usable_cores()), rows=rows) as decoding:
            yield replace(arrivals, deliveries=decoding.deliveries(arrivals.deliveries), decoding=decoding)

    def _decoded(self, delivery: Delivery) -> Delivery:
        """The same rows without any that are encoded; those that cannot be decoded are told. Safe for several threads.

        Args:
            delivery: delivery of the segments that were not handed out yet.
        """
        decode, places = self.source.decode, delivery.positions
        if decode is None or not delivery.batch.encoded:
            return delivery
        segment = next(segment for segment in tuple(self._segments) if segment.start <= places[0] < segment.stop)
        samples = self._samples.take(segment.rows[places - segment.start])
        batch = decode(replace(delivery.batch, skipped=()), samples)
        for skipped in batch.skipped:
            told = SampleSkipped(id=skipped.id, object=skipped.object, reason=skipped.reason, changed=skipped.changed)
            self._tell(told)
        there = ~np.isin(samples.ids, [skipped.id for skipped in batch.skipped])
        return replace(delivery, positions=places[there], batch=batch)

    @contextmanager
    def arrivals(self) -> Iterator[Arrivals]:
        """What the epoch must ask for, asked for by a window of its own."""
        window = Window(self.plan_requests(), self.source.settings, jitter=jitter)
        if window.is_done:
            yield Arrivals()
            return
        with self._prefetcher(window) as prefetcher:
            yield Arrivals.of(prefetcher, prefetcher.taken())

    def plan_requests(self, *, begins: bool = True) -> Iterator[PlannedRequest]:
        """What the epoch must ask for: neither what is cached nor what is known to be unreadable.

        Args:
            begins: the window asks for nothing before it.
        """
        dealer = self.source.dealer
        if begins and self.source.begins_short:
            dealer = RampUp(dealer, RampLengths.of(self.source.settings))
        ahead = self._blocks_ahead()
        for start in range(0, len(self._shard), _SEGMENT):
            stop = min(start + _SEGMENT, len(self._shard))
            rows = self._order.at(self._shard.positions(start, stop))
            ids = self._samples.ids_at(rows)
            cache = self.source.cache
            held = CachedIn.nowhere(len(ids)) if cache is None else cache.find(ids)
            segment = _Segment(start=start, rows=rows, ids=ids, held=held)
            self._segments.append(segment)
            plan = plan_requests if self._groups is None else self._groups.plan
            for request in self._asked(segment, np.flatnonzero((held.rows < 0) & ~held.is_on_disk), dealer, plan):
                self.asked = max(self.asked, int(request.positions[-1]) + 1)
                if ahead is not None:
                    ahead.upto(self.asked)
                yield request

    def _blocks_ahead(self) -> BlockPrefetch | None:
        blocks, order = self.source.blocks, self._order
        if blocks is None or not isinstance(order, Resumed) or (reads := blocks.open()) is None:
            return None
        self._reads = reads
        return BlockPrefetch(reads, blocks.order, self._samples, order, self._shard, self._is_wanted)

    def _is_wanted(self, ids: _Ints) -> npt.NDArray[np.bool_]:
        """Which samples will be asked for."""
        cache = self.source.cache
        wanted = ~np.isin(ids, self.source.unreadable())
        if cache is not None:
            held = cache.find(ids)
            wanted &= (held.rows < 0) & ~held.is_on_disk
        return wanted

    def _position(self, places: _Ints, assembler: BatchAssembler) -> int:
        if self._shard.is_shared:
            return self._shard.after(self._shard.step_of(self._given - 1) + 1)
        if self.source.settings.slack == 0:
            return self._shard.start + int(places[-1]) + 1
        waiting = assembler.pending(_PLACES)
        first = self._passed if waiting is None else min(self._passed, int(waiting.astype(np.int64).min()))
        return self._shard.start + first

    def _filled(self, assembler: BatchAssembler, arrivals: Iterator[Delivery | None]) -> Iterator[Columns | None]:
        done = 0  # what was cached at places below has been put into a batch
        for delivery in arrivals:
            if delivery is None:
                yield None
                continue
            for run in self._runs(*delivery.span(before=done)):
                yield from assembler.merge(*self._parts(run, _delivered(run, delivery)))
            yield from self._merged(assembler, done, delivery.reach, delivery)
            done = max(done, delivery.reach)
            self._passed = delivery.stop
            self._keep(delivery.batch)
            while self._segments[0].stop <= delivery.stop and len(self._segments) > 1:
                self._segments.popleft()
        yield from self._merged(assembler, done, len(self), None)
        self._passed = len(self)
        yield from filter(None, [assembler.finish()])

    def _merged(self, assembler: BatchAssembler, start: int, stop: int, delivery: Delivery | None) -> Iterator[Columns]:
        """Add the places from ``start`` up to ``stop``; of several ranks, each ends its batch where its step ends."""
        while start < stop:
            edge = self._shard.row_of(self._step + 1) if self._shard.is_shared else stop
            end = min(edge, stop)
            for run in self._runs(start, end):
                yield from assembler.merge(*self._parts(run, _delivered(run, delivery), self._cached(run)))
            if end == edge and self._shard.is_shared:
                yield from filter(None, [assembler.finish(self._minimum())])
                self._step += 1
                self._require_batch()
            start = end

    def _minimum(self) -> int:
        """Rows that the step's batch has whatever can be read, where all ranks are promised as many."""
        return self._shard.rows_in(self._shard.step_of(self._step)) if self._shard.last in EVEN else 0

    def _require_batch(self) -> None:
        if self._given < self._step:
            raise DataError(
                f"none of the samples that rank {self._shard.rank} takes in step {self._step - 1} can be read, and "
                "all ranks must take the step: mend the data, leave these samples out, or raise batch_size"
            )

    def _asked(self, segment: _Segment, places: _Ints, dealer: Dealer, plan: PlanRequests) -> Iterator[PlannedRequest]:
        readable = places[~np.isin(segment.ids[places], self.source.unreadable())]
        return plan(self._samples, segment.rows[readable], segment.start + readable, dealer)

    def _prefetcher(self, window: Window, observe: Observer | None = None) -> Prefetcher:
        source = self.source
        return Prefetcher(
            window,
            self.fetch,
            threads=source.settings.last_requests,
            clock=time.monotonic,
            observe=source.observe if observe is None else observe,
            tuner=source.tuner,
        )

    def _deliveries(self, asked: Iterator[PlannedRequest]) -> Iterator[Delivery]:
        """What is asked for and waited for now."""
        window = Window(asked, self.source.settings, jitter=jitter)
        if window.is_done:
            return
        with self._prefetcher(window, self._tell) as self._reading:
            if not self._is_interrupted:
                yield from map(self._decoded, self._reading)

    def _runs(self, start: int, stop: int) -> Iterator[_Segment]:
        """The places from ``start`` up to ``stop``, in runs that lie in one segment each."""
        # A tuple at once, because the window's threads add segments meanwhile.
        for item in [segment for segment in tuple(self._segments) if segment.start < stop and start < segment.stop]:
            yield from item.runs(start, stop, self._read_rows)

    def _parts(self, run: _Segment, *sources: Iterable[_Piece]) -> list[RowRange]:
        """The rows of a run, wherever they come from."""
        pieces = [piece for piece in itertools.chain(*sources) if len(piece.places)]
        if len(pieces) == 1:
            return [self._part(run, pieces[0], None)]
        present = np.sort(np.concatenate([piece.places for piece in pieces])) if pieces else run.rows[:0]
        return [self._part(run, piece, np.searchsorted(present, piece.places)) for piece in pieces]

    def _cached(self, run: _Segment) -> Iterator[_Piece]:
        cache, held = self.source.cache, run.held
        if cache is None:
            return
        places = np.flatnonzero(held.rows >= 0)
        rows = held.rows if len(places) == len(held.rows) else held.rows[places]
        tables = tuple(Gathered(table=table, rows=rows) for table in cache.memory.tables)
        yield _Piece(places=places, tensors=tables, is_kept=True)
        if held.is_on_disk.any():
            yield from self._read(cache, run, np.flatnonzero(held.is_on_disk))

    def _read(self, cache: TieredCache, run: _Segment, places: _Ints) -> Iterator[_Piece]:
        """Rows that the disk held when it was looked at; what is gone since is asked for now."""
        found, tensors = cache.read(run.ids[places])
        yield _Piece(places=places[found], tensors=tensors, is_kept=True)
        for delivery in self._deliveries(self._asked(run, places[~found], self.source.dealer, plan_requests)):
            yield _Piece(places=delivery.positions - run.start, tensors=delivery.batch.tensors)
            self._keep(delivery.batch)

    def _part(self, run: _Segment, piece: _Piece, places: _Ints | None) -> RowRange:
        """A piece with the ids, labels, places and rows of the table of its rows."""
        ids, rows = run.ids, run.rows
        if len(piece.places) < len(ids):
            ids, rows = ids[piece.places], rows[piece.places]
        columns = (ids, self._samples.labels_at(rows), run.start + piece.places, rows, *piece.tensors)
        return RowRange(places=places, columns=columns, is_kept=piece.is_kept)

    def _keep(self, batch: FeatureBatch) -> None:
        if self.source.cache is not None and len(batch):
            self.source.cache.put(batch.ids, batch.tensors)


def _delivered(run: _Segment, delivery: Delivery | None) -> Iterator[_Piece]:
    """The rows of a delivery that lie in a run."""
    if delivery is None:
        return
    first, stop = np.searchsorted(delivery.positions, (run.start, run.stop))
    tensors = tuple(tensor[first:stop] for tensor in delivery.batch.tensors)
    yield _Piece(places=delivery.positions[first:stop] - run.start, tensors=tensors)
