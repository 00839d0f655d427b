"""The docs say what the code says."""

import ast
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.fixture(scope="module")
def docstrings():
    """The docstring of every module, by its path, and whether it says what it gives."""
    found = {}
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        gives = any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" for node in tree.body)
        found[path] = ast.get_docstring(tree) or "", gives
    return found


def test_the_picture_of_the_layers_and_the_page_of_modules_are_those_of_the_code():
    tools = runpy.run_path(str(ROOT / "scripts" / "module_map.py"))
    assert tools["PICTURE"].read_text(encoding="utf-8") == tools["picture"](), "run `make map`"
    assert "| `ordering.orders` | Decides which sample stands" in tools["page"]()


def test_every_module_says_what_it_is_and_what_it_gives(docstrings):
    for path, (text, gives) in docstrings.items():
        assert text.split("\n")[0].endswith("."), f"{path}: the first line is a sentence"
        assert gives or path.name in {"__init__.py", "__main__.py"}, f"{path} has no __all__"


def test_what_the_architecture_names_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Where does it happen?")[2].partition("\n## ")[0]
    names = re.findall(r"`([a-z_]+(?:\.\w+)+)`", table)
    assert len(names) > 30, "the table is found at all"
    for name in names:
        assert is_there(f"frostline.{name}"), f"docs/architecture.md names {name}"


@pytest.mark.parametrize(
    ("section", "module", "message"),
    [
        ("## Ask for features", "messages", "FeatureRequest"),
        ("`POST /v1/profiles` takes the same", "messages", "ProfileRequest"),
        ("## Listings", "listings", "ListingRequest"),
    ],
)
def test_the_page_of_the_http_api_names_all_fields_of_a_request(section, module, message):
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    table = page.partition(f"\n{section}")[2].partition("| field | meaning |\n")[2].partition("\n\n")[0]
    tree = ast.parse((ROOT / "src" / "frostline" / "wire" / f"{module}.py").read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == message).body
    fields = {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == fields - {"features"}


def is_there(name):
    """Whether a dotted name is a module, or a class, function or constant of one; nothing is imported."""
    *folders, last = name.split(".")
    module = ROOT / "src" / Path(*folders, last)
    if module.is_dir() or module.with_suffix(".py").exists():
        return True
    source = (ROOT / "src" / Path(*folders)).with_suffix(".py")
    return source.exists() and bool(re.search(rf"^(class |def |){last}\b", source.read_text(), re.MULTILINE))


def test_modules_and_files_that_the_source_and_the_docs_point_at_are_there():
    source = ROOT / "src" / "frostline"
    packages = {path.stem for path in source.iterdir()}
    pages = [page for page in PAGES if page.parent.name != "decisions"]  # those tell what was there
    count = 0
    for path in (*source.rglob("*.py"), *pages, ROOT / "llms.txt"):
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"``((?:[a-z_]+\.)+\w+)``", text) if path.suffix == ".py" else []
        files = re.findall(r"`((?:benchmarks|docs|examples|scripts|tests)/[\w./-]+\.\w+)`(?!\W+at\s+commit)", text)
        names = [name for name in names if name.partition(".")[0] in packages]
        assert [name for name in names if not is_named(name)] == [], path
        assert [file for file in files if not (ROOT / file).exists()] == [], path
        count += len(names) + len(files)
    assert count > 100, "names are found at all"


def is_named(name):
    """Whether what follows the longest name of a module in a dotted name is a word of that module."""
    module, parts = ROOT / "src" / "frostline", name.split(".")
    while parts and ((module / parts[0]).is_dir() or (module / f"{parts[0]}.py").exists()):
        module /= parts.pop(0)
    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return not parts or bool(re.search(rf"\b{parts[0]}\b", file.read_text(encoding="utf-8")))


def test_each_promise_is_held_by_tests_whose_marks_say_so():
    tools = runpy.run_path(str(ROOT / "scripts" / "promises.py"))
    held = tools["held"]()
    assert held.keys() == tools["PROMISES"].keys()
    for name, found in held.items():
        assert found.tests, f"no test holds the promise {name}"
        assert found.cases + found.drawn >= sum(map(len, found.tests.values()))
    page = tools["page"]()
    assert "| `prefetch/test_window.py` |" in page
    assert "a flipped bit in an answer was a wrong feature" in page
    assert "by\ndefault 50, and ten times as many with `make test-long`" in page
    drawn = [settings.get_profile(name).max_examples for name in ("here", "ci", "long")]
    assert drawn == [tools["EXAMPLES"], tools["EXAMPLES"], 10 * tools["EXAMPLES"]]


def test_a_mark_of_a_promise_counts_cases_of_its_own_class_and_file():
    tools = runpy.run_path(str(ROOT / "scripts" / "promises.py"))
    code = """
pytestmark = [pytest.mark.promise("equal", mended="one")]
@pytest.mark.parametrize("x", [1, 2, 3])
def test_a(x): pass
def no_test(): pass
class TestB:
    @settings(max_examples=20)
    @given(st.integers())
    @pytest.mark.promise("kept")
    def test_b(self): pass
"""
    marked = list(tools["_marked"](ast.parse(code)))
    assert [(name, test.name, mended) for name, test, mended in marked] == [
        ("equal", "test_a", "one"),
        ("equal", "test_b", "one"),
        ("kept", "test_b", ""),
    ]
    assert [(tools["_cases"](test), tools["_drawn"](test)) for _, test, _ in marked] == [(3, 0), (1, 20), (1, 20)]


