"""Kept-alive connections to one node that count every byte, and one HTTP exchange over them."""

import http.client
import os
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from frostline.core.config import TlsFiles
from frostline.core.errors import AnswerDamaged, FrostlineError, NodeUnreachable, Refused, SettingError, Untrusted
from frostline.core.system import crc32
from frostline.wire.messages import CHECKSUM_HEADER, answer_checksum, reason_of
from frostline.wire.tls import FollowedContext, client_context

__all__ = (
    "INSIDE",
    "Connection",
    "Connections",
    "Exchange",
    "LinkMeter",
    "Message",
    "Meter",
    "address_of",
    "time_limit",
)


try:
    import fcntl
    import termios
except ImportError:  # they are Unix's
    _TELLS = False
else:
    _TELLS = True


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


class LinkMeter:
    """Bytes that come, and the seconds in which at least one large body is under way. Safe for threads.

    A body is under way while it is being read and at least 64 KiB of it have not come yet: one that lies in the
    socket's buffer already, since its reader was busy, tells nothing about the link. What comes meanwhile is counted
    on all connections, also where nobody reads it yet: otherwise a link that is shared with a busy reader's
    connection would look thinner than it is.

    Args:
        meter: meter that counts what is read from the sockets.
        clock: seconds of a monotonic clock.
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

    def watch(self, sock: socket.socket) -> None:
        """Count what comes on this connection."""
        with self._lock:
            self._settle()
            self._sockets.add(sock)
            self._since = self._mark()

    def forget(self, sock: socket.socket) -> None:
        """Forget a socket that is about to be closed. Forgetting it again does nothing."""
        with self._lock:
            self._settle()
            self._sockets.discard(sock)
            self._since = self._mark()

    def forget_all(self) -> None:
        """The connections belong to another process now."""
        with self._lock:
            self._sockets.clear()
            self._under_way = 0

    @contextmanager
    def body(self, sock: socket.socket | None, nbytes: int) -> Iterator[None]:
        """Measure while a body of so many bytes is read from a connection."""
        if sock is None or nbytes - _lying(sock) < _LARGE:
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


def _lying(sock: socket.socket) -> int:
    """Bytes that have come on a connection and were not read yet; none where the system does not tell."""
    if not _TELLS:
        return 0
    try:
        found = fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0\0\0\0")
    except (OSError, ValueError):  # it is closed
        return 0
    return int(struct.unpack("i", found)[0])


# How an answer begins that is the last to a request, in the order of texts: one below it has it go on.
_FINAL = b"HTTP/1.1 2"


INSIDE = "http+unix://"
"""The beginning of a node's address for processes of its own user: the path of its socket follows."""


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a node.

    Raises:
        SettingError: The text is no address of a node. The sentence never repeats a name and password.
    """
    shown = f"…@{url.rpartition('@')[2]}" if "@" in url else url
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SettingError(f"{shown!r} is no address of a node: {error}") from error
    is_plain = parts.path in ("", "/") and not parts.query and "@" not in parts.netloc
    is_named = parts.scheme == "https" or (parts.scheme == "http" and not parts.fragment)
    if not host or not is_plain or not is_named:
        raise SettingError(f"a node's address looks like http://host:7070 or https://host:7070, not {shown!r}")
    return host, port or (443 if parts.scheme == "https" else 80)


def _certified_name(url: str) -> str | None:
    """The name that the certificate at an address must be for; None where nothing is encrypted.

    It is that of the host, or the one behind ``#``, of a node that is asked at one of several addresses of a name.
    """
    parts = urlsplit(url)
    return (parts.fragment or parts.hostname) if parts.scheme == "https" else None


# A connection comes within a round trip, or another one where a packet was lost; nothing can break off the wait for it.
_CONNECT_S = 2.0


class Connection(http.client.HTTPConnection):
    """One connection. Not for several threads, but for ``break_off``.

    Args:
        url: URL of the node.
        deadline_s: the longest silence.
        meter: meter that counts the bytes that cross.
        transfers: watch what comes.
        tls: context of TLS; None where the URL asks for none.
    """

    def __init__(
        self, url: str, *, deadline_s: float, meter: Meter, transfers: LinkMeter, tls: FollowedContext | None
    ) -> None:
        self._path = unquote(url.removeprefix(INSIDE)) if url.startswith(INSIDE) else ""
        super().__init__(*(("localhost", 80) if self._path else address_of(url)), timeout=deadline_s)
        self._tls = tls
        self._name = _certified_name(url)
        self._deadline_s = deadline_s
        self._meter = meter
        self._transfers = transfers
        self._is_broken = False

    def connect(self) -> None:
        """Connect, without waiting to fill packets: a request is one small piece after another."""
        plain = self._connected(min(_CONNECT_S, self._deadline_s))
        if self._tls is None:
            plain.settimeout(self._deadline_s)
            self.sock = _CountedSocket(plain, self._meter)
        else:
            self.sock = self._encrypted(plain, self._tls.current())
        self._transfers.watch(self.sock)
        if self._is_broken:
            self.break_off()

    def _connected(self, timeout_s: float) -> socket.socket:
        if self._path:
            inside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            inside.settimeout(timeout_s)
            inside.connect(self._path)
            return inside
        plain = socket.create_connection((self.host, self.port), timeout_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(plain)
        return plain

    def _encrypted(self, plain: socket.socket, context: ssl.SSLContext) -> "_CountedTls":
        """Agree on TLS within the time that connecting may take; the plain socket is closed where that fails."""
        context.sslsocket_class = _CountedTls
        with plain:  # which is empty once it is wrapped
            wrapped = context.wrap_socket(plain, server_hostname=self._name)
        assert isinstance(wrapped, _CountedTls), "it is made by the class above"
        wrapped.meter = self._meter
        wrapped.settimeout(self._deadline_s)
        return wrapped

    @property
    def is_broken(self) -> bool:
        """Whether it was broken off."""
        return self._is_broken

    def close(self) -> None:
        """Close it. Closing it again does nothing."""
        if self.sock is not None:
            self._transfers.forget(self.sock)
        super().close()

    def wait_up_to(self, silence_s: float | None) -> None:
        """Bear a longer silence, once it is connected; None for the connection's own deadline again."""
        if self.sock is not None:
            self.sock.settimeout(self._deadline_s if silence_s is None else max(silence_s, self._deadline_s))

    def expect_rest(self, *, is_begun: bool = True) -> None:
        """Bear only a short silence where an answer has begun, and what waits for nobody is to come.

        A bit that was flipped in a length has its reader wait for bytes that nobody sends.
        """
        if self.sock is not None:
            self.sock.settimeout(min(_REST_S, self._deadline_s) if is_begun else self._deadline_s)

    def wait_for_answer(self) -> None:
        """Wait until an answer begins, whose head is there then."""
        if isinstance(self.sock, _CountedSocket | _CountedTls) and self.sock.peek(1):
            self.expect_rest()

    def is_body_wanted(self, longest_s: float) -> bool:
        """Whether the node goes on with a request whose head asked whether to (RFC 9110, section 10.1.1).

        Args:
            longest_s: the longest time it may take to say so; a node that says nothing gets the body.

        Raises:
            RemoteDisconnected: The node has closed the connection.
        """
        assert isinstance(self.sock, _CountedSocket | _CountedTls), "the head was sent"
        before = self.sock.gettimeout()
        self.sock.settimeout(longest_s)
        try:
            said: bytes = self.sock.peek(len(_FINAL))
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(before)
        if not said:
            raise http.client.RemoteDisconnected("the node closed the connection")
        return said < _FINAL

    def read_body(self, nbytes: int) -> AbstractContextManager[None]:
        """Measure while a body of so many bytes is read from the connection."""
        return self._transfers.body(self.sock, nbytes)

    def break_off(self) -> None:
        """End the exchange from any thread: one that waits for bytes gets an end instead."""
        self._is_broken = True
        counted = self.sock
        if counted is not None:
            try:
                # That of ssl has another thread go on without TLS.
                socket.socket.shutdown(counted, socket.SHUT_RDWR)
            except OSError:  # it is closed already
                return


