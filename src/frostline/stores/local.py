"""A folder or a single file as a store of objects, by the operating system's own calls and memory maps.

The driver of the other stores could read folders too. It runs threads that do not survive a fork, stops a whole
listing at one odd file name, and took twice as long to list 100,000 files, so the commonest store does without it.
"""

import errno
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cachetools import LRUCache

from frostline.core.errors import (
    AccessDenied,
    DataError,
    DataNotFound,
    FrostlineError,
    ObjectNotFound,
    OutOfSpace,
    StoreUnavailable,
)
from frostline.core.files import is_full, make_private_folder, open_private, try_lock
from frostline.stores.protocols import (
    UNREADABLE,
    Buffer,
    Dated,
    Described,
    Entry,
    LinkBounds,
    ObjectStore,
    Prunable,
    Sectioned,
)
from frostline.stores.urls import COMPRESSED, FILE_SUFFIXES, check_name, normalise_url

__all__ = (
    "FileOrFolder",
    "FolderStore",
    "MmapFolder",
    "Objects",
    "SingleFile",
    "base_url",
    "error_of_system",
    "etag",
    "is_partial",
)


_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ESPIPE, errno.ENXIO}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_PARTIAL = ".partial-"
# Classes lie in folders of splits, which may lie in one that holds everything.
_DEEPEST_EMPTY = 3
_MAX_SHOWN = 300


