"""The verb ``train``: fine-tune a network's head on data that stays in its store, and go on after a kill.

Takes the options of a run that goes on from its folder, and refuses those that would make it another run. A folder may
come from anybody: what runs code, and where anything is asked or written, is said on the command line alone.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from frostline.cli.logs import log_format_option, note, progress, trace_option
from frostline.cli.options import as_json, command, epochs_option, job_options, policy_option
from frostline.cli.show import DONE, INTERRUPTED, print_json, print_table, say
from frostline.core import EXACT
from frostline.core.errors import SettingError
from frostline.core.events import SetupWarning
from frostline.core.system import imports_stay
from frostline.core.units import METRICS, in_bytes, in_percent, in_rate, in_score, in_seconds, in_times
from frostline.planning import ALL_IN_STORE
from frostline.planning.replanning import NOTHING_YET
from frostline.training.report.report import Report, RouteUsage, recipe_in_words
from frostline.training.run_config import REPORT, RunConfig, has_earlier_network, require_ended
from frostline.training.settings import JobSettings, TrainSettings, is_factory
from frostline.wire.recipes import LOSSES, METRICS_OF, OPTIMIZERS, SCHEDULES, TASKS

__all__ = (
    "FREE",
    "finish",
    "refuse_changes",
    "resume_option",
    "run_options",
    "setup_warnings",
    "take_options",
    "train",
)


Verb = Callable[..., int | None]


_RECIPE = (
    click.option(
        "--optimizer", type=click.Choice(OPTIMIZERS), default="adam", show_default=True, help="Optimiser of the head."
    ),
    click.option("--learning-rate", "--lr", default=2e-3, show_default=True, help="Learning rate of the optimiser."),
    click.option(
        "--weight-decay",
        type=float,
        metavar="RATE",
        help="Weight decay of the optimiser. Default: 0.01 for adamw, 0 for the others.",
    ),
    click.option(
        "--schedule",
        type=click.Choice(SCHEDULES),
        default=SCHEDULES[0],
        show_default=True,
        help="Learning-rate schedule after the warm-up: constant, or decay to zero by the last step of --epochs.",
    ),
    click.option(
        "--warm-up",
        default=0.0,
        metavar="SHARE|STEPS",
        help="Warm-up of the learning rate: a number of steps, or if below 1 a share of all steps.",
    ),
    click.option(
        "--patience",
        type=click.IntRange(min=1),
        metavar="EPOCHS",
        help="Stop when the held-out loss has not improved for this many epochs, and keep the best head. Default "
        "without --epochs: 5.",
    ),
    click.option("--targets", metavar="COLUMN", help="Column to learn instead of the classes; --loss says how."),
    click.option(
        "--loss",
        default=LOSSES[0],
        show_default=True,
        metavar="|".join((*LOSSES, "FILE.py:FUNCTION")),
        help="Loss: cross-entropy, bce, mse or a function of yours. cross-entropy learns classes, bce a column of "
        "lists of classes, mse numbers or vectors; a function takes scores and targets and returns the mean loss.",
    ),
    click.option(
        "--task",
        type=click.Choice(tuple(TASKS.values())),
        help="Kind of targets that a loss function of yours takes. Default: numbers with --targets, else classes.",
    ),
    click.option(
        "--label-smoothing",
        default=0.0,
        metavar="SHARE",
        help="Label smoothing of the cross-entropy: the share of each target that is spread over all classes, in "
        "training only.",
    ),
    click.option(
        "--metrics",
        metavar="NAME,...",
        help="Metrics of the held-out samples, the main one first; "
        + "; ".join(f"for {task}: {', '.join(names)}" for task, names in METRICS_OF.items())
        + ". Default: accuracy for classes, all metrics for the others.",
    ),
    click.option(
        "--lora",
        metavar="LAYER,...:r=RANK",
        help="Train LoRA adapters in these layers, such as layers.10-11:r=8, and the classifier, instead of all weights"
        " after --until. alpha= and dropout= may follow.",
    ),
    click.option(
        "--unfreeze",
        metavar="EPOCH:LAYER,...",
        help="Layers to train as well from later epochs on, such as 3:layer4,6:layer3; join layers by + to unfreeze "
        "them together.",
    ),
    click.option(
        "--bf16",
        is_flag=True,
        help="Compute the trained layers in bfloat16 (autocast). Parameters, loss and optimiser stay in float32; for "
        "the frozen layers see --accuracy.",
    ),
)


def _recipe_options(verb: Verb) -> Verb:
    """How a head is trained. The verb gets each option by its name, and names of metrics as a tuple."""

    @wraps(verb)
    def with_names(*, metrics: str | None, **options: Any) -> int | None:
        names = tuple(name.strip() for name in (metrics or "").split(",") if name.strip())
        return verb(metrics=names, **options)

    for option in reversed(_RECIPE):
        with_names = option(with_names)
    return with_names


def run_options(verb: Verb) -> Verb:
    """All that says what a run trains on and how, but where it is written."""
    for option in (
        click.option(
            "--augment",
            is_flag=True,
            help="Crop and flip images at random, anew in each epoch.",
        ),
        _recipe_options,
        click.option(
            "--val-split",
            metavar="NAME",
            help="Name of the data's split that is held out and scored, instead of a random share.",
        ),
        click.option(
            "--val-share",
            type=float,
            metavar="SHARE",
            help="Share of each class that is held out and scored. Default: the data's own validation split if it has "
            "one, else 0.2.",
        ),
        click.option(
            "--batch-size", default=32, show_default=True, metavar="B", help="Number of samples in one optimiser step."
        ),
        epochs_option,
        policy_option,
        job_options,
    ):
        verb = option(verb)
    return verb


_NOT_OF_THE_RUN = ("as_json", "resume")
# Where something is asked, with this user's credentials, or written: no folder decides of that.
_PLACES = ("cache_folder", "local_tier", "near")
# Where and with how much a run is computed may change while it is away; what is computed may not.
FREE = (
    "allow_nonfinite",
    "cache_folder",
    "cache_size",
    "checkpoint_every",
    "device",
    "list_locally",
    "local_tier",
    "local_tier_size",
    "log_format",
    "memory",
    "near",
    "read_threads",
    "relist",
    "trace",
    "trials",
)


def _options_now() -> Mapping[str, Any]:
    """The options of the running command, as plain values."""
    params = click.get_current_context().params
    return {name: _plain(value) for name, value in params.items() if name not in _NOT_OF_THE_RUN}


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_changes(folder: Path, *, free: Collection[str] = FREE, again: str = "train --resume") -> None:
    """Do nothing if no option was given that differs from the run's.

    Args:
        folder: the run's folder.
        free: names of the options that may differ.
        again: verb that reads the folder, for the sentence.

    Raises:
        SettingError: one does, the run keeps no checkpoints, or an option has to be given that its folder may not say.
    """
    context, began = click.get_current_context(), RunConfig.read(folder).options
    for param in context.command.params:
        name = str(param.name)
        value = _plain(context.params.get(name))
        if _is_given(name) and name not in (*free, *_NOT_OF_THE_RUN) and value != began.get(name):
            raise SettingError(
                f"the run in {folder} began with {param.opts[0]} {began.get(name)}, and {value} is given now: leave it "
                "out, or begin another run (--out)"
            )
    if began.get("policy") == ALL_IN_STORE:
        raise SettingError(
            f"the run in {folder} trains beside the store, where neither checkpoints nor steps are kept: begin it anew"
        )
    for name, option, why in (
        ("model", "--model", "runs code" if is_factory(str(began.get("model"))) else ""),
        ("loss", "--loss", "" if began.get("loss") in LOSSES else "runs code"),
        ("data", "--data", "" if _is_here(began.get("data")) else "is asked with your credentials"),
    ):
        if why and not _is_given(name):
            raise SettingError(
                f"the run in {folder} began with {option} {began.get(name)}, which {why}: where that is to be, give it "
                f"again (frostline {again} {folder} {option} {began.get(name)})"
            )


def _is_here(data: object) -> bool:
    first = str(data).partition("/")[0]
    return ":" not in first or first == "file:"


def setup_warnings(folder: Path) -> Iterator[SetupWarning]:
    """What the folder of a run says and nobody followed."""
    began = RunConfig.read(folder).options
    for param in click.get_current_context().command.params:
        name = str(param.name)
        if name in _PLACES and began.get(name) and not _is_given(name):
            said = began[name] if isinstance(began[name], list) else [began[name]]
            options = " ".join(f"{param.opts[0]} {value}" for value in said)
            yield SetupWarning(
                reason=f"the run began with {options}, which is not taken from its folder: give it again to use it"
            )


def take_options(context: click.Context, _: click.Parameter, folder: Path | None) -> Path | None:
    """Take the options of a run from its folder, as the callback of the parameter that names it.

    Raises:
        SettingError: The folder has no run, or the run's file has unknown options.
    """
    if folder is not None:
        options, known = RunConfig.read(folder).options, train.params
        taken = {param.name for param in known if param.expose_value} - {*_PLACES, *_NOT_OF_THE_RUN}
        unknown = options.keys() - {param.name for param in known}
        if unknown:
            raise SettingError(f"the config of the run in {folder} has unknown options: {', '.join(sorted(unknown))}")
        context.default_map = {name: value for name, value in options.items() if value is not None and name in taken}
        context.default_map["out"] = str(folder)
    return folder


resume_option = click.option(
    "--resume",
    type=click.Path(path_type=Path, file_okay=False),
    is_eager=True,
    callback=take_options,
    metavar="DIR",
    help="Continue the run in this folder from its last checkpoint, with its options. Options that run code (a factory "
    "as --model, a file as --loss) or lead elsewhere (--near, --cache, --local-tier, and --data if it is not on "
    "this machine) are not stored and must be given again.",
)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def finish(report: Report, out: Path | None, *, as_json: bool) -> int:
    """Show a run that ended, and say which exit code it has."""
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report, out)
    return INTERRUPTED if report.interrupted else DONE


def _print_report(report: Report, out: Path | None) -> None:
    """Print accuracy, seconds, bytes with and without Frostline, their ratio, and where each part ran."""
    scores: Mapping[str, float | None] = report.val_score or {"accuracy": report.val_accuracy}
    rows = [
        *((f"held-out {METRICS[name]}", in_score(name, value)) for name, value in scores.items()),
        ("held out", report.held_out),
        ("recipe", recipe_in_words(report.settings) or "-"),
        ("weights", str(report.settings.get("weights", "-"))),
        ("seconds since the command", in_seconds(report.seconds)),
        ("set-up", in_seconds(report.setup_s)),
        ("first step after", _first_step(report)),
        ("samples", f"{report.samples} in {_epochs(report)}"),
        ("store side to trainer, with Frostline", in_bytes(report.wire_bytes)),
        ("store side to trainer, without it", in_bytes(report.baseline_wire_bytes)),
        ("fewer bytes", in_times(report.bytes_ratio)),
        ("waiting for data", in_percent(report.stall_share)),
        *((f"{place.part}", place.where) for place in report.where),
    ]
    rows += [(f"samples computed {_way(way)}", f"{way.samples}") for way in report.ways]
    rows += _kept(report) + _rates(report)
    if report.engine_error:
        rows.append(("engine's relative error", f"{report.engine_error:.1g} at most, allowed: {report.accuracy}"))
    if report.codec_error:
        rows.append(("relative error on the way", f"{report.codec_error:.2g} at most, allowed: {report.accuracy}"))
    if report.replans:
        rows.append(
            ("changes of the plan", f"{len(report.replans)}, the last after {in_seconds(report.replans[-1].at_s)}")
        )
    if report.skipped:
        rows.append(("skipped", f"{len(report.skipped)} unreadable samples, such as {report.skipped[0].object}"))
    if report.nonfinite:
        rows.append(("not finite", f"{report.nonfinite} samples as they came; {report.first_nonfinite}"))
    if report.diagnosis is not None and report.diagnosis.held_back_by != NOTHING_YET:
        say(f"{report.diagnosis}")
    if report.fallback:
        say(f"not cut as it stands: {report.fallback}")
    print_table("Interrupted" if report.interrupted else "Done", ("", ""), rows)
    if out is not None:
        say(f"Written to {out}: {_STAYS if has_earlier_network(out) else _ALL_FILES}")


_ALL_FILES = "head.safetensors, model.safetensors, report.json, report.html"
_STAYS = "report.json, report.html; nothing was learned, so the network of the run before stays as it is"


def _first_step(report: Report) -> str:
    if report.first_step_s is not None:
        return in_seconds(report.first_step_s)
    return "-" if report.interrupted else "no step was left"


def _kept(report: Report) -> list[tuple[str, str]]:
    """That no sample was computed for a loop here that made steps; of one on the node nobody here knows it."""
    came_from_nowhere = report.first_step_s is not None and not report.ways
    if not came_from_nowhere or report.settings.get("policy") == ALL_IN_STORE:
        return []
    return [("features of all samples", "kept on this machine by an earlier job")]


def _epochs(report: Report) -> str:
    kept = "" if report.head_epoch == report.epochs else f", of which the head of epoch {report.head_epoch} is kept"
    return f"{report.epochs} epoch{'' if report.epochs == 1 else 's'}{kept}"


def _way(usage: RouteUsage) -> str:
    if not usage.cut:
        return "here (they came encoded)"
    return f"at the node up to cut {usage.cut} ({usage.name}{'' if usage.codec == EXACT else f', {usage.codec}'})"


def _rates(report: Report) -> list[tuple[str, str]]:
    """Predicted beside measured, where both are known."""
    predicted, measured = report.predicted_samples_per_s, report.measured_samples_per_s
    if predicted is None or measured is None:
        return []
    return [("samples/s from the store", f"{in_rate(measured)} measured, {in_rate(predicted)} predicted")]


@command(epilog="Example: frostline train --data photos --model demo:efficientnet_lite0 --until features --out run")
@run_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for the trained head, the whole network, the report and checkpoints. Without it nothing is kept.",
)
@resume_option
@click.option(
    "--checkpoint-every",
    default="60s",
    show_default=True,
    metavar="STEPS|TIME",
    help="Steps (500) or time (60s, 5min) between two checkpoints in --out within an epoch; one is also written after "
    "each epoch. With a time, checkpoints take at most 2 % of the run.",
)
@log_format_option
@trace_option
@as_json
def train(job: JobSettings, out: Path | None, resume: Path | None, as_json: bool, **how: Any) -> int:
    """Fine-tune a network: frozen layers beside the data, head here.

    Features are computed once and kept if they fit into memory or --cache, so epochs after the first are cheap. Without
    --epochs, training ends when the loss of the held-out samples no longer falls, and the best head is kept. A split
    named "test" is scored and does not influence which head is kept.

    With --out the folder gets head.safetensors, model.safetensors (the whole network, loadable without
    Frostline), report.json and report.html. Ctrl-C writes the same files from the training done so far. The folder
    also keeps frostline.json and two checkpoints, from which --resume DIR continues after a kill; with --accuracy exact
    the losses are then those of an uninterrupted run. Only you can read the files.
    """
    from frostline.training.start import begin

    options = _options_now()
    if resume is not None:
        refuse_changes(resume)
        out = resume
    settings = TrainSettings(job=job, out=out, **how)
    if out is None:
        note("the trained network will not be kept: give --out DIR to keep it")
    elif resume is None and (RunConfig.is_in(out) or (out / REPORT).exists()):
        require_ended(out)
        kept = ", except for its report, which is kept as report.N.json" if (out / REPORT).exists() else ""
        note(f"{out} has an earlier run, which this one replaces{kept}")
    with progress() as on_event, begin(job, on_event, min_classes=2) as begun:
        for warning in setup_warnings(resume) if resume is not None else ():
            on_event(warning)
        # Brings PyTorch, which the node imports at the same time.
        with imports_stay():
            from frostline.training.run import train as run

        report = run(
            settings,
            on_event,
            begun=begun,
            began_at=click.get_current_context().obj,
            options=options,
            resumes=resume is not None,
        )
    return finish(report, out, as_json=as_json)
