"""A process of Frostline's own keeps the memory that it frees, in whichever of its threads."""

import os
import subprocess
import sys

import pytest

from frostline.engines.machine import ENVIRONMENT

pytestmark = pytest.mark.usefixtures("plain_starts")

# Blocks that no arena but the main one can hold, freed and asked for again: kept memory faults in once.
PROBE = """
import resource, threading
faults, together = [], threading.Barrier(4)

def work():
    together.wait()
    for _ in range(2):
        block = b"x" * (100 << 20)
        del block
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(3):
        block = b"x" * (100 << 20)
        del block
    faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    together.wait()

threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(*faults)
"""
VERB = """
import contextlib
from frostline.cli import main
with contextlib.suppress(SystemExit):
    main(["--version"])
"""
STARTS = {"node": "import numpy", "verb": VERB}


def faults(start, **environment):
    mine = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", STARTS[start] + PROBE], env={**mine, **environment}, capture_output=True, check=True
    )
    return [int(word) for word in done.stdout.splitlines()[-1].split()]


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told to keep what is freed")
@pytest.mark.parametrize(("start", "environment"), [("node", ENVIRONMENT), ("verb", {})])
def test_no_thread_of_a_node_or_a_command_faults_its_memory_in_again(start, environment):
    # The others' blocks may be in between where they run at the same time, so that a block comes from elsewhere; one
    # that is mapped anew each time takes 25,600 faults.
    assert max(faults(start, **environment)) < 25_600


def test_a_plain_process_does():
    assert max(faults("node")) >= 3 * 25_600 - 100
