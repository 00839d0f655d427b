"""Listens on a port and serves a node until it is told to stop."""

import asyncio
import errno
import ipaddress
import resource
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import cast

import uvicorn

from frostline.errors import AddressInUse, SettingError
from frostline.node.http.app import make_app
from frostline.node.http.connection_limit import ConnectionLimits, limits_of
from frostline.node.http.protocol import GuardedProtocol, Guards
from frostline.node.service.node import Node

__all__ = ("Server", "listen")

# A client that trains for a while between two requests keeps its connections.
_KEEP_ALIVE_S = 300
# Answers under way may end before the node stops.
_GRACE_S = 5
_BACKLOG = 2048
# A thread that has a batch to send waits no longer for one that computes in Python (`feature_cache.py --parts links`).
_TURN_S = 0.0005
_LAST_PORT = 65_535


def listen(host: str, port: int, *, for_others: bool = False) -> socket.socket:
    """Take a port; 0 takes a free one.

    Args:
        host: A name or address of this machine.
        port: The number.
        for_others: Others than this machine may reach it: it is said who may use the node, or that all may.

    Raises:
        AddressInUse: Another process listens there.
        SettingError: There is no such address on this machine, or it may not be used, or others can reach it.
    """
    if not 0 <= port <= _LAST_PORT:
        raise SettingError(f"a port is a number from 0 to {_LAST_PORT}, not {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"port {port} of {host} is in use: stop what listens there or choose another") from error
        raise SettingError(f"cannot listen on port {port} of {host}: {error.strerror or error}") from error
    # Judged once it is bound, since a name may stand for anything.
    address = listening.getsockname()[0]
    if for_others or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return listening
    listening.close()
    raise SettingError(
        f"others can reach a node that listens at {address}: say who may use it with --tenants, or start it with "
        "--open where only trainers can reach it"
    )


class Server:
    """A node on a listening socket.

    Args:
        node: what is served; the caller closes it.
        listening: from ``listen``; closed at the end.
        limits: What connections may take; None for what this process may have open.
    """

    def __init__(self, node: Node, listening: socket.socket, limits: ConnectionLimits | None = None) -> None:
        self._node = node
        self._listening = listening
        self._ended = threading.Event()
        guards = Guards(limits or limits_of(_descriptors()))
        config = uvicorn.Config(
            make_app(node),
            loop="uvloop",
            http=cast("type[asyncio.Protocol]", partial(GuardedProtocol, guards=guards)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Reporting(config)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until ``stop``, SIGINT or SIGTERM; a signal takes its usual effect once answers have ended.

        Threads of this process take shorter turns from now on.

        Args:
            on_ready: called when requests are taken.
        """
        sys.setswitchinterval(_TURN_S)
        self._server.on_ready = on_ready
        try:
            self._server.run(sockets=[self._listening])
        finally:
            self._listening.close()
            self._ended.set()

    def stop(self) -> None:
        """Stop taking requests, let answers end for a few seconds, then break them. Safe from any thread."""
        self._server.should_exit = True

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has stopped; False where it has not in that time."""
        return self._ended.wait(timeout_s)


def _descriptors() -> int:
    """How many files and sockets this process may have open; -1 where there is no bound."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return -1 if soft == resource.RLIM_INFINITY else soft


class _Reporting(uvicorn.Server):
    on_ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()
