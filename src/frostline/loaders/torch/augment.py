"""Augmentation in feature space, at the trainer: changes kept features anew each epoch, at next to no cost.

Augmented pixels need a pass through the frozen layers for each view. Noise on features and mixtures of two samples'
features need none, so they go with features that are computed once (DeVries and Taylor, "Dataset Augmentation in
Feature Space", 2017; Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018; Verma et al., "Manifold Mixup",
2019).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import View
from frostline.errors import SettingError
from frostline.loaders.torch.batch import Batch, Features, Mixed

__all__ = ("Augment", "FeatureMixup", "FeatureNoise")

Augment = Callable[[Batch, View], Batch]
"""Changes a batch: a function of the batch and of seed and epoch alone, so that an epoch can be had again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureNoise:
    """Adds Gaussian noise to every feature.

    A sample's noise is drawn from (seed, epoch, sample id): it is the same in whatever batch the sample stands.

    Attributes:
        share: standard deviation of the noise, relative to the root mean square of the sample's own features.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.share < np.inf:
            raise SettingError(f"share must be 0 or more, not {self.share}")

    def __call__(self, batch: Batch, view: View) -> Batch:
        """The same batch with noise; tensors that are not floats, such as masks, stay as they are."""
        draws = [_generator(view, 0, id) for id in batch.ids.tolist()]
        return replace(batch, features=_each(batch.features, lambda features: self._noisy(features, draws)))

    def _noisy(self, features: torch.Tensor, draws: list[np.random.Generator]) -> torch.Tensor:
        shape = tuple(features.shape[1:])
        noise = torch.from_numpy(np.stack([draw.standard_normal(shape, np.float32) for draw in draws]))
        scale = features.float().flatten(1).square().mean(1).sqrt() * self.share
        noise *= scale.reshape(-1, *[1] * len(shape))
        return features + noise.to(features.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureMixup:
    """Mixes each sample's features with those of another one of its batch.

    The loss is then ``w * loss(scores, labels) + (1 - w) * loss(scores, batch.mixed.labels)`` for each sample, with
    ``w`` from ``batch.mixed.weights``. Pairs and weights are drawn from seed, epoch and the batch's ids.

    Attributes:
        alpha: alpha of the Beta distribution of the weights; small ones mix little.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.alpha < np.inf:
            raise SettingError(f"alpha must be above 0, not {self.alpha}")

    def __call__(self, batch: Batch, view: View) -> Batch:
        """The mixtures, with the other samples' labels and the weights in ``mixed``; masks of tokens stay as they are.

        Raises:
            SettingError: The batch has targets, which have no mixture.
        """
        if batch.targets is not None:
            raise SettingError("FeatureMixup mixes labels: for batches with targets, ask the loader for targets=False")
        draw = _generator(view, 1, *batch.ids.tolist())
        other = torch.from_numpy(draw.permutation(len(batch)))
        weights = torch.from_numpy(draw.beta(self.alpha, self.alpha, len(batch)).astype(np.float32))

        def mixture(features: torch.Tensor) -> torch.Tensor:
            share = weights.reshape(-1, *[1] * (features.ndim - 1)).to(features.dtype)
            return features * share + features[other] * (1 - share)

        mixed = Mixed(labels=batch.labels[other], weights=weights)
        return replace(batch, features=_each(batch.features, mixture), mixed=mixed)


def _each(features: Features, change: Callable[[torch.Tensor], torch.Tensor]) -> Features:
    if isinstance(features, torch.Tensor):
        return change(features)
    return tuple(change(feature) if feature.is_floating_point() else feature for feature in features)


def _generator(view: View, kind: int, *numbers: int) -> np.random.Generator:
    seed: npt.NDArray[np.uint64] = np.array([view.seed, view.epoch, kind, *numbers], np.uint64)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed.tolist())))
