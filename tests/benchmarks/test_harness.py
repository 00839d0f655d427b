"""The benchmarks' harness: arguments, rounds, figures in words, tables and raw files."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "harness.py")))


def ran(harness, monkeypatch, *words, **given):
    """Run a benchmark that gives what it was asked for."""
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py", *map(str, words)])
    options = {"quick": {"samples": 2}, "data": False, "options": samples, "table": lambda found: f"| {found} |"}
    harness.run("Doc.", **{"measure": lambda wanted: {"samples": wanted.samples}, **options, **given})


def samples(parser):
    parser.add_argument("--samples", type=int, default=100)


def test_the_quick_form_has_its_own_values_unless_others_are_given(harness, monkeypatch, capsys):
    for words, expected in (((), 100), (("--quick",), 2), (("--quick", "--samples", 7), 7)):
        ran(harness, monkeypatch, *words)
        assert capsys.readouterr().out == f"| {{'samples': {expected}}} |\n"


def test_a_raw_file_says_where_and_how_its_figures_were_taken(harness, monkeypatch, tmp_path):
    ran(harness, monkeypatch, "--quick", "--out", tmp_path / "figures")
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["figures"] == {"samples": 2}
    assert found["benchmark"] == "some.py"
    assert found["command"] == ["--quick", "--out", "figures"], "paths of this machine are left out"
    assert found["arguments"] == {"rounds": 1, "seed": 0, "quick": True, "samples": 2}
    assert set(found) >= {"commit", "dirty", "date", "machine", "versions"}
    assert found["machine"]["cores"] >= 1
    assert (tmp_path / "figures.md").read_text() == "| {'samples': 2} |\n"


def test_what_there_is_by_then_is_kept_when_a_run_is_cut_short(harness, monkeypatch, tmp_path):
    def measure(wanted):
        yield {"rows": 1}
        yield {"rows": 2}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ran(harness, monkeypatch, "--out", tmp_path / "figures.json", measure=measure)
    assert json.loads((tmp_path / "figures.json").read_text())["figures"] == {"rows": 2}


def test_what_the_machine_lacks_is_one_sentence(harness, monkeypatch, capsys):
    ran(harness, monkeypatch, needs=(harness.modules("no_such_package"),))
    assert capsys.readouterr().out == "skipped: the package no_such_package is not installed\n"


def test_a_part_is_run_with_the_arguments_that_it_is_given(harness, monkeypatch, capsys):
    parts = {"node": lambda wanted: print(wanted.address)}
    ran(harness, monkeypatch, "--inside", "node", '{"address": "10.77.0.1"}', inside=parts)
    assert capsys.readouterr().out == "10.77.0.1\n"


def test_rounds_take_turns_and_the_first_ones_only_warm_up(harness):
    called = []
    runs = {name: lambda name=name: called.append(name) or len(called) for name in "ab"}
    assert harness.by_turns(2, runs, warm=1) == {"a": [3, 5], "b": [4, 6]}
    assert "".join(called) == "ababab"


@pytest.mark.parametrize(
    ("values", "words"), [([], "-"), ([None], "-"), ([2], "2.0"), ([3, 1, 2], "2.0 (1.0 to 3.0)"), ([1, None], "1.0")]
)
def test_a_spread_is_the_median_with_its_range(harness, values, words):
    assert harness.spread(values) == words


def test_a_median_leaves_out_rows_without_the_field(harness):
    assert harness.median([{"s": 3}, {"s": 1}, {}, {"s": None}, {"s": 2}], "s") == 2
    assert harness.median([{}], "s") is None


def test_columns_of_figures_stand_to_the_right(harness):
    table = harness.markdown(["name", "rate"], [["a", 12.3456], ["b", None]])
    assert table.splitlines() == ["| name | rate |", "| --- | ---: |", "| a | 12.35 |", "| b | - |"]


def test_a_row_of_another_length_is_refused(harness):
    with pytest.raises(AssertionError, match="2 columns"):
        harness.markdown(["name", "rate"], [["a"]])


def test_lists_of_numbers_stand_on_one_line(harness):
    found = {"bins": [1, 2.5, -3e-7], "names": ["a", "b"], "pairs": [[1, 2], [3, 4]]}
    text = harness.as_json(found)
    assert json.loads(text) == found
    assert '"bins": [1, 2.5, -3e-07]' in text
    assert text.count("\n") == 11


def test_each_benchmark_that_a_page_or_the_code_names_is_there_or_archived():
    archived = (BENCHMARKS / "results" / "README.md").read_text(encoding="utf-8")
    texts = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py"), ROOT / "README.md", *ROOT.glob("scripts/*")]
    named = {name for path in texts if path.is_file() for name in re.findall(r"benchmarks/(\w+\.py)", path.read_text())}
    assert len(named) > 20, "benchmarks are named at all"
    gone = {name for name in named if not (BENCHMARKS / name).exists()}
    assert {name for name in gone if f"`{name}" not in archived} == set()
