"""The verb ``train``: fine-tune a network's head on data that stays in its store."""

from pathlib import Path
from typing import Any

import click

from frostline.cli.monitoring.logs import log_format_option, progress, trace_option
from frostline.cli.options import as_json, epochs_option, job_options, policy_option
from frostline.cli.recipe import recipe_options
from frostline.cli.resume import options_now, refuse_changes, resume_option
from frostline.cli.summary import finish
from frostline.processors import collector_rests
from frostline.training.settings import JobSettings, TrainSettings

__all__ = ("train",)


@click.command(
    epilog="Example: frostline train --data photos --model demo:efficientnet_lite0 --until features --out run"
)
@job_options
@policy_option
@epochs_option
@click.option(
    "--batch-size", default=32, show_default=True, metavar="B", help="Number of samples of one optimiser step."
)
@click.option(
    "--val-share",
    type=float,
    metavar="SHARE",
    help="Share of each class that is held out and scored; by default the split for it that the data brings, or 0.2.",
)
@click.option("--val-split", metavar="NAME", help="Score this split, instead of a share.")
@recipe_options
@click.option("--augment", is_flag=True, help="Random crops and flips, computed anew each epoch.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write head, network and report here.")
@resume_option
@click.option(
    "--checkpoint-every",
    default="60s",
    show_default=True,
    metavar="STEPS|TIME",
    help="Steps (500) or time (60s, 5min) from one checkpoint in --out to the next within an epoch. Between epochs one "
    "is written too. Where no steps are given, they take at most a fiftieth of the time.",
)
@log_format_option
@trace_option
@as_json
def train(job: JobSettings, out: Path | None, resume: Path | None, as_json: bool, **how: Any) -> int:
    """Fine-tune a network: its frozen layers run beside the data, its head here.

    Features are computed once and kept where they fit, so that later epochs cost little: without --epochs there are
    as many as it takes until the loss of the held-out samples falls no more, and the best head is kept. A split that
    is called a test is scored and chooses nothing.

    With --out the folder gets head.safetensors, model.safetensors (the whole network, loadable without
    Frostline), report.json and report.html. Ctrl-C writes the same files with what there is by then. The folder also
    keeps config.json and two checkpoints: --resume DIR goes on after a kill, and its losses are those of a run that
    nothing broke off where features are (--accuracy exact).
    """
    from frostline.training.start import begin

    options = options_now()
    if resume is not None:
        refuse_changes(resume)
        out = resume
    settings = TrainSettings(job=job, out=out, **how)
    with progress() as observe, begin(job, observe, min_classes=2) as begun:
        # Brings PyTorch, which the node imports at the same time.
        with collector_rests():
            from frostline.training.run import train as run

        report = run(
            settings,
            observe,
            begun=begun,
            began_at=click.get_current_context().obj,
            options=options,
            resumes=resume is not None,
        )
    return finish(report, out, as_json=as_json)
