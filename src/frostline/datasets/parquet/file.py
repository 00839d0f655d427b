"""Opens Parquet files in a store, by ranges, and says in a sentence what is wrong with those that cannot be read."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from frostline.errors import DataError
from frostline.stores.base.protocols import Versioned
from frostline.stores.base.versions import is_other_version

__all__ = ("RangeFile", "leaf", "opened")

_END_BYTES = 64 << 10


class RangeFile:
    """A file of a store, as Arrow reads one: whole ranges, one request each. For one thread.

    Attributes:
        version: the etag that came with what was read; empty before that.
    """

    closed = False

    def __init__(self, store: Versioned, name: str, size: int) -> None:
        self.version = ""
        self._store = store
        self._name = name
        self._size = size
        self._place = 0

    def tell(self) -> int:
        """Where reading goes on."""
        return self._place

    def seek(self, place: int, whence: int = 0) -> int:
        """Go on from a place."""
        self._place = place + (0, self._place, self._size)[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        """The bytes from here on, as many as there are.

        Raises:
            DataError: the file was replaced since the first read.
        """
        left = max(0, self._size - self._place)
        length = left if size < 0 else min(size, left)
        if not length:
            return b""
        data, version = self._store.read_version(self._name, self._place, length)
        if is_other_version(self.version, version):
            raise DataError(f"{self._name} changed while it was read: ask again when nobody writes to it")
        self.version = version
        self._place += length
        return bytes(data)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def writable(self) -> bool:
        """It is not."""
        return False

    def flush(self) -> None:
        """There is nothing to write."""

    def close(self) -> None:
        """There is nothing to close."""


@contextmanager
def opened(
    store: Versioned, name: str, size: int, metadata: pq.FileMetaData | None = None
) -> Iterator[tuple[pq.ParquetFile, RangeFile]]:
    """A Parquet file to read from, in this thread alone: Arrow's own threads would not survive a fork.

    Args:
        store: store that holds the file.
        name: name of the object.
        size: size of the object in bytes.
        metadata: metadata of the file, where it was read before.

    Raises:
        DataError: the file is damaged, cut off or encrypted, and what the caller reads from it too.
        StoreError: the store failed.
    """
    source = RangeFile(store, name, size)
    try:
        yield pq.ParquetFile(pa.PythonFile(source, mode="r"), metadata=metadata, pre_buffer=False), source
    except MemoryError:  # Arrow's is one of its own errors too, and says nothing of the file
        raise
    except (pa.ArrowException, OSError) as error:
        if "crypt" in str(error).lower():
            raise DataError(f"{name} is encrypted, and Frostline has no key: write it without encryption") from error
        raise DataError(f"{name} is no Parquet file, or is damaged or cut off: make it again") from error


def leaf(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The only leaf of a column, however deep it lies in structs, as binary."""
    chunks = column.chunks
    kind = column.type
    while pa.types.is_struct(kind):
        kind = kind.field(0).type
        chunks = [chunk.flatten()[0] for chunk in chunks]
    return pa.chunked_array(chunks, kind).cast(pa.large_binary())
