"""Reads from a graph's operations whether each sample comes out the same whatever samples are beside it.

That is so where every operation is one that gives each sample its own rows whatever their values are, by the operations
and the dimensions that the batch lies along. ``models.row_check`` runs what does not say so.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from frostline.core import Dim, Graph, GraphNode, TensorSpec
from frostline.core.errors import FrostlineError
from frostline.core.graph import Argument, references
from frostline.engines.graph_runner import Runner, leaf_values, resolve_allowed
from frostline.models.graph import packet_of, reads

__all__ = ("keeps_rows_apart", "keeps_rows_apart_by_runs")

_BATCH = Dim(0, 1)
# Two batches whose dimensions tell what grows with the batch, and by how much; and the one operator that may say a
# batch's size: what is computed of sizes could be as it should at these two alone.
_RUNS = (8, 9)
_SIZE = "aten.sym_size.int"

_ONE_BY_ONE = """
abs add alias bitwise_and bitwise_not clamp clamp_min clone contiguous cos detach div elu eq exp full_like ge gelu
gt hardsigmoid hardswish hardtanh le leaky_relu lift_fresh_copy log logical_and logical_not lt masked_fill maximum
minimum mish mul ne neg ones_like pow reciprocal relu relu6 rsqrt rsub sigmoid silu sin softplus sqrt sub tanh to
to_copy type_as where zeros_like
"""
"""Operators that compute each number from those at its place, broadcast."""
_OF_IMAGES = {
    **dict.fromkeys(("conv1d", "adaptive_avg_pool1d"), 3),
    **dict.fromkeys(("conv2d", "adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"), 4),
    **dict.fromkeys(("upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d", "pixel_shuffle"), 4),
}
"""Operators that compute each sample of a batch apart, by the dimensions of what they take with the batch first."""
_ALONG = {
    **dict.fromkeys(("cumsum", "log_softmax", "mean", "narrow", "select", "slice", "softmax", "sum"), 1),
    **dict.fromkeys(("chunk", "flip", "split", "split_with_sizes", "squeeze", "unbind"), 1),
    "roll": 2,
}
"""Operators that mix numbers along dimensions alone, by the place of these among their arguments."""
_SECOND = {"chunk": 2, "split": 2, "split_with_sizes": 2}  # of these it is elsewhere, and the first one by default
_PARTING = frozenset({"chunk", "split", "split_with_sizes", "unbind"})


def keeps_rows_apart(graph: Graph, inputs: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether the operations of a graph are all known to give each sample the same in any company.

    False says nothing but that one of them is not.

    Args:
        graph: graph whose operations have the shapes of their trace: those must not come from untrusted clients.
        inputs: specifications of its inputs.
        tensors: weights by the names in ``graph.leaves``.
    """
    known = _RowsApart()
    for name, spec in zip(graph.inputs, inputs, strict=True):
        known.add(name, (_BATCH, *map(Dim, spec.shape)))
    for name, path in graph.leaves:
        known.add(name, tuple(map(Dim, tensors[path].shape)))
    return all(map(known.follows, graph.nodes))


