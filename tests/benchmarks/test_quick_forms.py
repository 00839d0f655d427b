"""Every benchmark runs in its quick form, and leaves figures that say where and how they were taken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py") if path.name != "harness.py")
TIMEOUT_S = 300


def test_benchmarks_are_found():
    assert len(SCRIPTS) > 15


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_in_its_quick_form(tmp_path, script):
    output, raw = tmp_path / "output.txt", tmp_path / "raw.json"
    command = [sys.executable, BENCHMARKS / script, "--quick", "--out", raw]
    with output.open("wb") as file:
        done = subprocess.run(command, stdout=file, stderr=file, timeout=TIMEOUT_S, check=False)
    said = output.read_text(errors="replace")
    assert done.returncode == 0, said[-4000:]
    for line in said.splitlines():
        if line.startswith("skipped: "):
            pytest.skip(line.removeprefix("skipped: "))
    assert "| ---" in said, "a table is printed"
    found = json.loads(raw.read_text(encoding="utf-8"))
    assert found["figures"]
    assert found["benchmark"] == script
    assert found["commit"] is None or len(found["commit"]) == 40
    assert {"processor", "cores", "flags", "load"} <= found["machine"].keys()
    assert {"python", "torch", "numpy"} <= found["versions"].keys()
    assert raw.with_suffix(".md").read_text(encoding="utf-8").strip() in said
