"""What a tenant may see of a control plane, as plain values."""

import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from frostline.control.activity.job_activity import JobActivity
from frostline.control.activity.summary import saved, summarised
from frostline.control.settings import EVERY_TENANT
from frostline.control.state import ControlState, StageRecord

__all__ = ("job_of", "tenant_of", "view_of")


def view_of(state: ControlState, tenant: str | None, now_s: float, *, may_change: bool = False) -> dict[str, Any]:
    """The stages that are there, their jobs and tenants, what was saved by all that are remembered, and what happened.

    Args:
        state: state of the control plane.
        tenant: tenant that asks, which sees its own alone; None sees all.
        now_s: seconds since 1970.
        may_change: whether whoever asks may change weights, jobs and capacities.
    """
    records = [record for record in state.records if tenant in (None, record.tenant)]
    jobs: dict[tuple[str, str], list[StageRecord]] = {}
    for record in records:
        jobs.setdefault(record.job, []).append(record)
    ended: dict[tuple[str, str], list[StageRecord]] = {}
    for record in state.remembered:
        if record.is_gone and tenant in (None, record.tenant):
            ended.setdefault(record.job, []).append(record)
    prices = state.settings.prices
    weights = state.settings.weights or {EVERY_TENANT: 1.0}
    return {
        "now_s": now_s,
        "may_change": may_change,
        "capacity": state.settings.capacity.to_json(),
        "changed": sorted(state.changes.capacity),
        "policies": list(state.settings.policies),
        "held": state.held.to_json() if tenant is None else None,
        "tenants": [tenant_of(state, name) for name in weights if tenant in (None, name)],
        "prices": None if prices is None else asdict(prices),
        "saved": saved(_activities([*records, *(record for gone in ended.values() for record in gone)]), prices),
        "jobs": [_job(state, key, stages, ended.get(key, [])) for key, stages in jobs.items()],
        "stages": [_stage(state, record, now_s) for record in records],
        "events": [event.to_json() for event in state.events.seen_by(tenant)],
    }


def _activities(records: Iterable[StageRecord]) -> list[JobActivity]:
    return [record.report.activity for record in records if record.report.activity is not None]


def tenant_of(state: ControlState, name: str) -> dict[str, Any]:
    """A tenant's weight, and which of its fields differ from the file because they were changed.

    Args:
        state: state of the control plane.
        name: name of the tenant.
    """
    changed = ["weight"] if name in state.changes.tenants else []
    return {"tenant": name, "weight": state.settings.weights.get(name, 1.0), "changed": changed}


def job_of(state: ControlState, key: tuple[str, str]) -> dict[str, Any]:
    """What is known of a job, and which of that differs from the file because it was changed.

    Args:
        state: state of the control plane.
        key: tenant and name of the job.
    """
    known = state.known(*key)
    return {
        "tenant": key[0],
        "job": key[1],
        "weight": known.weight,
        "priority": known.priority,
        "ends_at_s": None if math.isinf(known.ends_at_s) else known.ends_at_s,
        "work_bytes": known.work_bytes,
        "changed": sorted(name.removesuffix("_s") for name in state.changes.jobs.get(key, ())),
    }


def _job(
    state: ControlState, key: tuple[str, str], stages: list[StageRecord], ended: list[StageRecord]
) -> dict[str, Any]:
    return {
        **job_of(state, key),
        "stages": len(stages),
        "moved_bytes": sum(record.report.moved_bytes for record in stages),
        "notices": list(state.notices(*key)),
        "activity": summarised(_activities(stages), _activities(ended), state.settings.prices),
    }


def _stage(state: ControlState, record: StageRecord, now_s: float) -> dict[str, Any]:
    return {
        "tenant": record.tenant,
        **replace(record.report, activity=None).to_json(),
        "silent_s": max(0.0, now_s - record.heard_s),
        "answered": {"version": record.version, "settings": state.named(record.settings).to_json()},
        "notices": list(state.notices(*record.job)),
    }
