"""The pipeline of one request: a batch is read and decoded while the one before it runs and is sent."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, wait
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Skipped
from frostline.node.request.feature_cache import Found
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.memory_pool import Cancelled, Lane, Reservation
from frostline.stores.base.protocols import Buffer

__all__ = ("BatchStream", "Ending", "Made", "PendingBatch", "RequestOutput", "Slab", "batches")

Slab = npt.NDArray[np.float32] | npt.NDArray[np.uint8] | npt.NDArray[np.int64]
"""Samples as the device takes them: ``float32[n, C, H, W]``, or pixels ``uint8[n, H, W, C]``."""
Made = Skipped | Buffer | None
"""The result of reading one sample: it was skipped, it stays encoded, or None if it was decoded into the slab."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingBatch:
    """A batch that has begun.

    Attributes:
        rows: rows of the request; fewer than asked for if more cannot be processed at once.
        wanted: rows among them that must be read.
        slab: array for the decoded samples, one row each in that order; None if none are decoded.
        found: cached rows of the batch; None if there is no cache.
    """

    rows: range
    wanted: Sequence[int]
    slab: Slab | None = None
    found: Found | None = None


class RequestOutput(Protocol):
    """How a request turns its samples into batches."""

    def stretches(self) -> Sequence[range]:
        """Divide the rows of the request into batches."""

    def nbytes(self, rows: range) -> int:
        """The memory of a batch, from its first read until it is sent."""

    def kept_bytes(self, rows: range, batch: FeatureBatch) -> int:
        """The part of that memory that is still used once the batch is made."""

    def begin(self, rows: range) -> PendingBatch:
        """Prepare a batch of all these rows, or of the first ones, and say which samples must be read."""

    @property
    def at_a_time(self) -> int:
        """Samples that one thread reads in turn: one if it waits for a store, so that others read meanwhile."""

    def samples(self, rows: Sequence[int], out: Slab | None) -> Sequence[Made]:
        """Read some samples in turn, each into its row of ``out``. Called from several threads."""

    def finish(self, work: PendingBatch, made: Sequence[Made]) -> FeatureBatch:
        """Make the batch; ``made`` holds the result of each wanted sample."""


def batches(
    output: RequestOutput, memory: Lane, readers: Executor, scope: CancelScope
) -> Generator[FeatureBatch, None, None]:
    """Yield the batches of the answer. The memory of a batch stays reserved until the next one is asked for.

    The next batch is read ahead only if its memory is free at once. A request never waits for memory while it holds
    some, so that no two requests can wait for each other.

    Args:
        output: makes batches from samples.
        memory: access to the memory for batches.
        readers: executor whose threads read samples.
        scope: cancel scope of the request; cancelled too if the request fails or is closed early.
    """
    rest = deque(output.stretches())
    under_way: deque[_Loading] = deque()
    try:
        while rest or under_way:
            if not under_way:
                room = memory.reserve(output.nbytes(rest[0]), scope.is_cancelled)
                under_way.append(_Loading(rows=rest.popleft(), memory=room))
                rest.extendleft(under_way[0].start(output, readers, scope))
            ahead = memory.take(output.nbytes(rest[0])) if rest else None
            if ahead is not None:
                under_way.append(_Loading(rows=rest.popleft(), memory=ahead))
                rest.extendleft(under_way[-1].start(output, readers, scope))
            yield under_way[0].finish(output)
            under_way.popleft().memory.release()
    except BaseException:
        scope.cancel()
        raise
    finally:
        for loading in under_way:
            loading.abandon()


@dataclass(slots=True, eq=False)
class _Loading:
    """A batch whose samples are being read."""

    rows: range
    memory: Reservation
    work: PendingBatch | None = None
    samples: "Sequence[Future[Sequence[Made]]]" = ()

    def start(self, output: RequestOutput, readers: Executor, scope: CancelScope) -> Sequence[range]:
        """Begin to read it, and return the rows that are left for another batch."""
        work = self.work = output.begin(self.rows)
        left, self.rows = range(work.rows.stop, self.rows.stop), work.rows
        samples: list[Future[Sequence[Made]]] = []
        self.samples = samples
        for start in range(0, len(work.wanted), output.at_a_time):
            places = range(start, min(start + output.at_a_time, len(work.wanted)))
            samples.append(scope.submit(readers, _read, output, work, places))
        return [left] if left else []

    def finish(self, output: RequestOutput) -> FeatureBatch:
        made = [sample for some in self.samples for sample in some.result()]
        work, self.work, self.samples = self.work, None, ()
        assert work is not None
        batch = output.finish(work, made)
        del work
        self.memory.shrink(output.kept_bytes(self.rows, batch))
        return batch

    def abandon(self) -> None:
        """Wait until nothing writes into the slab any more, and release the memory."""
        wait(self.samples)
        self.work, self.samples = None, ()
        self.memory.release()


def _read(output: RequestOutput, work: PendingBatch, places: range) -> Sequence[Made]:
    some = slice(places.start, places.stop)
    return output.samples(work.wanted[some], None if work.slab is None else work.slab[some])


Ending = Literal["abandoned", "expired", "failed", "finished"]


class BatchStream:
    """The batches of one request, in its order. A batch's memory is released when the next batch is asked for.

    Args:
        batches: makes the batches.
        cancel: cancels the work of the request; called when the stream is closed before its end.
        on_end: called once, with the stream and how it ended, when no work of it is left.
    """

    def __init__(
        self,
        batches: Iterator[FeatureBatch],
        cancel: Callable[[], None],
        on_end: "Callable[[BatchStream, Ending], None]",
    ) -> None:
        self._batches = batches
        self._cancel = cancel
        self._on_end = on_end
        self._turn = threading.Lock()
        self._has_ended = False
        self._is_complete = False
        self._is_expired = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        with self._turn:
            if self._has_ended:
                raise StopIteration
            ending: Ending | None = "failed"
            try:
                batch = next(self._batches)
                ending = None
                return batch
            except StopIteration:
                ending = "finished"
                raise
            except (Cancelled, CancelledError):
                ending = self._given_up
                raise StopIteration from None
            finally:
                if ending is not None:
                    self._end(ending)

    @property
    def has_ended(self) -> bool:
        """Whether all its work has ended; closing it then does nothing."""
        return self._has_ended

    @property
    def is_complete(self) -> bool:
        """Whether every sample of the request was answered."""
        return self._is_complete

    @property
    def is_expired(self) -> bool:
        """Whether it was cancelled at its deadline."""
        return self._is_expired

    def expire(self) -> None:
        """Cancel the rest as ``close`` does, because the deadline has passed. Do nothing if it has ended."""
        self._is_expired = not self._has_ended
        self.close()

    def close(self) -> None:
        """Cancel the rest, wake a thread that waits in ``next``, and return when all work has ended."""
        if not self._has_ended:
            self._cancel()
        with self._turn:
            if not self._has_ended:
                close = getattr(self._batches, "close", None)
                if close is not None:
                    close()
                self._end(self._given_up)

    @property
    def _given_up(self) -> Ending:
        return "expired" if self._is_expired else "abandoned"

    def _end(self, ending: Ending) -> None:
        self._has_ended = True
        self._is_complete = ending == "finished"
        self._batches = iter(())
        self._on_end(self, ending)
