"""Decides how many nodes there should be under Ray, and which one is started, drained or stopped next.

The rule is that of Kubernetes' Horizontal Pod Autoscaler ("Algorithm details" and "Stabilization window" of its
documentation): the number that would bring nodes to a target share of their time, with a tolerance around it, at once
upward and downward only to the most that was wanted within a window.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from frostline.core.config import NodeSettings
from frostline.core.errors import SettingError
from frostline.core.system import __version__

__all__ = (
    "KEPT_S",
    "NAMESPACE",
    "ClusterSettings",
    "Load",
    "NodeView",
    "Steps",
    "busy_share",
    "name_of",
    "next_steps",
    "nodes_for",
    "number_of",
)


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


KEPT_S = 300.0
"""Loads that are older say nothing any more. A node that starts has no frozen layers and nothing cached."""

# Nodes that are busy all the time make requests wait, and a node that is lost leaves its work to the others.
_TARGET = 0.7
_TOLERANCE = 0.1
# So long a load is measured before it counts: a job's first requests come in a burst.
_UP_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy nodes were at a time.

    Attributes:
        at_s: time, on the clock of ``nodes_for``.
        nodes: nodes that were ready.
        busy: shares of their time in which they were busy, summed over nodes.
    """

    at_s: float
    nodes: int
    busy: float


def busy_share(before: dict[str, float], after: dict[str, float], elapsed_s: float, decode_threads: int) -> float:
    """Share of a node's time in which it was busy: its device, or all threads that decode, whichever was more.

    Args:
        before: totals of its statistics, ``compute_s``, ``train_s`` and ``decode_s`` among them.
        after: totals later; lower ones mean that the node was restarted.
        elapsed_s: seconds between both.
        decode_threads: threads that decode.
    """
    if elapsed_s <= 0:
        return 0.0
    spent = {name: after[name] - before[name] for name in ("compute_s", "train_s", "decode_s")}
    if min(spent.values()) < 0:
        return 0.0
    busy_s = max(spent["compute_s"] + spent["train_s"], spent["decode_s"] / decode_threads)
    return min(1.0, busy_s / elapsed_s)


def nodes_for(loads: Sequence[Load], now_s: float, *, current: int, min_nodes: int, max_nodes: int) -> int:
    """How many nodes there should be.

    Args:
        loads: the loads, measured by now, oldest first; those before ``KEPT_S`` ago are left out.
        now_s: time now.
        current: nodes that there should be by now.
        min_nodes: nodes that there are in any case.
        max_nodes: nodes that there may be.
    """
    kept = [load for load in loads if now_s - load.at_s <= KEPT_S and load.nodes]
    recent = [load for load in kept if now_s - load.at_s <= _UP_S]
    wanted = current
    if recent and now_s - kept[0].at_s >= _UP_S:
        wanted = _wanted(recent, current)
    if wanted < current:
        was_long_enough = now_s - kept[0].at_s >= KEPT_S - _UP_S
        wanted = min(current, max(_wanted([load], current) for load in kept)) if was_long_enough else current
    return max(min_nodes, min(max_nodes, wanted))


def _wanted(loads: Sequence[Load], current: int) -> int:
    """The number that would bring nodes to the target share, where they are away from it."""
    busy = sum(load.busy for load in loads) / len(loads)
    nodes = sum(load.nodes for load in loads) / len(loads)
    if abs(busy / nodes / _TARGET - 1) <= _TOLERANCE:
        return current
    return math.ceil(round(busy / _TARGET, 9))


# Jobs look at their lists every three seconds: by then nobody asks a node that is listed no more.
_LEAVE_S = 4.0
# A request that takes longer than this is asked for again at another node.
_MAX_DRAIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node's actor as it was seen last.

    Attributes:
        number: number of the node.
        is_current: True if it was started with what nodes should be started with now.
        is_ready: True if it takes requests.
        requests: requests in work.
    """

    number: int
    is_current: bool = True
    is_ready: bool = True
    requests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What is to be done now, by the numbers of nodes.

    Attributes:
        start: nodes to start.
        drain: nodes that nobody should ask any more.
        stop: nodes that nobody asks any more.
    """

    start: tuple[int, ...] = ()
    drain: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()


def next_steps(nodes: Sequence[NodeView], wanted: int, draining: Mapping[int, float], now_s: float) -> Steps:
    """What to do next about some nodes.

    Missing nodes are started and surplus ones drained at once. Of those that are outdated one at a time is drained,
    stopped and started anew, and the next one only when all that are current are ready: where a new setting lets nodes
    fail, the others stay as they were.

    Args:
        nodes: all that there are, also those that are drained.
        wanted: number of nodes that there should be.
        draining: the times from which nodes are drained, by their numbers.
        now_s: time now, on the clock of ``draining``.
    """
    there = {node.number: node for node in nodes}
    start = tuple(number for number in range(wanted) if number not in there)
    stop = tuple(number for number in sorted(draining) if number in there and _left(there[number], draining, now_s))
    surplus = tuple(number for number in sorted(there) if number >= wanted and number not in draining)
    return Steps(start=start, drain=(*_outdated(there, wanted, draining), *surplus), stop=stop)


def _outdated(there: Mapping[int, NodeView], wanted: int, draining: Mapping[int, float]) -> tuple[int, ...]:
    """The node that is to be replaced now, if one is; those that serve nobody go first."""
    kept = [there[number] for number in range(wanted) if number in there]
    is_whole = len(kept) == wanted and not any(node.number in draining for node in kept)
    if not is_whole or not all(node.is_ready for node in kept if node.is_current):
        return ()
    outdated = sorted((node.is_ready, node.number) for node in kept if not node.is_current)
    return tuple(number for _, number in outdated[:1])


def _left(node: NodeView, draining: Mapping[int, float], now_s: float) -> bool:
    """Whether nobody asks a drained node any more."""
    waited_s = now_s - draining[node.number]
    return not node.is_ready or waited_s >= _MAX_DRAIN_S or (waited_s >= _LEAVE_S and not node.requests)
