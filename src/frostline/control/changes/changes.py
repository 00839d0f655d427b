"""Decides what a control plane divides now: what its file says, and what was changed since, which goes before it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Self

from frostline.control.amounts import RESOURCES, Amounts
from frostline.control.settings import ControlledJob, ControlSettings
from frostline.core.units import in_bytes
from frostline.errors import BadRequest, Overloaded, SettingError, UnknownName
from frostline.wire.patches import Patch, fields_of_patch

__all__ = ("CAPACITY_FIELDS", "JOB_FIELDS", "TENANT_FIELDS", "ControlChanges", "amount_words")

TENANT_FIELDS = ("weight",)
"""What may be changed of a tenant."""

JOB_FIELDS = ("weight", "priority", "ends_at", "work_bytes")
"""What may be changed of a job."""

CAPACITY_FIELDS = RESOURCES
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
            BadRequest: It makes no sense; the sentence names the field.
        """
        patch = fields_of_patch(body, CAPACITY_FIELDS)
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
            BadRequest: It makes no sense; the sentence names the field.
        """
        patch = fields_of_patch(body, TENANT_FIELDS)
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
            BadRequest: It makes no sense; the sentence names the field.
            Overloaded: So many jobs are changed already that another one is not kept.
        """
        patch = _with_end(fields_of_patch(body, JOB_FIELDS))
        in_file = _fields_of(next((each for each in settings.jobs if (each.tenant, each.name) == job), None))
        values = _patched(self.jobs.get(job, {}), patch, in_file)
        others = {name: other for name, other in self.jobs.items() if name != job}
        if values and len(others) >= _MAX_JOBS:
            sentence = f"{_MAX_JOBS:,} jobs are changed already: set what some of them had changed to null first"
            raise Overloaded(sentence, retry_after_s=_RETRY_AFTER_S)
        return self._checked(settings, replace(self, jobs={**others, job: values} if values else others))

    def applied(self, settings: ControlSettings) -> ControlSettings:
        """The settings of the file with the changes. What the file no longer names, has no change.

        Args:
            settings: settings that the file says.

        Raises:
            SettingError: They make no sense together.
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
            KeyError: It is something else; so do ValueError, TypeError and AttributeError say.
        """
        jobs = {
            (tenant, name): {field: math.inf if found is None else found for field, found in values.items()}
            for tenant, name, values in value["jobs"]
        }
        return cls(capacity=dict(value["capacity"]), tenants=dict(value["tenants"]), jobs=jobs)

    def _checked(self, settings: ControlSettings, changed: Self) -> Self:
        try:
            changed.applied(settings)
        except SettingError as error:
            raise BadRequest(str(error)) from error
        return changed


def amount_words(resource: str, amount: float) -> str:
    """An amount of a resource for people.

    Args:
        resource: one of ``RESOURCES``.
        amount: in the resource's own unit.
    """
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
