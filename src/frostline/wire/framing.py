"""Feature batches as an Arrow IPC stream and back: buffers are collected and viewed, not copied.

The schema is ``id: int64`` and then either ``features_0 ...: arrow.fixed_shape_tensor``, one column for each tensor
that crosses the cut, or ``encoded: large_binary`` at cut 0. Bodies are not compressed. The samples that were skipped
travel as JSON in the custom metadata of a record batch. Where a request fails after its first batch, a last batch
without rows carries the error there too, and the stream's end mark is missing.

A column of a packed tensor (``wire.codecs``) names its codec, the shape of a sample and the dtype in the metadata of
its field. Its values are narrower ones (bfloat16 as uint16; int8 with ``features_0_scale`` beside it), or, where rows
are packed one by one, a ``large_binary`` each. The batch's custom metadata tells the error. Since a schema is a
stream's for good, a batch that is packed otherwise than the one before it begins another stream: a batch without rows
says so in the first, which then ends, and the next one follows at once.

Behind each of these batches comes one without rows whose metadata has the CRC-32 of all bytes of the answer before it,
also of schemas and of what is said beside rows, so that what changed on the way is asked for again. Either side takes
it of pieces that are in the processor's cache as they are sent and received, which costs least.

The columns of an answer: a batch's arrays as Arrow arrays and back, viewed and not copied.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from frostline.core import FeatureBatch, PackedTensor, Skipped
from frostline.core.errors import AnswerDamaged, FrostlineError, NodeUnreachable
from frostline.core.system import crc32
from frostline.wire.codecs import CODECS, Codec
from frostline.wire.messages import error_from_json, error_to_json
from frostline.wire.packing import narrowed_dtype, scales

__all__ = ("MEDIA_TYPE", "PIECE_BYTES", "ByteSource", "Column", "Encoder", "columns_of", "contents_of", "decode")


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
        """The field of the schema."""
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
        KeyError, TypeError, ValueError: The columns are not those that a node sends.
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


MEDIA_TYPE = "application/vnd.apache.arrow.stream"

PIECE_BYTES = 256 << 10
"""Of an answer that are sent at once and taken into its checksum at once: small enough for the processor's cache, since
the server joins each with its frame, which copies it, and large enough that the frame does not matter."""

Part = bytes | memoryview

_CHECKSUM = b"frostline.crc32"
_CHECKSUM_BYTES = b"frostline.crc32_bytes"
_DIGITS = b"checksum"  # of CRC-32 in hexadecimal there are as many as letters in this
_SKIPPED = b"frostline.skipped"
_FAILURE = b"frostline.failure"
_ERROR = b"frostline.error"
_NEXT = b"frostline.next"
_MERGED_BELOW = 64 << 10  # a write of its own costs more than copying this much
_MAX_BYTES = 4 << 30


class ByteSource(Protocol):
    """Something to read from. Fewer bytes than asked for mean that no more will come."""

    @property
    def checksum(self) -> int:
        """CRC-32 of all bytes that it gave."""

    def read(self, nbytes: int, /) -> bytes | bytearray | memoryview:
        """Exactly so many bytes, or what was left."""


class Encoder:
    """Turns the batches of one answer into pieces to be sent one after the other, all of one call before the next."""

    def __init__(self) -> None:
        self._sink = _Sink()
        self._file = pa.PythonFile(self._sink, "w")
        self._writer: Any = None
        self._schema: Any = None
        self._message = b""
        self._checksum = 0

    def encode(self, batch: FeatureBatch) -> Iterator[Part]:
        """The pieces of one batch; they view its arrays, which must not change until they are sent.

        Batches of an answer have the same tensors, also those without rows, and may be packed each in its own way.
        """
        columns = columns_of(batch)
        self._begin(pa.schema([column.field for column in columns]))
        arrays = [column.array for column in columns]
        skipped = [[sample.id, sample.object, sample.reason, sample.changed] for sample in batch.skipped]
        metadata: dict[bytes, str] = {_SKIPPED: json.dumps(skipped)} if skipped else {}
        if batch.error:
            metadata[_ERROR] = json.dumps(batch.error)
        self._write(pa.record_batch(arrays, schema=self._schema), metadata)
        return self._pieces(self._sink.taken())

    def fail(self, error: FrostlineError) -> Iterator[Part]:
        """The pieces that tell why the answer ends here, after at least one batch; nothing may follow them."""
        self._say({_FAILURE: json.dumps(error_to_json(error))})
        return self._pieces(self._sink.taken())

    def finish(self) -> Part:
        """The end mark; without it the answer counts as broken off."""
        assert self._writer is not None, "an answer has at least one batch"
        self._writer.close()
        return b"".join(self._sink.taken())

    def _pieces(self, parts: Sequence[Part]) -> Iterator[Part]:
        """What was written, and the checksum of all until then. A short last piece goes with it."""
        last: Part = b""
        for part in parts:
            for start in range(0, len(part), PIECE_BYTES):
                if last:
                    yield last
                last = memoryview(part)[start : start + PIECE_BYTES]
                self._checksum = crc32(last, self._checksum)
        said = self._message.replace(_DIGITS, f"{self._checksum:08x}".encode())
        self._checksum = crc32(said, self._checksum)
        if len(last) < _MERGED_BELOW:
            yield b"".join((last, said))
        else:
            yield last
            yield said

    def _begin(self, schema: Any) -> None:
        """A stream of that schema, after the one that is being written where that has another."""
        if self._writer is not None:
            if schema.equals(self._schema, check_metadata=True):
                return
            self._say({_NEXT: "1"})
            self._writer.close()
        self._schema, self._message = schema, _checksum_message(schema)
        self._writer = pa.ipc.new_stream(self._file, schema)

    def _say(self, metadata: dict[bytes, str]) -> None:
        self._write(pa.RecordBatch.from_pylist([], schema=self._schema), metadata)

    def _write(self, batch: Any, metadata: dict[bytes, str]) -> None:
        self._writer.write_batch(batch, custom_metadata={**metadata, _CHECKSUM_BYTES: str(len(self._message))})


@lru_cache(maxsize=64)
def _checksum_message(schema: Any) -> bytes:
    """A record batch without rows, as Arrow writes it into a stream of that schema, that says a checksum."""
    sink, empty = _Sink(), pa.RecordBatch.from_pylist([], schema=schema)
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), schema) as writer:
        writer.write_batch(empty)
        sink.taken()
        writer.write_batch(empty, custom_metadata={_CHECKSUM: _DIGITS})
        return b"".join(sink.taken())


def decode(source: ByteSource, *, max_bytes: int = _MAX_BYTES) -> Iterator[FeatureBatch]:
    """Yield the batches of an answer as they arrive; their arrays view what was read and cannot be written.

    Args:
        source: the place where the answer comes from.
        max_bytes: maximum bytes of one batch; more is taken for nonsense.

    Raises:
        NodeUnreachable: The answer broke off.
        AnswerDamaged: The answer makes no sense, or differs from its checksum.
        FrostlineError: The error that the node sent as its end.
    """
    watched = _Watched(source, max_bytes)
    reader = None
    while True:
        try:
            reader = _opened(watched) if reader is None else reader
            found = reader.read_next_batch_with_custom_metadata()
            metadata = dict(found.custom_metadata or {})
            if _NEXT in metadata:
                _end(reader)
                reader = None
                continue
            batch = _batch(found.batch, metadata, max_bytes)
            _verify(watched, metadata, len(found.batch))
        except StopIteration:
            watched.check_whole()
            return
        except (pa.ArrowException, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
            watched.check_whole()
            raise AnswerDamaged(f"the node's answer is no stream of features: {_first_line(error)}") from error
        if isinstance(batch, FrostlineError):
            raise batch
        yield batch


def _opened(watched: "_Watched") -> Any:
    options = pa.ipc.IpcReadOptions(use_threads=False, ensure_native_endian=False)
    return pa.ipc.open_stream(pa.PythonFile(watched, "r"), options=options)


def _verify(source: ByteSource, metadata: dict[bytes, bytes], rows: int) -> None:
    """Read the message behind a batch, whose bytes its metadata tell, and compare the checksum of all until then.

    Its text is looked for: Arrow would take longer to read it than the checksum of many small samples takes.
    """
    nbytes, checksum = int(metadata[_CHECKSUM_BYTES]), source.checksum
    if not 0 <= nbytes <= _MERGED_BELOW:
        raise ValueError(f"a checksum of {nbytes} bytes")
    if f"{checksum:08x}".encode() not in bytes(source.read(nbytes)):
        raise ValueError(f"a batch of {rows} rows has another checksum than it was sent with")


def _end(reader: Any) -> None:
    """Read the end mark of a stream that another one follows."""
    if next(reader, None) is not None:
        raise ValueError("a stream goes on after its end")


class _Sink:
    """Collects what Arrow writes, and merges small parts."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._small: list[Part] = []

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if len(view) < _MERGED_BELOW:
            self._small.append(bytes(view))
        else:
            self._merge()
            self._parts.append(view)
        return len(view)

    def taken(self) -> list[Part]:
        self._merge()
        parts, self._parts = self._parts, []
        return parts

    def flush(self) -> None:
        """Nothing waits elsewhere."""

    def close(self) -> None:
        """Nothing to close."""

    def _merge(self) -> None:
        if self._small:
            self._parts.append(b"".join(self._small))
            self._small = []


