"""Where the rows of a loader come from, as a job makes it, and the NumPy batch that they end in."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from frostline.cache import TieredCache
from frostline.core import SampleTable, TensorSpec
from frostline.core.config import LoaderSettings
from frostline.core.errors import SettingError
from frostline.core.events import Observer
from frostline.core.hints import hint_for
from frostline.core.nouns import widen_bfloat16
from frostline.core.system import in_background, usable_cores
from frostline.datasets import Dataset
from frostline.datasets.targets import TargetColumns, TargetValues
from frostline.loaders.fetch import FetchRows
from frostline.loaders.local_stage import Decode
from frostline.loaders.sample_map import Sample, SampleMap, join_targets, stack_values
from frostline.ordering import BlockOrder, Resumed, Shard
from frostline.prefetch.driver import Tuner
from frostline.prefetch.owned_requests import OwnedRequests
from frostline.prefetch.requests import Memory, RequestSource
from frostline.stores.protocols import ByteRange
from frostline.stores.readahead import BlockReads
from frostline.transport import ReadsBlocks, Transport

__all__ = (
    "THREADS",
    "Array",
    "Arrays",
    "BatchFinisher",
    "BlockPrefetch",
    "BlockSource",
    "Finish",
    "MixedArrays",
    "RowSource",
    "Unpackable",
    "blocks_of",
    "widened_batch",
)


# Places for which what nobody took is kept: a window may ask so far ahead of what it hands out.
_LATE = 1 << 12

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockSource:
    """What reads an epoch's samples in blocks.

    Attributes:
        open: function that makes the reads of a pass; None where neighbours are no faster together.
        order: order of an epoch; of any, since all have the same groups.
    """

    open: Callable[[], BlockReads | None]
    order: BlockOrder


def blocks_of(
    transport: Transport, data: Dataset, order: BlockOrder, settings: LoaderSettings, sharing: int
) -> BlockSource | None:
    """What reads a data set's samples in blocks; None where the node asks for each, or none is near another.

    Args:
        transport: the transport to the node; one in this process can be told.
        data: data set whose samples are read.
        order: order of these.
        settings: settings of the window, half of whose bytes are for samples that were read so.
        sharing: number of processes that share the epoch.

    Raises:
        SettingError: The data sets to mix do not fit each other.
    """
    if not isinstance(transport, ReadsBlocks):
        return None
    max_bytes = settings.window_bytes // 2
    found = BlockSource(open=partial(transport.blocks, data.url, data.manifest.reading, max_bytes), order=order)
    if found.open() is None:
        return None
    samples, blocks = data.samples, order.blocks
    mixed_bytes = samples.encoded_bytes * min(blocks.group, len(samples)) // max(1, len(samples) * sharing)
    if mixed_bytes > max_bytes:
        raise SettingError(
            f"{blocks.mixed} blocks of {blocks.samples} samples are {mixed_bytes / 1e6:.0f} MB, and half of "
            f"window_bytes is for them, which is {max_bytes / 1e6:.0f} MB: mix fewer, or raise window_bytes"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Places of an epoch whose samples were told together.

    Attributes:
        start: the first place.
        stop: the place after the last one.
        requests: function that is told by then, these included.
    """

    start: int
    stop: int
    requests: int


class BlockPrefetch:
    """Walks through an epoch as many samples ahead of what is asked for as a group has. Not for several threads.

    So while a group is asked for, the blocks of the next one are read at the same pace: as many bytes are held all the
    time, and the link is never left alone.

    Args:
        reads: block reads, which are told what will be asked for.
        blocks: blocks of the order.
        samples: the table that the order is one of.
        order: order of the epoch.
        shard: the process's part of it.
        is_wanted: the samples will be asked for, by their ids.
    """

    def __init__(
        self,
        reads: BlockReads,
        blocks: BlockOrder,
        samples: SampleTable,
        order: Resumed,
        shard: Shard,
        is_wanted: Callable[[_Ints], npt.NDArray[np.bool_]],
    ) -> None:
        self._reads = reads
        self._blocks = blocks
        self._samples = samples
        self._order = order
        self._shard = shard
        self._is_wanted = is_wanted
        self._told: deque[_Group] = deque()
        self._ahead = max(1, blocks.blocks.group // (shard.world_size * shard.workers))
        self._forgotten = 0
        self._stop = 0

    def upto(self, place: int) -> None:
        """All places before this one are asked for now."""
        stop = place + self._ahead
        while self._stop < len(self._shard) and self._stop < stop:
            self._tell()
        before = self._forgotten
        for group in self._told:
            if group.start < stop:
                share = min(1.0, (stop - group.start) / (group.stop - group.start))
                self._reads.begin(before + math.ceil(share * (group.requests - before)))
            before = group.requests
        while self._told and self._told[0].stop < place - _LATE:
            self._forgotten = self._told.popleft().requests
            self._reads.forget(self._forgotten)

    def _tell(self) -> None:
        """The samples of the next group that are this process's, and that it will ask for."""
        start = self._stop
        positions = self._shard.positions(start, min(start + self._blocks.blocks.group, len(self._shard)))
        groups = self._blocks.groups_at(self._order.original_positions(positions))
        others = np.flatnonzero(groups != groups[0])
        rows = self._order.at(positions[: others[0]] if len(others) else positions)
        self._stop += len(rows)
        chosen = self._samples.take(rows[self._is_wanted(self._samples.ids_at(rows))])
        places = list(map(ByteRange, chosen.objects, chosen.offsets.tolist(), chosen.lengths.tolist()))
        self._reads.expect(places, chosen.versions)
        self._told.append(_Group(start=start, stop=self._stop, requests=self._reads.told))


Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedArrays:
    """What was mixed into a batch's features.

    Attributes:
        labels: ``int64[batch]``, of the samples that were mixed in.
        weights: ``float32[batch]``, of the batch's own samples; the others have the rest.
    """

    labels: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]


