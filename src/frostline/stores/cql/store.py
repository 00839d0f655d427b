"""A table of Cassandra or ScyllaDB as a store of objects, over CQL: a row is an object, its key the object's name.

The driver is imported when a store is first used: its threads do not survive a fork, so a process that only forks
workers must never have started them.
"""

import hashlib
import math
import os
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from frostline.core.config import environment
from frostline.core.errors import AccessDenied, DataError, ObjectNotFound, SettingError, StoreError
from frostline.stores.cql.access import CqlAccess, error_of_cql, translate_errors
from frostline.stores.cql.schema import TEXTS, WHOLE, Shape, free_names, key_of
from frostline.stores.cql.writer import TableSample, find_damaged_rows, put_all, row_digests
from frostline.stores.protocols import LABELS, MASKS, UNREADABLE, Buffer, ByteRange, Driver, Entry
from frostline.stores.urls import CqlLocation, is_name

if TYPE_CHECKING:
    import pyarrow as pa
    from cassandra.query import PreparedStatement

    from frostline.stores.cql.session import CqlSession

__all__ = ("DRIVER", "CqlStore", "table_of")

_TYPES = {
    **dict.fromkeys(TEXTS, pa.string()),
    **dict.fromkeys(WHOLE, pa.int64()),
    "boolean": pa.bool_(),
    "double": pa.float64(),
    "float": pa.float64(),
    "timestamp": pa.timestamp("ms"),
}


def table_of(shape: Shape, pages: Iterable[Sequence[Sequence[Any]]]) -> pa.Table:
    """The rows of a scan: a first column, ``/key``, with the keys, then those beside it.

    Raises:
        DataError: a whole number has more than 64 bits.
    """
    names = () if shape.rows is None else shape.rows.columns[1:]
    schema = pa.schema([("/key", pa.string()), *((name, _TYPES[shape.types[name]]) for name in names)])
    return pa.Table.from_batches([_batch(page, schema) for page in pages if page], schema)


def _batch(page: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*page, strict=True)
    return pa.record_batch([_column(values, field) for values, field in zip(columns, schema, strict=True)], schema)


def _column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    if field.type == pa.string():
        values = [None if value is None else str(value) for value in values]
    try:
        return pa.array(values, field.type)
    except (OverflowError, pa.ArrowInvalid) as error:
        raise DataError(f"the column {field.name} holds values that are no {field.type}") from error


DRIVER = Driver(lambda: None)
"""Of Cassandra, which starts threads with each session."""

_ENVIRONMENT = "FROSTLINE_CQL_"
_OWN = ".frostline/"
# Answers that wait to be taken are held in memory: this many photographs of 100 kB are 100 MB.
_IN_FLIGHT = 1024
_CONTENTS_IN_FLIGHT = 64
_WRITES_IN_FLIGHT = 32
_DIGESTS_IN_FLIGHT = 256


