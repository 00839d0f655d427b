"""The HTTP protocol of a connection that may be a stranger's: heads have a time limit, and connections a limit too."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from frostline.node.http.connection_limit import ConnectionLimits, ConnectionTable

__all__ = ("GuardedProtocol", "Guards", "recognise")

_LOG = logging.getLogger("frostline.node")
# Minimum seconds between two log lines with the same text.
_LOG_S = 60.0
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_RECOGNISED = "frostline.recognised"


class Guards:
    """The state that the connections of one server share. Used only in its event loop's thread.

    Args:
        limits: limits of the connections.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
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
        self.scope["state"][_RECOGNISED] = self._recognised
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
