"""Which nodes an address stands for: itself, all addresses of a name, those in a file, or those under Ray.

A trainer thus needs no Ray of its own, loses nothing where Ray goes away, and may fork workers.
"""

import json
import os
import re
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from frostline.core.errors import NodeUnreachable, SettingError
from frostline.core.processes import Worker
from frostline.core.system import STARTED
from frostline.wire.connection import address_of

__all__ = (
    "SUPERVISOR",
    "NodeList",
    "listed_nodes",
    "said_by_supervisor",
)


SUPERVISOR = "frostline-supervisor"
"""Name of the actor that knows the nodes of a namespace."""

# Joining Ray takes seconds; later answers take milliseconds.
_ANSWER_S = 30.0
_ASK_S = 5.0


def _nodes_under_ray(namespace: str) -> tuple[str, ...]:
    """URLs of the nodes of a namespace of Ray by now.

    Args:
        namespace: the namespace as ``frostline cluster up`` was given it.

    Raises:
        NodeUnreachable: Ray does not answer, or has no nodes there.
    """
    ray = _RAYS.joined()
    said = _RAYS.asked(namespace) if ray is None else said_by_supervisor(ray, namespace)
    if "nodes" not in said:
        raise NodeUnreachable(
            f"ray://{namespace} says no nodes: {said.get('error', 'its answer makes no sense')}; start them with "
            "frostline cluster up, name another Ray with RAY_ADDRESS, or correct near="
        )
    return tuple(map(str, said["nodes"]))


def said_by_supervisor(ray: Any, namespace: str) -> dict[str, Any]:
    """What the supervisor of a namespace says in a process that has joined Ray: ``nodes``, or why not as ``error``."""
    try:
        supervisor = ray.get_actor(SUPERVISOR, namespace=namespace)
    except ValueError:  # its own sentence has three guesses
        return {"error": "nobody keeps nodes in that namespace"}
    try:
        return {"nodes": ray.get(supervisor.node_urls.remote(), timeout=_ASK_S)}
    except ray.exceptions.RayError as error:
        return {"error": str(error).strip().partition("\n")[0] or type(error).__name__}


class _Asking(Worker):
    """A process that has joined Ray and answers each line on its stdin. For one thread at a time."""

    def __init__(self, namespace: str) -> None:
        super().__init__(STARTED["Ray"], namespace, is_told=True, answers=True)

    def ask(self) -> dict[str, Any] | None:
        """What it says; None where it has ended or says nothing in time."""
        self.tell("")
        line = self.answer_within(_ANSWER_S)
        if not line.endswith(b"\n"):
            self.end()
            self.close()
            return None
        said = json.loads(line)
        return said if isinstance(said, dict) else None


