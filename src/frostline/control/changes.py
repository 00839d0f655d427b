"""Decides what a control plane divides now, how changes of it are described, and which events are kept.

Decides which events of a control plane are kept: the latest of each tenant, so that none crowds out another. And which
of them have a line in a log.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self

from frostline.control.settings import ControlledJob, ControlSettings
from frostline.control.shares import RESOURCES, Amounts, Row
from frostline.core.declared import refuse_unknown_fields
from frostline.core.errors import BadRequest, Overloaded, SettingError, UnknownName
from frostline.core.units import in_bytes
from frostline.wire.messages import Patch, fields_of_patch

__all__ = (
    "MAX_EVENTS",
    "Cause",
    "ControlChanges",
    "ControlEvent",
    "ControlEventLog",
    "EventLines",
    "JobShare",
    "ShareWatch",
    "describe_capacity_change",
    "describe_job_change",
    "describe_tenant_change",
)


_TENANT_FIELDS = ("weight",)
"""What may be changed of a tenant."""

_JOB_FIELDS = ("weight", "priority", "ends_at", "work_bytes")
"""What may be changed of a job."""

_CAPACITY_FIELDS = RESOURCES
"""Resources whose capacities may be changed."""

_NEVER = "never"
# Changed jobs that are kept; a change is some hundred bytes, and all are written with each.
_MAX_JOBS = 1000
_RETRY_AFTER_S = 60.0

Values = Mapping[str, Any]
JobName = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlChanges:
    """What was changed, by the fields that were; what is not named is as the file says.

    Attributes:
        capacity: amounts by their resources.
        tenants: weights by the names of tenants.
        jobs: fields of ``ControlledJob`` by tenant and name.
    """

    capacity: Mapping[str, float] = field(default_factory=dict)
    tenants: Mapping[str, float] = field(default_factory=dict)
    jobs: Mapping[JobName, Values] = field(default_factory=dict)

    def with_capacity(self, settings: ControlSettings, body: object) -> Self:
        """The same changes and those of a PATCH of the capacity; null goes back to the file.

        Args:
            settings: settings that the file says.
            body: the PATCH, as JSON gave it.

        Raises:
            BadRequest: The PATCH makes no sense; the sentence names the field.
        """
        patch = fields_of_patch(body, _CAPACITY_FIELDS)
        divided = settings.capacity.to_json()
        for resource in patch.keys() - divided.keys():
            raise BadRequest(f"{resource} is not divided here: name it under [capacity] of the file first")
        try:
            Amounts.from_json({name: value for name, value in patch.items() if value is not None}, "capacity")
        except SettingError as error:
            raise BadRequest(str(error)) from error
        return self._checked(settings, replace(self, capacity=_patched(self.capacity, patch, divided)))

    def with_tenant(self, settings: ControlSettings, name: str, body: object) -> Self:
        """The same changes and those of a PATCH of a tenant; null goes back to the file.

        Args:
            settings: settings that the file says.
            name: name of the tenant.
            body: the PATCH, as JSON gave it.

        Raises:
            UnknownName: There is no such tenant.
            BadRequest: The PATCH makes no sense; the sentence names the field.
        """
        patch = fields_of_patch(body, _TENANT_FIELDS)
        if name not in settings.weights:
            raise UnknownName(f"there is no tenant {name!r}")
        weight = _patched({}, patch, {"weight": settings.weights[name]}).get("weight")
        others = {tenant: other for tenant, other in self.tenants.items() if tenant != name}
        return self._checked(settings, replace(self, tenants=others if weight is None else {**others, name: weight}))

    def with_job(self, settings: ControlSettings, job: JobName, body: object) -> Self:
        """The same changes and those of a PATCH of a job; null goes back to the file.

        Args:
            settings: settings that the file says.
            job: tenant and name of the job, which the caller knows to be there.
            body: the PATCH, as JSON gave it; ``ends_at`` is a date and time with its offset, or ``"never"``.

        Raises:
            BadRequest: The PATCH makes no sense; the sentence names the field.
            Overloaded: The largest number of changed jobs is reached.
        """
        patch = _with_end(fields_of_patch(body, _JOB_FIELDS))
        in_file = _fields_of(next((each for each in settings.jobs if (each.tenant, each.name) == job), None))
        values = _patched(self.jobs.get(job, {}), patch, in_file)
        others = {name: other for name, other in self.jobs.items() if name != job}
        if values and len(others) >= _MAX_JOBS:
            sentence = f"{_MAX_JOBS:,} jobs are changed already: set what some of them had changed to null first"
            raise Overloaded(sentence, retry_after_s=_RETRY_AFTER_S)
        return self._checked(settings, replace(self, jobs={**others, job: values} if values else others))

    def apply(self, settings: ControlSettings) -> ControlSettings:
        """The settings of the file with the changes. What the file no longer names, has no change.

        Raises:
            SettingError: The changed settings contradict each other.
        """
        amounts = settings.capacity.to_json()
        amounts |= {resource: amount for resource, amount in self.capacity.items() if resource in amounts}
        tenants = [replace(tenant, weight=self.tenants.get(tenant.name, tenant.weight)) for tenant in settings.tenants]
        jobs = {(job.tenant, job.name): job for job in settings.jobs}
        for (tenant, name), values in self.jobs.items():
            if tenant in settings.weights:
                before = jobs.get((tenant, name), ControlledJob(name=name, tenant=tenant))
                jobs[tenant, name] = replace(before, **values)
        return replace(settings, capacity=Amounts(**amounts), tenants=tuple(tenants), jobs=tuple(jobs.values()))

    def to_json(self) -> dict[str, Any]:
        """The changes as plain values."""
        jobs = [
            [*job, {name: None if value == math.inf else value for name, value in values.items()}]
            for job, values in self.jobs.items()
        ]
        return {"capacity": dict(self.capacity), "tenants": dict(self.tenants), "jobs": jobs}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Read what ``to_json`` gave.

        Raises:
            KeyError: The JSON is not one of ``to_json``; ValueError, TypeError and AttributeError say the same.
        """
        refuse_unknown_fields(value, ("capacity", "tenants", "jobs"), "the changes")
        jobs = {
            (tenant, name): {field: math.inf if found is None else found for field, found in values.items()}
            for tenant, name, values in value["jobs"]
        }
        return cls(capacity=dict(value["capacity"]), tenants=dict(value["tenants"]), jobs=jobs)

    def _checked(self, settings: ControlSettings, changed: Self) -> Self:
        try:
            changed.apply(settings)
        except SettingError as error:
            raise BadRequest(str(error)) from error
        return changed


