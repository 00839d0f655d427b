"""A job: one network's frozen part on a node, its head here, and loaders over the features between them."""

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import numpy as np

from frostline.cache import Scope
from frostline.core import REFERENCE, Cut, Route, Samples, TensorSpec
from frostline.core.config import LoaderSettings
from frostline.core.errors import NetworkChanged, SettingError
from frostline.core.events import SetupWarning
from frostline.core.hints import Hinting, add_hints
from frostline.core.nouns import Closing
from frostline.datasets import Dataset
from frostline.datasets.dataset import steps_left_of
from frostline.jobs.activity import ActivityMeter, PassProgress, start_follower
from frostline.jobs.context import has_engines
from frostline.jobs.loader_factory import CachePolicy, LoaderFactory, keeps_all, mixed_splits, tuner_of
from frostline.jobs.measuring import Measuring
from frostline.jobs.router import PlanFollower, Router
from frostline.jobs.statistics import Explanation, JobStatistics, JobTable, StatisticsCollector, whereabouts
from frostline.jobs.usage import UsageMeter
from frostline.jobs.workers import JobLoaderSpec, RowReader, WorkerSetup
from frostline.loaders.arguments import EpochOptions, checked_options, shows_options
from frostline.loaders.epoch import Epochs
from frostline.loaders.epoch_loader import ArrayLoader
from frostline.loaders.fetch import EngineChoice, Fetcher
from frostline.loaders.sample_map import PicklableFunction, RestOfTransform, declared_targets, with_targets
from frostline.planning import Plan, Situation
from frostline.planning.replanning import NODE, PROCESSORS, Diagnosis, diagnose
from frostline.preprocess import Preprocess
from frostline.preprocess.transforms import Declared, name_of
from frostline.transport import CountsNodes, TrainsBeside
from frostline.wire.recipes import Recipe

if TYPE_CHECKING:  # of PyTorch, which other frameworks do without
    from torch import nn

    from frostline.jobs.in_store import Trained
    from frostline.loaders.torch_loader import Loader
    from frostline.models.changes import FrozenWatch

__all__ = ("Job", "JobParts")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobParts:
    """What of a job depends on its network, and is made anew with its frozen part.

    Attributes:
        fetcher: fetcher that makes the job's requests.
        scope: dependencies of what is kept of its features.
        worker_setup: setup of the job in a worker.
        router: router that chooses the cut and codec of the next request.
        measuring: measurements that are made while the job runs; None where nothing is to be measured.
        cuts: the cuts by number.
        head: trainable rest of the network; None where there is no model.
        fallback: the reason why the network was not cut as it stands; None where it was.
        watch: function that makes a watch for changes of the network, given the head; None where there is no model.
        behind: frozen layers behind the frost line, in words; empty where there are none.
        here: function that gives the engine that runs all frozen layers at the trainer, for its share.
    """

    fetcher: Fetcher
    scope: Scope
    worker_setup: WorkerSetup
    router: Router
    measuring: Measuring | None
    cuts: Sequence[Cut]
    head: "nn.Module | None"
    fallback: str | None
    watch: "Callable[[nn.Module], FrozenWatch] | None" = None
    behind: str = ""
    here: Callable[[], EngineChoice] = EngineChoice

    def untried_parts(self, *, has_engines: bool) -> tuple[str, ...]:
        """What runs all frozen layers of some samples in eager PyTorch, where no other engine was tried.

        Args:
            has_engines: True if the job's accuracy allows other engines, as far as that is known.
        """
        cuts = {route.cut for route, share in self.router.shares.items() if share}
        runs = {NODE: any(cut > 1 for cut in cuts), PROCESSORS: self.head is not None and 0 in cuts}
        known = {NODE: self.fetcher.engine.choice, PROCESSORS: self.here()}
        if not known[NODE].trials and known[PROCESSORS].engine == REFERENCE:
            known[NODE] = known[PROCESSORS]  # a node like the trainer need not find again that eager torch is fastest
        untried = {name for name, choice in known.items() if choice.engine == REFERENCE and not choice.trials}
        return tuple(name for name in runs if has_engines and runs[name] and name in untried)


