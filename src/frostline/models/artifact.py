"""The prefix as a file that is data alone: graph as JSON and tensors, written, read, and checked before use.

The prefix as a file that is data alone: a safetensors archive whose metadata holds the graph as JSON.

It is named by the SHA-256 of its bytes. Reading it runs nothing: operators are looked up on an allow-list, sizes are
bounded, and the graph is checked by a dry run on shapes before any tensor is made (``engines.measure``). A ``.pt2``
archive or a pickle would run code when loaded and is not accepted.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from frostline.core import Cut, Graph, GraphNode, Ref, TensorSpec, Token
from frostline.core.declared import parse_json, refuse_unknown_fields
from frostline.core.errors import BadRequest, ModelError, OverBudget, SettingError, UnsafeArtifact
from frostline.core.graph import Argument, Lengths, Stretch, at_length, buckets, references
from frostline.engines.graph_runner import ALLOWED, MAX_REFERENCES, check_call, leaf_values, refused_call
from frostline.engines.measure import (
    ROWS,
    CutMemory,
    GraphLimits,
    Operations,
    count_operations,
    count_operations_and_peaks,
    dry_run,
)
from frostline.engines.protocols import Footprint
from frostline.models.cuts import DTYPE_BYTES
from frostline.models.graph import changes, is_random, reads, uses_batch_statistics
from frostline.models.rows_apart import keeps_rows_apart_by_runs
from frostline.preprocess.tokens import MAX_TOKENIZER_BYTES, opened_tokenizer, why_unbounded
from frostline.wire.pieces import MIN_BYTES

__all__ = (
    "BROKEN",
    "GRAPH_FIELDS",
    "Inspection",
    "Prefix",
    "dense_bytes",
    "digest_of",
    "file_bytes",
    "flatten_tensor",
    "flatten_tensors",
    "graph_from_json",
    "graph_to_json",
    "header_of",
    "inspect_graph",
    "inspect_prefix",
    "integer",
    "metadata",
    "named_pieces",
    "read_outline",
    "read_prefix",
    "restore_tensors",
    "save_prefix",
    "text",
    "tokenizer_of",
    "try_tokenizer",
    "write_prefix",
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
        UnsafeArtifact: The file is no safetensors file, or its header is too large.
    """
    found: dict[str, str] = json.loads(bytes(body[8 : 8 + _header_bytes(body)]))["__metadata__"]
    return found


def _header_bytes(body: bytes | memoryview) -> int:
    """How long the JSON header of a safetensors file is.

    Raises:
        UnsafeArtifact: The file is no safetensors file, or its header is too large.
    """
    length = int.from_bytes(body[:8], "little")
    if not 2 <= length <= min(_MAX_HEADER_BYTES, len(body) - 8):
        raise UnsafeArtifact("this is not a safetensors file, or its header is too large")
    return length


def flatten_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """Tensors as they are written, and the order of the dimensions of those that do not lie in their own.

    A channels-last weight is written in the order of its memory, since kernels go by it.
    """
    dense = {
        name: flatten_tensor(tensor).detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())
    }
    return dense, _orders_of(tensors)


def flatten_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with its dimensions in the order of its memory."""
    return tensor.permute(_memory_order(tensor))


def _orders_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """The order of the dimensions in memory, of those tensors that do not lie in their own."""
    orders = {name: _memory_order(tensor) for name, tensor in tensors.items()}
    return {name: order for name, order in orders.items() if order != sorted(order)}


def restore_tensors(tensors: Mapping[str, torch.Tensor], orders: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inverse of ``flatten_tensors``.

    Raises:
        UnsafeArtifact: An order is none.
    """
    read = {text(name): [integer(dim) for dim in order] for name, order in orders.items()}
    return {**tensors, **{name: _turned_back(tensors[name], order) for name, order in read.items()}}


GRAPH_FIELDS = ("inputs", "leaves", "nodes", "outputs")
"""What ``graph_to_json`` gives, by name."""


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
    refuse_unknown_fields(value, ("name", "op", "args", "kwargs"), "an operation")
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


_MAX_STRETCHES = 100_000
_MAX_TOKENS = 8192  # as of preprocess.text


