"""The loader and the job: features in, batches out."""

import importlib
from typing import TYPE_CHECKING, Any

from frostline.loaders.array_loader import ArrayLoader
from frostline.loaders.arrays import Arrays
from frostline.loaders.blend import Blend
from frostline.loaders.epochs import Epochs
from frostline.loaders.job import Job
from frostline.loaders.ledger import JobStatistics
from frostline.loaders.offload import offload
from frostline.loaders.passport import furthest
from frostline.loaders.ranks import Ranks

if TYPE_CHECKING:
    from frostline.loaders.augment import FeatureMixup, FeatureNoise
    from frostline.loaders.batch import Batch
    from frostline.loaders.loader import Loader
    from frostline.loaders.workers import WorkerLoader

__all__ = (
    "ArrayLoader",
    "Arrays",
    "Batch",
    "Blend",
    "Epochs",
    "FeatureMixup",
    "FeatureNoise",
    "Job",
    "JobStatistics",
    "Loader",
    "Ranks",
    "WorkerLoader",
    "furthest",
    "offload",
)

# Of PyTorch, which loops of other frameworks do without: imported when they are named.
_MODULES = {
    "Batch": "frostline.loaders.batch",
    "FeatureMixup": "frostline.loaders.augment",
    "FeatureNoise": "frostline.loaders.augment",
    "Loader": "frostline.loaders.loader",
    "WorkerLoader": "frostline.loaders.workers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
