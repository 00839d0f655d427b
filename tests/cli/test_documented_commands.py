"""Every command that the docs show, and every verb's own example, is one that the command line takes."""

import re
import shlex
import sys
from pathlib import Path

import click
import pytest

import frostline.training.start as start
from frostline.cli.commands import verbs
from frostline.cli.logs import end_logs
from frostline.core.errors import DataNotFound, SettingError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "concepts").glob("*.md"))
PAGES += sorted((ROOT / "examples").rglob("*.md")) + sorted((ROOT / "deploy").rglob("*.md"))
# What a shell takes for the end of a command.
ENDS = {"|", "&", "&&", ";", ">", ">>", "2>&1", "2>"}
JOBS = ("train", "extract", "plan")
# What is not on this machine, and is named as it should be.
NOT_HERE = ("--data-root: there is no folder", "there is no run in")


def blocks(page):
    """The fenced blocks of a page that a shell would run."""
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.M | re.S):
        if language in {"", "bash", "console", "sh", "shell", "text"}:
            yield block.replace("\\\n", " ")


def words(line):
    """The words behind ``frostline`` of a line; None where it is no such command."""
    try:
        found = shlex.split(re.sub(r"^\s*(\$|>) ", "", line), comments=True)
    except ValueError:
        return None
    while found and re.fullmatch(r"[A-Z_]+=.*", found[0]):
        del found[0]
    if found[:1] != ["frostline"]:
        return None
    end = next((place for place, word in enumerate(found) if word in ENDS), len(found))
    return found[1:end]


def shown():
    for page in PAGES:
        for block in blocks(page):
            for line in block.splitlines():
                if (found := words(line)) is not None:
                    yield pytest.param(found, id=f"{page.name}: {' '.join(found)}"[:120])


def examples(group=verbs, before=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from examples(command, (*before, name))
        else:
            line = (command.epilog or "").partition("Example: ")[2]
            if line:
                yield pytest.param(words(line), id=line[:120])


class Reached(Exception):
    """All options were taken."""


def taken(arguments, monkeypatch, folder):
    """Have the command line take options, as far as the job that they describe; nothing is started."""

    def stop(*_, **__):
        raise Reached

    for name in ("control.toml", "tenants.toml", "ready", "photos"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(start, "begin", stop)
    if "frostline.training.setup" in sys.modules:  # other tests of this process may have imported it
        monkeypatch.setattr("frostline.training.setup.begin", stop)
    left, command = list(arguments), verbs
    while isinstance(command, click.Group):
        if not left or left[0] not in command.commands:
            raise click.UsageError(f"no verb {left[:1]}")
        command = command.commands[left.pop(0)]
    try:
        if command.name in JOBS:
            verbs.main(arguments, standalone_mode=False, obj=0.0)
            raise AssertionError("nothing was begun")
        command.make_context(command.name, left, obj=0.0)
    except (Reached, click.exceptions.Exit):
        return
    except (DataNotFound, SettingError) as error:
        if not any(words in str(error) for words in NOT_HERE):
            raise
    finally:
        end_logs()


def test_the_pages_show_commands():
    assert len(list(shown())) > 25
    assert len(list(examples())) > 12


@pytest.mark.parametrize("arguments", list(shown()))
def test_a_command_of_the_docs_is_taken(arguments, monkeypatch, tmp_path):
    taken(arguments, monkeypatch, tmp_path)


@pytest.mark.parametrize("arguments", list(examples()))
def test_a_verbs_example_is_taken(arguments, monkeypatch, tmp_path):
    taken(arguments, monkeypatch, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "ingest photos copy --format folders",
        "train --data photos --model demo:efficientnet_lite0",
        "train --data photos --model demo:efficientnet_lite0 --until features --warm",
        "train --data photos --model m:f --until x --schedule none",
        "train --data photos --model m:f --until x --loss mse",
        "extract --data photos --model m:f --until x --out f.txt",
        "index",
        "cluster",
        "serve --data-root photos --memory much",
        "train …",
    ],
)
def test_a_wrong_command_is_found(line, monkeypatch, tmp_path):
    with pytest.raises((click.ClickException, AssertionError, SettingError)):
        taken(shlex.split(line), monkeypatch, tmp_path)


def test_the_first_page_names_every_verb():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in verbs.commands if not re.search(rf"`(frostline )?{name}\b", page)] == []
