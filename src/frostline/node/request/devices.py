"""Several devices as one: gives each batch to one of them, and takes out a device that fails where another does not."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from frostline.batching.devices import DeviceLoad, batch_seconds, combined_speed, first_to_finish
from frostline.node.request.executor import Device
from frostline.node.request.work_queue import ExclusiveCall, Outputs, QueuedRows, RowWork
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.memory_pool import Cancelled, Pool, PoolStatistics
from frostline.node.scheduling.tenants import Account

__all__ = ("Devices",)

T = TypeVar("T")

_LOG = logging.getLogger("frostline.node")


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    """A device, and what is known of it.

    Attributes:
        device: device that runs what it is given.
        waiting_s: expected seconds of what it was given and has not finished.
        is_out: whether it failed, so that it is given no more.
        measured_s: seconds that it took for what was last measured on all devices; None before that.
    """

    device: Device
    waiting_s: float = 0.0
    is_out: bool = False
    measured_s: float | None = None


class Devices:
    """The devices of a node. They share its requests and its tenants' fair shares. Safe for threads.

    A device on which a batch fails that another one computes is given no more work, and the log says so; the last one
    stays. A batch that fails on all of them is refused, as on a node with one device.

    Args:
        devices: devices, each with its own memory for activations.

    Attributes:
        only: the device of a node that has one, to which its batches go without a choice; None if there are several.
        memory: memory for activations of the first device; that of the others has the same size.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.only = devices[0] if len(devices) == 1 else None
        self.memory: Pool = devices[0].memory
        self._members = [_Member(device=device) for device in devices]
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """The number of batches and calls that wait or run."""
        return sum(member.device.waiting for member in self._members)

    @property
    def speed(self) -> float:
        """How many times as fast those in service are together as the first of them, by what was last measured."""
        return combined_speed([self._members[number].measured_s for number in self.in_service()])

    def in_service(self) -> tuple[int, ...]:
        """The numbers of the devices that are given work."""
        with self._lock:
            return tuple(number for number, member in enumerate(self._members) if not member.is_out)

    def device(self, number: int) -> Device:
        """The device of that number."""
        return self._members[number].device

    def expected_s(self, works: Sequence[RowWork]) -> float:
        """The expected seconds of a run, on the fastest device in service.

        Args:
            works: the work on each device.
        """
        known = [self._members[number].device.known_s(works[number]) for number in self.in_service()]
        return min(batch_seconds([DeviceLoad(waiting_s=0.0, batch_s=seconds) for seconds in known]))

    def run(self, batch: QueuedRows, works: Sequence[RowWork], scope: CancelScope) -> Outputs:
        """Run a batch on the device that is expected to finish it first; if it fails there, on another one.

        Args:
            batch: rows to be run.
            works: the work on each device.
            scope: cancel scope of the request.

        Raises:
            Cancelled: if the request was cancelled.
        """
        failures: dict[int, BaseException] = {}
        while True:
            number, cost_s = self._give(batch, works, failures)
            member, batch.work = self._members[number], works[number]
            try:
                future = scope.follow(batch.future, partial(member.device.enqueue, batch))
                error = future.exception()
            finally:
                with self._lock:
                    member.waiting_s -= cost_s
            if error is None:
                self._take_out(failures)
                return future.result()
            failures[number] = error
            if isinstance(error, Cancelled) or not set(self.in_service()) - failures.keys():
                raise next(iter(failures.values()))
            batch.begin_again()

    def alone(self, number: int, call: Callable[[], T], account: Account, scope: CancelScope) -> T:
        """Run a call that has one device to itself, and return its result."""
        return self.all_alone({number: call}, account, scope)[number]

    def all_alone(self, calls: Mapping[int, Callable[[], T]], account: Account, scope: CancelScope) -> dict[int, T]:
        """Run a call on each of some devices at the same time; a device whose call fails is taken out.

        Returns:
            The result of each device that has one.

        Raises:
            Exception: what a call raised, if all of them failed.
        """
        entries = {
            number: ExclusiveCall(account=account, is_abandoned=scope.is_cancelled, call=call)
            for number, call in calls.items()
        }
        for number, entry in entries.items():
            scope.follow(entry.future, partial(self._members[number].device.enqueue, entry))
        errors = {number: entry.future.exception() for number, entry in entries.items()}
        failures = {number: error for number, error in errors.items() if error is not None}
        cancelled = [error for error in failures.values() if isinstance(error, Cancelled)]
        if cancelled or len(failures) == len(calls):
            raise next(iter(cancelled or failures.values()))
        self._take_out(failures)
        return {number: entry.future.result() for number, entry in entries.items() if number not in failures}

    def measured(self, seconds: Mapping[int, float]) -> None:
        """Take what the same work took on each device, by its number; see ``speed``."""
        with self._lock:
            for number, member in enumerate(self._members):
                member.measured_s = seconds.get(number)

    def memory_statistics(self) -> PoolStatistics:
        """The state of the memory for activations of all devices together."""
        each = [member.device.memory.statistics() for member in self._members]
        return PoolStatistics(
            total_bytes=sum(pool.total_bytes for pool in each),
            reserved_bytes=sum(pool.reserved_bytes for pool in each),
            peak_bytes=sum(pool.peak_bytes for pool in each),
            waiting=sum(pool.waiting for pool in each),
        )

    def close(self) -> None:
        """Wait until all work is done, and stop the threads."""
        for member in self._members:
            member.device.close()

    def _give(self, batch: QueuedRows, works: Sequence[RowWork], failed: Collection[int]) -> tuple[int, float]:
        """The device that takes a batch, and the seconds that are now expected to wait there for it."""
        known = [member.device.known_s(work) for member, work in zip(self._members, works, strict=True)]
        share = batch.left / batch.work.run_rows  # rows of others may fill the run up
        with self._lock:
            loads = [
                DeviceLoad(
                    waiting_s=member.waiting_s,
                    batch_s=None if run_s is None else share * run_s,
                    may_take=not (member.is_out or number in failed),
                )
                for number, (member, run_s) in enumerate(zip(self._members, known, strict=True))
            ]
            chosen = first_to_finish(loads)
            cost_s = batch_seconds(loads)[chosen]
            self._members[chosen].waiting_s += cost_s
        return chosen, cost_s

    def _take_out(self, failures: Mapping[int, BaseException]) -> None:
        """Give no more to devices on which something failed that another one did."""
        for number, error in failures.items():
            member = self._members[number]
            with self._lock:
                is_news = not member.is_out
                member.is_out = True
            if is_news:
                _LOG.warning(
                    "device %s failed where another did not, and gets no more work until the node is started again: %s",
                    member.device.name,
                    error,
                )
