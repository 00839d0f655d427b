"""Reads requests of connections that may be a stranger's within limits of time and bytes, and makes responses.

Reads the bodies of requests, makes JSON responses, and cancels calls whose client disconnects.

The HTTP protocol of a connection that may be a stranger's: heads have a time limit, and connections a limit too.

Refuses what a page of another site has a browser ask.
"""

import asyncio
import json
import logging
import math
import re
import socket
import time
import traceback
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Generic, Protocol, TypeVar

import anyio
from anyio import CancelScope, CapacityLimiter, create_task_group, to_thread
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from frostline.batching import readable_bytes
from frostline.core.audit import AuditLog
from frostline.core.errors import (
    AccessDenied,
    AnswerDamaged,
    BadRequest,
    Forbidden,
    FrostlineError,
    Overloaded,
    Refused,
    Unavailable,
)
from frostline.core.system import crc32
from frostline.node.memory import Cancelled
from frostline.wire.messages import CHECKSUM_HEADER, error_to_json, retry_after, status_of

__all__ = (
    "METRICS_TYPE",
    "REFUSALS",
    "AskedByName",
    "BodyReader",
    "ConnectionLimits",
    "ConnectionTable",
    "Guarded",
    "GuardedProtocol",
    "Guards",
    "OwnNames",
    "SeldomLog",
    "address_of",
    "announced",
    "body_length",
    "error_response",
    "inside_url",
    "is_stopping",
    "json_response",
    "limits_of",
    "log_refusal",
    "recognise",
    "run_while_connected",
)


METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"
"""What Prometheus is answered."""

T = TypeVar("T")

# Seconds without a byte after which a sender has gone. A body may take that much longer than its minimum rate allows.
_SILENCE_S = 60.0
# Python reads longer numbers slowly, and no memory has as many bytes.
_MAX_DIGITS = 18


