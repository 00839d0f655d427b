"""One epoch for a training loop: prefetched rows and cached rows, merged in order into batches."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from frostline.cache import Held, TieredCache
from frostline.config import LoaderSettings
from frostline.core import FeatureBatch, SampleTable, View
from frostline.errors import SettingError
from frostline.events import BatchTaken, EpochFinished, EpochStarted, Observer
from frostline.loaders.augment import Augment
from frostline.loaders.batch import Batch
from frostline.ordering import Order
from frostline.prefetch.assemble import BatchAssembler, Column, Columns, Gathered, Part
from frostline.prefetch.driver import Fetch, Prefetcher
from frostline.prefetch.stretches import Dealer, Delivery, Stretch, stretches
from frostline.prefetch.tuner import Tuner
from frostline.prefetch.window import Window

__all__ = ("Listed", "Loader", "Source")

# Rows are read from the disk so many at a time, in bytes and in rows, before they are copied into their batches.
_READ_BYTES = 16 << 20
_READ_ROWS = 1024
# Places of an epoch whose rows are worked out at a time, so that an epoch of a hundred million begins at once.
_SEGMENT = 1 << 15

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """Where a loader's rows come from; made by a job.

    Attributes:
        fetch: makes one request and yields rows at the frost line.
        dealer: says which way the next request takes.
        cache: keeps features between epochs; None where they differ from epoch to epoch.
        unreadable: ids that are known to be unreadable; they are not asked for again.
        settings: of the window.
        observe: told what happens.
        has_targets: the last tensor of every row is its sample's mask.
        tuner: of the windows' bounds; None leaves them as they are set.
    """

    fetch: Fetch
    dealer: Dealer
    cache: TieredCache | None
    unreadable: Callable[[], npt.NDArray[np.int64]]
    settings: LoaderSettings
    observe: Observer
    has_targets: bool = False
    tuner: Tuner | None = None


class Listed(Protocol):
    """What a loader needs of a data set."""

    @property
    def samples(self) -> SampleTable:
        """Its samples, in the manifest's order."""


class Loader:
    """The batches of one epoch, in the seeded order. Iterate it once or again: each pass is the same epoch.

    Leaving a pass early cancels what it had asked for. It is for one thread at a time.

    Args:
        source: where the rows come from.
        data: the samples.
        batch_size: rows of every batch but perhaps the last.
        shuffle: whether the order is drawn from the seed; else it is the manifest's.
        seed: of the order, and of random preprocessing.
        epoch: the same for all ranks; each epoch has its own order.
        drop_last: leave out a last batch with fewer rows.
        augment: changes each batch, by seed and epoch; None leaves it as it is.

    Raises:
        SettingError: a figure that makes no sense.
    """

    def __init__(
        self,
        source: Source,
        data: Listed,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        epoch: int,
        drop_last: bool,
        augment: Augment | None = None,
    ) -> None:
        if batch_size < 1:
            raise SettingError(f"batch_size must be at least 1, not {batch_size}")
        self._source = source
        self._samples = data.samples
        self._order = Order(size=len(self._samples), seed=seed, epoch=epoch, shuffle=shuffle)
        self._epoch = epoch
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._augment = augment
        self._view = View(seed=seed, epoch=epoch)

    def __len__(self) -> int:
        """Batches in the epoch, if no further sample turns out to be unreadable."""
        lost = self._source.unreadable()
        readable = len(self._samples) - (int(np.isin(self._samples.ids, lost).sum()) if len(lost) else 0)
        return readable // self._batch_size if self._drop_last else -(-readable // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        observe = self._source.observe
        observe(EpochStarted(epoch=self._epoch, samples=len(self._samples)))
        epoch = _Epoch(self._source, self._samples, self._order)
        started = waiting = time.perf_counter()
        taken, from_cache, stall_s = 0, 0, 0.0
        try:
            assembler = BatchAssembler(batch_size=self._batch_size, drop_last=self._drop_last)
            for columns in epoch.batches(assembler):
                waited = time.perf_counter() - waiting
                rows, cached = len(columns[0]), assembler.kept
                taken, from_cache, stall_s = taken + rows, from_cache + cached, stall_s + waited
                observe(BatchTaken(epoch=self._epoch, samples=rows, from_cache=cached, stall_s=waited))
                batch = _batch(columns, has_targets=self._source.has_targets)
                yield batch if self._augment is None else self._augment(batch, self._view)
                waiting = time.perf_counter()
        finally:
            seconds = time.perf_counter() - started
            observe(
                EpochFinished(epoch=self._epoch, samples=taken, from_cache=from_cache, seconds=seconds, stall_s=stall_s)
            )


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
    held: Held

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    def part(self, start: int, stop: int) -> "_Segment":
        if (start, stop) == (self.start, self.stop):
            return self
        some = slice(start - self.start, stop - self.start)
        held = Held(rows=self.held.rows[some], is_on_disk=self.held.is_on_disk[some])
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


