"""What a job tells control planes of itself once a second, and how it keeps to what they answer."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from frostline.control.messages import (
    MAX_BLOCKS,
    MAX_NAME,
    MAX_NODE_TEXT,
    MAX_NODES,
    MAX_SENTENCE,
    Bottleneck,
    JobActivity,
    NodeFailures,
    PlanOutline,
    RecentRates,
)
from frostline.control.settings import NO_CONTROL
from frostline.core import Cut, Route
from frostline.core.config import LoaderSettings
from frostline.core.events import BatchDelivered, EpochStarted, Event, Observer, WaitingForRows
from frostline.datasets import Dataset
from frostline.jobs.connect import members_of
from frostline.jobs.loader_factory import CachePolicy
from frostline.jobs.router import Router
from frostline.jobs.statistics import StatisticsCollector
from frostline.jobs.usage import UsageMeter
from frostline.planning.replanning import NOTHING_YET, Diagnosis, diagnose
from frostline.prefetch import Tuner
from frostline.transport import CountsNodes, NodeUse, ReportsRequests, Transport, TransportStatistics
from frostline.tuning import Setting

if TYPE_CHECKING:
    from frostline.control.follower import ControlFollower

__all__ = (
    "ActivityMeter",
    "PassProgress",
    "control_address",
    "failures_of",
    "outline_of",
    "saved_bytes",
    "start_follower",
)


# What asks the node, or is long, is said again after so long.
_SAY_AGAIN_S = 5.0
# While too little was measured nobody is asked for a diagnosis, and it is looked for more often.
_LOOK_AGAIN_S = 1.0
_ENDS_WITHIN_S = 1.0
# Fewer bytes or seconds tell nothing about a link.
_MIN_TRANSFER_BYTES, _MIN_TRANSFER_S = 1 << 20, 0.05


def saved_bytes(samples: int, sample_bytes: float, wire_bytes: int) -> float:
    """What samples would have crossed as they are stored, less what did; below 0 where features are larger.

    Whoever keeps features between epochs would keep stored samples too, so that each counts as often as it crossed, as
    in the report of a run (``baseline_wire_bytes``).

    Args:
        samples: samples that the loop took, without those that came from the cache.
        sample_bytes: mean size in bytes of a sample as it is stored.
        wire_bytes: bytes that crossed, bodies and headers.
    """
    return samples * sample_bytes - wire_bytes


def outline_of(cuts: Sequence[Cut], sample_bytes: float, shares: Mapping[Route, float]) -> PlanOutline:
    """A plan as it is drawn along the network; of one with more cuts than can be drawn, evenly spaced ones.

    Args:
        cuts: cuts of the job by number; the last is the frost line.
        sample_bytes: mean size in bytes of a sample as it is stored.
        shares: shares of the samples, by way.
    """
    route = max(shares, key=lambda way: shares[way])
    shown: Sequence[int] = range(len(cuts))
    if len(cuts) > MAX_BLOCKS:
        step = (len(cuts) - 1) / (MAX_BLOCKS - 2)
        spaced = {round(place * step) for place in range(MAX_BLOCKS - 1)}
        shown = sorted(spaced | {route.cut})
    return PlanOutline(
        names=tuple(_plain(cuts[number].name) for number in shown),
        nbytes=tuple(cuts[number].bytes_per_sample if number else round(sample_bytes) for number in shown),
        cut=list(shown).index(route.cut),
        codec=route.codec,
    )


def failures_of(uses: Sequence[NodeUse]) -> tuple[NodeFailures, ...]:
    """The nodes that failed requests, or took over others', as far as a report names them: those in trouble first."""
    some = [use for use in uses if use.failures or use.retries or use.trouble]
    some.sort(key=lambda use: (not use.trouble, -use.failures, use.url))
    return tuple(
        NodeFailures(
            node=_plain(use.url, MAX_NODE_TEXT),
            samples=use.samples,
            retries=use.retries,
            failures=use.failures,
            trouble=_plain(use.trouble, MAX_NODE_TEXT),
        )
        for use in some[:MAX_NODES]
    )


