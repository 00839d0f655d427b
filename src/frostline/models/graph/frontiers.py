"""Finds the places in a graph that few tensors cross, and which tensors those are. Pure."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from frostline.core import Dim, Graph, GraphNode, TensorSpec
from frostline.models.graph.flow import MOVING, Flow, packet_of, reads

__all__ = (
    "DTYPE_BYTES",
    "Frontier",
    "crosses_as_it_is",
    "crosses_permuted",
    "frontiers",
    "narrowest",
    "per_sample",
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
"""What may cross a cut: the dtypes that NumPy and Arrow have too, and bfloat16 (``core.features``)."""

# Operators on single elements that cost next to nothing.
_POINTWISE = """
add and bitwise_and bitwise_not bitwise_or clamp div eq full_like ge gt index le logical_and logical_not logical_or lt
masked_fill mul ne neg new_ones new_zeros ones_like pad rsub sub to to_copy type_as where zeros_like
"""
_CHEAP = MOVING | frozenset(_POINTWISE.split())
_MAX_TENSORS = 2
# At the place that the user named: the feature maps that a segmentation head takes, or a pyramid of them.
_MAX_TENSORS_AS_ASKED = 8
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
        """Of the values."""
        return {node.name for node in self.values}

    @property
    def nbytes(self) -> int:
        """Bytes that cross, of a batch of one sample."""
        return sum(map(_nbytes, self.values))


def frontiers(
    graph: Graph, inputs: Sequence[TensorSpec], may_cross: Callable[[GraphNode], bool], *, asked: range
) -> list[Frontier]:
    """Every place in the graph worth a cut, in order, without the inputs themselves.

    One stands after each data node at which at most two values are still needed later. Two are worth it only where
    they ship less than the nearest place before or behind that one tensor crosses; where there is no such place on a
    side, that side does not object. Nor does an input of whole numbers: token ids are smaller than what any layer makes
    of them. Of two, one that is made cheaply from a value that is no larger (an attention mask
    for every row, from one for the whole text) does not cross: that value does, and the other is made again. Where the
    user named the last frozen layer and none of these stands behind it, the place there that the fewest bytes cross is
    one too, and up to eight tensors may cross it.

    Args:
        graph: the whole network.
        inputs: specifications of its inputs.
        may_cross: whether a value may cross at all; ``crosses_as_it_is`` or ``crosses_permuted``.
        asked: indices of the nodes from the end of the layer that the user named to the last that is frozen.
    """
    first = _input_frontier(graph, inputs)
    legal = list(_legal(graph, first, may_cross, asked))
    found = [frontier for frontier in legal if len(frontier.values) <= _MAX_TENSORS]
    places = found if all(value.dtype.startswith("int") for value in first.values) else [first, *found]
    singles = [frontier for frontier in places if len(frontier.values) == 1]
    kept = [frontier for frontier in found if len(frontier.values) == 1 or _is_worth_two(frontier, singles)]
    return _with_one_as_asked(kept, [frontier for frontier in legal if frontier.after in asked])


def narrowest(
    graph: Graph, inputs: Sequence[TensorSpec], may_cross: Callable[[GraphNode], bool], *, among: range
) -> Frontier | None:
    """The place that the fewest tensors cross, of equals the last; None where more than eight cross every one.

    Args:
        graph: the whole network.
        inputs: specifications of its inputs.
        may_cross: as for ``frontiers``.
        among: indices of the nodes after which it may stand.
    """
    places = [
        place for place in _legal(graph, _input_frontier(graph, inputs), may_cross, among) if place.after in among
    ]
    return min(reversed(places), key=lambda place: len(place.values), default=None)


def crosses_as_it_is(node: GraphNode) -> bool:
    """Whether a value may be sent: its dimensions lie in memory in their own order, the batch first."""
    # What crosses arrives contiguous. A slice that becomes dense is read alike, but an operator that is given a
    # transposed tensor in another order may choose another kernel and round otherwise.
    return _is_a_batch(node) and node.order is not None and list(node.order) == sorted(node.order)


def crosses_permuted(node: GraphNode) -> bool:
    """Whether a value may be sent at least when its dimensions are put into another order, or copied into theirs.

    A view may not: what it views can cross instead.
    """
    has_own_memory = not node.storage or packet_of(node) not in MOVING
    return crosses_as_it_is(node) or (_is_a_batch(node) and has_own_memory and node.order is not None)


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