class _Rays:
    """What this process knows of Ray; a forked one begins anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking: dict[str, _Asking] = {}
        self._is_forked = False

    def reset_after_fork(self) -> None:
        """Forget what belongs to the process that forked this one: connections do not survive that."""
        self._lock = threading.Lock()
        self._asking = {}
        self._is_forked = True

    def joined(self) -> Any:
        """The package where this process has joined Ray; None elsewhere."""
        ray = None if self._is_forked else sys.modules.get("ray")
        is_joined = ray is not None and getattr(ray, "is_initialized", bool)()
        return ray if is_joined else None

    def asked(self, namespace: str) -> dict[str, Any]:
        """What a process beside this one says; it ends a minute after it was asked last, or with this one."""
        with self._lock:
            there = self._asking.pop(namespace, None)
            said = None if there is None else there.ask()
            if said is None:
                there = _Asking(namespace)
                said = there.ask()
            if said is not None and there is not None:
                self._asking[namespace] = there
        return said or {"error": "no answer; is Ray installed here (frostline[ray]), and does it run?"}


_RAYS = _Rays()
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_RAYS.reset_after_fork)


_MAX_BYTES = 1 << 20
_DNS = ("dns://", "dns+https://")
_EXAMPLES = (
    "http://store-1:7070, https://store-1:7070, dns://service:7070, dns+https://service:7070, file:///path/nodes.json "
    "or ray://frostline"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeList:
    """Where addresses of nodes stand, of which there may be others from time to time.

    Attributes:
        url: ``dns://NAME:PORT``, all addresses that a name has, as of a headless service; ``dns+https://NAME:PORT``,
            the same over TLS, by certificates of that name; ``file:///PATH``, a file with a JSON list of URLs; or
            ``ray://NAMESPACE``, the nodes that Ray runs there.

    Raises:
        SettingError: The address is none of these.
    """

    url: str

    def __post_init__(self) -> None:
        if not self.is_one(self.url):
            raise SettingError(f"{self.url} is no list of nodes: near= takes {_EXAMPLES}")
        if self.url.startswith(_DNS):
            _name_and_port(self.url)
        elif self.url.startswith("ray://"):
            _namespace(self.url)
        elif urlsplit(self.url).netloc or not self.path.is_absolute():
            raise SettingError(f"{self.url} names no file: write file:///, and the file's whole path")

    @staticmethod
    def is_one(url: str) -> bool:
        """Whether an address stands for a list, and not for a node."""
        return url.startswith((*_DNS, "file://", "ray://"))

    @property
    def path(self) -> Path:
        """The file."""
        return Path(unquote(urlsplit(self.url).path))

    def nodes(self) -> tuple[str, ...]:
        """URLs of the nodes by now, each once.

        Raises:
            NodeUnreachable: The name has no address, there is no such file, or Ray has no nodes there.
            SettingError: The file holds something else.
        """
        if self.url.startswith("ray://"):
            return _nodes_under_ray(_namespace(self.url))
        return self._of_name() if self.url.startswith(_DNS) else self._of_file()

    def _of_name(self) -> tuple[str, ...]:
        host, port = _name_and_port(self.url)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise NodeUnreachable(f"{host} has no address: {error}; start the service, or correct near=") from error
        hosts = sorted({str(item[4][0]) for item in found})
        # Their certificates are for the name, which the fragment keeps.
        begin, end = ("https", f"#{host}") if self.url.startswith("dns+https:") else ("http", "")
        return tuple(
            f"{begin}://[{address}]:{port}{end}" if ":" in address else f"{begin}://{address}:{port}{end}"
            for address in hosts
        )

    def _of_file(self) -> tuple[str, ...]:
        try:
            with self.path.open("rb") as file:
                body = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise NodeUnreachable(f"{self.path} cannot be read: {error}; write it, or correct near=") from error
        if len(body) > _MAX_BYTES:
            raise SettingError(f"{self.path} has more than {_MAX_BYTES:,} bytes: a list of nodes is shorter")
        try:
            listed = json.loads(body)
        except (ValueError, RecursionError):
            listed = None
        return self._checked(listed)

    def _checked(self, listed: Any) -> tuple[str, ...]:
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise SettingError(f'{self.path} holds no list of nodes, such as ["http://store-1:7070"]')
        for item in listed:
            if not item.startswith(("http://", "https://")):
                raise SettingError(f"{self.path} names {item}, and nodes are named such as http://store-1:7070")
            address_of(item)
        return tuple(dict.fromkeys(item.rstrip("/") for item in listed))


def listed_nodes(near: tuple[str, ...]) -> tuple[str, ...]:
    """URLs of all nodes that some addresses stand for by now, each once.

    Args:
        near: addresses of nodes and of lists of nodes.

    Raises:
        NodeUnreachable: A list cannot be read.
        SettingError: An address is none.
    """
    found = [NodeList(url=url).nodes() if NodeList.is_one(url) else (url.rstrip("/"),) for url in near]
    return tuple(dict.fromkeys(node for nodes in found for node in nodes))


def _name_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.path.strip("/") or parts.query:
        raise SettingError(f"{url} must name a service and its port, such as dns://service:7070")
    return host, port


def _namespace(url: str) -> str:
    found = re.fullmatch(r"ray://([A-Za-z0-9][\w.-]*)/?", url)
    if found is None:
        raise SettingError(f"{url} must name a namespace of Ray and nothing else, such as ray://frostline")
    return found[1]
