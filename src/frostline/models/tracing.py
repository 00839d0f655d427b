"""Traces a network into a graph of plain values, and compares what networks compute to the bit."""

import io
import random as random_of_python
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_structure, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from frostline.core import Dim, Graph, GraphNode, Ref, TensorSpec, Token
from frostline.core.errors import ModelError, NotTraceable
from frostline.core.graph import Argument
from frostline.engines.graph_runner import is_known
from frostline.engines.machine import compute_slot, trace_slot
from frostline.models.graph import replace_values, substitute
from frostline.models.modules import modes
from frostline.models.outside import kept_buffers
from frostline.models.recording import BY_SIZE, DRAWS, ROWS, Recording, record
from frostline.preprocess.steps import InputSlot, unpack_inputs

__all__ = (
    "GIVEN_BY",
    "UNFIT",
    "Given",
    "Trace",
    "are_close",
    "autograd_leaves",
    "cast_inputs",
    "cast_specs",
    "device_of",
    "has_several_parts",
    "is_origin_known",
    "kept_draws",
    "leaf_getters",
    "modules_of",
    "observe_run",
    "output_leaves",
    "random_batch",
    "run_whole",
    "takes_parts",
    "takes_rows",
    "trace",
)


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
    """A network's graph, traced on what ``cast_inputs`` gives, as one that takes the inputs as they are prepared."""
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
    alive: tuple[Argument, ...] = ()

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


def trace(
    model: nn.Module, inputs: Sequence[TensorSpec], *, training: Mapping[str, bool], may_end_early: bool = False
) -> Trace:
    """Trace ``model`` on two batches of random numbers, the batch size left open.

    Args:
        model: the user's network; left as it was found.
        inputs: specifications of the inputs of ``forward``, in order.
        training: the mode by module path: whether it is in train mode while traced.
        may_end_early: give the trace up to where the network cannot be followed. Its outputs are what is needed there,
            as far as that can be told.

    Raises:
        NotTraceable: The network decides by values or by the number of rows, draws random numbers that are not
            PyTorch's, or does something that a graph cannot express.
    """
    generator, recordings = torch.Generator().manual_seed(_SEED), list[Recording]()
    before = behind = _states_of_draws()[1:]
    try:
        with kept_draws():  # of both, since the second is to draw other numbers
            for rows in ROWS:
                batch = cast_inputs(model, random_batch(model, inputs, rows, generator))
                with trace_slot(), modes(model, training), _quiet():
                    recordings.append(record(model, batch, *recordings, may_end_early=may_end_early))
            behind = _states_of_draws()[1:]
        first, second = recordings
        nodes, outputs, alive = first.common_start(second) if may_end_early else (*first.nodes(second), ())
    except UNFIT as error:
        # What was drawn for each of two batches is what may have told them apart, and not their sizes.
        is_by_draws = str(error) == BY_SIZE and len(recordings) == len(ROWS) and behind != before
        said = DRAWS if is_by_draws else str(error)
        reason = said.strip().partition("\n")[0].partition(". ")[0].rstrip(".") or type(error).__name__
        if not isinstance(error, ModelError):  # as where code does otherwise while it is traced
            reason = f"its code fails on rows that are made up, while what it calls is recorded, with: {reason}"
        raise NotTraceable(f"{_CANNOT} {type(model).__name__}: {reason}") from error
    graph = Graph(inputs=first.inputs, leaves=tuple(first.leaves.items()), nodes=nodes, outputs=outputs)
    for node in nodes:
        if not is_known(node.op):
            raise NotTraceable(f"the network uses {node.op}, which Frostline cannot carry")
    return Trace(
        graph=_with_casts(model, graph, inputs),
        constants=first.constants,
        structure=tree_structure(outputs) if first.structure is None else first.structure,
        training=dict(training),
        alive=alive,
    )


_CANNOT = "Frostline cannot trace"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what a network warns of on rows that nobody has chosen for it."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


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


def takes_parts(model: M, places: Sequence[InputSlot]) -> M:
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
    more = {_SEVERAL: tuple(places), "__reduce_ex__": _reduced(takes_parts, places)}
    return _with_another_face(model, said, forward, more)


