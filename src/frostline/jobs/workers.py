"""What worker processes need to make a job's loaders, or to read its rows, anew: values alone."""

import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from multiprocessing.util import Finalize
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from frostline.cache import Scope
from frostline.core import Cut, Route, Skipped, TensorSpec
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.events import Event, NodeLost, Observer, RowsNotFinite
from frostline.core.system import usable_cores
from frostline.datasets import Dataset
from frostline.datasets.manifest import skips_by_name
from frostline.jobs.activity import ActivityMeter, PassProgress, start_follower
from frostline.jobs.connect import reach
from frostline.jobs.loader_factory import CachePolicy, LoaderFactory, features_on_disk, finite_check, tuner_of
from frostline.jobs.router import Clocks, Router
from frostline.jobs.statistics import SkipLog, StatisticsCollector, UseTeller, warn_user
from frostline.loaders.arguments import ALONE, Ranks
from frostline.loaders.epoch_loader import ArrayLoader
from frostline.loaders.fetch import Fetcher, NodeEngine, Shipment
from frostline.loaders.forked_workers import ForkedWorkers
from frostline.loaders.local_stage import LocalStage
from frostline.loaders.row_source import Arrays, widened_batch
from frostline.preprocess import Preprocess
from frostline.transport import CountsNodes
from frostline.wire.messages import FeatureRequest

__all__ = (
    "JobLoaderSpec",
    "RowReader",
    "RowsDone",
    "WorkerSetup",
)


