"""The path of one request: a batch is read and decoded while the one before it runs and is sent."""

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Skipped
from frostline.node.leash import Leash
from frostline.node.memory import Lane, Reservation
from frostline.stores.faces import Buffer

__all__ = ("Kind", "Made", "Slab", "batches")

Slab = npt.NDArray[np.float32]
Made = Skipped | Buffer | None
"""What became of a sample: it was skipped, it stays encoded, or it was decoded into its row of the slab."""


class Kind(Protocol):
    """What a request does with its samples."""

    def stretches(self) -> Sequence[range]:
        """The rows of the request that make up each batch."""

    def nbytes(self, rows: range) -> int:
        """What a batch takes, from its first sample read until it is sent."""

    def kept_bytes(self, rows: range, batch: FeatureBatch) -> int:
        """What is left of that when the answer is made."""

    def slab(self, rows: range) -> Slab | None:
        """Where the samples are decoded to, a row each; None where they stay encoded."""

    def sample(self, row: int, out: Slab | None) -> Made:
        """Read one sample. Called from several threads."""

    def finish(self, rows: range, made: Sequence[Made], slab: Slab | None) -> FeatureBatch:
        """The answer of a batch that was read."""


def batches(kind: Kind, memory: Lane, readers: Executor, leash: Leash) -> Generator[FeatureBatch, None, None]:
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
                under_way[0].start(kind, readers, leash)
            ahead = memory.take(kind.nbytes(rest[0])) if rest else None
            if ahead is not None:
                under_way.append(_Loading(rows=rest.popleft(), memory=ahead))
                under_way[-1].start(kind, readers, leash)
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
    slab: Slab | None = None
    samples: "Sequence[Future[Made]]" = ()

    def start(self, kind: Kind, readers: Executor, leash: Leash) -> None:
        slab = self.slab = kind.slab(self.rows)
        samples: list[Future[Made]] = []
        self.samples = samples
        for place, row in enumerate(self.rows):
            out = None if slab is None else slab[place]
            samples.append(leash.submit(readers, kind.sample, row, out))

    def finish(self, kind: Kind) -> FeatureBatch:
        made = [sample.result() for sample in self.samples]
        slab, self.slab, self.samples = self.slab, None, ()
        batch = kind.finish(self.rows, made, slab)
        del slab
        self.memory.shrink(kind.kept_bytes(self.rows, batch))
        return batch

    def abandon(self) -> None:
        """Wait until nothing writes into the slab any more, and give the memory back."""
        wait(self.samples)
        self.slab, self.samples = None, ()
        self.memory.release()
