"""Puts the rows of a pass into its batches, in order: those that arrive, and those that a cache holds."""

import itertools
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline.cache import TieredCache
from frostline.core import FeatureBatch, SampleTable
from frostline.errors import DataError
from frostline.events import Observer
from frostline.loaders.epoch.batch_filler import FilledBatch
from frostline.loaders.epoch.batch_finisher import Finish
from frostline.loaders.epoch.local_stage import DeliveryDecoder
from frostline.loaders.epoch.numpy_batch import Arrays
from frostline.loaders.epoch.request_planner import RequestPlanner, Segment, Segments, prefetcher_of, requests_for
from frostline.loaders.epoch.retry import jitter
from frostline.loaders.epoch.row_source import RowSource
from frostline.ordering import EVEN, Shard
from frostline.prefetch.assemble import BatchAssembler, Column, Columns, Gathered, RowRange
from frostline.prefetch.driver import Prefetcher
from frostline.prefetch.requests import Delivery, PlannedRequest
from frostline.prefetch.window import Window

__all__ = ("BatchBuilder", "CachedRows")

# Rows are read from the disk so many at a time, in bytes and in rows, before they are copied into their batches.
_READ_BYTES = 16 << 20
_READ_ROWS = 1024
# Of the columns that are put into batches: ids, labels, places, rows of the table, tensors.
_PLACES = 2

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """Rows of a run that come from one source, by their places in the run."""

    places: _Ints
    tensors: tuple[Column, ...]
    is_kept: bool = False


