"""Loaders: an epoch's samples as batches, for PyTorch and other frameworks."""

import importlib
from typing import TYPE_CHECKING, Any

from frostline.loaders.epoch.arguments import EpochOptions
from frostline.loaders.epoch.epoch_loader import ArrayLoader
from frostline.loaders.epoch.epochs import Epochs
from frostline.loaders.epoch.mixture import Mixture
from frostline.loaders.epoch.numpy_batch import Arrays
from frostline.loaders.epoch.ranks import Ranks
from frostline.loaders.epoch.sample_map import Sample
from frostline.loaders.epoch.worker_state import merge_worker_states

if TYPE_CHECKING:
    from frostline.loaders.torch.augment import FeatureMixup, FeatureNoise
    from frostline.loaders.torch.batch import Batch
    from frostline.loaders.torch.loader import Loader
    from frostline.loaders.torch.workers import WorkerLoader

__all__ = (
    "ArrayLoader",
    "Arrays",
    "Batch",
    "EpochOptions",
    "Epochs",
    "FeatureMixup",
    "FeatureNoise",
    "Loader",
    "Mixture",
    "Ranks",
    "Sample",
    "WorkerLoader",
    "merge_worker_states",
)

# Of PyTorch, which loops of other frameworks do without: imported when they are named.
_MODULES = {
    "Batch": "frostline.loaders.torch.batch",
    "FeatureMixup": "frostline.loaders.torch.augment",
    "FeatureNoise": "frostline.loaders.torch.augment",
    "Loader": "frostline.loaders.torch.loader",
    "WorkerLoader": "frostline.loaders.torch.workers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
