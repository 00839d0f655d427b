"""Writes the module map of docs/architecture.md from the first line of every module.

python scripts/module_map.py           # rewrites the map
python scripts/module_map.py --check   # exits with 1 where it is out of date
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- map: scripts/module_map.py writes this -->\n", "<!-- end of map -->\n"
HEIGHTS = (
    ("Command line", ("cli",)),
    ("Whole jobs", ("demo", "training", "testing")),
    ("Jobs and loading", ("jobs", "loaders")),
    ("Both ends of the wire", ("io_service", "client", "node", "transport")),
    ("Deciding", ("planning", "batching", "tuning", "prefetch", "cache")),
    ("Data and networks", ("datasets", "preprocess", "models", "stores", "engines")),
    ("Shared words", ("wire", "profiles", "ordering")),
    (
        "Ground",
        (
            "events",
            "config",
            "core",
            "checks",
            "private",
            "processors",
            "file_cache",
            "version",
            "errors",
        ),
    ),
)


def modules():
    for path in sorted((ROOT / "src" / "frostline").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        yield name, (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def written():
    lines, left = {}, dict(modules())
    for title, rooms in HEIGHTS:
        names = [name for room in rooms for name in left if f"{name}.".startswith(f"frostline.{room}.")]
        if names:
            lines[title] = [f"| `{name.removeprefix('frostline.')}` | {left.pop(name)} |" for name in names]
    left.pop("frostline", None)
    assert not left, f"give these a height in {Path(__file__).name}: {sorted(left)}"
    return "\n".join(
        f"### {title}\n\n| module | what it decides or does |\n| --- | --- |\n" + "\n".join(rows) + "\n"
        for title, rows in lines.items()
    )


def with_map(page):
    before, rest = page.split(START)
    return before + START + "\n" + written() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit(page != with_map(page) and "docs/architecture.md is out of date: run scripts/module_map.py")
    PAGE.write_text(with_map(page), encoding="utf-8")
