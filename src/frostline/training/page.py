"""Renders a report as one page that needs nothing else: no script, no request, by day, by night and on paper."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from frostline.training.plots import accuracy_plot, cuts_plot, loss_plot
from frostline.training.report import CutReport, Report
from frostline.training.words import in_bytes, in_percent, in_seconds, in_times

__all__ = ("render_page",)


def render_page(report: Report) -> str:
    """The whole page as HTML. Whatever stands in the report's texts is shown as text, never as markup."""
    environment = Environment(
        loader=PackageLoader("frostline.training", ""),
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
        rate=_in_rate,
        setting=_in_setting,
    )
    return environment.get_template("page.html.jinja").render(
        report=report,
        title=f"{report.model} on {_last_part(report.data)}",
        stages=_stage_bars(report.stages),
        crossings=_crossing_bars(report),
        epochs=_epoch_rows(report),
        candidates=report.plan.candidates,
        plots=_plots(report),
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


def _plots(report: Report) -> dict[str, str]:
    candidates: Sequence[CutReport] = report.plan.candidates
    return {
        "loss": loss_plot(report.losses, report.epoch_losses, report.val_losses),
        "accuracy": accuracy_plot(report.val_accuracies) if report.val_accuracies else "",
        "cuts": cuts_plot(candidates, chosen=report.plan.cut) if candidates else "",
    }


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


def _epoch_rows(report: Report) -> list[_Epoch]:
    columns = (report.epoch_losses, report.val_losses, report.val_accuracies)
    return [
        _Epoch(
            number=row + 1, loss=_at(columns[0], row), val_loss=_at(columns[1], row), val_accuracy=_at(columns[2], row)
        )
        for row in range(max(len(column) for column in columns))
    ]


def _at(column: Sequence[float], row: int) -> float | None:
    return column[row] if row < len(column) else None


def _in_number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3f}"


def _in_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}"


def _in_setting(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _last_part(url: str) -> str:
    return re.split(r"[/\\]", url.rstrip("/\\"))[-1] or url
