"""Images and their masks, side by side: decides from the listing's names which mask belongs to which image."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from frostline.datasets.formats.base import COLUMNS, TARGET_COLUMNS, ListedSamples, digest_of, stable_ids
from frostline.datasets.formats.folders import is_image
from frostline.datasets.formats.targets import NO_MASK, Mask, known_sizes, size_at, target_columns
from frostline.errors import DataError, EmptyDataset
from frostline.stores.base.listing import Entries
from frostline.stores.base.protocols import Entry, ObjectStore, Versioned

__all__ = ("MaskPairs", "Pair", "names_a_class", "pairs_of")

# Part of every digest: raise it whenever the same files would give another table.
_RULE = "frostline masks 2"
_THREADS = 16

_IMAGE_FOLDERS = frozenset({"image", "images", "img", "imgs", "jpegimages", "leftimg8bit"})
_MASK_FOLDERS = frozenset(
    {
        "annotation", "annotations", "ground_truth", "gt", "gtcoarse", "gtfine", "label", "labels", "mask", "masks",
        "segmentation", "segmentationclass", "segmentationclassaug", "segmentations", "trimaps",
    }
)  # fmt: skip
# Folders of masks that say nothing of images without one: others of their images are there for other tasks.
_SOME_ONLY = frozenset({"segmentationclass", "segmentationclassaug"})
_IMAGE_ENDS = ("_leftimg8bit", "_sat", "_image")
# Of several masks of an image the first of these is taken; the ones before None name masks wherever they lie.
_MASK_ENDS = (
    "_gtfine_labeltrainids", "_gtfine_labelids", "_gtcoarse_labeltrainids", "_gtcoarse_labelids", "_segmentation",
    "_mask",
)  # fmt: skip
_ENDS_IN_FOLDERS = (*_MASK_ENDS, "_masks", "_label", "_labels", "_seg", "_gt")
_FOLDER_END = "_masks"
# What the names of all masks have in them, and those of some other objects.
_LIKELY = "(?i)annotation|ground_truth|gt|label|mask|segmentation|trimaps"
_FOLDERS_AT_HAND = 4096


class Pair(NamedTuple):
    """An image and its mask.

    Attributes:
        image: entry of the image.
        mask: entry of its mask; None where there is none.
        folder: the first folder that names neither images nor masks; empty where there is none.
    """

    image: Entry
    mask: Entry | None
    folder: str


class _Place(NamedTuple):
    """What a name says of an object.

    Attributes:
        key: name without the part that tells images from masks: the same for both of a pair.
        is_mask: it is a mask.
        rank: precedence of the mask: of several masks of an image, the lowest rank counts.
        is_some_only: masks like it belong to some of the images.
    """

    key: str
    is_mask: bool
    rank: int = 0
    is_some_only: bool = False


class MaskPairs:
    """``images/1.jpg`` and ``masks/1.png``, and the other ways in which the two commonly lie side by side.

    Folders tell them apart (``images`` and ``masks`` at any depth, ``JPEGImages`` and ``SegmentationClass``,
    ``leftImg8bit`` and ``gtFine``, ``train`` and ``train_masks``), or the ends of names (``1.tif`` and ``1_mask.tif``).
    What is left of the two names is the same. The first folder that is left is the class. An image without a mask is
    a sample without one, but in the layout of Pascal VOC, where it belongs to other tasks.
    """

    name = "masks"
    is_incremental = True

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one pair is enough."""
        # Most listings are of other formats, and may be of millions: one look at each name tells.
        likely = Entries.of(entries).matching(_LIKELY)
        masks = {place.key for _, place in _placed(likely) if place.is_mask}
        return bool(masks) and any(place.key in masks for _, place in _placed(entries) if not place.is_mask)

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of(_RULE, (entry for entry in entries if is_image(entry.object)))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``; of images that are new or have changed, the head is read: masks must be as large."""
        pairs = pairs_of(entries)
        if not pairs:
            raise EmptyDataset(f"{store.url} holds no images with masks (such as images/1.jpg and masks/1.png)")
        classes = tuple(sorted({pair.folder for pair in pairs} - {""}))
        number = {name: index for index, name in enumerate(classes)}
        names = pa.array([pair.image.object for pair in pairs], pa.string())
        sizes = _sizes(store, [pair.image for pair in pairs], before)
        columns = {
            "id": pa.array(stable_ids(names.to_pylist())),
            "name": names,
            "object": names,
            "offset": pa.array(np.zeros(len(pairs), np.int64)),
            "length": pa.array([pair.image.size for pair in pairs], pa.int64()),
            "label": pa.array([number.get(pair.folder, -1) for pair in pairs], pa.int64()),
            "etag": pa.array([pair.image.etag for pair in pairs], pa.string()),
            **target_columns([_mask(pair.mask) for pair in pairs], sizes),
        }
        schema = pa.unify_schemas([COLUMNS, TARGET_COLUMNS])
        return ListedSamples(table=pa.table(columns, schema=schema), classes=classes, digest=self.digest(entries))


def pairs_of(entries: Iterable[Entry]) -> list[Pair]:
    """The images of a listing in the order of their names, each with its mask.

    Raises:
        DataError: two images, or two masks, have one name but for their suffix.
    """
    images: dict[str, Entry] = {}
    masks: dict[str, tuple[int, Entry]] = {}
    some_only = False
    for entry, place in _placed(sorted(entries)):
        if not place.is_mask:
            if place.key in images:
                raise DataError(_twice(images[place.key], entry, "the images of one sample"))
            images[place.key] = entry
            continue
        some_only |= place.is_some_only
        known = masks.get(place.key)
        if known is not None and known[0] == place.rank:
            raise DataError(_twice(known[1], entry, "the mask of one image"))
        if known is None or place.rank < known[0]:
            masks[place.key] = (place.rank, entry)
    if not masks.keys() & images.keys():
        return []
    found = ((key, image, masks[key][1] if key in masks else None) for key, image in images.items())
    return [Pair(image, mask, _folder_of(key)) for key, image, mask in found if mask or not some_only]


def _mask(entry: Entry | None) -> Mask:
    return NO_MASK if entry is None else Mask(entry.object, 0, entry.size, entry.etag)


def names_a_class(folder: str) -> bool:
    """Whether a folder of that name, of images or of masks, is taken for that of a class."""
    return "/" not in folder and _left_of(folder) == folder


def _twice(one: Entry, other: Entry, what: str) -> str:
    return f"{one.object} and {other.object} would both be {what}: leave one of them in the place"


def _folder_of(key: str) -> str:
    folder, slash, _ = key.partition("/")
    return folder if slash else ""


def _placed(entries: Iterable[Entry]) -> Iterator[tuple[Entry, _Place]]:
    for entry in entries:
        if is_image(entry.object):
            yield entry, _place(entry.object)


def _place(name: str) -> _Place:
    folder, _, base = name.rpartition("/")
    stem = base.rpartition(".")[0]
    left, is_mask, is_image_folder, is_some_only = _folders(folder)
    end = _end_of(stem, _ENDS_IN_FOLDERS if is_mask else _MASK_ENDS)
    if is_mask or (end and not is_image_folder):
        rank = _ENDS_IN_FOLDERS.index(end) if end else len(_ENDS_IN_FOLDERS)
        return _Place(left + stem[: len(stem) - len(end)], True, rank, is_some_only)
    return _Place(left + stem[: len(stem) - len(_end_of(stem, _IMAGE_ENDS))], False)


def _end_of(stem: str, ends: Iterable[str]) -> str:
    small = stem.lower()
    return next((end for end in ends if small.endswith(end) and len(small) > len(end)), "")


@lru_cache(_FOLDERS_AT_HAND)
def _folders(folder: str) -> tuple[str, bool, bool, bool]:
    """What is left of a folder's path, whether masks or images lie there, and whether of some images alone."""
    parts = folder.split("/") if folder else []
    small = [part.lower() for part in parts]
    is_mask = any(part in _MASK_FOLDERS or _is_of_masks(part) for part in small)
    left = [_left_of(part) for part in parts]
    path = "".join(f"{part}/" for part in left if part)
    return path, is_mask, any(part in _IMAGE_FOLDERS for part in small), bool(_SOME_ONLY & set(small))


def _left_of(part: str) -> str:
    if part.lower() in _IMAGE_FOLDERS or part.lower() in _MASK_FOLDERS:
        return ""
    return part[: -len(_FOLDER_END)] if _is_of_masks(part.lower()) else part


def _is_of_masks(part: str) -> bool:
    return part.endswith(_FOLDER_END) and len(part) > len(_FOLDER_END)


def _sizes(store: Versioned, images: Sequence[Entry], before: ListedSamples | None) -> list[tuple[int, int]]:
    known = known_sizes(before)
    with ThreadPoolExecutor(_THREADS, "frostline-index") as threads:
        return list(threads.map(partial(_size, store, known), images))


def _size(store: Versioned, known: Mapping[tuple[str, str], tuple[int, int]], image: Entry) -> tuple[int, int]:
    found = known.get((image.object, image.etag))
    return size_at(store, image.object, 0, image.size) if found is None else found
