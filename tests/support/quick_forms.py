"""Runs scripts in processes that are forked from one that has imported PyTorch and Frostline already."""

import multiprocessing
import os
import runpy
import sys
from contextlib import contextmanager
from pathlib import Path

# What most of them would import for seconds each: traces and optimisers need torch's compiler.
IMPORTED = ("numpy", "torch", "torch.export", "torch._dynamo", "PIL.Image", "pyarrow.parquet", "frostline")


@contextmanager
def prepared_processes(*more):
    """A context of ``multiprocessing`` whose processes begin with those imports; its server ends with the last.

    Args:
        more: further modules to import.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *more])
    yield context


def run_script(context, script, arguments, output, timeout_s):
    """The exit code of a script, whose output goes into a file; it is killed when its time is over."""
    process = context.Process(
        target=_script, args=(str(script), list(map(str, arguments)), str(output), dict(os.environ))
    )
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def _script(script, arguments, output, environment):
    os.environ.update(environment)  # the server's is that of its first test
    with Path(output).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
