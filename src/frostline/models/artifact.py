"""The prefix as a file that is data alone: a safetensors archive whose metadata holds the graph as JSON.

It is named by the SHA-256 of its bytes. Reading it runs nothing: operators are looked up on an allow-list,
sizes are bounded, and the graph is checked by a dry run on shapes before any tensor is made
(``engines.footprint``). A ``.pt2`` archive or a pickle would run code when loaded and is not accepted.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from frostline.core import Cut, Graph, Node, Ref, TensorSpec, Token
from frostline.core.graph import Argument
from frostline.engines.operators import ALLOWED
from frostline.errors import ModelError, UnsafeArtifact
from frostline.models.flow import changes, is_random, reads, uses_batch_statistics
from frostline.models.frontiers import DTYPE_BYTES

__all__ = ("Prefix", "digest_of", "read_prefix", "save_prefix", "write_prefix")

_FORMAT = 2
_KEY = "frostline.prefix"
# How safetensors names dtypes (its format's description, "dtype").
_SAFETENSORS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_MOST_NODES = 50_000
_MOST_DEPTH = 4
_MOST_GRAPH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefix:
    """The frozen part of a network, from its inputs to the frost line.

    Attributes:
        graph: its operations.
        cuts: every place where it may stop, cut 1 (the inputs) first, the frost line last.
        tensors: its weights by name, as in ``graph.leaves``, each in the memory order of the network's own.
    """

    graph: Graph
    cuts: tuple[Cut, ...]
    tensors: Mapping[str, torch.Tensor]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Per-sample shape of the pixels, or of the first of several inputs."""
        return self.cuts[0].shapes[0]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Shape and dtype of every input, in order."""
        return tuple(map(TensorSpec, self.cuts[0].shapes, self.cuts[0].dtypes))


def digest_of(body: bytes | memoryview) -> str:
    """The name of a prefix: SHA-256 of its file, in hexadecimal."""
    return hashlib.sha256(body).hexdigest()


def write_prefix(prefix: Prefix) -> bytes:
    """The file of a prefix; the same prefix gives the same bytes.

    Raises:
        ModelError: The frozen part uses an operator that nodes do not accept.
    """
    strange = sorted({node.op for node in prefix.graph.nodes} - ALLOWED)
    if strange:
        raise ModelError(f"the frozen part uses {', '.join(strange)}, which a node does not run; freeze less of it")
    text = json.dumps(_graph_to_json(prefix), sort_keys=True, separators=(",", ":"), allow_nan=False)
    tensors = {
        name: _flat(tensor).detach().cpu().contiguous().clone() for name, tensor in sorted(prefix.tensors.items())
    }
    # One key only: safetensors writes several in no fixed order, and the digest would change.
    return save_tensors(tensors, metadata={_KEY: text})


def save_prefix(prefix: Prefix, file: IO[bytes]) -> None:
    """Write the same prefix, tensor by tensor, so that it takes no memory beside the largest one.

    ``read_prefix`` reads it; its bytes, and so its digest, may differ from those of ``write_prefix``.
    """
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(_graph_to_json(prefix), allow_nan=False)}}
    start = 0
    for name, tensor in prefix.tensors.items():
        kind = {"dtype": _SAFETENSORS[tensor.dtype], "shape": list(_flat(tensor).shape)}
        header[name] = {**kind, "data_offsets": [start, start + tensor.nbytes]}
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in prefix.tensors.values():
        flat = _flat(tensor).detach().cpu().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)


def read_prefix(body: bytes | memoryview) -> Prefix:
    """Read the file of a prefix, from wherever it came.

    Raises:
        UnsafeArtifact: It is no such file, or names or declares what is not allowed.
    """
    try:
        graph = json.loads(_metadata(body)[_KEY])
        tensors = load_tensors(bytes(body))
        prefix = _prefix(graph, tensors)
    except (
        AttributeError,
        IndexError,
        KeyError,
        OverflowError,
        RecursionError,
        SafetensorError,
        TypeError,
        ValueError,
    ) as error:
        raise UnsafeArtifact(f"this is not a prefix: {type(error).__name__}: {error}") from error
    return prefix


def _metadata(body: bytes | memoryview) -> dict[str, str]:
    """The metadata of a safetensors file: eight bytes of length, then a JSON header."""
    length = int.from_bytes(body[:8], "little")
    if not 2 <= length <= min(_MOST_GRAPH_BYTES, len(body) - 8):
        raise UnsafeArtifact("this is not a safetensors file, or its header is too large")
    found: dict[str, str] = json.loads(bytes(body[8 : 8 + length]))["__metadata__"]
    return found


def _prefix(value: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Prefix:
    if value["format"] != _FORMAT:
        raise UnsafeArtifact(f"this prefix is of format {value['format']}; this node reads format {_FORMAT}")
    if len(value["nodes"]) > _MOST_NODES:
        raise UnsafeArtifact(f"a prefix has at most {_MOST_NODES} nodes")
    nodes = tuple(_node(node) for node in value["nodes"])
    strange = sorted({node.op for node in nodes} - ALLOWED)
    if strange:
        raise UnsafeArtifact(f"operator {strange[0]!r} is not allowed in a prefix")
    graph = Graph(
        inputs=tuple(_text(name) for name in value["inputs"]),
        leaves=tuple((_text(name), _text(tensor)) for name, tensor in value["leaves"]),
        nodes=nodes,
        outputs=tuple(_argument(output, 0) for output in value["outputs"]),
    )
    data = _data(graph)
    changing = [node.op for node in nodes if is_random(node) or uses_batch_statistics(node, data)]
    if changing:
        raise UnsafeArtifact(f"{changing[0]} depends on chance or on the batch, and a prefix may not")
    cuts = tuple(_cut(cut, len(nodes)) for cut in value["cuts"])
    if [cut.number for cut in cuts] != list(range(1, len(cuts) + 1)):
        raise UnsafeArtifact("a prefix has cuts numbered from 1")
    if not cuts or cuts[0].after != -1 or cuts[0].tensors != graph.inputs:
        raise UnsafeArtifact("the first cut of a prefix is its input")
    if any(one.after >= other.after for one, other in pairwise(cuts)):
        raise UnsafeArtifact("the cuts of a prefix stand in order, one behind a node at most")
    orders = {_text(name): [_integer(dim) for dim in order] for name, order in value["orders"].items()}
    turned = {name: _turned_back(tensors[name], order) for name, order in orders.items()}
    return Prefix(graph=graph, cuts=cuts, tensors={**tensors, **turned})


def _data(graph: Graph) -> set[str]:
    """Names of the values that depend on those of the input; in one pass, whatever the graph is."""
    found = set(graph.inputs)
    for node in graph.nodes:
        if not found.isdisjoint(reads(node)):
            found.update((node.name, changes(node)))
    return found


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Its dimensions from the outermost in memory to the innermost; their own order where they do not lie dense."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    is_dense = tensor.permute(order).is_contiguous()
    return order if is_dense else list(range(tensor.dim()))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A channels-last weight in the order of its memory, in which it is written: kernels go by the order."""
    return tensor.permute(_memory_order(tensor))


