"""Keeps the manifests of one store's data: as Parquet beside it or in the cache folder, the newest few of them."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from frostline.datasets.formats.base import COLUMNS, Format, ListedSamples, Widespread
from frostline.datasets.formats.columns import ManifestColumns
from frostline.datasets.formats.split_names import splits_said
from frostline.datasets.manifest.location import (
    HISTORY_BYTES,
    LAST_MANIFEST,
    history_of,
    history_text,
    lies_beside,
    tidied,
)
from frostline.datasets.manifest.mmap import ABOUT, StoreFile, copy_of, kept_copy, open_copy
from frostline.datasets.manifest.named_splits import SPLITS
from frostline.datasets.ready.layout import LAYOUT
from frostline.errors import AccessDenied, BadRequest, DataNotFound, ObjectNotFound, StoreError
from frostline.stores.base.protocols import Buffer, ObjectStore, Prunable
from frostline.stores.base.urls import object_url
from frostline.stores.objects.local import FolderStore

__all__ = ("ManifestStore", "StoredManifest", "about_of", "listed_in", "read_manifest", "write_manifest")

_FOLDER = ".frostline/manifests"
_GROUP_ROWS = 1 << 20
# Rows by which a column is judged.
_LOOKED_AT = 10_000
_HISTORY = ".frostline/manifest-history.json"
# Always as long as this, so that it is read without asking how long it is.
_LAST_BYTES = 512


class _Last(NamedTuple):
    """The manifest of some data that was built last.

    Attributes:
        digest: digest of the manifest.
        format: format that built the manifest.
        nbytes: size of the manifest's table in bytes.
        listing: digest of the listing; another one where objects elsewhere had changed and the listing had not.
        rule: digest of an empty listing, which names the format's rule alone.
    """

    digest: str
    format: str
    nbytes: int
    listing: str
    rule: str


class StoredManifest(NamedTuple):
    """A manifest that was read.

    Attributes:
        columns: its table.
        about: description of the manifest; see ``about_of``.
        place: its URL.
    """

    columns: ManifestColumns
    about: Mapping[str, Any]
    place: str


class ManifestStore:
    """Where the manifests of one store's data are: beside it, or in the cache folder.

    Args:
        store: store that holds the data.
        cache: folder for the manifests of local folders and of stores that take no writes, and for the mapped copies
            of large ones.
        in_memory_bytes: larger tables are mapped.
        beside: keep them beside the data in a local folder too, whatever the cache folder has.
    """

    def __init__(self, store: ObjectStore, cache: Path, in_memory_bytes: int, *, beside: bool = False) -> None:
        self._store = store
        self._cache = cache
        self._in_memory_bytes = in_memory_bytes
        root = hashlib.sha256(store.url.encode(errors="surrogateescape")).hexdigest()[:16]
        self._last_in_cache = f".frostline/last/{root}.json"
        self._history_in_cache = f".frostline/last/{root}.history.json"
        self._reads_cache = not beside
        self._keeps_beside = lies_beside(store, is_asked=beside)

    def found(self, digest: str, sizes: Mapping[str, int]) -> StoredManifest | None:
        """The manifest of that digest; the listing says what lies beside the data."""
        name = f"{_FOLDER}/{digest}.parquet"
        # The listing that was just made knows the manifests too: no further request tells whether one is there.
        if name in sizes:
            kept = self._opened(self._store, name, sizes[name], digest)
            if kept is not None:
                return kept
        path = self._cache / name
        if not self._reads_cache or not path.is_file():
            return None
        return self._opened(self._in_cache(), name, path.stat().st_size, digest)

    def of_listing(self, format: Format, digest: str, sizes: Mapping[str, int]) -> StoredManifest | None:
        """The manifest of a listing with that digest: the newest, where objects elsewhere changed after the first."""
        last = self._last_of(sizes) if isinstance(format, Widespread) else None
        if last is not None and (last.format, last.listing) == (format.name, digest):
            return self.found(last.digest, sizes)
        return self.found(digest, sizes)

    def likely(self) -> StoredManifest | None:
        """The manifest that was built last, whether or not the data is still the same.

        None where there is none, where it is so large that reading it should not be in vain, and where the store
        fails: whoever asks for the right one meets that too.
        """
        try:
            last = self._last_of(None)
            if last is None or last.nbytes > self._in_memory_bytes:
                return None
            return self.found(last.digest, {f"{_FOLDER}/{last.digest}.parquet": last.nbytes})
        except StoreError:
            return None

    def before(self, format: Format, sizes: Mapping[str, int], *, of_any_rule: bool) -> ListedSamples | None:
        """What the format made of an earlier listing.

        Args:
            format: format of the present listing.
            sizes: sizes of its objects.
            of_any_rule: whatever the format's rule was; otherwise its present one, whose rows can be taken over.
        """
        last = self._last_of(sizes)
        if last is None or last.format != format.name or not (of_any_rule or last.rule == format.digest(())):
            return None
        kept = self.found(last.digest, sizes)
        return None if kept is None else listed_in(kept)

    def last_kept(self, format: str | None) -> StoredManifest | None:
        """The manifest that was built last, found without listing the data; None where the data is a ready format.

        Raises:
            DataNotFound: there is no manifest, or it is of another format than the named one.
        """
        last = self._last_of(None)
        name = None if last is None else f"{_FOLDER}/{last.digest}.parquet"
        kept = None if last is None else self.found(last.digest, {str(name): last.nbytes})
        if last is not None and format not in (None, last.format):
            raise DataNotFound(
                f"the manifest of {self._store.url} that was built last is of the format {last.format}, not {format}: "
                f"list the data in that format first (frostline index --format {format})"
            )
        if kept is None and not self._has(LAYOUT):
            raise DataNotFound(f"no manifest of {self._store.url} was built yet: list the data first (frostline index)")
        return kept

    def _has(self, name: str) -> bool:
        try:
            self._store.read(name, 0, 1)
        except (AccessDenied, BadRequest, DataNotFound, ObjectNotFound):
            return False
        return True

    def keep(self, format: Format, listed: ListedSamples, listing: str) -> StoredManifest:
        """Write a manifest, and say that it is the last one, and the digest of the listing that it was made from."""
        name = f"{_FOLDER}/{listed.digest}.parquet"
        data = _file(listed)
        newest = _Last(listed.digest, format.name, len(data), listing, format.digest(()))
        last = json.dumps(newest._asdict()).encode().ljust(_LAST_BYTES)
        is_beside = self._keeps_beside and self._kept_beside(name, data, last)
        place = self._store if is_beside else self._kept_in_cache(name, data, last)
        if len(data) > self._in_memory_bytes:
            kept = self._opened(place, name, len(data), listed.digest)
            if kept is not None:
                return kept
        return StoredManifest(
            ManifestColumns(listed.table.combine_chunks()), about_of(listed), object_url(place.url, name)
        )

    def _kept_beside(self, name: str, data: Buffer, last: bytes) -> bool:
        try:
            self._store.write(name, data)
            self._store.write(LAST_MANIFEST, last)
        except AccessDenied:
            self._keeps_beside, self._reads_cache = False, True
        return self._keeps_beside

    def _kept_in_cache(self, name: str, data: Buffer, last: bytes) -> ObjectStore:
        place = self._in_cache()
        place.create()
        place.write(name, data)
        place.write(self._last_in_cache, last)
        return place

    def tidy(self, digest: str, sizes: Mapping[str, int]) -> None:
        """Remove manifests that nobody will want once this one was kept; see ``datasets.manifest.location``.

        Whoever is reading one of them finds it gone and builds it again. What the store refuses stays.
        """
        place: ObjectStore = self._store if self._keeps_beside else self._in_cache()
        name = _HISTORY if self._keeps_beside else self._history_in_cache
        if not isinstance(place, Prunable):
            return
        before = _history(place, name)
        # The cache folder has manifests of other data too: of those nothing is known, and they stay.
        there = _digests(sizes, _FOLDER, ".parquet") if self._keeps_beside else frozenset(before)
        named = _digests(sizes, SPLITS, ".json") | {
            digest for digest in there if self._splits_in_cache(digest).is_file()
        }
        history = tidied(before, digest, there=there, named=named)
        with suppress(AccessDenied):
            place.write(name, history_text(history.digests))
            for digest in history.gone:
                place.remove(f"{_FOLDER}/{digest}.parquet")

    def _splits_in_cache(self, digest: str) -> Path:
        return self._cache / SPLITS / f"{digest}.json"

    def _last_of(self, sizes: Mapping[str, int] | None) -> _Last | None:
        """What was built last; ``sizes`` of a listing spares asking for what is not there."""
        places: list[tuple[ObjectStore, str]] = [(self._in_cache(), self._last_in_cache)] if self._reads_cache else []
        if sizes is None or LAST_MANIFEST in sizes:
            places.insert(0, (self._store, LAST_MANIFEST))
        for store, name in places:
            try:
                value = json.loads(bytes(store.read(name, 0, _LAST_BYTES)))
                kept = {name: str(value[name]) for name in ("digest", "format", "listing", "rule")}
                return _Last(nbytes=int(value["nbytes"]), **kept)
            except (
                AccessDenied,
                BadRequest,
                DataNotFound,
                ObjectNotFound,
                AttributeError,
                ValueError,
                KeyError,
                TypeError,
            ):
                continue
        return None

    def _in_cache(self) -> FolderStore:
        return FolderStore(str(self._cache), is_private=True)

    def _opened(self, store: ObjectStore, name: str, nbytes: int, digest: str) -> StoredManifest | None:
        place = object_url(store.url, name)
        try:
            if nbytes > self._in_memory_bytes:
                found = self._mapped(store, name, nbytes, digest)
            else:
                found = read_manifest(store.read(name, 0, nbytes))
        except (ObjectNotFound, AccessDenied, BadRequest):  # a table's rows, for one, have no such names
            return None
        return None if found is None or not _is_of(*found, digest) else StoredManifest(*found, place)

    def _mapped(
        self, store: ObjectStore, name: str, nbytes: int, digest: str
    ) -> tuple[ManifestColumns, Mapping[str, Any]] | None:
        path = copy_of(self._cache, self._store.url, digest)
        found = open_copy(path)
        if found is not None and _is_of(*found, digest):
            return found
        try:
            file = pq.ParquetFile(StoreFile(store, name, nbytes), page_checksum_verification=True)
            if not _has_columns(file.schema_arrow):
                return None
            kept_copy(path, file)
        except (pa.ArrowException, OSError):
            return None
        return open_copy(path)


def listed_in(kept: StoredManifest) -> ListedSamples:
    """What a manifest was made of."""
    return ListedSamples(
        table=kept.columns.table,
        classes=tuple(kept.about["classes"]),
        digest=kept.about["digest"],
        reading=kept.about["reading"],
        divided_by_names=kept.about["divided_by_names"],
    )


def about_of(listed: ListedSamples) -> dict[str, Any]:
    """What a manifest says of itself."""
    return {
        "digest": listed.digest,
        "classes": listed.classes,
        "reading": listed.reading,
        "splits": splits_said(listed.table, divided_by_names=listed.divided_by_names),
        "divided_by_names": listed.divided_by_names,
    }


def _history(place: ObjectStore, name: str) -> tuple[str, ...]:
    try:
        return history_of(bytes(place.read(name, 0, HISTORY_BYTES)))
    except (AccessDenied, ObjectNotFound):
        return ()


def _digests(names: Iterable[str], folder: str, suffix: str) -> frozenset[str]:
    """What the objects of a folder are called, without its name and their suffix."""
    start = f"{folder}/"
    return frozenset(
        name[len(start) : -len(suffix)] for name in names if name.startswith(start) and name.endswith(suffix)
    )


def write_manifest(table: pa.Table, about: Mapping[str, Any], sink: Any) -> None:
    """Write a manifest as Parquet.

    Args:
        table: samples; wide texts, as mapped ones are, become narrow, and dictionaries are written out.
        about: description of the manifest; see ``about_of``.
        sink: a file of Arrow's or Python's, open for writing.
    """
    schema = pa.schema(map(_narrow, table.schema), {ABOUT: json.dumps(about)})
    options = {"compression": "zstd", "write_page_checksum": True, "use_dictionary": _repeating(table)}
    with pq.ParquetWriter(sink, schema, **options) as writer:
        for group in _row_groups(table):
            writer.write_table(group.cast(schema))


def _file(listed: ListedSamples) -> memoryview:
    sink = pa.BufferOutputStream()
    write_manifest(listed.table, about_of(listed), sink)
    return memoryview(sink.getvalue()).cast("B")  # as drivers take bytes


def _narrow(field: pa.Field) -> pa.Field:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return field.with_type(pa.string() if pa.types.is_large_string(kind) else kind)


def _row_groups(table: pa.Table) -> Iterator[pa.Table]:
    """A manifest's table in pieces as it is written."""
    for start in range(0, max(1, table.num_rows), _GROUP_ROWS):
        yield table.slice(start, _GROUP_ROWS)


