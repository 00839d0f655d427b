"""The verb ``demo``: the main job on real photographs and real weights, with no server beside its own."""

from pathlib import Path

import click

from frostline.cli.options import as_json, epochs_option
from frostline.cli.progress import ProgressBar
from frostline.cli.summary import finish
from frostline.core.units import in_bytes
from frostline.events import PhaseStarted, ProgressMade
from frostline.training.settings import JobSettings, TrainSettings

__all__ = ("demo",)

_MODEL = "demo:efficientnet_lite0"


@click.command(epilog="Example: frostline demo --data photos/ --out run/")
@click.option("--data", metavar="DIR", help="A folder of images in class folders, instead of the demo's own set.")
@epochs_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=".demo",
    show_default=True,
    metavar="DIR",
    help="Folder for the files.",
)
@as_json
def demo(data: str | None, epochs: int | None, out: Path, as_json: bool) -> int:
    """Fine-tune a pretrained EfficientNet-lite0 on real photographs, the node in a process of its own.

    Without --data a set is made once from the photographs that scikit-image and scikit-learn ship: one class a
    photograph, each sample a seeded view of it.
    """
    from frostline.training.start import begin

    with ProgressBar() as progress:
        folder = data or str(_own_photographs(out / "photographs", progress))
        job = JobSettings(data=folder, model=_MODEL, until="features")
        settings = TrainSettings(job=job, epochs=epochs, out=out)
        with begin(job, progress, min_classes=2) as begun:
            from frostline.training.run import train

            report = train(settings, progress, begun=begun, began_at=click.get_current_context().obj)
    return finish(report, out, as_json=as_json)


def _own_photographs(directory: Path, progress: ProgressBar) -> Path:
    """Make the demo's set, or find it, and say what it is."""
    from frostline.demo.photographs import make

    progress(PhaseStarted(name="making photographs"))
    found = make(directory, progress=lambda done, total: progress(ProgressMade(done=done, total=total)))
    click.echo(
        f"{'Made' if found.made else 'Found'} {found.images} photographs in {directory}: seeded views (crop, scale, "
        f"slight rotation) of the {len(found.classes)} photographs that scikit-image and scikit-learn ship, one class "
        f"each, JPEG quality 95, {in_bytes(found.mean_bytes)} on average.",
        err=True,
    )
    return directory
