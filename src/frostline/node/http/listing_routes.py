"""Listings over HTTP: how far one is streams out, and then the manifest itself."""

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
from frostline.node.http.request_body import Bodies, body_length
from frostline.node.scheduling.admission import Admission
from frostline.node.scheduling.tenants import Account
from frostline.node.service.listings import Listing
from frostline.node.service.node import Node
from frostline.wire.event_lines import line_of
from frostline.wire.listings import ListingRequest, failure_to_json

__all__ = ("ListingRoutes",)

_MEDIA_TYPE = b"application/octet-stream"
_MAX_BODY = 64 << 10
# A reader that takes no byte for so long has gone.
_SILENCE_S = 30.0
# An empty line tells a client, and whatever stands between, that the node is there while it lists.
_BEAT_S = 10.0

T = TypeVar("T")


class ListingRoutes:
    """The endpoint of listings.

    Args:
        node: that lists.
        threads: in which what blocks runs.
        ask: who asks, or refuses.
        bodies: how the bodies of requests are read.
    """

    def __init__(
        self, node: Node, threads: CapacityLimiter, *, ask: Callable[[Request], Account], bodies: Bodies
    ) -> None:
        self._node = node
        self._threads = threads
        self._ask = ask
        self._bodies = bodies

    async def begin(self, request: Request) -> ASGIApp:
        """List a data set for whoever may read it."""
        account = self._ask(request)
        length = body_length(request)
        if length > _MAX_BODY:
            raise OverBudget(f"the request has {readable_bytes(length)}, and that for a listing up to 64 KiB")
        admission = self._node.admit(length, account)
        try:
            wanted = _parsed(await self._bodies.whole(request))
            admission.read()
            with CancelScope(shield=True):  # a listing that began is one that somebody ends
                listing = await _run(self._threads, self._node.listings.begin, wanted, account)
        except BaseException:
            admission.close()
            raise
        return ListingReply(self._node, listing, admission, self._threads)


class ListingReply:
    """An ASGI application that tells how far a listing is, sends what came of it, and ends it when nobody listens.

    Args:
        node: that lists.
        listing: that runs.
        admission: of the request; closed at the end.
        threads: in which its lines are waited for.
    """

    def __init__(self, node: Node, listing: Listing, admission: Admission, threads: CapacityLimiter) -> None:
        self._node = node
        self._listing = listing
        self._admission = admission
        self._threads = threads
        self._has_ended = False

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send it all, or stop where the client goes away."""
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
        """End the process, which frees the thread that waits for its next line, as soon as the client has gone."""
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
        """Where this returns before the last piece, the server breaks the connection."""
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
        await self._end()  # who has it all may ask for another one at once
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pieces(self, send: Send) -> bool:
        """Whether all bytes of the manifest and of the splits were sent."""
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
        raise BadRequest(f"the body is no JSON: {error}") from error
    return ListingRequest.from_json(value)