def keeps_rows_apart_by_runs(graph: Graph, inputs: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor]) -> bool:
    """The same of a graph of which nobody is trusted to know the dimensions: it runs on the shapes of two batches.

    Args:
        graph: graph from wherever it came.
        inputs: specifications of its inputs.
        tensors: weights by the names in ``graph.leaves``; their shapes are enough.
    """
    leaves = [torch.empty_like(leaf, device="meta") for leaf in leaf_values(graph, tensors)]
    seen: list[list[Any]] = []
    for rows in _RUNS:
        batch = [torch.empty((rows, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta") for spec in inputs]
        first, made = len(batch) + len(leaves), list[Any]()

        def observe(index: int, values: Sequence[Any], first: int = first, made: list[Any] = made) -> None:
            value = values[first + index]
            made.append(value.shape if isinstance(value, torch.Tensor) else value)

        try:
            with torch.no_grad():
                Runner(graph, device="meta", resolve_op=resolve_allowed).run(batch, leaves, observe=observe)
        except _FAILING:
            return False
        seen.append(made)
    nodes = [_seen_node(*each) for each in zip(graph.nodes, *seen, strict=True)]
    known = [node for node in nodes if node is not None]
    return len(known) == len(nodes) and keeps_rows_apart(replace(graph, nodes=tuple(known)), inputs, tensors)


_FAILING = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, FrostlineError)


def _seen_node(node: GraphNode, few: Any, more: Any) -> GraphNode | None:
    """The node with the dimensions that two runs gave it; None where these say too little."""
    match few, more:
        case torch.Size(), torch.Size() if len(few) == len(more):
            return replace(node, shape=tuple(map(_dimension, few, more)), size=None)
        case list(), list():
            return replace(node, shape=None, size=None)
        case int(), int() if node.op == _SIZE:
            return replace(node, shape=None, size=_dimension(few, more))
        case _:
            return None


def _dimension(few: int, more: int) -> Dim:
    grows = (more - few) // (_RUNS[1] - _RUNS[0])
    return Dim(few - grows * _RUNS[0], grows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A value of which each sample has its own piece of one dimension, or that is the same whatever the samples are.

    Attributes:
        sizes: sizes of the dimensions; of the one along which the samples lie, that of one sample.
        axis: the dimension along which the samples lie; None where the value is the same for all samples.
    """

    sizes: tuple[int, ...]
    axis: int | None

    @property
    def from_the_end(self) -> int:
        """The dimension along which the samples lie, counted from behind; 0 where there is none."""
        return 0 if self.axis is None else self.axis - len(self.sizes)

    @property
    def piece(self) -> tuple[int, int]:
        """The dimension counted from behind, and what a sample has of it."""
        return self.from_the_end, 1 if self.axis is None else self.sizes[self.axis]

    def dims(self, given: Argument, more: int = 0) -> set[int]:
        """Dimensions as they are given to an operator, counted from the front; none where they are not numbers."""
        found = given if isinstance(given, tuple) else (given,)
        count = len(self.sizes) + more
        return {dim % count for dim in found if isinstance(dim, int)} if count else set()


class _RowsApart:
    """Follows through a graph along which dimension of each value the samples lie."""

    def __init__(self) -> None:
        self._known: dict[str, _Rows] = {}
        self._lists: set[str] = set()
        self._sizes: set[str] = set()

    def add(self, name: str, shape: Sequence[Dim] | None) -> bool:
        """Know a value by its shape; False where the samples do not lie along one dimension alone."""
        found = None if shape is None else _lying(shape)
        if found is not None:
            self._known[name] = found
        return found is not None

    def follows(self, node: GraphNode) -> bool:
        """Whether each sample's piece of the result depends on its own pieces alone."""
        if node.size is not None:
            self._sizes.add(node.name)
            return True
        read = reads(node)
        if packet_of(node) == "getitem":
            return self._lists.issuperset(read) and self.add(node.name, node.shape)
        is_for_all = all(name in self._known and self._known[name].axis is None for name in read)
        if node.shape is None:  # several values: their dimensions come with each
            self._lists.add(node.name)
            return is_for_all or (packet_of(node) in _PARTING and _is_along_others(node, self._taken(node), None))
        made = _lying(node.shape)
        if made is None or (is_for_all and made.axis is not None):
            return False
        self._known[node.name] = made
        return is_for_all or self._is_apart(node, made)

    def _is_apart(self, node: GraphNode, made: _Rows) -> bool:
        rule = _RULES.get(packet_of(node))
        has_sizes = not self._sizes.isdisjoint(reads(node)) and packet_of(node) not in _SIZED
        if rule is None or made.axis is None or has_sizes or references(tuple(value for _, value in node.kwargs)):
            return False
        taken = self._taken(node)
        return bool(taken) and rule(node, taken, made)

    def _taken(self, node: GraphNode) -> list[_Rows]:
        return [self._known[name] for name in references(node.args) if name not in self._sizes]


def _lying(shape: Sequence[Dim]) -> _Rows | None:
    axes = [place for place, dim in enumerate(shape) if dim.per_sample]
    if len(axes) > 1 or any(shape[axis].fixed for axis in axes):
        return None
    sizes = tuple(dim.per_sample or dim.fixed for dim in shape)
    return _Rows(sizes=sizes, axis=axes[0] if axes else None)


def _argument(node: GraphNode, place: int, name: str, default: Argument = None) -> Argument:
    return node.args[place] if len(node.args) > place else dict(node.kwargs).get(name, default)


def _is_one_by_one(_: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    return all(each.axis is None or each.piece == made.piece for each in taken)


def _is_of_images(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """The batch comes first, and weights are the same for all."""
    source, *weights = taken
    dims = _OF_IMAGES.get(packet_of(node), len(source.sizes))
    return (
        len(source.sizes) == dims
        and (source.axis, made.axis) == (0, 0)
        and source.sizes[0] == made.sizes[0]
        and all(weight.axis is None for weight in weights)
    )


def _is_normalised_alone(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    places = {"batch_norm": (5, "training"), "instance_norm": (5, "use_input_stats"), "dropout": (2, "train")}
    place, name = places[packet_of(node)]
    if packet_of(node) == "dropout":
        return _argument(node, place, name) is False and _is_one_by_one(node, taken, made)
    return _argument(node, place, name) is False and _is_of_images(node, taken, made)


def _is_along_others(node: GraphNode, taken: Sequence[_Rows], made: _Rows | None) -> bool:
    """What is mixed lies along other dimensions than the samples; ``made`` is None where parts of it are given."""
    source, packet = taken[0], packet_of(node)
    if source.axis is None or len(taken) > 1:
        return False
    default = 0 if packet in _PARTING else None
    place, name = _SECOND.get(packet, _ALONG[packet]), "dims" if packet in ("flip", "roll") else "dim"
    dims = source.dims(_argument(node, place, name, default))
    if not dims or source.axis in dims:
        return False
    if made is None:
        return True
    gone = len(source.sizes) - len(made.sizes)
    axis = source.axis - (sum(dim < source.axis for dim in dims) if gone else 0)
    return gone in (0, len(dims)) and made.axis == axis and made.sizes[axis] == source.sizes[source.axis]


def _is_joined(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """Tensors one behind the other, or a dimension more, along others than the samples."""
    more = packet_of(node) in ("stack", "unsqueeze")
    dims = taken[0].dims(_argument(node, 1, "dim", 0), int(more))
    first = taken[0]
    if first.axis is None or any((each.axis, len(each.sizes)) != (first.axis, len(first.sizes)) for each in taken):
        return False
    axis = first.axis + (int(min(dims) <= first.axis) if more else 0)
    pieces = {each.sizes[first.axis] for each in taken}
    return bool(dims) and (more or axis not in dims) and made.axis == axis and pieces == {made.sizes[axis]}


def _is_read_anew(_: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """The same numbers in their order, with as many before the samples' dimension."""
    [source] = taken
    if source.axis is None or made.axis is None:
        return False
    before = math.prod(source.sizes[: source.axis]) == math.prod(made.sizes[: made.axis])
    return before and math.prod(source.sizes) == math.prod(made.sizes)


def _is_turned(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    [source] = taken
    order = [*range(len(source.sizes))]
    match packet_of(node), node.args:
        case "permute", (_, tuple(dims)) if all(isinstance(dim, int) for dim in dims):
            order = [dim % len(order) for dim in dims if isinstance(dim, int)]
        case (("transpose" | "swapaxes"), (_, int(one), int(other))):
            order[one], order[other] = order[other], order[one]
        case "t", (_,):
            order.reverse()
        case _:
            return False
    sizes = tuple(source.sizes[dim] for dim in order)
    return made.axis is not None and order[made.axis] == source.axis and sizes == made.sizes


def _is_repeated(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """What is the same for all is given to each; what is each one's own stays where it is."""
    source = taken[0]
    return source.axis is None or (packet_of(node) != "repeat" and source.piece == made.piece)


def _is_multiplied(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """Matrices of each sample with others of its own, or with some that are the same for all."""
    packet, (first, *others) = packet_of(node), taken
    if packet in ("linear", "mm"):
        is_last = first.axis is None or first.from_the_end == -1
        return not is_last and first.piece == made.piece and all(each.axis is None for each in others)
    if packet == "scaled_dot_product_attention" and _argument(node, 4, "dropout_p", 0.0) != 0.0:
        return False
    rows_of_one = packet == "matmul" and first.from_the_end == -2 and others[0].axis is None
    is_of_each = all(each.axis is None or each.from_the_end <= -3 for each in taken)
    has_matrices = all(len(each.sizes) > 1 for each in taken)
    return has_matrices and (is_of_each or rows_of_one) and _is_one_by_one(node, taken, made)


def _is_of_the_last(node: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    """Only the last dimensions are worked on, which are not the samples'."""
    (source, *weights), given = taken, node.args[1]
    length = len(given) // (2 if "pad" in packet_of(node) else 1) if isinstance(given, tuple) else len(source.sizes)
    is_before = source.axis is not None and source.axis < len(source.sizes) - length
    return is_before and source.piece == made.piece and all(weight.axis is None for weight in weights)


def _is_looked_up(_: GraphNode, taken: Sequence[_Rows], made: _Rows) -> bool:
    table, places = taken
    return table.axis is None and places.axis == made.axis and places.sizes == made.sizes[:-1]


_Rule = Callable[[GraphNode, Sequence[_Rows], _Rows], bool]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_ONE_BY_ONE.split(), _is_one_by_one),
    **dict.fromkeys((*_OF_IMAGES, "group_norm"), _is_of_images),
    **dict.fromkeys(("batch_norm", "dropout", "instance_norm"), _is_normalised_alone),
    **dict.fromkeys(_ALONG, _is_along_others),
    **dict.fromkeys(("cat", "stack", "unsqueeze"), _is_joined),
    **dict.fromkeys(("flatten", "reshape", "unflatten", "view"), _is_read_anew),
    **dict.fromkeys(("permute", "swapaxes", "t", "transpose"), _is_turned),
    **dict.fromkeys(("expand", "repeat"), _is_repeated),
    **dict.fromkeys(("bmm", "linear", "matmul", "mm", "scaled_dot_product_attention"), _is_multiplied),
    **dict.fromkeys(("layer_norm", "pad"), _is_of_the_last),
    "embedding": _is_looked_up,
}
_SIZED = frozenset({"expand", "flatten", "repeat", "reshape", "unflatten", "view"})
