"""Which nodes an address stands for: itself, all addresses of a name, those in a file, or those under Ray."""

import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from frostline.errors import NodeUnreachable, SettingError
from frostline.wire.http.pool import address_of
from frostline.wire.http.ray_list import nodes_under_ray

__all__ = ("NodeList", "listed_nodes")

_MAX_BYTES = 1 << 20
_EXAMPLES = "http://store-1:7070, dns://service:7070, file:///path/nodes.json or ray://frostline"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeList:
    """Where addresses of nodes stand, of which there may be others from time to time.

    Attributes:
        url: ``dns://NAME:PORT``, all addresses that a name has, as of a headless service; ``file:///PATH``, a file
            with a JSON list of URLs; or ``ray://NAMESPACE``, the nodes that Ray runs there.

    Raises:
        SettingError: The address is none of these.
    """

    url: str

    def __post_init__(self) -> None:
        if not self.is_one(self.url):
            raise SettingError(f"{self.url} is no list of nodes: near= takes {_EXAMPLES}")
        if self.url.startswith("dns://"):
            _name_and_port(self.url)
        elif self.url.startswith("ray://"):
            _namespace(self.url)
        elif urlsplit(self.url).netloc or not self.path.is_absolute():
            raise SettingError(f"{self.url} names no file: write file:///, and the file's whole path")

    @staticmethod
    def is_one(url: str) -> bool:
        """Whether an address stands for a list, and not for a node."""
        return url.startswith(("dns://", "file://", "ray://"))

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
            return nodes_under_ray(_namespace(self.url))
        return self._of_name() if self.url.startswith("dns://") else self._of_file()

    def _of_name(self) -> tuple[str, ...]:
        host, port = _name_and_port(self.url)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise NodeUnreachable(f"{host} has no address: {error}; start the service, or correct near=") from error
        hosts = sorted({str(item[4][0]) for item in found})
        return tuple(
            f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}" for address in hosts
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
            if not item.startswith("http://"):
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
