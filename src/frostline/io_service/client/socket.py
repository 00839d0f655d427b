"""Sockets of this process to an I/O service: one that says who it is, and one for each request under way."""

import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from frostline.errors import FrostlineError, NodeUnreachable, SettingError, Unauthenticated
from frostline.wire.frames import PROTOCOL, RECORD, BrokenFrame, Frame, receive, send
from frostline.wire.refusals import error_from_json

__all__ = ("SCHEME", "ServiceSocket", "Sockets", "refusal", "socket_address", "translated")

SCHEME = "unix:"
"""What the address of an I/O service begins with."""

_CREDENTIALS = struct.Struct("3i")


def socket_address(url: str) -> str:
    """The address to connect to: of ``unix:///run/user/1000/frostline/io.sock``, or of ``unix:@name`` without a file.

    Raises:
        SettingError: The URL is not the address of an I/O service.
    """
    place = url.removeprefix(SCHEME)
    if url.startswith(SCHEME) and place.startswith("@") and len(place) > 1:
        return f"\0{place[1:]}"
    path = place.removeprefix("//")
    if not url.startswith(SCHEME) or not path.startswith("/") or "\0" in path:
        raise SettingError(f"an I/O service's address looks like unix:///run/user/1000/frostline/io.sock, not {url!r}")
    return path


@contextmanager
def translated(url: str) -> Iterator[None]:
    """The one place where failures of sockets become errors of Frostline."""
    try:
        yield
    except (FileNotFoundError, ConnectionRefusedError) as error:
        where = "" if "@" in url else f" --socket {socket_address(url)}"
        raise NodeUnreachable(
            f"there is no I/O service at {url}: start one with frostline io{where}, or leave out what names it "
            "(near=, FROSTLINE_IO)"
        ) from error
    except TimeoutError as error:
        raise NodeUnreachable(f"the I/O service at {url} said nothing for too long") from error
    except (BrokenFrame, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NodeUnreachable(f"the I/O service at {url} went away: {why}") from error


class ServiceSocket:
    """This process at the service: what says that it is there. Giving blocks back is safe in any thread, at any time.

    Args:
        address: to connect to.
        url: the same, for sentences.
        job: job that this process belongs to.
        deadline_s: longest silence.

    Attributes:
        max_bytes: maximum bytes that may be sent to the service at once.
        welcome: greeting of the service.

    Raises:
        OSError: No service listens there.
        Unauthenticated: The service runs as another user.
        FrostlineError: The service refuses this process.
    """

    def __init__(self, address: str, url: str, job: str, deadline_s: float) -> None:
        self._address = address
        self._url = url
        self._job = job
        self._deadline_s = deadline_s
        self._process = os.getpid()
        self._name = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._answers = 0
        self._socket = self._connected("session")
        try:
            self.welcome = self._welcomed()
        except BaseException:
            self._socket.close()
            raise
        self.max_bytes = int(self.welcome.get("max_bytes", 0))
        self._socket.setblocking(False)

    def ask(self) -> socket.socket:
        """A new connection for one request after another."""
        return self._connected("asks")

    def number(self) -> int:
        """Of the next answer."""
        with self._lock:
            self._answers += 1
            return self._answers

    def say(self, answer: int, kind: int, number: int) -> None:
        """Say something that has no answer. Nothing happens where the service is gone, or this process is a child."""
        # Called by the garbage collector, wherever that runs: no lock, no waiting. A child's copies are its parent's.
        if self._process == os.getpid():
            with suppress(OSError):
                self._socket.send(RECORD.pack(answer, kind, number), socket.MSG_DONTWAIT)

    @property
    def is_alive(self) -> bool:
        """Whether the service is there and knows this process; it says nothing more after its welcome."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """The process has done with the service."""
        self._socket.close()

    def _connected(self, role: str) -> socket.socket:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            one.settimeout(self._deadline_s)
            one.connect(self._address)
            self._check_owner(one)
            send(one, {"kind": "hello", "protocol": PROTOCOL, "role": role, "session": self._name, "job": self._job})
        except BaseException:
            one.close()
            raise
        return one

    def _check_owner(self, one: socket.socket) -> None:
        found = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(found)
        if user != os.geteuid():
            raise Unauthenticated(
                f"the I/O service at {self._url} is run by user {user}, not by {os.geteuid()}: what it gives cannot be "
                "trusted; start one of your own with frostline io"
            )

    def _welcomed(self) -> dict[str, Any]:
        frame = receive(self._socket)
        if frame is None:
            raise BrokenFrame("it takes no more processes")
        if frame.says.get("kind") != "welcome":
            raise refusal(frame)
        return frame.says


def refusal(frame: Frame) -> FrostlineError:
    """The error that a frame tells."""
    return error_from_json(frame.says.get("error")) or FrostlineError("the I/O service answers what makes no sense")


class Sockets:
    """Connections of this process to a service. Safe for threads; after a fork the child makes its own.

    Args:
        url: URL of the service.
        job: job that this process belongs to.
        deadline_s: longest silence on a connection.
        max_idle: kept for later.

    Raises:
        SettingError: The address is none.
    """

    def __init__(self, url: str, job: str, *, deadline_s: float, max_idle: int) -> None:
        self.url = url
        self._address = socket_address(url)
        self._job = job
        self._deadline_s = deadline_s
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._link: ServiceSocket | None = None
        self._idle: list[socket.socket] = []

    def link(self) -> ServiceSocket:
        """This process at the service, which is told of it at the first use."""
        with self._lock:
            if self._link is not None and not self._link.is_alive:
                self._close()
            if self._link is None:
                self._link = ServiceSocket(self._address, self.url, self._job, self._deadline_s)
            return self._link

    def take(self, link: ServiceSocket) -> socket.socket | None:
        """A connection of that link which was used before, if there is one; the service may be gone meanwhile."""
        with self._lock:
            return self._idle.pop() if self._idle and link is self._link else None

    def give_back(self, link: ServiceSocket, one: socket.socket) -> None:
        """Keep a connection whose last answer was read to its end."""
        with self._lock:
            if link is self._link and len(self._idle) < self._max_idle:
                one.settimeout(self._deadline_s)
                self._idle.append(one)
                return
        one.close()

    def drop(self) -> None:
        """Close the link, and what is idle of it."""
        with self._lock:
            self._close()

    def forked(self) -> None:
        """This process is a child of the one that connected: using its sockets would mix up both sides' answers."""
        self._lock = threading.Lock()
        self._close()

    def _close(self) -> None:
        idle, self._idle = self._idle, []
        link, self._link = self._link, None
        for descriptor in idle:
            descriptor.close()
        if link is not None:
            link.close()
