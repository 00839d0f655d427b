"""Caches of features: in memory at the trainer, on disk on either side."""

from frostline.cache.disk import DiskStatistics, FeatureStore
from frostline.cache.keys import Scope, row_keys
from frostline.cache.memory import CacheStatistics, FeatureCache
from frostline.cache.rows import RowLayout
from frostline.cache.tiers import DiskCache, RowNames, TieredCache

__all__ = (
    "CacheStatistics",
    "DiskCache",
    "DiskStatistics",
    "FeatureCache",
    "FeatureStore",
    "RowLayout",
    "RowNames",
    "Scope",
    "TieredCache",
    "row_keys",
)
