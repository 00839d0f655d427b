"""The options of an epoch, checked by name and type, with the order of its samples and the rank that reads them."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from frostline.core import SampleTable, View
from frostline.core.config import check_arguments, check_type
from frostline.core.errors import OrderMismatch, SettingError, Unavailable
from frostline.core.hints import add_field_hints
from frostline.datasets import Dataset
from frostline.datasets.dataset import dataset_from
from frostline.loaders.sample_map import SampleFunction
from frostline.ordering import (
    BlockOrder,
    BlockShuffle,
    EpochOrder,
    Gather,
    MixtureOrder,
    Order,
    OrderState,
    ReadingPlan,
    RecordedOrder,
    Replay,
    Weighted,
    Weights,
    check_agreement,
    weights_by_class,
)
from frostline.ordering.shards import RECORD_BYTES
from frostline.preprocess import Preprocess

if TYPE_CHECKING:
    from torch import distributed as dist

__all__ = (
    "ALONE",
    "DatasetView",
    "EpochOptions",
    "GivenWeights",
    "KeyValueStore",
    "Mixture",
    "Ranks",
    "check_epochs",
    "checked_options",
    "make_replay",
    "order_of",
    "shows_options",
)


GivenWeights = Mapping[str, float] | Sequence[float] | npt.NDArray[np.floating]
"""By the names of classes, or one for each sample."""


def order_of(
    data: Dataset,
    blend: "Mixture | None" = None,
    *,
    shuffle: bool | BlockShuffle,
    seed: int,
    epoch: int,
    weights: GivenWeights | None = None,
    num_samples: int | None = None,
) -> EpochOrder:
    """The order of one epoch; see ``Job.loader``.

    Args:
        data: the samples; those of all parts where they are blended.
        blend: mixture of the parts; None where they are not mixed.
        shuffle: draw the order from the seed, in blocks where those are given.
        seed: seed of the order.
        epoch: the number.
        weights: draw by these instead.
        num_samples: the number of num samples.

    Raises:
        SettingError: the figures make no sense, or do not go together.
    """
    if weights is None and num_samples is not None:
        raise SettingError("num_samples is how many samples are drawn by weights: give weights too")
    if isinstance(shuffle, BlockShuffle) and (blend is not None or weights is not None):
        raise SettingError(
            "BlockShuffle takes neighbours of one data set, each of which comes once: take shuffle=True for a mixture, "
            "and neither for weights"
        )
    if weights is not None and shuffle:
        raise SettingError("weights draw an order of their own, by the seed: leave out shuffle, or give no weights")
    if blend is not None:
        if weights is not None:
            raise SettingError("a mixture has ratios: draw by weights from one data set, or mix parts of it")
        return blend.order(shuffle=bool(shuffle), seed=seed, epoch=epoch)
    if isinstance(shuffle, BlockShuffle):
        return BlockOrder(size=len(data), seed=seed, epoch=epoch, blocks=shuffle)
    if weights is None:
        return Order(size=len(data), seed=seed, epoch=epoch, shuffle=shuffle)
    size = len(data) if num_samples is None else num_samples
    return Weighted(weights=_weights(data, weights), size=size, seed=seed, epoch=epoch)


def make_replay(data: Dataset, order: EpochOrder, recorded: RecordedOrder) -> Replay:
    """An order that repeats a recorded one.

    Raises:
        OrderMismatch: The order was recorded of other samples, or in another order.
    """
    if recorded.state.manifest != data.digest:
        raise OrderMismatch(f"this order was recorded of other samples than these of {data.url}")
    return Replay(recorded=recorded, order=order)


def _weights(data: Dataset, given: GivenWeights | str) -> Weights:
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - set(data.classes))
        if unknown:
            raise SettingError(f"there is no class {unknown[0]!r}: the data has {', '.join(data.classes)}")
        labels = {data.classes.index(name): weight for name, weight in given.items()}
        return Weights(weights_by_class(data.samples.labels, labels))
    if isinstance(given, str):
        raise SettingError(
            f"weights takes a number for each sample, or for each class by name, not {given!r}: write "
            "weights={name: 1 / n for name, n in zip(data.classes, numpy.bincount(data.targets))}"
        )
    if len(given) != len(data):
        raise SettingError(f"{len(given)} weights were given for {len(data)} samples")
    return Weights(given)


@add_field_hints
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """Parts of one data set, interleaved by fixed ratios in each epoch; see ``ordering.MixtureOrder``.

    Attributes:
        parts: parts of the job's data set, such as selections of it; a sample may be in several.
        ratios: share of samples from each part, relative: ``(3, 1)`` gives three samples of the first part for each of
            the second.
        ends: end of an epoch: ``first``, when a part would have to begin again; ``all``, when all parts were seen
            completely, smaller ones several times; or a number of samples.

    Raises:
        SettingError: a figure that makes no sense, or a part without samples.
    """

    parts: Sequence[Dataset]
    ratios: Sequence[float]
    ends: str | int = "first"

    def __post_init__(self) -> None:
        if not self.parts:
            raise SettingError("a mixture has at least one part")
        self.order(shuffle=False, seed=0, epoch=0)  # refuses what makes no sense

    def concatenate(self) -> Dataset:
        """The samples of all parts, one after the other.

        Raises:
            SettingError: the parts belong to several data sets.
        """
        return self.parts[0].concatenate(*self.parts[1:])

    def order(self, *, shuffle: bool, seed: int, epoch: int) -> MixtureOrder:
        """The order in which these samples come."""
        sizes = [len(part) for part in self.parts]
        return MixtureOrder.of(sizes, self.ratios, seed=seed, epoch=epoch, ends=self.ends, shuffle=shuffle)


class KeyValueStore(Protocol):
    """The part of a key-value store, such as torch's ``TCPStore``, by which ranks compare what they read."""

    def set(self, key: str, value: Any, /) -> None:
        """Keep a value."""

    def get(self, key: str, /) -> bytes:
        """The value, once it is there; an error after the store's own deadline."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, which is 0 at first, and give what it is then."""


