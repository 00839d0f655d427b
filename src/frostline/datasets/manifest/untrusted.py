"""Reads a manifest that a node has sent as what a stranger made: nothing of it is used before all of it was checked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from frostline.core import CELLS, OBJECTS, UNPACKED
from frostline.datasets.formats.base import COLUMNS, TARGET_COLUMNS
from frostline.datasets.manifest.manifest import IN_MEMORY_BYTES
from frostline.datasets.manifest.manifest_store import StoredManifest, read_manifest
from frostline.datasets.manifest.mmap import ABOUT, copy_of, kept_copy, open_copy
from frostline.errors import Refused
from frostline.ordering import Chosen
from frostline.wire.listings import ManifestHead

__all__ = ("checked", "opened", "splits_of")

# Ids are hashes, which nothing compresses: eight bytes a sample, and some for its address.
_MIN_BYTES_A_SAMPLE = 4
# What a few bytes may say over and over again, in memory and in a file that is mapped. A million names that differ in
# their number alone take eight bytes each as they are kept.
_MAX_EXPANSION = 256
_EXPANSION_BYTES = 64 << 20
_MAX_TEXT_BYTES, _MAX_MAPPED_TEXT_BYTES = 2 << 30, 64 << 30
_MAX_COLUMNS = 4096
_MAX_CLASSES = 1 << 24
_AT_ONCE = 1 << 16
# Of more, ids are not held against each other: a request in which one stands twice is refused by its node.
_MAX_COMPARED = 1 << 24
_SAID = ("digest", "classes", "reading", "splits")


def checked(path: Path, head: ManifestHead) -> None:
    """Do nothing if the file holds what its node says of it, and nothing that harms whoever uses it.

    Memory is that of some ten thousand rows, of one page of the file, and of the ids.

    Raises:
        Refused: the manifest does not match; the message names the difference.
    """
    try:
        # Texts come as they are kept, by their numbers: so it is known what they will take before they take it.
        plain = pq.read_schema(path)
        texts = [field.name for field in plain if _is_text(field.type)]
        with pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=texts) as file:
            _check_schema(plain, file.metadata, head)
            about = _about_in(plain, head)
            _check_rows(file, len(about["classes"]), head)
    except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
        raise Refused(f"the node sent a manifest that cannot be read: {str(error)[:200]!a}") from error


def opened(path: Path, head: ManifestHead, cache: Path, url: str) -> StoredManifest | None:
    """A manifest that was checked; None where it is not there any more.

    Args:
        path: location of the manifest's file.
        head: description of the manifest by its node.
        cache: folder for the mapped copy of a large one.
        url: address of the data set's root.
    """
    if head.nbytes <= IN_MEMORY_BYTES:
        try:
            found = read_manifest(path.read_bytes())
        except OSError:
            return None
    else:
        copy = copy_of(cache, url, head.sha256)  # of the file's own digest: no other file has a say in it
        found = open_copy(copy)
        if found is None:
            try:
                with pq.ParquetFile(path, page_checksum_verification=True) as file:
                    kept_copy(copy, file)
            except (pa.ArrowException, OSError):
                return None
            found = open_copy(copy)
    return None if found is None else StoredManifest(*found, path.as_uri())


def splits_of(head: ManifestHead, data: bytes | memoryview) -> dict[str, Chosen]:
    """The splits that came behind a manifest, as many bytes as its head says."""
    bits = np.frombuffer(data, np.uint8).reshape(len(head.splits), head.bitmap_bytes).copy()
    if head.samples % 8:
        bits[:, -1] &= (1 << head.samples % 8) - 1
    return {name: Chosen(row, head.samples) for name, row in zip(head.splits, bits, strict=True)}


def _check_schema(schema: pa.Schema, about: pq.FileMetaData, head: ManifestHead) -> None:
    first = pa.schema([schema.field(place) for place in range(min(len(COLUMNS), len(schema)))])
    if not first.equals(COLUMNS) or len(schema) > _MAX_COLUMNS or len(set(schema.names)) < len(schema):
        raise Refused("the node sent a manifest whose columns are not those of samples")
    strange = [field.name for field in schema if not _is_plain(field.type)]
    targets = [schema.field(field.name).type == field.type for field in TARGET_COLUMNS if field.name in schema.names]
    if strange or not all(targets):
        raise Refused("the node sent a manifest with a column of a type that none has")
    if about.num_rows != head.samples or about.num_rows * _MIN_BYTES_A_SAMPLE > head.nbytes:
        raise Refused(f"the node sent a manifest of {about.num_rows} samples that it cannot hold, or says otherwise")


def _about_in(schema: pa.Schema, head: ManifestHead) -> Mapping[str, Any]:
    try:
        about = json.loads((schema.metadata or {}).get(ABOUT, b"{}"))
    except RecursionError:
        about = None
    is_right = (
        isinstance(about, dict)
        and about.get("digest") == head.digest
        # What lies elsewhere is listed by no node.
        and about.get("reading") in (OBJECTS, CELLS, UNPACKED)
        and all(_are_texts(about.get(name)) for name in ("classes", "splits"))
    )
    if not is_right:
        raise Refused("the node sent a manifest that says of itself what makes no sense")
    return {name: about[name] for name in _SAID}


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_CLASSES and all(isinstance(name, str) for name in value)


def _check_rows(file: pq.ParquetFile, classes: int, head: ManifestHead) -> None:
    maximum = _MAX_TEXT_BYTES if head.nbytes <= IN_MEMORY_BYTES else _MAX_MAPPED_TEXT_BYTES
    left = min(_MAX_EXPANSION * head.nbytes + _EXPANSION_BYTES, maximum)
    ids: list[npt.NDArray[np.int64]] = []
    rows = 0
    # One thread: Arrow's pool would not survive a fork of the process.
    for batch in file.iter_batches(_AT_ONCE, use_threads=False):
        rows += len(batch)
        left -= sum(_text_bytes(column) for column in batch.columns if pa.types.is_dictionary(column.type))
        if left < 0:
            raise Refused("the node sent a manifest whose texts are far longer than its bytes can say")
        _check_numbers(batch, classes)
        if head.samples <= _MAX_COMPARED:
            ids.append(batch["id"].to_numpy())
    if rows != head.samples:
        raise Refused(f"the node sent {rows} samples and says that it sent {head.samples}")
    if ids and len(np.unique(np.concatenate(ids))) < rows:
        raise Refused("the node sent a manifest in which an id stands twice")


def _text_bytes(column: pa.DictionaryArray) -> int:
    """What texts take when each is written out."""
    lengths = pc.binary_length(column.dictionary)
    return int(pc.sum(lengths.take(column.indices).cast(pa.int64())).as_py() or 0)


def _check_numbers(batch: pa.RecordBatch, classes: int) -> None:
    has_targets = set(TARGET_COLUMNS.names) <= set(batch.schema.names)
    for column_field in (*COLUMNS, *(TARGET_COLUMNS if has_targets else ())):
        column = batch[column_field.name]
        if column.null_count:
            raise Refused(f"the node sent a manifest with samples that have no {column_field.name}")
        if column_field.type == pa.int64() and len(column):
            found = pc.min_max(column).as_py()
            minimum, maximum = (-1, classes - 1) if column_field.name == "label" else (0, np.iinfo(np.int64).max)
            if not minimum <= found["min"] <= found["max"] <= maximum:
                raise Refused(f"the node sent a manifest with a {column_field.name} that makes no sense")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_plain(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
        or _is_text(kind)
    )
