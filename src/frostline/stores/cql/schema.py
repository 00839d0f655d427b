"""Decides how tables are read as samples, made and added to, and the statements for it. Pure."""

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from frostline.core.errors import BadRequest, DataError
from frostline.stores.urls import CqlLocation, check_name

__all__ = (
    "DIGEST",
    "TEXTS",
    "WHOLE",
    "Scan",
    "Shape",
    "TableSchema",
    "additions",
    "creation",
    "free_names",
    "insertion",
    "key_from",
    "key_of",
    "quote_name",
    "shape_of",
)


TEXTS = ("ascii", "text", "timeuuid", "uuid", "varchar", "inet", "date", "decimal")
"""Types that become text in a table of samples."""
WHOLE = ("bigint", "int", "smallint", "tinyint", "varint", "counter")
"""Types that become whole numbers."""
_OTHERS = ("boolean", "double", "float", "timestamp")
_CLASS_COLUMNS = ("class", "class_name", "cls")
"""Columns that hold labels where the one that is called ``label`` holds masks, the first that is there."""
DIGEST = "frostline_digest"
"""The column that says of a sample which was put that it was read back, and what it was made from: a blob."""

# What keys are made from beside the name; another one would double every sample.
_SAMPLES = uuid.uuid5(uuid.NAMESPACE_DNS, "samples.frostline")
_BITS = {"bigint": 64, "int": 32}
_KEYS: dict[str, Callable[[str], object]] = {
    "ascii": check_name,
    "text": check_name,
    "varchar": check_name,
    "timeuuid": uuid.UUID,
    "uuid": uuid.UUID,
    "bigint": int,
    "int": int,
    "varint": int,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSchema:
    """What the servers say of a table.

    Attributes:
        keyspace: the keyspace that it is in.
        name: the name.
        columns: name and CQL type of each.
        partition: columns by whose values rows go to servers.
        clustering: columns that tell rows of one partition apart.
    """

    keyspace: str
    name: str
    columns: Mapping[str, str]
    partition: tuple[str, ...]
    clustering: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """Keyspace and name, quoted."""
        return f"{quote_name(self.keyspace)}.{quote_name(self.name)}"

    def require(self, column: str, option: str) -> str:
        """The column, if it is there.

        Raises:
            DataError: The table has no such column; the sentence names those that it has.
        """
        if column not in self.columns:
            raise DataError(
                f"the table {self.keyspace}.{self.name} has no column {column!a}, only "
                f"{', '.join(sorted(self.columns))}: name one with the option {option}"
            )
        return column


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A statement that reads a range of a table's tokens, as ``token > ? AND token <= ?``.

    Attributes:
        text: text of the statement.
        columns: columns that it gives, in this order: the key, and what else was asked for.
    """

    text: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the tables of a data set are read.

    Attributes:
        key_type: CQL type of the key.
        label: the column that is to hold labels; it may not be there.
        is_plain: rows are named as objects are, and say nothing more.
        read: statement that gives data and its version by key.
        read_mask: statement that gives a mask and its version by key; empty where rows have none.
        write: statement that puts data, and its size where there is a column for it, by key.
        has_size: True if there is such a column.
        table: full name of the table of the data, quoted.
        put: the columns of a sample: key and data, then those of ``beside``, its mask and its digest if any.
        beside: columns of size, name and label that are in the same table.
        check: statement that gives data, and the mask where rows have one, by key.
        digest: statement that puts a digest by key; empty where the table has no column for it.
        read_digest: statement that reads a digest by key, when it was written, and when data and mask were; or empty.
        listing: scan of keys, sizes where there are any, versions, and versions of the masks where there are masks.
        rows: scan of keys, labels and further columns, None where there are none.
        types: CQL types of the columns of ``rows``, by name.
    """

    key_type: str
    label: str
    is_plain: bool
    read: str
    read_mask: str
    write: str
    has_size: bool
    table: str
    put: tuple[str, ...]
    beside: tuple[str, ...]
    check: str
    digest: str
    read_digest: str
    listing: Scan
    rows: Scan | None
    types: Mapping[str, str]


def shape_of(place: CqlLocation, data: TableSchema, meta: TableSchema | None) -> Shape:
    """How to read a table of samples, and the one that is beside it.

    Raises:
        DataError: a column is missing, is of a type that cannot be used, or a key is not enough to find a row.
    """
    key = data.require(place.id, "id")
    blob = data.require(place.data, "data")
    if data.partition != (key,) or data.clustering:
        raise DataError(f"rows of {data.keyspace}.{data.name} are not found by {key} alone: it must be the primary key")
    if data.columns[key] not in _KEYS:
        raise DataError(
            f"the key {key} of {data.keyspace}.{data.name} is {data.columns[key]}, not one of {', '.join(_KEYS)}"
        )
    if data.columns[blob] != "blob":
        raise DataError(f"the column {blob} of {data.keyspace}.{data.name} is {data.columns[blob]}, not a blob")
    has_size = data.columns.get(place.size) in WHOLE
    names, sizes = ([blob, place.size], [place.size]) if has_size else ([blob], [])
    beside, link = (data, key) if meta is None else (meta, meta.require(place.meta_id or key, "meta_id"))
    known = {link, *(sizes if meta is None else ())}
    further = [
        name for name, kind in beside.columns.items() if name not in known and kind in (*TEXTS, *WHOLE, *_OTHERS)
    ]
    rows = _scan(beside, [link, *sorted(further)]) if further else None
    mask = [place.label] if data.columns.get(place.label) == "blob" else []
    if meta is not None and not mask and meta.columns.get(place.label) == "blob":
        raise DataError(
            f"the column {place.label} of {meta.keyspace}.{meta.name} is a blob: masks are read from the table of the "
            f"data, {data.keyspace}.{data.name}"
        )
    label = _label_of(place, further) if mask else place.label
    named = {"size": (place.size, WHOLE), "name": (place.name, TEXTS), "label": (label, (*WHOLE, *TEXTS))}
    roles = {role: name for role, (name, kinds) in named.items() if data.columns.get(name) in kinds}
    digests = [DIGEST] if data.columns.get(DIGEST) == "blob" else []
    return Shape(
        key_type=data.columns[key],
        label=label,
        is_plain=has_size and not further and not mask and _KEYS[data.columns[key]] is check_name,
        read=_reading(data, key, blob),
        read_mask=_reading(data, key, place.label) if mask else "",
        write=_writing(data, [key, *names]),
        has_size=has_size,
        table=data.full_name,
        put=(key, blob, *roles.values(), *mask, *digests),
        beside=tuple(roles),
        check=_selected(data, key, [*map(quote_name, (blob, *mask))]),
        digest=_writing(data, [key, DIGEST]) if digests else "",
        read_digest=_selected(data, key, [quote_name(DIGEST), *map(_written, (DIGEST, blob, *mask))])
        if digests
        else "",
        listing=_scan(data, [key, *sizes], versions_of=[blob, *mask]),
        rows=rows,
        types=dict(beside.columns),
    )


def key_of(kind: str, name: str) -> object:
    """The key of the object of that name, of a CQL type.

    Raises:
        BadRequest: the name cannot be a key of that type.
    """
    try:
        key = _KEYS[kind](name)
    except ValueError as error:
        raise BadRequest(f"{name!a} is no key: the table's keys are {kind}") from error
    if str(key) != name:
        raise BadRequest(f"{name!a} is no key: the table has {str(key)!a}")
    if isinstance(key, int) and kind in _BITS and not -(1 << _BITS[kind] - 1) <= key < 1 << _BITS[kind] - 1:
        raise BadRequest(f"{name} is no key: the table's keys are {kind}, of {_BITS[kind]} bits")
    return key


def key_from(kind: str, name: str) -> object:
    """The key under which a sample of that name is put: always the same one, so that putting it again doubles nothing.

    Raises:
        DataError: keys of that type cannot be made of names.
        BadRequest: the name cannot be a key.
    """
    if kind == "uuid":
        return uuid.uuid5(_SAMPLES, name)
    if kind not in ("ascii", "text", "varchar"):
        raise DataError(f"samples are put under keys that are uuid or text, not {kind}")
    return key_of(kind, name)


# Only quoted names get into the statements, and values only as what is bound to their question marks.


def _reading(table: TableSchema, key: str, blob: str) -> str:
    return _selected(table, key, [quote_name(blob), _written(blob)])


def _selected(table: TableSchema, key: str, what: Sequence[str]) -> str:
    return f"SELECT {', '.join(what)} FROM {table.full_name} WHERE {quote_name(key)} = ?"  # noqa: S608


def _written(column: str) -> str:
    return f"writetime({quote_name(column)})"


def _writing(table: TableSchema, columns: list[str]) -> str:
    names, marks = ", ".join(map(quote_name, columns)), ", ".join("?" for _ in columns)
    return f"INSERT INTO {table.full_name} ({names}) VALUES ({marks})"  # noqa: S608


def _label_of(place: CqlLocation, columns: Sequence[str]) -> str:
    """The column of labels where the one called so holds masks, or stands in another table than they."""
    return next((name for name in (place.label, *_CLASS_COLUMNS) if name in columns), place.label)


def _scan(table: TableSchema, columns: list[str], *, versions_of: Sequence[str] = ()) -> Scan:
    wanted = ", ".join([*map(quote_name, columns), *map(_written, versions_of)])
    token = f"token({', '.join(map(quote_name, table.partition))})"
    text = f"SELECT {wanted} FROM {table.full_name} WHERE {token} > ? AND {token} <= ?"  # noqa: S608
    return Scan(text=text, columns=tuple(columns))


def quote_name(name: str) -> str:
    """The name of a table or column as statements take it."""
    # Names of a URL were checked and hold no quotation mark; those that servers tell may.
    return '"' + name.replace('"', '""') + '"'


# What does as well where the column is there already.
_ALIKE: Mapping[str, Collection[str]] = {"bigint": WHOLE, "text": ("ascii", "varchar"), "double": ("float",)}


def free_names(place: CqlLocation, names: Sequence[str], *, has_masks: bool) -> list[str]:
    """What columns of metadata are called in a table: as they are, or with ``meta_`` before what samples' own have."""
    taken = {
        place.id,
        place.data,
        place.label,
        place.name,
        place.size,
        DIGEST,
        *(_CLASS_COLUMNS[:1] if has_masks else ()),
    }
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
        place: the place with the names of table and columns.
        release: release of the servers, such as ``4.1.3``: old ones have another word for a table that is not
            compressed.
        further: names and types of the columns of metadata.
        has_masks: the column of labels holds masks, and another one the names of classes.
    """
    plain = "{'sstable_compression': ''}" if release.startswith(("1.", "2.")) else "{'enabled': 'false'}"
    label = {place.label: "blob", _CLASS_COLUMNS[0]: "text"} if has_masks else {place.label: "text"}
    columns = {place.name: "text", **label, place.size: "bigint", place.data: "blob", DIGEST: "blob", **further}
    said = ", ".join(f"{quote_name(name)} {kind}" for name, kind in columns.items())
    table, key = f"{quote_name(place.keyspace)}.{quote_name(place.table)}", f"{quote_name(place.id)} uuid PRIMARY KEY"
    return f"CREATE TABLE IF NOT EXISTS {table} ({key}, {said}) WITH compression = {plain}"


def additions(place: CqlLocation, table: TableSchema, further: Mapping[str, str], *, has_masks: bool) -> dict[str, str]:
    """The statements that give a table the columns that it lacks, by the column: of digests, and of metadata.

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
    wanted = {DIGEST: "blob", **further}
    return {
        name: f"ALTER TABLE {table.full_name} ADD {quote_name(name)} {kind}"
        for name, kind in wanted.items()
        if name not in table.columns
    }


def insertion(shape: Shape, further: Iterable[str]) -> str:
    """The statement that puts a sample whole: the columns of ``shape.put``, then further ones."""
    columns = [*shape.put, *further]
    names, marks = ", ".join(map(quote_name, columns)), ", ".join("?" for _ in columns)
    return f"INSERT INTO {shape.table} ({names}) VALUES ({marks})"  # noqa: S608
