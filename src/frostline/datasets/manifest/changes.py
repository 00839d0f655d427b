"""Decides what of a data set changed since its manifest was built, from the table and a listing, in a sentence."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from frostline.core import CELLS, UNPACKED, URLS
from frostline.datasets.archives.copies import CompressedTar
from frostline.datasets.parquet.cells import Cell
from frostline.errors import DataChanged
from frostline.events import Event, Observer, SampleSkipped
from frostline.stores.base.protocols import Entry, is_other_version
from frostline.stores.base.urls import is_within, object_url

__all__ = (
    "NO_CHANGES",
    "Changes",
    "changes_elsewhere",
    "changes_in_words",
    "listed_elsewhere",
    "refusal_of",
    "refusing",
)

_MAX_NAMED = 3
_COLUMNS = (("object", "etag"), ("target_object", "target_etag"))
_LENGTHS = {"object": "length", "target_object": "target_length"}
# What stands in a table for an object that was not there, and for its version.
_MISSING_BYTES = 1


class Changes(NamedTuple):
    """Objects that are not what they were.

    Attributes:
        changed: those of another version or size.
        gone: those that are not there any more.
    """

    changed: Sequence[str] = ()
    gone: Sequence[str] = ()


NO_CHANGES = Changes()


def listed_elsewhere(table: pa.Table, url: str) -> dict[str, Entry]:
    """What a table of URLs says of the objects that do not lie within the data's root, by their URLs."""
    return {entry.object: entry for entry in _entries_of(table) if not is_within(entry.object, url)}


def changes_elsewhere(listed: Mapping[str, Entry], now: Mapping[str, Entry]) -> Changes:
    """What changed of objects that lists name elsewhere; of those without versions by their sizes alone.

    Args:
        listed: by URL, as the manifest has them.
        now: by URL; what is not there any more is missing.
    """
    gone = [url for url, was in listed.items() if url not in now and (was.etag or was.size != _MISSING_BYTES)]
    changed = [
        url
        for url, is_now in now.items()
        if is_other_version(listed[url].etag, is_now.etag) or is_now.size != listed[url].size
    ]
    return Changes(sorted(changed), sorted(gone))


def changes_in_words(
    table: pa.Table, reading: str, url: str, entries: Sequence[Entry], elsewhere: Changes = NO_CHANGES
) -> str:
    """What is other in a listing than in a manifest: which objects changed, and which are gone.

    Args:
        table: table of the manifest.
        reading: how the bytes at its addresses are found.
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
        _counted([*changed, *elsewhere.changed], "changed"),
        _counted([*gone, *elsewhere.gone], "not there any more"),
    ]
    return ", ".join(filter(None, said)) or "other objects lie beside those that it names"


def refusing(changed: str, observe: Observer) -> Observer:
    """An observer of what reads a data set, which raises where a sample has changed and the data set refuses that.

    Args:
        changed: the data set's choice.
        observe: told every event first.
    """

    def watch(event: Event) -> None:
        observe(event)
        if isinstance(event, SampleSkipped) and event.changed:
            raise refusal_of(event.object)

    return watch if changed == "refuse" else observe


def refusal_of(object: str) -> DataChanged:
    """What is raised where an object is met that has changed since it was listed."""
    return DataChanged(
        f"{object} is not what it was when it was listed, which is refused; changed='rebuild' (--changed rebuild) "
        "takes the data as it is when a job begins, 'skip' leaves out what has changed"
    )


def _counted(names: Sequence[str], what: str) -> str:
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
