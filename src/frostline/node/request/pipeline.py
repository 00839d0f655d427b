"""The path of one request: a batch is read and decoded while the one before it runs and is sent."""

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Skipped
from frostline.node.request.feature_cache import Found
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.memory_pool import Lane, Reservation
from frostline.stores.base.protocols import Buffer

__all__ = ("Kind", "Made", "PendingBatch", "Slab", "batches")

Slab = npt.NDArray[np.float32] | npt.NDArray[np.uint8]
"""Samples as the device takes them: ``float32[n, C, H, W]``, or pixels ``uint8[n, H, W, C]``."""
Made = Skipped | Buffer | None
"""What became of a sample: it was skipped, it stays encoded, or it was decoded into its row of the slab."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingBatch:
    """A batch that was begun.

    Attributes:
        rows: of the request; fewer than were to begin where those are as much as can be done at once.
        wanted: those of them that must be read.
        slab: where they are decoded to, a row each in that order; None where they stay encoded, or none is wanted.
        found: what the node's cache held of the batch; None where there is none.
    """

    rows: range
    wanted: Sequence[int]
    slab: Slab | None = None
    found: Found | None = None


class Kind(Protocol):
    """What a request does with its samples."""

    def stretches(self) -> Sequence[range]:
        """The rows of the request that make up each batch."""

    def nbytes(self, rows: range) -> int:
        """What a batch takes, from its first sample read until it is sent."""

    def kept_bytes(self, rows: range, batch: FeatureBatch) -> int:
        """What is left of that when the answer is made."""

    def begin(self, rows: range) -> PendingBatch:
        """Make place for a batch, of all these rows or of the first ones, and say which samples must be read."""

    @property
    def at_a_time(self) -> int:
        """Samples that one thread reads in turn: one where it waits for a store, which others do meanwhile."""

    def samples(self, rows: Sequence[int], out: Slab | None) -> Sequence[Made]:
        """Read some samples, one after another, each into its row of ``out``. Called from several threads."""

    def finish(self, work: PendingBatch, made: Sequence[Made]) -> FeatureBatch:
        """The answer of a batch; ``made`` tells what became of each sample that was wanted."""


def batches(kind: Kind, memory: Lane, readers: Executor, leash: CancelScope) -> Generator[FeatureBatch, None, None]:
    """Yield the answer's batches. What a batch takes stays reserved until the next one is asked for.

    The next batch is read ahead only with memory that is there at once: a request never waits for memory while
    it holds some, so that no two can wait for each other.

    Args:
        kind: what to do.
        memory: for batches.
        readers: threads that read samples.
        leash: cut where nobody wants the answer any more, and at the end.
    """
    rest = deque(kind.stretches())
    under_way: deque[_Loading] = deque()
    try:
        while rest or under_way:
            if not under_way:
                room = memory.reserve(kind.nbytes(rest[0]), leash.is_cut)
                under_way.append(_Loading(rows=rest.popleft(), memory=room))
                rest.extendleft(under_way[0].start(kind, readers, leash))
            ahead = memory.take(kind.nbytes(rest[0])) if rest else None
            if ahead is not None:
                under_way.append(_Loading(rows=rest.popleft(), memory=ahead))
                rest.extendleft(under_way[-1].start(kind, readers, leash))
            yield under_way[0].finish(kind)
            under_way.popleft().memory.release()
    finally:
        leash.cut()
        for loading in under_way:
            loading.abandon()


@dataclass(slots=True, eq=False)
class _Loading:
    """A batch whose samples are being read."""

    rows: range
    memory: Reservation
    work: PendingBatch | None = None
    samples: "Sequence[Future[Sequence[Made]]]" = ()

    def start(self, kind: Kind, readers: Executor, leash: CancelScope) -> Sequence[range]:
        """Begin it, and say which rows are left for another one."""
        work = self.work = kind.begin(self.rows)
        left, self.rows = range(work.rows.stop, self.rows.stop), work.rows
        samples: list[Future[Sequence[Made]]] = []
        self.samples = samples
        for start in range(0, len(work.wanted), kind.at_a_time):
            places = range(start, min(start + kind.at_a_time, len(work.wanted)))
            samples.append(leash.submit(readers, _read, kind, work, places))
        return [left] if left else []

    def finish(self, kind: Kind) -> FeatureBatch:
        made = [one for some in self.samples for one in some.result()]
        work, self.work, self.samples = self.work, None, ()
        assert work is not None
        batch = kind.finish(work, made)
        del work
        self.memory.shrink(kind.kept_bytes(self.rows, batch))
        return batch

    def abandon(self) -> None:
        """Wait until nothing writes into the slab any more, and give the memory back."""
        wait(self.samples)
        self.work, self.samples = None, ()
        self.memory.release()


def _read(kind: Kind, work: PendingBatch, places: range) -> Sequence[Made]:
    some = slice(places.start, places.stop)
    return kind.samples(work.wanted[some], None if work.slab is None else work.slab[some])
