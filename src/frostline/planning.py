"""Decides which cut a job uses: the most samples a second, and of nearly equal ones the fewest bytes."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from frostline.core import Cut
from frostline.errors import SettingError
from frostline.profiles import CutCost, Profile

__all__ = ("Candidate", "Link", "Plan", "Situation", "choose", "explain", "fixed")

# Two runs of one measurement differ by this share on a busy machine; a smaller gain is none.
_NOISE = 0.05
_SMALLEST_DEVICE_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from the store side to the trainer, as measured.

    Attributes:
        bytes_per_s: payload bytes a second with several requests under way; infinite within a process.
        round_trip_s: of a small request. It costs no samples while the window keeps enough requests under
            way, so the plan shows it and does not reckon with it.
    """

    bytes_per_s: float
    round_trip_s: float

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise SettingError(f"a link's bytes_per_s must be above 0, not {self.bytes_per_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a plan is made from.

    Attributes:
        cuts: every cut of the job, by number from 0; the last is the frost line.
        encoded_bytes: of one encoded sample, the mean; what cut 0 ships.
        store: measured at the node.
        trainer: measured at the trainer.
        link: between them.
        same_host: both sides share one machine's cores.
        memory_bytes: the node's budget.
        refused: why the node would not run the network at all, in its words; None where it does. Then only
            cut 0 is left.
    """

    cuts: Sequence[Cut]
    encoded_bytes: float
    store: Profile
    trainer: Profile
    link: Link
    same_host: bool
    memory_bytes: int
    refused: str | None = None

    def __post_init__(self) -> None:
        numbers = [cut.number for cut in self.cuts]
        assert numbers[:1] == [0], "cut 0 is always a candidate"
        for profile in (self.store, self.trainer):
            missing = set(numbers) - {cost.number for cost in profile.cuts}
            assert not missing, f"the profile of {profile.hardware} does not have the cuts {sorted(missing)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one cut would cost.

    Attributes:
        cut: its number.
        name: where it is in the network.
        wire_bytes_per_sample: payload that crosses.
        store_s: seconds a sample at the node: read, decode, and the prefix up to the cut.
        trainer_s: seconds a sample at the trainer: what is left up to the frost line.
        memory_bytes: the node's, for a run of ``device_batch`` samples.
        device_batch: the largest multiple of eight, up to the profiled one, that fits the budget.
        samples_per_s: steady state, all stages overlapping.
        rejected: why another cut was taken, in a sentence; None for the chosen one.
    """

    cut: int
    name: str
    wire_bytes_per_sample: int
    store_s: float
    trainer_s: float
    memory_bytes: int
    device_batch: int
    samples_per_s: float
    rejected: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen cut and all others.

    Attributes:
        cut: number of the cut to use.
        policy: ``best``, or ``fixed`` where the user named the cut.
        reason: one sentence.
        candidates: every cut, by number, the rejected ones too.
        link: that the figures hold for.
    """

    cut: int
    policy: str
    reason: str
    candidates: tuple[Candidate, ...]
    link: Link

    @property
    def chosen(self) -> Candidate:
        """The candidate of the chosen cut."""
        return next(one for one in self.candidates if one.cut == self.cut)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values; a rate without bound is None."""
        return {
            "cut": self.cut,
            "name": self.chosen.name,
            "policy": self.policy,
            "reason": self.reason,
            "link": {"bytes_per_s": _finite(self.link.bytes_per_s), "round_trip_s": self.link.round_trip_s},
            "candidates": [{**asdict(one), "samples_per_s": _finite(one.samples_per_s)} for one in self.candidates],
        }


def choose(situation: Situation) -> Plan:
    """Take the cut with the most samples a second; of those within 5 % of it the one with the fewest bytes.

    The rate of a cut is that of its slowest stage, since stages overlap: ``1 / max(store, link, trainer)``
    in seconds a sample. Where both sides share one machine their seconds add up, and with equal hardware one
    profile serves both, so that noise between two measurements of the same work decides nothing. Cut 0 ships
    the encoded samples and is never rejected, so no job is planned slower than loading without a node.

    Features that are kept between epochs are those at the frost line, whatever the cut: later epochs then
    cost the same for every candidate, so the choice for the first epoch is the choice for all.
    """
    candidates = _candidates(situation)
    possible = [one for one in candidates if one.rejected is None]
    fastest = max(one.samples_per_s for one in possible)
    near = [one for one in possible if one.samples_per_s >= (1 - _NOISE) * fastest]
    best = min(near, key=lambda one: (one.wire_bytes_per_sample, -one.samples_per_s, -one.cut))
    reason = _why(best, len(near), candidates[0], situation)
    judged = tuple(replace(one, rejected=_against(one, best, fastest)) for one in candidates)
    return Plan(cut=best.cut, policy="best", reason=reason, candidates=judged, link=situation.link)


def fixed(situation: Situation, cut: int) -> Plan:
    """Take the cut that the user named.

    Raises:
        SettingError: there is no such cut, or it does not fit the node's memory.
    """
    candidates = _candidates(situation)
    named = next((one for one in candidates if one.cut == cut), None)
    if named is None:
        raise SettingError(f"there is no cut {cut}: this job has cuts 0 to {candidates[-1].cut}")
    if named.rejected is not None:
        raise SettingError(f"cut {cut} ({named.name}) cannot be used: {named.rejected}; raise the node's memory_bytes")
    reason = f"cut {cut} ({named.name}) was asked for: {_limit(named, situation)}"
    others = f"cut {cut} was asked for"
    judged = tuple(one if one is named else replace(one, rejected=one.rejected or others) for one in candidates)
    return Plan(cut=cut, policy="fixed", reason=reason, candidates=judged, link=situation.link)


def explain(plan: Plan) -> str:
    """The plan as text: its reason, and a table of every cut; ``>`` marks the chosen one."""
    rows = [_HEAD, *(_row(one, is_chosen=one.cut == plan.cut) for one in plan.candidates)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, _SIDES, widths, strict=True)).rstrip()
        for row in rows
    ]
    link = f"link: {_amount(plan.link.bytes_per_s)}/s, round trip {plan.link.round_trip_s * 1000:.1f} ms"
    return "\n".join([f"{plan.reason}.", link, "", *table])


