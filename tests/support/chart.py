"""Renders the Helm chart's templates: the part of Go's template language that they use, and what Helm adds to it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

__all__ = ("CHART", "rendered", "values_of")

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "frostline"
_ACTION = re.compile(r"(?:\s*\{\{-|\{\{)\s*(/\*.*?\*/|.*?)\s*(?:-\}\}\s*|\}\})", re.DOTALL)
_WORD = re.compile(r'"[^"]*"|[()|]|[^\s()|]+')
_OPENING = ("if", "with", "range", "define")


class _Block(NamedTuple):
    """An action with what stands behind it until its ``end``."""

    kind: str
    said: str
    body: "Sequence[str | _Block]"
    otherwise: "Sequence[str | _Block]" = ()


def values_of(name: str | None = None) -> dict[str, Any]:
    """The chart's values, with those of a file of ``ci/`` over them."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    return _over(values, yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())) if name else values


def rendered(values: Mapping[str, Any], *, release: str = "store", namespace: str = "data") -> dict[str, str]:
    """The text of each template by its name."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    top = {
        "Values": values,
        "Release": {"Name": release, "Namespace": namespace},
        "Chart": {"AppVersion": chart["appVersion"], "Version": chart["version"], "Name": chart["name"]},
    }
    parsed = {path.name: _parsed(path.read_text()) for path in sorted((CHART / "templates").iterdir())}
    defined = {block.said: block.body for blocks in parsed.values() for block in blocks if isinstance(block, _Block)
               and block.kind == "define"}  # fmt: skip
    template = _Template({name.strip('"'): body for name, body in defined.items()})
    return {name: template.text(blocks, top, {}) for name, blocks in parsed.items() if not name.startswith("_")}


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _over(merged[name], value) if both else value
    return merged


def _parsed(text: str) -> "list[str | _Block]":
    pieces, at = [], 0
    for found in _ACTION.finditer(text):
        pieces += [("text", text[at : found.start()]), ("action", found[1])]
        at = found.end()
    # Only an action that ends with `-}}` takes the blanks behind it, and the pattern has taken them then.
    pieces.append(("text", text[at:]))
    waiting = iter(pieces)
    blocks, _ = _until_end(waiting)
    assert next(waiting, None) is None, "an end too many"
    return blocks


def _until_end(pieces: "Iterator[tuple[str, str]]") -> "tuple[list[str | _Block], str]":
    blocks: list[str | _Block] = []
    for kind, said in pieces:
        word, _, rest = said.partition(" ")
        if kind == "text":
            blocks.append(said)
        elif word in ("end", "else"):
            return blocks, word
        elif word in _OPENING:
            body, ending = _until_end(pieces)
            otherwise = _until_end(pieces)[0] if ending == "else" else []
            blocks.append(_Block(word, rest, body, otherwise))
        elif not said.startswith("/*"):
            blocks.append(_Block("print", said, ()))
    return blocks, ""


class _Template:
    """Writes blocks with values; ``defined`` are the parts that ``include`` names."""

    def __init__(self, defined: "Mapping[str, Sequence[str | _Block]]") -> None:
        self._defined = defined
        self._functions: Mapping[str, Callable[..., Any]] = {
            "default": lambda default, value: value or default,
            "include": lambda name, dot: self.text(self._defined[name], dot, {}),
            "nindent": lambda count, text: "\n" + "\n".join(" " * count + line for line in text.split("\n")),
            "not": lambda value: not value,
            "printf": lambda form, *values: form.replace("%v", "%s") % values,
            "quote": json.dumps,
            "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False).strip(),
        }

    def text(self, blocks: "Sequence[str | _Block]", dot: Any, names: Mapping[str, Any]) -> str:
        return "".join(block if isinstance(block, str) else self._written(block, dot, names) for block in blocks)

    def _written(self, block: _Block, dot: Any, names: Mapping[str, Any]) -> str:
        if block.kind == "define":
            return ""
        if block.kind == "range":
            return self._repeated(block, dot, names)
        value = self._value(block.said, dot, names)
        if block.kind == "print":
            return str(value).lower() if isinstance(value, bool) else str(value)
        if not value:
            return self.text(block.otherwise, dot, names)
        return self.text(block.body, value if block.kind == "with" else dot, names)

    def _repeated(self, block: _Block, dot: Any, names: Mapping[str, Any]) -> str:
        variables, mark, said = block.said.rpartition(":=")
        values = self._value(said, dot, names)
        if not mark:
            return "".join(self.text(block.body, value, names) for value in values)
        key, each = (name.strip() for name in variables.split(","))
        return "".join(self.text(block.body, values[name], {**names, key: name, each: values[name]}) for name in
                       sorted(values))  # fmt: skip

    def _value(self, said: str, dot: Any, names: Mapping[str, Any]) -> Any:
        words = _WORD.findall(said)
        value = self._piped(words, dot, names)
        assert not words, f"{said} has a bracket too many"
        return value

    def _piped(self, words: list[str], dot: Any, names: Mapping[str, Any]) -> Any:
        last: list[Any] = []
        while True:
            said: list[Any] = []
            while words and words[0] not in ("|", ")"):
                said.append(self._term(words, dot, names))
            head, *rest = said
            last = [head(*rest, *last) if callable(head) else head]
            if not words or words.pop(0) == ")":
                return last[0]

    def _term(self, words: list[str], dot: Any, names: Mapping[str, Any]) -> Any:
        word = words.pop(0)
        if word == "(":
            return self._piped(words, dot, names)
        if word in self._functions:
            return self._functions[word]
        if word.startswith("$"):
            return names[word]
        if not word.startswith("."):
            return json.loads(word)
        for name in filter(None, word.split(".")):
            dot = dot[name]
        return dot
