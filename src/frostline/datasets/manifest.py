"""The manifest: the immutable table of a data set's samples, named by its content, kept as Parquet beside the data."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from frostline.core import OBJECTS, Samples
from frostline.datasets.forms.faces import COLUMNS, Listed
from frostline.datasets.forms.known import form_named, form_of
from frostline.errors import AccessDenied, ObjectNotFound
from frostline.preprocess import Applied
from frostline.stores.faces import Entry, ObjectStore
from frostline.stores.folder import FolderStore

__all__ = ("Manifest", "load_manifest")

_FOLDER = ".frostline/manifests"
_ABOUT = b"frostline.manifest"


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
        reading: how the bytes at the samples' addresses are found.
    """

    samples: Samples
    names: tuple[str, ...]
    etags: tuple[str, ...]
    classes: tuple[str, ...]
    digest: str
    place: str
    found: bool
    applied: Applied | None = None
    reading: str = OBJECTS


def load_manifest(store: ObjectStore, *, cache: Path, form: str | None = None) -> Manifest:
    """List a store, and find the manifest of that listing or build it.

    A listing that has changed has another digest, so its manifest is built anew; so is a damaged one. A ready form
    brings its own.

    Args:
        store: that holds the data.
        cache: folder for the manifests of stores that take no writes; made when needed.
        form: name of the data's form; by default what the listing looks like.

    Raises:
        DataNotFound: nothing is at the store's URL.
        EmptyDataset: not one sample of that form is there.
        DataError: the data cannot be used as it is.
        SettingError: there is no form of that name.
        AccessDenied: the store refused to be listed.
        OutOfSpace: the disk is full.
        StoreUnavailable: asking again may help.
    """
    entries = list(store.list())
    chosen = form_of(entries) if form is None else form_named(form)
    digest = chosen.digest(entries)
    name = f"{_FOLDER}/{digest}.parquet"
    found = _found(store, name, digest, entries) or _found_in_cache(cache, name, digest)
    if found is not None:
        listed, place = found
        return _manifest(listed, place, found=True)
    listed = chosen.read(store, entries)
    if listed.kept_at:
        return _manifest(listed, f"{store.url}/{listed.kept_at}", found=True)
    return _manifest(listed, _kept(store, cache, name, _file(listed)), found=False)


def _found(store: ObjectStore, name: str, digest: str, entries: list[Entry]) -> tuple[Listed, str] | None:
    # The listing that was just made knows the manifests too: no further request tells whether one is there.
    size = next((entry.size for entry in entries if entry.object == name), None)
    if size is None:
        return None
    try:
        listed = _parsed(store.read(name, 0, size), digest)
    except (ObjectNotFound, AccessDenied):
        return None
    return None if listed is None else (listed, f"{store.url}/{name}")


def _found_in_cache(cache: Path, name: str, digest: str) -> tuple[Listed, str] | None:
    path = cache / name
    if not path.is_file():
        return None
    return _found(FolderStore(str(cache)), name, digest, [Entry(name, path.stat().st_size, "")])


def _kept(store: ObjectStore, cache: Path, name: str, data: bytes) -> str:
    try:
        store.write(name, data)
        return f"{store.url}/{name}"
    except AccessDenied:
        return _kept_in_cache(cache, name, data)


def _kept_in_cache(cache: Path, name: str, data: bytes) -> str:
    cache.mkdir(parents=True, exist_ok=True)
    store = FolderStore(str(cache))
    store.write(name, data)
    return f"{store.url}/{name}"


def _file(listed: Listed) -> bytes:
    about = {"digest": listed.digest, "classes": listed.classes, "reading": listed.reading}
    sink = pa.BufferOutputStream()
    table = listed.table.replace_schema_metadata({_ABOUT: json.dumps(about)})
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())


def _parsed(data: bytes | memoryview, digest: str) -> Listed | None:
    # One thread: Arrow's pool would not survive a fork of the process.
    try:
        table = pq.ParquetFile(pa.py_buffer(data), page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError):
        return None
    about = json.loads((table.schema.metadata or {}).get(_ABOUT, b"{}"))
    first = pa.schema([table.schema.field(place) for place in range(min(len(COLUMNS), table.num_columns))])
    if not first.equals(COLUMNS) or about.get("digest") != digest:
        return None
    return Listed(table=table, classes=tuple(about["classes"]), digest=digest, reading=about["reading"])


def _manifest(listed: Listed, place: str, *, found: bool) -> Manifest:
    table = listed.table
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
        names=tuple(table["name"].to_pylist()),
        etags=etags,
        classes=listed.classes,
        digest=listed.digest,
        place=place,
        found=found,
        applied=listed.applied,
        reading=listed.reading,
    )


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    return np.asarray(table[name].to_numpy(), np.int64)
