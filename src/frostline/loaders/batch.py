"""The batch that a training loop takes: activations at the frost line, labels and sample ids, as torch tensors."""

from dataclasses import dataclass

import torch

__all__ = ("Batch",)

Features = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One batch, in CPU memory, the caller's own.

    Attributes:
        features: activations at the frost line ``[batch, ...]``; a tuple where several tensors cross it; the
            preprocessed pixels ``float32[batch, C, H, W]`` where there is no model.
        labels: ``int64[batch]``, index into the data set's classes.
        ids: ``int64[batch]`` of the samples.
    """

    features: Features
    labels: torch.Tensor
    ids: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device; ids stay in CPU memory."""
        if isinstance(self.features, torch.Tensor):
            features: Features = self.features.to(device, non_blocking=True)
        else:
            features = tuple(one.to(device, non_blocking=True) for one in self.features)
        return Batch(features=features, labels=self.labels.to(device, non_blocking=True), ids=self.ids)
