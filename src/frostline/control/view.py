"""What a tenant may see of a control plane, as plain values."""

import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from frostline.control.activity.job_activity import JobActivity
from frostline.control.activity.summary import saved, summarised
from frostline.control.settings import EVERY_TENANT
from frostline.control.state import ControlState, StageRecord

__all__ = ("view_of",)


def view_of(state: ControlState, tenant: str | None, now_s: float) -> dict[str, Any]:
    """The stages that are there, their jobs and tenants, and what was saved by all that are remembered.

    Args:
        state: state of the control plane.
        tenant: tenant that asks, which sees its own alone; None sees all.
        now_s: seconds since 1970.
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
        "capacity": state.settings.capacity.to_json(),
        "policies": list(state.settings.policies),
        "held": state.held.to_json() if tenant is None else None,
        "tenants": [{"tenant": name, "weight": weight} for name, weight in weights.items() if tenant in (None, name)],
        "prices": None if prices is None else asdict(prices),
        "saved": saved(_activities([*records, *(record for gone in ended.values() for record in gone)]), prices),
        "jobs": [_job(state, key, stages, ended.get(key, [])) for key, stages in jobs.items()],
        "stages": [_stage(state, record, now_s) for record in records],
    }


def _activities(records: Iterable[StageRecord]) -> list[JobActivity]:
    return [record.report.activity for record in records if record.report.activity is not None]


def _job(
    state: ControlState, key: tuple[str, str], stages: list[StageRecord], ended: list[StageRecord]
) -> dict[str, Any]:
    known = state.known(*key)
    return {
        "tenant": key[0],
        "job": key[1],
        "weight": known.weight,
        "priority": known.priority,
        "ends_at_s": None if math.isinf(known.ends_at_s) else known.ends_at_s,
        "work_bytes": known.work_bytes,
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
