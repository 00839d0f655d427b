"""Data sets: a manifest of samples over data that stays as it is."""

from frostline.datasets.dataset import Dataset
from frostline.datasets.manifest import DatasetStatistics, SizeQuantiles
from frostline.datasets.targets import MultiLabel, TargetSpec

__all__ = ("Dataset", "DatasetStatistics", "MultiLabel", "SizeQuantiles", "TargetSpec")
