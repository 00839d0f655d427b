"""The loader and the job: features in, batches out."""

from frostline.loaders.array_loader import ArrayLoader
from frostline.loaders.arrays import Arrays
from frostline.loaders.augment import FeatureMixup, FeatureNoise
from frostline.loaders.batch import Batch
from frostline.loaders.blend import Blend
from frostline.loaders.epochs import Epochs
from frostline.loaders.job import Job
from frostline.loaders.ledger import JobStatistics
from frostline.loaders.loader import Loader
from frostline.loaders.offload import offload
from frostline.loaders.passport import furthest
from frostline.loaders.ranks import Ranks
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
