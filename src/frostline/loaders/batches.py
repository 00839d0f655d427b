"""Puts the rows of a pass into its batches, in order, on the threads on which they arrive; pinned for a GPU."""

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import numpy.typing as npt

from frostline.cache import TieredCache
from frostline.core import FeatureBatch, SampleTable
from frostline.core.errors import DataError, SettingError
from frostline.core.events import Event, Observer
from frostline.core.nouns import Closing
from frostline.core.system import in_background
from frostline.loaders.fetch import jitter
from frostline.loaders.local_stage import THREADS as DECODING
from frostline.loaders.local_stage import DecodePool, DeliveryDecoder
from frostline.loaders.requests import RequestPlanner, Segment, Segments, prefetcher_of, requests_for
from frostline.loaders.row_source import THREADS as MAPPING
from frostline.loaders.row_source import Arrays, Finish, RowSource
from frostline.ordering import EVEN, Shard
from frostline.prefetch.driver import Prefetcher
from frostline.prefetch.owned_requests import OwnedRequests
from frostline.prefetch.requests import (
    BatchAssembler,
    Column,
    Columns,
    Delivery,
    Gathered,
    Memory,
    PlannedRequest,
    RowRange,
)
from frostline.prefetch.window import Window

if TYPE_CHECKING:
    import torch

__all__ = (
    "Arrivals",
    "BatchBuilder",
    "BatchFiller",
    "CachedRows",
    "FilledBatch",
    "Pinned",
    "memory_for",
)


_THREADS = ("frostline-fill", "frostline-prefetch", DECODING, MAPPING)
# Finished batches with rows of a cache that may wait for the loop: such rows have no way to hide, and no window.
_MAX_KEPT = 2
# Of a thread that brings rows, before it goes on with that; another one fills what is left.
_MAX_IN_PASSING = 1
# Rows of a cache in batches below this are copied sooner by the loop's thread than another one takes turns with it.
_MIN_AHEAD_BYTES = 1 << 20
_END: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """What a pass asks for, as it arrives.

    Attributes:
        deliveries: the deliveries by places in the epoch; None where nothing may be handed out now.
        prefetcher: prefetcher that brings them; None where nothing is asked for.
        happened: queue of events of the prefetcher.
        decoding: pool that decodes the deliveries; None where they come decoded.
    """

    deliveries: Iterator[Delivery | None] = field(default_factory=lambda: iter(()))
    prefetcher: Prefetcher | None = None
    happened: SimpleQueue[Event | None] = field(default_factory=SimpleQueue)
    decoding: DecodePool | None = None

    @classmethod
    def of(cls, prefetcher: Prefetcher, deliveries: Iterator[Delivery | None]) -> Self:
        """What a prefetcher brings."""
        return cls(deliveries=deliveries, prefetcher=prefetcher, happened=prefetcher.happened)

    def in_order(self, owned: OwnedRequests | None) -> "Arrivals":
        """The same in the order of the epoch, where it was asked for by owner."""
        return self if owned is None else replace(self, deliveries=owned.in_order(self.deliveries))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FilledBatch:
    """A finished batch.

    Attributes:
        arrays: features, labels, ids and targets.
        nbytes: bytes of the columns that it was made of.
        places: ``int64[n]``, of its rows in the epoch.
        position: the place in the epoch after it.
        kept: rows of it that came from a cache.
    """

    arrays: Arrays
    nbytes: int
    places: npt.NDArray[np.int64]
    position: int
    kept: int


