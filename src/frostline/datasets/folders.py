"""Decides what of a store's listing is a labelled image: class folders, one folder a class."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline.stores.faces import Entry

__all__ = ("IMAGE_SUFFIXES", "Listing", "list_images", "suffix_of")

IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})

# Part of every digest: raise it whenever the same files would give another table.
_RULE = "frostline image folders 1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listing:
    """The labelled images of a store, ordered by name.

    Attributes:
        objects: their names.
        lengths: ``int64[n]``, their sizes in bytes.
        etags: of each, as the store gives them.
        labels: ``int64[n]``, index into ``classes``.
        classes: names of the folders that hold images, ordered.
        without_class: images that stand in no folder; they are left out.
        digest: SHA-256 of names, sizes and etags: equal listings have equal digests.
    """

    objects: list[str]
    lengths: npt.NDArray[np.int64]
    etags: list[str]
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    without_class: int
    digest: str


def list_images(entries: Iterable[Entry]) -> Listing:
    """Pick the labelled images out of a store's listing.

    The first folder of a name is the class; deeper folders belong to it. Names with a part that starts with a
    dot and names without the suffix of an image are passed over.
    """
    images = sorted(entry for entry in entries if _is_image(entry.object))
    labelled = [entry for entry in images if "/" in entry.object]
    folders = [entry.object.partition("/")[0] for entry in labelled]
    classes = tuple(sorted(set(folders)))
    number = {name: index for index, name in enumerate(classes)}
    return Listing(
        objects=[entry.object for entry in labelled],
        lengths=np.array([entry.size for entry in labelled], np.int64),
        etags=[entry.etag for entry in labelled],
        labels=np.array([number[folder] for folder in folders], np.int64),
        classes=classes,
        without_class=len(images) - len(labelled),
        digest=_digest(labelled),
    )


def suffix_of(name: str) -> str:
    """The suffix of an object's name in lower case, with its dot; empty where there is none."""
    base = name.rpartition("/")[2]
    dot = base.rfind(".")
    return base[dot:].lower() if dot > 0 else ""


def _is_image(name: str) -> bool:
    return suffix_of(name) in IMAGE_SUFFIXES and not name.startswith(".") and "/." not in name


def _digest(entries: list[Entry]) -> str:
    # A name holds no NUL, so that the columns cannot run into each other.
    rows = [f"{entry.object}\0{entry.size}\0{entry.etag}\0" for entry in entries]
    return hashlib.sha256("".join((_RULE, "\0", *rows)).encode()).hexdigest()
