"""What a request finds in the node's cache, and what it leaves there for later ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frostline.cache import DiskStatistics, FeatureStore, RowLayout, Scope, SharedStatistics, SharedStore, row_keys
from frostline.cache.local.disk import Keys
from frostline.cache.rows import Tensors
from frostline.config import NodeSettings
from frostline.core import Samples, read_as
from frostline.engines.machine.hardware import hardware_name
from frostline.errors import SettingError
from frostline.node.scheduling.statistics import Counters
from frostline.preprocess import Preprocess
from frostline.stores.base.urls import parse_url
from frostline.stores.open import is_within, normalise_url, object_url, open_store
from frostline.wire.messages import FeatureRequest

__all__ = ("CachedFeatures", "Found", "NodeCache", "shared_bytes")

Crossing = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """What the cache held of a batch.

    Attributes:
        mask: ``bool[n]``, which rows were there.
        tensors: arrays ``[n, ...]``; rows that were not there are still to be written.
    """

    mask: npt.NDArray[np.bool_]
    tensors: Tensors

    def upto(self, missing: int) -> "Found":
        """The first rows of it, up to so many that were not there."""
        beyond = np.flatnonzero(~self.mask)[missing:]
        if not len(beyond):
            return self
        return Found(mask=self.mask[: beyond[0]], tensors=tuple(tensor[: beyond[0]] for tensor in self.tensors))


# For where rows lie, and for rows that wait to be written.
_SHARED_PART = 16
# What computes features, or converts what does: another version may give other bits. Names begin with these.
_PACKAGES = ("nncf", "onnx", "openvino", "tensorrt", "torch")


class CachedFeatures:
    """The features of one request's samples in the node's caches. Safe for threads.

    Whoever makes it has made sure that the request may read the data: a hit is as good as a read.

    Args:
        store: where they are kept on disk; None where they are not.
        shared: where they are kept for other nodes too; None where they are not.
        scope: what they depend on.
        samples: of the request.
        counters: told of hits and misses.
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

    def known(self) -> npt.NDArray[np.bool_]:
        """Which rows of the request are kept; one that is may be gone, or found damaged, when it is read."""
        known = np.zeros(len(self._keys), np.bool_)
        if self._store is not None:
            known = self._store.contains(self._scope, self._keys)
        if self._shared is not None and not known.all():
            known |= self._shared.contains(self._scope, self._keys)
        return known

    def find(self, rows: range) -> Found:
        """What is kept of these rows of the request."""
        tensors = self._layout.empty(len(rows))
        keys = self._keys[rows.start : rows.stop]
        mask = np.zeros(len(rows), np.bool_)
        if self._store is not None:
            mask = self._store.get_into(self._scope, keys, self._layout, tensors)
        if self._shared is not None and not mask.all():
            mask |= self._find_shared(self._shared, keys, mask, tensors)
        return Found(mask=mask, tensors=tensors)

    def count(self, found: Found) -> None:
        """Rows that are used as they were found, and those that are made anew."""
        hits = int(found.mask.sum())
        self._counters.add(cache_hits=hits, cache_misses=len(found.mask) - hits)

    def keep(self, rows: Sequence[int], tensors: Tensors) -> None:
        """Keep these rows of the request, as far as there is room."""
        keys = [self._keys[row] for row in rows]
        if self._store is not None:
            self._store.put(self._scope, keys, tensors)
        if self._shared is not None:
            self._shared.offer(self._scope, keys, tensors)

    def _find_shared(
        self, shared: SharedStore, keys: Keys, mask: npt.NDArray[np.bool_], tensors: Tensors
    ) -> npt.NDArray[np.bool_]:
        """Which of the rows that the disk lacks other nodes had computed; the disk takes them too."""
        wanted = [None if is_there else key for key, is_there in zip(keys, mask, strict=True)]
        found = shared.get_into(self._scope, wanted, self._layout, tensors)
        if self._store is not None and found.any():
            some = [keys[place] for place in np.flatnonzero(found).tolist()]
            self._store.put(self._scope, some, tuple(tensor[found] for tensor in tensors))
        return found


class NodeCache:
    """A node's caches of features, where it has any. Safe for threads.

    Args:
        settings: of the node.
        roots: URLs under which it serves data.

    Raises:
        SettingError: A folder or URL cannot be used, or the cache is to be too small.
        OutOfSpace: There is no room to begin with.
    """

    def __init__(self, settings: NodeSettings, roots: Sequence[str]) -> None:
        folder = settings.cache_folder
        self._shared = _shared(settings, roots)
        self._store = None if folder is None else FeatureStore(Path(folder), settings.cache_bytes)
        self._hardware = hardware_name(settings.device)

    def of(
        self, request: FeatureRequest, preprocess: Preprocess, crossing: Crossing | None, counters: Counters
    ) -> Callable[[int], CachedFeatures] | None:
        """What is kept of a request whose data this node serves, for a number of rows of a run (0 without one).

        Args:
            request: what is wanted.
            preprocess: of the request.
            crossing: shapes of what crosses its cut, a sample, and the dtypes; None for the pixels.
            counters: told of hits and misses.

        Returns:
            None where nothing may be kept: there is no cache, no version of a sample is known, or its random view
            will not come again.
        """
        view = request.view if preprocess.is_random else None
        comes_again = view.recurs if view is not None else not preprocess.is_random
        store, shared = self._store, self._shared
        if (store is None and shared is None) or not request.samples.versions or not comes_again:
            return None
        shapes, dtypes = crossing or ((preprocess.shape,), ("float32",))
        scope = Scope(
            data=read_as(normalise_url(request.data), request.reading),
            prefix=request.prefix or "",
            cut=request.cut,
            preprocess=preprocess.digest,
            engine="" if crossing is None else f"{request.engine}, {_packages()}, {self._hardware}",
            shapes=shapes,
            dtypes=dtypes,
            view=view,
        )
        return lambda rows: CachedFeatures(store, shared, replace(scope, batch_rows=rows), request.samples, counters)

    def statistics(self) -> DiskStatistics | None:
        """Where it stands; None where there is none."""
        return None if self._store is None else self._store.statistics()

    def shared_statistics(self) -> SharedStatistics | None:
        """Where the one that nodes share stands; None where there is none."""
        return None if self._shared is None else self._shared.statistics()

    def close(self) -> None:
        """Write what waits, and close the file. Calling it again does nothing."""
        if self._shared is not None:
            self._shared.close()
        if self._store is not None:
            self._store.close()


def shared_bytes(settings: NodeSettings) -> int:
    """What of a node's memory belongs to the cache that nodes share."""
    return 0 if settings.shared_cache is None else settings.memory_bytes // _SHARED_PART


def _shared(settings: NodeSettings, roots: Sequence[str]) -> SharedStore | None:
    url = settings.shared_cache
    if url is None:
        return None
    for root in roots:
        if is_within(url, root) or is_within(root, url):
            raise SettingError(
                f"the shared cache {normalise_url(url)} and the data root {normalise_url(root)} must lie apart: "
                "whoever may read the data could read everybody's features"
            )
    if parse_url(url).scheme == "file" and not Path(parse_url(url).path).is_dir():
        raise SettingError(f"there is no folder {normalise_url(url)}: make it, or mount what holds the shared cache")
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
