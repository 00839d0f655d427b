"""The trainable rest as data, which another process trains: two graphs of it, one a mode, that are verified first.

The user's own code runs wherever the head is trained beside it (``models.head``); only what travels is traced.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from frostline.core import Graph, TensorSpec
from frostline.core.declared import refuse_unknown_fields
from frostline.core.errors import ModelError, NotTraceable, UnsafeArtifact
from frostline.engines.graph_runner import Runner, leaf_values, refused_call, resolve_allowed
from frostline.models.artifact import (
    GRAPH_FIELDS,
    flatten_tensors,
    graph_from_json,
    graph_to_json,
    integer,
    restore_tensors,
    text,
)
from frostline.models.cuts import contiguous_copies
from frostline.models.frozen import FrozenPart, equals_whole, features_of, order_graph
from frostline.models.graph import after, before, guard_inputs, map_cut
from frostline.models.head import Head, SkippingHead
from frostline.models.tracing import are_close, device_of, kept_draws, leaf_getters, modules_of, random_batch, trace

__all__ = ("Mode", "PortableHead", "PortedHead", "head_from_json", "head_to_json", "make_portable")

_ROWS = 3  # of a check: a BatchNorm gives two rows the same whatever they are
_DOES_MORE = "it does more than its trace says, such as a backward or hooks of its own or what it reads of Python"
_OTHERWISE = "the frozen part of the network computes something else when its head changes mode"
_ELSEWHERE = "choose another policy, with which the head is trained here"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mode:
    """What a head computes in train mode, or in eval mode.

    Attributes:
        graph: the graph from what crosses the frost line to the scores, its only output.
        places: the places among the tensors that cross it that it takes, in the order of ``graph.inputs``.
    """

    graph: Graph
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PortableHead:
    """A head without a line of its network's code.

    Attributes:
        training: outputs in train mode.
        evaluation: outputs in eval mode.
        tensors: the parameters, buffers and constants; a tensor that the network has under several names is here once.
        trained: names of those that are trained.
    """

    training: Mode
    evaluation: Mode
    tensors: Mapping[str, torch.Tensor]
    trained: tuple[str, ...]

    @property
    def returning(self) -> tuple[str, ...]:
        """Names of the tensors that training may change: what is trained, and buffers."""
        return tuple(name for name in self.tensors if _changes(name))


def make_portable(head: nn.Module) -> PortableHead:
    """A head as data, which shares the network's tensors.

    Raises:
        ModelError: The head cannot be sent to another process; the sentence says why, and what to do instead.
    """
    try:
        modes = _traced_graphs(head) if isinstance(head, SkippingHead) else None
    except ModelError as error:
        raise ModelError(f"the trainable rest of this network cannot travel, {error}: {_ELSEWHERE}") from error
    if modes is None:
        kind = "its own code runs" if isinstance(head, Head) else "it is no head of a job"
        raise ModelError(
            f"the trainable rest of this network was not traced ({kind}), so it cannot travel: {_ELSEWHERE}"
        )
    strange = sorted({refused_call(node) for mode in modes for node in mode.graph.nodes} - {""})
    if strange:
        raise ModelError(f"the trainable rest uses {', '.join(strange)}, which a node does not run: {_ELSEWHERE}")
    names = _Names()
    training, evaluation = (names.renamed(mode) for mode in modes)
    trained = tuple(name for name, tensor in names.tensors.items() if tensor.requires_grad)
    return PortableHead(training=training, evaluation=evaluation, tensors=names.tensors, trained=trained)


def head_to_json(head: PortableHead) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A head as plain values, and its tensors as they are written."""
    tensors, orders = flatten_tensors(head.tensors)
    modes = {"training": head.training, "evaluation": head.evaluation}
    described = {
        name: {"graph": graph_to_json(mode.graph), "places": list(mode.places)} for name, mode in modes.items()
    }
    return {**described, "orders": orders, "trained": list(head.trained)}, tensors


