"""What a store of objects can do: one narrow protocol a capability, and the entry of a listing."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

__all__ = ("Buffer", "Entry", "Listable", "ObjectStore", "Readable", "Versioned", "Writable")

Buffer = bytes | memoryview


class Entry(NamedTuple):
    """One object of a listing: a light value, because there may be millions.

    Attributes:
        object: its name, relative to the store's root.
        size: in bytes.
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


class Listable(Protocol):
    """A store that names its objects."""

    def list(self) -> Iterator[Entry]:
        """Every object under the root, hidden ones too, in no particular order.

        Raises:
            DataNotFound: the root is not there.
            AccessDenied: the store refused.
            StoreUnavailable: asking again may help.
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


class ObjectStore(Versioned, Listable, Writable, Protocol):
    """A store that can do it all."""

    @property
    def url(self) -> str:
        """The canonical URL of the root."""
