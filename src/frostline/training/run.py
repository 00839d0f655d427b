"""The main job: divide samples, freeze a network, train its head on features that a node sends, score, save, report."""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import nn

from frostline.core import Cut, Samples
from frostline.core.errors import FrostlineError, ModelError, OutOfSpace, SettingError, Unavailable, UserError
from frostline.core.events import LayersUnfrozen, Observer, RunResumed, SetupWarning, SplitsChosen
from frostline.datasets import Dataset
from frostline.datasets.dataset import split_in_two
from frostline.datasets.formats.labels import scoring_splits, training_split
from frostline.datasets.formats.left_out import json_of
from frostline.datasets.selection import (
    alike_classes,
    few_of_a_class,
    numbers_among_names,
    numbers_without_samples,
)
from frostline.jobs import Job
from frostline.jobs.connect import first_of
from frostline.jobs.statistics import JobStatistics, sum_uses
from frostline.loaders import Batch, Loader
from frostline.loaders.epoch import in_turn
from frostline.models.freezing import layer_of, unfreeze, used_parameters
from frostline.models.modules import modes
from frostline.planning import ALL_IN_STORE
from frostline.training.hugging_face import as_saved, config_of
from frostline.training.loop import Checkpoint, Loop, UnfrozenHead
from frostline.training.lora import check_unfrozen, merged_state
from frostline.training.metrics import file_digest
from frostline.training.objective import Objective, objective_of
from frostline.training.recipe import Confusion, Unfreezing
from frostline.training.report.report import Record, Report, RouteUsage, WorkLocation, versions
from frostline.training.report.steps import StepRecorder, digests_of
from frostline.training.run_config import (
    NETWORK,
    REPORT,
    RunConfig,
    has_earlier_network,
    keep_report,
    own_folder,
    unmark_network,
    write_tensors,
    write_text,
)
from frostline.training.run_folder import CheckpointFolder, begin_run
from frostline.training.settings import CheckpointEvery, TrainSettings
from frostline.training.setup import Setup, set_up
from frostline.training.start import StartedJob, chosen_samples, outputs_of
from frostline.wire.recipes import FEW_EPOCHS

__all__ = (
    "LAYERS",
    "SAMPLES",
    "Stages",
    "TrainValSplit",
    "identity_of",
    "in_words",
    "is_test",
    "loader_of",
    "sides_of",
    "train",
)


_SUMS = (
    "wire_bytes",
    "requests",
    "samples",
    "from_cache",
    "nonfinite",
    "stall_s",
    "loading_s",
    "fetching_s",
    "fetched",
)
_LISTS = ("skipped", "replans", "tunings")
_FEW_TO_DIVIDE = 1 << 20
_PAGE = "frostline.training.report.page"
SAMPLES, LAYERS = "the samples to train on", "the frozen layers and their preprocessing"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """What a job did."""

    statistics: JobStatistics
    ways: tuple[RouteUsage, ...]
    stages: Mapping[str, float]


