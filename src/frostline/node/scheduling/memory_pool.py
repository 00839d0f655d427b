"""The node's memory: its budget divided into shares, and threads that wait for their turn in one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

from frostline.batching import ANYBODY, Claim, FairShares, MemoryBudget

__all__ = ("Abandoned", "Lane", "Pool", "PoolStatistics", "Reservation", "Shares", "cells_bytes")


# Enough for a megabyte for each of the threads that read.
_MAX_AHEAD = 32 << 20


class Abandoned(Exception):
    """Nobody wants the answer any more; never leaves the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The budget of a node, divided for good, so that no work waits for memory while others wait for its own.

    A request goes through them in the order below and never waits in an earlier one than it holds: that is
    why nothing can stand still for ever.

    Attributes:
        messages: requests as they were sent, read and kept.
        weights: resident prefixes; on an accelerator they lie in its memory too, and must fit both.
        work: batches from their first sample read until they are sent, and uploads while they are read.
        decode: encoded samples and what decoding them needs.
        ahead: what was read together with a sample that was asked for; nobody waits for it.
        device: activations of the batch that runs, and of a second where they fit, in the accelerator's memory where
            there is one.
    """

    messages: int
    weights: int
    work: int
    decode: int
    ahead: int
    device: int

    @classmethod
    def of(cls, memory_bytes: int, device_bytes: int | None = None) -> "Shares":
        """Sixteenths: one, three, two, three, two; one for decoded Parquet columns, four are left to the allocator.

        What is read ahead has some of what decoding would have: half a sixteenth, and no more than 32 MiB.

        Blocks that were freed between others that are in use still take memory. A node under a load of everything
        at once took up to 1.46 times what was reserved (``tests/node/test_node_memory.py`` with 400 MiB, ten runs).

        Args:
            memory_bytes: of the processor.
            device_bytes: that are free in an accelerator's own memory; None where there is none. Half of them may
                hold weights, and of what those leave a quarter is left to libraries and to the gaps between blocks.
        """
        part = memory_bytes // 16
        ahead = min(part // 2, _MAX_AHEAD)
        weights, device = 3 * part, 2 * part
        if device_bytes is not None:
            weights = min(weights, device_bytes // 2)
            device = (device_bytes - weights) * 3 // 4
        return cls(messages=part, weights=weights, work=2 * part, decode=3 * part - ahead, ahead=ahead, device=device)

    def pools(self, turns: FairShares | None = None) -> "dict[str, Pool]":
        """An empty pool for each share, by its name; for work by the tenants' turns where those are given."""
        return {name: Pool(nbytes, turns if name == "work" else None) for name, nbytes in asdict(self).items()}


