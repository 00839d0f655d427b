"""Divides the node's memory into pools, its device and threads between tenants, and cancels what a request began.

Cancels everything that one request has started: futures, waits for memory and waits in queues.
"""

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from frostline.batching import ANYBODY, Claim, FairShares, MemoryBudget, kept_part
from frostline.core.declared import Count
from frostline.core.errors import Unavailable
from frostline.core.system import in_background

__all__ = (
    "CancelScope",
    "Cancelled",
    "LockedFairShares",
    "Pool",
    "PoolStatistics",
    "Readers",
    "RequestMemory",
    "Reservation",
    "Shares",
    "cells_bytes",
)


# Seconds of a thread that a task is charged at most. A store that hung, or a node that was stopped, would else be paid
# for by whoever was at work then: it would wait until all others have had as much.
_MAX_CHARGE_S = 1.0
# One megabyte for each reading thread.
_MAX_AHEAD = 32 << 20


class Cancelled(Exception):
    """The request was cancelled. It never leaves the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """A node's memory budget, divided into fixed shares, so that no work waits for memory that other work needs.

    A request reserves from the shares in the order below, and never waits for an earlier share than those that it
    holds. This rules out deadlocks.

    Attributes:
        messages: bytes for requests while they are read and kept.
        weights: bytes for resident prefixes; on an accelerator they lie in its memory too, and must fit both.
        work: bytes for batches, from the first read of a sample until they are sent, and for uploads in progress.
        decode: bytes for encoded samples and for the buffers of decoding them.
        ahead: bytes for samples that were read together with a requested one; nobody waits for them.
        device: bytes for activations of the running batch, and of a second one if they fit; in the accelerator's
            memory if there is one.
    """

    messages: int
    weights: int
    work: int
    decode: int
    ahead: int
    device: int

    @classmethod
    def of(cls, memory_bytes: int, device_bytes: int | None = None) -> "Shares":
        """Divide a budget into sixteenths.

        Messages get one, weights three, work two, decode three and device two; one is for decoded Parquet columns, and
        four are left for the allocator. Reading ahead takes half a sixteenth of the decode share, at most 32 MiB.

        Freed blocks between blocks in use still occupy memory. A node under full load took up to 1.46 times what was
        reserved (``tests/node/test_memory.py`` with 400 MiB, ten runs).

        Args:
            memory_bytes: main memory.
            device_bytes: the free memory of an accelerator, if there is one. Half of it may hold weights. A quarter
                of the rest is left for libraries and for gaps between blocks.
        """
        part = memory_bytes // 16
        ahead = min(part // 2, _MAX_AHEAD)
        weights, device = 3 * part, 2 * part
        if device_bytes is not None:
            weights = min(weights, device_bytes // 2)
            device = (device_bytes - weights) * 3 // 4
        return cls(messages=part, weights=weights, work=2 * part, decode=3 * part - ahead, ahead=ahead, device=device)

    def pools(self, fair_shares: FairShares | None = None) -> "dict[str, Pool]":
        """An empty pool per share, by name; the pool for work uses the fair shares if they are given."""
        return {name: Pool(nbytes, fair_shares if name == "work" else None) for name, nbytes in asdict(self).items()}


def cells_bytes(memory_bytes: int) -> int:
    """The part of a node's budget for decoded columns of Parquet files."""
    return memory_bytes // 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """The state of a pool.

    Attributes:
        total_bytes: size of the share; if ``waiting`` is rarely 0, give the node more memory.
        reserved_bytes: bytes in use or promised now.
        peak_bytes: the largest ``reserved_bytes`` so far; it never exceeds the total.
        waiting: number of reservations that wait for memory.
    """

    total_bytes: Count
    reserved_bytes: Count
    peak_bytes: Count
    waiting: Count


class Reservation:
    """Memory that may be used until it is released. A context manager; safe for threads."""

    def __init__(self, pool: "Pool", number: int) -> None:
        self._pool = pool
        self._number = number

    def shrink(self, nbytes: int) -> None:
        """Keep only ``nbytes`` of it."""
        with self._pool.lock_budget() as budget:
            budget.shrink(self._number, nbytes)

    def release(self) -> None:
        """Release it. Calling it again does nothing."""
        with self._pool.lock_budget() as budget:
            budget.release(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Pool:
    """One share of the memory. Safe for threads, which wait in the order that ``batching.MemoryBudget`` decides.

    Args:
        total_bytes: size of the share.
        fair_shares: order between tenants; None serves them in order of arrival.
    """

    def __init__(self, total_bytes: int, fair_shares: FairShares | None = None) -> None:
        self._budget = MemoryBudget(total_bytes, fair_shares)
        self._lock = threading.Lock()
        # One condition per waiting thread: waking all of them for one grant costs a thread switch each.
        self._waiting: dict[int, threading.Condition] = {}

    @property
    def total_bytes(self) -> int:
        """The size of the pool."""
        return self._budget.total_bytes

    def reserve(
        self,
        nbytes: int,
        is_abandoned: Callable[[], bool],
        claim: Claim = ANYBODY,
        longest_s: float | None = None,
    ) -> Reservation:
        """Wait for memory and reserve it.

        Args:
            nbytes: number of bytes.
            is_abandoned: function that is called after every change and ``wake``; True cancels the wait.
            claim: tenant and cost of the work that asks.
            longest_s: maximum wait in seconds; None waits without a limit.

        Raises:
            OverBudget: The pool can never hold so much.
            Cancelled: The wait was cancelled or took too long.
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
                raise Cancelled
        return Reservation(self, number)

    def take(self, nbytes: int, claim: Claim = ANYBODY) -> Reservation | None:
        """Reserve memory if it is free now; None otherwise.

        Raises:
            OverBudget: The pool can never hold so much.
        """
        with self._lock:
            self._budget.check(nbytes)
            number = self._budget.take(nbytes, claim)
        return None if number is None else Reservation(self, number)

    def held_bytes(self, tenant: str) -> int:
        """The number of bytes that a tenant holds now."""
        with self._lock:
            return self._budget.held_bytes(tenant)

    def is_full(self, tenant: str) -> bool:
        """Whether work of a tenant waits for memory that the tenant itself holds."""
        with self._lock:
            return self._budget.is_full(tenant)

    def wake(self) -> None:
        """Make all waiting threads check whether they are still wanted."""
        with self._lock:
            for condition in self._waiting.values():
                condition.notify()

    @contextmanager
    def lock_budget(self) -> Iterator[MemoryBudget]:
        """The budget, locked for a change; threads whose reservation was granted by it continue afterwards."""
        with self._lock:
            yield self._budget
            self._tell()

    def statistics(self) -> PoolStatistics:
        """The current state."""
        with self._lock:
            return PoolStatistics(
                total_bytes=self._budget.total_bytes,
                reserved_bytes=self._budget.reserved_bytes,
                peak_bytes=self._budget.peak_bytes,
                waiting=self._budget.waiting,
            )

    def _tell(self) -> None:
        """Wake the threads whose reservation was granted."""
        for number, condition in self._waiting.items():
            if self._budget.is_granted(number):
                condition.notify()


