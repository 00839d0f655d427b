"""Runs a verb and turns what went wrong into one sentence and an exit code; and the first verb, ``demo``.

The demo is the main job on real photographs and real weights, with no server beside its own.
"""

import errno
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from tempfile import gettempdir

import click

from frostline.cli.cluster import cluster
from frostline.cli.doctor import doctor
from frostline.cli.extract_predict import extract, predict
from frostline.cli.index import index
from frostline.cli.ingest import ingest
from frostline.cli.io import io
from frostline.cli.logs import end_logs, log_or_say
from frostline.cli.options import VerbGroup, as_json, command, epochs_option
from frostline.cli.plan import plan
from frostline.cli.serve import cert, control, serve
from frostline.cli.show import DONE, FAILED, INTERRUPTED, MISTAKEN, ProgressBar, say
from frostline.cli.top import top
from frostline.cli.train import finish, train
from frostline.cli.verify import verify
from frostline.core.errors import AccessDenied, BadRequest, Forbidden, FrostlineError, OverBudget, Untrusted, UserError
from frostline.core.events import PhaseStarted, ProgressMade
from frostline.core.files import is_full
from frostline.core.system import __version__
from frostline.core.units import in_bytes, printable_logs
from frostline.training.settings import JobSettings, TrainSettings

__all__ = ("run", "verbs")

# What a node or a store refuses and its user can put right: too little --memory, other roots, wrong credentials.
_USERS = (AccessDenied, BadRequest, Forbidden, OverBudget, Untrusted)


# Of descriptors: this process may have no more, or the whole system has none left.
_USED_UP = (errno.EMFILE, errno.ENFILE)
# In what torch says of memory that a processor or an accelerator does not have.
_NO_MEMORY = ("out of memory", "allocate memory", "bad_alloc")

_MODEL = "demo:efficientnet_lite0"


@command(epilog="Example: frostline demo --data photos/ --out run/")
@click.option(
    "--data", metavar="DIR", help="Folder of images with one folder per class, instead of the demo's own images."
)
@epochs_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=".demo",
    show_default=True,
    metavar="DIR",
    help="Folder for the demo's images, trained network, report and checkpoints.",
)
@as_json
def demo(data: str | None, epochs: int | None, out: Path, as_json: bool) -> int:
    """Fine-tune a pretrained network on real photographs.

    The network is EfficientNet-lite0, and the node runs on this machine. Without --data the images are made once,
    from photographs that scikit-image and scikit-learn ship: each photograph is a class, and each sample a random
    crop of it. Held-out crops show regions that no training crop shows.
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
    from frostline.demo import make

    progress(PhaseStarted(name="making photographs"))
    found = make(directory, progress=lambda done, total: progress(ProgressMade(done=done, total=total)))
    say(
        f"{'Made' if found.made else 'Found'} {found.images} images in {directory}: seeded views (crop, scale, slight "
        f"rotation) of {len(found.classes)} photographs that scikit-image and scikit-learn ship, one class each, "
        f"{in_bytes(found.mean_bytes)} on average. Held-out views show a quarter of a photograph that no other shows.",
        err=True,
    )
    return directory


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="frostline")
def verbs() -> None:
    """Fine-tune pretrained networks on data that stays in its store.

    The frozen layers run on a node beside the data; only small activations cross the network.
    Start with: frostline demo
    """


for _verb in (
    cert,
    cluster,
    control,
    demo,
    doctor,
    extract,
    index,
    ingest,
    io,
    plan,
    predict,
    serve,
    top,
    train,
    verify,
):
    verbs.add_command(_verb)


def run(arguments: Sequence[str] | None, began_at: float) -> None:
    """Run a verb and exit: 0 done, 1 failed, 2 the user can put it right, 3 a run differs, 130 interrupted.

    Args:
        arguments: arguments of the command line; by default those of this process.
        began_at: the time when the command began, as ``time.perf_counter`` counts; verbs find it as the context's
            ``obj``.
    """
    printable_logs()
    try:
        code = verbs.main(args=arguments, prog_name="frostline", standalone_mode=False, obj=began_at)
    except click.ClickException as error:
        _show(error)
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = _fail("interrupted", INTERRUPTED)
    except (UserError, *_USERS) as error:
        code = _fail(str(error), MISTAKEN)
    except FrostlineError as error:
        code = _fail(str(error), FAILED)
    except BrokenPipeError:
        code = FAILED
    except (OSError, MemoryError, RuntimeError) as error:  # met by a library, or in a temporary folder
        sentence = _of_system(error) if isinstance(error, OSError) else _of_memory(error)
        if sentence is None:
            raise
        code = _fail(sentence, MISTAKEN)
    finally:
        end_logs()
    sys.exit(code if isinstance(code, int) else DONE)


def _of_memory(error: MemoryError | RuntimeError) -> str | None:
    why = str(error).partition("\n")[0]
    if not isinstance(error, MemoryError) and not any(word in why for word in _NO_MEMORY):
        return None
    return f"this process has too little memory{f' ({why[:300]})' if why else ''}: give a smaller --batch-size"


def _of_system(error: OSError) -> str | None:
    if not is_full(error) and error.errno not in _USED_UP:
        return None
    at = f" {error.filename}" if error.filename else ""
    if is_full(error):
        return f"no space left to write{at or f' a file ({gettempdir()} has the temporary ones)'}: free some"
    return f"cannot open{at or ' another file'}: {error.strerror}; allow this process more (ulimit -n)"


def _show(error: click.ClickException) -> None:
    shown = StringIO()
    error.show(shown)
    say(*shown.getvalue().expandtabs().splitlines(), err=True)


def _fail(sentence: str, code: int) -> int:
    log_or_say(sentence)
    return code