class Job(JobTable, Hinting, Closing):
    """Features of a data set for a training loop; made by ``offload``.

    Use it as a context manager, or call ``close``.

    Attributes:
        head: the trained part of the network, which shares the parameters of the user's model.
        frost_line: the place where the head takes over; the pixels where there is no model.
        fallback: the reason why the network could not be cut as it is, in a sentence; None if it could.
    """

    def __init__(
        self,
        *,
        data: Dataset,
        parts: JobParts,
        made_anew: Callable[[JobParts], JobParts] | None,
        cache_policy: CachePolicy,
        collector: StatisticsCollector,
        progress: PassProgress,
        settings: LoaderSettings,
        near: str | None,
        trains_in_store: bool = False,
        transform: Declared | None = None,
        close: Callable[[], None],
    ) -> None:
        self._data = data
        self._made_anew = made_anew
        self._cache_policy = cache_policy
        self._collector = collector
        self._progress = progress
        self._head = parts.head
        self._settings = settings
        self._near = near
        self._trains_in_store = trains_in_store
        self._transform = transform
        self._generation = 0
        self._passes: Counter[tuple[str, str, int]] = Counter()  # see ArrayLoader.passes
        self._close_rest = close
        self._unused: weakref.finalize[..., PlanFollower] | None = None
        self._begin_with(parts)

    def _begin_with(self, parts: JobParts) -> None:
        """Run on this frozen part from now on, and close once nobody refers to the job or a loader of it any more."""
        if self._unused is not None:
            self._unused.detach()
        self._parts, self._fetcher, self._router = parts, parts.fetcher, parts.router
        self._worker_setup, self._cuts = parts.worker_setup, tuple(parts.cuts)
        self.frost_line, self.fallback = self._cuts[-1], parts.fallback
        self._watch = None if parts.watch is None or self._head is None else parts.watch(self._head)
        self._cache_policy.switch_scope(parts.scope)
        settings, fetcher, router, data = self._settings, parts.fetcher, parts.router, self._data
        tuner = tuner_of(settings, fetcher, router, data)
        activity = ActivityMeter(self._progress, self._collector, fetcher.transport, router, self._cuts, data)
        nodes = parts.worker_setup.nodes
        follower, self._unfollow = start_follower(
            settings, tuner, fetcher.transport, router, self._cache_policy, nodes, activity, _nothing
        )
        self._close = partial(_close_both, self._unfollow, self._close_rest)
        self._usage = UsageMeter(
            fetcher.transport,
            self._collector,
            self._cache_policy.rejected_rows,
            follower,
            has_own_process=self._near is not None,
            untried=partial(
                parts.untried_parts, has_engines=has_engines(data, fetcher.preprocess, fetcher.engine.accuracy)
            ),
        )
        activity.judge_by(self._usage)
        measuring = parts.measuring
        measured = None if measuring is None else partial(measuring.changes, fetcher=fetcher, router=router)
        # It is what the job and all of its loaders refer to.
        self._on_event = PlanFollower(self._collector, router, measured, self._usage)
        self._unused = weakref.finalize(self._on_event, self._close)
        self._maker = LoaderFactory(
            data=data,
            fetcher=fetcher,
            cache_policy=self._cache_policy,
            router=router,
            collector=self._collector,
            settings=settings,
            tuner=tuner,
            follower=follower,
            on_event=self._on_event,
            tensors=tuple(map(TensorSpec, self.frost_line.shapes, self.frost_line.dtypes)),
        )

    def __reduce_ex__(self, _: object) -> NoReturn:
        # Of this type, since libraries that try what can be pickled expect it.
        raise TypeError(
            "a job has connections and threads, and cannot be copied or pickled: copy job.head, which has weights of "
            "its own then, and hand job.loader(...) to other processes"
        )

    def __repr__(self) -> str:
        near = "" if self._near is None else f", near {self._near}"
        return f"Job({len(self._data):,} samples of {self._data.url}, frost line {self.frost_line.name!r}{near})"

    @property
    def data(self) -> Dataset:
        """The job's data set; with ``on_change="rebuild"``, as it was listed when the job was made."""
        return self._data

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Every cut of the network by its number, from the encoded sample to the frost line."""
        return self._cuts

    @property
    def plan(self) -> Plan | None:
        """The cuts and codecs in use now, and the cost of all others; None without a model."""
        return self._router.plan

    @property
    def situation(self) -> Situation | None:
        """The measurements from which the plan is made; None without a model."""
        return self._router.situation

    @property
    def keeps_features(self) -> bool:
        """True if all features are kept at the trainer after the first epoch, so that later epochs fetch nothing."""
        return keeps_all(self.frost_line.bytes_per_sample * len(self._data), self._fetcher.preprocess, self._settings)

    @property
    def engine(self) -> EngineChoice:
        """The engine that runs the frozen layers at the node now, its error, and what is known of the others."""
        return EngineChoice() if self.frost_line.number in self._fetcher.unfit else self._fetcher.engine.choice

    @property
    def where(self) -> tuple[tuple[str, str], ...]:
        """Pairs of texts: a part of the work, and the side on which it runs now."""
        has_head, engine = self._head is not None, self.engine.engine
        behind = self._parts.behind
        parts = whereabouts(
            self._router.shares,
            self._cuts,
            near=self._near,
            has_head=has_head,
            engine=engine,
            here=self._parts.here().engine,
            behind=behind,
        )
        if self._transform is not None:
            left = ", ".join(map(name_of, self._transform.rest))
            parts = (*parts, (f"transform: {left}", "trainer, for each sample"))
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
        """The trained part of the network; the whole network if it could not be cut (see ``fallback``).

        Raises:
            SettingError: The job has no model; its batches are the preprocessed pixels.
        """
        if self._head is None:
            raise SettingError("this job has no head: offload was called without a model")
        return self._head

    @property
    def changed(self) -> str | None:
        """The change of the network since the job was made or refrozen, in a sentence; None if there is none."""
        try:
            self._require_unchanged()()
        except NetworkChanged as error:
            return str(error)
        return None

    def refreeze(self) -> None:
        """Use the network as it is now, after layers were unfrozen or frozen weights changed.

        Data, connections and features on disk are kept. ``head`` stays the same object and has the parameters that are
        trained now: add the new ones to your optimiser. Loaders made before use the new frozen part from their next
        pass on; a pass that is running ends with an error that says so. If nothing is frozen any more, the whole
        network runs at the trainer, and ``fallback`` says so.

        Raises:
            ModelError: The network cannot be cut; or the head was sharded.
            SettingError: The job has no model, or is closed.
            Refused: The node will not run the network.
        """
        if self._made_anew is None or self._head is None:
            raise SettingError("this job has no network to freeze anew: offload was called without a model")
        self._fetcher.require_open()
        from frostline.models.changes import require_whole, take_over

        require_whole(self._head)
        parts = self._made_anew(self._parts)
        assert parts.head is not None, "there is a model"
        take_over(self._head, parts.head)
        self._unfollow()
        if self._watch is not None:
            self._watch.retire()
        self._begin_with(replace(parts, head=self._head))
        self._generation += 1

    @add_hints
    @shows_options(LoaderFactory.arrays)
    def loader(self, batch_size: int, **options: Unpack[EpochOptions]) -> "Loader":
        """The batches of one epoch.

        Args:
            batch_size: samples of every batch at each rank; the last one of an epoch may have fewer.
            **options: Order, part of the data, ranks and changes, by name: see ``EpochOptions``.

        Raises:
            OrderMismatch: The order to replay was recorded of other samples, or in another order.
            SettingError: a figure that makes no sense, or data from another place than the job's, or without masks
                where they are asked for; or several ranks are to be recorded; or the job's policy trains on the node.
            TypeError: An option is unknown.
        """
        from frostline.loaders.torch_loader import Loader

        augment = options.pop("augment", None)
        return Loader(self._arrays(batch_size, options), augment=augment)

    @add_hints
    @shows_options(LoaderFactory.arrays)
    def arrays(self, batch_size: int, *, encoded: bool = False, **options: Unpack[EpochOptions]) -> ArrayLoader:
        """The batches of one epoch as NumPy arrays, for a framework other than PyTorch or for none.

        Samples, order and states are those of ``loader``. They need no PyTorch, unless ``augment`` is given.

        Args:
            batch_size: samples of every batch at each rank; the last one of an epoch may have fewer.
            encoded: True gives the samples undecoded, as they are stored: ``features`` is an array of ``bytes``
                objects. Only for jobs without a model.
            **options: options of the epoch by name, as of ``loader``; ``augment`` is given a ``Batch`` here too.

        Raises:
            OrderMismatch: The order to replay was recorded of other samples, or in another order.
            SettingError: An argument makes no sense (see ``loader``), or there are no encoded samples to give.
            TypeError: An option is unknown.
        """
        augment = options.pop("augment", None)
        if augment is None and "bfloat16" not in self.frost_line.dtypes:
            return self._arrays(batch_size, options, encoded=encoded)
        from frostline.loaders.torch_loader import in_arrays

        return self._arrays(batch_size, options, encoded=encoded, change=in_arrays(augment))

    @add_hints
    @shows_options(LoaderFactory.arrays)
    def epochs(self, batch_size: int, epochs: Sequence[int], **options: Unpack[EpochOptions]) -> "Epochs[Loader]":
        """Several epochs, such as ``range(10)``: each is a loader, which begins to fetch while the previous one ends.

        So the loop does not wait at the beginning of an epoch. Features that are cached at the trainer are read from
        the cache and not fetched ahead.

        Args:
            batch_size: samples of every batch at each rank; the last one of an epoch may have fewer.
            epochs: numbers of the epochs, in their order; none may come twice.
            **options: options of every epoch by name, as of ``loader``, without ``epoch``.

        Raises:
            SettingError: An argument makes no sense (see ``loader``), there is no epoch, or one comes twice.
            TypeError: An option is unknown.
        """
        return Epochs(self.loader(batch_size, **options), epochs)

    def __iter__(self) -> NoReturn:
        raise TypeError("a job is no loader: write for x, y in job.loader(batch_size=32, shuffle=True)")

    def __len__(self) -> NoReturn:
        raise TypeError("a job is no data set: write len(job.loader(batch_size=32)) for batches, or len(job.data)")

    def __bool__(self) -> bool:
        return True  # it has a length in refusing one

    def __getitem__(self, _: object) -> NoReturn:
        raise TypeError("a job is no data set: write job.data[0], or next(iter(job.loader(batch_size=32)))")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Refuse to be called like a network, and say what is."""
        raise TypeError("a job is no module: write job.head(batch.features)")

    def row_reader(self, batch_size: int) -> RowReader:
        """What reads rows of the job's data in another process, on this machine or elsewhere, as the job would.

        Args:
            batch_size: samples of a batch.

        Raises:
            NetworkChanged: The network is another one than the job's features are of.
        """
        self._fetcher.require_open()
        self._require_unchanged()()
        return RowReader(worker_setup=self._worker_setup, shares=self._router.fixed_shares, batch_size=batch_size)

    @add_hints
    def train(
        self,
        recipe: Recipe,
        train: Dataset | None = None,
        held_out: Dataset | None = None,
        *,
        plain_preprocess: Preprocess | None = None,
    ) -> "Trained":
        """Train the head on the node, with cross-entropy over the data set's classes, and load the result into it.

        The node must have been started with ``--allow-training``. The job's observer gets the same events as when the
        head is trained here. On one machine losses and weights are the same bits as those of training here.

        Args:
            recipe: epochs, batch size, optimiser, learning rate and seed of the training.
            train: samples to train on; by default all of the job's data.
            held_out: samples that are scored after each epoch; by default none are.
            plain_preprocess: preprocessing of the held-out samples, without random steps; by default the job's own.

        Raises:
            SettingError: The job has no node in a process of its own, no head, or other data.
            ModelError: The head cannot travel, or the network has changed; the sentence says what to do instead.
            Refused: The node does not take it.
            Unavailable: The node is busy with another training, or went away.
            KeyboardInterrupt: Ctrl-C; what was learned by then has come back.
        """
        from frostline.jobs.in_store import Assignment, train_beside
        from frostline.models.portable import make_portable

        self._require_unchanged()()
        data = self._maker.job_data(train)
        held = None if held_out is None else self._maker.job_data(held_out)
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
            head=make_portable(self.head),
            recipe=recipe,
            views=self._settings.cached_augmentations,
            max_skipped=self._settings.max_skipped(len(self._data)),
            allow_nonfinite=self._settings.allow_nonfinite,
        )
        self._fetcher.transport.put_prefix(shipment.digest, shipment.artifact)  # where others took its place
        return train_beside(transport, assignment, self._on_event)

    def use(self, shares: Mapping[Route, float], *, replan: bool = False) -> None:
        """Use these cuts and codecs for all samples not yet requested, whatever the plan says; for comparisons.

        Args:
            shares: share of the samples that takes each way, from 0 to 1; they sum to 1.
            replan: True lets the plan change the shares later, by what is measured.

        Raises:
            SettingError: The shares do not sum to 1, or name an unknown cut.
        """
        self._router.use(shares, follow=replan)

    def explain(self) -> Explanation:
        """A report of what ran where and why, predicted and measured; ``print`` it."""
        return Explanation(
            plan=self.plan,
            first_plan=self._router.first_plan,
            situation=self.situation,
            statistics=self.statistics(),
            where=self.where,
            engine=self.engine,
            fallback=self.fallback,
            diagnosis=self.diagnosis(),
            are_both_sides=self._router.are_both_sides,
        )

    def diagnosis(self) -> Diagnosis:
        """The job's bottleneck, the evidence for it, what to change, and the expected gain; ``print`` it.

        It is judged from what the job did since a second after its first batch, while batches came from the store side.
        """
        return diagnose(self._usage.usage())

    def statistics(self) -> JobStatistics:
        """Counts, bytes and seconds of the job so far."""
        transport = self._fetcher.transport
        wire, nodes = transport.statistics(), transport.uses() if isinstance(transport, CountsNodes) else ()
        return replace(
            self._collector.statistics(),
            wire_bytes=wire.bytes_received,
            requests=wire.requests,
            damaged=wire.damaged,
            nodes=self._collector.with_workers(nodes),
        )

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

        Iterating its loaders raises an error from then on.
        """
        self._fetcher.closed.set()
        if self._watch is not None:
            self._watch.release()
        self._close()

    def _arrays(self, batch_size: int, given: EpochOptions, **more: Any) -> ArrayLoader:
        """A loader that knows how it was made, for workers."""
        if self._trains_in_store:
            raise SettingError(
                "policy all_in_store trains on the node: call the job's train, or choose another policy for a loop "
                "of your own"
            )
        options = checked_options({"batch_size": batch_size, **given, **more})
        batch_size = options.pop("batch_size")
        if options.get("data") is None and (mixed := mixed_splits(self._data)) is not None:
            self._collector(SetupWarning(reason=mixed))
        if self._transform is not None and not options.get("encoded") and options.get("preprocess") is None:
            options |= self._transformed(self._transform, options)
        if options.get("map") is not None:
            options["map"] = PicklableFunction(function=options["map"])
        self._fetcher.require_open()
        make = partial(self._unguarded, batch_size, options)
        if self._watch is None:
            return make()
        guard = _PassGuard(
            generations=lambda: self._generation,
            unguarded=make,
            begin=self._require_unchanged,
            end=lambda: None if self._watch is None else self._watch.end(),
            watch=lambda: self._watch,
        )
        return guard.make()

    def _transformed(self, transform: Declared, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with which a loader runs what steps do not say of a transform.

        Raises:
            SettingError: the data has masks, which would not follow it.
        """
        targets = options.get("targets")
        if with_targets(self._data, declared_targets(self._data, targets), targets):
            raise SettingError(
                f"masks follow steps, and {name_of(transform.rest[0])} of transform is none: give the job steps, such "
                "as preprocess=frostline.preprocess.imagenet(224), or the loader targets=False"
            )
        is_turned = (options.get("data") or self._data).manifest.is_turned
        rest = RestOfTransform.of(transform, options.get("map"), is_turned=is_turned)
        return {"map": rest, "encoded": True} if transform.preprocess is None else {"map": rest}

    def _unguarded(self, batch_size: int, options: Mapping[str, Any]) -> ArrayLoader:
        arrays = self._maker.arrays(batch_size, **options)
        if "epoch" not in options:
            arrays.passes = self._passes
        return arrays.set_maker(JobLoaderSpec.of(self._worker_setup, self._router.fixed_shares, batch_size, options))

    def _require_unchanged(self) -> Callable[[], None]:
        if self._watch is None:
            return _nothing
        self._watch.begin()
        return self._watch.step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PassGuard:
    """Stops passes of a job over a network that changed; see ``PassGuard``."""

    generations: Callable[[], int]
    unguarded: Callable[[], ArrayLoader]
    begin: Callable[[], Callable[[], None]]
    end: Callable[[], None]
    watch: "Callable[[], FrozenWatch | None]"

    @property
    def generation(self) -> int:
        """See ``PassGuard``."""
        return self.generations()

    @property
    def note(self) -> Callable[[Sequence[Any]], None]:
        """See ``PassGuard``."""
        watch = self.watch()
        return _nothing if watch is None else watch.note

    def make(self) -> ArrayLoader:
        """See ``PassGuard``."""
        return self.unguarded().set_guard(self)


def _nothing(*_: object) -> None:
    pass


def _close_both(first: Callable[[], None], then: Callable[[], None]) -> None:
    try:
        first()
    finally:
        then()


def _all_of(data: Dataset) -> Samples:
    return data.samples.take(np.arange(len(data), dtype=np.int64))
