"""What a plan would be in a measured situation, and the measured situations that are kept for that question."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from frostline.core.config import NodeSettings, cache_folder
from frostline.core.declared import parse_json
from frostline.core.errors import SettingError
from frostline.core.files import with_schema, without_schema
from frostline.core.system import __version__
from frostline.core.units import in_bytes
from frostline.planning import POLICIES, Plan, Situation, make_plan, plan_at_cut, vary
from frostline.stores.urls import normalise_url
from frostline.training.run_config import make_folder, write_text
from frostline.training.settings import RANDOM, JobSettings

__all__ = (
    "ALL_POLICIES",
    "MeasuredSituation",
    "Question",
    "WhatIf",
    "WhatIfPlan",
    "answer",
    "find",
    "keep",
    "measurement_key",
    "recent_situation",
    "relative_speed",
)


_FORMAT = 1

ALL_POLICIES = "all"
"""Asks for every rule beside each other, instead of the name of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSituation:
    """A situation, when it was measured, and what for.

    Attributes:
        asked: inputs of the plan, by name: data, network, frost line and so on.
        at: the time, as ISO 8601 in UTC.
        situation: situation that was measured.
        fallback: the reason why the network was not cut as it stands, in a sentence; None where it was.
    """

    asked: Mapping[str, Any]
    at: str
    situation: Situation
    fallback: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What might be otherwise than it was measured; None leaves it as it was.

    Attributes:
        bandwidth: bandwidth of the link, bytes a second.
        store_speed: speed of the store side, times the measured one.
        trainer_speed: speed of the trainer, times the measured one.
        nodes: number of nodes that work beside the store.
        epochs: number of epochs of the job.
        trainer_memory: bytes that the frozen layers left to the trainer may take.
        separate_machines: node and trainer have a machine each.
    """

    bandwidth: float | None = None
    store_speed: float | None = None
    trainer_speed: float | None = None
    nodes: int | None = None
    epochs: int | None = None
    trainer_memory: int | None = None
    separate_machines: bool = False

    @property
    def is_asked(self) -> bool:
        """Something is to be otherwise."""
        return any(value is not None and value is not False for value in asdict(self).values())

    def words(self, situation: Situation) -> tuple[str, ...]:
        """What is otherwise, beside what it was in the measured situation."""
        said = []
        if self.bandwidth is not None:
            measured = situation.link.bytes_per_s
            said.append(f"a link of {in_bytes(self.bandwidth)}/s instead of {in_bytes(measured)}/s")
        if self.store_speed is not None:
            said.append(f"a store side {self.store_speed:g} times as fast")
        if self.trainer_speed is not None:
            said.append(f"a trainer {self.trainer_speed:g} times as fast")
        if self.trainer_memory is not None:
            said.append(f"{in_bytes(self.trainer_memory)} for the frozen layers at the trainer")
        if self.nodes is not None:
            said.append(f"{self.nodes} node{'' if self.nodes == 1 else 's'}")
        if self.separate_machines:
            said.append("node and trainer on a machine each")
        if self.epochs is not None:
            said.append(f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}")
        return tuple(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a situation.

    Attributes:
        policy: rule that chooses, or ``ALL_POLICIES``: the best one, and every rule beside it.
        cut: number of the cut to look at instead.
        codec: the codec with that cut.
        what_if: changes to assume.
    """

    policy: str = POLICIES[0]
    cut: int | None = None
    codec: str | None = None
    what_if: WhatIf = field(default_factory=WhatIf)

    @property
    def is_asked(self) -> bool:
        """More is asked than what the best plan is in the situation as it is."""
        return self != Question()


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfPlan:
    """A plan, and those to compare it with.

    Attributes:
        measured: situation that it follows from.
        what_if: changes to the measured situation.
        situation: the situation with that in it.
        plan: the plan for it.
        as_measured: the plan of the same rule for the situation as it was measured, where something is otherwise.
        rules: plans of every rule, where they were asked for.
    """

    measured: MeasuredSituation
    what_if: tuple[str, ...] = ()
    situation: Situation
    plan: Plan
    as_measured: Plan | None = None
    rules: tuple[Plan, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The plan's own dictionary, with what it was compared with beside it."""
        found = self.measured
        more: dict[str, Any] = {"asked": dict(found.asked), "measured": found.at, "fallback": found.fallback}
        if self.as_measured is not None:
            more |= {"what_if": list(self.what_if), "as_measured": _in_short(self.as_measured, beside=self.plan)}
        if self.rules:
            more["rules"] = [_in_short(rule, beside=self.plan) for rule in self.rules]
        return {**self.plan.to_json(), **more}


def relative_speed(plan: Plan, beside: Plan) -> float | None:
    """A plan's predicted samples a second over all epochs, as a share of another's; None where one has no bound."""
    if math.isinf(plan.mean_samples_per_s) or math.isinf(beside.mean_samples_per_s):
        return None
    return plan.mean_samples_per_s / beside.mean_samples_per_s


def answer(measured: MeasuredSituation, question: Question) -> WhatIfPlan:
    """Plan for the situation and, where something is to be otherwise, for that too.

    Raises:
        SettingError: there is no such cut, codec or rule, or a figure makes no sense.
    """
    situation, what_if = measured.situation, question.what_if
    varied = vary(situation, **asdict(what_if)) if what_if.is_asked else situation
    return WhatIfPlan(
        measured=measured,
        what_if=what_if.words(situation),
        situation=varied,
        plan=_plan(varied, question),
        as_measured=_plan(situation, question) if what_if.is_asked else None,
        rules=tuple(make_plan(varied, name) for name in POLICIES) if question.policy == ALL_POLICIES else (),
    )


def _plan(situation: Situation, question: Question) -> Plan:
    if question.cut is not None:
        return plan_at_cut(situation, question.cut, question.codec)
    return make_plan(situation, POLICIES[0] if question.policy == ALL_POLICIES else question.policy)


def _in_short(plan: Plan, *, beside: Plan) -> dict[str, Any]:
    """A plan without its candidates, and how fast it is beside another one; None where a rate has no bound."""
    whole = plan.to_json()
    short = {name: whole[name] for name in ("policy", "mixture", "samples_per_s", "bottleneck", "prices", "reason")}
    return {**short, "relative": relative_speed(plan, beside)}


def recent_situation(job: JobSettings, situation: Situation, *, fallback: str | None = None) -> MeasuredSituation:
    """A situation that was measured for a job a moment ago.

    Raises:
        SettingError: the data's URL is none that Frostline reads.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return MeasuredSituation(asked=measurement_key(job), at=now, situation=situation, fallback=fallback)


def measurement_key(job: JobSettings) -> dict[str, Any]:
    """What a measurement depends on, as plain values.

    No name and no password is among them: neither the data's URL nor the node's may carry any.

    Raises:
        SettingError: the data's URL is none that Frostline reads.
    """
    return {
        "data": normalise_url(job.data),
        "column": job.column,
        "file_column": job.file_column,
        "label": job.label,
        "model": job.model,
        "until": job.until,
        "near": None if job.near is None else job.near.rstrip("/"),
        "also_near": [url.rstrip("/") for url in job.also_near],
        "weights": job.weights if job.weights in (None, RANDOM) else str(Path(job.weights).absolute()),
        "tokenizer": job.tokenizer,
        "max_length": job.max_length,
        "samples": job.samples,
        "augment": job.augment,
        "accuracy": job.accuracy,
        "seed": job.seed,
        # A node of one's own is as large and as fast as it is told to be.
        "node": _own_node(job.node) if job.near is None else None,
    }


def keep(measured: MeasuredSituation) -> Path:
    """Write a measurement where ``find`` looks for it, in the place of an older one, and say where that is.

    Raises:
        SettingError: the cache folder cannot be written.
        OutOfSpace: the disk is full.
    """
    path = _place(measured.asked)
    make_folder(path.parent)
    whole = {
        "asked": measured.asked,
        "measured": measured.at,
        "fallback": measured.fallback,
        "situation": measured.situation.to_json(),
    }
    write_text(path, json.dumps(with_schema(whole, _FORMAT), indent=1, allow_nan=False) + "\n")
    return path


_KEPT = ("asked", "measured", "fallback", "situation")


def find(job: JobSettings) -> MeasuredSituation | None:
    """The latest measurement that answers for a job, or None where this version of Frostline kept none."""
    asked = measurement_key(job)
    try:
        place = _place(asked)
        kept = without_schema(parse_json(place.read_bytes()), _FORMAT, place, _KEPT)
        situation = Situation.from_json(kept["situation"])
        return MeasuredSituation(asked=asked, at=kept["measured"], situation=situation, fallback=kept["fallback"])
    except (OSError, ValueError, LookupError, TypeError, SettingError):
        return None


def _own_node(node: NodeSettings) -> dict[str, Any]:
    return {"memory_bytes": node.memory_bytes, "device": node.device, "tries": node.trial_s > 0}


def _place(asked: Mapping[str, Any]) -> Path:
    """The file of a measurement: another version of Frostline may measure something else."""
    named = json.dumps({"frostline": __version__, **asked}, sort_keys=True)
    return cache_folder() / "plans" / f"{hashlib.sha256(named.encode()).hexdigest()[:40]}.json"
