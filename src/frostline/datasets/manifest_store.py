"""Keeps manifests and named splits of a data set: beside the data, or in the user's cache folder."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from frostline.core.declared import parse_json
from frostline.core.errors import (
    AccessDenied,
    BadRequest,
    DataNotFound,
    ObjectNotFound,
    OutOfSpace,
    SettingError,
    StoreError,
)
from frostline.core.files import checked_text, read_checked, warn_not_kept, with_schema, without_schema
from frostline.datasets.formats.base import COLUMNS, ExternalReferences, Format, ListedSamples, ManifestColumns
from frostline.datasets.formats.labels import split_names
from frostline.datasets.formats.left_out import read_left_out
from frostline.datasets.formats.ready import LAYOUT
from frostline.datasets.mapped import ABOUT, StoreFile, copy_of, open_copy, opened_copy
from frostline.ordering import Chosen
from frostline.stores.local import FolderStore
from frostline.stores.protocols import Buffer, Described, ObjectStore, Prunable, Readable
from frostline.stores.urls import object_url

__all__ = (
    "HISTORY_BYTES",
    "KEPT",
    "History",
    "ManifestStore",
    "NamedSplits",
    "StoredManifest",
    "about_of",
    "history_of",
    "history_text",
    "lies_beside",
    "listed_samples",
    "prune_history",
    "read_manifest",
    "write_manifest",
)


_LAST_MANIFEST = ".frostline/last-manifest.json"
"""Says beside the data which manifest was built last."""


def lies_beside(store: Readable, *, is_asked: bool) -> bool:
    """Whether they are kept beside the data: in an object store always, in a folder where somebody asked for it.

    Whoever reads a local folder by its names, as ``torchvision.datasets.ImageFolder`` does, would take one more folder
    in it for a class. A folder that has a manifest beside it goes on having it there.
    """
    if is_asked or not isinstance(store, FolderStore):
        return True
    try:
        store.read(_LAST_MANIFEST, 0, 1)
    except StoreError:
        return False
    return True


KEPT = 4
"""Manifests that stay, the newest one among them: somebody may be about to read the one before, or go back to it."""

HISTORY_BYTES = 2048
"""Of the text of a history: always as long as this, so that it is read without asking how long it is."""

# So many digests fit into the text.
_REMEMBERED = 24


class History(NamedTuple):
    """What becomes of the manifests of a data set when another one was built.

    Attributes:
        digests: digests of the manifests that stay, the newest first.
        gone: digests of those that are to be removed.
    """

    digests: tuple[str, ...]
    gone: tuple[str, ...]


def prune_history(history: Sequence[str], built: str, *, there: Collection[str], named: Collection[str]) -> History:
    """The history once a manifest was built.

    Args:
        history: digests of those that were built before, the newest first, as far as that is known.
        built: digest of the new one.
        there: digests of all manifests that lie there; those of which nothing is known are taken for the oldest.
        named: digests that something else names: they stay.
    """
    known = [built, *(digest for digest in history if digest != built)]
    order = [*known, *sorted(set(there) - set(known))]
    gone = tuple(digest for digest in order[KEPT:] if digest in there and digest not in named)
    stay = [digest for digest in order if digest not in gone and (digest == built or digest in there)]
    return History(tuple(stay[:_REMEMBERED]), gone)


def history_of(text: bytes) -> tuple[str, ...]:
    """The digests of a history's text; none where it is damaged."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    return tuple(filter(_is_digest, value)) if isinstance(value, list) else ()


def history_text(digests: Sequence[str]) -> bytes:
    """The inverse of ``history_of``."""
    return json.dumps(list(digests)).encode().ljust(HISTORY_BYTES)


def _is_digest(value: object) -> bool:
    # They become names of objects that are removed.
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


_FORMAT = 3
_SPLITS = ".frostline/splits"
"""Where they lie; ``<digest of the listing>.json`` says that there are some."""
# Always as long as this, so that it is read without asking how long it is.
_ABOUT_BYTES = 256
# What a store says of an object that is not there; one of rows cannot even name it.
_ABSENT = (AccessDenied, BadRequest, DataNotFound, ObjectNotFound)
_SCHEMA = pa.schema({"name": pa.string(), "samples": pa.int64(), "bits": pa.large_binary()})


