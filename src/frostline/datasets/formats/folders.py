"""Images or sounds in class folders, or in those of splits: decides what of a store's listing is a labelled one."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.formats.base import COLUMNS, ListedSamples, digest_of, is_hidden, stable_ids
from frostline.datasets.formats.split_names import SPLIT, are_divided, folder_splits
from frostline.errors import EmptyDataset
from frostline.stores.base.listing import Entries, Names
from frostline.stores.base.protocols import Entry, ObjectStore
from frostline.stores.base.urls import COMPRESSED

__all__ = (
    "IMAGE_SUFFIXES",
    "KINDS",
    "SAMPLE_SUFFIXES",
    "SOUND_SUFFIXES",
    "ClassFolderFormat",
    "is_image",
    "is_sample",
    "suffix_of",
)

IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".npy", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
SOUND_SUFFIXES = frozenset({".flac", ".ogg", ".opus", ".wav"})
KINDS = (IMAGE_SUFFIXES, SOUND_SUFFIXES)
"""Suffixes of each kind of samples: where several lie in one place, the first of them are the samples."""
SAMPLE_SUFFIXES = frozenset[str]().union(*KINDS)

_FOLDERS = r"(?P<first>[^/]*)/(?:(?P<second>[^/]*)/)?"

# Part of every digest: raise it whenever the same files would give another table.
_RULE = "frostline image folders 5"


class _Layout(NamedTuple):
    """Where splits and classes stand in the names.

    Attributes:
        prefix: folder around all others, with its slash; empty where the first folder is the class or the split.
        splits: split of each folder that is one; empty where there are none.
    """

    prefix: str = ""
    splits: Mapping[str, str] = {}


class ClassFolderFormat:
    """The first folder of a name is the class; deeper folders belong to it.

    Where first folders are called as splits are, such as ``train`` and ``val``, and have their images in folders of
    their own, the first is the split and the second the class. Such a folder may also have no class folders at all, but
    for one to train on: its images have no label. Images in other folders beside those of splits are in none and have
    no label. The folders of splits may lie in one folder that holds everything.

    Where no image lies in a folder, those that lie in none are the samples, without classes.

    Names with a part that starts with a dot and names without the suffix of an image are passed over. Where there are
    no images, sounds are the samples.
    """

    name = "folders"
    is_incremental = False

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one image in a folder is enough; images in none may be what lists beside them name."""
        return len(_in_folders(entries)) > 0

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of(_RULE, _listed(entries))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:  # noqa: ARG002
        """See ``Format.read``; nothing but the listing is needed."""
        labelled = _listed(entries).in_order()
        if not labelled:
            raise EmptyDataset(_nothing_at(store.url, entries))
        objects, sizes, etags = labelled.table.columns
        layout = _layout(labelled)
        labels, classes = _classes(labelled, layout)
        ids, offsets = stable_ids(Names(objects)), np.zeros(len(labelled), np.int64)
        columns = [pa.array(ids), objects, objects, pa.array(offsets), sizes, pa.array(labels), etags]
        table = pa.table(columns, schema=COLUMNS)
        if layout.splits:
            splits = [_split_names(first, layout) for first in _folders(labelled, "first", layout.prefix)]
            table = table.append_column(SPLIT, pa.chunked_array(splits, pa.string()))
        return ListedSamples(
            table=table, classes=classes, digest=labelled.digest(_RULE), divided_by_names=bool(layout.splits)
        )


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
    found = _in_folders(entries)
    return found if len(found) else _of_kind(entries, in_folders=False)


def _in_folders(entries: Sequence[Entry]) -> Entries:
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
    hidden = pc.or_(pc.starts_with(objects, "."), pc.match_substring(objects, "/."))
    fits = pc.match_substring_regex(objects, pattern)
    is_inside = pc.match_substring(objects, "/")
    return found.where(pc.and_(pc.and_not(fits, hidden), is_inside if in_folders else pc.invert(is_inside)))


def _folders(labelled: Entries, which: str, prefix: str) -> Iterator[pa.Array]:
    """The first or the second folder of each name behind a prefix, some names at a time; empty where there is none."""
    pattern = f"^{re.escape(prefix)}{_FOLDERS}"
    for piece in labelled.pieces():
        yield pc.fill_null(pc.struct_field(pc.extract_regex(piece["object"], pattern), which), "")


def _layout(labelled: Entries) -> _Layout:
    """Whether first folders are splits, or those in the one folder that holds everything."""
    firsts = _different(labelled, "")
    if splits := folder_splits(firsts, lambda: _pairs(labelled, "")):
        return _Layout("", splits)
    if len(firsts) == 1:
        prefix = f"{firsts.pop()}/"
        inner = _different(labelled, prefix)
        splits = folder_splits(inner, lambda: _pairs(labelled, prefix)) if "" not in inner else {}
        if are_divided(splits.values()):
            return _Layout(prefix, splits)
    return _Layout()


def _different(labelled: Entries, prefix: str) -> set[str]:
    return {name for firsts in _folders(labelled, "first", prefix) for name in pc.unique(firsts).to_pylist()}


def _pairs(labelled: Entries, prefix: str) -> set[tuple[str, str]]:
    """The pairs of first and second folder that there are."""
    found: set[tuple[str, str]] = set()
    for both in zip(_folders(labelled, "first", prefix), _folders(labelled, "second", prefix), strict=True):
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
    if not layout.splits:
        yield from _folders(labelled, "first", "")
        return
    seconds = _folders(labelled, "second", layout.prefix)
    for first, second in zip(_folders(labelled, "first", layout.prefix), seconds, strict=True):
        yield pc.if_else(pc.is_valid(_split_names(first, layout)), second, "")


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
        beside += f"; {packed} is compressed as a whole and has no places to read at: unpack it, to a plain tar at most"
    return (
        f"{url} holds no images or sounds, in class folders (such as cats/1.jpg) or in none{beside}{_unread(entries)}"
    )
