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


def traced(folder, cut, *way):
    done = subprocess.run(
        [sys.executable, "-P", str(_SCRIPT), str(folder), str(cut), *way],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    passed = json.loads(done.stdout)
    # Where a pool starts one more thread just then, and where the network is looked at at a pass's end, that passes
    # files more, and no sample does.
    others = ("core/system.py", *(f"models/{name}.py" for name in ("head", "modules", "outside", "skipping")))
    passed["files"] = [name for name in passed["files"] if not name.endswith(others)]
    return passed


def test_a_plain_sample_passes_at_most_27_files_and_three_hand_overs(folder):
    passed = traced(folder, 0)
    assert len(passed["files"]) <= 27, passed["files"]
    # One thread reads it, one decodes it, one puts it into its batch where the decoder does not, and the loop takes it.
    assert set(passed["threads"]) <= {"frostline-prefetch", "frostline-decode", "frostline-fill", "loop"}


def test_a_sample_with_frozen_layers_in_the_same_process_passes_at_most_42_files(folder):
    passed = traced(folder, 4)
    assert "node/device.py" in passed["files"], "the node's device runs the layers"
    assert len(passed["files"]) <= 42, passed["files"]


def test_a_sample_over_http_passes_at_most_60_files_of_both_sides(folder):
    passed = traced(folder, 4, "http")
    assert {"client/http.py", "node/http/app.py", "node/device.py"} <= set(passed["files"]), "a node is asked"
    assert len(passed["files"]) <= 60, passed["files"]
