"""A file as a store of one object: what is found at a URL whose name ends as that of a table or a shard does."""

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from frostline.errors import AccessDenied, DataNotFound, ObjectNotFound
from frostline.stores.base.limits import LinkBounds
from frostline.stores.base.protocols import Buffer, Dated, Described, Entry, ObjectStore, Prunable, Sectioned
from frostline.stores.base.urls import normalise_url
from frostline.stores.objects.local import FolderStore

__all__ = ("FileOrFolder", "Objects", "SingleFile", "beside")


class Objects(ObjectStore, Described, Sectioned, Prunable, Protocol):
    """A store of objects, such as a bucket's."""


class SingleFile(FolderStore):
    """A file of this machine as a folder that holds nothing else. Safe for threads and forks.

    Args:
        path: path of the file.
        links: see ``FolderStore``.
    """

    def __init__(self, path: str, links: LinkBounds | None = None) -> None:
        super().__init__(str(Path(path).parent), links)
        self._file = Path(path).name

    @property
    def url(self) -> str:
        """The canonical URL of the file."""
        return normalise_url(str(self._path / self._file))

    @property
    def folder_url(self) -> str:
        """The canonical URL of the folder that the file lies in."""
        return super().url

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``; the files beside it are not there."""
        return super().read_version(self._own(object), offset, length)

    def describe(self, object: str) -> Entry:
        """See ``Described.describe``."""
        return super().describe(self._own(object))

    def list(self) -> Iterator[Entry]:
        """See ``Listable.list``."""
        yield self._described()

    def sections(self) -> tuple[Sequence[Entry], tuple[str, ...]]:
        """See ``Sectioned.sections``; there are no folders."""
        return [self._described()], ()

    def list_dated(self) -> Iterator[Dated]:
        """See ``Prunable.list_dated``; nothing is pruned."""
        return iter(())

    def write(self, object: str, data: Buffer) -> None:  # noqa: ARG002
        """Refuse, so that nothing is put beside a file that was named alone.

        Raises:
            AccessDenied: always.
        """
        raise _refused(self.url)

    def path_of(self, object: str) -> Path:
        """See ``FolderStore.path_of``."""
        return super().path_of(self._own(object))

    def _own(self, object: str) -> str:
        if object != self._file:
            raise ObjectNotFound(f"there is no object {object[:200]!a} in {self._file}, which is one itself")
        return object

    def _described(self) -> Entry:
        try:
            return self.describe(self._file)
        except ObjectNotFound as error:
            path = self._path / self._file
            is_odd = path.exists() and not stat.S_ISREG(path.stat().st_mode)
            raise DataNotFound(f"{path} is no regular file" if is_odd else f"there is no file {path}") from error


class FileOrFolder:
    """An object of a store of objects, or what lies under a prefix of that name, as Spark writes ``x.parquet/``.

    Nothing is asked until it is used; then one request tells whether it is an object. Safe for threads.

    Args:
        name: name of the object in its folder.
        outside: store of the folder that the object would lie in.
        inside: store of the prefix.
    """

    def __init__(self, name: str, outside: Objects, inside: Objects) -> None:
        self._name = name
        self._outside = outside
        self._inside = inside
        self._entry: Entry | None = None
        self._is_known = False

    @property
    def url(self) -> str:
        """The canonical URL of the object or prefix."""
        return self._inside.url

    @property
    def folder_url(self) -> str:
        """The canonical URL of the folder that holds the file; of a prefix, its own."""
        return self._inside.url if self._found() is None else self._outside.url

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self._holder(object).read(object, offset, length)

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``."""
        return self._holder(object).read_version(object, offset, length)

    def describe(self, object: str) -> Entry:
        """See ``Described.describe``."""
        return self._holder(object).describe(object)

    def list(self) -> Iterator[Entry]:
        """See ``Listable.list``."""
        entry = self._found(anew=True)
        return self._inside.list() if entry is None else iter((entry,))

    def sections(self) -> tuple[Sequence[Entry], tuple[str, ...]]:
        """See ``Sectioned.sections``."""
        entry = self._found(anew=True)
        return self._inside.sections() if entry is None else ([entry], ())

    def list_section(self, folder: str) -> Sequence[Entry]:
        """See ``Sectioned.list_section``."""
        return self._inside.list_section(folder)

    def list_dated(self) -> Iterator[Dated]:
        """See ``Prunable.list_dated``."""
        return self._inside.list_dated() if self._found() is None else iter(())

    def remove(self, object: str) -> None:
        """See ``Prunable.remove``."""
        if self._found() is None:
            self._inside.remove(object)

    def write(self, object: str, data: Buffer) -> None:
        """See ``Writable.write``.

        Raises:
            AccessDenied: it is an object, beside which nothing is put.
        """
        if self._found() is not None:
            raise _refused(self.url)
        self._inside.write(object, data)

    def _found(self, *, anew: bool = False) -> Entry | None:
        """The object's entry; None where there is none of that name."""
        if anew or not self._is_known:
            try:
                self._entry = self._outside.describe(self._name)
            except (DataNotFound, ObjectNotFound):
                self._entry = None
            self._is_known = True
        return self._entry

    def _holder(self, object: str) -> Objects:
        if self._found() is None:
            return self._inside
        if object != self._name:
            raise ObjectNotFound(f"there is no object {object[:200]!a} in {self._name}, which is one itself")
        return self._outside


def beside(store: object, url: str) -> str:
    """The URL of the folder to which names in a store's tables are relative: of a single file, the one it lies in.

    Args:
        store: store that holds the tables.
        url: URL of its root.
    """
    return store.folder_url if isinstance(store, SingleFile | FileOrFolder) else url


def _refused(url: str) -> AccessDenied:
    return AccessDenied(f"{url} is a single file: nothing is written beside it")