def has_several_parts(model: nn.Module) -> bool:
    """Whether it is the face that ``takes_parts`` makes."""
    return bool(_places(model))


def _places(model: nn.Module) -> tuple[InputSlot, ...]:
    return getattr(type(model), _SEVERAL, ())


def random_batch(
    model: nn.Module, inputs: Sequence[TensorSpec], rows: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """A batch of normal numbers, and of zeros and ones where the dtype is no floating one, on the network's device.

    Args:
        model: network that takes it. Of one that ``takes_parts``, each part is made by its own dtype.
        inputs: specifications of the inputs.
        rows: number of samples.
        generator: generator of the numbers.
    """
    device, places = device_of(model), _places(model)
    if not places:
        return [_random(spec, rows, generator).to(device) for spec in inputs]
    packed = np.zeros((rows, *inputs[0].shape), np.int64)
    for place in places:
        for row, part in zip(packed, _random(place.spec, rows, generator), strict=True):
            place.within(row)[...] = part.numpy()
    return [torch.from_numpy(packed).to(device)]


def _random(spec: TensorSpec, rows: int, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    values = torch.randn((rows, *spec.shape), generator=generator)
    return (values if dtype.is_floating_point else values > 0).to(dtype)


def _reduced(face: Callable[..., Any], given: Sequence[Any]) -> Callable[..., Any]:
    """How a face is copied and pickled, whose class is made while the process runs: as its network's class."""

    def reduced(self: nn.Module, _: int) -> tuple[Any, ...]:
        return _faced, (face, type(self).__mro__[1], tuple(given)), vars(self)

    return reduced


def _faced(face: Callable[..., Any], kind: type[nn.Module], given: Sequence[Any]) -> Any:
    return face(kind.__new__(kind), given)


def _with_another_face(model: M, said: str, forward: Callable[..., Any], more: Mapping[str, Any] | None = None) -> M:
    # What it takes is part of the class's name, since what is kept of a network is found by the names of classes too.
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

_SEED = 0


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


def leaf_getters(model: nn.Module, traced: Trace, graph: Graph) -> tuple[Callable[[], torch.Tensor], ...]:
    """Functions that give, for each leaf of a graph, the network's tensor or the trace's own constant."""
    constants = {path: tensor.to(device_of(model)) for path, tensor in traced.constants.items()}

    def leaf(path: str) -> Callable[[], torch.Tensor]:
        owner, _, name = path.rpartition(".")
        return partial(getattr, model.get_submodule(owner), name)

    return tuple(partial(constants.__getitem__, path) if path in constants else leaf(path) for _, path in graph.leaves)


def modules_of(graph: Graph, model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose mode may matter to the graph: those that made its nodes, and all around them."""
    paths = {""}
    for node in graph.nodes:
        names = node.module.split(".") if node.module else []
        paths.update(".".join(names[: depth + 1]) for depth in range(len(names)))
    return {path: module for path, module in model.named_modules() if path in paths}


Given = tuple[tuple[TensorSpec, ...], list[torch.Tensor]]
"""A frozen part, known by its inputs and by what it makes of a few rows, which are the same for all networks."""

GIVEN_BY = WeakTensorKeyDictionary()
"""The frozen part that gave each of the features that loops hold."""


_OF_ANOTHER = (
    "these features were computed by other frozen layers than those before this head, as where a batch was kept across "
    "job.refreeze(), or the head was copied before it: take batches from the job's loader, and copy job.head, anew"
)


def is_origin_known(features: Sequence[torch.Tensor], part: Given) -> bool:
    """Whether it is known which frozen part gave some of these features; of a copy it is not.

    Raises:
        ModelError: A frozen part gave them that does something else with the same inputs.
    """
    inputs, made = part
    found = [GIVEN_BY[tensor] for tensor in features if tensor in GIVEN_BY]
    if any(theirs is not made and specs == inputs and not are_close(theirs, made) for specs, theirs in found):
        raise ModelError(_OF_ANOTHER)
    return bool(found)
