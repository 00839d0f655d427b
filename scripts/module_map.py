"""Makes the site's page of modules from the first line of each, and draws the layers from their contract.

The site takes the page as it is built (a hook of MkDocs), so that none is kept; the picture is kept, for the README's
readers.

python scripts/module_map.py           # writes the picture
python scripts/module_map.py --check   # exits with 1 where it is out of date
"""

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = "modules.md", ROOT / "docs" / "pictures" / "layers.svg"
HEAD = """# Modules

Every module in one line: what it decides or does, as the first line of its file says. This page is made with the site.
The [architecture](architecture.md) says which of them to read first.
"""
# Packages whose modules decide: values come in, values go out.
DECIDERS = {"ordering", "planning", "batching", "tuning"}
WIDTH, HEIGHT, GAP = 860, 34, 10
STYLE = """<style>
  text { font: 15px system-ui, sans-serif; fill: #1c2733; text-anchor: middle; dominant-baseline: central }
  rect { fill: #e8eef4; stroke: #7b8fa3 }
  .pure { fill: #cfe8d8 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } rect { fill: #22303d; stroke: #7b8fa3 } .pure { fill: #1f4a33 }
  }
</style>"""


def modules():
    for path in sorted((ROOT / "src" / "frostline").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        yield name, (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def layers():
    """The packages by height, the highest first, as the contract of imports lists them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    lines = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    return [line.replace("|", " ").replace(":", " ").split() for line in lines]


def page():
    left = dict(modules())
    tables = []
    for package in (package for packages in layers() for package in packages):
        names = [name for name in left if f"{name}.".startswith(f"frostline.{package}.")]
        rows = [f"| `{name.removeprefix('frostline.')}` | {left.pop(name)} |" for name in names]
        tables.append(f"## {package}\n\n| module | what it decides or does |\n| --- | --- |\n" + "\n".join(rows) + "\n")
    for name in ("frostline", "frostline.__main__"):
        left.pop(name)
    assert not left, f"give these a layer in pyproject.toml: {sorted(left)}"
    return HEAD + "\n" + "\n".join(tables)


def picture():
    shapes = []
    for row, packages in enumerate(layers()):
        width = (WIDTH - GAP * (len(packages) - 1)) / len(packages)
        for place, package in enumerate(packages):
            x, y = place * (width + GAP), row * (HEIGHT + GAP)
            kind = ' class="pure"' if package in DECIDERS else ""
            shapes.append(f'<rect{kind} x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="5"/>')
            shapes.append(f'<text x="{x + width / 2:.0f}" y="{y + HEIGHT / 2:.0f}">{package}</text>')
    height = len(layers()) * (HEIGHT + GAP)
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="-2 -2 {WIDTH + 4} {height}" role="img"'
    title = "<title>The packages of Frostline by height; imports go downward only</title>"
    return "\n".join([f"<svg {box}>", title, STYLE, *shapes, "</svg>", ""])


def on_files(files, config):
    """Give MkDocs the page of modules."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files


if __name__ == "__main__":
    if "--check" in sys.argv:
        is_stale = PICTURE.read_text(encoding="utf-8") != picture()
        sys.exit(f"out of date: {PICTURE}: run `make map`" if is_stale else 0)
    PICTURE.write_text(picture(), encoding="utf-8")
