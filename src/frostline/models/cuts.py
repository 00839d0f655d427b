"""Finds where a graph may be cut: the places that few tensors cross, numbered and named. Pure."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from frostline.core import Cut, Dim, Graph, GraphNode, Ref, TensorSpec, Token
from frostline.core.graph import Argument
from frostline.models.graph import MOVING, Flow, frozen_reach, packet_of, reads, replace_values, substitute

__all__ = (
    "DTYPE_BYTES",
    "Frontier",
    "contiguous_copies",
    "enumerate_cuts",
    "input_cuts",
    "is_put_back",
    "narrowest_frontier",
    "origin",
    "per_sample",
    "split_encoder_outputs",
    "transposed_values",
)


DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""What may cross a cut: the dtypes that NumPy and Arrow have too, and bfloat16 (``core.nouns``)."""

# Operators on single elements that cost next to nothing.
_POINTWISE = """
add and bitwise_and bitwise_not bitwise_or clamp div eq full_like ge gt index le logical_and logical_not logical_or lt
masked_fill mul ne neg new_ones new_zeros ones_like pad rsub sub to to_copy type_as where zeros_like
"""
_CHEAP = MOVING | frozenset(_POINTWISE.split())
_MAX_TENSORS = 2
# At the place that the user named: the feature maps that a segmentation head takes, or what every layer of an encoder
# gives for a sum of them.
_MAX_TENSORS_AS_ASKED = 32
_BATCH = Dim(0, 1)


@dataclass(frozen=True, slots=True)
class Frontier:
    """A place in a graph.

    Attributes:
        after: index of the last node before it; -1 for the network's inputs.
        values: values that cross it, the largest first.
    """

    after: int
    values: tuple[GraphNode, ...]

    @property
    def names(self) -> set[str]:
        """Names of the values."""
        return {node.name for node in self.values}

    @property
    def nbytes(self) -> int:
        """Bytes that cross, of a batch of one sample."""
        return sum(map(_nbytes, self.values))


def _frontiers(
    graph: Graph, inputs: Sequence[TensorSpec], may_cross: Callable[[GraphNode], bool], *, asked: range
) -> list[Frontier]:
    """Every place in the graph worth a cut, in order, without the inputs themselves.

    One stands after each data node at which at most two values are still needed later. Two are worth it only where
    they ship less than the nearest place before or behind that one tensor crosses; where there is no such place on a
    side, that side does not object. Nor does an input of whole numbers: token ids are smaller than what any layer makes
    of them. Of two, one that is made cheaply from a value that is no larger (an attention mask
    for every row, from one for the whole text) does not cross: that value does, and the other is made again. Where the
    user named the last frozen layer and none of these stands behind it, the place there that the fewest bytes cross is
    one too, and up to 32 tensors may cross it.

    Args:
        graph: the whole network.
        inputs: specifications of its inputs.
        may_cross: True if a value may cross at all; ``_crosses_as_it_is`` or ``_crosses_permuted``.
        asked: indices of the nodes from the end of the layer that the user named to the last that is frozen.
    """
    first = _input_frontier(graph, inputs)
    legal = list(_legal(graph, first, may_cross, asked))
    found = [frontier for frontier in legal if len(frontier.values) <= _MAX_TENSORS]
    places = found if all(value.dtype.startswith("int") for value in first.values) else [first, *found]
    singles = [frontier for frontier in places if len(frontier.values) == 1]
    kept = [frontier for frontier in found if len(frontier.values) == 1 or _is_worth_two(frontier, singles)]
    return _with_one_as_asked(kept, [frontier for frontier in legal if frontier.after in asked])


