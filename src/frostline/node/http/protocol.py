"""The HTTP protocol of a connection that may be a stranger's: heads have a time limit, and connections a limit too."""

import asyncio
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

__all__ = ("ConnectionLimits", "ConnectionTable", "GuardedProtocol", "Guards", "is_stopping", "limits_of", "recognise")

C = TypeVar("C", bound=Hashable)

_MAX_CONNECTIONS = 4096
# File descriptors left for files, stores and caches, if there are at least twice as many.
_RESERVED = 256
_MAX_HEAD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections before the node knows who asks.

    Attributes:
        head_s: seconds within which a request's head must be complete, from its start or from the connection's.
        head_bytes: maximum size of a head.
        max_unknown: maximum number of connections older than ``young_s`` without a request of a known tenant.
        young_s: seconds for which a new connection is not closed because of ``max_unknown``, since many trainers may
            begin at once.
        max_connections: maximum number of connections.
    """

    head_s: float = 10.0
    head_bytes: int = _MAX_HEAD_BYTES
    max_unknown: int = 1024
    young_s: float = 1.0
    max_connections: int = _MAX_CONNECTIONS


def limits_of(descriptors: int) -> ConnectionLimits:
    """The limits of a process that may open so many files and sockets.

    Args:
        descriptors: maximum number of descriptors; a negative number means no limit.
    """
    if descriptors < 0:
        return ConnectionLimits()
    maximum = max(2, min(_MAX_CONNECTIONS, descriptors - min(_RESERVED, descriptors // 2)))
    return ConnectionLimits(max_unknown=max(1, maximum // 4), max_connections=maximum)


class ConnectionTable(Generic[C]):
    """The connections of a node: unknown, working, or idle after an answer to a known tenant. Not safe for threads.

    Args:
        limits: limits of the connections.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        # Each dictionary is in the order in which connections entered that state.
        self._unknown: dict[C, float] = {}
        self._idle: dict[C, None] = {}
        self._working: dict[C, None] = {}

    def __len__(self) -> int:
        return len(self._unknown) + len(self._idle) + len(self._working)

    def enter(self, connection: C, now_s: float) -> C | None:
        """Admit a connection.

        Args:
            connection: new connection.
            now_s: monotonic seconds.

        Returns:
            The connection that must be closed for it: the oldest unknown one, else the one that has been idle longest,
            else the new one itself; None if there is space.
        """
        gone: C | None = None
        oldest = next(iter(self._unknown), None)
        if len(self) >= self._limits.max_connections:
            gone = oldest or next(iter(self._idle), None) or connection
        elif oldest is not None and len(self._unknown) >= self._limits.max_unknown:
            gone = oldest if now_s - self._unknown[oldest] >= self._limits.young_s else None
        if gone is not None:
            self.leave(gone)
        if gone is not connection:
            self._unknown[connection] = now_s
        return gone

    def recognised(self, connection: C) -> None:
        """Note that a known tenant has asked on this connection."""
        if connection in self._unknown or connection in self._idle:
            self.leave(connection)
            self._working[connection] = None

    def answered(self, connection: C) -> None:
        """Note that its request was answered; an unknown connection stays unknown."""
        if connection in self._working:
            self.leave(connection)
            self._idle[connection] = None

    def leave(self, connection: C) -> None:
        """Remove a connection that is closed, or about to be. Calling it again does nothing."""
        for kind in (self._unknown, self._idle, self._working):
            kind.pop(connection, None)


_LOG = logging.getLogger("frostline.node")
# Minimum seconds between two log lines with the same text.
_LOG_S = 60.0
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_RECOGNISED = "frostline.recognised"
_STOPPING = "frostline.stopping"


class Guards:
    """The state that the connections of one server share. Used only in its event loop's thread.

    Args:
        limits: limits of the connections.

    Attributes:
        is_stopping: whether the server ends, so that answers that go on for ever are to end too.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.is_stopping = False
        self.connections: ConnectionTable[GuardedProtocol] = ConnectionTable(limits)
        self._counts: dict[str, int] = {}
        self._said_at_s: dict[str, float] = {}

    def say(self, what: str, now_s: float) -> None:
        """Log what was done with a connection: at once, and then at most once a minute with a count."""
        self._counts[what] = self._counts.get(what, 0) + 1
        if now_s >= self._said_at_s.get(what, -_LOG_S) + _LOG_S:
            self._said_at_s[what] = now_s
            _LOG.warning("%s (%d since the last such line)", what, self._counts.pop(what))


class GuardedProtocol(HttpToolsProtocol):
    """One connection, made by uvicorn; asyncio and the parser call its methods.

    Args:
        config: uvicorn's argument.
        server_state: uvicorn's argument.
        app_state: uvicorn's argument.
        guards: state shared with the other connections.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        guards: Guards,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._guards = guards
        self._head_bytes = 0
        self._is_in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.BaseProtocol``."""
        super().connection_made(transport)
        self._begin_head()
        gone = self._guards.connections.enter(self, self.loop.time())
        if gone is not None:
            gone.turn_away()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.BaseProtocol``."""
        self._end_head()
        self._guards.connections.leave(self)
        super().connection_lost(exc)

    def turn_away(self) -> None:
        """Close it to make space for another."""
        self._guards.say("closed a connection to make room for another: too many are open", self.loop.time())
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and cycle.response_complete:
            self.transport.close()  # which first sends what is left of its last answer
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > self._guards.limits.head_bytes:
            self._give_up(_TOO_LARGE, f"closed a connection whose head had over {self._guards.limits.head_bytes} bytes")

    def on_message_begin(self) -> None:
        """See ``httptools``."""
        super().on_message_begin()
        self.scope["state"] |= {_RECOGNISED: self._recognised, _STOPPING: self._is_stopping}
        if not self._is_in_head:
            self._begin_head()

    def on_headers_complete(self) -> None:
        """See ``httptools``."""
        self._end_head()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """See ``uvicorn``."""
        self._guards.connections.answered(self)
        super().on_response_complete()

    def _recognised(self) -> None:
        self._guards.connections.recognised(self)

    def _is_stopping(self) -> bool:
        return self._guards.is_stopping

    def _begin_head(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(self._guards.limits.head_s, self._late)

    def _end_head(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._give_up(_LATE, f"closed a connection that sent no whole head within {self._guards.limits.head_s:g} s")

    def _give_up(self, answer: bytes, what: str) -> None:
        if self.transport.is_closing():
            return
        self._guards.say(what, self.loop.time())
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            self.transport.write(answer)
        self.transport.close()


def recognise(state: dict[str, Any]) -> None:
    """Tell a request's connection, through the state in its ASGI scope, that a known tenant has asked."""
    recognised: Callable[[], None] | None = state.get(_RECOGNISED)
    if recognised is not None:
        recognised()


def is_stopping(state: dict[str, Any]) -> bool:
    """Whether the server of a request is about to end, from the state in the request's ASGI scope."""
    stopping: Callable[[], bool] | None = state.get(_STOPPING)
    return stopping is not None and stopping()
