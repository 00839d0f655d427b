"""The verbs ``extract`` and ``predict``: features of a data set, and what a run's network says of its samples."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from frostline.cli.logs import log_format_option, progress, trace_option
from frostline.cli.options import as_json, command, data_options, job_options, policy_option
from frostline.cli.show import ProgressBar, on_ray, print_json, say
from frostline.cli.units import BYTES
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import SettingError
from frostline.core.system import imports_stay
from frostline.core.units import in_bytes, in_seconds
from frostline.training.run_config import NETWORK, RunConfig, has_earlier_network
from frostline.training.settings import ExtractSettings, JobSettings, is_factory
from frostline.wire.recipes import LOSSES, TASKS

if TYPE_CHECKING:
    from frostline.training.extract import Extracted
    from frostline.training.predict import Predictions

__all__ = (
    "extract",
    "predict",
)


@command(
    epilog="Example: frostline extract --data photos/ --model demo:efficientnet_lite0 --until features --out f.parquet"
)
@job_options
@policy_option
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to write; the suffix chooses the format: .parquet, .safetensors or .lance.",
)
@click.option(
    "--part-size",
    type=BYTES,
    default="64MiB",
    show_default=True,
    help="Write parts of about this size; an interrupted extraction continues after the last complete part.",
)
@click.option(
    "--executor",
    type=click.Choice(("ray",)),
    help="Let Ray tasks request the features, part by part, on the Ray cluster of RAY_ADDRESS or frostline cluster up.",
)
@log_format_option
@trace_option
@as_json
def extract(job: JobSettings, out: Path, part_size: int, executor: str | None, as_json: bool) -> None:
    """Write the features (embeddings) of every sample to a file.

    Parquet has the columns id, object, label, class and features, a fixed-shape tensor; safetensors has the tensors
    features, ids and labels; a Lance data set, which is a folder, has the columns of Parquet with features as lists
    of one length. The file appears when it is complete. Until then finished parts are kept beside it, and the same
    command continues after a kill. When the data has changed, the same command computes only new and changed samples;
    the result equals that of a run from scratch. Give --near several times to share the work between nodes.
    """
    from frostline.training.feature_files import check_suffix
    from frostline.training.start import begin

    check_suffix(out)
    # Each sample comes once, so nothing is worth keeping.
    settings = ExtractSettings(
        job=replace(job, loader=replace(job.loader, cache_bytes=0)),
        out=out,
        part_bytes=part_size,
        on_ray=executor == "ray",
    )
    ray = on_ray() if settings.on_ray else nullcontext()
    with ray, progress() as on_event, begin(settings.job, on_event) as begun:
        # Brings PyTorch, which the node imports at the same time.
        with imports_stay():
            from frostline.training.extract import extract as run

        done = run(settings, on_event, begun=begun, began_at=click.get_current_context().obj)
    if as_json:
        print_json(done.to_json())
        return
    say(
        f"{done.samples} samples of {done.shape} {done.dtype} written to {out} in {in_seconds(done.seconds)}, "
        f"{in_seconds(done.setup_s)} of them set-up; "
        f"{in_bytes(done.wire_bytes)} crossed, {len(done.skipped)} skipped{_not_finite(done)}"
        f"; {done.computed} computed, {done.kept} kept"
        + (f", {done.taken_up} taken up from before" if done.taken_up else "")
        + f"; computed by {done.engine}"
        + (f", relative error up to {done.engine_error:.2g}" if done.engine_error else "")
        + (f"; relative error on the way up to {done.codec_error:.2g}" if done.codec_error else "")
    )


def _not_finite(done: "Extracted | Predictions") -> str:
    return f", {done.nonfinite} not finite ({done.first_nonfinite})" if done.nonfinite else ""


_SUFFIXES = (".csv", ".parquet")
# Options of the run that say what its network is and how samples become its input, and their types.
_OF_THE_RUN = {
    "column": str,
    "max_length": int,
    "model": str,
    "samples": str,
    "seed": int,
    "targets": str,
    "task": str,
    "tokenizer": str,
    "until": str,
}


@command(epilog="Example: frostline predict --run runs/first --data new-photos/ --out predictions.csv")
@click.option(
    "--run",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of a run, as frostline train --out wrote it.",
)
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help="The run's network, if it is a factory of yours. A factory is code, so it is only run if you name it here.",
)
@data_options
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the table to this .csv or .parquet file; without it, CSV goes to stdout.",
)
@click.option(
    "--batch-size",
    default=32,
    show_default=True,
    metavar="B",
    help="Number of samples that the head processes at once.",
)
@as_json
def predict(
    run: Path,
    model: str | None,
    out: Path | None,
    batch_size: int,
    near: Sequence[str],
    max_skipped_fraction: float,
    allow_nonfinite: bool,
    node: NodeSettings,
    as_json: bool,
    **data: Any,
) -> None:
    """Predict classes, labels or numbers with a trained network.

    The network, its preprocessing and the class names come from the folder of the run. The folder need not be trusted:
    it cannot make this command run code, or read or write anywhere else. The data needs no labels. The table has
    one row per sample: its object, the predicted class and the probability of that class. For several labels it has
    those with a probability above one half, and the probability of each; for vectors the numbers, joined by semicolons.
    """
    from frostline.training.start import begin

    if out is not None and out.suffix not in _SUFFIXES:
        raise SettingError(f"predictions are written to {' or '.join(_SUFFIXES)}, and {out} ends otherwise (--out)")
    if as_json and out is None:
        raise SettingError("--json prints a summary on stdout, and the table needs another place: name a file (--out)")
    # Each sample comes once, so nothing is worth keeping.
    loader = LoaderSettings(max_skipped_fraction=max_skipped_fraction, allow_nonfinite=allow_nonfinite, cache_bytes=0)
    job = _settings(run, model, near, node, loader, data)
    with ProgressBar() as progress, begin(job, progress) as begun:
        # Brings PyTorch, which the node imports at the same time.
        with imports_stay():
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
    say(
        f"{done.samples} samples predicted in {in_seconds(done.seconds)}, {in_seconds(done.setup_s)} of them set-up; "
        f"{in_bytes(done.wire_bytes)} crossed, {done.skipped} skipped{_not_finite(done)}",
        *(f"  {name}: {count}" for name, count in list(done.counts.items())[:10]),
        err=True,
    )


def _settings(
    run: Path, model: str | None, near: Sequence[str], node: NodeSettings, loader: LoaderSettings, data: dict[str, Any]
) -> JobSettings:
    """The settings of a job on this data with the run's network.

    Raises:
        SettingError: The folder has no run, the run has not ended, or its network is another one or runs code.
    """
    config = RunConfig.read(run)
    weights = run / NETWORK
    if not weights.exists() or has_earlier_network(run):
        other = "; that which lies there is of the run before" if weights.exists() else ""
        raise SettingError(
            f"the run in {run} has no {NETWORK}, which is written when it ends{other}: end it (frostline train "
            f"--resume {run})"
        )
    of_the_run = {name: config.options[name] for name in _OF_THE_RUN if config.options.get(name) is not None}
    strange = [name for name, value in of_the_run.items() if type(value) is not _OF_THE_RUN[name]]
    if strange or not {"model", "until"} <= of_the_run.keys():
        raise SettingError(f"the config of the run in {run} is damaged: {', '.join(strange) or 'model or until'}")
    _check_model(run, of_the_run["model"], model)
    data["column"] = data["column"] or of_the_run.pop("column", None)
    of_the_run.pop("column", None)
    return JobSettings(
        **of_the_run,
        **data,
        loss=_named_loss(config.options),
        near=next(iter(near), None),
        also_near=tuple(near[1:]),
        weights=str(weights),
        outputs=config.outputs,
        loader=loader,
        node=node,
    )


def _check_model(run: Path, began: str, given: str | None) -> None:
    if given is not None and given != began:
        raise SettingError(f"the network of the run in {run} is {began}, not {given}: leave out --model")
    if given is None and is_factory(began):
        raise SettingError(
            f"the network of the run in {run} is made by {began}, which runs code: where that is to be, give it again "
            f"(--model {began})"
        )


def _named_loss(options: Mapping[str, Any]) -> str:
    """A loss of what the run learned that has a name: a function of the user's own says no more of predictions."""
    loss = options.get("loss")
    if loss is None or loss in LOSSES:
        return str(loss or LOSSES[0])
    learned = options.get("task") or ("classes" if options.get("targets") is None else "numbers")
    return next((name for name, task in TASKS.items() if task == learned), LOSSES[0])
