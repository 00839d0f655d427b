"""The verb ``predict``: what a run's network says of each sample of a data set."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from frostline.cli.options import as_json, data_options
from frostline.cli.progress import ProgressBar
from frostline.cli.show import print_json
from frostline.config import LoaderSettings, NodeSettings
from frostline.core.units import in_bytes, in_seconds
from frostline.errors import SettingError
from frostline.processors import collector_rests
from frostline.training.run_config import RunConfig
from frostline.training.settings import JobSettings

__all__ = ("predict",)

_SUFFIXES = (".csv", ".parquet")
_MODEL = "model.safetensors"
# Options of the run that say what its network is and how samples become its input.
_OF_THE_RUN = ("model", "until", "tokenizer", "max_length", "samples", "seed", "targets", "loss", "task")


@click.command(epilog="Example: frostline predict --run runs/first --data new-photos/ --out predictions.csv")
@click.option(
    "--run",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of a run: what frostline train --out wrote.",
)
@data_options
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the table to this .csv or .parquet file; without it CSV goes to stdout.",
)
@click.option(
    "--batch-size", default=32, show_default=True, metavar="B", help="Number of samples that the head takes at once."
)
@as_json
def predict(
    run: Path,
    out: Path | None,
    batch_size: int,
    near: Sequence[str],
    skip_allowance: float,
    node: NodeSettings,
    as_json: bool,
    **data: Any,
) -> None:
    """Classify every sample with the network of a run, or give the numbers or labels that it learned.

    The network, its preprocessing and the names of the classes are the run's. The data needs no labels. The table has
    a row for each sample: its object, the prediction, and the probability of that class; of several labels those that
    are more likely than not, and the probability of each; of vectors the numbers, joined by semicolons.
    """
    from frostline.training.start import begin

    if out is not None and out.suffix not in _SUFFIXES:
        raise SettingError(f"predictions are written to {' or '.join(_SUFFIXES)}, and {out} ends otherwise (--out)")
    if as_json and out is None:
        raise SettingError("--json prints a summary on stdout, and the table needs another place: name a file (--out)")
    job = _settings(run, near, node, skip_allowance, data)
    with ProgressBar() as progress, begin(job, progress) as begun:
        # Brings PyTorch, which the node imports at the same time.
        with collector_rests():
            from frostline.training.predict import predict as predicted

        done = predicted(
            run,
            job,
            progress,
            batch_size=batch_size,
            out=out,
            stdout=sys.stdout.buffer,
            begun=begun,
            began_at=click.get_current_context().obj,
        )
    if as_json:
        print_json(done.to_json())
        return
    click.echo(
        f"{done.samples} samples predicted in {in_seconds(done.seconds)}, {in_seconds(done.setup_s)} of them set-up; "
        f"{in_bytes(done.wire_bytes)} crossed, {done.skipped} skipped"
        + "".join(f"\n  {name}: {count}" for name, count in list(done.counts.items())[:10]),
        err=True,
    )


def _settings(
    run: Path, near: Sequence[str], node: NodeSettings, skip_allowance: float, data: dict[str, Any]
) -> JobSettings:
    """The settings of a job on this data with the run's network.

    Raises:
        SettingError: there is no run in the folder, or it has not ended.
    """
    config = RunConfig.read(run)
    weights = run / _MODEL
    if not weights.exists():
        raise SettingError(
            f"the run in {run} has no {_MODEL}, which is written when it ends: end it (frostline train --resume {run})"
        )
    of_the_run = {name: config.options[name] for name in _OF_THE_RUN if config.options.get(name) is not None}
    data["column"] = data["column"] or config.options.get("column")
    return JobSettings(
        **of_the_run,
        **data,
        near=next(iter(near), None),
        also_near=tuple(near[1:]),
        weights=str(weights),
        outputs=config.outputs,
        # Each sample comes once, so nothing is worth keeping.
        loader=LoaderSettings(skip_allowance=skip_allowance, cache_bytes=0),
        node=node,
    )
