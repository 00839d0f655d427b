"""The verb ``verify``: compute steps of a run again, and say whether they are equal or what differs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from frostline.cli.options import as_json, command
from frostline.cli.show import DIFFERENT, DONE, ProgressBar, print_json, print_table, say
from frostline.cli.train import FREE, refuse_changes, run_options, setup_warnings, take_options
from frostline.core.system import imports_stay
from frostline.core.units import in_seconds
from frostline.training.settings import JobSettings, TrainSettings

if TYPE_CHECKING:
    from frostline.training.verify import Verification

__all__ = ("verify",)

# What may be another one beside what any run may be gone on with: another copy of the data, and another way to compute.
_OTHER = ("accuracy", "codec", "cut", "data", "policy", "steps", "run")
# All other options are taken from the run's folder.
_FIRST = (
    *("run", "steps", "near", "data", "model", "until", "loss", "accuracy", "cut", "codec"),
    *("policy", "device", "memory", "cache_folder", "local_tier", "trials", "as_json"),
)


@command(epilog="Example: frostline verify runs/first --near http://another-node:8000", first=_FIRST)
@click.argument(
    "run",
    metavar="RUN",
    type=click.Path(path_type=Path, file_okay=False),
    is_eager=True,
    callback=take_options,
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="Maximum number of steps to compute again, spread evenly over the recorded ones.",
)
@run_options
@as_json
def verify(run: Path, steps: int, job: JobSettings, as_json: bool, **how: Any) -> int:
    """Compute steps of a run again and compare them with its record.

    Batches are made again with the options of the run, and their features are compared with the recorded ones. The
    result is equal (bit for bit), within (the error that both accuracies allow), or a list of differences: in the
    record, the data, the weights, the layers, the order, the features, or with --cache the cached features. Another
    node (--near), engine (--accuracy, --device) or copy of the data (--data) may compute them. Options that the
    folder does not store must be given again, as for train --resume. The exit code is 0 for equal or within, 3 for
    differences.
    """
    from frostline.training.start import begin

    refuse_changes(run, free=(*FREE, *_OTHER), again="verify")
    settings = TrainSettings(job=job, **how)
    with ProgressBar() as progress:
        for warning in setup_warnings(run):
            progress(warning)
        with begin(settings.job, progress, min_classes=2) as begun:
            # Brings PyTorch, which the node imports at the same time.
            with imports_stay():
                from frostline.training.verify import verify as verified

            done = verified(settings, run, progress, steps=steps, begun=begun, began_at=click.get_current_context().obj)
    if as_json:
        print_json(done.to_json())
    else:
        _print(done)
    return DIFFERENT if done.differences else DONE


def _print(done: "Verification") -> None:
    rows = [
        ("steps computed again", f"{len(done.steps)} of {done.recorded} recorded: {', '.join(map(str, done.steps))}"),
        ("samples compared", f"{done.samples}, of which {done.equal_samples} are equal to the bit"),
        (
            "relative error",
            "-" if done.error is None else f"{done.error:.2g} as estimated, allowed: {done.allowed:.2g}",
        ),
        *((f"engine {when}", ", ".join(names)) for when, names in done.engines.items()),
        ("seconds", in_seconds(done.seconds)),
    ]
    print_table(f"Verified {done.run}", ("", ""), rows)
    said = {"equal": "All is equal to the bit.", "within": "All is within the bound.", "differs": "It differs:"}
    say(said[done.verdict], *(f"  {differing.part}: {differing.what}" for differing in done.differences))
