"""The trainable rest of the user's network: its own modules, run from the frost line on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from frostline.core import Cut, Graph
from frostline.engines.runner import Runner
from frostline.errors import NotTraceable
from frostline.models.cuts import prune
from frostline.models.split import after
from frostline.models.trace import Trace, device_of, trace

__all__ = ("Head",)


class Head(nn.Module):
    """Takes the activations at the frost line and returns what the whole network would.

    Its parameters and buffers are those of the user's own network, under the same names: an optimiser over
    ``head.parameters()``, ``model.load_state_dict`` and ``model.state_dict`` see the same tensors. Outputs,
    gradients and BatchNorm statistics equal the whole network's bit for bit on one machine.

    ``train()`` and ``eval()`` of the head, or of the network, choose how its layers behave; the graph for each
    combination of modes is traced when it is first needed (0.1 to 10 s) and kept.

    Args:
        model: the user's network.
        traced: ``model`` traced in train mode, frozen modules in eval mode, pruned.
        cut: the frost line in that trace.
        input_shape: of one sample.
    """

    def __init__(self, model: nn.Module, traced: Trace, cut: Cut, input_shape: Sequence[int]) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, so that the frozen layers do not become the head's
        self._traced = traced
        self._cut = cut
        self._input_shape = tuple(input_shape)
        graph = after(traced.graph, cut)
        self._modules_run = self._modules_of(graph)
        self._parts: dict[tuple[torch.device, tuple[bool, ...]], _Part] = {}
        for _, path in graph.leaves:
            if not path.startswith("constant:"):
                _graft(self, model, path)

    def forward(self, *features: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """What the network returns for these activations.

        Args:
            features: as a loader's batch gives them: one tensor ``[batch, ...]``, or several as arguments or as
                one sequence. They are not changed.
        """
        tensors = [one for given in features for one in ((given,) if isinstance(given, torch.Tensor) else given)]
        return self._part().run(tensors)

    def train(self, mode: bool = True) -> "Head":
        """Set the mode of the network's layers that the head runs; frozen layers stay in eval mode."""
        super().train(mode)
        for module in getattr(self, "_modules_run", {}).values():
            module.training = mode
        return self

    def prepare(self) -> None:
        """Trace for the present modes now, rather than at the first batch."""
        self._part()

    def _part(self) -> "_Part":
        modes = tuple(module.training for module in self._modules_run.values())
        kind = (device_of(self._model[0]), modes)
        if kind not in self._parts:
            self._parts[kind] = self._trace_part()
        return self._parts[kind]

    def _trace_part(self) -> "_Part":
        model = self._model[0]
        flags = {**self._traced.training, **{path: one.training for path, one in self._modules_run.items()}}
        traced = trace(model, self._input_shape, training=flags)
        graph = prune(traced.graph)
        upto = self._cut.after + 1
        if graph.nodes[:upto] != self._traced.graph.nodes[:upto]:
            raise NotTraceable("the frozen part of the network computes something else when its head changes mode")
        return _Part.of(model, after(graph, self._cut), traced)

    def _modules_of(self, graph: Graph) -> dict[str, nn.Module]:
        """The modules whose mode may matter to the head: those that made its nodes, and all around them."""
        paths = {""}
        for node in graph.nodes:
            names = node.module.split(".") if node.module else []
            paths.update(".".join(names[: depth + 1]) for depth in range(len(names)))
        return {path: module for path, module in self._model[0].named_modules() if path in paths}


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The head for one combination of modes. Tensors are looked up at each run: ``.to()`` replaces buffers."""

    runner: Runner
    lookups: list[Callable[[], torch.Tensor]]
    structure: TreeSpec

    @classmethod
    def of(cls, model: nn.Module, graph: Graph, traced: Trace) -> "_Part":
        lookups = [_lookup(model, traced, path) for _, path in graph.leaves]
        return cls(Runner(graph, device=device_of(model)), lookups, traced.structure)

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        outputs = self.runner.run(tensors, [lookup() for lookup in self.lookups])
        return tree_unflatten(list(outputs), self.structure)


def _lookup(model: nn.Module, traced: Trace, path: str) -> Callable[[], torch.Tensor]:
    if path in traced.constants:
        constant = traced.constants[path].to(device_of(model))
        return lambda: constant
    owner, _, name = path.rpartition(".")
    module = model.get_submodule(owner)
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
