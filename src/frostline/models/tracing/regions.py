"""Writes the regions of a traced network in which gradients or autocast are off into the graph around them."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from frostline.errors import NotTraceable

__all__ = ("flat_graph",)

_GRADIENTS = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"
# The arguments before the region's own: whether gradients are on; and device, dtype, whether autocast is on, caching.
_SETTINGS = {_GRADIENTS: 1, _AUTOCAST: 4}
_IS_ON = {_GRADIENTS: 0, _AUTOCAST: 2}


def flat_graph(module: fx.GraphModule) -> fx.Graph:
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
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, torch.Tensor) else node  # type: ignore[no-untyped-call]


def _valued(argument: Any, values: dict[fx.Node, Any]) -> Any:
    return fx.map_arg(argument, values.__getitem__)
