"""Opens what a sample's address is read from: the one function that knows the readings."""

from frostline.core import OBJECTS
from frostline.errors import BadRequest
from frostline.stores.faces import Versioned
from frostline.stores.folder import FolderStore
from frostline.stores.mapped import MappedFolder
from frostline.stores.objects import open_store

__all__ = ("open_samples",)


def open_samples(url: str, reading: str = OBJECTS, *, mapped: bool = False) -> Versioned:
    """What gives the bytes at the addresses of a data set's samples.

    Args:
        url: of its root.
        reading: how the bytes are found: one of ``core.READINGS``.
        mapped: from memory maps, where that is a local folder and the objects are sealed.

    Raises:
        BadRequest: there is no such reading.
        SettingError: the URL is none that Frostline reads.
    """
    if reading != OBJECTS:
        raise BadRequest(f"reading: there is no {reading[:50]!r}")
    store = open_store(url)
    return MappedFolder(store) if mapped and isinstance(store, FolderStore) else store