class PassProgress:
    """Follows the pass that runs, and tells events on. Read by another thread than it is told in.

    Args:
        tell: function that is told each event after it was counted.
    """

    def __init__(self, tell: Observer) -> None:
        self._tell = tell
        self.epoch = self.samples = self.taken = 0
        self.waited_s = 0.0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        match event:
            case EpochStarted():
                self.epoch, self.samples, self.taken, self.waited_s = event.epoch, event.samples, 0, 0.0
            case BatchDelivered() if event.epoch == self.epoch:
                self.taken, self.waited_s = self.taken + event.samples, 0.0
            case WaitingForRows():
                self.waited_s += 1.0  # it is said once a second, and in no batch's stall yet
            case _:
                pass
        self._tell(event)


class ActivityMeter:
    """Reads what one process of a job says of it. Called by one thread, which it never keeps waiting.

    It refers to what the job is made of and not to the job, which would else never be unused.

    Args:
        progress: progress of its passes.
        collector: collector that counts what the job did.
        transport: way to its nodes, which counts what crosses.
        router: router of the job.
        cuts: cuts of the job by number.
        data: data of the job.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        progress: PassProgress,
        collector: StatisticsCollector,
        transport: Transport,
        router: Router,
        cuts: Sequence[Cut],
        data: Dataset,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._statistics = collector.statistics
        self._transport = transport
        self._router = router
        self._cuts = cuts
        self._data = data
        self._clock = clock
        self._rates = RecentRates()
        self._sample_bytes: float | None = None
        self._diagnoses: _Diagnoses | None = None
        self._drawn: tuple[Mapping[Route, float], PlanOutline] | None = None
        self._said: tuple[float, PlanOutline | None, Bottleneck | None] = (-math.inf, None, None)

    def __call__(self) -> JobActivity:
        """What it says now; what holds it back and its plan where they changed, and every few seconds."""
        now_s, done, crossed, progress = self._clock(), self._statistics(), self._transport.statistics(), self._progress
        rate, stall_share = self._rates.take(now_s, done.samples, done.stall_s + progress.waited_s)
        came = done.samples - done.from_cache
        spared = saved_bytes(came, self._bytes_of_sample() if came else 0.0, crossed.bytes_received)
        link_bytes_per_s = self._link_bytes_per_s(crossed)
        plan, bottleneck = self._now_and_then(now_s, done.samples)
        return JobActivity(
            epoch=progress.epoch,
            taken=progress.taken,
            epoch_samples=progress.samples,
            samples=done.samples,
            samples_per_s=rate,
            stall_share=stall_share,
            wire_bytes=crossed.bytes_received,
            saved_bytes=spared,
            saved_s=None if link_bytes_per_s is None else spared / link_bytes_per_s,
            retries=done.retries,
            nodes=failures_of(self._transport.uses() if isinstance(self._transport, CountsNodes) else ()),
            bottleneck=bottleneck,
            plan=plan,
        )

    def judge_by(self, usage: UsageMeter) -> None:
        """Say what holds the job back, too, by how busy each part of it is; for one process of a job."""
        self._diagnoses = _Diagnoses(lambda: diagnose(usage.usage()))

    def close(self) -> None:
        """Begin no further look at the node, and give one that is under way a second to end. For the end of the job."""
        if self._diagnoses is not None:
            self._diagnoses.close()

    def _bytes_of_sample(self) -> float:
        if self._sample_bytes is None:  # it is a sum over all samples, so that it is not made before it is wanted
            self._sample_bytes = self._data.samples.encoded_bytes / max(1, len(self._data))
        return self._sample_bytes

    def _link_bytes_per_s(self, crossed: TransportStatistics) -> float | None:
        """Bandwidth of the link as the plan knows it, or as large answers showed it; None where neither is there."""
        situation = self._router.situation
        if situation is not None and math.isfinite(situation.link.bytes_per_s):
            return situation.link.bytes_per_s
        if crossed.transfer_bytes < _MIN_TRANSFER_BYTES or crossed.transfer_s < _MIN_TRANSFER_S:
            return None
        return crossed.transfer_bytes / crossed.transfer_s

    def _outline(self) -> PlanOutline:
        shares = self._router.shares
        if self._drawn is None or self._drawn[0] != shares:
            self._drawn = shares, outline_of(self._cuts, self._bytes_of_sample(), shares)
        return self._drawn[1]

    def _now_and_then(self, now_s: float, samples: int) -> tuple[PlanOutline | None, Bottleneck | None]:
        said_s, said_plan, said_bottleneck = self._said
        if not samples:
            return None, None
        plan = self._outline()
        bottleneck = None if self._diagnoses is None else self._diagnoses.latest(now_s, samples)
        if now_s - said_s < _SAY_AGAIN_S and plan == said_plan and bottleneck == said_bottleneck:
            return None, None
        self._said = now_s, plan, bottleneck
        return plan, bottleneck


class _Diagnoses:
    """Diagnoses in a thread of its own, since a node that is away answers late or never."""

    def __init__(self, diagnose: Callable[[], Diagnosis]) -> None:
        self._diagnose = diagnose
        self._lock = threading.Lock()  # a look does not begin while the job is closed
        self._thread: threading.Thread | None = None
        self._asked_s = -math.inf
        self._asked_samples = -1
        self._found: Bottleneck | None = None
        self._is_closed = False

    def latest(self, now_s: float, samples: int) -> Bottleneck | None:
        """What was found last. Another look begins where samples were taken since, and the last one is over."""
        is_over = self._thread is None or not self._thread.is_alive()
        has_nothing = self._found is None or self._found.held_back_by == NOTHING_YET
        pause_s = _LOOK_AGAIN_S if has_nothing else _SAY_AGAIN_S
        if is_over and not self._is_closed and now_s - self._asked_s >= pause_s and samples != self._asked_samples:
            self._asked_s, self._asked_samples = now_s, samples
            self._begin()
        return self._found

    def _begin(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._thread = threading.Thread(target=self._look, name="frostline-diagnosis", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Look no more. A look that outlives the job's connections would leave one open."""
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._thread.join(_ENDS_WITHIN_S)

    def _look(self) -> None:
        found = self._diagnose()
        self._found = Bottleneck(
            held_back_by=_printable(found.held_back_by, MAX_NAME),
            says=_printable(found.says, MAX_SENTENCE),
            gain=found.gain if math.isfinite(found.gain) else 1.0,
        )