_HEAD = ("", "cut", "name", "bytes", "node ms", "trainer ms", "node memory", "samples/s", "")
_SIDES = "<><>>>>><"


def _row(one: Candidate, *, is_chosen: bool) -> tuple[str, ...]:
    return (
        ">" if is_chosen else "",
        str(one.cut),
        one.name,
        _amount(one.wire_bytes_per_sample),
        f"{one.store_s * 1000:.2f}",
        f"{one.trainer_s * 1000:.2f}",
        _amount(one.memory_bytes),
        _rate(one.samples_per_s),
        one.rejected or "",
    )


def _candidates(situation: Situation) -> tuple[Candidate, ...]:
    return tuple(_candidate(cut, situation) for cut in situation.cuts)


def _candidate(cut: Cut, situation: Situation) -> Candidate:
    store = situation.store
    is_alike = situation.same_host and store.hardware == situation.trainer.hardware
    trainer = store if is_alike else situation.trainer
    frost_line = situation.cuts[-1].number
    store_s = store.read_s + _cost(store, cut.number).seconds
    trainer_s = max(0.0, _cost(trainer, frost_line).seconds - _cost(trainer, cut.number).seconds)
    wire_bytes = round(situation.encoded_bytes) if cut.number == 0 else cut.bytes_per_sample
    busiest_s = max(_stages(store_s, wire_bytes, trainer_s, situation).values())
    cost = _cost(store, cut.number)
    device_batch = _device_batch(cost, situation)
    memory_bytes = cost.fixed_bytes + device_batch * cost.bytes_per_sample
    return Candidate(
        cut=cut.number,
        name=cut.name,
        wire_bytes_per_sample=wire_bytes,
        store_s=store_s,
        trainer_s=trainer_s,
        memory_bytes=memory_bytes,
        device_batch=device_batch,
        samples_per_s=1 / busiest_s if busiest_s > 0 else math.inf,
        rejected=_rejected(cut, memory_bytes, situation),
    )


