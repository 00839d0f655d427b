"""Feature batches as an Arrow IPC stream and back: buffers are collected and viewed, not copied.

The schema is ``id: int64`` and then either ``features_0 ...: arrow.fixed_shape_tensor``, one column for each
tensor that crosses the cut, or ``encoded: large_binary`` at cut 0. Bodies are not compressed. The samples that
were skipped travel as JSON in the custom metadata of a record batch. Where a request fails after its first
batch, a last batch without rows carries the error there too, and the stream's end mark is missing.
"""

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from frostline.core import FeatureBatch, Skipped
from frostline.errors import FrostlineError, NodeUnreachable
from frostline.wire.refusals import error_from_json, error_to_json

__all__ = ("MEDIA_TYPE", "Encoder", "Source", "decode")

MEDIA_TYPE = "application/vnd.apache.arrow.stream"

Part = bytes | memoryview

_SKIPPED = b"frostline.skipped"
_FAILURE = b"frostline.failure"
_DTYPE = b"frostline.dtype"
_MERGED_BELOW = 64 << 10  # a write of its own costs more than copying this much
_MOST_BYTES = 4 << 30
_DTYPES = {np.dtype(kind) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1")}


class Source(Protocol):
    """Something to read from. Fewer bytes than asked for mean that no more will come."""

    def read(self, nbytes: int, /) -> bytes | bytearray | memoryview:
        """Exactly so many bytes, or what was left."""


class Encoder:
    """Turns the batches of one answer into parts to be sent one after the other."""

    def __init__(self) -> None:
        self._sink = _Sink()
        self._file = pa.PythonFile(self._sink, "w")
        self._writer: Any = None
        self._schema: Any = None

    def encode(self, batch: FeatureBatch) -> list[Part]:
        """The parts of one batch; they view its arrays, which must not change until they are sent.

        All batches of an answer have the same tensors, also those without rows. Encoded samples are copied
        once, since Arrow wants them in one piece.
        """
        names, columns = _columns(batch)
        if self._writer is None:
            self._schema = pa.schema([_field(name, column) for name, column in zip(names, columns, strict=True)])
            self._writer = pa.ipc.new_stream(self._file, self._schema)
        arrays = [pa.array(np.ascontiguousarray(batch.ids)), *(_array(column) for column in columns[1:])]
        skipped = [[one.id, one.object, one.reason] for one in batch.skipped]
        metadata = {_SKIPPED: json.dumps(skipped)} if skipped else None
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema), custom_metadata=metadata)
        return self._sink.taken()

    def fail(self, error: FrostlineError) -> list[Part]:
        """The parts that tell why the answer ends here, after at least one batch; nothing may follow them."""
        empty = self._schema.empty_table().to_batches() or [pa.RecordBatch.from_pylist([], schema=self._schema)]
        self._writer.write_batch(empty[0], custom_metadata={_FAILURE: json.dumps(error_to_json(error))})
        return self._sink.taken()

    def finish(self) -> list[Part]:
        """The end mark; without it the answer counts as broken off."""
        assert self._writer is not None, "an answer has at least one batch"
        self._writer.close()
        return self._sink.taken()


def decode(source: Source, *, most_bytes: int = _MOST_BYTES) -> Iterator[FeatureBatch]:
    """Yield the batches of an answer as they arrive; their arrays view what was read and cannot be written.

    Args:
        source: where the answer comes from.
        most_bytes: of one batch; more is taken for nonsense.

    Raises:
        NodeUnreachable: The answer broke off.
        FrostlineError: It is no answer of a node, or the error that the node sent as its end.
    """
    watched = _Watched(source, most_bytes)
    reader = None
    while True:
        try:
            if reader is None:
                options = pa.ipc.IpcReadOptions(use_threads=False, ensure_native_endian=False)
                reader = pa.ipc.open_stream(pa.PythonFile(watched, "r"), options=options)
            found = reader.read_next_batch_with_custom_metadata()
            batch = _batch(found.batch, dict(found.custom_metadata or {}))
        except StopIteration:
            watched.check_whole()
            return
        except (pa.ArrowException, KeyError, OSError, TypeError, ValueError) as error:
            watched.check_whole()
            raise FrostlineError(f"the node's answer is no stream of features: {_first_line(error)}") from error
        yield batch


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

    def __init__(self, source: Source, most_bytes: int) -> None:
        self._source = source
        self._most_bytes = most_bytes
        self._has_ended = False

    def read(self, nbytes: int) -> bytes | bytearray | memoryview:
        if not 0 <= nbytes <= self._most_bytes:
            raise ValueError(f"a part of {nbytes} bytes")
        data = self._source.read(nbytes)
        self._has_ended |= len(data) < nbytes
        return data

    def check_whole(self) -> None:
        if self._has_ended:
            raise NodeUnreachable("the node's answer broke off before its end")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """The source belongs to the caller."""