def _plain(name: str, longest: int = MAX_NAME) -> str:
    """A name of few bytes, so that 64 of them fit a report."""
    return _printable(name, longest).encode("ascii", "replace").decode()


def _printable(text: str, longest: int) -> str:
    """As much of a text as a report may hold, without what could not be shown."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:longest])


def start_follower(
    settings: LoaderSettings,
    tuner: Tuner,
    transport: Transport,
    router: Router,
    cache_policy: CachePolicy,
    nodes: Sequence[str],
    activity: ActivityMeter,
    close: Callable[[], None],
) -> "tuple[ControlFollower | None, Callable[[], None]]":
    """What tells a control plane of a job and keeps it to its share, and what ends that and closes the rest of the job.

    Args:
        settings: settings of the job.
        tuner: tuner of its windows, which is bounded.
        transport: way to its nodes.
        router: router of the job, which plans with its share.
        cache_policy: policy of its caches.
        nodes: addresses of its nodes, as they were given.
        activity: function that describes the work of this process.
        close: function that closes the rest of the job.

    Raises:
        SettingError: The address of the control plane is none.
    """
    address = control_address(settings, nodes, transport)
    if address is None:
        return None, close
    from frostline.control.follower import ControlFollower
    from frostline.control.reporter import CacheStage, ControlLink

    link, was_named = ControlLink(address, settings.token, settings.tls), settings.control is not None
    cache = CacheStage(link.job, settings.cache_bytes, lambda: cache_policy.held_bytes, cache_policy.bound)
    elsewhere = transport.reports_requests if isinstance(transport, ReportsRequests) else lambda: False
    follower = ControlFollower(
        link,
        tuner.limit,
        Setting(requests=settings.last_requests, window_bytes=settings.window_bytes),
        beside=[cache] if settings.cache_bytes and was_named else [],
        counted_elsewhere=elsewhere,
        activity=activity,
        was_named=was_named,
    )
    router.count_on(lambda: follower.share.bytes_per_s)
    return follower, partial(_close_all, (activity.close, follower.close, close))


def control_address(settings: LoaderSettings, nodes: Sequence[str], transport: Transport) -> str | None:
    """URL of the control plane that a job reports to: the one that was named, else its first node's.

    Args:
        settings: the way that the job asks.
        nodes: addresses that its nodes were given by; a node in this process needs no reports.
        transport: way to them.

    Returns:
        None where there is neither, or nobody is to be told.
    """
    if settings.control is not None:
        return None if settings.control == NO_CONTROL else settings.control
    first = next(iter(members_of(transport, nodes)), "")
    return first if first.startswith(("http:", "https:")) else None


def _close_all(closes: Sequence[Callable[[], None]]) -> None:
    with ExitStack() as stack:
        for close in reversed(closes):
            stack.callback(close)
