"""The trainable rest of the user's network: its own modules, run from the frost line on."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from frostline.core import Cut, Graph, TensorSpec
from frostline.engines.base.runner import Runner, leaf_values
from frostline.engines.machine.isolation import computing
from frostline.errors import ModelError, NotTraceable
from frostline.models.cutting.frozen import FrozenPart, ordered
from frostline.models.freezing import frozen_modules
from frostline.models.graph.cuts import straightened
from frostline.models.graph.split import after, before, guard_inputs, is_same, moved
from frostline.models.modes import all_in_eval, modes
from frostline.models.tracing.border import fed
from frostline.models.tracing.comparison import UNFIT, are_same, observed, whole
from frostline.models.tracing.export import Trace, device_of
from frostline.models.tracing.recording import random
from frostline.models.tracing.trace_cache import trace
from frostline.models.wrappers import is_split

__all__ = ("Head", "HeadGraph", "TracedHead", "WholeHead", "equals_whole", "tensor_paths")

_ROWS = 8


class Head(nn.Module, ABC):
    """Takes the activations at the frost line and returns what the whole network would.

    Its parameters and buffers are those of the user's own network, under the same names: an optimiser over
    ``head.parameters()``, ``model.load_state_dict`` and ``model.state_dict`` see the same tensors. Outputs,
    gradients and BatchNorm statistics equal the whole network's bit for bit on one machine.

    ``train()`` and ``eval()`` of the head, or of the network, choose how its layers behave; layers that are frozen
    whole keep the mode that they have.

    Args:
        model: the user's network.
        paths: paths of the tensors that become the head's, as in ``model.state_dict()``.
        modules: those of the network whose mode may matter to the head.
    """

    def __init__(self, model: nn.Module, paths: Iterable[str], modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, so that the frozen layers do not become the head's
        self._modules_run = dict(modules)
        self._frozen = tuple(inner for _, module in frozen_modules(model) for inner in module.modules())
        for path in paths:
            _graft(self, model, path)

    def forward(self, *features: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """What the network returns for these activations.

        Args:
            features: as a loader's batch gives them: one tensor ``[batch, ...]``, or several as arguments or as
                one sequence. They are not changed.
        """
        return self._run(
            [tensor for given in features for tensor in ((given,) if isinstance(given, torch.Tensor) else given)]
        )

    def train(self, mode: bool = True) -> "Head":
        """Set the mode of the network's layers that the head runs; frozen layers keep theirs."""
        kept = [(module, module.training) for module in self._frozen]
        super().train(mode)
        for module in self._modules_run.values():
            module.training = mode
        for module, own in kept:
            module.training = own
        return self

    def prepare(self) -> None:
        """Get ready for the present modes now, rather than at the first batch."""
        return

    @abstractmethod
    def _run(self, tensors: list[torch.Tensor]) -> Any:
        """What the network returns for the activations at the frost line."""


