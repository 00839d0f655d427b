"""Makes one request after another: asks a node for rows, again where it is full, and finishes them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import SystemRandom
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from frostline.core import REFERENCE, FeatureBatch, Route, Samples, Skipped, View
from frostline.core.errors import EngineNotReady, Overloaded, SettingError, UnknownPrefix
from frostline.core.events import NodeFull, Observer
from frostline.loaders.ahead import SamplesAhead
from frostline.loaders.local_stage import LocalStage
from frostline.prefetch.requests import Ask
from frostline.prefetch.window import Failing, delay_s
from frostline.preprocess import Preprocess
from frostline.profiles import Profile, Trial
from frostline.transport import Transport
from frostline.wire.messages import FeatureRequest, ProfileRequest
from frostline.wire.packing import unpack

__all__ = (
    "EngineChoice",
    "FetchRows",
    "Fetcher",
    "NodeEngine",
    "Repeats",
    "RetryPolicy",
    "Shipment",
    "fetch_asked",
    "fetch_each",
    "jitter",
    "join_batches",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine of the node, as it was found for a job.

    Attributes:
        engine: the name.
        error: the largest relative error against the reference on the job's samples; 0 for the reference itself.
        trials: trials of every engine that was looked at, with why the others are not used.
    """

    engine: str = REFERENCE
    error: float = 0.0
    trials: tuple[Trial, ...] = ()

    @property
    def samples_per_s(self) -> float | None:
        """Samples a second by the engine's trial up to the last cut, alone on the node; None where it is not known."""
        mine = [trial for trial in self.trials if trial.engine == self.engine]
        return max(mine, key=lambda item: item.cut).samples_per_s if mine else None

    @classmethod
    def of(cls, profile: Profile) -> "EngineChoice":
        """What a node's profile says."""
        return cls(engine=profile.engine, error=profile.engine_error, trials=profile.trials)


@dataclass(slots=True, eq=False)
class NodeEngine:
    """The engine in use. Requests that were made keep theirs; safe for threads, which see one choice or the other.

    Args:
        accuracy: accuracy that the job allows, for engine and codecs together.
        choice: the choice to begin with.
        fixed_rows: False if a node may run fewer rows than usual; see ``wire.messages.FeatureRequest``.
    """

    accuracy: str | float
    choice: EngineChoice = field(default_factory=EngineChoice)
    fixed_rows: bool = True

    @property
    def name(self) -> str:
        """The name of the engine."""
        return self.choice.engine

    @property
    def tolerance(self) -> float | None:
        """Largest relative error that a lossy codec may make; None where the codec itself is the bound."""
        return None if isinstance(self.accuracy, str) else max(0.0, self.accuracy - self.choice.error)


FetchRows = Callable[[Samples, Route], Iterator[FeatureBatch]]
"""Makes one request for samples on a way, no one twice, and yields their rows at the frost line."""

Arrived = Callable[[Route, FeatureBatch], None]
Counted = Callable[[Route, int], None]
Pace = Callable[[Callable[[], Iterator[FeatureBatch]]], Iterator[FeatureBatch]]

