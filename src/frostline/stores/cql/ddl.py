"""Decides how a table for samples is made or added to, and the statement that puts them there. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from frostline.errors import DataError
from frostline.stores.base.cql_urls import CqlLocation
from frostline.stores.cql.schema import CLASS_COLUMNS, SEAL, WHOLE, Shape, TableSchema, quoted

__all__ = ("FURTHER", "additions", "creation", "free_names", "insertion")

FURTHER = ("bigint", "boolean", "double", "text", "timestamp")
"""Types that columns of metadata get in a table that is made."""
# What does as well where the column is there already.
_ALIKE: Mapping[str, Collection[str]] = {"bigint": WHOLE, "text": ("ascii", "varchar"), "double": ("float",)}


def free_names(place: CqlLocation, names: Sequence[str], *, has_masks: bool) -> list[str]:
    """What columns of metadata are called in a table: as they are, or with ``meta_`` before what samples' own have."""
    taken = {place.id, place.data, place.label, place.name, place.size, SEAL, *(CLASS_COLUMNS[:1] if has_masks else ())}
    free: list[str] = []
    for name in names:
        called = name
        while called in taken or (called != name and called in names):
            called = f"meta_{called}"
        taken.add(called)
        free.append(called)
    return free


def creation(place: CqlLocation, release: str, further: Mapping[str, str], *, has_masks: bool) -> str:
    """The statement that makes a table for samples where there is none.

    Args:
        place: with the names of table and columns.
        release: release of the servers, such as ``4.1.3``: old ones have another word for a table that is not
            compressed.
        further: names and types of the columns of metadata.
        has_masks: the column of labels holds masks, and another one the names of classes.
    """
    plain = "{'sstable_compression': ''}" if release.startswith(("1.", "2.")) else "{'enabled': 'false'}"
    label = {place.label: "blob", CLASS_COLUMNS[0]: "text"} if has_masks else {place.label: "text"}
    columns = {place.name: "text", **label, place.size: "bigint", place.data: "blob", SEAL: "blob", **further}
    said = ", ".join(f"{quoted(name)} {kind}" for name, kind in columns.items())
    table, key = f"{quoted(place.keyspace)}.{quoted(place.table)}", f"{quoted(place.id)} uuid PRIMARY KEY"
    return f"CREATE TABLE IF NOT EXISTS {table} ({key}, {said}) WITH compression = {plain}"


def additions(place: CqlLocation, table: TableSchema, further: Mapping[str, str], *, has_masks: bool) -> dict[str, str]:
    """The statements that give a table the columns that it lacks, by the column: of seals, and of metadata.

    Raises:
        DataError: there are masks and no column for them, or a column of that name has values of another kind.
    """
    if has_masks and table.columns.get(place.label) != "blob":
        there = table.columns.get(place.label, "missing")
        raise DataError(f"{place.url} holds no masks: its column {place.label} is {there}; use another table")
    for name, kind in further.items():
        there = table.columns.get(name, kind)
        if there != kind and there not in _ALIKE.get(kind, ()):
            raise DataError(
                f"the column {name!a} of {place.url} is {there}, and this data has {kind}: use another table"
            )
    wanted = {SEAL: "blob", **further}
    return {
        name: f"ALTER TABLE {table.full_name} ADD {quoted(name)} {kind}"
        for name, kind in wanted.items()
        if name not in table.columns
    }


def insertion(shape: Shape, further: Iterable[str]) -> str:
    """The statement that puts a sample whole: the columns of ``shape.put``, then further ones."""
    columns = [*shape.put, *further]
    names, marks = ", ".join(map(quoted, columns)), ", ".join("?" for _ in columns)
    return f"INSERT INTO {shape.table} ({names}) VALUES ({marks})"  # noqa: S608
