"""What a finished run looks like on a terminal: a short table."""

from pathlib import Path

import click

from frostline.cli.show import print_table
from frostline.training.report import Report
from frostline.training.words import in_bytes, in_percent, in_seconds, in_times

__all__ = ("print_report",)


def print_report(report: Report, out: Path | None) -> None:
    """Print accuracy, seconds, bytes with and without Frostline, their ratio, and where each part ran."""
    accuracy = "-" if report.val_accuracy is None else in_percent(report.val_accuracy)
    rows = [
        ("held-out accuracy", accuracy),
        ("seconds", in_seconds(report.seconds)),
        ("samples", f"{report.samples} in {report.epochs} epochs"),
        ("store side to trainer, with Frostline", in_bytes(report.wire_bytes)),
        ("store side to trainer, without it", in_bytes(report.baseline_wire_bytes)),
        ("fewer bytes", in_times(report.bytes_ratio)),
        ("waiting for data", in_percent(report.stall_share)),
        *((f"{one.part}", one.where) for one in report.where),
    ]
    if report.skipped:
        rows.append(("skipped", f"{len(report.skipped)} unreadable samples, such as {report.skipped[0].object}"))
    print_table("Interrupted" if report.interrupted else "Done", ("", ""), rows)
    if out is not None:
        click.echo(f"Written to {out}: head.safetensors, model.safetensors, report.json, report.html")
