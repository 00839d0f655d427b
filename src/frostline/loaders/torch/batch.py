"""The batch that a training loop takes: activations at the frost line, labels and sample ids, as torch tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from frostline.engines.base.runner import as_array, as_tensor
from frostline.errors import SettingError
from frostline.loaders.epoch.numpy_batch import Arrays, MixedArrays

__all__ = ("Batch", "BatchTargets", "Features", "Mixed", "arrays_of", "batch_of")

Features = torch.Tensor | tuple[torch.Tensor, ...]
BatchTargets = torch.Tensor | list[Any] | dict[str, torch.Tensor | list[Any]]
"""Targets of a batch: lists hold a tensor, a text or a list of texts for each sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixed:
    """What was mixed into a batch's features.

    Attributes:
        labels: ``int64[batch]``, of the samples that were mixed in.
        weights: ``float32[batch]``, of the batch's own samples; the others have the rest.
    """

    labels: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One batch, in CPU memory, the caller's own.

    Attributes:
        features: activations at the frost line ``[batch, ...]``; a tuple where several tensors cross it; the
            preprocessed pixels ``float32[batch, C, H, W]`` where there is no model.
        labels: ``int64[batch]``, index into the data set's classes.
        ids: ``int64[batch]`` of the samples.
        mixed: the other samples in the features, where they are mixtures (``FeatureMixup``); else None.
        targets: declared targets of the data set: a tensor ``[batch, ...]``, a list with one value a sample where
            shapes differ or values are texts, or a dict of these by name. Where none are declared and the data set has
            masks, ``int64[batch, H, W]``, the class of each pixel of the network's input, 255 where there is none, as
            losses are told to ignore. Else None.
    """

    features: Features
    labels: torch.Tensor
    ids: torch.Tensor
    mixed: Mixed | None = None
    targets: BatchTargets | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device; ids stay in CPU memory."""
        if isinstance(self.features, torch.Tensor):
            features: Features = self.features.to(device, non_blocking=True)
        else:
            features = tuple(feature.to(device, non_blocking=True) for feature in self.features)
        mixed = self.mixed
        if mixed is not None:
            mixed = Mixed(labels=mixed.labels.to(device), weights=mixed.weights.to(device))
        labels = self.labels.to(device, non_blocking=True)
        targets = _each(self.targets, torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True))
        return Batch(features=features, labels=labels, ids=self.ids, mixed=mixed, targets=targets)


def batch_of(arrays: Arrays) -> Batch:
    """The same batch as tensors, in the same memory."""
    features, mixed = arrays.features, arrays.mixed
    return Batch(
        features=tuple(map(_tensor, features)) if isinstance(features, tuple) else _tensor(features),
        labels=torch.from_numpy(arrays.labels),
        ids=torch.from_numpy(arrays.ids),
        mixed=None if mixed is None else _mixed(mixed),
        targets=_each(arrays.targets, np.ndarray, torch.from_numpy),
    )


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array) if array.dtype != np.uint16 else as_tensor(array)  # bits of bfloat16


def arrays_of(batch: Batch) -> Arrays:
    """The same batch as arrays, in the same memory where it is in CPU memory."""
    features, mixed = batch.features, batch.mixed
    return Arrays(
        features=tuple(map(as_array, features)) if isinstance(features, tuple) else as_array(features),
        labels=_array(batch.labels),
        ids=_array(batch.ids),
        mixed=None if mixed is None else MixedArrays(labels=_array(mixed.labels), weights=_array(mixed.weights)),
        targets=_each(batch.targets, torch.Tensor, _array),
    )


def _each(targets: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Targets of which each array or tensor is changed, wherever it stands; texts stay."""
    if isinstance(targets, dict):
        return {name: _each(values, kind, change) for name, values in targets.items()}
    if isinstance(targets, list):
        return [_each(value, kind, change) for value in targets]
    return change(targets) if isinstance(targets, kind) else targets


def _mixed(mixed: MixedArrays) -> Mixed:
    return Mixed(labels=torch.from_numpy(mixed.labels), weights=torch.from_numpy(mixed.weights))


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()


def _refuse_to_collate(_: list[Batch], **__: Any) -> NoReturn:
    raise SettingError("the loader makes the batches: give DataLoader batch_size=None")


# As the documentation of ``torch.utils.data.default_collate`` has it.
default_collate_fn_map[Batch] = _refuse_to_collate
