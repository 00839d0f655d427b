"""Where an I/O service gets from what it does not have: nodes, or the store itself, read by a node in its process."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from frostline.client.http import HttpTransport
from frostline.client.membership import NodeWatch, balanced
from frostline.config import LoaderSettings, NodeSettings
from frostline.errors import EngineNotReady, SettingError
from frostline.transport.protocol import Transport
from frostline.wire.http.node_lists import NodeList

__all__ = ("Upstream",)

# A node that says nothing for so long is not there.
_PROBE_S = 5.0


def _ignored(*_: str) -> None:
    pass


def _nobody_told(_: str, __: str, ___: EngineNotReady) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """What is asked.

    Attributes:
        near: URLs of nodes that serve the same data, or of lists of them; none to read the stores here.
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
        if len(self.near) > 1 or NodeList.is_one(self.near[0]):
            probing = LoaderSettings(deadline_s=_PROBE_S)
            several = balanced(
                self.near,
                make=HttpTransport,
                probe=partial(HttpTransport, settings=probing),
                left_out=_nobody_told,
                watch=NodeWatch(joined=_ignored, left=_ignored, refused=_ignored),
            )
            with several as transport:
                yield transport
            return
        with closing(HttpTransport(self.near[0])) as alone:
            yield alone

    def _here(self) -> Iterator[Transport]:
        # These import torch, which a service before a node has no need of.
        from frostline.node import Node
        from frostline.node.in_process import LocalTransport

        # A service reads for the jobs of one user.
        with Node(replace(self.node, follow_links=True), self.roots) as node:
            yield LocalTransport(node)