class CachedRows:
    """The rows that a cache held when they were planned; those that are gone since are asked for now, and waited for.

    For the thread that fills; ``interrupt`` is for any.

    Args:
        source: where the rows come from.
        samples: the table that the order is one of.
        segments: segments that were planned.

    Attributes:
        max_read_rows: maximum number of rows that are read from the disk at a time.
    """

    def __init__(self, source: RowSource, samples: SampleTable, segments: Segments) -> None:
        self._source = source
        self._samples = samples
        self._segments = segments
        self._reading: Prefetcher | None = None
        self._is_interrupted = False
        row_bytes = 0 if source.cache is None else source.cache.row_bytes
        self.max_read_rows = max(1, min(_READ_ROWS, _READ_BYTES // max(1, row_bytes)))

    def interrupt(self) -> None:
        """Free a thread that waits for rows that were gone from the disk. Safe from any thread."""
        self._is_interrupted = True
        if self._reading is not None:
            self._reading.close()

    def pieces(self, run: Segment, tell: Observer) -> Iterator[_Piece]:
        """The rows of a run that were held.

        Args:
            run: some places of a segment.
            tell: told what happens while rows are asked for.
        """
        cache, held = self._source.cache, run.held
        if cache is None:
            return
        places = np.flatnonzero(held.rows >= 0)
        rows = held.rows if len(places) == len(held.rows) else held.rows[places]
        tables = tuple(Gathered(table=table, rows=rows) for table in cache.memory.tables)
        yield _Piece(places=places, tensors=tables, is_kept=True)
        if held.is_on_disk.any():
            yield from self._read(cache, run, np.flatnonzero(held.is_on_disk), tell)

    def keep(self, batch: FeatureBatch) -> None:
        """Keep rows that arrived for the epochs to come, where there is a cache with room for them."""
        if self._source.cache is not None and len(batch):
            self._source.cache.put(batch.ids, batch.tensors)

    def _read(self, cache: TieredCache, run: Segment, places: _Ints, tell: Observer) -> Iterator[_Piece]:
        found, tensors = cache.read(run.ids[places])
        yield _Piece(places=places[found], tensors=tensors, is_kept=True)
        missing = requests_for(self._source, self._samples, run, places[~found], self._source.dealer)
        for delivery in self._arriving(missing, tell):
            yield _Piece(places=delivery.positions - run.start, tensors=delivery.batch.tensors)
            self.keep(delivery.batch)

    def _arriving(self, requests: Iterator[PlannedRequest], tell: Observer) -> Iterator[Delivery]:
        """What is asked for and waited for now."""
        window = Window(requests, self._source.settings, jitter=jitter)
        if window.is_done:
            return
        decoder = DeliveryDecoder(self._source.decode, self._segments.samples_at, tell)
        with prefetcher_of(self._source, window, tell) as self._reading:
            if not self._is_interrupted:
                yield from map(decoder.decoded, self._reading)


class BatchBuilder:
    """Builds the batches of one pass. For the thread that fills: one at a time, whichever that is.

    Args:
        source: where the rows come from.
        samples: the table that the order is one of.
        shard: this process's part of the order.
        planner: planner of the requests, whose segments are dropped as they are handed out; closed at the end.
        cached: rows of the cache.
        assembler: assembler of the batches; empty.
        tell: told what happens.
    """

    def __init__(
        self,
        source: RowSource,
        samples: SampleTable,
        shard: Shard,
        planner: RequestPlanner,
        cached: CachedRows,
        assembler: BatchAssembler,
        tell: Observer,
    ) -> None:
        self._source = source
        self._samples = samples
        self._shard = shard
        self._planner = planner
        self._segments = planner.segments
        self._cached = cached
        self._assembler = assembler
        self._tell = tell
        self._step = 0
        self._given = 0
        self._passed = 0  # all below this place was put into a batch, or cannot be read

    def batches(self, deliveries: Iterator[Delivery | None]) -> Generator[FilledBatch | None]:
        """The batches as their rows arrive; None where the next one lacks rows.

        Each says how far the epoch is when it is handed out: the position of the first sample that is not in a batch
        yet, though later ones may be where there is slack.

        Args:
            deliveries: rows that were asked for, decoded and in order; None where nothing may be handed out now.
        """
        finisher = self._source.finisher
        with closing(self._planner), nullcontext() if finisher is None else finisher.started() as finish:
            for found in self._filled(deliveries):
                yield None if found is None else self._finished(found, finish)

    def _filled(self, deliveries: Iterator[Delivery | None]) -> Iterator[Columns | None]:
        done = 0  # what was cached at places below has been put into a batch
        for delivery in deliveries:
            if delivery is None:
                yield None
                continue
            for run in self._runs(*delivery.span(before=done)):
                yield from self._assembler.merge(*self._parts(run, _delivered(run, delivery)))
            yield from self._merged(done, delivery.reach, delivery)
            done = max(done, delivery.reach)
            self._passed = delivery.stop
            self._cached.keep(delivery.batch)
            self._segments.drop(delivery.stop)
        yield from self._merged(done, len(self._shard), None)
        self._passed = len(self._shard)
        yield from filter(None, [self._assembler.finish()])

    def _merged(self, start: int, stop: int, delivery: Delivery | None) -> Iterator[Columns]:
        """Add the places from ``start`` up to ``stop``; of several ranks, each ends its batch where its step ends."""
        while start < stop:
            edge = self._shard.row_of(self._step + 1) if self._shard.is_shared else stop
            end = min(edge, stop)
            for run in self._runs(start, end):
                held = self._cached.pieces(run, self._tell)
                yield from self._assembler.merge(*self._parts(run, _delivered(run, delivery), held))
            if end == edge and self._shard.is_shared:
                yield from filter(None, [self._assembler.finish(self._minimum())])
                self._step += 1
                self._require_batch()
            start = end

    def _minimum(self) -> int:
        """Rows that the step's batch has whatever can be read, where all ranks are promised as many."""
        shard = self._shard
        return shard.rows_in(shard.step_of(self._step)) if shard.last in EVEN else 0

    def _require_batch(self) -> None:
        if self._given < self._step:
            raise DataError(
                f"none of the samples that rank {self._shard.rank} takes in step {self._step - 1} can be read, and "
                "all ranks must take the step: mend the data, leave these samples out, or raise batch_size"
            )

    def _finished(self, found: Columns, finish: Finish | None) -> FilledBatch:
        ids, labels, column, rows, *tensors = found
        self._given += 1
        places = column.astype(np.int64, copy=False)
        nbytes = sum(part.nbytes for part in (ids, labels, *tensors))
        targets = tensors.pop().astype(np.int64) if self._source.has_targets else None
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
            position=self._position(places),
            kept=self._assembler.kept,
        )

    def _position(self, places: _Ints) -> int:
        if self._shard.is_shared:
            return self._shard.after(self._shard.step_of(self._given - 1) + 1)
        if self._source.settings.slack == 0:
            return self._shard.start + int(places[-1]) + 1
        waiting = self._assembler.pending(_PLACES)
        first = self._passed if waiting is None else min(self._passed, int(waiting.astype(np.int64).min()))
        return self._shard.start + first

    def _runs(self, start: int, stop: int) -> Iterator[Segment]:
        return self._segments.runs(start, stop, self._cached.max_read_rows)

    def _parts(self, run: Segment, *sources: Iterable[_Piece]) -> list[RowRange]:
        """The rows of a run, wherever they come from."""
        pieces = [piece for piece in itertools.chain(*sources) if len(piece.places)]
        if len(pieces) == 1:
            return [self._part(run, pieces[0], None)]
        present = np.sort(np.concatenate([piece.places for piece in pieces])) if pieces else run.rows[:0]
        return [self._part(run, piece, np.searchsorted(present, piece.places)) for piece in pieces]

    def _part(self, run: Segment, piece: _Piece, places: _Ints | None) -> RowRange:
        """A piece with the ids, labels, places and rows of the table of its rows."""
        ids, rows = run.ids, run.rows
        if len(piece.places) < len(ids):
            ids, rows = ids[piece.places], rows[piece.places]
        columns = (ids, self._samples.labels_at(rows), run.start + piece.places, rows, *piece.tensors)
        return RowRange(places=places, columns=columns, is_kept=piece.is_kept)


def _delivered(run: Segment, delivery: Delivery | None) -> Iterator[_Piece]:
    """The rows of a delivery that lie in a run."""
    if delivery is None:
        return
    first, stop = np.searchsorted(delivery.positions, (run.start, run.stop))
    tensors = tuple(tensor[first:stop] for tensor in delivery.batch.tensors)
    yield _Piece(places=delivery.positions[first:stop] - run.start, tensors=tensors)
