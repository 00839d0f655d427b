"""Sends an answer while it is made, and ends it when its client disconnects."""

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
from frostline.node.http.messages import error_response
from frostline.node.request.pipeline import BatchStream
from frostline.wire.framing import MEDIA_TYPE, Encoder

__all__ = ("FeatureResponse",)

# The server joins each piece with its frame, which copies it: small enough for the processor's cache, large enough that
# the frame does not matter.
_PIECE = 256 << 10
# Seconds without a byte taken after which a reader has gone; the memory of its answer is then freed.
_SILENCE_S = 30.0

Part = bytes | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class FeatureResponse:
    """An ASGI application that sends one answer.

    An error before the first batch becomes an HTTP response of its own. A later error is written to the stream, which
    then has no end mark, and the connection is broken, so that it never looks like a complete answer.

    Attributes:
        answer: stream of batches; it is always closed at the end.
        threads: limiter of the threads that wait for batches.
        deadline_s: seconds that the client waits for the next batch; a later one is cancelled, and its memory freed.
    """

    answer: BatchStream
    threads: CapacityLimiter
    deadline_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client disconnects."""
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
        """When the client disconnects, close the answer, which also frees the thread that waits for a batch."""
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
            await error_response(error)(scope, receive, send)
            return
        if parts is None:  # it was cancelled before its first batch
            why = f"no batch was ready within your deadline of {self.deadline_s:g} s" if self.answer.is_expired else ""
            await error_response(Unavailable(why or "the node is stopping"))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", MEDIA_TYPE.encode())]})
        with suppress(TimeoutError):
            await self._send_batches(send, encoder, parts)

    async def _send_batches(self, send: Send, encoder: Encoder, parts: Sequence[Part] | None) -> None:
        """Send batches to the end. If this returns before the last piece, the server breaks the connection."""
        while parts is not None:
            await _send_parts(send, parts)
            del parts  # so that their memory is freed with the next batch
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
        """Cancel the answer at the deadline, which also frees the thread that waits for a batch."""
        await anyio.sleep(self.deadline_s)
        with CancelScope(shield=True):
            await to_thread.run_sync(self.answer.expire, limiter=self.threads)


def _encoded(answer: BatchStream, encoder: Encoder) -> Sequence[Part] | FrostlineError | None:
    """Encode the next batch; an error is returned as a value, because a task group would wrap it."""
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