# Names by which other libraries hand out what a batch holds.
_PIXELS = ("images", "image", "pixel_values", "pixels")
_FIELDS = {"inputs": "features", "label": "labels", "target": "targets", "x": "features", "y": "labels"}


class Unpackable:
    """A batch as other libraries hand it out: ``x, y = batch``, ``batch["images"]`` and ``batch.images``.

    It unpacks to its features and, where it has some, its targets, else its labels.
    """

    __slots__ = ()

    features: Any
    labels: Any
    ids: Any
    targets: Any
    are_images: bool

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Any]:
        yield self.features
        yield self.labels if self.targets is None else self.targets

    def keys(self) -> list[str]:
        """Names of what the batch holds, as ``dict(batch)`` asks for them."""
        return [name for name in ("features", "labels", "targets", "ids") if getattr(self, name) is not None]

    def __contains__(self, name: object) -> bool:
        """Whether ``batch[name]`` gives something."""
        try:
            return isinstance(name, str) and self[name] is not None
        except KeyError:
            return False

    def __getitem__(self, name: str | int) -> Any:
        """What the batch holds by that name, or at that place of the two that it unpacks to.

        Raises:
            KeyError: The batch holds nothing of that name.
        """
        if isinstance(name, int):
            return tuple(self)[name]
        if not isinstance(name, str):
            raise KeyError("a batch is asked for what it has by name: write batch.features[:2] and batch.labels[:2]")
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(str(error)) from None

    @property
    def images(self) -> Any:
        """The pixels, ``float32[batch, C, H, W]``, of a batch of images that no network was run on.

        Raises:
            AttributeError: The batch holds something else.
        """
        return self._pixels("images")

    def _pixels(self, name: str) -> Any:
        if self.are_images:
            return self.features
        raise AttributeError(
            f"this batch has no {name}: batch.features is what it holds, which a job's head takes: "
            "job.head(batch.features)"
        )

    if not TYPE_CHECKING:  # which would take any name for one that there is

        def __getattr__(self, name: str) -> Any:
            if name == "target" and self.targets is None:  # as the batch unpacks
                return self.labels
            if name in _FIELDS:
                return getattr(self, _FIELDS[name])
            if name in _PIXELS:
                return self._pixels(name)
            hint = "" if name[:1] == "_" else hint_for(name, _HELD, "batch") or f"; it has {', '.join(_HELD)}"
            raise AttributeError(f"a batch has no {name!r}{hint}")


_HELD = ("features", "labels", "ids", "mixed", "targets", "images")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrays(Unpackable):
    """One batch, in CPU memory, the caller's own: contiguous, writable, and never written again by Frostline.

    Features have the type of the tensors that cross the frost line: ``float32`` for pixels and for most networks,
    ``float16``, ``float64`` or whole numbers where the network has those. NumPy has no ``bfloat16``: what a network of
    16 bits gives is handed out as ``float32`` (``widened_batch``), and as tensors it is what it was.

    Attributes:
        features: activations at the frost line ``[batch, ...]``; a tuple of them if several tensors cross it. Without
            a model, the preprocessed pixels ``float32[batch, C, H, W]``.
        labels: ``int64[batch]``, the index of each sample's class in the data set's classes.
        ids: ``int64[batch]``, the ids of the samples.
        mixed: labels and weights of the other samples that ``FeatureMixup`` mixed in; None without it.
        targets: the declared targets of the data set: an array ``[batch, ...]``; a list with one value per sample if
            shapes differ or values are texts; or a dict of these by name. If none are declared and the data set has
            masks, ``int64[batch, H, W]``, the class of each pixel of the network's input, with 255 for pixels to
            ignore. Otherwise None.
        are_images: True if the features are the pixels of images, which ``batch.images`` gives too.
    """

    features: Array | tuple[Array, ...]
    labels: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    mixed: MixedArrays | None = None
    targets: TargetValues | None = None
    are_images: bool = False


def widened_batch(batch: Arrays) -> Arrays:
    """The same batch with features that hold bits of bfloat16 as ``float32``, which has all its values."""
    features = batch.features
    return replace(
        batch,
        features=tuple(map(widen_bfloat16, features)) if isinstance(features, tuple) else widen_bfloat16(features),
    )


THREADS = "frostline-map"
"""The name that threads which map samples begin with."""