def _turned_back(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    if sorted(order) != list(range(tensor.dim())):
        raise UnsafeArtifact(f"a tensor of the prefix has {tensor.dim()} dimensions and not the order {order[:8]}")
    return tensor.permute(sorted(range(tensor.dim()), key=order.__getitem__))


def _graph_to_json(prefix: Prefix) -> dict[str, Any]:
    graph = prefix.graph
    orders = {name: _memory_order(tensor) for name, tensor in prefix.tensors.items()}
    return {
        "format": _FORMAT,
        "orders": {name: order for name, order in orders.items() if order != sorted(order)},
        "inputs": list(graph.inputs),
        "leaves": [list(leaf) for leaf in graph.leaves],
        "nodes": [_node_to_json(node) for node in graph.nodes],
        "outputs": [_argument_to_json(output) for output in graph.outputs],
        "cuts": [_cut_to_json(cut) for cut in prefix.cuts],
    }


def _node_to_json(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "op": node.op,
        "args": [_argument_to_json(argument) for argument in node.args],
        "kwargs": {name: _argument_to_json(argument) for name, argument in node.kwargs},
    }


def _node(value: dict[str, Any]) -> Node:
    return Node(
        name=_text(value["name"]),
        op=_text(value["op"]),
        args=tuple(_argument(argument, 0) for argument in value["args"]),
        kwargs=tuple((_text(name), _argument(argument, 0)) for name, argument in sorted(value["kwargs"].items())),
    )


def _cut_to_json(cut: Cut) -> dict[str, Any]:
    return {
        "number": cut.number,
        "name": cut.name,
        "after": cut.after,
        "tensors": list(cut.tensors),
        "shapes": [list(shape) for shape in cut.shapes],
        "dtypes": list(cut.dtypes),
        "bytes_per_sample": cut.bytes_per_sample,
        "is_relu": cut.is_relu,
    }


def _cut(value: dict[str, Any], nodes: int) -> Cut:
    cut = Cut(
        number=_integer(value["number"]),
        name=_text(value["name"]),
        after=_integer(value["after"]),
        tensors=tuple(_text(name) for name in value["tensors"]),
        shapes=tuple(tuple(_integer(size) for size in shape) for shape in value["shapes"]),
        dtypes=tuple(_text(dtype) for dtype in value["dtypes"]),
        bytes_per_sample=_integer(value["bytes_per_sample"]),
        is_relu=bool(value["is_relu"]),
    )
    if any(size < 0 for shape in cut.shapes for size in shape) or not set(cut.dtypes) <= set(DTYPE_BYTES):
        raise UnsafeArtifact(f"cut {cut.number} declares tensors that there are none of")
    if not -1 <= cut.after < nodes or not len(cut.tensors) == len(cut.shapes) == len(cut.dtypes) >= 1:
        raise UnsafeArtifact(f"cut {cut.number} does not make sense")
    return cut


def _argument_to_json(argument: Argument) -> Any:
    match argument:
        case Ref():
            return {"ref": argument.name}
        case Token():
            return {argument.kind: argument.value}
        case tuple():
            return [_argument_to_json(one) for one in argument]
        case float() if not math.isfinite(argument):
            return {"float": repr(argument)}
        case _:
            return argument


def _argument(value: Any, depth: int) -> Argument:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() if depth < _MOST_DEPTH:
            return tuple(_argument(one, depth + 1) for one in value)
        case {"ref": str(name)} if len(value) == 1:
            return Ref(name)
        case {"float": "inf" | "-inf" | "nan" as text} if len(value) == 1:
            return float(text)
        case {"dtype": str() as text} | {"layout": str() as text} | {"memory_format": str() as text} if len(value) == 1:
            return Token(next(iter(value)), text)
        case {"device": ""} if len(value) == 1:
            return Token("device", "")
        case _:
            raise UnsafeArtifact(f"a prefix cannot hold the argument {str(value)[:80]!r}")


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise UnsafeArtifact("a name in the prefix is no text")
    return value


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -2 <= value < 1 << 40:
        raise UnsafeArtifact("a number in the prefix is no integer, or out of bounds")
    return value
