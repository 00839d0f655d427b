"""A job: one network's frozen part on a node, its head here, and loaders over the features between them."""

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from frostline.core import Cut, Route, Samples, TensorSpec
from frostline.core.config import LoaderSettings
from frostline.core.errors import SettingError
from frostline.core.events import SetupWarning
from frostline.datasets import Dataset
from frostline.datasets.reading import steps_left_of
from frostline.jobs.activity import ActivityMeter, PassProgress, followed
from frostline.jobs.loader_factory import CachePolicy, LoaderFactory, keeps_all, mixed_splits, tuner_of
from frostline.jobs.measuring import Measuring
from frostline.jobs.router import PlanFollower, Router
from frostline.jobs.statistics import Explanation, JobStatistics, JobTable, StatisticsCollector, whereabouts
from frostline.jobs.usage import UsageMeter
from frostline.jobs.workers import JobLoaderSpec, RowReader, WorkerSetup
from frostline.loaders.arguments import EpochOptions, check_names, checked_options, shows_options
from frostline.loaders.epoch import Epochs
from frostline.loaders.epoch_loader import ArrayLoader
from frostline.loaders.fetch import EngineChoice, Fetcher
from frostline.loaders.sample_map import TravellingFunction
from frostline.planning import Plan, Situation
from frostline.planning.replanning import Diagnosis, diagnose
from frostline.preprocess import Preprocess
from frostline.transport import TrainsBeside
from frostline.wire.recipes import Recipe

if TYPE_CHECKING:  # of PyTorch, which other frameworks do without
    from torch import nn

    from frostline.jobs.in_store import Trained
    from frostline.loaders.torch_loader import Loader

__all__ = ("Job",)


