"""What a reader can hold in mind: few modules of a fair size, folders that are packages, classes of a bounded face."""

import ast
import statistics
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "frostline"
MAX_MODULES = 300
MIN_MEDIAN_LINES = 200
MIN_LINES, MAX_LINES = 80, 800
MIN_MODULES_IN_FOLDER, MAX_MODULES_IN_FOLDER = 4, 20
MAX_PUBLIC_METHODS = 25
# What a package gives, and what a process of its own runs, may be as short as it is.
FACES = ("__init__", "__main__")


@pytest.fixture(scope="module")
def lines():
    """Lines of every module without faces, by its path."""
    found = (path for path in SOURCE.rglob("*.py") if path.stem not in FACES)
    return {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8").count("\n") for path in found}


def test_there_are_at_most_300_modules_of_a_median_of_at_least_200_lines(lines):
    assert 100 < len(lines) <= MAX_MODULES, "see whether a module that is there can take it before a module is added"
    assert statistics.median(lines.values()) >= MIN_MEDIAN_LINES


def test_every_module_has_80_to_800_lines(lines):
    assert {name: count for name, count in lines.items() if not MIN_LINES <= count <= MAX_LINES} == {}


def test_a_folder_is_a_package_with_4_to_20_modules(lines):
    found = Counter(str(Path(name).parent) for name in lines)
    del found["."]
    outside = {
        folder: count for folder, count in found.items() if not MIN_MODULES_IN_FOLDER <= count <= MAX_MODULES_IN_FOLDER
    }
    assert outside == {}
    packages = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("__init__.py")} - {"."}
    assert packages == found.keys(), "each folder has a face, and each face a folder"


def public_methods(found):
    methods = (item for item in found.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
    return {method.name for method in methods if not method.name.startswith("_")}


def test_no_class_has_more_than_25_public_methods():
    nodes = [node for path in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    found = {node.name: len(public_methods(node)) for node in nodes if isinstance(node, ast.ClassDef)}
    assert found["Dataset"] > 15, "methods are found at all"
    assert {name: count for name, count in found.items() if count > MAX_PUBLIC_METHODS} == {}


def test_a_folder_of_tests_has_at_most_20_files():
    tests = Path(__file__).resolve().parents[1]
    found = Counter(path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py"))
    assert found["jobs"] > 5, "tests are found at all"
    assert {package: count for package, count in found.items() if count > MAX_MODULES_IN_FOLDER} == {}
