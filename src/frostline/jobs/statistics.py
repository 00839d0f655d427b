"""Counts what a job did, logs its skipped samples, and explains what ran where and why, predicted and measured."""

import json
import math
import os
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core import EXACT, REFERENCE, Cut, FeatureBatch, Route, Skipped
from frostline.core.errors import TooManySkipped
from frostline.core.events import (
    BatchDelivered,
    EpochFinished,
    EpochStarted,
    Event,
    NodeLost,
    Observer,
    Replanned,
    RequestFinished,
    RequestHedged,
    RequestRetried,
    RowsNotFinite,
    SampleSkipped,
    SamplesLeftOut,
    SetupWarning,
    Tuned,
)
from frostline.core.nouns import ShownInNotebooks
from frostline.core.units import in_bytes, in_rate, in_samples_per_s, log_named, printable, warn_caller
from frostline.datasets.formats.left_out import log_losses
from frostline.datasets.manifest import refusal_of
from frostline.loaders.fetch import EngineChoice
from frostline.planning import Plan, Situation, explain
from frostline.planning.replanning import Diagnosis, diagnose
from frostline.transport import NodeUse

__all__ = (
    "Explanation",
    "JobStatistics",
    "JobTable",
    "LoopTimes",
    "SkipLog",
    "StatisticsCollector",
    "UseTeller",
    "sum_uses",
    "warn_user",
    "whereabouts",
)


Logged = Skipped | RowsNotFinite | NodeUse


class SkipLog:
    """Samples that could not be read, or are not finite, in whichever of a job's processes. Safe for all of them.

    Beside them what workers asked of nodes, which counts in the job's process.

    Processes that are forked share it, and those that ``multiprocessing`` starts. One that it reaches otherwise, such
    as over a network, can be told nothing: a ``None`` comes out of the pickle there.

    Args:
        handle: a file descriptor of the log that another process has made; None makes a new one.

    Attributes:
        close: let it go, in this process. What is appended afterwards is lost, and nothing is read.
    """

    def __init__(self, handle: int | None = None) -> None:
        if handle is None:
            handle = _new()
        self._handle = handle
        self.close = weakref.finalize(self, os.close, handle)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if get_spawning_popen() is None or not self.close.alive:
            return _nowhere, ()
        return _received, (DupFd(self._handle),)

    def append(self, found: Logged) -> None:
        """Tell all processes, this one too."""
        if self.close.alive:
            os.write(self._handle, json.dumps(asdict(found)).encode() + b"\n")

    def read(self, since: int) -> tuple[list[Logged], int]:
        """What was appended after the first ``since`` bytes, and where that ends: ``since`` of the next call."""
        if not self.close.alive or (size := os.fstat(self._handle).st_size) <= since:
            return [], since
        text = os.pread(self._handle, size - since, since)
        lines = text[: text.rfind(b"\n") + 1]  # a line may still be on its way
        return [_read(json.loads(line)) for line in lines.splitlines()], since + len(lines)


def _read(line: dict[str, Any]) -> Logged:
    if "url" in line:
        return NodeUse(**line)
    return RowsNotFinite(**line) if "rows" in line else Skipped(**line)