class _Epoch:
    """One pass over one order. Segments are made as the window asks for them, and dropped when they were handed out."""

    def __init__(self, source: Source, samples: SampleTable, order: Order) -> None:
        self._source = source
        self._samples = samples
        self._order = order
        self._segments: deque[_Segment] = deque()
        row_bytes = 0 if source.cache is None else source.cache.row_bytes
        self._read_rows = max(1, min(_READ_ROWS, _READ_BYTES // max(1, row_bytes)))

    def batches(self, assembler: BatchAssembler) -> Iterator[Columns]:
        done = 0  # what was cached at places below has been handed out
        for delivery in self._deliveries(self._stretches()):
            for run in self._runs(*delivery.span(before=done)):
                yield from assembler.merge(*self._parts(run, _delivered(run, delivery)))
            for run in self._runs(done, delivery.reach):
                yield from assembler.merge(*self._parts(run, _delivered(run, delivery), self._cached(run)))
            done = max(done, delivery.reach)
            self._keep(delivery.batch)
            while self._segments[0].stop <= delivery.stop and len(self._segments) > 1:
                self._segments.popleft()
        for run in self._runs(done, len(self._order)):
            yield from assembler.merge(*self._parts(run, self._cached(run)))
        last = assembler.finish()
        if last is not None:
            yield last

    def _stretches(self) -> Iterator[Stretch]:
        """What the epoch must ask for: neither what is cached nor what is known to be unreadable."""
        for start in range(0, len(self._order), _SEGMENT):
            rows = self._order.indices(start, min(start + _SEGMENT, len(self._order)))
            ids = self._samples.ids_at(rows)
            cache = self._source.cache
            held = Held.nowhere(len(ids)) if cache is None else cache.find(ids)
            segment = _Segment(start=start, rows=rows, ids=ids, held=held)
            self._segments.append(segment)
            yield from self._asked(segment, np.flatnonzero((held.rows < 0) & ~held.is_on_disk))

    def _asked(self, segment: _Segment, places: _Ints) -> Iterator[Stretch]:
        source = self._source
        readable = places[~np.isin(segment.ids[places], source.unreadable())]
        return stretches(self._samples, segment.rows[readable], segment.start + readable, source.dealer)

    def _deliveries(self, asked: Iterator[Stretch]) -> Iterator[Delivery]:
        source = self._source
        window = Window(asked, source.settings)
        if window.is_done:
            return
        with Prefetcher(
            window,
            source.fetch,
            threads=source.settings.last_requests,
            clock=time.monotonic,
            observe=source.observe,
            tuner=source.tuner,
        ) as prefetcher:
            yield from prefetcher

    def _runs(self, start: int, stop: int) -> Iterator[_Segment]:
        """The places from ``start`` up to ``stop``, in runs that lie in one segment each."""
        for one in [one for one in self._segments if one.start < stop and start < one.stop]:
            yield from one.runs(start, stop, self._read_rows)

    def _parts(self, run: _Segment, *sources: Iterable[_Piece]) -> list[Part]:
        """The rows of a run, wherever they come from."""
        pieces = [piece for piece in itertools.chain(*sources) if len(piece.places)]
        if len(pieces) == 1:
            return [self._part(run, pieces[0], None)]
        present = np.sort(np.concatenate([piece.places for piece in pieces])) if pieces else run.rows[:0]
        return [self._part(run, piece, np.searchsorted(present, piece.places)) for piece in pieces]

    def _cached(self, run: _Segment) -> Iterator[_Piece]:
        cache, held = self._source.cache, run.held
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
        for delivery in self._deliveries(self._asked(run, places[~found])):
            yield _Piece(places=delivery.positions - run.start, tensors=delivery.batch.tensors)
            self._keep(delivery.batch)

    def _part(self, run: _Segment, piece: _Piece, places: _Ints | None) -> Part:
        """A piece with the ids and labels of its rows."""
        ids, rows = run.ids, run.rows
        if len(piece.places) < len(ids):
            ids, rows = ids[piece.places], rows[piece.places]
        columns = (ids, self._samples.labels_at(rows), *piece.tensors)
        return Part(places=places, columns=columns, is_kept=piece.is_kept)

    def _keep(self, batch: FeatureBatch) -> None:
        if self._source.cache is not None and len(batch):
            self._source.cache.put(batch.ids, batch.tensors)


def _delivered(run: _Segment, delivery: Delivery) -> Iterator[_Piece]:
    """The rows of a delivery that lie in a run."""
    first, stop = np.searchsorted(delivery.positions, (run.start, run.stop))
    tensors = tuple(one[first:stop] for one in delivery.batch.tensors)
    yield _Piece(places=delivery.positions[first:stop] - run.start, tensors=tensors)


def _batch(columns: Columns, *, has_targets: bool) -> Batch:
    ids, labels, *tensors = columns
    targets = torch.from_numpy(tensors.pop().astype(np.int64)) if has_targets else None
    features = [torch.from_numpy(one) for one in tensors]
    return Batch(
        features=features[0] if len(features) == 1 else tuple(features),
        labels=torch.from_numpy(labels),
        ids=torch.from_numpy(ids),
        targets=targets,
    )
