"""Reads the body of a request in pieces, and drops senders that are too slow."""

from collections.abc import AsyncIterator

import anyio
from starlette.requests import ClientDisconnect, Request

from frostline.batching import readable_bytes
from frostline.errors import BadRequest

__all__ = ("BodyReader", "body_length")

# Seconds without a byte after which a sender has gone. A body may take that much longer than its minimum rate allows.
_SILENCE_S = 60.0


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
    length = request.headers.get("content-length", "")
    if not length.isascii() or not length.isdigit():
        raise BadRequest("the length of the body must be announced with Content-Length")
    return int(length)
