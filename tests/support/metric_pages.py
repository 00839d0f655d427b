"""What the page on metrics lists, and what a scrape has, in the same words."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

__all__ = ("listed", "scraped")

_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def listed(prefix):
    """Kind and unit of each metric of the page whose name begins so, by name; each is explained, and once."""
    rows = re.findall(
        rf"^\| `({prefix}\w+)`(?: \(by [\w, ]+\))? \| (\w+) \| (\w*) \| (.+) \|$",
        _PAGE.read_text("utf-8"),
        re.MULTILINE,
    )
    assert len({name for name, *_ in rows}) == len(rows)
    assert all(len(meaning.split()) > 1 for *_, meaning in rows)
    return {name: (kind, unit) for name, kind, unit, _ in rows}


def scraped(families):
    """The same of metrics, as ``text_string_to_metric_families`` gives them."""
    if isinstance(families, str):
        families = text_string_to_metric_families(families)
    names = {_shown(family): family.type for family in families}
    return {name: (kind, _unit(name)) for name, kind in names.items()}


def _shown(family):
    return f"{family.name}_total" if family.type == "counter" else family.name


def _unit(name):
    return next((unit for unit in ("seconds", "bytes") if unit in name.split("_")), "")
