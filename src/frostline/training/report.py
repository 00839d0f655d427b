"""What a finished run was, as one value: the fields of ``report.json`` and of ``--json``."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from frostline.core import Skipped

__all__ = ("CutReport", "PlanReport", "Report", "Whereabouts")


@dataclass(frozen=True, slots=True, kw_only=True)
class CutReport:
    """One candidate of the plan: the network cut here, with what that was expected to cost.

    Attributes:
        cut: its number (0 ships the encoded image, 1 the pixels).
        name: of the layer before it, as a person knows it.
        wire_bytes_per_sample: payload that crosses for one sample.
        store_s: seconds a sample at the store side, from reading to this cut.
        trainer_s: seconds a sample at the trainer, from this cut to the frost line.
        memory_bytes: the node needs for one device batch.
        samples_per_s: predicted for the whole pipeline.
        rejected: why another cut was taken, in a sentence; None for the one chosen.
    """

    cut: int
    name: str
    wire_bytes_per_sample: float
    store_s: float
    trainer_s: float
    memory_bytes: int
    samples_per_s: float
    rejected: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The cut a job used and every candidate it was chosen from, in the network's order."""

    cut: int
    candidates: tuple[CutReport, ...]

    @property
    def chosen(self) -> CutReport | None:
        """The candidate that was used, or None where no candidate was measured."""
        return next((candidate for candidate in self.candidates if candidate.cut == self.cut), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where one part of the work ran, such as ``decode`` at ``node 127.0.0.1:7070``."""

    part: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run of ``frostline train``, finished or interrupted.

    Attributes:
        model: name given by the user.
        data: URL of the data set.
        started: when, as ISO 8601 in UTC.
        seconds: of wall clock, from the first sample asked for to the last validation.
        epochs: finished; fewer than asked for where the run was interrupted.
        samples: handed to the head, over all epochs.
        train_samples: in the training split.
        val_samples: held out.
        classes: names, in the order of their labels.
        losses: one for each optimisation step.
        epoch_losses: mean over each epoch's steps.
        val_losses: on the held-out split, after each epoch.
        val_accuracies: share of the held-out samples that were right, after each epoch.
        val_accuracy: after the last epoch; None without a held-out split.
        wire_bytes: store side to trainer, bodies and headers.
        baseline_wire_bytes: the encoded images over the same epochs.
        plan: the cut and its alternatives.
        stalls_s: seconds in which the training loop waited for a batch.
        stages: seconds spent in each stage, over all epochs; stages overlap.
        where: what ran where.
        skipped: samples that could not be read.
        interrupted: whether the user stopped the run.
        settings: the run's options by name.
        versions: of Frostline, Python and the libraries that decide the numbers.
    """

    model: str
    data: str
    started: str
    seconds: float
    epochs: int
    samples: int
    train_samples: int
    val_samples: int
    classes: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()
    epoch_losses: tuple[float, ...] = ()
    val_losses: tuple[float, ...] = ()
    val_accuracies: tuple[float, ...] = ()
    val_accuracy: float | None = None
    wire_bytes: int
    baseline_wire_bytes: int
    plan: PlanReport
    stalls_s: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    where: tuple[Whereabouts, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    interrupted: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes_ratio(self) -> float | None:
        """How many times fewer bytes crossed than the encoded images have; None where nothing crossed."""
        return self.baseline_wire_bytes / self.wire_bytes if self.wire_bytes else None

    @property
    def stall_share(self) -> float:
        """Share of the run's seconds in which the training loop waited for a batch."""
        return self.stalls_s / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values that JSON can hold: a loss that is not finite becomes None."""
        derived = {"bytes_ratio": self.bytes_ratio, "stall_share": self.stall_share}
        plain = _plain({**asdict(self), **derived})
        assert isinstance(plain, dict)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