class WholeHead(Head):
    """The user's network itself, for a frost line that is its input.

    Args:
        model: the user's network.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, tensor_paths(model), dict(model.named_modules()))

    def train(self, mode: bool = True) -> "WholeHead":
        """As ``Head.train``.

        Raises:
            ModelError: The head was sharded.
        """
        if is_split(self):
            raise ModelError(
                "the whole network runs at the trainer, since it was not cut, and such a head cannot be sharded: wrap "
                "job.head in DistributedDataParallel, or mend what the job says about the cut"
            )
        super().train(mode)
        return self

    def _run(self, tensors: list[torch.Tensor]) -> Any:
        with computing():
            return self._model[0](*fed(self._model[0], tensors))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadGraph:
    """What a traced head computes in one combination of modes.

    Attributes:
        graph: from the frost line to the network's one output.
        places: which of the tensors that cross the frost line it takes, in the order of its inputs.
        tensors: the network's own parameters, buffers and constants, by the names in ``graph.leaves``.
    """

    graph: Graph
    places: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]


class TracedHead(Head):
    """A network's graph from the frost line on.

    The graph for each combination of modes is traced when it is first needed (0.1 to 10 s) and kept.

    Args:
        model: the user's network.
        part: its frozen part.
        inputs: specifications of the network's inputs.
    """

    def __init__(self, model: nn.Module, part: FrozenPart, inputs: Sequence[TensorSpec]) -> None:
        graph = after(part.traced.graph, part.frost_line)
        paths = [path for _, path in graph.leaves if not path.startswith("constant:")]
        super().__init__(model, paths, _modules_of(graph, model))
        self._part = part
        self._traced_on = device_of(model)
        self._inputs = tuple(inputs)
        self._ready: dict[tuple[torch.device, tuple[bool, ...]], _Ready] = {}

    def train(self, mode: bool = True) -> "TracedHead":
        """As ``Head.train``.

        Raises:
            ModelError: Layers of the head were sharded one by one.
        """
        if any(map(is_split, self.children())):
            raise ModelError(
                "the head runs as one graph, so that its layers cannot be sharded one by one: shard it whole, by "
                "fully_shard(job.head)"
            )
        super().train(mode)
        return self

    def prepare(self) -> None:
        """Trace for the present modes now, rather than at the first batch."""
        self._for_these_modes()

    def graphs(self) -> tuple[HeadGraph, HeadGraph]:
        """What the head computes in train mode and in eval mode; its modes stay as they are.

        Raises:
            ModelError: The network gives something else than one tensor.
            NotTraceable: The head cannot be traced in one of the modes.
        """
        modules = [*self.modules(), *self._modules_run.values()]
        kept = [(module, module.training) for module in modules]
        try:
            self.train()
            training = self._for_these_modes().described()
            self.eval()
            return training, self._for_these_modes().described()
        finally:
            for module, own in kept:
                module.training = own

    def _run(self, tensors: list[torch.Tensor]) -> Any:
        return self._for_these_modes().run(tensors)

    def _for_these_modes(self) -> "_Ready":
        modes = tuple(module.training for module in self._modules_run.values())
        kind = (device_of(self._model[0]), modes)
        if kind not in self._ready:
            self._ready[kind] = self._trace()
        return self._ready[kind]

    def _trace(self) -> "_Ready":
        model, part = self._model[0], self._part
        flags = {**part.traced.training, **{path: module.training for path, module in self._modules_run.items()}}
        if flags == part.traced.training and device_of(model) == self._traced_on:
            return _Ready.of(self, model, part.traced, part.frost_line, part.frost_line)
        with torch.enable_grad():  # as the part was traced: elsewhere transformers asks other things of sizes
            traced = trace(model, self._inputs, training=flags)
        traced = replace(traced, graph=straightened(ordered(model, traced.graph, self._inputs)[0], part.turned))
        cut = moved(part.frost_line, part.traced.graph, traced.graph)
        if cut is None or not self._is_made_alike(traced, cut):
            raise NotTraceable("the frozen part of the network computes something else when its head changes mode")
        return _Ready.of(self, model, traced, cut, part.frost_line)

    def _is_made_alike(self, traced: Trace, cut: Cut) -> bool:
        """Whether a trace makes what crosses a cut as the prefix does: step by step, or at least to the bit."""
        model, part = self._model[0], self._part
        ours = before(traced.graph, cut)
        theirs = before(part.traced.graph, replace(cut, after=part.frost_line.after))
        if is_same(ours, theirs):
            return True
        batch = random(self._inputs, _ROWS, torch.Generator().manual_seed(0), device_of(model))
        with torch.no_grad():
            made = _Bound.to(model, guard_inputs(ours), traced).run(batch)
            meant = _Bound.to(model, guard_inputs(theirs), part.traced).run(batch)
        return all(torch.equal(tensor, other) for tensor, other in zip(made, meant, strict=True))


def tensor_paths(model: nn.Module) -> list[str]:
    """Paths of all parameters and buffers, also of those that several modules share."""
    parameters = (path for path, _ in model.named_parameters(remove_duplicate=False))
    return [*parameters, *(path for path, _ in model.named_buffers(remove_duplicate=False))]


def _modules_of(graph: Graph, model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose mode may matter to the graph: those that made its nodes, and all around them."""
    paths = {""}
    for node in graph.nodes:
        names = node.module.split(".") if node.module else []
        paths.update(".".join(names[: depth + 1]) for depth in range(len(names)))
    return {path: module for path, module in model.named_modules() if path in paths}


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    """A graph with the network's tensors as its leaves, looked up at each run: ``.to()`` replaces buffers."""

    graph: Graph
    runner: Runner
    lookups: list[Callable[[], torch.Tensor]]

    @classmethod
    def to(cls, model: nn.Module, graph: Graph, traced: Trace, head: nn.Module | None = None) -> "_Bound":
        lookups = [_lookup(model, traced, path, head) for _, path in graph.leaves]
        return cls(graph, Runner(graph, device=device_of(model)), lookups)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        return self.runner.run(tensors, [lookup() for lookup in self.lookups])


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """The head for one combination of modes, which may need only some of what crosses the frost line."""

    bound: _Bound
    places: list[int]
    structure: TreeSpec

    @classmethod
    def of(cls, head: nn.Module, model: nn.Module, traced: Trace, cut: Cut, frost_line: Cut) -> "_Ready":
        bound = _Bound.to(model, after(traced.graph, cut), traced, head)
        return cls(bound, [frost_line.tensors.index(name) for name in cut.tensors], traced.structure)

    def described(self) -> HeadGraph:
        """The same as a value."""
        if not self.structure.is_leaf():
            raise ModelError("the network gives something else than one tensor")
        graph = self.bound.graph
        paths = [path for _, path in graph.leaves]
        tensors = {path: lookup() for path, lookup in zip(paths, self.bound.lookups, strict=True)}
        return HeadGraph(graph=graph, places=tuple(self.places), tensors=tensors)

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        return tree_unflatten(list(self.bound.run([tensors[place] for place in self.places])), self.structure)


