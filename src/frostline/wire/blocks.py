"""How rows lie in a block of shared memory: which bytes go where, and arrays that view them at the other end. Pure.

A block holds the columns of one batch, one after the other, each at a multiple of 64 bytes: ids, and then either the
encoded samples with where each begins, or tensors, or packed tensors. What says where they lie is plain values, which
travel beside the block. Rows of several batches lie together where they are alike, and are copied once, into the block.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, PackedTensor, Skipped
from frostline.wire.codecs import CODECS

__all__ = ("Block", "RowBlock", "is_alike", "lay_out", "read_block", "row_bytes")

_ALIGNED = 64
_KINDS = frozenset(np.dtype(kind).str for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "?"))
_MAX_AXES = 16

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBlock:
    """Neighbouring rows of a batch, from ``start`` up to ``stop``; none where only its layout is wanted."""

    batch: FeatureBatch
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """What goes into a block.

    Attributes:
        parts: buffers, to be written one after the other from its beginning.
        nbytes: bytes of all of them.
        says: where what lies, as plain values.
    """

    parts: list[memoryview] = field(default_factory=list)
    nbytes: int = 0
    says: dict[str, Any] = field(default_factory=dict)

    def add(self, arrays: Sequence[Array], shape: Sequence[int], dtype: np.dtype[Any]) -> dict[str, Any]:
        """Put arrays behind each other as one column, and say where it lies."""
        gap = -self.nbytes % _ALIGNED
        if gap:
            self._put(memoryview(bytes(gap)))
        at = self.nbytes
        for rows in arrays:
            self._put(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        return {"at": at, "shape": list(shape), "dtype": dtype.str}

    def _put(self, part: memoryview) -> None:
        if part.nbytes:
            self.parts.append(part)
            self.nbytes += part.nbytes


def is_alike(one: FeatureBatch, other: FeatureBatch) -> bool:
    """Whether rows of both may lie in one block."""
    return one is other or _layout(one) == _layout(other)


def row_bytes(batch: FeatureBatch) -> float:
    """Payload of a row, the mean."""
    return batch.nbytes / max(1, len(batch))


def lay_out(pieces: Sequence[RowBlock], skipped: Sequence[Skipped]) -> Block:
    """A block of the rows of some batches that are alike; there is one piece at least."""
    block = Block()
    layout = pieces[0].batch
    rows = sum(map(len, pieces))
    says: dict[str, Any] = {
        "ids": block.add([piece.batch.ids[piece.start : piece.stop] for piece in pieces], [rows], np.dtype(np.int64)),
        "skipped": [[sample.id, sample.object, sample.reason, sample.changed] for sample in skipped],
        "error": max((piece.batch.error for piece in pieces if len(piece)), default=0.0),
    }
    if layout.packed:
        says["packed"] = [_lay_packed(block, pieces, place, rows) for place in range(len(layout.packed))]
    elif layout.tensors:
        says["tensors"] = [
            _lay(block, [(piece.batch.tensors[place], piece) for piece in pieces], rows)
            for place in range(len(layout.tensors))
        ]
    else:
        encoded = [sample for piece in pieces for sample in piece.batch.encoded[piece.start : piece.stop]]
        says["bounds"] = block.add([_bounds([len(sample) for sample in encoded])], [rows + 1], np.dtype(np.int64))
        says["encoded"] = block.add(
            [np.frombuffer(sample, np.uint8) for sample in encoded if len(sample)], [sum(map(len, encoded))], _BYTE
        )
    block.says = {**says, "nbytes": block.nbytes}
    return block


def read_block(says: dict[str, Any], memory: memoryview) -> FeatureBatch:
    """The rows of a block as a batch whose arrays view it.

    Raises:
        KeyError, TypeError, ValueError: It is not laid out as it says.
    """
    ids = _column(says["ids"], memory)
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError("ids are one column of integers")
    contents: dict[str, Any] = {}
    if "packed" in says:
        contents["packed"] = tuple(_read_packed(tensor, memory, len(ids)) for tensor in says["packed"])
    elif "tensors" in says:
        contents["tensors"] = tuple(_rows(_column(tensor, memory), len(ids)) for tensor in says["tensors"])
    else:
        contents["encoded"] = tuple(_encoded(says, memory, len(ids)))
    skipped = tuple(
        Skipped(id=int(id), object=str(object), reason=str(reason), changed=bool(changed))
        for id, object, reason, changed in says["skipped"]
    )
    return FeatureBatch(ids=ids, skipped=skipped, error=float(says["error"]), **contents)


_BYTE = np.dtype(np.uint8)


def _layout(batch: FeatureBatch) -> tuple[object, ...]:
    packed = tuple(
        (tensor.codec, tensor.shape, tensor.dtype, tensor.bounds is None, tensor.scale is None)
        for tensor in batch.packed
    )
    return packed, tuple((tensor.shape[1:], tensor.dtype) for tensor in batch.tensors)


def _bounds(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _lay(block: Block, columns: Sequence[tuple[Array, RowBlock]], rows: int) -> dict[str, Any]:
    first, _ = columns[0]
    return block.add(
        [array[piece.start : piece.stop] for array, piece in columns], [rows, *first.shape[1:]], first.dtype
    )


def _lay_packed(block: Block, pieces: Sequence[RowBlock], place: int, rows: int) -> dict[str, Any]:
    packed = [(piece.batch.packed[place], piece) for piece in pieces]
    layout, _ = packed[0]
    says: dict[str, Any] = {"codec": layout.codec, "shape": list(layout.shape), "dtype": layout.dtype.str}
    if layout.bounds is None:
        says["body"] = _lay(block, [(tensor.body, piece) for tensor, piece in packed], rows)
    else:
        lengths, bodies = _by_row(packed)
        says["bounds"] = block.add([_bounds(lengths)], [rows + 1], np.dtype(np.int64))
        says["body"] = block.add(bodies, [sum(lengths)], _BYTE)
    if layout.scale is not None:
        says["scale"] = _lay(block, [(_present(tensor.scale), piece) for tensor, piece in packed], rows)
    return says


def _by_row(packed: Sequence[tuple[PackedTensor, RowBlock]]) -> tuple[list[int], list[Array]]:
    """How long each row is, and the bytes of each piece's rows."""
    lengths: list[int] = []
    bodies: list[Array] = []
    for tensor, piece in packed:
        bounds = _present(tensor.bounds)[piece.start : piece.stop + 1]
        lengths += np.diff(bounds).tolist()
        bodies.append(tensor.body[bounds[0] : bounds[-1]])
    return lengths, bodies


