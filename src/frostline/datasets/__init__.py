"""Data sets: a manifest of samples over data that stays as it is."""

from frostline.datasets.dataset import Dataset, DatasetStatistics

__all__ = ("Dataset", "DatasetStatistics")