def test_links_between_pages_lead_somewhere():
    for page in (*PAGES, ROOT / "llms.txt"):
        for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
            is_made = target in {"modules.md", "promises.md", "verbs.md"}  # with the site
            assert is_made or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_locks_pin_each_package_with_hashes_and_leave_torch_out():
    pinned = {name: locked(name) for name in ("demo", "node", "test")}
    assert pinned["demo"].items() <= pinned["test"].items()
    assert pinned["node"].items() <= pinned["test"].items()
    for packages in pinned.values():
        assert not [name for name in packages if re.match(r"torch$|triton$|nvidia-|cuda-", name)]
        assert {"sympy", "filelock", "networkx", "jinja2"} <= packages.keys()


def test_frameworks_are_locked_beside_the_test_set_and_nothing_is_in_both():
    frameworks = locked("frameworks")
    assert not frameworks.keys() & locked("test").keys()
    assert {"jax", "tensorflow-cpu", "nvidia-dali-cuda130", "grain"} <= frameworks.keys()
    assert not {"torch", "numpy", "protobuf"} & frameworks.keys()


def locked(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert "://" not in text
    entries = re.split(r"\n(?=[a-z0-9])", text)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    packages = {}
    for entry in entries:
        package, version = re.match(r"([a-z0-9-]+)==(\S+)", entry).groups()
        packages.setdefault(package, set()).add(version)
    return {package: frozenset(versions) for package, versions in packages.items()}


def test_every_direct_dependency_has_a_floor_and_a_reason():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    for requirement in project["dependencies"]:
        assert ">=" in requirement
        assert re.search(rf'"{re.escape(requirement)}", # \w', text), f"{requirement}: say why it is here"


def test_the_picture_shows_the_committed_figures():
    import json

    folder = ROOT / "docs" / "pictures"
    figures = json.loads((folder / "efficientnet_lite0.json").read_text(encoding="utf-8"))
    drawn = (folder / "cuts.svg").read_text(encoding="utf-8")
    assert f"{figures['encoded_bytes'] / 1e3:.0f} kB" in drawn
    assert f"{figures['cuts'][-1]['bytes_per_sample'] / 1e3:.1f} kB" in drawn
    assert [cut["share"] for cut in figures["cuts"]] == sorted(cut["share"] for cut in figures["cuts"])


def test_every_module_that_claims_to_decide_is_held_to_it(docstrings):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {contract["id"]: contract for contract in project["tool"]["importlinter"]["contracts"]}
    pure = [*contracts["pure"]["source_modules"], *contracts["pure-in-itself"]["source_modules"]]
    for path, (first, _) in docstrings.items():
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        claims = first.partition("\n\n")[0]
        if claims.startswith(("Decide ", "Decides ")) or re.search(r": decides |\bPure[.:]", claims):
            assert any(f"{name}.".startswith(f"{package}.") for package in pure), f"add {name} to a contract of purity"


def test_each_trouble_names_tests_that_there_are():
    text = (ROOT / "docs" / "troubles.md").read_text(encoding="utf-8")
    troubles = re.split(r"\n\n(?=\*\*)", text)[1:]
    assert len(troubles) > 15
    for trouble in troubles:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", trouble)
        assert named, trouble.split("\n")[0]
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in there, f"{path} has no {name}"


def test_the_concepts_are_chapters_that_are_short_and_that_their_index_names():
    folder = ROOT / "docs" / "concepts"
    index = (folder / "index.md").read_text(encoding="utf-8")
    chapters = sorted(path for path in folder.glob("*.md") if path.name != "index.md")
    assert len(chapters) >= 10
    for chapter in chapters:
        text = chapter.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 200, f"{chapter} is to be divided"
        assert re.match(r"# .+\n\n\w", text), f"{chapter} begins with a title, and says what it is about"
        assert f"]({chapter.name})" in index, f"docs/concepts/index.md does not name {chapter.name}"


def test_each_decision_has_its_number_and_the_title_that_their_index_has():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "index.md").read_text(encoding="utf-8")
    lines = re.findall(r"^- \[(\d+)\. (.+)\]\((.+)\)$", index, re.MULTILINE)
    listed = {name: (int(number), title) for number, title, name in lines}
    pages = sorted(folder.glob("0*.md"))
    assert len(pages) > 100, "decisions are found at all"
    for page in pages:
        number, title = re.match(r"# (\d+)\. (.+)\n", page.read_text(encoding="utf-8")).groups()
        assert (int(number), title) == listed.pop(page.name, None), f"{page.name} and docs/decisions/index.md"
        assert int(number) == int(page.name[:4])
        assert len(title.split()) > 2 or number == "1", f"{page.name}: say what was decided"
    assert listed == {}, "the index lists pages that are gone"
