"""Renders a report as one page that needs nothing else: no script, no request, by day, by night and on paper."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frostline.core import EXACT
from frostline.core.units import in_bytes, in_rate, in_seconds
from frostline.training.report.plan_view import PlanView
from frostline.training.report.plots import accuracy_plot, loss_plot
from frostline.training.report.report import Report
from frostline.training.report.templates import render

__all__ = ("render_page",)

_MAX_ROWS = 12


def render_page(report: Report) -> str:
    """The whole page as HTML. Whatever stands in the report's texts is shown as text, never as markup."""
    return render(
        "report",
        {
            "report": report,
            "title": f"{report.model} on {_last_part(report.data)}",
            "stages": _stage_bars(report.stages),
            "crossings": _crossing_bars(report),
            "ways": _way_bars(report),
            "rates": _rate_bars(report),
            "epochs": _epoch_rows(report),
            "view": None if report.plan is None else PlanView.of(report.plan),
            "plots": {
                "loss": loss_plot(report.losses, report.epoch_losses, report.val_losses),
                "accuracy": accuracy_plot(report.val_accuracies, report.kept_epoch) if report.val_accuracies else "",
            },
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """A table's row with a bar: its share of the longest one, and which side of the wire it belongs to."""

    name: str
    words: str
    share: float
    side: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Epoch:
    number: int
    loss: float | None
    val_loss: float | None
    val_accuracy: float | None
    is_kept: bool


def _stage_bars(stages: Mapping[str, float]) -> list[_Bar]:
    longest = max(stages.values(), default=0) or 1
    return [
        _Bar(name=name, words=in_seconds(seconds), share=seconds / longest, side=_side(name))
        for name, seconds in stages.items()
    ]


def _side(stage: str) -> str:
    return next((side for side in ("store", "trainer", "wire") if stage.startswith(side)), "idle")


def _crossing_bars(report: Report) -> list[_Bar]:
    sizes = (
        ("encoded images", report.baseline_wire_bytes, "wire"),
        ("with Frostline", report.wire_bytes, "store"),
    )
    most = max(size for _, size, _ in sizes) or 1
    return [_Bar(name=name, words=in_bytes(size), share=size / most, side=side) for name, size, side in sizes]


def _way_bars(report: Report) -> list[_Bar]:
    most = max((way.samples for way in report.ways), default=0) or 1
    return [
        _Bar(
            name=f"{way.name} (cut {way.cut}{'' if way.codec == EXACT else f', {way.codec}'})",
            words=f"{way.samples:,}",
            share=way.samples / most,
            side="wire" if way.cut == 0 else "store",
        )
        for way in report.ways
    ]


def _rate_bars(report: Report) -> list[_Bar]:
    rates = (
        ("predicted", report.predicted_samples_per_s, "idle"),
        ("measured", report.measured_samples_per_s, "store"),
    )
    most = max((rate for _, rate, _ in rates if rate is not None), default=0) or 1
    return [
        _Bar(name=name, words=f"{in_rate(rate)} samples/s", share=rate / most, side=side)
        for name, rate, side in rates
        if rate is not None
    ]


def _epoch_rows(report: Report) -> list[_Epoch]:
    """The epochs, or of very many of them some at even distances, the last one, and the one whose head was kept."""
    columns = (report.epoch_losses, report.val_losses, report.val_accuracies)
    count = max(len(column) for column in columns)
    shown = {*range(0, count, -(-count // _MAX_ROWS) or 1), count - 1, report.kept_epoch - 1}
    return [
        _Epoch(
            number=row + 1,
            loss=_at(columns[0], row),
            val_loss=_at(columns[1], row),
            val_accuracy=_at(columns[2], row),
            is_kept=row + 1 == report.kept_epoch,
        )
        for row in range(count)
        if row in shown
    ]


def _at(column: Sequence[float], row: int) -> float | None:
    return column[row] if row < len(column) else None


def _last_part(url: str) -> str:
    return re.split(r"[/\\]", url.rstrip("/\\"))[-1] or url