class Stages:
    """The stages of a run: one job after another, each with a frost line that lies before that of the last.

    Args:
        setup: data, network and first job of the run.
        unfreezing: layers that are trained later.
        epochs: number of all epochs.
        on_event: function that is called when the frost line moves.

    Raises:
        SettingError: No layer would be frozen in the end, or a layer to unfreeze has an adapter.
        UnknownLayer: the network has no such layer.
    """

    def __init__(self, setup: Setup, unfreezing: Unfreezing, epochs: int, on_event: Observer) -> None:
        self.job = setup.job
        self._setup = setup
        self._unfreezing = unfreezing
        self._epochs = epochs
        self._left = list(unfreezing.steps)
        self._on_event = on_event
        self._past: list[_Done] = []
        self._is_open = True
        _check(setup, unfreezing)

    def unfreeze(self, epoch: int) -> UnfrozenHead | None:
        """Make the job of an epoch, counted from 0, where it is another one than that of the epoch before.

        Raises:
            UserError: the network cannot be cut there.
            Unavailable: the node went away.
        """
        due = [step for step in self._left if step.epoch <= epoch + 1]
        if not due:
            return None
        del self._left[: len(due)]
        self._past.append(_done(self.job))
        self._is_open = False
        self.job.close()
        network = self._setup.network
        added = [unfreeze(network.model, step.layers, input_shape=network.preprocess.inputs) for step in due]
        with torch.random.fork_rng():  # which dropout goes on with
            self.job = self._setup.again(self._unfreezing.until_next(epoch, self._epochs))
        self._is_open = True
        layers = ", ".join(layer for step in due for layer in step.layers)
        # A run that goes on in a later epoch trains them since the epoch that was asked for.
        since = max(step.epoch for step in due) - 1
        self._on_event(LayersUnfrozen(epoch=since, layers=layers, frost_line=self.job.frost_line.name))
        return UnfrozenHead(head=self.job.head, added=added)

    @property
    def begun(self) -> int:
        """The number of stages that were begun."""
        return len(self._past) + self._is_open

    def totals(self) -> tuple[JobStatistics, tuple[RouteUsage, ...], Mapping[str, float]]:
        """What all jobs did: their statistics, the ways of their samples, and the seconds of each part."""
        # Where a stage could not begin, the job before it is closed, and was counted.
        done = [*self._past, _done(self.job)] if self._is_open else self._past
        return (
            _summed([item.statistics for item in done]),
            tuple(way for item in done for way in item.ways),
            {name: _seconds(name, done) for name in done[-1].stages},
        )