def _lengths_to_json(lengths: Lengths) -> dict[str, Any]:
    """How a graph becomes one for fewer tokens, as plain values."""
    return {
        "max_length": lengths.max_length,
        "stretches": [[stretch.node, list(stretch.path), stretch.per_token] for stretch in lengths.stretches],
        "shapes": [[list(grows) for grows in cut] for cut in lengths.shapes],
    }


def _lengths_from_json(value: dict[str, Any], graph: Graph, cuts: Sequence[Cut]) -> Lengths:
    """The inverse of ``_lengths_to_json``, from wherever it came; may also raise any of ``graph_file.BROKEN``.

    Raises:
        UnsafeArtifact: The lengths do not fit the graph.
    """
    refuse_unknown_fields(value, ("max_length", "stretches", "shapes"), "lengths")
    if len(value["stretches"]) > _MAX_STRETCHES:
        raise UnsafeArtifact(f"a prefix names up to {_MAX_STRETCHES} numbers that grow with the tokens")
    lengths = Lengths(
        max_length=integer(value["max_length"]),
        stretches=tuple(
            Stretch(node=integer(node), path=tuple(map(integer, path)), per_token=integer(per_token))
            for node, path, per_token in value["stretches"]
        ),
        shapes=tuple(tuple(tuple(map(integer, grows)) for grows in cut) for cut in value["shapes"]),
    )
    places = [place for stretch in lengths.stretches for place in (stretch.node, *stretch.path)]
    if min(places, default=0) < 0 or not all(stretch.path for stretch in lengths.stretches):
        raise UnsafeArtifact("a number that grows with the tokens is named by places from 0 on")
    if not 1 <= lengths.max_length <= _MAX_TOKENS or cuts[0].shapes != ((2, lengths.max_length),):
        raise UnsafeArtifact("a prefix that grows with the tokens takes ids and mask of as many as it says")
    shapes = at_length(graph, cuts, lengths, buckets(lengths.max_length)[0])[1]
    if any(size < 0 for cut in shapes for shape in cut.shapes for size in shape):
        raise UnsafeArtifact("a tensor of fewer tokens has a negative size")
    return lengths


_FORMAT = 2
# Bytes that tell the length of the header.
_LENGTH = 8
_KEY = "frostline.prefix"
_TOKENIZER = "frostline.tokenizer"
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefix:
    """The frozen part of a network, from its inputs to the frost line.

    Attributes:
        graph: the operations.
        cuts: every place where it may stop, cut 1 (the inputs) first, the frost line last.
        tensors: the weights by name, as in ``graph.leaves``, each in the memory order of the network's own.
        tokenizer: JSON of the tokenizer that makes its input of texts; empty where there is none.
        lengths: the way that it runs on fewer tokens than it was traced at; None where texts are padded, and of images.
    """

    graph: Graph
    cuts: tuple[Cut, ...]
    tensors: Mapping[str, torch.Tensor]
    tokenizer: bytes = b""
    lengths: Lengths | None = None

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
    strange = sorted({*map(refused_call, prefix.graph.nodes)} - {""})
    if strange:
        raise ModelError(f"the frozen part uses {', '.join(strange)}, which a node does not run; freeze less of it")
    tensors, _ = flatten_tensors(prefix.tensors)
    if prefix.tokenizer:
        tensors[_TOKENIZER] = torch.frombuffer(bytearray(prefix.tokenizer), dtype=torch.uint8)
    about = json.dumps(_to_json(prefix), sort_keys=True, separators=(",", ":"), allow_nan=False)
    # One key only: safetensors writes several in no fixed order, and the digest would change.
    return save_tensors(tensors, metadata={_KEY: about})


def save_prefix(prefix: Prefix, file: IO[bytes]) -> None:
    """Write the same prefix without its tokenizer, tensor by tensor, so that it takes no memory beside the largest one.

    ``read_prefix`` reads it; its bytes, and so its digest, may differ from those of ``write_prefix``.
    """
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(_to_json(prefix), allow_nan=False)}}
    start = 0
    for name, tensor in prefix.tensors.items():
        kind = {"dtype": _SAFETENSORS[tensor.dtype], "shape": list(flatten_tensor(tensor).shape)}
        header[name] = {**kind, "data_offsets": [start, start + tensor.nbytes]}
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    file.write(len(text).to_bytes(8, "little") + text)
    for name in prefix.tensors:
        file.write(_dense(prefix.tensors[name]).data)