# Samples on which an engine is tried that the node has not ready.
_TRIED = 96
# After which a node that dropped a prefix as soon as it had it is asked again.
_AGAIN_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class Shipment:
    """A prefix as it travels.

    Another process gets it when it is known whether the nodes run it: it would send it again, or ask for it in vain.

    Attributes:
        digest: the name.
        artifact: the file, to upload again where a node was restarted.
        refused: the reason why no node runs it, so that the trainer does; None where one does, or it is not known yet.
        is_settled: event that is set once that is known; None where it was from the beginning.
        under_way: event that is set once an upload, begun before the network was checked, has ended, well or not; None
            where none was begun.
        is_there: True once that upload has ended well, or found that the nodes have it.
    """

    digest: str
    artifact: bytes
    refused: str | None = None
    is_settled: threading.Event | None = None
    under_way: threading.Event | None = None
    is_there: bool = False

    def settle(self, refused: str | None) -> None:
        """Note whether the nodes run it, which is known now."""
        self.refused = refused
        if self.is_settled is not None:
            self.is_settled.set()

    def __reduce__(self) -> tuple[object, ...]:
        if self.is_settled is not None:
            self.is_settled.wait()
        return partial(Shipment, digest=self.digest, artifact=self.artifact, refused=self.refused), ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetcher:
    """Makes a job's requests. Safe for several threads.

    Attributes:
        transport: the transport to the node.
        url: URL of the data set's root.
        reading: the way that the bytes at its samples' addresses are found.
        preprocess: the preprocess, declared once for both sides.
        shipment: the prefix; None where there is no model.
        local_stage: stage that computes the rest of the frozen part.
        engine: engine that runs the prefix at the node, and may be another one in the next request.
        ahead: samples, encoded, that were asked for before it was known which requests want them; None where none were.
        arrived: functions called with the way and the content of every batch, as it came.
        done: function that is called with the way and the number of rows that are at the frost line, or could not be
            read.
        dropped: function that is called with the way and the number of rows that come no more.
        tried: request for the samples on which engines are tried; None for a request's own samples, which calibrate
            them otherwise.
        unfit: numbers of the cuts at which the engine cannot be used, which has been tried up to the plan's own.
        closed: event that is set when the job is closed, for this and all made of it: nobody answers any more.
        pace: pace that makes each exchange when the job's share of a control plane allows it; None where there is none.
    """

    transport: Transport
    url: str
    reading: str
    preprocess: Preprocess
    shipment: Shipment | None
    local_stage: LocalStage
    engine: NodeEngine
    ahead: SamplesAhead | None = None
    arrived: Sequence[Arrived]
    done: Counted = lambda *_: None
    dropped: Counted = lambda *_: None
    tried: FeatureRequest | None = None
    unfit: set[int] = field(default_factory=set)
    closed: threading.Event = field(default_factory=threading.Event)
    pace: Pace | None = None

    def fetch(self, samples: Samples, route: Route, view: View | None, *, decodes: bool = True) -> "RowStream":
        """Rows of these samples at the frost line, as they arrive; encoded ones stay so where it does not decode."""
        return RowStream(self, samples, route, view, decodes=decodes)

    def require_open(self) -> None:
        """Do nothing unless the job is closed.

        Raises:
            SettingError: The job is closed.
        """
        if self.closed.is_set():
            raise SettingError(
                "this job is closed: take its batches before job.close() or inside its with block, or make another job "
                "with offload"
            )

    def request(self, samples: Samples, route: Route, view: View | None) -> FeatureRequest:
        """The message that asks for them.

        Raises:
            SettingError: The job is closed.
        """
        self.require_open()
        return FeatureRequest(
            data=self.url,
            reading=self.reading,
            samples=samples,
            prefix=self.shipment.digest
            if self.shipment is not None and route.cut >= self.preprocess.shipped_from
            else None,
            cut=route.cut,
            preprocess=self.preprocess.to_json(),
            view=view,
            codec=route.codec,
            tolerance=self.engine.tolerance,
            engine=self.engine.name if route.cut > 1 and route.cut not in self.unfit else REFERENCE,
            fixed_rows=self.engine.fixed_rows,
        )

    def features(self, request: FeatureRequest) -> Iterator[FeatureBatch]:
        """The answer, as it crosses the network; see ``Transport.features``."""
        ahead, transport = self.ahead, self.transport
        make = partial(transport.features, request) if ahead is None else partial(ahead.features, request, transport)
        return make() if self.pace is None else self.pace(make)

    def prepare(self, request: FeatureRequest) -> bool:
        """Have the node make the engine ready that a request names; ``Transport.profile`` says what may be raised.

        Returns:
            True if the engine is ready. False if it cannot be used at this cut, so that the reference engine has to be
            used from now on.
        """
        few = request.samples.take(np.arange(min(_TRIED, len(request.samples))))
        tried = self.tried or replace(request, samples=few)
        features = replace(tried, engine=request.engine, cut=request.cut)
        try:
            self.transport.profile(ProfileRequest(features=features, accuracy=self.engine.accuracy))
        except EngineNotReady:
            self.unfit.add(request.cut)
            return False
        return True


