"""What a head learns: the loss of a batch, and how well held-out samples are scored and confused."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from frostline.loaders import Batch
from frostline.training.metrics import Criterion, criterion_of, make_metrics, metrics_of
from frostline.training.recipe import ConfusedPair, Confusion, Mistake
from frostline.wire.recipes import LOSSES, TASKS

__all__ = (
    "ConfusionTally",
    "Objective",
    "Tally",
    "objective_of",
)


# The counts of more classes than this would take more than 4 MB, and those of a matrix fill a report's file.
_MAX_COUNTED = 1000
_MAX_MATRIX = 100
_MAX_PAIRS = 20
_MAX_MISTAKES = 24


class ConfusionTally:
    """Gathers it over the batches of a pass, in memory that does not grow with the samples."""

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int32] | None = None
        self._mistakes: list[tuple[float, int, int, int]] = []
        self._samples = self._wrong = 0

    def add(self, scores: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> None:
        """Count a batch.

        Args:
            scores: scores ``[batch, classes]``.
            labels: true classes ``int64[batch]``.
            ids: ids of the samples ``int64[batch]``.
        """
        said = scores.argmax(1)
        shares = scores.detach().float().softmax(1)
        confidence = shares.gather(1, said[:, None])[:, 0].nan_to_num(0.0)
        self._count(scores.shape[1], labels.cpu().numpy(), said.cpu().numpy())
        wrong = said != labels
        self._samples += len(labels)
        self._wrong += int(wrong.sum())
        places = torch.where(wrong, confidence, -1.0).topk(min(_MAX_MISTAKES, int(wrong.sum()))).indices.tolist()
        found = [(float(confidence[place]), int(ids[place]), int(labels[place]), int(said[place])) for place in places]
        self._mistakes = heapq.nlargest(_MAX_MISTAKES, [*self._mistakes, *found])

    def _count(self, classes: int, true: npt.NDArray[np.int64], said: npt.NDArray[np.int64]) -> None:
        if classes > _MAX_COUNTED:
            return
        if self._counts is None:
            self._counts = np.zeros((classes, classes), np.int32)
        np.add.at(self._counts, (true, said), 1)

    @property
    def value(self) -> Confusion:
        """What was gathered so far."""
        return Confusion(
            samples=self._samples,
            wrong=self._wrong,
            matrix=self._matrix(),
            pairs=self._pairs(),
            mistakes=tuple(
                Mistake(id=id, true=true, said=said, confidence=confidence)
                for confidence, id, true, said in self._mistakes
            ),
        )

    def _matrix(self) -> tuple[tuple[int, ...], ...]:
        if self._counts is None or len(self._counts) > _MAX_MATRIX:
            return ()
        return tuple(map(tuple, self._counts.tolist()))

    def _pairs(self) -> tuple[ConfusedPair, ...]:
        if self._counts is None:
            return ()
        confused = self._counts.copy()
        np.fill_diagonal(confused, 0)
        order = np.argsort(-confused, axis=None, kind="stable")[:_MAX_PAIRS]
        true, said = np.unravel_index(order, confused.shape)
        pairs = zip(true.tolist(), said.tolist(), confused[true, said].tolist(), strict=True)
        return tuple(ConfusedPair(true=row, said=column, samples=count) for row, column, count in pairs if count)


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
        objective: objective with the metrics and the loss.
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
