"""Decides how many nodes there should be, from how busy those that there are have been.

The rule is that of Kubernetes' Horizontal Pod Autoscaler ("Algorithm details" and "Stabilization window" of its
documentation): the number that would bring nodes to a target share of their time, with a tolerance around it, at once
upward and downward only to the most that was wanted within a window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ("KEPT_S", "Load", "busy_share", "nodes_for")

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
        after: the same later; lower ones are of a node that was started again.
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
        loads: measured by now, oldest first; those before ``KEPT_S`` ago are left out.
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