class Connections:
    """Idle connections for the next request. Safe for threads; after a fork the child makes its own.

    Args:
        url: URL of the node.
        deadline_s: the longest silence on a connection.
        max_idle: the number, kept for later.
        tls: files of TLS where the URL is an ``https://``; None takes those of the environment.

    Attributes:
        meter: meter that counts the bytes that cross.
        transfers: tell how fast large bodies come.

    Raises:
        SettingError: The URL is none, or the files of TLS make no sense.
    """

    def __init__(self, url: str, *, deadline_s: float, max_idle: int, tls: TlsFiles | None = None) -> None:
        if not url.startswith(INSIDE):
            address_of(url)  # which refuses what is none
        self._url = url
        self._tls = client_context(tls or TlsFiles()) if url.startswith("https:") else None
        self._deadline_s = deadline_s
        self._max_idle = max_idle
        self.meter = Meter()
        self.transfers = LinkMeter(self.meter)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._in_use: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._process = os.getpid()

    def take(self) -> Connection | None:
        """A connection that was used before, if there is one; it may have been closed by the node meanwhile."""
        with self._lock:
            self._own()
            if not self._idle:
                return None
            used = self._idle.pop()
            self._in_use.add(used)
            return used

    def make_connection(self) -> Connection:
        """A connection that is not connected yet."""
        made = Connection(
            self._url, deadline_s=self._deadline_s, meter=self.meter, transfers=self.transfers, tls=self._tls
        )
        with self._lock:
            self._own()
            self._in_use.add(made)
        return made

    def break_off(self) -> None:
        """End every exchange that is under way: whoever waits for one is freed."""
        with self._lock:
            self._own()
            in_use = list(self._in_use)
            self._in_use.clear()
        for connection in in_use:
            connection.break_off()

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose last answer was read to its end."""
        with self._lock:
            self._own()
            self._in_use.discard(connection)
            if not connection.is_broken and len(self._idle) < self._max_idle:
                self._idle.append(connection)
                return
        connection.close()

    def drop_idle(self, *, for_good: bool = False) -> None:
        """Close what is kept: the node went away, or this is the end, and what comes back later is closed too."""
        with self._lock:
            self._own()
            idle, self._idle, self._max_idle = self._idle, [], 0 if for_good else self._max_idle
        for connection in idle:
            connection.close()

    def _own(self) -> None:
        # A forked child shares its parent's sockets: using them would mix up both sides' answers.
        if self._process != os.getpid():
            self._process = os.getpid()
            self._idle = []
            self._in_use = weakref.WeakSet()
            self.transfers.forget_all()


def _keep_alive(plain: socket.socket) -> None:
    """Have the system ask a peer that is silent for long whether it is still there: one that vanished cannot say so."""
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # as Linux has them
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _CountedSocket(socket.socket):
    def __init__(self, plain: socket.socket, meter: Meter) -> None:
        timeout = plain.gettimeout()
        super().__init__(fileno=plain.detach())
        self.settimeout(timeout)
        self._meter = meter

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        received = super().recv_into(*args, **kwargs)
        self._meter.add(received=received)
        return received

    def sendall(self, data: Any, *args: Any) -> None:
        super().sendall(data, *args)
        self._meter.add(sent=memoryview(data).nbytes)

    def peek(self, nbytes: int) -> bytes:
        """What comes next, which stays to be received."""
        return self.recv(nbytes, socket.MSG_PEEK)


class _CountedTls(ssl.SSLSocket):
    """Counts what it encrypts and decrypts, some tenths of a percent less than what crosses."""

    meter: Meter
    _peeked = b""

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        if self._peeked:
            view = memoryview(buffer).cast("B")
            received = min(len(view), nbytes or len(view), len(self._peeked))
            view[:received], self._peeked = self._peeked[:received], self._peeked[received:]
        else:
            received = super().recv_into(buffer, nbytes, flags)
        self.meter.add(received=received)
        return received

    def sendall(self, data: Any, flags: int = 0) -> None:
        try:
            super().sendall(data, flags)
        except (ssl.SSLEOFError, ConnectionError):
            self.recv(1)  # which raises what the other side said before it closed, where it did
            raise
        self.meter.add(sent=memoryview(data).nbytes)

    def peek(self, nbytes: int) -> bytes:
        """What comes next, which stays to be received."""
        self._peeked = self._peeked or self.recv(nbytes)
        return self._peeked


# What a connection that the node has closed meanwhile looks like before any byte of an answer has come.
_STALE = (RemoteDisconnected, ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_MAX_JSON = 64 << 20
# A body as large as this is sent once the node has said that it takes it: it may take minutes to send, and a node that
# is full says so at once. It may let an upload wait for memory for ten seconds before.
_ASKED_FIRST = 1 << 20
# Within the longest silence this much is to be on its way: a socket's timeout is for all that one call sends.
_SENT_AT_ONCE = 256 << 10
_ASKED_WITHIN_S = 20.0
_MAX_LINE = 1 << 20
# Seconds without a byte where an answer has begun: the node has sent all of its head, or of a batch, at once.
_REST_S = 10.0
# What ends an answer is there with its last bytes.
_END_S = 1.0
# Arrow reads of each message first so many bytes. A node may compute before them, but not before those of the first,
# which it sends with the head.
_BEGINNING_BYTES = 8
# Of an answer that are read and then taken into its checksum: they are in the processor's cache still.
_SUMMED_AT_ONCE = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is sent.

    Attributes:
        method: HTTP method.
        path: the path after the node's address.
        body: body of the request.
        media_type: media type of the body.
        headers: the headers beside those of HTTP itself. Never shown: one says who asks.
        silence_s: the time that its answer may let wait for itself; None for as long as the connection's own deadline.
        may_repeat: sending it twice is as good as once: an idle connection, which may be closed, is tried first.
    """

    method: str
    path: str
    body: bytes | None = None
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    silence_s: float | None = None
    may_repeat: bool = True


