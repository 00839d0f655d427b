"""The manifest: the immutable table of a data set's samples, named by its content, found or built from a listing."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core import CELLS, OBJECTS, UNPACKED, URLS, SampleTable
from frostline.core.errors import DataChanged, Forbidden
from frostline.core.events import Event, Observer, PhaseStarted, ProgressMade, SampleSkipped
from frostline.core.nouns import Texts, take_texts
from frostline.datasets.formats.base import (
    ExternalReferences,
    Format,
    ListedSamples,
    ManifestColumns,
    SelectedRows,
    WholeSamples,
    digest_of,
)
from frostline.datasets.formats.cql import CqlTables
from frostline.datasets.formats.folders import SAMPLE_SUFFIXES, ClassFolderFormat
from frostline.datasets.formats.known import format_named, format_of
from frostline.datasets.formats.left_out import (
    FOLDERS_LEFT,
    OBJECTS_LEFT,
    LeftOut,
    folders_left_out,
    objects_left_out,
    read_left_out,
    split_unreadable,
    sum_left_out,
)
from frostline.datasets.formats.parquet import Cell
from frostline.datasets.formats.webdataset import CompressedTar
from frostline.datasets.manifest_store import ManifestStore, StoredManifest, about_of, listed_samples
from frostline.ordering import Chosen, RowIndices
from frostline.preprocess import Applied
from frostline.stores.protocols import Entries, Entry, HasFolders, Listable, ObjectStore, Sectioned, is_other_version
from frostline.stores.urls import is_within, object_url

__all__ = (
    "IN_MEMORY_BYTES",
    "Changes",
    "DatasetStatistics",
    "JoinedRows",
    "Manifest",
    "SizeQuantiles",
    "as_chosen",
    "changes_elsewhere",
    "changes_in_words",
    "external_entries",
    "formats_of",
    "list_all",
    "load_manifest",
    "manifest_of",
    "null_observer",
    "quantiles_of",
    "refusal_of",
    "refusing_observer",
    "rows_at",
    "rows_of_ids",
    "select_part",
    "skips_by_name",
    "within",
)


def as_chosen(rows: SelectedRows | None, size: int) -> Chosen:
    """The same rows in the table's order."""
    if rows is None:
        return Chosen.where(np.ones(size, np.bool_))
    return rows if isinstance(rows, Chosen) else Chosen.of(rows.pieces(), size)


def rows_at(rows: SelectedRows | None, mask: npt.NDArray[np.bool_]) -> SelectedRows:
    """The rows at which a mask of the whole table is true, in the order that they had."""
    if rows is None:
        return Chosen.where(mask)
    kept = (some[mask[some]] for some in rows.pieces())
    if isinstance(rows, Chosen):
        return Chosen.of(kept, rows.size)
    return RowIndices(np.concatenate([np.zeros(0, np.int64), *kept]))


def select_part(rows: SelectedRows | None, parts: npt.NDArray[np.uint8], number: int) -> SelectedRows:
    """The rows whose part, by their position, has that number."""
    chosen = Chosen.equal(parts, number)
    if rows is None:
        return chosen
    if isinstance(rows, Chosen):
        return Chosen.of((rows.at(some) for some in chosen.pieces()), rows.size)
    return RowIndices(rows.at(np.flatnonzero(parts == number)))


