"""Where a graph may be cut: its frontiers, numbered and named. Pure: a graph in, cuts out."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from frostline.core import Cut, Dim, Graph, GraphNode, Ref, TensorSpec, Token
from frostline.core.graph import Argument
from frostline.models.graph.flow import MOVING, packet_of, reads, replaced, substitute
from frostline.models.graph.frontiers import (
    DTYPE_BYTES,
    Frontier,
    crosses_as_it_is,
    crosses_permuted,
    frontiers,
    per_sample,
)

__all__ = ("enumerate_cuts", "input_cuts", "is_put_back", "origin", "straightened", "transposed")

_FLAT = "__flat"
_BACK = "__back"
_TURNED, _LAID = "__turned", "__laid"


def transposed(graph: Graph, inputs: Sequence[TensorSpec], *, reach: int, asked: int) -> frozenset[str]:
    """Names of the values that stand at a frontier but lie in memory in another order than that of their dimensions.

    Args:
        graph: the whole network.
        inputs: specifications of its inputs.
        reach: index of the last node that matters.
        asked: index of the last node of the layer that the user named; ``len(nodes)`` where there is none.
    """
    found = frontiers(graph, inputs, crosses_permuted, asked=range(asked, reach + 1))
    values = [value for frontier in found if frontier.after <= reach for value in frontier.values]
    return frozenset(value.name for value in values if value.order != tuple(range(len(value.order or ()))))


def straightened(graph: Graph, names: Collection[str]) -> Graph:
    """The graph with two values behind each of the named ones: one that is contiguous, and one put back.

    The first may cross a cut; whoever read the value reads the second, which has the same shape and strides. Both are
    views, in the order of the memory and back, but where a sample's memory is no piece: there, as in attention that
    has the batch second, both are copies.
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
    return next(candidate for candidate in graph.nodes if candidate.name == node.name.removesuffix(_FLAT))


def is_put_back(node: GraphNode) -> bool:
    """Whether the node only puts back what crosses; see ``straightened``."""
    return node.name.endswith((_BACK, _TURNED, _LAID))


def _there_and_back(node: GraphNode) -> Iterator[GraphNode]:
    assert node.order is not None
    assert node.shape is not None
    if node.order[0] != 0:
        yield from _copied_there_and_back(node, node.order, node.shape)
        return
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


def _copied_there_and_back(node: GraphNode, order: tuple[int, ...], shape: tuple[Dim, ...]) -> Iterator[GraphNode]:
    """Both copies, of which the second is made in the memory order of the value."""
    own, inverse = tuple(range(len(order))), tuple(sorted(range(len(order)), key=order.__getitem__))
    across = tuple(shape[dim] for dim in order)
    layout = (("memory_format", Token("memory_format", "contiguous_format")),)
    flat = replace(node, name=f"{node.name}{_FLAT}", op="aten.clone.default", args=(Ref(node.name),), kwargs=layout)
    flat = replace(flat, order=own, storage="")
    turned = replace(flat, name=f"{node.name}{_TURNED}", op="aten.permute.default", args=(Ref(flat.name), order))
    yield flat
    yield replace(turned, kwargs=(), shape=across, order=inverse, storage=flat.name)
    laid = replace(flat, name=f"{node.name}{_LAID}", args=(Ref(turned.name),), shape=across)
    yield laid
    back = replace(laid, name=f"{node.name}{_BACK}", op="aten.permute.default", args=(Ref(laid.name), inverse))
    yield replace(back, kwargs=(), shape=shape, order=order, storage=laid.name)


_CHOOSING = MOVING | {"max_pool2d"}


def enumerate_cuts(graph: Graph, inputs: Sequence[TensorSpec], *, reach: int, asked: int) -> tuple[Cut, ...]:
    """Every legal cut up to node index ``reach``, in order, from cut 0, the encoded sample, to the frost line.

    Args:
        graph: the whole network.
        inputs: specifications of its inputs.
        reach: index of the last node that is frozen.
        asked: index of the last node of the layer that the user named; ``len(nodes)`` where there is none.
    """
    found = frontiers(graph, inputs, crosses_as_it_is, asked=range(asked, reach + 1))
    names: dict[str, int] = {}
    nonnegative = _from_relu(graph)
    kept = [frontier for frontier in found if frontier.after <= reach]
    encoded, first = input_cuts(inputs)
    cuts = [_cut(number, frontier, graph, names, nonnegative) for number, frontier in enumerate(kept, start=2)]
    return (encoded, replace(first, tensors=graph.inputs), *cuts)


def input_cuts(inputs: Sequence[TensorSpec]) -> tuple[Cut, Cut]:
    """The two cuts that every job has: 0, the encoded sample, and 1, the network's inputs.

    Cut 1 is named ``pixels`` where the one input is a float32 image, else ``inputs``.
    """
    encoded = Cut(number=0, name="encoded", after=-2, tensors=(), shapes=(), dtypes=(), bytes_per_sample=0)
    is_image = [(len(spec.shape), spec.dtype) for spec in inputs] == [(3, "float32")]
    names = ("pixels",) if is_image else tuple(f"input_{place}" for place in range(len(inputs)))
    first = Cut(
        number=1,
        name="pixels" if is_image else "inputs",
        after=-1,
        tensors=names,
        shapes=tuple(spec.shape for spec in inputs),
        dtypes=tuple(spec.dtype for spec in inputs),
        bytes_per_sample=sum(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in inputs),
    )
    return encoded, first


def _cut(number: int, frontier: Frontier, graph: Graph, names: dict[str, int], nonnegative: frozenset[str]) -> Cut:
    values = frontier.values
    return Cut(
        number=number,
        name=_place(origin(graph, graph.nodes[frontier.after]), names),
        after=frontier.after,
        tensors=tuple(node.name for node in values),
        shapes=tuple(per_sample(node) for node in values),
        dtypes=tuple(node.dtype for node in values),
        bytes_per_sample=frontier.nbytes,
        is_relu=len(values) == 1 and values[0].name in nonnegative,
    )


def _from_relu(graph: Graph) -> frozenset[str]:
    """Names of the values whose elements all come out of a ReLU, chosen or moved since at most."""
    found: set[str] = set()
    for node in graph.nodes:
        is_chosen = packet_of(node) in _CHOOSING and reads(node) and set(reads(node)) <= found
        if is_chosen or _is_relu(node):
            found.add(node.name)
    return frozenset(found)


def _is_relu(node: GraphNode) -> bool:
    packet = packet_of(node)
    return packet in ("relu", "relu6") or (packet == "hardtanh" and node.args[1:2] == (0.0,))


def _place(node: GraphNode, names: dict[str, int]) -> str:
    """The module, and the operator where that says more; numbered where the same place comes again."""
    name = f"{node.module}:{packet_of(node)}" if node.module else packet_of(node)
    names[name] = names.get(name, 0) + 1
    return name if names[name] == 1 else f"{name}#{names[name]}"