@add_field_hints
@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that share an epoch. Environment variables of launchers are not read.

    Attributes:
        rank: number of this process among the ranks, from 0.
        world_size: number of ranks that share the epoch.
        worker: worker of this rank, which takes its steps in turn with the others; a ``DataLoader`` says it.
        workers: number of workers of the rank.
        gather: function that sends this rank's record to the others and returns all records in the order of ranks; None
            if ranks cannot communicate, so that differences between them are not noticed.

    Raises:
        SettingError: the rank is not below the number of ranks.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1
    gather: Gather | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "world_size", "worker", "workers"):
            check_type(name, getattr(self, name), int)
        if not 0 <= self.rank < self.world_size:
            raise SettingError(
                f"rank must lie from 0 to below world_size, and {self.rank} of {self.world_size} does not"
            )

    @classmethod
    def current(cls) -> Self:
        """The ranks of ``torch.distributed`` if it is initialised; otherwise this process alone."""
        torch = sys.modules.get("torch")  # where nobody imported it, no group was made
        is_shared = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
        return cls.of_torch() if is_shared else cls()

    @classmethod
    def of_torch(cls, group: "dist.ProcessGroup | None" = None) -> Self:
        """The ranks of a process group, by default the default one, whose time-out bounds how long they wait.

        Raises:
            SettingError: This process is not in the group.
        """
        from torch import distributed as dist

        rank = dist.get_rank(group)
        if rank < 0:
            raise SettingError("this process is not in the process group that should share the epoch")
        return cls(rank=rank, world_size=dist.get_world_size(group), gather=_TorchGather(group))

    @classmethod
    def by_store(cls, store: KeyValueStore, rank: int, world_size: int, *, run: str = "") -> Self:
        """Processes without a process group that reach one store, such as those of JAX or TensorFlow.

        They may be made once, or anew for each epoch: each rank makes as many of them as the others.

        Args:
            store: the store for these ranks alone (``torch.distributed.PrefixStore`` makes one of a larger one).
            rank: number of this process among the ranks, from 0.
            world_size: number of ranks that share the epoch.
            run: name of this start of the processes, the same at all ranks, where the store outlives them: such as the
                launcher's count of restarts. What an earlier start left in the store is then not read.

        Raises:
            SettingError: the rank is not below the number of ranks.
        """
        return cls(rank=rank, world_size=world_size, gather=_StoreGather(store, rank, world_size, run))

    @property
    def are_several(self) -> bool:
        """This process is not alone: other ranks share the epoch, or other workers its rank."""
        return self.world_size > 1 or self.workers > 1

    def agree(self, state: OrderState) -> None:
        """Check that all ranks are about to read from the same state of the order; each must call it equally often.

        Raises:
            OrderMismatch: The ranks differ; the sentence says in what, and which ranks.
            Unavailable: a rank did not say it.
        """
        if self.are_several and self.gather is not None:
            check_agreement(
                self.gather(ReadingPlan(state=state, rank=self.rank, world_size=self.world_size).to_bytes())
            )


