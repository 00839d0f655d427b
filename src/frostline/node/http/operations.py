"""Trainings and listings over HTTP: they are asked for, their events stream out, and results are fetched.

Both stream what their process says, and end it with its client; behind a listing's lines comes the manifest itself.
"""

import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import IO, Any, TypeVar

import anyio
from anyio import CancelScope, CapacityLimiter, create_task_group, to_thread
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from frostline.batching import readable_bytes
from frostline.core.audit import AuditLog
from frostline.core.errors import BadRequest, FrostlineError, OverBudget, Overloaded, Refused
from frostline.node.http.connection_guard import inside_url
from frostline.node.http.description import BINARY
from frostline.node.http.requests import BodyReader, address_of, body_length, json_response, parsed_json
from frostline.node.operations import Operation, Training, Trainings
from frostline.node.service import Node
from frostline.node.tenants import Account
from frostline.wire.listings import ListingRequest, failure_to_json
from frostline.wire.messages import error_from_line, error_to_json
from frostline.wire.recipes import line_of

__all__ = (
    "LINES",
    "ListingRoutes",
    "TrainingRoutes",
)


_DIGEST = re.compile(r"[0-9a-f]{64}")
LINES = "application/x-ndjson"
"""The media type of lines of JSON."""

_PIECE = 64 << 10
# Results that one tenant fetches at once: each holds a file and some pieces until its reader has them.
_MAX_FETCHED = 16
# Seconds without a byte taken after which a reader has gone.
_SILENCE_S = 30.0
# Seconds between empty lines, which show clients and proxies that the training is alive: one who has other nodes to ask
# leaves this one after three.
_BEAT_S = 1.0

T = TypeVar("T")


class TrainingRoutes:
    """The endpoints for trainings.

    Args:
        trainings: trainings of the node.
        threads: limiter of the threads for blocking calls.
        ask: function that returns the account that asks, or refuses it.
        length: function that returns the announced length of a request's body.
        chunks: function that yields the pieces of a request's body.
        audit: log of who had what trained.
    """

    def __init__(
        self,
        trainings: Trainings,
        threads: CapacityLimiter,
        *,
        ask: Callable[[Request], Account],
        length: Callable[[Request], int],
        chunks: Callable[[Request], AsyncIterator[bytes]],
        audit: AuditLog,
    ) -> None:
        self._audit = audit
        self._trainings = trainings
        self._threads = threads
        self._ask = ask
        self._length = length
        self._chunks = chunks
        self._fetched: Counter[str] = Counter()

    async def begin(self, request: Request) -> ASGIApp:
        """Receive a head and start its training."""
        account = self._ask(request)
        training = self._trainings.begin(_prefix(request), self._length(request), account)
        try:
            await self._start(training, request)
        except BaseException:
            with CancelScope(shield=True):
                await _run(self._threads, self._trainings.end, training)
            raise
        self._audit.note("train", tenant=account.name, prefix=_prefix(request), address=address_of(request))
        return OperationResponse(
            training,
            partial(self._trainings.end, training),
            self._threads,
            media_type=LINES,
            told=error_to_json,
            first=line_of({"event": "started", "id": training.id}),
        )

    async def _start(self, training: Training, request: Request) -> None:
        async for chunk in self._chunks(request):
            await _run(self._threads, training.write, chunk)
        first = await _run(self._threads, training.start, _own_url(request), _token(request))
        failure = error_from_line(first)
        if failure is not None:
            raise failure

    async def fetch_or_stop(self, request: Request) -> ASGIApp:
        """Fetch the trained tensors, or end a training."""
        account = self._ask(request)
        self._trainings.check()
        name = request.path_params["id"]
        if request.method == "DELETE":
            is_running = await _run(self._threads, self._trainings.stop, name, account)
            return json_response({"id": name}, status=202 if is_running else 200)
        if self._fetched[account.name] >= _MAX_FETCHED:
            raise Overloaded(f"{_MAX_FETCHED} results are being sent to you already: ask again", retry_after_s=1.0)
        self._fetched[account.name] += 1
        try:
            file = await _run(self._threads, self._trainings.result, name, account)
        except BaseException:
            self._fetched -= Counter({account.name: 1})
            raise
        return self._fetch(file, account)

    def _fetch(self, file: IO[bytes], account: Account) -> ASGIApp:
        length = str(os.fstat(file.fileno()).st_size)
        sending = StreamingResponse(_pieces(file), media_type=BINARY, headers={"Content-Length": length})

        async def send_it(scope: Scope, receive: Receive, send: Send) -> None:
            with file:
                try:
                    await sending(scope, receive, send)
                finally:
                    self._fetched -= Counter({account.name: 1})

        return send_it


