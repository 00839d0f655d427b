"""A process with engines that came and went takes signals as before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frostline.engines.catalog import absence

pytestmark = pytest.mark.usefixtures("plain_starts")

ENGINE = "openvino-int8"
# Each is made while the one before is still there, and the oldest goes first.
PROGRAM = f"""
import os, signal, tempfile
from pathlib import Path
from frostline.engines.catalog import build
from support.prefixes import pixels, small_prefix

prefix, kept = small_prefix(), []
with tempfile.TemporaryDirectory() as folder:
    for cut in prefix.cuts[-3:]:
        kept.append(build("{ENGINE}", prefix.graph, prefix.cuts, prefix.tensors, cut=cut.number,
                          calibration=pixels(8), folder=Path(folder) / str(cut.number)))
        del kept[:-1]
kept.clear()
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(absence(ENGINE, "cpu") is not None, reason=str(absence(ENGINE, "cpu")))
def test_an_interrupt_is_survived_after_engines_came_and_went():
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("interrupted\n")
