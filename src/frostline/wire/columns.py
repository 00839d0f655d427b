"""The columns of an answer: a batch's arrays as Arrow arrays and back, viewed and not copied."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from frostline.core import FeatureBatch, PackedTensor
from frostline.wire.codecs import CODECS, Codec
from frostline.wire.codecs.pack import narrowed_dtype, scales

__all__ = ("Column", "columns_of", "contents_of")

_CODEC = b"frostline.codec"
_DTYPE = b"frostline.dtype"
_SHAPE = b"frostline.shape"
_CROSSING = {
    name: np.dtype(name) for name in ("bool", "float16", "float32", "float64", "int32", "int64", "uint8", "uint16")
}
_READ = {np.dtype(kind) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2")}
_MAX_AXES = 16

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """An Arrow array, and what its field says of it."""

    name: str
    array: Any
    metadata: dict[bytes, bytes] | None = None

    @property
    def field(self) -> Any:
        """Of the schema."""
        return pa.field(self.name, self.array.type, nullable=False, metadata=self.metadata)


def columns_of(batch: FeatureBatch) -> list[Column]:
    """``id`` and the payload of a batch. Encoded samples are copied once, since Arrow wants them in one piece."""
    ids = Column(name="id", array=pa.array(np.ascontiguousarray(batch.ids)))
    if batch.packed:
        return [ids, *(column for index, packed in enumerate(batch.packed) for column in _packed(index, packed))]
    if batch.tensors:
        return [ids, *(_plain(f"features_{index}", tensor) for index, tensor in enumerate(batch.tensors))]
    return [ids, Column(name="encoded", array=_joined(tuple(batch.encoded)))]


def contents_of(found: Any, max_bytes: int) -> dict[str, Any]:
    """The fields of a ``FeatureBatch`` that the columns of a record batch hold: ids and the payload.

    Args:
        found: the record batch, from anybody.
        max_bytes: maximum bytes that its tensors may take once they are unpacked.

    Raises:
        KeyError, TypeError, ValueError: It is not what a node sends.
    """
    found.validate(full=True)
    ids = _values(found.column("id")).astype(np.int64, casting="equiv", copy=False)
    columns = {name: (found.column(name), found.schema.field(name)) for name in found.schema.names if name != "id"}
    if list(columns) == ["encoded"]:
        return {"ids": ids, "encoded": _views(columns["encoded"][0])}
    tensors = [name for name in columns if not name.endswith("_scale")]
    if not tensors or tensors != [f"features_{index}" for index in range(len(tensors))]:
        raise ValueError(f"columns {list(columns)[:4]}")
    if not any(_CODEC in (field.metadata or {}) for _, field in columns.values()):
        return {"ids": ids, "tensors": tuple(_tensor(*columns.pop(name)) for name in tensors), **_nothing(columns)}
    packed = tuple(_unread(name, columns, max_bytes // len(tensors)) for name in tensors)
    return {"ids": ids, "packed": packed, **_nothing(columns)}


def _plain(name: str, tensor: Array, metadata: dict[bytes, bytes] | None = None) -> Column:
    """A column of tensors. Arrow packs truth values into bits; here they take a byte, as in memory."""
    is_bool = tensor.dtype == np.bool_
    flat = np.ascontiguousarray(tensor).reshape(-1)
    values = pa.array(flat.view(np.uint8) if is_bool else flat)
    kind = pa.fixed_shape_tensor(values.type, tensor.shape[1:])
    storage = pa.Array.from_buffers(kind.storage_type, len(tensor), [None], children=[values])
    says = {_DTYPE: b"bool"} if is_bool and metadata is None else metadata
    return Column(name=name, array=pa.ExtensionArray.from_storage(kind, storage), metadata=says)


def _packed(index: int, packed: PackedTensor) -> Iterator[Column]:
    name = f"features_{index}"
    metadata = {
        _CODEC: packed.codec.encode(),
        _SHAPE: json.dumps(packed.shape).encode(),
        _DTYPE: packed.dtype.name.encode(),
    }
    if packed.bounds is None:
        yield _plain(name, packed.body, metadata)
    else:
        yield Column(name=name, array=_binary(packed.bounds, packed.body), metadata=metadata)
    if packed.scale is not None:
        yield _plain(f"{name}_scale", packed.scale)


def _joined(parts: tuple[bytes | memoryview, ...]) -> Any:
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return _binary(offsets, parts[0] if len(parts) == 1 else b"".join(parts))


def _binary(offsets: npt.NDArray[np.int64], data: Any) -> Any:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers, null_count=0)


def _nothing(columns: dict[str, Any]) -> dict[str, Any]:
    if columns:
        raise ValueError(f"columns {list(columns)[:4]}")
    return {}


def _unread(name: str, columns: dict[str, Any], max_bytes: int) -> PackedTensor:
    """A packed tensor, checked against what its field says; its rows are looked at where they are unpacked."""
    column, field = columns.pop(name)
    says = field.metadata or {}
    codec, shape, dtype = _codec(says[_CODEC]), _shape(says[_SHAPE]), _CROSSING[says[_DTYPE].decode()]
    if codec.of(dtype) != codec:
        raise ValueError(f"codec {codec.name} for values of type {dtype}")
    if math.prod(shape) * dtype.itemsize * len(column) > max_bytes:
        raise ValueError(f"{len(column)} rows of shape {list(shape)[:4]}")
    if codec.by_row:
        bounds, body = _bytes(column)
        return PackedTensor(codec=codec.name, shape=shape, dtype=dtype, body=body, bounds=bounds)
    body = _tensor(column, field)
    scale = _tensor(*columns.pop(f"{name}_scale")) if scales(shape, codec) else None
    if body.shape[1:] != shape or body.dtype != narrowed_dtype(codec, dtype):
        raise ValueError(f"column {name} does not hold what it says")
    if scale is not None and (scale.shape[1:] != (scales(shape, codec),) or scale.dtype != np.float32):
        raise ValueError(f"column {name} has other scales than it says")
    return PackedTensor(codec=codec.name, shape=shape, dtype=dtype, body=body, scale=scale)


def _codec(name: bytes) -> Codec:
    if name.decode() not in CODECS:
        raise ValueError(f"codec {name[:50]!r}")
    return Codec.parse(name.decode())


def _shape(text: bytes) -> tuple[int, ...]:
    shape = json.loads(text)
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_AXES
        or not all(type(size) is int and size >= 0 for size in shape)
    ):
        raise ValueError(f"shape {text[:50]!r}")
    return tuple(shape)


def _tensor(column: Any, field: Any) -> Array:
    if not isinstance(column.type, pa.FixedShapeTensorType) or column.type.permutation or column.null_count:
        raise ValueError(f"column {field.name} holds no tensors")
    shape = tuple(column.type.shape)
    values = (
        _values(column.storage.flatten()) if math.prod(shape) else np.empty(0, column.type.value_type.to_pandas_dtype())
    )
    if (field.metadata or {}).get(_DTYPE) == b"bool":
        values = values.view(np.bool_)
    return values.reshape(len(column), *shape)


def _values(column: Any) -> Array:
    values: Array = column.to_numpy(zero_copy_only=True)
    if values.dtype not in _READ:
        raise ValueError(f"values of type {values.dtype}")
    return values


def _views(column: Any) -> tuple[memoryview, ...]:
    bounds, data = _bytes(column)
    view = data.data
    return tuple(view[start:stop] for start, stop in pairwise(bounds.tolist()))


def _bytes(column: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Where each value of a binary column starts and the last ends, and the bytes of all."""
    if column.type != pa.large_binary() or column.null_count:
        raise ValueError("a column of bytes is no large_binary")
    if len(column) == 0:
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    return bounds, np.frombuffer(data if data is not None else b"", np.uint8)
