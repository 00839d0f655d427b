"""The main job: freeze a network, train its head on features that a node sends, evaluate, save, report."""

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frostline.core import Route
from frostline.datasets import Dataset
from frostline.errors import FrostlineError, ModelError, SettingError, Unavailable
from frostline.events import Evaluated, Observer, StepFinished
from frostline.loaders import Loader
from frostline.planning import Plan
from frostline.training.files import make_folder, write_tensors, write_text
from frostline.training.page import render_page
from frostline.training.report import Report, WayTaken, Whereabouts
from frostline.training.settings import TrainSettings
from frostline.training.setup import Setup, set_up
from frostline.training.versions import versions

__all__ = ("train",)


def train(settings: TrainSettings, observe: Observer) -> Report:
    """Train the head and write ``head.safetensors``, ``model.safetensors``, ``report.json`` and ``report.html``.

    Interrupted by Ctrl-C, it writes the same files with what it has, and returns a report that says so.

    Raises:
        UserError: what the user can put right.
        NodeUnreachable: the node stayed away for longer than the loader's ``retry_for_s``.
    """
    if settings.out is not None:
        make_folder(settings.out)
    with set_up(settings.job, observe, least_classes=2, epochs=settings.epochs) as setup:
        run = _Run(settings, setup, observe)
        try:
            run.epochs()
        finally:
            # Also where the node stayed away or too much was unreadable: what was learned by then is kept.
            report = run.report()
            if settings.out is not None:
                _save(settings.out, setup.network.model, setup.job.head, report)
    return report


class _Run:
    """The training loop and what it has gathered."""

    def __init__(self, settings: TrainSettings, setup: Setup, observe: Observer) -> None:
        self._settings = settings
        self._setup = setup
        self._job = job = setup.job
        self._observe = observe
        self._train, self._held_out = setup.data.split(settings.val_share, settings.job.seed)
        self._optimizer = _optimizer(settings, job.head)
        self._check_head()
        self._started = datetime.now(UTC)
        self._losses: list[float] = []
        self._epoch_losses: list[float] = []
        self._val: list[Evaluated] = []
        self._samples = 0
        self._head_s = 0.0
        self._seconds = 0.0
        self._interrupted = False

    def _check_head(self) -> None:
        """Score one sample of zeros, so that a network that gives no scores is refused before any work."""
        line = self._job.frost_line
        zeros = [torch.zeros((2, *shape)) for shape in line.shapes]
        self._job.head.eval()
        with torch.no_grad():
            scores = self._job.head(zeros)
        classes = len(self._setup.data.classes)
        if not isinstance(scores, torch.Tensor) or scores.shape != (2, classes):
            given = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            raise ModelError(f"the network must give a tensor of scores [batch, {classes}], and it gives {given}")

    def epochs(self) -> None:
        """Train; an interrupt ends it early and is noted."""
        started = time.perf_counter()
        torch.manual_seed(self._settings.job.seed)
        try:
            for epoch in range(self._settings.epochs):
                self._epoch(epoch)
        except KeyboardInterrupt:
            self._interrupted = True
        except FrostlineError:
            self._interrupted = True
            raise
        finally:
            self._seconds = time.perf_counter() - started

    def _epoch(self, epoch: int) -> None:
        head = self._job.head
        head.train()
        first = len(self._losses)
        loader = self._loader(self._train, epoch, shuffle=True)
        total = self._settings.epochs * len(loader)
        for batch in loader:
            started = time.perf_counter()
            loss = nn.functional.cross_entropy(head(batch.features), batch.labels)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._losses.append(float(loss.detach()))
            self._samples += len(batch)
            self._head_s += time.perf_counter() - started
            self._stepped(epoch, total, len(batch))
        steps = self._losses[first:]
        self._epoch_losses.append(sum(steps) / max(1, len(steps)))
        if len(self._held_out):
            self._evaluate(epoch)

    def _stepped(self, epoch: int, steps: int, samples: int) -> None:
        done = len(self._losses)
        self._observe(StepFinished(epoch=epoch, step=done, steps=steps, samples=samples, loss=self._losses[-1]))

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> None:
        head = self._job.head
        head.eval()
        losses, right, seen = 0.0, 0, 0
        for batch in self._loader(self._held_out, epoch, shuffle=False):
            scores = head(batch.features)
            losses += float(nn.functional.cross_entropy(scores, batch.labels, reduction="sum"))
            right += int((scores.argmax(1) == batch.labels).sum())
            seen += len(batch)
        done = Evaluated(epoch=epoch, samples=seen, loss=losses / max(1, seen), accuracy=right / max(1, seen))
        self._val.append(done)
        self._observe(done)

    def _loader(self, data: Dataset, epoch: int, *, shuffle: bool) -> Loader:
        return self._job.loader(
            batch_size=self._settings.batch_size,
            shuffle=shuffle,
            seed=self._settings.job.seed,
            epoch=epoch,
            data=data,
            preprocess=None if shuffle else self._setup.network.plain_preprocess,
        )

    def report(self) -> Report:
        """Everything that was gathered."""
        settings, job = self._settings, self._job
        explained, epochs = job.explain(), len(self._epoch_losses)
        statistics, plan, first_plan = explained.statistics, explained.plan, explained.first_plan
        assert plan, "a job with a model has a plan"
        assert first_plan, "and had one from the beginning"
        return Report(
            model=settings.job.model,
            data=self._setup.data.url,
            started=self._started.isoformat(timespec="seconds"),
            seconds=self._seconds,
            epochs=epochs,
            samples=self._samples,
            train_samples=len(self._train),
            val_samples=len(self._held_out),
            classes=self._setup.data.classes,
            losses=tuple(self._losses),
            epoch_losses=tuple(self._epoch_losses),
            val_losses=tuple(one.loss for one in self._val),
            val_accuracies=tuple(one.accuracy for one in self._val),
            val_accuracy=self._val[-1].accuracy if self._val else None,
            wire_bytes=statistics.wire_bytes,
            baseline_wire_bytes=self._baseline_bytes(epochs),
            plan=plan,
            fallback=explained.fallback,
            ways=_ways(plan, statistics.routed),
            accuracy=settings.job.accuracy,
            codec_error=statistics.codec_error,
            replans=statistics.replans,
            predicted_samples_per_s=_bound(first_plan.samples_per_s),
            measured_samples_per_s=statistics.fetched_per_s,
            stalls_s=statistics.stall_s,
            stages={**self._stages(), "trainer: head": self._head_s, "waiting for a batch": statistics.stall_s},
            where=tuple(Whereabouts(part=part, where=where) for part, where in explained.where),
            skipped=statistics.skipped,
            interrupted=self._interrupted,
            settings={**_plain_settings(settings), "weights": self._setup.network.weights},
            versions=versions(),
        )

    def _stages(self) -> Mapping[str, float]:
        try:
            return self._job.stages()
        except Unavailable:  # a run that was cut short may have lost its node
            return {}

    def _baseline_bytes(self, epochs: int) -> int:
        """What a loop without Frostline would have fetched: each epoch's training and held-out images, encoded."""
        return epochs * (self._train.samples.encoded_bytes + self._held_out.samples.encoded_bytes)


