"""What a run that ended looks like on a terminal: a short table, or its report as JSON."""

from collections.abc import Mapping
from pathlib import Path

import click

from frostline.cli.show import DONE, INTERRUPTED, print_json, print_table
from frostline.core import EXACT
from frostline.core.units import METRICS, in_bytes, in_percent, in_rate, in_score, in_seconds, in_times
from frostline.planning.diagnosis import NOTHING_YET
from frostline.training.report.recipe_words import recipe_in_words
from frostline.training.report.report import Report, RouteUsage

__all__ = ("finish",)


def finish(report: Report, out: Path | None, *, as_json: bool) -> int:
    """Show a run that ended, and say which exit code it has."""
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report, out)
    return INTERRUPTED if report.interrupted else DONE


def _print_report(report: Report, out: Path | None) -> None:
    """Print accuracy, seconds, bytes with and without Frostline, their ratio, and where each part ran."""
    scores: Mapping[str, float | None] = report.val_score or {"accuracy": report.val_accuracy}
    rows = [
        *((f"held-out {METRICS[name]}", in_score(name, value)) for name, value in scores.items()),
        ("held out", report.held_out),
        ("recipe", recipe_in_words(report.settings) or "-"),
        ("weights", str(report.settings.get("weights", "-"))),
        ("seconds since the command", in_seconds(report.seconds)),
        ("set-up", in_seconds(report.setup_s)),
        ("first step after", "-" if report.first_step_s is None else in_seconds(report.first_step_s)),
        ("samples", f"{report.samples} in {_epochs(report)}"),
        ("store side to trainer, with Frostline", in_bytes(report.wire_bytes)),
        ("store side to trainer, without it", in_bytes(report.baseline_wire_bytes)),
        ("fewer bytes", in_times(report.bytes_ratio)),
        ("waiting for data", in_percent(report.stall_share)),
        *((f"{place.part}", place.where) for place in report.where),
    ]
    rows += [(f"samples by {_way(way)}", f"{way.samples}") for way in report.ways]
    rows += _rates(report)
    if report.engine_error:
        rows.append(("engine's relative error", f"{report.engine_error:.1g} at most, allowed: {report.accuracy}"))
    if report.codec_error:
        rows.append(("relative error on the way", f"{report.codec_error:.2g} at most, allowed: {report.accuracy}"))
    if report.replans:
        rows.append(
            ("changes of the plan", f"{len(report.replans)}, the last after {in_seconds(report.replans[-1].at_s)}")
        )
    if report.skipped:
        rows.append(("skipped", f"{len(report.skipped)} unreadable samples, such as {report.skipped[0].object}"))
    if report.diagnosis is not None and report.diagnosis.held_back_by != NOTHING_YET:
        click.echo(f"{report.diagnosis}")
    if report.fallback:
        click.echo(f"not cut as it stands: {report.fallback}")
    print_table("Interrupted" if report.interrupted else "Done", ("", ""), rows)
    if out is not None:
        click.echo(f"Written to {out}: head.safetensors, model.safetensors, report.json, report.html")


def _epochs(report: Report) -> str:
    kept = "" if report.head_epoch == report.epochs else f", of which the head of epoch {report.head_epoch} is kept"
    return f"{report.epochs} epoch{'' if report.epochs == 1 else 's'}{kept}"


def _way(one: RouteUsage) -> str:
    return f"cut {one.cut} ({one.name}{'' if one.codec == EXACT else f', {one.codec}'})"


def _rates(report: Report) -> list[tuple[str, str]]:
    """Predicted beside measured, where both are known."""
    predicted, measured = report.predicted_samples_per_s, report.measured_samples_per_s
    if predicted is None or measured is None:
        return []
    return [("samples/s from the store", f"{in_rate(measured)} measured, {in_rate(predicted)} predicted")]
