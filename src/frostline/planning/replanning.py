"""Decides what measurements of a running job say: what holds it back, and whether another plan is worth it.

The rules are the utilisation and the bottleneck law of queueing networks (Denning and Buzen 1978): a part that works
``d`` seconds for each sample cannot do more than ``1 / d`` samples a second. The part that is busy all the time holds
the job back; without it the one with the next largest ``d`` would. Work is divided by the samples that it was done
for, not by those that the loop took: a window that fills has the node and the link do more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from frostline.core import EXACT, Cut, Route
from frostline.core.errors import SettingError
from frostline.core.nouns import ShownInNotebooks
from frostline.core.units import in_bytes, in_percent, in_rate, in_samples_per_s, in_seconds, in_times
from frostline.planning.candidates import STORE_ACCELERATOR, STORE_CPU, TRAINER_CPU, options, sides
from frostline.planning.plan import Plan, make_plan
from frostline.planning.situation import Situation
from frostline.profiles import Profile

__all__ = (
    "CACHE",
    "LINK",
    "MEASURING_SHARE",
    "NODE",
    "NOTHING_YET",
    "PROCESSORS",
    "QUOTA",
    "ROUND_TRIP",
    "SHARE",
    "SILENCE_S",
    "STORE",
    "TRAINER",
    "Diagnosis",
    "Observed",
    "Probe",
    "Rates",
    "Replan",
    "Usage",
    "as_measured",
    "diagnose",
    "find_better",
    "is_news",
    "is_worth_measuring",
    "is_worth_sending",
    "is_worth_trying",
    "learn",
    "mixture_in_words",
    "probe",
    "vary",
)


TRAINER = "the training loop"
STORE = "the store"
NODE = "the node's compute"
LINK = "the link"
ROUND_TRIP = "the round trip"
PROCESSORS = "this machine's processors"
QUOTA = "a quota"
SHARE = "its share"
CACHE = "the cache"
NOTHING_YET = "nothing yet"

_MENDS: Mapping[str, str] = {
    TRAINER: "nothing is wrong; only a faster accelerator or a smaller head would make it faster",
    STORE: "give the store more bandwidth, or the node more memory to read ahead (--read-threads, --local-tier)",
    NODE: "add a node (--near again), give it an accelerator (--device), or allow a faster engine (--accuracy bf16)",
    LINK: "send less, by a narrower codec (--accuracy bf16 or int8), or more layers in front of the frost line",
    ROUND_TRIP: "let more requests be under way (LoaderSettings.max_requests and window_bytes)",
    PROCESSORS: "end what else runs here, give this process more cores, or let a node on another machine do the work",
    QUOTA: "ask the node's operator for a larger quota of this tenant",
    SHARE: "give the job or its tenant a greater weight, or the control plane a greater capacity",
    CACHE: "give it more (LoaderSettings.cache_bytes, cache_disk_bytes), or free space on its disk",
}

# A loop that waits less than this has what it needs; measurements on a busy machine differ by as much.
_LITTLE = 0.1
# A part that is busy for this share of the time has no capacity left: batches come in bursts, and so does work.
_BUSY = 0.8
# Requests wait for their turn for more than so much of the time.
_MOSTLY = 0.5
# What runs frozen layers, and how it is said of each that it runs eager PyTorch without need.
_COMPUTING: Mapping[str, str] = {
    NODE: "the node runs eager PyTorch, and no faster engine was tried there",
    PROCESSORS: "frozen layers run here in eager PyTorch, and no faster engine was tried",
}
# One refusal in so many requests is a loop that tries how far it may go; more of them are what it waits for.
_OFTEN = 0.05
_MIN_S = 1.0
# Beyond this nobody knows: what is left takes so little that it was not measured.
_MAX_GAIN = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What was measured while batches came from the store side, and not from the cache.

    Attributes:
        seconds: seconds of wall clock.
        samples: samples that the loop took meanwhile.
        arrived: samples that came from the store side meanwhile; while the window fills these are more.
        stall_s: seconds in which the loop waited.
        busy: share of the time in which each part worked, of ``NODE``, ``LINK`` and ``PROCESSORS``, of these also that
            in which the job waited for them; those that were not measured are missing.
        costs_s: seconds that each of them works for one sample, whatever else it does; of ``PROCESSORS`` those of the
            job's own processes, divided by the number of cores. Those that did nothing are missing.
        requests: requests that were answered.
        request_s: mean seconds from sending a request to the end of its answer; 0 where there was none.
        round_trip_s: seconds of a small request; 0 within a process.
        refusals: requests that a quota refused.
        held_s: seconds in which requests waited for the job's share of a control plane.
        fetched_again: samples that came a second time, since the cache had no space to keep them.
        same_host: True if the node works on this machine's processors too.
        loop_cores_s: seconds of the cost of ``PROCESSORS`` that are the loop's own thread's.
        others: share of this machine's processors that other programs had, not the node on this machine.
        untried: names of the parts, of ``NODE`` and ``PROCESSORS``, that run frozen layers in eager PyTorch although
            the accuracy allows other engines, of which nobody has tried one.
    """

    seconds: float
    samples: int
    arrived: int
    stall_s: float
    busy: Mapping[str, float] = field(default_factory=dict)
    costs_s: Mapping[str, float] = field(default_factory=dict)
    requests: int = 0
    request_s: float = 0.0
    round_trip_s: float = 0.0
    refusals: int = 0
    held_s: float = 0.0
    fetched_again: int = 0
    same_host: bool = False
    loop_cores_s: float = 0.0
    others: float = 0.0
    untried: tuple[str, ...] = ()

    @property
    def waiting(self) -> float:
        """Share of the time in which the loop waited."""
        return min(1.0, self.stall_s / self.seconds)

    @property
    def loop_s(self) -> float:
        """Seconds that the loop itself takes for one sample."""
        return (1.0 - self.waiting) * self.seconds / self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(ShownInNotebooks):
    """What holds a job back.

    Attributes:
        held_back_by: ``the store``, ``the node's compute``, ``the link``, ``the round trip``, ``this machine's
            processors``, ``a quota``, ``its share`` of a control plane, ``the cache``, ``the training loop``, or
            ``nothing yet``.
        says: the finding with its evidence, in one sentence.
        mend: the change that helps.
        gain: factor by which samples a second would rise without it, 100 for that and more; 1 where
            nothing is to be gained.
        shares: share of the time in which each part that was measured was busy.
        idle: share of the time in which the other side, which could compute frozen layers, had nothing to do.
        untried: the part that holds the job back, if it runs frozen layers in eager PyTorch and no engine was tried.
    """

    held_back_by: str
    says: str
    mend: str | None = None
    gain: float = 1.0
    shares: Mapping[str, float] = field(default_factory=dict)
    idle: Mapping[str, float] = field(default_factory=dict)
    untried: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Diagnosis(held back by {self.held_back_by}, {in_times(self.gain)} without it)"

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "finding", self.says
        if self.mend is not None:
            yield "what helps", self.mend
        for part, share in self.shares.items():
            yield f"{part} busy", in_percent(share)
        for part in self.untried:
            yield f"{part}, engine", _COMPUTING.get(part, part)

    def __str__(self) -> str:
        return self.says if self.mend is None else f"{self.says}. What to do: {self.mend}"

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "shares": dict(self.shares), "idle": dict(self.idle)}


