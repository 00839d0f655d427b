"""Reads the bodies of requests, makes JSON responses, and cancels calls whose client disconnects."""

import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import anyio
from anyio import CancelScope, CapacityLimiter, create_task_group, to_thread
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from frostline.batching import readable_bytes
from frostline.errors import BadRequest, FrostlineError, Unavailable
from frostline.node.scheduling.memory_pool import Cancelled
from frostline.wire.refusals import error_to_json, retry_after, status_of

__all__ = (
    "METRICS_TYPE",
    "REFUSALS",
    "BodyReader",
    "announced",
    "body_length",
    "error_response",
    "json_response",
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
        """Read a whole body; see ``chunks`` for the errors."""
        body = bytearray()
        async for chunk in self.chunks(request):
            body += chunk
        return body

    def _broken(self, *, is_late: bool) -> BadRequest:
        if not is_late:
            return BadRequest("the body broke off before its end")
        return BadRequest(
            f"the body came slower than {readable_bytes(self._min_bytes_per_s)} per second: send it over a faster "
            "link, or start the node with a smaller --min-upload-rate"
        )


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


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, FrostlineError)
    return error_response(error)


async def _refuse_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"error": "Refused", "message": error.detail}
    return json_response(body, status=error.status_code, headers=error.headers)


REFUSALS = {FrostlineError: _refuse, HTTPException: _refuse_http}
"""What an application of Starlette answers to errors: a sentence as JSON, with the status that belongs to it."""
