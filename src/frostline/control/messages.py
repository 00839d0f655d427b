"""What stages and jobs say to a control plane and are answered: values, their JSON, and what is decided from them.

Decides what a stage reports, and what it keeps to: the last settings that it heard, while it hears nothing.
"""

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Self, TypedDict

from frostline.control.shares import Amounts
from frostline.core.config import check_fields
from frostline.core.declared import Amount, Count, Matching, OneOf, Refer, Sized, Within, read_declared
from frostline.core.errors import BadRequest, SettingError

__all__ = (
    "KINDS",
    "MAX_BLOCKS",
    "MAX_NAME",
    "MAX_NODES",
    "MAX_NODE_TEXT",
    "MAX_SENTENCE",
    "Bottleneck",
    "ControlAnswer",
    "ControlView",
    "ControlledStage",
    "JobActivity",
    "JobSummary",
    "JobView",
    "NodeFailures",
    "PlanOutline",
    "Prices",
    "RecentRates",
    "Savings",
    "StageReport",
    "checked_job",
    "savings",
    "summarise_job",
)


MAX_BLOCKS = 64
"""Blocks of a network that an outline has at most."""

MAX_NAME = 64
"""Characters of a name at most."""

MAX_SENTENCE = 512
"""Characters of a sentence at most."""

MAX_NODES, MAX_NODE_TEXT = 4, 128
"""Nodes that failed requests, of which a report names the worst, and characters of a URL and of a trouble."""

