"""Reads samples that lie in compressed tars, from plain copies of these."""

from frostline.config import cache_folder
from frostline.datasets.archives.copies import CompressedTar, TarCopies
from frostline.errors import DataError, ObjectNotFound
from frostline.stores.base.protocols import Buffer, Entry, ObjectStore, Versioned
from frostline.stores.objects.local import FolderStore
from frostline.stores.objects.single import beside

__all__ = ("TarReader", "tar_reader")


class TarReader:
    """A ``Versioned`` whose objects are compressed tars, read at places of the unpacked ones. Safe for threads.

    Args:
        store: store that holds the tars.
        url: address of the folder to which their names are relative.
        copies: keeps them unpacked.
    """

    def __init__(self, store: Versioned, url: str, copies: TarCopies) -> None:
        self._store = store
        self._url = url
        self._copies = copies
        self._open: dict[str, tuple[FolderStore, str]] = {}

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``; the first read of a tar unpacks it, where no copy is there.

        Raises:
            ObjectNotFound: it is not what it was when it was listed.
        """
        tar = CompressedTar.parse(object)
        try:
            return self._read(tar, object, offset, length), tar.version
        except ObjectNotFound:
            if self._open.pop(object, None) is None:
                raise
        # The copy was there before, and somebody may have removed it.
        return self._read(tar, object, offset, length), tar.version

    def entry_of(self, tar: CompressedTar) -> Entry:
        """The entry of a tar, of the size that it has unpacked; raises as ``TarCopies.path_of`` does."""
        size = self._copies.path_of(self._store, self._url, tar).stat().st_size
        return Entry(tar.file, size, tar.version)

    def within(self, tar: CompressedTar) -> Versioned:
        """The same reader under the name that the tar has in its store, as a listing knows it."""
        return _Named(self, str(tar))

    def _read(self, tar: CompressedTar, object: str, offset: int, length: int) -> Buffer:
        found = self._open.get(object)
        if found is None:
            found = self._open[object] = self._opened(tar)
        folder, name = found
        return folder.read(name, offset, length)

    def _opened(self, tar: CompressedTar) -> tuple[FolderStore, str]:
        try:
            path = self._copies.path_of(self._store, self._url, tar)
        except DataError as error:  # what is wrong with it was said when it was listed
            raise ObjectNotFound(f"{error}; it may have changed since it was listed") from error
        return FolderStore(str(path.parent)), path.name


class _Named:
    """One object of a reader, whatever it is called."""

    def __init__(self, reader: TarReader, object: str) -> None:
        self._reader = reader
        self._object = object

    def read(self, object: str, offset: int, length: int) -> Buffer:
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:  # noqa: ARG002
        return self._reader.read_version(self._object, offset, length)


def tar_reader(store: ObjectStore) -> TarReader:
    """What reads samples in the compressed tars of a store, from copies in the user's cache folder."""
    return TarReader(store, beside(store, store.url), TarCopies(cache_folder() / "unpacked"))