_FROM_WORKER_STATE = ("epoch", "ranks")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerSetup:
    """A job, as values that may be pickled to a process of one's own.

    Attributes:
        data: data of the job.
        nodes: URLs of its nodes; none where it runs in the process that asks.
        node: settings of that node.
        settings: the way that the job asks. A token that stands in the environment does not travel: it stands there
            too.
        cuts: the cuts by number.
        scope: scope of what is kept.
        preprocess: preprocessing that is left to do.
        shipment: the prefix; None where there is no model.
        device: the place where the trainer's part runs.
        engine: engine of the node, as it is when the job goes to a process.
        tried: samples that engines are tried on.
        skipped: samples skipped by all processes of the job; None where those cannot be told.
        forked: processes that are forked and served by this one; None where each worker reads by itself, as spawned
            ones do.
    """

    data: Dataset
    nodes: Sequence[str]
    node: NodeSettings
    settings: LoaderSettings
    cuts: tuple[Cut, ...]
    scope: Scope
    preprocess: Preprocess
    shipment: Shipment | None
    device: str
    engine: NodeEngine
    tried: FeatureRequest
    skipped: SkipLog | None
    forked: ForkedWorkers | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        from_environment = self.settings.token is not None and LoaderSettings().token == self.settings.token
        if from_environment:
            values["settings"] = replace(self.settings, token=None)
        return _unpacked, ({**values, "forked": None}, from_environment)

    def open(self, shares: Mapping[Route, float], workers: int, on_event: Observer = lambda _: None) -> LoaderFactory:
        """Make what loaders are made with, in this process and for as long as it lives.

        Args:
            shares: shares of the samples, by way; they stay.
            workers: number of workers that share what the job may use.
            on_event: function that is called with each event; a job's log tells the job itself.
        """
        stack = ExitStack()
        Finalize(None, stack.close, exitpriority=0)  # which multiprocessing calls before it waits for threads
        teller = UseTeller(self.skipped)

        def told(event: Event) -> None:
            teller(event)
            on_event(event)

        progress = PassProgress(told)
        settings, collector = _share(self.settings, workers), self._collector(progress)
        nodes = self.nodes or (() if self.forked is None else self.forked.nodes)
        transport = reach(nodes, self.data, settings, self.node, _left_out, stack, _log_lost)
        if isinstance(transport, CountsNodes):
            teller.counts = transport.uses
            stack.callback(teller.tell)
        router = Router(
            cuts=self.cuts,
            shares=shares if self.shipment is None or self.shipment.refused is None else {Route(0): 1.0},
            samples_per_request=settings.samples_per_request,
            transport=transport,
            cores=len(usable_cores()),
            clocks=Clocks(wall=time.monotonic, busy=time.process_time),
        )

        fetcher = Fetcher(
            transport=transport,
            url=self.data.url,
            reading=self.data.manifest.reading,
            preprocess=self.preprocess,
            shipment=self.shipment,
            local_stage=self._local_stage(collector),
            engine=self.engine,
            arrived=(router.take_batch, collector.take_batch, teller.take_batch),
            tried=self.tried,
        )
        store = features_on_disk(settings)
        if store is not None:
            stack.enter_context(store)
        cache_policy = CachePolicy(self.scope, self.data.samples, settings, store)
        tuner = tuner_of(settings, fetcher, router, self.data)
        activity = ActivityMeter(progress, collector, transport, router, self.cuts, self.data)
        follower, close = start_follower(settings, tuner, transport, router, cache_policy, nodes, activity, _nothing)
        stack.callback(close)
        return LoaderFactory(
            data=self.data,
            fetcher=fetcher,
            cache_policy=cache_policy,
            router=router,
            collector=collector,
            settings=settings,
            tuner=tuner,
            follower=follower,
            on_event=collector,
            tensors=tuple(map(TensorSpec, self.cuts[-1].shapes, self.cuts[-1].dtypes)),
        )

    def _collector(self, on_event: Observer) -> StatisticsCollector:
        return StatisticsCollector(
            on_event,
            max_skipped=self.settings.max_skipped(len(self.data)),
            refuses_changes=self.data.source.on_change == "refuse",
            named=skips_by_name(self.data.whole.samples, self.data.whole.names),
            shared=self.skipped,
        )

    def _local_stage(self, collector: StatisticsCollector) -> LocalStage:
        rest = check = None
        if self.shipment is not None:
            from frostline.jobs.partition import rest_of

            rest = rest_of(self.shipment.artifact, self.device)
            check = finite_check(self.cuts, self.engine, collector, self.settings)
        return LocalStage(
            cuts=self.cuts, rest=rest, device=self.device, device_batch=self.settings.device_batch, check=check
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobLoaderSpec:
    """How a loader was made, so that another process can make it too.

    Attributes:
        worker_setup: setup of its job in a worker.
        shares: shares of the samples, by way, when it was made.
        batch_size: batch size of the loader.
        options: the options as ``LoaderFactory.arrays`` took them, but what ``WorkerState`` says.
    """

    worker_setup: WorkerSetup
    shares: Mapping[Route, float]
    batch_size: int
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls, worker_setup: WorkerSetup, shares: Mapping[Route, float], batch_size: int, options: Mapping[str, Any]
    ) -> Self:
        """The specification of a loader that was made with these options."""
        # How ranks speak to each other goes to no other process: what ``WorkerState`` says of them takes its place.
        rest = {name: value for name, value in options.items() if name not in _FROM_WORKER_STATE}
        return cls(worker_setup=worker_setup, shares=shares, batch_size=batch_size, options=rest)

    def make(self, epoch: int, ranks: Ranks, workers: int) -> ArrayLoader:
        """The loader of an epoch, in this process: one of several workers, which keep the order."""
        maker = self.worker_setup.open(self.shares, workers)
        return maker.arrays(self.batch_size, epoch=epoch, ranks=ranks, **self.options)