def _repeating(table: pa.Table) -> list[str]:
    """The columns whose values come again: a dictionary of others takes memory, and makes the file larger."""
    first = table.slice(0, _LOOKED_AT)
    return [
        field.name
        for field, column in zip(first.schema, first.columns, strict=True)
        if not pa.types.is_null(field.type) and 2 * pc.count_distinct(column).as_py() <= len(column)
    ]


def read_manifest(data: bytes | memoryview) -> tuple[ManifestColumns, Mapping[str, Any]] | None:
    """A manifest's columns and what it says of itself, from the bytes of its file; None where it is damaged."""
    # One thread: Arrow's pool would not survive a fork of the process.
    try:
        table = pq.ParquetFile(pa.py_buffer(data), page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError):
        return None
    about = json.loads((table.schema.metadata or {}).get(ABOUT, b"{}"))
    return (ManifestColumns(table.combine_chunks()), about) if _has_columns(table.schema) else None


def _has_columns(schema: pa.Schema) -> bool:
    first = [schema.field(place) for place in range(min(len(COLUMNS), len(schema)))]
    return bool(pa.schema(first).equals(COLUMNS))


def _is_of(columns: ManifestColumns, about: Mapping[str, Any], digest: str) -> bool:
    return about.get("digest") == digest and len(columns.table.column_names) >= len(COLUMNS)
