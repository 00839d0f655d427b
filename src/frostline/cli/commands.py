"""Runs a verb and turns what went wrong into one sentence and an exit code."""

import sys
from collections.abc import Sequence

import click

from frostline.cli.cluster import cluster
from frostline.cli.demo import demo
from frostline.cli.doctor import doctor
from frostline.cli.extract import extract
from frostline.cli.index import index
from frostline.cli.ingest import ingest
from frostline.cli.io import io
from frostline.cli.monitoring.logs import end_logs, log_or_say
from frostline.cli.monitoring.top import top
from frostline.cli.plan import plan
from frostline.cli.predict import predict
from frostline.cli.serve import control, serve
from frostline.cli.show import DONE, FAILED, INTERRUPTED, MISTAKEN
from frostline.cli.train import train
from frostline.errors import AccessDenied, BadRequest, Forbidden, FrostlineError, OverBudget, UserError
from frostline.version import __version__

__all__ = ("run",)

# What a node or a store refuses and its user can put right: too little --memory, other roots, wrong credentials.
_USERS = (AccessDenied, BadRequest, Forbidden, OverBudget)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="frostline")
def verbs() -> None:
    """Fine-tune pretrained networks on data that stays in its store.

    The frozen layers run on a node beside the data; only small activations cross the network.
    Start with: frostline demo
    """


for _verb in (cluster, control, demo, doctor, extract, index, ingest, io, plan, predict, serve, top, train):
    verbs.add_command(_verb)


def run(arguments: Sequence[str] | None, began_at: float) -> None:
    """Run a verb and exit: 0 done, 1 failed, 2 the user can put it right, 130 interrupted.

    Args:
        arguments: those of the process where there are none.
        began_at: when the command began, as ``time.perf_counter`` counts; verbs find it as the context's ``obj``.
    """
    try:
        code = verbs.main(args=arguments, prog_name="frostline", standalone_mode=False, obj=began_at)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = _fail("interrupted", INTERRUPTED)
    except (UserError, *_USERS) as error:
        code = _fail(str(error), MISTAKEN)
    except FrostlineError as error:
        code = _fail(str(error), FAILED)
    except BrokenPipeError:
        code = FAILED
    finally:
        end_logs()
    sys.exit(code if isinstance(code, int) else DONE)


def _fail(sentence: str, code: int) -> int:
    log_or_say(sentence)
    return code
