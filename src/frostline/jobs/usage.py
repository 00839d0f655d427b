"""Measures how busy each part of a running job is, while batches come from the store side and not from the cache."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from frostline.core.errors import FrostlineError
from frostline.core.events import BatchDelivered, EpochFinished, EpochStarted, Event
from frostline.core.system import cores_busy_s, threads_waited_s, usable_cores
from frostline.engines.machine import host_digest
from frostline.jobs.statistics import StatisticsCollector
from frostline.planning.replanning import LINK, NODE, PROCESSORS, Usage
from frostline.transport import Transport

if TYPE_CHECKING:
    from frostline.control.follower import ControlFollower

__all__ = ("UsageMeter",)

# The first batches fill the pipe, and a job of a second needs no diagnosis.
_SETTLED_S = 1.0
# A pass that ends while the node is being looked at waits so long for the answer.
_ENDS_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """What was done until a moment, or between two of them."""

    at_s: float = 0.0
    taken_at_s: float = 0.0
    samples: int = 0
    from_cache: int = 0
    arrived: int = 0
    payload_bytes: int = 0
    stall_s: float = 0.0
    answered: int = 0
    answering_s: float = 0.0
    quota_refusals: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    held_s: float = 0.0
    cores_busy_s: float = 0.0
    cores_s: float = 0.0
    process_s: float = 0.0
    waited_s: float = 0.0
    loop_s: float = 0.0

    def __add__(self, other: "_Counts") -> "_Counts":
        return _Counts(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def __sub__(self, other: "_Counts") -> "_Counts":
        return _Counts(**{name: getattr(self, name) - getattr(other, name) for name in _NAMES})


_NAMES = tuple(field.name for field in fields(_Counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeLook:
    """What a node has done until a moment, and where it works."""

    at_s: float
    totals: dict[str, Any]
    cpu_s: float
    cores: int
    is_here: bool
    round_trip_s: float
    """Seconds of the shorter of two small requests: the other one may have had to connect first."""


class UsageMeter:
    """Looks at the job's counters as passes begin and end, from a second after the first on. Safe for several threads.

    Args:
        transport: way to the nodes, whose counters and connections are read.
        collector: collector that counts what the job does, and sees its loop.
        rejected: function that gives the number of samples that the cache had no space for.
        follower: follower that keeps the job's requests to its share of a control plane; None where there is none.
        has_own_process: the node works in a process of its own, and not in this one.
        untried: function that gives the parts whose engines nobody tried; see ``Usage``.
    """

    def __init__(
        self,
        transport: Transport,
        collector: StatisticsCollector,
        rejected: Callable[[], int],
        follower: "ControlFollower | None",
        *,
        has_own_process: bool,
        untried: Callable[[], tuple[str, ...]],
    ) -> None:
        self._transport = transport
        self._collector = collector
        self._rejected = rejected
        self._follower = follower
        self._has_own_process = has_own_process
        self._untried = untried
        self._lock = threading.Lock()
        self._born_s = math.inf  # when the first pass began
        self._pass = 0  # grows as passes begin and end
        self._timer: threading.Timer | None = None
        self._epochs: set[int] = set()
        self._begun: _Counts | None = None
        self._done = _Counts()
        self._first: _NodeLook | None = None
        self._cores = _CoreWaits()

    def __call__(self, event: Event) -> None:
        """Take the beginning or the end of a pass, or now and then a batch of it; for the loop's thread."""
        now_s = time.monotonic()
        if isinstance(event, EpochStarted):
            with self._lock:
                self._epochs.add(event.epoch)
                self._born_s = min(self._born_s, now_s)
                self._pass += 1
                is_settled = now_s - self._born_s >= _SETTLED_S
                self._begun = self._counts() if is_settled else None
            if self._first is None or not is_settled:
                self._timer = threading.Timer(max(0.0, self._born_s + _SETTLED_S - now_s), self._begin, (self._pass,))
                self._timer.name, self._timer.daemon = "frostline-usage", True
                self._timer.start()
        elif isinstance(event, BatchDelivered):
            self._cores.waited_s()  # threads end with their pass, and what they waited with them
        elif isinstance(event, EpochFinished):
            if self._timer is not None:
                self._timer.cancel()
                self._timer.join(_ENDS_WITHIN_S)
            with self._lock:
                self._done, self._begun = self._so_far(), None
                self._pass += 1

    def usage(self) -> Usage | None:
        """What was measured so far; None where too little came from the store side."""
        with self._lock:
            done, first, epochs = self._so_far(), self._first, len(self._epochs)
        fetched = done.samples - done.from_cache
        if fetched <= 0 or done.taken_at_s <= 0:
            return None
        # The loop is seen at its batches alone: since the last one it has waited or worked, and nobody knows how long.
        until_batch = done.taken_at_s / done.at_s
        now = None if first is None else self._look_at_node()
        looks = None if first is None or now is None else (first, now)
        own_s, is_beside = done.process_s, False
        if looks is not None and looks[1].is_here and self._has_own_process:
            own_s, is_beside = own_s + looks[1].cpu_s - looks[0].cpu_s, True
        return Usage(
            seconds=done.taken_at_s,
            samples=fetched,
            arrived=int(_flowed(done) * until_batch),
            stall_s=done.stall_s,
            busy=_shares(done, looks, is_beside=is_beside),
            costs_s=_costs_s(done, looks, own_s),
            requests=done.answered,
            request_s=done.answering_s / done.answered if done.answered else 0.0,
            round_trip_s=0.0 if looks is None else min(look.round_trip_s for look in looks),
            refusals=done.quota_refusals,
            held_s=done.held_s * until_batch,
            fetched_again=min(self._rejected(), fetched) if epochs > 1 else 0,
            same_host=now is not None and now.is_here,
            loop_cores_s=done.loop_s * done.at_s / done.cores_s / fetched if done.cores_s else 0.0,
            others=max(0.0, done.cores_busy_s - own_s) / done.cores_s if done.cores_s else 0.0,
            untried=self._untried(),
        )

    def _begin(self, number: int) -> None:
        """In a thread of its own: count from now on, unless the pass has ended, and look at the node first."""
        with self._lock:
            if number == self._pass and self._begun is None:
                self._begun = self._counts()
            is_first = self._begun is not None and self._first is None
        if is_first:
            self._first = self._look_at_node()

    def _so_far(self) -> _Counts:
        """What was counted in all passes; one that found everything in the cache does not count."""
        if self._begun is None:
            return self._done
        passed = self._counts() - self._begun
        return self._done + passed if passed.from_cache < passed.samples else self._done

    def _counts(self) -> _Counts:
        done = self._collector.statistics()
        crossed = self._transport.statistics()
        busy_s, all_s = cores_busy_s()
        return _Counts(
            at_s=time.monotonic(),
            taken_at_s=self._collector.loop.seen_at_s,
            samples=done.samples,
            from_cache=done.from_cache,
            stall_s=done.stall_s,
            answered=done.answered,
            answering_s=done.answering_s,
            quota_refusals=done.quota_refusals,
            arrived=sum(number for _, number in done.routed),
            payload_bytes=done.payload_bytes,
            transfer_bytes=crossed.transfer_bytes,
            transfer_s=crossed.transfer_s,
            held_s=0.0 if self._follower is None else self._follower.held_s,
            cores_busy_s=busy_s,
            cores_s=all_s,
            process_s=time.process_time(),
            waited_s=self._cores.waited_s(),
            loop_s=self._collector.loop.processor_s,
        )

    def _look_at_node(self) -> _NodeLook | None:
        try:
            asked_s = time.monotonic()
            health = self._transport.health()
            known_s = time.monotonic()
            statistics = self._transport.node_statistics()
            at_s = time.monotonic()
        except FrostlineError:  # it went away
            return None
        return _NodeLook(
            at_s=at_s,
            totals=statistics.get("totals", {}),
            cpu_s=float(statistics.get("cpu_s", 0.0)),
            cores=max(1, len(health.cores)),
            is_here=health.host == host_digest() and bool(set(health.cores).intersection(usable_cores())),
            round_trip_s=min(known_s - asked_s, at_s - known_s),
        )


