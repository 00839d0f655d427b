"""Decides what each stage may use of each resource: amounts, fair shares, policies, and the pace of requests."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt

from frostline.core.declared import Within, read_declared
from frostline.core.errors import BadRequest, SettingError
from frostline.core.units import in_bytes

__all__ = (
    "RESOURCES",
    "Amounts",
    "Division",
    "Floats",
    "Ints",
    "Pace",
    "Row",
    "SharingPolicy",
    "StageTable",
    "Used",
    "chain_policies",
    "deadlines",
    "max_min",
    "policies_of",
    "priorities",
    "proportional",
    "sum_groups",
    "weighted_max_min",
)


RESOURCES = ("compute_s_per_s", "bytes_per_s", "requests_per_s", "requests", "memory_bytes")
"""Resources by name, in the order of a row: device seconds, bytes and requests of each second; requests and bytes under
way at once."""

Row = tuple[float, ...]
"""An amount of each resource, in the order of ``RESOURCES``."""


# Beyond the bytes that any store moves in a second, and within what floats count exactly.
_MAX_AMOUNT = 2**52
_Bound = Annotated[float, Within(0, _MAX_AMOUNT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """An amount of each resource; infinite where there is no bound.

    Attributes:
        compute_s_per_s: device seconds that may be used each second.
        bytes_per_s: bytes that may cross the link each second.
        requests_per_s: requests that may be made each second.
        requests: requests that may be under way at once.
        memory_bytes: bytes that may be asked for and not yet used.
    """

    compute_s_per_s: _Bound = math.inf
    bytes_per_s: _Bound = math.inf
    requests_per_s: _Bound = math.inf
    requests: _Bound = math.inf
    memory_bytes: _Bound = math.inf

    @classmethod
    def of(cls, row: Iterable[float]) -> Self:
        """Name the amounts of a row."""
        return cls(**dict(zip(RESOURCES, row, strict=True)))

    @classmethod
    def from_json(cls, value: object, name: str) -> Self:
        """Read amounts by their resources; those that are not named have no bound.

        Args:
            value: a table of numbers, 0 or more each.
            name: name of the table, for sentences.

        Raises:
            SettingError: The table is something else.
        """
        if not isinstance(value, Mapping):
            raise SettingError(f"{name} must be a table of amounts, named {', '.join(RESOURCES)}")
        try:
            return read_declared(cls, value, name, f"{name}: ")
        except BadRequest as error:
            raise SettingError(str(error)) from error

    @property
    def row(self) -> Row:
        """The amounts in the order of ``RESOURCES``."""
        return (self.compute_s_per_s, self.bytes_per_s, self.requests_per_s, self.requests, self.memory_bytes)

    def to_json(self) -> dict[str, float]:
        """The amounts that are bounded, by their resources."""
        named = zip(RESOURCES, self.row, strict=True)
        return {resource: amount for resource, amount in named if amount < math.inf}


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def sum_groups(group: Ints, amount: Floats, groups: int) -> Floats:
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
        capacity: amount to divide, as for ``weighted_max_min``.
        demand: amount that each asks for, as for ``weighted_max_min``.
        weight: weight of each, as for ``weighted_max_min``.
        group: group of each, as for ``weighted_max_min``.
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
    def zero(cls, table: StageTable) -> "Division":
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
    of_jobs = sum_groups(table.job, demand, len(table.tenant))
    of_tenants = sum_groups(table.tenant, of_jobs, len(table.tenant_weight))
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


def chain_policies(table: StageTable, policies: Sequence[SharingPolicy]) -> Division:
    """What several rules give, each of what those before it left; and what nobody asked for on top, by weight.

    That last part lets a stage use more at once when it comes to want more, without waiting for its next report. Stages
    that want nothing at all of a resource never use it, and have no part in that.
    """
    division = Division.zero(table)
    for policy in policies:
        division = policy(table, division)
    given = division.given.copy()
    for resource in table.divided:
        left = max(0.0, float(table.capacity[resource] - given[:, resource].sum()))
        if left > 0:
            wants = np.where(table.demand[:, resource] > 0, np.inf, 0.0)
            given[:, resource] += _down_the_tree(table, wants, left, proportional)
    return replace(division, given=given)


# What may be used at once after a pause, in seconds' worth: enough that threads which wake late lose nothing.
_SAVED_S = 0.25
# By how much a request's bytes change what the next ones are expected to bring.
_LEARNED = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What a job did since the report before.

    Attributes:
        seconds: the length of time.
        requests: requests that went.
        nbytes: bytes that came.
        waited_requests: True if a request waited because there were as many as it might make.
        waited_bytes: True if one waited because there were as many bytes as it might move.
    """

    seconds: float
    requests: int
    nbytes: int
    waited_requests: bool
    waited_bytes: bool


