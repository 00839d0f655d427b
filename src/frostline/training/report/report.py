"""What a finished run was, as one value: the fields of ``report.json``, and its recipe in words."""

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib.metadata import version
from typing import Any

from frostline.core import FLOAT32, REFERENCE, Skipped
from frostline.core.events import EpochTrained, Evaluated, Event, HeadSelected, Observer, Replanned, StepFinished, Tuned
from frostline.core.files import with_schema
from frostline.core.system import __version__
from frostline.core.units import in_percent
from frostline.planning import Plan
from frostline.planning.replanning import Diagnosis
from frostline.training.recipe import Confusion
from frostline.transport import NodeUse
from frostline.wire.recipes import LOSSES, SCHEDULES

__all__ = (
    "Record",
    "Report",
    "RouteUsage",
    "WorkLocation",
    "recipe_in_words",
    "versions",
)

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteUsage:
    """The number of samples that arrived at a trainer through one cut (``name``) and ``codec``."""

    cut: int
    codec: str
    name: str
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLocation:
    """Where one part of the work ran, such as ``decode`` at ``node 127.0.0.1:7070``."""

    part: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run of ``frostline train``, finished or interrupted.

    Attributes:
        model: name given by the user.
        data: URL of the data set.
        started: the time of its start, as ISO 8601 in UTC.
        seconds: seconds of wall clock, from the command to this report: set-up, training and scoring.
        setup_s: the seconds of them before the training loop: listing, building and cutting the network, planning.
        first_step_s: the time from the command to the end of the first optimiser step; None where there was none.
        epochs: number of epochs finished; fewer than asked for where the run was interrupted.
        head_epoch: epoch whose head was kept: the last one, unless the loss of the held-out samples decided; 0 before
            any.
        held_out: the held-out samples, and whether they decided which head was kept, in words.
        samples: the samples, handed to the head, over all epochs.
        train_samples: the samples in the training split.
        val_samples: number of held-out samples.
        train_split: name of the split that was trained on; None where it was none.
        val_split: name of the split that was scored; None where it was none.
        classes: names, in the order of their labels.
        losses: loss of each optimisation step.
        epoch_losses: mean over each epoch's steps.
        val_losses: the losses on the held-out split, after each epoch.
        val_accuracies: share of the held-out samples that were right, after each epoch; none where no classes are
            learned.
        val_accuracy: accuracy of the head that was kept; None without a held-out split.
        val_scores: scores of the held-out samples after each epoch, by the name of the metric: those of
            ``core.units.METRICS`` that the run has.
        val_score: scores of the head that was kept, by the same names.
        confusion: answers of that head to the held-out samples, class by class, and its mistakes; None where
            no classes are learned, nothing is held out, or another process scored it.
        wire_bytes: store side to trainer, bodies and headers.
        baseline_wire_bytes: the encoded images: once where features are kept between epochs, else in each epoch.
        diagnosis: the part that held the run back, with the gain to expect without it; None where nobody looked.
        plan: the plan in force at the end: which share of the samples takes which way, and what every other would cost;
            None where the job was too short for measuring to pay.
        engine: engine that ran the frozen layers at the node in the end.
        engine_error: the largest relative error against the reference on samples of the job; 0 for the reference.
        fallback: the reason why the network was not cut as it stands, in a sentence; None where it was.
        ways: the ways by which the samples arrived, the most used first.
        accuracy: accuracy that engine and codecs had to keep.
        codec_error: the largest relative error that a codec made in any sample; 0 where nothing was lost.
        replans: changes of the plan while the job ran.
        tunings: changes of the window's bounds while it ran.
        predicted_samples_per_s: the rate by the plan that the job began with, while features come from the store; None
            where it knew no bound.
        measured_samples_per_s: the rate in the passes in which nothing came from the cache; None where there was none.
        stall_s: seconds in which the training loop waited for a batch.
        stages: seconds spent in each stage, over all epochs; stages overlap.
        where: pairs of a part of the work and where it ran.
        nodes: requests to each of several nodes, and their outcome.
        skipped: samples that could not be read.
        left_out: parts of the data that are no samples, by kind and reason.
        nonfinite: samples for which the frozen layers gave Inf or NaN, counted each time that they came.
        first_nonfinite: the first row with Inf or NaN, in words: its sample, cut, dtype and engine; empty if there is
            none.
        interrupted: True if the user stopped the run.
        ended_by: error that ended the run before its end, in words; None where none did.
        not_written: names of the run's files that could not be written, with the reason of each.
        resumed_steps: steps that were taken before the run went on in this process; 0 where it began here. Seconds,
            bytes, samples by way and stages are those of this process.
        settings: the run's options by name.
        versions: versions of Frostline, Python and the libraries that decide the numbers.
    """

    model: str
    data: str
    started: str
    seconds: float
    setup_s: float = 0.0
    first_step_s: float | None = None
    epochs: int
    head_epoch: int = 0
    held_out: str = ""
    samples: int
    train_samples: int
    val_samples: int
    train_split: str | None = None
    val_split: str | None = None
    classes: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()
    epoch_losses: tuple[float, ...] = ()
    val_losses: tuple[float, ...] = ()
    val_accuracies: tuple[float, ...] = ()
    val_accuracy: float | None = None
    val_scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    val_score: Mapping[str, float] = field(default_factory=dict)
    confusion: Confusion | None = None
    wire_bytes: int
    baseline_wire_bytes: int
    diagnosis: Diagnosis | None = None
    plan: Plan | None = None
    engine: str = REFERENCE
    engine_error: float = 0.0
    fallback: str | None = None
    ways: tuple[RouteUsage, ...] = ()
    accuracy: str | float = FLOAT32
    codec_error: float = 0.0
    replans: tuple[Replanned, ...] = ()
    tunings: tuple[Tuned, ...] = ()
    predicted_samples_per_s: float | None = None
    measured_samples_per_s: float | None = None
    stall_s: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    where: tuple[WorkLocation, ...] = ()
    nodes: tuple[NodeUse, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    left_out: tuple[Mapping[str, Any], ...] = ()
    nonfinite: int = 0
    first_nonfinite: str = ""
    interrupted: bool = False
    ended_by: str | None = None
    not_written: Mapping[str, str] = field(default_factory=dict)
    resumed_steps: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes_ratio(self) -> float | None:
        """How many times fewer bytes crossed than the encoded images have; None where nothing crossed or would have."""
        return (self.baseline_wire_bytes / self.wire_bytes or None) if self.wire_bytes else None

    @property
    def stall_share(self) -> float:
        """Share of the seconds after set-up in which the training loop waited for a batch."""
        training_s = self.seconds - self.setup_s
        return self.stall_s / training_s if training_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values that JSON can hold: a loss that is not finite becomes None.

        Beside the fields it has the number of their ``schema``, and the version of Frostline that wrote it.
        """
        plan = None if self.plan is None else self.plan.to_json()
        derived = {"bytes_ratio": self.bytes_ratio, "stall_share": self.stall_share, "plan": plan}
        own = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        plain = _plain({**own, **derived})
        assert isinstance(plain, dict)
        return with_schema(plain, _FORMAT)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


