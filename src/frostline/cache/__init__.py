"""Caches of features: in memory at the trainer, on disk on either side, in an object store for several nodes."""

from frostline.cache.keys import Scope, row_keys
from frostline.cache.local.disk import DiskStatistics, FeatureStore
from frostline.cache.local.memory import CacheStatistics, FeatureCache
from frostline.cache.local.tiers import DiskCache, Held, RowNames, TieredCache
from frostline.cache.rows import RowLayout
from frostline.cache.shared.store import SharedStatistics, SharedStore

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
