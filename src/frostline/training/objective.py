"""What a head learns: the loss of a batch, and how well held-out samples are scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from frostline.loaders import Batch
from frostline.training.recipe.confusion import Confusion
from frostline.training.recipe.confusion_tally import ConfusionTally
from frostline.training.recipe.losses import Criterion, criterion_of
from frostline.training.recipe.metrics import make_metrics, metrics_of
from frostline.wire.recipes import LOSSES, TASKS

__all__ = ("Objective", "Tally", "objective_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a head learns.

    Attributes:
        task: ``classes``, ``labels`` or ``numbers``, as of ``wire.recipes.TASKS``.
        criterion: mean loss of a batch in training.
        held_out: mean loss of a batch of held-out samples, without what helps training alone.
        metrics: names of the metrics, the main one first.
        are_targets: classes stand in the batch's targets, not in its labels.
    """

    task: str
    criterion: Criterion
    held_out: Criterion
    metrics: tuple[str, ...]
    are_targets: bool = False

    def loss(self, scores: Any, batch: Batch) -> torch.Tensor:
        """The mean loss of a batch, from the head's scores."""
        return self.criterion(scores, self.targets(scores, batch))

    def begin(self) -> "Tally":
        """Begin to count what a pass over held-out samples gets right."""
        return Tally(self)

    def targets(self, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Classes as ``int64[batch]``; labels and numbers as floats in the shape of the scores."""
        found: Any = batch.targets if self.are_targets or self.task != "classes" else batch.labels
        targets: torch.Tensor = found if self.task == "classes" else found.to(scores.dtype).reshape(scores.shape)
        return targets


def objective_of(
    loss: str = LOSSES[0],
    *,
    are_targets: bool = False,
    task: str | None = None,
    metrics: Sequence[str] = (),
    label_smoothing: float = 0.0,
) -> Objective:
    """The objective of a loss.

    Args:
        loss: one of ``wire.recipes.LOSSES``, or ``FILE.py:FUNCTION``.
        are_targets: a column of targets was declared.
        task: one of ``wire.recipes.TASKS``; None takes the one that the loss is for.
        metrics: names of metrics; none takes those of the task.
        label_smoothing: share that cross-entropy spreads over all classes.

    Raises:
        SettingError: there is no such loss, or no such metric for what it is for.
    """
    task = task or TASKS[loss]
    criterion = criterion_of(loss, label_smoothing)
    return Objective(
        task=task,
        criterion=criterion,
        held_out=criterion_of(loss) if label_smoothing else criterion,
        metrics=metrics_of(task, metrics),
        are_targets=are_targets,
    )


class Tally:
    """What a pass over held-out samples got right so far.

    Args:
        objective: names the metrics, and the loss.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._metrics = make_metrics(objective.task, objective.metrics)
        self._confusion = ConfusionTally() if objective.task == "classes" else None

    def add(self, scores: torch.Tensor, batch: Batch) -> float:
        """Count a batch; its samples' losses, summed."""
        targets = self._objective.targets(scores, batch)
        for metric in self._metrics.values():
            metric.add(scores, targets)
        if self._confusion is not None:
            self._confusion.add(scores, targets, batch.ids)
        return float(self._objective.held_out(scores, targets)) * len(batch)

    @property
    def scores(self) -> Mapping[str, float]:
        """The metrics over all that was counted, by their names."""
        return {name: metric.value for name, metric in self._metrics.items()}

    @property
    def confusion(self) -> Confusion | None:
        """Which classes were taken for which; None where no classes are learned."""
        return None if self._confusion is None else self._confusion.value