Finish = Callable[[Arrays, npt.NDArray[np.int64]], Arrays]
"""Finishes a batch, given the rows of the data set's table that it has."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchFinisher:
    """Finishes batches, in the thread that fills them.

    Attributes:
        targets: the declared targets of the data set, by row; None where none are declared.
        sample_map: the sample map, made to each sample; None leaves them as they are.
    """

    targets: TargetColumns | None = None
    sample_map: SampleMap | None = None

    @contextmanager
    def start(self) -> Iterator[Finish]:
        """What finishes batches; samples are mapped by as many threads as there are cores.

        It raises ``DataError`` where a target does not have the shape that its column has, and ``SettingError`` where
        the samples that were mapped make no batch.
        """
        cores = len(usable_cores())
        if self.sample_map is None or cores < 2:
            yield partial(self._finish, None)
            return
        threads = ThreadPoolExecutor(cores, THREADS, in_background)
        try:
            yield partial(self._finish, threads)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _finish(self, threads: ThreadPoolExecutor | None, arrays: Arrays, rows: npt.NDArray[np.int64]) -> Arrays:
        if self.targets is not None:
            masks = arrays.targets  # which are there where they are declared, and no dict yet
            assert not isinstance(masks, dict)
            arrays = replace(arrays, targets=self.targets.at(rows, masks))
        return arrays if self.sample_map is None else _mapped(arrays, self.sample_map, threads)


def _mapped(arrays: Arrays, sample_map: SampleMap, threads: ThreadPoolExecutor | None) -> Arrays:
    ids = arrays.ids.tolist()
    samples = [_sample(arrays, row, id) for row, id in enumerate(ids)]
    each = map(sample_map, [samples]) if threads is None else threads.map(sample_map, _divided(samples))
    found = [sample for some in each for sample in some]
    return replace(
        arrays,
        features=stack_values("features", [sample.features for sample in found], ids),
        labels=np.array([sample.label for sample in found], np.int64),
        targets=join_targets([sample.target for sample in found], arrays.targets, ids),
    )


def _sample(arrays: Arrays, row: int, id: int) -> Sample:
    features = arrays.features
    return Sample(
        features=tuple(part[row] for part in features) if isinstance(features, tuple) else features[row],
        label=int(arrays.labels[row]),
        id=id,
        target=_target(arrays.targets, row),
    )


def _target(targets: Any, row: int) -> Any:
    if isinstance(targets, dict):
        return {name: values[row] for name, values in targets.items()}
    return None if targets is None else targets[row]


def _divided(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """The samples in as many parts as there are cores, in their order."""
    size = -(-len(samples) // len(usable_cores()))
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSource:
    """Where a loader's rows come from; made by a job.

    Attributes:
        fetch: function that makes one request and yields rows at the frost line.
        request_source: source that chooses the cut and codec of the next request.
        cache: cache that keeps features between epochs; None where they differ from epoch to epoch.
        unreadable: ids that are known to be unreadable; they are not asked for again.
        settings: settings of the window.
        on_event: function that is called with each event.
        catch_up: function that passes on events of workers; called from the loop's thread.
        has_targets: the last tensor of every row is its sample's mask.
        finisher: finisher that gives batches their declared targets and maps their samples; None where there is nothing
            to do.
        tuner: tuner of the windows' bounds; None leaves them as they are set.
        memory: the place where batches lie; None for memory of this process.
        tensors: tensors of every row, its mask apart, where that is known beforehand.
        blocks: source that reads samples in blocks before they are asked for; None where nobody does.
        begins_short: the first requests of a window are shorter; not where a network runs, which rows fill up.
        decode: function that decodes what ``fetch`` brings encoded; None where it brings nothing that is. Safe for
            several threads.
        max_finished_bytes: maximum bytes of finished batches that wait for the loop; the last of them may be more. None
            where the window bounds them, which holds their rows.
        owned: function that divides a pass's samples by the nodes that own them; None where any node will do.
        fetch_from: function that gives a ``fetch`` from nodes by their names, the one to ask first in front.
        are_images: features are the pixels of images, on which no network was run.
        require_open: function that raises ``SettingError`` once the job is closed: what is cached would be handed out
            all the same.
        has_choice: function that says whether samples that are not asked for yet may take another way than others.
    """

    fetch: FetchRows
    request_source: RequestSource
    cache: TieredCache | None
    unreadable: Callable[[], npt.NDArray[np.int64]]
    settings: LoaderSettings
    on_event: Observer
    has_targets: bool = False
    finisher: BatchFinisher | None = None
    tuner: Tuner | None = None
    memory: Memory | None = None
    tensors: tuple[TensorSpec, ...] = ()
    blocks: BlockSource | None = None
    begins_short: bool = False
    decode: Decode | None = None
    max_finished_bytes: int | None = None
    catch_up: Callable[[], None] = _nothing
    owned: Callable[[], OwnedRequests] | None = None
    fetch_from: Callable[[tuple[str, ...]], FetchRows] | None = None
    are_images: bool = False
    require_open: Callable[[], None] = _nothing
    has_choice: Callable[[], bool] = lambda: True
