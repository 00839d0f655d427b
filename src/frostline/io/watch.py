"""One thread that sees what happens on sockets that nobody reads: who comes, who says something, who is gone."""

import os
import select
import threading
from collections.abc import Callable

__all__ = ("Watch",)

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Watch:
    """Calls back in one thread, whose calls must not wait. Safe for threads."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._calls: dict[int, Callable[[], None]] = {}
        self._woken, self._wakes = os.pipe()
        self._thread = threading.Thread(target=self._run, name="frostline-io-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._epoll.register(self._woken, select.EPOLLIN)
        self._thread.start()

    def stop(self) -> None:
        """End, and close what it holds itself."""
        os.close(self._wakes)
        self._thread.join()
        os.close(self._woken)
        self._epoll.close()

    def readable(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call whenever there is something to read, or an end."""
        self._register(descriptor, select.EPOLLIN | _GONE, call)

    def gone(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call once, when the peer of a socket has gone."""
        self._register(descriptor, _GONE | select.EPOLLONESHOT, call)

    def forget(self, descriptor: int) -> None:
        """Call no more; before the descriptor is closed."""
        with self._lock:
            if self._calls.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)

    def _register(self, descriptor: int, events: int, call: Callable[[], None]) -> None:
        with self._lock:
            self._calls[descriptor] = call
            self._epoll.register(descriptor, events)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._woken:
                    return
                with self._lock:
                    call = self._calls.get(descriptor)
                if call is not None:
                    call()