Column = npt.NDArray[np.generic] | tuple[Part, ...]


def _columns(batch: FeatureBatch) -> tuple[list[str], list[Column]]:
    if not batch.tensors:
        return ["id", "encoded"], [batch.ids, tuple(batch.encoded)]
    return ["id", *(f"features_{index}" for index in range(len(batch.tensors)))], [batch.ids, *batch.tensors]


def _field(name: str, column: Column) -> Any:
    if isinstance(column, tuple):
        return pa.field(name, pa.large_binary(), nullable=False)
    if name == "id":
        return pa.field(name, pa.int64(), nullable=False)
    metadata = {_DTYPE: b"bool"} if column.dtype == np.bool_ else None
    return pa.field(name, _tensor_type(column), nullable=False, metadata=metadata)


def _tensor_type(column: npt.NDArray[np.generic]) -> Any:
    # Arrow packs truth values into bits; here they take a byte, as in memory.
    value = pa.uint8() if column.dtype == np.bool_ else pa.from_numpy_dtype(column.dtype)
    return pa.fixed_shape_tensor(value, column.shape[1:])


def _array(column: Column) -> Any:
    if isinstance(column, tuple):
        return _binary(column)
    kind = _tensor_type(column)
    flat = np.ascontiguousarray(column).reshape(-1)
    values = pa.array(flat.view(np.uint8) if flat.dtype == np.bool_ else flat)
    storage = pa.Array.from_buffers(kind.storage_type, len(column), [None], children=[values])
    return pa.ExtensionArray.from_storage(kind, storage)


def _binary(parts: tuple[Part, ...]) -> Any:
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return pa.Array.from_buffers(
        pa.large_binary(), len(parts), [None, pa.py_buffer(offsets), pa.py_buffer(data)], null_count=0
    )


def _batch(found: Any, metadata: dict[bytes, bytes]) -> FeatureBatch:
    if _FAILURE in metadata:
        value = json.loads(metadata[_FAILURE])
        raise error_from_json(value) or FrostlineError("the node's request failed")
    found.validate(full=True)
    ids = _plain(found.column("id")).astype(np.int64, casting="equiv", copy=False)
    names = [name for name in found.schema.names if name != "id"]
    skipped = tuple(_skipped(one) for one in json.loads(metadata.get(_SKIPPED, b"[]")))
    if names == ["encoded"]:
        return FeatureBatch(ids=ids, encoded=_views(found.column("encoded")), skipped=skipped)
    if not names or names != [f"features_{index}" for index in range(len(names))]:
        raise ValueError(f"columns {names[:4]}")
    tensors = tuple(_tensor(found.column(name), found.schema.field(name)) for name in names)
    return FeatureBatch(ids=ids, tensors=tensors, skipped=skipped)


def _tensor(column: Any, field: Any) -> npt.NDArray[np.generic]:
    if not isinstance(column.type, pa.FixedShapeTensorType) or column.type.permutation or column.null_count:
        raise ValueError(f"column {field.name} holds no tensors")
    shape = tuple(column.type.shape)
    values = (
        _plain(column.storage.flatten()) if math.prod(shape) else np.empty(0, column.type.value_type.to_pandas_dtype())
    )
    if (field.metadata or {}).get(_DTYPE) == b"bool":
        values = values.view(np.bool_)
    return values.reshape(len(column), *shape)


def _plain(column: Any) -> npt.NDArray[np.generic]:
    values: npt.NDArray[np.generic] = column.to_numpy(zero_copy_only=True)
    if values.dtype not in _DTYPES:
        raise ValueError(f"values of type {values.dtype}")
    return values


def _views(column: Any) -> tuple[memoryview, ...]:
    if column.type != pa.large_binary() or column.null_count:
        raise ValueError("encoded samples are no large_binary")
    _, offsets, data = column.buffers()
    if len(column) == 0:
        return ()
    bounds = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1].tolist()
    view = memoryview(data if data is not None else b"")
    return tuple(view[start:stop] for start, stop in pairwise(bounds))


def _skipped(value: Any) -> Skipped:
    id, object, reason = value
    if not isinstance(id, int) or not isinstance(object, str) or not isinstance(reason, str):
        raise TypeError("a skipped sample has an id, an object and a reason")
    return Skipped(id=id, object=object, reason=reason)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
