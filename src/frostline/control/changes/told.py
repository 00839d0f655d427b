"""Decides how a change of what a control plane divides is told: who changed what, from what to what."""

import math
from datetime import UTC, datetime

from frostline.control.changes.changes import amount_words
from frostline.control.settings import ControlledJob, ControlSettings
from frostline.core.units import in_bytes

__all__ = ("capacity_told", "job_told", "tenant_told")

# In the year 9800; an offset cannot lead out of the calendar.
_LAST_S = 2.471e11


def capacity_told(by: str, before: ControlSettings, after: ControlSettings) -> str | None:
    """What was changed of the capacity; None where nothing was.

    Args:
        by: name of the tenant that changed it.
        before: settings before.
        after: settings after.
    """
    old, new = before.capacity.to_json(), after.capacity.to_json()
    parts = [
        f"{resource} from {amount_words(resource, old[resource])} to {amount_words(resource, amount)}"
        for resource, amount in new.items()
        if amount != old[resource]
    ]
    return f"{by} changed what there is of {', '.join(parts)}" if parts else None


def tenant_told(by: str, name: str, before: ControlSettings, after: ControlSettings) -> str | None:
    """What was changed of a tenant; see ``capacity_told``."""
    old, new = before.weights[name], after.weights[name]
    return None if old == new else f"{by} changed the weight of tenant {name} from {old:g} to {new:g}"


def job_told(by: str, before: ControlledJob, after: ControlledJob, job: tuple[str, str]) -> str | None:
    """What was changed of a job; see ``capacity_told``.

    Args:
        by: name of the tenant that changed it.
        before: the job as it was known.
        after: the job as it is known now.
        job: its tenant and name.
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
