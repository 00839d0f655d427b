"""Decides which features a job keeps between epochs and for later jobs, and makes the caches for them."""

from dataclasses import replace

from frostline.cache import DiskCache, FeatureCache, FeatureStore, RowNames, Scope, TieredCache
from frostline.config import LoaderSettings
from frostline.core import SampleTable, View
from frostline.preprocess import Preprocess
from frostline.preprocess.masks import MASK_DTYPE

__all__ = ("Keeper", "keeps_all")


def keeps_all(nbytes: int, preprocess: Preprocess, settings: LoaderSettings) -> bool:
    """Whether so many bytes of features all stay at the trainer after their first epoch."""
    room_bytes = settings.cache_bytes + (settings.cache_disk_bytes if settings.cache_folder is not None else 0)
    return not preprocess.is_random and nbytes <= room_bytes


class Keeper:
    """The caches of one job, one for each preprocessing and each view that comes again.

    Args:
        scope: what the job's features depend on beside preprocessing and view.
        samples: of the job's data set.
        settings: how much is kept, and where.
        store: on disk, shared with other jobs; None keeps features in memory alone.
    """

    def __init__(
        self, scope: Scope, samples: SampleTable, settings: LoaderSettings, store: FeatureStore | None = None
    ) -> None:
        self._scope = scope
        self._settings = settings
        self._store = store
        self._names = None if store is None else RowNames(samples)
        self._caches: dict[bytes, TieredCache] = {}

    def view(self, preprocess: Preprocess, seed: int, epoch: int) -> View | None:
        """Which random view an epoch has; None where the preprocessing is not random.

        With a number of views the one of epoch ``e`` is ``e mod views``, so that it comes again.
        """
        if not preprocess.is_random:
            return None
        views = self._settings.views
        return View(seed=seed, epoch=epoch % views, recurs=True) if views else View(seed=seed, epoch=epoch)

    def cache(self, preprocess: Preprocess, view: View | None, *, has_targets: bool = False) -> TieredCache | None:
        """Where features of that view are kept, masks with them; None where none come again, or none is to be kept."""
        if (view is not None and not view.recurs) or not (self._settings.cache_bytes or self._store):
            return None
        scope = replace(self._scope, preprocess=preprocess.digest, view=view)
        if has_targets:
            mask = preprocess.shape[1:]
            scope = replace(scope, shapes=(*scope.shapes, mask), dtypes=(*scope.dtypes, MASK_DTYPE))
        if scope.digest not in self._caches:
            # What the caches in memory may take together stays within the setting.
            left = self._settings.cache_bytes - sum(cache.memory.statistics().bytes for cache in self._caches.values())
            disk = None
            if self._store is not None and self._names is not None:
                disk = DiskCache(self._store, scope, self._names)
            self._caches[scope.digest] = TieredCache(FeatureCache(scope, max(0, left)), disk)
        return self._caches[scope.digest]
