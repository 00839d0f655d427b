"""What a reader can hold in mind: files of at most 400 lines, folders of 20 modules, classes of 25 public methods."""

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "frostline"
MAX_LINES = 400
MAX_MODULES = 20
MAX_PUBLIC_METHODS = 25


def test_no_file_has_more_than_400_lines():
    found = {path.relative_to(SOURCE).as_posix(): path.read_text().count("\n") for path in SOURCE.rglob("*.py")}
    assert len(found) > 400, "the source is found at all"
    assert {name: lines for name, lines in found.items() if lines > MAX_LINES} == {}


def test_no_folder_has_more_than_20_modules():
    found = Counter(path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    assert {folder: count for folder, count in found.items() if count - 1 > MAX_MODULES} == {}


def public_methods(found):
    methods = (item for item in found.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
    return {method.name for method in methods if not method.name.startswith("_")}


def test_no_class_has_more_than_25_public_methods():
    nodes = [node for path in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    found = {node.name: len(public_methods(node)) for node in nodes if isinstance(node, ast.ClassDef)}
    assert found["Dataset"] > 15, "methods are found at all"
    assert {name: count for name, count in found.items() if count > MAX_PUBLIC_METHODS} == {}
