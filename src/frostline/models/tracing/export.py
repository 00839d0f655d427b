"""Exports a network with torch.export into a graph of plain values. The only module that knows torch.export."""

import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import Dim as ExportDim
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec

from frostline.core import Dim, Graph, GraphNode, Ref, TensorSpec, Token
from frostline.core.graph import Argument
from frostline.engines.machine.isolation import tracing
from frostline.errors import NotTraceable
from frostline.models.modes import modes
from frostline.models.tracing.border import fed, with_casts
from frostline.models.tracing.recording import zeros
from frostline.models.tracing.regions import flat_graph

__all__ = ("Trace", "device_of", "export", "tensor_of")


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


def device_of(model: nn.Module) -> torch.device:
    """Where the network's parameters are."""
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def tensor_of(model: nn.Module, traced: Trace, path: str) -> torch.Tensor:
    """The parameter, buffer or constant that a leaf of the trace names, where the network is now."""
    if path in traced.constants:
        return traced.constants[path].to(device_of(model))
    owner, _, name = path.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(owner), name)
    return tensor


# Any batch does, since its size is traced as a symbol; two or more keeps torch from fixing it as one.
_EXAMPLE_BATCH = 8
# What torch.export asserts of a value's type before a cast: it gives nothing, and no file of a graph may hold it.
_ASSERTION = "aten._assert_tensor_metadata.default"


def export(model: nn.Module, inputs: Sequence[TensorSpec], *, training: Mapping[str, bool]) -> Trace:
    """Trace ``model`` on one batch of its inputs, the batch size left open.

    Args:
        model: the user's network; left as it was found.
        inputs: specifications of the inputs of ``forward``, in order.
        training: for each module path whether it is in train mode while traced.

    Raises:
        NotTraceable: torch.export does not follow it, or it holds what a graph cannot say.
    """
    example = tuple(fed(model, zeros(inputs, _EXAMPLE_BATCH, device_of(model))))
    try:
        with tracing(), modes(model, training), _quiet():
            program = torch.export.export(
                model, example, strict=False, dynamic_shapes=_open_batches(model, len(example))
            )
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise NotTraceable(f"torch.export cannot trace {type(model).__name__}: {_why(error)}") from error
    traced = _Reader(program, len(example)).read(training)
    return replace(traced, graph=with_casts(model, traced.graph, inputs))


def _open_batches(model: nn.Module, inputs: int) -> tuple[Any, ...]:
    """A batch size left open for each parameter of ``forward``; those that ``*args`` takes are one tuple."""
    batch = {0: ExportDim("batch")}
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    named = kinds.index(Parameter.VAR_POSITIONAL) if Parameter.VAR_POSITIONAL in kinds else inputs
    return (batch,) * inputs if named >= inputs else (*((batch,) * named), (batch,) * (inputs - named))


def _why(error: BaseException) -> str:
    """The reason in one line, in the words of whoever wrote the network."""
    if isinstance(error, GuardOnDataDependentSymNode):
        return "its code decides by the values of a tensor"
    first = str(error).strip().partition("\n")[0].partition(". ")[0]
    if first.startswith("Constraints violated (batch)"):
        return "its code decides by the size of the batch"
    return first.rstrip(".") or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what torch.export warns of, logs and prints: where it fails, the error says what matters."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.fx.experimental.symbolic_shapes")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


class _Reader:
    """Turns an exported program into a ``Trace``."""

    def __init__(self, program: torch.export.ExportedProgram, inputs: int) -> None:
        self._program = program
        self._inputs = inputs
        self._leaves = dict(self._leaf_names())
        self._owners: dict[StorageWeakRef, str] = {}

    def read(self, training: Mapping[str, bool]) -> Trace:
        nodes = list(flat_graph(self._program.graph_module).nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        inputs = tuple(placeholder.name for placeholder in placeholders if placeholder.name not in self._leaves)
        strange = [node for node in nodes if node.op not in ("placeholder", "call_function", "output")]
        if strange or len(inputs) != self._inputs:
            raise NotTraceable("the network holds control flow or inputs that are no tensors, which cannot be carried")
        for placeholder in placeholders:
            self._storage(placeholder)
        graph = Graph(
            inputs=inputs,
            leaves=tuple(self._leaves.items()),
            nodes=tuple(
                self._node(node) for node in nodes if node.op == "call_function" and str(node.target) != _ASSERTION
            ),
            outputs=tuple(_argument(item) for item in nodes[-1].args[0]),
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

    def _node(self, node: torch.fx.Node) -> GraphNode:
        value = node.meta.get("val")
        tensor = value if isinstance(value, torch.Tensor) else None
        return GraphNode(
            name=node.name,
            op=_op_name(node),
            args=tuple(_argument(arg) for arg in node.args),
            kwargs=tuple((name, _argument(item)) for name, item in sorted(node.kwargs.items())),
            shape=None if tensor is None else _shape(tensor),
            order=None if tensor is None else _order(tensor),
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            storage=self._storage(node),
            size=_dim(value) if isinstance(value, torch.SymInt) else None,
            module=_module_path(node),
        )

    def _storage(self, node: torch.fx.Node) -> str:
        """The value that first had the memory of this one; empty where it has memory of its own."""
        value = node.meta.get("val")
        parts = value if isinstance(value, list | tuple) else [value]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        if str(node.target) == "aten.lift_fresh_copy.default":
            # The trace only has the constant itself; a run copies it.
            self._owners.update((_key(tensor), node.name) for tensor in tensors)
        owners = [self._owners.setdefault(_key(tensor), node.name) for tensor in tensors]
        return next((owner for owner in owners if owner != node.name), "")


def _key(tensor: torch.Tensor) -> StorageWeakRef:
    """Equal for tensors that share their memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


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
            return tuple(_argument(item) for item in value)
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
    dims = [_dim(size) for size in value.shape]
    return None if None in dims else tuple(dim for dim in dims if dim is not None)


def _order(value: torch.Tensor) -> tuple[int, ...] | None:
    strides = [_known(stride) for stride in value.stride()]
    if not all(isinstance(stride, int) for stride in value.stride()) and value.is_contiguous():
        return tuple(range(value.dim()))
    if any(stride == 0 and size != 1 for size, stride in zip(value.shape, strides, strict=True)):
        return None
    return tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))


def _known(size: int | torch.SymInt) -> int:
    """The size where the batch is that of the trace."""
    return size if isinstance(size, int) else int(size.node.hint)


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
    # torch has a name of its own for sizes, which no module makes.
    return str(paths[-1]) if paths and not paths[-1].startswith("_empty_nn_module_stack") else ""
