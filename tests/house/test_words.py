"""The code's words: one class a name, descriptions that are no fragments, bounds that are called max and min."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = runpy.run_path(str(ROOT / "scripts" / "words.py"))


@pytest.fixture(scope="module")
def found():
    return WORDS["places"]()


def test_no_two_public_classes_share_a_name():
    assert WORDS["repeated_classes"]() == {}


def test_descriptions_are_no_fragments_loops_name_what_they_hold_and_bounds_are_max_and_min(found):
    places, count = found
    assert count > 2_000, "descriptions are found at all"
    assert places == []


def test_finds_fragments_loops_and_banned_words(tmp_path):
    (tmp_path / "odd.py").write_text(
        '"""Odd words."""\n\n\ndef f(values, most_rows):\n    """Sum.\n\n    Args:\n        values: that are added.\n'
        '        most_rows: How many are added.\n    """\n    return sum(one for one in values)\n'
    )
    places, count = WORDS["places"]((tmp_path,))
    assert count == 2
    assert [why for _, _, why in places] == [
        "the description of values begins with 'that'",
        "a loop variable is called 'one': call it what it holds",
        "say max_ or min_ for most_rows",
        "say max_ or min_ for most_rows",
    ]
