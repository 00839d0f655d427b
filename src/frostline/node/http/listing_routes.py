"""Listings over HTTP: streams the progress of a listing, and then the manifest itself."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import anyio
from anyio import CancelScope, CapacityLimiter, create_task_group, to_thread
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from frostline.batching import readable_bytes
from frostline.errors import BadRequest, FrostlineError, OverBudget
from frostline.node.http.messages import BodyReader, body_length
from frostline.node.scheduling.admission import Admission
from frostline.node.scheduling.tenants import Account
from frostline.node.service.listings import Listing
from frostline.node.service.node import Node
from frostline.wire.event_lines import line_of
from frostline.wire.listings import ListingRequest, failure_to_json

__all__ = ("ListingRoutes",)

_MEDIA_TYPE = b"application/octet-stream"
_MAX_BODY = 64 << 10
# Seconds without a byte taken after which a reader has gone.
_SILENCE_S = 30.0
# Seconds between empty lines, which show clients and proxies that the listing is alive.
_BEAT_S = 10.0

T = TypeVar("T")


class ListingRoutes:
    """The endpoint for listings.

    Args:
        node: node that lists.
        threads: limiter of the threads for blocking calls.
        ask: returns the account that asks, or refuses it.
        body_reader: reads the bodies of requests.
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
            wanted = _parsed(await self._body_reader.whole(request))
            admission.read()
            with CancelScope(shield=True):  # so that every listing that has begun is also ended
                listing = await _run(self._threads, self._node.listings.begin, wanted, account)
        except BaseException:
            admission.close()
            raise
        return ListingResponse(self._node, listing, admission, self._threads)


class ListingResponse:
    """An ASGI application that streams a listing's progress and result, and ends the listing with its client.

    Args:
        node: node that lists.
        listing: running listing.
        admission: admission of the request; closed at the end.
        threads: limiter of the threads that wait for its lines.
    """

    def __init__(self, node: Node, listing: Listing, admission: Admission, threads: CapacityLimiter) -> None:
        self._node = node
        self._listing = listing
        self._admission = admission
        self._threads = threads
        self._has_ended = False

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client disconnects."""
        try:
            async with create_task_group() as group:
                group.start_soon(self._watch, receive, group.cancel_scope)
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", _MEDIA_TYPE)]})
                group.start_soon(self._beat, send)
                with suppress(TimeoutError):
                    await self._send_all(send)
                group.cancel_scope.cancel()
        finally:
            await self._end()
            self._admission.close()

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
        """Send lines and manifest. If this returns before the last piece, the server breaks the connection."""
        is_listed = False
        try:
            while line := await _run(self._threads, self._listing.line):
                is_listed = is_listed or line.startswith(b'{"event":"listed"')
                self._has_ended = is_listed
                await _send(send, line)
        except FrostlineError as error:
            is_listed = False
            await _send(send, line_of(failure_to_json(error)))
        if is_listed and not await self._send_pieces(send):
            return
        await self._end()  # a client that has everything may ask for another listing at once
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pieces(self, send: Send) -> bool:
        """Send the manifest and the splits, and return whether all bytes were sent."""
        place = 0
        try:
            while piece := await _run(self._threads, self._listing.piece, place):
                place += len(piece)
                await _send(send, piece)
        except FrostlineError:
            return False
        return True

    async def _end(self) -> None:
        with CancelScope(shield=True):
            await _run(self._threads, self._node.listings.end, self._listing)


async def _run(threads: CapacityLimiter, call: Callable[..., T], *args: Any) -> T:
    return await to_thread.run_sync(call, *args, limiter=threads)


async def _send(send: Send, body: bytes) -> None:
    with anyio.fail_after(_SILENCE_S):
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _parsed(body: bytearray) -> ListingRequest:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    return ListingRequest.from_json(value)
