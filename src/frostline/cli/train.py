"""The verb ``train``: fine-tune a network's head on data that stays in its store."""

import sys
from pathlib import Path

import click

from frostline.cli.options import as_json, job_options, node_options
from frostline.cli.progress import ProgressBar
from frostline.cli.show import print_json
from frostline.cli.summary import print_report
from frostline.config import LoaderSettings, NodeSettings

__all__ = ("train",)

_INTERRUPTED = 130


@click.command(
    epilog="Example: frostline train --data photos --model demo:efficientnet_lite0 --until features --out run"
)
@job_options
@click.option("--epochs", default=5, show_default=True, metavar="N", help="Passes over the training samples.")
@click.option("--batch-size", default=16, show_default=True, metavar="B", help="Samples of one optimiser step.")
@click.option(
    "--val-share", default=0.2, show_default=True, metavar="SHARE", help="Of each class, held out and scored."
)
@click.option("--optimizer", type=click.Choice(["adam", "adamw", "sgd"]), default="adam", show_default=True)
@click.option("--learning-rate", "--lr", default=2e-3, show_default=True, help="Of the optimiser.")
@click.option("--augment", is_flag=True, help="Random crops and flips, computed anew each epoch.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write head, network and report here.")
@node_options
@as_json
def train(
    data: str,
    model: str,
    until: str,
    near: str | None,
    weights: str | None,
    seed: int,
    cut: int | None,
    skip_allowance: float,
    epochs: int,
    batch_size: int,
    val_share: float,
    optimizer: str,
    learning_rate: float,
    augment: bool,
    out: Path | None,
    memory: int,
    device: str,
    as_json: bool,
) -> None:
    """Fine-tune a network: its frozen layers run beside the data, its head here.

    With --out the folder gets head.safetensors, model.safetensors (the whole network, loadable without
    Frostline), report.json and report.html. Ctrl-C writes the same files with what there is by then.
    """
    from frostline.training.run import TrainSettings
    from frostline.training.run import train as run

    settings = TrainSettings(
        data=data,
        model=model,
        until=until,
        epochs=epochs,
        batch_size=batch_size,
        near=near,
        weights=weights,
        seed=seed,
        val_share=val_share,
        optimizer=optimizer,
        learning_rate=learning_rate,
        augment=augment,
        cut=cut,
        out=out,
        loader=LoaderSettings(skip_allowance=skip_allowance),
        node=NodeSettings(memory_bytes=memory, device=device),
    )
    with ProgressBar() as progress:
        report = run(settings, progress)
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report, out)
    if report.interrupted:
        sys.exit(_INTERRUPTED)
