"""Loaders: an epoch's samples as batches, for PyTorch and other frameworks."""

import importlib
from typing import TYPE_CHECKING, Any

from frostline.loaders.arguments import EpochOptions, Mixture, Ranks
from frostline.loaders.epoch import Epochs
from frostline.loaders.epoch_loader import ArrayLoader, merge_worker_states
from frostline.loaders.row_source import Arrays
from frostline.loaders.sample_map import Sample

if TYPE_CHECKING:
    from frostline.loaders.torch_loader import Batch, FeatureMixup, FeatureNoise, Loader
    from frostline.loaders.torch_workers import WorkerLoader

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
    "Batch": "frostline.loaders.torch_loader",
    "FeatureMixup": "frostline.loaders.torch_loader",
    "FeatureNoise": "frostline.loaders.torch_loader",
    "Loader": "frostline.loaders.torch_loader",
    "WorkerLoader": "frostline.loaders.torch_workers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
