"""One thread that sees what happens on sockets that nobody reads: who comes, who says something, who is gone."""

import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ("Poller",)

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


@dataclass(frozen=True, slots=True, kw_only=True)
class _Polled:
    call: Callable[[], None]
    number: int
    is_once: bool


class Poller:
    """Calls back in one thread, whose calls must not wait. Safe for threads."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._watched: dict[int, _Polled] = {}
        self._count = 0
        self._woken, self._wakes = socket.socketpair()  # which know that they are closed, in a forked process too
        self._thread = threading.Thread(target=self._run, name="frostline-io-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._epoll.register(self._woken, select.EPOLLIN)
        self._thread.start()

    def stop(self) -> None:
        """End, and close what it holds itself."""
        self._wakes.close()
        self._thread.join()
        self._woken.close()
        self._epoll.close()

    def forked(self) -> None:
        """This process is a child of the one that watches: close what it holds, and leave alone what that one sees."""
        for handle in (self._epoll, self._woken, self._wakes):
            handle.close()

    def readable(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call whenever there is something to read, or an end."""
        self._register(descriptor, select.EPOLLIN | _GONE, call, is_once=False)

    def gone(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call once, when the peer of a socket has gone."""
        self._register(descriptor, _GONE, call, is_once=True)

    def forget(self, descriptor: int) -> None:
        """Call no more; before the descriptor is closed."""
        with self._lock:
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def _register(self, descriptor: int, events: int, call: Callable[[], None], *, is_once: bool) -> None:
        with self._lock:
            self._count += 1
            self._watched[descriptor] = _Polled(call=call, number=self._count, is_once=is_once)
            self._epoll.register(descriptor, events)

    def _run(self) -> None:
        while True:
            with self._lock:
                known = self._count
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._woken.fileno():
                    return
                call = self._call(descriptor, known)
                if call is not None:
                    call()

    def _call(self, descriptor: int, known: int) -> Callable[[], None] | None:
        """What an event is for, of what was watched when it was asked for.

        A descriptor that was closed since then may be another's already. That one's own events come next time.
        """
        with self._lock:
            found = self._watched.get(descriptor)
            if found is None or found.number > known:
                return None
            if found.is_once:
                self._forget(descriptor)
            return found.call
