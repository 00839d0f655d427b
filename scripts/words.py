"""Says where the code's words are not what they should be: one class a name, plain descriptions, nouns in loops.

python scripts/words.py [FOLDER ...]    # every place below these folders, src/frostline by default; exits with 1 if any
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "frostline"
# A description that begins so is the end of a sentence whose beginning the reader has to find.
FRAGMENTS = {"of", "that", "what", "whom", "who", "whose"}
BANNED = re.compile(r"\b_?(most|least|fewest)_(?!common\b)[a-z_]+", re.IGNORECASE)
_HEADINGS = ("Args:", "Attributes:")
_ITEM = re.compile(r"(?P<indent> *)(?P<name>\*{0,2}\w[\w, *]*): (?P<first>\w*)(?P<rest>.*)")


def descriptions(docstring):
    """The descriptions of arguments and attributes in a docstring: line, name and first word."""
    indent = None
    for number, line in enumerate(docstring.split("\n")):
        if line.strip() in _HEADINGS:
            indent = len(line) - len(line.lstrip()) + 4
        elif line.strip() and indent is not None and len(line) - len(line.lstrip()) < indent:
            indent = None
        elif indent is not None and (item := _ITEM.fullmatch(line)) and len(item["indent"]) == indent:
            yield number, item["name"], item["first"]


def docstrings(tree):
    """Every docstring of a module: its first line's number and its text, indented as it is written."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            yield node.body[0].lineno, node.body[0].value.value


def fragments(tree):
    """Descriptions that are fragments, and how many descriptions there are."""
    found, count = [], 0
    for start, text in docstrings(tree):
        for number, name, first in descriptions(text):
            count += 1
            if first.lower() in FRAGMENTS:
                found.append((start + number, f"the description of {name} begins with {first!r}"))
    return found, count


def loops(tree):
    """Loop variables that say nothing."""
    for node in ast.walk(tree):
        targets = [node.target] if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension) else []
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and name.id == "one":
                    yield name.lineno, "a loop variable is called 'one': call it what it holds"


def modules(folders=(SOURCE,)):
    """Path, text and tree of every module."""
    for folder in folders:
        for path in sorted(Path(folder).resolve().rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            yield path, text, ast.parse(text)


def repeated_classes():
    """Public classes whose name another one has."""
    places = defaultdict(list)
    for path, _, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def places(folders=(SOURCE,)):
    """Every place with words that should be others: path, line and why; and how many descriptions there are."""
    found, count = [], 0
    for path, text, tree in modules(folders):
        here, descriptions_here = fragments(tree)
        here += loops(tree)
        here += [
            (text[: match.start()].count("\n") + 1, f"say max_ or min_ for {match[0]}")
            for match in BANNED.finditer(text)
        ]
        found += [(path, line, why) for line, why in here]
        count += descriptions_here
    return found, count


if __name__ == "__main__":
    found, count = places(sys.argv[1:] or (SOURCE,))
    for path, line, why in sorted(found):
        print(f"{path.relative_to(ROOT)}:{line}: {why}")
    for name, where in repeated_classes().items():
        print(f"{name} is the name of several classes: {', '.join(where)}")
    print(f"{sum('description' in why for _, _, why in found)} of {count} descriptions are fragments")
    sys.exit(1 if found else 0)
