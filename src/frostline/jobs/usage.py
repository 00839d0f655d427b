"""Measures how busy each part of a running job is, while batches come from the store side and not from the cache."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from frostline.engines.machine.hardware import host_digest
from frostline.errors import FrostlineError
from frostline.events import EpochFinished, EpochStarted, Event
from frostline.jobs.statistics import JobStatistics
from frostline.planning.diagnosis import LINK, NODE, PROCESSORS, Usage
from frostline.processors import cores_busy_s, usable_cores
from frostline.transport.protocol import Transport

__all__ = ("UsageMeter",)

# The first batches fill the pipe, and a job of a second needs no diagnosis.
_SETTLED_S = 1.0
# A pass that ends while the node is being looked at waits so long for the answer.
_ENDS_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """What was done until a moment, or between two of them."""

    at_s: float = 0.0
    samples: int = 0
    from_cache: int = 0
    stall_s: float = 0.0
    answered: int = 0
    answering_s: float = 0.0
    quota_refusals: int = 0
    transfer_s: float = 0.0
    cores_busy_s: float = 0.0
    cores_s: float = 0.0
    process_s: float = 0.0

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


class UsageMeter:
    """Looks at the job's counters as passes begin and end, from a second after the first on. Safe for several threads.

    Args:
        transport: way to the nodes, whose counters and connections are read.
        statistics: gives the job's own counters.
        rejected: gives the number of samples that the cache had no room for.
        has_own_process: the node works in a process of its own, and not in this one.
    """

    def __init__(
        self,
        transport: Transport,
        statistics: Callable[[], JobStatistics],
        rejected: Callable[[], int],
        *,
        has_own_process: bool,
    ) -> None:
        self._transport = transport
        self._statistics = statistics
        self._rejected = rejected
        self._has_own_process = has_own_process
        self._lock = threading.Lock()
        self._born_s: float | None = None  # when the first pass began
        self._pass = 0  # number of the current one; 0 between two
        self._passes = 0
        self._timer: threading.Timer | None = None
        self._epochs: set[int] = set()
        self._begun: _Counts | None = None
        self._done = _Counts()
        self._first: _NodeLook | None = None

    def __call__(self, event: Event) -> None:
        """Take the beginning or the end of a pass."""
        if isinstance(event, EpochStarted):
            with self._lock:
                self._epochs.add(event.epoch)
                self._passes += 1
                self._pass, self._begun = self._passes, None
                if self._born_s is None:
                    self._born_s = time.monotonic()
                delay_s = max(0.0, self._born_s + _SETTLED_S - time.monotonic())
                self._timer = threading.Timer(delay_s, self._begin, (self._passes,))
            self._timer.name, self._timer.daemon = "frostline-usage", True
            self._timer.start()
        elif isinstance(event, EpochFinished):
            if self._timer is not None:
                self._timer.cancel()
                self._timer.join(_ENDS_WITHIN_S)
            with self._lock:
                self._done = self._so_far()
                self._pass, self._begun = 0, None

    def usage(self) -> Usage | None:
        """What was measured so far; None where too little came from the store side."""
        with self._lock:
            done, first, epochs = self._so_far(), self._first, len(self._epochs)
        fetched = done.samples - done.from_cache
        if fetched <= 0 or done.at_s <= 0:
            return None
        busy = {LINK: done.transfer_s / done.at_s}
        if done.cores_s:
            busy[PROCESSORS] = done.cores_busy_s / done.cores_s
        now = None if first is None else self._look_at_node()
        own_s = done.process_s
        if first is not None and now is not None:
            busy[NODE] = _computed_s(first, now) / done.at_s
            own_s += now.cpu_s - first.cpu_s if now.is_here and self._has_own_process else 0.0
        return Usage(
            seconds=done.at_s,
            samples=fetched,
            stall_s=done.stall_s,
            busy={part: min(1.0, share) for part, share in busy.items()},
            requests=done.answered,
            request_s=done.answering_s / done.answered if done.answered else 0.0,
            round_trip_s=0.0 if now is None else now.round_trip_s,
            refusals=done.quota_refusals,
            fetched_again=min(self._rejected(), fetched) if epochs > 1 else 0,
            same_host=now is not None and now.is_here,
            own_cores=min(1.0, own_s / done.cores_s) if done.cores_s else 0.0,
        )

    def _begin(self, number: int) -> None:
        """In a thread of its own: count from here on, unless the pass has ended."""
        with self._lock:
            if number == self._pass:
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
        done = self._statistics()
        busy_s, all_s = cores_busy_s()
        return _Counts(
            at_s=time.monotonic(),
            samples=done.samples,
            from_cache=done.from_cache,
            stall_s=done.stall_s,
            answered=done.answered,
            answering_s=done.answering_s,
            quota_refusals=done.quota_refusals,
            transfer_s=self._transport.statistics().transfer_s,
            cores_busy_s=busy_s,
            cores_s=all_s,
            process_s=time.process_time(),
        )

    def _look_at_node(self) -> _NodeLook | None:
        try:
            asked_s = time.monotonic()
            health = self._transport.health()
            at_s = time.monotonic()
            statistics = self._transport.node_statistics()
        except FrostlineError:  # it went away
            return None
        return _NodeLook(
            at_s=at_s,
            totals=statistics.get("totals", {}),
            cpu_s=float(statistics.get("cpu_s", 0.0)),
            cores=max(1, len(health.cores)),
            is_here=health.host == host_digest() and bool(set(health.cores).intersection(usable_cores())),
            round_trip_s=at_s - asked_s,
        )


def _computed_s(first: _NodeLook, now: _NodeLook) -> float:
    """Seconds in which a node computed between two looks: runs have all of its cores, and a decoder has one."""
    return _grown(first, now, "compute_s") + _grown(first, now, "decode_s") / now.cores


def _grown(first: _NodeLook, now: _NodeLook, name: str) -> float:
    return float(now.totals.get(name, 0.0)) - float(first.totals.get(name, 0.0))