class UseTeller:
    """Tells a job's process what one of its workers asked of each node, once a second and at the end of each pass.

    Safe for several threads.

    Args:
        log: log that the job's process reads; None where it cannot be told.
        clock: function that returns the time in seconds.

    Attributes:
        counts: function that gives what was asked of each node so far; None before there is a way to the nodes.
    """

    def __init__(self, log: SkipLog | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Callable[[], tuple[NodeUse, ...]] | None = None
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[str, NodeUse] = {}
        self._told_at_s = -math.inf

    def __call__(self, event: Event) -> None:
        """Tell it where a pass has ended."""
        if isinstance(event, EpochFinished):
            self.tell()

    def take_batch(self, _: Route, __: FeatureBatch) -> None:
        """Tell it, unless that was done a moment ago."""
        if self._clock() - self._told_at_s >= _TOLD_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Tell what was asked since the last time."""
        if self._log is None or self.counts is None:
            return
        with self._lock:
            self._told_at_s = self._clock()
            for use in self.counts():
                known = self._told.get(use.url, NodeUse(url=use.url))
                self._told[use.url] = use
                change = replace(
                    use, trouble="", **{name: getattr(use, name) - getattr(known, name) for name in _COUNTS}
                )
                if change != NodeUse(url=use.url):
                    self._log.append(change)


def _new() -> int:
    """A file without a name, in memory where the system has such, to whose end all processes write."""
    if hasattr(os, "memfd_create"):
        import fcntl

        handle = os.memfd_create("frostline-skipped")
        fcntl.fcntl(handle, fcntl.F_SETFL, os.O_APPEND)  # so that lines of several processes do not overlap
        return handle
    with tempfile.TemporaryDirectory() as folder:  # which goes at once; the file stays as long as it is open
        return os.open(Path(folder, "skipped"), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)


def _received(handle: Any) -> SkipLog:
    return SkipLog(handle.detach())


def _nowhere() -> None:
    return None


_TOLD_EVERY_S = 1.0
_COUNTS = tuple(field.name for field in fields(NodeUse) if field.name not in ("url", "trouble"))


def sum_uses(parts: Iterable[Sequence[NodeUse]]) -> tuple[NodeUse, ...]:
    """What was asked of each node in one job after another; in trouble is what was so in the last one that asked it."""
    found: dict[str, NodeUse] = {}
    for use in chain.from_iterable(parts):
        found[use.url] = _sum_of(use, found.get(use.url, NodeUse(url=use.url)))
    return tuple(found.values())


def _sum_of(use: NodeUse, other: NodeUse) -> NodeUse:
    return replace(use, **{name: getattr(use, name) + getattr(other, name) for name in _COUNTS})


_LOG = log_named("frostline")
# Where Frostline's own code lies: a warning is about the call from outside it.
# A job of days has many, and each costs memory.
_TUNINGS = 100
# Of samples that a pass had to do without.
_LOST_NAMED = 3
# How the refusal of a tenant's quota begins (``node.tenants``).
_QUOTA = "tenant "


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatistics:
    """Counts of a job's work so far.

    Attributes:
        wire_bytes: store side to trainer, bodies and headers, measuring included.
        requests: exchanges with the node.
        retries: requests made again, because they failed.
        hedges: requests made a second time, because they were late.
        answered: requests whose answers came whole.
        answering_s: seconds from sending those to the ends of their answers, summed.
        damaged: answers that did not come as they were sent, by their checksums, and were asked for again.
        quota_refusals: requests that a quota of the node refused.
        samples: the samples, handed to the training loop.
        from_cache: samples of these that did not cross the network.
        routed: samples that arrived, by the way that they took.
        payload_bytes: bytes of the batches that arrived, as they were packed.
        codec_error: the largest relative error that a lossy codec made in any sample, as the sender measured it; 0
            where nothing was lost.
        stall_s: seconds in which the loop waited for a batch.
        loading_s: seconds of all passes over loaders, training included.
        fetching_s: seconds of these in passes in which nothing came from the cache.
        fetched: samples of the passes in which nothing came from the cache.
        skipped: samples that could not be read, by this process or by its loaders' workers.
        nonfinite: samples for which the frozen layers gave Inf or NaN, counted each time that they came.
        first_nonfinite: the first row with Inf or NaN, in words: its sample, cut, dtype and engine; empty if there is
            none.
        replans: changes of the plan while the job ran.
        tunings: changes of the windows' bounds that were kept; the last hundred of them.
        nodes: requests of this process, and of its loaders' workers, to each node, and their outcome; empty where there
            is only one node.
    """

    wire_bytes: int = 0
    requests: int = 0
    retries: int = 0
    hedges: int = 0
    answered: int = 0
    answering_s: float = 0.0
    damaged: int = 0
    quota_refusals: int = 0
    samples: int = 0
    from_cache: int = 0
    routed: tuple[tuple[Route, int], ...] = ()
    payload_bytes: int = 0
    codec_error: float = 0.0
    stall_s: float = 0.0
    loading_s: float = 0.0
    fetching_s: float = 0.0
    fetched: int = 0
    skipped: tuple[Skipped, ...] = ()
    nonfinite: int = 0
    first_nonfinite: str = ""
    replans: tuple[Replanned, ...] = ()
    tunings: tuple[Tuned, ...] = ()
    nodes: tuple[NodeUse, ...] = ()

    @property
    def fetched_per_s(self) -> float | None:
        """Samples a second in the passes in which nothing came from the cache; None before the first."""
        return self.fetched / self.fetching_s if self.fetched and self.fetching_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTimes:
    """The training loop, as far as it was seen: at its batches, and at the beginnings and ends of passes.

    Attributes:
        seen_at_s: seconds of a monotonic clock when it was seen last.
        processor_s: seconds that its thread ran on a processor in passes until then.
    """

    seen_at_s: float = 0.0
    processor_s: float = 0.0


class StatisticsCollector:
    """Counts, and passes events on. Safe for several threads.

    Args:
        on_event: function that is called with each event.
        max_skipped: samples that may be unreadable.
        refuses_changes: True if no object may have changed since it was listed.
        named: function that tells of a sample by its name; by default the object that it lies in tells of it.
        shared: file that other processes of the job share: what any of them cannot read counts here too. None for none.
    """

    def __init__(
        self,
        on_event: Observer,
        *,
        max_skipped: int,
        refuses_changes: bool = False,
        named: Callable[[SampleSkipped], SampleSkipped] | None = None,
        shared: SkipLog | None = None,
    ) -> None:
        self._on_event = on_event
        self._named = named
        self._shared = shared
        self._heard = 0
        self._untold: list[SampleSkipped | RowsNotFinite] = []
        self._refuses_changes = refuses_changes
        self._max_skipped = max_skipped
        self._lock = threading.Lock()
        self._skipped: dict[int, Skipped] = {}
        self._uses: dict[str, NodeUse] = {}
        self._routed: Counter[Route] = Counter()
        self._sums: Counter[str] = Counter()
        self._codec_error = self._stall_s = self._answering_s = self._loading_s = self._fetching_s = 0.0
        self._loop, self._loop_at_s = LoopTimes(), 0.0
        self._first_nonfinite = ""
        self._replans: list[Replanned] = []
        self._tunings: deque[Tuned] = deque(maxlen=_TUNINGS)

    def __call__(self, event: Event) -> None:
        """Count an event and pass it on, after what other processes could not read meanwhile.

        Raises:
            DataChanged: A sample has changed since it was listed, and none may.
            TooManySkipped: More samples are unreadable than allowed.
        """
        if isinstance(event, RowsNotFinite):  # from a training beside the store
            self.not_finite(event.rows, event.first)
            return
        if isinstance(event, SampleSkipped) and self._named is not None:
            event = self._named(event)
        with self._lock:
            self._count(event)
            self._hear()
            untold, self._untold = self._untold, []
            too_many = len(self._skipped) > self._max_skipped
        self._tell(untold)
        self._on_event(event)
        if isinstance(event, EpochFinished):
            self._tell_of_pass()
        if self._refuses_changes and isinstance(event, SampleSkipped) and event.changed:
            raise refusal_of(event.object)
        if too_many and isinstance(event, SampleSkipped):
            whose = "this process alone" if self._shared is None else "the job's process and its workers together"
            raise TooManySkipped(
                f"{len(self._skipped)} samples are unreadable and the job allows {self._max_skipped}, by the count of "
                f"{whose}; the last is {event.object} ({event.reason}); mend the data or raise max_skipped_fraction"
            )

    def _tell_of_pass(self) -> None:
        """Tell in one line which samples a pass had to do without."""
        with self._lock:
            lost = tuple(self._skipped.values())
        if lost:
            named = "; ".join(f"{skipped.object}: {skipped.reason}" for skipped in lost[:_LOST_NAMED])
            more = "; …" if len(lost) > _LOST_NAMED else ""
            count = f"{len(lost)} sample{'s' if len(lost) > 1 else ''}"
            self._on_event(SamplesLeftOut(count=len(lost), reason=f"left out of the pass: {count} ({named}{more})"))

    def tell(self) -> None:
        """Pass on what other processes and threads found since; for the loop's thread, in which observers are told."""
        with self._lock:
            self._hear()
            untold, self._untold = self._untold, []
        self._tell(untold)

    def _tell(self, untold: list[SampleSkipped | RowsNotFinite]) -> None:
        for event in untold:
            self._on_event(event)

    def close(self) -> None:
        """Hear other processes no more; the counts stay."""
        with self._lock:
            self._hear()
            if self._shared is not None:
                self._shared.close()

    def take_batch(self, route: Route, batch: FeatureBatch) -> None:
        """Count a batch as it came."""
        with self._lock:
            self._routed[route] += len(batch)
            self._sums["payload_bytes"] += batch.nbytes
            self._codec_error = max(self._codec_error, batch.error)

    def not_finite(self, rows: int, first: str) -> None:
        """Count rows with Inf or NaN; observers are told at the loop's next event.

        Args:
            rows: number of them.
            first: the first such row, in words.
        """
        found = RowsNotFinite(rows=rows, total=rows, first=first)
        with self._lock:
            if self._shared is None:
                self._count_nonfinite(found)
            else:  # it is heard like those of other processes
                self._shared.append(found)
                self._hear()

    def _count_nonfinite(self, found: RowsNotFinite) -> None:
        self._sums["nonfinite"] += found.rows
        self._first_nonfinite = self._first_nonfinite or found.first
        self._untold.append(replace(found, total=self._sums["nonfinite"]))

    def unreadable_ids(self) -> npt.NDArray[np.int64]:
        """Ids of the samples that turned out to be unreadable."""
        with self._lock:
            self._hear()
            return np.fromiter(self._skipped, np.int64, len(self._skipped))

    def with_workers(self, uses: Sequence[NodeUse]) -> tuple[NodeUse, ...]:
        """What this process asked of each node, and its workers too; a node that only they know stands behind."""
        with self._lock:
            self._hear()
            others = dict(self._uses)
        own = tuple(_sum_of(use, others.pop(use.url, NodeUse(url=use.url))) for use in uses)
        return (*own, *others.values())

    def statistics(self) -> JobStatistics:
        """The counts so far; ``wire_bytes`` and ``requests`` are the transport's to fill in."""
        with self._lock:
            self._hear()
            counted: dict[str, Any] = dict(self._sums)
            return JobStatistics(
                **counted,
                codec_error=self._codec_error,
                stall_s=self._stall_s,
                answering_s=self._answering_s,
                loading_s=self._loading_s,
                fetching_s=self._fetching_s,
                routed=tuple(sorted(self._routed.items())),
                skipped=tuple(self._skipped.values()),
                first_nonfinite=self._first_nonfinite,
                replans=tuple(self._replans),
                tunings=tuple(self._tunings),
            )

    @property
    def loop(self) -> LoopTimes:
        """The training loop as it was seen last."""
        return self._loop

    def _see_loop(self, event: Event) -> None:
        now_s = time.thread_time()
        ran_s = max(0.0, now_s - self._loop_at_s) if isinstance(event, BatchDelivered) else 0.0
        self._loop_at_s = now_s
        self._loop = LoopTimes(seen_at_s=time.monotonic(), processor_s=self._loop.processor_s + ran_s)

    def _count(self, event: Event) -> None:
        if isinstance(event, EpochStarted | BatchDelivered | EpochFinished):
            self._see_loop(event)
        match event:
            case SampleSkipped():
                skipped = Skipped(id=event.id, object=event.object, reason=event.reason, changed=event.changed)
                if self._shared is not None and event.id not in self._skipped:
                    self._shared.append(skipped)
                self._skipped[event.id] = skipped
            case RequestRetried() | RequestFinished() | RequestHedged():
                self._count_request(event)
            case BatchDelivered():
                self._sums["samples"] += event.samples
                self._sums["from_cache"] += event.from_cache
                self._stall_s += event.stall_s
            case EpochFinished():
                self._loading_s += event.seconds
                if not event.from_cache:
                    self._fetching_s += event.seconds
                    self._sums["fetched"] += event.samples
            case Replanned():
                self._replans.append(event)
            case Tuned() if event.is_kept:
                self._tunings.append(event)
            case _:
                pass

    def _count_request(self, event: RequestRetried | RequestFinished | RequestHedged) -> None:
        match event:
            case RequestRetried():
                self._sums["retries"] += 1
                self._sums["quota_refusals"] += event.reason.startswith(_QUOTA)
            case RequestFinished():
                self._sums["answered"] += 1
                self._answering_s += event.seconds
            case RequestHedged():
                self._sums["hedges"] += 1

    def _hear(self) -> None:
        """Count what other processes could not read since."""
        if self._shared is None:
            return
        found, self._heard = self._shared.read(self._heard)
        for item in found:
            if isinstance(item, RowsNotFinite):
                self._count_nonfinite(item)
            elif isinstance(item, NodeUse):
                self._uses[item.url] = _sum_of(self._uses.get(item.url, NodeUse(url=item.url)), item)
            elif item.id not in self._skipped:
                self._skipped[item.id] = item
                self._untold.append(
                    SampleSkipped(id=item.id, object=item.object, reason=item.reason, changed=item.changed)
                )


def warn_user(event: Event) -> None:
    """The default observer: a Python warning or a log line for events that a user should know.

    Python warns where a job is not made as it was asked for. Lost nodes, samples that were left out, and the first one
    that is not finite, are logged.
    """
    if isinstance(event, SamplesLeftOut | NodeLost):
        log_losses(event)
    elif isinstance(event, SetupWarning):
        warn_caller(event.reason)
    elif isinstance(event, RowsNotFinite) and event.total == event.rows:
        _LOG.warning("%s; more are counted by the job's statistics", event.first)


_UNDIVIDED = "no plan was measured: there is no network to divide"
_UNPLANNED = (
    "no plan was measured: the job is too short for measuring to pay, and began with all frozen layers at the node; "
    "LoaderSettings(measure_first=True) measures before it begins"
)
_BOTH_SIDES = (
    "node and trainer both ran the frozen layers: each request went to the side that was expected to be done with it "
    "first, by what both had done so far"
)


class JobTable(ShownInNotebooks):
    """How a job looks in a notebook: where each part of its work runs now."""

    @property
    def where(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a part of the work and where it runs now."""
        return ()

    def _rows(self) -> Sequence[tuple[str, str]]:
        return self.where


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(ShownInNotebooks):
    """The predicted speed beside the measured one; its text is for people, ``to_json`` for programs.

    Attributes:
        plan: the plan in force now; None for a plain loader.
        first_plan: plan that the job began with.
        situation: situation that the plan is made from, as measured by now.
        statistics: counts of what the job did.
        where: pairs of a part of the work and where it runs.
        engine: engine that runs the frozen layers at the node now.
        fallback: the reason why the network was not cut as it stands; None where it was.
        diagnosis: the part that holds the job back.
        are_both_sides: True if requests go to node and trainer as each is free, whatever was planned.
    """

    plan: Plan | None
    first_plan: Plan | None
    situation: Situation | None
    statistics: JobStatistics
    where: tuple[tuple[str, str], ...]
    engine: EngineChoice = field(default_factory=EngineChoice)
    fallback: str | None = None
    diagnosis: Diagnosis = field(default_factory=lambda: diagnose(None))
    are_both_sides: bool = False

    def __repr__(self) -> str:
        return f"Explanation({self.diagnosis.says}; {self.plan!r})"

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "held back by", self.diagnosis.held_back_by
        if self.plan is not None:
            yield "plan", self.plan.reason
        yield from self.where
        yield "measured", "; ".join(self._measured()).removeprefix("measured: ")

    def __str__(self) -> str:
        unplanned = _BOTH_SIDES if self.are_both_sides else _UNPLANNED if "head" in dict(self.where) else _UNDIVIDED
        lines = [str(self.diagnosis), unplanned if self.plan is None else explain(self.plan)]
        lines += [f"not cut as it stands: {self.fallback}"] if self.fallback else []
        lines += [f"{part}: {where}" for part, where in self.where]
        lines += [
            f"after {replan.at_s:.0f} s: {replan.before} -> {replan.after}, {replan.reason}" for replan in self._replans
        ]
        lines += [_tuned(tuning) for tuning in self.statistics.tunings[-1:]]
        return "\n".join(printable(line) for text in (*lines, *self._measured()) for line in text.split("\n"))

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        done = self.statistics
        return {
            "diagnosis": self.diagnosis.to_json(),
            "plan": None if self.plan is None else self.plan.to_json(),
            "fallback": self.fallback,
            "where": dict(self.where),
            "engine": {"name": self.engine.engine, "error": self.engine.error},
            "predicted": {"samples_per_s": self._predicted_per_s},
            "measured": {
                "samples": done.samples,
                "from_cache": done.from_cache,
                "routed": [{"cut": route.cut, "codec": route.codec, "samples": rows} for route, rows in done.routed],
                "samples_per_s": done.fetched_per_s,
                "wire_bytes": done.wire_bytes,
                "payload_bytes": done.payload_bytes,
                "codec_error": done.codec_error,
                "nonfinite": done.nonfinite,
                "first_nonfinite": done.first_nonfinite,
                "loading_s": done.loading_s,
                "stall_s": done.stall_s,
            },
            "replans": [asdict(replan) for replan in self._replans],
            "tunings": [asdict(tuning) for tuning in self.statistics.tunings],
            "nodes": [asdict(use) for use in done.nodes],
        }

    @property
    def _replans(self) -> Sequence[Any]:
        return self.statistics.replans

    @property
    def _predicted_per_s(self) -> float | None:
        """Of the plan that the job began with, while nothing comes from the cache; None where it has no bound."""
        if self.first_plan is None or self.first_plan.samples_per_s == float("inf"):
            return None
        return self.first_plan.samples_per_s

    def _measured(self) -> list[str]:
        done = self.statistics
        if not done.samples or not done.loading_s:
            return ["measured: nothing yet"]
        overall = (
            f"measured: {done.samples} samples, {done.from_cache} of them from the cache, "
            f"{done.samples / done.loading_s:.0f} samples/s, waiting {done.stall_s / done.loading_s:.0%} of the time, "
            f"{done.wire_bytes / 1e6:.2f} MB received"
        )
        lines = [overall]
        if done.fetched_per_s is not None and self._predicted_per_s is not None:
            lines.append(
                f"while nothing came from the cache: {in_samples_per_s(done.fetched_per_s)} measured, "
                f"{in_rate(self._predicted_per_s)} predicted"
            )
        if done.codec_error:
            lines.append(f"largest relative error by a codec: {done.codec_error:.2g}")
        if done.nonfinite:
            lines.append(f"not finite: {done.nonfinite} samples as they came; {done.first_nonfinite}")
        return [*lines, *map(_used, done.nodes)]


def _used(node: NodeUse) -> str:
    """What came of asking one of several nodes."""
    counted = {
        "requests failed": node.failures,
        "of others' requests taken over": node.retries,
        "samples that only others could read": node.unreadable,
        "damaged answers": node.damaged,
    }
    parts = [f"{node.samples:,} samples in {node.requests:,} requests"]
    parts += [f"{count:,} {what}" for what, count in counted.items() if count]
    parts += [f"in trouble: {node.trouble}"] if node.trouble else []
    return f"{node.url}: {', '.join(parts)}"


def _tuned(tuned: Tuned) -> str:
    return (
        f"window after {tuned.at_s:.0f} s: {tuned.requests} requests and {in_bytes(tuned.window_bytes)} "
        f"under way at most; {tuned.reason}"
    )


def whereabouts(
    shares: Mapping[Route, float],
    cuts: Sequence[Cut],
    *,
    near: str | None,
    has_head: bool,
    engine: str = REFERENCE,
    here: str = REFERENCE,
    behind: str = "",
) -> tuple[tuple[str, str], ...]:
    """Pairs of a part of the work and where it runs.

    Args:
        shares: shares of the samples, by way.
        cuts: cuts of the job, by number; the last is the frost line.
        near: URL of the node; None for the one in this process.
        has_head: True if there is a model.
        engine: engine that runs the frozen layers at the node.
        here: engine that runs all of them at the trainer, for samples that come encoded.
        behind: frozen layers behind the frost line, in words; empty where there are none.
    """
    node = "node in this process" if near is None else f"node at {near}"
    parts = [("reading", node)]
    for route, share in sorted(shares.items(), key=lambda item: -item[1]):
        of = "" if len(shares) == 1 else f" of {share:.0%} of the samples"
        parts += [(f"{part}{of}", where) for part, where in _one_way(route, cuts, node, engine, here)]
    parts += [(behind, "trainer")] if behind else []
    return (*parts, ("head", "trainer")) if has_head else tuple(parts)


def _one_way(route: Route, cuts: Sequence[Cut], node: str, engine: str, here: str) -> list[tuple[str, str]]:
    cut, frost_line = cuts[route.cut], cuts[-1]
    parts = [("decoding", "trainer" if cut.number == 0 else node)]
    if cut.number > 1:
        parts.append(
            (
                f"frozen layers up to {cut.name} (cut {cut.number})",
                node if engine == REFERENCE else f"{node}, by {engine}",
            )
        )
    if route.codec != EXACT:
        parts.append((f"packing as {route.codec}", node))
    if max(1, cut.number) < frost_line.number:
        by = "" if cut.number or here == REFERENCE else f", by {here}"
        parts.append((f"frozen layers up to {frost_line.name}", f"trainer{by}"))
    return parts
