"""What a head learns, by the name of its loss: classes, numbers or several labels; and how well it does."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from frostline.loaders import Batch

__all__ = ("Classes", "Numbers", "Objective", "SeveralLabels", "objective_of")


class Objective(Protocol):
    """What a head learns."""

    @property
    def metric(self) -> str:
        """The name of the score."""

    def loss(self, scores: Any, batch: Batch) -> torch.Tensor:
        """The mean loss of a batch, from the head's scores."""

    def begin(self) -> "Tally":
        """Begin to count what a pass over held-out samples gets right."""


class Tally(Protocol):
    """What a pass over held-out samples got right so far."""

    def add(self, scores: torch.Tensor, batch: Batch) -> float:
        """Count a batch; its samples' losses, summed."""

    @property
    def score(self) -> float:
        """The metric over all that was counted; 0 before anything was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """One class of several for each sample.

    Attributes:
        are_targets: classes stand in the batch's targets, not in its labels.
    """

    are_targets: bool = False
    metric: str = "accuracy"

    def loss(self, scores: Any, batch: Batch) -> torch.Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(scores, self._classes(batch))

    def begin(self) -> "Tally":
        """Count samples whose class has the greatest score."""
        return _Right(self._classes)

    def _classes(self, batch: Batch) -> Any:
        return batch.targets if self.are_targets else batch.labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """A number for each sample, or a vector of them; the score is the mean absolute error."""

    metric: str = "mae"

    def loss(self, scores: Any, batch: Batch) -> torch.Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(scores, _like(batch.targets, scores))

    def begin(self) -> "Tally":
        """Sum absolute errors."""
        return _Errors()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralLabels:
    """Any number of labels for each sample, as zeros and ones; the score is macro-F1."""

    metric: str = "macro_f1"

    def loss(self, scores: Any, batch: Batch) -> torch.Tensor:
        """Binary cross-entropy of each label."""
        return nn.functional.binary_cross_entropy_with_logits(scores, _like(batch.targets, scores))

    def begin(self) -> "Tally":
        """Count hits, false alarms and misses of each label."""
        return _Hits()


def objective_of(loss: str, *, are_targets: bool) -> Objective:
    """The objective of a loss's name.

    Args:
        loss: one of ``wire.recipes.LOSSES``.
        are_targets: a column of targets was declared.
    """
    if loss == "mse":
        return Numbers()
    return SeveralLabels() if loss == "bce" else Classes(are_targets=are_targets)


class _Right:
    def __init__(self, classes: Any) -> None:
        self._classes = classes
        self._right, self._seen = 0, 0

    def add(self, scores: torch.Tensor, batch: Batch) -> float:
        classes = self._classes(batch)
        self._right += int((scores.argmax(1) == classes).sum())
        self._seen += len(batch)
        return float(nn.functional.cross_entropy(scores, classes, reduction="sum"))

    @property
    def score(self) -> float:
        return self._right / max(1, self._seen)


class _Errors:
    def __init__(self) -> None:
        self._sum, self._seen = 0.0, 0

    def add(self, scores: torch.Tensor, batch: Batch) -> float:
        errors = scores - _like(batch.targets, scores)
        self._sum += float(errors.abs().mean(1).sum())
        self._seen += len(batch)
        return float(errors.square().mean(1).sum())

    @property
    def score(self) -> float:
        return self._sum / max(1, self._seen)


class _Hits:
    def __init__(self) -> None:
        self._hits: Any = 0
        self._said: Any = 0
        self._meant: Any = 0

    def add(self, scores: torch.Tensor, batch: Batch) -> float:
        meant = _like(batch.targets, scores)
        said = (scores > 0).to(meant.dtype)
        self._hits, self._said = self._hits + (said * meant).sum(0), self._said + said.sum(0)
        self._meant = self._meant + meant.sum(0)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, meant, reduction="none")
        return float(loss.mean(1).sum())

    @property
    def score(self) -> float:
        if isinstance(self._hits, int):
            return 0.0
        # A label that nobody has and nobody says is right; as scikit-learn's zero_division=1 has it.
        both = self._said + self._meant
        return float(torch.where(both > 0, 2 * self._hits / both.clamp(min=1), torch.ones_like(both)).mean())


def _like(targets: Any, scores: torch.Tensor) -> torch.Tensor:
    """Targets as floats in the shape of the scores, ``[batch, outputs]``."""
    found: torch.Tensor = targets.to(scores.dtype).reshape(scores.shape)
    return found
