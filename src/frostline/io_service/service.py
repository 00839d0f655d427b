"""The I/O service: takes requests of training processes on sockets, and answers them in shared memory."""

import math
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

from frostline.core.config import IoSettings
from frostline.core.declared import refuse_unknown_fields
from frostline.core.errors import BadRequest, FrostlineError, NodeUnreachable, Unauthenticated
from frostline.core.system import __version__, connection_slots, max_open_files
from frostline.core.units import log_named
from frostline.io_service.handler import (
    ClientDisconnected,
    Delivered,
    Records,
    RequestHandler,
    Session,
    hang_up,
    peer_of,
    share_parts,
    watched_process,
)
from frostline.io_service.rows import ByteLimiter, JobBytes, RowCache
from frostline.transport import Cancellation, CountsNodes, NodeUse, Transport
from frostline.wire.messages import FeatureRequest, ProfileRequest, error_to_json
from frostline.wire.shared_memory import PROTOCOL, BrokenFrame, Frame, receive, send

__all__ = (
    "IoService",
    "Poller",
    "Sender",
)


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

    def reset_after_fork(self) -> None:
        """This process is a child of the one that watches: close what it holds, and leave alone what that one sees."""
        for handle in (self._epoll, self._woken, self._wakes):
            handle.close()

    def call_when_readable(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call whenever there is something to read, or an end."""
        self._register(descriptor, select.EPOLLIN | _GONE, call, is_once=False)

    def call_when_gone(self, descriptor: int, call: Callable[[], None]) -> None:
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


class Sender:
    """Lends and sends the blocks of one answer. For one thread.

    Attributes:
        bytes_sent: number of bytes sent so far.
        bytes_read: bytes of these that were read for this answer.
    """

    def __init__(self, sock: socket.socket, session: Session, answer: int, in_flight: ByteLimiter) -> None:
        self._socket = sock
        self._session = session
        self._answer = answer
        self._in_flight = in_flight
        self._block = 0
        self.bytes_sent = 0
        self.bytes_read = 0

    def __call__(self, delivered: Delivered) -> None:
        """Lend and send rows.

        Raises:
            Gone: The client is gone.
            Overloaded: The service has no memory for the rows.
        """
        block = delivered.block
        descriptor = share_parts(block.parts)
        try:
            self._lend(delivered.ticket, block.nbytes)
            says = {"kind": "block", "block": self._block, "read_bytes": delivered.read_bytes, **block.says}
            send(self._socket, says, descriptor=descriptor)
        except OSError as error:
            self._session.back(self._answer, self._block)
            raise ClientDisconnected from error
        finally:
            os.close(descriptor)
        self._block += 1
        self.bytes_sent += block.nbytes
        self.bytes_read += delivered.read_bytes

    def _lend(self, ticket: int, nbytes: int) -> None:
        self._in_flight.lend(ticket, nbytes)
        try:
            self._session.lend(self._answer, self._block, nbytes)
        except ClientDisconnected:
            self._in_flight.give_back(self._session.job, nbytes)
            raise


# Whoever connects says who it is at once; a connection that is idle after that may stay so for hours.
_HELLO_S = 10.0
# Answers are small frames that wait for nobody: a peer that does not take them for so long hangs.
_SEND_S = 60.0
# What cannot be broken off, such as a kernel that runs, is left to the end of the process.
_STOP_S = 10.0
# While nothing more can be opened, a connection that waits would be reported again and again: so often it is tried.
_FULL_S = 0.05
_SAID_EVERY_S = 60.0
_LOG = log_named("frostline.io")
_NAME = re.compile(r"[0-9a-f]{1,64}")
_NOTHING = JobBytes(expected_bytes=0, lent_bytes=0, waiting=0)


class IoService:
    """Answers on a listening socket. A context manager: leaving it ends every connection and every answer under way.

    Args:
        upstream: the upstream to the node; the caller closes it.
        settings: bounds of the service.
        listening: a Unix-domain stream socket; the caller closes it.
        accepting: the lock, held while a connection is accepted; None needs nothing. A process that forks holds it
            meanwhile, so that its child knows every connection that it inherits.
        reports_requests: True if the upstream's requests are reported to a control plane; jobs that connect are told.
    """

    def __init__(
        self,
        upstream: Transport,
        settings: IoSettings,
        listening: socket.socket,
        accepting: AbstractContextManager[Any] | None = None,
        *,
        reports_requests: bool = False,
    ) -> None:
        self._upstream = upstream
        self._reports_requests = reports_requests
        self._settings = settings
        self._listening = listening
        self._accepting = accepting or nullcontext()
        self._row_cache = RowCache(settings.memory_bytes - settings.window_bytes)
        self._in_flight = ByteLimiter(settings.window_bytes)
        self._poller = Poller()
        self._tidy = ThreadPoolExecutor(1, "frostline-io-tidy")
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._is_stopped = False
        self._max_connections = connection_slots(settings.max_connections, max_open_files())
        self._said_at_s = -math.inf
        self._requests = 0
        self._samples = 0
        self._bytes_read = 0
        self._bytes_sent = 0
        self._started = time.monotonic()

    def __enter__(self) -> "IoService":
        self._listening.setblocking(False)
        self._poller.start()
        self._poller.call_when_readable(self._listening.fileno(), self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._poller.forget(self._listening.fileno())
        with self._lock:
            self._is_stopped = True
            connections = dict(self._connections)
            sessions = list(self._sessions.values())
        for session in sessions:
            session.end()
        for connection in connections:
            hang_up(connection)
        until = time.monotonic() + _STOP_S
        for thread in connections.values():
            thread.join(max(0.0, until - time.monotonic()))
        self._tidy.shutdown()
        self._poller.stop()

    def bound(self, *, requests: int, window_bytes: int) -> None:
        """Let no more requests and bytes be under way from now on, beside one request of each job."""
        self._in_flight.bound(window_bytes, requests)

    def bound_cache(self, nbytes: int) -> None:
        """Keep no more than so many bytes of rows from now on."""
        self._row_cache.bound(nbytes)

    def cached_bytes(self) -> int:
        """Bytes of the rows that are kept."""
        return self._row_cache.statistics().bytes

    def reset_after_fork(self) -> None:
        """This process is a child of the one that serves: let go of connections, which end with that one alone."""
        for connection in (self._listening, *self._connections):
            connection.close()
        self._poller.reset_after_fork()

    def statistics(self) -> dict[str, Any]:
        """Where it stands, as plain values."""
        jobs = self._in_flight.jobs()
        with self._lock:
            sessions = list(self._sessions.values())
            totals = {
                "requests": self._requests,
                "samples": self._samples,
                "bytes_read": self._bytes_read,
                "bytes_sent": self._bytes_sent,
            }
        processes: dict[str, list[int]] = {}
        for session in sessions:
            processes.setdefault(session.job, []).append(session.pid)
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": time.monotonic() - self._started,
            "totals": totals,
            "window": {
                "budget_bytes": self._in_flight.total_bytes,
                "used_bytes": self._in_flight.used_bytes,
                "peak_bytes": self._in_flight.peak_bytes,
            },
            "cache": asdict(self._row_cache.statistics()),
            "nodes": [asdict(use) for use in self._uses()],
            "jobs": {job: {"processes": pids, **asdict(jobs.get(job, _NOTHING))} for job, pids in processes.items()},
        }

    def _uses(self) -> tuple[NodeUse, ...]:
        """What it asked of each of several nodes."""
        return self._upstream.uses() if isinstance(self._upstream, CountsNodes) else ()

    def _accept(self) -> None:
        """In the watching thread: somebody connects. Whoever cannot be served is let go, and others are heard."""
        try:
            with self._accepting, suppress(BlockingIOError, ConnectionAbortedError):
                one, _ = self._listening.accept()
                if not self._is_of_this_user(one) or not self._begin(one):
                    one.close()
        except OSError as error:  # no descriptors or memory, which whoever ends gives back
            self._say(f"cannot take a connection: {error.strerror or error}")
            time.sleep(_FULL_S)

    def _is_of_this_user(self, sock: socket.socket) -> bool:
        """Whether whoever connected may; another user gets a sentence, and neither a thread nor a place."""
        _, user = peer_of(sock)
        if user != os.geteuid():
            sock.setblocking(False)
            why = f"this I/O service answers processes of user {os.geteuid()}, not of {user}: start one of your own"
            _refuse(sock, Unauthenticated(why))
        return user == os.geteuid()

    def _begin(self, sock: socket.socket) -> bool:
        """Serve a connection in a thread of its own; return whether there is a place and a thread for it."""
        thread = threading.Thread(target=self._serve, args=(sock,), name="frostline-io", daemon=True)
        with self._lock:
            if self._is_stopped or len(self._connections) >= self._max_connections:
                return False
            self._connections[sock] = thread
            try:
                thread.start()  # before anybody can wait for it to end
            except RuntimeError as error:
                del self._connections[sock]
                self._say(f"cannot take a connection: {error}")
                return False
        return True

    def _say(self, what: str) -> None:
        """Log what goes wrong in the watching thread, at most once a minute."""
        if time.monotonic() >= self._said_at_s + _SAID_EVERY_S:
            self._said_at_s = time.monotonic()
            _LOG.warning("%s", what)

    def _serve(self, sock: socket.socket) -> None:
        """In a thread of the connection."""
        try:
            with sock, suppress(ClientDisconnected, OSError):
                sock.settimeout(_HELLO_S)
                self._greeted(sock)
        finally:
            with self._lock:
                del self._connections[sock]

    def _greeted(self, sock: socket.socket) -> None:
        """Find out who it is, and do what it connected for."""
        pid, _ = peer_of(sock)
        try:
            hello = _received(sock)
            if hello is None:
                return
            says = _hello(hello.says)
            if says["role"] == "session":
                self._attend(sock, says, pid)
            else:
                self._take(sock, says)
        except FrostlineError as error:
            _refuse(sock, error)

    def _attend(self, sock: socket.socket, says: dict[str, str], pid: int) -> None:
        """Follow a process until it ends."""
        session = Session(
            says["session"], says["job"], pid, lambda nbytes: self._in_flight.give_back(says["job"], nbytes)
        )
        ended = threading.Event()
        told = Records(sock, session, ended.set)
        with self._lock:
            if self._is_stopped or session.name in self._sessions:
                return
            self._sessions[session.name] = session
        process = watched_process(sock, pid)
        try:
            welcome = {
                "version": __version__,
                "max_bytes": self._settings.memory_bytes,
                "reports": self._reports_requests,
            }
            send(sock, {"kind": "welcome", **welcome, **self._transfers()})
            sock.setblocking(False)
            self._poller.call_when_readable(sock.fileno(), told.read)
            if process is not None:
                self._poller.call_when_readable(process, ended.set)
            ended.wait()
        finally:
            self._poller.forget(sock.fileno())
            if process is not None:
                self._poller.forget(process)
                os.close(process)
            with self._lock:
                del self._sessions[session.name]
            session.end()

    def _take(self, sock: socket.socket, says: dict[str, str]) -> None:
        """Answer requests of a session until it closes the connection."""
        with self._lock:
            session = self._sessions.get(says["session"])
        if session is None:
            raise NodeUnreachable("the I/O service does not know this session any more")
        while True:
            session.add_connection(sock, _nothing)
            sock.settimeout(None)
            frame = _received(sock, self._settings.memory_bytes)
            if frame is None:
                return
            sock.settimeout(_SEND_S)
            try:
                self._answer(sock, session, frame)
            except FrostlineError as error:
                _refuse(sock, error, **self._transfers())
            finally:
                session.drop_connection(sock)

    def _answer(self, sock: socket.socket, session: Session, frame: Frame) -> None:
        says, kind = frame.says, frame.says.get("kind")
        refuse_unknown_fields(says, ("kind", "answer", *_FIELDS.get(str(kind), says)), f"a request {str(kind)[:50]!r}")
        if kind == "features":
            self._features(sock, session, says)
        elif kind == "prefix":
            self._upstream.put_prefix(str(says.get("digest")), bytes(frame.body))
            send(sock, {"kind": "end", **self._transfers()})
        elif kind == "profile":
            self._profile(sock, session, says)
        else:
            send(sock, {"kind": "end", "value": self._value(kind), **self._transfers()})

    def _value(self, kind: object) -> Any:
        """What is answered in plain values."""
        if kind == "health":
            return self._upstream.health().to_json()
        if kind == "node":
            return self._upstream.node_statistics()
        if kind == "statistics":
            return self.statistics()
        raise BadRequest("the I/O service does not know this kind of request")

    def _profile(self, sock: socket.socket, session: Session, says: dict[str, Any]) -> None:
        wanted, cancellation = ProfileRequest.from_json(says.get("request")), Cancellation()
        with self._watched(sock, session, cancellation.cancel):
            found = self._upstream.profile(wanted, cancellation)
        send(sock, {"kind": "end", "value": found.to_json(), **self._transfers()})

    def _features(self, sock: socket.socket, session: Session, says: dict[str, Any]) -> None:
        request = FeatureRequest.from_json(says.get("request"))
        number = says.get("answer")
        if not isinstance(number, int) or not 0 <= number < 1 << 63:
            raise BadRequest("a request has a number")
        sender = Sender(sock, session, number, self._in_flight)
        answering = RequestHandler(
            request=request,
            job=session.job,
            upstream=self._upstream,
            row_cache=self._row_cache,
            in_flight=self._in_flight,
            deliver=sender,
        )
        with self._lock:
            self._requests += 1
            self._samples += len(request.samples)
        try:
            with self._watched(sock, session, answering.abandon):
                answering.run()
        finally:
            with self._lock:
                self._bytes_sent += sender.bytes_sent
                self._bytes_read += sender.bytes_read
        send(sock, {"kind": "end", **self._transfers()})

    @contextmanager
    def _watched(self, sock: socket.socket, session: Session, abandon: Callable[[], None]) -> Iterator[None]:
        """While an answer is made: whoever asked may go away, and its session may end."""

        def gone() -> None:
            with suppress(RuntimeError):  # the service ends, and abandons everything itself
                self._tidy.submit(abandon)

        session.add_connection(sock, abandon)
        self._poller.call_when_gone(sock.fileno(), gone)
        try:
            yield
        finally:
            self._poller.forget(sock.fileno())

    def _transfers(self) -> dict[str, float]:
        """How fast the link to the node is, which is what tells a job how fast it gets what is not here yet."""
        seen = self._upstream.statistics()
        return {"transfer_bytes": seen.transfer_bytes, "transfer_s": seen.transfer_s}


_FIELDS = {
    "features": ("request",),
    "health": (),
    "node": (),
    "prefix": ("digest",),
    "profile": ("request",),
    "statistics": (),
}
"""What a request of each kind says beside its number."""


def _received(sock: socket.socket, max_bytes: int = 0) -> Frame | None:
    """The next frame.

    Raises:
        BadRequest: The bytes are not a frame.
    """
    try:
        return receive(sock, max_bytes=max_bytes)
    except BrokenFrame as error:
        raise BadRequest(str(error)) from error


def _hello(says: dict[str, Any]) -> dict[str, str]:
    """Who connects, checked."""
    if says.get("kind") != "hello" or says.get("protocol") != PROTOCOL:
        raise BadRequest(
            f"this I/O service is of version {__version__} and speaks protocol {PROTOCOL}: start it with the version "
            "that the jobs have"
        )
    refuse_unknown_fields(says, ("kind", "protocol", "role", "session", "job"), "who connects")
    if says.get("role") not in ("session", "asks") or not all(
        isinstance(says.get(name), str) and _NAME.fullmatch(says[name]) for name in ("session", "job")
    ):
        raise BadRequest("who connects to an I/O service says its session and its job")
    return says


def _refuse(sock: socket.socket, error: FrostlineError, **more: float) -> None:
    with suppress(OSError):
        send(sock, {"kind": "error", "error": error_to_json(error), **more})


def _nothing() -> None:
    pass
