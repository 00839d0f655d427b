"""Decides fair shares: weighted max-min, and shares in proportion of which nothing that is not wanted is given away."""

import numpy as np
import numpy.typing as npt

__all__ = ("Floats", "Ints", "proportional", "summed", "weighted_max_min")

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def summed(group: Ints, amount: Floats, groups: int) -> Floats:
    """The amounts of each group together.

    Args:
        group: ``int64[n]``, the group of each amount.
        amount: ``float64[n]``.
        groups: number of groups.
    """
    return np.asarray(np.bincount(group, amount, groups), np.float64)


def weighted_max_min(capacity: Floats, demand: Floats, weight: Floats, group: Ints) -> Floats:
    """Divide the capacity of each group among its members, weighted max-min fair.

    All members are filled at rates in proportion to their weights, and each stops where its demand is met
    (progressive filling: Bertsekas and Gallager, Data Networks, section 6.5). Members are sorted by the level at which
    they stop instead of filled step by step, so n of them take n log n steps.

    Args:
        capacity: ``float64[g]``, finite.
        demand: ``float64[n]``, infinite for whoever takes all that there is.
        weight: ``float64[n]``, above 0.
        group: ``int64[n]``, the group of each member, from 0 to below g.

    Returns:
        ``float64[n]``; the shares of a group never exceed its capacity.
    """
    demand = np.minimum(demand, capacity[group])
    level = demand / weight
    order = np.lexsort((level, group))
    met = np.empty(len(demand), bool)
    met[order] = _are_met(capacity, demand[order], weight[order], group[order])
    rest_weight = np.bincount(group, np.where(met, 0.0, weight), len(capacity))
    rest = np.maximum(0.0, capacity - np.bincount(group, np.where(met, demand, 0.0), len(capacity)))
    reached = np.divide(rest, rest_weight, out=np.zeros_like(rest), where=rest_weight > 0)
    return _within(capacity, np.where(met, demand, np.minimum(demand, weight * reached[group])), group)


def _are_met(capacity: Floats, demand: Floats, weight: Floats, group: Ints) -> npt.NDArray[np.bool_]:
    """Whether each demand is met, of members sorted by group and then by the level at which they are."""
    first = np.searchsorted(group, group)
    taken, weighed = np.cumsum(demand), np.cumsum(weight)
    taken -= np.where(first > 0, taken[first - 1], 0.0)
    weighed -= np.where(first > 0, weighed[first - 1], 0.0)
    total = np.bincount(group, weight, len(capacity))[group]
    filled = taken + demand / weight * np.maximum(0.0, total - weighed)
    return filled <= capacity[group]


def proportional(capacity: Floats, demand: Floats, weight: Floats, group: Ints) -> Floats:
    """Divide the capacity of each group in proportion to weights, without false allocation.

    Nobody is given more than it demands. What is left of such shares goes to whoever has demand left, in proportion to
    that demand: the idea of Cheferd's proportional sharing without false allocation.

    Args:
        capacity: as of ``weighted_max_min``.
        demand: as of ``weighted_max_min``.
        weight: as of ``weighted_max_min``.
        group: as of ``weighted_max_min``.
    """
    demand = np.minimum(demand, capacity[group])
    total = np.bincount(group, weight, len(capacity))
    share = np.minimum(demand, capacity[group] * weight / total[group])
    rest = np.maximum(0.0, capacity - np.bincount(group, share, len(capacity)))
    lack = demand - share
    lacking = np.bincount(group, lack, len(capacity))
    part = np.divide(rest, lacking, out=np.zeros_like(rest), where=lacking > 0)
    return _within(capacity, share + lack * np.minimum(1.0, part)[group], group)


def _within(capacity: Floats, share: Floats, group: Ints) -> Floats:
    """The same shares, less what rounding put on top of the capacity."""
    given = np.bincount(group, share, len(capacity))
    times = np.divide(capacity, given, out=np.ones_like(capacity), where=given > capacity)
    return share * times[group]
