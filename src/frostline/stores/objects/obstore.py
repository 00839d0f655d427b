"""A store of objects behind obstore, and memory as one.

obstore is imported when a store is first used: its threads do not survive a fork, so a process that only
forks workers must never have started them.
"""

import builtins
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING

from frostline.errors import ObjectNotFound
from frostline.processors import background
from frostline.stores.base.forks import Driver
from frostline.stores.base.protocols import Buffer, Dated, Entry, version_of_time
from frostline.stores.base.urls import check_name
from frostline.stores.objects.obstore_errors import error_of_driver

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import MemoryStore
    from obstore.store import ObjectStore as Client

__all__ = ("DRIVER", "DriverStore", "memory_store")

_LISTED_AT_ONCE = 1000
_LIST_RETRIES = 4


def _start() -> None:
    # Its threads start with the first call, whatever that is.
    with background():
        from obstore import put
        from obstore.store import MemoryStore

        put(MemoryStore(), "first", b"")


DRIVER = Driver(_start)
"""Of objects, whose threads serve all stores of a process."""


class DriverStore:
    """A store behind obstore. Safe for threads; its client is made on first use, by the process that uses it.

    Args:
        url: canonical, of the root.
        connect: makes the client that tries a request again so often. It is called in the process that uses it, and
            must travel by pickle.
        prefix: prefix of the root's objects within the client's place.
    """

    def __init__(self, url: str, connect: Callable[[int], "Client"], prefix: str) -> None:
        self._url = url
        self._connect = connect
        self._prefix = f"{prefix}/" if prefix else ""
        # Reads and writes are tried again by whoever asks, who must know how often a store refuses; a listing is not
        # taken up where it ended, so the driver does it.
        self._clients: dict[int, Client] = {}

    @property
    def url(self) -> str:
        """The canonical URL of the root."""
        return self._url

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``; the bytes are the driver's own, not copied."""
        name = check_name(object)
        if length == 0:
            return b""
        with self._driven(name) as client:
            from obstore import get_range

            data = memoryview(get_range(client, self._prefix + name, start=offset, length=length))
        if len(data) != length:
            raise ObjectNotFound(f"{name} gave {len(data)} of {length} bytes: it has changed")
        return data

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``."""
        name = check_name(object)
        if length == 0:
            return b"", ""
        with self._driven(name) as client:
            from obstore import get

            found = get(client, self._prefix + name, options={"range": (offset, offset + length)})
            data = memoryview(found.bytes())
        if len(data) != length:
            raise ObjectNotFound(f"{name} gave {len(data)} of {length} bytes: it has changed")
        return data, _version(found.meta)

    def describe(self, object: str) -> Entry:
        """See ``Described.describe``."""
        name = check_name(object)
        with self._driven(name) as client:
            from obstore import head

            found = head(client, self._prefix + name)
        return Entry(name, found["size"], _version(found))

    def list(self) -> Iterator[Entry]:
        """See ``Listable.list``."""
        with self._driven("", _LIST_RETRIES) as client:
            from obstore import list as list_objects

            skipped = len(self._prefix)
            for chunk in list_objects(client, prefix=self._prefix or None, chunk_size=_LISTED_AT_ONCE):
                for found in chunk:
                    yield Entry(found["path"][skipped:], found["size"], _version(found))

    def sections(self) -> "tuple[builtins.list[Entry], tuple[str, ...]]":
        """See ``Sectioned.sections``."""
        with self._driven("", _LIST_RETRIES) as client:
            from obstore import list_with_delimiter

            found = list_with_delimiter(client, self._prefix or None)
            skipped = len(self._prefix)
            folders = tuple(f"{prefix.rstrip('/')[skipped:]}/" for prefix in found["common_prefixes"])
            return [Entry(item["path"][skipped:], item["size"], _version(item)) for item in found["objects"]], folders

    def list_section(self, folder: str) -> Sequence[Entry]:
        """See ``Sectioned.list_section``."""
        with self._driven("", _LIST_RETRIES) as client:
            from obstore import list as list_objects

            from frostline.stores.base.listing import Entries

            skipped = len(self._prefix)
            return Entries.of(
                Entry(found["path"][skipped:], found["size"], _version(found))
                for chunk in list_objects(client, prefix=self._prefix + folder, chunk_size=_LISTED_AT_ONCE)
                for found in chunk
            )

    def list_dated(self) -> Iterator[Dated]:
        """See ``Prunable.list_dated``."""
        with self._driven("", _LIST_RETRIES) as client:
            from obstore import list as list_objects

            skipped = len(self._prefix)
            for chunk in list_objects(client, prefix=self._prefix or None, chunk_size=_LISTED_AT_ONCE):
                for found in chunk:
                    yield Dated(found["path"][skipped:], found["size"], found["last_modified"].timestamp())

    def remove(self, object: str) -> None:
        """See ``Prunable.remove``."""
        name = check_name(object)
        with suppress(ObjectNotFound), self._driven(name) as client:
            from obstore import delete

            delete(client, self._prefix + name)

    def write(self, object: str, data: Buffer) -> None:
        """See ``Writable.write``."""
        name = check_name(object)
        with self._driven(name) as client:
            from obstore import put

            put(client, self._prefix + name, data)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    def __getstate__(self) -> dict[str, object]:
        # A client cannot travel to another process; the next one makes its own.
        return {**self.__dict__, "_clients": {}}

    @contextmanager
    def _driven(self, name: str, retries: int = 0) -> Iterator["Client"]:
        DRIVER.use(self._url)
        from obstore.exceptions import BaseError

        try:
            if retries not in self._clients:
                self._clients[retries] = self._connect(retries)
            yield self._clients[retries]
        except (BaseError, OSError, ValueError) as error:
            raise error_of_driver(error, self._url, name) from error


def memory_store(url: str, place: str, path: str) -> DriverStore:
    """Objects in this process's memory; every store of the same place shares them."""
    return DriverStore(url, partial(_memory_client, place), path)


def _version(found: "ObjectMeta") -> str:
    # Azure writes it with quotes beside the bytes and without them in listings.
    etag = (found["e_tag"] or "").strip('"')
    # Web servers need not have one. Where they give no time either, the driver says that of 1970.
    return etag or version_of_time(found["last_modified"].timestamp())


def _memory_client(place: str, retries: int) -> "MemoryStore":  # noqa: ARG001 (memory never fails)
    return _memory(place)


@cache
def _memory(place: str) -> "MemoryStore":  # noqa: ARG001 (the key of the cache: one memory a name)
    from obstore.store import MemoryStore

    return MemoryStore()