class OperationResponse:
    """An ASGI application that streams what an operation says, and ends the operation with its client.

    Empty lines come while nothing happens, but none behind the line after which its bytes come.

    Args:
        operation: running operation.
        end: function that ends it and frees its slots; calling it again does nothing.
        threads: limiter of the threads that wait for its lines.
        media_type: media type of the whole.
        told: function that makes the line of an error.
        first: line that comes first.
        last: beginning of the line after which its bytes come.
    """

    def __init__(
        self,
        operation: Operation,
        end: Callable[[], None],
        threads: CapacityLimiter,
        *,
        media_type: str,
        told: Callable[[FrostlineError], dict[str, Any]],
        first: bytes = b"",
        last: bytes | None = None,
    ) -> None:
        self._operation = operation
        self._end_it = end
        self._threads = threads
        self._media_type = media_type
        self._told = told
        self._first = first
        self._last = last
        self._has_ended = False

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client disconnects."""
        head = [(b"content-type", self._media_type.encode())]
        try:
            async with create_task_group() as group:
                group.start_soon(self._watch, receive, group.cancel_scope)
                await send({"type": "http.response.start", "status": 200, "headers": head})
                group.start_soon(self._beat, send)
                with suppress(TimeoutError):
                    await self._send_all(send)
                group.cancel_scope.cancel()
        finally:
            await self._end()

    async def _watch(self, receive: Receive, scope: CancelScope) -> None:
        """When the client disconnects, end the process at once, which also frees the thread that waits for a line."""
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()
        await self._end()

    async def _beat(self, send: Send) -> None:
        while not self._has_ended:
            await anyio.sleep(_BEAT_S)
            if not self._has_ended:
                await _send(send, b"\n")

    async def _send_all(self, send: Send) -> None:
        """Send lines and bytes. If this returns before the last piece, the server breaks the connection."""
        if self._first:
            await _send(send, self._first)
        is_behind = False
        try:
            while line := await _run(self._threads, self._operation.line):
                is_behind = is_behind or (self._last is not None and line.startswith(self._last))
                self._has_ended = is_behind
                await _send(send, line)
        except FrostlineError as error:
            is_behind = False
            await _send(send, line_of({"event": "failed", **self._told(error)}))
        self._has_ended = True
        if is_behind and not await self._send_pieces(send):
            return
        await self._end()  # a client that has everything may ask for the result, or for another one, at once
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pieces(self, send: Send) -> bool:
        """Send the bytes behind the lines, and return whether all were sent."""
        place = 0
        try:
            while piece := await _run(self._threads, self._operation.piece, place):
                place += len(piece)
                await _send(send, piece)
        except FrostlineError:
            return False
        return True

    async def _end(self) -> None:
        with CancelScope(shield=True):
            await _run(self._threads, self._end_it)


async def _send(send: Send, body: bytes) -> None:
    with anyio.fail_after(_SILENCE_S):
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _prefix(request: Request) -> str:
    digest = request.query_params.get("prefix", "")
    if not _DIGEST.fullmatch(digest):
        raise BadRequest("prefix must be the SHA-256 of the frozen part in 64 lower-case hexadecimal digits")
    return digest


def _own_url(request: Request) -> str:
    """This node's URL as the client reached it; a process beside the node can reach it too."""
    if inside := inside_url(request.scope.get("state", {})):
        return inside
    server = request.scope.get("server")
    if not server or server[1] is None:
        raise Refused("this node does not know its own address")
    host, port = server
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _token(request: Request) -> str | None:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" and token.strip() else None


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    place = 0  # not the file's own position, which other readers share
    while piece := os.pread(file.fileno(), _PIECE, place):
        place += len(piece)
        yield piece


_MAX_BODY = 64 << 10


class ListingRoutes:
    """The endpoint for listings.

    Args:
        node: node that lists.
        threads: limiter of the threads for blocking calls.
        ask: function that returns the account that asks, or refuses it.
        body_reader: reader of the bodies of requests.
    """

    def __init__(
        self, node: Node, threads: CapacityLimiter, *, ask: Callable[[Request], Account], body_reader: BodyReader
    ) -> None:
        self._node = node
        self._threads = threads
        self._ask = ask
        self._body_reader = body_reader

    async def begin(self, request: Request) -> ASGIApp:
        """List a data set for a tenant that may read it."""
        account = self._ask(request)
        length = body_length(request)
        if length > _MAX_BODY:
            raise OverBudget(f"the request has {readable_bytes(length)}: a listing's request may have up to 64 KiB")
        admission = self._node.admit(length, account)
        try:
            wanted = ListingRequest.from_json(parsed_json(await self._body_reader.read_whole(request)))
            admission.read()
            with CancelScope(shield=True):  # so that every listing that has begun is also ended
                listing = await _run(self._threads, self._node.listings.begin, wanted, account)
        except BaseException:
            admission.close()
            raise
        self._node.audit.note("list", tenant=account.name, data=wanted.data, address=address_of(request))

        def end() -> None:
            self._node.listings.end(listing)
            admission.close()

        last = b'{"event":"listed"'
        return OperationResponse(listing, end, self._threads, media_type=BINARY, told=failure_to_json, last=last)


async def _run(threads: CapacityLimiter, call: Callable[..., T], *args: Any) -> T:
    return await to_thread.run_sync(call, *args, limiter=threads)
