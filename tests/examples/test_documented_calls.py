"""Every call of Frostline that the docs or a hint shows, is one that the function takes."""

import ast
import inspect
import re
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name

import pytest

import frostline as fl
from frostline.core import hints

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), ROOT / "llms.txt", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/concepts").glob("*.md")]
CALL = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?:\.\w+)*\(")
# Of Hugging Face's `datasets`, and of loaders for other frameworks, which tests/frameworks runs.
OF_OTHERS = {"data.save_to_disk", "loader.callback", "loader.count_taken"}
OBJECTS = {"batch": fl.Batch, "data": fl.Dataset, "job": fl.Job, "loader": fl.Loader}


def snippets(page):
    """The blocks of Python of a page, and what its sentences show as code."""
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"^ *```(?:python|text)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    sentences = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"(?<!`)`([^`\n]+)`(?!`)", sentences)


def hinted():
    """All that hints say."""
    tree = ast.parse(Path(hints.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace("{{", "{").replace("}}", "}")


def calls(text):
    """The calls that stand in a text, each whole; what is no Python is passed over."""
    for found in CALL.finditer(text):
        depth = 0
        for place in range(found.end() - 1, len(text)):
            depth += (text[place] in "([{") - (text[place] in ")]}")
            if depth == 0:
                with suppress(SyntaxError):
                    yield ast.parse(text[found.start() : place + 1], mode="eval").body
                break


def meant(name):
    """What a name stands for where it is Frostline's, and what its methods take first; None where it is not."""
    first, _, rest = name.partition(".")
    if name in OF_OTHERS or (first in OBJECTS and "." in rest):
        return None
    if first in OBJECTS and rest:  # and not what is called, as `loader(data, batch_size=32)` is
        return inspect.getattr_static(OBJECTS[first], rest), [None]
    if first in {"fl", "frostline"} and rest:
        return resolve_name(f"frostline.{rest}"), []
    return (resolve_name(f"frostline.{name}"), []) if first in fl.__all__ else None


def wrong(call):
    """Why a call does not fit what it names; None where it does, or where nothing can be said of it."""
    name = ast.unparse(call.func)
    is_left_out = any(isinstance(value, ast.Constant) and value.value is ... for value in call.args)
    if any(isinstance(value, ast.Starred) for value in call.args) or any(word.arg is None for word in call.keywords):
        return None
    try:
        found = meant(name)
    except AttributeError:
        return f"there is no {name}"
    if found is None or not callable(found[0]) or not (call.args or call.keywords):  # a mention of its name
        return None
    signature = inspect.signature(found[0])
    given = [None for value in call.args if not (isinstance(value, ast.Constant) and value.value is ...)]
    try:
        bind = signature.bind_partial if is_left_out else signature.bind
        bind(*found[1], *given, **{word.arg: None for word in call.keywords})
    except TypeError as error:
        return f"{ast.unparse(call)}: {error}"
    return None


@pytest.mark.parametrize("page", [*PAGES, "hints"], ids=lambda page: page if page == "hints" else page.name)
def test_every_call_that_a_page_or_a_hint_shows_is_one_that_the_function_takes(page):
    shown = [call for text in (hinted() if page == "hints" else snippets(page)) for call in calls(text)]
    assert [why for call in shown if (why := wrong(call))] == []


def test_calls_are_found_and_wrong_ones_are_told():
    assert len([call for text in hinted() for call in calls(text)]) > 100
    text = "fl.Dataset(1, shuffel=2), data.takes(3), job.loader(4, ...), loader(data, batch_size=8) or batch.to()"
    assert [why for call in calls(text) if (why := wrong(call))] == [
        "fl.Dataset(1, shuffel=2): got an unexpected keyword argument 'shuffel'",
        "there is no data.takes",
    ]
