"""Images in class folders: decides what of a store's listing is a labelled image, one folder a class."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from frostline.datasets.forms.faces import COLUMNS, Listed, digest_of, is_hidden
from frostline.datasets.ids import stable_ids
from frostline.errors import EmptyDataset
from frostline.stores.faces import Entry, ObjectStore

__all__ = ("IMAGE_SUFFIXES", "ClassFolders", "is_image", "suffix_of")

IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".npy", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})

# Part of every digest: raise it whenever the same files would give another table.
_RULE = "frostline image folders 2"


class ClassFolders:
    """The first folder of a name is the class; deeper folders belong to it.

    Names with a part that starts with a dot and names without the suffix of an image are passed over.
    """

    name = "folders"

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Form.claims``: one image in a folder is enough."""
        return any(_is_labelled(entry.object) for entry in entries)

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Form.digest``."""
        return digest_of(_RULE, _labelled(entries))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: Listed | None = None) -> Listed:  # noqa: ARG002
        """See ``Form.read``; nothing but the listing is needed."""
        labelled = sorted(_labelled(entries))
        if not labelled:
            raise EmptyDataset(_nothing_at(store.url, entries))
        names = [entry.object for entry in labelled]
        folders = [name.partition("/")[0] for name in names]
        classes = tuple(sorted(set(folders)))
        number = {name: index for index, name in enumerate(classes)}
        objects = pa.array(names, pa.string())
        columns = [
            pa.array(stable_ids(names)),
            objects,
            objects,
            pa.array(np.zeros(len(names), np.int64)),
            pa.array([entry.size for entry in labelled], pa.int64()),
            pa.array([number[folder] for folder in folders], pa.int64()),
            pa.array([entry.etag for entry in labelled], pa.string()),
        ]
        return Listed(table=pa.table(columns, schema=COLUMNS), classes=classes, digest=digest_of(_RULE, labelled))


def suffix_of(name: str) -> str:
    """The suffix of an object's name in lower case, with its dot; empty where there is none."""
    base = name.rpartition("/")[2]
    dot = base.rfind(".")
    return base[dot:].lower() if dot > 0 else ""


def is_image(name: str) -> bool:
    """Whether an object's name is that of an image, and not hidden."""
    return suffix_of(name) in IMAGE_SUFFIXES and not is_hidden(name)


def _is_labelled(name: str) -> bool:
    return "/" in name and is_image(name)


def _labelled(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if _is_labelled(entry.object)]


def _nothing_at(url: str, entries: Sequence[Entry]) -> str:
    images = sum(is_image(entry.object) for entry in entries)
    beside = f"; {images} images stand in no class folder" if images else ""
    return f"{url} holds no images in class folders (such as cats/1.jpg){beside}"
