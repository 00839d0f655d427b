"""What the files of prefixes and of heads have in common: graphs as JSON, and tensors in the order of their memory."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError

from frostline.core import Graph, GraphNode, Ref, Token
from frostline.core.graph import Argument, references
from frostline.engines.base.operators import ALLOWED
from frostline.engines.base.schemas import MAX_REFERENCES, check_call
from frostline.errors import UnsafeArtifact

__all__ = (
    "BROKEN",
    "flat",
    "flattened",
    "graph_from_json",
    "graph_to_json",
    "header_bytes",
    "integer",
    "metadata",
    "orders_of",
    "restored",
    "text",
)

MAX_NODES = 20_000
_MAX_DEPTH = 4
_MAX_HEADER_BYTES = 32 << 20

BROKEN = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    SafetensorError,
    TypeError,
    ValueError,
)
"""What reading a file that is none of ours may raise."""


def metadata(body: bytes | memoryview) -> dict[str, str]:
    """The metadata of a safetensors file: eight bytes of length, then a JSON header.

    Raises:
        UnsafeArtifact: It is no such file, or its header is too large.
    """
    found: dict[str, str] = json.loads(bytes(body[8 : 8 + header_bytes(body)]))["__metadata__"]
    return found


def header_bytes(body: bytes | memoryview) -> int:
    """How long the JSON header of a safetensors file is.

    Raises:
        UnsafeArtifact: It is no such file, or its header is too large.
    """
    length = int.from_bytes(body[:8], "little")
    if not 2 <= length <= min(_MAX_HEADER_BYTES, len(body) - 8):
        raise UnsafeArtifact("this is not a safetensors file, or its header is too large")
    return length


def flattened(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """Tensors as they are written, and the order of the dimensions of those that do not lie in their own.

    A channels-last weight is written in the order of its memory, since kernels go by it.
    """
    dense = {name: flat(tensor).detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())}
    return dense, orders_of(tensors)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with its dimensions in the order of its memory."""
    return tensor.permute(_memory_order(tensor))


def orders_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """The order of the dimensions in memory, of those tensors that do not lie in their own."""
    orders = {name: _memory_order(tensor) for name, tensor in tensors.items()}
    return {name: order for name, order in orders.items() if order != sorted(order)}


def restored(tensors: Mapping[str, torch.Tensor], orders: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inverse of ``flattened``.

    Raises:
        UnsafeArtifact: An order is none.
    """
    read = {text(name): [integer(dim) for dim in order] for name, order in orders.items()}
    return {**tensors, **{name: _turned_back(tensors[name], order) for name, order in read.items()}}


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """A graph as plain values."""
    return {
        "inputs": list(graph.inputs),
        "leaves": [list(leaf) for leaf in graph.leaves],
        "nodes": [_node_to_json(node) for node in graph.nodes],
        "outputs": [_argument_to_json(output) for output in graph.outputs],
    }


def graph_from_json(value: Mapping[str, Any]) -> Graph:
    """The inverse of ``graph_to_json``, from wherever the values came; may also raise any of ``BROKEN``.

    Raises:
        UnsafeArtifact: The graph is too large, or names what is not allowed.
    """
    if len(value["nodes"]) > MAX_NODES:
        raise UnsafeArtifact(f"a graph has at most {MAX_NODES} nodes")
    nodes = tuple(_node(node) for node in value["nodes"])
    strange = sorted({node.op for node in nodes} - ALLOWED)
    if strange:
        raise UnsafeArtifact(f"operator {strange[0][:80]!r} is not allowed")
    for node in nodes:
        check_call(node)
    outputs = tuple(_argument(output, 0) for output in value["outputs"])
    if len(references(outputs)) > MAX_REFERENCES:
        raise UnsafeArtifact(f"a graph gives at most {MAX_REFERENCES} values")
    return Graph(
        inputs=tuple(text(name) for name in value["inputs"]),
        leaves=tuple((text(name), text(tensor)) for name, tensor in value["leaves"]),
        nodes=nodes,
        outputs=outputs,
    )


def text(value: object) -> str:
    """The value, if it is a name.

    Raises:
        UnsafeArtifact: The value is not a name.
    """
    if not isinstance(value, str) or len(value) > 1000:
        raise UnsafeArtifact("a name in the file is no text")
    return value


def integer(value: object) -> int:
    """The value, if it is a number that a file may hold.

    Raises:
        UnsafeArtifact: The value is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not -2 <= value < 1 << 40:
        raise UnsafeArtifact("a number in the file is no integer, or out of bounds")
    return value


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Its dimensions from the outermost in memory to the innermost; their own order where they do not lie dense."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    is_dense = tensor.permute(order).is_contiguous()
    return order if is_dense else list(range(tensor.dim()))


def _turned_back(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    if sorted(order) != list(range(tensor.dim())):
        raise UnsafeArtifact(f"a tensor of the file has {tensor.dim()} dimensions and not the order {order[:8]}")
    return tensor.permute(sorted(range(tensor.dim()), key=order.__getitem__))


def _node_to_json(node: GraphNode) -> dict[str, Any]:
    return {
        "name": node.name,
        "op": node.op,
        "args": [_argument_to_json(argument) for argument in node.args],
        "kwargs": {name: _argument_to_json(argument) for name, argument in node.kwargs},
    }


def _node(value: dict[str, Any]) -> GraphNode:
    return GraphNode(
        name=text(value["name"]),
        op=text(value["op"]),
        args=tuple(_argument(argument, 0) for argument in value["args"]),
        kwargs=tuple((text(name), _argument(argument, 0)) for name, argument in sorted(value["kwargs"].items())),
    )


def _argument_to_json(argument: Argument) -> Any:
    match argument:
        case Ref():
            return {"ref": argument.name}
        case Token():
            return {argument.kind: argument.value}
        case tuple():
            return [_argument_to_json(item) for item in argument]
        case float() if not math.isfinite(argument):
            return {"float": repr(argument)}
        case _:
            return argument


def _argument(value: Any, depth: int) -> Argument:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() if depth < _MAX_DEPTH:
            return tuple(_argument(item, depth + 1) for item in value)
        case {"ref": str(name)} if len(value) == 1:
            return Ref(name)
        case {"float": "inf" | "-inf" | "nan" as number} if len(value) == 1:
            return float(number)
        case {"dtype": str() as name} | {"layout": str() as name} | {"memory_format": str() as name} if len(value) == 1:
            return Token(next(iter(value)), name)
        case {"device": ""} if len(value) == 1:
            return Token("device", "")
        case _:
            raise UnsafeArtifact(f"a graph cannot hold the argument {str(value)[:80]!r}")