def rows_of_ids(ids: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where ids stand in a table, in the order in which they are wanted, without those that stand nowhere."""
    order = np.argsort(ids, kind="stable")
    places = np.searchsorted(ids, wanted, sorter=order)
    is_there = places < len(ids)
    rows = order[places[is_there]]
    return np.asarray(rows[ids[rows] == wanted[is_there]], np.int64)


def within(rows: SelectedRows | None, chosen: Chosen) -> SelectedRows:
    """The rows that a choice has too, in the order that they had."""
    if rows is None:
        return chosen
    mask = np.zeros(chosen.size, np.bool_)
    for some in chosen.pieces():
        mask[some] = True
    return rows_at(rows, mask)


class JoinedRows:
    """The rows of several parts of a table, one part after the other; a row may come more than once. Immutable.

    Args:
        parts: one part at least.
    """

    def __init__(self, parts: Sequence[SelectedRows]) -> None:
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that name exactly these rows in this order."""
        each = (hashlib.sha256(part.fingerprint).digest() for part in self._parts)
        return hashlib.sha256(b"joined\0" + b"".join(each)).digest()

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows at these positions."""
        which = np.searchsorted(self._ends, positions, side="right")
        found = np.empty(len(positions), np.int64)
        for place, part in enumerate(self._parts):
            some = which == place
            found[some] = part.at(positions[some] - (self._ends[place] - len(part)))
        return found

    def pieces(self) -> Iterator[npt.NDArray[np.int64]]:
        """All rows in order, some of them at a time."""
        for part in self._parts:
            yield from part.pieces()


_MAX_NAMED = 3
_COLUMNS = (("object", "etag"), ("target_object", "target_etag"))
_LENGTHS = {"object": "length", "target_object": "target_length"}
# What stands in a table for an object that was not there, and for its version.
_MISSING_BYTES = 1


class Changes(NamedTuple):
    """Objects that are not what they were.

    Attributes:
        changed: objects of another version or size.
        gone: objects that are not there any more.
    """

    changed: Sequence[str] = ()
    gone: Sequence[str] = ()


_NO_CHANGES = Changes()


def external_entries(table: pa.Table, url: str) -> dict[str, Entry]:
    """What a table of URLs says of the objects that do not lie within the data's root, by their URLs."""
    return {entry.object: entry for entry in _entries_of(table) if not is_within(entry.object, url)}


def changes_elsewhere(listed: Mapping[str, Entry], now: Mapping[str, Entry]) -> Changes:
    """What changed of objects that lists name elsewhere; of those without versions by their sizes alone.

    Args:
        listed: the objects by URL, as the manifest has them.
        now: the objects as they are now, by URL; what is not there any more is missing.
    """
    gone = [url for url, was in listed.items() if url not in now and (was.etag or was.size != _MISSING_BYTES)]
    changed = [
        url
        for url, is_now in now.items()
        if is_other_version(listed[url].etag, is_now.etag) or is_now.size != listed[url].size
    ]
    return Changes(sorted(changed), sorted(gone))


def changes_in_words(
    table: pa.Table, reading: str, url: str, entries: Sequence[Entry], elsewhere: Changes = _NO_CHANGES
) -> str:
    """What is other in a listing than in a manifest: which objects changed, and which are gone.

    Args:
        table: table of the manifest.
        reading: the way that the bytes at its addresses are found.
        url: address of the data's root.
        entries: the listing.
        elsewhere: changes of objects that lie outside that root.
    """
    now = _by_address(entries, reading, url)
    was = _listed(table, reading)
    # Lists name objects elsewhere too, of which this listing knows nothing.
    within = url.partition("?")[0] if reading == URLS else ""
    gone = sorted(name for name in was if name not in now and name.startswith(within))
    changed = sorted(name for name, etag in was.items() if name in now and is_other_version(etag, now[name]))
    said = [
        _number_of([*changed, *elsewhere.changed], "changed"),
        _number_of([*gone, *elsewhere.gone], "not there any more"),
    ]
    return ", ".join(filter(None, said)) or "other objects lie beside those that it names"


def refusing_observer(on_change: str, on_event: Observer) -> Observer:
    """An observer of what reads a data set, which raises where a sample has changed and the data set refuses that.

    Args:
        on_change: the data set's choice.
        on_event: function that is called with every event first.
    """

    def watch(event: Event) -> None:
        on_event(event)
        if isinstance(event, SampleSkipped) and event.changed:
            raise refusal_of(event.object)

    return watch if on_change == "refuse" else on_event


def refusal_of(object: str) -> DataChanged:
    """What is raised where an object is met that has changed since it was listed."""
    return DataChanged(
        f"{object} is not what it was when it was listed, which is refused; on_change='rebuild' (--on-change rebuild) "
        "takes the data as it is when a job begins, 'skip' leaves out what has changed"
    )


# Each is looked for among the ids of all samples.
_NAMED_SKIPS = 1000


def skips_by_name(samples: SampleTable, names: Sequence[str]) -> Callable[[SampleSkipped], SampleSkipped]:
    """A function that tells of a sample by its name, where it is told by an object that holds others too.

    So are rows of Parquet and members of shards; of more than a thousand the others keep the object's name.

    Args:
        samples: all samples of the data.
        names: names of these samples.
    """
    left = iter(range(_NAMED_SKIPS))

    def named(event: SampleSkipped) -> SampleSkipped:
        if next(left, None) is None:
            return event
        rows = np.flatnonzero(samples.ids == event.id)[:1].astype(np.int64)
        # Of an image with a mask, it may be the mask that is told.
        is_own = len(rows) > 0 and take_texts(samples.objects, rows)[0] == event.object
        return replace(event, object=take_texts(names, rows)[0]) if is_own else event

    return named


def _number_of(names: Sequence[str], what: str) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
    return f"{len(names)} objects are {what} ({shown})" if len(names) > 1 else f"{names[0]} is {what}"


def _by_address(entries: Sequence[Entry], reading: str, url: str) -> Mapping[str, str]:
    if reading == URLS:
        return {object_url(url, entry.object): entry.etag for entry in entries}
    return {entry.object: entry.etag for entry in entries}


def _listed(table: pa.Table, reading: str) -> dict[str, str]:
    """Version by object, as the manifest has them."""
    object_of = _FILES.get(reading, str)
    found: dict[str, str] = {}
    for objects, etags in _COLUMNS:
        if objects in table.schema.names:
            pairs = table.select([objects, etags]).group_by([objects, etags]).aggregate([])
            columns = (pairs[objects].to_pylist(), pairs[etags].to_pylist())
            found |= {object_of(name): etag for name, etag in zip(*columns, strict=True) if name}
    return found


def _entries_of(table: pa.Table) -> Iterator[Entry]:
    """The objects of samples and of their masks, one for each row."""
    for objects, etags in _COLUMNS:
        if objects in table.schema.names:
            columns = (table[name].to_pylist() for name in (objects, _LENGTHS[objects], etags))
            yield from (Entry(*row) for row in zip(*columns, strict=True) if row[0])


_FILES: Mapping[str, Callable[[str], str]] = {
    CELLS: lambda object: Cell.parse(object).file,
    UNPACKED: lambda object: CompressedTar.parse(object).file,
}


# A listing of S3 comes 1,000 names a request, one request after another: folders are what can be asked for at once.
_FOLDERS_AT_ONCE = 16
_SAID_EVERY = 10_000


def list_all(store: Listable, on_event: Observer) -> Entries:
    """Every object of a store, in the order of their names. Memory is that of their columns, and for a while of two.

    Args:
        store: the store to list.
        on_event: function that is called with the number of objects found by now.

    Raises:
        DataNotFound: the root is not there.
        AccessDenied: the store refused.
        StoreUnavailable: asking again may help.
    """
    on_event(PhaseStarted(name="listing the data"))
    parts = _by_folders(store, on_event) if isinstance(store, Sectioned) else [_at_once(store, on_event)]
    return Entries.concatenate(parts)


def _by_folders(store: Sectioned, on_event: Observer) -> list[Entries]:
    entries, folders = store.sections()
    found, count = [Entries.of(entries)], len(entries)
    with ThreadPoolExecutor(_FOLDERS_AT_ONCE, "frostline-list") as threads:
        asked = {threads.submit(store.list_section, folder) for folder in folders}
        try:
            for future in as_completed(asked):
                asked.discard(future)  # which holds what it found
                found.append(Entries.of(future.result()))
                count += len(found[-1])
                on_event(ProgressMade(done=count, total=0))
        finally:
            threads.shutdown(cancel_futures=True)
    return found


def _at_once(store: Listable, on_event: Observer) -> Entries:
    return Entries.of(_observed(store.list(), on_event))


def _observed(entries: Iterable[Entry], on_event: Observer) -> Iterator[Entry]:
    for number, entry in enumerate(entries, 1):
        yield entry
        if number % _SAID_EVERY == 0:
            on_event(ProgressMade(done=number, total=0))


def null_observer(event: Event) -> None:
    """An observer that does nothing."""


IN_MEMORY_BYTES = 32 << 20
"""Larger manifests are mapped: reading this much takes about a second, and some 200 MB of memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """A data set's samples and where their table is kept.

    Attributes:
        samples: table with a row for each sample, in the order in which the format lists them.
        names: names of the images; in a ready format, those of the images that it was made from.
        etags: etag of each sample's object, as the store gives it.
        columns: the table itself, metadata too; of a part, still that of the whole.
        classes: names, by label.
        digest: SHA-256 of the listing; the name of the table.
        place: URL of the table.
        found: True if it was there already; False where it was built now.
        applied: preprocessing done before the images were kept; None where they are encoded.
        reading: the way that the bytes at the samples' addresses are found.
        splits: splits that the data itself names in its column ``split``.
        saved: splits that came with it from the node that listed the data, by name; none where it was listed here.
        left_out: parts of the data that are no samples, by kind and reason.
        listing: digest of the listing, by which splits are kept, where that is not ``digest``.
        is_turned: the data's own reader turns images as their EXIF data says; of a ready format, ``applied`` says it.
        named: names that the numbers of metadata columns stand for, by the column.
    """

    samples: SampleTable
    names: Sequence[str]
    etags: Sequence[str]
    columns: ManifestColumns
    classes: tuple[str, ...]
    digest: str
    place: str
    found: bool
    applied: Applied | None = None
    reading: str = OBJECTS
    splits: tuple[str, ...] = ()
    saved: Mapping[str, Chosen] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    listing: str = ""
    is_turned: bool = False
    named: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def load_manifest(
    store: ObjectStore,
    *,
    cache: Path,
    format: str | None = None,
    relist: bool = True,
    in_memory_bytes: int = IN_MEMORY_BYTES,
    beside: bool = False,
    refuses_changes: bool = False,
    looks_elsewhere: bool = False,
    only_within: bool = False,
    on_event: Observer = null_observer,
) -> Manifest:
    """List a store, and find the manifest of that listing or build it.

    A listing that has changed has another digest, so its manifest is built anew, from the one before as far as the
    format can: what did not change is not read again. A damaged one is built anew too. A ready format brings its own.

    Args:
        store: store that holds the data.
        cache: folder for the manifests of local folders and of stores that take no writes, and for the mapped copies
            of large ones; made when needed.
        format: name of the data's format; by default what the listing looks like.
        relist: False takes the manifest that was built last, and does not look whether the data is still the same. A
            ready format is listed all the same: it has few objects, and a table of its own.
        in_memory_bytes: larger tables are mapped from a copy in the cache folder.
        beside: keep the manifest beside the data in a local folder too.
        refuses_changes: a listing that differs from that of the manifest that was built last is refused.
        looks_elsewhere: objects that the data names and that lie elsewhere are asked for again, and count as listed.
        only_within: data whose samples may lie elsewhere than in the store is refused before any of it is looked at.
        on_event: function that is called with the progress of the listing, and what is built.

    Raises:
        Forbidden: the samples may lie elsewhere, and that is refused.
        DataNotFound: The store's URL has no objects, or no manifest was built for it and ``relist`` is False.
        EmptyDataset: the data has no sample of that format.
        DataChanged: the listing differs from the last one, and that is refused.
        DataError: the data cannot be used as it is.
        SettingError: there is no format of that name.
        AccessDenied: the store refused to be listed.
        OutOfSpace: the disk is full.
        StoreUnavailable: asking again may help.
    """
    manifests = ManifestStore(store, cache, in_memory_bytes, beside=beside)
    if not relist and (last := manifests.unlisted_manifest(format)) is not None:
        _check_within(store, is_refused=only_within and last.about["reading"] == URLS)
        return manifest_of(last, found=True)
    with ThreadPoolExecutor(1, "frostline-manifest") as meanwhile:
        # Mostly the listing is the last one again: its manifest is read meanwhile, which spares some round trips.
        likely = meanwhile.submit(manifests.last_manifest)
        entries, unreadable = split_unreadable(list_all(store, on_event), store.url)
        chosen = format_of(entries) if format is None else format_named(format)
        _check_within(store, is_refused=only_within and isinstance(chosen, ExternalReferences))
        digest = chosen.digest(entries)
        sizes = {entry.object: entry.size for entry in entries.filter_prefix(".frostline/")}
        kept = likely.result()
    if kept is None or kept.about["digest"] != digest:
        kept = manifests.of_listing(chosen, digest, sizes)
    elsewhere = _NO_CHANGES
    if kept is not None and looks_elsewhere and isinstance(chosen, ExternalReferences):
        on_event(PhaseStarted(name="asking for objects elsewhere"))
        listed_then = external_entries(kept.columns.table, store.url)
        elsewhere = changes_elsewhere(listed_then, chosen.find_current(listed_then))
    if kept is not None and not any(elsewhere):
        _check_within(store, is_refused=only_within and kept.about["reading"] == URLS)
        objects = (*unreadable, *_objects_left_out(kept, chosen, entries, store))
        return manifest_of(kept, found=True, left_out=objects)
    before = None if kept is None else listed_samples(kept)
    if before is None and (refuses_changes or chosen.is_incremental):
        before = manifests.before(chosen, sizes, of_any_rule=refuses_changes)
    if refuses_changes and before is not None:
        raise DataChanged(
            f"{store.url} is not what it was when its manifest was built, which is refused: "
            f"{changes_in_words(before.table, before.reading, store.url, entries, elsewhere)}; on_change='rebuild' "
            "(--on-change rebuild) takes it as it is now"
        )
    on_event(PhaseStarted(name="building the manifest"))
    listed = chosen.read(store, entries, before)
    _check_within(store, is_refused=only_within and listed.reading == URLS)
    objects = (*unreadable, *_left_out_of(listed, chosen, entries, store))
    listed = replace(listed, left_out=(*objects, *listed.left_out))
    del entries, before  # a table as large as the listing follows
    if any(elsewhere):
        listed = replace(listed, digest=digest_of(digest, external_entries(listed.table, store.url).values()))
    if listed.kept_at:
        columns = ManifestColumns(listed.table.combine_chunks())
        kept = StoredManifest(columns, about_of(listed), object_url(store.url, listed.kept_at))
        return manifest_of(kept, found=True, applied=listed.applied)
    kept = manifests.keep(chosen, listed, digest)
    manifests.tidy(listed.digest, sizes)
    return manifest_of(kept, found=False)


def _objects_left_out(
    kept: StoredManifest, format: Format, entries: Entries, store: ObjectStore
) -> tuple[LeftOut, ...]:
    """What is left out of a listing whose manifest was found: other objects than then may lie beside the samples."""
    about = listed_samples(kept)
    found = _left_out_of(about, format, entries, store)
    kept_left = (left for left in about.left_out if left.what not in (OBJECTS_LEFT, FOLDERS_LEFT) or left.object)
    return (*found, *kept_left)


def _left_out_of(listed: ListedSamples, format: Format, entries: Entries, store: ObjectStore) -> tuple[LeftOut, ...]:
    """The objects of a listing of which nothing was made, and the folders beside those of classes without any."""
    table, used = listed.table, listed.used
    if listed.kept_at:  # a ready format's listing is its own
        return ()
    if isinstance(format, CqlTables):  # a table's rows are its own, and those without data are no samples
        return ()
    folders: tuple[LeftOut, ...] = ()
    if isinstance(format, ClassFolderFormat) and isinstance(store, HasFolders):
        folders = folders_left_out(store.empty_folders())
    if isinstance(format, ClassFolderFormat) and len(entries) == len(table) + len(used):
        return folders  # which spares millions of names from being compared
    columns = [pc.unique(table[name]) for name, _ in _COLUMNS if name in table.schema.names]
    object_of = _within(store.url) if listed.reading == URLS else _FILES.get(listed.reading, str)
    names = [[object_of(name) for name in column.to_pylist() if name] for column in columns]
    samples = [pa.chunked_array([list(dict.fromkeys(some))], pa.string()) for some in names]
    return (*objects_left_out(entries, samples, used, format.name, SAMPLE_SUFFIXES), *folders)


def _within(url: str) -> Callable[[str], str]:
    """Gives the name of an object within a root by its canonical URL; what lies elsewhere keeps its URL."""
    root, _, options = url.partition("?")
    start, end = f"{root.rstrip('/')}/", f"?{options}" if options else ""
    plain = unquote if root.startswith(("file:", "http:", "https:")) else str

    def name_of(url: str) -> str:
        return plain(url[len(start) :].removesuffix(end)) if url.startswith(start) else url

    return name_of


def manifest_of(
    kept: StoredManifest,
    *,
    found: bool,
    applied: Applied | None = None,
    saved: Mapping[str, Chosen] | None = None,
    left_out: tuple[LeftOut, ...] | None = None,
) -> Manifest:
    """A manifest that was read or built.

    Args:
        kept: the table, its words of itself, and where it lies.
        found: see ``Manifest``.
        applied: steps that a ready format has applied, see ``Manifest``.
        saved: see ``Manifest``; None is none.
        left_out: see ``Manifest``; None takes what was left out when it was built.
    """
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
        applied=applied,
        reading=kept.about["reading"],
        splits=tuple(kept.about["splits"]),
        saved=saved or {},
        left_out=sum_left_out(read_left_out(kept.about["left_out"]) if left_out is None else left_out),
        is_turned=kept.about["is_turned"],
        named={name: tuple(names) for name, names in kept.about["named"].items()},
    )


def _check_within(store: ObjectStore, *, is_refused: bool) -> None:
    if not is_refused:
        return
    raise Forbidden(
        f"{store.url} holds lists of URLs, which may lead to other hosts, and a node asks no others: list this data "
        "with credentials of your own (--list-locally; in Python Dataset without near=)"
    )


_AT_ONCE = 1 << 18
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# The suffix of a name, as formats take it: what follows the last dot of its last part, which does not begin with it.
_SUFFIX = r"[^/](?P<suffix>\.[^./]*)$"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeQuantiles:
    """Encoded bytes below which so many hundredths of the samples lie: half of them below ``p50``."""

    p5: int
    p25: int
    p50: int
    p75: int
    p95: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatistics:
    """What a data set holds.

    Attributes:
        samples: the number of samples.
        per_class: name and number of samples of each class, by label.
        without_label: samples that have none.
        total_bytes: the encoded bytes of all samples.
        mean_bytes: mean size of a sample.
        min_bytes: size of the smallest sample.
        max_bytes: size of the largest sample.
        quantiles: quantiles of the samples' sizes.
        formats: suffix and number of samples, the commonest first.
        columns: name and type of each column of the manifest.
        splits: name and number of samples of each split that was saved.
        manifest: URL of the table.
        manifest_found: True if it was there already; False where it was built now.
        left_out: parts of the data that are no samples, by kind and reason.
    """

    samples: int
    per_class: tuple[tuple[str, int], ...]
    without_label: int
    total_bytes: int
    mean_bytes: float
    min_bytes: int
    max_bytes: int
    quantiles: SizeQuantiles
    formats: tuple[tuple[str, int], ...]
    columns: tuple[tuple[str, str], ...]
    splits: tuple[tuple[str, int], ...]
    manifest: str
    manifest_found: bool
    left_out: tuple[LeftOut, ...] = ()


def quantiles_of(lengths: npt.NDArray[np.int64]) -> SizeQuantiles:
    """Return the quantiles of sizes; zeros where there are none."""
    found = np.quantile(lengths, _QUANTILES, method="nearest") if len(lengths) else np.zeros(len(_QUANTILES))
    p5, p25, p50, p75, p95 = (int(quantile) for quantile in found)
    return SizeQuantiles(p5=p5, p25=p25, p50=p50, p75=p75, p95=p95)


def formats_of(manifest: Manifest) -> tuple[tuple[str, int], ...]:
    """Suffixes of the samples' names and how many have each, the commonest first."""
    counts: dict[str, int] = {}
    for names in _pieces(manifest.names):
        found = pc.extract_regex(names, _SUFFIX)
        suffixes = pc.utf8_lower(pc.fill_null(pc.struct_field(found, "suffix"), ""))
        for count in pc.value_counts(suffixes).to_pylist():
            counts[count["values"]] = counts.get(count["values"], 0) + count["counts"]
    return tuple(sorted(counts.items(), key=lambda count: (-count[1], count[0])))


def _pieces(names: Sequence[str]) -> Iterator[pa.Array]:
    for start in range(0, len(names), _AT_ONCE):
        some = np.arange(start, min(start + _AT_ONCE, len(names)), dtype=np.int64)
        yield pa.array(names.take(some) if isinstance(names, Texts) else names[start : start + _AT_ONCE], pa.string())
