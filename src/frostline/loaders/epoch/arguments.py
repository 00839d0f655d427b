"""The options of an epoch, by name; those that are unknown or of another type are refused before anything is done."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, Protocol, TypedDict, TypeVar

from frostline.checks import check_type, checked
from frostline.core import SampleTable, View
from frostline.datasets import Dataset
from frostline.errors import SettingError, nearest
from frostline.loaders.epoch.mixture import GivenWeights, Mixture
from frostline.loaders.epoch.ranks import Ranks
from frostline.loaders.epoch.sample_map import SampleFunction
from frostline.ordering import BlockShuffle, RecordedOrder
from frostline.preprocess import Preprocess

__all__ = ("DatasetView", "EpochOptions", "check_epochs", "check_names", "checked_options", "shows_options")


class DatasetView(Protocol):
    """What a loader needs of a data set."""

    @property
    def samples(self) -> SampleTable:
        """Its samples, in the manifest's order."""

    @property
    def digest(self) -> str:
        """Names exactly these samples."""


class EpochOptions(TypedDict, total=False):
    """What may be said of an epoch; each has a default.

    Attributes:
        shuffle: draw the order from the seed; else it is the manifest's. ``BlockShuffle`` draws blocks of neighbours,
            which are read by one request, and mixes some of them at a time. False by default.
        seed: seed of the order and of random preprocessing; 0 by default.
        epoch: number of the epoch; each has its own order. 0 by default.
        data: a part of the job's data set, such as one side of ``Dataset.split``, or a mixture of parts; all of it by
            default.
        weights: draw samples with replacement: a weight for each sample, or for each class by its name, which the
            class's samples then have together. They draw an order of their own, so that ``shuffle`` stays False.
        num_samples: how many drawn samples are an epoch; as many as there are samples by default.
        preprocess: another one than the job's that gives the same shape, such as one without random steps for the
            held-out samples.
        last: rule for samples that fill no batch: ``keep`` (the default), ``drop``, ``pad`` or ``uneven``, as
            ``ordering.Shard`` says.
        ranks: ranks that share the epoch; by default those of ``torch.distributed`` where it is initialised, as for
            PyTorch's ``DistributedSampler``. ``Ranks()`` is one that shares with nobody. Several ranks keep the order,
            whatever ``LoaderSettings.slack`` is, and so do worker processes.
        augment: changes each ``Batch`` here, in feature space, by seed and epoch: ``FeatureNoise``, ``FeatureMixup``,
            or a function of your own. What is kept are the features as they were before.
        map: function of your own that is called for each sample here, before it is put into its batch, as
            ``map(sample)`` or ``map(sample, rng)``: it is given a ``Sample`` and gives another one with the same id.
            The generator is seeded by seed, epoch and id, so that a sample is the same whoever reads it. It runs in
            several threads; what is kept are the features as they were before. ``augment`` comes after it.
        targets: give ``batch.targets``: those that the data set declares, else the samples' masks; by default where
            there are any.
        record: keep in which order samples are handed out, which differs from the epoch's where
            ``LoaderSettings.slack`` allows it; ``Loader.recorded`` gives it. Not for several ranks.
        replay: hand the samples out as they were then. All else must be as it was.
    """

    shuffle: bool | BlockShuffle
    seed: int
    epoch: int
    data: Dataset | Mixture | None
    weights: GivenWeights | None
    num_samples: int | None
    preprocess: Preprocess | None
    last: str
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
    "ranks": (Ranks, NoneType),
    "targets": (bool, NoneType),
    "encoded": (bool,),
    "record": (bool,),
    "replay": (RecordedOrder, NoneType),
}


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``Job.loader`` is given, by name, its whole numbers as Python's own, which states can hold.

    Raises:
        SettingError: something is of another type.
    """
    return checked(options, _OPTIONS)


def check_names(options: Iterable[str], method: str) -> None:
    """Make sure that these are options of an epoch, as Python does it where a function names them.

    Args:
        options: names of what was given.
        method: name of the job's method, for the sentence.

    Raises:
        TypeError: An option is unknown.
    """
    known = EpochOptions.__annotations__
    for name in options:
        if name not in known:
            hint = ": say last='drop'" if name == "drop_last" else nearest(name, known)
            raise TypeError(f"Job.{method}() got an unexpected keyword argument {name!r}{hint}")


def shows_options(defaults: Callable[..., Any]) -> Callable[[F], F]:
    """Let ``help`` and notebooks show a function's options by name, in the place of ``**options``.

    Args:
        defaults: Function that has the options as arguments with defaults; None is the default of all others.
    """
    known = inspect.signature(defaults).parameters

    def shown(function: F) -> F:
        signature = inspect.signature(function)
        named = {name: each for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(known.get(name)), annotation=kind)
            for name, kind in EpochOptions.__annotations__.items()
            if name not in named
        ]
        function.__signature__ = signature.replace(parameters=[*named.values(), *options])  # type: ignore[attr-defined]
        return function

    return shown


def _default(parameter: inspect.Parameter | None) -> Any:
    return None if parameter is None else parameter.default


def check_epochs(numbers: object) -> None:
    """Make sure that these are numbers of epochs to come.

    Raises:
        SettingError: a value is not the number of an epoch.
    """
    if not isinstance(numbers, Sequence) or isinstance(numbers, str):
        raise SettingError(f"epochs names the epochs to come, such as range(10), not {numbers!r}")
    for number in () if isinstance(numbers, range) else numbers:
        check_type("epochs", number, int)
