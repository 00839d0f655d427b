"""The verb ``extract``: the features of a whole data set, to Parquet."""

from pathlib import Path

import click

from frostline.cli.options import as_json, job_options, node_options
from frostline.cli.progress import ProgressBar
from frostline.cli.show import print_json
from frostline.config import LoaderSettings, NodeSettings
from frostline.training.words import in_bytes, in_seconds

__all__ = ("extract",)


@click.command(
    epilog="Example: frostline extract --data photos/ --model demo:efficientnet_lite0 --until features --out f.parquet"
)
@job_options
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="To write.")
@node_options
@as_json
def extract(
    data: str,
    model: str,
    until: str,
    near: str | None,
    weights: str | None,
    seed: int,
    cut: int | None,
    skip_allowance: float,
    out: Path,
    memory: int,
    device: str,
    as_json: bool,
) -> None:
    """Write the features of every sample to a Parquet file.

    Columns: id, object, label, class, and features as a fixed-shape tensor. The file appears when it is whole.
    """
    from frostline.training.extract import ExtractSettings
    from frostline.training.extract import extract as run

    settings = ExtractSettings(
        data=data,
        model=model,
        until=until,
        out=out,
        near=near,
        weights=weights,
        seed=seed,
        cut=cut,
        loader=LoaderSettings(skip_allowance=skip_allowance, cache_bytes=0),
        node=NodeSettings(memory_bytes=memory, device=device),
    )
    with ProgressBar() as progress:
        done = run(settings, progress)
    if as_json:
        print_json(done.to_json())
        return
    click.echo(
        f"{done.samples} samples of {done.shape} {done.dtype} written to {out} in {in_seconds(done.seconds)}; "
        f"{in_bytes(done.wire_bytes)} crossed, {len(done.skipped)} skipped"
    )
