"""Sends an answer while it is made, and ends it when nobody reads it any more."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
from anyio import CancelScope, CapacityLimiter, create_task_group, to_thread
from starlette.types import Receive, Scope, Send

from frostline.core import FeatureBatch
from frostline.errors import FrostlineError, Unavailable
from frostline.node.http.replies import error_reply
from frostline.node.request.answer import BatchStream
from frostline.wire.framing import MEDIA_TYPE, Encoder

__all__ = ("AnswerReply",)

# The server joins each piece with its frame, so a piece is copied once: small enough to stay in the processor's
# cache, large enough that its frame does not count.
_PIECE = 256 << 10
# A reader that takes no byte for so long has gone; its answer's memory is given to others.
_SILENCE_S = 30.0

Part = bytes | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class AnswerReply:
    """An ASGI application that sends one answer.

    An error before the first batch becomes an HTTP answer of its own. A later one is told in the stream, whose end
    mark is then missing, and the connection is broken, so that it never looks like a complete answer.

    Attributes:
        answer: makes the batches; it is closed at the end, whatever happens.
        threads: in which batches are waited for.
        deadline_s: how long the client waits for the next batch; what was not made by then is given up, and what it
            held goes to others.
    """

    answer: BatchStream
    threads: CapacityLimiter
    deadline_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, or stop where the client goes away."""
        try:
            async with create_task_group() as group:
                group.start_soon(self._watch, receive, group.cancel_scope)
                await self._send_all(scope, receive, send)
                group.cancel_scope.cancel()
        finally:
            if not self.answer.has_ended:
                with CancelScope(shield=True):
                    await to_thread.run_sync(self.answer.close, limiter=self.threads)

    async def _watch(self, receive: Receive, scope: CancelScope) -> None:
        """Free a thread that waits for the next batch, as soon as the client has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()
        with CancelScope(shield=True):
            await to_thread.run_sync(self.answer.close, limiter=self.threads)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoder = Encoder()
        try:
            parts = await self._next(encoder)
        except FrostlineError as error:
            await error_reply(error)(scope, receive, send)
            return
        if parts is None:  # it was abandoned before its first batch
            why = f"nothing was ready after the {self.deadline_s:g} s that you wait" if self.answer.is_expired else ""
            await error_reply(Unavailable(why or "the node is stopping"))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", MEDIA_TYPE.encode())]})
        with suppress(TimeoutError):
            await self._send_batches(send, encoder, parts)

    async def _send_batches(self, send: Send, encoder: Encoder, parts: Sequence[Part] | None) -> None:
        """Where this returns before the last piece, the server breaks the connection."""
        while parts is not None:
            await _send_parts(send, parts)
            del parts  # their memory is given back with the next batch
            try:
                parts = await self._next(encoder)
            except FrostlineError as error:
                await _send_parts(send, encoder.fail(error))
                return
        if self.answer.is_complete:
            await _send_parts(send, encoder.finish())
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, encoder: Encoder) -> Sequence[Part] | None:
        async with create_task_group() as group:
            if self.deadline_s < math.inf:
                group.start_soon(self._expire)
            made = await to_thread.run_sync(_encoded, self.answer, encoder, limiter=self.threads)
            group.cancel_scope.cancel()
        if isinstance(made, FrostlineError):
            raise made
        return made

    async def _expire(self) -> None:
        """Free the thread that waits for the next batch, once nobody waits for it any more."""
        await anyio.sleep(self.deadline_s)
        with CancelScope(shield=True):
            await to_thread.run_sync(self.answer.expire, limiter=self.threads)


def _encoded(answer: BatchStream, encoder: Encoder) -> Sequence[Part] | FrostlineError | None:
    """The next parts. An error is a value here, since a task group would wrap it."""
    try:
        batch: FeatureBatch | None = next(answer, None)
    except FrostlineError as error:
        return error
    return None if batch is None else encoder.encode(batch)


async def _send_parts(send: Send, parts: Sequence[Part]) -> None:
    for part in parts:
        for start in range(0, len(part), _PIECE):
            message: dict[str, Any] = {
                "type": "http.response.body",
                "body": memoryview(part)[start : start + _PIECE],
                "more_body": True,
            }
            with anyio.fail_after(_SILENCE_S):
                await send(message)
