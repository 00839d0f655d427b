"""Runs a prefix on the batches of one request when the device is free, within the memory for activations."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from frostline.batching import ROWS, Limit, readable_bytes
from frostline.core import Cut
from frostline.core.features import array_dtype
from frostline.engines.base.identity import levels_of
from frostline.engines.base.protocols import Footprint
from frostline.errors import OverBudget
from frostline.node.request.devices import Devices
from frostline.node.request.executor import Device
from frostline.node.request.pipeline import Slab
from frostline.node.request.work_queue import HEADROOM, QueuedRows, RowWork
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.memory_pool import Reservation
from frostline.node.scheduling.tenants import Account
from frostline.node.weights.prefix_registry import Resident

__all__ = ("HEADROOM", "PrefixRun")

T = TypeVar("T")


class PrefixRun:
    """A prefix up to one cut, for one request.

    Args:
        resident: prefix with its engine.
        cut: number of the cut.
        devices: run the prefix, each with its own engine.
        scope: cancel scope of the request.
        account: account of the tenant that asks.
    """

    def __init__(self, resident: Resident, cut: int, devices: Devices, scope: CancelScope, account: Account) -> None:
        self._resident = resident
        self._cut = resident.cut(cut)
        self._footprint = resident.engine.footprint(cut)
        self._devices = devices
        self._scope = scope
        self._account = account

    @property
    def crossing(self) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """The shapes per sample and the dtypes of the tensors at the cut."""
        return self._cut.shapes, self._cut.dtypes

    @property
    def takes(self) -> tuple[tuple[int, ...], "np.dtype[Any]"]:
        """The shape and dtype of a row of the engine's input: the network's input, or the pixels before that."""
        channels, *sides = self._resident.prefix.input_shape
        if levels_of(self._resident.engine.name):
            return (*sides, channels), np.dtype(np.uint8)
        return (channels, *sides), np.dtype(self._resident.prefix.inputs[0].dtype)

    @property
    def answer_bytes(self) -> int:
        """The bytes per sample at the cut."""
        crossing = zip(self._cut.shapes, self._cut.dtypes, strict=True)
        return sum(math.prod(shape) * array_dtype(kind).itemsize for shape, kind in crossing)

    @property
    def limit(self) -> Limit:
        """The rows that the memory for activations allows."""
        return Limit(
            room_bytes=int(self._devices.memory.total_bytes / HEADROOM),
            fixed_bytes=self._footprint.fixed_bytes,
            bytes_per_row=self._footprint.bytes_per_sample,
        )

    def check(self, rows: int = ROWS) -> None:
        """Check that so many rows fit.

        Raises:
            OverBudget: if they do not.
        """
        if self.limit.max_rows < rows:
            raise OverBudget(
                f"running {rows} samples to this cut takes {readable_bytes(self._bytes(rows))}, and the node has "
                f"{readable_bytes(self._devices.memory.total_bytes)} for it: start it with more --memory, "
                "or choose an earlier cut"
            )

    def expected_s(self, run_rows: int) -> float:
        """The expected device seconds of a run."""
        works = self._works(run_rows)
        only = self._devices.only
        return self._devices.expected_s(works) if only is None else only.expected_s(works[0])

    def __call__(self, slab: Slab, rows: int) -> list[npt.NDArray[np.generic]]:
        """Run the prefix on the first rows of a slab when it is their turn, and return the tensors at the cut.

        Meanwhile the slab belongs to the device, which may add rows of other requests behind these, to run them
        together. Every tensor has at least these rows, and they come first.
        """
        works = self._works(len(slab))
        batch = QueuedRows(
            account=self._account,
            is_abandoned=self._scope.is_cancelled,
            work=works[0],
            slab=slab,
            rows=rows,
            served=self._resident.served,
        )
        if (only := self._devices.only) is None:
            return self._devices.run(batch, works, self._scope)
        return self._scope.follow(batch.future, partial(only.enqueue, batch)).result()

    def seconds(self, slab: Slab, *, repeats: int) -> npt.NDArray[np.float64]:
        """Measure the seconds per sample up to each cut on the first device; see ``TorchEngine.cut_seconds``.

        The other devices measure the same at the same time, so that it is known how fast all are together.
        """
        calls = {number: partial(self._measure, number, slab, repeats) for number in self._devices.in_service()}
        found = self._devices.all_alone(calls, self._account, self._scope)
        self._devices.measured({number: float(np.median(each[:, -1])) for number, each in found.items()})
        return found[min(found)]

    def values(self, slab: Slab, cuts: Sequence[Cut]) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
        """Compute the tensors at some cuts for up to eight samples; see ``TorchEngine.cut_values``."""
        number = self._devices.in_service()[0]
        return self._devices.alone(number, partial(self._values, number, slab, cuts), self._account, self._scope)

    def reference_footprint(self, cut: int) -> Footprint:
        """The memory of one run of the reference up to a cut."""
        return self._resident.reference.footprint(cut)

    def _works(self, run_rows: int) -> tuple[RowWork, ...]:
        """The work on each device."""
        return tuple(
            RowWork(engine=engine, cut=self._cut.number, run_rows=run_rows) for engine in self._resident.engines
        )

    def alone(self, call: Callable[[], T]) -> T:
        """Run a call that has the first device to itself, and return its result."""
        return self._devices.alone(self._devices.in_service()[0], call, self._account, self._scope)

    def _measure(self, number: int, slab: Slab, repeats: int) -> npt.NDArray[np.float64]:
        device, reference = self._devices.device(number), self._resident.references[number]
        with self._activations(device, len(slab)):
            return reference.cut_seconds(slab, repeats=repeats, clock=time.perf_counter, between=device.between)

    def _values(self, number: int, slab: Slab, cuts: Sequence[Cut]) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
        device = self._devices.device(number)
        with self._activations(device, ROWS):
            return self._resident.references[number].cut_values(cuts, slab, device.between)

    def _activations(self, device: Device, rows: int) -> Reservation:
        memory = device.memory.take(self._bytes(rows))
        assert memory is not None, "calls run alone, and its rows were chosen to fit"
        return memory

    def _bytes(self, rows: int) -> int:
        return int(self._footprint.at(rows) * HEADROOM)
