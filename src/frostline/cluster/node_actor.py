"""The actor that is one node under Ray: it runs a node in a process of its own, and ends with that."""

import hashlib
import os
import secrets
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from frostline.client.http import HttpTransport
from frostline.cluster.demand import busy_share
from frostline.cluster.settings import ClusterSettings
from frostline.config import LoaderSettings, TenantSettings
from frostline.errors import FrostlineError
from frostline.node.process.subprocess import NodeProcess

__all__ = ("NodeActor", "NodeState")

_AGAIN_S = 2.0
_ASK_S = 2.0
_ENDED = 1
_OWN = "frostline-cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What a node under Ray says of itself.

    Attributes:
        digest: digest of the settings that it was started with.
        host: address of its host.
        url: its URL; empty while it starts.
        pid: id of its process; 0 while it starts.
        failure: reason that it did not start; empty otherwise.
        requests: requests in work.
        busy: share of its time in which it was busy lately.
    """

    digest: str
    host: str
    url: str = ""
    pid: int = 0
    failure: str = ""
    requests: int = 0
    busy: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return asdict(self)


class NodeActor:
    """A node under Ray. Ray starts the actor again where it ends, and with it the node.

    Args:
        settings: settings that nodes should have.
        number: number of this one.
        host: address on which it listens.
    """

    def __init__(self, settings: ClusterSettings, number: int, host: str | None = None) -> None:
        self._host = host or _host()
        self._digest = settings.digest
        self._decode_threads = settings.node.decode_threads
        self._token, node = _with_own_tenant(settings)
        port = settings.port_of(number)
        self._process = NodeProcess(settings.roots, node, self._host, port, control=settings.control)
        self._failure = ""
        self._is_stopping = False
        self._measured: tuple[float, dict[str, float]] | None = None
        threading.Thread(target=self._run, name="frostline-node", daemon=True).start()

    def state(self) -> NodeState:
        """How it is now."""
        known = NodeState(digest=self._digest, host=self._host, failure=self._failure)
        pid = self._process.pid
        if not pid or self._failure:
            return known
        requests, busy = self._load()
        return replace(known, url=self._process.url, pid=pid, requests=requests, busy=busy)

    def stop(self) -> None:
        """Give its answers a few seconds to end, and end the node."""
        self._is_stopping = True
        self._process.stop()

    def _run(self) -> None:
        """In a thread: start the node, again and again where it cannot start yet, and end this process with it."""
        while not self._is_stopping:
            try:
                self._process.start()
            except FrostlineError as error:  # its port is not free yet, or its folder is not mounted yet
                self._failure = str(error)
                time.sleep(_AGAIN_S)
                continue
            self._failure = ""
            self._process.wait()
            if not self._is_stopping:
                os._exit(_ENDED)  # whereupon Ray starts this actor again

    def _load(self) -> tuple[int, float]:
        """Requests in work, and how busy it was since it was asked last."""
        transport = HttpTransport(self._process.url, LoaderSettings(deadline_s=_ASK_S, token=self._token))
        try:
            found = transport.node_statistics()
        except FrostlineError:
            return 0, 0.0
        finally:
            transport.close()
        before, self._measured = self._measured, (time.monotonic(), found["totals"])
        busy = 0.0
        if before is not None:
            elapsed_s = self._measured[0] - before[0]
            busy = busy_share(before[1], found["totals"], elapsed_s, self._decode_threads)
        return int(found["requests_in_progress"]), busy


def _host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _with_own_tenant(settings: ClusterSettings) -> tuple[str | None, Any]:
    """A token with which the actor may see statistics, and settings of a node that knows it among its tenants."""
    if not settings.node.tenants:
        return None, settings.node
    token = secrets.token_urlsafe(32)
    own = TenantSettings(name=_OWN, token_sha256=hashlib.sha256(token.encode()).hexdigest(), weight=1e-3)
    return token, replace(settings.node, tenants=(*settings.node.tenants, own))
