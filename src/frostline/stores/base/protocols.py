"""What a store of objects can do: one narrow protocol a capability, and the entry of a listing."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from frostline.errors import StoreError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = (
    "LABELS",
    "MASKS",
    "Batched",
    "Buffer",
    "Dated",
    "Described",
    "Entry",
    "Listable",
    "ObjectStore",
    "Place",
    "Prunable",
    "Readable",
    "Sectioned",
    "Tabular",
    "Versioned",
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


class Entry(NamedTuple):
    """One object of a listing: a light value, because there may be millions.

    Attributes:
        object: its name, relative to the store's root.
        size: in bytes; -1 where the store cannot tell without reading the object.
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
            ObjectNotFound: no such object, or it ends before these bytes do.
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
        """Its size and version, at the cost of one request.

        Raises what ``Readable.read`` raises.
        """


class Place(NamedTuple):
    """Some bytes of an object."""

    object: str
    offset: int
    length: int


@runtime_checkable
class Batched(Protocol):
    """A store that has many reads under way at once without a thread for each."""

    def read_many(
        self, places: Sequence[Place], *, maximum: int = ...
    ) -> Iterator[tuple[int, tuple[Buffer, str] | StoreError]]:
        """What ``Versioned.read_version`` gives for each place, as it comes: in any order, each once.

        Args:
            places: to read.
            maximum: largest number of them under way, or waiting to be taken, at once.

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
        """Every object under the root, hidden ones too, in no particular order.

        Raises:
            DataNotFound: the root is not there.
            AccessDenied: the store refused.
            StoreUnavailable: asking again may help.
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

        Of a folder with millions they may be columns (``stores.base.listing``), which take less than a list.

        Raises what ``Listable.list`` raises.
        """


class Writable(Protocol):
    """A store that takes bytes."""

    def write(self, object: str, data: Buffer) -> None:
        """Put a whole object in place at once: readers see the old one or the new one, never a part.

        Raises:
            BadRequest: the name leaves the root or cannot be a name.
            AccessDenied: the store is read-only.
            OutOfSpace: it is full; nothing half-written is left behind.
        """


class Dated(NamedTuple):
    """One object of a listing that tells its age.

    Attributes:
        object: its name, relative to the store's root.
        size: in bytes.
        modified_s: when it was written, by the store's own clock, in seconds since the epoch.
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
