"""Images, sounds and masks in class folders, or in those of splits: which of a listing belongs to which."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.errors import DataError, EmptyDataset
from frostline.datasets.formats.base import (
    COLUMNS,
    TARGET_COLUMNS,
    ListedSamples,
    digest_of,
    label_column,
    stable_ids,
)
from frostline.datasets.formats.labels import (
    CLASSES,
    SPLIT,
    are_divided,
    classes_in,
    folder_splits,
    inner_splits,
    is_split,
    training_split,
)
from frostline.datasets.formats.left_out import are_hidden, is_hidden
from frostline.preprocess.images import size_of
from frostline.stores.protocols import Entries, Entry, Names, ObjectStore, Readable, Versioned
from frostline.stores.urls import COMPRESSED

__all__ = (
    "IMAGE_SUFFIXES",
    "KINDS",
    "MASK_FIELDS",
    "NO_MASK",
    "SAMPLE_SUFFIXES",
    "SOUND_SUFFIXES",
    "ClassFolderFormat",
    "Mask",
    "MaskPairs",
    "Pair",
    "Size",
    "are_masks",
    "fill_masks",
    "is_image",
    "is_sample",
    "known_sizes",
    "names_a_class",
    "pairs_of",
    "samples_in_folders",
    "size_at",
    "suffix_of",
    "table_log",
    "target_columns",
    "twin_folders",
)


IMAGE_SUFFIXES = frozenset(
    {
        ".avif", ".bmp", ".gif", ".heic", ".heif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".jpx",
        ".npy", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp",
    }
)  # fmt: skip
SOUND_SUFFIXES = frozenset({".flac", ".ogg", ".opus", ".wav"})
KINDS = (IMAGE_SUFFIXES, SOUND_SUFFIXES)
"""Suffixes of each kind of samples: where several lie in one place, the first of them are the samples."""
SAMPLE_SUFFIXES = frozenset[str]().union(*KINDS)

_FOLDERS = r"(?P<first>[^/]*)/(?:(?P<second>[^/]*)/)?"

# Part of every digest: raise it whenever the same files would give another table.
_FOLDER_RULE = "frostline image folders 10"
# One look at each name tells of most listings that no class has a folder to train on.
_INNER_TRAINED = "(?i)^[^/]+/train(ing)?/"
# Folders around those of splits, each of which is looked for in all names.
_DEEPEST = 8


# A larger one is no table of classes, whose names stand in every manifest.
_TABLE_BYTES = 64 << 20


class _Layout(NamedTuple):
    """Where splits and classes stand in the names.

    Attributes:
        prefix: folder around all others, with its slash; empty where the first folder is the class or the split.
        splits: split of each folder that is one; empty where there are none.
        is_inner: the folders of splits lie within those of classes.
    """

    prefix: str = ""
    splits: Mapping[str, str] = {}
    is_inner: bool = False

    @property
    def of_splits(self) -> str:
        """Which of the two folders is called as its split is."""
        return "second" if self.is_inner else "first"


class ClassFolderFormat:
    """The first folder of a name is the class; deeper folders belong to it.

    Where first folders are called as splits are, such as ``train`` and ``val``, and have their images in folders of
    their own, the first is the split and the second the class. Such a folder may also have no class folders at all, or
    ``images`` alone, but for one to train on: its images have no label. Images in other folders beside those of splits
    are in none and have no label. The folders of splits may lie in one folder that holds everything, or in several,
    one within the other. They may also lie within those of classes, each of which has one to train on; what lies
    beside them is in no split.

    Where ``classes.json`` beside the folders is a list of names, with those of all folders among them, it says how
    classes are numbered, and that none of them is a split; else classes are in the order of their names.

    Where no image lies in a folder, those that lie in none are the samples, without classes.

    Names with a part that starts with a dot and names without the suffix of an image are passed over. Where there are
    no images, sounds are the samples.
    """

    name = "folders"
    is_incremental = False

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one image in a folder is enough; images in none may be what lists beside them name."""
        return len(samples_in_folders(entries)) > 0

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of(f"{_FOLDER_RULE}{_version_of_table(entries)}", _listed(entries))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:  # noqa: ARG002
        """See ``Format.read``; nothing but the listing is needed."""
        labelled = _listed(entries).in_order()
        if not labelled:
            raise EmptyDataset(_nothing_at(store.url, entries))
        objects, sizes, etags = labelled.table.columns
        named = _table_of_classes(store, entries)
        layout = _layout(labelled, named)
        labels, folders = _classes(labelled, layout)
        table_of_classes = named if set(folders) <= set(named) else ()
        classes = table_of_classes or folders
        labels = _renumbered(labels, folders, classes)
        ids, offsets = stable_ids(Names(objects)), np.zeros(len(labelled), np.int64)
        columns = [pa.array(ids), objects, objects, pa.array(offsets), sizes, label_column(labels), etags]
        table = pa.table(columns, schema=COLUMNS)
        if layout.splits:
            splits = [_split_names(part, layout) for part in _folders_behind(labelled, layout.of_splits, layout.prefix)]
            table = table.append_column(SPLIT, pa.chunked_array(splits, pa.string()))
        return ListedSamples(
            table=table,
            classes=classes,
            digest=self.digest(entries),
            divided_by_names=bool(layout.splits),
            has_named_classes=True,
            used=(CLASSES,) if table_of_classes else (),
        )


