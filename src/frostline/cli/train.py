"""The verb ``train``: fine-tune a network's head on data that stays in its store."""

from pathlib import Path
from typing import Any

import click

from frostline.cli.options import as_json, job_options, policy_option
from frostline.cli.progress import ProgressBar
from frostline.cli.summary import finish
from frostline.training.settings import JobSettings, TrainSettings
from frostline.wire.recipes import OPTIMIZERS

__all__ = ("train",)


@click.command(
    epilog="Example: frostline train --data photos --model demo:efficientnet_lite0 --until features --out run"
)
@job_options
@policy_option
@click.option("--epochs", default=5, show_default=True, metavar="N", help="Passes over the training samples.")
@click.option("--batch-size", default=16, show_default=True, metavar="B", help="Samples of one optimiser step.")
@click.option(
    "--val-share", default=0.2, show_default=True, metavar="SHARE", help="Of each class, held out and scored."
)
@click.option("--val-split", metavar="NAME", help="Score this split, as it was saved, instead of a share.")
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adam", show_default=True)
@click.option("--learning-rate", "--lr", default=2e-3, show_default=True, help="Of the optimiser.")
@click.option("--augment", is_flag=True, help="Random crops and flips, computed anew each epoch.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write head, network and report here.")
@as_json
def train(job: JobSettings, out: Path | None, as_json: bool, **how: Any) -> int:
    """Fine-tune a network: its frozen layers run beside the data, its head here.

    With --out the folder gets head.safetensors, model.safetensors (the whole network, loadable without
    Frostline), report.json and report.html. Ctrl-C writes the same files with what there is by then.
    """
    from frostline.training.run import train as run

    settings = TrainSettings(job=job, out=out, **how)
    with ProgressBar() as progress:
        report = run(settings, progress)
    return finish(report, out, as_json=as_json)
