"""The trainable rest as data: what a head computes in both modes, and its tensors, to be trained by another process."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from frostline.core import Graph
from frostline.engines.base.operators import ALLOWED, resolve_allowed
from frostline.engines.base.runner import Runner, leaf_values
from frostline.errors import ModelError, UnsafeArtifact
from frostline.models.cutting.head import Head, HeadGraph, TracedHead
from frostline.models.files.graph_file import flattened, graph_from_json, graph_to_json, integer, restored, text

__all__ = ("Mode", "PortableHead", "TravelledHead", "head_from_json", "head_to_json", "portable")

_ELSEWHERE = "choose another policy, with which the head is trained here"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mode:
    """What a head computes in train mode, or in eval mode.

    Attributes:
        graph: from what crosses the frost line to the scores, its only output.
        places: which of the tensors that cross it takes, in the order of ``graph.inputs``.
    """

    graph: Graph
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PortableHead:
    """A head without a line of its network's code.

    Attributes:
        training: outputs in train mode.
        evaluation: outputs in eval mode.
        tensors: its parameters, buffers and constants; a tensor that the network has under several names is here once.
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


def portable(head: nn.Module) -> PortableHead:
    """A head as data, which shares the network's tensors.

    Raises:
        ModelError: It cannot travel; the sentence says why, and what to do instead.
    """
    if not isinstance(head, TracedHead):
        kind = "its own code runs" if isinstance(head, Head) else "it is no head of a job"
        raise ModelError(
            f"the trainable rest of this network was not traced ({kind}), so it cannot travel: {_ELSEWHERE}"
        )
    try:
        modes = head.graphs()
    except ModelError as error:
        raise ModelError(f"the trainable rest of this network cannot travel, {error}: {_ELSEWHERE}") from error
    strange = sorted({node.op for mode in modes for node in mode.graph.nodes} - ALLOWED)
    if strange:
        raise ModelError(f"the trainable rest uses {', '.join(strange)}, which a node does not run: {_ELSEWHERE}")
    names = _Names()
    training, evaluation = (names.renamed(mode) for mode in modes)
    trained = tuple(name for name, tensor in names.tensors.items() if tensor.requires_grad)
    return PortableHead(training=training, evaluation=evaluation, tensors=names.tensors, trained=trained)


def head_to_json(head: PortableHead) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A head as plain values, and its tensors as they are written."""
    tensors, orders = flattened(head.tensors)
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
    turned = restored(tensors, value["orders"])
    trained = tuple(text(name) for name in value["trained"])
    if not all(turned[name].is_floating_point() for name in trained):
        raise UnsafeArtifact("only floats can be trained")
    return PortableHead(
        training=_mode(value["training"], turned),
        evaluation=_mode(value["evaluation"], turned),
        tensors=turned,
        trained=trained,
    )


class TravelledHead:
    """A head that trains away from its network; bit for bit what the network's own would do.

    Args:
        head: head whose tensors it takes over.

    Attributes:
        tensors: its tensors now, by name.

    Raises:
        UnsafeArtifact: A graph does not hold together.
    """

    def __init__(self, head: PortableHead) -> None:
        trained = set(head.trained)
        self.tensors = {name: tensor.detach().requires_grad_(name in trained) for name, tensor in head.tensors.items()}
        self._trained = head.trained
        self._modes = {True: _Ready.of(head.training, self.tensors), False: _Ready.of(head.evaluation, self.tensors)}
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
class _Ready:
    runner: Runner
    places: tuple[int, ...]
    leaves: list[torch.Tensor]

    @classmethod
    def of(cls, mode: Mode, tensors: Mapping[str, torch.Tensor]) -> "_Ready":
        return cls(Runner(mode.graph, resolve_op=resolve_allowed), mode.places, leaf_values(mode.graph, tensors))


class _Names:
    """Gives every tensor one name over both graphs, however many the network has for it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._own: dict[int, str] = {}
        self._memory: dict[int, str] = {}

    def renamed(self, mode: HeadGraph) -> Mode:
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
    graph = graph_from_json(value["graph"])
    places = tuple(integer(place) for place in value["places"])
    if len(places) != len(graph.inputs) or len(graph.outputs) != 1 or min(places) < 0:
        raise UnsafeArtifact("a head takes what crosses the frost line, and gives one tensor")
    leaf_values(graph, tensors)
    return Mode(graph=graph, places=places)
