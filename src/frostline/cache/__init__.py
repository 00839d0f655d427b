"""Caches of features: in memory at the trainer, on disk on either side, in an object store for several nodes."""

from frostline.cache.disk import DiskStatistics, FeatureStore
from frostline.cache.keys import Scope, row_keys
from frostline.cache.memory import CacheStatistics, FeatureCache
from frostline.cache.rows import RowLayout
from frostline.cache.shared import SharedStatistics, SharedStore
from frostline.cache.tiers import DiskCache, Held, RowNames, TieredCache

__all__ = (
    "CacheStatistics",
    "DiskCache",
    "DiskStatistics",
    "FeatureCache",
    "FeatureStore",
    "Held",
    "RowLayout",
    "RowNames",
    "Scope",
    "SharedStatistics",
    "SharedStore",
    "TieredCache",
    "row_keys",
)
