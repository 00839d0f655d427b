"""The code's words: one class a name, functions that are verbs or nouns, whole descriptions, bounds as max and min."""

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_NAME_OF_A_TEST = 80
WORDS = runpy.run_path(str(ROOT / "scripts" / "words.py"))


@pytest.fixture(scope="module")
def found():
    return WORDS["places"]()


def test_no_two_public_classes_share_a_name():
    assert WORDS["repeated_classes"]() == {}


def test_functions_summaries_descriptions_loops_and_bounds_have_plain_words(found):
    places, count = found
    assert count > 2_000, "descriptions are found at all"
    assert places == []


def test_only_a_noun_verb_article_or_number_begins_a_description():
    fragments = (
        "of that what how whether where when why in as by with for to from its their which told made called measured "
        "longest likewise instead most since such"
    )
    whole = (
        "the a an one all every both number seconds see seed speed need bytes listing preprocessing true "
        "none uint8 function thread"
    )
    assert [word for word in fragments.split() if not WORDS["is_fragment"](word)] == []
    verbs = "gives,the makes,it is,told lets,time knows,which runs,the counts,what reads,them answers,the names,it"
    assert [words for words in verbs.split() if not WORDS["is_fragment"](*words.split(","))] == []
    sentences = "there,is there,are too,many this,node"
    assert [words for words in sentences.split() if WORDS["is_fragment"](*words.split(","))] == []
    nouns = "rows,that reads,under counts,of samples,a passes,over bytes,on runs,of"
    assert [words for words in nouns.split() if WORDS["is_fragment"](*words.split(","))] == []
    assert [word for word in whole.split() if WORDS["is_fragment"](word)] == []


def test_only_a_verb_or_a_noun_is_a_name_of_a_function():
    bare = "known told_by finished silent done found_in asked_of made_here unreadable"
    plain = "find finish known_parts bound unpack embed cut seed readable empty is_done feed"
    assert [name for name in bare.split() if not WORDS["is_bare"](name)] == []
    assert [name for name in plain.split() if WORDS["is_bare"](name)] == []


def test_finds_fragments_names_parameters_loops_and_banned_words(tmp_path):
    (tmp_path / "odd.py").write_text(
        '"""Odd words."""\n\n\ndef f(values, most_rows, add):\n    """Sum.\n\n    Args:\n'
        "        values: that are added.\n        most_rows: How many are added.\n        add: adds them.\n\n"
        "    Returns:\n        By value, their sum\n        to the last digit.\n\n"
        "    Raises:\n        a.B, ValueError: If they are none.\n        KeyError: There is none.\n"
        '    """\n    return sum(one for one in values)\n\n\n'
        'class A:\n    @property\n    def known(self):\n        """Of a row."""\n        return 1\n\n'
        '    def begin(self):\n        """As ``B.begin`` says."""\n\n'
        "    def done(self, one):\n        return one\n"
    )
    places, count = WORDS["places"]((tmp_path,))
    assert count == 6
    assert [why for _, _, why in places] == [
        "the description of values begins with 'that'",
        "the description of most_rows begins with 'How'",
        "the description of add begins with 'adds'",
        "the description of what is returned begins with 'By'",
        "the description of a.B, ValueError begins with 'If'",
        "a loop variable is called 'one': call it what it holds",
        "the function done is a bare participle or adjective: a verb or a noun",
        "a parameter is called 'one': call it what it is",
        "the summary of known begins with 'Of'",
        "say max_ or min_ for most_rows",
        "say max_ or min_ for most_rows",
    ]


def test_names_of_tests_have_at_most_80_characters():
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py")))
    names = re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)
    assert len(names) > 1_000, "tests are found at all"
    assert [name for name in names if len(name) > MAX_NAME_OF_A_TEST] == [], "say what holds, and no more"


def test_each_setting_has_a_line_in_the_docstring_of_its_class():
    from frostline.core.config import IoSettings, LoaderSettings, NodeSettings
    from frostline.training.settings import ExtractSettings, JobSettings, TrainSettings
    from frostline.wire.recipes import Recipe

    for settings in (ExtractSettings, IoSettings, JobSettings, LoaderSettings, NodeSettings, Recipe, TrainSettings):
        said = re.findall(r"^        (\w+): ", settings.__doc__, re.MULTILINE)
        assert sorted(said) == sorted(field.name for field in fields(settings)), settings.__name__
