"""The verb ``index``: build a data set's manifest, or find it, show what it holds, and divide it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from frostline.cli.options import (
    as_json,
    changed_option,
    command,
    file_column_option,
    format_option,
    label_option,
    list_option,
    where_option,
)
from frostline.cli.show import ProgressBar, bar, print_json, print_table, say
from frostline.cli.units import SHARES
from frostline.core.config import MANIFEST_LOCATIONS
from frostline.core.units import in_bytes, in_seconds

if TYPE_CHECKING:
    from frostline.datasets import Dataset, DatasetStatistics
    from frostline.datasets.check import Checked

__all__ = ("index",)

_MAX_CLASSES = 60
_MAX_SHOWN = 10


@command(epilog="Example: frostline index --data photos/ --split train=0.8,val=0.1,test=0.1")
@click.option("--data", required=True, metavar="URL", help="Folder or URL of the data.")
@format_option
@file_column_option
@label_option
@list_option
@changed_option
@click.option(
    "--near",
    multiple=True,
    metavar="URL",
    help="Let this node list the data; if given several times, the first one that serves the data lists it.",
)
@where_option
@click.option(
    "--split",
    "shares",
    type=SHARES,
    metavar="NAME=SHARE,...",
    help="Divide the samples into named parts and save them, such as train=0.8,val=0.2.",
)
@click.option(
    "--group-by",
    "by",
    metavar="COLUMN",
    help="Keep samples with the same value in this column, such as a patient's number, in the same part.",
)
@click.option("--split-by", "column", metavar="COLUMN", help="Save one part for each value of this column.")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    help="Seed for drawing the parts; the same seed gives the same parts.",
)
@click.option(
    "--manifest-location",
    type=click.Choice(MANIFEST_LOCATIONS),
    default=MANIFEST_LOCATIONS[0],
    show_default=True,
    help="Location of the manifest and splits of a local folder: data puts them into the folder itself, so that "
    "everyone who reads the data finds them; auto uses your cache folder.",
)
@click.option("--check", "checks", is_flag=True, help="Read every sample and report unreadable ones and duplicates.")
@as_json
def index(
    data: str,
    format: str | None,
    file_column: str | None,
    label: str | None,
    relist: bool,
    on_change: str,
    near: tuple[str, ...],
    where: str | None,
    shares: Mapping[str, float] | None,
    by: str | None,
    column: str | None,
    seed: int,
    manifest_location: str,
    checks: bool,
    as_json: bool,
) -> None:
    """List a data set, show what it contains, divide it into splits.

    The list of samples, the manifest, is kept and is built again only when the data has changed: beside the data in an
    object store, or in the user's cache folder if the data is a local folder or is read-only. Splits are kept beside
    it; use them by train --split. With --near the node lists the data, so this machine needs no credentials for the
    store, and splits are kept in the cache folder.
    """
    whole = _listed(
        data,
        format=format,
        file_column=file_column,
        label=label,
        relist=relist,
        on_change=on_change,
        near=near,
        manifest_location=manifest_location,
    )
    dataset = whole if where is None else whole.select(where)
    if shares is not None:
        whole.save_splits(dataset.split(shares, seed, by=by))
    if column is not None:
        whole.save_splits(dataset.split_by(column))
    found = dataset.statistics()
    checked = _checked(dataset) if checks else None
    if as_json:
        from frostline.datasets.formats.left_out import json_of

        applied = None if dataset.manifest.applied is None else dataset.manifest.applied.to_json()
        about = {"data": dataset.url, "digest": dataset.digest, "applied": applied}
        tables: dict[str, Any] = {name: dict(getattr(found, name)) for name in ("per_class", "columns", "splits")}
        tables["left_out"] = json_of(found.left_out)
        print_json({**about, **asdict(found), **tables, "check": None if checked is None else checked.to_json()})
        return
    _show(dataset, found)
    if checked is not None:
        _show_checked(checked)


def _listed(data: str, **how: Any) -> "Dataset":
    from frostline.datasets import Dataset

    with ProgressBar() as progress:
        dataset = Dataset(data, **how, targets=(), on_event=progress)
        _ = dataset.samples  # which lists it
    return dataset


def _checked(dataset: "Dataset") -> "Checked":
    from frostline.datasets.check import check

    with ProgressBar() as progress:
        return check(dataset, progress)


def _show_checked(checked: "Checked") -> None:
    say(
        f"checked in {in_seconds(checked.seconds)}: {len(checked.unreadable)} samples cannot be read, and "
        f"{checked.surplus} have the bytes of another"
    )
    for group in checked.duplicates[:_MAX_SHOWN]:
        say(f"the same bytes: {', '.join(group[:_MAX_SHOWN])}{', …' if len(group) > _MAX_SHOWN else ''}")
    if len(checked.duplicates) > _MAX_SHOWN:
        say(f"and {len(checked.duplicates) - _MAX_SHOWN} more groups; --json has all")


def _show(dataset: "Dataset", found: "DatasetStatistics") -> None:
    shown = found.per_class
    if len(shown) > _MAX_CLASSES:
        shown = tuple(sorted(shown, key=lambda item: -item[1])[:_MAX_CLASSES])
    maximum = max((count for _, count in shown), default=0)
    rows = [(name, str(count), bar(count, maximum)) for name, count in shown]
    print_table(f"{dataset.url}: {found.samples} samples", ("class", "samples", ""), rows, left=(0, 2))
    if len(shown) < len(found.per_class):
        say(f"the {len(shown)} largest of {len(found.per_class)} classes; --json has all")
    if found.without_label:
        say(f"{found.without_label} samples without a label")
    say(
        f"{in_bytes(found.total_bytes)} encoded, {in_bytes(found.mean_bytes)} a sample "
        f"({in_bytes(found.min_bytes)} to {in_bytes(found.max_bytes)}, half of them below "
        f"{in_bytes(found.quantiles.p50)}, 95 % below {in_bytes(found.quantiles.p95)}); "
        + ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in found.formats)
    )
    say("columns: " + ", ".join(f"{name} ({kind})" for name, kind in found.columns))
    if found.splits:
        say("splits: " + ", ".join(f"{name} {count}" for name, count in found.splits))
    if dataset.splits_brought:
        say(
            f"the data itself brings the splits {', '.join(dataset.splits_brought)}, in its column split: train and "
            "score by them, or choose with --split and --val-split"
        )
    if dataset.manifest.applied is not None:
        say(f"a ready format, made with {dataset.manifest.applied}")
    say(f"manifest {'found' if found.manifest_found else 'built'}: {found.manifest or 'kept nowhere'}")