class BodyReader:
    """Reads bodies with a minimum rate, because a slow upload occupies a slot that others wait for.

    Args:
        min_bytes_per_s: minimum rate of a sender.
        silence_s: maximum seconds without a byte, and seconds in all that a body may take beyond its minimum rate.
    """

    def __init__(self, min_bytes_per_s: int, silence_s: float = _SILENCE_S) -> None:
        self._min_bytes_per_s = min_bytes_per_s
        self._silence_s = silence_s

    async def chunks(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the pieces of a body as they come.

        Raises:
            BadRequest: if it breaks off, is too slow, or its length was not announced.
        """
        until_s = anyio.current_time() + self._silence_s + body_length(request) / self._min_bytes_per_s
        stream = request.stream()
        while True:
            left_s = until_s - anyio.current_time()
            try:
                with anyio.fail_after(min(self._silence_s, left_s)):
                    chunk = await anext(stream, None)
            except (ClientDisconnect, TimeoutError) as error:
                raise self._broken(is_late=left_s < self._silence_s and isinstance(error, TimeoutError)) from error
            if chunk is None:
                return
            yield chunk

    async def whole(self, request: Request) -> bytearray:
        """Read a whole body; see ``chunks`` for the errors.

        Raises:
            AnswerDamaged: if it is not what was sent, by the checksum that may stand in its head.
        """
        body = bytearray()
        async for chunk in self.chunks(request):
            body += chunk
        said = request.headers.get(CHECKSUM_HEADER, "")
        if said and said != f"{crc32(body):08x}":
            raise AnswerDamaged("the request came damaged: its body has another checksum than it was sent with")
        return body

    def _broken(self, *, is_late: bool) -> BadRequest:
        if not is_late:
            return BadRequest("the body broke off before its end")
        return BadRequest(
            f"the body came slower than {readable_bytes(self._min_bytes_per_s)} per second: send it over a faster "
            "link, or start the node with a smaller --min-upload-rate"
        )


def address_of(request: Request) -> str:
    """The address that a request came from; empty where it came from this machine's own user (``Guards.inside``)."""
    return "" if request.client is None else request.client.host


def body_length(request: Request) -> int:
    """The announced length of the body; the server makes sure that no more comes.

    Raises:
        BadRequest: if it is not announced.
    """
    return announced(request, "Content-Length")


def announced(request: Request, header: str) -> int:
    """The length in bytes that a header announces.

    Raises:
        BadRequest: if it announces none.
    """
    length = request.headers.get(header, "")
    if not length.isascii() or not length.isdigit() or len(length) > _MAX_DIGITS:
        raise BadRequest(f"the length of the body must be announced with {header}")
    return int(length)


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make a response with a value as JSON."""
    body = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def error_response(error: FrostlineError) -> Response:
    """Make the response for an error."""
    return json_response(error_to_json(error), status=status_of(error), headers=retry_after(error))


async def run_while_connected(
    receive: Receive,
    call: Callable[[], T],
    give_up: Callable[[], None],
    threads: CapacityLimiter,
    deadline_s: float = math.inf,
) -> T:
    """Run a call in a thread, and cancel it when the client disconnects or its deadline passes.

    Args:
        receive: ASGI receive function, which reports the disconnect; the body was read before.
        call: call to run.
        give_up: makes the call end soon; safe from any thread.
        threads: limiter of the threads.
        deadline_s: seconds after which the call is cancelled.

    Raises:
        FrostlineError: any error of the call.
        Unavailable: if it was cancelled.
    """
    async with create_task_group() as group:
        group.start_soon(_watch, receive, give_up, threads)
        if deadline_s < math.inf:
            group.start_soon(_expire, deadline_s, give_up, threads)
        made = await to_thread.run_sync(_outcome, call, limiter=threads)
        group.cancel_scope.cancel()
    if isinstance(made, FrostlineError):
        raise made
    return made


async def _watch(receive: Receive, give_up: Callable[[], None], threads: CapacityLimiter) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    with CancelScope(shield=True):
        await to_thread.run_sync(give_up, limiter=threads)


async def _expire(deadline_s: float, give_up: Callable[[], None], threads: CapacityLimiter) -> None:
    await anyio.sleep(deadline_s)
    with CancelScope(shield=True):
        await to_thread.run_sync(give_up, limiter=threads)


def _outcome(call: Callable[[], T]) -> T | FrostlineError:
    """Run the call; its error is returned as a value, because a task group would wrap it."""
    try:
        return call()
    except FrostlineError as error:
        return error
    except (Cancelled, CancelledError):
        return Unavailable("this was cancelled: its deadline has passed, its client has gone, or the node is stopping")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, FrostlineError)
    log_refusal(request.url.path, error)
    if isinstance(error, Refused | AccessDenied | Overloaded):
        audit: AuditLog = request.app.state.audit
        state, kind = request.scope.get("state", {}), type(error).__name__
        route = getattr(request.scope.get("route"), "path", "")
        audit.note("refused", kind=kind, route=route, tenant=state.get(_TENANT, ""), address=address_of(request))
    return error_response(error)


_SAID_EVERY_S = 10.0
_said_at_s: dict[str, float] = {}


def log_refusal(path: str, error: FrostlineError) -> None:
    """Log why a request is refused or has failed; one line for each kind of error in ten seconds.

    A node that is full refuses many, which its metrics count.
    """
    kind, now_s = type(error).__name__, time.monotonic()
    if isinstance(error, Overloaded) or now_s - _said_at_s.get(kind, -math.inf) < _SAID_EVERY_S:
        return
    _said_at_s[kind] = now_s
    _LOG.warning("refused %s: %s: %s", path, kind, error)


async def _refuse_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"error": "Refused", "message": error.detail}
    return json_response(body, status=error.status_code, headers=error.headers)


REFUSALS = {FrostlineError: _refuse, HTTPException: _refuse_http}
"""What an application of Starlette answers to errors: a sentence as JSON, with the status that belongs to it."""


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
_TENANT = "frostline.tenant"
_INSIDE = "frostline.inside"


class Guarded(Hashable, Protocol):
    """A connection that may be closed for another."""

    def turn_away(self) -> None:
        """Close it to make space for another."""


class Guards:
    """The state that the connections of one server share. Used only in its event loop's thread.

    Args:
        limits: limits of the connections.

    Attributes:
        is_stopping: whether the server ends, so that answers that go on for ever are to end too.
        inside: URL at which processes of its own ask it; empty where they ask it as others do.
        log: takes the place of uvicorn's log.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.is_stopping = False
        self.inside = ""
        self.connections: ConnectionTable[Guarded] = ConnectionTable(limits)
        self.log = SeldomLog(_LOG)

    def say(self, what: str) -> None:
        """Log what was done with a connection; see ``SeldomLog``."""
        self.log.warning(what)


class SeldomLog(logging.LoggerAdapter[logging.Logger]):
    """Logs the same message, whatever fills it, at once and then at most once a minute with a count.

    Whoever reaches a port can cause a line for each request.

    Args:
        logger: takes the lines.
        clock: monotonic seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logger)
        self._clock = clock
        self._counts: dict[tuple[str, str], int] = {}
        self._said_at_s: dict[tuple[str, str], float] = {}

    @property
    def level(self) -> int:
        """The level of the logger, which uvicorn asks for."""
        return self.logger.level

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message, or count it; what is logged at all is no question of its count."""
        if not self.isEnabledFor(level):
            return
        what, now_s = str(msg).rstrip(), self._clock()
        key = (what, _place_of(kwargs.get("exc_info")))
        self._counts[key] = self._counts.get(key, 0) + 1
        if now_s >= self._said_at_s.get(key, -_LOG_S) + _LOG_S:
            self._said_at_s[key] = now_s
            self.logger.log(level, f"{what} (%d since the last such line)", *args, self._counts.pop(key), **kwargs)


def _place_of(error: object) -> str:
    """What an error is and where it was raised, by which errors are told apart; empty for none."""
    if not isinstance(error, BaseException):
        return ""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{type(error).__name__} {frames[0].filename}:{frames[0].lineno}" if frames else type(error).__name__


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
        self.logger = guards.log  # type: ignore[assignment]
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
        self._guards.say("closed a connection to make room for another: too many are open")
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
        self.scope["state"] |= {
            _RECOGNISED: self._recognised,
            _STOPPING: self._is_stopping,
            _INSIDE: self._guards.inside,
        }
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

    def _unsupported_upgrade_warning(self) -> None:
        self._guards.say("answered a request to change to another protocol as if it had not asked")

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
        self._guards.say(what)
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            self.transport.write(answer)
        self.transport.close()


def recognise(state: dict[str, Any], tenant: str) -> None:
    """Tell a request's connection, through the state in its ASGI scope, that a known tenant has asked, and which."""
    state[_TENANT] = tenant
    recognised: Callable[[], None] | None = state.get(_RECOGNISED)
    if recognised is not None:
        recognised()


def is_stopping(state: dict[str, Any]) -> bool:
    """Whether the server of a request is about to end, from the state in the request's ASGI scope."""
    stopping: Callable[[], bool] | None = state.get(_STOPPING)
    return stopping is not None and stopping()


def inside_url(state: dict[str, Any]) -> str:
    """The URL at which processes of its own ask a server, from the state in a request's ASGI scope; empty for none."""
    return str(state.get(_INSIDE, ""))


_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
# How a browser says that a page of another site, or of a neighbour of this one, has it ask.
_FROM_ELSEWHERE = {"cross-site", "same-site"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNames:
    """The names by which a server may be asked, so that no page of another site has a browser ask it.

    A page can have a name of its own lead to any address, a loopback's too, and then reads what answers there as its
    own. It can send what it cannot read. What programs send is not affected.

    Attributes:
        names: further names, each with all names that end in it; they count as origins too.
        is_open: a server without tenants, which answers whoever asks; else who asks must send a token, which no page of
            another site has, and any name will do.
        is_local: it listens on a loopback, and names without a dot are no names of its own.
    """

    names: tuple[str, ...] = ()
    is_open: bool = True
    is_local: bool = True

    def refusal(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Why a request is refused; None where it is not.

        Args:
            method: its method.
            path: its path.
            headers: its headers, with small names.
        """
        said = {name: [value for other, value in headers if other == name] for name in (b"host", b"origin")}
        hosts = [host.decode("latin-1").lower() for host in said[b"host"]]
        if len(hosts) > 1 or (self.is_open and any(not self._is_own(_name_of(host)) for host in hosts)):
            return "this server is not asked by that name: use its address, or start it with --allow-host NAME"
        for origin in said[b"origin"]:
            place = origin.decode("latin-1").lower().rpartition("//")[2]
            if place not in hosts and not self._is_named(_name_of(place)):
                return "pages of other sites may not ask this server: start it with --allow-host NAME where one may"
        sites = {value.decode("latin-1").lower() for name, value in headers if name == b"sec-fetch-site"}
        if sites & _FROM_ELSEWHERE and not (path == "/" and method in ("GET", "HEAD")):
            return "pages of other sites may not ask this server"
        return None

    def _is_own(self, name: str) -> bool:
        try:
            return bool(ip_address(name))
        except ValueError:
            is_here = name == "localhost" or name.endswith(".localhost") or name == socket.gethostname().lower()
            is_plain = not self.is_local and bool(_LABEL.fullmatch(name)) and not name.isdigit()
            return is_here or is_plain or self._is_named(name)

    def _is_named(self, name: str) -> bool:
        return any(name == own or name.endswith(f".{own}") for own in self.names)


def _name_of(host: str) -> str:
    """A host's name or address without its port and the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0].partition("%")[0]
    return host.partition(":")[0].rstrip(".")


class AskedByName:
    """An application that answers requests alone which ``names`` does not refuse.

    Args:
        app: the application.
        names: names of the server.
    """

    def __init__(self, app: ASGIApp, names: OwnNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        why = self._names.refusal(scope["method"], scope["path"], scope["headers"])
        app = self._app if why is None else error_response(Forbidden(why))
        await app(scope, receive, send)
