"""Makes loaders for a job: puts data, order, ranks, caches and the source of rows together."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from frostline.cache import DiskCache, FeatureCache, FeatureStore, RowNames, Scope, TieredCache
from frostline.cache.keys import row_keys
from frostline.core import REFERENCE, Cut, Samples, SampleTable, TensorSpec, View
from frostline.core.config import LoaderSettings
from frostline.core.errors import FrostlineError, SettingError
from frostline.core.events import Event
from frostline.core.nouns import array_dtype
from frostline.datasets import Dataset
from frostline.datasets.dataset import steps_left_of
from frostline.datasets.formats.labels import scoring_splits, training_split
from frostline.datasets.manifest import rows_of_ids
from frostline.jobs.router import Router
from frostline.jobs.statistics import StatisticsCollector
from frostline.loaders.arguments import GivenWeights, Mixture, Ranks, make_replay, order_of
from frostline.loaders.batches import memory_for
from frostline.loaders.epoch_loader import ArrayLoader, Change
from frostline.loaders.fetch import Fetcher, FetchRows, NodeEngine
from frostline.loaders.local_stage import Decode, FiniteCheck, UndecodedRequests, undecoded_bytes
from frostline.loaders.row_source import BatchFinisher, RowSource, blocks_of
from frostline.loaders.sample_map import (
    ENCODED,
    EncodedRequests,
    MaskedRequests,
    PicklableFunction,
    SampleMap,
    declared_targets,
    fetch_encoded,
    fetch_of,
    mask_bytes,
    refuse_encoded,
    with_targets,
)
from frostline.ordering import BlockOrder, BlockShuffle, RecordedOrder
from frostline.prefetch import OwnedRequests, RequestSource, RowOwners, Tuner
from frostline.preprocess import Preprocess
from frostline.preprocess.apply import MASK_DTYPE
from frostline.transport import OwnsBlocks, Transport
from frostline.tuning import rule_of

if TYPE_CHECKING:
    from frostline.control.follower import ControlFollower

__all__ = (
    "CachePolicy",
    "LoaderFactory",
    "features_on_disk",
    "fetch_from",
    "finite_check",
    "has_kept_features",
    "keeps_all",
    "mixed_splits",
    "owned_rows",
    "tuner_of",
)


# Of the window's bytes, those of rows that wait behind it for others before them.
_WAITING_PART = 4


def owned_rows(
    transport: Transport, data: Dataset, settings: LoaderSettings, tensors: Sequence[TensorSpec]
) -> tuple[Callable[[], OwnedRequests] | None, LoaderSettings]:
    """How each pass divides its samples by owner; None where any node will do.

    Args:
        transport: way to the nodes.
        data: data set that is read, a part of another one perhaps.
        settings: settings of the window.
        tensors: tensors of a row as the window hands it out; none where it hands out encoded samples.

    Returns:
        The object that divides the samples by owner, and the fetch settings for it: rows keep their order, since rows
        wait for those before them, and part of the window's bytes is reserved for them.
    """
    if not isinstance(transport, OwnsBlocks):
        return None, settings
    reach, url, whole = transport, data.url, len(data.whole)
    chosen, waiting_bytes = data.selection.rows, settings.window_bytes // _WAITING_PART
    row_bytes = sum(math.prod(tensor.shape) * array_dtype(tensor.dtype).itemsize for tensor in tensors)
    row_bytes = row_bytes or data.samples.encoded_bytes // max(1, len(data))

    def owners() -> RowOwners:
        return reach.owners(url, whole)

    def whole_rows(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return rows if chosen is None else chosen.at(rows)

    def owned() -> OwnedRequests:
        return OwnedRequests(
            owners,
            whole_rows,
            request_rows=settings.samples_per_request,
            max_rows=waiting_bytes // max(1, row_bytes),
        )

    return owned, replace(settings, max_reorder=0, window_bytes=max(1, settings.window_bytes - waiting_bytes))


def fetch_from(
    fetcher: Fetcher, fetch: Callable[[Fetcher], FetchRows]
) -> Callable[[tuple[str, ...]], FetchRows] | None:
    """What makes requests of certain nodes, the one to ask first in front; None where any node will do.

    Args:
        fetcher: fetcher of the job.
        fetch: function that makes the source of rows, from what makes requests.
    """
    transport = fetcher.transport
    if not isinstance(transport, OwnsBlocks):
        return None
    reach = transport

    def of(nodes: tuple[str, ...]) -> FetchRows:
        return fetch(replace(fetcher, transport=reach.at(nodes)) if nodes else fetcher)

    return of


def finite_check(
    cuts: Sequence[Cut],
    engine: NodeEngine,
    collector: StatisticsCollector,
    settings: LoaderSettings,
    here: Callable[[], str] = lambda: REFERENCE,
) -> FiniteCheck:
    """What looks at rows that a network made.

    Args:
        cuts: every cut by number.
        engine: engine that runs the frozen layers at the node.
        collector: collector that counts rows that are not finite.
        settings: say whether there may be any.
        here: function that gives the name of the engine that runs all frozen layers at the trainer.
    """
    return FiniteCheck(
        cuts,
        lambda cut: engine.name if cut > 1 else f"{here()} here",
        collector.not_finite,
        is_allowed=settings.allow_nonfinite,
    )


def keeps_all(nbytes: int, preprocess: Preprocess, settings: LoaderSettings) -> bool:
    """Whether so many bytes of features all stay at the trainer after their first epoch."""
    return not preprocess.is_random and nbytes <= settings.cache_bytes + settings.max_disk_bytes


def features_on_disk(settings: LoaderSettings) -> FeatureStore | None:
    """The cache on disk, opened; None where none is kept there, or the disk has no space for it.

    Raises:
        SettingError: The folder cannot be used, or the maximum is too small.
    """
    if settings.cache_folder is None or not settings.max_disk_bytes:
        return None
    return FeatureStore.try_open(Path(settings.cache_folder), settings.max_disk_bytes)


def has_kept_features(folder: Path, samples: Samples) -> bool:
    """Whether an earlier job left features of one of these samples in a folder, of whatever network."""
    with suppress(FrostlineError, OSError):
        if any(folder.iterdir()):
            with FeatureStore(folder, sys.maxsize) as store:
                return store.has_any(row_keys(samples))
    return False


class CachePolicy:
    """The caches of one job, one for each preprocessing and each view that comes again.

    Args:
        scope: dependencies of the job's features beside preprocessing and view.
        samples: samples of the job's data set.
        settings: the bounds of what is kept, and its place.
        store: the store on disk, shared with other jobs; None keeps features in memory alone.
    """

    def __init__(
        self, scope: Scope, samples: SampleTable, settings: LoaderSettings, store: FeatureStore | None = None
    ) -> None:
        self._scope = scope
        self._settings = settings
        self._bound_bytes = settings.cache_bytes
        self._store = store
        self._names = None if store is None else RowNames(samples)
        self._caches: dict[bytes, TieredCache] = {}

    def switch_scope(self, scope: Scope) -> None:
        """Keep features of another frozen part from now on; of the one before, what is on disk stays."""
        if scope.digest != self._scope.digest:
            self._scope, self._caches = scope, {}

    def rejected_rows(self) -> int:
        """The number of rows that no cache of the job had space for."""
        return sum(cache.rejected for cache in self._caches.values())

    @property
    def held_bytes(self) -> int:
        """Bytes that the caches in memory hold together."""
        return sum(cache.memory.statistics().bytes for cache in list(self._caches.values()))

    def bound(self, nbytes: int) -> None:
        """Keep no further rows in memory once all caches together hold so many bytes; what is kept stays."""
        self._bound_bytes = nbytes
        for cache in list(self._caches.values()):
            own_bytes = cache.memory.statistics().bytes
            cache.memory.bound(max(0, nbytes - (self.held_bytes - own_bytes)))

    def view(self, preprocess: Preprocess, seed: int, epoch: int) -> View | None:
        """Which random view an epoch has; None where the preprocessing is not random.

        With a number of views the one of epoch ``e`` is ``e mod views``, so that it comes again.
        """
        if not preprocess.is_random:
            return None
        views = self._settings.cached_augmentations
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
            left = self._settings.cache_bytes - self.held_bytes
            disk = None
            if self._store is not None and self._names is not None:
                disk = DiskCache(self._store, scope, self._names)
            self._caches[scope.digest] = TieredCache(FeatureCache(scope, max(0, left)), disk)
            self.bound(self._bound_bytes)
        return self._caches[scope.digest]


# Of the window's bytes, those of batches that were decoded here and wait for the loop.
_FINISHED_PART = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoaderFactory:
    """What a job's loaders share.

    Attributes:
        data: data of the job.
        fetcher: fetcher that makes the job's requests.
        cache_policy: cache policy of the features that are kept.
        router: router that chooses the cut and codec of the next request.
        collector: collector that knows which samples are unreadable.
        settings: the way that the job asks.
        tuner: tuner of its windows.
        on_event: function that is called with each event.
        tensors: tensors that cross the frost line.
        follower: follower that keeps the job's requests to what a control plane says; None where there is none.
    """

    data: Dataset
    fetcher: Fetcher
    cache_policy: CachePolicy
    router: Router
    collector: StatisticsCollector
    settings: LoaderSettings
    tuner: Tuner
    on_event: Callable[[Event], None]
    tensors: tuple[TensorSpec, ...]
    follower: "ControlFollower | None" = None

    def arrays(
        self,
        batch_size: int,
        *,
        shuffle: bool | BlockShuffle = False,
        seed: int = 0,
        epoch: int = 0,
        data: Dataset | Mixture | None = None,
        weights: GivenWeights | None = None,
        num_samples: int | None = None,
        preprocess: Preprocess | None = None,
        last: str = "keep",
        ranks: Ranks | None = None,
        change: Change | None = None,
        map: PicklableFunction | None = None,
        targets: bool | None = None,
        encoded: bool = False,
        record: bool = False,
        replay: RecordedOrder | None = None,
    ) -> ArrayLoader:
        """A loader of one epoch; see ``EpochOptions`` for what arguments mean, ``Job.loader`` for what is refused."""
        blend, data = (data, data.concatenate()) if isinstance(data, Mixture) else (None, data)
        data = self.job_data(data)
        fetcher = self.fetcher
        if preprocess is not None:
            fetcher = replace(fetcher, preprocess=steps_left_of(preprocess, data))
        declared = declared_targets(data, targets)
        has_targets = not encoded and with_targets(data, declared, targets)
        if encoded:
            refuse_encoded(fetcher, targets=targets if declared is None else declared.has_masks)
        make = self._encoded if encoded else self._source
        ranks = Ranks.current() if ranks is None else ranks
        order = order_of(data, blend, shuffle=shuffle, seed=seed, epoch=epoch, weights=weights, num_samples=num_samples)
        # Reordered, each rank would be somewhere else in a step, and a replay would be another order.
        is_strict = ranks.are_several or replay is not None
        settings = replace(self.settings, max_reorder=0) if is_strict else self.settings
        if self.follower is not None and self.follower.may_hold_back:  # a request that waits for its turn is not late
            settings = replace(settings, hedge_quantile=1.0)
        blocks = None
        if isinstance(order, BlockOrder) and replay is None:
            sharing = ranks.world_size * ranks.workers
            blocks = blocks_of(fetcher.transport, data, order, settings, sharing)
        is_encoded = encoded or _decodes(fetcher, self.router)
        owned, settings = owned_rows(fetcher.transport, data, settings, () if is_encoded else self.tensors)
        if blocks is not None:
            settings = replace(settings, window_bytes=max(1, settings.window_bytes // 2))
        if not encoded and _decodes(fetcher, self.router):
            if settings.is_followed:
                window_bytes = max(1, settings.window_bytes - _finished_bytes(self.settings))
            else:
                window_bytes = undecoded_bytes(data.samples, fetcher.preprocess, settings.window_bytes)
            settings = replace(settings, window_bytes=window_bytes)

        def source(number: int) -> RowSource:
            mapped = None if map is None else SampleMap.of(map.function, View(seed=seed, epoch=number))
            is_finished = mapped is None and declared is None
            finisher = None if is_finished else BatchFinisher(targets=declared, sample_map=mapped)
            made = make(fetcher, seed, number, has_targets=has_targets)
            if encoded and map is not None:
                made = replace(made, max_finished_bytes=_finished_bytes(settings))
            are_images = fetcher.shipment is None and fetcher.preprocess.are_images and (not encoded or map is not None)
            return replace(
                made, settings=settings, blocks=blocks, finisher=finisher, owned=owned, are_images=are_images
            )

        return ArrayLoader(
            source,
            data,
            order=order if replay is None else make_replay(data, order, replay),
            batch_size=batch_size,
            last=last,
            ranks=ranks,
            change=change,
            record=record,
        )

    def job_data(self, data: Dataset | None) -> Dataset:
        """A part of the job's data; all of it where none is named.

        Raises:
            SettingError: The data is from another place, or of another listing.
        """
        mine = self.data
        data = mine if data is None else data
        is_of_same_listing = data.selection.listing == mine.selection.listing
        if data.url == mine.url and not is_of_same_listing and mine.source.on_change == "rebuild":
            return mine.whole.take(rows_of_ids(mine.whole.samples.ids, data.samples.ids))
        if data.url != mine.url or not is_of_same_listing:
            raise SettingError(
                f"this job reads {mine.url} as it was listed when the job was made, not {data.url} as it is "
                "listed now; make another job for other data"
            )
        return data

    def _source(self, fetcher: Fetcher, seed: int, epoch: int, *, has_targets: bool) -> RowSource:
        """Where the rows of an epoch come from."""
        view = self.cache_policy.view(fetcher.preprocess, seed, epoch)
        decodes = _decodes(fetcher, self.router)
        request_source: RequestSource = UndecodedRequests(self.router) if decodes else self.router
        fetch = self._paced(partial(fetch_of, view=view, has_targets=has_targets, decodes=not decodes))
        return RowSource(
            fetch=fetch(fetcher),
            fetch_from=fetch_from(fetcher, fetch),
            require_open=fetcher.require_open,
            has_choice=lambda: self.router.has_choice,
            request_source=MaskedRequests(request_source, mask_bytes(fetcher.preprocess))
            if has_targets
            else request_source,
            cache=self.cache_policy.cache(fetcher.preprocess, view, has_targets=has_targets),
            unreadable=self.collector.unreadable_ids,
            settings=self.settings,
            on_event=self.on_event,
            catch_up=self.collector.tell,
            has_targets=has_targets,
            tuner=self.tuner,
            memory=memory_for(self.settings.pin_memory, fetcher.local_stage.device),
            tensors=self.tensors,
            begins_short=fetcher.shipment is None,
            decode=_decode(fetcher, view) if decodes else None,
            max_finished_bytes=_finished_bytes(self.settings) if decodes else None,
        )

    def _paced(self, make: Callable[[Fetcher], FetchRows]) -> Callable[[Fetcher], FetchRows]:
        """The same requests; where there is a control plane, each goes when it may."""
        follower = self.follower
        return make if follower is None else lambda fetcher: make(replace(fetcher, pace=follower.pace))

    def _encoded(self, fetcher: Fetcher, seed: int, epoch: int, *, has_targets: bool) -> RowSource:
        """The same, of samples that nobody decodes; they are of any length, so none is kept."""
        source = self._source(fetcher, seed, epoch, has_targets=has_targets)
        make, request_source = self._paced(fetch_encoded), EncodedRequests(self.router)
        return replace(
            source,
            fetch=make(fetcher),
            fetch_from=fetch_from(fetcher, make),
            request_source=request_source,
            cache=None,
            memory=None,
            tensors=(ENCODED,),
            decode=None,
            max_finished_bytes=None,
        )


def tuner_of(settings: LoaderSettings, fetcher: Fetcher, router: Router, data: Dataset) -> Tuner:
    """The tuner of a job's windows.

    Samples that are decoded behind their window are read ahead for no longer than decoded ones would be, until the
    decoder is seen to wait for them.
    """
    nodes = len(fetcher.transport.members) if isinstance(fetcher.transport, OwnsBlocks) else 1
    if not (settings.is_followed and _decodes(fetcher, router)):
        return Tuner(rule_of(settings, nodes=nodes), time.monotonic())
    maximum = settings.window_bytes - _finished_bytes(settings)
    first = undecoded_bytes(data.samples, fetcher.preprocess, settings.window_bytes)
    rule = rule_of(replace(settings, window_bytes=maximum), window_bytes=first, nodes=nodes)
    return Tuner(rule, time.monotonic())


def _finished_bytes(settings: LoaderSettings) -> int:
    """Of the window's bytes, those of batches that were decoded here and wait for the loop."""
    return settings.window_bytes // _FINISHED_PART


def _decodes(fetcher: Fetcher, router: Router) -> bool:
    """Samples come encoded, and nothing is left to do with them but to decode them."""
    return fetcher.shipment is None and any(route.cut == 0 for route in router.shares)


def _decode(fetcher: Fetcher, view: View | None) -> Decode:
    return partial(fetcher.local_stage.finish, cut=0, preprocess=fetcher.preprocess, view=view)


def mixed_splits(data: Dataset) -> str | None:
    """Why it is likely a mistake to train on all of a data set: it brings splits to train on and to score.

    Returns:
        A sentence; None where the samples are a part already, or there are no such splits.
    """
    if data.selection.rows is not None:
        return None
    trained, scored = training_split(data.splits_brought), scoring_splits(data.splits_brought)
    if trained is None or not scored:
        return None
    return (
        f"all of {data.url} is read, with its splits {', '.join((trained, *scored))} mixed: give the loader a part, "
        f"such as data=job.data[{trained!r}]"
    )
