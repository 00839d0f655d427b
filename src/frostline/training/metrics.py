"""Scores held-out samples by the names of metrics, and finds a loss by its name or in the user's own file."""

import hashlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from frostline.core.errors import SettingError
from frostline.wire.recipes import METRICS_OF

__all__ = (
    "Criterion",
    "Metric",
    "criterion_of",
    "file_digest",
    "make_metrics",
    "metrics_of",
)


# Of classes the one that PyTorch counts: to import scikit-learn takes most of a second.
_DEFAULTS = {**METRICS_OF, "classes": ("accuracy",)}
_OF_SCIKIT_LEARN = {"macro_f1", "auroc"}


class Metric(Protocol):
    """Gathers one figure over the batches of a pass."""

    def add(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        """Count a batch."""

    @property
    def value(self) -> float:
        """The figure over all that was counted; 0 before anything was, and not a number where it has no meaning."""


def metrics_of(task: str, asked: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of the metrics of a run, the main one first.

    Args:
        task: one of ``wire.recipes.TASKS``.
        asked: names that were asked for; none takes the task's own.

    Raises:
        SettingError: there is no such metric for the task, or a package is missing.
    """
    unknown = [name for name in asked if name not in METRICS_OF[task]]
    if unknown:
        raise SettingError(
            f"there is no metric {unknown[0]!r} for {task}: --metrics is of {', '.join(METRICS_OF[task])}"
        )
    names = tuple(dict.fromkeys(asked)) or _DEFAULTS[task]
    needing = [name for name in names if name in _OF_SCIKIT_LEARN]
    if needing and find_spec("sklearn") is None:
        raise SettingError(
            f"the metric {needing[0]} is scikit-learn's, which is not installed: pip install 'frostline[torch]', or "
            "choose another one (--metrics)"
        )
    return names


def make_metrics(task: str, names: Sequence[str]) -> Mapping[str, Metric]:
    """New metrics, before anything is counted."""
    return {name: _KINDS[task, name]() for name in names}


class _Accuracy:
    """The share of samples whose class has the greatest score."""

    def __init__(self) -> None:
        self._right, self._seen = 0, 0

    def add(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        self._right += int((scores.argmax(1) == targets).sum())
        self._seen += len(targets)

    @property
    def value(self) -> float:
        return self._right / max(1, self._seen)


class _Gathered:
    """What a metric over all samples at once is given: for each batch what was said and what was meant."""

    def __init__(self) -> None:
        self._said: list[npt.NDArray[np.generic]] = []
        self._meant: list[npt.NDArray[np.generic]] = []

    def _gather(self, said: torch.Tensor, meant: torch.Tensor) -> None:
        self._said.append(said.cpu().numpy())
        self._meant.append(meant.cpu().numpy())

    @property
    def value(self) -> float:
        if not self._said:
            return 0.0
        return self._of(np.concatenate(self._meant), np.concatenate(self._said))

    def _of(self, meant: npt.NDArray[np.generic], said: npt.NDArray[np.generic]) -> float:
        raise NotImplementedError


class _MacroF1(_Gathered):
    """The mean of the classes' F1; of labels at a probability of a half."""

    def add(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        if targets.ndim == 1:
            self._gather(scores.argmax(1), targets)
        else:
            self._gather(scores > 0, targets > 0)

    def _of(self, meant: npt.NDArray[np.generic], said: npt.NDArray[np.generic]) -> float:
        from sklearn.metrics import f1_score

        # A label that nobody has and nobody says is right.
        return float(f1_score(meant, said, average="macro", zero_division=1.0))


class _Auroc(_Gathered):
    """The mean of the areas of those labels that some samples have and some have not."""

    def add(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        self._gather(scores.float(), targets > 0)

    def _of(self, meant: npt.NDArray[np.generic], said: npt.NDArray[np.generic]) -> float:
        from sklearn.metrics import roc_auc_score

        if not np.isfinite(said).all():
            return float("nan")
        both = meant.any(0) & ~meant.all(0)
        return float(roc_auc_score(meant[:, both], said[:, both], average="macro")) if both.any() else float("nan")


class _Error:
    """The mean absolute error."""

    def __init__(self) -> None:
        self._sum, self._seen = 0.0, 0

    def add(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        self._sum += float(self._of(scores - targets).mean(1).sum())
        self._seen += len(targets)

    def _of(self, errors: torch.Tensor) -> torch.Tensor:
        return errors.abs()

    @property
    def value(self) -> float:
        return self._sum / max(1, self._seen)


class _RootOfSquares(_Error):
    """The root of the mean squared error."""

    def _of(self, errors: torch.Tensor) -> torch.Tensor:
        return errors.square()

    @property
    def value(self) -> float:
        return float(super().value ** 0.5)


_KINDS: dict[tuple[str, str], Callable[[], Metric]] = {
    ("classes", "accuracy"): _Accuracy,
    ("classes", "macro_f1"): _MacroF1,
    ("labels", "macro_f1"): _MacroF1,
    ("labels", "auroc"): _Auroc,
    ("numbers", "mae"): _Error,
    ("numbers", "rmse"): _RootOfSquares,
}


Criterion = Callable[[Any, torch.Tensor], torch.Tensor]
"""Takes scores ``[batch, outputs]`` and targets, and gives the mean loss of the samples."""


def criterion_of(loss: str, label_smoothing: float = 0.0) -> Criterion:
    """The loss of a batch.

    Args:
        loss: one of ``wire.recipes.LOSSES``, or ``FILE.py:FUNCTION``.
        label_smoothing: share that cross-entropy spreads over all classes.

    Raises:
        SettingError: there is no such file, or no such function in it.
    """
    match loss:
        case "cross-entropy":
            return partial(nn.functional.cross_entropy, label_smoothing=label_smoothing)
        case "bce":
            return nn.functional.binary_cross_entropy_with_logits
        case "mse":
            return nn.functional.mse_loss
        case _:
            return partial(_checked, loss, _function(loss))


def file_digest(loss: str) -> str:
    """SHA-256 of the file that has a function of the user's own; empty for a loss that has a name."""
    path, colon, _ = loss.rpartition(":")
    return hashlib.sha256(_read(Path(path))).hexdigest() if colon else ""


def _function(loss: str) -> Callable[..., Any]:
    path, _, name = loss.rpartition(":")
    _read(Path(path))
    spec = importlib.util.spec_from_file_location("frostline_loss_of_the_user", path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise SettingError(f"{path} has no function {name!r} (--loss FILE.py:FUNCTION)")
    function: Callable[..., Any] = found
    return function


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(f"the loss function's file {path} cannot be read ({error.strerror}): see --loss") from error


def _checked(loss: str, function: Callable[..., Any], scores: Any, targets: torch.Tensor) -> torch.Tensor:
    value = function(scores, targets)
    if not isinstance(value, torch.Tensor) or value.ndim or not value.is_floating_point():
        given = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise SettingError(f"{loss} must give the mean loss of a batch as one number in a tensor, and it gave {given}")
    return value