def head_from_json(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> PortableHead:
    """The inverse of ``head_to_json``, from wherever the values came; may also raise any of ``graph_file.BROKEN``.

    Raises:
        UnsafeArtifact: The values name or declare something that is not allowed.
    """
    refuse_unknown_fields(value, ("training", "evaluation", "orders", "trained"), "a head")
    turned = restore_tensors(tensors, value["orders"])
    trained = tuple(text(name) for name in value["trained"])
    if not all(turned[name].is_floating_point() for name in trained):
        raise UnsafeArtifact("only floats can be trained")
    return PortableHead(
        training=_mode(value["training"], turned),
        evaluation=_mode(value["evaluation"], turned),
        tensors=turned,
        trained=trained,
    )


class PortedHead:
    """A head that trains away from its network; bit for bit what the network's own would do.

    Args:
        head: head whose tensors it takes over.

    Attributes:
        tensors: the tensors now, by name.

    Raises:
        UnsafeArtifact: A graph does not hold together.
    """

    def __init__(self, head: PortableHead) -> None:
        trained = set(head.trained)
        self.tensors = {name: tensor.detach().requires_grad_(name in trained) for name, tensor in head.tensors.items()}
        self._trained = head.trained
        self._modes = {
            True: _PortablePart.of(head.training, self.tensors),
            False: _PortablePart.of(head.evaluation, self.tensors),
        }
        self._now = self._modes[True]

    def train(self) -> None:
        """Behave as in training from now on."""
        self._now = self._modes[True]

    def eval(self) -> None:
        """Behave as in evaluation from now on."""
        self._now = self._modes[False]

    def parameters(self) -> Iterator[torch.Tensor]:
        """What is trained."""
        return (self.tensors[name] for name in self._trained)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What training may change: what is trained, and buffers."""
        return {name: tensor.detach() for name, tensor in self.tensors.items() if _changes(name)}

    def __call__(self, features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """The scores for these activations at the frost line.

        Raises:
            UnsafeArtifact: The graph gives no tensor.
        """
        given = [features] if isinstance(features, torch.Tensor) else list(features)
        [scores] = self._now.runner.run([given[place] for place in self._now.places], self._now.leaves)
        if not isinstance(scores, torch.Tensor):
            raise UnsafeArtifact("the head gives no tensor")
        return scores


def _changes(name: str) -> bool:
    """Whether training may change the tensor of that name."""
    return not name.startswith("constant:")


@dataclass(frozen=True, slots=True, eq=False)
class _PortablePart:
    runner: Runner
    places: tuple[int, ...]
    leaves: list[torch.Tensor]

    @classmethod
    def of(cls, mode: Mode, tensors: Mapping[str, torch.Tensor]) -> "_PortablePart":
        return cls(Runner(mode.graph, resolve_op=resolve_allowed), mode.places, leaf_values(mode.graph, tensors))


class _Names:
    """Gives every tensor one name over both graphs, however many the network has for it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._own: dict[int, str] = {}
        self._memory: dict[int, str] = {}

    def renamed(self, mode: "_HeadGraph") -> Mode:
        names = {path: self._name(path, tensor) for path, tensor in mode.tensors.items()}
        leaves = tuple((leaf, names[path]) for leaf, path in mode.graph.leaves)
        return Mode(graph=replace(mode.graph, leaves=leaves), places=mode.places)

    def _name(self, path: str, tensor: torch.Tensor) -> str:
        if id(tensor) in self._own:
            return self._own[id(tensor)]
        # Two traces may have constants of one name that are not the same.
        name = path if path not in self.tensors else f"{path}#{len(self.tensors)}"
        memory = tensor.untyped_storage().data_ptr()
        other = self._memory.setdefault(memory, name) if tensor.nbytes else name
        if other != name:
            raise ModelError(f"{name!r} and {other!r} share their memory, which does not travel: {_ELSEWHERE}")
        self._own[id(tensor)] = name
        self.tensors[name] = tensor
        return name


def _mode(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Mode:
    refuse_unknown_fields(value, ("graph", "places"), "a mode of a head")
    refuse_unknown_fields(value["graph"], GRAPH_FIELDS, "a graph")
    graph = graph_from_json(value["graph"])
    places = tuple(integer(place) for place in value["places"])
    if len(places) != len(graph.inputs) or len(graph.outputs) != 1 or min(places) < 0:
        raise UnsafeArtifact("a head takes what crosses the frost line, and gives one tensor")
    leaf_values(graph, tensors)
    return Mode(graph=graph, places=places)


def _traced_graphs(head: SkippingHead) -> "tuple[_HeadGraph, _HeadGraph] | None":
    """What a head computes in train and in eval mode, as graphs, with its modes kept; None where it was not traced.

    Raises:
        ModelError: The graphs are not what the user's own code does, gradients included; or it gives something else
            than one tensor.
        NotTraceable: The head cannot be traced in one of the modes.
    """
    if head.traced_parts_ is None:
        return None
    model, part, inputs, flags = head.traced_parts_
    rest = _TracedRest(model, part, inputs)
    kept = [(module, module.training) for module in model.modules()]
    graphs = []
    try:
        for training in (True, False):
            head.train(training)
            graphs.append(rest.graph())
    finally:
        for module, own in kept:
            module.training = own
    with kept_draws():
        if not equals_whole(model, part, rest, inputs, flags, is_own_code=False):
            raise ModelError(_DOES_MORE)
    return graphs[0], graphs[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _HeadGraph(Mode):
    """What a traced head computes in one combination of modes, over the network's own tensors.

    Attributes:
        runner: runner of the graph.
        leaves: the function, for each leaf of the graph, that gives the network's own tensor: ``.to()`` replaces
            buffers.
    """

    runner: Runner
    leaves: tuple[Callable[[], torch.Tensor], ...]

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The network's own parameters, buffers and constants, by the names in ``graph.leaves``."""
        return {path: leaf() for (_, path), leaf in zip(self.graph.leaves, self.leaves, strict=True)}

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the network returns."""
        [output] = self.runner.run([tensors[place] for place in self.places], [leaf() for leaf in self.leaves])
        return output


class _TracedRest:
    """A network's graphs from the frost line on, one for each combination of modes, traced when it is first needed.

    Args:
        model: the user's network.
        part: the frozen part.
        inputs: specifications of the network's inputs.
    """

    def __init__(self, model: nn.Module, part: FrozenPart, inputs: Sequence[TensorSpec]) -> None:
        self._model = model
        self._part = part
        self._inputs = tuple(inputs)
        self._modules = modules_of(after(part.traced.graph, part.frost_line), model)
        self._graphs: dict[tuple[bool, ...], _HeadGraph] = {}

    def __call__(self, features: Sequence[torch.Tensor]) -> Any:
        """What the network returns for these activations, in the modes that its layers are in."""
        return self.graph().run(features)

    def graph(self) -> _HeadGraph:
        """What is computed in the modes that the layers are in.

        Raises:
            ModelError: The network gives something else than one tensor.
            NotTraceable: The head cannot be traced in these modes.
        """
        now = {path: module.training for path, module in self._modules.items()}
        kind = tuple(now.values())
        if kind not in self._graphs:
            self._graphs[kind] = self._traced({**self._part.traced.training, **now})
        return self._graphs[kind]

    def _traced(self, flags: Mapping[str, bool]) -> _HeadGraph:
        model, part = self._model, self._part
        with torch.enable_grad():  # as the part was traced: elsewhere transformers asks other things of sizes
            traced = trace(model, self._inputs, training=flags)
        graph = contiguous_copies(order_graph(model, traced.graph, self._inputs, part.mixing)[0], part.turned)
        cut = map_cut(part.frost_line, part.traced.graph, graph)
        if cut is None:
            raise NotTraceable(_OTHERWISE)
        places = tuple(part.frost_line.tensors.index(name) for name in cut.tensors)
        device, frozen, rest = device_of(model), guard_inputs(before(graph, cut)), after(graph, cut)
        batch = random_batch(model, self._inputs, _ROWS, torch.Generator().manual_seed(0))
        with torch.no_grad():
            made = Runner(frozen, device=device).run(batch, [leaf() for leaf in leaf_getters(model, traced, frozen)])
            meant = features_of(part, batch, device)
        if not are_close(made, [meant[place] for place in places]):
            raise NotTraceable(_OTHERWISE)
        runner, leaves = Runner(rest, device=device), leaf_getters(model, traced, rest)
        if not traced.structure.is_leaf():
            raise ModelError("the network gives something else than one tensor")
        return _HeadGraph(graph=rest, places=places, runner=runner, leaves=leaves)
