"""A sample's way from the store to its batch: through few files, and from hand to hand of few threads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.nodes import make_images

_SCRIPT = Path(__file__).parents[1] / "support" / "traced.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    (path / "one").mkdir()
    make_images(path / "one", 1200)
    return path


def traced(folder, cut, most, *way):
    """What each run passes of up to three, until that is at most so many files: on a busy machine a run passes more."""
    files = None
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-P", str(_SCRIPT), str(folder), str(cut), *way],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        passed = json.loads(done.stdout)
        # Where a pool starts one more thread just then, and where the network is looked at now and then, that passes
        # files more, and no sample does.
        looks = ("absent", "head", "modules", "outside", "skipping", "tracing")
        others = ("core/system.py", *(f"models/{name}.py" for name in looks))
        seen = {name for name in passed["files"] if not name.endswith(others)}
        files = seen if files is None else files & seen
        if len(files) <= most:
            break
    assert len(files) <= most, sorted(files)
    return files, set(passed["threads"])


def test_a_plain_sample_passes_at_most_27_files_and_three_hand_overs(folder):
    _, threads = traced(folder, 0, 27)
    # One thread reads it, one decodes it, one puts it into its batch where the decoder does not, and the loop takes it.
    assert threads <= {"frostline-prefetch", "frostline-decode", "frostline-fill", "loop"}


def test_a_sample_with_frozen_layers_in_the_same_process_passes_at_most_42_files(folder):
    files, _ = traced(folder, 4, 42)
    assert "node/device.py" in files, "the node's device runs the layers"


def test_a_sample_over_http_passes_at_most_60_files_of_both_sides(folder):
    files, _ = traced(folder, 4, 60, "http")
    assert {"client/http.py", "node/http/app.py", "node/device.py"} <= files, "a node is asked"
