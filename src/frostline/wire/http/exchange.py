"""One HTTP exchange with a node: sent once more where an idle connection turns out to be closed."""

import http.client
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse, RemoteDisconnected

import numpy as np

from frostline.errors import NodeUnreachable
from frostline.wire.http.pool import Connection, Connections

__all__ = ("Exchange", "Message")

# What a connection that the node has closed meanwhile looks like before any byte of an answer has come.
_STALE = (RemoteDisconnected, ConnectionResetError, BrokenPipeError)
_MAX_JSON = 64 << 20
# A body as large as this is sent once the node has said that it takes it: it may take minutes to send, and a node that
# is full says so at once. It may let an upload wait for memory for ten seconds before.
_ASKED_FIRST = 1 << 20
_ASKED_WITHIN_S = 20.0
_MAX_LINE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is sent.

    Attributes:
        method: HTTP method.
        path: after the node's address.
        body: body of the request.
        media_type: media type of the body.
        headers: beside those of HTTP itself. Never shown: one says who asks.
        silence_s: how long its answer may let wait for itself; None for as long as the connection's own deadline.
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
        connections: to the node.
        url: URL of the node, for sentences.
    """

    def __init__(self, connections: Connections, url: str) -> None:
        self._connections = connections
        self._url = url
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._response: HTTPResponse | None = None
        self._is_broken_off = False
        self._is_sent = False

    def send(self, message: Message) -> int:
        """Send a request and return the status of its answer.

        Raises:
            NodeUnreachable: No connection, or no answer.
        """
        with self._translated():
            used = self._connections.take() if message.may_repeat else None
            if used is not None:
                try:
                    return self._send(used, message)
                except _STALE:
                    self._connections.drop_idle()
            return self._send(self._connections.new(), message)

    def read(self, nbytes: int) -> memoryview:
        """So many bytes of the answer, or what is left of it.

        Raises:
            NodeUnreachable: The node fell silent.
        """
        view = np.empty(nbytes, np.uint8).data
        filled = 0
        with self._translated(), self._reading(nbytes):
            try:
                while filled < nbytes and (got := self._answer.readinto(view[filled:])):
                    filled += got
            except http.client.IncompleteRead as error:
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
        """
        with self._translated():
            body = self._answer.read(_MAX_JSON)
        self.end()
        return body

    def end(self) -> None:
        """The answer was read: keep its connection for another exchange where nothing is left on it."""
        connection, response = self._connection, self._response
        self._connection = None
        if connection is None:
            return
        if response is not None and self._is_sent and not self._is_broken_off and _is_whole(response):
            self._connections.give_back(connection)
        else:
            connection.close()
            if response is not None:  # which has the socket of a connection that carries no other answer
                response.close()

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
        return nullcontext() if connection is None else connection.reading(nbytes)

    def _send(self, connection: Connection, message: Message) -> int:
        with self._lock:
            if self._is_broken_off:
                connection.close()
                raise NodeUnreachable("the request was given up")
            self._connection = connection
        headers = {**message.headers, **({} if message.body is None else {"Content-Type": message.media_type})}
        try:
            self._is_sent = _send_all(connection, message, headers)
            connection.wait_up_to(message.silence_s)
            self._response = connection.getresponse()
        except BaseException:
            self._connection = None
            connection.close()
            raise
        return self._response.status

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """The one place where failures of sockets and of HTTP become errors of Frostline."""
        try:
            yield
        except TimeoutError as error:
            self._close()
            raise NodeUnreachable(f"the node at {self._url} said nothing for too long") from error
        except socket.gaierror as error:
            self._close()
            raise NodeUnreachable(f"the host of {self._url} is not known") from error
        except (HTTPException, OSError) as error:
            self._close()
            why = str(error) or type(error).__name__
            raise NodeUnreachable(f"no connection to the node at {self._url}: {why}") from error

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _send_all(connection: Connection, message: Message, headers: Mapping[str, str]) -> bool:
    """Send a request; False where the node has answered before it had the body, which was not sent then."""
    body = message.body
    if body is None or len(body) < _ASKED_FIRST:
        connection.request(message.method, message.path, body, headers)
        return True
    asking = {**headers, "Content-Length": str(len(body)), "Expect": "100-continue"}
    connection.request(message.method, message.path, headers=asking)
    is_wanted = connection.is_body_wanted(_ASKED_WITHIN_S)
    if is_wanted:
        connection.send(body)
    return is_wanted


def _is_whole(response: HTTPResponse) -> bool:
    """Nothing is left of an answer, and its connection may carry another."""
    try:
        return not response.read(1) and not response.will_close
    except (HTTPException, OSError):
        return False
