"""Runs a prefix on decoded batches, one at a time, within the memory for activations."""

import math
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.batching import ROWS, Limit, readable_bytes
from frostline.core import Cut
from frostline.engines.profile import cut_seconds, cut_values
from frostline.errors import OverBudget
from frostline.node.leash import Leash
from frostline.node.memory import Pool, Reservation
from frostline.node.pipeline import Slab
from frostline.node.prefixes import Resident
from frostline.node.statistics import Counters

__all__ = ("HEADROOM", "Device", "PrefixRun")

HEADROOM = 1.25
"""What a run may take for each byte of the dry run's count, for the workspaces of kernels.

ResNet-18 takes 1.0 to 1.2 at its peak; ``tests/node/test_node_memory.py`` holds a whole node to its budget.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What runs prefixes, one batch at a time.

    Attributes:
        name: in torch's words.
        thread: the one thread from which it runs, so that the engine keeps one team of threads.
        memory: for activations.
        counters: told what was done.
    """

    name: str
    thread: Executor
    memory: Pool
    counters: Counters


class PrefixRun:
    """A prefix up to one cut, for one request.

    Args:
        resident: the prefix.
        cut: number of the cut.
        device: what runs it.
        leash: of the request.
    """

    def __init__(self, resident: Resident, cut: int, device: Device, leash: Leash) -> None:
        self._resident = resident
        self._cut = resident.cut(cut)
        self._footprint = resident.engine.footprint(cut)
        self._device = device
        self._leash = leash

    @property
    def crossing(self) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """Shapes of what crosses the cut, a sample, and the dtypes."""
        return self._cut.shapes, self._cut.dtypes

    @property
    def answer_bytes(self) -> int:
        """What crosses the cut, a sample."""
        crossing = zip(self._cut.shapes, self._cut.dtypes, strict=True)
        return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in crossing)

    @property
    def limit(self) -> Limit:
        """The rows that the memory for activations allows."""
        return Limit(
            room_bytes=int(self._device.memory.total_bytes / HEADROOM),
            fixed_bytes=self._footprint.fixed_bytes,
            bytes_per_row=self._footprint.bytes_per_sample,
        )

    def check(self) -> None:
        """Do nothing if eight rows fit.

        Raises:
            OverBudget: They do not.
        """
        if self.limit.most_rows < ROWS:
            raise OverBudget(
                f"running {ROWS} samples to this cut takes {readable_bytes(self._bytes(ROWS))}, and the node has "
                f"{readable_bytes(self._device.memory.total_bytes)} for it: start it with more --memory, "
                "or choose an earlier cut"
            )

    def __call__(self, slab: Slab) -> list[npt.NDArray[np.generic]]:
        """What crosses the cut, when it is this batch's turn."""
        return self._leash.submit(self._device.thread, self._run, slab).result()

    def seconds(self, slab: Slab, *, repeats: int) -> npt.NDArray[np.float64]:
        """Seconds a sample up to each cut, as ``engines.profile.cut_seconds`` gives them."""
        return self._leash.submit(self._device.thread, self._measure, slab, repeats).result()

    def values(self, slab: Slab, cuts: Sequence[Cut]) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
        """What crosses some cuts for up to eight samples, as ``engines.profile.cut_values`` gives it."""
        return self._leash.submit(self._device.thread, self._values, slab, cuts).result()

    def _run(self, slab: Slab) -> list[npt.NDArray[np.generic]]:
        with self._activations(len(slab)):
            started = time.perf_counter()
            tensors = self._resident.engine.run(slab, self._cut.number)
            self._device.counters.add(compute_s=time.perf_counter() - started)
            return [_apart(tensor, slab) for tensor in tensors]

    def _measure(self, slab: Slab, repeats: int) -> npt.NDArray[np.float64]:
        graph, cuts = self._resident.prefix.graph, self._resident.prefix.cuts
        with self._activations(len(slab)):
            return cut_seconds(graph, self._leaves(), cuts, slab, repeats=repeats, clock=time.perf_counter)

    def _values(self, slab: Slab, cuts: Sequence[Cut]) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
        with self._activations(ROWS):
            return cut_values(self._resident.prefix.graph, self._leaves(), cuts, slab)

    def _leaves(self) -> list[Any]:
        prefix = self._resident.prefix
        return [prefix.tensors[tensor].to(self._device.name) for _, tensor in prefix.graph.leaves]

    def _activations(self, rows: int) -> Reservation:
        memory = self._device.memory.take(self._bytes(rows))
        assert memory is not None, "one batch runs at a time, and it was made to fit"
        return memory

    def _bytes(self, rows: int) -> int:
        return int(self._footprint.at(rows) * HEADROOM)


def _apart(tensor: npt.NDArray[np.generic], slab: Slab) -> npt.NDArray[np.generic]:
    # An answer that views the pixels would keep them all while it waits to be sent.
    return tensor.copy() if np.may_share_memory(tensor, slab) else tensor
