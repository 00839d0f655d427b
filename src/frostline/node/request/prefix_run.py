"""Runs a prefix on the batches of one request when it is their turn, within the memory for activations."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from frostline.batching import ROWS, Limit, readable_bytes
from frostline.core import Cut
from frostline.engines.base.identity import levels_of
from frostline.engines.base.protocols import Footprint
from frostline.errors import OverBudget
from frostline.node.request.executor import Device
from frostline.node.request.pipeline import Slab
from frostline.node.request.work_queue import HEADROOM, ExclusiveCall, QueuedRows, RowWork
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.memory_pool import Reservation
from frostline.node.scheduling.tenants import Account
from frostline.node.weights.prefix_registry import Resident

__all__ = ("HEADROOM", "PrefixRun")

T = TypeVar("T")


class PrefixRun:
    """A prefix up to one cut, for one request.

    Args:
        resident: the prefix.
        cut: number of the cut.
        device: what runs it.
        leash: of the request.
        account: whose request it is.
    """

    def __init__(self, resident: Resident, cut: int, device: Device, leash: CancelScope, account: Account) -> None:
        self._resident = resident
        self._cut = resident.cut(cut)
        self._footprint = resident.engine.footprint(cut)
        self._device = device
        self._leash = leash
        self._account = account

    @property
    def crossing(self) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """Shapes of what crosses the cut, a sample, and the dtypes."""
        return self._cut.shapes, self._cut.dtypes

    @property
    def takes(self) -> tuple[tuple[int, ...], type[np.generic]]:
        """Shape and dtype of a row that the engine takes: what the network takes, or the pixels before that."""
        channels, *sides = self._resident.prefix.input_shape
        if levels_of(self._resident.engine.name):
            return (*sides, channels), np.uint8
        return (channels, *sides), np.float32

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

    def check(self, rows: int = ROWS) -> None:
        """Do nothing if so many rows fit.

        Raises:
            OverBudget: They do not.
        """
        if self.limit.max_rows < rows:
            raise OverBudget(
                f"running {rows} samples to this cut takes {readable_bytes(self._bytes(rows))}, and the node has "
                f"{readable_bytes(self._device.memory.total_bytes)} for it: start it with more --memory, "
                "or choose an earlier cut"
            )

    def expected_s(self, run_rows: int) -> float:
        """What a run will probably take of the device."""
        return self._device.expected_s(self._work(run_rows))

    def __call__(self, slab: Slab, rows: int) -> list[npt.NDArray[np.generic]]:
        """What crosses the cut for the first rows of a slab, when it is their turn.

        The slab belongs to the device meanwhile, which may put rows of other requests behind these, to have one run
        for all. Every tensor has at least these rows, which come first.
        """
        batch = QueuedRows(
            account=self._account,
            is_abandoned=self._leash.is_cut,
            work=self._work(len(slab)),
            slab=slab,
            rows=rows,
            served=self._resident.served,
        )
        return self._leash.follow(batch.future, partial(self._device.enqueue, batch)).result()

    def seconds(self, slab: Slab, *, repeats: int) -> npt.NDArray[np.float64]:
        """Seconds a sample up to each cut, as ``TorchEngine.cut_seconds`` gives them."""
        return self.alone(partial(self._measure, slab, repeats))

    def values(self, slab: Slab, cuts: Sequence[Cut]) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
        """What crosses some cuts for up to eight samples, as ``TorchEngine.cut_values`` gives it."""
        return self.alone(partial(self._values, slab, cuts))

    def reference_footprint(self, cut: int) -> Footprint:
        """Memory of one run of the reference up to a cut."""
        return self._resident.reference.footprint(cut)

    def _work(self, run_rows: int) -> RowWork:
        return RowWork(engine=self._resident.engine, cut=self._cut.number, run_rows=run_rows)

    def alone(self, call: Callable[[], T]) -> T:
        """What a call gives that has the device alone."""
        entry = ExclusiveCall(account=self._account, is_abandoned=self._leash.is_cut, call=call)
        made: T = self._leash.follow(entry.future, partial(self._device.enqueue, entry)).result()
        return made

    def _measure(self, slab: Slab, repeats: int) -> npt.NDArray[np.float64]:
        with self._activations(len(slab)):
            return self._resident.reference.cut_seconds(
                slab, repeats=repeats, clock=time.perf_counter, between=self._device.between
            )

    def _values(self, slab: Slab, cuts: Sequence[Cut]) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
        with self._activations(ROWS):
            return self._resident.reference.cut_values(cuts, slab, self._device.between)

    def _activations(self, rows: int) -> Reservation:
        memory = self._device.memory.take(self._bytes(rows))
        assert memory is not None, "one batch runs at a time, and it was made to fit"
        return memory

    def _bytes(self, rows: int) -> int:
        return int(self._footprint.at(rows) * HEADROOM)
