"""A traced network as a value: its graph, the tensors that its code made, and the modes in which it was traced."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from frostline.core import Graph

__all__ = ("Trace", "device_of", "tensor_of")


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