def cells_bytes(memory_bytes: int) -> int:
    """Of a node's budget, what decoded columns of Parquet files may take: who waits for it holds none of it."""
    return memory_bytes // 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """Where a share of the memory stands.

    Attributes:
        total_bytes: of the share; if ``waiting`` is rarely 0, give the node more memory.
        reserved_bytes: in use or promised now.
        peak_bytes: most of it at once so far; never above the total.
        waiting: pieces of work that wait for memory.
    """

    total_bytes: int
    reserved_bytes: int
    peak_bytes: int
    waiting: int


class Reservation:
    """Memory that may be used until it is given back. A context manager; safe for threads."""

    def __init__(self, pool: "Pool", number: int) -> None:
        self._pool = pool
        self._number = number

    def shrink(self, nbytes: int) -> None:
        """Keep only so much of it; what it was for has run."""
        with self._pool.changing() as budget:
            budget.shrink(self._number, nbytes)

    def release(self) -> None:
        """Give it back. Calling it again does nothing."""
        with self._pool.changing() as budget:
            budget.release(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Pool:
    """One share of the memory. Safe for threads, which wait in it as ``batching.MemoryBudget`` orders them.

    Args:
        total_bytes: of the share.
        turns: the order between tenants; without it first come is first served.
    """

    def __init__(self, total_bytes: int, turns: FairShares | None = None) -> None:
        self._budget = MemoryBudget(total_bytes, turns)
        self._lock = threading.Lock()
        # One for each who waits: to wake all for what one gets costs a switch of threads each.
        self._waiting: dict[int, threading.Condition] = {}

    @property
    def total_bytes(self) -> int:
        """All that there is."""
        return self._budget.total_bytes

    def reserve(
        self,
        nbytes: int,
        is_abandoned: Callable[[], bool],
        claim: Claim = ANYBODY,
        longest_s: float | None = None,
    ) -> Reservation:
        """Wait for memory.

        Args:
            nbytes: how much.
            is_abandoned: looked at again after every change and ``wake``.
            claim: whose it will be.
            longest_s: that is waited; None waits until it is there.

        Raises:
            OverBudget: The share can never hold it.
            Abandoned: It is no longer wanted, or did not come in that time.
        """
        with self._lock:
            number = self._budget.ask(nbytes, claim)
            self._tell()
            mine = self._waiting[number] = threading.Condition(self._lock)
            has_ended = mine.wait_for(lambda: self._budget.is_granted(number) or is_abandoned(), longest_s)
            del self._waiting[number]
            if is_abandoned() or not has_ended:
                self._budget.release(number)
                self._tell()
                raise Abandoned
        return Reservation(self, number)

    def take(self, nbytes: int, claim: Claim = ANYBODY) -> Reservation | None:
        """Memory that is there now, or None.

        Raises:
            OverBudget: The share can never hold it.
        """
        with self._lock:
            self._budget.check(nbytes)
            number = self._budget.take(nbytes, claim)
        return None if number is None else Reservation(self, number)

    def held_bytes(self, tenant: str) -> int:
        """What a tenant holds of it now."""
        with self._lock:
            return self._budget.held_bytes(tenant)

    def is_full(self, tenant: str) -> bool:
        """Whether a tenant's work waits for memory that it holds itself."""
        with self._lock:
            return self._budget.is_full(tenant)

    def wake(self) -> None:
        """Have all who wait look whether they are still wanted."""
        with self._lock:
            for one in self._waiting.values():
                one.notify()

    @contextmanager
    def changing(self) -> Iterator[MemoryBudget]:
        """The budget to change; those who have what they waited for go on afterwards."""
        with self._lock:
            yield self._budget
            self._tell()

    def statistics(self) -> PoolStatistics:
        """Where it stands."""
        with self._lock:
            return PoolStatistics(
                total_bytes=self._budget.total_bytes,
                reserved_bytes=self._budget.reserved_bytes,
                peak_bytes=self._budget.peak_bytes,
                waiting=self._budget.waiting,
            )

    def _tell(self) -> None:
        """Have those go on that were granted what they wait for."""
        for number, one in self._waiting.items():
            if self._budget.is_granted(number):
                one.notify()


class Lane:
    """One request's way into a share of the memory: what it asks for is asked for in its tenant's name.

    Args:
        pool: the share.
        claim: what is said with the next piece of work.
        max_bytes: the request's tenant may hold no more; None where there is no such bound.
    """

    def __init__(self, pool: Pool, claim: Callable[[], Claim], max_bytes: int | None = None) -> None:
        self._pool = pool
        self._claim = claim
        self._most = pool.total_bytes if max_bytes is None else min(max_bytes, pool.total_bytes)

    @property
    def total_bytes(self) -> int:
        """All that the tenant may hold at once."""
        return self._most

    def reserve(self, nbytes: int, is_abandoned: Callable[[], bool], longest_s: float | None = None) -> Reservation:
        """Wait for memory; see ``Pool.reserve``."""
        return self._pool.reserve(nbytes, is_abandoned, self._claim(), longest_s)

    def take(self, nbytes: int) -> Reservation | None:
        """Memory that is there now, or None; see ``Pool.take``."""
        return self._pool.take(nbytes, self._claim())

    def wake(self) -> None:
        """Have all who wait look whether they are still wanted."""
        self._pool.wake()
