"""Checks a request against what the node serves, and opens its stores."""

import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from cachetools import LRUCache

from frostline.core import CELLS, OBJECTS, UNPACKED, URLS, Samples
from frostline.datasets.formats.url_reader import UrlReader
from frostline.datasets.open import check_object, open_samples
from frostline.datasets.parquet.cells import CELLS_BYTES, CellCache
from frostline.engines.base.identity import levels_of
from frostline.errors import BadRequest, SettingError
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.memory_pool import Pool, Reservation
from frostline.preprocess import Preprocess
from frostline.stores.base.limits import LinkBounds, StoreLimits
from frostline.stores.base.protocols import Place, Versioned
from frostline.stores.base.urls import parse_url
from frostline.stores.cql.store import CqlStore
from frostline.stores.open import is_within, normalise_url
from frostline.stores.reads.readahead import ReadAhead, ReadAheadQueue, SecondReads
from frostline.stores.reads.shared_reads import SharedReads
from frostline.wire.messages import FeatureRequest

__all__ = ("Stores", "checked_preprocess", "read_ahead")

# Stores stay open for later requests; each may hold connections.
_MAX_OPEN = 16


class Stores:
    """The stores under the node's roots. Safe for threads.

    Args:
        roots: URLs under which data is served.
        cells_bytes: memory for decoded Parquet columns.
        follows_links: whether symbolic links in folders may lead out of the roots.
        deadline_s: see ``StoreLimits``.

    Raises:
        SettingError: if a root is not a URL that Frostline reads.
    """

    def __init__(
        self,
        roots: tuple[str, ...],
        cells_bytes: int = CELLS_BYTES,
        *,
        follows_links: bool = True,
        deadline_s: float = math.inf,
    ) -> None:
        self._roots = tuple(normalise_url(root) for root in roots)
        self._lock = threading.Lock()
        self._cells = CellCache(cells_bytes)
        self._follows_links = follows_links
        self._deadline_s = deadline_s
        self._open: LRUCache[tuple[str, str, bool, tuple[str, ...], tuple[str, ...]], Versioned] = LRUCache(_MAX_OPEN)

    @property
    def roots(self) -> tuple[str, ...]:
        """The canonical URLs of the roots."""
        return self._roots

    def allowed(self, roots: tuple[str, ...] | None) -> tuple[str, ...]:
        """The canonical URLs of the roots that a tenant may read; None means all roots of the node."""
        return self._roots if roots is None else tuple(normalise_url(root) for root in roots)

    def store(
        self,
        data: str,
        allowed: tuple[str, ...] | None = None,
        *,
        reading: str = OBJECTS,
        objects: Sequence[str] = (),
        mapped: bool = False,
    ) -> Versioned:
        """Open the store of a data set's samples, or return it if it is open.

        Args:
            data: URL of its root.
            allowed: roots under which the tenant may read; None for all.
            reading: how the bytes at the samples' addresses are found.
            objects: objects to be read; if they are URLs, each must lie under an allowed root too.
            mapped: whether to read sealed objects of a local folder from memory maps.

        Raises:
            BadRequest: if the data or an object lies outside the node's roots that the tenant may read.
        """
        url, may_read = self._served(data, allowed)
        within = may_read if reading == URLS else ()
        folders = _folders(may_read)
        mapped = mapped and url.startswith("file:")
        key = (url, reading, mapped, within, folders)
        with self._lock:
            store = self._open.get(key)
            if store is None:
                links = None if self._follows_links else LinkBounds(folders)
                limits = StoreLimits(links=links, deadline_s=self._deadline_s)
                store = open_samples(url, reading, mapped=mapped, cells=self._cells, roots=within, limits=limits)
                self._open[key] = store
        if isinstance(store, UrlReader):
            for name in objects:
                store.check(name)
        return store

    def listed(self, data: str, allowed: tuple[str, ...] | None = None) -> tuple[str, tuple[str, ...] | None]:
        """The canonical URL of a data set's root, and the folders in which links may lead; None means anywhere.

        Args:
            data: URL of its root.
            allowed: roots under which the tenant may read; None for all.

        Raises:
            BadRequest: if it lies outside the node's roots that the tenant may read.
        """
        url, may_read = self._served(data, allowed)
        return url, None if self._follows_links else _folders(may_read)

    def _served(self, data: str, allowed: tuple[str, ...] | None) -> tuple[str, tuple[str, ...]]:
        """The canonical URL of a data set's root, and all roots that the tenant may read."""
        try:
            url = normalise_url(data)
        except SettingError as error:
            raise BadRequest(f"data: {error}") from error
        roots = self.allowed(allowed)
        if "://" not in data or not self._is_open(url, roots):
            served = ", ".join(roots) or "no roots that you may read"
            raise BadRequest(f"this node does not serve {data[:200]}; it serves {served}")
        return url, tuple(dict.fromkeys(root for root in (*roots, *self._roots) if self._is_open(root, roots)))

    def _is_open(self, url: str, roots: tuple[str, ...]) -> bool:
        """Whether a URL lies both under a root of the node and under one that the tenant may read."""
        return any(is_within(url, root) for root in self._roots) and any(is_within(url, root) for root in roots)


