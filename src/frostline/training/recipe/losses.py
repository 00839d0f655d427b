"""Finds a loss by its name, or a function of the user's own in a file of Python."""

import hashlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frostline.errors import SettingError

__all__ = ("Criterion", "criterion_of", "file_digest")

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
