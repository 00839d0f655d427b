"""Opens what a sample's address is read from: the one function that knows the readings."""

from frostline.core import CELLS, OBJECTS, UNPACKED, URLS
from frostline.datasets.archives.copies import CompressedTar
from frostline.datasets.archives.reader import tar_reader
from frostline.datasets.formats.url_reader import UrlReader
from frostline.datasets.parquet.cells import Cell, CellCache, CellReader
from frostline.errors import BadRequest
from frostline.stores.base.limits import NO_LIMITS, StoreLimits
from frostline.stores.base.protocols import Versioned
from frostline.stores.base.urls import check_name
from frostline.stores.objects.local import FolderStore
from frostline.stores.objects.mmap import MmapFolder
from frostline.stores.open import open_store

__all__ = ("check_object", "open_samples")


def open_samples(
    url: str,
    reading: str = OBJECTS,
    *,
    mapped: bool = False,
    cells: CellCache | None = None,
    roots: tuple[str, ...] | None = None,
    limits: StoreLimits = NO_LIMITS,
) -> Versioned:
    """What gives the bytes at the addresses of a data set's samples.

    Args:
        url: address of the data set's root.
        reading: how the bytes are found: one of ``core.READINGS``.
        mapped: from memory maps, where that is a local folder and the objects are sealed.
        roots: canonical URLs of places in which objects that are URLs may lie; by default that of the data alone.
        cells: where decoded columns are kept, if cells are read; by default a cache of its own.
        limits: limits on the stores that may be read.

    Raises:
        BadRequest: the reading is unknown.
        SettingError: the URL is none that Frostline reads.
    """
    store = open_store(url, limits)
    match reading:
        case _ if reading == OBJECTS:
            return MmapFolder(store) if mapped and isinstance(store, FolderStore) else store
        case _ if reading == CELLS:
            return CellReader(store, cells or CellCache(), store.url)
        case _ if reading == URLS:
            return UrlReader((store.url,) if roots is None else roots, limits)
        case _ if reading == UNPACKED:
            return tar_reader(store)
        case _:
            raise BadRequest(f"reading: there is no {reading[:50]!r}")


def check_object(object: str, reading: str) -> None:
    """Do nothing if the name of a sample's object makes sense in a reading, and stays within the data.

    Raises:
        BadRequest: the name makes no sense, or leads out of the data.
    """
    if reading != URLS:  # of those the reader knows what they may be
        check_name(_file_of(object, reading))


def _file_of(object: str, reading: str) -> str:
    if reading == UNPACKED:
        return CompressedTar.parse(object).file
    return Cell.parse(object).file if reading == CELLS else object