class _CoreWaits:
    """Seconds in which this process waited for a core: of each stretch between two looks, those of one thread.

    It is the one that waited longest. Others wait at the same time, for cores or for each other. Safe for threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: dict[int, float] = {}
        self._sum_s = 0.0

    def waited_s(self) -> float:
        """Seconds so far."""
        with self._lock:
            now = threads_waited_s()
            grown_s = (waited_s - self._before.get(thread, 0.0) for thread, waited_s in now.items())
            self._sum_s += max(0.0, max(grown_s, default=0.0))
            self._before = now
            return self._sum_s


_Looks = tuple[_NodeLook, _NodeLook]


def _shares(done: _Counts, looks: _Looks | None, *, is_beside: bool) -> dict[str, float]:
    """Share of the time in which each part worked, or of the processors: in which the job used or waited for them.

    That others use them too is no harm where the job need not wait for it. Where that is not known, as of a node beside
    this process, they are as busy as all programs make them.
    """
    shares = {LINK: done.transfer_s / done.at_s}
    if done.cores_s:
        used = done.cores_busy_s / done.cores_s
        wanted = done.process_s / done.cores_s + done.waited_s / done.at_s
        shares[PROCESSORS] = used if is_beside or not done.waited_s else min(used, wanted)
    if looks is not None:
        shares[NODE] = _computed_s(*looks) / max(done.at_s, looks[1].at_s - looks[0].at_s)
    return {part: min(1.0, share) for part, share in shares.items()}


def _flowed(done: _Counts) -> int:
    """Samples that came, those of answers that are still under way by their bytes."""
    by_bytes = done.transfer_bytes * done.arrived / done.payload_bytes if done.payload_bytes else 0.0
    return max(done.arrived, int(by_bytes))


def _costs_s(done: _Counts, looks: _Looks | None, own_s: float) -> dict[str, float]:
    """Seconds that each part works for one sample."""
    costs_s = {}
    if done.transfer_bytes and done.arrived:
        costs_s[LINK] = done.transfer_s / done.transfer_bytes * done.payload_bytes / done.arrived
    if done.cores_s:
        costs_s[PROCESSORS] = own_s * done.at_s / done.cores_s / max(done.samples, _flowed(done))
    if looks is not None and (answered := _grown(*looks, "samples")):
        costs_s[NODE] = _computed_s(*looks) / answered
    return costs_s


def _computed_s(first: _NodeLook, now: _NodeLook) -> float:
    """Seconds in which a node computed between two looks: runs have all of its cores, and a decoder has one."""
    return _grown(first, now, "compute_s") + _grown(first, now, "decode_s") / now.cores


def _grown(first: _NodeLook, now: _NodeLook, name: str) -> float:
    return float(now.totals.get(name, 0.0)) - float(first.totals.get(name, 0.0))