class NamedSplits:
    """The splits of one listing of some data; of another listing there are others.

    Args:
        store: store that holds the data; None where a node listed it, and only the cache folder takes splits.
        cache: folder for the splits of local folders and of stores that take no writes.
        digest: digest of the listing.
        size: samples of all of the data.
        beside: keep them beside the data in a local folder too.
        given: splits that came with the listing; one of the same name in the cache folder goes first.
    """

    def __init__(
        self,
        store: ObjectStore | None,
        cache: Path,
        digest: str,
        size: int,
        *,
        beside: bool = False,
        given: Mapping[str, Chosen] = MappingProxyType({}),
    ) -> None:
        self._given = given
        self._store = store
        self._cache = cache
        self._digest = digest
        self._size = size
        self._beside = beside

    def load(self) -> dict[str, Chosen]:
        """All of them by name, in the order in which they were saved.

        Raises:
            SettingError: The splits were saved by another version of Frostline, or are damaged; they stay as they are.
            StoreUnavailable: asking again may help.
        """
        return {**self._given, **self._kept()}

    def _kept(self) -> dict[str, Chosen]:
        for store in filter(None, (self._store, self._in_cache())):
            try:
                text = bytes(store.read(self._about, 0, _ABOUT_BYTES))
            except _ABSENT as error:
                if _is_there(store, self._about):  # and shorter than any that was saved
                    raise self._damage(store, error) from error
                continue
            return self._understood(store, text)
        return {}

    def _understood(self, store: ObjectStore, text: bytes) -> dict[str, Chosen]:
        place = object_url(store.url, self._about)
        try:
            about = without_schema(parse_json(text), _FORMAT, place, ("object", "nbytes"))
            data = bytes(store.read(str(about["object"]), 0, int(about["nbytes"])))
            return self._parsed(about["object"], data)
        except (*_ABSENT, ValueError, LookupError, TypeError, RecursionError, pa.ArrowException) as error:
            raise self._damage(store, error) from error

    def _damage(self, store: ObjectStore, why: Exception) -> SettingError:
        # Taken for none, they would be written over, and what was held out would be trained on.
        return SettingError(
            f"the splits that were saved at {object_url(store.url, self._about)} cannot be read ({why}), and stay as "
            "they are: put back a copy, or remove that file to save others"
        )

    def save(self, splits: Mapping[str, Chosen]) -> str:
        """Keep them, in place of any of the same name, and say where.

        Raises:
            SettingError: The splits that were saved before cannot be read, and stay; see ``load``.
            OutOfSpace: the disk is full.
            StoreUnavailable: asking again may help.
        """
        data = _splits_file({**self._kept(), **splits})
        if self._store is not None and lies_beside(self._store, is_asked=self._beside):
            with suppress(AccessDenied):
                return self._write(self._store, data)
        cache = self._in_cache()
        cache.create()
        return self._write(cache, data)

    @property
    def _about(self) -> str:
        return f"{_SPLITS}/{self._digest}.json"

    def _object(self, data: bytes) -> str:
        return f"{_SPLITS}/{self._digest[:16]}-{hashlib.sha256(data).hexdigest()[:16]}.parquet"

    def _write(self, store: ObjectStore, data: bytes) -> str:
        # Named by its content, and named last: a reader finds the old splits or the new ones.
        name = self._object(data)
        store.write(name, data)
        store.write(self._about, _about_text({"object": name, "nbytes": len(data)}, _ABOUT_BYTES))
        return f"{store.url}/{name}"

    def _in_cache(self) -> FolderStore:
        return FolderStore(str(self._cache), is_private=True)

    def _parsed(self, name: str, data: bytes) -> dict[str, Chosen]:
        if name != self._object(data):  # a flipped bit would be a held-out sample that is trained on
            raise ValueError(f"{name} holds other bytes than were written")
        table = pq.ParquetFile(pa.py_buffer(data)).read(use_threads=False)
        rows = zip(table["name"].to_pylist(), table["bits"], strict=True)
        return {name: Chosen(np.frombuffer(bits.as_buffer(), np.uint8), self._size) for name, bits in rows}


