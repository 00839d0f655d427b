"""Files and folders that a reader can hold in mind: at most 400 lines and 20 modules."""

from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "frostline"
MAX_LINES = 400
MAX_MODULES = 20


def test_no_file_has_more_than_400_lines():
    found = {path.relative_to(SOURCE).as_posix(): path.read_text().count("\n") for path in SOURCE.rglob("*.py")}
    assert len(found) > 400, "the source is found at all"
    assert {name: lines for name, lines in found.items() if lines > MAX_LINES} == {}


def test_no_folder_has_more_than_20_modules():
    found = Counter(path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    assert {folder: count for folder, count in found.items() if count - 1 > MAX_MODULES} == {}
