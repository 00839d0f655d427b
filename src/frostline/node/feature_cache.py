"""Looks up the features of a request in the node's caches, and stores new ones there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frostline.cache import DiskStatistics, FeatureStore, RowLayout, Scope, SharedStatistics, SharedStore, row_keys
from frostline.cache.disk import Keys
from frostline.cache.keys import Tensors
from frostline.core import Samples, read_as
from frostline.core.config import NodeSettings
from frostline.core.errors import SettingError
from frostline.engines.machine import hardware_name
from frostline.node.statistics import Counters
from frostline.preprocess import Preprocess
from frostline.stores.open import open_store
from frostline.stores.urls import is_within, normalise_url, object_url, parse_url
from frostline.wire.messages import FeatureRequest

__all__ = ("CachedFeatures", "Found", "NodeCache", "shared_bytes")

Crossing = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The cached part of a batch.

    Attributes:
        mask: ``bool[n]``, True for rows that were found.
        tensors: arrays ``[n, ...]``; rows that were not found are still to be written.
    """

    mask: npt.NDArray[np.bool_]
    tensors: Tensors

    def upto(self, missing: int) -> "Found":
        """The leading rows, with at most ``missing`` rows that were not found."""
        beyond = np.flatnonzero(~self.mask)[missing:]
        if not len(beyond):
            return self
        return Found(mask=self.mask[: beyond[0]], tensors=tuple(tensor[: beyond[0]] for tensor in self.tensors))


# The part of the memory for the index of the shared cache, and for rows that wait to be written.
_SHARED_PART = 16
# Packages that compute features or convert networks, by prefix: another version may give other bits.
_PACKAGES = ("nncf", "onnx", "openvino", "tensorrt", "torch")


class CachedFeatures:
    """The features of one request's samples in the node's caches. Safe for threads.

    The caller has checked that the request may read the data: a cache hit reveals as much as a read.

    Args:
        store: cache on disk; None if there is none.
        shared: cache that nodes share; None if there is none.
        scope: digest of all that the features depend on.
        samples: samples of the request.
        counters: counters of the request.
    """

    def __init__(
        self,
        store: FeatureStore | None,
        shared: SharedStore | None,
        scope: Scope,
        samples: Samples,
        counters: Counters,
    ) -> None:
        self._store = store
        self._shared = shared
        self._scope = scope.digest
        self._layout = RowLayout(shapes=scope.shapes, dtypes=scope.dtypes)
        self._keys = row_keys(samples)
        self._counters = counters

    def cached_rows(self) -> npt.NDArray[np.bool_]:
        """The rows of the request that are cached, as a mask; a row may still be gone or damaged when it is read."""
        known = np.zeros(len(self._keys), np.bool_)
        if self._store is not None:
            known = self._store.contains(self._scope, self._keys)
        if self._shared is not None and not known.all():
            known |= self._shared.contains(self._scope, self._keys)
        return known

    def find(self, rows: range) -> Found:
        """Read the cached ones of these rows of the request."""
        tensors = self._layout.empty(len(rows))
        keys = self._keys[rows.start : rows.stop]
        mask = np.zeros(len(rows), np.bool_)
        if self._store is not None:
            mask = self._store.get_into(self._scope, keys, self._layout, tensors)
        if self._shared is not None and not mask.all():
            mask |= self._find_shared(self._shared, keys, mask, tensors)
        return Found(mask=mask, tensors=tensors)

    def count(self, found: Found) -> None:
        """Count the rows that are used from the cache, and those that are computed."""
        hits = int(found.mask.sum())
        self._counters.add(cache_hits=hits, cache_misses=len(found.mask) - hits)

    def keep(self, rows: Sequence[int], tensors: Tensors) -> None:
        """Store these rows of the request, as far as there is space."""
        keys = [self._keys[row] for row in rows]
        if self._store is not None:
            self._store.put(self._scope, keys, tensors)
        if self._shared is not None:
            self._shared.offer(self._scope, keys, tensors)

    def _find_shared(
        self, shared: SharedStore, keys: Keys, mask: npt.NDArray[np.bool_], tensors: Tensors
    ) -> npt.NDArray[np.bool_]:
        """Read rows that the disk lacks from the shared cache, and copy them to disk. Returns a mask."""
        wanted = [None if is_there else key for key, is_there in zip(keys, mask, strict=True)]
        found = shared.get_into(self._scope, wanted, self._layout, tensors)
        if self._store is not None and found.any():
            some = [keys[place] for place in np.flatnonzero(found).tolist()]
            self._store.put(self._scope, some, tuple(tensor[found] for tensor in tensors))
        return found


