"""Decides what a selection written as text means: comparisons of columns, read by an allow-list and never run."""

import ast
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from frostline.errors import SettingError, nearest

__all__ = ("parse_expression",)

_LONGEST = 10_000
_COMPARED = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_EXAMPLE = "label == 'glass' and width >= 200"


def parse_expression(text: str, schema: pa.Schema, classes: Sequence[str]) -> pc.Expression:
    """Read a selection such as ``label == 'glass' and width >= 200``.

    It knows columns, texts, numbers, ``True``, ``False``, ``and``, ``or``, ``not``, brackets, ``== != < <= > >=`` (also
    chained), ``in`` and ``not in`` a list, ``'part' in column`` for texts, and ``is None``. The column ``label`` is
    compared with names of classes, dates and times with texts such as ``'2026-11-21'`` and ``'2026-11-21T08:30:00'``.
    A column whose name is no single word is written ``column('taken at')``.

    Args:
        text: written by whoever asks; nothing of it is run.
        schema: schema of the table.
        classes: names, by label.

    Raises:
        SettingError: the text cannot be read, or names a column or a class that is not there.
    """
    if len(text) > _LONGEST:
        raise SettingError(f"a selection has up to {_LONGEST} characters, not {len(text)}")
    try:
        tree = _Named().visit(ast.parse(text.strip(), mode="eval"))
        return _Reader(schema, classes).condition(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SettingError(f"the selection {_short(text)} cannot be read: write it like {_EXAMPLE}") from error


class _Named(ast.NodeTransformer):
    """Takes ``column('any name')`` for the column's name."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str(name))], keywords=[]):
                return ast.copy_location(ast.Name(id=name, ctx=ast.Load()), node)
        return node


class _Reader:
    """Turns the tree of an expression into one of Arrow; whatever is not named here is refused."""

    def __init__(self, schema: pa.Schema, classes: Sequence[str]) -> None:
        self._schema = schema
        self._classes = classes

    def condition(self, node: ast.expr) -> pc.Expression:
        match node:
            case ast.BoolOp(op=joined, values=values):
                found = self.condition(values[0])
                for value in values[1:]:
                    other = self.condition(value)
                    found = found & other if isinstance(joined, ast.And) else found | other
                return found
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self.condition(operand)
            case ast.Compare(left=left, ops=operators, comparators=others):
                sides = [left, *others]
                found = self._compared(sides[0], operators[0], sides[1])
                for place, operator in enumerate(operators[1:], 1):
                    found &= self._compared(sides[place], operator, sides[place + 1])
                return found
            case ast.Name(id=name) if pa.types.is_boolean(self._type(name)):
                return pc.field(name)
        raise _refused(node)

    def _compared(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> pc.Expression:
        match operator, left, right:
            case ((ast.Is() | ast.IsNot()), ast.Name(id=name), ast.Constant(value=None)):
                self._type(name)
                empty = pc.field(name).is_null()
                return empty if isinstance(operator, ast.Is) else ~empty
            case ((ast.In() | ast.NotIn()), ast.Constant(value=str(part)), ast.Name(id=name)):
                if not _is_text(self._type(name)):
                    raise SettingError(f"column {name!r} holds no text in which {part!r} could be")
                found = pc.match_substring(pc.field(name), part)
                return found if isinstance(operator, ast.In) else ~found
            case ((ast.In() | ast.NotIn()), ast.Name(id=name), (ast.Tuple() | ast.List() | ast.Set())):
                values = [self._value(name, elt) for elt in right.elts]
                found = pc.field(name).isin(values)
                return found if isinstance(operator, ast.In) else ~found
            case _, ast.Name(id=name), ast.Name(id=other) if type(operator) in _COMPARED:
                if _is_text(self._type(name)) != _is_text(self._type(other)):
                    raise SettingError(f"columns {name!r} and {other!r} cannot be compared")
                return _compare(pc.field(name), operator, pc.field(other))
            case _, ast.Name(id=name), _ if type(operator) in _COMPARED:
                return _compare(pc.field(name), operator, pc.scalar(self._value(name, right)))
            case _, _, ast.Name(id=name) if type(operator) in _COMPARED:
                return _compare(pc.scalar(self._value(name, left)), operator, pc.field(name))
        raise _refused(left)

    def _value(self, name: str, node: ast.expr) -> Any:
        """A value as a column can be compared with it."""
        value, kind = _constant(node), self._type(name)
        if name == "label" and isinstance(value, str):
            if value not in self._classes:
                raise SettingError(f"there is no class {value!r}{nearest(value, self._classes)}")
            return self._classes.index(value)
        if pa.types.is_temporal(kind):
            return _moment(name, value, kind)
        if isinstance(value, str) != _is_text(kind):
            raise SettingError(f"column {name!r} holds {kind} and cannot be compared with {value!r}")
        return value

    def _type(self, name: str) -> pa.DataType:
        if name not in self._schema.names:
            known = ", ".join(self._schema.names)
            raise SettingError(f"there is no column {name!r}, only {known}{nearest(name, self._schema.names)}")
        return self._schema.field(name).type


def _compare(left: pc.Expression, operator: ast.cmpop, right: pc.Expression) -> pc.Expression:
    match _COMPARED[type(operator)]:
        case "==":
            return left == right
        case "!=":
            return left != right
        case "<":
            return left < right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case _:
            return left >= right


def _moment(name: str, value: str | float, kind: pa.DataType) -> pa.Scalar:
    try:
        return pa.scalar(value).cast(kind)
    except pa.ArrowException as error:
        written = "'2026-11-21T08:30:00Z'" if getattr(kind, "tz", None) else "'2026-11-21' or '2026-11-21T08:30:00'"
        raise SettingError(
            f"column {name!r} holds {kind}: {value!r} is none, which is written like {written}"
        ) from error


def _constant(node: ast.expr) -> str | int | float | bool:
    match node:
        case ast.Constant(value=str() | int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise _refused(node)


def _is_text(kind: pa.DataType) -> bool:
    while pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _refused(node: ast.expr) -> SettingError:
    return SettingError(f"a selection compares columns with values, as in {_EXAMPLE}; not {_short(ast.unparse(node))}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