class CqlStore:
    """A table's rows as objects. Safe for threads; its session is made on first use, by the process that uses it.

    Args:
        place: the table, and how to reach it.
        deadline_s: the time that its servers may be silent, where the usual time is not less.

    Raises:
        SettingError: the place names a keyspace only.
    """

    def __init__(self, place: CqlLocation, *, deadline_s: float = math.inf) -> None:
        if not place.table:
            raise SettingError(f"{place.url} names a keyspace: a data set is one of its tables, /keyspace/table")
        self._place = place
        self._deadline_s = deadline_s
        self._lock = Lock()
        self._link: CqlSession | None = None

    @property
    def url(self) -> str:
        """The canonical URL of the table."""
        return self._place.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def label_column(self) -> str:
        """See ``Tabular.label_column``."""
        with self._driven("") as link:
            return link.shape.label

    @property
    def name_column(self) -> str:
        """See ``Tabular.name_column``."""
        return self._place.name

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``. The whole cell is fetched: CQL knows no ranges."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``; the version is the microsecond at which the cell was written."""
        with self._driven(object) as link:
            statement, key = _asked(link, object)
            rows = link.run(statement, (key,))
        return _part(rows, object, offset, length)

    def read_many(
        self, places: Sequence[ByteRange], *, maximum: int = _IN_FLIGHT
    ) -> Iterator[tuple[int, tuple[Buffer, str] | StoreError]]:
        """See ``Batched.read_many``."""
        with self._driven("") as link:
            asked = [_asked(link, place.object) for place in places]
            for index, answer in link.answers(asked, maximum):
                yield index, self._answer(places[index], answer)

    def contents(self, objects: Sequence[str]) -> Iterator[tuple[int, Buffer | None]]:
        """See ``Tabular.contents``."""
        with self._driven("") as link:
            for index, answer in link.answers((_asked(link, name) for name in objects), _CONTENTS_IN_FLIGHT):
                if isinstance(answer, Exception):
                    raise answer
                yield index, answer[0][0] if answer else None

    def list(self) -> Iterator[Entry]:
        """See ``Listable.list``; sizes are -1 where no column holds them.

        Where rows have masks, those are objects too, whose names begin with ``MASKS``. One more entry, ``LABELS``,
        stands for labels and further columns of all rows. Only a table of plain objects has none: its keys are texts,
        and beside the data it has sizes alone.
        """
        with self._driven("") as link:
            for page in link.scan(link.shape.listing):
                yield from self._entries(page, has_masks=bool(link.shape.read_mask))
            if not link.shape.is_plain:
                rows = link.shape.rows
                # Which columns mean what belongs to it too.
                what = repr((link.shape.label, self._place.name, None if rows is None else rows.columns))
                yield _entry_of_labels(() if rows is None else link.scan(rows), what)

    def rows(self) -> "pa.Table":
        """See ``Tabular.rows``."""
        with self._driven("") as link:
            return table_of(link.shape, () if link.shape.rows is None else link.scan(link.shape.rows))

    def write(self, object: str, data: Buffer) -> None:
        """See ``Writable.write``. Labels and further columns of the row stay as they are."""
        if object.startswith((_OWN, MASKS)):
            raise AccessDenied(f"Frostline keeps nothing of its own in {self.url}")
        with self._driven(object) as link:
            key = key_of(link.shape.key_type, object)
            link.run(link.write, (key, bytes(data), len(data)) if link.shape.has_size else (key, bytes(data)))

    def free_names(self, names: Sequence[str], *, has_masks: bool) -> Sequence[str]:
        """What columns of metadata are called in this table."""
        return free_names(self._place, names, has_masks=has_masks)

    def create(self, further: Mapping[str, str] | None = None, *, has_masks: bool = False) -> Collection[str]:
        """Make the table where it is missing, with columns for all that a sample has; add those that one lacks.

        Args:
            further: names and types (bigint, boolean, double, text or timestamp) of columns of metadata.
            has_masks: samples have masks: the column of labels is to hold them.

        Returns:
            The columns that the table still lacks, because this user may not add any.

        Raises:
            DataNotFound: the keyspace does not exist.
            DataError: the table has columns of these names for something else.
            AccessDenied: the user may not make tables.
            StoreUnavailable: asking again may help.
        """
        with self._translated(""):
            from frostline.stores.cql.session import create_table

            access = CqlAccess.of(environment(_ENVIRONMENT))
            return create_table(self._place, access, further or {}, has_masks=has_masks)

    def put_many(self, samples: Iterable[TableSample], *, columns: Sequence[str] = ()) -> None:
        """Put samples with their names and labels, under keys that follow from their names; again doubles nothing.

        Each is read back and compared, and then its row gets a digest, where the table has a column for it.

        Args:
            samples: the samples, taken while earlier ones are under way.
            columns: columns of their metadata.

        Raises:
            DataError: keys of the table cannot be made of names, labels stand in another table, or a sample came back
                otherwise than it was put.
            AccessDenied: the user may not write to the table, or not read it.
            StoreUnavailable: asking again may help.
        """
        with self._driven("") as link:
            if self._place.meta:
                raise DataError(f"samples are put into one table with their labels: leave meta out of {self.url}")
            put_all(link, self._place, samples, columns=columns, maximum=_WRITES_IN_FLIGHT)

    def digests(self, names: Sequence[str]) -> Sequence[bytes]:
        """The digest of each sample that was put under these names; empty where there is none that still holds.

        Raises what ``put_many`` raises.
        """
        with self._driven("") as link:
            return row_digests(link, names, maximum=_DIGESTS_IN_FLIGHT)

    def find_damaged(self, names: Sequence[str], digests: Sequence[bytes]) -> Sequence[int]:
        """Places of the samples whose rows hold other bytes than these digests of theirs say: every row is read.

        Raises what ``put_many`` raises.
        """
        with self._driven("") as link:
            return find_damaged_rows(link, names, digests, maximum=_CONTENTS_IN_FLIGHT)

    def __getstate__(self) -> dict[str, object]:
        # A session cannot travel to another process; the next one makes its own.
        return {"_place": self._place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_place"])  # type: ignore[misc]

    def _answer(self, place: ByteRange, answer: "Sequence[Any] | Exception") -> tuple[Buffer, str] | StoreError:
        try:
            if isinstance(answer, Exception):
                raise error_of_cql(answer, self.url, place.object) from answer
            return _part(answer, place.object, place.offset, place.length)
        except StoreError as error:
            return error

    def _entries(self, page: Sequence[Any], *, has_masks: bool) -> Iterator[Entry]:
        for key, *said in page:
            mask = said.pop() if has_masks else None
            *sizes, version = said
            name = str(key)
            if version is None:
                continue  # without data, which the format says of rows
            if not is_name(name) or name.startswith(MASKS):
                yield Entry(name.replace("\0", "\\0"), UNREADABLE, "")
                continue
            yield Entry(name, sizes[0] if sizes and sizes[0] is not None else -1, str(version))
            if mask is not None:
                yield Entry(MASKS + name, -1, str(mask))

    @contextmanager
    def _driven(self, name: str) -> Iterator["CqlSession"]:
        with self._translated(name):
            yield self._connected()

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        DRIVER.use(self.url)
        with translate_errors(self.url, name):
            yield

    def _connected(self) -> "CqlSession":
        if self._link is None:
            from frostline.stores.cql.session import CqlSession

            with self._lock:
                if self._link is None:
                    link = CqlSession(self._place, CqlAccess.of(environment(_ENVIRONMENT)), self._deadline_s)
                    # At the end of the process the driver says farewell by itself.
                    weakref.finalize(self, _close, link, os.getpid()).atexit = False
                    self._link = link
        return self._link


def _asked(link: "CqlSession", name: str) -> "tuple[PreparedStatement, object]":
    """The statement that reads an object, and the key that it takes.

    Raises:
        BadRequest: the name cannot be a key.
        ObjectNotFound: the object is a mask, and rows have none.
    """
    if not name.startswith(MASKS):
        return link.read, key_of(link.shape.key_type, name)
    if link.read_mask is None:
        raise ObjectNotFound(f"there is no object {name}")
    return link.read_mask, key_of(link.shape.key_type, name.removeprefix(MASKS))


def _part(rows: Sequence[Any], name: str, offset: int, length: int) -> tuple[Buffer, str]:
    if not rows or rows[0][0] is None:
        raise ObjectNotFound(f"there is no object {name}")
    data, version = rows[0]
    if offset + length > len(data):
        raise ObjectNotFound(f"{name} has {len(data)} bytes and ends before byte {offset + length}: it has changed")
    whole = not offset and length == len(data)
    return (data if whole else memoryview(data)[offset : offset + length]), str(version)


def _close(link: "CqlSession", made_by: int) -> None:
    # Whoever drops a store need not wait for farewells, and a forked child has none to say.
    if os.getpid() == made_by:
        Thread(target=link.close, daemon=True).start()


def _entry_of_labels(pages: Iterable[Sequence[Any]], what: str) -> Entry:
    # A sum, because rows come in no particular order.
    total, count = 0, 0
    for page in pages:
        for row in page:
            total += int.from_bytes(hashlib.blake2b(repr(row).encode(), digest_size=16).digest(), "little")
            count += 1
    content = f"{what}{total}"
    return Entry(LABELS, count, hashlib.blake2b(content.encode(), digest_size=16).hexdigest())
