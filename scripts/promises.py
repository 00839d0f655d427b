"""Makes the site's page of promises from the marks of the tests that hold them, so that it says nothing else.

A test, a class of tests or a file is marked `pytest.mark.promise(NAME)`, with `mended="…"` where it found a fault that
is mended. The site takes the page as it is built (a hook of MkDocs).
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = "promises.md"
PROMISES = {
    "equal": "What a training loop gets is what it gets without Frostline: features, losses, gradients, buffers and "
    "draws, to the bit or within 1e-6 where sums are added in another order; or it is refused, or told in a sentence.",
    "noticed": "What changes after a job was made, such as a weight, a mode or a layer, is noticed before it makes a "
    "batch wrong.",
    "complete": "Every sample comes once in each epoch, in the order that was asked for, or is left out with its name "
    "and a count.",
    "labels": "A label means the same in every format, copy and split.",
    "survives": "A node, worker, service or trainer that is killed, hangs or answers wrong costs seconds, and neither "
    "a sample nor the equality of losses.",
    "intact": "A flipped bit on the way, in memory or on a disk is found, counted, and computed or fetched again.",
    "kept": "Nothing that was trained is deleted or half-written, and a run that goes on ends as one that was never "
    "broken off.",
    "bounded": "Whatever an untrusted client sends is bounded in bytes, count and time before anybody is recognised.",
    "apart": "Tenants get their shares, and none sees, stops or starves another.",
    "data": "Networks, data and run folders are data: nothing that comes from them is run, and no path leads out of "
    "what was given.",
    "secret": "Tokens, keys and credentials get into no file, log, report or sentence, and answer nobody else.",
    "fast": "Tuning, planning and dealing leave no resource without work that would gain by it.",
}
EXAMPLES = 50
"""Of a property, where it says no other number (tests/conftest.py)."""
HEAD = """# Promises

What Frostline promises, and the tests that hold each promise, from the marks of the tests themselves. A *case* is one
set of values that a test runs with, where these stand at the test, and else all of them; a property draws its cases, by
default 50, and ten times as many with `make test-long`.
"""


@dataclass(kw_only=True)
class Held:
    """What holds one promise.

    Attributes:
        tests: tests by the file they stand in.
        cases: number of cases that are written out.
        drawn: number of cases that are drawn.
        mended: faults that they found.
    """

    tests: dict[str, list[str]] = field(default_factory=dict)
    cases: int = 0
    drawn: int = 0
    mended: list[str] = field(default_factory=list)


def held() -> dict[str, Held]:
    """What holds each promise.

    Raises:
        SystemExit: A mark names no promise.
    """
    found = {name: Held() for name in PROMISES}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "promise" in text:
            for name, test, mended in _marked(ast.parse(text)):
                if name not in found:
                    raise SystemExit(f"{path.relative_to(ROOT)}: there is no promise {name!r}: see scripts/promises.py")
                _take(found[name], str(path.relative_to(ROOT)), test, mended)
    return found


def _take(one: Held, path: str, test: ast.FunctionDef, mended: str) -> None:
    drawn, cases = _drawn(test), _cases(test)
    names = one.tests.setdefault(path, [])
    if test.name not in names:
        names.append(test.name)
        one.drawn += drawn * cases
        one.cases += 0 if drawn else cases
    if mended and mended not in one.mended:
        one.mended.append(mended)


def _marked(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """The promises of each test: its own marks, those of its class, and those of the file."""
    of_file = [mark for statement in tree.body for mark in _marks_of_file(statement)]
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            of_class = [*of_file, *_marks(statement.decorator_list)]
            tests = [item for item in statement.body if isinstance(item, ast.FunctionDef)]
        else:
            of_class, tests = of_file, [statement] if isinstance(statement, ast.FunctionDef) else []
        for test in tests:
            if test.name.startswith("test_"):
                for name, mended in [*of_class, *_marks(test.decorator_list)]:
                    yield name, test, mended


def _marks_of_file(statement: ast.stmt) -> list[tuple[str, str]]:
    match statement:
        case ast.Assign(targets=[ast.Name(id="pytestmark")], value=ast.List(elts=marks)):
            return _marks(marks)
        case ast.Assign(targets=[ast.Name(id="pytestmark")], value=mark):
            return _marks([mark])
        case _:
            return []


def _marks(expressions: Sequence[ast.expr]) -> list[tuple[str, str]]:
    found = []
    for expression in expressions:
        match expression:
            case ast.Call(func=ast.Attribute(attr="promise"), args=[ast.Constant(value=str(name))], keywords=more):
                found.append((name, "".join(ast.literal_eval(item.value) for item in more)))
            case _:
                pass
    return found


def _cases(test: ast.FunctionDef) -> int:
    """The number of cases of a test, where they are written out; at least one."""
    cases = 1
    for expression in test.decorator_list:
        match expression:
            case ast.Call(
                func=ast.Attribute(attr="parametrize"), args=[_, ast.List(elts=values) | ast.Tuple(elts=values)]
            ):
                cases *= max(1, len(values))
            case _:
                pass
    return cases


def _drawn(test: ast.FunctionDef) -> int:
    """The number of cases that a property draws; 0 of any other test."""
    calls = [call for call in test.decorator_list if isinstance(call, ast.Call)]
    names = [getattr(call.func, "id", "") for call in calls]
    if "given" not in names:
        return 0
    options = [item for call, name in zip(calls, names, strict=True) if name == "settings" for item in call.keywords]
    given = (
        item.value.value for item in options if item.arg == "max_examples" and isinstance(item.value, ast.Constant)
    )
    return int(next(given, EXAMPLES))


def page() -> str:
    """The page in Markdown."""
    parts = [HEAD]
    for name, one in held().items():
        count = sum(map(len, one.tests.values()))
        drawn = f", and {one.drawn:,} drawn" if one.drawn else ""
        parts.append(f"## {name.capitalize()}\n\n{PROMISES[name]}\n\n{count} tests, {one.cases:,} cases{drawn}.\n")
        parts += ["Found by them, and mended:\n", *(f"- {line}" for line in one.mended), ""] if one.mended else []
        rows = [f"| `{path.removeprefix('tests/')}` | {_listed(tests)} |" for path, tests in one.tests.items()]
        parts.append("| file | what its tests say |\n| --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _listed(tests: Sequence[str]) -> str:
    return "<br>".join(test.removeprefix("test_").replace("_", " ") for test in tests)


def on_files(files, config):
    """Give MkDocs the page of promises."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files
