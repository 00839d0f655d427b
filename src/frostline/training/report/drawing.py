"""Draws a page's plots as SVG that takes its colours from the page: bars, lines, and a plan along the network."""

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from frostline.core import EXACT, Route
from frostline.core.units import in_bytes, in_multiple, in_percent, in_rate, in_seconds, in_times
from frostline.planning import Candidate, Plan, table
from frostline.profiles import Trial

__all__ = (
    "INK",
    "LINE",
    "SOFT",
    "STORE",
    "STYLE",
    "TRAINER",
    "WIRE",
    "PlanView",
    "canvas",
    "cuts_plot",
    "light_axes",
    "rates_plot",
    "render",
    "svg",
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


def light_axes(axes: Axes, *, along: Literal["x", "y"] = "y") -> None:
    """Leave a light grid and no frame."""
    axes.grid(visible=True, axis=along)
    for spine in axes.spines.values():
        spine.set_visible(False)


def svg(figure: Figure, *, name: str, title: str) -> str:
    """The figure as a part of a page.

    Args:
        figure: the figure to draw.
        name: name that no other drawing of the page has.
        title: title for readers who cannot see it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue(), name=name, title=title)


def _without_zeros(words: str) -> str:
    """An amount as a tick says it: ``10 kB`` for ``10.0 kB``."""
    return re.sub(r"\.0+(?= )", "", words)


def _in_one_line(name: str) -> str:
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


_ROW_INCHES, _HEAD_INCHES, _FOOT_INCHES, _WIDE_INCHES = 0.21, 0.65, 0.4, 10.4
# A decade more than this below the largest is too little to matter, and would press the rest together.
_DECADES = 4.0
# Ticks within a decade.
_STEPS = (1, 2, 5)
# Lines nearer than this lie on each other.
_SAME_LINE = 0.01
# So many of the fastest cuts that are not in use are worth a look.
_FASTEST = 3
# 5.4 points a letter is wide enough for all faces on the page's list.
_POINTS_A_LETTER = 5.4
# Ticks are a point larger, and those of two neighbours need certainty.
_POINTS_A_TICK_LETTER = 6.8


def cuts_plot(plan: Plan, *, memory_bytes: int | None = None) -> str:
    """One row a cut, down the network: bytes, seconds on the store side, link and trainer, and the node's memory.

    Every row has the same height, so that names can be read however many there are. Rows are those of
    ``planning.table``: of each cut the fastest codec that is possible, and every way in use.

    Args:
        plan: the plan to draw.
        memory_bytes: the node's budget; None draws no line.
    """
    shown = table(plan).candidates
    in_use = {part.route: part.share for part in plan.mixture}
    with mpl.rc_context(STYLE):
        height = _HEAD_INCHES + _FOOT_INCHES + _ROW_INCHES * len(shown)
        figure = Figure(figsize=(_WIDE_INCHES, height))
        panels = figure.subplots(1, 3, sharey=True, width_ratios=[1.15, 1.15, 0.6])
        names = [f"{_in_one_line(candidate.name)} · {candidate.cut}" for candidate in shown]
        margin = min(0.34, (0.2 + max(map(len, names)) * _POINTS_A_LETTER / 72) / _WIDE_INCHES)
        figure.subplots_adjust(
            left=margin, right=0.985, top=1 - _HEAD_INCHES / height, bottom=_FOOT_INCHES / height, wspace=0.1
        )
        _draw_bytes(
            panels[0],
            shown,
            exact={candidate.cut: candidate for candidate in plan.candidates if candidate.codec == EXACT},
        )
        _draw_seconds(panels[1], shown)
        _draw_memory(panels[2], shown, memory_bytes)
        panels[0].set_yticks(range(len(shown)), names, fontsize=9)
        panels[0].set_ylim(len(shown) - 0.4, -0.6)
        for axes in panels:
            light_axes(axes, along="x")
            axes.tick_params(axis="y", pad=8)
            axes.tick_params(axis="x", labeltop=True)
        for axes, say in zip(panels, (in_bytes, in_seconds, in_bytes), strict=True):
            _keep_labels_apart(axes, say)
        _mark_chosen(panels, [in_use.get(candidate.route) for candidate in shown])
        return svg(figure, name="cuts", title="Bytes, seconds and memory at every cut of the network, for one sample")


def rates_plot(bandwidths: Sequence[float], rates: Mapping[str, Sequence[float]], *, measured: float) -> str:
    """Samples a second over bytes a second, both on log axes, one line a rule; the best one stands out.

    Args:
        bandwidths: bytes a second, rising.
        rates: rates of each rule at each bandwidth, the best rule first.
        measured: the bandwidth that the plan is for.
    """
    with mpl.rc_context(STYLE):
        figure, axes = canvas(width=10.4, height=3.3)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.axvline(measured, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
        looks = ((STORE, "solid", 2.4), (TRAINER, "solid", 1.4), (WIRE, "solid", 1.4), (SOFT, (0, (1, 1.5)), 1.4))
        for (names, values), (colour, dashes, width) in zip(_together(rates), looks, strict=False):
            axes.plot(bandwidths, values, color=colour, linestyle=dashes, linewidth=width, label=", ".join(names))
        # Above the lines, which may lie anywhere.
        axes.legend(
            loc="lower right", bbox_to_anchor=(1, 1), ncols=2, labelcolor=SOFT, handlelength=1.8, borderaxespad=0
        )
        axes.set_xlabel("bandwidth of the link, a second")
        axes.set_title("samples a second", loc="left", fontsize=10, color=SOFT)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _without_zeros(in_bytes(value))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_rate(value)))
        # Rates seldom span a decade, so that one tick a decade may be none.
        axes.yaxis.set_major_locator(LogLocator(subs=_STEPS, numticks=12))
        axes.set_ylim(*_enclosing([value for values in rates.values() for value in values]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        light_axes(axes)
        return svg(figure, name="rates", title="Predicted samples a second of several rules at other bandwidths")


def _enclosing(values: Sequence[float]) -> tuple[float, float]:
    """The greatest tick of a log axis below all values, and the least one above them."""
    found = [value for value in values if 0 < value < math.inf] or [1.0]
    decades = range(math.floor(math.log10(min(found))), math.ceil(math.log10(max(found))) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in _STEPS]
    below = [tick for tick in ticks if tick < min(found)] or [ticks[0] / 2]
    above = [tick for tick in ticks if tick > max(found)]
    return below[-1], above[0]


def _draw_bytes(axes: Axes, shown: Sequence[Candidate], *, exact: Mapping[int, Candidate]) -> None:
    """A stalk from the encoded image's size to the cut's: to the left it saves, to the right it costs.

    A ring shows what would cross as it is, where a codec makes it fewer.
    """
    encoded = max(exact[0].wire_bytes_per_sample, 1)
    sizes = [max(candidate.wire_bytes_per_sample, 1) for candidate in shown]
    axes.set_xscale("log")
    axes.set_title("bytes that cross", loc="left", fontsize=10, color=SOFT, pad=24)
    for row, (candidate, size) in enumerate(zip(shown, sizes, strict=True)):
        colour = WIRE if size > encoded else STORE
        axes.plot([encoded, size], [row, row], color=colour, linewidth=1.4, alpha=0.55)
        axes.plot([size], [row], color=colour, marker="o", markersize=5)
        if candidate.codec != EXACT:
            whole = max(exact[candidate.cut].wire_bytes_per_sample, 1)
            axes.plot([whole], [row], color=colour, marker="o", markersize=4, fillstyle="none", markeredgewidth=1)
    axes.axvline(encoded, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
    _log_ticks(axes)


def _draw_seconds(axes: Axes, shown: Sequence[Candidate]) -> None:
    """Three dots a row, and a tick where the row's rate is: what works at the same time is as slow as the slowest."""
    axes.set_title("seconds on each side, and in all", loc="left", fontsize=10, color=SOFT, pad=24)
    slowest = [1 / candidate.samples_per_s for candidate in shown]
    maximum = max([*slowest, *(max(candidate.store_s, candidate.link_s, candidate.trainer_s) for candidate in shown)])
    if maximum <= 0:
        return
    axes.set_xscale("log")
    minimum = maximum / 10**_DECADES
    axes.set_xlim(minimum / 1.3, maximum * 1.6)
    for row, (candidate, seconds) in enumerate(zip(shown, slowest, strict=True)):
        if seconds > minimum:
            axes.plot([seconds], [row], color=INK, marker="|", markersize=11, markeredgewidth=1.6, linestyle="none")
        for value, colour in ((candidate.store_s, STORE), (candidate.link_s, WIRE), (candidate.trainer_s, TRAINER)):
            if value > minimum:
                axes.plot([value], [row], color=colour, marker="o", markersize=5)
    _log_ticks(axes)


def _draw_memory(axes: Axes, shown: Sequence[Candidate], memory_bytes: int | None) -> None:
    sizes = [candidate.memory_bytes for candidate in shown]
    axes.barh(range(len(shown)), sizes, height=0.5, color=STORE, alpha=0.75)
    axes.set_title("memory of the node", loc="left", fontsize=10, color=SOFT, pad=24)
    # A budget far above everything would leave nothing to see of the rest.
    if memory_bytes is not None and memory_bytes <= 3 * max(sizes):
        axes.axvline(memory_bytes, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
    axes.locator_params(axis="x", nbins=3)
    axes.set_xlim(left=0)


def _log_ticks(axes: Axes) -> None:
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())


def _keep_labels_apart(axes: Axes, say: Callable[[float], str]) -> None:
    """Label the ticks so that no label leaves its panel, where it would run into the next one's, or meets another."""
    low, high = axes.get_xlim()
    ticks = [float(tick) for tick in axes.get_xticks() if low <= tick <= high]
    places = [float(axes.transAxes.inverted().transform(axes.transData.transform((tick, 0)))[0]) for tick in ticks]
    a_letter = _POINTS_A_TICK_LETTER / (axes.get_position().width * _WIDE_INCHES * 72)
    labels, anchors, end = list[str](), list[Literal["left", "center", "right"]](), 0.0
    for place, label in zip(places, (_without_zeros(say(tick)) for tick in ticks), strict=True):
        width = a_letter * len(label)
        start = min(max(place - width / 2, 0.0), 1.0 - width)
        is_free = start >= end
        labels.append(label if is_free else "")
        anchors.append("left" if place < width / 2 else "right" if place > 1 - width / 2 else "center")
        end = start + width + 2 * a_letter if is_free else end
    axes.set_xticks(ticks, labels)
    for tick, anchor in zip(axes.xaxis.get_major_ticks(), anchors, strict=True):
        tick.label1.set_horizontalalignment(anchor)
        tick.label2.set_horizontalalignment(anchor)


def _together(rates: Mapping[str, Sequence[float]]) -> list[tuple[list[str], Sequence[float]]]:
    """The rules with their rates, those that nobody could tell apart in a drawing as one."""
    found: list[tuple[list[str], Sequence[float]]] = []
    for name, values in rates.items():
        same = next((names for names, others in found if np.allclose(values, others, rtol=_SAME_LINE)), None)
        if same is None:
            found.append(([name], values))
        else:
            same.append(name)
    return found


def _mark_chosen(panels: Sequence[Axes], shares: Sequence[float | None]) -> None:
    """Bring out the rows in use, with their shares where there are several."""
    is_mixed = sum(share is not None for share in shares) > 1
    for row, share in ((row, share) for row, share in enumerate(shares) if share is not None):
        for axes in panels:
            axes.axhspan(row - 0.5, row + 0.5, color=LINE, alpha=0.7, zorder=0, linewidth=0)
        label = panels[0].get_yticklabels()[row]
        label.set_color(INK)
        label.set_fontweight("bold")
        if is_mixed:
            panels[0].text(
                0.99, row, f"{share:.0%}", transform=panels[0].get_yaxis_transform(), ha="right", va="center",
                color=INK, fontweight="bold", fontsize=9,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One of the mixture's ways."""

    share: float
    candidate: Candidate
    shade: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Price:
    """What ten percent more of a resource would give, as a share."""

    resource: str
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    cells: tuple[str, ...]
    is_chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan, as a template takes it.

    Attributes:
        plan: all of it.
        ways: ways of the mixture, the largest share first.
        prices: the dearest resource first; empty where nothing bounds the rate.
        columns: columns of the table.
        rows: rows that are worth a look: the ways in use, both ends of the network, and the fastest others.
        others: all other rows.
        figure: SVG of all cuts.
        wire_bytes: bytes on the wire of an average sample.
        encoded: the candidate that ships the encoded sample.
        trials: trials of the node's engines up to the frost line, the fastest first; those that did not run come last.
    """

    plan: Plan
    ways: tuple[_Way, ...]
    prices: tuple[_Price, ...]
    columns: tuple[str, ...]
    rows: tuple[_Row, ...]
    others: tuple[_Row, ...]
    figure: str
    wire_bytes: float
    encoded: Candidate
    trials: tuple[Trial, ...]

    @classmethod
    def of(cls, plan: Plan, *, memory_bytes: int | None = None, every: bool = False) -> "PlanView":
        """Gather what is shown of a plan.

        Args:
            plan: the plan to show.
            memory_bytes: the node's budget, where it is known.
            every: a row for every codec of every cut.
        """
        by_route = {candidate.route: candidate for candidate in plan.candidates}
        made, in_use = table(plan, every=every), {part.route for part in plan.mixture}
        worth = _worth_a_look(made.candidates, in_use)
        rows = [
            (candidate.route in worth, _Row(cells=cells, is_chosen=candidate.route in in_use))
            for cells, candidate in zip(made.rows, made.candidates, strict=True)
        ]
        is_bound = any(price for _, price in plan.prices)
        ways = tuple(
            _Way(share=part.share, candidate=by_route[part.route], shade=max(1 - 0.3 * place, 0.25))
            for place, part in enumerate(plan.mixture)
        )
        return cls(
            plan=plan,
            ways=ways,
            prices=tuple(_Price(resource=name, gain=price / 10) for name, price in plan.prices if is_bound),
            columns=made.columns,
            rows=tuple(row for is_worth, row in rows if is_worth),
            others=tuple(row for is_worth, row in rows if not is_worth),
            figure=cuts_plot(plan, memory_bytes=memory_bytes),
            wire_bytes=sum(way.share * way.candidate.wire_bytes_per_sample for way in ways),
            encoded=next(candidate for candidate in plan.candidates if candidate.cut == 0),
            trials=_trials(plan),
        )


def _worth_a_look(shown: Sequence[Candidate], in_use: Set[Route]) -> Set[Route]:
    ends = {candidate.cut for candidate in (shown[0], shown[-1])}
    others = [candidate for candidate in shown if candidate.is_possible and candidate.route not in in_use]
    fastest = sorted(others, key=lambda item: -item.samples_per_s)[:_FASTEST]
    at_ends = [next(candidate for candidate in shown if candidate.cut == cut) for cut in ends]
    return {*in_use, *(candidate.route for candidate in (*fastest, *at_ends))}


def _trials(plan: Plan) -> tuple[Trial, ...]:
    line = max((trial.cut for trial in plan.trials), default=0)
    here = [trial for trial in plan.trials if trial.cut == line]
    return tuple(sorted(here, key=lambda item: (item.samples_per_s is None, -(item.samples_per_s or 0.0))))
