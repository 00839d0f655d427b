"""What stages and jobs say to a control plane and are answered: values, their JSON, and what is decided from them.

Decides what a stage reports, and what it keeps to: the last settings that it heard, while it hears nothing.

What one process of a job says of the job: progress, rates, what it saved, what holds it back, and its plan.

Decides what the rate and the share of waiting were lately, from counts that only grow.

Decides what is shown of a job of several processes, and what all jobs saved together.
"""

import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from frostline.control.shares import Amounts
from frostline.core.config import check_fields
from frostline.core.errors import BadRequest, SettingError

__all__ = (
    "KINDS",
    "MAX_BLOCKS",
    "MAX_NAME",
    "MAX_SENTENCE",
    "Bottleneck",
    "ControlAnswer",
    "ControlledStage",
    "JobActivity",
    "PlanOutline",
    "Prices",
    "RecentRates",
    "StageReport",
    "checked_job",
    "count",
    "savings",
    "summarise_job",
)


MAX_BLOCKS = 64
"""Blocks of a network that an outline has at most."""

MAX_NAME = 64
"""Characters of a name at most."""

MAX_SENTENCE = 512
"""Characters of a sentence at most."""

_MAX_COUNT = 2**52


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What holds a job back, as ``Job.diagnosis`` found it.

    Attributes:
        held_back_by: name of the part.
        says: the finding in one sentence.
        gain: factor by which samples a second would rise without it.
    """

    held_back_by: str
    says: str
    gain: float

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read what a stranger sent; raises ``BadRequest`` where it is something else."""
        table = _table(value, "diagnosis", ("held_back_by", "says", "gain"))
        return cls(
            held_back_by=_text(table["held_back_by"], "held_back_by", MAX_NAME),
            says=_text(table["says"], "says", MAX_SENTENCE),
            gain=_at_least_0(table["gain"], "gain"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutline:
    """A job's plan along its network, of 64 blocks at most.

    Attributes:
        names: names of the places between blocks in order, from the encoded sample to the frost line.
        nbytes: bytes of one sample at each, uncompressed; those of the encoded sample are the mean.
        cut: the cut, which of them most samples cross the network at now, counted from 0.
        codec: name of the codec that they cross with.
    """

    names: tuple[str, ...]
    nbytes: tuple[int, ...]
    cut: int
    codec: str

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read what a stranger sent; raises ``BadRequest`` where it is something else."""
        table = _table(value, "plan", ("names", "nbytes", "cut", "codec"))
        names, nbytes = (_list(table[name], name) for name in ("names", "nbytes"))
        cut = count(table["cut"], "cut")
        if len(names) != len(nbytes) or cut >= len(names):
            raise BadRequest("a plan has a number of bytes for each name, and a cut among them")
        return cls(
            names=tuple(_text(name, "names", MAX_NAME) for name in names),
            nbytes=tuple(count(number, "nbytes") for number in nbytes),
            cut=cut,
            codec=_text(table["codec"], "codec", MAX_NAME),
        )


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
        hindrance: the part that holds the job back; None where this report does not say.
        plan: the plan; None where this report does not say.
    """

    epoch: int = 0
    taken: int = 0
    epoch_samples: int = 0
    samples: int = 0
    samples_per_s: float = 0.0
    stall_share: float = 0.0
    wire_bytes: int = 0
    saved_bytes: float = 0.0
    saved_s: float | None = None
    hindrance: Bottleneck | None = None
    plan: PlanOutline | None = None

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read what a stranger sent.

        Raises:
            BadRequest: It is something else; the sentence names the field.
        """
        table = _table(value, "activity", tuple(_READ_ACTIVITY), is_whole=False)
        return cls(**{name: _READ_ACTIVITY[name](found, name) for name, found in table.items()})

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, without what it does not say."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def after(self, before: "JobActivity | None") -> "JobActivity":
        """The same, with what this report does not say as the one before said it."""
        if before is None:
            return self
        return replace(self, hindrance=self.hindrance or before.hindrance, plan=self.plan or before.plan)

    def abbreviate(self) -> "JobActivity":
        """The same without what is said again within seconds."""
        return replace(self, hindrance=None, plan=None)


def _table(value: object, name: str, fields: tuple[str, ...], *, is_whole: bool = True) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value.keys() <= set(fields) or (is_whole and len(value) < len(fields)):
        raise BadRequest(f"{name} is an object of {', '.join(fields)}")
    return value


def _list(value: object, name: str) -> Sequence[object]:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_BLOCKS:
        raise BadRequest(f"{name} must be a list of 1 to {MAX_BLOCKS}")
    return value


def _text(value: object, name: str, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise BadRequest(f"{name} must be a printable text of at most {longest} characters")
    return value


def count(value: object, name: str) -> int:
    """Read a count that a stranger sent.

    Args:
        value: the count, as JSON gave it.
        name: name of its field, for the sentence.

    Raises:
        BadRequest: It is no whole number from 0 to 2^52.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise BadRequest(f"{name} must be a whole number from 0 to {_MAX_COUNT}")
    return value


def _number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_MAX_COUNT <= value <= _MAX_COUNT:
        raise BadRequest(f"{name} must be a finite number, at most {_MAX_COUNT}")
    return float(value)


def _at_least_0(value: object, name: str) -> float:
    number = _number(value, name)
    if number < 0:
        raise BadRequest(f"{name} must be 0 or more")
    return number


def _share(value: object, name: str) -> float:
    number = _at_least_0(value, name)
    if number > 1:
        raise BadRequest(f"{name} must be at most 1")
    return number


_READ_ACTIVITY: dict[str, Callable[[object, str], Any]] = {
    "epoch": count,
    "taken": count,
    "epoch_samples": count,
    "samples": count,
    "samples_per_s": _at_least_0,
    "stall_share": _share,
    "wire_bytes": count,
    "saved_bytes": _number,
    "saved_s": _number,
    "hindrance": lambda value, _: Bottleneck.from_json(value),
    "plan": lambda value, _: PlanOutline.from_json(value),
}


KINDS = ("window", "io", "node", "cache")
"""What a stage may be: a loader's window, an I/O service, a node or a cache."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


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

    stage: str
    job: str
    kind: str = "window"
    sequence: int
    version: int = 0
    in_force: Amounts = field(default_factory=Amounts)
    demand: Amounts = field(default_factory=Amounts)
    used: Amounts = field(default_factory=Amounts)
    moved_bytes: int = 0
    activity: JobActivity | None = None
    has_ended: bool = False

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read a report that a stranger sent.

        Raises:
            BadRequest: It is not one; the sentence names the field.
        """
        if not isinstance(value, dict) or not {"stage", "job", "sequence"} <= value.keys() <= _READ_REPORT.keys():
            raise BadRequest(f"a report needs stage, job and sequence, and may have {', '.join(sorted(_READ_REPORT))}")
        try:
            return cls(**{name: _READ_REPORT[name](found, name) for name, found in value.items()})
        except SettingError as error:
            raise BadRequest(str(error)) from error

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

    version: int
    settings: Amounts
    round_s: float
    lease_s: float
    notices: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read an answer.

        Raises:
            BadRequest: It is not one.
        """
        try:
            if not isinstance(value, Mapping):
                raise BadRequest("an answer of a control plane is an object")
            return cls(
                version=count(value.get("version"), "version"),
                settings=Amounts.from_json(value.get("settings"), "settings"),
                round_s=_seconds(value.get("round_s"), "round_s"),
                lease_s=_seconds(value.get("lease_s"), "lease_s"),
                notices=_sentences(value.get("notices")),
            )
        except SettingError as error:
            raise BadRequest(str(error)) from error

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
        BadRequest: No job can have it.
    """
    return _name(name, "job")


def _name(value: object, name: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise BadRequest(f"{name} must be a name of 1 to 128 letters, digits and . _ : -")
    return value


def _kind(value: object, name: str) -> str:
    if value not in KINDS:
        raise BadRequest(f"{name} must be one of {', '.join(KINDS)}")
    return str(value)


def _switch(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false")
    return value


def _seconds(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise BadRequest(f"{name} must be a number of seconds above 0")
    return float(value)


def _sentences(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(sentence, str) for sentence in value):
        raise BadRequest("notices must be a list of sentences")
    return tuple(value)


_READ_REPORT: dict[str, Callable[[object, str], Any]] = {
    "stage": _name,
    "job": _name,
    "kind": _kind,
    "sequence": count,
    "version": count,
    "in_force": Amounts.from_json,
    "demand": Amounts.from_json,
    "used": Amounts.from_json,
    "moved_bytes": count,
    "activity": lambda value, _: JobActivity.from_json(value),
    "has_ended": _switch,
}


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


def savings(activities: Sequence[JobActivity], prices: Prices | None) -> dict[str, float | None]:
    """Bytes, seconds of the link and money that jobs saved.

    Args:
        activities: the last word of each process, those that have ended too.
        prices: prices of both; None where nobody said.

    Returns:
        ``bytes``, ``seconds`` of those who know their bandwidth, None where nobody does, and ``money``, None without
        prices.
    """
    known = [activity.saved_s for activity in activities if activity.saved_s is not None]
    nbytes, seconds = sum(activity.saved_bytes for activity in activities), sum(known) if known else None
    money = None
    if prices is not None:
        money = nbytes / _GB * prices.per_gb + (seconds or 0.0) / _HOUR_S * prices.per_trainer_hour
    return {"bytes": nbytes, "seconds": seconds, "money": money}


def summarise_job(
    running: Sequence[JobActivity], ended: Sequence[JobActivity], prices: Prices | None
) -> dict[str, Any] | None:
    """What is shown of a job.

    Ranks and workers each take a part of an epoch, so samples, rates and bytes add up. Progress is that of the epoch
    which the most advanced one is in. The share of waiting is the mean over those that take samples, and what holds the
    job back is what the one says that waits longest.

    Args:
        running: the last word of each process that is there.
        ended: the last word of those that have ended, which counts in sums.
        prices: prices of what is saved.

    Returns:
        A dictionary of plain values; None where no process said anything.
    """
    if not running:
        return None
    taking = [activity for activity in running if activity.epoch_samples]
    epoch = max((activity.epoch for activity in taking), default=0)
    passes = [activity for activity in taking if activity.epoch == epoch]
    said = [activity for activity in running if activity.hindrance is not None]
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
        "hindrance": None if slowest is None or slowest.hindrance is None else asdict(slowest.hindrance),
        "plan": None if plan is None else asdict(plan),
    }
