"""Where an I/O service gets from what it does not have: nodes, or the store itself, read by a node in its process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from frostline.client.http import HttpTransport
from frostline.client.load_balancer import BalancedTransport
from frostline.config import LoaderSettings, NodeSettings
from frostline.errors import SettingError
from frostline.transport.protocol import Transport

__all__ = ("Upstream",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """What is asked.

    Attributes:
        near: URLs of nodes that serve the same data; none to read the stores here.
        roots: URLs under which data is read here.
        node: settings of the node that does so.
    """

    near: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    node: NodeSettings = field(default_factory=NodeSettings)

    def __post_init__(self) -> None:
        if bool(self.near) == bool(self.roots):
            raise SettingError(
                "an I/O service asks nodes (--near) or reads data itself (--data-root): give one of them"
            )

    @contextmanager
    def opened(self) -> Iterator[Transport]:
        """The way there, closed at the end.

        Raises:
            SettingError: An address or a root makes no sense.
        """
        if not self.near:
            yield from self._here()
            return
        ways = [HttpTransport(url, LoaderSettings()) for url in self.near]
        transport: Transport = ways[0] if len(ways) == 1 else BalancedTransport(ways)
        try:
            yield transport
        finally:
            transport.close()

    def _here(self) -> Iterator[Transport]:
        # These import torch, which a service before a node has no need of.
        from frostline.node import Node
        from frostline.node.in_process import LocalTransport

        # A service reads for the jobs of one user.
        with Node(replace(self.node, follow_links=True), self.roots) as node:
            yield LocalTransport(node)
