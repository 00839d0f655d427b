"""What a store of objects can do: one narrow protocol a capability, listings as columns, forks and limits.

A listing as columns: some seventy bytes beside the names, where values of Python's own take three hundred.
"""

import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Protocol, overload, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.config import refuse_variables
from frostline.core.errors import AccessDenied, SettingError, StoreError
from frostline.core.nouns import Texts

__all__ = (
    "LABELS",
    "MASKS",
    "NO_LIMITS",
    "PREFIX",
    "REQUESTS",
    "RETRY_FOR",
    "TIMEOUT",
    "UNREADABLE",
    "Batched",
    "Buffer",
    "ByteRange",
    "Dated",
    "Described",
    "Driver",
    "Entries",
    "Entry",
    "HasFolders",
    "LinkBounds",
    "Listable",
    "Names",
    "ObjectStore",
    "Prunable",
    "Readable",
    "Sectioned",
    "StoreLimits",
    "Tabular",
    "Versioned",
    "Waits",
    "Writable",
    "is_other_version",
    "plain_etag",
    "version_of_time",
)


Buffer = bytes | memoryview

LABELS = ".frostline/labels"
"""Name of the entry that stands in the listing of a ``Tabular`` store for all that its rows say beside the data."""

MASKS = ".masks/"
"""What begins the name of the object that is the mask of a row of a ``Tabular`` store; the row's own name follows."""


UNREADABLE = -2
"""Size of an entry whose object cannot be asked for by its name: it is listed to be named and counted."""


class Entry(NamedTuple):
    """One object of a listing: a light value, because there may be millions.

    Attributes:
        object: the name, relative to the store's root.
        size: the size in bytes; -1 where the store cannot tell without reading the object, ``UNREADABLE`` where its
            name is none that can be read.
        etag: changes when the object's bytes change; empty where the store has none.
    """

    object: str
    size: int
    etag: str


class Readable(Protocol):
    """A store that gives bytes. Safe for use by several threads at once."""

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """Exactly ``length`` bytes of an object from ``offset``; the caller may keep them.

        Raises:
            BadRequest: the name leaves the root or cannot be a name.
            ObjectNotFound: There is no such object, or it is shorter than that.
            AccessDenied: the store refused.
            StoreUnavailable: asking again may help.
        """


class Versioned(Readable, Protocol):
    """A store that tells the version of what it gives, at no further cost."""

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """The bytes as ``read`` gives them, and the ``Entry.etag`` that the object has now; empty where it has none.

        Raises what ``read`` raises.
        """


@runtime_checkable
class Described(Protocol):
    """A store that tells of one object what a listing tells of all."""

    def describe(self, object: str) -> Entry:
        """The size and version of an object, at the cost of one request.

        Raises what ``Readable.read`` raises.
        """


class ByteRange(NamedTuple):
    """Some bytes of an object."""

    object: str
    offset: int
    length: int


@runtime_checkable
class Batched(Protocol):
    """A store that has many reads under way at once without a thread for each."""

    def read_many(
        self, places: Sequence[ByteRange], *, maximum: int = ...
    ) -> Iterator[tuple[int, tuple[Buffer, str] | StoreError]]:
        """What ``Versioned.read_version`` gives for each place, as it comes: in any order, each once.

        Args:
            places: the places to read.
            maximum: the largest number of them under way, or waiting to be taken, at once.

        Returns:
            Pairs of an index into ``places`` and what was read; what went wrong with one place alone is in its pair.

        Raises:
            BadRequest: a name leaves the root or cannot be a name.
            StoreError: the store failed, and not for one place alone.
        """


@runtime_checkable
class Tabular(Protocol):
    """A store whose objects are rows of a table, with further columns beside their bytes."""

    @property
    def label_column(self) -> str:
        """The column that is to hold labels; it may not be there."""

    @property
    def name_column(self) -> str:
        """The column that is to hold samples' names; it may not be there."""

    def rows(self) -> "pa.Table":
        """A first column with the objects' names, whatever it is called, and the further columns; in any order.

        Raises what ``Listable.list`` raises.
        """

    def contents(self, objects: Sequence[str]) -> "Iterator[tuple[int, Buffer | None]]":
        """The bytes of each of these objects, whose lengths nobody knows: its place and they; None where it is gone.

        Each once, in any order, some at a time. Raises what ``Readable.read`` raises.
        """


class Listable(Protocol):
    """A store that names its objects."""

    def list(self) -> Iterator[Entry]:
        """Every object under the root, hidden and unreadable ones too, in no particular order.

        Raises:
            DataNotFound: the root is not there.
            AccessDenied: the store refused.
            StoreUnavailable: asking again may help.
        """