def _reaching_the_last(places: Sequence[Frontier], graph: Graph) -> list[Frontier]:
    """Those places from whose values those of the last can be made, so that work goes on to the frost line from each.

    The last may be crossed by a value from which another place's value was made cheaply; that place is left out.
    """
    data = Flow(graph).data
    needs = {node.name: [name for name in reads(node) if name in data] for node in graph.nodes}

    def reaches(place: Frontier, last: Frontier) -> bool:
        waiting, made = list(last.names), set(place.names)
        while waiting:
            name = waiting.pop()
            if name in made:
                continue
            if name not in needs:  # an input
                return False
            made.add(name)
            waiting += needs[name]
        return True

    return [place for place in places if reaches(place, places[-1])]


def narrowest_frontier(
    graph: Graph, inputs: Sequence[TensorSpec], may_cross: Callable[[GraphNode], bool], *, among: range
) -> Frontier | None:
    """The place that the fewest tensors cross, of equals the last; None where more than 32 cross every one.

    Args:
        graph: the whole network.
        inputs: specifications of its inputs.
        may_cross: function that returns True for values that may cross, as for ``_frontiers``.
        among: indices of the nodes after which it may stand.
    """
    places = [
        place for place in _legal(graph, _input_frontier(graph, inputs), may_cross, among) if place.after in among
    ]
    return min(reversed(places), key=lambda place: len(place.values), default=None)


def _crosses_as_it_is(node: GraphNode) -> bool:
    """Whether a value may be sent: its dimensions lie in memory in their own order, the batch first."""
    # What crosses arrives contiguous. A slice that becomes dense is read alike, but an operator that is given a
    # transposed tensor in another order may choose another kernel and round otherwise.
    return _is_a_batch(node) and node.order is not None and list(node.order) == sorted(node.order)


def _crosses_permuted(node: GraphNode) -> bool:
    """Whether a value may be sent at least when its dimensions are put into another order, or copied into theirs.

    A view may not: what it views can cross instead.
    """
    has_own_memory = not node.storage or packet_of(node) not in MOVING
    return _crosses_as_it_is(node) or (_is_a_batch(node) and has_own_memory and node.order is not None)


def per_sample(node: GraphNode) -> tuple[int, ...]:
    """The shape of one sample of a value that may cross."""
    return tuple(dim.fixed for dim in (node.shape or ())[1:])


def _with_one_as_asked(kept: list[Frontier], there: Sequence[Frontier]) -> list[Frontier]:
    if not there or any(frontier in there for frontier in kept):
        return kept
    minimum = min(there, key=lambda frontier: frontier.nbytes)
    return sorted([*kept, minimum], key=lambda frontier: frontier.after)


def _legal(graph: Graph, first: Frontier, may_cross: Callable[[GraphNode], bool], asked: range) -> Iterator[Frontier]:
    """Every place that few enough values cross, each of which may; of places that the same ones cross, the first."""
    flow = Flow(graph)
    values = {node.name: node for node in (*first.values, *graph.nodes)}
    shrink = _Shrink(flow, values, may_cross)
    seen = {frozenset(first.names)}
    live = list(graph.inputs)
    for index, node in enumerate(graph.nodes):
        live = [name for name in live if flow.last_use.get(name, -1) > index]
        if node.name not in flow.data:
            continue
        if flow.last_use.get(node.name, -1) > index:
            live.append(node.name)
        names = live if len(live) <= 1 else list(dict.fromkeys(map(shrink.source, live)))
        here = Frontier(index, tuple(sorted((values[name] for name in names), key=_nbytes, reverse=True)))
        if here.names not in seen and all(map(may_cross, here.values)) and _is_legal(here, flow, asked):
            yield here
            seen.add(frozenset(here.names))


def _input_frontier(graph: Graph, inputs: Sequence[TensorSpec]) -> Frontier:
    """The network's inputs, as the values that cross cut 1."""
    named = zip(graph.inputs, inputs, strict=True)
    return Frontier(-1, tuple(_input(name, spec) for name, spec in named))


def _input(name: str, spec: TensorSpec) -> GraphNode:
    shape = (_BATCH, *(Dim(size) for size in spec.shape))
    return GraphNode(name=name, op="", shape=shape, order=tuple(range(len(shape))), dtype=spec.dtype)


