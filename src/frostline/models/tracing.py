"""Traces a network into a graph of plain values with torch.export, and compares what both compute to the bit.

The only module that knows torch.export.

Writes the regions of a traced network in which gradients or autocast are off into the graph around them.

Casts what a network takes to its own precision: samples are prepared in float32, whatever its weights are.

Lets a network that takes several inputs by name take one array in their place, which holds them all.

Runs two variants of one network on the same batch, and compares what they give to the bit.
"""

import inspect
import io
import logging
import operator
import random as random_of_python
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter
from random import getstate, setstate
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import fx, nn
from torch.export import Dim as ExportDim
from torch.export.graph_signature import InputKind
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_leaves, tree_structure, tree_unflatten

from frostline.core import Dim, Graph, GraphNode, Ref, TensorSpec, Token
from frostline.core.errors import ModelError, NotTraceable
from frostline.core.graph import Argument
from frostline.engines.graph_runner import Runner, is_known
from frostline.engines.machine import compute_slot, trace_slot
from frostline.engines.measure import storage_key
from frostline.models.graph import replace_values, substitute
from frostline.models.modules import kept_buffers, modes, random_batch, zeros
from frostline.preprocess.steps import InputPlace, unpack_inputs

__all__ = (
    "UNFIT",
    "Trace",
    "agrees",
    "are_close",
    "are_same",
    "autograd_leaves",
    "cast_inputs",
    "cast_specs",
    "device_of",
    "draws_elsewhere",
    "export",
    "has_several_parts",
    "kept_draws",
    "observe_run",
    "output_leaves",
    "run_whole",
    "takes_parts",
    "takes_rows",
)


_GRADIENTS = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"
# The arguments before the region's own: whether gradients are on; and device, dtype, whether autocast is on, caching.
_SETTINGS = {_GRADIENTS: 1, _AUTOCAST: 4}
_IS_ON = {_GRADIENTS: 0, _AUTOCAST: 2}


def _flat_graph(module: fx.GraphModule) -> fx.Graph:
    """The graph of an exported network, with the operations of its regions in their places.

    torch.export puts what runs under ``torch.no_grad()`` into a module of its own, as it does with the rotary
    embeddings of transformers. Written out, the results are detached, so that no gradient flows through them either.

    Args:
        module: an exported network's; it stays as it is.

    Raises:
        NotTraceable: A region turns gradients or autocast on, or writes to a tensor of the graph around it.
    """
    graph, values = fx.Graph(), dict[fx.Node, Any]()
    _copy(module, graph, values)
    output = next(node for node in module.graph.nodes if node.op == "output")
    graph.output(_valued(output.args[0], values))
    return graph


def _copy(module: fx.GraphModule, graph: fx.Graph, values: dict[fx.Node, Any]) -> None:
    """Copy the operations of a module, in which ``values`` holds what is known already."""
    for node in module.graph.nodes:
        if _kind(node) in _SETTINGS:
            values[node] = _region(node, module, graph, values)
        elif node.target is operator.getitem and _kind(node.args[0]) in _SETTINGS:
            values[node] = values[node.args[0]][node.args[1]]
        elif node.op != "output" and node not in values and not _is_a_region(node):
            values[node] = graph.node_copy(node, values.__getitem__)


def _region(node: fx.Node, module: fx.GraphModule, graph: fx.Graph, values: dict[fx.Node, Any]) -> Sequence[Any]:
    """Copy the operations of a region; its results."""
    kind = _kind(node)
    if node.args[_IS_ON[kind]]:
        raise NotTraceable(f"the network turns {'gradients' if kind == _GRADIENTS else 'autocast'} on in its own code")
    inner, *given = node.args[_SETTINGS[kind] :]
    region = module.get_submodule(str(inner.target))  # type: ignore[union-attr]
    assert isinstance(region, fx.GraphModule)
    _refuse_writes(region)
    inputs = [placeholder for placeholder in region.graph.nodes if placeholder.op == "placeholder"]
    values.update(zip(inputs, _valued(given, values), strict=True))
    _copy(region, graph, values)
    returned = next(output.args[0] for output in region.graph.nodes if output.op == "output")
    return [
        # What is only handed through stays what it was.
        result if kind == _AUTOCAST or own in inputs else _detached(result, graph)
        for own, result in zip(returned, _valued(returned, values), strict=True)
    ]


def _refuse_writes(region: fx.GraphModule) -> None:
    """Where gradients are off, what is written to a tensor from outside would have one when it is written out."""
    outside = {_memory(node) for node in region.graph.nodes if node.op == "placeholder"}
    for node in region.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and _memory(node.args[0]) in outside:
            raise NotTraceable("the network writes to a tensor where it turns gradients off")


