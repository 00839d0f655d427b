"""Decides what holds a running job back, and how much faster it would be without that, by the time each part is busy.

The rule is the utilisation law of queueing networks (Denning and Buzen 1978): a part that is busy for a share ``u`` of
the time at a rate of ``r`` samples a second cannot do more than ``r / u``. The part that is busy all the time holds the
job back; without it the next busiest one would, so that the rate could grow to ``r / u`` of that.
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
    CACHE: "give it more (LoaderSettings.cache_bytes, cache_disk_bytes), or make room on its disk",
}

# A loop that waits less than this has what it needs; measurements on a busy machine differ by as much.
_LITTLE = 0.1
# A part that is busy for this share of the time has no room: batches come in bursts, and so does work.
_BUSY = 0.8
# Of a request's time: more is spent on the way than in the store.
_MOSTLY = 0.5
# One refusal in so many requests is a loop that tries how far it may go; more of them are what it waits for.
_OFTEN = 0.05
_MIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What was measured while batches came from the store side, and not from the cache.

    Attributes:
        seconds: seconds of wall clock.
        samples: samples that the loop took meanwhile.
        stall_s: seconds of these in which it waited.
        busy: share of the time in which each part worked, of ``NODE``, ``LINK`` and ``PROCESSORS``; those that were not
            measured are missing.
        requests: requests that were answered.
        request_s: mean seconds from sending a request to the end of its answer; 0 where there was none.
        round_trip_s: seconds of a small request; 0 within a process.
        refusals: requests that a quota refused.
        fetched_again: samples that came a second time, since the cache had no room to keep them.
        same_host: whether the node works on this machine's processors too.
        own_cores: share of this machine's processors that the job's own processes had, the node's among them where it
            is on this machine.
    """

    seconds: float
    samples: int
    stall_s: float
    busy: Mapping[str, float] = field(default_factory=dict)
    requests: int = 0
    request_s: float = 0.0
    round_trip_s: float = 0.0
    refusals: int = 0
    fetched_again: int = 0
    same_host: bool = False
    own_cores: float = 0.0

    @property
    def others(self) -> float:
        """Share of this machine's processors that other programs had."""
        return max(0.0, self.busy.get(PROCESSORS, 0.0) - self.own_cores)

    @property
    def waiting(self) -> float:
        """Share of the time in which the loop waited."""
        return min(1.0, self.stall_s / self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(ShownInNotebooks):
    """What holds a job back.

    Attributes:
        held_back_by: ``the store``, ``the node's compute``, ``the link``, ``the round trip``, ``this machine's
            processors``, ``a quota``, ``the cache``, ``the training loop``, or ``nothing yet``.
        says: the finding with its evidence, in one sentence.
        mend: the change that helps.
        gain: how many times as many samples a second there would be without it; 1 where nothing is to be gained.
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
    shares = {TRAINER: 1.0 - usage.waiting, **usage.busy}
    part = _held_back_by(usage)
    gain = _gain(part, usage, shares)
    return Diagnosis(
        held_back_by=part, says=_sentence(part, usage, shares, gain), mend=_MENDS[part], gain=gain, shares=shares
    )


def _held_back_by(usage: Usage) -> str:
    if usage.waiting < _LITTLE:
        return TRAINER
    if usage.refusals > _OFTEN * (usage.requests + usage.refusals):
        return QUOTA
    if usage.fetched_again > usage.samples // 2:
        return CACHE
    busy = dict(usage.busy)
    if usage.same_host and busy.get(PROCESSORS, 0.0) >= _BUSY:
        return PROCESSORS  # the node's compute is some of what they do
    part = max(busy, key=lambda name: busy[name], default=None)
    if part is not None and busy[part] >= _BUSY:
        return part
    return ROUND_TRIP if usage.round_trip_s > _MOSTLY * usage.request_s else STORE


def _gain(part: str, usage: Usage, shares: Mapping[str, float]) -> float:
    """How many times as many samples a second the next busiest part allows."""
    if part == TRAINER:
        return 1.0
    if part == CACHE:
        return 1.0 / max(shares[TRAINER], 1e-3)  # features that are kept need none of the other parts
    if part == PROCESSORS and usage.others > _LITTLE:
        # Whatever else was timed here took longer because of them.
        return max(1.0, 1.0 / max(usage.own_cores, shares[TRAINER], 1e-3))
    others = [share for name, share in shares.items() if name != part]
    return max(1.0, 1.0 / max(*others, 1e-3))


def _sentence(part: str, usage: Usage, shares: Mapping[str, float], gain: float) -> str:
    rate = f"{in_rate(usage.samples / usage.seconds)} samples/s"
    if part == TRAINER:
        return (
            f"the training loop itself is the slowest part: it waits {in_percent(usage.waiting)} of the time, at {rate}"
        )
    busy = f"busy {in_percent(shares.get(part, 1.0))} of the time"
    evidence = {
        STORE: "no other part is busy all the time",
        ROUND_TRIP: f"{in_seconds(usage.round_trip_s)} of the {in_seconds(usage.request_s)} that a request takes",
        QUOTA: f"it refused {usage.refusals} requests, and {usage.requests} were answered",
        CACHE: f"it had no room, and {usage.fetched_again} samples were fetched again",
        PROCESSORS: f"{busy}, {in_percent(usage.others)} by other programs",
    }.get(part, busy)
    then = f"up to {in_times(gain)} as many" if gain >= 1 + _LITTLE else "another part would hold it back as much"
    return (
        f"held back by {part} ({evidence}): the loop waits {in_percent(usage.waiting)} of the time for what comes from "
        f"the store side, at {rate}; without that {then}"
    )