@runtime_checkable
class HasFolders(Protocol):
    """A store whose folders are there without objects, as those of a disk are."""

    def empty_folders(self) -> Sequence[str]:
        """Names of folders with nothing in them, up to three folders deep, each with a slash at its end.

        Those in a folder with files of its own, but the root, are not among them.
        """


@runtime_checkable
class Sectioned(Protocol):
    """A store that names its objects folder by folder, so that several folders can be listed at once."""

    def sections(self) -> tuple[Sequence[Entry], tuple[str, ...]]:
        """The objects that lie in no folder, and the names of the folders, each with a slash at its end.

        Raises what ``Listable.list`` raises.
        """

    def list_section(self, folder: str) -> Sequence[Entry]:
        """Every object of such a folder and of those within it, named from the root, in no particular order.

        Of a folder with millions they may be columns (``stores.protocols``), which take less than a list.

        Raises what ``Listable.list`` raises.
        """


class Writable(Protocol):
    """A store that takes bytes."""

    def write(self, object: str, data: Buffer) -> None:
        """Put a whole object in place at once: readers see the old one or the new one, never a part.

        Raises:
            BadRequest: the name leaves the root or cannot be a name.
            AccessDenied: the store is read-only.
            OutOfSpace: The store is full; nothing half-written is left behind.
        """


class Dated(NamedTuple):
    """One object of a listing that tells its age.

    Attributes:
        object: the name, relative to the store's root.
        size: the size in bytes.
        modified_s: the time when it was written, by the store's own clock, in seconds since the epoch.
    """

    object: str
    size: int
    modified_s: float


@runtime_checkable
class Prunable(Protocol):
    """A store whose old objects can be found and removed."""

    def list_dated(self) -> Iterator[Dated]:
        """Every object under the root, in no particular order.

        Raises what ``Listable.list`` raises.
        """

    def remove(self, object: str) -> None:
        """Remove an object; where there is none of that name, nothing happens.

        Raises:
            BadRequest: the name leaves the root or cannot be a name.
            AccessDenied: the store refused.
            StoreUnavailable: asking again may help.
        """


class ObjectStore(Versioned, Listable, Writable, Protocol):
    """A store that can do it all."""

    @property
    def url(self) -> str:
        """The canonical URL of the root."""


_TIME = "modified-"


def plain_etag(etag: str) -> str:
    """An etag without its quotation marks, and without what says that it is a weak one."""
    return etag.removeprefix("W/").strip('"')


def version_of_time(changed_s: float) -> str:
    """The version of an object that has no etag: when it was changed last, to the second; empty where nobody knows."""
    return f"{_TIME}{int(changed_s)}" if changed_s >= 1 else ""


def is_other_version(listed: str, found: str) -> bool:
    """Whether an object has changed since it was listed; not where one of the two is unknown, or only one is a time."""
    if not listed or not found or listed.startswith(_TIME) != found.startswith(_TIME):
        return False
    return plain_etag(listed) != plain_etag(found)


_COLUMNS = pa.schema({"object": pa.string(), "size": pa.int64(), "etag": pa.string()})
# Held as values of Python's own while they are put into columns, or taken out of them.
_AT_ONCE = 1 << 13
# Rows and bytes of what is put in order at once: offsets into texts have 32 bits.
_SORTED_ROWS, _SORTED_BYTES = 1 << 20, 1 << 31
_STRETCHES = 64


