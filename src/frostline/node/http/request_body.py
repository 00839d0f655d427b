"""Reads the body of a request piece by piece, from a sender that keeps up."""

from collections.abc import AsyncIterator

import anyio
from starlette.requests import ClientDisconnect, Request

from frostline.batching import readable_bytes
from frostline.errors import BadRequest

__all__ = ("Bodies", "body_length")

# A sender that gives no byte for so long has gone. Beyond what its bytes take at the least rate, any may take as much.
_SILENCE_S = 60.0


class Bodies:
    """How bodies are read, of a place in work that others wait for.

    Args:
        min_bytes_per_s: a sender may be as slow as this.
        silence_s: how long it may give no byte, and how much longer than its rate allows it may take in all.
    """

    def __init__(self, min_bytes_per_s: int, silence_s: float = _SILENCE_S) -> None:
        self._least = min_bytes_per_s
        self._silence_s = silence_s

    async def chunks(self, request: Request) -> AsyncIterator[bytes]:
        """The pieces of a body as they come.

        Raises:
            BadRequest: It breaks off, or comes slower than it may; its length was not announced.
        """
        until_s = anyio.current_time() + self._silence_s + body_length(request) / self._least
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
        """All of a body; see ``chunks`` for what may be raised."""
        body = bytearray()
        async for chunk in self.chunks(request):
            body += chunk
        return body

    def _broken(self, *, is_late: bool) -> BadRequest:
        if not is_late:
            return BadRequest("the body broke off before its end")
        return BadRequest(
            f"the body came slower than {readable_bytes(self._least)} a second: send it over a faster link, or start "
            "the node with a smaller --min-upload-rate"
        )


def body_length(request: Request) -> int:
    """The announced length of the body; the server sees to it that no more comes.

    Raises:
        BadRequest: It is not announced.
    """
    length = request.headers.get("content-length", "")
    if not length.isascii() or not length.isdigit():
        raise BadRequest("the length of the body must be announced with Content-Length")
    return int(length)
