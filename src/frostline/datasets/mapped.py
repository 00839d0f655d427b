"""Keeps large manifests as mapped files: an Arrow copy in the cache folder, of which only what is read takes memory."""

import hashlib
import io
import json
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from frostline.core.errors import AccessDenied, OutOfSpace
from frostline.core.files import make_private_folder, open_private, read_checked, warn_not_kept
from frostline.datasets.formats.base import COLUMNS, LabelSummary, ManifestColumns, label_column
from frostline.ordering import count_labels, places_by_label
from frostline.stores.local import error_of_system
from frostline.stores.protocols import Readable

__all__ = ("ABOUT", "StoreFile", "copy_of", "kept_copy", "open_copy", "opened_copy")

_FORMAT = 1
ABOUT = b"frostline.manifest"
"""The key of what a manifest says of itself, as ``checked_text`` writes it."""

_FOLDER = "mapped"
_SAME_NAMES = b"frostline.names"
_BATCH_ROWS = 1 << 18
_LABELS = b"frostline.labels"
_PLACES = "frostline.places"
# So far apart, labels are counted when a copy is made; the counts lie in its head as text.
_MAX_CLASSES = 1 << 16
# Whose places have four bytes each.
_MAX_PLACES = 1 << 32


def copy_of(cache: Path, url: str, digest: str) -> Path:
    """Where the copy of a manifest of the data at ``url`` is kept."""
    root = hashlib.sha256(url.encode(errors="surrogateescape")).hexdigest()[:16]
    return cache / _FOLDER / root / f"{digest}.{_FORMAT}.arrow"


def open_copy(path: Path) -> tuple[ManifestColumns, Mapping[str, Any]] | None:
    """A copy's columns and what it says of itself; None where there is none, or it is damaged."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapped)))
        if reader.num_record_batches != 1:
            return None
        table = pa.Table.from_batches([reader.get_batch(0)])
        about = table.schema.metadata or {}
        value = read_checked(about[ABOUT])
        table, known = _without_known(table)
    except (FileNotFoundError, KeyError, ValueError, OSError, pa.ArrowException):
        return None
    if not value:
        return None
    if _SAME_NAMES in about:
        table = table.add_column(1, "name", table.column("object"))
    # Who reads rows here and there gains nothing from what lies beside them.
    mapped.madvise(mmap.MADV_RANDOM)
    return ManifestColumns(table, mapped, known), value


def opened_copy(path: Path, file: pq.ParquetFile) -> tuple[ManifestColumns, Mapping[str, Any]] | None:
    """Make the copy of a manifest and open it; where the cache folder takes none, in a temporary one, which is logged.

    Raises:
        OutOfSpace: there is no space in the folder for temporary files either.
        AccessDenied: The temporary folder cannot be written to.
    """
    try:
        kept_copy(path, file)
        return open_copy(path)
    except (AccessDenied, OutOfSpace) as error:
        warn_not_kept(path.parent, error)
    # What is mapped stays until nobody uses it any more, though its file is gone.
    with tempfile.TemporaryDirectory(prefix="frostline-") as folder:
        kept_copy(Path(folder, path.name), file)
        return open_copy(Path(folder, path.name))


def kept_copy(path: Path, file: pq.ParquetFile) -> None:
    """Write the copy of a manifest in pieces, and let it appear when it is whole; other copies beside it go.

    Memory is that of a piece, and of the metadata columns. What a split by class needs of the labels is worked out too.

    Raises:
        OutOfSpace: the disk is full.
        AccessDenied: the cache folder takes no writes.
    """
    try:
        make_private_folder(path.parent)
        for left in path.parent.glob(".spool-*"):
            if _is_gone(left.name.split("-")[1]):  # the process was killed
                shutil.rmtree(left, ignore_errors=True)
        with _folder_of_its_own(path.parent) as spool:
            _write(spool, file)
            (spool / "whole").replace(path)
        for other in path.parent.glob("*.arrow"):
            if other != path:
                other.unlink(missing_ok=True)
    except OSError as error:
        raise error_of_system(error, str(path)) from error


class StoreFile(io.RawIOBase):
    """An object of a store as a file that can be read at any place."""

    def __init__(self, store: Readable, name: str, size: int) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._size = size
        self._place = 0

    def readable(self) -> bool:
        """Whether it can be read: it can."""
        return True

    def seekable(self) -> bool:
        """Whether it can be read at any place: it can."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        """Bytes from here, up to ``size`` of them."""
        left = max(0, self._size - self._place)
        size = left if size < 0 else min(size, left)
        data = bytes(self._store.read(self._name, self._place, size)) if size else b""
        self._place += len(data)
        return data


def _write(spool: Path, file: pq.ParquetFile) -> None:
    schema = file.schema_arrow
    spooled: dict[str, _Texts | _Numbers] = {
        field.name: _Texts(spool, field.name) if field.type == pa.string() else _Numbers(spool, field.name)
        for field in COLUMNS
    }
    further: dict[str, list[pa.Array]] = {name: [] for name in schema.names if name not in COLUMNS.names}
    is_same = True
    # One thread: Arrow's pool would not survive a fork of the process.
    for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
        is_same = is_same and batch["name"].equals(batch["object"])
        for name, column in spooled.items():
            column.add(batch[name])
        for name, pieces in further.items():
            pieces.append(batch[name])
    arrays = {name: column.array() for name, column in spooled.items()}
    arrays["label"] = label_column(arrays["label"].to_numpy())
    if is_same:
        del arrays["name"]
    for name, pieces in further.items():
        arrays[name] = pa.chunked_array(pieces, schema.field(name).type).combine_chunks()
    known, places = _known_labels(spool, arrays["label"])
    arrays.update(places)
    metadata = {**(schema.metadata or {}), **({_SAME_NAMES: b"object"} if is_same else {}), **known}
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays)).replace_schema_metadata(metadata)
    options = pa.ipc.IpcWriteOptions(allow_64bit=True, use_threads=False)
    with open_private(spool / "whole", "xb") as out:
        with pa.ipc.new_file(out, batch.schema, options=options) as writer:
            writer.write_batch(batch)
        out.flush()
        os.fsync(out.fileno())


def _known_labels(spool: Path, column: pa.Array) -> tuple[dict[bytes, bytes], dict[str, pa.Array]]:
    """What a split by class needs, for a copy's head and as a column; nothing where labels are too far apart."""
    numbers = np.frombuffer(column.buffers()[1] or b"", np.int64, len(column))
    if not 0 < len(column) <= _MAX_PLACES or int(numbers.max()) - int(numbers.min()) > _MAX_CLASSES:
        return {}, {}
    labels = count_labels(lambda: iter((numbers,)))
    said = {"first": labels.first, "counts": labels.counts.tolist(), "is_ascending": labels.is_ascending}
    if labels.is_ascending:
        return {_LABELS: json.dumps(said).encode()}, {}
    places = _Numbers(spool, _PLACES, pa.uint32())
    for piece in places_by_label(labels):
        places.add(pa.array(piece.astype(np.uint32)))
    return {_LABELS: json.dumps(said).encode()}, {_PLACES: places.array()}