class Job(JobTable):
    """Features for a training loop; made by ``offload``. Use it as a context manager, or call ``close``.

    Attributes:
        head: the trainable rest of the network, on the user's own parameters.
        frost_line: where the head takes over; the pixels where there is no model.
        fallback: why the network was not cut as it stands, in a sentence; None where it was.
    """

    def __init__(
        self,
        *,
        data: Dataset,
        fetcher: Fetcher,
        cache_policy: CachePolicy,
        worker_setup: WorkerSetup,
        router: Router,
        collector: StatisticsCollector,
        progress: PassProgress,
        measuring: Measuring | None = None,
        cuts: Sequence[Cut],
        head: "nn.Module | None",
        fallback: str | None,
        settings: LoaderSettings,
        near: str | None,
        trains_in_store: bool = False,
        close: Callable[[], None],
    ) -> None:
        self._data = data
        self._fetcher = fetcher
        self._worker_setup = worker_setup
        self._router = router
        self._collector = collector
        tuner = tuner_of(settings, fetcher, router, data)
        activity = ActivityMeter(progress, collector, fetcher.transport, router, cuts, data)
        follower, self._close = followed(
            settings, tuner, fetcher.transport, router, cache_policy, worker_setup.nodes, activity, close
        )
        self._usage = UsageMeter(
            fetcher.transport, collector, cache_policy.rejected, follower, has_own_process=near is not None
        )
        activity.judge_by(self._usage)
        measured = None if measuring is None else partial(measuring.changes, fetcher=fetcher, router=router)
        self._observe = PlanFollower(collector, router, measured, self._usage)
        self._cuts = tuple(cuts)
        self._head = head
        self.frost_line = self._cuts[-1]
        self.fallback = fallback
        self._settings = settings
        self._near = near
        self._trains_in_store = trains_in_store
        self._maker = LoaderFactory(
            data=data,
            fetcher=fetcher,
            cache_policy=cache_policy,
            router=router,
            collector=collector,
            settings=settings,
            tuner=tuner,
            follower=follower,
            observe=self._observe,
            tensors=tuple(map(TensorSpec, self.frost_line.shapes, self.frost_line.dtypes)),
        )

    def __repr__(self) -> str:
        near = "" if self._near is None else f", near {self._near}"
        return f"Job({len(self._data):,} samples of {self._data.url}, frost line {self.frost_line.name!r}{near})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def data(self) -> Dataset:
        """The samples as the job has them; another listing than the one that was given, where it listed them again."""
        return self._data

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Every cut of the network by its number, from the encoded sample to the frost line."""
        return self._cuts

    @property
    def plan(self) -> Plan | None:
        """Which way the samples take now, and what the others would cost; None for a plain loader."""
        return self._router.plan

    @property
    def situation(self) -> Situation | None:
        """What the plan is made from, as measured by now; None for a plain loader."""
        return self._router.situation

    @property
    def keeps_features(self) -> bool:
        """Whether all features stay at the trainer after their first epoch, so that later ones cost little."""
        return keeps_all(self.frost_line.bytes_per_sample * len(self._data), self._fetcher.preprocess, self._settings)

    @property
    def engine(self) -> EngineChoice:
        """The engine that runs the frozen layers at the node now, its error, and what is known of the others."""
        return EngineChoice() if self.frost_line.number in self._fetcher.unfit else self._fetcher.engine.choice

    @property
    def where(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a part of the work and where it runs now."""
        has_head, engine = self._head is not None, self.engine.engine
        parts = whereabouts(self._router.shares, self._cuts, near=self._near, has_head=has_head, engine=engine)
        if not self._trains_in_store:
            return parts
        return tuple((part, f"beside the node at {self._near}" if part == "head" else at) for part, at in parts)

    @property
    def features_digest(self) -> str:
        """SHA-256 of what a sample's features depend on, beside the sample: network, frost line and preprocessing."""
        shipment = self._fetcher.shipment
        network = "" if shipment is None else shipment.digest
        content = f"{network} {self.frost_line.number} {self._fetcher.preprocess.digest}"
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def head(self) -> "nn.Module":
        """The trainable rest of the network; the whole of it where it could not be cut (see ``fallback``).

        Raises:
            SettingError: The job has no model; its batches are the preprocessed pixels.
        """
        if self._head is None:
            raise SettingError("this job has no head: offload was called without a model")
        return self._head

    @shows_options(LoaderFactory.arrays)
    def loader(self, batch_size: int, **options: Unpack[EpochOptions]) -> "Loader":
        """The batches of one epoch.

        Args:
            batch_size: rows of every batch but perhaps the last, at each rank.
            **options: Order, part of the data, ranks and changes, by name: see ``EpochOptions``.

        Raises:
            OrderMismatch: what is to be replayed was recorded of other samples, or in another order.
            SettingError: a figure that makes no sense, or data from another place than the job's, or without masks
                where they are asked for; or several ranks are to be recorded; or the job's policy trains on the node.
            TypeError: An option is unknown.
        """
        from frostline.loaders.torch_loader import Loader

        augment = options.pop("augment", None)
        return Loader(self._arrays("loader", batch_size, options), augment=augment)

    @shows_options(LoaderFactory.arrays)
    def arrays(self, batch_size: int, *, encoded: bool = False, **options: Unpack[EpochOptions]) -> ArrayLoader:
        """The batches of one epoch as NumPy arrays, for a framework other than PyTorch or for none.

        They are those of ``loader``, sample by sample, and so are their states. PyTorch is not asked for them, unless
        something is augmented.

        Args:
            batch_size: as of ``loader``.
            encoded: give the samples as they lie in the store, which nobody has decoded: ``features`` are ``bytes``, an
                array of objects. It is for jobs without a model.
            **options: as of ``loader``; ``augment`` is given a ``Batch`` here too.

        Raises:
            OrderMismatch: as ``loader``.
            SettingError: as ``loader``; or there are no encoded samples to give.
            TypeError: An option is unknown.
        """
        augment = options.pop("augment", None)
        if augment is None and "bfloat16" not in self.frost_line.dtypes:
            return self._arrays("arrays", batch_size, options, encoded=encoded)
        from frostline.loaders.torch_loader import in_arrays

        return self._arrays("arrays", batch_size, options, encoded=encoded, change=in_arrays(augment))

    @shows_options(LoaderFactory.arrays)
    def epochs(self, batch_size: int, epochs: Sequence[int], **options: Unpack[EpochOptions]) -> "Epochs[Loader]":
        """Several epochs, such as ``range(10)``: each a loader, asked for while the one before it ends.

        What an epoch is asked for early waits in the window until all of the one before was handed out. Where features
        are kept at the trainer the next epoch finds them, and is not asked for before.

        Args:
            batch_size: as of ``loader``.
            epochs: their numbers, each once.
            **options: as of ``loader``, but ``epoch``.

        Raises:
            SettingError: as ``loader``; or there is no epoch, or one comes twice.
            TypeError: An option is unknown.
        """
        check_names(options, "epochs")
        return Epochs(self.loader(batch_size, **options), epochs)

    def row_reader(self, batch_size: int) -> RowReader:
        """What reads rows of the job's data in another process, on this machine or elsewhere, as the job would.

        Args:
            batch_size: rows of a batch.
        """
        return RowReader(worker_setup=self._worker_setup, shares=self._router.shares, batch_size=batch_size)

    def train(
        self,
        recipe: Recipe,
        train: Dataset | None = None,
        held_out: Dataset | None = None,
        *,
        plain_preprocess: Preprocess | None = None,
    ) -> "Trained":
        """Train the head on the node, with cross-entropy over the data set's classes; its tensors come back into it.

        The node must have been started with ``--allow-training``. What happens is told to the job's observer, as it
        is when the head is trained here. On one machine the losses and the tensors are the same bits as here.

        Args:
            recipe: how.
            train: the samples to train on; all of the job's data by default.
            held_out: samples to score after each epoch.
            plain_preprocess: preprocessing of these, where the job's own is random.

        Raises:
            SettingError: The job has no node in a process of its own, no head, or other data.
            ModelError: The head cannot travel; the sentence says what to do instead.
            Refused: The node does not take it.
            Unavailable: The node is busy with another training, or went away.
            KeyboardInterrupt: Ctrl-C; what was learned by then has come back.
        """
        from frostline.jobs.in_store import Assignment, train_beside
        from frostline.models.head import portable

        data = self._maker.own(train)
        held = None if held_out is None else self._maker.own(held_out)
        shipment, transport = self._fetcher.shipment, self._fetcher.transport
        if shipment is None or not isinstance(transport, TrainsBeside):
            raise SettingError(
                "training in the store needs a frozen part, and one node in a process of its own: give near=, and "
                "start the node there with frostline serve --allow-training"
            )
        assignment = Assignment(
            data=self._data.url,
            reading=self._data.manifest.reading,
            train=_all_of(data),
            held_out=data.samples.take(np.zeros(0, np.int64)) if held is None else _all_of(held),
            classes=len(self._data.classes),
            prefix=shipment.digest,
            engine=self._fetcher.engine.name,
            cut=self.frost_line.number,
            inputs=tuple(map(TensorSpec, self.frost_line.shapes, self.frost_line.dtypes)),
            preprocess=self._fetcher.preprocess,
            plain_preprocess=steps_left_of(plain_preprocess, data) if plain_preprocess else self._fetcher.preprocess,
            head=portable(self.head),
            recipe=recipe,
            views=self._settings.views,
            max_skipped=self._settings.max_skipped(len(self._data)),
        )
        self._fetcher.transport.put_prefix(shipment.digest, shipment.artifact)  # where others took its place
        return train_beside(transport, assignment, self._observe)

    def use(self, shares: Mapping[Route, float], *, follow: bool = False) -> None:
        """Let the samples that are not asked for yet take these ways, whatever the plan says; for comparisons.

        Args:
            shares: shares of the samples, by way; they sum to 1.
            follow: change them where what is measured says so.

        Raises:
            SettingError: The shares do not sum to 1, or name an unknown cut.
        """
        self._router.use(shares, follow=follow)

    def explain(self) -> Explanation:
        """What ran where and why, predicted and measured; ``print`` it."""
        return Explanation(
            plan=self.plan,
            first_plan=self._router.first_plan,
            situation=self.situation,
            statistics=self.statistics(),
            where=self.where,
            engine=self.engine,
            fallback=self.fallback,
            diagnosis=self.diagnosis(),
        )

    def diagnosis(self) -> Diagnosis:
        """What holds the job back, with its evidence, what to change, and the gain to expect; ``print`` it.

        It is judged from what the job did since a second after its first batch, while batches came from the store side.
        """
        return diagnose(self._usage.usage())

    def statistics(self) -> JobStatistics:
        """What the job did so far."""
        wire = self._fetcher.transport.statistics()
        return replace(self._collector.statistics(), wire_bytes=wire.bytes_received, requests=wire.requests)

    def stages(self) -> dict[str, float]:
        """Seconds by stage so far, summed over threads; stages overlap, and a node's are those of all its jobs.

        Raises:
            Unavailable: The node does not answer.
        """
        done = self._fetcher.transport.node_statistics().get("totals", {})
        decode_s, compute_s = self._fetcher.local_stage.seconds
        return {
            "store: read": done.get("read_s", 0.0),
            "store: decode": done.get("decode_s", 0.0),
            "store: frozen layers": done.get("compute_s", 0.0),
            "trainer: decode": decode_s,
            "trainer: frozen layers": compute_s,
        }

    def close(self) -> None:
        """Close the connections, and the embedded node where there is one. Calling it again does nothing.

        From then on its loaders fetch nothing, and say so.
        """
        self._fetcher.closed.set()
        self._close()

    def close_when_unused(self) -> None:
        """Close the job once neither it nor a loader of it is referred to any more, or the process ends."""
        # It is what the job and all of its loaders refer to.
        weakref.finalize(self._observe, self._close)

    def _arrays(self, method: str, batch_size: int, given: EpochOptions, **more: Any) -> ArrayLoader:
        """A loader that knows how it was made, for workers."""
        check_names(given, method)
        if self._trains_in_store:
            raise SettingError(
                "policy all_in_store trains on the node: call the job's train, or choose another policy for a loop "
                "of your own"
            )
        options = checked_options({"batch_size": batch_size, **given, **more})
        batch_size = options.pop("batch_size")
        if options.get("data") is None and (mixed := mixed_splits(self._data)) is not None:
            self._collector(SetupWarning(reason=mixed))
        if options.get("map") is not None:
            options["map"] = TravellingFunction(function=options["map"])
        arrays = self._maker.arrays(batch_size, **options)
        return arrays.made_by(JobLoaderSpec.of(self._worker_setup, self._router.shares, batch_size, options))


def _all_of(data: Dataset) -> Samples:
    return data.samples.take(np.arange(len(data), dtype=np.int64))
