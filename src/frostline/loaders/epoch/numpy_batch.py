"""The batch that belongs to no framework: activations at the frost line, labels and sample ids, as NumPy arrays."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from frostline.core.features import widened
from frostline.datasets.select.target_columns import TargetValues

__all__ = ("Array", "Arrays", "MixedArrays", "widened_batch")

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedArrays:
    """What was mixed into a batch's features.

    Attributes:
        labels: ``int64[batch]``, of the samples that were mixed in.
        weights: ``float32[batch]``, of the batch's own samples; the others have the rest.
    """

    labels: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrays:
    """One batch, in CPU memory, the caller's own: contiguous, writable, and never written again by Frostline.

    Features have the type of the tensors that cross the frost line: ``float32`` for pixels and for most networks,
    ``float16``, ``float64`` or whole numbers where the network has those. NumPy has no ``bfloat16``: what a network of
    16 bits gives is handed out as ``float32`` (``widened_batch``), and as tensors it is what it was.

    Attributes:
        features: activations at the frost line ``[batch, ...]``; a tuple where several tensors cross it; the
            preprocessed pixels ``float32[batch, C, H, W]`` where there is no model.
        labels: ``int64[batch]``, index into the data set's classes.
        ids: ``int64[batch]`` of the samples.
        mixed: the other samples in the features, where they are mixtures (``FeatureMixup``); else None.
        targets: declared targets of the data set: an array ``[batch, ...]``, a list with one value a sample where
            shapes differ or values are texts, or a dict of these by name. Where none are declared and the data set has
            masks, ``int64[batch, H, W]``, the class of each pixel of the network's input, 255 where there is none. Else
            None.
    """

    features: Array | tuple[Array, ...]
    labels: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    mixed: MixedArrays | None = None
    targets: TargetValues | None = None

    def __len__(self) -> int:
        return len(self.ids)


def widened_batch(batch: Arrays) -> Arrays:
    """The same batch with features that hold bits of bfloat16 as ``float32``, which has all its values."""
    features = batch.features
    return replace(batch, features=tuple(map(widened, features)) if isinstance(features, tuple) else widened(features))