def _detached(value: Any, graph: fx.Graph) -> Any:
    if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return value
    detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta = dict(value.meta)
    return detached


def _kind(node: Any) -> str:
    return getattr(node.target, "__name__", "") if isinstance(node, fx.Node) and node.op == "call_function" else ""


def _is_a_region(node: fx.Node) -> bool:
    return node.op == "get_attr" and all(_kind(user) in _SETTINGS for user in node.users)


def _memory(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return storage_key(value) if isinstance(value, torch.Tensor) else node


def _valued(argument: Any, values: dict[fx.Node, Any]) -> Any:
    return fx.map_arg(argument, values.__getitem__)


_PREPARED = "float32"
_CAST = "__cast"


def cast_inputs(model: nn.Module, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as the network takes them: those of float32 in the precision of its weights.

    Args:
        model: network that will run on them.
        batch: the inputs, in order.
    """
    own = _own(model)
    return [tensor.to(own) if tensor.dtype == torch.float32 else tensor for tensor in batch]


def cast_specs(model: nn.Module, inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The specifications of the same tensors."""
    own = str(_own(model)).removeprefix("torch.")
    return tuple(replace(spec, dtype=own) if spec.dtype == _PREPARED else spec for spec in inputs)


def _with_casts(model: nn.Module, graph: Graph, inputs: Sequence[TensorSpec]) -> Graph:
    """A network's graph, traced on what ``cast_inputs`` gives, as one that takes the inputs as they are prepared.

    Args:
        model: network that was traced.
        graph: graph of the network.
        inputs: specifications of the inputs as they are prepared.
    """
    changed = zip(graph.inputs, inputs, cast_specs(model, inputs), strict=True)
    casts = [_cast(name, taken) for name, spec, taken in changed if spec != taken]
    values = {node.name.removesuffix(_CAST): Ref(node.name) for node in casts}
    nodes = (*casts, *(substitute(node, values) for node in graph.nodes))
    return replace(graph, nodes=nodes, outputs=tuple(replace_values(output, values) for output in graph.outputs))


def _own(model: nn.Module) -> torch.dtype:
    """The dtype of the network's first weights that are floats."""
    floats = (parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point)
    return next(floats, torch.float32)


def _cast(name: str, spec: TensorSpec) -> GraphNode:
    shape = (Dim(0, 1), *(Dim(size) for size in spec.shape))
    return GraphNode(
        name=f"{name}{_CAST}",
        op="aten._to_copy.default",
        args=(Ref(name),),
        kwargs=(("dtype", Token("dtype", spec.dtype)),),
        shape=shape,
        order=tuple(range(len(shape))),
        dtype=spec.dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """A network as a graph.

    Attributes:
        graph: the whole network; leaves are named by the dotted paths of parameters and buffers, and by
            ``constant:...`` for tensors that the code of the network made.
        constants: the tensors behind the ``constant:`` names.
        structure: the way that the graph's outputs form what the network's ``forward`` returns.
        training: the mode by module path: whether it was in train mode.
    """

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    structure: TreeSpec
    training: Mapping[str, bool]

    def __reduce__(self) -> tuple[Any, ...]:
        """As data with an example in the place of the structure, which torch makes anew only with a warning."""
        example = tree_unflatten(range(self.structure.num_leaves), self.structure)
        return _restored_trace, (self.graph, dict(self.constants), example, dict(self.training))


def _restored_trace(graph: Graph, constants: dict[str, torch.Tensor], example: Any, training: dict[str, bool]) -> Trace:
    return Trace(graph=graph, constants=constants, structure=tree_structure(example), training=training)


def device_of(model: nn.Module) -> torch.device:
    """Where the network's parameters are."""
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def _tensor_of(model: nn.Module, traced: Trace, path: str) -> torch.Tensor:
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
        training: the mode by module path: whether it is in train mode while traced.

    Raises:
        NotTraceable: torch.export does not follow it, or it holds what a graph cannot say.
    """
    example = tuple(cast_inputs(model, zeros(inputs, _EXAMPLE_BATCH, device_of(model))))
    try:
        with trace_slot(), modes(model, training, runs=False), _quiet():
            program = torch.export.export(
                model, example, strict=False, dynamic_shapes=_open_batches(model, len(example))
            )
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise NotTraceable(f"{_CANNOT} {type(model).__name__}: {_why(error)}") from error
    traced = _Reader(program, len(example)).read(training)
    for node in traced.graph.nodes:
        if not is_known(node.op):  # torch.export has put in what it checks of a size that only a run can tell
            raise NotTraceable(f"{_CANNOT} {type(model).__name__}: {_BY_VALUES}")
    return replace(traced, graph=_with_casts(model, traced.graph, inputs))


_CANNOT, _BY_VALUES = "torch.export cannot trace", "its code decides by the values of a tensor"


def _open_batches(model: nn.Module, inputs: int) -> tuple[Any, ...]:
    """A batch size left open for each parameter of ``forward``; those that ``*args`` takes are one tuple."""
    batch = {0: ExportDim("batch")}
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    named = kinds.index(Parameter.VAR_POSITIONAL) if Parameter.VAR_POSITIONAL in kinds else inputs
    return (batch,) * inputs if named >= inputs else (*((batch,) * named), (batch,) * (inputs - named))


def _why(error: BaseException) -> str:
    """The reason in one line, in the words of whoever wrote the network."""
    # With it comes sympy, a third of a second: a network whose trace was kept has no use of either.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if isinstance(error, GuardOnDataDependentSymNode):
        return _BY_VALUES
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
        nodes = list(_flat_graph(self._program.graph_module).nodes)
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
            # Of their own: what is changed of the network's afterwards has to be noticed.
            f"constant:{name}": value.detach().clone()
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
        if any(tensor.layout != torch.strided for tensor in tensors):
            raise NotTraceable(f"the network computes with sparse tensors in {_module_path(node) or 'its own forward'}")
        if str(node.target) == "aten.lift_fresh_copy.default":
            # The trace only has the constant itself; a run copies it.
            self._owners.update((storage_key(tensor), node.name) for tensor in tensors)
        owners = [self._owners.setdefault(storage_key(tensor), node.name) for tensor in tensors]
        return next((owner for owner in owners if owner != node.name), "")


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
    if isinstance(size, int):
        return size
    if size.node.hint is None:
        raise NotTraceable(f"torch.export knows no size of a tensor: {_BY_VALUES}")
    return int(size.node.hint)


def _dim(size: int | torch.SymInt) -> Dim | None:
    """The size as ``fixed + per_sample * batch``, or None where it is something else."""
    if isinstance(size, int):
        return Dim(size)
    import sympy

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


_SEVERAL = "frostline_several_parts"

M = TypeVar("M", bound=nn.Module)


def takes_rows(model: M, names: Sequence[str]) -> M:
    """The same network, whose ``forward`` takes ``x[batch, inputs, ...]`` and returns one tensor.

    It calls the network's own with ``x[:, 0]``, ``x[:, 1]`` and so on, and returns ``logits`` where the network gives
    an output of transformers, else the first tensor of what it gives. Modules, parameters, modes and hooks are those of
    ``model`` itself, which stays as it is: whatever happens to one happens to both.

    Args:
        model: network that takes as many inputs.
        names: names of these inputs in its ``forward``.
    """
    kind = type(model)

    def forward(self: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        inputs = {name: rows[:, place] for place, name in enumerate(names)}
        return _first_tensor(kind.forward(self, **inputs))

    return _with_another_face(model, ", ".join(names), forward, {"__reduce_ex__": _reduced(takes_rows, names)})


def takes_parts(model: M, places: Sequence[InputPlace]) -> M:
    """The same network, whose ``forward`` takes samples of several parts, ``int64[batch, ...]``.

    It calls the network's own with the inputs by name, and returns what that gives where it is a tensor, or tensors in
    a plain tuple, list or dict; of an output of transformers what ``takes_rows`` returns.

    Args:
        model: network that takes these inputs; see ``takes_rows``.
        places: the place where each lies in a sample.
    """
    kind = type(model)

    def forward(self: nn.Module, rows: torch.Tensor) -> Any:
        output = kind.forward(self, **unpack_inputs(places, rows))
        return output if type(output) in (tuple, list, dict) else _first_tensor(output)

    said = ", ".join(f"{place.name} {place.spec.dtype}{list(place.spec.shape)}@{place.start}" for place in places)
    more = {_SEVERAL: True, "__reduce_ex__": _reduced(takes_parts, places)}
    return _with_another_face(model, said, forward, more)


def has_several_parts(model: nn.Module) -> bool:
    """Whether it is the face that ``takes_parts`` makes."""
    return bool(getattr(type(model), _SEVERAL, False))


def _reduced(face: Callable[..., Any], given: Sequence[Any]) -> Callable[..., Any]:
    """How a face is copied and pickled, whose class is made while the process runs: as its network's class."""

    def reduced(self: nn.Module, _: int) -> tuple[Any, ...]:
        return _faced, (face, type(self).__mro__[1], tuple(given)), vars(self)

    return reduced


def _faced(face: Callable[..., Any], kind: type[nn.Module], given: Sequence[Any]) -> Any:
    return face(kind.__new__(kind), given)


def _with_another_face(model: M, said: str, forward: Callable[..., Any], more: Mapping[str, Any] | None = None) -> M:
    # What it takes is part of the class's name, since kept traces are found by the code and the names of classes.
    kind, members = type(model), {"forward": forward, "__module__": __name__, **(more or {})}
    same = cast(M, object.__new__(type(f"{kind.__name__} of {said}", (kind,), members)))
    object.__setattr__(same, "__dict__", model.__dict__)
    return same


def _first_tensor(output: Any) -> torch.Tensor:
    given = [output]
    if isinstance(output, Mapping):
        given = [output["logits"]] if "logits" in output else list(output.values())
    elif isinstance(output, list | tuple):
        given = list(output)
    found = next((value for value in given if isinstance(value, torch.Tensor)), None)
    if found is None:
        raise ModelError(f"the network gives no tensor, but {type(output).__name__}")
    return found


UNFIT = (ArithmeticError, AssertionError, AttributeError, LookupError, ModelError, RuntimeError, TypeError, ValueError)
"""What a network may raise on an input that nobody has chosen for it."""

# Two rows tell a trace with an open batch from one that was made for a single sample, at the least cost.
_ROWS = 2
_SEED = 0


def agrees(model: nn.Module, traced: Trace, inputs: Sequence[TensorSpec]) -> bool:
    """Whether a trace gives what the network gives on a random batch, outputs and buffers to the bit.

    Both run in the modes of the trace, with the same random numbers. The network is left as it was.
    """
    device = device_of(model)
    batch = random_batch(inputs, _ROWS, torch.Generator().manual_seed(_SEED), device)
    try:
        with modes(model, traced.training):
            leaves = [_tensor_of(model, traced, path) for _, path in traced.graph.leaves]
            run = partial(Runner(traced.graph, device=device).run, [tensor.clone() for tensor in batch], leaves)
            return are_same(observe_run(model, run, _SEED, gradients=False), _run_whole(model, batch))
    except UNFIT:
        return False


def draws_elsewhere(model: nn.Module, inputs: Sequence[TensorSpec], training: Mapping[str, bool]) -> bool:
    """Whether the network draws random numbers that are not torch's, of which a trace would repeat one for ever.

    It is run twice on the same batch, with the same random numbers of torch, and left as it was; so are the states of
    NumPy's and Python's own random numbers.

    Args:
        model: the user's network.
        inputs: specifications of its inputs.
        training: the mode by module path: whether it is in train mode.
    """
    batch = random_batch(inputs, _ROWS, torch.Generator().manual_seed(_SEED), device_of(model))
    states = np.random.get_state(), getstate()
    try:
        with modes(model, training), torch.no_grad():
            first, second = (_drawn(model, batch) for _ in range(2))
    except UNFIT:
        return False
    finally:
        np.random.set_state(states[0])
        setstate(states[1])
    return not are_same(first, second)


def _drawn(model: nn.Module, batch: Sequence[torch.Tensor]) -> list[Any]:
    with torch.random.fork_rng(), kept_buffers(model):
        torch.manual_seed(_SEED)
        return [part for leaf in tree_leaves(run_whole(model, batch)) for part in _dense_parts(leaf)]


def _run_whole(model: nn.Module, batch: Sequence[torch.Tensor]) -> list[Any]:
    return observe_run(model, partial(run_whole, model, batch), _SEED, gradients=False)


def run_whole(model: nn.Module, batch: Sequence[torch.Tensor]) -> Any:
    """What the network returns for a batch, which stays as it is."""
    with compute_slot():
        return model(*cast_inputs(model, [tensor.clone() for tensor in batch]))


def observe_run(model: nn.Module, run: Callable[[], Any], seed: int, *, gradients: bool = True) -> list[Any]:
    """The leaves of what a run returns, its gradients, and the buffers that it leaves; they are put back.

    Args:
        model: model whose buffers a run may change.
        run: function that runs the network once, in some variant.
        seed: seed of the random numbers that it draws.
        gradients: compute those of the trained parameters too.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and gradients]
    with kept_buffers(model), _seeded(seed):
        outputs = list(output_leaves(run()))
        drawn = [_states_of_draws()] if gradients else []
        learning = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
        strays = [_Strays(model, learning)] if gradients else []
        sums = [output.square().sum() for output in learning]
        found = torch.autograd.grad(sums, trained, allow_unused=True) if sums and trained else ()
        outputs = [output.detach() if isinstance(output, torch.Tensor) else output for output in outputs]
        buffers = [buffer.detach().clone() for buffer in model.buffers()]
        values = [part for value in (*outputs, *found, *buffers) for part in _dense_parts(value)]
        return [*values, *drawn, *strays]


def _dense_parts(value: Any) -> list[Any]:
    """A value itself, or what a sparse tensor is made of, since torch compares no sparse ones."""
    if not isinstance(value, torch.Tensor) or value.layout == torch.strided:
        return [value]
    if value.layout == torch.sparse_coo:
        value = value.coalesce()
        return [value.shape, value.indices(), value.values()]
    is_by_row = value.layout in (torch.sparse_csr, torch.sparse_bsr)
    places = (value.crow_indices, value.col_indices) if is_by_row else (value.ccol_indices, value.row_indices)
    return [value.shape, *(place() for place in places), value.values()]


_DEEPEST = 4  # of objects in objects


def output_leaves(output: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors and other values that a network returned, also those that are attributes of an object."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) or depth == _DEEPEST or isinstance(leaf, type) or not _fields(leaf):
            yield leaf
        else:
            yield from output_leaves(_fields(leaf), depth + 1)


def _fields(leaf: Any) -> list[Any]:
    slots = (slot for kind in type(leaf).__mro__ for slot in getattr(kind, "__slots__", ()))
    return [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, slot) for slot in slots if hasattr(leaf, slot))]


def _states_of_draws() -> tuple[Any, ...]:
    """How far the random numbers of torch, NumPy and Python were drawn."""
    numpys = np.random.get_state(legacy=False)["state"]
    torchs = torch.get_rng_state().numpy().tobytes()
    return torchs, int(numpys["pos"]), numpys["key"].tobytes(), random_of_python.getstate()


class _Strays:
    """The tensors from which outputs are computed that gradients flow to, and that are no parameters of a network's.

    Those that a run itself makes are gone when it is over; two runs are compared behind that.
    """

    def __init__(self, model: nn.Module, outputs: Sequence[torch.Tensor]) -> None:
        own = {id(parameter) for parameter in model.parameters()}
        self._found = [weakref.ref(leaf) for leaf in autograd_leaves(outputs) if id(leaf) not in own]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Strays) and self._alive() == other._alive()

    __hash__ = None  # type: ignore[assignment]

    def _alive(self) -> set[int]:
        return {id(leaf) for found in self._found if (leaf := found()) is not None}


def autograd_leaves(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The tensors at the leaves of what autograd recorded, such as parameters."""
    waiting, seen, found = [tensor.grad_fn for tensor in tensors], set(), []
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting.extend(before for before, _ in node.next_functions)
    return found


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The random numbers of this seed, also those of NumPy and Python, by which transformers masks parts of sounds."""
    with kept_draws():
        torch.manual_seed(seed)
        np.random.seed(seed)
        random_of_python.seed(seed)
        yield


@contextmanager
def kept_draws() -> Iterator[None]:
    """Put the generators of torch, NumPy and Python back at the end, whatever was drawn of them."""
    numpys, pythons = np.random.get_state(), random_of_python.getstate()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        np.random.set_state(numpys)
        random_of_python.setstate(pythons)


def are_same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether two lists of observed values are equal, tensors to the bit."""
    return len(ours) == len(theirs) and all(_is_same(our, other) for our, other in zip(ours, theirs, strict=True))


_ERROR, _ERROR_OF_16_BITS = 1e-4, 3e-2  # by which sums of another order differ
_NOISE = 1e-2  # share of the largest tensor's size below which a tensor is that of rounding


def are_close(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether two lists of observed values are equal, tensors but for what the order of sums makes of them."""
    floats = [value for value in theirs if isinstance(value, torch.Tensor) and value.is_floating_point()]
    least = _NOISE * max((_size(value) for value in floats), default=0.0)
    pairs = list(zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) and all(_is_same(*pair) or _is_close(*pair, least) for pair in pairs)


def _is_close(value: Any, other: Any, least: float) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor) or not other.is_floating_point():
        return False
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    error = _ERROR if other.dtype in (torch.float32, torch.float64) else _ERROR_OF_16_BITS
    return _size(value.double() - other.double()) <= error * max(_size(other), least)


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt()) if tensor.numel() else 0.0


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and value.dtype == other.dtype and torch.equal(value, other)
    try:
        return type(value) is type(other) and bool(value == other)
    except (RuntimeError, ValueError):  # of arrays
        return False
