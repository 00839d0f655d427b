"""Decides where manifests and splits of a data set are kept: beside the data, or in the user's cache folder."""

from frostline.errors import StoreError
from frostline.stores.base.protocols import Readable
from frostline.stores.objects.local import FolderStore

__all__ = ("LAST_MANIFEST", "lies_beside")

LAST_MANIFEST = ".frostline/last-manifest.json"
"""Says beside the data which manifest was built last."""


def lies_beside(store: Readable, *, is_asked: bool) -> bool:
    """Whether they are kept beside the data: in an object store always, in a folder where somebody asked for it.

    Whoever reads a local folder by its names, as ``torchvision.datasets.ImageFolder`` does, would take one more folder
    in it for a class. A folder that has a manifest beside it goes on having it there.
    """
    if is_asked or not isinstance(store, FolderStore):
        return True
    try:
        store.read(LAST_MANIFEST, 0, 1)
    except StoreError:
        return False
    return True