def _share(settings: LoaderSettings, workers: int) -> LoaderSettings:
    """What one of several workers may use. In memory nothing is kept: its next epoch has other samples."""
    requests = settings.requests_in_flight
    return replace(
        settings,
        requests_in_flight=None if requests is None else max(1, requests // workers),
        max_requests=max(1, settings.max_requests // workers),
        window_bytes=max(1, settings.window_bytes // workers),
        cache_bytes=0,
        max_reorder=0,
        replan=False,
        pin_memory=False,
    )


def _nothing() -> None:
    pass


def _log_lost(event: Event) -> None:
    """A worker has no observer; what it sees of lost nodes stands in its log."""
    if isinstance(event, NodeLost):
        warn_user(event)


def _left_out(_: str, __: str, ___: Exception) -> None:
    pass


def _unpacked(values: dict[str, Any], from_environment: bool) -> WorkerSetup:
    worker_setup = WorkerSetup(**values)
    if not from_environment:
        return worker_setup
    return replace(worker_setup, settings=replace(worker_setup.settings, token=LoaderSettings().token))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsDone:
    """What reading some rows took.

    Attributes:
        skipped: samples that could not be read; no batch has them.
        wire_bytes: bytes that came from the nodes meanwhile.
        codec_error: the largest relative error that a codec has made so far.
        nonfinite: rows with Inf or NaN, where there may be any.
        first_nonfinite: the first row with Inf or NaN, in words; empty if there is none.
    """

    skipped: tuple[Skipped, ...]
    wire_bytes: int
    codec_error: float
    nonfinite: int
    first_nonfinite: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowReader:
    """Reads parts of a job's data, in the order of their rows, wherever it is taken.

    Connections and caches of a process stay open between parts, until another reader is used there.

    Attributes:
        worker_setup: setup of the job in a process.
        shares: shares of the samples, by way, when the reader was made.
        batch_size: rows of a batch.
        key: unique text that identifies the reader.
    """

    worker_setup: WorkerSetup
    shares: Mapping[Route, float]
    batch_size: int
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def batches(self, rows: npt.NDArray[np.int64], *, targets: bool | None = None) -> Iterator[Arrays]:
        """The batches of some rows of the job's data; bits of bfloat16 come as ``float32``.

        Args:
            rows: rows of the data, in the order that they are wanted in.
            targets: True gives targets, as for ``Job.loader``.
        """
        factory = _OPENED.factory(self)
        data = factory.data.take(rows)
        for batch in factory.arrays(self.batch_size, data=data, ranks=ALONE, targets=targets):
            yield widened_batch(batch)

    def rows_done(self, rows: npt.NDArray[np.int64], wire_bytes: int) -> RowsDone:
        """What reading some rows took, in the process that read them.

        Args:
            rows: rows that were read.
            wire_bytes: bytes that had come before, as ``received_bytes`` says.
        """
        factory = _OPENED.factory(self)
        statistics = factory.collector.statistics()
        ids = set(factory.data.samples.ids_at(rows).tolist())
        found = _OPENED.nonfinite()
        return RowsDone(
            skipped=tuple(sample for sample in statistics.skipped if sample.id in ids),
            wire_bytes=self.received_bytes() - wire_bytes,
            codec_error=statistics.codec_error,
            nonfinite=sum(event.rows for event in found),
            first_nonfinite=found[0].first if found else "",
        )

    def received_bytes(self) -> int:
        """Bytes that have come from the nodes to this process so far."""
        return _OPENED.factory(self).fetcher.transport.statistics().bytes_received


class _Opened:
    """The reader that is open in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key = ""
        self._factory: Any = None
        self._nonfinite: list[RowsNotFinite] = []

    def factory(self, reader: RowReader) -> LoaderFactory:
        with self._lock:
            if self._key != reader.key:
                # Logs of what is skipped do not reach other machines; each part says what it skipped.
                setup = replace(reader.worker_setup, skipped=None)
                self._key, self._factory = reader.key, setup.open(reader.shares, 1, self._on_event)
            factory: LoaderFactory = self._factory
            return factory

    def nonfinite(self) -> list[RowsNotFinite]:
        """What came of rows that are not finite since this was asked last."""
        found, self._nonfinite = self._nonfinite, []
        return found

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RowsNotFinite):
            self._nonfinite.append(event)


_OPENED = _Opened()
