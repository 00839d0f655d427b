"""Decides what of a data set changed since its manifest was built, from the table and a listing, in a sentence."""

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from frostline.core import CELLS, URLS
from frostline.datasets.cells import Cell
from frostline.errors import DataChanged
from frostline.events import Event, Observer, SampleSkipped
from frostline.stores.faces import Entry
from frostline.stores.urls import object_url
from frostline.stores.versions import is_other_version

__all__ = ("changes_in_words", "refusal_of", "refusing")

_MOST_NAMED = 3
_COLUMNS = (("object", "etag"), ("target_object", "target_etag"))


def changes_in_words(table: pa.Table, reading: str, url: str, entries: Sequence[Entry]) -> str:
    """What is other in a listing than in a manifest: which objects changed, and which are gone.

    Args:
        table: of the manifest.
        reading: how the bytes at its addresses are found.
        url: of the data's root.
        entries: the listing; its digest is another one than the manifest's.
    """
    now = _by_address(entries, reading, url)
    was = _listed(table, reading)
    # Lists name objects elsewhere too, of which this listing knows nothing.
    within = url.partition("?")[0] if reading == URLS else ""
    gone = sorted(one for one in was if one not in now and one.startswith(within))
    changed = sorted(one for one, etag in was.items() if one in now and is_other_version(etag, now[one]))
    said = [_counted(changed, "changed"), _counted(gone, "not there any more")]
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
    shown = ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")
    return f"{len(names)} objects are {what} ({shown})" if len(names) > 1 else f"{names[0]} is {what}"


def _by_address(entries: Sequence[Entry], reading: str, url: str) -> Mapping[str, str]:
    if reading == URLS:
        return {object_url(url, entry.object): entry.etag for entry in entries}
    return {entry.object: entry.etag for entry in entries}


def _listed(table: pa.Table, reading: str) -> dict[str, str]:
    """Version by object, as the manifest has them."""
    object_of: Callable[[str], str] = _file_of if reading == CELLS else str
    found: dict[str, str] = {}
    for objects, etags in _COLUMNS:
        if objects in table.schema.names:
            pairs = table.select([objects, etags]).group_by([objects, etags]).aggregate([])
            columns = (pairs[objects].to_pylist(), pairs[etags].to_pylist())
            found |= {object_of(name): etag for name, etag in zip(*columns, strict=True) if name}
    return found


def _file_of(object: str) -> str:
    return Cell.parse(object).file
