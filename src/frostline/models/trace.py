"""Trace a network with torch.export into a graph of plain values. The only module that knows torch.export."""

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import Dim as ExportDim
from torch.export.graph_signature import InputKind
from torch.utils._pytree import TreeSpec

from frostline.core import Dim, Graph, Node, Ref, Token
from frostline.core.graph import Argument
from frostline.engines.apart import tracing
from frostline.errors import NotTraceable

__all__ = ("Trace", "device_of", "trace")

# Any batch does, since its size is traced as a symbol; two or more keeps torch from fixing it as one.
_EXAMPLE_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """A network as a graph.

    Attributes:
        graph: the whole network; leaves are named by the dotted paths of parameters and buffers, and by
            ``constant:...`` for tensors that the code of the network made.
        constants: the tensors behind the ``constant:`` names.
        structure: how the graph's outputs form what the network's ``forward`` returns.
        training: for each module path whether it was in train mode.
    """

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    structure: TreeSpec
    training: Mapping[str, bool]


def trace(model: nn.Module, input_shape: Sequence[int], *, training: Mapping[str, bool]) -> Trace:
    """Trace ``model`` on a batch of ``float32[batch, *input_shape]``, the batch size left open.

    Args:
        model: the user's network; left as it was found.
        input_shape: per-sample shape of its one input.
        training: for each module path whether it is in train mode while traced.

    Raises:
        NotTraceable: torch.export does not follow it, or it holds what a graph cannot say.
    """
    example = torch.zeros((_EXAMPLE_BATCH, *input_shape), device=device_of(model))
    try:
        with tracing(), _modes(model, training), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, (example,), strict=False, dynamic_shapes=({0: ExportDim("batch")},))
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NotTraceable(f"torch.export cannot trace {type(model).__name__}: {why}") from error
    return _Reader(program).read(training)


@contextmanager
def _modes(model: nn.Module, training: Mapping[str, bool]) -> Iterator[None]:
    """Set the flags and put them back, without touching anything else that ``train()`` overrides may do."""
    before = {module: module.training for module in model.modules()}
    try:
        for path, module in model.named_modules():
            module.training = training[path]
        yield
    finally:
        for module, flag in before.items():
            module.training = flag


def device_of(model: nn.Module) -> torch.device:
    """Where the network's parameters are."""
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


class _Reader:
    """Turns an exported program into a ``Trace``."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self._program = program
        self._leaves = dict(self._leaf_names())

    def read(self, training: Mapping[str, bool]) -> Trace:
        nodes = list(self._program.graph.nodes)
        inputs = tuple(one.name for one in nodes if one.op == "placeholder" and one.name not in self._leaves)
        strange = [one for one in nodes if one.op not in ("placeholder", "call_function", "output")]
        if strange or len(inputs) != 1:
            raise NotTraceable("the network holds control flow or more than one input, which Frostline cannot carry")
        graph = Graph(
            inputs=inputs,
            leaves=tuple(self._leaves.items()),
            nodes=tuple(self._node(one) for one in nodes if one.op == "call_function"),
            outputs=tuple(_argument(one) for one in nodes[-1].args[0]),
        )
        constants = {
            f"constant:{name}": value
            for name, value in self._program.constants.items()
            if isinstance(value, torch.Tensor)
        }
        structure = self._program.call_spec.out_spec
        return Trace(graph=graph, constants=constants, structure=structure, training=dict(training))

    def _leaf_names(self) -> Iterator[tuple[str, str]]:
        for spec in self._program.graph_signature.input_specs:
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                yield spec.arg.name, str(spec.target)
            elif spec.kind == InputKind.CONSTANT_TENSOR:
                yield spec.arg.name, f"constant:{spec.target}"

    def _node(self, node: torch.fx.Node) -> Node:
        value = node.meta.get("val")
        tensor = value if isinstance(value, torch.Tensor) else None
        return Node(
            name=node.name,
            op=_op_name(node),
            args=tuple(_argument(one) for one in node.args),
            kwargs=tuple((name, _argument(one)) for name, one in sorted(node.kwargs.items())),
            shape=None if tensor is None else _shape(tensor),
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            size=_dim(value) if isinstance(value, torch.SymInt) else None,
            module=_module_path(node),
        )


def _op_name(node: torch.fx.Node) -> str:
    target = node.target
    if type(target).__name__ == "OpOverload":
        return str(target)
    module = getattr(target, "__module__", "")
    if module in ("_operator", "operator"):
        return f"operator.{target.__name__}"  # type: ignore[union-attr]
    raise NotTraceable(f"the network uses {target}, which Frostline cannot carry")


def _argument(value: Any) -> Argument:
    match value:
        case torch.fx.Node():
            return Ref(value.name)
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return tuple(_argument(one) for one in value)
        case torch.dtype():
            return Token("dtype", str(value).removeprefix("torch."))
        case torch.device():
            return Token("device", "")
        case torch.layout():
            return Token("layout", str(value).removeprefix("torch."))
        case torch.memory_format():
            return Token("memory_format", str(value).removeprefix("torch."))
        case _:
            raise NotTraceable(f"the network passes a {type(value).__name__}, which Frostline cannot carry")


def _shape(value: torch.Tensor) -> tuple[Dim, ...] | None:
    # What crosses a cut arrives contiguous. A slice that becomes dense is read alike, but an operator that is
    # given a transposed tensor in another order may choose another kernel and round otherwise.
    if not _in_order(value):
        return None
    dims = [_dim(size) for size in value.shape]
    return None if None in dims else tuple(dim for dim in dims if dim is not None)


def _in_order(value: torch.Tensor) -> bool:
    """Whether the dimensions lie in memory in their own order, dense or not."""
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
    if not all(isinstance(stride, int) for stride in strides):
        return value.is_contiguous()
    return all(outer >= inner for outer, inner in itertools.pairwise(strides))


def _dim(size: int | torch.SymInt) -> Dim | None:
    """The size as ``fixed + per_sample * batch``, or None where it is something else."""
    if isinstance(size, int):
        return Dim(size)
    expression = sympy.sympify(size.node.expr)
    symbols = list(expression.free_symbols)
    if len(symbols) != 1 or not expression.is_polynomial(*symbols) or sympy.degree(expression, symbols[0]) != 1:
        return None
    per_sample, fixed = sympy.Poly(expression, symbols[0]).all_coeffs()
    if not (per_sample.is_Integer and fixed.is_Integer):
        return None
    return Dim(int(fixed), int(per_sample))


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""