def _present(array: Array | None) -> Array:
    assert array is not None, "rows that are alike have the same columns"
    return array


def _column(says: dict[str, Any], memory: memoryview) -> Array:
    """A column, checked: it lies within the block, and its values are numbers."""
    at, shape = says["at"], tuple(says["shape"])
    if says["dtype"] not in _KINDS or len(shape) > _MAX_AXES or not all(type(size) is int for size in (at, *shape)):
        raise ValueError("a column says no place, shape or type")
    if at < 0 or min(shape, default=0) < 0:
        raise ValueError("a column lies outside its block")
    dtype = np.dtype(says["dtype"])
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(memory, dtype, count, at).reshape(shape)


def _rows(array: Array, rows: int) -> Array:
    if not array.ndim or len(array) != rows:
        raise ValueError(f"a column does not have {rows} rows")
    return array


def _whole_bounds(says: dict[str, Any], memory: memoryview, rows: int, nbytes: int) -> npt.NDArray[np.int64]:
    bounds = _rows(_column(says, memory), rows + 1)
    if bounds.dtype != np.int64 or bounds.ndim != 1:
        raise ValueError("bounds are one column of integers")
    if bounds[0] != 0 or bounds[-1] != nbytes or (np.diff(bounds) < 0).any():
        raise ValueError("rows do not lie one after the other")
    return bounds


def _encoded(says: dict[str, Any], memory: memoryview, rows: int) -> Iterator[memoryview]:
    body = _column(says["encoded"], memory)
    bounds = _whole_bounds(says["bounds"], memory, rows, body.nbytes)
    view = body.data
    for start, stop in pairwise(bounds.tolist()):
        yield view[start:stop]


def _read_packed(says: dict[str, Any], memory: memoryview, rows: int) -> PackedTensor:
    if says["codec"] not in CODECS or says["dtype"] not in _KINDS:
        raise ValueError("rows that are packed in no way that there is")
    body = _column(says["body"], memory)
    bounds = _whole_bounds(says["bounds"], memory, rows, body.nbytes) if "bounds" in says else None
    return PackedTensor(
        codec=says["codec"],
        shape=tuple(map(int, says["shape"])),
        dtype=np.dtype(says["dtype"]),
        body=body if bounds is not None else _rows(body, rows),
        bounds=bounds,
        scale=_rows(_column(says["scale"], memory), rows) if "scale" in says else None,
    )
