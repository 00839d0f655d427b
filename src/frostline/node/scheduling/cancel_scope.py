"""Ties what one request has under way together, so that all of it ends at once when nobody wants it any more."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, Protocol, TypeVar

from frostline.node.scheduling.memory_pool import Abandoned

__all__ = ("CancelScope",)

P = ParamSpec("P")
T = TypeVar("T")


class _Wakes(Protocol):
    def wake(self) -> None: ...


class CancelScope:
    """Everything that a request has submitted. Safe for threads.

    Args:
        places: where it may wait, for memory or for a turn.
    """

    def __init__(self, places: tuple[_Wakes, ...]) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._is_cut = False
        self._under_way: set[Future[object]] = set()
        self._ends: list[Callable[[], None]] = []

    def is_cut(self) -> bool:
        """Nobody wants the result."""
        return self._is_cut

    def on_cut(self, end: Callable[[], None]) -> None:
        """Have something ended too when it is cut, in the thread that does so; more than once, perhaps."""
        with self._lock:
            self._ends.append(end)
        if self._is_cut:
            end()

    def submit(self, executor: Executor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Have something done, unless it is no longer wanted.

        Raises:
            Abandoned: It is not.
        """
        with self._lock:
            self._check()
            future = executor.submit(call, *args, **kwargs)
            self._under_way.add(future)  # type: ignore[arg-type]  # a future is only read here
        future.add_done_callback(self._done)
        return future

    def follow(self, future: "Future[T]", begin: Callable[[], None]) -> "Future[T]":
        """Begin what a future will tell of, unless it is no longer wanted.

        Raises:
            Abandoned: It is not.
        """
        with self._lock:
            self._check()
            begin()
            self._under_way.add(future)  # type: ignore[arg-type]  # a future is only read here
        future.add_done_callback(self._done)
        return future

    def cut(self) -> None:
        """Cancel what has not started, and free what waits for memory or for a turn. Calling it again does nothing."""
        with self._lock:
            self._is_cut = True
            under_way, ends = list(self._under_way), list(self._ends)
        for future in under_way:
            future.cancel()
        for end in ends:
            end()
        for place in self._places:
            place.wake()

    def _check(self) -> None:
        if self._is_cut:
            raise Abandoned

    def _done(self, future: "Future[T]") -> None:
        with self._lock:
            self._under_way.discard(future)
