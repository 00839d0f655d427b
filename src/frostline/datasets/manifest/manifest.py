"""The manifest: the immutable table of a data set's samples, named by its content; finds it or builds it."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from frostline.core import OBJECTS, URLS, SampleTable
from frostline.datasets.formats.base import Widespread, digest_of
from frostline.datasets.formats.columns import ManifestColumns, WholeSamples
from frostline.datasets.formats.known import format_named, format_of
from frostline.datasets.manifest.changes import NO_CHANGES, changes_elsewhere, changes_in_words, listed_elsewhere
from frostline.datasets.manifest.listing import list_all, nobody
from frostline.datasets.manifest.manifest_store import ManifestStore, StoredManifest, about_of, listed_in
from frostline.errors import DataChanged, Forbidden
from frostline.events import Observer, PhaseStarted
from frostline.ordering import Chosen
from frostline.preprocess import Applied
from frostline.stores.base.protocols import ObjectStore
from frostline.stores.base.urls import object_url

__all__ = ("IN_MEMORY_BYTES", "Manifest", "load_manifest", "manifest_of")

IN_MEMORY_BYTES = 32 << 20
"""Larger manifests are mapped: reading this much takes about a second, and some 200 MB of memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """A data set's samples and where their table is kept.

    Attributes:
        samples: one row a sample, in the order in which the format lists them.
        names: names of the images; in a ready format, those of the images that it was made from.
        etags: etag of each sample's object, as the store gives it.
        columns: the table itself, metadata too; of a part, still that of the whole.
        classes: names, by label.
        digest: SHA-256 of the listing; the name of the table.
        place: URL of the table.
        found: it was there already; False where it was built now.
        applied: preprocessing done before the images were kept; None where they are encoded.
        reading: how the bytes at the samples' addresses are found.
        splits: splits that the data itself names in its column ``split``.
        saved: splits that came with it from the node that listed the data, by name; none where it was listed here.
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
    observe: Observer = nobody,
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
        observe: told how far the listing is, and what is built.

    Raises:
        Forbidden: the samples may lie elsewhere, and that is refused.
        DataNotFound: nothing is at the store's URL, or no manifest was built for it where it is not to be listed.
        EmptyDataset: the data has no sample of that format.
        DataChanged: the listing differs from the last one, and that is refused.
        DataError: the data cannot be used as it is.
        SettingError: there is no format of that name.
        AccessDenied: the store refused to be listed.
        OutOfSpace: the disk is full.
        StoreUnavailable: asking again may help.
    """
    manifests = ManifestStore(store, cache, in_memory_bytes, beside=beside)
    if not relist and (last := manifests.last_kept(format)) is not None:
        _check_within(store, is_refused=only_within and last.about["reading"] == URLS)
        return manifest_of(last, found=True)
    with ThreadPoolExecutor(1, "frostline-manifest") as meanwhile:
        # Mostly the listing is the last one again: its manifest is read meanwhile, which spares some round trips.
        likely = meanwhile.submit(manifests.likely)
        entries = list_all(store, observe)
        chosen = format_of(entries) if format is None else format_named(format)
        _check_within(store, is_refused=only_within and isinstance(chosen, Widespread))
        digest = chosen.digest(entries)
        sizes = {entry.object: entry.size for entry in entries.under(".frostline/")}
        kept = likely.result()
    if kept is None or kept.about["digest"] != digest:
        kept = manifests.of_listing(chosen, digest, sizes)
    elsewhere = NO_CHANGES
    if kept is not None and looks_elsewhere and isinstance(chosen, Widespread):
        observe(PhaseStarted(name="asking for objects elsewhere"))
        listed_then = listed_elsewhere(kept.columns.table, store.url)
        elsewhere = changes_elsewhere(listed_then, chosen.found_now(listed_then))
    if kept is not None and not any(elsewhere):
        return manifest_of(kept, found=True)
    before = None if kept is None else listed_in(kept)
    if before is None and (refuses_changes or chosen.is_incremental):
        before = manifests.before(chosen, sizes, of_any_rule=refuses_changes)
    if refuses_changes and before is not None:
        raise DataChanged(
            f"{store.url} is not what it was when its manifest was built, which is refused: "
            f"{changes_in_words(before.table, before.reading, store.url, entries, elsewhere)}; changed='rebuild' "
            "(--changed rebuild) takes it as it is now"
        )
    observe(PhaseStarted(name="building the manifest"))
    listed = chosen.read(store, entries, before)
    del entries, before  # a table as large as the listing follows
    if any(elsewhere):
        listed = replace(listed, digest=digest_of(digest, listed_elsewhere(listed.table, store.url).values()))
    if listed.kept_at:
        columns = ManifestColumns(listed.table.combine_chunks())
        kept = StoredManifest(columns, about_of(listed), object_url(store.url, listed.kept_at))
        return manifest_of(kept, found=True, applied=listed.applied)
    kept = manifests.keep(chosen, listed, digest)
    manifests.tidy(listed.digest, sizes)
    return manifest_of(kept, found=False)


def manifest_of(
    kept: StoredManifest, *, found: bool, applied: Applied | None = None, saved: Mapping[str, Chosen] | None = None
) -> Manifest:
    """A manifest that was read or built.

    Args:
        kept: its table, what it says of itself, and where it lies.
        found: see ``Manifest``.
        applied: likewise.
        saved: likewise; None is none.
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
    )


def _check_within(store: ObjectStore, *, is_refused: bool) -> None:
    if not is_refused:
        return
    raise Forbidden(
        f"{store.url} holds lists of URLs, which may lead to other hosts, and a node asks no others: list this data "
        "with credentials of your own (--list-locally; in Python Dataset without near=)"
    )
