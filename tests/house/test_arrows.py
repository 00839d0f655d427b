"""No arrow is hidden in a text: what is named by a text lies below, but for the processes of one table."""

import ast
import importlib.util
import tomllib
from pathlib import Path

import pytest

from frostline.core.system import STARTED

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "frostline"


def modules():
    """Every module's dotted name and path."""
    for path in SOURCE.rglob("*.py"):
        yield ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"), path


@pytest.fixture(scope="module")
def trees():
    """The syntax of every module, by its dotted name."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules()}


@pytest.fixture(scope="module")
def heights():
    """How high each package stands, by the contract of imports: 0 is the lowest."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    packages = [line.replace("|", " ").replace(":", " ").split() for line in layers]
    return {package: height for height, row in enumerate(reversed(packages)) for package in row}


def texts_that_name_modules(trees):
    """Module, and the module that one of its texts names; texts of the table of processes are not among them."""
    for name, tree in trees.items():
        if name == "frostline.core.system":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in trees:
                yield name, node.value


def test_what_a_text_names_lies_below_or_in_the_same_package(heights, trees):
    def height(name):
        return heights[name.split(".")[1]]

    found = [(named_by, name) for named_by, name in texts_that_name_modules(trees) if name != "frostline"]
    assert ("frostline.node.torch_bridge", "frostline.engines.torch") in found, "texts are found at all"
    upward = [
        (named_by, name) for named_by, name in found if named_by != "frostline" and height(name) > height(named_by)
    ]
    assert upward == [], "start it through STARTED of core/system.py, or hand it down"


def test_every_process_of_the_table_can_be_started():
    for what, name in STARTED.items():
        assert name.startswith("frostline."), what
        main = importlib.util.find_spec(f"{name}.__main__") if is_package(name) else importlib.util.find_spec(name)
        assert main is not None, f"{what}: there is no {name}"
        source = Path(main.origin).read_text(encoding="utf-8")
        assert 'if __name__ == "__main__":' in source, f"{what}: {name} does nothing when it is run"


def is_package(name):
    return importlib.util.find_spec(name).submodule_search_locations is not None


def test_processes_are_started_by_the_table_alone(trees):
    """A command that begins with Python and -m names its module by STARTED, or by an argument."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            words = [ast.unparse(word) for word in node.elts] if isinstance(node, ast.List) else []
            if "'-m'" in words:
                module = words[words.index("'-m'") + 1]
                assert not module.startswith("'frostline"), f"{name} starts {module}"


def test_processes_are_started_in_one_place():
    """``Worker`` knows how our own modules are started, within which limits, and how they are ended."""
    places = {name for name, path in modules() if "subprocess.Popen" in path.read_text(encoding="utf-8")}
    assert places == {"frostline.core.processes", "frostline.ray.control"}, "Ray's is a command of Ray"