ALONE = Ranks()
"""One process that shares with nobody."""


class _TorchGather:
    """Gathers bytes as tensors, which are never unpickled."""

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        self._group = group

    def __call__(self, record: bytes) -> Sequence[bytes]:
        import torch
        from torch import distributed as dist

        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        own = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device)
        size = dist.get_world_size(self._group)
        found = [torch.empty(RECORD_BYTES, dtype=torch.uint8, device=device) for _ in range(size)]
        try:
            dist.all_gather(found, own, self._group)
        except RuntimeError as error:  # what every backend raises
            raise Unavailable(f"the ranks could not tell each other what they are about to read: {error}") from error
        return [array.cpu().numpy().tobytes() for array in found]


class _StoreGather:
    """Gathers bytes over a store: each handshake has keys of its own, and each rank waits for all of them.

    The store counts those that each rank has had, so that one that is made anew reads no keys of the one before.
    """

    def __init__(self, store: KeyValueStore, rank: int, world_size: int, run: str) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._run = run
        self._made = self._number = 0

    def __call__(self, record: bytes) -> Sequence[bytes]:
        if not self._made:
            self._made = self._store.add(f"frostline/{self._run}/made/{self._rank}", 1)
        self._number += 1
        self._store.set(self._key(self._rank), record)
        return [self._get(rank) for rank in range(self._world_size)]

    def _key(self, rank: int) -> str:
        return f"frostline/{self._run}/{self._made}/{self._number}/{rank}"

    def _get(self, rank: int) -> bytes:
        try:
            return bytes(self._store.get(self._key(rank)))
        except RuntimeError as error:  # what every store of torch raises
            raise Unavailable(f"rank {rank} did not say what it is about to read: {error}; does it run?") from error


class DatasetView(Protocol):
    """The part of a data set that a loader needs."""

    @property
    def samples(self) -> SampleTable:
        """The samples of the data set, in the manifest's order."""

    @property
    def digest(self) -> str:
        """Names exactly these samples."""