class Record:
    """An observer that keeps losses and scores, and passes every event on.

    Attributes:
        losses: loss of each step.
        epoch_losses: mean over the steps of each epoch that was trained to its end.
        scores: scores of the held-out samples, one an epoch.
        samples: the samples, handed to the head.
        first_step_at: the time when the first step was taken, as ``time.perf_counter`` counts; None before.
        kept: the epoch's head was kept where held-out loss decided; None else.
        resumed_steps: steps of an earlier process.
        resumed_epochs: epochs that an earlier process trained to their end.
    """

    def __init__(self, on_event: Observer) -> None:
        self._on_event = on_event
        self.losses: list[float] = []
        self.epoch_losses: list[float] = []
        self.scores: list[Evaluated] = []
        self.samples = 0
        self.first_step_at: float | None = None
        self.kept: HeadSelected | None = None
        self.resumed_steps = 0
        self.resumed_epochs = 0

    def resume(
        self, *, losses: Sequence[float], epoch_losses: Sequence[float], scores: Sequence[Evaluated], samples: int
    ) -> None:
        """Take over what an earlier process kept."""
        self.losses, self.epoch_losses, self.scores = list(losses), list(epoch_losses), list(scores)
        self.samples = samples
        self.resumed_steps, self.resumed_epochs = len(losses), len(epoch_losses)

    @property
    def scores_by_name(self) -> Mapping[str, tuple[float, ...]]:
        """Scores after each epoch, by their names."""
        names = self.scores[0].scores if self.scores else ()
        return {name: tuple(item.scores[name] for item in self.scores) for name in names}

    @property
    def kept_scores(self) -> Mapping[str, float]:
        """Scores of the head that was kept; none where nothing was scored."""
        place = -1 if self.kept is None else self.kept.epoch
        return {name: values[place] for name, values in self.scores_by_name.items()}

    def __call__(self, event: Event) -> None:
        """Keep what it says, and pass it on."""
        match event:
            case StepFinished():
                self.first_step_at = self.first_step_at or time.perf_counter()
                self.losses.append(event.loss)
                self.samples += event.samples
            case EpochTrained():
                self.epoch_losses.append(event.loss)
            case Evaluated():
                self.scores.append(event)
            case HeadSelected():
                self.kept = event
            case _:
                pass
        self._on_event(event)


_DECIDING = ("numpy", "pillow", "pyarrow")


def versions() -> dict[str, str]:
    """Versions of Frostline, Python and the libraries that decide the numbers."""
    import torch

    found = {"frostline": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**found, **{name: version(name) for name in _DECIDING}}


# In words where a setting differs from what it is by default.
_WORDS: dict[str, tuple[Any, Callable[[Any], str]]] = {
    "loss": (LOSSES[0], "loss {}".format),
    "label_smoothing": (0.0, lambda share: f"label smoothing of {in_percent(share)}"),
    "lora": (None, "adapters {}".format),
    "unfreeze": (None, "later trained too: {}".format),
    "weight_decay": (None, "weight decay {:g}".format),
    "warm_up": (0.0, lambda some: f"warm-up of {in_percent(some) if some < 1 else f'{some:.0f} steps'}"),
    "schedule": (SCHEDULES[0], "{} learning rate".format),
    "patience": (None, "patience of {} epochs".format),
    "bf16": (False, lambda _: "computed in bfloat16"),
}


def recipe_in_words(settings: Mapping[str, Any]) -> str:
    """The optimiser, its steps and every setting that is not the default, in words; empty if nothing is known.

    Args:
        settings: settings of the run, by name, as in its report.
    """
    if "optimizer" not in settings:
        return ""
    said = [f"{settings['optimizer']} at {settings['learning_rate']:g}", f"batches of {settings['batch_size']}"]
    for name, (default, words) in _WORDS.items():
        value = settings.get(name, default)
        said += [] if value == default else [words(value)]
    return ", ".join(said)
