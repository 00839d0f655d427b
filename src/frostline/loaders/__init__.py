"""The loader and the job: features in, batches out."""

from frostline.loaders.augment import FeatureMixup, FeatureNoise
from frostline.loaders.batch import Batch
from frostline.loaders.job import Job
from frostline.loaders.ledger import JobStatistics
from frostline.loaders.loader import Loader
from frostline.loaders.offload import offload

__all__ = ("Batch", "FeatureMixup", "FeatureNoise", "Job", "JobStatistics", "Loader", "offload")
