"""Decides the fastest mixture of ways: a linear programme, with what more of each resource would give."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

__all__ = ("Optimum", "optimum")

Floats = npt.NDArray[np.float64]

# A share below this is no sample of a million.
_NO_SHARE = 1e-6
# A way that takes this many times the best single way's seconds could take one sample in ten million at most.
_HOPELESS = 1e7
# The solver's strictest; numbers below 1e-9 it takes for 0.
_TOLERANCE = 1e-10
# Two mixtures whose rates differ by this share are equally fast: well above the tolerance, so that what was found
# stays possible, and far below any measurement.
_EQUAL = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The fastest mixture.

    Attributes:
        shares: ``float64[n]``, of each way; they sum to 1, and at most as many as there are resources are above 0.
        seconds: seconds of the busiest resource, a sample, in the fastest mixture: the inverse of the greatest
            throughput. 0 where a way costs nothing.
        prices: ``float64[r]``, of each resource: by how many percent the throughput grows for each percent more of
            it; they sum to 1. All 0 where a way costs nothing.
    """

    shares: Floats
    seconds: float
    prices: Floats


def optimum(costs: Floats, weights: Floats, *, slack: float = 0.0) -> Optimum:
    """The mixture of ways with the greatest throughput; of equally fast ones that of the least weight.

    All resources work at the same time, each on another sample. With ``y_i`` samples a second on way ``i``, resource
    ``r`` works ``sum_i y_i c_ir`` of every second, so the steady state is:

        maximise T = sum_i y_i   subject to   sum_i y_i c_ir <= 1 for every r,   y >= 0.

    Way ``i`` has the share ``x_i = y_i / T`` of the samples. In shares this is the same as to minimise ``t = 1 / T``,
    the seconds of the busiest resource, subject to ``sum_i x_i = 1`` and ``sum_i x_i c_ir <= t``. A basic solution
    has no more variables above zero than rows: at most as many ways are mixed as there are resources.

    The prices are the elasticities of the throughput. If resource ``r`` did ``1 + s`` seconds of work a second, T
    would grow by ``q_r s``, where ``q_r >= 0`` is the dual of its row; so ``p_r = q_r / T`` percent for each percent.
    By strong duality the ``q_r`` sum to T, so the prices sum to one. T is concave in what each resource does, so a
    price is exact for small changes, and a bound for large ones: more gives at most that, less costs at least that.
    Where the optimum is degenerate (more rows are tight than are needed), even small changes may give less.

    Args:
        costs: ``float64[n, r]``, seconds a sample that way ``i`` takes of resource ``r``; finite, not negative.
        weights: ``float64[n]``, that breaks ties, such as bytes a sample; not negative.
        slack: mixtures whose throughput is less by this share count as equally fast.

    Returns:
        The optimum. Its seconds are within 5e-6 of the least possible, whatever the size of the costs: ways are
        counted in what they take of their own busiest resource, and rates in those of the fastest single way, of
        which the optimum has between 1 and r times as much.
    """
    single_s = costs.max(axis=1)
    unit_s = single_s.min()
    if unit_s == 0:
        return _free(single_s, weights, resources=costs.shape[1])
    ways = np.flatnonzero(single_s <= unit_s * _HOPELESS)
    loads, rates = costs[ways] / single_s[ways, np.newaxis], unit_s / single_s[ways]
    fastest = _fastest(loads, rates)
    chosen = _lightest(loads, rates, weights[ways], minimum=-fastest.fun * (1 - slack))
    # On nearly parallel ways rounding may leave one way too many: the fastest mixture of those has no more than r.
    if np.count_nonzero(chosen) > costs.shape[1]:
        few = np.flatnonzero(chosen)
        chosen[few] = _shares(_fastest(loads[few], rates[few]).x * rates[few])
    shares = np.zeros(len(costs))
    shares[ways] = chosen
    prices = np.maximum(0.0, -fastest.ineqlin.marginals)
    seconds = unit_s / -fastest.fun if slack else (shares @ costs).max()
    return Optimum(shares=shares, seconds=float(seconds), prices=prices / prices.sum())


def _free(single_s: Floats, weights: Floats, *, resources: int) -> Optimum:
    """Of the ways that cost nothing at all, the one of the least weight."""
    shares = np.zeros(len(single_s))
    shares[np.argmin(np.where(single_s == 0, weights, np.inf))] = 1.0
    return Optimum(shares=shares, seconds=0.0, prices=np.zeros(resources))


def _fastest(loads: Floats, rates: Floats) -> "OptimizeResult":
    """How much of its own busiest resource each way takes, where all together have the greatest rate.

    Args:
        loads: ``float64[n, r]``, of each resource while a way takes all of its busiest: the largest of a row is 1.
        rates: ``float64[n]``, of a way that takes all of its busiest resource; the largest is 1.
    """
    return _solved(-rates, loads.T, np.ones(loads.shape[1]))


def _lightest(loads: Floats, rates: Floats, weights: Floats, *, minimum: float) -> Floats:
    """Shares of the mixture of the least weight among those with at least that rate."""
    weighed = rates * weights
    heaviest = weighed.max()
    found = _solved(
        weighed / heaviest if heaviest > 0 else np.zeros(len(rates)),
        np.vstack([loads.T, -rates]),
        np.append(np.ones(loads.shape[1]), -minimum * (1 - _EQUAL)),
    )
    return _shares(found.x * rates)


def _solved(costs: Floats, rows: Floats, bounds: Floats) -> "OptimizeResult":
    """A basic solution that has the least costs, where ``rows @ x <= bounds`` and ``x >= 0``."""
    # Imported when a plan is made: it takes longer than all of the command line, which asks here for names alone.
    from scipy.optimize import linprog

    options = {"primal_feasibility_tolerance": _TOLERANCE, "dual_feasibility_tolerance": _TOLERANCE}
    found = linprog(costs, A_ub=rows, b_ub=bounds, method="highs-ds", options=options)
    assert found.success, f"some mixture is always possible, and rates are bounded: {found.message}"
    return found


def _shares(rates: Floats) -> Floats:
    """Rates as shares that sum to one, without those that are no sample."""
    shares = rates / rates.sum()
    kept = np.where(shares < _NO_SHARE, 0.0, shares)
    return np.asarray(kept / kept.sum())