class _Watched:
    """A source that remembers whether it ended early, and refuses lengths that make no sense."""

    closed = False

    def __init__(self, source: ByteSource, max_bytes: int) -> None:
        self._source = source
        self._max_bytes = max_bytes
        self._has_ended = False

    def read(self, nbytes: int) -> bytes | bytearray | memoryview:
        if not 0 <= nbytes <= self._max_bytes:
            raise ValueError(f"a part of {nbytes} bytes")
        data = self._source.read(nbytes)
        self._has_ended |= len(data) < nbytes
        return data

    @property
    def checksum(self) -> int:
        return self._source.checksum

    def check_whole(self) -> None:
        if self._has_ended:
            raise NodeUnreachable("the node's answer broke off before its end")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """The source belongs to the caller."""


def _batch(found: Any, metadata: dict[bytes, bytes], max_bytes: int) -> FeatureBatch | FrostlineError:
    """The batch, or the error that ends the answer."""
    if _FAILURE in metadata:
        value = json.loads(metadata[_FAILURE])
        return error_from_json(value) or FrostlineError("the node's request failed")
    skipped = tuple(_skipped(load) for load in json.loads(metadata.get(_SKIPPED, b"[]")))
    contents = contents_of(found, max_bytes)
    return FeatureBatch(**contents, skipped=skipped, error=_error(metadata.get(_ERROR, b"0.0")))


def _skipped(value: Any) -> Skipped:
    kinds = (int, str, str, bool)
    if len(value) != len(kinds) or not all(map(isinstance, value, kinds)):
        raise TypeError("a skipped sample has an id, an object, a reason, and whether it has changed")
    id, object, reason, changed = value
    return Skipped(id=id, object=object, reason=reason, changed=changed)


def _error(text: bytes) -> float:
    value = json.loads(text)
    if not isinstance(value, float) or not 0 <= value < math.inf:
        raise ValueError(f"an error of {text[:20]!r}")
    return value


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
