"""Threads that read samples, which tenants use by turns: one's slow store does not hold up the reads of another."""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from frostline.background import in_background
from frostline.errors import Unavailable

__all__ = ("Readers",)

P = ParamSpec("P")
T = TypeVar("T")
Task = tuple["Future[Any]", Callable[[], Any]]


class Readers:
    """Some threads. Each tenant has a queue of its own, and those that have work take turns.

    Args:
        threads: how many.
        most: of them that work for one tenant at once. The others are there at once for whoever comes.
    """

    def __init__(self, threads: int, most: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "frostline-read", in_background)
        self._most = most
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, _Queue] = OrderedDict()  # whose turn it is comes first
        self._at_work: Counter[str] = Counter()

    def lane(self, tenant: str, *, is_urgent: bool = False) -> Executor:
        """What has things done in a tenant's name; there is no need to shut it down.

        Args:
            tenant: its name.
            is_urgent: they are done before what else the tenant has asked for.
        """
        return _Lane(self, tenant, is_urgent=is_urgent)

    def enqueue(self, tenant: str, task: Task, *, is_urgent: bool = False) -> None:
        """Have it done when it is the tenant's turn; before its other tasks where it is urgent.

        Raises:
            Unavailable: The node is stopping.
        """
        with self._lock:
            queue = self._queues.setdefault(tenant, _Queue())
            (queue.urgent if is_urgent else queue.others).append(task)
        try:
            self._pool.submit(self._work)
        except RuntimeError as error:
            raise Unavailable("the node is stopping") from error

    def close(self) -> None:
        """Wait until nothing is left to do, and stop the threads."""
        self._pool.shutdown()

    def _work(self) -> None:
        # What a tenant may not have done now is done by the threads that work for it, once they are free.
        while (found := self._next()) is not None:
            tenant, (future, call) = found
            with ExitStack() as stack:
                stack.callback(self._done, tenant)
                if future.set_running_or_notify_cancel():
                    stack.push(partial(_tell, future))
                    future.set_result(call())

    def _next(self) -> tuple[str, Task] | None:
        with self._lock:
            tenant = next((one for one in self._queues if self._at_work[one] < self._most), None)
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
    """What a tenant has asked for, each in its order."""

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
    kind: type[BaseException] | None,  # noqa: ARG001 (as context managers are told)
    error: BaseException | None,
    trace: TracebackType | None,  # noqa: ARG001
) -> bool:
    """Hand what went wrong to whoever waits."""
    if error is not None:
        future.set_exception(error)
    return error is not None