class RowStream:
    """The rows of one request. ``close`` may be called from another thread and ends a read that is under way."""

    def __init__(self, fetcher: Fetcher, samples: Samples, route: Route, view: View | None, *, decodes: bool) -> None:
        self._fetcher = fetcher
        self._samples = samples
        self._route = route
        self._view = view
        self._request = fetcher.request(samples, route, view)
        self._batches: Iterator[FeatureBatch] = fetcher.features(self._request)
        self._begun = False
        self._left = len(samples)
        self._turn = fetcher.local_stage.turn()
        self._stays_encoded = route.cut == 0 and not decodes
        self._received: Callable[[], None] = lambda: None

    def __iter__(self) -> Self:
        return self

    def when_received(self, tell: Callable[[], None]) -> None:
        """Have a function called once the whole answer is here, before its last rows are computed on this side."""
        self._received = tell

    def __next__(self) -> FeatureBatch:
        try:
            batch = self._rows()
        except BaseException:
            self._drop()
            raise
        rows = len(batch) + len(batch.skipped)
        self._left -= rows
        self._fetcher.done(self._route, rows)
        return batch

    def _rows(self) -> FeatureBatch:
        if self._stays_encoded:
            batch = self._next()
            # A view would keep the whole answer in memory for as long as one sample waits.
            return replace(batch, encoded=[bytes(sample) for sample in batch.encoded])
        side = self._fetcher.local_stage
        parts = [self._next()]
        wanted = side.wants(self._route.cut)
        while sum(map(len, parts)) < wanted:
            try:
                parts.append(self._next())
            except StopIteration:
                break
        batch = parts[0] if len(parts) == 1 else join_batches(parts)
        if wanted > 1 and len(batch) + len(batch.skipped) >= self._left:
            self._received()
        route, steps = self._route, self._fetcher.preprocess
        return side.finish(batch, self._samples, cut=route.cut, preprocess=steps, view=self._view, turn=self._turn)

    def close(self) -> None:
        """Abandon the rest of the answer."""
        self._drop()
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def _drop(self) -> None:
        left, self._left = self._left, 0
        if left > 0:
            self._fetcher.dropped(self._route, left)

    def _next(self) -> FeatureBatch:
        """The next rows as they come, unpacked."""
        try:
            batch = next(self._batches)
        except UnknownPrefix:
            batch = self._uploaded()
        except EngineNotReady:
            batch = self._prepared()
        self._begun = True
        for count in self._fetcher.arrived:
            count(self._route, batch)
        return unpack(batch) if batch.packed else batch

    def _uploaded(self) -> FeatureBatch:
        """The node lost the prefix, as after a restart: upload it and ask once more."""
        shipment = self._fetcher.shipment
        if shipment is None or self._begun:
            raise UnknownPrefix("the node asks for a prefix that this job does not have")
        self._begun = True
        self._fetcher.transport.put_prefix(shipment.digest, shipment.artifact)
        self._batches = self._fetcher.features(self._request)
        try:
            return next(self._batches)
        except EngineNotReady:
            return self._prepared()
        except UnknownPrefix as error:  # others had its place before this request came
            raise Overloaded(
                "the node drops the frozen layers again for want of memory: start it with more --memory",
                retry_after_s=_AGAIN_S,
            ) from error

    def _prepared(self) -> FeatureBatch:
        """The node has not made the engine ready, as for a cut that no plan wanted before: have it do so, ask again."""
        if not self._fetcher.prepare(self._request):
            self._request = replace(self._request, engine=REFERENCE)
        self._batches = self._fetcher.features(self._request)
        return next(self._batches)


def join_batches(parts: Sequence[FeatureBatch]) -> FeatureBatch:
    """Batches of one answer as one."""
    tensors = zip(*(part.tensors for part in parts), strict=True)
    return FeatureBatch(
        ids=np.concatenate([part.ids for part in parts]),
        tensors=tuple(np.concatenate(column) for column in tensors),
        encoded=[sample for part in parts for sample in part.encoded],
        skipped=tuple(skipped for part in parts for skipped in part.skipped),
    )


_Ints = npt.NDArray[np.int64]


def fetch_asked(
    fetch: FetchRows, ask: Ask, fetch_from: Callable[[tuple[str, ...]], FetchRows] | None = None
) -> Iterator[FeatureBatch]:
    """Make a request for some rows of an epoch, of the nodes that own them where there are such; see ``fetch_each``."""
    return fetch_each(fetch if fetch_from is None else fetch_from(ask.nodes), ask.samples, ask.route)


