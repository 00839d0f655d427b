"""Puts rows into their batches on the threads on which they arrive, so that a loop takes batches that are finished."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from frostline.events import Event, Observer
from frostline.loaders.epoch.batch_finisher import THREADS as MAPPING
from frostline.loaders.epoch.local_stage import THREADS as DECODING
from frostline.loaders.epoch.local_stage import DecodePool
from frostline.loaders.epoch.numpy_batch import Arrays
from frostline.prefetch.driver import Prefetcher
from frostline.prefetch.owned_requests import OwnedRequests
from frostline.prefetch.requests import Delivery
from frostline.processors import in_background

__all__ = ("Arrivals", "BatchFiller", "FilledBatch")

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
        deliveries: by places in the epoch; None where nothing may be handed out now.
        prefetcher: prefetcher that brings them; None where nothing is asked for.
        happened: as of the prefetcher.
        decoding: decodes the deliveries; None where they come decoded.
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
        position: how far the epoch is when it is handed out.
        kept: rows of it that came from a cache.
    """

    arrays: Arrays
    nbytes: int
    places: npt.NDArray[np.int64]
    position: int
    kept: int


class BatchFiller:
    """The finished batches of a pass, for one thread at a time. A context manager.

    A row is copied into its batch as soon as its place there is certain, by the thread that brought it, or the one
    that brought what was missing before it. One thread fills at a time; one that comes meanwhile leaves its rows to it.
    What the loop does not wait for yet stays in the window's bounds: all but the rows of the next batch. Where nothing
    arrives, as all rows are kept, small batches are filled when the loop asks for them.

    Args:
        steps: gives the batches; None where the next one lacks rows. Run by one thread at a time, whichever.
        arrivals: rows that they are made of.
        observe: told what happened, in the loop's thread.
        interrupt: frees a thread that waits within a step; safe from any thread.
        max_bytes: maximum bytes of finished batches that wait for the loop; one may, whatever its bytes are. None
            bounds nothing.
    """

    def __init__(
        self,
        steps: Generator[FilledBatch | None],
        arrivals: Arrivals,
        observe: Observer,
        interrupt: Callable[[], None],
        max_bytes: int | None,
    ) -> None:
        self._steps = steps
        self._prefetcher = arrivals.prefetcher
        self._decoding = arrivals.decoding
        self._max_bytes = max_bytes
        self._happened = arrivals.happened
        self._observe = observe
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        self._schedule()  # there is room for another one
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
        with suppress(Empty):
            while True:
                self._tell(self._happened.get_nowait())
        with self._lock:
            if self._finished:
                found, _ = self._finished.popleft()
                self._hold()
                return found
            if self._failure is not None:
                raise self._failure
            if self._is_over:
                raise StopIteration
            return None

    def _tell(self, event: Event | None) -> None:
        if event is None:
            self._schedule()  # perhaps it was the end
        else:
            self._observe(event)

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