class BatchFiller(Closing):
    """The finished batches of a pass, for one thread at a time. A context manager.

    A row is copied into its batch as soon as its place there is certain, by the thread that brought it, or the one
    that brought what was missing before it. One thread fills at a time; one that comes meanwhile leaves its rows to it.
    What the loop does not wait for yet stays in the window's bounds: all but the rows of the next batch. Where nothing
    arrives, as all rows are kept, small batches are filled when the loop asks for them.

    Args:
        steps: generator of the batches; None where the next one lacks rows. Run by one thread at a time, whichever.
        arrivals: rows that they are made of.
        on_event: function that is called with each event, in the loop's thread.
        interrupt: function that frees a thread that waits within a step; safe from any thread.
        max_bytes: maximum bytes of finished batches that wait for the loop; one may, whatever its bytes are. None
            bounds nothing.
    """

    def __init__(
        self,
        steps: Generator[FilledBatch | None],
        arrivals: Arrivals,
        on_event: Observer,
        interrupt: Callable[[], None],
        max_bytes: int | None,
    ) -> None:
        self._steps = steps
        self._prefetcher = arrivals.prefetcher
        self._decoding = arrivals.decoding
        self._max_bytes = max_bytes
        self._happened = arrivals.happened
        self._on_event = on_event
        self._interrupt = interrupt
        self._rest = ThreadPoolExecutor(1, _THREADS[0], in_background)  # fills what no thread that brings rows does
        self._is_ahead = self._prefetcher is not None
        self._is_scheduled = False
        self._turn = threading.Lock()  # held by who fills
        self._is_wanted = False
        self._is_awaited = False  # by the loop, which has no batch
        self._lock = threading.Lock()  # guards what follows
        self._finished: deque[tuple[FilledBatch, int]] = deque()
        self._failure: BaseException | None = None
        self._is_over = False
        self._is_closed = False

    def __enter__(self) -> Self:
        self._listen(self._fill_in_passing)
        self._schedule()
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FilledBatch:
        try:
            while (found := self._take()) is None:
                if not self._is_ahead:
                    self._fill(1)
                elif self._prefetcher is None:
                    self._tell(self._happened.get())
                else:
                    self._is_awaited = True
                    self._count_stall(self._prefetcher)
                    self._tell(self._prefetcher.next_event())
        finally:
            self._is_awaited = False
            if self._prefetcher is not None:
                self._prefetcher.stall_ends()
        self._schedule()  # another one fits
        return found

    def close(self) -> None:
        """Fill no more, and let go of what was filled. Calling it again does nothing."""
        self._is_closed = True
        self._listen(None)
        self._interrupt()
        # A pass that was dropped in a cycle is closed by the garbage collector, which may run in such a thread itself.
        waits = not threading.current_thread().name.startswith(_THREADS)
        if self._turn.acquire(blocking=waits):
            self._steps.close()
            self._turn.release()
        self._rest.shutdown(wait=waits)
        if self._prefetcher is not None:
            self._prefetcher.hold_after(None)

    def _listen(self, listener: Callable[[], None] | None) -> None:
        for source in (self._prefetcher, self._decoding):
            if source is not None:
                source.listen(listener)

    def _take(self) -> FilledBatch | None:
        """The next batch, if it is finished. What happened meanwhile is told first."""
        self._tell_what_happened()
        with self._lock:
            if self._finished:
                found, _ = self._finished.popleft()
                self._hold()
                return found
            is_over = self._is_over
        if not is_over:
            return None
        self._tell_what_happened()  # its last rows may have come, and said what was lost, since we looked
        if self._failure is not None:
            raise self._failure
        raise StopIteration

    def _tell_what_happened(self) -> None:
        with suppress(Empty):
            while True:
                self._tell(self._happened.get_nowait())

    def _tell(self, event: Event | None) -> None:
        if event is None:
            self._schedule()  # perhaps it was the end
        else:
            self._on_event(event)

    def _count_stall(self, prefetcher: Prefetcher) -> None:
        """More requests help a loop that waits for rows to arrive, and not one that waits until rows are decoded."""
        if self._is_awaited and (self._decoding is None or self._decoding.is_starved):
            prefetcher.stall_begins()
        else:
            prefetcher.stall_ends()

    def _hold(self) -> None:
        """What lies behind the next batch waits in the window's bounds."""
        if self._prefetcher is not None:
            self._prefetcher.hold_after(self._finished[0][1] if self._finished else None)

    def _schedule(self) -> None:
        if self._is_ahead and not (self._is_scheduled or self._is_closed or self._is_over):
            self._is_scheduled = True
            self._rest.submit(self._fill_rest)

    def _fill_rest(self) -> None:
        self._is_scheduled = False
        self._fill(None)

    def _fill_in_passing(self) -> None:
        if not self._fill(_MAX_IN_PASSING):
            with suppress(RuntimeError):  # it is being closed
                self._schedule()

    def _fill(self, maximum: int | None) -> bool:
        """Fill until rows are missing; False where so many batches were finished before that."""
        self._is_wanted = True
        while self._is_wanted and self._turn.acquire(blocking=False):
            try:
                self._is_wanted = False
                if not self._fill_now(maximum):
                    return False
            finally:
                self._turn.release()
        return True

    def _fill_now(self, maximum: int | None) -> bool:
        finished = 0
        while not (self._is_closed or self._is_over or self._has_enough):
            if finished == maximum:
                return False
            try:
                found = next(self._steps, _END)
            except BaseException as error:  # noqa: BLE001 (the loop gets it)
                self._failure, self._is_over = error, True
                found = _END
            if found is None:
                if self._decoding is not None and self._prefetcher is not None:
                    self._count_stall(self._prefetcher)
                break
            if found is _END:
                self._is_over = True
                self._happened.put(None)
                break
            assert isinstance(found, FilledBatch)
            self._add(found)
            finished += 1
        return True

    @property
    def _has_enough(self) -> bool:
        with self._lock:
            if not self._finished:
                return False
            if self._max_bytes is not None and sum(batch.nbytes for batch, _ in self._finished) >= self._max_bytes:
                return True
            return sum(batch.kept > 0 for batch, _ in self._finished) >= _MAX_KEPT

    def _add(self, found: FilledBatch) -> None:
        taken = 0 if self._prefetcher is None else self._prefetcher.bytes_taken
        self._is_ahead = self._is_ahead or found.nbytes >= _MIN_AHEAD_BYTES
        with self._lock:
            self._finished.append((found, taken))
            if len(self._finished) == 1:
                self._hold()
        self._happened.put(None)


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
        source: the place where the rows come from.
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
            run: places of a segment.
            tell: function that is told what happens while rows are asked for.
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
        """Keep rows that arrived for the epochs to come, where there is a cache with space for them."""
        if self._source.cache is not None and len(batch):
            self._source.cache.put(batch.ids, batch.tensors)

    def _read(self, cache: TieredCache, run: Segment, places: _Ints, tell: Observer) -> Iterator[_Piece]:
        found, tensors = cache.read(run.ids[places])
        yield _Piece(places=places[found], tensors=tensors, is_kept=True)
        missing = requests_for(self._source, self._samples, run, places[~found], self._source.request_source)
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
                yield from map(decoder.decode_rows, self._reading)


