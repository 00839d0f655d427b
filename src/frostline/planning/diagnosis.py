"""Decides what holds a running job back, and how much faster it would be without that, by what each part's work takes.

The rules are the utilisation and the bottleneck law of queueing networks (Denning and Buzen 1978): a part that works
``d`` seconds for each sample cannot do more than ``1 / d`` samples a second. The part that is busy all the time holds
the job back; without it the one with the next largest ``d`` would. Work is divided by the samples that it was
done for, not by those that the loop took: a window that fills has the node and the link do more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from frostline.core.notebook import ShownInNotebooks
from frostline.core.units import in_percent, in_rate, in_seconds, in_times

__all__ = (
    "CACHE",
    "LINK",
    "NODE",
    "NOTHING_YET",
    "PROCESSORS",
    "QUOTA",
    "ROUND_TRIP",
    "SHARE",
    "STORE",
    "TRAINER",
    "Diagnosis",
    "Usage",
    "diagnose",
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
    STORE: "give the store more bandwidth, or the node more room to read ahead (--read-threads, --local-tier)",
    NODE: "add a node (--near again), give it an accelerator (--device), or allow a faster engine (--accuracy bf16)",
    LINK: "send less: allow a narrower codec (--accuracy bf16 or int8), or more layers in front of the frost line",
    ROUND_TRIP: "let more requests be under way (LoaderSettings.max_requests and window_bytes)",
    PROCESSORS: "end what else runs here, give this process more cores, or let a node on another machine do the work",
    QUOTA: "ask the node's operator for a larger quota of this tenant",
    SHARE: "give the job or its tenant a greater weight, or the control plane a greater capacity",
    CACHE: "give it more (LoaderSettings.cache_bytes, cache_disk_bytes), or make room on its disk",
}

# A loop that waits less than this has what it needs; measurements on a busy machine differ by as much.
_LITTLE = 0.1
# A part that is busy for this share of the time has no room: batches come in bursts, and so does work.
_BUSY = 0.8
# Requests wait for their turn for more than so much of the time.
_MOSTLY = 0.5
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
        fetched_again: samples that came a second time, since the cache had no room to keep them.
        same_host: whether the node works on this machine's processors too.
        loop_cores_s: seconds of the cost of ``PROCESSORS`` that are the loop's own thread's.
        others: share of this machine's processors that other programs had, not the node on this machine.
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
        gain: how many times as many samples a second there would be without it, 100 for that and more; 1 where
            nothing is to be gained.
        shares: share of the time in which each part that was measured was busy.
    """

    held_back_by: str
    says: str
    mend: str | None = None
    gain: float = 1.0
    shares: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Diagnosis(held back by {self.held_back_by}, {in_times(self.gain)} without it)"

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "finding", self.says
        if self.mend is not None:
            yield "what helps", self.mend
        for part, share in self.shares.items():
            yield f"{part} busy", in_percent(share)

    def __str__(self) -> str:
        return self.says if self.mend is None else f"{self.says}: {self.mend}"

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "shares": dict(self.shares)}


def diagnose(usage: Usage | None) -> Diagnosis:
    """Name the part that holds a job back.

    Args:
        usage: measured while it ran; None where it has not run for long enough.
    """
    if usage is None or usage.seconds < _MIN_S or not usage.samples:
        return Diagnosis(held_back_by=NOTHING_YET, says="too few batches came from the store side to say what is slow")
    part = _held_back_by(usage)
    gain = _gain(part, usage)
    shares = {TRAINER: 1.0 - usage.waiting, **usage.busy}
    return Diagnosis(
        held_back_by=part, says=_sentence(part, usage, shares, gain), mend=_MENDS[part], gain=gain, shares=shares
    )


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
        CACHE: f"it had no room, and {usage.fetched_again} samples were fetched again",
        PROCESSORS: f"{busy}, {in_percent(usage.others)} by other programs",
    }.get(part, busy)
    return (
        f"held back by {part} ({evidence}): the loop waits {in_percent(usage.waiting)} of the time for what comes from "
        f"the store side, at {rate}; without that {then}"
    )


def _then(gain: float) -> str:
    if gain < 1 + _LITTLE:
        return "another part would hold it back as much"
    return f"up to {in_times(gain)} as many" if gain < _MAX_GAIN else "far more than can be measured now"
