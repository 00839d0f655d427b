"""Fills the pages' templates; whatever stands in a value's texts is shown as text, never as markup."""

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from frostline.core.units import in_bytes, in_percent, in_rate, in_seconds, in_times

__all__ = ("render",)


def render(template: str, values: Mapping[str, Any]) -> str:
    """The whole page as HTML, from the template of that name."""
    environment = Environment(
        loader=PackageLoader("frostline.training", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=in_bytes,
        seconds=in_seconds,
        percent=in_percent,
        times=in_times,
        number=_in_number,
        rate=in_rate,
        setting=_in_setting,
    )
    return environment.get_template(f"{template}.html.jinja").render(values)


def _in_number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3f}"


def _in_setting(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_setting(one)}" for name, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
