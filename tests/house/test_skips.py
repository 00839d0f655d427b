"""Tests skip for reasons that are listed, and a script that brings what they need looks for programs."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.skips import SKIPS, counted, forbidden

pytestmark = pytest.mark.usefixtures("plain_starts")

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
CHROMIUM, CUDA = "no Chromium here: see scripts/browser.sh", "there is no CUDA here"
COMPLETE = {"FROSTLINE_TESTS_COMPLETE": "1"}


def test_a_reason_that_is_not_listed_is_none(tmp_path):
    assert "not in tests/support/skips.py: it rains" in forbidden("it rains", {}, tmp_path)


def test_what_make_test_brings_may_be_missing_elsewhere_alone(tmp_path):
    assert forbidden(CHROMIUM, {}, tmp_path) is None
    assert "`make test` brings" in forbidden(CHROMIUM, COMPLETE, tmp_path)
    (tmp_path / "chromium").write_text("None could be installed.\n")
    assert forbidden(CHROMIUM, COMPLETE, tmp_path) is None
    assert "continuous integration" in forbidden(CHROMIUM, COMPLETE | {"CI": "true"}, tmp_path)


def test_what_nobody_brings_may_be_missing_anywhere(tmp_path):
    assert forbidden(CUDA, COMPLETE | {"CI": "true"}, tmp_path) is None


def test_counts_what_skipped_with_what_makes_it_run():
    first, second = counted([CUDA, CHROMIUM, CUDA])
    assert first.startswith(f"2 skipped: {CUDA} (a machine with")
    assert second.startswith(f"1 skipped: {CHROMIUM} (scripts/browser.sh")


def test_every_reason_that_a_test_gives_has_one_entry():
    found = {reason for path in (ROOT / "tests").rglob("*.py") for reason in reasons(ast.parse(path.read_text()))}
    assert len(found) > 20, "reasons are found at all"
    entries = {reason: [skip for skip in SKIPS if re.search(skip.reason, reason)] for reason in found}
    assert {reason: skips for reason, skips in entries.items() if len(skips) != 1} == {}


def reasons(tree):
    """The reasons to skip that stand in a file in full."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = ast.unparse(call.func)
        named = {word.arg: word.value for word in call.keywords}
        said = named.get("reason", call.args[0] if function == "pytest.skip" else None)
        if function in {"pytest.skip", "pytest.mark.skipif", "pytest.importorskip"} and isinstance(said, ast.Constant):
            yield said.value
        elif function == "pytest.importorskip":
            yield f"could not import {call.args[0].value!r}: No module named {call.args[0].value!r}"


def test_a_file_and_a_test_that_skip_for_no_listed_reason_fail(tmp_path):
    own = "Within(config, Path(__file__).with_name('durations.json'))"
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text().replace("Within(config)", own))
    (tmp_path / "test_one.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    (tmp_path / "test_two.py").write_text(
        "import pytest\n"
        "def test_rain():\n    pytest.skip('it rains')\n"
        "def test_gpu():\n    pytest.skip('there is no CUDA here')\n"
        "@pytest.mark.xfail\ndef test_known():\n    assert False\n"
    )
    options = ["-p", "no:cacheprovider", "--numprocesses", "2", "--continue-on-collection-errors"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", tmp_path, *options, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 skipped, 1 xfailed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "not in tests/support/skips.py: it rains" in done.stdout
    assert "not in tests/support/skips.py: could not import 'no_such_package'" in done.stdout
    assert "1 skipped: there is no CUDA here (a machine with" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_script_looks_for_a_program_by_the_name_of_its_function(script):
    assert mistaken(script.read_text()) == set()


def test_finds_functions_that_are_taken_for_programs():
    assert mistaken("weed() {\n  command -v weed\n}\n") == {"weed"}
    assert mistaken("function jq {\n  :\n}\nfor name in a jq; do type $name; done\n") == {"jq"}
    assert mistaken("see_to_weed() {\n  command -v weed\n}\n") == set()
    assert mistaken("weed() {\n  type -P weed\n}\n") == set()


def mistaken(text):
    """Functions of a shell script whose names are also words where programs are looked for.

    The words of a loop count where what is looked for is a variable; ``type -P`` finds programs alone.
    """
    text = re.sub(r"(^|\s)#.*", "", text)
    functions = set(re.findall(r"^\s*(?:function\s+)?([\w-]+)\s*(?:\(\)\s*)?\{", text, re.MULTILINE))
    looked_for = re.findall(r"\b(?:command -v|command -V|which|hash|type(?! -P)(?: -\w+)?)\s+(\S+)", text)
    words = {word.strip("\"';)") for word in looked_for}
    if any("$" in word for word in words):
        words |= {
            word for line in re.findall(r"\bfor \w+ in (.*?)(?:;|$)", text, re.MULTILINE) for word in line.split()
        }
    return functions & words


def test_the_scripts_of_make_test_leave_a_sentence_about_what_they_could_not_bring():
    brought = {skip.brought_by for skip in SKIPS} - {None, "the environment"}
    text = "".join(path.read_text() for path in SCRIPTS)
    for word in ("is_here", "is_absent"):
        assert set(re.findall(rf"^\s*(?:\w+ \|\| )?{word} ([a-z-]+)", text, re.MULTILINE)) == brought


def test_a_browser_that_is_there_is_found_and_one_that_cannot_be_had_is_noted(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("absent.sh", "browser.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "dirname", "mkdir", "rm", "tee"):
        (programs / name).symlink_to(shutil.which(name))

    def said(**environment):
        command = ["bash", tmp_path / "scripts" / "browser.sh"]
        return subprocess.run(
            command, env={"PATH": str(programs), **environment}, capture_output=True, text=True
        ).stdout

    note = tmp_path / "build" / "absent" / "chromium"
    assert "No Chromium is here and none could be installed" in said()
    assert "the tests of pages will skip" in note.read_text()
    (programs / "chromium").symlink_to(shutil.which("true"))
    assert f"Pages are tested with {programs}/chromium." in said()
    assert not note.exists()
    assert "Pages are tested with /bin/sh." in said(FROSTLINE_BROWSER="/bin/sh")