class Names(Texts):
    """A column of texts in several pieces, made to be gone through.

    Args:
        column: column of strings without nulls.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __iter__(self) -> Iterator[str]:
        for chunk in self._column.chunks:
            for start in range(0, len(chunk), _AT_ONCE):
                yield from chunk.slice(start, _AT_ONCE).to_pylist()

    def take(self, rows: npt.NDArray[np.int64]) -> Sequence[str]:
        """See ``Texts.take``."""
        found: list[str] = self._column.take(pa.array(rows)).to_pylist()
        return found


class Entries(Sequence[Entry]):
    """Entries of a listing, made when they are asked for. Immutable, safe for threads.

    Iterating makes some thousand at a time; the columns are much faster where they are enough.

    Args:
        table: columns ``object``, ``size`` and ``etag``, without nulls.
        is_in_order: True if they stand in the order of their names.
    """

    def __init__(self, table: pa.Table, *, is_in_order: bool = False) -> None:
        self.table = table
        self.is_in_order = is_in_order

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> "Entries":
        """The same entries as columns; those that are columns already are taken as they are."""
        if isinstance(entries, Entries):
            return entries
        rest, found = iter(entries), []
        while some := list(islice(rest, _AT_ONCE)):
            found.append(pa.record_batch(list(zip(*some, strict=True)), schema=_COLUMNS))
        return cls(pa.Table.from_batches(found, _COLUMNS))

    @classmethod
    def concatenate(cls, parts: "list[Entries]") -> "Entries":
        """The entries of several listings, in the order of their names. The list is emptied: what it held is freed."""
        columns = list(pa.concat_tables([part.table for part in parts] or [_COLUMNS.empty_table()]).columns)
        parts.clear()
        table = _in_order(columns)
        pa.default_memory_pool().release_unused()
        return cls(table, is_in_order=True)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, row: int) -> Entry: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[Entry]: ...

    def __getitem__(self, row: int | slice) -> Entry | Sequence[Entry]:
        """One entry, or those of a slice."""
        if isinstance(row, slice):
            start, stop, step = row.indices(len(self))
            if step != 1:
                return [self[place] for place in range(start, stop, step)]
            return Entries(self.table.slice(start, max(0, stop - start)), is_in_order=self.is_in_order)
        place = row + len(self) if row < 0 else row
        if not 0 <= place < len(self):
            raise IndexError(f"row {row} lies outside the {len(self)} entries")
        return next(iter(Entries(self.table.slice(place, 1))))

    def __iter__(self) -> Iterator[Entry]:
        for piece in self.pieces():
            yield from map(Entry, *(column.to_pylist() for column in piece.columns))

    def pieces(self) -> Iterator[pa.RecordBatch]:
        """The columns in pieces of some thousand rows."""
        yield from self.table.to_batches(max_chunksize=_AT_ONCE)

    def in_order(self) -> "Entries":
        """The same entries in the order of their names, which is that of texts in Python and in UTF-8."""
        if self.is_in_order:
            return self
        return Entries(_in_order(list(self.table.columns)), is_in_order=True)

    def where(self, mask: pa.ChunkedArray) -> "Entries":
        """The entries for which a mask is true. Nothing is copied where they lie in few stretches, as sorted do."""
        chosen = np.concatenate([[False], mask.to_numpy(), [False]])
        edges = np.flatnonzero(chosen[1:] != chosen[:-1]).tolist()
        if len(edges) > 2 * _STRETCHES:
            return Entries(self.table.filter(mask), is_in_order=self.is_in_order)
        parts = [self.table.slice(start, stop - start) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        return Entries(pa.concat_tables(parts or [_COLUMNS.empty_table()]), is_in_order=self.is_in_order)

    def filter_prefix(self, start: str) -> "Entries":
        """The entries whose names begin so."""
        return self.where(pc.starts_with(self.table["object"], start))

    def filter_pattern(self, pattern: str) -> "Entries":
        """The entries in whose names a regular expression, as RE2 reads them, is found."""
        return self.where(pc.match_substring_regex(self.table["object"], pattern))

    def has(self, name: str) -> bool:
        """Whether one of them has that name."""
        return bool(pc.index(self.table["object"], pa.scalar(name, _COLUMNS.types[0])).as_py() >= 0)

    def find(self, name: str) -> Entry | None:
        """The one of that name; None where there is none."""
        place = pc.index(self.table["object"], pa.scalar(name, _COLUMNS.types[0])).as_py()
        return None if place < 0 else self[place]

    def digest(self, rule: str) -> str:
        """SHA-256 of a rule and of all entries in their order: names, sizes and etags, each ended by a NUL."""
        # A name holds no NUL, so that the columns cannot run into each other.
        digest = hashlib.sha256(f"{rule}\0".encode())
        for piece in self.in_order().pieces():
            said = pc.binary_join_element_wise(
                piece["object"], piece["size"].cast(pa.string()), piece["etag"], "", "\0"
            )
            digest.update("".join(said.to_pylist()).encode())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"<{len(self)} entries>"


def _in_order(columns: list[pa.ChunkedArray]) -> pa.Table:
    """The columns in the order of the first, each taken out of the list before the next is put in order."""
    order = pc.sort_indices(columns[0])
    taken = []
    while columns:
        taken.append(_taken(columns.pop(0), order))
    return pa.table(taken, _COLUMNS)


def _taken(column: pa.ChunkedArray, order: pa.Array) -> pa.ChunkedArray:
    kind = column.type
    if column.nbytes >= _SORTED_BYTES:
        column = column.cast(pa.large_string())
    whole = column.combine_chunks()
    del column
    pieces = (order.slice(start, _SORTED_ROWS) for start in range(0, len(order), _SORTED_ROWS))
    return pa.chunked_array([whole.take(piece).cast(kind) for piece in pieces], kind)


class Driver:
    """A library that reaches stores with threads of its own. Safe for threads.

    Args:
        start: function that starts the threads; called once, by the first process that uses it.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._process: int | None = None
        self._has_started = False

    @property
    def is_used(self) -> bool:
        """Whether this process has used it, or one that it was forked from."""
        return self._process is not None

    def use(self, url: str) -> None:
        """Note that the driver is about to be used.

        Raises:
            StoreError: The driver was used before this process was forked.
        """
        if self._process is None:
            self._process = os.getpid()
        if self._process != os.getpid():
            raise StoreError(
                f"{url} cannot be read here: this process was forked from one that had used such a store. Start it "
                "with 'spawn' or 'forkserver', or have a service read for both: start frostline io --data-root "
                f"{url}, and give its address as near="
            )
        if not self._has_started:  # a forked process never comes here, so that it finds no lock which nobody opens
            with self._lock:
                if not self._has_started:
                    self._start()
                    self._has_started = True