def diagnose(usage: Usage | None) -> Diagnosis:
    """Name the part that holds a job back.

    Args:
        usage: the usage, measured while it ran; None where it has not run for long enough.
    """
    if usage is None or usage.seconds < _MIN_S or not usage.samples:
        return Diagnosis(held_back_by=NOTHING_YET, says="too few batches came from the store side to say what is slow")
    part = _held_back_by(usage)
    gain = _gain(part, usage)
    shares = {TRAINER: 1.0 - usage.waiting, **usage.busy}
    idle, untried = _idle(part, usage), _untried(part, usage)
    also = [f"; {name} had nothing to do {in_percent(share)} of the time" for name, share in idle.items()]
    also += [f"; {_COMPUTING[name]}" for name in untried]
    return Diagnosis(
        held_back_by=part,
        says="".join([_sentence(part, usage, shares, gain), *also]),
        mend=_MENDS[part],
        gain=gain,
        shares=shares,
        idle=idle,
        untried=untried,
    )


def _idle(part: str, usage: Usage) -> dict[str, float]:
    """How long what computes had nothing to do, where it could have had a part of what holds the job back."""
    other = {LINK: NODE, PROCESSORS: NODE, NODE: PROCESSORS}.get(part, "")
    idle = 1.0 - usage.busy.get(other, 1.0)
    return {other: idle} if idle > _LITTLE and not usage.same_host else {}


