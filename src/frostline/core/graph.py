"""A traced network as a value: nodes that name their operator, leaves that name their tensor, cuts, and lengths.

The same value describes the whole network in the user's process, the frozen prefix that travels to a node (as JSON,
see ``models.artifact``), the frozen rest of it at the trainer, and the trainable head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = (
    "Argument",
    "Cut",
    "Dim",
    "Graph",
    "GraphNode",
    "Lengths",
    "Ref",
    "Stretch",
    "TensorSpec",
    "Token",
    "at_length",
    "bucket_of",
    "buckets",
    "references",
    "stretches",
    "subgraph_for",
    "weightless_values",
)


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of the node, input or leaf of that name."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One of a network's inputs.

    Attributes:
        shape: shape of one sample, without the batch.
        dtype: the dtype, such as ``float32`` or ``int64``.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Token:
    """A constant that is no number: ``kind`` is dtype, device, layout or memory_format; ``value`` its name.

    A device token always means "where the graph runs", so that a trace made on one device runs on another.
    """

    kind: str
    value: str


Argument = object  # None, bool, int, float, str, Ref, Token, or a tuple of these


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension: ``per_sample * batch + fixed``."""

    fixed: int
    per_sample: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One operation.

    Attributes:
        name: unique in the graph; also the name of its result.
        op: overload name, such as ``aten.conv2d.default`` or ``operator.mul``.
        args: positional arguments: None, bool, int, float, str, Ref, Token, or tuples of these.
        kwargs: keyword arguments by name.
        shape: shape of the result; None where it is no tensor, or has a dimension that is no ``Dim``.
        order: the dimensions from the outermost in memory to the innermost, such as (0, 2, 3, 1) for channels-last;
            None where they do not lie dense in memory in any order.
        dtype: dtype of the result, such as ``float32``; empty where it is no tensor.
        storage: name of a value that the result shares its memory with; empty where the memory is its own.
        size: the result itself where it is an integer that the batch decides, such as ``aten.sym_size.int``.
        module: the dotted path of the module whose forward made it; empty for the network itself.
        writes: names of the values that it changes, as its schema says; of a graph that was read from a file, whose
            operators change their first argument alone, none.
    """

    name: str
    op: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    shape: tuple[Dim, ...] | None = None
    order: tuple[int, ...] | None = None
    dtype: str = ""
    storage: str = ""
    size: Dim | None = None
    module: str = ""
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place where computation may change sides.

    Attributes:
        number: 0 ships the encoded sample, 1 the network's input (decoded pixels), higher ones lie inside the network.
        name: the place, in the words of the network, such as ``layer4.1.relu``.
        after: index of the last node that runs before it; -1 for cut 1, -2 for cut 0.
        tensors: names of the values that cross it.
        shapes: the per-sample shape of each, without the batch dimension.
        dtypes: dtypes of each, such as ``float32``.
        bytes_per_sample: bytes that cross, uncompressed; 0 for cut 0, whose bytes are the sample's own.
        is_relu: True if the only tensor that crosses holds values of a ReLU alone (its output, or a selection or
            maximum of it), so that no value is below zero and many are zero; -0.0 and NaN may be among them.
    """

    number: int
    name: str
    after: int
    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    bytes_per_sample: int
    is_relu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes in an order in which each may run.

    Attributes:
        inputs: names of the values that come from outside, in order.
        leaves: parameters, buffers and constants: name in the graph to the name of the tensor.
        nodes: the operations.
        outputs: the values that leave, in order.
    """

    inputs: tuple[str, ...]
    leaves: tuple[tuple[str, str], ...]
    nodes: tuple[GraphNode, ...]
    outputs: tuple[Argument, ...]


def references(argument: Argument) -> list[str]:
    """Names of all values that an argument reads, in order of appearance."""
    if isinstance(argument, Ref):
        return [argument.name]
    if isinstance(argument, tuple):
        return [name for item in argument for name in references(item)]
    return []


_SHORTEST = 8
_MIN_STEP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A whole number among the arguments of an operation that grows with the number of tokens.

    Attributes:
        node: place of the operation in the graph.
        path: way to the number: place of the argument (positional ones first, then those with names), then places in
            the tuples that it consists of.
        per_token: amount that it grows by with each token.
    """

    node: int
    path: tuple[int, ...]
    per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How a graph that was traced at one number of tokens becomes one for fewer.

    Attributes:
        max_length: number of tokens at which it was traced.
        stretches: all numbers in it that grow with the tokens.
        shapes: growth of every dimension, for each tensor of each cut.
    """

    max_length: int
    stretches: tuple[Stretch, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]


def buckets(max_length: int) -> tuple[int, ...]:
    """The lengths to which texts are padded, rising: 8, and then steps of an eighth to a quarter of what is reached.

    They are multiples of 8, but for the last one, which is ``max_length``. So few shapes are seen, 20 for 512 tokens,
    and padding is less than a tenth of what is computed for real texts.
    """
    found = [_SHORTEST]
    while found[-1] < max_length:
        found.append(found[-1] + max(_MIN_STEP, (1 << (found[-1].bit_length() - 1)) >> 2))
    return (*(length for length in found if length < max_length), max_length)


def bucket_of(tokens: int, lengths: Sequence[int]) -> int:
    """The least of some rising lengths that holds so many tokens, which depends on nothing else."""
    return next((length for length in lengths if length >= tokens), lengths[-1])


def stretches(full: Graph, short: Graph, tokens: int, fewer: int) -> tuple[Stretch, ...] | None:
    """The numbers in which a network's graph differs from that of fewer tokens; None where more than these differ.

    Args:
        full: graph of the network at ``tokens`` tokens.
        short: graph of the same network at ``fewer`` tokens.
        tokens: number of tokens of the one.
        fewer: number of tokens of the other.
    """
    if (full.inputs, full.leaves, full.outputs) != (short.inputs, short.leaves, short.outputs):
        return None
    if [_kind(node) for node in full.nodes] != [_kind(node) for node in short.nodes]:
        return None
    found: list[Stretch] = []
    for place, (node, other) in enumerate(zip(full.nodes, short.nodes, strict=True)):
        grown = _grown(_arguments(node), _arguments(other), tokens - fewer, ())
        if grown is None:
            return None
        found += [Stretch(node=place, path=path, per_token=per_token) for path, per_token in grown]
    return tuple(found)


def at_length(graph: Graph, cuts: Sequence[Cut], lengths: Lengths, length: int) -> tuple[Graph, tuple[Cut, ...]]:
    """The graph and the cuts for fewer tokens than they were traced at."""
    less = lengths.max_length - length
    nodes = list(graph.nodes)
    for stretch in lengths.stretches:
        nodes[stretch.node] = _shrunk(nodes[stretch.node], stretch.path, stretch.per_token * less)
    shorter = [
        replace(cut, shapes=tuple(_less(shape, grows, less) for shape, grows in zip(cut.shapes, growth, strict=True)))
        for cut, growth in zip(cuts, lengths.shapes, strict=True)
    ]
    return replace(graph, nodes=tuple(nodes)), tuple(shorter)


def weightless_values(graph: Graph, weights: Iterable[str]) -> frozenset[str]:
    """The values into which no weight enters, such as masks: they cost next to nothing at any length.

    Args:
        graph: graph to look at.
        weights: names in it of the leaves that are weights.
    """
    heavy = set(weights)
    for node in graph.nodes:
        if not heavy.isdisjoint(references((node.args, tuple(value for _, value in node.kwargs)))):
            heavy.add(node.name)
    return frozenset({*graph.inputs, *(node.name for node in graph.nodes)} - heavy)


def subgraph_for(graph: Graph, names: Sequence[str]) -> Graph:
    """The part of a graph that some of its values need, which it gives in this order."""
    wanted, kept = set(names), []
    for node in reversed(graph.nodes):
        if node.name in wanted:
            kept.append(node)
            wanted.update(references((node.args, tuple(value for _, value in node.kwargs))))
    return replace(graph, nodes=tuple(reversed(kept)), outputs=tuple(map(Ref, names)))


def _kind(node: GraphNode) -> tuple[object, ...]:
    return node.name, node.op, len(node.args), tuple(name for name, _ in node.kwargs)


def _arguments(node: GraphNode) -> tuple[Argument, ...]:
    return (*node.args, *(value for _, value in node.kwargs))


def _grown(
    value: Argument, other: Argument, fewer: int, path: tuple[int, ...]
) -> list[tuple[tuple[int, ...], int]] | None:
    """Ways to all numbers that differ, and their growth with a token; None where something else does."""
    if isinstance(value, tuple) and isinstance(other, tuple) and len(value) == len(other):
        found = [_grown(*pair, fewer, (*path, place)) for place, pair in enumerate(zip(value, other, strict=True))]
        return None if None in found else [grown for part in found if part is not None for grown in part]
    if value == other and type(value) is type(other):
        return []
    if type(value) is not int or type(other) is not int or (value - other) % fewer:
        return None
    return [(path, (value - other) // fewer)]


def _shrunk(node: GraphNode, path: tuple[int, ...], less: int) -> GraphNode:
    place, rest = path[0], path[1:]
    if place < len(node.args):
        return replace(node, args=_with_less(node.args, path, less))
    values = list(node.kwargs)
    name, value = values[place - len(node.args)]
    values[place - len(node.args)] = (name, _with_less((value,), (0, *rest), less)[0])
    return replace(node, kwargs=tuple(values))


def _with_less(values: tuple[Argument, ...], path: tuple[int, ...], less: int) -> tuple[Argument, ...]:
    """The values with a number less where a path leads; ``LookupError`` or ``TypeError`` where it leads to none."""
    place, value = path[0], values[path[0]]
    if len(path) > 1:
        if not isinstance(value, tuple):
            raise TypeError("a path leads into what is no tuple")
        made: Argument = _with_less(value, path[1:], less)
    elif type(value) is not int:
        raise TypeError("a path leads to what is no whole number")
    else:
        made = value - less
    return (*values[:place], made, *values[place + 1 :])


def _less(shape: Sequence[int], grows: Sequence[int], less: int) -> tuple[int, ...]:
    return tuple(size - per_token * less for size, per_token in zip(shape, grows, strict=True))