class LinkBounds:
    """The folders that links may lead to. Safe for threads.

    Args:
        folders: The absolute paths. They may be links themselves: whoever names a folder means what it leads to.
    """

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._folders = folders
        self._real: tuple[str, ...] = ()

    def check(self, place: str, name: str) -> None:
        """Do nothing if a path without links lies within one of the folders.

        Args:
            place: The path, absolute.
            name: name that the sentence uses.

        Raises:
            AccessDenied: The path lies outside of these folders.
        """
        if not _is_within(place, self._real):
            # A folder may be a link that points elsewhere since it was looked at.
            self._real = tuple(os.path.realpath(folder) for folder in self._folders)
            if not _is_within(place, self._real):
                raise AccessDenied(
                    f"{name} is reached by a symbolic link that leads out of the data root: copy what it points to, "
                    "or start the node with --follow-links"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """What whoever opens a store allows it.

    Attributes:
        links: The folders within which symbolic links of a folder may lead; None lets them lead anywhere.
        deadline_s: The time that it may be silent, and how long a call of it is tried again, where the environment does
            not say less.
    """

    links: LinkBounds | None = None
    deadline_s: float = math.inf


NO_LIMITS = StoreLimits()
"""Of whoever reads their own data."""


def _is_within(place: str, folders: tuple[str, ...]) -> bool:
    return any(place == folder or place.startswith(f"{folder.rstrip('/')}/") for folder in folders)


PREFIX = "FROSTLINE_STORE_"
"""What the names of these variables begin with."""
TIMEOUT = f"{PREFIX}TIMEOUT_S"
RETRY_FOR = f"{PREFIX}RETRY_FOR_S"
REQUESTS = f"{PREFIX}REQUESTS_PER_S"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How long stores behind the driver are waited for, and how fast they are asked.

    Attributes:
        timeout_s: the time without a byte from the store before a request is given up. What comes steadily may take any
            time.
        retry_for_s: the time that it refuses for its rate, or does not answer though it did, until its caller is told.
        requests_per_s: the most requests a second that one process makes of one store, where a whole listing
            counts as one; infinite where only the store's refusals count.
    """

    timeout_s: float = 30.0
    retry_for_s: float = 60.0
    requests_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name, value, minimum in ((TIMEOUT, self.timeout_s, 1e-3), (RETRY_FOR, self.retry_for_s, 0.0)):
            if not minimum <= value < math.inf:
                raise SettingError(f"{name} is a number of seconds, such as 30, not {value!r}")
        if not self.requests_per_s >= 1e-3:
            raise SettingError(f"{REQUESTS} is a number of requests, such as 100, not {self.requests_per_s!r}")

    def within(self, deadline_s: float) -> "Waits":
        """The same for a caller who waits no longer than that for a store that says nothing, or fails."""
        deadline_s = max(deadline_s, 1e-3)
        return replace(self, timeout_s=min(self.timeout_s, deadline_s), retry_for_s=min(self.retry_for_s, deadline_s))

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Waits":
        """What the environment says, and the defaults where it says nothing.

        Raises:
            SettingError: a variable is no such number, or none that is read.
        """
        said = {"timeout_s": TIMEOUT, "retry_for_s": RETRY_FOR, "requests_per_s": REQUESTS}
        refuse_variables(environment, PREFIX, said.values())
        return cls(**{field: _number(name, environment[name]) for field, name in said.items() if name in environment})


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        what = "requests" if name == REQUESTS else "seconds"
        raise SettingError(f"{name} is a number of {what}, such as 30, not {text[:40]!a}") from error