def _untried(part: str, usage: Usage) -> tuple[str, ...]:
    """What computes and holds the job back by an engine that need not be the fastest."""
    is_beside = part == PROCESSORS and usage.same_host
    return tuple(name for name in usage.untried if name == part or (is_beside and name == NODE))


def _held_back_by(usage: Usage) -> str:
    if usage.waiting < _LITTLE:
        return TRAINER
    if usage.refusals > _OFTEN * (usage.requests + usage.refusals):
        return QUOTA
    if usage.held_s > _MOSTLY * usage.seconds:
        return SHARE
    if usage.fetched_again > usage.samples // 2:
        return CACHE
    busy = dict(usage.busy)
    if usage.same_host and busy.get(PROCESSORS, 0.0) >= _BUSY:
        return PROCESSORS  # the node's compute is some of what they do
    part = max(busy, key=lambda name: busy[name], default=None)
    if part is not None and busy[part] >= _BUSY:
        return part
    return ROUND_TRIP if usage.round_trip_s > _in_store_s(usage) else STORE


def _in_store_s(usage: Usage) -> float:
    """Seconds of a request that neither its way nor the work of the parts explains."""
    rows = usage.arrived / max(1, usage.requests)
    worked_s = rows * sum(cost for part, cost in usage.costs_s.items() if part != PROCESSORS)
    return max(0.0, usage.request_s - usage.round_trip_s - worked_s)


def _gain(part: str, usage: Usage) -> float:
    """How many times as many samples a second the part with the next largest cost allows."""
    per_s = (usage.samples if part == TRAINER else max(usage.samples, usage.arrived)) / usage.seconds
    if part == LINK:  # a job's first requests are few and short, and do not fill it
        per_s = max(per_s, 1.0 / usage.costs_s[LINK]) if usage.costs_s.get(LINK) else per_s
    max_s = max(_left_s(part, usage).values(), default=0.0)
    return max(1.0, 1.0 / max(per_s * max_s, 1.0 / _MAX_GAIN))


def _left_s(part: str, usage: Usage) -> dict[str, float]:
    """What each part still takes for a sample where one no longer holds the job back."""
    left = {TRAINER: usage.loop_s, **usage.costs_s}
    if part == TRAINER and PROCESSORS in left:
        left[PROCESSORS] = max(0.0, left[PROCESSORS] - usage.loop_cores_s)
    if part == PROCESSORS and usage.others > _LITTLE:
        # Without other programs the job's own work would be left; a node beside it took longer because of them.
        return {name: cost for name, cost in left.items() if name != NODE or not usage.same_host}
    if part == CACHE:
        return {name: cost for name, cost in left.items() if name in (TRAINER, PROCESSORS)}
    # One request at a time is slow for its round trips, of which the first bytes of an answer take some more.
    gone = {part, LINK} if part == ROUND_TRIP else {part}
    return {name: cost for name, cost in left.items() if name not in gone}


def _sentence(part: str, usage: Usage, shares: Mapping[str, float], gain: float) -> str:
    rate = f"{in_rate(usage.samples / usage.seconds)} samples/s"
    then = _then(gain)
    if part == TRAINER:
        return (
            f"the training loop itself is the slowest part: it waits {in_percent(usage.waiting)} of the time, at "
            f"{rate}; if it took no time, {then}"
        )
    busy = f"busy {in_percent(shares.get(part, 1.0))} of the time"
    evidence = {
        STORE: "no other part is busy all the time",
        ROUND_TRIP: f"{in_seconds(usage.round_trip_s)} of the {in_seconds(usage.request_s)} that a request takes",
        QUOTA: f"it refused {usage.refusals} requests, and {usage.requests} were answered",
        SHARE: f"requests waited for it {in_percent(min(1.0, usage.held_s / usage.seconds))} of the time",
        CACHE: f"it had no space, and {usage.fetched_again} samples were fetched again",
        PROCESSORS: f"{busy}, {in_percent(usage.others)} by other programs",
    }.get(part, busy)
    return (
        f"held back by {part} ({evidence}): the loop waits {in_percent(usage.waiting)} of the time for what comes from "
        f"the store side, at {rate}; without that, {then}"
    )