class NodeCache:
    """A node's feature caches, if it has any. Safe for threads.

    Args:
        settings: settings of the node.
        roots: URLs under which it serves data.

    Attributes:
        is_on: True if there is any.

    Raises:
        SettingError: A folder or URL cannot be used, or the cache is too small.
    """

    def __init__(self, settings: NodeSettings, roots: Sequence[str]) -> None:
        folder = settings.cache_folder
        self._shared = _shared(settings, roots)
        self._store = None if folder is None else FeatureStore.try_open(Path(folder), settings.cache_bytes)
        self._hardware = hardware_name(settings.device)
        self.is_on = self._shared is not None or self._store is not None
        # Here, and not when the first request waits for it: it reads what is said of every package there is.
        self._packages = _packages() if self.is_on else ""

    def of(
        self, request: FeatureRequest, preprocess: Preprocess, crossing: Crossing | None, counters: Counters
    ) -> Callable[[int], CachedFeatures] | None:
        """A function from the rows of a run (0 without a run) to the cached features of a request.

        Args:
            request: request for data that this node serves.
            preprocess: preprocessing of the request.
            crossing: shapes per sample and dtypes of the tensors at its cut; None for pixels.
            counters: counters of the request.

        Returns:
            None if nothing may be cached: there is no cache, the samples have no versions, or the random view does not
            recur.
        """
        view = request.view if preprocess.is_random else None
        comes_again = view.recurs if view is not None else not preprocess.is_random
        store, shared = self._store, self._shared
        if (store is None and shared is None) or not request.samples.versions or not comes_again:
            return None
        shapes, dtypes = crossing or ((preprocess.shape,), (preprocess.dtype,))
        scope = Scope(
            data=read_as(normalise_url(request.data), request.reading),
            prefix=request.prefix or "",
            cut=request.cut,
            preprocess=preprocess.digest,
            engine="" if crossing is None else f"{request.engine}, {self._packages}, {self._hardware}",
            shapes=shapes,
            dtypes=dtypes,
            view=view,
        )
        return lambda rows: CachedFeatures(store, shared, replace(scope, batch_rows=rows), request.samples, counters)

    def statistics(self) -> DiskStatistics | None:
        """The statistics of the cache on disk; None if there is none."""
        return None if self._store is None else self._store.statistics()

    def shared_statistics(self) -> SharedStatistics | None:
        """The statistics of the cache that nodes share; None if there is none."""
        return None if self._shared is None else self._shared.statistics()

    def close(self) -> None:
        """Write the waiting rows and close the file. Calling it again does nothing."""
        if self._shared is not None:
            self._shared.close()
        if self._store is not None:
            self._store.close()


def shared_bytes(settings: NodeSettings) -> int:
    """The part of a node's memory that the shared cache takes."""
    return 0 if settings.shared_cache is None else settings.memory_bytes // _SHARED_PART


def _shared(settings: NodeSettings, roots: Sequence[str]) -> SharedStore | None:
    url = settings.shared_cache
    if url is None:
        return None
    for root in roots:
        if is_within(url, root) or is_within(root, url):
            raise SettingError(
                f"the shared cache {normalise_url(url)} and the data root {normalise_url(root)} must not contain each "
                "other: whoever may read the data could read the features of all tenants"
            )
    if parse_url(url).scheme == "file" and not Path(parse_url(url).path).is_dir():
        raise SettingError(f"there is no folder {normalise_url(url)}: create it, or mount the shared cache there")
    return SharedStore(
        lambda folder: open_store(object_url(url, folder) if folder else url),
        budget_bytes=settings.shared_cache_bytes,
        memory_bytes=shared_bytes(settings),
        wait_s=settings.shared_cache_wait_s,
    )


@cache
def _packages() -> str:
    found = {
        distribution.metadata["Name"].lower(): distribution.version
        for distribution in distributions()
        if distribution.metadata["Name"]
    }
    known = [name for name in sorted(found) if name.startswith(_PACKAGES)]
    return ", ".join(f"{name} {found[name]}" for name in known)
