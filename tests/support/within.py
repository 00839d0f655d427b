"""Runs what of some tests fits into a time: how long each took is kept under build/, and the longest are left out."""

import json
import os
import time
from pathlib import Path

import pytest

__all__ = ("TIME_IS_UP", "Within", "chosen", "kept")

KEPT = Path(__file__).resolve().parents[2] / "build" / "durations.json"
UNKNOWN_S = 0.02
"""What a test counts that never ran here: little, since those that take long are stopped by the time itself."""
CHOSEN_SHARE = 0.7
"""Of the time; the rest is for starting, and for tests that take longer than they did."""
TIME_IS_UP = "the time of `make test-fast` was up"


def chosen(durations, budget_s):
    """Places of the tests that are run: the shortest, as many as fit; given and returned in their order."""
    places, spent_s = [], 0.0
    for place in sorted(range(len(durations)), key=durations.__getitem__):
        spent_s += durations[place]
        if spent_s > budget_s:
            break
        places.append(place)
    return sorted(places)


def kept(path=KEPT):
    """How many seconds each test took when it last ran here."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class Within:
    """A plugin of pytest: keeps how long tests take, and where a time is given chooses by that.

    Args:
        config: pytest's.
        path: where durations are kept.
    """

    def __init__(self, config, path=KEPT):
        self._path, self._took, self._began = path, {}, time.monotonic()
        self._within_s = config.getoption("within")
        self._is_worker = hasattr(config, "workerinput")
        self._workers = int(config.workerinput["workercount"]) if self._is_worker else 1
        self._left_out = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        if self._within_s is None:
            return
        known = kept(self._path)
        took = [known.get(item.nodeid, UNKNOWN_S) for item in items]
        places = set(chosen(took, self._within_s * CHOSEN_SHARE * self._workers))
        left_out = [item for place, item in enumerate(items) if place not in places]
        self._left_out = len(left_out)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for place, item in enumerate(items) if place in places]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        """Begin no test after the time is up: what never ran here may take long."""
        if self._within_s is not None and time.monotonic() - self._began > self._within_s:
            pytest.skip(TIME_IS_UP)

    def pytest_runtest_logreport(self, report):
        if not report.skipped:
            self._took[report.nodeid] = self._took.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self, session):
        if self._is_worker:
            session.config.workeroutput["left out"] = self._left_out
        elif self._took:
            told = kept(self._path) | {name: round(took, 2) for name, took in self._took.items()}
            self._path.parent.mkdir(exist_ok=True)
            new = self._path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(told, indent=0, sort_keys=True), encoding="utf-8")
            new.replace(self._path)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """Each worker has left the same tests out."""
        self._left_out = getattr(node, "workeroutput", {}).get("left out", self._left_out)

    def pytest_terminal_summary(self, terminalreporter):
        if self._left_out:
            terminalreporter.write_line(
                f"{self._left_out} tests left out, which took longest here, to end within {self._within_s:g} s; "
                "`make test` runs them"
            )