def _is_there(store: ObjectStore, name: str) -> bool:
    try:
        return isinstance(store, Described) and bool(store.describe(name))
    except _ABSENT:
        return False


def _splits_file(splits: Mapping[str, Chosen]) -> bytes:
    columns = [
        list(splits),
        [len(split) for split in splits.values()],
        [split.bits.tobytes() for split in splits.values()],
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=_SCHEMA), sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())


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
        columns: the table.
        about: description of the manifest; see ``about_of``.
        place: the URL; empty where no place took it.
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

    def find(self, digest: str, sizes: Mapping[str, int]) -> StoredManifest | None:
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
        last = self._last_of(sizes) if isinstance(format, ExternalReferences) else None
        if last is not None and (last.format, last.listing) == (format.name, digest):
            return self.find(last.digest, sizes)
        return self.find(digest, sizes)

    def last_manifest(self) -> StoredManifest | None:
        """The manifest that was built last, whether or not the data is still the same.

        None where there is none, where it is so large that reading it should not be in vain, and where the store
        fails: whoever asks for the right one meets that too.
        """
        try:
            last = self._last_of(None)
            if last is None or last.nbytes > self._in_memory_bytes:
                return None
            return self.find(last.digest, {f"{_FOLDER}/{last.digest}.parquet": last.nbytes})
        except StoreError:
            return None

    def before(self, format: Format, sizes: Mapping[str, int], *, of_any_rule: bool) -> ListedSamples | None:
        """What the format made of an earlier listing.

        Args:
            format: format of the present listing.
            sizes: sizes of its objects.
            of_any_rule: True to take one of any rule of the format; otherwise of its present one, whose rows can be
                taken over.
        """
        last = self._last_of(sizes)
        if last is None or last.format != format.name or not (of_any_rule or last.rule == format.digest(())):
            return None
        kept = self.find(last.digest, sizes)
        return None if kept is None else listed_samples(kept)

    def unlisted_manifest(self, format: str | None) -> StoredManifest | None:
        """The manifest that was built last, found without listing the data; None where the data is a ready format.

        Raises:
            DataNotFound: No manifest was built, or it is of another format than the named one.
        """
        last = self._last_of(None)
        name = None if last is None else f"{_FOLDER}/{last.digest}.parquet"
        kept = None if last is None else self.find(last.digest, {str(name): last.nbytes})
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
        data = _manifest_file(listed)
        newest = _Last(listed.digest, format.name, len(data), listing, format.digest(()))
        last = _about_text(newest._asdict(), _LAST_BYTES)
        is_beside = self._keeps_beside and self._kept_beside(name, data, last)
        place = self._store if is_beside else self._kept_in_cache(name, data, last)
        if place is not None and len(data) > self._in_memory_bytes:
            kept = self._opened(place, name, len(data), listed.digest)
            if kept is not None:
                return kept
        return StoredManifest(
            ManifestColumns(listed.table.combine_chunks()),
            about_of(listed),
            "" if place is None else object_url(place.url, name),
        )

    def _kept_beside(self, name: str, data: Buffer, last: bytes) -> bool:
        try:
            self._store.write(name, data)
            self._store.write(_LAST_MANIFEST, last)
        except (AccessDenied, OutOfSpace):
            self._keeps_beside, self._reads_cache = False, True
        return self._keeps_beside

    def _kept_in_cache(self, name: str, data: Buffer, last: bytes) -> ObjectStore | None:
        """The store that has it now; None where the cache folder takes nothing, which is logged."""
        place = self._in_cache()
        try:
            place.create()
            place.write(name, data)
            place.write(self._last_in_cache, last)
        except (AccessDenied, OutOfSpace) as error:
            warn_not_kept(self._cache, error)
            return None
        return place

    def tidy(self, digest: str, sizes: Mapping[str, int]) -> None:
        """Remove manifests that nobody will want once this one was kept; see ``datasets.manifest_store``.

        Whoever is reading one of them finds it gone and builds it again. What the store refuses stays.
        """
        place: ObjectStore = self._store if self._keeps_beside else self._in_cache()
        name = _HISTORY if self._keeps_beside else self._history_in_cache
        if not isinstance(place, Prunable):
            return
        before = _history(place, name)
        # The cache folder has manifests of other data too: of those nothing is known, and they stay.
        there = _digests(sizes, _FOLDER, ".parquet") if self._keeps_beside else frozenset(before)
        named = _digests(sizes, _SPLITS, ".json") | {
            digest for digest in there if self._splits_in_cache(digest).is_file()
        }
        history = prune_history(before, digest, there=there, named=named)
        with suppress(AccessDenied, DataNotFound, OutOfSpace):  # there is no folder where none could be made
            place.write(name, history_text(history.digests))
            for digest in history.gone:
                place.remove(f"{_FOLDER}/{digest}.parquet")

    def _splits_in_cache(self, digest: str) -> Path:
        return self._cache / _SPLITS / f"{digest}.json"

    def _last_of(self, sizes: Mapping[str, int] | None) -> _Last | None:
        """What was built last; ``sizes`` of a listing spares asking for what is not there."""
        places: list[tuple[ObjectStore, str]] = [(self._in_cache(), self._last_in_cache)] if self._reads_cache else []
        if sizes is None or _LAST_MANIFEST in sizes:
            places.insert(0, (self._store, _LAST_MANIFEST))
        for store, name in places:
            try:
                said = parse_json(bytes(store.read(name, 0, _LAST_BYTES)))
                value = without_schema(said, _FORMAT, name, _Last._fields)
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
                SettingError,
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
            return opened_copy(path, file)
        except (pa.ArrowException, OSError):
            return None


