"""The prefix as a file that is data alone: a safetensors archive whose metadata holds the graph as JSON.

It is named by the SHA-256 of its bytes. Reading it runs nothing: operators are looked up on an allow-list,
sizes are bounded, and the graph is checked by a dry run on shapes before any tensor is made
(``engines.measure.footprint``). A ``.pt2`` archive or a pickle would run code when loaded and is not accepted.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from frostline.core import Cut, Graph, TensorSpec
from frostline.core.token_lengths import Lengths
from frostline.engines.base.operators import ALLOWED
from frostline.errors import ModelError, UnsafeArtifact
from frostline.models.files.graph_file import (
    BROKEN,
    flat,
    flattened,
    graph_from_json,
    graph_to_json,
    header_bytes,
    integer,
    metadata,
    orders_of,
    restored,
    text,
)
from frostline.models.files.length_file import lengths_from_json, lengths_to_json
from frostline.models.graph.flow import changes, is_random, reads, uses_batch_statistics
from frostline.models.graph.frontiers import DTYPE_BYTES
from frostline.preprocess.tokens import MAX_TOKENIZER_BYTES
from frostline.wire.pieces import MIN_BYTES

__all__ = (
    "Prefix",
    "digest_of",
    "file_bytes",
    "header_of",
    "named_pieces",
    "read_outline",
    "read_prefix",
    "save_prefix",
    "tokenizer_of",
    "write_prefix",
)

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
        graph: its operations.
        cuts: every place where it may stop, cut 1 (the inputs) first, the frost line last.
        tensors: its weights by name, as in ``graph.leaves``, each in the memory order of the network's own.
        tokenizer: JSON of the tokenizer that makes its input of texts; empty where there is none.
        lengths: how it runs on fewer tokens than it was traced at; None where texts are padded, and of images.
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
    strange = sorted({node.op for node in prefix.graph.nodes} - ALLOWED)
    if strange:
        raise ModelError(f"the frozen part uses {', '.join(strange)}, which a node does not run; freeze less of it")
    tensors, _ = flattened(prefix.tensors)
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
        kind = {"dtype": _SAFETENSORS[tensor.dtype], "shape": list(flat(tensor).shape)}
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
    """The bytes of a tensor as they stand in the prefix's file; a view of it where it lies in memory like that.

    Args:
        prefix: prefix of the tensor.
        tensor: its name.
    """
    return memoryview(prefix.tokenizer) if tensor == _TOKENIZER else _dense(prefix.tensors[tensor]).data


def _dense(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return flat(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def read_prefix(body: bytes | memoryview) -> Prefix:
    """Read the file of a prefix, from wherever it came.

    Raises:
        UnsafeArtifact: It is no such file, or names or declares what is not allowed.
    """
    try:
        graph = json.loads(metadata(body)[_KEY])
        tensors = load_tensors(bytes(body))
        prefix = _prefix(graph, tensors)
    except BROKEN as error:
        raise UnsafeArtifact(f"this is not a prefix: {type(error).__name__}: {str(error)[:300]}") from error
    return prefix


def header_of(body: bytes | memoryview) -> bytes:
    """The header of a prefix's file: all but the numbers of its weights.

    Raises:
        UnsafeArtifact: It is no such file, or its header is too large.
    """
    return bytes(body[_LENGTH : _LENGTH + header_bytes(body)])


def tokenizer_of(body: bytes | memoryview) -> bytes:
    """The JSON of the tokenizer in a prefix's file, before anything else of it is read; empty where there is none.

    Raises:
        UnsafeArtifact: It is no such file, or the tokenizer is too large.
    """
    header = header_of(body)
    try:
        entry = json.loads(header).get(_TOKENIZER)
        start, stop = (0, 0) if entry is None else map(integer, entry["data_offsets"])
    except BROKEN as error:
        raise UnsafeArtifact(f"this is not a prefix: {type(error).__name__}: {str(error)[:300]}") from error
    if not 0 <= stop - start <= MAX_TOKENIZER_BYTES:
        raise UnsafeArtifact(f"the tokenizer of a prefix is JSON of up to {MAX_TOKENIZER_BYTES >> 20} MiB")
    first = _LENGTH + len(header)
    return bytes(body[first + start : first + stop])


def read_outline(header: bytes) -> Prefix:
    """A prefix from the header of its file alone; its tensors have shapes and dtypes, and no data.

    Raises:
        UnsafeArtifact: It is no such header, or names or declares what is not allowed.
    """
    try:
        declared = json.loads(header)
        graph = json.loads(declared.pop("__metadata__")[_KEY])
        return _prefix(graph, {text(name): _bare(value) for name, value in declared.items()})
    except BROKEN as error:
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
    lengths = lengths_from_json(value["lengths"], graph, cuts) if "lengths" in value else None
    tensors = restored(tensors, value["orders"])
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
    lengths = {} if prefix.lengths is None else {"lengths": lengths_to_json(prefix.lengths)}
    orders = orders_of(prefix.tensors)
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
    cut = Cut(
        number=integer(value["number"]),
        name=text(value["name"]),
        after=integer(value["after"]),
        tensors=tuple(text(name) for name in value["tensors"]),
        shapes=tuple(tuple(integer(size) for size in shape) for shape in value["shapes"]),
        dtypes=tuple(text(dtype) for dtype in value["dtypes"]),
        bytes_per_sample=integer(value["bytes_per_sample"]),
        is_relu=bool(value["is_relu"]),
    )
    if any(size < 0 for shape in cut.shapes for size in shape) or not set(cut.dtypes) <= set(DTYPE_BYTES):
        raise UnsafeArtifact(f"cut {cut.number} declares tensors that there are none of")
    if not -1 <= cut.after < nodes or not len(cut.tensors) == len(cut.shapes) == len(cut.dtypes) >= 1:
        raise UnsafeArtifact(f"cut {cut.number} does not make sense")
    return cut
