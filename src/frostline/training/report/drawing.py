"""How a page's drawings look: SVG that takes its colours and letters from the page around it."""

import html
import io
import re
from collections.abc import Mapping
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from frostline.core.units import in_bytes, in_multiple, in_percent, in_rate, in_seconds, in_times

__all__ = (
    "INK",
    "LINE",
    "SOFT",
    "STORE",
    "STYLE",
    "TRAINER",
    "WIRE",
    "canvas",
    "in_one_line",
    "quiet",
    "render",
    "svg",
    "without_zeros",
)

# Placeholders that matplotlib carries through; the page's style sheet decides what they look like, by day and by night.
INK, SOFT, LINE = "#010101", "#010102", "#010103"
STORE, TRAINER, WIRE = "#010104", "#010105", "#010106"
_VARIABLES = {
    INK: "--ink",
    SOFT: "--soft",
    LINE: "--line",
    STORE: "--store",
    TRAINER: "--trainer",
    WIRE: "--wire",
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "frostline",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "text.parse_math": False,
    "font.family": ["sans-serif"],
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.color": LINE,
    "ytick.labelcolor": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}
"""Of ``matplotlib.rc_context``."""


def canvas(*, width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of so many inches with one pair of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def quiet(axes: Axes, *, along: Literal["x", "y"] = "y") -> None:
    """Leave a light grid and no frame."""
    axes.grid(visible=True, axis=along)
    for spine in axes.spines.values():
        spine.set_visible(False)


def svg(figure: Figure, *, name: str, title: str) -> str:
    """The figure as a part of a page.

    Args:
        figure: to draw.
        name: name that no other drawing of the page has.
        title: title for readers who cannot see it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue(), name=name, title=title)


def without_zeros(words: str) -> str:
    """An amount as a tick says it: ``10 kB`` for ``10.0 kB``."""
    return re.sub(r"\.0+(?= )", "", words)


def in_one_line(name: str) -> str:
    """A name that a drawing can hold: without control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", name)


def _inline(svg: str, *, name: str, title: str) -> str:
    """Make a drawing part of a page: the page's colours and letters, ids of its own, a title, and no address."""
    found = re.search(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', svg)
    assert found, "matplotlib writes a viewBox"
    body = svg[found.end() :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', body)
    body = body.replace("url(#", f"url(#{name}-")
    for placeholder, variable in _VARIABLES.items():
        body = body.replace(placeholder, f"var({variable})")
    head = f'<svg viewBox="{found[1]}" role="img" aria-labelledby="{name}-title">'
    return f'{head}<title id="{name}-title">{html.escape(title)}</title>{body}'


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
        multiple=in_multiple,
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
        return ", ".join(f"{name} {_in_setting(item)}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