def _version_of_table(entries: Sequence[Entry]) -> str:
    """What stands for the table of classes beside class folders in a digest; empty where there is none."""
    found = Entries.of(entries).find(CLASSES)
    return "" if found is None else f" {found.size} {found.etag}"


def _table_of_classes(store: Readable, entries: Sequence[Entry]) -> tuple[str, ...]:
    """The classes that ``classes.json`` beside the folders names; empty where it is not there, or is no such table."""
    found = Entries.of(entries).find(CLASSES)
    if found is None or not 0 < found.size <= _TABLE_BYTES:
        return ()
    return classes_in(bytes(store.read(found.object, 0, found.size)))


def _renumbered(labels: npt.NDArray[np.int64], folders: Sequence[str], classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """Labels that are numbers of folders as those of classes; -1 stays."""
    if folders == classes:
        return labels
    number = {name: place for place, name in enumerate(classes)}
    return np.array([*(number[name] for name in folders), -1], np.int64)[labels]


def suffix_of(name: str) -> str:
    """The suffix of an object's name in lower case, with its dot; empty where there is none."""
    base = name.rpartition("/")[2]
    dot = base.rfind(".")
    return base[dot:].lower() if dot > 0 else ""


def is_image(name: str) -> bool:
    """Whether an object's name is that of an image, and not hidden."""
    return suffix_of(name) in IMAGE_SUFFIXES and not is_hidden(name)


def is_sample(name: str) -> bool:
    """Whether an object's name is that of an image or a sound, and not hidden."""
    return suffix_of(name) in SAMPLE_SUFFIXES and not is_hidden(name)


def _listed(entries: Sequence[Entry]) -> Entries:
    """The samples: what lies in folders, else what lies in none."""
    found = samples_in_folders(entries)
    return found if len(found) else _of_kind(entries, in_folders=False)


def samples_in_folders(entries: Sequence[Entry]) -> Entries:
    """The samples of a listing that lie in folders: of the first kind that there is, and not hidden."""
    return _of_kind(entries, in_folders=True)


def _of_kind(entries: Sequence[Entry], *, in_folders: bool) -> Entries:
    """Samples of the first kind that there is, and not hidden."""
    for suffixes in KINDS[:-1]:
        if len(found := _with_suffix(entries, suffixes, in_folders=in_folders)):
            return found
    return _with_suffix(entries, KINDS[-1], in_folders=in_folders)


def _with_suffix(entries: Sequence[Entry], suffixes: Iterable[str], *, in_folders: bool) -> Entries:
    """The objects of these suffixes: as ``suffix_of`` decides, for a column of names."""
    pattern = rf"(?i)[^/]\.(?:{'|'.join(sorted(suffix[1:] for suffix in suffixes))})$"
    found = Entries.of(entries)
    objects = found.table["object"]
    fits = pc.and_not(pc.match_substring_regex(objects, pattern), are_hidden(objects))
    is_inside = pc.match_substring(objects, "/")
    return found.where(pc.and_(fits, is_inside if in_folders else pc.invert(is_inside)))


def _folders_behind(labelled: Entries, which: str, prefix: str) -> Iterator[pa.Array]:
    """The first or the second folder of each name behind a prefix, some names at a time; empty where there is none."""
    pattern = f"^{re.escape(prefix)}{_FOLDERS}"
    for piece in labelled.pieces():
        yield pc.fill_null(pc.struct_field(pc.extract_regex(piece["object"], pattern), which), "")


def _layout(labelled: Entries, named: Sequence[str]) -> _Layout:
    """Whether first folders are splits, or those in the one folder that holds everything, or those of each class."""
    firsts, are_classes = _different(labelled, ""), bool(named)
    if are_classes and firsts <= set(named):
        return _inner_layout(labelled)
    if splits := folder_splits(firsts, lambda: _pairs(labelled, ""), are_classes=are_classes):
        return _Layout("", splits)
    prefix = ""
    for _ in range(_DEEPEST):
        if len(firsts) > 1 or "" in firsts:
            break
        prefix += f"{firsts.pop()}/"
        firsts = _different(labelled, prefix)
        pairs = partial(_pairs, labelled, prefix)
        splits = folder_splits(firsts, pairs, are_classes=are_classes) if "" not in firsts else {}
        if are_divided(splits.values()):
            return _Layout(prefix, splits)
    return _inner_layout(labelled)


def _inner_layout(labelled: Entries) -> _Layout:
    inner = inner_splits(_pairs(labelled, "")) if len(labelled.filter_pattern(_INNER_TRAINED)) else {}
    return _Layout("", inner, is_inner=True)


def _different(labelled: Entries, prefix: str) -> set[str]:
    return {name for firsts in _folders_behind(labelled, "first", prefix) for name in pc.unique(firsts).to_pylist()}


def _pairs(labelled: Entries, prefix: str) -> set[tuple[str, str]]:
    """The pairs of first and second folder that there are."""
    found: set[tuple[str, str]] = set()
    for both in zip(
        _folders_behind(labelled, "first", prefix), _folders_behind(labelled, "second", prefix), strict=True
    ):
        different = pa.table(list(both), names=["first", "second"]).group_by(["first", "second"]).aggregate([])
        found.update(zip(different["first"].to_pylist(), different["second"].to_pylist(), strict=True))
    return found


def _split_names(folders: pa.Array, layout: _Layout) -> pa.Array:
    """The split that each folder is; null where it is none."""
    found = folders.dictionary_encode()
    splits = pa.array([layout.splits.get(name) for name in found.dictionary.to_pylist()], pa.string())
    return splits.take(found.indices)


def _class_folders(labelled: Entries, layout: _Layout) -> Iterator[pa.Array]:
    """The folder of each name that is its class; empty where it has none."""
    if not layout.splits or layout.is_inner:
        yield from _folders_behind(labelled, "first", "")
        return
    bare = pa.array(sorted(_bare_splits(labelled, layout)), pa.string())
    seconds = _folders_behind(labelled, "second", layout.prefix)
    for first, second in zip(_folders_behind(labelled, "first", layout.prefix), seconds, strict=True):
        has_classes = pc.and_not(pc.is_valid(_split_names(first, layout)), pc.is_in(first, value_set=bare))
        yield pc.if_else(has_classes, second, "")


def _bare_splits(labelled: Entries, layout: _Layout) -> set[str]:
    """The folders of splits to score all of whose images lie in ``images`` or the like, which none to train on has."""
    within = f"(?i)^{re.escape(layout.prefix)}[^/]+/({'|'.join(sorted(_IMAGE_FOLDERS))})/"
    if not len(labelled.filter_pattern(within)):
        return set()
    inner: dict[str, set[str]] = {}
    for first, second in _pairs(labelled, layout.prefix):
        inner.setdefault(first, set()).add(second)
    trained = {name for first in inner if training_split([layout.splits.get(first, "")]) for name in inner[first]}
    return {
        first
        for first, names in inner.items()
        if len(names) == 1 and not names & trained and {name.lower() for name in names} <= _IMAGE_FOLDERS
    }


def _classes(labelled: Entries, layout: _Layout) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """The label of each name, and the names of the classes: of their folders, in their order."""
    seen: dict[str, int] = {}
    labels = np.empty(len(labelled), np.int64)
    done = 0
    for folders in _class_folders(labelled, layout):
        found = folders.dictionary_encode()
        numbers = np.array([seen.setdefault(name, len(seen)) for name in found.dictionary.to_pylist()], np.int64)
        labels[done : done + len(found)] = numbers[found.indices.to_numpy()]
        done += len(found)
    classes = tuple(sorted(seen.keys() - {""}))
    place = np.full(len(seen), -1, np.int64)
    place[[seen[name] for name in classes]] = np.arange(len(classes))
    return place[labels], classes


_SHARD_INDEX = "index.json"
# What shards of formats that are not read are called, as their writers name them.
_UNREAD = (
    (re.compile(r"(^|/)shard\.\d+\.mds(\.\w+)?$"), "MDS shards of MosaicML's streaming"),
    (re.compile(r"(^|/)chunk-\d+-\d+\.bin$|(^|/)chunk-\d+-\d+\.[\w.]+\.bin$"), "chunks of LitData"),
)
_LANCE = (re.compile(r"(^|/)data/[^/]+\.lance$"), "files of a Lance data set")
# What says which files of a table still count.
_LOGS = (
    (r"(^|/)_delta_log/.", "Delta"),
    (r"(^|/)metadata/[^/]+\.metadata\.json$", "Iceberg"),
    (r"(^|/)\.hoodie/.", "Hudi"),
)


def table_log(entries: Sequence[Entry]) -> str:
    """What is said of a table whose log tells which of its files count; empty where there is none."""
    for pattern, kind in _LOGS:
        if len(found := Entries.of(entries).filter_pattern(pattern)):
            return (
                f"; {found.in_order()[0].object} belongs to a table of {kind}, whose log says which of its files still "
                "count, and Frostline does not read it: write the rows out as plain Parquet, or read every file there "
                "is by format='parquet' (--format parquet)"
            )
    return ""


def _unread(entries: Sequence[Entry]) -> str:
    """What is said of shards that other libraries wrote; empty where there are none."""
    has_index = any(entry.object.rpartition("/")[2] == _SHARD_INDEX for entry in entries)
    for pattern, kind in (*(_UNREAD if has_index else ()), _LANCE):
        found = next((entry.object for entry in entries if pattern.search(entry.object)), None)
        if found is not None:
            return (
                f"; {found} is one of the {kind}, which Frostline does not read: write the samples out with that "
                "library, as files in class folders, WebDataset shards or Parquet"
            )
    return ""


def _nothing_at(url: str, entries: Sequence[Entry]) -> str:
    beside = ""
    packed = next((entry.object for entry in entries if entry.object.lower().endswith(COMPRESSED)), None)
    if packed is not None:
        beside += (
            f"; {packed} is compressed as a whole and cannot be read at an offset: unpack it, to a plain tar at most"
        )
    said = _unread(entries) or table_log(entries) or ("" if beside else _what_is_there(entries))
    return f"{url} holds no images or sounds, in class folders (such as cats/1.jpg) or in none{beside}{said}"


def _what_is_there(entries: Sequence[Entry]) -> str:
    """The suffixes that most objects have, each with one of them; empty where nothing is there."""
    found: dict[str, list[str]] = {}
    for entry in sorted(entries):
        found.setdefault(suffix_of(entry.object), []).append(entry.object)
    most = sorted(found.items(), key=lambda names: -len(names[1]))[:_NAMED_SUFFIXES]
    kinds = (f"{len(names)} {suffix or 'without a suffix'} ({names[0]})" for suffix, names in most)
    return f"; of other objects there are {', '.join(kinds)}" if found else ""


_NAMED_SUFFIXES = 3


MASK_FIELDS = ("mask", "masks", "segmentation", "segmentation_mask", "annotation", "seg")
"""Columns, and kinds of members of shards, that hold a sample's mask or say where it is; the first that is there."""

Size = tuple[int, int]
"""Width and height in pixels; zeros where nobody knows them."""

# Of an image's head, which says how large it is; where it is not enough, the whole is read.
_HEAD_BYTES = 4096


class Mask(NamedTuple):
    """Where the mask of a sample is.

    Attributes:
        object: name of its object; empty where the sample has none.
        offset: the place where it starts there.
        length: bytes of it.
        etag: version of its object, empty where the store has none.
    """

    object: str
    offset: int
    length: int
    etag: str


NO_MASK = Mask("", 0, 0, "")


def target_columns(masks: Sequence[Mask], sizes: Sequence[Size]) -> dict[str, pa.Array]:
    """``TARGET_COLUMNS`` of some samples.

    Args:
        masks: mask of each sample.
        sizes: width and height of each sample's image; zeros where nobody knows them.
    """
    columns = [*zip(*masks, strict=True), *zip(*sizes, strict=True)] or [()] * len(TARGET_COLUMNS)
    return {field.name: pa.array(values, field.type) for field, values in zip(TARGET_COLUMNS, columns, strict=True)}


def fill_masks(table: pa.Table) -> pa.Table:
    """A table of which some parts had masks: their columns are where they belong, and the others' samples have none."""
    if TARGET_COLUMNS.names[0] not in table.schema.names:
        return table
    for field in TARGET_COLUMNS:
        empty = "" if field.type == pa.string() else 0
        column = pc.fill_null(table[field.name].cast(field.type), empty)
        table = table.set_column(table.schema.get_field_index(field.name), field, column)
    beside = [name for name in table.schema.names if name not in TARGET_COLUMNS.names]
    return table.select([*beside, *TARGET_COLUMNS.names])


def size_at(store: Readable, object: str, offset: int, length: int, *, is_turned: bool = False) -> Size:
    """The size of an image, from its head; zeros where its header is broken, which reading it will say.

    With ``is_turned`` that which it has once it is turned as its EXIF data says.

    Raises what ``Readable.read`` raises.
    """
    if not length:
        return 0, 0
    size = size_of(store.read(object, offset, min(length, _HEAD_BYTES)), is_turned=is_turned)
    if 0 not in size or length <= _HEAD_BYTES:
        return size
    return size_of(store.read(object, offset, length), is_turned=is_turned)


def known_sizes(before: ListedSamples | None) -> Mapping[tuple[str, str], Size]:
    """Width and height of the images of an earlier listing that had masks, by the object's name and version."""
    if before is None or TARGET_COLUMNS.names[0] not in before.table.schema.names:
        return {}
    names = ("object", "etag", "target_length", "target_width", "target_height")
    rows = zip(*(before.table[name].to_pylist() for name in names), strict=True)
    # Of an image that had no mask nobody asked for its size.
    return {(name, etag): (width, height) for name, etag, mask, width, height in rows if etag and mask}


# Part of every digest: raise it whenever the same files would give another table.
_MASK_RULE = "frostline masks 7"
_THREADS = 16

_IMAGE_FOLDERS = frozenset({"image", "images", "img", "imgs", "input", "inputs", "jpegimages", "leftimg8bit"})
_MASK_FOLDERS = frozenset(
    {
        "ann", "annotation", "annotations", "anns", "ground_truth", "groundtruth", "gt", "gtcoarse", "gtfine", "label",
        "labels", "lbl", "lbls", "mask", "masks", "seg", "segmentation", "segmentationclass", "segmentationclassaug",
        "segmentations", "target", "targets", "trimaps",
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
# Words within the names of folders that tell masks, and images: ``masks_png`` and ``images_png``, ``ann_dir`` and
# ``img_dir``, ``trainannot`` and ``train``. Of masks there are several: ``with_mask`` is a class.
_OF_MASKS = re.compile(
    r"(?<=.)[_-](annotations?|groundtruth|labels|masks)$|^(ann|anns|annotations|labels|masks)[_-]|(?<=[a-z])_?annot$"
)
_OF_IMAGES = re.compile(r"(?<=.)[_-](images|imgs)$|^(images|img|imgs)[_-]")
_ANY_ENDS = (*_IMAGE_ENDS, *_ENDS_IN_FOLDERS)
# Before all ends: a mask that is called as its image is.
_SAME_NAME = -1
# What the names of all masks have in them, and those of some other objects.
_LIKELY = "(?i)ann|ground_?truth|gt|label|lbl|mask|seg|target|trimaps"
# Photographs lie in the first, and masks in the second: what is written by the first has other values when it is read.
_LOSSY, _LOSSLESS = frozenset({"jfif", "jpe", "jpeg", "jpg"}), frozenset({"bmp", "gif", "png", "tif", "tiff"})
_FOLDERS_AT_HAND = 4096


class Pair(NamedTuple):
    """An image and its mask.

    Attributes:
        image: entry of the image.
        mask: entry of its mask; None where there is none.
        folder: the first folder that names neither images nor masks; empty where there is none.
        inner: the second one, likewise.
    """

    image: Entry
    mask: Entry | None
    folder: str
    inner: str


class _Place(NamedTuple):
    """What a name says of an object.

    Attributes:
        name: name without its suffix and without the folders that tell images from masks.
        key: name without the ending that tells images from masks, equal for an image and its mask.
        is_mask: True if it is a mask.
        rank: precedence of the mask: of several masks of an image, the lowest rank counts.
        is_some_only: masks like it belong to some of the images.
    """

    name: str
    key: str
    is_mask: bool
    rank: int = 0
    is_some_only: bool = False


class MaskPairs:
    """``images/1.jpg`` and ``masks/1.png``, and the other ways in which the two commonly lie side by side.

    Folders tell them apart (``images`` and ``masks`` at any depth, ``JPEGImages`` and ``SegmentationClass``,
    ``leftImg8bit`` and ``gtFine``, ``train`` and ``train_masks``, ``img_dir`` and ``ann_dir``), or the ends of names
    (``1.tif`` and ``1_mask.tif``).
    What is left of the two names is the same; a mask whose whole name is that of an image goes before others. The
    first folder that is left is the class; where all of them are called as splits are, it is the split, and the
    second is the class. An image without a mask is a sample without one, but in the layout of Pascal VOC, where it
    belongs to other tasks.
    """

    name = "masks"
    is_incremental = True

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one pair is enough, and so are folders of images and of masks beside each other."""
        # Most listings are of other formats, and may be of millions: one look at each name tells.
        placed = [
            (entry, place) for entry, place in _placed(Entries.of(entries).filter_pattern(_LIKELY)) if place.is_mask
        ]
        masks = {name for _, place in placed for name in (place.name, place.key)}
        around = {_around_masks(entry.object) for entry, _ in placed} - {None}
        return bool(masks) and any(
            not masks.isdisjoint((place.name, place.key)) or _around_images(entry.object) in around
            for entry, place in _placed(entries)
            if not place.is_mask
        )

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        rule = f"{_MASK_RULE}{_version_of_table(entries)}"
        return digest_of(rule, (entry for entry in entries if is_image(entry.object)))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``; of images that are new or have changed, the head is read: masks must be as large."""
        pairs = pairs_of(entries)
        if not pairs:
            raise EmptyDataset(_no_pairs(store.url, entries))
        firsts = {pair.folder for pair in pairs} - {""}
        is_divided = bool(firsts) and all(map(is_split, firsts))
        of_classes = [pair.inner if is_divided else pair.folder for pair in pairs]
        folders = tuple(sorted({*of_classes} - {""}))
        named = _table_of_classes(store, entries)
        table_of_classes = named if set(folders) <= set(named) else ()
        classes = table_of_classes or folders
        number = {name: index for index, name in enumerate(classes)}
        names = pa.array([pair.image.object for pair in pairs], pa.string())
        sizes = _sizes(store, [pair.image for pair in pairs], before)
        columns = {
            "id": pa.array(stable_ids(names.to_pylist())),
            "name": names,
            "object": names,
            "offset": pa.array(np.zeros(len(pairs), np.int64)),
            "length": pa.array([pair.image.size for pair in pairs], pa.int64()),
            "label": pa.array([number.get(folder) for folder in of_classes], pa.int64()),
            "etag": pa.array([pair.image.etag for pair in pairs], pa.string()),
            **target_columns([_mask(pair.mask) for pair in pairs], sizes),
        }
        table = pa.table(columns, schema=pa.unify_schemas([COLUMNS, TARGET_COLUMNS]))
        if is_divided:
            splits = [pair.folder.lower() or None for pair in pairs]
            table = table.append_column(SPLIT, pa.array(splits, pa.string()))
        return ListedSamples(
            table=table,
            classes=classes,
            digest=self.digest(entries),
            divided_by_names=is_divided,
            has_named_classes=True,
            used=(CLASSES,) if table_of_classes else (),
        )


def pairs_of(entries: Iterable[Entry]) -> list[Pair]:
    """The images of a listing in the order of their names, each with its mask.

    Raises:
        DataError: two images, or two masks, have one name but for their suffix.
    """
    placed = list(_placed(sorted(entries)))
    images: dict[str, Entry] = {}
    names: dict[str, str] = {}
    for entry, place in placed:
        if not place.is_mask:
            if place.name in images:
                raise DataError(_twice(images[place.name], entry, "the images of one sample"))
            images[place.name] = entry
            names.setdefault(place.key, place.name)
    masks: dict[str, tuple[int, Entry]] = {}
    for entry, place in placed:
        name, rank = _image_of(place, images, names) if place.is_mask else (None, 0)
        if name is None:
            continue
        known = masks.get(name)
        if known is not None and known[0] == rank:
            raise DataError(_twice(known[1], entry, "the mask of one image"))
        if known is None or rank < known[0]:
            masks[name] = (rank, entry)
    some_only = any(place.is_some_only for _, place in placed)
    found = ((name, image, masks[name][1] if name in masks else None) for name, image in images.items())
    pairs = [Pair(image, mask, *_folders_of(name)) for name, image, mask in found if mask or not some_only]
    return pairs if masks else []


def twin_folders(entries: Sequence[Entry]) -> tuple[str, str] | None:
    """Two folders whose names say nothing, and whose files look like images and their masks; None for all else.

    There is no third folder, each photograph has a namesake in the other folder, but for the ends that tell images
    from masks, and those are of lossless formats.
    """
    stems, suffixes = dict[str, set[str]](), dict[str, set[str]]()
    for piece in Entries.of(entries).pieces():
        for name in piece.column(0).to_pylist():
            folder, _, base = name.rpartition("/")
            if not folder or len(stems) > 2 or not is_image(name):  # which may be a list that says what they are
                return None
            stem, _, suffix = base.rpartition(".")
            stems.setdefault(folder, set()).add(stem[: len(stem) - len(_end_of(stem, _ANY_ENDS))])
            suffixes.setdefault(folder, set()).add(suffix.lower())
    for images, masks in itertools.permutations(stems) if len(stems) == 2 else ():
        if suffixes[images] <= _LOSSY and suffixes[masks] <= _LOSSLESS and stems[images] == stems[masks]:
            return (images, masks) if len(stems[images]) > 1 else None
    return None


def _no_pairs(url: str, entries: Sequence[Entry]) -> str:
    if (twins := twin_folders(entries)) is not None:
        return (
            f"{twins[0]} and {twins[1]} at {url} hold files of the same names, as images and their masks do: call the "
            "folders images and masks; where they are classes, say format='folders' (--format folders)"
        )
    placed = list(_placed(sorted(entries)))
    first = next((entry.object for entry, place in placed if not place.is_mask), None)
    mask = next((entry.object for entry, place in placed if place.is_mask), None)
    names = "" if first is None or mask is None else f": {first} and {mask} do not belong together by their names"
    return (
        f"{url} holds no images with masks (such as images/1.jpg and masks/1.png){names}; a mask is called as its one "
        "image is, and format='folders' (--format folders) takes all of them for images"
    )


def _around_masks(object: str) -> str | None:
    """The path around the folder of masks that an object lies in; None where it lies in none."""
    left, is_mask, _, _ = _mask_folders(object.rpartition("/")[0])
    return left if is_mask else None


def _around_images(object: str) -> str | None:
    """The path around the folder of images that an object lies in; None where it lies in none, or among masks."""
    left, is_mask, is_image, _ = _mask_folders(object.rpartition("/")[0])
    return left if is_image and not is_mask else None


def _image_of(mask: _Place, images: Mapping[str, Entry], names: Mapping[str, str]) -> tuple[str | None, int]:
    """The name of the image that a mask belongs to, and the mask's precedence among those of the same image."""
    if mask.name in images:
        return mask.name, _SAME_NAME
    return (mask.key if mask.key in images else names.get(mask.name, names.get(mask.key))), mask.rank


def _mask(entry: Entry | None) -> Mask:
    return NO_MASK if entry is None else Mask(entry.object, 0, entry.size, entry.etag)


@lru_cache(1)
def are_masks(folders: tuple[str, ...]) -> bool:
    """Whether samples of the same names in these folders would be taken for images and their masks."""
    return MaskPairs().claims([Entry(f"{folder}/0.png", 1, "") for folder in folders])


def names_a_class(folder: str) -> bool:
    """Whether a folder of that name, of images or of masks, is taken for that of a class."""
    return "/" not in folder and _left_of(folder) == folder


def _twice(entry: Entry, other: Entry, what: str) -> str:
    return f"{entry.object} and {other.object} would both be {what}: leave one of them in the place"


def _folders_of(key: str) -> tuple[str, str]:
    """The first and the second folder of a name; empty where there is none."""
    first, second, *_ = [*key.split("/")[:-1], "", ""]
    return first, second


def _placed(entries: Iterable[Entry]) -> Iterator[tuple[Entry, _Place]]:
    for entry in entries:
        if is_image(entry.object):
            yield entry, _place(entry.object)


def _place(name: str) -> _Place:
    folder, _, base = name.rpartition("/")
    stem = base.rpartition(".")[0]
    left, is_mask, is_image_folder, is_some_only = _mask_folders(folder)
    end = _end_of(stem, _ENDS_IN_FOLDERS if is_mask else _MASK_ENDS)
    if is_mask or (end and not is_image_folder):
        rank = _ENDS_IN_FOLDERS.index(end) if end else len(_ENDS_IN_FOLDERS)
        return _Place(left + stem, left + stem[: len(stem) - len(end)], True, rank, is_some_only)
    return _Place(left + stem, left + stem[: len(stem) - len(_end_of(stem, _IMAGE_ENDS))], False)


def _end_of(stem: str, ends: Iterable[str]) -> str:
    small = stem.lower()
    return next((end for end in ends if small.endswith(end) and len(small) > len(end)), "")


@lru_cache(_FOLDERS_AT_HAND)
def _mask_folders(folder: str) -> tuple[str, bool, bool, bool]:
    """What is left of a folder's path, whether masks or images lie there, and whether of some images alone."""
    parts = folder.split("/") if folder else []
    small = [part.lower() for part in parts]
    is_mask = any(part in _MASK_FOLDERS or _OF_MASKS.search(part) for part in small)
    left = [_left_of(part) for part in parts]
    path = "".join(f"{part}/" for part in left if part)
    is_image = any(part in _IMAGE_FOLDERS or _OF_IMAGES.search(part) for part in small)
    return path, is_mask, is_image, bool(_SOME_ONLY & set(small))


def _left_of(part: str) -> str:
    if part.lower() in _IMAGE_FOLDERS or part.lower() in _MASK_FOLDERS:
        return ""
    found = _OF_MASKS.search(part.lower()) or _OF_IMAGES.search(part.lower())
    if found is None:
        return part
    # What stands behind the word is a split or tells of the files.
    return part[: found.start()] or (part[found.end() :] if is_split(part[found.end() :]) else "")


def _sizes(store: Versioned, images: Sequence[Entry], before: ListedSamples | None) -> list[tuple[int, int]]:
    known = known_sizes(before)
    with ThreadPoolExecutor(_THREADS, "frostline-index") as threads:
        return list(threads.map(partial(_size, store, known), images))


def _size(store: Versioned, known: Mapping[tuple[str, str], tuple[int, int]], image: Entry) -> tuple[int, int]:
    found = known.get((image.object, image.etag))
    return size_at(store, image.object, 0, image.size) if found is None else found