def _is_legal(frontier: Frontier, flow: Flow, asked: range) -> bool:
    return (
        1 <= len(frontier.values) <= (_MAX_TENSORS_AS_ASKED if frontier.after in asked else _MAX_TENSORS)
        # Two views of one memory would arrive as two copies.
        and len({flow.roots[name] for name in frontier.names}) == len(frontier.values)
        and not any(frontier.after in span for span in flow.entangled)
    )


def _is_worth_two(frontier: Frontier, singles: Sequence[Frontier]) -> bool:
    before = [single for single in singles if single.after < frontier.after]
    behind = [single for single in singles if single.after > frontier.after]
    if not before or not behind:
        return True
    return frontier.nbytes < before[-1].nbytes or frontier.nbytes < behind[0].nbytes


def _is_a_batch(node: GraphNode) -> bool:
    """Samples along the first dimension, all of one fixed shape and a dtype that can be sent."""
    if not node.shape or node.dtype not in DTYPE_BYTES:
        return False
    return node.shape[0] == _BATCH and all(dim.per_sample == 0 for dim in node.shape[1:])


class _Shrink:
    """Finds the smallest value, and of equals the earliest, from which another can be made again cheaply."""

    def __init__(self, flow: Flow, values: Mapping[str, GraphNode], may_cross: Callable[[GraphNode], bool]) -> None:
        self._flow = flow
        self._values = values
        self._may_cross = may_cross
        self._places = {name: place for place, name in enumerate(values)}
        self._found: dict[str, str] = {}

    def source(self, name: str) -> str:
        """The name of that value; ``name`` itself where there is none."""
        if name not in self._found:
            self._found[name] = self._smallest(name)
        return self._found[name]

    def _smallest(self, name: str) -> str:
        sizes = {ancestor: _nbytes(self._values[ancestor]) for ancestor in self._ancestors(name)}
        no_larger = [size for size in sizes if sizes[size] <= _nbytes(self._values[name])]
        return min(no_larger, key=lambda item: (sizes[item], self._places[item]), default=name)

    def _ancestors(self, name: str) -> Iterator[str]:
        """The values through which all of it has passed, and after which it was changed cheaply, latest first."""
        open_ends = {name}
        while open_ends:
            latest = max(open_ends, key=self._places.__getitem__)
            if not self._is_cheap(latest):
                return
            open_ends.remove(latest)
            open_ends.update(read for read in reads(self._values[latest]) if read in self._flow.data)
            if len(open_ends) == 1 and self._may_cross(self._values[next(iter(open_ends))]):
                yield from open_ends

    def _is_cheap(self, name: str) -> bool:
        """Whether the value can be made again from what it was made of, which nobody has written to since."""
        node = self._values[name]
        if not node.op or packet_of(node) not in _CHEAP:
            return False
        return not any(self._flow.is_written_later(read) for read in (name, *reads(node)))


def _nbytes(node: GraphNode) -> int:
    """Of a batch of one sample; of a value whose shape or dtype is not known, more than any other has."""
    if not node.shape or node.dtype not in DTYPE_BYTES:
        return 1 << 62
    return math.prod(dim.fixed + dim.per_sample for dim in node.shape) * DTYPE_BYTES[node.dtype]


_FLAT = "__flat"
_BACK = "__back"
_TURNED, _LAID = "__turned", "__laid"


def transposed_values(graph: Graph, inputs: Sequence[TensorSpec], *, reach: int, asked: int) -> frozenset[str]:
    """Names of the values that stand at a frontier but lie in memory in another order than that of their dimensions.

    Args:
        graph: the whole network.
        inputs: specifications of its inputs.
        reach: index of the last node that matters.
        asked: index of the last node of the layer that the user named; ``len(nodes)`` where there is none.
    """
    found = _frontiers(graph, inputs, _crosses_permuted, asked=range(asked, reach + 1))
    values = [value for frontier in found if frontier.after <= reach for value in frontier.values]
    return frozenset(value.name for value in values if value.order != tuple(range(len(value.order or ()))))


