"""Cancels everything that one request has started: futures, waits for memory and waits in queues."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, Protocol, TypeVar

from frostline.node.scheduling.memory_pool import Cancelled

__all__ = ("CancelScope",)

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
        self._under_way: set[Future[object]] = set()
        self._ends: list[Callable[[], None]] = []

    def is_cancelled(self) -> bool:
        """Whether the request was cancelled."""
        return self._is_cancelled

    def on_cancel(self, end: Callable[[], None]) -> None:
        """Call ``end`` when the scope is cancelled, in the cancelling thread; it may be called more than once."""
        with self._lock:
            self._ends.append(end)
        if self._is_cancelled:
            end()

    def submit(self, executor: Executor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Submit a call to an executor.

        Raises:
            Cancelled: if the request was cancelled before.
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
            Cancelled: if the request was cancelled before.
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
