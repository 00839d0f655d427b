"""Checks the arguments of a graph's operators against their schemas, before any of them is called.

Torch takes an integer where a dtype belongs and reads the memory of its tables with it, so that names alone are no
protection: every argument must be of the type that the schema gives it, a constant must be one of those that
networks use, and a number must lie in a range.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import torch

from frostline.core import GraphNode, Ref, Token
from frostline.core.graph import Argument, references
from frostline.engines.base.operators import MAX_SIZE, PYTHON_OPERATORS, TOKENS, resolve_allowed
from frostline.errors import UnsafeArtifact

__all__ = ("MAX_REFERENCES", "check_call")

MAX_REFERENCES = 1024
"""The most values that one operation reads, and the longest list among its arguments: DenseNet joins 64."""

# What a slice that goes to the end has for its end (``sys.maxsize``).
_TO_THE_END = (1 << 63) - 1
# Any bits are a float; of other types, such as bool, some are values that kernels do not expect.
_BITS = Token("dtype", "float32")
_TEXTS: dict[tuple[str, str], frozenset[str]] = {
    ("aten.conv2d.padding", "padding"): frozenset({"same", "valid"}),
    ("aten.gelu.default", "approximate"): frozenset({"none", "tanh"}),
    ("aten.pad.default", "mode"): frozenset({"circular", "constant", "reflect", "replicate"}),
}
# Below one, kernels divide by these.
_POSITIVE = frozenset(
    {"chunks", "dilation", "divisor_override", "groups", "kernel_size", "num_groups", "step", "stride"}
    | {"upscale_factor"}
)
_DIMENSIONS = frozenset(
    {"axis0", "axis1", "destination", "dim", "dim0", "dim1", "dims", "end_dim", "source", "start_dim"}
)
_MAX_DIMENSIONS = 64
_EQUATION = re.compile(r"[A-Za-z.,> -]{1,200}")
_KINDS = {"ScalarType": "dtype", "Layout": "layout", "MemoryFormat": "memory_format", "Device": "device"}


def check_call(node: GraphNode) -> None:
    """Do nothing if an operation's arguments are what its operator takes.

    Args:
        node: the operation; its operator is on the allow-list.

    Raises:
        UnsafeArtifact: One argument is not, is missing, or the operator has none of that name.
    """
    if len(references((node.args, tuple(value for _, value in node.kwargs)))) > MAX_REFERENCES:
        raise UnsafeArtifact(f"{node.op} reads more than {MAX_REFERENCES} values")
    if node.op in PYTHON_OPERATORS:
        _check_python(node)
        return
    parameters = _parameters(node.op)
    positional = [parameter for parameter in parameters if not parameter.is_keyword]
    if len(node.args) > len(positional):
        raise UnsafeArtifact(f"{node.op} takes {len(positional)} arguments, not {len(node.args)}")
    given = {parameter.name: value for parameter, value in zip(positional, node.args, strict=False)}
    known = {parameter.name for parameter in parameters}
    for name, value in node.kwargs:
        if name in given or name not in known:
            raise UnsafeArtifact(f"{node.op} has no argument {name[:40]!r} left to be given")
        given[name] = value
    for parameter in parameters:
        if parameter.name in given:
            _check_argument(node.op, parameter, given[parameter.name])
        elif parameter.is_required:
            raise UnsafeArtifact(f"{node.op} needs the argument {parameter.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """One argument of an operator.

    Attributes:
        name: The name of the argument.
        kind: The type in the words of the schema, such as ``Optional[ScalarType]``.
        length: The length of a list that may be given as one number; 0 where it may not.
        is_first: Whether it is the operator's first argument.
        is_keyword: Whether it is given by its name alone.
        is_required: Whether it has no default.
    """

    name: str
    kind: str
    length: int
    is_first: bool
    is_keyword: bool
    is_required: bool


@cache
def _parameters(op: str) -> tuple[_Parameter, ...]:
    schema = _schema(op)
    return tuple(
        _Parameter(
            name=argument.name,
            # ``type`` says int where an enumeration is meant; ``real_type`` says which.
            kind=str(argument.real_type),
            length=argument.N or 0,
            is_first=place == 0,
            is_keyword=argument.kwarg_only,
            is_required=not argument.has_default_value(),
        )
        for place, argument in enumerate(schema.arguments)
    )


def _schema(op: str) -> Any:
    resolve_allowed(op)
    _, packet, overload = op.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)._schema  # noqa: SLF001 (torch has no public word for it)


def _check_argument(op: str, one: _Parameter, value: Argument) -> None:
    if one.kind == "str":
        is_fit = isinstance(value, str) and _is_text(op, one.name, value)
    elif one.name == "pin_memory":
        is_fit = value is None or value is False
    elif one.length and not isinstance(value, tuple | None):
        is_fit = _fits("int", value)
    elif one.kind == "Tensor" and not one.is_first:
        # A number stands for a tensor in ``x + 1``.
        is_fit = _fits("Tensor", value) or _fits("number", value)
    elif (op, one.name) == ("aten.view.dtype", "dtype"):
        is_fit = value == _BITS
    elif op == "aten.slice.Tensor" and value == _TO_THE_END:
        is_fit = one.name in ("start", "end")
    else:
        is_fit = _fits(one.kind, value)
    if not is_fit:
        raise UnsafeArtifact(f"{op} takes {_said(one.kind)} for {one.name!r}, not {_shown(value)}")
    for number in value if isinstance(value, tuple) else (value,):
        if _is_integer(number) and not _is_in_range(one.name, number):
            raise UnsafeArtifact(f"{op} takes no {number} for {one.name!r}")


def _is_in_range(name: str, number: int) -> bool:
    if name in _POSITIVE:
        return number >= 1
    return name not in _DIMENSIONS or abs(number) <= _MAX_DIMENSIONS


def _fits(kind: str, value: Argument) -> bool:
    """Whether a value is of a type, in the words of the schema."""
    if kind.startswith("Optional["):
        return value is None or _fits(kind[len("Optional[") : -1], value)
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return isinstance(value, tuple) and len(value) <= MAX_REFERENCES and all(_fits(inner, item) for item in value)
    if kind in _KINDS:
        return _is_token(_KINDS[kind], value)
    match kind:
        case "Tensor":
            return isinstance(value, Ref)
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, Ref) or (_is_integer(value) and abs(value) <= MAX_SIZE)
        case "float":
            return isinstance(value, Ref | float) or _is_number(value)
        case "number":
            return isinstance(value, Ref | float | bool) or _is_number(value)
        case _:
            return False


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) and -_TO_THE_END <= value <= _TO_THE_END


def _is_token(kind: str, value: Argument) -> bool:
    if not isinstance(value, Token) or value.kind != kind:
        return False
    return kind == "device" or value.value in TOKENS[kind]


def _is_text(op: str, name: str, value: str) -> bool:
    if (op, name) == ("aten.einsum.default", "equation"):
        return _EQUATION.fullmatch(value) is not None
    return value in _TEXTS.get((op, name), ())


def _check_python(node: GraphNode) -> None:
    """Arithmetic on sizes, and places in lists."""
    left, right = (*node.args, None, None)[:2]
    is_item = node.op == "operator.getitem"
    is_fit = isinstance(left, Ref) and _is_integer(right) if is_item else _fits("int", left) and _fits("int", right)
    if len(node.args) != 2 or node.kwargs or not is_fit:
        raise UnsafeArtifact(f"{node.op} takes {'a list and a place in it' if is_item else 'two sizes'}")


def _said(kind: str) -> str:
    """A type for a sentence."""
    plain = kind.replace("Optional[", "").replace("]", "").replace("List[", "a list of ")
    named = {"ScalarType": "a dtype", "Layout": "a layout", "MemoryFormat": "a memory format", "Device": "a device"}
    return named.get(plain, plain if plain.startswith("a ") else f"a {plain}")


def _shown(value: Argument) -> str:
    match value:
        case Ref():
            return f"the value {value.name[:40]!r}"
        case Token():
            return f"{value.kind} {value.value[:40]!r}"
        case tuple():
            return "this list" if value else "an empty list"
        case _:
            return repr(value)[:40]