def _check(setup: Setup, unfreezing: Unfreezing) -> None:
    if not unfreezing.steps:
        return
    model = setup.network.model
    check_unfrozen(model, unfreezing.layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained += [parameter for layer in unfreezing.layers for parameter in layer_of(model, layer).parameters()]
    first = next(
        (
            parameter
            for _, parameter in used_parameters(model, setup.network.preprocess.inputs)
            if parameter is not None
        ),
        None,
    )
    if any(first is parameter for parameter in trained):
        raise SettingError(
            f"with {unfreezing.layers[-1]} the whole network is trained, and nothing is left that could run beside the "
            "data: leave it frozen (--unfreeze)"
        )


def _done(job: Job) -> _Done:
    statistics = job.statistics()
    return _Done(statistics=statistics, ways=_ways(job.cuts, statistics), stages=_parts(job))


def _parts(job: Job) -> Mapping[str, float]:
    try:
        return job.stages()
    except Unavailable:  # a run that was cut short may have lost its node
        return {}


def _ways(cuts: Sequence[Cut], statistics: JobStatistics) -> tuple[RouteUsage, ...]:
    taken = (
        RouteUsage(cut=route.cut, codec=route.codec, name=cuts[route.cut].name, samples=samples)
        for route, samples in statistics.routed
    )
    return tuple(sorted(taken, key=lambda item: -item.samples))


def _summed(parts: Sequence[JobStatistics]) -> JobStatistics:
    changes: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    changes |= {name: tuple(item for part in parts for item in getattr(part, name)) for name in _LISTS}
    first = next((part.first_nonfinite for part in parts if part.first_nonfinite), "")
    error, nodes = max(part.codec_error for part in parts), sum_uses(part.nodes for part in parts)
    return replace(parts[-1], codec_error=error, first_nonfinite=first, nodes=nodes, **changes)


def _seconds(name: str, parts: Sequence[_Done]) -> float:
    """A node's seconds are those of all its jobs already."""
    seconds = [part.stages.get(name, 0.0) for part in parts]
    return seconds[-1] if name.startswith("store") else sum(seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainValSplit:
    """What a run trains on and what it scores.

    Attributes:
        train: the samples to train on.
        held_out: the samples to score; it may be empty.
        train_split: name of the split that is trained on; None where it is none.
        val_split: name of the split that is scored; None where it is none.
    """

    train: Dataset
    held_out: Dataset
    train_split: str | None = None
    val_split: str | None = None

    @property
    def taken(self) -> SplitsChosen:
        """Both of them as an event."""
        return SplitsChosen(
            train=self.train_split,
            train_samples=len(self.train),
            held_out=self.val_split,
            held_out_samples=len(self.held_out),
        )


def sides_of(settings: TrainSettings, whole: Dataset, data: Dataset) -> TrainValSplit:
    """The samples to train on and those to score.

    Splits that were asked for go first. Where none was, and the data brings splits, the one that is called so is
    trained on, and the first one for validation that has labels is scored, or else one for the last test. Where
    nothing says what to score, it is a share of the samples to train on.

    Raises:
        DataError: labels are learned, and a sample of one side has none.
        SettingError: both sides would have samples in common, or the data brings several splits of which none is
            called as one to train on.
    """
    asked, brought = settings.job.split, whole.splits_brought
    name = asked or training_split(brought)
    if name is None and len(brought) > 1 and settings.val_split is None:
        raise SettingError(
            f"{data.url} has the splits {', '.join(brought)}, and none that is called train: name the one to "
            "train on (--split)"
        )
    train = data if name == asked else data[str(name)]
    if settings.val_split is not None:
        held_out = chosen_samples(whole, settings.job, settings.val_split)
        _check_apart(train, held_out, settings.val_split)
        _check_labels(settings, train, held_out)
        return TrainValSplit(train=train, held_out=held_out, train_split=name, val_split=settings.val_split)
    if asked is None and name is not None and settings.val_share is None:
        for scored in scoring_splits(brought):
            held_out = data[scored]
            if held_out.target_columns is not None or bool((held_out.samples.labels >= 0).any()):
                _check_labels(settings, train, held_out)
                return TrainValSplit(train=train, held_out=held_out, train_split=name, val_split=scored)
    _check_labels(settings, train)
    train, held_out = split_in_two(train, settings.held_out_share, settings.job.seed)
    return TrainValSplit(train=train, held_out=held_out, train_split=name)


def _few_of_a_class(settings: TrainSettings, sides: TrainValSplit) -> str:
    train, held_out = sides.train, sides.held_out
    if sides.val_split is not None or train.target_columns is not None:
        return ""
    counts = Counter(train.selection.per_label) + Counter(held_out.selection.per_label)
    return few_of_a_class(counts, settings.held_out_share, len(held_out) / max(1, len(train) + len(held_out)))


def _odd_classes(settings: TrainSettings, setup: Setup) -> Sequence[str]:
    if settings.job.targets is not None or setup.whole.target_columns is not None:
        return ()
    classes = setup.whole.classes
    return (
        numbers_without_samples(classes, setup.whole.selection.per_label),
        alike_classes(classes),
        numbers_among_names(classes),
    )


def _check_labels(settings: TrainSettings, *sides: Dataset) -> None:
    if settings.job.targets is None and settings.job.outputs is None:
        for side in sides:
            side.selection.require_labels(side.url)


def _check_apart(train: Dataset, held_out: Dataset, split: str) -> None:
    both = train.selection.count_shared(held_out.selection)
    if both:
        raise SettingError(
            f"{both} samples of split {split!r} are among those to train on too: name the split to train on (--split)"
        )


# A class whose share is less gets one sample held out all the same.
_TESTS = {"test", "tests", "testing"}
_NO_WORD = re.compile(r"[^a-z]+")


def is_test(split: str | None) -> bool:
    """Whether a split is called as one that is scored at the very end, and chooses nothing."""
    return split is not None and not _TESTS.isdisjoint(_NO_WORD.split(split.lower()))


def in_words(split: str | None, share: float, *, is_empty: bool, decided: bool) -> str:
    """What was held out, and what its accuracy therefore says.

    Args:
        split: the name; None for a share of each class.
        share: share of the samples that was held out, where it is no split.
        is_empty: True if nothing was.
        decided: True if it chose which head is kept.
    """
    if is_empty:
        return "nothing"
    what = f"{share * 100:g} % of each class" if split is None else f"split {split!r}"
    if decided:
        return f"{what}, which also chose the epoch: a little optimistic"
    return f"{what}; nothing was chosen by it"


def train(
    settings: TrainSettings,
    on_event: Observer,
    *,
    begun: StartedJob | None = None,
    began_at: float | None = None,
    options: Mapping[str, Any] | None = None,
    resumes: bool = False,
) -> Report:
    """Train the head and write ``head.safetensors``, ``model.safetensors``, ``report.json`` and ``report.html``.

    Interrupted by Ctrl-C, it writes the same files with what it has, and returns a report that says so. While it runs
    it keeps checkpoints, with which another process goes on.

    Args:
        settings: the settings of the job.
        on_event: function that is called with each event.
        begun: work that has begun already, which the caller ends; None begins here.
        began_at: the time since when the report's seconds count, as ``time.perf_counter`` does; now by default.
        options: options of the command, for the run's config.
        resumes: go on with the run in ``settings.out`` from its last checkpoint, instead of beginning one there.

    Raises:
        UserError: The user can mend what is wrong: data, network, node or settings.
        NodeUnreachable: the node stayed away for longer than the loader's ``retry_for_s``.
    """
    began_at = time.perf_counter() if began_at is None else began_at
    record = Record(on_event)
    epochs = Unfreezing.parse(settings.unfreeze).until_next(0, settings.epochs or FEW_EPOCHS)
    first = None if resumes else partial(_first_samples, settings)
    with (
        nullcontext() if settings.out is None else own_folder(settings.out),
        set_up(settings.job, record, begun=begun, min_classes=2, epochs=epochs, first=first) as setup,
    ):
        run = _Run(settings, setup, record, began_at)
        run.begin(options or {}, resumes=resumes)
        try:
            run.epochs()
        except BaseException as error:
            # Also where the node stayed away or too much was unreadable: what was learned by then is kept.
            for lost in _save(settings, setup.network.model, run, replace(run.report(), ended_by=_in_words(error))):
                record(SetupWarning(reason=str(lost)))
            raise
        report = run.report()
        for lost in _save(settings, setup.network.model, run, report):
            raise lost
    return report


def _in_words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _first_samples(settings: TrainSettings, whole: Dataset, data: Dataset) -> Samples:
    """Those of the first epoch; to divide many samples, which is done again for the run, takes longer than it saves."""
    train = sides_of(settings, whole, data).train if len(data) <= _FEW_TO_DIVIDE else data
    return first_of(train, seed=settings.job.seed)


def identity_of(settings: TrainSettings, sides: TrainValSplit, job: Job) -> dict[str, str]:
    """Digests of what must be the same when a run goes on, by what they are of."""
    digest = file_digest(settings.job.loss)
    return {
        SAMPLES: sides.train.digest,
        "the held-out samples": sides.held_out.digest if len(sides.held_out) else "",
        LAYERS: job.features_digest,
        **({"the lines of the loss function's file": digest} if digest else {}),
    }


def loader_of(settings: TrainSettings, setup: Setup, job: Job, data: Dataset, epoch: int, *, shuffle: bool) -> Loader:
    """The batches of an epoch of a run: to train on where they are shuffled, else to score."""
    return job.loader(
        batch_size=settings.batch_size,
        shuffle=shuffle,
        seed=settings.job.seed,
        epoch=epoch,
        data=data,
        preprocess=None if shuffle else setup.network.plain_preprocess,
        targets=settings.job.targets is not None,
    )


class _Run:
    """One run: the loop, here or beside the store, and its report."""

    def __init__(self, settings: TrainSettings, setup: Setup, record: Record, began_at: float) -> None:
        self._settings = settings
        self._began_at = began_at
        self._setup = setup
        self._stages = Stages(setup, Unfreezing.parse(settings.unfreeze), settings.epochs or FEW_EPOCHS, record)
        self._record = record
        self._sides = sides_of(settings, setup.whole, setup.data)
        self._train, self._held_out = self._sides.train, self._sides.held_out
        record(self._sides.taken)
        for why in filter(None, (_few_of_a_class(settings, self._sides), *_odd_classes(settings, setup))):
            record(SetupWarning(reason=why))
        self._recipe = replace(settings.recipe, selects=not is_test(self._sides.val_split))
        every = CheckpointEvery.parse(settings.checkpoint_every)
        self._checkpoints = None if settings.out is None else CheckpointFolder(settings.out, every)
        self._recorder = None if settings.out is None else StepRecorder(settings.out, self._train.samples)
        self._imports = Thread(target=_import_page, name="frostline-imports", daemon=True)
        self._resumed: Checkpoint | None = None
        if self._recipe.patience is not None and not (len(self._held_out) and self._recipe.selects):
            raise SettingError(
                "patience counts epochs whose held-out loss is no better, and no held-out samples may choose here: "
                "leave it out, or hold some out (val_share)"
            )
        self._check_head()
        self._loop = self._here()
        self._started = datetime.now(UTC)
        self._store_head_s: float | None = None
        self._setup_s = 0.0
        self._interrupted = False

    def _here(self) -> Loop:
        return Loop(
            self._recipe,
            self._job.head,
            train=lambda epoch: self._loader(self._train, epoch, shuffle=True),
            held_out=(lambda epoch: self._loader(self._held_out, epoch, shuffle=False))
            if len(self._held_out)
            else None,
            keeps_features=self._job.keeps_features,
            on_event=self._record,
            objective=self._objective(),
            checkpointer=self._checkpoints,
            unfreeze=self._stages.unfreeze,
            last_unfreeze=Unfreezing.parse(self._settings.unfreeze).last_epoch,
            in_turn=in_turn,
            on_batch=self._on_batch,
        )

    def _on_batch(self, step: int, epoch: int, number: int, batch: Batch) -> None:
        """Record it where it is due and can be had again: of the first stage, behind no sample that was left out."""
        self._have_page_imported()
        recorder = self._recorder
        if recorder is None or self._stages.begun > 1 or not recorder.is_due(step) or self._job.statistics().skipped:
            return
        recorder.add(batch, step=step, epoch=epoch, number=number, engine=self._job.engine.engine)

    def _have_page_imported(self) -> None:
        """Import what draws the report from the first step on: at the end nobody computes while this process does."""
        if self._settings.out is not None and self._imports.ident is None:
            self._imports.start()

    @property
    def _job(self) -> Job:
        return self._stages.job

    @property
    def head(self) -> nn.Module:
        """The head as it is trained now."""
        return self._job.head

    def _objective(self) -> Objective:
        job = self._settings.job
        return objective_of(
            job.loss,
            are_targets=job.targets is not None,
            task=job.learns,
            metrics=self._settings.metrics,
            label_smoothing=self._settings.label_smoothing,
        )

    def begin(self, options: Mapping[str, Any], *, resumes: bool) -> None:
        """Begin in the run's folder, or go on with what an earlier process kept there; nothing where there is none.

        Raises:
            SettingError: The folder has no run, or that run began with other data or another network.
            OutOfSpace: the disk is full.
        """
        folder, checkpoints = self._settings.out, self._checkpoints
        if folder is None or checkpoints is None:
            return
        config = RunConfig(
            options={**options, "samples": options.get("samples") or self._setup.samples},
            outputs=outputs_of(self._setup.data, self._settings.job),
            classes=self._classes(),
            identity=identity_of(self._settings, self._sides, self._job),
        )
        if resumes:
            RunConfig.read(folder).require(config.identity, folder)
            tensors = self._setup.network.model.state_dict().values()
            self._take_up(*checkpoints.read_latest(sum(tensor.nbytes for tensor in tensors)))
        else:
            keep_report(folder)
            begin_run(folder, config)
        if self._recorder is not None and self._settings.job.policy != ALL_IN_STORE:
            after = 0 if self._resumed is None else self._resumed.step
            self._recorder.begin(digests_of(self._setup.network.model), self._settings.job.accuracy, after=after)

    def _take_up(self, found: Checkpoint | None, damaged: Sequence[str]) -> None:
        if damaged:
            self._record(SetupWarning(reason=f"the run goes on from an older checkpoint: {', '.join(damaged)}"))
        if found is None:
            return
        self._resumed = found
        self._record.resume(
            losses=found.losses, epoch_losses=found.epoch_losses, scores=found.scores, samples=found.samples
        )
        self._record(RunResumed(epoch=found.epoch, step=found.step))

    def _check_head(self) -> None:
        """Score one sample of zeros, so that a network that gives no scores is refused before any work."""
        line = self._job.frost_line
        crossing = zip(line.shapes, line.dtypes, strict=True)
        zeros = [torch.zeros((2, *shape), dtype=getattr(torch, dtype)) for shape, dtype in crossing]
        self._job.head.train()  # as it was traced: in eval mode it would be traced again, before the first step
        model = self._setup.network.model
        training = {path: module.training for path, module in model.named_modules()}
        with torch.no_grad(), torch.random.fork_rng(), modes(model, training):
            scores = self._job.head(zeros)
        classes = outputs_of(self._setup.data, self._settings.job)
        if not isinstance(scores, torch.Tensor) or scores.shape != (2, classes):
            given = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            raise ModelError(f"the network must give a tensor of scores [batch, {classes}], and it gives {given}")

    def epochs(self) -> None:
        """Train; an interrupt ends it early and is noted."""
        self._setup_s = self._seconds()
        try:
            if self._settings.job.policy == ALL_IN_STORE:
                self._beside_the_store()
            else:
                self._loop.run(self._resumed)
        except KeyboardInterrupt:
            self._interrupted = True
        except FrostlineError:
            self._interrupted = True
            raise

    def _beside_the_store(self) -> None:
        self._have_page_imported()
        trained = self._job.train(
            self._recipe, self._train, self._held_out, plain_preprocess=self._setup.network.plain_preprocess
        )
        self._store_head_s = trained.head_s
        self._interrupted = not trained.is_whole

    def _loader(self, data: Dataset, epoch: int, *, shuffle: bool) -> Loader:
        return loader_of(self._settings, self._setup, self._job, data, epoch, shuffle=shuffle)

    def report(self) -> Report:
        """Everything that was gathered."""
        settings, job = self._settings, self._job
        explained, record = job.explain(), self._record
        epochs = len(record.epoch_losses)
        plan, first_plan = explained.plan, explained.first_plan
        statistics, ways, seconds = self._stages.totals()
        return Report(
            model=settings.job.model,
            data=self._setup.data.url,
            started=self._started.isoformat(timespec="seconds"),
            seconds=self._seconds(),
            setup_s=self._setup_s,
            first_step_s=None if record.first_step_at is None else record.first_step_at - self._began_at,
            epochs=epochs,
            head_epoch=epochs if record.kept is None else record.kept.epoch + 1,
            held_out=in_words(
                self._sides.val_split,
                settings.held_out_share,
                is_empty=not len(self._held_out),
                decided=record.kept is not None,
            ),
            samples=record.samples,
            train_samples=len(self._train),
            val_samples=len(self._held_out),
            train_split=self._sides.train_split,
            val_split=self._sides.val_split,
            classes=self._classes(),
            losses=tuple(record.losses),
            epoch_losses=tuple(record.epoch_losses),
            val_losses=tuple(score.loss for score in record.scores),
            val_accuracies=record.scores_by_name.get("accuracy", ()),
            val_accuracy=record.kept_scores.get("accuracy"),
            val_scores=record.scores_by_name,
            val_score=record.kept_scores,
            confusion=self._confusion(),
            wire_bytes=statistics.wire_bytes,
            baseline_wire_bytes=self._baseline_bytes(epochs - record.resumed_epochs),
            diagnosis=explained.diagnosis,
            plan=plan,
            fallback=explained.fallback,
            engine=explained.engine.engine,
            engine_error=explained.engine.error,
            ways=ways,
            accuracy=settings.job.accuracy,
            codec_error=statistics.codec_error,
            replans=statistics.replans,
            tunings=statistics.tunings,
            predicted_samples_per_s=None if first_plan is None else _bound(first_plan.samples_per_s),
            measured_samples_per_s=statistics.fetched_per_s,
            stall_s=statistics.stall_s,
            stages={**seconds, **self._head_stage(), "waiting for a batch": statistics.stall_s},
            where=tuple(WorkLocation(part=part, where=where) for part, where in explained.where),
            nodes=statistics.nodes,
            skipped=statistics.skipped,
            left_out=tuple(json_of(self._setup.whole.manifest.left_out)),
            nonfinite=statistics.nonfinite,
            first_nonfinite=statistics.first_nonfinite,
            interrupted=self._interrupted,
            resumed_steps=record.resumed_steps,
            settings={**_plain_settings(settings), "weights": self._setup.network.weights},
            versions=versions(),
        )

    def _confusion(self) -> Confusion | None:
        """What the kept head said, with the names of the samples that it got wrong."""
        said = self._loop.confusion
        if said is None:
            return None
        from frostline.training.report.page import names_of  # brings matplotlib, and is for the end

        names = names_of(self._held_out, [mistake.id for mistake in said.mistakes])
        mistakes = tuple(replace(mistake, name=names.get(mistake.id, "")) for mistake in said.mistakes)
        return replace(said, mistakes=mistakes)

    def pictures(self, report: Report) -> Mapping[int, str]:
        """Small pictures of those samples; none after an interrupt, which is to end the run soon."""
        if report.confusion is None or report.interrupted:
            return {}
        from frostline.training.report.page import thumbnails

        return thumbnails(self._held_out, [mistake.id for mistake in report.confusion.mistakes])

    def _classes(self) -> tuple[str, ...]:
        targets = self._setup.data.target_columns
        if targets is None:
            return self._setup.data.classes
        return () if self._settings.job.learns == "numbers" else targets.specs[0].classes

    def _seconds(self) -> float:
        return time.perf_counter() - self._began_at

    def _head_stage(self) -> Mapping[str, float]:
        if self._settings.job.policy != ALL_IN_STORE:
            return {"trainer: head": self._loop.head_s}
        return {} if self._store_head_s is None else {"store: head": self._store_head_s}

    def _baseline_bytes(self, epochs: int) -> int:
        """What a loop without Frostline would have fetched: encoded images, once where it too could keep features."""
        passes = min(epochs, self._stages.begun) if self._job.keeps_features else epochs
        return passes * (self._train.samples.encoded_bytes + self._held_out.samples.encoded_bytes)


def _import_page() -> None:
    with suppress(ImportError):  # whoever needs it says what is missing
        import_module(_PAGE)


def _bound(samples_per_s: float) -> float | None:
    return None if math.isinf(samples_per_s) else samples_per_s


def _plain_settings(settings: TrainSettings) -> Mapping[str, Any]:
    own = {**asdict(settings), "out": str(settings.out) if settings.out else None}
    named = {**own.pop("job"), **own}
    named["loader"].pop("token")  # it belongs into no file
    return {name: value for name, value in named.items() if name not in ("data", "model")}


# Without it transformers does not know whose names the tensors have.
_MADE_BY = {"format": "pt"}
_KEPT = "nothing was learned, so what lies there is what the run before has learned"


def _save(settings: TrainSettings, model: nn.Module, run: _Run, report: Report) -> list[FrostlineError]:
    """Write a run's files, each as far as there is room for it; return why some were not, which the report says too."""
    out = settings.out
    if out is None:
        return []

    def write_config() -> None:
        begun = RunConfig.read(out)
        config = config_of(model, begun.outputs, begun.classes)
        if config is not None:
            write_text(out / "config.json", config)

    def write_report() -> None:
        said = replace(report, not_written=kept | {name: str(error) for name, error in lost.items()})
        write_text(out / REPORT, json.dumps(said.to_json(), indent=2) + "\n")

    def write_page() -> None:
        # Its plots bring matplotlib, which takes a second to import: not before the first step.
        from frostline.training.report.page import render_page

        write_text(out / "report.html", render_page(report, run.pictures(report)))

    def write_head() -> None:
        write_tensors(out / "head.safetensors", as_saved(model, run.head.state_dict()), _MADE_BY)

    def write_model() -> None:
        state = model.state_dict() if settings.job.lora is None else merged_state(model)
        write_tensors(out / NETWORK, as_saved(model, state), _MADE_BY)
        unmark_network(out)

    network = {"head.safetensors": write_head, NETWORK: write_model, "config.json": write_config}
    pages = {REPORT: write_report, "report.html": write_page}
    is_kept = has_earlier_network(out) and not report.losses
    kept = {name: _KEPT for name in network if is_kept and (out / name).exists()}
    lost = dict[str, UserError]()
    for name, write in (pages if is_kept else network | pages).items():
        try:
            write()
        except (OutOfSpace, SettingError) as error:
            lost[name] = error
    return _told(lost, out)


def _told(lost: Mapping[str, UserError], out: Path) -> list[FrostlineError]:
    """One error for all files that were not written; none where all were."""
    if not lost:
        return []
    first, *others = lost.items()
    also = f", and so were not {', '.join(name for name, _ in others)}" if others else ""
    again = f"; once that is mended, frostline train --resume {out} goes on with the run"
    return [type(first[1])(f"{first[1]}{also}{again}")]
