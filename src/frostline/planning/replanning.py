"""Decides what a running job's measurements say of its situation, and whether another plan is worth a change."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from frostline.core import EXACT, Cut, Route
from frostline.core.units import in_bytes, in_samples_per_s
from frostline.planning.candidates import STORE_ACCELERATOR, STORE_CPU, TRAINER_CPU, options
from frostline.planning.choice import make_plan
from frostline.planning.plan import Plan
from frostline.planning.situation import Situation
from frostline.planning.whatif import vary

__all__ = (
    "SILENCE_S",
    "Observed",
    "Probe",
    "Rates",
    "Replan",
    "as_measured",
    "better",
    "is_news",
    "learn",
    "mixture_in_words",
    "probe",
)

SILENCE_S = 3.0
"""A link that nobody uses much is tried anew after so long, with real work."""
# Measurements on a busy machine differ by a tenth; a change that gains little more would be undone by the next one.
_MIN_GAIN = 0.15
# Fewer bytes say more about one packet's luck than about the link.
_TELLING_BYTES = 128 << 10
# Two rates of a link within this factor are one rate, and within the smaller one no news.
_NEAR = 1.5
_NEWS = 1.1
# Such tries take so long on the link as it is known, and at most this share of its time.
_PROBE_S = 0.3
_PROBE_BYTES = (128 << 10, 1 << 20)
_PROBE_SHARE = 0.1
# Rows come in bursts, whole batches in order: only over so long, and so many, does their rate say what a side can do.
_TALLY_S = 10.0
_TALLY_ROWS = 128
# Of that time: what counts as waiting, and as having nothing to do.
_WAITING = 0.5
_FREE = 0.6
# The store's speed is taken for another one when it differs by this factor.
_OTHER_SPEED = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was measured between two looks at a running job.

    Attributes:
        seconds: seconds of wall clock.
        stalled_s: seconds of these in which the training loop waited.
        rows: rows that arrived, by way.
        transfer_bytes: bytes of large bodies.
        transfer_s: in which at least one of them was under way.
        busy_s: seconds of this process, shared out over its cores.
        allowed_bytes_per_s: bytes a second of the job's share of a control plane now; infinite where there is none.
    """

    seconds: float = 0.0
    stalled_s: float = 0.0
    rows: Mapping[Route, int] = field(default_factory=dict)
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    busy_s: float = 0.0
    allowed_bytes_per_s: float = math.inf

    @property
    def count(self) -> int:
        """Rows that arrived, whatever their way."""
        return sum(self.rows.values())

    def __add__(self, other: "Observed") -> "Observed":
        return Observed(
            seconds=self.seconds + other.seconds,
            stalled_s=self.stalled_s + other.stalled_s,
            rows={route: self.rows.get(route, 0) + other.rows.get(route, 0) for route in {**self.rows, **other.rows}},
            transfer_bytes=self.transfer_bytes + other.transfer_bytes,
            transfer_s=self.transfer_s + other.transfer_s,
            busy_s=self.busy_s + other.busy_s,
            allowed_bytes_per_s=other.allowed_bytes_per_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was learned so far, in place of what was profiled.

    Attributes:
        bytes_per_s: bytes a second of the link; None before it was seen.
        is_settled: the last two sights of the link agree.
        head_s: seconds a sample that the trainer spends beside the plan's own work there.
        store_speed: as a multiple of the profiled one.
        allowed_bytes_per_s: most that the job may move, whatever the link gives.
        tally: looks since the sides' speeds were last learned.
    """

    bytes_per_s: float | None = None
    is_settled: bool = True
    head_s: float = 0.0
    store_speed: float = 1.0
    allowed_bytes_per_s: float = math.inf
    tally: Observed = Observed()

    def link_bytes_per_s(self, profiled: Situation) -> float:
        """Bytes a second of the link, as it was seen last."""
        return profiled.link.bytes_per_s if self.bytes_per_s is None else self.bytes_per_s

    def is_held(self, profiled: Situation) -> bool:
        """Whether the job may move less than the link gives, so that a faster one would be no help."""
        return self.allowed_bytes_per_s < self.link_bytes_per_s(profiled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """Another plan, and in a sentence why."""

    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One request that tries the link: samples that are wanted anyway, by a way with more bytes."""

    route: Route
    rows: int


def learn(profiled: Situation, rates: Rates, seen: Observed) -> Rates:
    """What is known after another look.

    * The link's rate is that of the large bodies under way. One near the known rate is averaged with it; one that is
      far off replaces it, since links do change at once, and counts as settled when the next sight agrees.
    * What the trainer's process spends beyond the plan's own work is the loop and its head: it is the same
      whatever way a sample takes.
    * A share of a control plane is a thinner link: jobs that plan with their shares add up to what there is.
    * The store's speed shows while the loop waits and neither link nor trainer are busy: then the store works all
      the time, and what it did, at its profiled cost, over that time is its speed.

    Args:
        profiled: as it was measured before the job ran.
        rates: known until now.
        seen: the look.
    """
    rates = replace(_learn_link(rates, seen), allowed_bytes_per_s=seen.allowed_bytes_per_s)
    tally = rates.tally + seen
    if profiled.same_host or tally.seconds < _TALLY_S or tally.count < _TALLY_ROWS:
        return replace(rates, tally=tally)
    work = busy(replace(profiled, head_s=0.0), {route: rows / tally.count for route, rows in tally.rows.items()})
    head_s = _beside_s(profiled, work, tally) / tally.count
    return replace(rates, head_s=head_s, store_speed=_store_speed(rates, work, tally), tally=Observed())


def is_news(known: Rates | None, rates: Rates) -> bool:
    """Whether rates differ enough from those that a plan was last compared with; that takes a while."""
    if known is None or (known.head_s, known.store_speed) != (rates.head_s, rates.store_speed):
        return True
    pairs = (known.bytes_per_s, rates.bytes_per_s), (known.allowed_bytes_per_s, rates.allowed_bytes_per_s)
    return any(_differ(before, now) for before, now in pairs)


def _differ(before: float | None, now: float | None) -> bool:
    if before is None or now is None or math.isinf(before) or math.isinf(now):
        return before != now
    return not 1 / _NEWS < now / before < _NEWS


def as_measured(profiled: Situation, rates: Rates) -> Situation:
    """The situation with what was learned in place of what was profiled."""
    bytes_per_s = min(rates.link_bytes_per_s(profiled), rates.allowed_bytes_per_s)
    found = vary(profiled, bandwidth=bytes_per_s, store_speed=rates.store_speed)
    return found if profiled.same_host else replace(found, head_s=rates.head_s)


def busy(situation: Situation, shares: Mapping[Route, float]) -> dict[str, float]:
    """Seconds a sample that a mixture takes of each resource."""
    found = {option.candidate.route: option.seconds for option in options(situation)}
    names = next(iter(found.values()))
    return {name: sum(share * found[route][name] for route, share in shares.items()) for name in names}


def better(situation: Situation, shares: Mapping[Route, float]) -> Replan | None:
    """The best plan, where it gains more over the present mixture than noise would.

    Args:
        situation: as measured by now.
        shares: shares of the samples, by way, now.
    """
    plan = make_plan(situation)
    seconds = busy(situation, shares)
    limit = max(seconds, key=lambda name: seconds[name])
    if seconds[limit] <= 0:
        return None
    rate = 1 / seconds[limit]
    if plan.samples_per_s < (1 + _MIN_GAIN) * rate:
        return None
    gain = in_samples_per_s(plan.samples_per_s)
    reason = (
        f"{in_bytes(situation.link.bytes_per_s)}/s may cross the link, the mixture before would be held to "
        f"{in_samples_per_s(rate)} by the {limit}, this one has {gain}"
    )
    return Replan(plan=plan, reason=reason)


def probe(
    situation: Situation, shares: Mapping[Route, float], *, silent_s: float, is_settled: bool = True
) -> Probe | None:
    """A request that tries the link again, where a faster one would change the plan and none was seen for long.

    Args:
        situation: as measured by now.
        shares: shares of the samples, by way, now.
        silent_s: seconds since the link's rate was last seen.
        is_settled: the last two sights of it agree; else it is tried again at once.
    """
    rate = situation.link.bytes_per_s
    if math.isinf(rate) or (is_settled and silent_s < SILENCE_S):
        return None
    fast = vary(situation, bandwidth=math.inf)
    if better(fast, shares) is None:
        return None
    sizes = {option.candidate.route: option.candidate.wire_bytes_per_sample for option in options(situation)}
    route = max((route.route for route in make_plan(fast).mixture), key=lambda item: sizes[item])
    nbytes = min(max(rate * _PROBE_S, _PROBE_BYTES[0]), _PROBE_BYTES[1])
    if is_settled and silent_s < nbytes / rate / _PROBE_SHARE:
        return None
    return Probe(route=route, rows=max(1, math.ceil(nbytes / max(1, sizes[route]))))


def mixture_in_words(shares: Mapping[Route, float], cuts: Sequence[Cut]) -> str:
    """Such as ``70 % cut 5 (layer2) as fp16, 30 % cut 0 (encoded)``."""
    parts = []
    for route, share in sorted(shares.items(), key=lambda item: (-item[1], item[0])):
        codec = "" if route.codec == EXACT else f" as {route.codec}"
        parts.append(f"{share:.0%} cut {route.cut} ({cuts[route.cut].name}){codec}")
    return ", ".join(parts).replace("%", " %")


def _learn_link(rates: Rates, seen: Observed) -> Rates:
    if seen.transfer_bytes < _TELLING_BYTES or seen.transfer_s <= 0:
        return rates
    rate, known = seen.transfer_bytes / seen.transfer_s, rates.bytes_per_s
    if known is not None and 1 / _NEAR < rate / known < _NEAR:
        return replace(rates, bytes_per_s=math.sqrt(rate * known), is_settled=True)
    return replace(rates, bytes_per_s=rate, is_settled=False)


def _beside_s(profiled: Situation, work: Mapping[str, float], tally: Observed) -> float:
    """Seconds that the trainer spent beside the plan's own work."""
    if profiled.trainer.device != "cpu":
        return max(0.0, tally.seconds - tally.stalled_s)
    return max(0.0, tally.busy_s - tally.count * work.get(TRAINER_CPU, 0.0))


def _store_speed(rates: Rates, work: Mapping[str, float], tally: Observed) -> float:
    waits = tally.stalled_s >= _WAITING * tally.seconds
    others_are_free = max(tally.transfer_s, tally.busy_s) <= _FREE * tally.seconds
    if not (waits and others_are_free):
        return rates.store_speed
    speed = tally.count * max(work.get(STORE_CPU, 0.0), work.get(STORE_ACCELERATOR, 0.0)) / tally.seconds
    is_other = not 1 / _OTHER_SPEED < speed / rates.store_speed < _OTHER_SPEED
    return speed if is_other and speed > 0 else rates.store_speed