def _then(gain: float) -> str:
    if gain < 1 + _LITTLE:
        return "another part would hold it back as much"
    return f"up to {in_times(gain)} this rate" if gain < _MAX_GAIN else "far more than can be measured now"


def vary(
    situation: Situation,
    *,
    bandwidth: float | None = None,
    store_speed: float | None = None,
    trainer_speed: float | None = None,
    nodes: int | None = None,
    epochs: int | None = None,
    trainer_memory: int | None = None,
    separate_machines: bool = False,
) -> Situation:
    """The situation with some figures changed; None leaves one as it is.

    Args:
        situation: the situation as measured.
        bandwidth: bandwidth of the link, bytes a second.
        store_speed: factor by which each node works faster than measured, reading included.
        trainer_speed: factor by which the trainer works faster than measured, the head included.
        nodes: number of nodes that work beside the store.
        epochs: number of epochs that the job takes.
        trainer_memory: bytes that the frozen layers left to the trainer may take.
        separate_machines: node and trainer have a machine each, as the one that they were measured on.

    Raises:
        SettingError: A figure makes no sense.
    """
    if trainer_memory is not None and trainer_memory < 1:
        raise SettingError(f"trainer_memory must be at least 1 byte, not {trainer_memory}")
    store, trainer = sides(situation)
    trainer_speed = _speed("trainer_speed", trainer_speed)
    return replace(
        situation,
        link=situation.link if bandwidth is None else replace(situation.link, bytes_per_s=bandwidth),
        store=_faster(store, _speed("store_speed", store_speed)),
        trainer=_faster(trainer, trainer_speed),
        head_s=situation.head_s / trainer_speed,
        nodes=situation.nodes if nodes is None else nodes,
        trainer_memory_bytes=situation.trainer_memory_bytes if trainer_memory is None else trainer_memory,
        epochs=situation.epochs if epochs is None else epochs,
        same_host=situation.same_host and not separate_machines,
    )


def _speed(name: str, speed: float | None) -> float:
    if speed is None:
        return 1.0
    if not speed > 0:
        raise SettingError(f"{name} is how many times as fast as measured, so it must be above 0, not {speed}")
    return speed


def _faster(profile: Profile, speed: float) -> Profile:
    """The profile of hardware so many times as fast, which is other hardware by name too."""
    if speed == 1:
        return profile
    return replace(
        profile,
        hardware=f"{profile.hardware}, {speed:g} times as fast",
        read_s=profile.read_s / speed,
        cuts=tuple(replace(cut, seconds=cut.seconds / speed, spread_s=cut.spread_s / speed) for cut in profile.cuts),
        codecs=tuple(
            replace(
                codec,
                encode_s=codec.encode_s / speed,
                decode_s=codec.decode_s / speed,
                spread_s=codec.spread_s / speed,
            )
            for codec in profile.codecs
        ),
    )


MEASURING_SHARE = 0.05
"""Of the time that a job has left: what measuring may take of it."""
# A profile runs three batches of sixteen samples on each side and packs a few samples with every codec: about the time
# of this many samples of real work, and this many seconds beside it (``benchmarks/first_step.py`` at commit 84d6b10c).
_SAMPLES = 64
_SECONDS = 2.0


def is_worth_measuring(*, samples_left: int, samples_per_s: float) -> bool:
    """Whether both sides and the link are measured for a plan.

    Args:
        samples_left: number of samples that are still to be computed.
        samples_per_s: the rate at which they were computed until now; above 0.
    """
    return _SECONDS + _SAMPLES / samples_per_s <= MEASURING_SHARE * samples_left / samples_per_s


