"""Lets channels-last values cross a cut: they are sent in the order of their memory and turned back behind it. Pure."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from frostline.core import Graph, GraphNode, Ref, TensorSpec
from frostline.core.graph import Argument
from frostline.models.graph.flow import replaced, substitute
from frostline.models.graph.frontiers import crosses_permuted, frontiers

__all__ = ("origin", "straightened", "transposed")

_FLAT = "__flat"
_BACK = "__back"


def transposed(graph: Graph, inputs: Sequence[TensorSpec], *, reach: int) -> frozenset[str]:
    """Names of the values that stand at a frontier but lie in memory in another order than that of their dimensions.

    Args:
        graph: the whole network.
        inputs: what it takes.
        reach: index of the last node that matters.
    """
    found = frontiers(graph, inputs, crosses_permuted)
    values = [value for one in found if one.after <= reach for value in one.values]
    return frozenset(value.name for value in values if value.order != tuple(range(len(value.order or ()))))


def straightened(graph: Graph, names: Collection[str]) -> Graph:
    """The graph with two views behind each of the named values: one in the order of its memory, and one back.

    The first may cross a cut, since it is contiguous; whoever read the value reads the second, which has the same
    shape and strides. Nothing is computed or copied.
    """
    nodes: list[GraphNode] = []
    back: dict[str, Argument] = {}
    for node in graph.nodes:
        nodes.append(substitute(node, back))
        if node.name in names:
            nodes.extend(_there_and_back(nodes[-1]))
            back[node.name] = Ref(nodes[-1].name)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(replaced(output, back) for output in graph.outputs))


def origin(graph: Graph, node: GraphNode) -> GraphNode:
    """The node whose value this one shows in the order of its memory; the node itself where it is none of those."""
    if not node.name.endswith(_FLAT):
        return node
    return next(one for one in graph.nodes if one.name == node.name.removesuffix(_FLAT))


def _there_and_back(node: GraphNode) -> Iterator[GraphNode]:
    assert node.order is not None
    assert node.shape is not None
    inverse = tuple(sorted(range(len(node.order)), key=node.order.__getitem__))
    flat = replace(
        node,
        name=f"{node.name}{_FLAT}",
        op="aten.permute.default",
        args=(Ref(node.name), node.order),
        kwargs=(),
        shape=tuple(node.shape[dim] for dim in node.order),
        order=tuple(range(len(node.order))),
        storage=node.storage or node.name,
    )
    yield flat
    args = (Ref(flat.name), inverse)
    yield replace(flat, name=f"{node.name}{_BACK}", args=args, shape=node.shape, order=node.order)
