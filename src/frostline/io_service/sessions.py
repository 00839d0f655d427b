"""Who is connected: one session for each process that asks, what it was lent, and what it has open."""

import os
import socket
import struct
import threading
from collections.abc import Callable

from frostline.wire.frames import BACK, CLOSED, RECORD

__all__ = ("ClientDisconnected", "Records", "Session", "hang_up", "peer_of", "watched_process")

_CREDENTIALS = struct.Struct("3i")
_PEER_PIDFD = 77  # SO_PEERPIDFD, from Linux 6.5 on; this Python has no name for it
_MAX_RECORDS = 4096


class ClientDisconnected(Exception):
    """Whoever asked is not there any more."""


class Session:
    """A process that asks. Safe for threads.

    Args:
        name: name that it gave itself.
        job: job that it belongs to; several processes may.
        pid: id of the process, as the system says; 0 where it cannot.
        give_back: told of each number of bytes that it has done with.
    """

    def __init__(self, name: str, job: str, pid: int, give_back: Callable[[int], None]) -> None:
        self.name = name
        self.job = job
        self.pid = pid
        self._give_back = give_back
        self._lock = threading.Lock()
        self._lent: dict[tuple[int, int], int] = {}
        self._open: dict[socket.socket, Callable[[], None]] = {}
        self._has_ended = False

    @property
    def lent_bytes(self) -> int:
        """In blocks that it has not given back."""
        with self._lock:
            return sum(self._lent.values())

    def opened(self, one: socket.socket, abandon: Callable[[], None]) -> None:
        """A connection of it works; ``abandon`` ends that.

        Raises:
            Gone: The session has ended.
        """
        with self._lock:
            if self._has_ended:
                raise ClientDisconnected
            self._open[one] = abandon

    def closed(self, one: socket.socket) -> None:
        """The connection is idle again, or gone."""
        with self._lock:
            self._open.pop(one, None)

    def lend(self, answer: int, block: int, nbytes: int) -> None:
        """It is about to get a block.

        Raises:
            Gone: The session has ended.
        """
        with self._lock:
            if self._has_ended:
                raise ClientDisconnected
            self._lent[answer, block] = nbytes

    def back(self, answer: int, block: int) -> None:
        """It has done with a block, or did not get it. What it was not lent is nothing."""
        with self._lock:
            nbytes = self._lent.pop((answer, block), 0)
        if nbytes:
            self._give_back(nbytes)

    def told(self, record: bytes) -> None:
        """It says that it has done with a block, or that it closed an answer of which it got so many."""
        answer, kind, number = RECORD.unpack(record)
        if kind == BACK:
            self.back(answer, number)
        elif kind == CLOSED:
            with self._lock:
                unseen = [block for lent, block in self._lent if lent == answer and block >= number]
            for block in unseen:
                self.back(answer, block)

    def end(self) -> None:
        """The process is gone: all that it was lent comes back, and all that it had under way ends."""
        with self._lock:
            self._has_ended = True
            nbytes, self._lent = sum(self._lent.values()), {}
            under_way = list(self._open.items())
        if nbytes:
            self._give_back(nbytes)
        for number, abandon in under_way:
            hang_up(number)
            abandon()


class Records:
    """What a session says while it runs, as it comes. For the watching thread."""

    def __init__(self, one: socket.socket, session: Session, ended: Callable[[], None]) -> None:
        self._socket = one
        self._session = session
        self._ended = ended
        self._left = b""

    def read(self) -> None:
        """Read what there is."""
        try:
            came = self._socket.recv(RECORD.size * _MAX_RECORDS)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        if not came:
            self._ended()
            return
        data = self._left + came
        whole = len(data) - len(data) % RECORD.size
        self._left = data[whole:]
        for start in range(0, whole, RECORD.size):
            self._session.told(data[start : start + RECORD.size])


def hang_up(one: socket.socket) -> None:
    """Free whoever waits on a socket; it is closed by its own thread."""
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed, or the peer is gone
        return


def peer_of(one: socket.socket) -> tuple[int, int]:
    """Process id and user id of whoever is at the other end; the first is 0 where it cannot be seen from here."""
    found = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


def watched_process(one: socket.socket, pid: int) -> int | None:
    """A descriptor that is readable once the process at the other end has ended; None where the system has none.

    A socket alone does not tell: where the process forked, its children hold the socket too.
    """
    try:
        return struct.unpack("i", one.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD, 4))[0]  # type: ignore[no-any-return]
    except OSError:
        try:
            return os.pidfd_open(pid) if pid else None
        except OSError:
            return None