def contiguous_copies(graph: Graph, names: Collection[str]) -> Graph:
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
            nodes.extend(_there_and_back(replace(nodes[-1], writes=())))
            back[node.name] = Ref(nodes[-1].name)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(replace_values(output, back) for output in graph.outputs))


def origin(graph: Graph, node: GraphNode) -> GraphNode:
    """The node whose value this one shows in the order of its memory; the node itself where it is none of those."""
    if not node.name.endswith(_FLAT):
        return node
    return next(candidate for candidate in graph.nodes if candidate.name == node.name.removesuffix(_FLAT))


def is_put_back(node: GraphNode) -> bool:
    """Whether the node only puts back what crosses; see ``contiguous_copies``."""
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
    found = _frontiers(graph, inputs, _crosses_as_it_is, asked=range(asked, reach + 1))
    names: dict[str, int] = {}
    nonnegative = _from_relu(graph)
    kept = _reaching_the_last([frontier for frontier in found if frontier.after <= reach], graph)
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


def split_encoder_outputs(
    graph: Graph, inputs: Sequence[TensorSpec], changing: Collection[str]
) -> tuple[Graph, frozenset[str]]:
    """The graph with what is frozen behind each encoder's own narrowest place moved behind all that is before one.

    With it the names of what was moved.

    Where an adapter is trained within a layer, what is frozen of that layer is computed by then too, and each encoder
    would have half a dozen tensors cross. So each ends where the fewest tensors of it cross behind its first weights;
    of places that are equally narrow, at the last.

    Args:
        graph: the graph with its frozen layers first (``models.graph.frozen_first``).
        inputs: specifications of its inputs, which the encoders share.
        changing: names of the nodes at which it stops being a fixed function of the input.
    """
    reach = frozen_reach(graph, changing)
    encoders = _encoders(graph, reach)
    late = frozenset(name for encoder in encoders for name in _behind(graph, inputs, encoder, encoders, changing))
    frozen = sorted(graph.nodes[: reach + 1], key=lambda node: node.name in late)
    return replace(graph, nodes=(*frozen, *graph.nodes[reach + 1 :])), late


def _encoders(graph: Graph, reach: int) -> list[set[str]]:
    """Names of the frozen nodes that hang together without the inputs, for each such group with weights."""
    data, inputs = Flow(graph).data, set(graph.inputs)
    groups: list[set[str]] = []
    for node in graph.nodes[: reach + 1]:
        if node.name in data:
            near = {node.name, *(name for name in reads(node) if name in data and name not in inputs)}
            joined = [group for group in groups if not group.isdisjoint(near)]
            groups = [group for group in groups if group.isdisjoint(near)] + [near.union(*joined)]
    weights = {name for name, _ in graph.leaves}
    reading = {node.name for node in graph.nodes if not weights.isdisjoint(reads(node))}
    return [group for group in groups if not group.isdisjoint(reading)]


def _behind(
    graph: Graph,
    inputs: Sequence[TensorSpec],
    encoder: set[str],
    encoders: Sequence[set[str]],
    changing: Collection[str],
) -> Iterator[str]:
    """Names of an encoder's nodes behind its narrowest place; none where it has no such place."""
    others = {name for other in encoders if other is not encoder for name in other}
    # To this encoder the others are as constant as weights are.
    alone = replace(
        graph,
        nodes=tuple(node for node in graph.nodes if node.name not in others),
        leaves=(*graph.leaves, *((name, name) for name in sorted(others))),
    )
    weights = {name for name, _ in graph.leaves}
    first = next(
        place for place, node in enumerate(alone.nodes) if node.name in encoder and not weights.isdisjoint(reads(node))
    )
    place = narrowest_frontier(alone, inputs, _crosses_permuted, among=range(first, frozen_reach(alone, changing) + 1))
    if place is not None:
        yield from (node.name for node in alone.nodes[place.after + 1 :] if node.name in encoder)
