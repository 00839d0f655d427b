"""The manifest: the immutable table of a data set's samples, named by its content, kept as Parquet beside the data."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from frostline.core import Samples
from frostline.datasets.folders import Listing, list_images
from frostline.datasets.ready import LAYOUT, TABLE, ReadyTable
from frostline.errors import AccessDenied, DataError, EmptyDataset, ObjectNotFound
from frostline.preprocess import Applied
from frostline.stores.faces import Entry, ObjectStore
from frostline.stores.folder import FolderStore

__all__ = ("Manifest", "load_manifest", "stable_ids")

_FOLDER = ".frostline/manifests"
_SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "object": pa.string(),
        "offset": pa.int64(),
        "length": pa.int64(),
        "label": pa.int64(),
        "etag": pa.string(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """A data set's samples and where their table is kept.

    Attributes:
        samples: one row a sample, ordered by name.
        names: of the images; where they are kept as a ready form, those that it was made from.
        etags: of each sample's object, as the store gives them.
        classes: names, by label.
        digest: SHA-256 of the listing; the name of the table.
        place: URL of the table.
        found: it was there already; False where it was built now.
        applied: what was done to the images before they were kept; None where they are encoded.
    """

    samples: Samples
    names: tuple[str, ...]
    etags: tuple[str, ...]
    classes: tuple[str, ...]
    digest: str
    place: str
    found: bool
    applied: Applied | None = None


def load_manifest(store: ObjectStore, *, cache: Path) -> Manifest:
    """List a store, and find the manifest of that listing or build it.

    A listing that has changed has another digest, so its manifest is built anew; so is a damaged one. A ready form
    brings its own.

    Args:
        store: that holds the data.
        cache: folder for the manifests of stores that take no writes; made when needed.

    Raises:
        DataNotFound: nothing is at the store's URL.
        EmptyDataset: not one labelled image is there.
        DataError: a ready form is there that is not whole.
        AccessDenied: the store refused to be listed.
        OutOfSpace: the disk is full.
        StoreUnavailable: asking again may help.
    """
    entries = list(store.list())
    if any(entry.object == LAYOUT for entry in entries):
        return _ready(store, {entry.object: entry for entry in entries})
    listing = list_images(entries)
    if not listing.objects:
        raise EmptyDataset(_nothing_at(store.url, listing))
    name = f"{_FOLDER}/{listing.digest}.parquet"
    return (
        _found(store, name, listing, entries)
        or _found_in_cache(cache, name, listing)
        or _built(store, cache, name, listing)
    )


def stable_ids(objects: list[str]) -> npt.NDArray[np.int64]:
    """Ids from names alone, so that a sample keeps its id whatever is added, taken away or moved to another store.

    Returns:
        ``int64[n]``, not negative: 63 bits of the BLAKE2b of each name.

    Raises:
        DataError: two names have one id, which happens once in some hundred million data sets of 100,000 names.
    """
    digests = b"".join([hashlib.blake2b(name.encode(), digest_size=8).digest() for name in objects])
    ids = (np.frombuffer(digests, "<u8") >> np.uint64(1)).astype(np.int64)
    if len(np.unique(ids)) != len(ids):
        order = np.argsort(ids, kind="stable")
        first = int(np.flatnonzero(np.diff(ids[order]) == 0)[0])
        one, other = (objects[row] for row in order[first : first + 2].tolist())
        raise DataError(f"{one!r} and {other!r} have the same 63-bit id: rename one of them")
    return ids


def _ready(store: ObjectStore, entries: dict[str, Entry]) -> Manifest:
    if TABLE not in entries:
        raise DataError(
            f"the ready form at {store.url} is not whole: run frostline ingest again, it goes on where it was"
        )
    table = ReadyTable.from_file(store.read(TABLE, 0, entries[TABLE].size))
    lost = [name for name, size in table.sizes.items() if name not in entries or entries[name].size != size]
    if lost:
        raise DataError(f"{lost[0]} of the ready form at {store.url} is gone or cut off: run frostline ingest again")
    etags = {name: entries[name].etag for name in table.sizes}
    content = "\0".join((table.digest, *(f"{name}\0{etag}" for name, etag in etags.items())))
    versions = tuple(etags[name] for name in table.samples.objects)
    return Manifest(
        samples=replace(table.samples, versions=versions),
        names=table.names,
        etags=versions,
        classes=table.classes,
        digest=hashlib.sha256(content.encode()).hexdigest(),
        place=f"{store.url}/{TABLE}",
        found=True,
        applied=table.layout.applied,
    )


def _nothing_at(url: str, listing: Listing) -> str:
    beside = f"; {listing.without_class} images stand in no class folder" if listing.without_class else ""
    return f"{url} holds no images in class folders (such as cats/1.jpg){beside}"


def _found(store: ObjectStore, name: str, listing: Listing, entries: list[Entry]) -> Manifest | None:
    # The listing that was just made knows the manifests too: no further request tells whether one is there.
    size = next((entry.size for entry in entries if entry.object == name), None)
    if size is None:
        return None
    try:
        table = _parsed(store.read(name, 0, size), listing.digest)
    except (ObjectNotFound, AccessDenied):
        return None
    return None if table is None else _manifest(table, listing, f"{store.url}/{name}", found=True)


def _found_in_cache(cache: Path, name: str, listing: Listing) -> Manifest | None:
    path = cache / name
    if not path.is_file():
        return None
    store = FolderStore(str(cache))
    return _found(store, name, listing, [Entry(name, path.stat().st_size, "")])


def _built(store: ObjectStore, cache: Path, name: str, listing: Listing) -> Manifest:
    table = _table(listing)
    data = _file(table)
    try:
        store.write(name, data)
        place = f"{store.url}/{name}"
    except AccessDenied:
        place = _kept_in_cache(cache, name, data)
    return _manifest(table, listing, place, found=False)


def _kept_in_cache(cache: Path, name: str, data: bytes) -> str:
    cache.mkdir(parents=True, exist_ok=True)
    store = FolderStore(str(cache))
    store.write(name, data)
    return f"{store.url}/{name}"


def _table(listing: Listing) -> pa.Table:
    columns = [
        stable_ids(listing.objects),
        listing.objects,
        np.zeros(len(listing.objects), np.int64),
        listing.lengths,
        listing.labels,
        listing.etags,
    ]
    about = {"frostline.digest": listing.digest, "frostline.classes": json.dumps(listing.classes)}
    return pa.table(columns, schema=_SCHEMA.with_metadata(about))


def _file(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())


def _parsed(data: bytes | memoryview, digest: str) -> pa.Table | None:
    # One thread: Arrow's pool would not survive a fork of the process.
    try:
        table = pq.ParquetFile(pa.py_buffer(data), page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError):
        return None
    known = (table.schema.metadata or {}).get(b"frostline.digest")
    return table if table.schema.equals(_SCHEMA) and known == digest.encode() else None


def _manifest(table: pa.Table, listing: Listing, place: str, *, found: bool) -> Manifest:
    etags = tuple(table["etag"].to_pylist())
    samples = Samples(
        ids=_numbers(table, "id"),
        objects=table["object"].to_pylist(),
        offsets=_numbers(table, "offset"),
        lengths=_numbers(table, "length"),
        labels=_numbers(table, "label"),
        versions=etags,
    )
    return Manifest(
        samples=samples,
        names=tuple(samples.objects),
        etags=etags,
        classes=listing.classes,
        digest=listing.digest,
        place=place,
        found=found,
    )


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    return np.asarray(table[name].to_numpy(), np.int64)
