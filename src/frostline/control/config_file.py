"""Reads what a control plane divides from a TOML file."""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from frostline.control.activity.summary import Prices
from frostline.control.amounts import Amounts
from frostline.control.settings import ControlledJob, ControlSettings, ControlTenant
from frostline.errors import SettingError

__all__ = ("read_control_settings",)

_TOP = ("capacity", "policies", "round_s", "lease_s", "max_stages", "prices", "tenant", "job")

T = TypeVar("T")


def read_control_settings(path: Path, tenants: tuple[ControlTenant, ...] | None = None) -> ControlSettings:
    """Read the settings of a control plane.

    Args:
        path: TOML file with a table ``[capacity]`` and, where they are wanted, ``policies``, ``round_s``, ``lease_s``,
            ``max_stages`` and tables ``[prices]``, ``[[tenant]]`` and ``[[job]]``.
        tenants: tenants of whoever serves it, who are named elsewhere; None has those of the file.

    Raises:
        SettingError: It cannot be read or makes no sense; the sentence names the file and the field.
    """
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
        return _settings(value, tenants)
    except (OSError, ValueError) as error:
        raise SettingError(f"cannot read {path}: {error}") from error
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error


def _settings(value: dict[str, Any], tenants: tuple[ControlTenant, ...] | None) -> ControlSettings:
    _check_fields_known("the file", value, _TOP)
    if tenants is None:
        tenants = tuple(_made(ControlTenant, table) for table in _tables(value, "tenant"))
    elif "tenant" in value:
        raise SettingError("a node has its own tenants (--tenants); leave out the tables [[tenant]]")
    policies = value.get("policies", ["deadlines", "max_min"])
    if not isinstance(policies, list) or not all(isinstance(name, str) for name in policies):
        raise SettingError("policies must be a list of names")
    numbers = {name: value[name] for name in ("round_s", "lease_s", "max_stages") if name in value}
    return ControlSettings(
        capacity=Amounts.from_json(value.get("capacity", {}), "capacity"),
        policies=tuple(policies),
        tenants=tenants,
        jobs=tuple(_made(ControlledJob, _with_end(table)) for table in _tables(value, "job")),
        prices=_prices(value.get("prices")),
        **numbers,
    )


def _prices(value: object) -> Prices | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise SettingError("prices must be a table [prices]")
    return _made(Prices, value)


def _tables(value: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    tables = value.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SettingError(f"there must be a table [[{name}]] for each {name}")
    return tables


def _made(kind: type[T], table: dict[str, Any]) -> T:
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # both kinds are data classes
    _check_fields_known(f"a {kind.__name__}", table, known)
    try:
        return kind(**table)
    except TypeError as error:
        raise SettingError(f"a table lacks a field: {error}") from error


def _with_end(table: dict[str, Any]) -> dict[str, Any]:
    """The same table, with ``ends_at``, a date and time, in seconds."""
    rest = dict(table)
    ends_at = rest.pop("ends_at", None)
    if ends_at is None:
        return rest
    if not isinstance(ends_at, datetime) or ends_at.tzinfo is None:
        raise SettingError("ends_at of a job must be a date and time with its offset, such as 2030-01-31T07:00:00Z")
    return {**rest, "ends_at_s": ends_at.timestamp()}


def _check_fields_known(owner: str, table: Mapping[str, Any], known: Any) -> None:
    for name in table:
        if name not in known:
            raise SettingError(f"{owner} has an unknown field {name!r}; there are {', '.join(known)}")
