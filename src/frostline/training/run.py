"""The main job: freeze a network, train its head on features that a node sends, evaluate, save, report."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from frostline.datasets import Dataset
from frostline.errors import FrostlineError, ModelError, SettingError
from frostline.events import Observer, RunResumed, SetupWarning
from frostline.jobs import Job
from frostline.loaders import Loader
from frostline.models.tracing.comparison import kept_buffers
from frostline.planning import ALL_IN_STORE
from frostline.training.checkpoint import Checkpoint
from frostline.training.files import make_folder, write_tensors, write_text
from frostline.training.loop import Loop
from frostline.training.objective import Objective, objective_of
from frostline.training.recipe.confusion import Confusion
from frostline.training.recipe.lora import merged_state
from frostline.training.recipe.losses import file_digest
from frostline.training.recipe.unfreezing import Unfreezing
from frostline.training.report.report import Record, Report, WorkLocation, versions
from frostline.training.report.thumbnails import names_of, thumbnails
from frostline.training.run_config import RunConfig
from frostline.training.run_folder import CheckpointFolder, begin_run
from frostline.training.settings import CheckpointEvery, TrainSettings
from frostline.training.setup import Setup, set_up
from frostline.training.sides import in_words, is_test, sides_of
from frostline.training.stages import Stages
from frostline.training.start import StartedJob, outputs_of
from frostline.wire.recipes import FEW_EPOCHS

__all__ = ("train",)


def train(
    settings: TrainSettings,
    observe: Observer,
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
        settings: on what, and how.
        observe: told what happens.
        begun: work that has begun already, which the caller ends; None begins here.
        began_at: since when the report's seconds count, as ``time.perf_counter`` does; now by default.
        options: options of the command, for the run's config.
        resumes: go on with the run in ``settings.out`` from its last checkpoint, instead of beginning one there.

    Raises:
        UserError: what the user can put right.
        NodeUnreachable: the node stayed away for longer than the loader's ``retry_for_s``.
    """
    began_at = time.perf_counter() if began_at is None else began_at
    if settings.out is not None:
        make_folder(settings.out)
    record = Record(observe)
    epochs = Unfreezing.parse(settings.unfreeze).until_next(0, settings.epochs or FEW_EPOCHS)
    with set_up(settings.job, record, begun=begun, min_classes=2, epochs=epochs) as setup:
        run = _Run(settings, setup, record, began_at)
        run.begin(options or {}, resumes=resumes)
        try:
            run.epochs()
        finally:
            # Also where the node stayed away or too much was unreadable: what was learned by then is kept.
            report = run.report()
            if settings.out is not None:
                _save(settings, setup.network.model, run, report)
    return report


class _Run:
    """One run: the loop, here or beside the store, and its report."""

    def __init__(self, settings: TrainSettings, setup: Setup, record: Record, began_at: float) -> None:
        self._settings = settings
        self._began_at = began_at
        self._setup = setup
        self._stages = Stages(setup, Unfreezing.parse(settings.unfreeze), settings.epochs or FEW_EPOCHS, record)
        self._record = record
        self._sides = sides_of(settings, setup)
        self._train, self._held_out = self._sides.train, self._sides.held_out
        record(self._sides.taken)
        self._recipe = replace(settings.recipe, selects=not is_test(self._sides.val_split))
        every = CheckpointEvery.parse(settings.checkpoint_every)
        self._checkpoints = None if settings.out is None else CheckpointFolder(settings.out, every)
        self._resumed: Checkpoint | None = None
        if self._recipe.patience is not None and not (len(self._held_out) and self._recipe.selects):
            raise SettingError("patience goes by held-out samples, and there are none that may choose: leave it out")
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
            observe=self._record,
            objective=self._objective(),
            checkpointer=self._checkpoints,
            thaw=self._stages.thaw,
            last_thaw=Unfreezing.parse(self._settings.unfreeze).last_epoch,
        )

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
            SettingError: there is no run in it, or that run began with other data or another network.
            OutOfSpace: the disk is full.
        """
        folder, checkpoints = self._settings.out, self._checkpoints
        if folder is None or checkpoints is None:
            return
        digest = file_digest(self._settings.job.loss)
        config = RunConfig(
            options={**options, "samples": options.get("samples") or self._setup.samples},
            outputs=outputs_of(self._setup.data, self._settings.job),
            classes=self._classes(),
            identity={
                "the samples to train on": self._train.digest,
                "the held-out samples": self._held_out.digest if len(self._held_out) else "",
                "the frozen layers and their preprocessing": self._job.features_digest,
                **({"the lines of the loss function's file": digest} if digest else {}),
            },
        )
        if resumes:
            RunConfig.read(folder).require(config.identity, folder)
            self._take_up(*checkpoints.latest())
        else:
            begin_run(folder, config)

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
        with torch.no_grad(), torch.random.fork_rng(), kept_buffers(self._setup.network.model):
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
        trained = self._job.train(
            self._recipe, self._train, self._held_out, plain_preprocess=self._setup.network.plain_preprocess
        )
        self._store_head_s = trained.head_s
        self._interrupted = not trained.is_whole

    def _loader(self, data: Dataset, epoch: int, *, shuffle: bool) -> Loader:
        return self._job.loader(
            batch_size=self._settings.batch_size,
            shuffle=shuffle,
            seed=self._settings.job.seed,
            epoch=epoch,
            data=data,
            preprocess=None if shuffle else self._setup.network.plain_preprocess,
            targets=self._settings.job.targets is not None,
        )

    def report(self) -> Report:
        """Everything that was gathered."""
        settings, job = self._settings, self._job
        explained, record = job.explain(), self._record
        epochs = len(record.epoch_losses)
        plan, first_plan = explained.plan, explained.first_plan
        statistics, ways, seconds = self._stages.done()
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
            skipped=statistics.skipped,
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
        names = names_of(self._held_out, [mistake.id for mistake in said.mistakes])
        mistakes = tuple(replace(mistake, name=names.get(mistake.id, "")) for mistake in said.mistakes)
        return replace(said, mistakes=mistakes)

    def pictures(self, report: Report) -> Mapping[int, str]:
        """Small pictures of those samples; none after an interrupt, which is to end the run soon."""
        if report.confusion is None or report.interrupted:
            return {}
        return thumbnails(self._held_out, [mistake.id for mistake in report.confusion.mistakes])

    def _classes(self) -> tuple[str, ...]:
        targets = self._setup.data.targets
        return self._setup.data.classes if targets is None else targets.specs[0].classes

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


def _bound(samples_per_s: float) -> float | None:
    return None if math.isinf(samples_per_s) else samples_per_s


def _plain_settings(settings: TrainSettings) -> Mapping[str, Any]:
    own = {**asdict(settings), "out": str(settings.out) if settings.out else None}
    named = {**own.pop("job"), **own}
    named["loader"].pop("token")  # it belongs into no file
    return {name: value for name, value in named.items() if name not in ("data", "model")}


def _save(settings: TrainSettings, model: nn.Module, run: _Run, report: Report) -> None:
    # Its plots bring matplotlib, which takes a second to import: not before the first step.
    from frostline.training.report.page import render_page

    out, has_adapters = settings.out, settings.job.lora is not None
    assert out is not None, "there is a folder"
    write_tensors(out / "head.safetensors", run.head.state_dict())
    write_tensors(out / "model.safetensors", merged_state(model) if has_adapters else model.state_dict())
    write_text(out / "report.json", json.dumps(report.to_json(), indent=2) + "\n")
    write_text(out / "report.html", render_page(report, run.pictures(report)))
