"""Works out ahead what a frozen part makes of its weights alone, where nodes do not run the operators that do it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from frostline.core import Graph, GraphNode, Ref
from frostline.engines.base.runner import Runner, leaf_values
from frostline.models.graph.flow import Flow, prune, reads
from frostline.models.graph.frontiers import DTYPE_BYTES

__all__ = ("foldable", "folded")


def foldable(graph: Graph, strange: Collection[str], changing: Collection[str]) -> dict[str, tuple[str, ...]]:
    """For each strange node that depends on frozen tensors alone the values that can stand for it.

    Such are the grids and divisions from which networks make positions. The values are tensors of one shape for any
    batch: the node's own, or the parts of the list that it gives.

    Args:
        graph: the whole network.
        strange: names of the nodes that cannot be shipped.
        changing: names of the nodes at which a forward pass stops being a fixed function of the input.
    """
    flow = Flow(graph)
    fixed = _fixed(flow, changing)
    found = {node.name: _values(graph, node) for node in graph.nodes if node.name in strange and node.name in fixed}
    return {
        name: tuple(value.name for value in values)
        for name, values in found.items()
        if values and not any(flow.is_written_later(value.name) for value in values)
    }


def folded(
    graph: Graph, known: Mapping[str, Sequence[str]], tensors: Callable[[Graph], Mapping[str, torch.Tensor]]
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The graph with constants in the places of these values, and the constants by their names in its leaves.

    Args:
        graph: the frozen part.
        known: values, as ``foldable`` gives them.
        tensors: finds the tensors that a graph's leaves name.
    """
    names = {name for values in known.values() for name in values}
    wanted = [node.name for node in graph.nodes if node.name in names]
    if not wanted:
        return graph, {}
    making = replace(prune(replace(graph, outputs=tuple(map(Ref, wanted)))), inputs=())
    leaves = leaf_values(making, tensors(making))
    device = next((leaf.device for leaf in leaves), torch.device("cpu"))
    with torch.no_grad():
        values = Runner(making, device=device).run([], leaves)
    constants = {f"constant:{name}": _dense(value) for name, value in zip(wanted, values, strict=True)}
    nodes = tuple(node for node in graph.nodes if node.name not in wanted)
    paths = zip(wanted, constants, strict=True)
    return prune(replace(graph, leaves=(*graph.leaves, *paths), nodes=nodes)), constants


def _fixed(flow: Flow, changing: Collection[str]) -> set[str]:
    """Names of the values that depend on leaves alone, and not on the size of the batch."""
    found = {name for name, _ in flow.graph.leaves}
    for node, needs in zip(flow.graph.nodes, flow.depends, strict=False):
        if node.size is None and node.name not in changing and found.issuperset(needs):
            found.add(node.name)
    return found


def _values(graph: Graph, node: GraphNode) -> list[GraphNode]:
    """The node where it gives a tensor, or whoever takes a part of its list; none where something is none of these."""
    if _is_a_constant(node):
        return [node]
    readers = [reader for reader in graph.nodes if node.name in reads(reader)]
    is_a_list = all(reader.op == "operator.getitem" and _is_a_constant(reader) for reader in readers)
    return readers if is_a_list else []


def _is_a_constant(node: GraphNode) -> bool:
    return node.dtype in DTYPE_BYTES and node.shape is not None and not any(dim.per_sample for dim in node.shape)


def _dense(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value.detach().clone(memory_format=torch.preserve_format)
