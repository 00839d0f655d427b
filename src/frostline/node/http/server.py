"""Listens on a port and serves a node until it is told to stop."""

import asyncio
import errno
import ipaddress
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from frostline.core.config import ServerTls
from frostline.core.errors import AddressInUse, SettingError
from frostline.core.system import max_open_files
from frostline.node.http.app import make_app
from frostline.node.http.connection_guard import ConnectionLimits, GuardedProtocol, Guards, limits_of
from frostline.node.http.requests import AskedByName, OwnNames
from frostline.node.http.tls import TlsConnection
from frostline.node.service import Node
from frostline.wire.connection import INSIDE
from frostline.wire.tls import server_context

__all__ = ("AppServer", "Server", "listen")

# Seconds: a client that trains for a while between two requests keeps its connections.
_KEEP_ALIVE_S = 300
# Seconds in which answers may end before the node stops.
_GRACE_S = 5
# Seconds in which requests are told that the node is about to stop, while anybody is connected: a job that uses it asks
# within that time whether it is there, and goes to other nodes.
_DRAIN_S = 1.5
_LOOK_S = 0.05
_BACKLOG = 2048
# New connections that are taken in each round of the event loop, which is long while many others ask. uvloop takes one
# from each socket, so whoever kept a few hundred connections asking let nobody else in.
_ACCEPTED = 4
# Thread switch interval: a thread with a batch to send waits less for threads that compute in Python
# (`feature_cache.py --parts links`).
_TURN_S = 0.0005
_LAST_PORT = 65_535


_USERS = "name its users with --tenants, or start it with --allow-anonymous if only your trainers can reach it"


def listen(host: str, port: int, *, for_others: bool = False, advice: str = _USERS) -> socket.socket:
    """Bind a socket to a port.

    Args:
        host: name or address of this machine.
        port: number of the port; 0 takes a free one.
        for_others: True if other machines may reach it, because it has tenants or is open to all.
        advice: end of the sentence where other machines reach it and may not: how to let them.

    Raises:
        AddressInUse: Another process listens there.
        SettingError: This machine has no such address, it may not be used, or other machines can reach it.
    """
    if not 0 <= port <= _LAST_PORT:
        raise SettingError(f"a port must be a number from 0 to {_LAST_PORT}, not {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"port {port} of {host} is in use: stop what listens there or choose another") from error
        raise SettingError(f"cannot listen on port {port} of {host}: {error.strerror or error}") from error
    # Checked after binding, because a name may stand for any address.
    address = listening.getsockname()[0]
    if for_others or _is_loopback(address):
        return listening
    listening.close()
    raise SettingError(f"other machines can reach what listens at {address}: {advice}")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class AppServer:
    """An application on a listening socket.

    Args:
        app: application to serve, whose state has the audit log.
        listening: socket from ``listen``; closed at the end.
        limits: limits of connections; None derives them from the descriptors that this process may open.
        drain: function that makes the application say that it is about to stop; called before the port closes.
        is_open: True if all who ask are answered, as the app knows no tenants.
        names: names by which it may be asked beside its address (``requests.OwnNames``).
        tls: files by which it speaks TLS; None speaks none.

    Raises:
        SettingError: The files of TLS make no sense.
    """

    def __init__(
        self,
        app: Starlette,
        listening: socket.socket,
        limits: ConnectionLimits | None = None,
        drain: Callable[[], None] | None = None,
        *,
        is_open: bool = True,
        names: tuple[str, ...] = (),
        tls: ServerTls | None = None,
    ) -> None:
        self._listening = listening
        self._ended = threading.Event()
        self._guards = guards = Guards(limits or limits_of(max_open_files()))
        self._tls = None if tls is None else server_context(tls)
        names_of = OwnNames(names=names, is_open=is_open, is_local=_is_loopback(listening.getsockname()[0]))
        speaks: Callable[..., asyncio.Protocol] = partial(GuardedProtocol, guards=guards)
        if self._tls is not None:
            speaks = partial(TlsConnection, speaks=speaks, guards=guards, tls=self._tls)
        config = uvicorn.Config(
            AskedByName(app, names_of),
            loop="auto",  # uvloop, but on Windows
            http=cast("type[asyncio.Protocol]", speaks),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Reporting(config, guards, drain)

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        host, port = self._listening.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def run(self, on_ready: Callable[[], None], on_end: Callable[[], None] | None = None) -> None:
        """Serve until ``stop``, SIGINT or SIGTERM; a signal takes its usual effect once answers have ended.

        Args:
            on_ready: function that is called when requests are taken.
            on_end: function that is called when answers have ended, before a signal takes its effect.
        """
        self._server.on_ready, self._server.on_end = on_ready, on_end
        try:
            with self._inside() as inside, ExitStack() as stack:
                again = [stack.enter_context(self._listening.dup()) for _ in range(_ACCEPTED - 1)]
                self._server.run(sockets=[self._listening, *again, *inside])
        finally:
            self._listening.close()
            self._ended.set()

    @contextmanager
    def _inside(self) -> Iterator[list[socket.socket]]:
        """A socket for processes of its own beside a port that speaks TLS: they have no certificate, and need none."""
        if self._tls is None:
            yield []
            return
        with (
            tempfile.TemporaryDirectory(prefix="frostline-") as folder,  # which only its user may enter
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inside,
        ):
            path = Path(folder) / "server.sock"
            inside.bind(str(path))
            inside.listen(_BACKLOG)
            self._guards.inside = f"{INSIDE}{path}"
            yield [inside]

    def stop(self) -> None:
        """Stop taking requests, give answers a few seconds to end, then break them. Safe for threads."""
        self._server.should_exit = True

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has stopped, and return whether it has."""
        return self._ended.wait(timeout_s)


class Server(AppServer):
    """A node on a listening socket.

    Args:
        node: node to serve; the caller closes it.
        listening: socket from ``listen``; closed at the end.
        limits: limits of connections; None derives them from the descriptors that this process may open.
        routes: routes beside its own, such as those of its control plane.
    """

    def __init__(
        self,
        node: Node,
        listening: socket.socket,
        limits: ConnectionLimits | None = None,
        *,
        routes: Sequence[Route] = (),
    ) -> None:
        settings = node.settings
        is_open, names = not settings.tenants, settings.allowed_hosts
        app = make_app(node, routes)
        super().__init__(app, listening, limits, node.drain, is_open=is_open, names=names, tls=settings.tls)

    def run(self, on_ready: Callable[[], None], on_end: Callable[[], None] | None = None) -> None:
        """Set the thread switch interval of this process, and serve; see ``AppServer.run``."""
        sys.setswitchinterval(_TURN_S)
        super().run(on_ready, on_end)


class _Reporting(uvicorn.Server):
    on_ready: Callable[[], None]
    on_end: Callable[[], None] | None

    def __init__(self, config: uvicorn.Config, guards: Guards, drain: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._guards = guards
        self._drain = drain
        self._is_signalled = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    async def _said(self) -> None:
        """Leave the port open while there are connections whose next request can be told, and force is not used."""
        until_s, connections = time.monotonic() + _DRAIN_S, self.server_state.connections
        # uvicorn tells nobody when the last connection ends.
        while connections and time.monotonic() < until_s and not self.force_exit:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See ``uvicorn``; who is signalled to end is one of several, and has its jobs go elsewhere."""
        self._is_signalled = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._drain is not None and self._is_signalled:
            self._drain()
            await self._said()
        self._guards.is_stopping = True
        await super().shutdown(sockets)
        if self.on_end is not None:
            self.on_end()
