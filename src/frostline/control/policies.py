"""Decides what each stage may use: rules from the table of stages to shares, which can be chained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from frostline.control.amounts import RESOURCES, Row
from frostline.control.fairness import Floats, Ints, proportional, summed, weighted_max_min
from frostline.control.settings import ControlledJob
from frostline.core.units import in_bytes

__all__ = (
    "Division",
    "SharingPolicy",
    "StageColumns",
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


_Key = tuple[str, str]
_COLUMNS = np.dtype(
    [
        ("demand", np.float64, len(RESOURCES)),
        ("held", np.float64, len(RESOURCES)),
        ("moved_bytes", np.float64),
        ("job", np.int64),
        ("heard_s", np.float64),
        ("asked_s", np.float64),
        ("is_there", np.bool_),
    ]
)
# A job of which nothing is known beforehand.
_PLAIN = ControlledJob(name="any")
# Jobs that no stage works for any more are forgotten beyond so many.
_MAX_FORMER_JOBS = 64


class StageColumns:
    """What is known of all stages as columns, which stay between decisions: a decision takes nothing of each stage.

    Rows have the order in which stages came. Not for several threads.
    """

    def __init__(self) -> None:
        # A forgotten stage leaves an empty row, and no key, until rows are moved to make room.
        self._rows: dict[_Key, int] = {}
        self._keys: list[_Key | None] = []
        self._columns = np.zeros(0, _COLUMNS)
        self._given: Floats = np.zeros((0, len(RESOURCES)))
        self._jobs: dict[_Key, int] = {}

    def put(
        self,
        key: _Key,
        job: _Key,
        *,
        demand: Row,
        held: Row,
        moved_bytes: int,
        heard_s: float,
        asked_s: float,
        is_there: bool,
    ) -> None:
        """Know this of a stage from now on.

        Args:
            key: tenant and name of the stage.
            job: tenant and name of its job.
            demand: amounts that it wants.
            held: amounts that it may be using.
            moved_bytes: bytes that it has moved since it began.
            heard_s: when it was heard, in seconds since 1970.
            asked_s: when it was first answered settings that it has not said to have taken.
            is_there: whether it has a part of what is divided.
        """
        row = self._rows.get(key)
        if row is None:
            row = self._new_row(key)
        number = self._jobs.get(job)
        if number is None:
            number = self._new_job(job)
        self._columns[row] = (demand, held, moved_bytes, number, heard_s, asked_s, is_there)

    def drop(self, key: _Key) -> None:
        """Forget a stage."""
        row = self._rows.pop(key)
        self._keys[row] = None
        self._columns[row] = np.zeros((), _COLUMNS)
        self._given[row] = 0.0

    def given(self, key: _Key) -> Row:
        """What the last decision gives a stage; nothing where it was not there yet."""
        return tuple(self._given[self._rows[key]].tolist())

    def held(self) -> Row:
        """The amounts that all stages together may be using."""
        return tuple(self._used["held"].sum(axis=0).tolist())

    def silent(self, since_s: float) -> tuple[list[_Key], list[_Key]]:
        """The stages that were not heard since a time, and others that did not take what they were answered before it.

        Args:
            since_s: the time, in seconds since 1970.
        """
        columns = self._used
        unheard = columns["is_there"] & (columns["heard_s"] < since_s)
        waiting = columns["is_there"] & ~unheard & (columns["asked_s"] < since_s)
        return self._named(unheard), self._named(waiting)

    def divide(
        self,
        policies: Sequence["SharingPolicy"],
        *,
        capacity: Row,
        known: Mapping[_Key, ControlledJob],
        weights: Mapping[str, float],
        now_s: float,
    ) -> dict[_Key, tuple[str, ...]]:
        """Decide what each stage is given from now on; return the sentences about jobs.

        Args:
            policies: rules, in their order.
            capacity: what there is.
            known: jobs of which something is known beforehand.
            weights: weights of tenants; 1 where they have none.
            now_s: seconds since 1970.
        """
        there = np.flatnonzero(self._used["is_there"])
        self._given[:] = 0.0
        if not len(there):
            return {}
        # Jobs are numbered as their first stages came.
        numbers, first, job = np.unique(self._used["job"][there], return_index=True, return_inverse=True)
        order = np.argsort(first)
        names = list(self._jobs)
        jobs = [names[number] for number in numbers[order].tolist()]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        table = _table(
            jobs,
            place[job],
            demand=self._used["demand"][there],
            moved=self._moved()[numbers[order]],
            capacity=capacity,
            known=known,
            weights=weights,
            now_s=now_s,
        )
        division = chained(table, policies)
        self._given[there] = division.given
        return {jobs[number]: (sentence,) for number, sentence in division.notices}

    @property
    def _used(self) -> np.ndarray:
        return self._columns[: len(self._keys)]

    def _named(self, are_meant: npt.NDArray[np.bool_]) -> list[_Key]:
        found = (self._keys[row] for row in np.flatnonzero(are_meant).tolist())
        return [key for key in found if key is not None]

    def _moved(self) -> Floats:
        """The bytes that each job has moved, in all its stages, those that have ended among them."""
        return summed(self._used["job"], self._used["moved_bytes"], len(self._jobs))

    def _new_row(self, key: _Key) -> int:
        if len(self._keys) == len(self._columns):
            self._make_room()
        self._rows[key] = len(self._keys)
        self._keys.append(key)
        return self._rows[key]

    def _make_room(self) -> None:
        rows = list(self._rows.values())
        columns, given = self._columns[rows], self._given[rows]
        self._keys = list(self._rows)
        self._rows = dict(zip(self._keys, range(len(rows)), strict=True))
        self._columns = np.concatenate([columns, np.zeros(len(rows) + 16, _COLUMNS)])
        self._given = np.concatenate([given, np.zeros((len(rows) + 16, len(RESOURCES)))])

    def _new_job(self, job: _Key) -> int:
        if len(self._jobs) >= 2 * len(self._keys) + _MAX_FORMER_JOBS:
            numbers, self._used["job"] = np.unique(self._used["job"], return_inverse=True)
            names = list(self._jobs)
            self._jobs = {names[number]: place for place, number in enumerate(numbers.tolist())}
        return self._jobs.setdefault(job, len(self._jobs))


def _table(
    jobs: list[_Key],
    job: Ints,
    *,
    demand: Floats,
    moved: Floats,
    capacity: Row,
    known: Mapping[_Key, ControlledJob],
    weights: Mapping[str, float],
    now_s: float,
) -> StageTable:
    tenants = {tenant: number for number, tenant in enumerate(dict.fromkeys(tenant for tenant, _ in jobs))}
    found = [known.get(key, _PLAIN) for key in jobs]
    work = np.array([job.work_bytes for job in found])
    return StageTable(
        now_s=now_s,
        capacity=np.array(capacity),
        demand=demand,
        job=job,
        jobs=[name for _, name in jobs],
        tenant=np.array([tenants[tenant] for tenant, _ in jobs], np.int64),
        job_weight=np.array([job.weight for job in found], np.float64),
        tenant_weight=np.array([weights.get(tenant, 1.0) for tenant in tenants], np.float64),
        priority=np.array([job.priority for job in found], np.int64),
        ends_at_s=np.array([job.ends_at_s for job in found]),
        left_bytes=np.maximum(0.0, work - moved),
    )


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
