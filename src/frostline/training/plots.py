"""Draws a report's plots as SVG that takes its colours and letters from the page around it."""

import html
import io
import re
from collections.abc import Sequence
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from frostline.training.report import CutReport
from frostline.training.words import in_bytes, in_percent, in_seconds

__all__ = ("accuracy_plot", "cuts_plot", "loss_plot")

# Placeholders that matplotlib carries through; the page's style sheet decides what they look like, by day and by night.
_INK, _SOFT, _LINE = "#010101", "#010102", "#010103"
_STORE, _TRAINER, _WIRE = "#010104", "#010105", "#010106"
_VARIABLES = {
    _INK: "--ink",
    _SOFT: "--soft",
    _LINE: "--line",
    _STORE: "--store",
    _TRAINER: "--trainer",
    _WIRE: "--wire",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "frostline",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "text.parse_math": False,
    "font.family": ["sans-serif"],
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _SOFT,
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.8,
    "xtick.color": _LINE,
    "xtick.labelcolor": _SOFT,
    "ytick.color": _LINE,
    "ytick.labelcolor": _SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}
_ROW_INCHES, _HEAD_INCHES, _FOOT_INCHES = 0.21, 0.65, 0.4


def loss_plot(losses: Sequence[float], epoch_losses: Sequence[float], val_losses: Sequence[float]) -> str:
    """Loss over optimisation steps, with each epoch's mean and held-out loss at the epoch's end."""
    with mpl.rc_context(_STYLE):
        figure, axes = _canvas(width=5.2, height=2.9)
        if losses:
            axes.plot(range(1, len(losses) + 1), losses, color=_WIRE, linewidth=1, label="each step")
        steps = len(losses) / len(epoch_losses) if losses and epoch_losses else 1.0
        # A mean belongs to the middle of its epoch; a validation comes at the end.
        _epoch_line(axes, epoch_losses, steps=steps, shift=0.5, color=_TRAINER, name="mean of an epoch")
        _epoch_line(axes, val_losses, steps=steps, color=_STORE, name="held out")
        if losses or epoch_losses or val_losses:
            axes.legend(loc="upper right", labelcolor=_SOFT, handlelength=1.4, borderaxespad=0)
        axes.set_xlabel("optimisation step")
        axes.set_ylim(bottom=0)
        _quiet(axes)
        return _svg(figure, name="loss", title="Loss at each optimisation step, with epoch means and held-out loss")


def accuracy_plot(accuracies: Sequence[float]) -> str:
    """Share of the held-out samples that were right, after each epoch."""
    with mpl.rc_context(_STYLE):
        figure, axes = _canvas(width=5.2, height=2.9)
        _epoch_line(axes, accuracies, steps=1, color=_STORE, name="")
        for epoch in {0, len(accuracies) - 1} if accuracies else ():
            value = accuracies[epoch]
            axes.annotate(
                in_percent(value), (epoch + 1, value), (0, 8), textcoords="offset points", ha="center", color=_INK
            )
        axes.set_xlabel("epoch")
        axes.set_xlim(0.5, max(len(accuracies), 1) + 0.5)
        axes.set_ylim(0, 1.1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        _quiet(axes)
        return _svg(figure, name="accuracy", title="Validation accuracy after each epoch")


def cuts_plot(candidates: Sequence[CutReport], *, chosen: int) -> str:
    """One row a cut, down the network: bytes a sample on the left, seconds a sample on each side on the right.

    Every row has the same height, so that names can be read however many there are.
    """
    with mpl.rc_context(_STYLE):
        height = _HEAD_INCHES + _FOOT_INCHES + _ROW_INCHES * max(len(candidates), 1)
        figure = Figure(figsize=(10.4, height))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.15, 1])
        names = [f"{_in_one_line(one.name)} · {one.cut}" for one in candidates]
        # The page's own face is not known here: 5.4 points a letter is wide enough for all of its list.
        margin = min(0.42, (0.2 + max(map(len, names), default=0) * 5.4 / 72) / 10.4)
        figure.subplots_adjust(
            left=margin, right=0.985, top=1 - _HEAD_INCHES / height, bottom=_FOOT_INCHES / height, wspace=0.08
        )
        _draw_bytes(left, candidates)
        _draw_seconds(right, candidates)
        left.set_yticks(range(len(candidates)), names, fontsize=9)
        left.set_ylim(len(candidates) - 0.4, -0.6)
        for axes in (left, right):
            _quiet(axes, along="x")
            axes.tick_params(axis="y", pad=8)
            axes.tick_params(axis="x", labeltop=True)
        _mark_chosen((left, right), [candidate.cut == chosen for candidate in candidates])
        return _svg(figure, name="cuts", title="Bytes and seconds a sample at every cut of the network")


def _draw_bytes(axes: Axes, candidates: Sequence[CutReport]) -> None:
    """A stalk from the encoded image's size to the cut's: to the left it saves, to the right it costs."""
    crossing = [max(candidate.wire_bytes_per_sample, 1.0) for candidate in candidates]
    encoded = next((size for one, size in zip(candidates, crossing, strict=True) if one.cut == 0), None)
    axes.set_xscale("log")
    axes.set_title("bytes that cross, a sample", loc="left", fontsize=10, color=_SOFT, pad=24)
    for row, size in enumerate(crossing):
        colour = _WIRE if encoded is not None and size > encoded else _STORE
        if encoded is not None:
            axes.plot([encoded, size], [row, row], color=colour, linewidth=1.4, alpha=0.55)
        axes.plot([size], [row], color=colour, marker="o", markersize=5)
    if encoded is not None:
        axes.axvline(encoded, color=_SOFT, linewidth=1, linestyle=(0, (3, 3)))
    axes.xaxis.set_major_locator(LogLocator(numticks=7))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _round(in_bytes(value))))


def _draw_seconds(axes: Axes, candidates: Sequence[CutReport]) -> None:
    rows = range(len(candidates))
    store = [candidate.store_s for candidate in candidates]
    axes.barh(rows, store, height=0.5, color=_STORE)
    axes.barh(rows, [candidate.trainer_s for candidate in candidates], left=store, height=0.5, color=_TRAINER)
    axes.set_title("seconds, a sample: store side, then trainer", loc="left", fontsize=10, color=_SOFT, pad=24)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _round(in_seconds(value))))


def _mark_chosen(both: Sequence[Axes], picked: Sequence[bool]) -> None:
    for row in (row for row, is_chosen in enumerate(picked) if is_chosen):
        for axes in both:
            axes.axhspan(row - 0.5, row + 0.5, color=_LINE, alpha=0.7, zorder=0, linewidth=0)
        label = both[0].get_yticklabels()[row]
        label.set_color(_INK)
        label.set_fontweight("bold")


def _epoch_line(axes: Axes, values: Sequence[float], *, steps: float, shift: float = 1, color: str, name: str) -> None:
    if values:
        places = [steps * (epoch + shift) for epoch in range(len(values))]
        axes.plot(places, values, color=color, linewidth=2, marker="o", markersize=4, label=name)


def _canvas(*, width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _quiet(axes: Axes, *, along: Literal["x", "y"] = "y") -> None:
    axes.grid(visible=True, axis=along)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _round(words: str) -> str:
    return re.sub(r"\.0+(?= )", "", words)


def _in_one_line(name: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", name)


def _svg(figure: Figure, *, name: str, title: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue(), name=name, title=title)


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
