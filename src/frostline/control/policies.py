"""Decides what each stage may use: rules from the table of stages to shares, which can be chained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from frostline.control.amounts import RESOURCES
from frostline.control.fairness import Floats, Ints, proportional, summed, weighted_max_min
from frostline.core.units import in_bytes

__all__ = (
    "Division",
    "SharingPolicy",
    "StageTable",
    "chained",
    "deadlines",
    "max_min",
    "policies_of",
    "priorities",
)

_BYTES = RESOURCES.index("bytes_per_s")
# A job whose end has come cannot keep it.
_MIN_LEFT_S = 1e-3
# Jobs are to be done so long before they must: what they moved is known a second later, and what is asked for last is
# still under way. A job given just what it takes ended 0.2 s late (``benchmarks/fleet.py``).
_EARLY_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTable:
    """Who asks, and for how much, as columns: s stages of j jobs of t tenants, and r resources.

    Attributes:
        now_s: seconds since 1970.
        capacity: ``float64[r]``, infinite where nothing is divided.
        demand: ``float64[s, r]``, infinite for whoever takes all that there is, 0 for whoever never uses any.
        job: ``int64[s]``, the job of each stage.
        jobs: names of the jobs.
        tenant: ``int64[j]``, the tenant of each job.
        job_weight: ``float64[j]``.
        tenant_weight: ``float64[t]``.
        priority: ``int64[j]``, greater ones first.
        ends_at_s: ``float64[j]``, when each must have ended; infinite where it may take its time.
        left_bytes: ``float64[j]``, bytes that each still moves until its end.
    """

    now_s: float
    capacity: Floats
    demand: Floats
    job: Ints
    jobs: Sequence[str]
    tenant: Ints
    job_weight: Floats
    tenant_weight: Floats
    priority: Ints
    ends_at_s: Floats
    left_bytes: Floats

    @property
    def divided(self) -> list[int]:
        """The resources that have a bound."""
        return np.flatnonzero(np.isfinite(self.capacity)).tolist()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Division:
    """What is given so far.

    Attributes:
        given: ``float64[s, r]``; 0 for resources without a bound.
        settled: ``bool[s, r]``, shares that are what their stage needs, to which later rules add nothing.
        notices: sentences for people, by the number of the job that they are about.
    """

    given: Floats
    settled: npt.NDArray[np.bool_]
    notices: tuple[tuple[int, str], ...] = ()

    @classmethod
    def nothing(cls, table: StageTable) -> "Division":
        """Nobody has been given anything."""
        return cls(given=np.zeros(table.demand.shape), settled=np.zeros(table.demand.shape, bool))


SharingPolicy = Callable[[StageTable, Division], Division]
"""Divides what is left of the capacity; pure."""

_Rule = Callable[[Floats, Floats, Floats, Ints], Floats]


def max_min(table: StageTable, division: Division) -> Division:
    """Weighted max-min fair: between tenants, then between the jobs of each, then between the stages of each job."""
    return _divided(table, division, weighted_max_min, None)


def priorities(table: StageTable, division: Division) -> Division:
    """Max-min fair among the jobs of the greatest priority; those below divide what they leave."""
    for priority in sorted(set(table.priority.tolist()), reverse=True):
        division = _divided(table, division, weighted_max_min, table.priority[table.job] == priority)
    return division


def _in_proportion(table: StageTable, division: Division) -> Division:
    return _divided(table, division, proportional, None)


def deadlines(table: StageTable, division: Division) -> Division:
    """Give jobs that must end by a time the bytes a second that this takes, some seconds early, the earliest first.

    A job that cannot be in time even with all that is left is told so at once, and divides with the others. So does one
    that has moved all that was declared, and moves more.
    """
    if not table.divided.count(_BYTES):
        return division
    is_due = np.isfinite(table.ends_at_s) & (table.left_bytes > 0)
    due = [job for job in np.argsort(table.ends_at_s, kind="stable").tolist() if is_due[job]]
    for job in due:
        division = _kept_in_time(table, division, job)
    return division


def _kept_in_time(table: StageTable, division: Division, job: int) -> Division:
    left_s = max(_MIN_LEFT_S, float(table.ends_at_s[job]) - table.now_s)
    needs = float(table.left_bytes[job]) / left_s
    left = max(0.0, float(table.capacity[_BYTES] - division.given[:, _BYTES].sum()))
    if needs > left:
        return replace(division, notices=(*division.notices, (job, _too_late(table.jobs[job], needs, left))))
    planned = min(left, float(table.left_bytes[job]) / max(left_s / 2, left_s - _EARLY_S))
    own = np.flatnonzero(table.job == job)
    none = np.zeros(len(own), np.int64)
    # A stage that asks for less than its part must not slow the job: what it leaves, the others take.
    shares = weighted_max_min(np.array([planned]), table.demand[own, _BYTES], np.ones(len(own)), none)
    given, settled = division.given.copy(), division.settled.copy()
    given[own, _BYTES] += shares
    settled[own, _BYTES] = True
    return replace(division, given=given, settled=settled)


def _too_late(job: str, needs: float, left: float) -> str:
    return (
        f"job {job} cannot end in time: it needs {in_bytes(int(needs))} a second until then, and "
        f"{in_bytes(int(left))} a second are left; give it a later ends_at or the store a greater bytes_per_s"
    )


def _divided(table: StageTable, division: Division, rule: _Rule, among: npt.NDArray[np.bool_] | None) -> Division:
    given = division.given.copy()
    for resource in table.divided:
        lack = np.maximum(0.0, table.demand[:, resource] - given[:, resource])
        lack[division.settled[:, resource]] = 0.0
        if among is not None:
            lack[~among] = 0.0
        left = max(0.0, float(table.capacity[resource] - given[:, resource].sum()))
        given[:, resource] += _down_the_tree(table, lack, left, rule)
    return replace(division, given=given)


def _down_the_tree(table: StageTable, demand: Floats, capacity: float, rule: _Rule) -> Floats:
    """Divide one resource between tenants, jobs and stages; ``float64[s]``."""
    demand = np.minimum(demand, capacity)
    of_jobs = summed(table.job, demand, len(table.tenant))
    of_tenants = summed(table.tenant, of_jobs, len(table.tenant_weight))
    everybody = np.zeros(len(of_tenants), np.int64)
    tenants = rule(np.array([capacity]), of_tenants, table.tenant_weight, everybody)
    jobs = rule(tenants, of_jobs, table.job_weight, table.tenant)
    return rule(jobs, demand, np.ones(len(demand)), table.job)


_POLICIES: dict[str, SharingPolicy] = {
    "deadlines": deadlines,
    "priorities": priorities,
    "max_min": max_min,
    "proportional": _in_proportion,
}


def policies_of(names: Sequence[str]) -> list[SharingPolicy]:
    """The rules with these names."""
    return [_POLICIES[name] for name in names]


def chained(table: StageTable, policies: Sequence[SharingPolicy]) -> Division:
    """What several rules give, each of what those before it left; and what nobody asked for on top, by weight.

    That last part lets a stage use more at once when it comes to want more, without waiting for its next report. Stages
    that want nothing at all of a resource never use it, and have no part in that.

    Args:
        table: table of the stages.
        policies: rules, in their order.
    """
    division = Division.nothing(table)
    for policy in policies:
        division = policy(table, division)
    given = division.given.copy()
    for resource in table.divided:
        left = max(0.0, float(table.capacity[resource] - given[:, resource].sum()))
        if left > 0:
            wants = np.where(table.demand[:, resource] > 0, np.inf, 0.0)
            given[:, resource] += _down_the_tree(table, wants, left, proportional)
    return replace(division, given=given)
