"""Casts what a network takes to its own precision: samples are prepared in float32, whatever its weights are."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from frostline.core import Dim, Graph, GraphNode, Ref, TensorSpec, Token
from frostline.models.graph.flow import replaced, substitute

__all__ = ("fed", "fed_specs", "with_casts")

_PREPARED = "float32"
_CAST = "__cast"


def fed(model: nn.Module, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as the network takes them: those of float32 in the precision of its weights.

    Args:
        model: network that will run on them.
        batch: its inputs, in order.
    """
    own = _own(model)
    return [tensor.to(own) if tensor.dtype == torch.float32 else tensor for tensor in batch]


def fed_specs(model: nn.Module, inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The specifications of the same tensors."""
    own = str(_own(model)).removeprefix("torch.")
    return tuple(replace(spec, dtype=own) if spec.dtype == _PREPARED else spec for spec in inputs)


def with_casts(model: nn.Module, graph: Graph, inputs: Sequence[TensorSpec]) -> Graph:
    """A network's graph, traced on what ``fed`` gives, as one that takes the inputs as they are prepared.

    Args:
        model: network that was traced.
        graph: graph of the network.
        inputs: specifications of the inputs as they are prepared.
    """
    changed = zip(graph.inputs, inputs, fed_specs(model, inputs), strict=True)
    casts = [_cast(name, taken) for name, spec, taken in changed if spec != taken]
    values = {node.name.removesuffix(_CAST): Ref(node.name) for node in casts}
    nodes = (*casts, *(substitute(node, values) for node in graph.nodes))
    return replace(graph, nodes=nodes, outputs=tuple(replaced(output, values) for output in graph.outputs))


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
