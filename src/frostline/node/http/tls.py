"""TLS of one connection of a server, between the socket and HTTP, within the bounds of untrusted clients.

asyncio's own begins without a bound that the other connections share, and holds 256 KiB for each connection.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

from frostline.node.http.connection_guard import Guards, place_of
from frostline.wire.tls import FollowedContext

__all__ = ("TlsConnection",)

_PIECE = 64 << 10
# What one piece of an answer is encrypted in at once: the encrypted piece lies in memory beside it.
_WRITTEN = 256 << 10


class TlsConnection(asyncio.Transport, asyncio.Protocol):
    """A connection that is encrypted: a protocol to its socket, and the transport of a protocol of HTTP.

    Until both sides agree on TLS it is bounded as one without a whole head. Connections on a Unix socket, which only
    processes of this user reach, are not encrypted.

    Args:
        speaks: function that makes the protocol of HTTP that is spoken through TLS.
        guards: state shared with the other connections.
        tls: context of TLS.
        options: arguments of uvicorn's for that protocol.
    """

    def __init__(
        self, *, speaks: Callable[..., asyncio.Protocol], guards: Guards, tls: FollowedContext, **options: Any
    ) -> None:
        super().__init__()
        self._guards = guards
        self._context = tls.current()
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = self._context.wrap_bio(self._came, self._goes, server_side=True)
        self._protocol = speaks(**options)
        self._is_agreed = self._is_closing = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.BaseProtocol``."""
        self._socket = cast("asyncio.Transport", transport)
        if transport.get_extra_info("socket").family == socket.AF_UNIX:
            self._socket.set_protocol(self._protocol)
            self._protocol.connection_made(self._socket)
            return
        loop, limits = asyncio.get_running_loop(), self._guards.limits
        self._timer = loop.call_later(limits.head_s, self._give_up, "it took too long")
        peer = transport.get_extra_info("peername")
        gone = self._guards.connections.enter(self, loop.time(), place_of(peer[:2] if peer else None))
        if gone is not None:
            gone.turn_away()

    def data_received(self, data: bytes) -> None:
        """Decrypt what came, and hand it on."""
        self._came.write(data)
        try:
            if not self._is_agreed:
                self._agree()
            while not self._is_closing and (piece := self._tls.read(_PIECE)):
                self._protocol.data_received(piece)
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self._flush()  # which says why to the other side
            self._give_up((error.reason or type(error).__name__).replace("_", " ").lower())
            return
        self._flush()
        if not self._is_closing and self._protocol.eof_received() is not True:  # the other side has ended TLS
            self.close()

    def eof_received(self) -> None:
        """The other side sends no more; the socket is closed."""
        if self._is_agreed:
            self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.BaseProtocol``."""
        self._end_wait()
        self._is_closing = True
        if self._is_agreed:
            self._protocol.connection_lost(exc)
        else:
            self._guards.note_end()

    def pause_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        if self._is_agreed:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        if self._is_agreed:
            self._protocol.resume_writing()

    def turn_away(self) -> None:
        """Close it to make space for another, before both sides agree."""
        self._guards.say("closed a connection in favour of another: too many are open")
        self.abort()

    def _agree(self) -> None:
        self._tls.do_handshake()
        self._end_wait()
        self._is_agreed = True
        self._protocol.connection_made(self)

    def _end_wait(self) -> None:
        """It is bounded by the protocol of HTTP from now on, or gone."""
        self._guards.connections.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, why: str) -> None:
        self._guards.log.warning(f"closed a connection whose TLS failed: {why}")
        self._is_closing = True
        self._socket.close()

    def _flush(self) -> None:
        if self._goes.pending and not self._socket.is_closing():
            self._socket.write(self._goes.read())

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send; the socket's buffer is what pauses whoever writes."""
        if self._is_closing or not data:
            return
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _WRITTEN):
                self._tls.write(view[start : start + _WRITTEN])
                self._flush()
        except ssl.SSLError as error:
            self._give_up((error.reason or type(error).__name__).replace("_", " ").lower())

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """See ``asyncio.WriteTransport``."""
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        """Whether it can send that nothing more comes and still receive: TLS cannot."""
        return False

    def close(self) -> None:
        """Say that nothing more comes, and close once all is sent; nobody waits for the other side to say so too."""
        if self._is_closing:
            return
        self._is_closing = True
        with suppress(ssl.SSLError):  # it has not said so yet, or has never agreed
            self._tls.unwrap()
        self._flush()
        self._socket.close()

    def abort(self) -> None:
        """Close it at once."""
        self._is_closing = True
        self._socket.abort()

    def is_closing(self) -> bool:
        """See ``asyncio.BaseTransport``."""
        return self._is_closing or self._socket.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See ``asyncio.BaseTransport``."""
        if name == "sslcontext":
            return self._context
        return self._tls if name == "ssl_object" else self._socket.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """See ``asyncio.BaseTransport``."""
        self._protocol = cast("asyncio.Protocol", protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """See ``asyncio.BaseTransport``."""
        return self._protocol

    def pause_reading(self) -> None:
        """See ``asyncio.ReadTransport``."""
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """See ``asyncio.ReadTransport``."""
        self._socket.resume_reading()

    def is_reading(self) -> bool:
        """See ``asyncio.ReadTransport``."""
        return self._socket.is_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See ``asyncio.WriteTransport``."""
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """See ``asyncio.WriteTransport``."""
        return self._socket.get_write_buffer_size()