def fetch_each(fetch: FetchRows, samples: Samples, route: Route) -> Iterator[FeatureBatch]:
    """The rows of these samples in their order, also where one stands there more than once."""
    _, firsts, which = np.unique(samples.ids, return_index=True, return_inverse=True)
    if len(firsts) == len(samples):
        return fetch(samples, route)
    asked = samples.take(np.sort(firsts))
    places = np.argsort(np.argsort(firsts))  # of each id, by where it first stands
    return Repeats(fetch(asked, route), asked.ids, places[which])


class Repeats:
    """Rows handed out more than once. ``close`` may be called from another thread, as that of the answer.

    Args:
        answer: rows of samples that differ, in their order.
        ids: ``int64[m]``, of these samples.
        which: ``int64[n]``, which of them stands at each place; the first time each comes is in their order.
    """

    def __init__(self, answer: Iterator[FeatureBatch], ids: _Ints, which: _Ints) -> None:
        self._answer = answer
        self._ids = ids
        self._which = which
        self._places = 0
        self._come = 0
        self._rows = np.full(len(ids), -1, np.int64)
        self._skipped: dict[int, Skipped] = {}
        self._kept = 0
        self._tensors: tuple[npt.NDArray[np.generic], ...] = ()
        self._encoded: list[bytes | memoryview] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        self._take(next(self._answer))
        # A sample that has not come yet stands nowhere before the first place that waits for it.
        waiting = np.flatnonzero(self._which[self._places :] >= self._come)
        stop = self._places + int(waiting[0]) if len(waiting) else len(self._which)
        some = self._which[self._places : stop]
        self._places = stop
        kept = some[self._rows[some] >= 0]
        return FeatureBatch(
            ids=self._ids[kept],
            tensors=tuple(tensor[self._rows[kept]] for tensor in self._tensors),
            encoded=[self._encoded[row] for row in self._rows[kept].tolist()] if self._encoded else (),
            skipped=tuple(self._skipped[id] for id in self._ids[some[self._rows[some] < 0]].tolist()),
        )

    def close(self) -> None:
        """Abandon the rest of the answer."""
        close = getattr(self._answer, "close", None)
        if close is not None:
            close()

    def _take(self, batch: FeatureBatch) -> None:
        """Keep what arrived, for the places further on."""
        self._skipped |= {skipped.id: skipped for skipped in batch.skipped}
        stop = self._come + len(batch) + len(batch.skipped)
        come = np.arange(self._come, stop)
        there = come[~np.isin(self._ids[come], list(self._skipped))]
        self._rows[there] = np.arange(self._kept, self._kept + len(there))
        self._kept += len(there)
        self._encoded.extend(batch.encoded)
        if self._tensors and len(there):
            self._tensors = tuple(np.concatenate(pair) for pair in zip(self._tensors, batch.tensors, strict=True))
        elif len(there):
            self._tensors = batch.tensors
        self._come = stop


T = TypeVar("T")

# Of the system, since forked workers would all have the same of a generator with a state.
jitter = SystemRandom().random
"""From 0 to below 1; see ``delay_s``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RetryPolicy:
    """How long a node that is full is asked again.

    Only ``Overloaded`` is waited out: the node is there, and says when to come back. A node that cannot be reached at
    the start of a job is more likely a wrong address.

    Attributes:
        retry_for_s: the time for each thing that is asked for, from its first refusal on.
        on_event: function that is called before every wait.
        clock: seconds of a monotonic clock.
        wait: function that lets so many seconds pass.
        jitter: see ``delay_s``.
    """

    retry_for_s: float
    on_event: Observer
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = jitter

    def __call__(self, ask: Callable[[], T]) -> T:
        """What ``ask`` gives, which is called until a node is not full.

        Raises:
            NodeUnreachable: The node was full for ``retry_for_s`` seconds, or asks to wait for longer than that.
        """
        failures, since = 0, 0.0
        while True:
            try:
                return ask()
            except Overloaded as reason:
                now = self.clock()
                failures, since = failures + 1, since if failures else now
                failing = Failing(samples=0, failures=failures, since=since)
                pause_s = delay_s(failing, reason, now, self.retry_for_s, self.jitter())
                self.on_event(NodeFull(attempt=failures + 1, delay_s=pause_s, reason=str(reason)))
            self.wait(pause_s)
