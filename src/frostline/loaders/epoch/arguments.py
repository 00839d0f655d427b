"""Refuses arguments of a job and its loaders that are of another type than theirs, before anything is done."""

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from frostline.checks import check_type, checked
from frostline.datasets import Dataset
from frostline.errors import SettingError, nearest
from frostline.loaders.epoch.mixture import Mixture
from frostline.loaders.epoch.ranks import Ranks
from frostline.ordering import BlockShuffle, RecordedOrder
from frostline.preprocess import Preprocess

__all__ = ("check_epochs", "check_names", "checked_options")

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
        SettingError: something is of another type.
    """
    return checked(options, _OPTIONS)


def check_names(options: Iterable[str], function: str) -> None:
    """Make sure that these are options of a function of ``Job``, as Python does it where a function names them.

    Args:
        options: names that were given.
        function: name of the function.

    Raises:
        TypeError: An option is unknown.
    """
    known = {*_OPTIONS, "augment", "weights"}
    for name in options:
        if name not in known:
            raise TypeError(f"Job.{function}() got an unexpected keyword argument {name!r}{nearest(name, known)}")


def check_epochs(numbers: object) -> None:
    """Make sure that these are numbers of epochs to come.

    Raises:
        SettingError: a value is not the number of an epoch.
    """
    if not isinstance(numbers, Sequence) or isinstance(numbers, str):
        raise SettingError(f"epochs names the epochs to come, such as range(10), not {numbers!r}")
    for number in () if isinstance(numbers, range) else numbers:
        check_type("epochs", number, int)