class EpochOptions(TypedDict, total=False):
    """Options of an epoch, the keyword arguments of ``loader`` and ``Job.loader``; each has a default.

    Attributes:
        shuffle: True draws a random order from seed and epoch; False (the default) keeps the data set's order.
            ``BlockShuffle`` shuffles blocks of neighbouring samples, each read by one request.
        seed: seed of the order and of random preprocessing; 0 by default.
        epoch: number of the epoch; each has its own order. 0 by default.
        data: a part of the job's data set, such as one side of ``Dataset.split`` or of PyTorch's ``random_split``, or a
            mixture of parts; all of it by default.
        weights: weights for drawing samples with replacement: one for each sample, or a dict with the total weight of
            each class by its name. Leave ``shuffle`` False: draws are in random order.
        num_samples: number of draws in an epoch, with ``weights``. Default: the number of samples.
        preprocess: preprocessing to use instead of the job's, such as one without random steps for held-out samples. It
            must give the same shape.
        last: rule for samples that fill no batch: ``keep`` (the default), ``drop``, ``pad`` or ``uneven``, as
            ``ordering.Shard`` says.
        drop_last: True drops the last incomplete batch, as in PyTorch; the same as ``last="drop"``. False by default.
        ranks: processes that share the epoch. Default: those of ``torch.distributed`` if it is initialised, as with
            PyTorch's ``DistributedSampler``. ``Ranks()`` shares with no other process. ``LoaderSettings.max_reorder``
            has no effect with several ranks or worker processes.
        augment: augmentation of features: ``FeatureNoise``, ``FeatureMixup``, or a function that takes a ``Batch`` and
            a view (seed and epoch) and returns a ``Batch``. Features are cached before it.
        map: function that is called at the trainer for each sample, as ``map(sample)`` or ``map(sample, rng)``; it
            takes a ``Sample`` and returns a ``Sample`` with the same id. ``rng`` is a NumPy generator seeded by seed,
            epoch and id. The function is called from several threads, before ``augment``. Features are cached before
            it.
        targets: True requires ``batch.targets``, False leaves them out: the declared targets, or the samples' masks.
            Default: given if there are any.
        record: True records the order in which samples are handed out, which may differ from the epoch's order with
            ``LoaderSettings.max_reorder``; read it by ``Loader.recorded_order``. Not for several ranks.
        replay: order of an earlier pass, from ``Loader.recorded_order``, to be repeated. All other options must be the
            same as in that pass.
    """

    shuffle: bool | BlockShuffle
    seed: int
    epoch: int
    data: Dataset | Mixture | None
    weights: GivenWeights | None
    num_samples: int | None
    preprocess: Preprocess | None
    last: str
    drop_last: bool
    ranks: Ranks | None
    augment: Callable[[Any, View], Any] | None
    map: SampleFunction | None
    targets: bool | None
    record: bool
    replay: RecordedOrder | None


F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: Mapping[str, tuple[type, ...]] = {
    "batch_size": (int,),
    "shuffle": (bool, BlockShuffle),
    "seed": (int,),
    "epoch": (int,),
    "data": (Dataset, Mixture, NoneType),
    "num_samples": (int, NoneType),
    "preprocess": (Preprocess, NoneType),
    "last": (str,),
    "drop_last": (bool,),
    "ranks": (Ranks, NoneType),
    "targets": (bool, NoneType),
    "encoded": (bool,),
    "record": (bool,),
    "replay": (RecordedOrder, NoneType),
}


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``Job.loader`` is given, by name, its whole numbers as Python's own, which states can hold.

    Raises:
        SettingError: An option is of a wrong type, or ``drop_last`` and ``last`` contradict each other.
    """
    if not isinstance(options.get("data"), Dataset | Mixture | str | NoneType):
        options = {**options, "data": dataset_from(options["data"])}
    found = check_arguments(options, _OPTIONS)
    if found.pop("drop_last", False) and found.setdefault("last", "drop") != "drop":
        raise SettingError(f"drop_last=True is last='drop', and last={found['last']!r} was given too: give one of them")
    return found


def shows_options(defaults: Callable[..., Any]) -> Callable[[F], F]:
    """Show a function's options by name in ``help`` and notebooks, in place of ``**options``.

    Args:
        defaults: Function that has the options as arguments with defaults; None is the default of all others.
    """
    known = inspect.signature(defaults).parameters

    def shown(function: F) -> F:
        signature = inspect.signature(function)
        named = {name: each for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(name, known), annotation=kind)
            for name, kind in EpochOptions.__annotations__.items()
            if name not in named
        ]
        function.__signature__ = signature.replace(parameters=[*named.values(), *options])  # type: ignore[attr-defined]
        return function

    return shown


def _default(name: str, known: Mapping[str, inspect.Parameter]) -> Any:
    if name == "drop_last":  # ``last`` as other libraries have it
        return False
    return known[name].default if name in known else None


def check_epochs(numbers: object) -> None:
    """Make sure that these are valid numbers of epochs.

    Raises:
        SettingError: a value is not the number of an epoch.
    """
    if not isinstance(numbers, Sequence) or isinstance(numbers, str):
        raise SettingError(f"epochs names the epochs to come, such as range(10), not {numbers!r}")
    for number in () if isinstance(numbers, range) else numbers:
        check_type("epochs", number, int)