def _cost(profile: Profile, number: int) -> CutCost:
    return next(cost for cost in profile.cuts if cost.number == number)


def _stages(store_s: float, wire_bytes: int, trainer_s: float, situation: Situation) -> dict[str, float]:
    """Seconds a sample of everything that works at the same time."""
    link_s = wire_bytes / situation.link.bytes_per_s
    if situation.same_host:
        return {"the shared machine": store_s + trainer_s, "the link": link_s}
    return {"the node": store_s, "the link": link_s, "the trainer": trainer_s}


def _device_batch(cost: CutCost, situation: Situation) -> int:
    """The largest whole number of eights, up to the profiled batch, that fits; eight where none does."""
    most = situation.store.device_batch
    if cost.bytes_per_sample:
        most = min(most, (situation.memory_bytes - cost.fixed_bytes) // cost.bytes_per_sample)
    return max(_SMALLEST_DEVICE_BATCH, most // _SMALLEST_DEVICE_BATCH * _SMALLEST_DEVICE_BATCH)


def _rejected(cut: Cut, memory_bytes: int, situation: Situation) -> str | None:
    budget_bytes = situation.memory_bytes
    if cut.number == 0:
        return None
    if situation.refused is not None:
        return situation.refused
    if memory_bytes <= budget_bytes:
        return None
    return (
        f"needs {_amount(memory_bytes)} at the node for {_SMALLEST_DEVICE_BATCH} samples, "
        f"the budget is {_amount(budget_bytes)}"
    )


def _why(best: Candidate, near: int, encoded: Candidate, situation: Situation) -> str:
    among = "is the fastest"
    if near > 1:
        among = f"ships the fewest bytes of the {near} cuts within {_NOISE:.0%} of the fastest"
    return (
        f"cut {best.cut} ({best.name}) {among}: {_amount(best.wire_bytes_per_sample)} a sample"
        f"{_beside_encoded(best, encoded)}, {_limit(best, situation)}"
    )


def _against(one: Candidate, best: Candidate, fastest: float) -> str | None:
    """Why another cut than this one was taken."""
    if one is best or one.rejected is not None:
        return one.rejected
    if one.samples_per_s < (1 - _NOISE) * fastest:
        return f"{1 - one.samples_per_s / fastest:.0%} slower than the fastest"
    if one.wire_bytes_per_sample > best.wire_bytes_per_sample:
        times = one.wire_bytes_per_sample / max(1, best.wire_bytes_per_sample)
        return f"as fast within {_NOISE:.0%}, with {times:.3g} times the bytes"
    return f"as fast within {_NOISE:.0%}, with the same bytes"


def _beside_encoded(best: Candidate, encoded: Candidate) -> str:
    ours, theirs = best.wire_bytes_per_sample, encoded.wire_bytes_per_sample
    if best.cut == encoded.cut or ours == theirs or not (ours and theirs):
        return ""
    times, word = (theirs / ours, "fewer") if ours < theirs else (ours / theirs, "more")
    return f", {times:.3g} times {word} than encoded"


def _limit(one: Candidate, situation: Situation) -> str:
    stages = _stages(one.store_s, one.wire_bytes_per_sample, one.trainer_s, situation)
    return f"{_rate(one.samples_per_s)} samples/s, held back by {max(stages, key=lambda name: stages[name])}"


def _rate(samples_per_s: float) -> str:
    return "no bound" if math.isinf(samples_per_s) else f"{samples_per_s:.4g}"


def _amount(count: float) -> str:
    """Bytes in the largest decimal unit that leaves a number of at least one."""
    if math.isinf(count):
        return "no bound"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
