"""Reads requests of untrusted clients within limits of time and bytes, and makes responses."""

import json
import math
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Generic, TypeVar

import anyio
from anyio import CancelScope, CapacityLimiter, create_task_group, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frostline.batching import readable_bytes
from frostline.core.audit import AuditLog
from frostline.core.declared import FieldTwice, first_twice, parse_json, refuse_unknown_fields
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
from frostline.node.http.connection_guard import LOG, tenant_of_request
from frostline.node.memory import Cancelled
from frostline.wire.messages import CHECKSUM_HEADER, answer_checksum, error_to_json, retry_after, status_of

__all__ = (
    "METRICS_TYPE",
    "REFUSALS",
    "AskedByName",
    "BodyReader",
    "MadeOnce",
    "OwnNames",
    "Turns",
    "address_of",
    "announced_bytes",
    "body_length",
    "check_parameters",
    "error_response",
    "json_bytes",
    "json_response",
    "log_refusal",
    "parsed_json",
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
            BadRequest: The body breaks off, is too slow, or its length was not announced.
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

    async def read_whole(self, request: Request) -> bytearray:
        """Read a whole body; see ``chunks`` for the errors.

        Raises:
            AnswerDamaged: The bytes differ from those that were sent, by the checksum that may stand in the request's
                head.
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


def parsed_json(body: bytearray) -> object:
    """The value of a body.

    Raises:
        BadRequest: The body is not JSON, an object in it has a field twice, of which one would be ignored, or a text in
            it has half a character, as no name of a file and no address has.
    """
    try:
        text = body.decode(json.detect_encoding(body))
        value: object = parse_json(text)
    except FieldTwice as error:
        raise BadRequest(f"the body has {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if _MAYBE_HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise BadRequest(f"the body has half a character in a text: {half}") from error
    return value


# What JSON writes halves of characters as: two that belong together are a character, and one of the last 128 is a byte
# of a name that is no UTF-8.
_MAYBE_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def check_parameters(request: Request, known: Iterable[str] = ()) -> None:
    """Make sure that an address has no field that nobody reads, and none twice.

    Args:
        request: request of somebody.
        known: names of the fields behind the question mark.

    Raises:
        BadRequest: The address has an unknown field, or one twice; the sentence names it.
    """
    names = [name for name, _ in request.query_params.multi_items()]
    refuse_unknown_fields(dict.fromkeys(names), known, "the address")
    twice = first_twice(names)
    if twice is not None:
        raise BadRequest(f"the address has the field {twice!r} twice")


def address_of(request: Request) -> str:
    """The address that a request came from; empty where it came from this machine's own user (``Guards.inside``)."""
    return "" if request.client is None else request.client.host


def body_length(request: Request) -> int:
    """The announced length of the body; the server makes sure that no more comes.

    Raises:
        BadRequest: The length of the body is not announced.
    """
    return announced_bytes(request, "Content-Length")


def announced_bytes(request: Request, header: str) -> int:
    """The length in bytes that a header announces.

    Raises:
        BadRequest: The header announces no length.
    """
    length = request.headers.get(header, "")
    if not length.isascii() or not length.isdigit() or len(length) > _MAX_DIGITS:
        raise BadRequest(f"the length of the body must be announced with {header}")
    return int(length)


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make a response with a value as JSON."""
    body = json_bytes(value)
    says = {**(headers or {}), CHECKSUM_HEADER: answer_checksum(status, body)}
    return Response(body, status_code=status, headers=says, media_type="application/json")


def json_bytes(value: Any) -> bytes:
    """A value as JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def error_response(error: FrostlineError) -> Response:
    """Make the response for an error."""
    return json_response(error_to_json(error), status=status_of(error), headers=retry_after(error))


# Calls of one asker that wait for their turn. What waits longer than a few hundred others is asked for again meanwhile.
_MAX_IN_LINE = 1024


class Turns:
    """Runs calls in a few threads, one of each asker at a time, so that nobody waits behind all that another asks for.

    Used only in the event loop's thread.

    Args:
        threads: maximum number of calls that run at once.
    """

    def __init__(self, threads: int) -> None:
        self._threads = CapacityLimiter(threads)
        self._lines: dict[Hashable, _Line] = {}

    async def run(self, asker: Hashable, call: Callable[[], T]) -> T:
        """Run a call once it is the asker's turn, and return what it returns.

        Args:
            asker: key of who asks, such as the name of a tenant.
            call: call to run.

        Raises:
            Overloaded: The asker has over a thousand calls that wait already.
        """
        line = self._lines.setdefault(asker, _Line())
        if line.count >= _MAX_IN_LINE:
            raise Overloaded(f"{line.count:,} requests of yours wait already: ask again later", retry_after_s=1.0)
        line.count += 1
        try:
            async with line.turn:
                return await to_thread.run_sync(call, limiter=self._threads)
        finally:
            line.count -= 1
            if not line.count:
                del self._lines[asker]


@dataclass(slots=True)
class _Line:
    """The calls of one asker that run or wait."""

    turn: anyio.Lock = field(default_factory=anyio.Lock)
    count: int = 0


class MadeOnce(Generic[T]):
    """Makes a value for whoever asks, once more for all who ask while it is made. Used in the event loop's thread."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._lock = anyio.Lock()
        self._made: tuple[float, T] | None = None

    async def get(self) -> T:
        """The value, which was begun to be made since now."""
        asked_s = anyio.current_time()
        async with self._lock:
            if self._made is None or self._made[0] < asked_s:
                self._made = anyio.current_time(), await self._make()
            return self._made[1]


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
        give_up: function that makes the call end soon; safe from any thread.
        threads: limiter of the threads.
        deadline_s: seconds after which the call is cancelled.

    Raises:
        FrostlineError: any error of the call.
        Unavailable: The call was cancelled.
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
        tenant, kind = tenant_of_request(request.scope.get("state", {})), type(error).__name__
        route = getattr(request.scope.get("route"), "path", "")
        audit.note("refused", kind=kind, route=route, tenant=tenant, address=address_of(request))
    return error_response(error)


_SAID_EVERY_S = 10.0
# Characters of a path in the log: longer than any that a route takes.
_MAX_PATH = 200
_said_at_s: dict[str, float] = {}


def log_refusal(path: str, error: FrostlineError) -> None:
    """Log why a request is refused or has failed; one line for each kind of error in ten seconds.

    A node that is full refuses many, which its metrics count.
    """
    kind, now_s = type(error).__name__, time.monotonic()
    if isinstance(error, Overloaded) or now_s - _said_at_s.get(kind, -math.inf) < _SAID_EVERY_S:
        return
    _said_at_s[kind] = now_s
    LOG.warning("refused %s: %s: %s", path[:_MAX_PATH], kind, error)


async def _refuse_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"error": "Refused", "message": error.detail}
    return json_response(body, status=error.status_code, headers=error.headers)


REFUSALS = {FrostlineError: _refuse, HTTPException: _refuse_http}
"""What an application of Starlette answers to errors: a sentence as JSON, with the status that belongs to it."""


_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
# How a browser says that a page of another site, or of a neighbour of this one, has it ask.
_FROM_ELSEWHERE = {"cross-site", "same-site"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNames:
    """The names by which a server may be asked, so that no page of another site has a browser ask it.

    A page can have a name of its own lead to any address, a loopback's too, and then reads what answers there as its
    own. It can send what it cannot read. What programs send is not affected.

    Attributes:
        names: host names to add, with their subdomains; they count as origins too.
        is_open: a server without tenants, which answers whoever asks; else who asks must send a token, which no page of
            another site has, and any name will do.
        is_local: True if it listens on a loopback, and names without a dot are no names of its own.
    """

    names: tuple[str, ...] = ()
    is_open: bool = True
    is_local: bool = True

    def refusal(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Why a request is refused; None where it is not.

        Args:
            method: the method.
            path: the path.
            headers: the headers, with small names.
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


# As a browser writes it, so that nothing else is behind what is looked at.
_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d{0,5})?")


def _name_of(host: str) -> str:
    """A host's name or address without its port and the brackets of IPv6; empty where it is no host."""
    found = _HOST.fullmatch(host)
    if found is None:
        return ""
    address, name = found.groups("")
    return address.partition("%")[0] if address else name.rstrip(".")


class AskedByName:
    """An application that answers requests alone which ``names`` does not refuse; those stand in its audit log."""

    def __init__(self, app: Starlette, names: OwnNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        why = self._names.refusal(scope["method"], scope["path"], scope["headers"])
        if why is None:
            await self._app(scope, receive, send)
            return
        error, audit = Forbidden(why), self._app.state.audit
        audit.note("refused", kind=type(error).__name__, why=why, address=address_of(Request(scope)))
        await error_response(error)(scope, receive, send)
