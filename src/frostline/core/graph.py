"""A traced network as a value: nodes that name their operator, leaves that name their tensor, and cuts.

The same value describes the whole network in the user's process, the frozen prefix that travels to a
node (as JSON, see ``models.files.artifact``), the frozen rest of it at the trainer, and the trainable head.
"""

from dataclasses import dataclass

__all__ = ("Argument", "Cut", "Dim", "Graph", "GraphNode", "Ref", "TensorSpec", "Token", "references")


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of the node, input or leaf of that name."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One of a network's inputs.

    Attributes:
        shape: shape of one sample, without the batch.
        dtype: such as ``float32`` or ``int64``.
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
        order: its dimensions from the outermost in memory to the innermost, such as (0, 2, 3, 1) for channels-last;
            None where they do not lie dense in memory in any order.
        dtype: dtype of the result, such as ``float32``; empty where it is no tensor.
        storage: name of a value that the result shares its memory with; empty where the memory is its own.
        size: the result itself where it is an integer that the batch decides, such as ``aten.sym_size.int``.
        module: dotted path of the module whose forward made it; empty for the network itself.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place where computation may change sides.

    Attributes:
        number: 0 ships the encoded sample, 1 the network's input (decoded pixels), higher ones lie inside the network.
        name: where it is, in the words of the network, such as ``layer4.1.relu``.
        after: index of the last node that runs before it; -1 for cut 1, -2 for cut 0.
        tensors: names of the values that cross it.
        shapes: per-sample shape of each, without the batch dimension.
        dtypes: dtypes of each, such as ``float32``.
        bytes_per_sample: bytes that cross, uncompressed; 0 for cut 0, whose bytes are the sample's own.
        is_relu: the one tensor that crosses holds values of a ReLU and no others (its output, or a selection or
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