def _optimizer(settings: TrainSettings, head: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if not parameters:
        raise SettingError(f"--until {settings.job.until} freezes the whole network, so there is nothing to train")
    match settings.optimizer:
        case "sgd":
            return torch.optim.SGD(parameters, settings.learning_rate, momentum=0.9)
        case "adamw":
            return torch.optim.AdamW(parameters, settings.learning_rate)
        case _:
            return torch.optim.Adam(parameters, settings.learning_rate)


def _ways(plan: Plan, routed: Iterable[tuple[Route, int]]) -> tuple[WayTaken, ...]:
    names = {one.cut: one.name for one in plan.candidates}
    taken = (
        WayTaken(cut=route.cut, codec=route.codec, name=names[route.cut], samples=samples) for route, samples in routed
    )
    return tuple(sorted(taken, key=lambda one: -one.samples))


def _bound(samples_per_s: float) -> float | None:
    return None if math.isinf(samples_per_s) else samples_per_s


def _plain_settings(settings: TrainSettings) -> Mapping[str, Any]:
    own = {**asdict(settings), "out": str(settings.out) if settings.out else None}
    named = {**own.pop("job"), **own}
    named["loader"].pop("token")  # it belongs into no file
    return {name: value for name, value in named.items() if name not in ("data", "model")}


def _save(out: Path, model: nn.Module, head: nn.Module, report: Report) -> None:
    write_tensors(out / "head.safetensors", head.state_dict())
    write_tensors(out / "model.safetensors", model.state_dict())
    write_text(out / "report.json", json.dumps(report.to_json(), indent=2) + "\n")
    write_text(out / "report.html", render_page(report))
