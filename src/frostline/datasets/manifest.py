"""The manifest: the immutable table of a data set's samples, named by its content, kept as Parquet beside the data."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from frostline.core import OBJECTS, SampleTable
from frostline.datasets.changes import changes_in_words
from frostline.datasets.columns import Columns, WholeSamples
from frostline.datasets.forms.faces import COLUMNS, Form, Listed
from frostline.datasets.forms.known import form_named, form_of
from frostline.datasets.history import HISTORY_BYTES, history_of, history_text, tidied
from frostline.datasets.listing import list_all, nobody
from frostline.datasets.mapped import ABOUT, StoreFile, copy_of, kept_copy, open_copy
from frostline.datasets.named_splits import SPLITS
from frostline.datasets.ready import LAYOUT
from frostline.errors import AccessDenied, BadRequest, DataChanged, DataNotFound, ObjectNotFound
from frostline.events import Observer, PhaseStarted
from frostline.preprocess import Applied
from frostline.stores.faces import ObjectStore, Prunable
from frostline.stores.folder import FolderStore
from frostline.stores.urls import object_url

__all__ = ("IN_MEMORY_BYTES", "Manifest", "load_manifest", "row_groups")

IN_MEMORY_BYTES = 32 << 20
"""Larger manifests are mapped: reading this much takes about a second, and some 200 MB of memory."""

_FOLDER = ".frostline/manifests"
_GROUP_ROWS = 1 << 20
# Rows by which a column is judged.
_LOOKED_AT = 10_000
_LAST = ".frostline/last-manifest.json"
_HISTORY = ".frostline/manifest-history.json"
# Always as long as this, so that it is read without asking how long it is.
_LAST_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """A data set's samples and where their table is kept.

    Attributes:
        samples: one row a sample, in the order in which the form lists them.
        names: of the images; where they are kept as a ready form, those that it was made from.
        etags: of each sample's object, as the store gives them.
        columns: the table itself, metadata too; of a part, still that of the whole.
        classes: names, by label.
        digest: SHA-256 of the listing; the name of the table.
        place: URL of the table.
        found: it was there already; False where it was built now.
        applied: what was done to the images before they were kept; None where they are encoded.
        reading: how the bytes at the samples' addresses are found.
    """

    samples: SampleTable
    names: Sequence[str]
    etags: Sequence[str]
    columns: Columns
    classes: tuple[str, ...]
    digest: str
    place: str
    found: bool
    applied: Applied | None = None
    reading: str = OBJECTS


class _Last(NamedTuple):
    """The manifest of some data that was built last: its digest, the form that built it, and the table's bytes."""

    digest: str
    form: str
    nbytes: int


class _Kept(NamedTuple):
    """A manifest that was read: its table, what it says of itself, and its URL."""

    columns: Columns
    about: Mapping[str, Any]
    place: str


def load_manifest(
    store: ObjectStore,
    *,
    cache: Path,
    form: str | None = None,
    relist: bool = True,
    in_memory_bytes: int = IN_MEMORY_BYTES,
    refuses_changes: bool = False,
    observe: Observer = nobody,
) -> Manifest:
    """List a store, and find the manifest of that listing or build it.

    A listing that has changed has another digest, so its manifest is built anew, from the one before as far as the
    form can: what did not change is not read again. A damaged one is built anew too. A ready form brings its own.

    Args:
        store: that holds the data.
        cache: folder for the manifests of stores that take no writes and for the mapped copies of large ones; made
            when needed.
        form: name of the data's form; by default what the listing looks like.
        relist: False takes the manifest that was built last, and does not look whether the data is still the same. A
            ready form is listed all the same: it has few objects, and a table of its own.
        in_memory_bytes: larger tables are mapped from a copy in the cache folder.
        refuses_changes: a listing that differs from that of the manifest that was built last is refused.
        observe: told how far the listing is, and what is built.

    Raises:
        DataNotFound: nothing is at the store's URL, or no manifest was built for it where it is not to be listed.
        EmptyDataset: not one sample of that form is there.
        DataChanged: the listing differs from the last one, and that is refused.
        DataError: the data cannot be used as it is.
        SettingError: there is no form of that name.
        AccessDenied: the store refused to be listed.
        OutOfSpace: the disk is full.
        StoreUnavailable: asking again may help.
    """
    shelf = _Shelf(store, cache, in_memory_bytes)
    if not relist and (last := shelf.last_kept(form)) is not None:
        return _manifest(last, found=True)
    entries = list_all(store, observe)
    chosen = form_of(entries) if form is None else form_named(form)
    digest = chosen.digest(entries)
    sizes = {entry.object: entry.size for entry in entries.under(".frostline/")}
    kept = shelf.found(digest, sizes)
    if kept is not None:
        return _manifest(kept, found=True)
    before = shelf.before(chosen, sizes) if refuses_changes or chosen.is_incremental else None
    if refuses_changes and before is not None:
        raise DataChanged(
            f"{store.url} is not what it was when its manifest was built, which is refused: "
            f"{changes_in_words(before.table, before.reading, store.url, entries)}; changed='rebuild' "
            "(--changed rebuild) takes it as it is now"
        )
    observe(PhaseStarted(name="building the manifest"))
    listed = chosen.read(store, entries, before)
    del entries, before  # a table as large as the listing follows
    if listed.kept_at:
        columns = Columns(listed.table.combine_chunks())
        return _manifest(
            _Kept(columns, _about(listed), object_url(store.url, listed.kept_at)), found=True, listed=listed
        )
    kept = shelf.keep(chosen, listed)
    shelf.tidy(listed.digest, sizes)
    return _manifest(kept, found=False)


