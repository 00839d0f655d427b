"""The verb ``index``: build a data set's manifest, or find it, and show what it holds."""

from dataclasses import asdict

import click

from frostline.cli.options import as_json
from frostline.cli.show import print_json, print_table
from frostline.core.amounts import in_bytes

__all__ = ("index",)


@click.command(epilog="Example: frostline index --data photos/")
@click.option("--data", required=True, metavar="URL", help="Folder or s3:// prefix of images in class folders.")
@as_json
def index(data: str, as_json: bool) -> None:
    """Build the manifest of a data set, or find it, and show what it holds.

    The manifest is kept beside the data (in the user's cache folder where the store takes no writes) and is built
    again only when the listing has changed.
    """
    from frostline.datasets import Dataset

    dataset = Dataset(data)
    found = dataset.statistics()
    if as_json:
        applied = None if dataset.applied is None else dataset.applied.to_json()
        about = {"data": dataset.url, "digest": dataset.digest, "applied": applied}
        print_json({**about, **asdict(found), "per_class": dict(found.per_class)})
        return
    rows = [(name, str(count)) for name, count in found.per_class]
    print_table(f"{dataset.url}: {found.samples} samples", ("class", "samples"), rows)
    click.echo(
        f"{in_bytes(found.total_bytes)} encoded, {in_bytes(found.mean_bytes)} a sample "
        f"({in_bytes(found.min_bytes)} to {in_bytes(found.max_bytes)}); "
        + ", ".join(f"{count} {suffix}" for suffix, count in found.formats)
    )
    if dataset.applied is not None:
        click.echo(f"a ready form, made with {dataset.applied}")
    click.echo(f"manifest {'found' if found.manifest_found else 'built'}: {found.manifest}")