def listed_samples(kept: StoredManifest) -> ListedSamples:
    """What a manifest was made of."""
    return ListedSamples(
        table=kept.columns.table,
        classes=tuple(kept.about["classes"]),
        digest=kept.about["digest"],
        reading=kept.about["reading"],
        divided_by_names=kept.about["divided_by_names"],
        has_named_classes=kept.about["has_named_classes"],
        declared=kept.about["declared"],
        used=tuple(kept.about["used"]),
        left_out=read_left_out(kept.about["left_out"]),
        is_turned=kept.about["is_turned"],
        named={name: tuple(names) for name, names in kept.about["named"].items()},
        read_again=tuple(kept.about.get("read_again", ())),
    )


def about_of(listed: ListedSamples) -> dict[str, Any]:
    """What a manifest says of itself."""
    return {
        "digest": listed.digest,
        "classes": listed.classes,
        "reading": listed.reading,
        "splits": split_names(listed.table, divided_by_names=listed.divided_by_names),
        "divided_by_names": listed.divided_by_names,
        "has_named_classes": listed.has_named_classes,
        "declared": listed.declared,
        "used": listed.used,
        "left_out": listed.left_out,
        "is_turned": listed.is_turned,
        "named": listed.named,
        "read_again": listed.read_again,
    }


def _history(place: ObjectStore, name: str) -> tuple[str, ...]:
    try:
        return history_of(bytes(place.read(name, 0, HISTORY_BYTES)))
    except (AccessDenied, ObjectNotFound):
        return ()


def _about_text(value: Mapping[str, Any], nbytes: int) -> bytes:
    return json.dumps(with_schema(value, _FORMAT)).encode().ljust(nbytes)


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
    schema = pa.schema(map(_narrow, table.schema), {ABOUT: checked_text(with_schema(about, _FORMAT))})
    options = {"compression": "zstd", "write_page_checksum": True, "use_dictionary": _repeating(table)}
    with pq.ParquetWriter(sink, schema, **options) as writer:
        for group in _row_groups(table):
            writer.write_table(group.cast(schema))


def _manifest_file(listed: ListedSamples) -> memoryview:
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
    about = read_checked((table.schema.metadata or {}).get(ABOUT, b"{}"))
    return (ManifestColumns(table.combine_chunks()), about) if about and _has_columns(table.schema) else None


def _has_columns(schema: pa.Schema) -> bool:
    first = [schema.field(place) for place in range(min(len(COLUMNS), len(schema)))]
    return bool(pa.schema(first).equals(COLUMNS))


def _is_of(columns: ManifestColumns, about: Mapping[str, Any], digest: str) -> bool:
    is_known = about.get("digest") == digest and about.get("schema") == _FORMAT
    return is_known and len(columns.table.column_names) >= len(COLUMNS)