_MAX_COUNT = 2**52
# Of all processes of a job together.
_MAX_NODES_SHOWN = 16
_Sum = Annotated[int, Within(0, _MAX_COUNT)]
_Rate = Annotated[float, Within(0, _MAX_COUNT)]
_Difference = Annotated[float, Within(-_MAX_COUNT, _MAX_COUNT)]
_Time = Annotated[float, Within(0, is_above=True)]
_Name = Annotated[str, Sized(0, MAX_NAME, is_printable=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What holds a job back, as ``Job.diagnosis`` found it.

    Attributes:
        held_back_by: name of the part.
        says: the finding in one sentence.
        gain: factor by which samples a second would rise without it.
    """

    held_back_by: _Name
    says: Annotated[str, Sized(0, MAX_SENTENCE, is_printable=True)]
    gain: _Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutline:
    """A job's plan along its network, of 64 blocks at most.

    Attributes:
        names: names of the places between blocks in order, from the encoded sample to the frost line.
        nbytes: bytes of one sample at each, uncompressed; those of the encoded sample are the mean.
        cut: the cut, which of them most samples cross the network at now, counted from 0.
        codec: name of the codec that they cross with.
    """

    names: Annotated[tuple[_Name, ...], Sized(1, MAX_BLOCKS)]
    nbytes: Annotated[tuple[_Sum, ...], Sized(1, MAX_BLOCKS)]
    cut: _Sum
    codec: _Name

    def __post_init__(self) -> None:
        if len(self.names) != len(self.nbytes) or self.cut >= len(self.names):
            raise BadRequest("a plan has a number of bytes for each name, and a cut among them")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailures:
    """One of several nodes that failed requests of a process, or took over those that others had failed.

    Attributes:
        node: the URL.
        samples: samples that it answered.
        retries: requests to it that another node had failed.
        failures: requests to it that broke, or that it refused.
        trouble: start of the reason why it is asked nothing, or less, for now; empty where it is well.
    """

    node: Annotated[str, Sized(0, MAX_NODE_TEXT, is_printable=True)]
    samples: _Sum = 0
    retries: _Sum = 0
    failures: _Sum = 0
    trouble: Annotated[str, Sized(0, MAX_NODE_TEXT, is_printable=True)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobActivity:
    """What one process of a job says of it. Sums are since the process began, and of this process alone.

    Attributes:
        epoch: number of the epoch of the pass that runs, or ran last.
        taken: samples of that pass that the loop has taken.
        epoch_samples: samples of that pass in all; 0 before the first one.
        samples: samples that the loop took.
        samples_per_s: samples a second in the last ten seconds.
        stall_share: share of these in which the loop waited for a batch.
        wire_bytes: bytes that came from the store side, bodies and headers.
        saved_bytes: bytes of the samples taken as they are stored, less ``wire_bytes``; below 0 where features are
            larger than the samples.
        saved_s: seconds in which the link, at its measured bandwidth, would have moved ``saved_bytes``. They are the
            link's: a loop that never waits for it is no sooner done. None where the bandwidth is not known.
        retries: requests made again, because they failed.
        nodes: nodes that failed some, four at most, those in trouble first.
        bottleneck: the part that holds the job back; None where this report does not say.
        plan: the plan; None where this report does not say.
    """

    epoch: _Sum = 0
    taken: _Sum = 0
    epoch_samples: _Sum = 0
    samples: _Sum = 0
    samples_per_s: _Rate = 0.0
    stall_share: Annotated[float, Within(0, 1)] = 0.0
    wire_bytes: _Sum = 0
    saved_bytes: _Difference = 0.0
    saved_s: _Difference | None = None
    retries: _Sum = 0
    nodes: Annotated[tuple[NodeFailures, ...], Sized(0, MAX_NODES)] = ()
    bottleneck: Bottleneck | None = None
    plan: PlanOutline | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, without what it does not say."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def after(self, before: "JobActivity | None") -> "JobActivity":
        """The same, with what this report does not say as the one before said it."""
        if before is None:
            return self
        return replace(self, bottleneck=self.bottleneck or before.bottleneck, plan=self.plan or before.plan)

    def abbreviate(self) -> "JobActivity":
        """The same without what is said again within seconds."""
        return replace(self, bottleneck=None, plan=None)


KINDS = ("window", "io", "node", "cache")
"""What a stage may be: a loader's window, an I/O service, a node or a cache."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_Known = Annotated[str, Matching(_NAME.pattern, "a name of 1 to 128 letters, digits and . _ : -")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What a stage says of itself. It may come late, twice or never: only the latest by ``sequence`` counts.

    Attributes:
        stage: name of the stage, which no other process of its tenant ever has.
        job: name of the job that it works for, which several stages may share.
        kind: one of ``KINDS``.
        sequence: number of the report, greater with each.
        version: version of the settings that are in force; 0 for none.
        in_force: the settings in force.
        demand: amounts that it would use if it might; infinite for all that there is, and 0 of what it never uses: then
            it is given none.
        used: amounts that it used since its last report, each second, or holds now; infinite where it does not say.
        moved_bytes: bytes that it has moved since it began.
        activity: account that its process gives of the job; None where it says nothing, as nodes and caches do.
        has_ended: True if this is its last report.
    """

    stage: _Known
    job: _Known
    kind: Annotated[str, OneOf(KINDS)] = "window"
    sequence: _Sum
    version: _Sum = 0
    in_force: Amounts = field(default_factory=Amounts)
    demand: Amounts = field(default_factory=Amounts)
    used: Amounts = field(default_factory=Amounts)
    moved_bytes: _Sum = 0
    activity: JobActivity | None = None
    has_ended: bool = False

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read a report that an untrusted client sent.

        Raises:
            BadRequest: The JSON is no report; the sentence names the field.
        """
        return read_declared(cls, value, "a report")

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        plain = {name: getattr(self, name) for name in ("stage", "job", "kind", "sequence", "version", "moved_bytes")}
        amounts = {name: getattr(self, name).to_json() for name in ("in_force", "demand", "used")}
        said = {} if self.activity is None else {"activity": self.activity.to_json()}
        return {**plain, **amounts, **said, "has_ended": self.has_ended}

    def after(self, before: "StageReport") -> "StageReport":
        """The same, with what is not said in each report as the one before said it."""
        return self if self.activity is None else replace(self, activity=self.activity.after(before.activity))


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAnswer:
    """What a stage is to keep to from now on.

    Attributes:
        version: version of the settings; a stage takes only those with a greater one than it has.
        settings: amounts that it may use.
        round_s: seconds after which it is to report again.
        lease_s: seconds for which these amounts stay its own though it says nothing.
        notices: sentences about its job for people.
    """

    version: _Sum
    settings: Amounts
    round_s: _Time
    lease_s: _Time
    notices: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read an answer.

        Raises:
            BadRequest: The JSON is no report.
        """
        known = {field.name for field in fields(cls)}
        said = {name: found for name, found in value.items() if name in known} if isinstance(value, dict) else value
        return read_declared(cls, said, "an answer of a control plane")

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values."""
        return {
            "version": self.version,
            "settings": self.settings.to_json(),
            "round_s": self.round_s,
            "lease_s": self.lease_s,
            "notices": list(self.notices),
        }


def checked_job(name: str) -> str:
    """Give back the name of a job.

    Raises:
        BadRequest: The text cannot be the name of a job.
    """
    if not _NAME.fullmatch(name):
        raise BadRequest("job must be a name of 1 to 128 letters, digits and . _ : -")
    return name


_UNCOUNTED = Amounts()


class ControlledStage:
    """A stage's side of the control plane. Not for several threads.

    Before it has heard anything it keeps to nothing but its own settings. Afterwards it keeps the last settings, also
    where the control plane is gone. Only a share of nothing ends with its lease, because waiting for more would stop
    the job; then one request at a time is allowed, and computing.

    Args:
        stage: name of the stage, which no other process of its tenant ever has.
        job: name of the job that it works for.
        kind: one of ``KINDS``.
    """

    def __init__(self, *, stage: str, job: str, kind: str = "window") -> None:
        self._base = StageReport(stage=stage, job=job, kind=kind, sequence=0)
        self._heard_s = -math.inf
        self._lease_s = math.inf
        self.version = 0
        self.in_force = Amounts()
        self.notices: tuple[str, ...] = ()

    def report(
        self,
        demand: Amounts,
        moved_bytes: int = 0,
        *,
        used: Amounts = _UNCOUNTED,
        activity: JobActivity | None = None,
        has_ended: bool = False,
    ) -> StageReport:
        """Make the next report.

        Args:
            demand: amounts that it would use if it might.
            moved_bytes: bytes that it has moved since it began.
            used: amounts that it used since the last one.
            activity: account that its process gives of the job.
            has_ended: True if it is the last one.
        """
        self._base = replace(self._base, sequence=self._base.sequence + 1)
        return replace(
            self._base,
            version=self.version,
            in_force=self.in_force,
            demand=demand,
            used=used,
            moved_bytes=moved_bytes,
            activity=activity,
            has_ended=has_ended,
        )

    def take(self, answer: ControlAnswer, now_s: float) -> bool:
        """Take an answer; return whether something is in force now that should be reported at once.

        That is the case where it may use less than before: others wait until it says so.

        Args:
            answer: the answer, which may be older than others that came.
            now_s: seconds of a monotonic clock.
        """
        self._heard_s, self._lease_s, self.notices = now_s, answer.lease_s, answer.notices
        if answer.version <= self.version:
            return False
        pairs = zip(answer.settings.row, self.in_force.row, strict=True)
        is_less = self.version > 0 and any(amount < before for amount, before in pairs)
        self.version, self.in_force = answer.version, answer.settings
        return is_less

    def bounds(self, now_s: float) -> Amounts:
        """Say what it may use now.

        Args:
            now_s: seconds of a monotonic clock.
        """
        is_alone = now_s - self._heard_s > self._lease_s
        if not is_alone:
            return self.in_force
        bounds = self.in_force
        if bounds.compute_s_per_s == 0:
            bounds = replace(bounds, compute_s_per_s=math.inf)
        if min(bounds.bytes_per_s, bounds.requests_per_s) > 0:
            return bounds
        return replace(bounds, bytes_per_s=math.inf, requests_per_s=math.inf, requests=1.0)


class RecentRates:
    """Rates over the last seconds. Not for several threads.

    Args:
        seconds: the time that they reach back.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._counts: deque[tuple[float, int, float]] = deque()

    def take(self, now_s: float, samples: int, stall_s: float) -> tuple[float, float]:
        """Take counts, and return samples a second and the share of the time that was waited, both 0 at first.

        Args:
            now_s: seconds of a monotonic clock.
            samples: samples taken so far.
            stall_s: seconds waited so far. A wait that is said at its end counts at its end.
        """
        counts = self._counts
        counts.append((now_s, samples, stall_s))
        while len(counts) > 2 and counts[1][0] <= now_s - self._seconds:
            counts.popleft()
        since_s, before, stalled_s = counts[0]
        if now_s <= since_s:
            return 0.0, 0.0
        passed_s = now_s - since_s
        return (samples - before) / passed_s, min(1.0, max(0.0, (stall_s - stalled_s) / passed_s))


_MAX_CURRENCY = 8
_MAX_PRICE = 1e9
_HOUR_S = 3600.0
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What is paid for what Frostline saves.

    Attributes:
        per_gb: price of a gigabyte (10⁹ bytes) that crosses from the store side to a trainer.
        per_trainer_hour: price of an hour of a trainer.
        currency: name of the currency, in at most eight characters.
    """

    per_gb: float = 0.0
    per_trainer_hour: float = 0.0
    currency: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("per_gb", "per_trainer_hour"):
            if not 0 <= getattr(self, name) <= _MAX_PRICE:
                raise SettingError(f"the price {name} must be from 0 to {_MAX_PRICE:.0f}, not {getattr(self, name)}")
        if len(self.currency) > _MAX_CURRENCY or not self.currency.isprintable():
            raise SettingError(f"a currency has at most {_MAX_CURRENCY} printable characters, not {self.currency!r}")


class Savings(TypedDict):
    """What jobs saved.

    Attributes:
        bytes: bytes that did not cross the network.
        seconds: the time in which the link would have moved them, of jobs that know its bandwidth; None of others.
        money: the price of both; None where nobody said any.
    """

    bytes: float
    seconds: float | None
    money: float | None


class JobSummary(TypedDict):
    """What all processes of a job say together.

    Attributes:
        processes: number of those that run.
        epoch: number of the epoch that the most advanced ones are in.
        taken: samples of it that loops have taken.
        epoch_samples: samples of it in all.
        samples: samples that loops took.
        samples_per_s: samples a second in the last ten seconds.
        stall_share: mean share of these in which loops waited.
        wire_bytes: bytes that came from the store side.
        saved: bytes, seconds and money that it saved.
        retries: requests made again, because they failed.
        nodes: nodes that failed some, 16 at most, with sums over all processes, those in trouble first.
        bottleneck: the part that holds back the process that waits longest; None where none says.
        plan: the plan; None where none says.
    """

    processes: Count
    epoch: Count
    taken: Count
    epoch_samples: Count
    samples: Count
    samples_per_s: Amount
    stall_share: Amount
    wire_bytes: Count
    saved: Savings
    retries: Count
    nodes: list[Annotated[dict[str, Any], Refer("NodeFailures")]]
    bottleneck: Annotated[dict[str, Any], Refer("Bottleneck")] | None
    plan: Annotated[dict[str, Any], Refer("PlanOutline")] | None


class JobView(TypedDict):
    """A job as a view shows it.

    Attributes:
        tenant: name of its tenant.
        job: the name.
        weight: number; the share of what its tenant has is in proportion to this.
        priority: number by which jobs are served first.
        ends_at_s: the time when it must have ended, in seconds since 1970; None where it may take its time.
        work_bytes: bytes that its stages move until then.
        changed: names of fields that differ from the file because they were changed.
        stages: number of its stages.
        moved_bytes: bytes that they moved.
        notices: sentences about it for people.
        activity: account of its processes; None where none gives any.
    """

    tenant: str
    job: str
    weight: float
    priority: int
    ends_at_s: float | None
    work_bytes: float
    changed: list[str]
    stages: Count
    moved_bytes: Count
    notices: list[str]
    activity: JobSummary | None


class ControlView(TypedDict):
    """The state of a control plane as far as the asker may see it.

    Attributes:
        now_s: time of the control plane, in seconds since 1970.
        may_change: True if the asker may change weights, jobs and capacities.
        capacity: amounts that all stages together may use.
        changed: names of capacities that differ from the file because they were changed.
        policies: names of the rules, in the order in which they divide.
        held: amounts that stages may use now; None for who does not see all.
        tenants: tenants with their weights.
        prices: prices at which money is said; None without any.
        saved: bytes, seconds and money that all jobs saved.
        counts: numbers of jobs and of stages that there are.
        next: numbers of the first job and of the first stage after this page; None where there is none.
        jobs: jobs of this page.
        stages: stages of this page: their last reports, and what they were answered.
        events: the last events.
    """

    now_s: Amount
    may_change: bool
    capacity: Annotated[dict[str, float], Refer("Amounts")]
    changed: list[str]
    policies: list[str]
    held: Annotated[dict[str, float], Refer("Amounts")] | None
    tenants: list[dict[str, Any]]
    prices: dict[str, Any] | None
    saved: Savings
    counts: dict[str, Count]
    next: dict[str, Count | None]
    jobs: list[JobView]
    stages: list[dict[str, Any]]
    events: list[dict[str, Any]]


def savings(activities: Sequence[JobActivity], prices: Prices | None) -> Savings:
    """Bytes, seconds of the link and money that jobs saved.

    Args:
        activities: the last word of each process, those that have ended too.
        prices: prices of both; None where nobody said.
    """
    known = [activity.saved_s for activity in activities if activity.saved_s is not None]
    nbytes, seconds = sum(activity.saved_bytes for activity in activities), sum(known) if known else None
    money = None
    if prices is not None:
        money = nbytes / _GB * prices.per_gb + (seconds or 0.0) / _HOUR_S * prices.per_trainer_hour
    return {"bytes": nbytes, "seconds": seconds, "money": money}


def summarise_job(
    running: Sequence[JobActivity], ended: Sequence[JobActivity], prices: Prices | None
) -> JobSummary | None:
    """What is shown of a job.

    Ranks and workers each take a part of an epoch, so samples, rates and bytes add up. Progress is that of the epoch
    which the most advanced one is in. The share of waiting is the mean over those that take samples, and what holds the
    job back is what the one says that waits longest.

    Args:
        running: the last word of each process that is there.
        ended: the last word of those that have ended, which counts in sums.
        prices: prices of what is saved.

    Returns:
        The summary; None where no process said anything.
    """
    if not running:
        return None
    taking = [activity for activity in running if activity.epoch_samples]
    epoch = max((activity.epoch for activity in taking), default=0)
    passes = [activity for activity in taking if activity.epoch == epoch]
    said = [activity for activity in running if activity.bottleneck is not None]
    slowest = max(said, key=lambda activity: activity.stall_share, default=None)
    plan = next((activity.plan for activity in running if activity.plan is not None), None)
    everything = [*running, *ended]
    return {
        "processes": len(running),
        "epoch": epoch,
        "taken": sum(activity.taken for activity in passes),
        "epoch_samples": sum(activity.epoch_samples for activity in passes),
        "samples": sum(activity.samples for activity in everything),
        "samples_per_s": sum(activity.samples_per_s for activity in running),
        "stall_share": sum(activity.stall_share for activity in taking) / max(1, len(taking)),
        "wire_bytes": sum(activity.wire_bytes for activity in everything),
        "saved": savings(everything, prices),
        "retries": sum(activity.retries for activity in everything),
        "nodes": _summed_nodes(running, ended),
        "bottleneck": None if slowest is None or slowest.bottleneck is None else asdict(slowest.bottleneck),
        "plan": None if plan is None else asdict(plan),
    }


def _summed_nodes(running: Sequence[JobActivity], ended: Sequence[JobActivity]) -> list[dict[str, Any]]:
    """What processes say of each node together; in trouble is what is so for one that runs."""
    found: dict[str, dict[str, Any]] = {}
    for is_running, activities in ((True, running), (False, ended)):
        for said in (node for activity in activities for node in activity.nodes):
            known = found.setdefault(said.node, asdict(NodeFailures(node=said.node)))
            known |= {name: known[name] + getattr(said, name) for name in ("samples", "retries", "failures")}
            known["trouble"] = known["trouble"] or (said.trouble if is_running else "")
    worst_first = sorted(found.values(), key=lambda node: (not node["trouble"], -node["failures"], node["node"]))
    return worst_first[:_MAX_NODES_SHOWN]