def row_groups(listed: Listed) -> Iterator[pa.Table]:
    """A manifest's table in pieces as it is written."""
    for start in range(0, max(1, listed.table.num_rows), _GROUP_ROWS):
        yield listed.table.slice(start, _GROUP_ROWS)


class _Shelf:
    """Where the manifests of one store's data are: beside it, or in the cache folder where it takes no writes."""

    def __init__(self, store: ObjectStore, cache: Path, in_memory_bytes: int) -> None:
        self._store = store
        self._cache = cache
        self._in_memory_bytes = in_memory_bytes
        root = hashlib.sha256(store.url.encode(errors="surrogateescape")).hexdigest()[:16]
        self._last_in_cache = f".frostline/last/{root}.json"
        self._history_in_cache = f".frostline/last/{root}.history.json"
        self._keeps_beside = True

    def found(self, digest: str, sizes: Mapping[str, int]) -> _Kept | None:
        """The manifest of that digest; the listing says what lies beside the data."""
        name = f"{_FOLDER}/{digest}.parquet"
        # The listing that was just made knows the manifests too: no further request tells whether one is there.
        if name in sizes:
            kept = self._opened(self._store, name, sizes[name], digest)
            if kept is not None:
                return kept
        path = self._cache / name
        return self._opened(self._in_cache(), name, path.stat().st_size, digest) if path.is_file() else None

    def before(self, form: Form, sizes: Mapping[str, int]) -> Listed | None:
        """What the form made of an earlier listing."""
        last = self._last_of(sizes)
        if last is None or last.form != form.name:
            return None
        kept = self.found(last.digest, sizes)
        if kept is None:
            return None
        return Listed(
            table=kept.columns.table,
            classes=tuple(kept.about["classes"]),
            digest=last.digest,
            reading=kept.about["reading"],
        )

    def last_kept(self, form: str | None) -> _Kept | None:
        """The manifest that was built last, found without listing the data; None where the data is a ready form.

        Raises:
            DataNotFound: there is none, or it is one of another form than that named.
        """
        last = self._last_of(None)
        name = None if last is None else f"{_FOLDER}/{last.digest}.parquet"
        kept = None if last is None else self.found(last.digest, {str(name): last.nbytes})
        if last is not None and form not in (None, last.form):
            raise DataNotFound(
                f"the manifest of {self._store.url} that was built last is of the form {last.form}, not {form}: list "
                f"the data in that form first (frostline index --form {form})"
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

    def keep(self, form: Form, listed: Listed) -> _Kept:
        """Write a manifest, and say that it is the last one."""
        name = f"{_FOLDER}/{listed.digest}.parquet"
        data = _file(listed)
        last = json.dumps(_Last(listed.digest, form.name, len(data))._asdict()).encode().ljust(_LAST_BYTES)
        try:
            self._store.write(name, data)
            self._store.write(_LAST, last)
            place = self._store
        except AccessDenied:
            self._keeps_beside = False
            self._cache.mkdir(parents=True, exist_ok=True)
            place = self._in_cache()
            place.write(name, data)
            place.write(self._last_in_cache, last)
        if len(data) > self._in_memory_bytes:
            kept = self._opened(place, name, len(data), listed.digest)
            if kept is not None:
                return kept
        return _Kept(Columns(listed.table.combine_chunks()), _about(listed), object_url(place.url, name))

    def tidy(self, digest: str, sizes: Mapping[str, int]) -> None:
        """Remove manifests that nobody will want once this one was kept; see ``datasets.history``.

        Whoever is reading one of them finds it gone and builds it again. What the store refuses stays.
        """
        place: ObjectStore = self._store if self._keeps_beside else self._in_cache()
        name = _HISTORY if self._keeps_beside else self._history_in_cache
        if not isinstance(place, Prunable):
            return
        before = _history(place, name)
        # The cache folder has manifests of other data too: of those nothing is known, and they stay.
        there = _digests(sizes, _FOLDER, ".parquet") if self._keeps_beside else frozenset(before)
        named = _digests(sizes, SPLITS, ".json") | {one for one in there if self._splits_in_cache(one).is_file()}
        history = tidied(before, digest, there=there, named=named)
        with suppress(AccessDenied):
            place.write(name, history_text(history.digests))
            for one in history.gone:
                place.remove(f"{_FOLDER}/{one}.parquet")

    def _splits_in_cache(self, digest: str) -> Path:
        return self._cache / SPLITS / f"{digest}.json"

    def _last_of(self, sizes: Mapping[str, int] | None) -> _Last | None:
        """What was built last; ``sizes`` of a listing spares asking for what is not there."""
        places: list[tuple[ObjectStore, str]] = [(self._in_cache(), self._last_in_cache)]
        if sizes is None or _LAST in sizes:
            places.insert(0, (self._store, _LAST))
        for store, name in places:
            try:
                value = json.loads(bytes(store.read(name, 0, _LAST_BYTES)))
                return _Last(str(value["digest"]), str(value["form"]), int(value["nbytes"]))
            except (AccessDenied, BadRequest, DataNotFound, ObjectNotFound, ValueError, KeyError, TypeError):
                continue
        return None

    def _in_cache(self) -> FolderStore:
        return FolderStore(str(self._cache))

    def _opened(self, store: ObjectStore, name: str, nbytes: int, digest: str) -> _Kept | None:
        place = object_url(store.url, name)
        try:
            if nbytes > self._in_memory_bytes:
                found = self._mapped(store, name, nbytes, digest)
            else:
                found = _parsed(store.read(name, 0, nbytes))
        except (ObjectNotFound, AccessDenied):
            return None
        return None if found is None or not _is_of(*found, digest) else _Kept(*found, place)

    def _mapped(
        self, store: ObjectStore, name: str, nbytes: int, digest: str
    ) -> tuple[Columns, Mapping[str, Any]] | None:
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


def _history(place: ObjectStore, name: str) -> tuple[str, ...]:
    try:
        return history_of(bytes(place.read(name, 0, HISTORY_BYTES)))
    except (AccessDenied, ObjectNotFound):
        return ()


def _digests(names: Iterable[str], folder: str, suffix: str) -> frozenset[str]:
    """What the objects of a folder are called, without its name and their suffix."""
    start = f"{folder}/"
    return frozenset(one[len(start) : -len(suffix)] for one in names if one.startswith(start) and one.endswith(suffix))


def _about(listed: Listed) -> dict[str, Any]:
    return {"digest": listed.digest, "classes": listed.classes, "reading": listed.reading}


def _file(listed: Listed) -> memoryview:
    sink = pa.BufferOutputStream()
    schema = listed.table.schema.with_metadata({ABOUT: json.dumps(_about(listed))})
    options = {"compression": "zstd", "write_page_checksum": True, "use_dictionary": _repeating(listed.table)}
    with pq.ParquetWriter(sink, schema, **options) as writer:
        for group in row_groups(listed):
            writer.write_table(group.cast(schema))
    return memoryview(sink.getvalue()).cast("B")  # as drivers take bytes


def _repeating(table: pa.Table) -> list[str]:
    """The columns whose values come again: a dictionary of others takes memory, and makes the file larger."""
    first = table.slice(0, _LOOKED_AT)
    return [
        field.name
        for field, column in zip(first.schema, first.columns, strict=True)
        if 2 * pc.count_distinct(column).as_py() <= len(column)
    ]


def _parsed(data: bytes | memoryview) -> tuple[Columns, Mapping[str, Any]] | None:
    # One thread: Arrow's pool would not survive a fork of the process.
    try:
        table = pq.ParquetFile(pa.py_buffer(data), page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError):
        return None
    about = json.loads((table.schema.metadata or {}).get(ABOUT, b"{}"))
    return (Columns(table.combine_chunks()), about) if _has_columns(table.schema) else None


def _has_columns(schema: pa.Schema) -> bool:
    first = [schema.field(place) for place in range(min(len(COLUMNS), len(schema)))]
    return bool(pa.schema(first).equals(COLUMNS))


def _is_of(columns: Columns, about: Mapping[str, Any], digest: str) -> bool:
    return about.get("digest") == digest and len(columns.table.column_names) >= len(COLUMNS)


def _manifest(kept: _Kept, *, found: bool, listed: Listed | None = None) -> Manifest:
    samples = WholeSamples(kept.columns)
    return Manifest(
        samples=samples,
        names=kept.columns.texts("name"),
        etags=samples.versions,
        columns=kept.columns,
        classes=tuple(kept.about["classes"]),
        digest=kept.about["digest"],
        place=kept.place,
        found=found,
        applied=None if listed is None else listed.applied,
        reading=kept.about["reading"],
    )
