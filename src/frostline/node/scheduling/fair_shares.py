"""Shares a node's device and its reading threads between tenants: whose turn it is, by weighted fair shares."""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from frostline.batching import FairShares
from frostline.errors import Unavailable
from frostline.processors import in_background

__all__ = ("LockedFairShares", "Readers")


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


P = ParamSpec("P")
T = TypeVar("T")
Task = tuple["Future[Any]", Callable[[], Any]]


class Readers:
    """A thread pool with one queue per tenant, served in turn.

    Args:
        threads: number of threads.
        maximum: maximum number of threads that work for one tenant; the others stay free for other tenants.
    """

    def __init__(self, threads: int, maximum: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "frostline-read", in_background)
        self._maximum = maximum
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, _Queue] = OrderedDict()  # the tenant that is served next comes first
        self._at_work: Counter[str] = Counter()

    def lane(self, tenant: str, *, is_urgent: bool = False) -> Executor:
        """An executor that runs calls in a tenant's name; it need not be shut down.

        Args:
            tenant: name of the tenant.
            is_urgent: whether its calls run before the tenant's other calls.
        """
        return _Lane(self, tenant, is_urgent=is_urgent)

    def enqueue(self, tenant: str, task: Task, *, is_urgent: bool = False) -> None:
        """Run a task when it is the tenant's turn; urgent tasks run before the tenant's other tasks.

        Raises:
            Unavailable: if the node is stopping.
        """
        with self._lock:
            queue = self._queues.setdefault(tenant, _Queue())
            (queue.urgent if is_urgent else queue.others).append(task)
        try:
            self._pool.submit(self._work)
        except RuntimeError as error:
            raise Unavailable("the node is stopping") from error

    def close(self) -> None:
        """Wait until all tasks are done, and stop the threads."""
        self._pool.shutdown()

    def _work(self) -> None:
        # A task of a tenant that has all its threads at work is left for those threads.
        while (found := self._next()) is not None:
            tenant, (future, call) = found
            with ExitStack() as stack:
                stack.callback(self._done, tenant)
                if future.set_running_or_notify_cancel():
                    stack.push(partial(_tell, future))
                    future.set_result(call())

    def _next(self) -> tuple[str, Task] | None:
        with self._lock:
            tenant = next((name for name in self._queues if self._at_work[name] < self._maximum), None)
            if tenant is None:
                return None
            queue = self._queues[tenant]
            task = (queue.urgent or queue.others).popleft()
            self._queues.move_to_end(tenant)
            if not (queue.urgent or queue.others):
                del self._queues[tenant]
            self._at_work[tenant] += 1
            return tenant, task

    def _done(self, tenant: str) -> None:
        with self._lock:
            self._at_work[tenant] -= 1


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