def _amount_words(resource: str, amount: float) -> str:
    """An amount of a resource for people."""
    return in_bytes(amount) if "bytes" in resource else f"{amount:.4g}"


def _patched(before: Values, patch: Values, in_file: Values) -> dict[str, Any]:
    """The changes after a patch, without those that are what the file says."""
    after = {**before, **patch}
    return {name: value for name, value in after.items() if value is not None and value != in_file.get(name)}


def _fields_of(job: ControlledJob | None) -> dict[str, Any]:
    return asdict(job or ControlledJob(name="any"))


def _with_end(patch: Patch) -> dict[str, Any]:
    """The same patch, with ``ends_at``, a text, in seconds."""
    rest: dict[str, Any] = dict(patch)
    if "ends_at" not in rest:
        return rest
    said = rest.pop("ends_at")
    if said is None or said == _NEVER:
        return {**rest, "ends_at_s": None if said is None else math.inf}
    try:
        at = datetime.fromisoformat(said)
    except (TypeError, ValueError):
        at = None
    if at is None or at.tzinfo is None:
        raise BadRequest("ends_at must be a date and time with its offset, such as 2030-01-31T07:00:00Z, or never")
    return {**rest, "ends_at_s": at.timestamp()}


# In the year 9800; an offset cannot lead out of the calendar.
_LAST_S = 2.471e11


def describe_capacity_change(by: str, before: ControlSettings, after: ControlSettings) -> str | None:
    """What was changed of the capacity; None where nothing was.

    Args:
        by: name of the tenant that changed it.
        before: settings before.
        after: settings after.
    """
    old, new = before.capacity.to_json(), after.capacity.to_json()
    parts = [
        f"{resource} from {_amount_words(resource, old[resource])} to {_amount_words(resource, amount)}"
        for resource, amount in new.items()
        if amount != old[resource]
    ]
    return f"{by} changed what there is of {', '.join(parts)}" if parts else None


