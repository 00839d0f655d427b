"""One epoch for a training loop: prefetched rows and cached rows, merged in order into batches."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from frostline.cache import TieredCache
from frostline.config import LoaderSettings
from frostline.core import FeatureBatch, SampleTable, View
from frostline.errors import SettingError
from frostline.events import BatchTaken, EpochFinished, EpochStarted, Observer
from frostline.loaders.augment import Augment
from frostline.loaders.batch import Batch
from frostline.ordering import Order
from frostline.prefetch.assemble import BatchAssembler, Columns, Part
from frostline.prefetch.driver import Fetch, Prefetcher
from frostline.prefetch.stretches import Dealer, Delivery, Stretch, stretches
from frostline.prefetch.window import Window

__all__ = ("Listed", "Loader", "Source")

# Cached rows are copied in runs of this many, so that an epoch from the cache needs no second copy of it all.
_CACHED_RUN = 1024
# Places of an epoch whose rows are worked out at a time, so that an epoch of a hundred million begins at once.
_SEGMENT = 1 << 15


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
    """

    fetch: Fetch
    dealer: Dealer
    cache: TieredCache | None
    unreadable: Callable[[], npt.NDArray[np.int64]]
    settings: LoaderSettings
    observe: Observer


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
            for columns in epoch.batches(BatchAssembler(batch_size=self._batch_size, drop_last=self._drop_last)):
                waited = time.perf_counter() - waiting
                rows, cached = len(columns[0]), epoch.take_cached()
                taken, from_cache, stall_s = taken + rows, from_cache + cached, stall_s + waited
                observe(BatchTaken(epoch=self._epoch, samples=rows, from_cache=cached, stall_s=waited))
                batch = _batch(columns)
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
        cached: ``bool[n]``, whether the cache held its features when the segment was looked at.
    """

    start: int
    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    cached: npt.NDArray[np.bool_]

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    def part(self, start: int, stop: int) -> "_Segment":
        some = slice(max(start, self.start) - self.start, min(stop, self.stop) - self.start)
        return _Segment(
            start=self.start + some.start, rows=self.rows[some], ids=self.ids[some], cached=self.cached[some]
        )


class _Epoch:
    """One pass over one order. Segments are made as the window asks for them, and dropped when they were handed out."""

    def __init__(self, source: Source, samples: SampleTable, order: Order) -> None:
        self._source = source
        self._samples = samples
        self._order = order
        self._segments: deque[_Segment] = deque()
        self._from_cache = 0

    def take_cached(self) -> int:
        """Rows that came from the cache since the last call."""
        taken, self._from_cache = self._from_cache, 0
        return taken

    def batches(self, assembler: BatchAssembler) -> Iterator[Columns]:
        done = 0
        for delivery in self._deliveries(self._stretches()):
            for start in range(done, delivery.stop, _CACHED_RUN):
                yield from assembler.merge(*self._parts(start, min(start + _CACHED_RUN, delivery.stop), delivery))
            done = delivery.stop
            self._keep(delivery.batch)
            while self._segments[0].stop <= done and len(self._segments) > 1:
                self._segments.popleft()
        for start in range(done, len(self._order), _CACHED_RUN):
            yield from assembler.merge(*self._parts(start, min(start + _CACHED_RUN, len(self._order)), None))
        last = assembler.finish()
        if last is not None:
            yield last

    def _stretches(self) -> Iterator[Stretch]:
        """What the epoch must ask for: neither what is cached nor what is known to be unreadable."""
        for start in range(0, len(self._order), _SEGMENT):
            rows = self._order.indices(start, min(start + _SEGMENT, len(self._order)))
            ids = self._samples.ids_at(rows)
            cache = self._source.cache
            cached = np.zeros(len(ids), np.bool_) if cache is None else cache.contains(ids)
            segment = _Segment(start=start, rows=rows, ids=ids, cached=cached)
            self._segments.append(segment)
            yield from self._asked(segment, np.flatnonzero(~cached))

    def _asked(self, segment: _Segment, places: npt.NDArray[np.int64]) -> Iterator[Stretch]:
        source = self._source
        readable = places[~np.isin(segment.ids[places], source.unreadable())]
        return stretches(self._samples, segment.rows[readable], segment.start + readable, source.dealer)

    def _deliveries(self, asked: Iterator[Stretch]) -> Iterator[Delivery]:
        source = self._source
        window = Window(asked, source.settings)
        if window.is_done:
            return
        threads = source.settings.requests_in_flight
        with Prefetcher(
            window, source.fetch, threads=threads, clock=time.monotonic, observe=source.observe
        ) as prefetcher:
            yield from prefetcher

    def _parts(self, start: int, stop: int, delivery: Delivery | None) -> list[Part]:
        """The rows from place ``start`` up to ``stop``: those of a delivery and those of the cache."""
        segment = self._segment(start, stop)
        cached = np.flatnonzero(segment.cached)
        positions = np.zeros(0, np.int64) if delivery is None else delivery.positions
        inside = (positions >= start) & (positions < stop)
        pieces = list(self._kept(segment, cached)) if len(cached) else []
        if delivery is not None and inside.any():
            pieces.append((positions[inside], tuple(one[inside] for one in delivery.batch.tensors)))
        present = np.sort(np.concatenate([places for places, _ in pieces])) if pieces else positions[:0]
        return [self._part(segment, present, places, tensors) for places, tensors in pieces]

    def _segment(self, start: int, stop: int) -> _Segment:
        """The places from ``start`` up to ``stop``, which may lie in several segments."""
        found = [one.part(start, stop) for one in self._segments if one.start < stop and start < one.stop]
        if len(found) == 1:
            return found[0]
        columns = ((one.rows, one.ids, one.cached) for one in found)
        rows, ids, cached = (np.concatenate(pieces) for pieces in zip(*columns, strict=True))
        return _Segment(start=start, rows=rows, ids=ids, cached=cached)

    def _kept(
        self, segment: _Segment, places: npt.NDArray[np.int64]
    ) -> Iterator[tuple[npt.NDArray[np.int64], Columns]]:
        """Rows that the cache held when it was looked at; what is gone from the disk since is asked for now."""
        cache = self._source.cache
        assert cache is not None
        found, tensors = cache.get(segment.ids[places])
        self._from_cache += int(found.sum())
        if found.any():
            yield segment.start + places[found], tensors
        for delivery in self._deliveries(self._asked(segment, places[~found])):
            if len(delivery.batch):
                yield delivery.positions, delivery.batch.tensors
                self._keep(delivery.batch)

    def _part(
        self,
        segment: _Segment,
        present: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        tensors: Columns,
    ) -> Part:
        places = positions - segment.start
        labels = self._samples.labels_at(segment.rows[places])
        return Part(places=np.searchsorted(present, positions), columns=(segment.ids[places], labels, *tensors))

    def _keep(self, batch: FeatureBatch) -> None:
        if self._source.cache is not None and len(batch):
            self._source.cache.put(batch.ids, batch.tensors)


def _batch(columns: Columns) -> Batch:
    ids, labels, *features = (torch.from_numpy(column) for column in columns)
    return Batch(features=features[0] if len(features) == 1 else tuple(features), labels=labels, ids=ids)
