"""What a cluster of nodes should be, as values; names under which Ray knows its actors."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field

from frostline.config import NodeSettings
from frostline.errors import SettingError
from frostline.version import __version__

__all__ = ("NAMESPACE", "ClusterSettings", "name_of", "number_of")

NAMESPACE = "frostline"
"""The namespace of Ray in which nodes are, unless another one is named."""

_NODE = "frostline-node-"
_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What the nodes of one namespace of Ray should be.

    Attributes:
        roots: URLs under which every node serves data.
        node: settings of every node.
        namespace: namespace of Ray in which they are.
        min_nodes: nodes that there are whatever is asked of them.
        max_nodes: nodes that there may be; more than ``min_nodes`` lets their number follow the demand.
        label: label of hosts on which nodes are placed, as ``KEY=VALUE``; None places them anywhere.
        port: port of the first node; the next ones count on from there. 0 takes free ones.
        control: address of the control plane that every node keeps to; None takes that of each host's environment, and
            ``"none"`` none. The token there is that of each host's ``FROSTLINE_TOKEN``.

    Raises:
        SettingError: A value makes no sense.
    """

    roots: tuple[str, ...]
    node: NodeSettings = field(default_factory=NodeSettings)
    namespace: str = NAMESPACE
    min_nodes: int = 1
    max_nodes: int = 1
    label: str | None = None
    port: int = 0
    control: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.namespace):
            raise SettingError(f"a namespace has letters, digits, '.', '_' and '-', and {self.namespace!r} has others")
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise SettingError(
                f"there must be at least one node, and --max no less than --min: not {self.min_nodes} to "
                f"{self.max_nodes}"
            )
        if self.label is not None and not all(self.label.partition("=")):
            raise SettingError(f"--on-label takes KEY=VALUE, such as store=photos, not {self.label!r}")
        if not 0 <= self.port <= _LAST_PORT + 1 - self.max_nodes:
            raise SettingError(f"--port {self.port} leaves no port below 65536 for each of {self.max_nodes} nodes")

    @property
    def follows_demand(self) -> bool:
        """Whether the number of nodes changes with what is asked of them."""
        return self.min_nodes < self.max_nodes

    @property
    def selector(self) -> dict[str, str]:
        """Labels that a host must have, as Ray takes them."""
        key, _, value = (self.label or "").partition("=")
        return {key: value} if key else {}

    @property
    def digest(self) -> str:
        """SHA-256 of all that a node is started with: a node of another one is outdated."""
        started_with = [self.roots, asdict(self.node), self.label, self.port, self.control, __version__]
        return hashlib.sha256(json.dumps(started_with, sort_keys=True).encode()).hexdigest()

    def port_of(self, number: int) -> int:
        """The port of a node; 0 for a free one."""
        return self.port + number if self.port else 0


def name_of(number: int) -> str:
    """The name of a node's actor."""
    return f"{_NODE}{number}"


def number_of(name: str) -> int | None:
    """The number of the node that an actor with this name is; None for other actors."""
    number = name.removeprefix(_NODE)
    return int(number) if name.startswith(_NODE) and number.isdecimal() else None
