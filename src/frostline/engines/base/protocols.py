"""What runs a prefix: one protocol for every engine, and two for what only some of them can."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = ("Arrays", "Between", "Dividing", "Engine", "Footprint", "Queueing", "RunningBatch")

Arrays = npt.NDArray[np.generic] | Sequence[npt.NDArray[np.generic]]
"""What comes in: one array for each input, or the one array of a network with one input."""

Between = Callable[[], None]
"""What is called between two operations of a run; it may end the run by raising something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of one run at its peak: ``fixed_bytes + batch * bytes_per_sample``, weights not counted."""

    fixed_bytes: int
    bytes_per_sample: int

    def at(self, batch: int) -> int:
        """Bytes for one batch of this many samples."""
        return self.fixed_bytes + batch * self.bytes_per_sample


class Engine(Protocol):
    """A prefix ready to run. Threads may share it; it need not run on more than one at a time."""

    @property
    def name(self) -> str:
        """As in ``engines.backends.catalog.OFFERS``."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that it holds, at most."""

    def footprint(self, cut: int) -> Footprint:
        """Memory of one run up to this cut, weights not counted."""

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Compute what crosses a cut, with the shapes and dtypes that the cut declares.

        Args:
            inputs: an array ``[n, ...]`` for each input of the network, as cut 1 declares them, or the one; or where
                the engine's name says what they mean (``engines.base.identity``), pixels ``uint8[n, H, W, C]``. Not
                changed.
            cut: one that the engine was made for.

        Returns:
            One C-contiguous array ``[n, ...]`` for each tensor that crosses.
        """


class RunningBatch(Protocol):
    """A run that was begun. ``outputs`` is to be called; until it has ended, the inputs must not change."""

    def drain(self) -> None:
        """Wait until its last pieces run, of which some will end before the others. What failed, ``outputs`` raises."""

    def outputs(self) -> tuple[npt.NDArray[np.generic], ...]:
        """Wait for what ``Engine.run`` returns, or raise what it raises."""


@runtime_checkable
class Queueing(Protocol):
    """An engine to which a batch may be given while it runs another: its threads go from one to the other."""

    def begin(self, inputs: Arrays, cut: int) -> RunningBatch | None:
        """Begin what ``Engine.run`` does, with the same arguments; None where it takes one batch at a time."""


@runtime_checkable
class Dividing(Protocol):
    """An engine whose runs can be interrupted between two operations."""

    def run_divided(self, inputs: Arrays, cut: int, between: Between) -> tuple[npt.NDArray[np.generic], ...]:
        """What ``Engine.run`` does with the same arguments, and raises; ``between`` is called behind each operation."""