def _folders(roots: Sequence[str]) -> tuple[str, ...]:
    return tuple(url.path for url in map(parse_url, roots) if url.scheme == "file")


def checked_preprocess(request: FeatureRequest) -> Preprocess:
    """Check a request's samples and return its preprocessing.

    Raises:
        BadRequest: if they are not valid; the message names the field.
    """
    request.checked()
    _check_samples(request.samples, request.reading)
    preprocess = Preprocess.from_json(request.preprocess)
    if request.cut > 0 and preprocess.is_random and request.view is None:
        raise BadRequest("view: random preprocessing needs one, with seed and epoch")
    if request.cut > 1 and request.prefix is None:
        raise BadRequest(f"prefix: cut {request.cut} lies inside a network; name its prefix")
    if request.cut > 1:
        _check_levels(request.engine, preprocess)
    return preprocess


def read_ahead(
    store: Versioned,
    request: FeatureRequest,
    places: Sequence[Place],
    ahead: Pool,
    queue: ReadAheadQueue,
    second: SecondReads | None,
    scope: CancelScope,
    held: ExitStack,
) -> Versioned:
    """The store, or a wrapper of it that reads samples of the request before they are asked for.

    Samples that are neighbours in an object are read by one request to the store.

    Args:
        store: store that holds the samples.
        request: request for the samples.
        places: places of the samples.
        ahead: memory for samples that were read with a neighbour and are not asked for yet.
        queue: queue of the other reads.
        second: how slow reads are repeated; None if they are not.
        scope: cancel scope of the request, which also wakes threads that wait for a read.
        held: closed when the request ends.
    """
    # Parquet cells are read by whole row groups, and unpacked tars lie on this machine.
    if request.reading in (CELLS, UNPACKED):
        return store

    def room(nbytes: int) -> Reservation | None:
        return ahead.take(nbytes) if nbytes <= ahead.total_bytes else None

    # Single objects and rows of a table have no neighbours.
    if request.reading == OBJECTS and not isinstance(store, CqlStore):
        together = SharedReads(store, places, room)
        held.callback(together.close)
        if together.joins:
            return together
    one_by_one = ReadAhead(store, queue, second)
    held.callback(one_by_one.close)
    scope.on_cancel(one_by_one.close)
    return one_by_one


def _check_levels(engine: str, preprocess: Preprocess) -> None:
    named, levels = levels_of(engine), preprocess.levels
    if named and (levels is None or levels.digest != named):
        raise BadRequest(f"engine: {engine} expects pixels with other mean and std than those of preprocess")


def _check_samples(samples: Samples, reading: str) -> None:
    if len(np.unique(samples.ids)) != len(samples):
        raise BadRequest("samples.ids: an id occurs twice")
    for name in samples.objects:
        check_object(name, reading)