class _Bucket:
    """Tokens that come at a rate. It may owe some: what a request brings is known when it has come."""

    def __init__(self, now_s: float) -> None:
        self._per_s = math.inf
        self._left = 0.0
        self._at_s = now_s

    def change(self, per_s: float, now_s: float) -> None:
        self._fill(now_s)
        if self._per_s == math.inf:
            self._left = 0.0
        self._per_s = per_s
        self._left = min(self._left, self._maximum)

    def wait_s(self, now_s: float, least: float) -> float:
        """Seconds until there are so many tokens."""
        self._fill(now_s)
        lack = least - self._left
        if self._per_s == math.inf or lack <= 0:
            return 0.0
        return math.inf if self._per_s == 0 else lack / self._per_s

    def spend(self, amount: float, now_s: float) -> None:
        """Take tokens; a negative amount gives back what was taken in vain."""
        self._fill(now_s)
        if self._per_s < math.inf:
            self._left = min(self._maximum, self._left - amount)

    @property
    def _maximum(self) -> float:
        return max(1.0, _SAVED_S * self._per_s)

    def _fill(self, now_s: float) -> None:
        passed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        if 0 < self._per_s < math.inf:
            self._left = min(self._maximum, self._left + passed_s * self._per_s)


class Pace:
    """The pace of one job's requests in one process. Not for several threads.

    A request is paid when it goes, with the bytes that requests before it brought, and what it brings beyond or below
    that when it has come. So requests go one after another as the share allows, not all at once when nothing is owed,
    and over seconds no more than the share is used.

    Args:
        now_s: seconds of a monotonic clock.

    Attributes:
        moved_bytes: bytes that have come so far.
        expected_bytes: bytes that the next request is paid with.
    """

    def __init__(self, now_s: float) -> None:
        self._requests = _Bucket(now_s)
        self._bytes = _Bucket(now_s)
        self._since_s = now_s
        self._counts = [0, 0]
        self._waited = [False, False]
        self._has_learned = False
        self.moved_bytes = 0
        self.expected_bytes = 0.0

    def change(self, share: Amounts, now_s: float) -> None:
        """Keep to another share from now on."""
        self._requests.change(share.requests_per_s, now_s)
        self._bytes.change(share.bytes_per_s, now_s)

    def ask(self, now_s: float) -> float:
        """Let a request go if it may, and return 0; else the seconds after which it is worth asking again."""
        waits_s = self._requests.wait_s(now_s, 1.0), self._bytes.wait_s(now_s, 0.0)
        if max(waits_s) > 0:
            self._waited = [before or wait_s > 0 for before, wait_s in zip(self._waited, waits_s, strict=True)]
            return max(waits_s)
        self._requests.spend(1.0, now_s)
        self._bytes.spend(self.expected_bytes, now_s)
        self._counts[0] += 1
        return 0.0

    def count_bytes(self, nbytes: int, now_s: float, paid_bytes: float = 0.0) -> None:
        """Count bytes that have come, of which so many were paid when their request went."""
        self._bytes.spend(nbytes - paid_bytes, now_s)
        self._counts[1] += nbytes
        self.moved_bytes += nbytes

    def end_request(self, nbytes: int, unused_bytes: float, now_s: float) -> None:
        """A request has brought so many bytes, and so many that it was paid with did not come."""
        self._bytes.spend(-unused_bytes, now_s)
        if nbytes:
            self.expected_bytes += (_LEARNED if self._has_learned else 1.0) * (nbytes - self.expected_bytes)
            self._has_learned = True

    def take_usage(self, now_s: float) -> Used:
        """What was done since the last call."""
        found = Used(
            seconds=now_s - self._since_s,
            requests=self._counts[0],
            nbytes=self._counts[1],
            waited_requests=self._waited[0],
            waited_bytes=self._waited[1],
        )
        self._since_s, self._counts, self._waited = now_s, [0, 0], [False, False]
        return found