# A trial runs the reference on some eights of samples, and the engine on as many; the usual one takes a third of the
# time on networks of convolutions, and is expected to take this much less on any
# (``benchmarks/results/2026-11-21-engines.md``).
_TRIED_SAMPLES = 48
_TRIED_S = 1.0
_SAVED = 0.4
# Of a job without them, the longest that weights may be on their way: a little at its end is worth no upload.
_SENT = 0.8


def is_worth_trying(*, samples_left: int, samples_per_s: float, speed_up: float | None = None) -> bool:
    """Whether another engine is tried on the node, which a job must win back.

    Args:
        samples_left: number of samples that are still to be computed.
        samples_per_s: the rate at which they were computed until now; above 0.
        speed_up: speed of an engine that was tried on hardware like that of the node, times the reference's; None where
            none was, and it is expected to be as fast as the usual one on other networks.
    """
    saved = _SAVED if speed_up is None else 1 - 1 / speed_up
    return _TRIED_S + _TRIED_SAMPLES / samples_per_s <= saved * samples_left / samples_per_s


def is_worth_sending(*, needed_s: float, samples_left: int, samples_per_s: float) -> bool:
    """Whether weights that a node lacks are sent to it, of which the job must still have something when they are there.

    Args:
        needed_s: seconds that they need on the link.
        samples_left: number of samples that are still to be computed.
        samples_per_s: the rate of the trainer, which computes them meanwhile; above 0.
    """
    return needed_s + _TRIED_S <= _SENT * samples_left / samples_per_s


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
        transfer_s: the time in which at least one of them was under way.
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
        store_speed: the store speed as a multiple of the profiled one.
        allowed_bytes_per_s: the most that the job may move, whatever the link gives.
        tally: counts of what was seen since the sides' speeds were last learned.
        is_steady: no more and no less could cross all that time, as far as that was seen.
        done_per_s: samples a second that came before, by the present mixture while as much could cross; 0 where that
            was not seen.
    """

    bytes_per_s: float | None = None
    is_settled: bool = True
    head_s: float = 0.0
    store_speed: float = 1.0
    allowed_bytes_per_s: float = math.inf
    tally: Observed = Observed()
    is_steady: bool = True
    done_per_s: float = 0.0

    def link_bytes_per_s(self, profiled: Situation) -> float:
        """Bytes a second of the link, as it was seen last."""
        return profiled.link.bytes_per_s if self.bytes_per_s is None else self.bytes_per_s

    def is_held(self, profiled: Situation) -> bool:
        """Whether the job may move less than the link gives, so that a faster one would be no help."""
        return self.allowed_bytes_per_s < self.link_bytes_per_s(profiled)

    def is_reliable(self, profiled: Situation) -> bool:
        """Whether what may cross is known: a share that binds is, however much the link beneath it varies."""
        return self.is_settled or self.is_held(profiled)

    @property
    def crossing_bytes_per_s(self) -> float:
        """Bytes a second that may cross, as far as they were seen; infinite before."""
        return min(math.inf if self.bytes_per_s is None else self.bytes_per_s, self.allowed_bytes_per_s)

    def without_mixture(self) -> "Rates":
        """What stays known where another mixture is dealt from now on."""
        return replace(self, tally=Observed(), is_steady=True, done_per_s=0.0)


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
    * The store's speed shows while the loop waits, neither link nor trainer are busy, and no share holds requests:
      then the store works all the time, and what it did, at its profiled cost, over that time is its speed.
    * What the mixture did it can do, whatever the costs say that were learned, for as long as as much may cross.

    Args:
        profiled: the situation as it was measured before the job ran.
        rates: the rates, known until now.
        seen: the look.
    """
    before, rates = rates, replace(_learn_link(rates, seen), allowed_bytes_per_s=seen.allowed_bytes_per_s)
    if _has_changed(_may_cross(profiled, before), _may_cross(profiled, rates)):
        rates = replace(rates, is_steady=False, done_per_s=0.0)
    tally = rates.tally + seen
    if profiled.same_host or tally.seconds < _TALLY_S or tally.count < _TALLY_ROWS:
        return replace(rates, tally=tally)
    work = resource_seconds(
        replace(profiled, head_s=0.0), {route: rows / tally.count for route, rows in tally.rows.items()}
    )
    return replace(
        rates.without_mixture(),
        head_s=_beside_s(profiled, work, tally) / tally.count,
        store_speed=_store_speed(rates, work, tally),
        done_per_s=tally.count / tally.seconds if rates.is_steady else 0.0,
    )