def named_pieces(prefix: Prefix) -> dict[str, str]:
    """Names of the tensors that other prefixes may share, by the SHA-256 of their bytes in the file."""
    large = [name for name, tensor in prefix.tensors.items() if tensor.nbytes >= MIN_BYTES]
    names = [*large, *([_TOKENIZER] if len(prefix.tokenizer) >= MIN_BYTES else [])]
    return {digest_of(file_bytes(prefix, name)): name for name in names}


def file_bytes(prefix: Prefix, tensor: str) -> memoryview:
    """The bytes of a tensor as they stand in the prefix's file; a view of it where it lies in memory like that."""
    return memoryview(prefix.tokenizer) if tensor == _TOKENIZER else dense_bytes(prefix.tensors[tensor])


def dense_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor as they would stand in a prefix's file; a view of it where it lies in memory like that."""
    return _dense(tensor).data


def _dense(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return flatten_tensor(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def read_prefix(body: bytes | memoryview) -> Prefix:
    """Read the file of a prefix, from wherever it came.

    Raises:
        UnsafeArtifact: The file is no prefix, or names or declares something that is not allowed.
    """
    try:
        graph = parse_json(metadata(body)[_KEY])
        tensors = load_tensors(bytes(body))
        prefix = _prefix(graph, tensors)
    except (BadRequest, *BROKEN) as error:
        raise UnsafeArtifact(f"this is not a prefix: {type(error).__name__}: {str(error)[:300]}") from error
    return prefix


def header_of(body: bytes | memoryview) -> bytes:
    """The header of a prefix's file: all but the numbers of its weights.

    Raises:
        UnsafeArtifact: The file is no prefix, or its header is too large.
    """
    return bytes(body[_LENGTH : _LENGTH + _header_bytes(body)])


def tokenizer_of(body: bytes | memoryview) -> bytes:
    """The JSON of the tokenizer in a prefix's file, before anything else of it is read; empty where there is none.

    Raises:
        UnsafeArtifact: The file is no prefix, or its tokenizer is too large.
    """
    header = header_of(body)
    start, stop = tokenizer_span(header)
    if not 0 <= stop - start <= MAX_TOKENIZER_BYTES:
        raise UnsafeArtifact(f"the tokenizer of a prefix is JSON of up to {MAX_TOKENIZER_BYTES >> 20} MiB")
    first = _LENGTH + len(header)
    return bytes(body[first + start : first + stop])


def tokenizer_span(header: bytes) -> tuple[int, int]:
    """Where the tokenizer lies behind the header of a prefix's file, from and up to; two zeros where there is none.

    Raises:
        UnsafeArtifact: The bytes are no header of a prefix.
    """
    try:
        entry = json.loads(header).get(_TOKENIZER)
        start, stop = (0, 0) if entry is None else map(integer, entry["data_offsets"])
    except BROKEN as error:
        raise UnsafeArtifact(f"this is not a prefix: {type(error).__name__}: {str(error)[:300]}") from error
    return start, stop


def read_outline(header: bytes) -> Prefix:
    """A prefix from the header of its file alone; its tensors have shapes and dtypes, and no data.

    Raises:
        UnsafeArtifact: The bytes are no header of a prefix, or name or declare something that is not allowed.
    """
    try:
        declared = parse_json(header)
        graph = parse_json(declared.pop("__metadata__")[_KEY])
        return _prefix(graph, {text(name): _bare(value) for name, value in declared.items()})
    except (BadRequest, *BROKEN) as error:
        raise UnsafeArtifact(f"this is not a prefix: {type(error).__name__}: {str(error)[:300]}") from error


def _bare(declared: dict[str, Any]) -> torch.Tensor:
    dtypes = {name: dtype for dtype, name in _SAFETENSORS.items()}
    shape = [integer(size) for size in declared["shape"]]
    if min(shape, default=0) < 0:
        raise UnsafeArtifact("a tensor of the file has a negative size")
    return torch.empty(shape, dtype=dtypes[declared["dtype"]], device="meta")


def _prefix(value: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Prefix:
    if value["format"] != _FORMAT:
        raise UnsafeArtifact(f"this prefix is of format {value['format']}; this node reads format {_FORMAT}")
    refuse_unknown_fields(value, ("format", "orders", *GRAPH_FIELDS, "cuts", "lengths"), "a prefix")
    graph, tokenizer = graph_from_json(value), _tokenizer(tensors.pop(_TOKENIZER, None))
    data = _data(graph)
    changing = [node.op for node in graph.nodes if is_random(node) or uses_batch_statistics(node, data)]
    if changing:
        raise UnsafeArtifact(f"{changing[0]} depends on chance or on the batch, and a prefix may not")
    cuts = tuple(_cut(cut, len(graph.nodes)) for cut in value["cuts"])
    if [cut.number for cut in cuts] != list(range(1, len(cuts) + 1)):
        raise UnsafeArtifact("a prefix has cuts numbered from 1")
    if not cuts or cuts[0].after != -1 or cuts[0].tensors != graph.inputs:
        raise UnsafeArtifact("the first cut of a prefix is its input")
    if any(cut.after >= other.after for cut, other in pairwise(cuts)):
        raise UnsafeArtifact("the cuts of a prefix stand in order, one behind a node at most")
    lengths = _lengths_from_json(value["lengths"], graph, cuts) if "lengths" in value else None
    tensors = restore_tensors(tensors, value["orders"])
    return Prefix(graph=graph, cuts=cuts, tensors=tensors, tokenizer=tokenizer, lengths=lengths)


def _tokenizer(entry: torch.Tensor | None) -> bytes:
    if entry is None:
        return b""
    if entry.dtype != torch.uint8 or entry.dim() != 1 or entry.nbytes > MAX_TOKENIZER_BYTES:
        raise UnsafeArtifact(f"the tokenizer of a prefix is JSON of up to {MAX_TOKENIZER_BYTES >> 20} MiB")
    return b"" if entry.is_meta else entry.numpy().tobytes()


def _data(graph: Graph) -> set[str]:
    """Names of the values that depend on those of the input; in one pass, whatever the graph is."""
    found = set(graph.inputs)
    for node in graph.nodes:
        if not found.isdisjoint(reads(node)):
            found.update((node.name, changes(node)))
    return found


def _to_json(prefix: Prefix) -> dict[str, Any]:
    cuts = [_cut_to_json(cut) for cut in prefix.cuts]
    lengths = {} if prefix.lengths is None else {"lengths": _lengths_to_json(prefix.lengths)}
    orders = _orders_of(prefix.tensors)
    return {"format": _FORMAT, "orders": orders, **graph_to_json(prefix.graph), "cuts": cuts, **lengths}


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
    refuse_unknown_fields(value, (field.name for field in fields(Cut)), "a cut")
    if not isinstance(value["is_relu"], bool):
        raise UnsafeArtifact("is_relu of a cut is true or false")
    cut = Cut(
        number=integer(value["number"]),
        name=text(value["name"]),
        after=integer(value["after"]),
        tensors=tuple(text(name) for name in value["tensors"]),
        shapes=tuple(tuple(integer(size) for size in shape) for shape in value["shapes"]),
        dtypes=tuple(text(dtype) for dtype in value["dtypes"]),
        bytes_per_sample=integer(value["bytes_per_sample"]),
        is_relu=value["is_relu"],
    )
    if any(size < 0 for shape in cut.shapes for size in shape) or not set(cut.dtypes) <= set(DTYPE_BYTES):
        raise UnsafeArtifact(f"cut {cut.number} declares tensors that there are none of")
    if not -1 <= cut.after < nodes or not len(cut.tensors) == len(cut.shapes) == len(cut.dtypes) >= 1:
        raise UnsafeArtifact(f"cut {cut.number} does not make sense")
    return cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What dry runs of a prefix have found, by the number of the cut.

    Attributes:
        memory: memory of running to a cut, and from it.
        operations: operations of running eight samples to a cut.
        keeps_rows_apart: True if its operations say that each sample comes out the same in any company.
    """

    memory: Mapping[int, CutMemory]
    operations: Mapping[int, Operations]
    keeps_rows_apart: bool = False

    def to_json(self) -> str:
        """All of it as JSON."""
        cuts = {number: self._numbers(number) for number in self.memory}
        return json.dumps({"cuts": cuts, "keeps_rows_apart": self.keeps_rows_apart})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Inspection":
        """The inverse of ``to_json``, once it is parsed."""
        found: dict[int, list[int]] = {int(number): numbers for number, numbers in value["cuts"].items()}
        return cls(
            memory={number: _memory(counts) for number, counts in found.items()},
            operations={number: Operations(total=counts[4], heaviest=counts[5]) for number, counts in found.items()},
            keeps_rows_apart=value["keeps_rows_apart"] is True,
        )

    def _numbers(self, number: int) -> list[int]:
        memory, counted = self.memory[number], self.operations[number]
        sides = [(part.fixed_bytes, part.bytes_per_sample) for part in (memory.to_here, memory.rest)]
        return [*sides[0], *sides[1], counted.total, counted.heaviest]


def inspect_prefix(header: bytes, *, max_rows: int, limits: GraphLimits) -> Inspection:
    """Check a prefix and run it on shapes alone, without its weights and its tokenizer.

    Args:
        header: The header of its file (``artifact.header_of``).
        max_rows: The largest batch, a multiple of 8.
        limits: limits of the process.

    Raises:
        UnsafeArtifact: The prefix names or declares something that is not allowed, or its parts do not fit each other.
        OverBudget: The graph computes more than it may.
    """
    prefix = read_outline(header)
    leaves = leaf_values(prefix.graph, prefix.tensors)
    found = inspect_graph(prefix.graph, leaves, prefix.cuts, max_rows=max_rows, limits=limits)
    _inspect_lengths(prefix, leaves, found, limits)
    # Texts run on fewer tokens too, whose dimensions are other ones.
    is_apart = prefix.lengths is None and keeps_rows_apart_by_runs(prefix.graph, prefix.inputs, prefix.tensors)
    return replace(found, keeps_rows_apart=is_apart)


def _inspect_lengths(prefix: Prefix, leaves: Sequence[torch.Tensor], whole: Inspection, limits: GraphLimits) -> None:
    """See that a run on fewer tokens takes no more than one on all, whatever the file says of them."""
    if prefix.lengths is None:
        return
    for length in buckets(prefix.lengths.max_length)[:-1]:
        graph, cuts = at_length(prefix.graph, prefix.cuts, prefix.lengths, length)
        operations, peaks = count_operations_and_peaks(graph, leaves, cuts, limits)
        for number, peak in peaks.items():
            takes_more = operations[number].heaviest > whole.operations[number].heaviest
            if takes_more or peak > whole.memory[number].to_here.at(ROWS):
                raise UnsafeArtifact(f"a run on {length} tokens takes more than one on {prefix.lengths.max_length}")


def inspect_graph(
    graph: Graph, leaves: Sequence[torch.Tensor], cuts: Sequence[Cut], *, max_rows: int, limits: GraphLimits
) -> Inspection:
    """As ``inspect_prefix``, once the file is read."""
    operations = count_operations(graph, leaves, cuts, limits)
    return Inspection(memory=dry_run(graph, leaves, cuts, max_rows=max_rows), operations=operations)


def try_tokenizer(content: bytes) -> None:
    """Read a tokenizer and use it once: whatever is wrong with it then happens here, and not in the node.

    Args:
        content: JSON of the tokenizer.

    Raises:
        UnsafeArtifact: The JSON is no tokenizer.
        OverBudget: The tokenizer may take any time or memory.
    """
    try:
        tokenizer = opened_tokenizer(content)
        why = why_unbounded(content)
        if why is not None:  # no reason to end a job: its trainer tokenizes
            raise OverBudget(f"the node does not run this tokenizer for others: {why}")
        tokenizer.encode("a")
    except SettingError as error:
        raise UnsafeArtifact(str(error)) from error


def _memory(numbers: list[Any]) -> CutMemory:
    to_here, rest = (Footprint(fixed_bytes=fixed, bytes_per_sample=each) for fixed, each in (numbers[:2], numbers[2:4]))
    return CutMemory(to_here=to_here, rest=rest)
