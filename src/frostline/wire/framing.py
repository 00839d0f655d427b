"""Feature batches as an Arrow IPC stream and back: buffers are collected and viewed, not copied.

The schema is ``id: int64`` and then either ``features_0 ...: arrow.fixed_shape_tensor``, one column for each
tensor that crosses the cut, or ``encoded: large_binary`` at cut 0. Bodies are not compressed. The samples that
were skipped travel as JSON in the custom metadata of a record batch. Where a request fails after its first
batch, a last batch without rows carries the error there too, and the stream's end mark is missing.

A column of a packed tensor (``wire.codecs``) names its codec, the shape of a sample and the dtype in the metadata of
its field. Its values are narrower ones (bfloat16 as uint16; int8 with ``features_0_scale`` beside it), or, where rows
are packed one by one, a ``large_binary`` each. The batch's custom metadata tells the error. Since a schema is a
stream's for good, a batch that is packed otherwise than the one before it begins another stream: a batch without rows
says so in the first, which then ends, and the next one follows at once.
"""

import json
import math
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from frostline.core import FeatureBatch, Skipped
from frostline.errors import FrostlineError, NodeUnreachable
from frostline.wire.columns import columns_of, contents_of
from frostline.wire.refusals import error_from_json, error_to_json

__all__ = ("MEDIA_TYPE", "ByteSource", "Encoder", "decode")

MEDIA_TYPE = "application/vnd.apache.arrow.stream"

Part = bytes | memoryview

_SKIPPED = b"frostline.skipped"
_FAILURE = b"frostline.failure"
_ERROR = b"frostline.error"
_NEXT = b"frostline.next"
_MERGED_BELOW = 64 << 10  # a write of its own costs more than copying this much
_MAX_BYTES = 4 << 30


class ByteSource(Protocol):
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

        Batches of an answer have the same tensors, also those without rows, and may be packed each in its own way.
        """
        columns = columns_of(batch)
        self._begin(pa.schema([column.field for column in columns]))
        arrays = [column.array for column in columns]
        skipped = [[sample.id, sample.object, sample.reason, sample.changed] for sample in batch.skipped]
        metadata = {_SKIPPED: json.dumps(skipped)} if skipped else {}
        if batch.error:
            metadata[_ERROR] = json.dumps(batch.error)
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema), custom_metadata=metadata or None)
        return self._sink.taken()

    def fail(self, error: FrostlineError) -> list[Part]:
        """The parts that tell why the answer ends here, after at least one batch; nothing may follow them."""
        self._say({_FAILURE: json.dumps(error_to_json(error))})
        return self._sink.taken()

    def finish(self) -> list[Part]:
        """The end mark; without it the answer counts as broken off."""
        assert self._writer is not None, "an answer has at least one batch"
        self._writer.close()
        return self._sink.taken()

    def _begin(self, schema: Any) -> None:
        """A stream of that schema, after the one that is being written where that has another."""
        if self._writer is not None:
            if schema.equals(self._schema, check_metadata=True):
                return
            self._say({_NEXT: b"1"})
            self._writer.close()
        self._schema = schema
        self._writer = pa.ipc.new_stream(self._file, schema)

    def _say(self, metadata: dict[bytes, str | bytes]) -> None:
        empty = pa.RecordBatch.from_pylist([], schema=self._schema)
        self._writer.write_batch(empty, custom_metadata=metadata)


def decode(source: ByteSource, *, max_bytes: int = _MAX_BYTES) -> Iterator[FeatureBatch]:
    """Yield the batches of an answer as they arrive; their arrays view what was read and cannot be written.

    Args:
        source: where the answer comes from.
        max_bytes: maximum bytes of one batch; more is taken for nonsense.

    Raises:
        NodeUnreachable: The answer broke off.
        FrostlineError: It is no answer of a node, or the error that the node sent as its end.
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
        except StopIteration:
            watched.check_whole()
            return
        except (pa.ArrowException, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
            watched.check_whole()
            raise FrostlineError(f"the node's answer is no stream of features: {_first_line(error)}") from error
        yield batch


def _opened(watched: "_Watched") -> Any:
    options = pa.ipc.IpcReadOptions(use_threads=False, ensure_native_endian=False)
    return pa.ipc.open_stream(pa.PythonFile(watched, "r"), options=options)


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

    def check_whole(self) -> None:
        if self._has_ended:
            raise NodeUnreachable("the node's answer broke off before its end")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """The source belongs to the caller."""


def _batch(found: Any, metadata: dict[bytes, bytes], max_bytes: int) -> FeatureBatch:
    if _FAILURE in metadata:
        value = json.loads(metadata[_FAILURE])
        raise error_from_json(value) or FrostlineError("the node's request failed")
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
