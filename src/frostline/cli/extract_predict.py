"""The verbs ``extract`` and ``predict``: features of a data set, and what a run's network says of its samples.

The verb ``extract``: the features of a whole data set, to Parquet, safetensors or Lance.
"""

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
from frostline.core.system import collector_rests
from frostline.core.units import in_bytes, in_seconds
from frostline.training.run_config import RunConfig
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
    help="File to write, by its suffix: .parquet, .safetensors or .lance.",
)
@click.option(
    "--part-size",
    type=BYTES,
    default="64MiB",
    show_default=True,
    help="Write in parts of about this size; an extraction that is interrupted goes on after the last whole part.",
)
@click.option(
    "--on",
    type=click.Choice(("ray",)),
    help="Have tasks of Ray ask the nodes, part by part; Ray is that of RAY_ADDRESS or frostline cluster up.",
)
@log_format_option
@trace_option
@as_json
def extract(job: JobSettings, out: Path, part_size: int, on: str | None, as_json: bool) -> None:
    """Write the features of every sample to a name that ends in .parquet, .safetensors or .lance.

    Parquet has the columns id, object, label, class, and features as a fixed-shape tensor; safetensors the tensors
    features, ids and labels; a Lance data set, which is a folder, has the columns of Parquet, with features as lists of
    one length. It appears when it is whole. Parts are kept beside it until then: after a kill, run the same again, and
    it goes on where it was. Over data that changed since, only samples that came or changed are computed, and the
    result is that of a run from scratch. With --near several times the nodes share the work.
    """
    from frostline.training.feature_files import check_suffix
    from frostline.training.start import begin

    check_suffix(out)
    # Each sample comes once, so nothing is worth keeping.
    settings = ExtractSettings(
        job=replace(job, loader=replace(job.loader, cache_bytes=0)), out=out, part_bytes=part_size, on_ray=on == "ray"
    )
    ray = on_ray() if settings.on_ray else nullcontext()
    with ray, progress() as observe, begin(settings.job, observe) as begun:
        # Brings PyTorch, which the node imports at the same time.
        with collector_rests():
            from frostline.training.extract import extract as run

        done = run(settings, observe, begun=begun, began_at=click.get_current_context().obj)
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
_MODEL = "model.safetensors"
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
    help="Folder of a run: what frostline train --out wrote.",
)
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help="The run's network, where it is a factory of yours: that is code, and runs only where you name it here.",
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
    model: str | None,
    out: Path | None,
    batch_size: int,
    near: Sequence[str],
    skip_allowance: float,
    allow_nonfinite: bool,
    node: NodeSettings,
    as_json: bool,
    **data: Any,
) -> None:
    """Classify every sample with the network of a run, or give the numbers or labels that it learned.

    The network, its preprocessing and the names of the classes are the run's; its folder may come from anybody, for it
    says nothing that is run, asked or written elsewhere. The data needs no labels. The table has
    a row for each sample: its object, the prediction, and the probability of that class; of several labels those that
    are more likely than not, and the probability of each; of vectors the numbers, joined by semicolons.
    """
    from frostline.training.start import begin

    if out is not None and out.suffix not in _SUFFIXES:
        raise SettingError(f"predictions are written to {' or '.join(_SUFFIXES)}, and {out} ends otherwise (--out)")
    if as_json and out is None:
        raise SettingError("--json prints a summary on stdout, and the table needs another place: name a file (--out)")
    # Each sample comes once, so nothing is worth keeping.
    loader = LoaderSettings(skip_allowance=skip_allowance, allow_nonfinite=allow_nonfinite, cache_bytes=0)
    job = _settings(run, model, near, node, loader, data)
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
        SettingError: there is no run in the folder, it has not ended, or its network is another one or runs code.
    """
    config = RunConfig.read(run)
    weights = run / _MODEL
    if not weights.exists():
        raise SettingError(
            f"the run in {run} has no {_MODEL}, which is written when it ends: end it (frostline train --resume {run})"
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