class Exchange:
    """One request and its answer. ``break_off`` may be called from any thread; all else from one.

    Args:
        connections: the connections to the node.
        url: URL of the node, or of another service that ``what`` names, for sentences.
    """

    def __init__(self, connections: Connections, url: str, what: str = "node") -> None:
        self._connections = connections
        self._url, self._what = url, what
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._response: HTTPResponse | None = None
        self._is_broken_off = False
        self._is_sent = False
        self._has_body = True
        self._has_read = False
        self._checksum = 0

    @property
    def checksum(self) -> int:
        """CRC-32 of all bytes that ``read`` gave."""
        return self._checksum

    def send(self, message: Message) -> int:
        """Send a request and return the status of its answer.

        Raises:
            NodeUnreachable: There is no connection, or no answer.
        """
        with self._translated():
            used = self._connections.take() if message.may_repeat else None
            if used is not None:
                try:
                    return self._send(used, message)
                except _STALE:
                    if used.is_broken:
                        raise
                    self._connections.drop_idle()
            return self._send(self._connections.make_connection(), message)

    def is_of(self, media_type: str) -> bool:
        """Whether the answer says that it is of a kind."""
        return self._answer.getheader("Content-Type", "").partition(";")[0].strip() == media_type

    def require(self, media_type: str) -> None:
        """Make sure that the answer is of a kind.

        Raises:
            FrostlineError: The answer is of another kind, such as that of another service at a node's address.
        """
        said = self._answer.getheader("Content-Type", media_type).partition(";")[0].strip()
        if said != media_type:
            self.break_off()
            self.end()
            if media_type in said or _is_a_bit_apart(said, media_type):
                raise AnswerDamaged(f"what came from {self._url} is damaged: it says that it is {said!r}")
            raise FrostlineError(f"what answers at {self._url} is no {self._what}: it sends {said[:60]!r}")

    def read(self, nbytes: int) -> memoryview:
        """So many bytes of the answer, or what is left of it.

        Raises:
            NodeUnreachable: The node fell silent.
        """
        view = np.empty(nbytes, np.uint8).data
        filled = 0
        with self._translated(), self._reading(nbytes):
            if self._connection is not None:
                self._connection.expect_rest(is_begun=nbytes > _BEGINNING_BYTES or not self._has_read)
                self._has_read = True
            try:
                while filled < nbytes and (got := self._answer.readinto(view[filled : filled + _SUMMED_AT_ONCE])):
                    self._checksum = crc32(view[filled : filled + got], self._checksum)
                    filled += got
            except IncompleteRead as error:
                self._checksum = crc32(error.partial, self._checksum)
                filled += len(error.partial)
        return view[:filled]

    def read_line(self) -> bytes:
        """The next line of the answer, or nothing at its end.

        Raises:
            NodeUnreachable: The node fell silent.
        """
        with self._translated():
            return self._answer.readline(_MAX_LINE)

    def read_all(self) -> bytes:
        """A short answer as a whole.

        Raises:
            NodeUnreachable: The answer broke off.
            AnswerDamaged: The bytes differ from those that were sent, by the checksum in the answer's head.
        """
        answer = self._answer
        with self._translated():
            if self._connection is not None:
                self._connection.expect_rest()
            body = answer.read(_MAX_JSON)
        if answer.length and len(body) < _MAX_JSON:
            self._close()
            raise NodeUnreachable(f"the answer of the {self._what} at {self._url} broke off before its end")
        self.end()
        said = answer.getheader(CHECKSUM_HEADER) if self._has_body else None
        if said is not None and said != answer_checksum(answer.status, body):
            raise AnswerDamaged(f"what came from {self._url} is damaged: it has another checksum than it was sent with")
        return body

    def end(self) -> None:
        """The answer was read: keep its connection for another exchange where nothing is left on it."""
        connection, response = self._connection, self._response
        if connection is None:
            return
        if response is not None and self._is_sent and not self._is_broken_off and _is_whole(connection, response):
            self._connection = None
            self._connections.give_back(connection)
        else:
            self._close()

    def break_off(self) -> None:
        """Abandon the answer; a thread that waits for it is freed."""
        with self._lock:
            self._is_broken_off = True
            connection = self._connection
        if connection is not None:
            connection.break_off()

    @property
    def _answer(self) -> HTTPResponse:
        assert self._response is not None
        return self._response

    def _reading(self, nbytes: int) -> AbstractContextManager[None]:
        connection = self._connection
        return nullcontext() if connection is None else connection.read_body(nbytes)

    def _send(self, connection: Connection, message: Message) -> int:
        with self._lock:
            if self._is_broken_off:
                connection.close()
                raise NodeUnreachable("the request was given up")
            self._connection = connection
        headers = {**message.headers, **({} if message.body is None else {"Content-Type": message.media_type})}
        try:
            connection.wait_up_to(None)
            self._is_sent = _send_all(connection, message, headers)
            self._has_body = message.method != "HEAD"
            connection.wait_up_to(message.silence_s)
            if message.body is None or len(message.body) < _ASKED_FIRST:  # else a word of going on has come already
                connection.wait_for_answer()
            self._response = connection.getresponse()
            connection.wait_up_to(message.silence_s)
            self._check_head(self._response)
        except BaseException:
            if connection.is_broken:
                self._is_broken_off = True
            self._close()
            raise
        return self._response.status

    def _check_head(self, response: HTTPResponse) -> None:
        """See to it that an answer says where it ends: else it is waited for until the node closes the connection."""
        is_closed = response.version < 11 or "close" in response.getheader("Connection", "").lower()
        if response.length is None and not response.chunked and not is_closed:
            raise AnswerDamaged(f"what came from {self._url} is damaged: its head says no length")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """The one place where failures of sockets and of HTTP become errors of Frostline."""
        try:
            yield
        except TimeoutError as error:
            self._close()
            raise NodeUnreachable(f"the {self._what} at {self._url} said nothing for too long") from error
        except socket.gaierror as error:
            self._close()
            raise NodeUnreachable(f"the host of {self._url} is not known") from error
        except ssl.SSLError as error:
            self._close()
            raise _error_of_tls(error, self._url, self._what) from error
        except (HTTPException, OSError) as error:
            is_given_up = self._is_broken_off or (self._connection is not None and self._connection.is_broken)
            self._close()
            if is_given_up:  # what a reader then sees is no word of the node's
                raise NodeUnreachable(f"the request to the {self._what} at {self._url} was given up") from error
            why = reason_of(error, self._what)
            if isinstance(error, HTTPException) and not isinstance(error, RemoteDisconnected | IncompleteRead):
                raise AnswerDamaged(f"what came from {self._url} is damaged, or no HTTP: {why[:200]}") from error
            raise NodeUnreachable(f"no connection to the {self._what} at {self._url}: {why}") from error

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            if self._response is not None:  # which has the socket of a connection that carries no other answer
                self._response.close()


