"""What a request finds in the node's cache, and what it leaves there for later ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import numpy.typing as npt

from frostline.cache import DiskStatistics, FeatureStore, RowLayout, Scope, row_keys
from frostline.cache.rows import Tensors
from frostline.config import NodeSettings
from frostline.core import Samples
from frostline.engines.hardware import hardware_name
from frostline.node.statistics import Counters
from frostline.preprocess import Preprocess
from frostline.stores.objects import normalise_url
from frostline.wire.messages import FeatureRequest

__all__ = ("Found", "Kept", "NodeCache")

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


# What computes features, or converts what does: another version may give other bits.
_PACKAGES = ("nncf", "onnxruntime", "openvino", "tensorrt", "torch")


class Kept:
    """The features of one request's samples in the node's cache. Safe for threads.

    Whoever makes it has made sure that the request may read the data: a hit is as good as a read.

    Args:
        store: where they are kept.
        scope: what they depend on.
        samples: of the request.
        counters: told of hits and misses.
    """

    def __init__(self, store: FeatureStore, scope: Scope, samples: Samples, counters: Counters) -> None:
        self._store = store
        self._scope = scope.digest
        self._layout = RowLayout(shapes=scope.shapes, dtypes=scope.dtypes)
        self._keys = row_keys(samples)
        self._counters = counters

    def find(self, rows: range) -> Found:
        """What is kept of these rows of the request."""
        tensors = self._layout.empty(len(rows))
        mask = self._store.get_into(self._scope, self._keys[rows.start : rows.stop], self._layout, tensors)
        hits = int(mask.sum())
        self._counters.add(cache_hits=hits, cache_misses=len(rows) - hits)
        return Found(mask=mask, tensors=tensors)

    def keep(self, rows: Sequence[int], tensors: Tensors) -> None:
        """Keep these rows of the request, as far as there is room."""
        self._store.put(self._scope, [self._keys[row] for row in rows], tensors)


class NodeCache:
    """A node's cache of features, where it has one. Safe for threads.

    Args:
        settings: of the node.

    Raises:
        SettingError: The folder cannot be used, or the cache is to be too small.
        OutOfSpace: There is no room to begin with.
    """

    def __init__(self, settings: NodeSettings) -> None:
        folder = settings.cache_folder
        self._store = None if folder is None else FeatureStore(Path(folder), settings.cache_bytes)
        self._hardware = hardware_name(settings.device)

    def of(
        self, request: FeatureRequest, preprocess: Preprocess, crossing: Crossing | None, counters: Counters
    ) -> Callable[[int], Kept] | None:
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
        store = self._store
        if store is None or not request.samples.versions or not comes_again:
            return None
        shapes, dtypes = crossing or ((preprocess.shape,), ("float32",))
        scope = Scope(
            data=normalise_url(request.data),
            prefix=request.prefix or "",
            cut=request.cut,
            preprocess=preprocess.digest,
            engine="" if crossing is None else f"{request.engine}, {_packages()}, {self._hardware}",
            shapes=shapes,
            dtypes=dtypes,
            view=view,
        )
        return lambda rows: Kept(store, replace(scope, batch_rows=rows), request.samples, counters)

    def statistics(self) -> DiskStatistics | None:
        """Where it stands; None where there is none."""
        return None if self._store is None else self._store.statistics()

    def close(self) -> None:
        """Close its file. Calling it again does nothing."""
        if self._store is not None:
            self._store.close()


@cache
def _packages() -> str:
    found = {one.metadata["Name"].lower(): one.version for one in distributions() if one.metadata["Name"]}
    known = [name for name in sorted(found) if name.startswith(_PACKAGES)]
    return ", ".join(f"{name} {found[name]}" for name in known)