class RequestMemory:
    """One request's access to a pool: it reserves in the name of its tenant.

    Args:
        pool: pool to reserve from.
        claim: function that returns the claim of the next piece of work.
        max_bytes: maximum that the tenant may hold; None for no such limit.
        tenants: number of tenants that share the pool.
    """

    def __init__(
        self, pool: Pool, claim: Callable[[], Claim], max_bytes: int | None = None, *, tenants: int = 1
    ) -> None:
        self._pool = pool
        self._claim = claim
        self._max_bytes = pool.total_bytes if max_bytes is None else min(max_bytes, pool.total_bytes)
        self._own_bytes = kept_part(pool.total_bytes, tenants) or self._max_bytes

    @property
    def total_bytes(self) -> int:
        """The number of bytes that the tenant may hold at once."""
        return self._max_bytes

    @property
    def batch_bytes(self) -> int:
        """The number of bytes that a batch takes at most, if it can be that small.

        A quarter of what the tenant may hold, so that other batches are read meanwhile, and no more than its own part,
        so that it waits for no tenant whose client takes an answer slowly.
        """
        return min(self._max_bytes // 4, self._own_bytes)

    def reserve(self, nbytes: int, is_abandoned: Callable[[], bool], longest_s: float | None = None) -> Reservation:
        """Wait for memory; see ``Pool.reserve``."""
        return self._pool.reserve(nbytes, is_abandoned, self._claim(), longest_s)

    def take(self, nbytes: int) -> Reservation | None:
        """Reserve memory if it is free now, else None; see ``Pool.take``."""
        return self._pool.take(nbytes, self._claim())

    def wake(self) -> None:
        """Make all waiting threads check whether they are still wanted."""
        self._pool.wake()


P = ParamSpec("P")
T = TypeVar("T")


class _Wakeable(Protocol):
    def wake(self) -> None: ...


class CancelScope:
    """The work that one request has started. Safe for threads.

    Args:
        waits: pools and queues in which the request may wait; each is woken by ``cancel``.
    """

    def __init__(self, waits: tuple[_Wakeable, ...]) -> None:
        self._waits = waits
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._is_revoked = False
        self._under_way: set[Future[object]] = set()
        self._ends: list[Callable[[], None]] = []

    def is_cancelled(self) -> bool:
        """Whether the request was cancelled."""
        return self._is_cancelled

    def is_revoked(self) -> bool:
        """Whether it was cancelled because others wait for what it holds."""
        return self._is_revoked

    def revoke(self) -> None:
        """Cancel it because others wait for what it holds. Calling it again does nothing."""
        self._is_revoked = True
        self.cancel()

    def on_cancel(self, end: Callable[[], None]) -> None:
        """Call ``end`` when the scope is cancelled, in the cancelling thread; it may be called more than once."""
        with self._lock:
            self._ends.append(end)
        if self._is_cancelled:
            end()

    def submit(self, executor: Executor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Submit a call to an executor.

        Raises:
            Cancelled: The request was cancelled before.
        """
        with self._lock:
            self._check()
            future = executor.submit(call, *args, **kwargs)
            self._under_way.add(future)  # type: ignore[arg-type]  # its result is never set here
        future.add_done_callback(self._done)
        return future

    def follow(self, future: "Future[T]", begin: Callable[[], None]) -> "Future[T]":
        """Call ``begin``, which starts the work that ``future`` reports, and cancel the future with the scope.

        Raises:
            Cancelled: The request was cancelled before.
        """
        with self._lock:
            self._check()
            begin()
            self._under_way.add(future)  # type: ignore[arg-type]  # its result is never set here
        future.add_done_callback(self._done)
        return future

    def cancel(self) -> None:
        """Cancel the futures that have not started, and wake every waiting thread. Calling it again does nothing."""
        with self._lock:
            self._is_cancelled = True
            under_way, ends = list(self._under_way), list(self._ends)
        for future in under_way:
            future.cancel()
        for end in ends:
            end()
        for wait in self._waits:
            wait.wake()

    def _check(self) -> None:
        if self._is_cancelled:
            raise Cancelled

    def _done(self, future: "Future[T]") -> None:
        with self._lock:
            self._under_way.discard(future)


class LockedFairShares(FairShares):
    """``FairShares`` behind a lock. The lock is always taken last, and no other is taken while it is held."""

    def __init__(self, weights: dict[str, float]) -> None:
        super().__init__(weights)
        self._lock = threading.RLock()

    def change_weight(self, tenant: str, weight: float) -> None:
        """See ``FairShares``."""
        with self._lock:
            super().change_weight(tenant, weight)

    def tag(self, tenant: str) -> float:
        """See ``FairShares``."""
        with self._lock:
            return super().tag(tenant)

    def arrive(self, tenant: str) -> None:
        """See ``FairShares``."""
        with self._lock:
            super().arrive(tenant)

    def depart(self, tenant: str) -> None:
        """See ``FairShares``."""
        with self._lock:
            super().depart(tenant)

    def begin(self, tenant: str) -> None:
        """See ``FairShares``."""
        with self._lock:
            super().begin(tenant)

    def owe(self, tenant: str, device_s: float) -> None:
        """See ``FairShares``."""
        with self._lock:
            super().owe(tenant, device_s)

    def charge(self, tenant: str, device_s: float) -> None:
        """See ``FairShares``."""
        with self._lock:
            super().charge(tenant, device_s)


Task = tuple["Future[Any]", Callable[[], Any]]


class Readers:
    """A thread pool with one queue per tenant, which shares its seconds by the tenants' weights.

    Where reading and decoding is the limit and not the device, these shares are what a weight comes to.

    Args:
        threads: number of threads.
        maximum: maximum number of threads that work for one tenant; the others stay free for other tenants.
        weights: the tenants' weights by name; 1 for those who are not named.
        clock: clock that returns seconds.
        spare: number of threads beside those, for tenants that have none at work: whatever several others wait for
            together, each is served.
    """

    def __init__(
        self,
        threads: int,
        maximum: int,
        weights: Mapping[str, float] = MappingProxyType({}),
        clock: Callable[[], float] = time.perf_counter,
        *,
        spare: int = 0,
    ) -> None:
        self._pool = ThreadPoolExecutor(threads + spare, "frostline-read", in_background)
        self._threads = threads
        self._all_threads = threads + spare
        self._maximum = maximum
        self._clock = clock
        self._shares = FairShares(weights)
        self._asked = 0  # threads that were asked to look for tasks, and do not yet
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, _Queue] = OrderedDict()  # of those with equal shares the first is next
        self._at_work: Counter[str] = Counter()

    def executor_for(self, tenant: str, *, is_urgent: bool = False) -> Executor:
        """An executor that runs calls in a tenant's name; it need not be shut down.

        Args:
            tenant: name of the tenant.
            is_urgent: True if its calls run before the tenant's other calls.
        """
        return _Lane(self, tenant, is_urgent=is_urgent)

    def enqueue(self, tenant: str, task: Task, *, is_urgent: bool = False) -> None:
        """Run a task when it is the tenant's turn; urgent tasks run before the tenant's other tasks.

        Raises:
            Unavailable: The node is stopping.
        """
        with self._lock:
            queue = self._queues.setdefault(tenant, _Queue())
            (queue.urgent if is_urgent else queue.others).append(task)
            self._shares.arrive(tenant)
            # Threads that are never idle take task after task: asked once a task, the pool would keep what it is asked.
            if self._asked == self._all_threads:
                return
            try:
                self._pool.submit(self._work)
            except RuntimeError as error:
                raise Unavailable("the node is stopping") from error
            self._asked += 1

    def change_weight(self, tenant: str, weight: float) -> None:
        """See ``FairShares.change_weight``."""
        with self._lock:
            self._shares.change_weight(tenant, weight)

    def close(self) -> None:
        """Wait until all tasks are done, and stop the threads."""
        self._pool.shutdown()

    def _work(self) -> None:
        with self._lock:
            self._asked -= 1
        # A task of a tenant that has all its threads at work is left for those threads.
        while (found := self._next()) is not None:
            tenant, (future, call) = found
            with ExitStack() as stack:
                stack.callback(self._done, tenant, self._clock())
                if future.set_running_or_notify_cancel():
                    stack.push(partial(_tell, future))
                    future.set_result(call())

    def _next(self) -> tuple[str, Task] | None:
        with self._lock:
            most = self._maximum if self._at_work.total() < self._threads else 1
            able = [name for name in self._queues if self._at_work[name] < most]
            if not able:
                return None
            tenant = min(able, key=self._shares.tag)
            self._shares.begin(tenant)
            queue = self._queues[tenant]
            task = (queue.urgent or queue.others).popleft()
            self._queues.move_to_end(tenant)
            if not (queue.urgent or queue.others):
                del self._queues[tenant]
            self._at_work[tenant] += 1
            return tenant, task

    def _done(self, tenant: str, began: float) -> None:
        with self._lock:
            self._at_work[tenant] -= 1
            self._shares.charge(tenant, min(self._clock() - began, _MAX_CHARGE_S))
            self._shares.depart(tenant)


@dataclass(frozen=True, slots=True)
class _Queue:
    """The tasks of one tenant, each kind in its order."""

    urgent: deque[Task] = field(default_factory=deque)
    others: deque[Task] = field(default_factory=deque)


class _Lane(Executor):
    def __init__(self, readers: Readers, tenant: str, *, is_urgent: bool) -> None:
        self._readers = readers
        self._tenant = tenant
        self._is_urgent = is_urgent

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()
        self._readers.enqueue(self._tenant, (future, partial(fn, *args, **kwargs)), is_urgent=self._is_urgent)
        return future


def _tell(
    future: "Future[Any]",
    kind: type[BaseException] | None,  # noqa: ARG001 (the signature of an exit callback)
    error: BaseException | None,
    trace: TracebackType | None,  # noqa: ARG001
) -> bool:
    """Pass an exception to the future."""
    if error is not None:
        future.set_exception(error)
    return error is not None
