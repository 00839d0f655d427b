"""Decides which node is started, drained or stopped next, so that nodes come in line one after another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ("NodeView", "Steps", "next_steps")

# Jobs look at their lists every three seconds: by then nobody asks a node that is listed no more.
_LEAVE_S = 4.0
# A request that takes longer than this is asked for again at another node.
_MAX_DRAIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node's actor as it was seen last.

    Attributes:
        number: number of the node.
        is_current: It was started with what nodes should be started with now.
        is_ready: It takes requests.
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

    @property
    def are_none(self) -> bool:
        """Nothing is to be done."""
        return not (self.start or self.drain or self.stop)


def next_steps(nodes: Sequence[NodeView], wanted: int, draining: Mapping[int, float], now_s: float) -> Steps:
    """What to do next about some nodes.

    Missing nodes are started and surplus ones drained at once. Of those that are outdated one at a time is drained,
    stopped and started anew, and the next one only when all that are current are ready: where a new setting lets nodes
    fail, the others stay as they were.

    Args:
        nodes: all that there are, also those that are drained.
        wanted: number of nodes that there should be.
        draining: since when nodes are drained, by their numbers.
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
