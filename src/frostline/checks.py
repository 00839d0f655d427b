"""Refuses values of another type than their name asks for, in one sentence that names it."""

import re
from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from os import PathLike
from types import NoneType
from typing import Any, get_args

from frostline.errors import SettingError

__all__ = (
    "check_fields",
    "check_minimums",
    "check_quantile",
    "check_type",
    "check_whole_eights",
    "checked",
    "devices_of",
)

_MEANT: Mapping[type, tuple[type, ...]] = {int: (Integral,), float: (Real,), str: (str, PathLike)}
_WORDS: Mapping[type, str] = {
    bool: "True or False",
    float: "a number",
    int: "a whole number",
    NoneType: "None",
    str: "a text",
}
_SHOWN = (bool, Integral, Real, str)


def check_type(name: str, value: object, *kinds: type) -> None:
    """Make sure that a value is of one of these types.

    NumPy's numbers are numbers, a whole number is a number, ``True`` is none, and a path is a text.

    Raises:
        SettingError: the value is of another type.
    """
    if not any(_is(value, kind) for kind in kinds):
        came = repr(value) if isinstance(value, _SHOWN) else type(value).__name__
        raise SettingError(f"{name} takes {' or '.join(_WORDS.get(kind, kind.__name__) for kind in kinds)}, not {came}")


def checked(given: Mapping[str, Any], taken: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The same arguments, whole numbers as Python's own.

    Args:
        given: by name; ``None`` is left to whoever takes it.
        taken: the types of those that are looked at.

    Raises:
        SettingError: a value is of another type.
    """
    for name, kinds in taken.items():
        if name in given:
            check_type(name, given[name], *kinds)
    return {name: int(value) if _is(value, int) else value for name, value in given.items()}


def check_fields(settings: Any) -> None:
    """Make sure that the fields of a data class that hold numbers, texts and switches do so; secret ones are not shown.

    Raises:
        SettingError: a field holds a value of another type.
    """
    for setting in fields(settings):
        kinds = get_args(setting.type) or (setting.type,)
        if setting.repr and all(kind in _WORDS for kind in kinds):
            check_type(setting.name, getattr(settings, setting.name), *kinds)


def _is(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind in (bool, object)
    return isinstance(value, _MEANT.get(kind, (kind,)))


def check_minimums(settings: object, **minimums: float) -> None:
    """Make sure that fields are no less than they may be; None stands for no value.

    Args:
        settings: Owner of the fields.
        **minimums: The least value of each field, by its name.

    Raises:
        SettingError: A field is less.
    """
    for name, minimum in minimums.items():
        value = getattr(settings, name)
        if value is not None and value < minimum:
            raise SettingError(f"{name} must be at least {minimum}, not {value}")


def check_quantile(name: str, value: float) -> None:
    """Make sure that a value is above 0 and at most 1.

    Raises:
        SettingError: It is not.
    """
    if not 0 < value <= 1:
        raise SettingError(f"{name} must be above 0 and at most 1, not {value}")


def check_whole_eights(name: str, value: int) -> None:
    """Make sure that a number of rows is a multiple of 8.

    Raises:
        SettingError: It is not.
    """
    if value < 8 or value % 8:
        raise SettingError(f"{name} must be a multiple of 8, not {value}")


def devices_of(device: str) -> tuple[str, ...]:
    """The devices that a setting names with commas, in torch's words; numbered parts of the processor are all ``cpu``.

    Args:
        device: such as ``cpu``, ``cuda`` or ``cuda:0,cuda:1``.

    Raises:
        SettingError: It names none, one twice, or devices of several kinds.
    """
    names = device.split(",")
    kinds = {name.partition(":")[0] for name in names}
    pattern = r"(cpu|cuda):\d+" if len(names) > 1 else r"cpu|cuda(:\d+)?"
    is_clear = all(re.fullmatch(pattern, name) for name in names) and len(kinds) == 1 and len(set(names)) == len(names)
    if not is_clear:
        raise SettingError(f"device must be cpu, cuda or cuda:N, or several such as cuda:0,cuda:1; not {device!r}")
    return ("cpu",) * len(names) if kinds == {"cpu"} else tuple(names)