def _lookup(model: nn.Module, traced: Trace, path: str, head: nn.Module | None) -> Callable[[], torch.Tensor]:
    if path in traced.constants:
        constant = traced.constants[path].to(device_of(model))
        return lambda: constant
    owner, _, name = path.rpartition(".")
    module = model.get_submodule(owner)
    # Sharding a head puts other parameters into the head's modules; the network has those of its own that stand alone.
    own = {} if head is None else dict(head.named_modules(remove_duplicate=False))
    if owner in own and name in dict(own[owner].named_parameters(recurse=False)):
        module = own[owner]
    return lambda: getattr(module, name)


def _graft(head: nn.Module, model: nn.Module, path: str) -> None:
    """Hang the owner of a tensor into the head at its own path; where it owns other modules, the tensor alone."""
    *owner, name = path.split(".")
    module = model.get_submodule(".".join(owner))
    place = head
    for depth, part in enumerate(owner):
        here = dict(place.named_children()).get(part)
        if here is module:
            return
        if here is None:
            is_whole = depth == len(owner) - 1 and not list(module.children())
            here = module if is_whole else nn.Module()
            place.add_module(part, here)
        if here is module:
            return
        place = here
    tensor = getattr(module, name)
    if isinstance(tensor, nn.Parameter):
        place.register_parameter(name, tensor)
    else:
        place.register_buffer(name, tensor, persistent=path in model.state_dict())


_SEEDS = (1, 2)


def equals_whole(
    model: nn.Module, part: FrozenPart, head: Head, inputs: Sequence[TensorSpec], flags: Mapping[str, bool]
) -> bool:
    """Whether prefix and head together do what the whole network does, to the bit, on two random batches.

    Compared are outputs, gradients and buffers, with the modes in which the head is trained and in eval mode. The
    network is left as it was.

    Args:
        model: the whole network.
        part: its frozen part.
        head: head that goes on from there.
        inputs: specifications of the network's inputs.
        flags: the modes in which the head is trained.
    """
    device = device_of(model)
    runner = Runner(part.prefix.graph, device=device)
    leaves = [leaf.to(device) for leaf in leaf_values(part.prefix.graph, part.prefix.tensors)]
    for seed in _SEEDS:
        batch = random(inputs, _ROWS, torch.Generator().manual_seed(seed), device)
        for training in (flags, all_in_eval(model)):
            try:
                with modes(model, training):
                    with torch.no_grad():
                        features = list(runner.run(batch, leaves))
                    ours = observed(model, partial(head, features), seed)
                    theirs = observed(model, partial(whole, model, batch), seed)
            except UNFIT:
                return False
            if not are_same(ours, theirs):
                return False
    return True