def is_news(known: Rates | None, rates: Rates) -> bool:
    """Whether rates differ enough from those that a plan was last compared with; that takes a while."""
    if known is None or (known.head_s, known.store_speed) != (rates.head_s, rates.store_speed):
        return True
    return _has_changed(known.crossing_bytes_per_s, rates.crossing_bytes_per_s)


def _has_changed(before: float, now: float) -> bool:
    """Whether two rates at which bytes may cross differ by more than the noise."""
    if math.isinf(before) or math.isinf(now):
        return before != now
    return not 1 / _NEWS < now / before < _NEWS


def as_measured(profiled: Situation, rates: Rates) -> Situation:
    """The situation with what was learned in place of what was profiled."""
    found = vary(profiled, bandwidth=_may_cross(profiled, rates), store_speed=rates.store_speed)
    return found if profiled.same_host else replace(found, head_s=rates.head_s)


def _may_cross(profiled: Situation, rates: Rates) -> float:
    return min(rates.link_bytes_per_s(profiled), rates.allowed_bytes_per_s)


def resource_seconds(situation: Situation, shares: Mapping[Route, float]) -> dict[str, float]:
    """Seconds a sample that a mixture takes of each resource."""
    found = {option.candidate.route: option.seconds for option in options(situation)}
    names = next(iter(found.values()))
    return {name: sum(share * found[route][name] for route, share in shares.items()) for name in names}


def find_better(situation: Situation, shares: Mapping[Route, float], *, done_per_s: float = 0.0) -> Replan | None:
    """The best plan, where it gains more over the present mixture than noise would.

    Args:
        situation: the situation as measured by now.
        shares: shares of the samples, by way, now.
        done_per_s: see ``Rates``.
    """
    plan = make_plan(situation)
    seconds = resource_seconds(situation, shares)
    limit = max(seconds, key=lambda name: seconds[name])
    if seconds[limit] <= 0:
        return None
    rate = 1 / seconds[limit]
    if plan.samples_per_s < (1 + _MIN_GAIN) * max(rate, done_per_s):
        return None
    held = f"would be held to {in_samples_per_s(rate)} by the {limit}"
    before = held if rate >= done_per_s else f"had {in_samples_per_s(done_per_s)}"
    reason = (
        f"{in_bytes(situation.link.bytes_per_s)}/s may cross the link, the mixture before {before}, this one has "
        f"{in_samples_per_s(plan.samples_per_s)}"
    )
    return Replan(plan=plan, reason=reason)


def probe(
    situation: Situation, shares: Mapping[Route, float], *, silent_s: float, is_settled: bool = True
) -> Probe | None:
    """A request that tries the link again, where a faster one would change the plan and none was seen for long.

    Args:
        situation: the situation as measured by now.
        shares: shares of the samples, by way, now.
        silent_s: seconds since the link's rate was last seen.
        is_settled: the last two sights of it agree; else it is tried again at once.
    """
    rate = situation.link.bytes_per_s
    if math.isinf(rate) or (is_settled and silent_s < SILENCE_S):
        return None
    fast = vary(situation, bandwidth=math.inf)
    if find_better(fast, shares) is None:
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
    held_s = tally.transfer_bytes / tally.allowed_bytes_per_s
    others_are_free = max(tally.transfer_s, tally.busy_s, held_s) <= _FREE * tally.seconds
    if not (waits and others_are_free):
        return rates.store_speed
    speed = tally.count * max(work.get(STORE_CPU, 0.0), work.get(STORE_ACCELERATOR, 0.0)) / tally.seconds
    is_other = not 1 / _OTHER_SPEED < speed / rates.store_speed < _OTHER_SPEED
    return speed if is_other and speed > 0 else rates.store_speed