class BatchBuilder:
    """Builds the batches of one pass. For the thread that fills: one at a time, whichever that is.

    Args:
        source: the place where the rows come from.
        samples: the table that the order is one of.
        shard: the process's part of the order.
        planner: planner of the requests, whose segments are dropped as they are handed out; closed at the end.
        cached: rows of the cache.
        assembler: assembler of the batches; empty.
        tell: function that is told what happens.
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
        yet, though later ones may be where ``max_reorder`` allows it.

        Args:
            deliveries: rows that were asked for, decoded and in order; None where nothing may be handed out now.
        """
        finisher = self._source.finisher
        with closing(self._planner), nullcontext() if finisher is None else finisher.start() as finish:
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
            are_images=self._source.are_images,
        )
        if finish is not None:
            arrays = finish(arrays, rows.astype(np.int64, copy=False))
            made = arrays.features if isinstance(arrays.features, tuple) else (arrays.features,)
            nbytes = max(nbytes, sum(part.nbytes for part in made))  # of encoded samples a map makes more
        return FilledBatch(
            arrays=arrays,
            nbytes=nbytes,
            places=places,
            position=self._position(places),
            kept=self._assembler.kept,
        )

    def _position(self, places: _Ints) -> int:
        if self._shard.is_shared:
            return self._shard.after(self._shard.step_of(self._given - 1) + 1)
        if self._source.settings.max_reorder == 0:
            return self._shard.start + int(places[-1]) + 1
        waiting = self._assembler.pending_rows(_PLACES)
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


def memory_for(pin_memory: bool | None, device: "torch.device | str") -> Memory | None:
    """Where a job's batches lie; None for memory of this process.

    Args:
        pin_memory: page-locked memory for batches, as in ``LoaderSettings``.
        device: device of the model.

    Raises:
        SettingError: page-locked memory is asked for, and there is no GPU to copy from it.
    """
    if not (str(device).startswith("cuda") if pin_memory is None else pin_memory):
        return None
    import torch

    if not torch.cuda.is_available():
        raise SettingError("pin_memory=True is for GPUs that CUDA drives, and there is none here: leave it out")
    return Pinned()


class Pinned:
    """Memory from PyTorch's allocator of page-locked memory.

    The allocator knows which copies to a GPU are under way, and gives memory away again when they have ended: a batch
    may be dropped as soon as its copies were begun.
    """

    def empty(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """See ``Memory``."""
        import torch

        nbytes = max(1, math.prod(shape) * dtype.itemsize)
        whole: npt.NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return whole[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
