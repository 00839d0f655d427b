"""The way to a node through the I/O service of this machine: payloads come in shared memory."""

import math
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from frostline.client.http import ResponseStream
from frostline.core import FeatureBatch
from frostline.core.config import LoaderSettings
from frostline.core.errors import (
    AnswerDamaged,
    FrostlineError,
    NodeUnreachable,
    OverBudget,
    SettingError,
    Unauthenticated,
)
from frostline.profiles import Profile
from frostline.transport import Cancellation, TransportStatistics
from frostline.wire.messages import FeatureRequest, Health, ProfileRequest, error_from_json
from frostline.wire.shared_memory import BACK, CLOSED, PROTOCOL, RECORD, BrokenFrame, Frame, read_block, receive, send

__all__ = (
    "SCHEME",
    "IoResponse",
    "IoTransport",
    "ServiceSocket",
    "Sockets",
    "refusal",
    "socket_address",
    "translate_errors",
)


SCHEME = "unix:"
"""What the address of an I/O service begins with."""

_CREDENTIALS = struct.Struct("3i")
# A service that is there greets at once. Where an answer is silent for longer than usual, it is asked whether it is.
_GREETS_WITHIN_S, _SILENT_S = 2.0, 1.0


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
def translate_errors(url: str) -> Iterator[None]:
    """The one place where failures of sockets become errors of Frostline."""
    try:
        yield
    except (FileNotFoundError, ConnectionRefusedError) as error:
        where = "" if "@" in url else f" --socket {socket_address(url)}"
        raise NodeUnreachable(
            f"there is no I/O service at {url}: start one with frostline io{where}, or leave out what names it "
            "(near=, FROSTLINE_IO)"
        ) from error
    except (TimeoutError, BlockingIOError) as error:  # the second one where too many wait for it to greet
        raise NodeUnreachable(f"the I/O service at {url} said nothing for too long") from error
    except (BrokenFrame, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NodeUnreachable(f"the I/O service at {url} went away: {why}") from error


class ServiceSocket:
    """This process at the service: what says that it is there. Giving blocks back is safe in any thread, at any time.

    Args:
        address: the address to connect to.
        url: URL of the service, for messages.
        job: job that this process belongs to.
        deadline_s: the longest silence.

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
        """The number of the next answer."""
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
            one.settimeout(min(_GREETS_WITHIN_S, self._deadline_s))
            one.connect(self._address)
            self._check_owner(one)
            send(one, {"kind": "hello", "protocol": PROTOCOL, "role": role, "session": self._name, "job": self._job})
            if role == "asks":
                one.settimeout(self._deadline_s)
        except BaseException:
            one.close()
            raise
        return one

    def _check_owner(self, sock: socket.socket) -> None:
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
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
        deadline_s: the longest silence on a connection.
        max_idle: the number, kept for later.

    Attributes:
        url: URL of the service.
        exchanges: exchanges that were begun, as long as somebody has them.

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
        self._checking = threading.Lock()
        self._checked_at_s, self._hangs = -math.inf, False
        self.exchanges: weakref.WeakSet[_Exchange] = weakref.WeakSet()

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

    def give_back(self, link: ServiceSocket, sock: socket.socket) -> None:
        """Keep a connection whose last answer was read to its end."""
        with self._lock:
            if link is self._link and len(self._idle) < self._max_idle:
                sock.settimeout(self._deadline_s)
                self._idle.append(sock)
                return
        sock.close()

    def check(self) -> None:
        """Do nothing if the service greets, or did so a moment ago, and what is asked of it takes its time.

        Raises:
            TimeoutError: The service hangs.
        """
        with self._checking:
            if time.monotonic() > self._checked_at_s + _SILENT_S:
                self._hangs = self._is_silent()
                self._checked_at_s = time.monotonic()
            if self._hangs:
                raise TimeoutError

    def _is_silent(self) -> bool:
        try:
            ServiceSocket(self._address, self.url, self._job, self._deadline_s).close()
        except (TimeoutError, BlockingIOError):
            return True
        except (FrostlineError, BrokenFrame, OSError):  # which come at once, and those who use it are told themselves
            return False
        return False

    def drop(self) -> None:
        """Close the link, and what is idle of it."""
        with self._lock:
            self._close()

    def reset_after_fork(self) -> None:
        """This process is a child of the one that connected: using its sockets would mix up both sides' answers."""
        self._lock, self._checking = threading.Lock(), threading.Lock()
        self.exchanges = weakref.WeakSet()
        self._close()

    def _close(self) -> None:
        idle, self._idle = self._idle, []
        link, self._link = self._link, None
        for descriptor in idle:
            descriptor.close()
        if link is not None:
            link.close()


# Trying engines takes up to ten minutes where the prefix is new to the node's hardware, after others' trials.
_TRIALS_S = 1800.0
_MAX_BYTES = 4 << 30
# A mapping holds a descriptor, of which a process may have no more than 1,024: what a full window of 256 MiB holds must
# be fewer. Small ones are as fast to copy as to map, too.
_COPIED_BELOW = 512 << 10
# What the socket's buffer takes of a request whoever reads it.
_AT_ONCE_BYTES = 64 << 10

T = TypeVar("T")


class IoTransport:
    """A ``Transport`` through an I/O service. Nothing is connected before the first call.

    Processes that come of it by a fork, and those that it is sent to (it can be pickled: address and job, nothing
    else), connect on their own and count as the same job.

    What it has received is what the service read for it from the node: what it found there costs no link.

    Args:
        url: address, such as ``unix:///run/user/1000/frostline/io.sock``.
        settings: settings of the job's loader.

    Raises:
        SettingError: The address is none.
    """

    def __init__(self, url: str, settings: LoaderSettings | None = None) -> None:
        settings = settings or LoaderSettings()
        self._made_from = (url, settings.deadline_s, settings.last_requests + 1, secrets.token_hex(8))
        self._begin(*self._made_from)

    def _begin(self, url: str, deadline_s: float, max_idle: int, job: str) -> None:
        self._made_from = (url, deadline_s, max_idle, job)
        self._sockets = Sockets(url, job, deadline_s=deadline_s, max_idle=max_idle)
        self._lock = threading.Lock()
        self._totals = TransportStatistics()
        self._seen: tuple[ServiceSocket | None, int, float] = (None, 0, 0.0)
        _ALL.add(self)

    def __getstate__(self) -> tuple[str, float, int, str]:
        return self._made_from

    def __setstate__(self, state: tuple[str, float, int, str]) -> None:
        self._begin(*state)

    @property
    def url(self) -> str:
        """The URL of the service."""
        return self._sockets.url

    @property
    def job(self) -> str:
        """Names the job to the service."""
        return self._made_from[3]

    def reports_requests(self) -> bool:
        """See ``ReportsRequests``; the service says so in its welcome. One that is not there reports nothing."""
        try:
            with translate_errors(self.url):
                return self._sockets.link().welcome.get("reports") is True
        except FrostlineError:
            return False

    def health(self) -> Health:
        """See ``Transport``; of the node."""
        return self._value(Health.from_json, {"kind": "health"})

    def put_prefix(self, digest: str, artifact: bytes, before_upload: Callable[[], None] | None = None) -> None:
        """See ``Transport``; whether the node has it is the service's to know."""
        if before_upload is not None:
            before_upload()
        self._exchange({"kind": "prefix", "digest": digest}, body=artifact)

    def profile(self, wanted: ProfileRequest, cancellation: Cancellation | None = None) -> Profile:
        """See ``Transport``."""
        says = {"kind": "profile", "request": wanted.to_json()}
        return self._value(Profile.from_json, says, silence_s=_TRIALS_S, cancellation=cancellation)

    def features(self, request: FeatureRequest) -> "IoResponse":
        """See ``Transport``. Arrays of the batches lie in the service's memory, which is given back with the last."""
        return IoResponse(self, self._sockets, {"kind": "features", "request": request.to_json()})

    def node_statistics(self) -> dict[str, Any]:
        """See ``Transport``; of the node."""
        return self._value(dict, {"kind": "node"})

    def service_statistics(self) -> dict[str, Any]:
        """Where the service stands: its jobs, the bytes under way, what it keeps and what it found there."""
        return self._value(dict, {"kind": "statistics"})

    def statistics(self) -> TransportStatistics:
        """See ``Transport``; what this process asked for, and how fast the service's link to the node is."""
        with self._lock:
            return self._totals

    def break_off(self) -> None:
        """See ``Transport``."""
        for exchange in list(self._sockets.exchanges):
            exchange.break_off()

    def close(self) -> None:
        """Close the connections. Calling it again does nothing."""
        self._sockets.drop()

    def reset_after_fork(self) -> None:
        """This process is a child of the one that used it: what is connected is the parent's."""
        self._lock = threading.Lock()
        self._sockets.reset_after_fork()

    def count(self, *, seen: tuple[ServiceSocket, dict[str, Any]] | None = None, **more: float) -> None:
        """Add to the statistics; ``seen`` is what a link told last of the service's own."""
        with self._lock:
            if seen is not None:
                link, says = seen
                nbytes, seconds = int(says.get("transfer_bytes", 0)), float(says.get("transfer_s", 0.0))
                before = self._seen if self._seen[0] is link else (link, nbytes, seconds)
                more["transfer_bytes"] = max(0, nbytes - before[1])
                more["transfer_s"] = max(0.0, seconds - before[2])
                self._seen = (link, nbytes, seconds)
            self._totals = _added(self._totals, more)

    @contextmanager
    def count_requests(self, *, requests: int = 0) -> Iterator[None]:
        """Count requests, and the failure where there is one, and the seconds until it has ended."""
        started = time.perf_counter()
        failures = 0
        try:
            yield
        except FrostlineError:
            failures = 1
            raise
        finally:
            self.count(requests=requests, failures=failures, receive_s=time.perf_counter() - started)

    def _value(self, from_json: Callable[[Any], T], says: dict[str, Any], **how: Any) -> T:
        answered = self._exchange(says, **how)
        try:
            return from_json(answered.get("value"))
        except (KeyError, TypeError, ValueError) as error:
            raise FrostlineError(
                f"the I/O service at {self.url} is of another version: {type(error).__name__}"
            ) from error

    def _exchange(
        self,
        says: dict[str, Any],
        *,
        body: bytes = b"",
        silence_s: float | None = None,
        cancellation: Cancellation | None = None,
    ) -> dict[str, Any]:
        exchange, cancellation = _Exchange(self._sockets), cancellation or Cancellation()
        with self.count_requests(requests=1), cancellation.ends(exchange.break_off):
            try:
                exchange.send(says, body, silence_s=silence_s)
                frame = exchange.receive()
                if frame.says.get("kind") == "error":
                    raise refusal(frame)
            finally:
                exchange.end()
            self.count(seen=(exchange.link, frame.says))
            return frame.says


class IoResponse(ResponseStream):
    """The batches of one answer; see ``ResponseStream``."""

    def __init__(self, transport: IoTransport, sockets: Sockets, says: dict[str, Any]) -> None:
        super().__init__(transport)
        self._transport = transport
        self._says = says
        self._exchange = _Exchange(sockets)
        self._blocks = 0
        self._has_ended = False

    def _break_off(self) -> None:
        self._exchange.break_off()

    def _next(self, *, is_first: bool) -> FeatureBatch:
        if self._has_ended:
            raise StopIteration
        try:
            if is_first:
                self._exchange.send(self._says)
            frame = self._exchange.receive()
            if frame.says.get("kind") == "block":
                return self._batch(frame)
        except BaseException:
            self._end()
            raise
        is_end = frame.says.get("kind") == "end"
        self._transport.count(seen=(self._exchange.link, frame.says))
        self._end()
        if is_end:
            raise StopIteration
        raise refusal(frame)

    def _batch(self, frame: Frame) -> FeatureBatch:
        """The rows of a block, mapped."""
        try:
            block = int(frame.says["block"])
            memory = _mapped(frame, self._exchange.link, self._exchange.answer, block)
            self._blocks = block + 1
            batch = read_block(frame.says, memory)
            self._transport.count(bytes_received=int(frame.says["read_bytes"]))
        except (KeyError, OSError, TypeError, ValueError) as error:
            self._transport.count(damaged=1)
            raise AnswerDamaged(f"the I/O service sent a block that makes no sense: {error}") from error
        return batch

    def _end(self) -> None:
        """Nothing more is read; say what came of it where that is not all."""
        if not self._has_ended:
            self._has_ended = True
            self._exchange.end(self._blocks)


class _Exchange:
    """One request and its answer. ``break_off`` may be called from any thread; all else from one."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._lock = threading.Lock()
        self._link: ServiceSocket | None = None
        self._socket: socket.socket | None = None
        self._is_broken_off = False
        self.is_whole = False
        self.answer = 0
        sockets.exchanges.add(self)

    @property
    def link(self) -> ServiceSocket:
        """That it is of."""
        assert self._link is not None
        return self._link

    def send(self, says: dict[str, Any], body: bytes = b"", *, silence_s: float | None = None) -> None:
        """Send a request."""
        with translate_errors(self._sockets.url):
            link = self._link = self._sockets.link()
            if len(body) > link.max_bytes:
                raise OverBudget(
                    f"{len(body):,} bytes do not fit the I/O service's memory: start it with more --memory"
                )
            self.answer = link.number()
            one = self._sockets.take(link) or link.ask()
            with self._lock:
                self._socket = one
                if self._is_broken_off:
                    raise BrokenFrame("the request was given up")
            if silence_s is not None:
                one.settimeout(max(silence_s, one.gettimeout() or 0.0))
            if len(body) > _AT_ONCE_BYTES:  # which waits until the service takes it
                self._sockets.check()
            send(one, {**says, "answer": self.answer}, body)

    def receive(self) -> Frame:
        """The next frame of the answer; the last one is its end, or an error."""
        assert self._socket is not None
        with translate_errors(self._sockets.url):
            self._wait(self._socket)
            frame = receive(self._socket, takes_descriptor=True)
            if frame is None:
                raise BrokenFrame("it closed the connection")
            self.is_whole = frame.says.get("kind") in ("end", "error")
            return frame

    def _wait(self, sock: socket.socket) -> None:
        """Wait for what comes next, as long as the service is there.

        Raises:
            TimeoutError: The service hangs, or was silent for as long as the connection may be.
        """
        deadline_s = time.monotonic() + (sock.gettimeout() or math.inf)
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        while not poller.poll(1000 * min(_SILENT_S, max(0.0, deadline_s - time.monotonic()))):
            if time.monotonic() >= deadline_s:
                raise TimeoutError
            self._sockets.check()

    def break_off(self) -> None:
        """Abandon the answer; a thread that waits for it is freed."""
        with self._lock:
            self._is_broken_off = True
            one = self._socket
        if one is not None:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is closed already
                return

    def end(self, blocks: int = 0) -> None:
        """The answer is over: keep its connection where it was read whole; else say how many blocks came of it."""
        with self._lock:
            one, self._socket = self._socket, None
        if one is None:
            return
        if self.is_whole and not self._is_broken_off:
            self._sockets.give_back(self.link, one)
            return
        one.close()
        self.link.say(self.answer, CLOSED, blocks)


class _Lent(mmap.mmap):
    """A block that is mapped; the service gets it back when the last array over it is gone."""

    link: ServiceSocket
    answer: int
    block: int

    def __del__(self) -> None:
        self.link.say(self.answer, BACK, self.block)


def _is_sealed(descriptor: int) -> bool:
    """Whether nobody can cut the memory short, or write to it."""
    import fcntl  # which Windows lacks: a job without an I/O service needs none

    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & wanted == wanted)


def _mapped(frame: Frame, link: ServiceSocket, answer: int, block: int) -> memoryview:
    """The memory of a block: mapped, or copied where it is small; the descriptor is closed."""
    nbytes = int(frame.says["nbytes"])
    try:
        if not 0 <= nbytes <= _MAX_BYTES or not _is_sealed(frame.descriptor):
            raise ValueError("its memory could change")
        if nbytes < _COPIED_BELOW:
            data = np.empty(nbytes, np.uint8).data
            if nbytes and os.preadv(frame.descriptor, [data], 0) != nbytes:
                raise ValueError("it is too short")
            link.say(answer, BACK, block)
            return data.toreadonly()
        lent = _Lent(frame.descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
    finally:
        frame.close()
    lent.link, lent.answer, lent.block = link, answer, block
    return memoryview(lent)


def _added(totals: TransportStatistics, more: dict[str, float]) -> TransportStatistics:
    return replace(totals, **{name: getattr(totals, name) + value for name, value in more.items()})


# Transports of this process. A lock that another thread held at a fork would stay locked in the child for good.
_ALL: weakref.WeakSet[IoTransport] = weakref.WeakSet()


def _forked() -> None:
    for transport in list(_ALL):
        transport.reset_after_fork()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_forked)
