"""Tells how fast a link carries large bodies, from the connections that carry the data."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

try:
    import fcntl
    import termios
except ImportError:  # they are Unix's
    _TELLS = False
else:
    _TELLS = True

__all__ = ("Meter", "Transfers")

# Smaller ones come at once, or wait for their sender more than for the link.
_LARGE = 64 << 10


class Meter:
    """Bytes on the sockets, headers too. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received = 0
        self._sent = 0

    def add(self, *, received: int = 0, sent: int = 0) -> None:
        """Count some more."""
        with self._lock:
            self._received += received
            self._sent += sent

    def read(self) -> tuple[int, int]:
        """Bytes received and sent so far."""
        with self._lock:
            return self._received, self._sent


class Transfers:
    """Bytes that come, and the seconds in which at least one large body is under way. Safe for threads.

    A body is under way while it is being read and at least 64 KiB of it have not come yet: one that lies in the
    socket's buffer already, since its reader was busy, tells nothing about the link. What comes meanwhile is counted
    on all connections, also where nobody reads it yet: otherwise a link that is shared with a busy reader's
    connection would look thinner than it is.

    Args:
        meter: counts what is read from the sockets.
        clock: monotonic seconds.
    """

    def __init__(self, meter: Meter, clock: Callable[[], float] = time.perf_counter) -> None:
        self._meter = meter
        self._clock = clock
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._under_way = 0
        self._since = (0, 0.0)
        self._bytes = 0
        self._seconds = 0.0

    def watch(self, one: socket.socket) -> None:
        """Count what comes on this connection."""
        with self._lock:
            self._settle()
            self._sockets.add(one)
            self._since = self._mark()

    def forget(self, one: socket.socket) -> None:
        """It is about to be closed. Forgetting it again does nothing."""
        with self._lock:
            self._settle()
            self._sockets.discard(one)
            self._since = self._mark()

    def forget_all(self) -> None:
        """The connections belong to another process now."""
        with self._lock:
            self._sockets.clear()
            self._under_way = 0

    @contextmanager
    def body(self, one: socket.socket | None, nbytes: int) -> Iterator[None]:
        """While a body of so many bytes is read from a connection."""
        if one is None or nbytes - _lying(one) < _LARGE:
            yield
            return
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def read(self) -> tuple[int, float]:
        """Bytes and seconds so far, those of bodies under way too."""
        with self._lock:
            self._settle()
            return self._bytes, self._seconds

    def _change(self, by: int) -> None:
        with self._lock:
            self._settle()
            self._under_way += by
            self._since = self._mark()

    def _settle(self) -> None:
        """Add what came since the last look, if something was under way, and look from here on."""
        if not self._under_way:
            return
        mark = self._mark()
        self._bytes += max(0, mark[0] - self._since[0])
        self._seconds += mark[1] - self._since[1]
        self._since = mark

    def _mark(self) -> tuple[int, float]:
        """All that has come, read or not, and when."""
        received, _ = self._meter.read()
        return received + sum(map(_lying, self._sockets)), self._clock()


def _lying(one: socket.socket) -> int:
    """Bytes that have come on a connection and were not read yet; none where the system does not tell."""
    if not _TELLS:
        return 0
    try:
        found = fcntl.ioctl(one.fileno(), termios.FIONREAD, b"\0\0\0\0")
    except (OSError, ValueError):  # it is closed
        return 0
    return int(struct.unpack("i", found)[0])