def describe_tenant_change(by: str, name: str, before: ControlSettings, after: ControlSettings) -> str | None:
    """What was changed of a tenant; see ``describe_capacity_change``."""
    old, new = before.weights[name], after.weights[name]
    return None if old == new else f"{by} changed the weight of tenant {name} from {old:g} to {new:g}"


def describe_job_change(by: str, before: ControlledJob, after: ControlledJob, job: tuple[str, str]) -> str | None:
    """What was changed of a job; see ``describe_capacity_change``.

    Args:
        by: name of the tenant that changed it.
        before: the job as it was known.
        after: the job as it is known now.
        job: the tenant and name.
    """
    parts = []
    for name in ("weight", "priority"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            parts.append(f"{name} from {old:g} to {new:g}")
    if before.ends_at_s != after.ends_at_s:
        parts.append(f"its end from {_end(before.ends_at_s)} to {_end(after.ends_at_s)}")
    if before.work_bytes != after.work_bytes:
        parts.append(f"work_bytes from {in_bytes(before.work_bytes)} to {in_bytes(after.work_bytes)}")
    return f"{by} changed job {job[1]} of tenant {job[0]}: {', '.join(parts)}" if parts else None


def _end(at_s: float) -> str:
    if at_s == math.inf:
        return "never"
    return datetime.fromtimestamp(max(0.0, min(at_s, _LAST_S)), UTC).isoformat(timespec="seconds")


MAX_EVENTS = 200
"""Events of a tenant that are kept, and that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEvent:
    """What happened at a control plane, and why.

    Attributes:
        number: the number; later events have greater ones.
        at_s: the time when it happened, in seconds since 1970.
        kind: ``joined``, ``ended``, ``lost``, ``changed``, ``late``, ``in_time`` or ``share``.
        tenant: tenant whose stages it is about; None where it is about those of all.
        sentence: sentence for people about what happened and why.
    """

    number: int
    at_s: float
    kind: str
    tenant: str | None
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """The event as plain values."""
        return asdict(self)


class ControlEventLog:
    """The latest events of each tenant. Not for several threads.

    Args:
        events: events that an earlier log had.
    """

    def __init__(self, events: Iterable[ControlEvent] = ()) -> None:
        self._kept: dict[str | None, deque[ControlEvent]] = {}
        for event in sorted(events, key=lambda event: event.number):
            self._kept.setdefault(event.tenant, deque()).append(event)
        self._number = max((queue[-1].number for queue in self._kept.values()), default=0)
        self._unsaved: dict[int, ControlEvent | None] = {}

    def add(self, kind: str, tenant: str | None, sentence: str, at_s: float) -> None:
        """Note an event, and forget the tenant's oldest one where it has too many; see ``ControlEvent``."""
        self._number += 1
        event = ControlEvent(number=self._number, at_s=at_s, kind=kind, tenant=tenant, sentence=sentence)
        queue = self._kept.setdefault(tenant, deque())
        queue.append(event)
        self._unsaved[event.number] = event
        if len(queue) > MAX_EVENTS:
            self._unsaved[queue.popleft().number] = None

    def events_for(self, tenant: str | None) -> list[ControlEvent]:
        """The latest events, the oldest first.

        Args:
            tenant: tenant that asks, which sees those of its own stages; None sees all.
        """
        queues = self._kept.values() if tenant is None else [self._kept.get(tenant, deque())]
        found = sorted((event for queue in queues for event in queue), key=lambda event: event.number)
        return found[-MAX_EVENTS:]

    def take_unsaved(self) -> dict[int, ControlEvent | None]:
        """The events since the last call by their numbers; None for those that were forgotten."""
        found, self._unsaved = self._unsaved, {}
        return found


# Lines of a minute in a log: as many as the stages of a large job that begins.
_MAX_LINES = 256
_MINUTE_S = 60.0


class EventLines:
    """Which events a log has a line for, since a stage may join and end often. Not for several threads."""

    def __init__(self) -> None:
        self._minutes: dict[str | None, tuple[float, int]] = {}

    def admit(self, tenant: str | None, now_s: float) -> int | None:
        """Whether an event of a tenant is logged: None for no, else how many of its events were not just before.

        Args:
            tenant: tenant that the event is about; None for all.
            now_s: seconds of a clock that only grows.
        """
        since_s, count = self._minutes.get(tenant, (-math.inf, 0))
        if now_s >= since_s + _MINUTE_S:
            self._minutes[tenant] = (now_s, 1)
            return max(0, count - _MAX_LINES)
        self._minutes[tenant] = (since_s, count + 1)
        return 0 if count < _MAX_LINES else None


# A change by less is no news.
_MIN_PART = 0.25
# Jobs named for one decision: after a change of the capacity there may be thousands.
_MAX_NAMED_JOBS = 8
_MAX_CAUSES = 3
_MAX_NOTED = 64
_UNITS = {
    "compute_s_per_s": "device seconds a second",
    "bytes_per_s": "a second",
    "requests_per_s": "requests a second",
    "requests": "requests at once",
    "memory_bytes": "of memory",
}


@dataclass(frozen=True, slots=True)
class JobShare:
    """The share of a job, in all its stages.

    Attributes:
        given: amounts that it may use.
        wanted: amounts, at most ``given``, that it wants now. The rest is left by others, and its changes are no news.
    """

    given: Row
    wanted: Row


@dataclass(frozen=True, slots=True)
class Cause:
    """Why shares may change.

    Attributes:
        tenant: tenant whose stages or settings changed; None for what is everybody's.
        words: words about it for that tenant: ``"job night joined"``.
        for_others: description for other tenants, without names.
    """

    tenant: str | None
    words: str
    for_others: str


class ShareWatch:
    """Compares the shares of jobs with those of the decision before. Not for several threads."""

    def __init__(self) -> None:
        self._shares: Mapping[JobName, JobShare] = {}
        self._causes: list[Cause] = []

    def note(self, tenant: str | None, words: str, for_others: str) -> None:
        """Note what may change shares at the next decision; see ``Cause``."""
        cause = Cause(tenant, words, for_others)
        if cause not in self._causes and len(self._causes) < _MAX_NOTED:
            self._causes.append(cause)

    def news(self, shares: Mapping[JobName, JobShare]) -> list[tuple[JobName, str]]:
        """The jobs whose shares changed most, with a sentence each; none where nothing was noted.

        Args:
            shares: share of each job after a decision.
        """
        before, causes = self._shares, self._causes
        self._shares, self._causes = shares, []
        if not causes:
            return []
        changed = [
            (_part(before[job].wanted[place], share.wanted[place]), job, place)
            for job, share in shares.items()
            if job in before and (place := _greatest_change(before[job].wanted, share.wanted)) is not None
        ]
        changed.sort(key=lambda entry: (-entry[0], entry[1]))
        return [
            (job, f"{_said(job[1], place, before[job].given, shares[job].given)}: {_why(job[0], causes)}")
            for _, job, place in changed[:_MAX_NAMED_JOBS]
        ]


def _greatest_change(before: Row, after: Row) -> int | None:
    parts = [_part(old, new) for old, new in zip(before, after, strict=True)]
    place = max(range(len(parts)), key=parts.__getitem__)
    return place if parts[place] > _MIN_PART else None


def _part(before: float, after: float) -> float:
    """How far a share moved, as a part of what it was."""
    if before == after:
        return 0.0
    return abs(after - before) / before if before > 0 else math.inf


def _said(job: str, place: int, before: Row, after: Row) -> str:
    resource = RESOURCES[place]
    old, new = (_amount_words(resource, row[place]) for row in (before, after))
    return f"job {job} may use {new} {_UNITS[resource]} instead of {old}"


def _why(tenant: str, causes: list[Cause]) -> str:
    words = list(dict.fromkeys(_words(tenant, causes)))
    return ", ".join(words[:_MAX_CAUSES]) + (" and more" if len(words) > _MAX_CAUSES else "")


def _words(tenant: str, causes: list[Cause]) -> Iterator[str]:
    for cause in causes:
        yield cause.words if cause.tenant in (None, tenant) else cause.for_others