def _without_known(table: pa.Table) -> tuple[pa.Table, LabelSummary | None]:
    """A copy's table as it was, and what is known of its labels."""
    places = table.select([_PLACES]) if _PLACES in table.column_names else None
    said = json.loads((table.schema.metadata or {}).get(_LABELS, b"null"))
    table = table if places is None else table.drop_columns([_PLACES])
    if said is None:
        return table, None
    counts = np.array(said["counts"], np.int64)
    return table, LabelSummary(
        first=int(said["first"]), counts=counts, is_ascending=bool(said["is_ascending"]), places=places
    )


class _Numbers:
    """A column of whole numbers, written to a file piece by piece; null, as labels may be, as -1."""

    def __init__(self, folder: Path, name: str, kind: pa.DataType | None = None) -> None:
        self._file = _new(folder / f"{name}.numbers")
        self._kind = kind or pa.int64()

    def add(self, column: pa.Array) -> None:
        numbers = column if not column.null_count else pc.fill_null(column, -1)
        self._file.write(memoryview(numbers.to_numpy(zero_copy_only=True)).cast("B"))

    def array(self) -> pa.Array:
        data = _mapped(self._file)
        return pa.Array.from_buffers(self._kind, data.size * 8 // self._kind.bit_width, [None, data])


class _Texts:
    """A column of strings, written to two files piece by piece: their bytes, and where each ends."""

    def __init__(self, folder: Path, name: str) -> None:
        self._bytes = _new(folder / f"{name}.bytes")
        self._ends = _new(folder / f"{name}.ends")
        self._ends.write(bytes(8))
        self._total = 0

    def add(self, column: pa.Array) -> None:
        _, ends, data = column.buffers()
        places = np.frombuffer(ends, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
        if data is not None:
            self._bytes.write(memoryview(data)[places[0] : places[-1]])
        self._ends.write(memoryview(places[1:] - places[0] + self._total).cast("B"))
        self._total += int(places[-1] - places[0])

    def array(self) -> pa.Array:
        ends = _mapped(self._ends)
        return pa.Array.from_buffers(pa.large_string(), ends.size // 8 - 1, [None, ends, _mapped(self._bytes)])


def _new(path: Path) -> BinaryIO:
    return path.open("x+b")


def _mapped(file: BinaryIO) -> pa.Buffer:
    file.flush()
    with file:
        size = file.seek(0, os.SEEK_END)
        return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")


def _is_gone(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (OverflowError, ProcessLookupError, ValueError):
        return True
    except PermissionError:  # it is somebody else's
        pass
    return False


@contextmanager
def _folder_of_its_own(parent: Path) -> Iterator[Path]:
    folder = parent / f".spool-{os.getpid()}-{secrets.token_hex(4)}"
    make_private_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
