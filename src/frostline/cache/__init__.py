"""Caches of features: in memory at the trainer, on disk on either side, in an object store for several nodes."""

from frostline.cache.disk import DiskStatistics, FeatureStore
from frostline.cache.keys import RowLayout, Scope, row_keys
from frostline.cache.memory import CachedIn, CacheStatistics, DiskCache, FeatureCache, RowNames, TieredCache
from frostline.cache.shared import SharedStatistics, SharedStore

__all__ = (
    "CacheStatistics",
    "CachedIn",
    "DiskCache",
    "DiskStatistics",
    "FeatureCache",
    "FeatureStore",
    "RowLayout",
    "RowNames",
    "Scope",
    "SharedStatistics",
    "SharedStore",
    "TieredCache",
    "row_keys",
)