@contextmanager
def time_limit(seconds: float, end: Callable[[], None], url: str) -> Iterator[None]:
    """An exchange that is given up where it takes longer, also where a byte comes now and then.

    Args:
        seconds: seconds from now.
        end: function that breaks the exchange off, from another thread.
        url: address of the other side, for the sentence.

    Raises:
        NodeUnreachable: The exchange took longer.
    """
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        end()

    limit = threading.Timer(seconds, give_up)
    limit.daemon = True
    began_s = time.monotonic()
    limit.start()
    try:
        yield
    except FrostlineError:
        if is_late.is_set() or time.monotonic() - began_s >= seconds:  # a socket that waits as long may be first
            raise NodeUnreachable(f"{url} did not answer within {seconds:g} s") from None
        raise
    finally:
        limit.cancel()


def _error_of_tls(error: ssl.SSLError, url: str, what: str) -> FrostlineError:
    """What it means where two sides do not agree on TLS."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Untrusted(
            f"the certificate at {url} is not trusted: {error.verify_message.rstrip('.')}; FROSTLINE_TLS_CA names the "
            "file of its authority"
        )
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        return Untrusted(
            f"{url} trusts no certificate of this client ({_plainly(reason)}): FROSTLINE_TLS_CERT and "
            "FROSTLINE_TLS_KEY name the files of one of its authority"
        )
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return Refused(f"what listens at {url} does not speak TLS: does its address begin with http://?")
    return NodeUnreachable(f"no encrypted connection to the {what} at {url}: {_plainly(reason) or error}")


def _plainly(reason: str) -> str:
    return reason.lower().replace("_", " ")


def _send_all(connection: Connection, message: Message, headers: Mapping[str, str]) -> bool:
    """Send a request; False where the node has answered before it had the body, which was not sent then."""
    body = message.body
    if body is None or len(body) < _ASKED_FIRST:
        connection.request(message.method, message.path, body, headers)
        return True
    asking = {**headers, "Content-Length": str(len(body)), "Expect": "100-continue"}
    connection.request(message.method, message.path, headers=asking)
    is_wanted = connection.is_body_wanted(_ASKED_WITHIN_S)
    for start in range(0, len(body) if is_wanted else 0, _SENT_AT_ONCE):
        connection.send(memoryview(body)[start : start + _SENT_AT_ONCE])
    return is_wanted


def _is_a_bit_apart(said: str, expected: str) -> bool:
    bits = [(ord(got) ^ ord(wanted)).bit_count() for got, wanted in zip(said, expected, strict=False)]
    return len(said) == len(expected) and sum(bits) == 1


def _is_whole(connection: Connection, response: HTTPResponse) -> bool:
    """Nothing is left of an answer, and its connection may carry another."""
    try:
        if connection.sock is not None:
            connection.sock.settimeout(_END_S)
        return not response.read(1) and not response.will_close
    except (HTTPException, OSError):
        return False
