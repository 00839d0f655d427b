"""`make test-fast` leaves out the tests that take longest, and says so."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.within import chosen

pytestmark = pytest.mark.usefixtures("plain_starts")


@given(st.lists(st.floats(0, 100)), st.floats(0, 300))
def test_the_shortest_are_chosen_and_as_many_as_fit(durations, budget_s):
    places = chosen(durations, budget_s)
    taken = [durations[place] for place in places]
    left = [seconds for place, seconds in enumerate(durations) if place not in places]
    assert places == sorted(places)
    assert sum(sorted(taken)) <= budget_s
    if left:
        assert max(taken, default=0) <= min(left)
        assert sum(sorted(taken)) + min(left) > budget_s


PLUGIN = """
import os
from support.within import Within

def pytest_addoption(parser):
    parser.addoption("--within", type=float)

def pytest_configure(config):
    from pathlib import Path
    config.pluginmanager.register(Within(config, Path(os.environ["KEPT"])))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_some.py").write_text("def test_short():\n    pass\n\n\ndef test_long():\n    pass\n")
    return tmp_path


def ran(folder, *options):
    kept = folder / "durations.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", folder, "-rs", *options, folder],
        env={**os.environ, "KEPT": str(kept), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(kept.read_text()) if kept.exists() else None


def test_a_run_keeps_what_its_tests_took_beside_what_others_did(folder):
    (folder / "durations.json").write_text('{"test_other.py::test_it": 3.0}')
    _, kept = ran(folder)
    assert kept.keys() == {"test_other.py::test_it", "test_some.py::test_short", "test_some.py::test_long"}


@pytest.mark.parametrize("workers", [[], ["--numprocesses", "1"]], ids=["alone", "in a worker"])
def test_what_took_longest_is_left_out_and_counted(folder, workers):
    (folder / "durations.json").write_text('{"test_some.py::test_long": 3000.0}')
    said, kept = ran(folder, "--within", "100", *workers)
    assert "1 passed" in said
    assert "1 tests left out, which took longest here, to end within 100 s; `make test` runs them" in said
    assert kept["test_some.py::test_long"] == 3000, "it was not run"


def test_what_is_not_known_is_not_begun_after_the_time(folder):
    (folder / "durations.json").write_text('{"test_some.py::test_long": 0.0, "test_some.py::test_short": 0.0}')
    said, _ = ran(folder, "--within", "0")
    assert "2 skipped" in said
    assert "the time of `make test-fast` was up" in said


def test_folders_whose_tests_took_little_run_in_one_process():
    fast = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "test_fast.py"))
    known = {"README.md::line:1": 50.0, "tests/node/a.py::test": 50.0, "tests/wire/a.py::test": 1.0}
    assert [fast["spread"]([name], known, "3")[1] for name in ("node", "wire", "new")] == ["3", "0", "3"]