class FolderStore:
    """A folder. Safe for threads and forks.

    Args:
        path: The place where it is.
        links: The folders within which symbolic links may lead; None lets them lead anywhere, as whoever reads only
            their own files means it.
        is_private: True if files are made for their user alone, as in a cache.
    """

    def __init__(self, path: str, links: LinkBounds | None = None, *, is_private: bool = False) -> None:
        self._is_private = is_private
        self._path = Path(path).absolute()
        self._links = links

    @property
    def url(self) -> str:
        """The canonical URL of the folder."""
        return normalise_url(str(self._path))

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``."""
        path = f"{self._path}/{check_name(object)}"
        with _translated(object):
            # Not blocking: a pipe of that name must not hold up the reader.
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self.check_opened(handle, object)
                return _read(handle, object, offset, length)
            finally:
                os.close(handle)

    def describe(self, object: str) -> Entry:
        """See ``Described.describe``."""
        path = self._path / check_name(object)
        with _translated(object):
            if self._links is not None:
                self._links.check(os.path.realpath(path), object)
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ObjectNotFound(f"there is no object {object}")
        return Entry(object, status.st_size, etag(status.st_mtime_ns, status.st_size))

    def list(self) -> Iterator[Entry]:
        """See ``Listable.list``."""
        yield from _entries(self._files())

    def sections(self) -> tuple[Sequence[Entry], tuple[str, ...]]:
        """See ``Sectioned.sections``."""
        with _folder_translated(self._path):
            self._check_is_there()
            from frostline.stores.protocols import Entries

            folders: list[str] = []
            files = Entries.of(_entries(_of_folder(self._path, "", folders, self._links)))
            return files, tuple(folders)

    def list_section(self, folder: str) -> Sequence[Entry]:
        """See ``Sectioned.list_section``. Most of its time is the system's, so that several threads are faster."""
        with _folder_translated(self._path):
            from frostline.stores.protocols import Entries

            return Entries.of(_entries(_walk(self._path, self._links, folder, (_folder_identity(self._path),))))

    def empty_folders(self) -> Sequence[str]:
        """See ``HasFolders.empty_folders``."""
        return sorted(_empty_folders(self._path, "", _DEEPEST_EMPTY))

    def list_dated(self) -> Iterator[Dated]:
        """See ``Prunable.list_dated``."""
        for name, status in self._files():
            if _is_readable(name, status):
                yield Dated(name, status.st_size, status.st_mtime)

    def remove(self, object: str) -> None:
        """See ``Prunable.remove``."""
        with suppress(ObjectNotFound), _translated(object):
            (self._path / check_name(object)).unlink(missing_ok=True)

    def write(self, object: str, data: Buffer) -> None:
        """See ``Writable.write``."""
        path = self._path / check_name(object)
        with _folder_translated(self._path):
            self._check_is_there()
        try:
            self._make(path.parent)
            _replace(path, data, is_private=self._is_private)
        except OSError as error:
            # Who has to free space must know where.
            raise error_of_system(error, str(path) if is_full(error) else object) from error

    def create(self) -> None:
        """Make the folder, and those above it, where they are missing.

        Raises:
            AccessDenied: the folder may not be made there.
            OutOfSpace: the disk is full.
        """
        with _translated(str(self._path)):
            try:
                self._make(self._path)
            except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
                raise AccessDenied(f"no folder can be made at {self._path}: {error.strerror}") from error

    @contextmanager
    def lock_for_writing(self, *folders: str) -> Iterator[None]:
        """Be the only writer that asks to be, and remove what killed ones had begun to write in these folders.

        Raises:
            DataError: Another process is writing there.
            AccessDenied: the folder takes no writes.
        """
        lock = self._path / ".frostline" / "lock"
        with _translated(str(self._path)):
            lock.parent.mkdir(exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(handle, self._path)
            for partial in (file for folder in folders for file in (self._path / folder).glob(f"{_PARTIAL}*")):
                partial.unlink(missing_ok=True)
            yield
        finally:
            os.close(handle)

    def make_read_only(self, object: str) -> None:
        """Take everyone's right to write to an object away; it can still be replaced or removed.

        Raises:
            BadRequest: the name leaves the root or cannot be a name.
            ObjectNotFound: There is no such object.
            AccessDenied: the folder belongs to another user.
        """
        with _translated(object):
            (self._path / check_name(object)).chmod(0o444)

    def path_of(self, object: str) -> Path:
        """Where an object lies.

        Raises:
            BadRequest: the name leaves the root or cannot be a name.
        """
        return self._path / check_name(object)

    def check_opened(self, handle: int, object: str) -> None:
        """Do nothing if an open file lies where links may lead; looked at once it is open, so that nobody swaps it.

        Args:
            handle: The file's descriptor.
            object: The name.

        Raises:
            AccessDenied: A symbolic link led out of the folders that may be read.
        """
        if self._links is not None:
            self._links.check(_place_of(handle, f"{self._path}/{object}"), object)

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        with _folder_translated(self._path):
            self._check_is_there()
            yield from _walk(self._path, self._links)

    def _make(self, folder: Path) -> None:
        if self._is_private:
            make_private_folder(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)

    def _check_is_there(self) -> None:
        if self._path.is_file():
            raise DataNotFound(_no_folder(self._path))
        if not self._path.is_dir():
            hint = (
                ": name a folder without wildcards, and all that lies below it is read"
                if set("*?{") & set(str(self._path))
                else ""
            )
            raise DataNotFound(f"there is no folder {self._path}{hint}")


def _no_folder(path: Path) -> str:
    """What is said of a file that is no data set by itself."""
    if path.name.lower().endswith(COMPRESSED):
        return f"{path} is compressed as a whole and cannot be read at an offset: unpack it, to a plain tar at most"
    return (
        f"{path} is a file, and of single files those that end in {', '.join(FILE_SUFFIXES)} are data sets: name its "
        f"folder {path.parent}, or such a file"
    )


def etag(mtime_ns: int, size: int) -> str:
    """What stands for a file's version, since file systems have none of their own."""
    return f"{mtime_ns:x}-{size:x}"


def is_partial(name: str) -> bool:
    """Whether an object's name is that of a file that is being written, or that a killed writer left behind."""
    return name.rpartition("/")[2].startswith(_PARTIAL)


def error_of_system(error: OSError, name: str) -> FrostlineError:
    """What a failed call to the operating system means for the object of that name."""
    reason = os.strerror(error.errno) if error.errno else "unknown reason"
    if is_full(error):
        return OutOfSpace(f"the disk is full: {name} was not written")
    if error.errno in _REFUSED:
        return AccessDenied(f"no access to {name}: {reason}")
    if error.errno in _ABSENT:
        why = f": {reason}" if error.errno == errno.ENAMETOOLONG else ""
        return ObjectNotFound(f"there is no object {name[:_MAX_SHOWN]}{why}")
    return StoreUnavailable(f"{name}: {reason}")


@contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise error_of_system(error, name) from error


@contextmanager
def _folder_translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # The system names the folder that failed, which may be one deep within.
        name = str(error.filename or path)[-_MAX_SHOWN:]
        if error.errno in _ABSENT:
            raise DataNotFound(f"there is no folder {name}: {os.strerror(error.errno)}") from error
        raise error_of_system(error, f"the folder {name}") from error


def _read(handle: int, name: str, offset: int, length: int) -> tuple[bytes, str]:
    # Looked at first: a wrong length must not make Python set that much memory aside.
    status = os.fstat(handle)
    size = status.st_size
    if offset + length > size:
        raise ObjectNotFound(f"{name} has {size} bytes and ends before byte {offset + length}: it has changed")
    data = os.pread(handle, length, offset)
    if len(data) != length:
        raise StoreUnavailable(f"{name} gave {len(data)} of {length} bytes")
    return data, etag(status.st_mtime_ns, size)


_Identities = tuple[tuple[int, int], ...]


def _walk(
    root: Path, links: LinkBounds | None, start: str = "", above: _Identities = ()
) -> Iterator[tuple[str, os.stat_result]]:
    # Folders still to list, each with the folders above it, so that a link to one of those is not followed for ever.
    waiting: list[tuple[str, _Identities]] = [(start, above)]
    while waiting:
        prefix, above = waiting.pop()
        here = _folder_identity(root / prefix)
        if here in above:
            continue
        folders: list[str] = []
        yield from _of_folder(root, prefix, folders, links)
        waiting += [(name, (*above, here)) for name in folders]


def _of_folder(
    root: Path, prefix: str, folders: list[str], links: LinkBounds | None
) -> Iterator[tuple[str, os.stat_result]]:
    """The files of one folder; those in it are added to ``folders``."""
    if links is not None:
        links.check(os.path.realpath(root / prefix), prefix or str(root))
    with os.scandir(root / prefix) as entries:
        for entry in entries:
            name = prefix + entry.name
            if links is not None and entry.is_symlink():
                links.check(os.path.realpath(entry.path), name)
            if _holds(entry.is_dir):
                folders.append(f"{name}/")
            else:
                with suppress(FileNotFoundError):  # gone since the folder was read
                    # A link that leads nowhere, a pipe: what it is, not what it would lead to.
                    yield name, entry.stat(follow_symlinks=_holds(entry.is_file))


def _empty_folders(root: Path, prefix: str, deep: int) -> Iterator[str]:
    """Folders with nothing in them, among those that are no links; what cannot be looked into is passed over."""
    folders, has_files = list[str](), True
    with suppress(OSError), os.scandir(root / prefix) as entries:
        has_files = False
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            has_files = has_files or not is_folder
            folders += [f"{prefix}{entry.name}/"] if is_folder and deep else []
    if prefix and not (has_files or folders):
        yield prefix
    for folder in () if prefix and has_files else folders:
        yield from _empty_folders(root, folder, deep - 1)


def _holds(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError as error:
        if error.errno == errno.ELOOP:  # of a link that leads to itself, in whatever way
            return False
        raise


def _entries(files: Iterable[tuple[str, os.stat_result]]) -> Iterator[Entry]:
    for name, status in files:
        version = etag(status.st_mtime_ns, status.st_size)
        if _is_readable(name, status):
            yield Entry(name, status.st_size, version)
        else:
            shown = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
            yield Entry(shown, UNREADABLE, "")


def _folder_identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _place_of(handle: int, path: str) -> str:
    # Linux tells where an open file lies. PassOwner the name is followed again, which somebody may change meanwhile.
    try:
        return os.readlink(f"/proc/self/fd/{handle}")  # noqa: PTH115 (once for each read)
    except FileNotFoundError:
        return os.path.realpath(path)


def _is_readable(name: str, status: os.stat_result) -> bool:
    if not stat.S_ISREG(status.st_mode):
        return False
    if name.isascii():  # asked first, for it costs nothing: nearly all names are
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lock(handle: int, path: Path) -> None:
    if not try_lock(handle):
        raise DataError(f"another process is writing to {path}: let it end first")


def _replace(path: Path, data: Buffer, *, is_private: bool) -> None:
    partial = path.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
    try:
        with open_private(partial, "xb") if is_private else partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


# A map takes address space and a descriptor's place in the kernel, no memory of its own.
_MAX_MAPPED = 64
_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH

Identity = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Mapped:
    identity: Identity
    pages: mmap.mmap


class MmapFolder:
    """Reads objects that nobody may write to (``FolderStore.make_read_only``) from memory maps, and others as ever.

    A file that is cut short while it is mapped takes down the process that reads it, which is why only read-only ones
    are mapped. Safe for threads and forks.
    """

    def __init__(self, folder: FolderStore) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._mapped: LRUCache[str, _Mapped] = LRUCache(_MAX_MAPPED)

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``. Views of a map keep it alive, also when its object was replaced."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``."""
        path = self._folder.path_of(object)
        try:
            identity = _read_only_identity(path)
            mapped = None if identity is None else self._mapped_file(object, path, identity)
        except OSError as error:
            raise error_of_system(error, object) from error
        if mapped is None or not length:
            return self._folder.read_version(object, offset, length)
        pages = mapped.pages
        if offset + length > len(pages):
            raise ObjectNotFound(
                f"{object} has {len(pages)} bytes and ends before byte {offset + length}: it has changed"
            )
        start = offset - offset % mmap.PAGESIZE
        pages.madvise(mmap.MADV_WILLNEED, start, offset + length - start)
        _, _, size, mtime_ns = mapped.identity
        return memoryview(pages)[offset : offset + length], etag(mtime_ns, size)

    def _mapped_file(self, object: str, path: Path, identity: Identity) -> _Mapped | None:
        with self._lock:
            known = self._mapped.get(object)
            if known is None or known.identity != identity:
                known = self._map(object, path)
                if known is None:
                    return None
                self._mapped[object] = known
            return known

    def _map(self, object: str, path: Path) -> _Mapped | None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._folder.check_opened(handle, object)
            status = os.fstat(handle)
            # It may have been replaced since it was looked at; an empty file cannot be mapped.
            if status.st_mode & _WRITABLE or not status.st_size:
                return None
            return _Mapped(_file_identity(status), mmap.mmap(handle, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(handle)


def _read_only_identity(path: Path) -> Identity | None:
    status = path.stat()
    return None if status.st_mode & _WRITABLE or not stat.S_ISREG(status.st_mode) else _file_identity(status)


def _file_identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Objects(ObjectStore, Described, Sectioned, Prunable, Protocol):
    """A store of objects, such as a bucket's."""


class SingleFile(FolderStore):
    """A file of this machine as a folder that holds nothing else. Safe for threads and forks."""

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

    def empty_folders(self) -> Sequence[str]:
        """See ``HasFolders.empty_folders``; there are no folders."""
        return ()

    def list_dated(self) -> Iterator[Dated]:
        """See ``Prunable.list_dated``; nothing is pruned."""
        return iter(())

    def write(self, object: str, data: Buffer) -> None:  # noqa: ARG002
        """Refuse, so that nothing is put beside a file that was named alone.

        Raises:
            AccessDenied: Every call raises it.
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
            AccessDenied: The folder's place is taken by an object.
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


def base_url(store: object, url: str) -> str:
    """The URL of the folder to which names in a store's tables are relative: of a single file, the one it lies in.

    Args:
        store: store that holds the tables.
        url: URL of its root.
    """
    return store.folder_url if isinstance(store, SingleFile | FileOrFolder) else url


def _refused(url: str) -> AccessDenied:
    return AccessDenied(f"{url} is a single file: nothing is written beside it")
