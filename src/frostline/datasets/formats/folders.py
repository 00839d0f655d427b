"""Images in class folders, or in those of splits: decides what of a store's listing is a labelled image."""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.formats.base import COLUMNS, ListedSamples, digest_of, is_hidden, stable_ids
from frostline.datasets.formats.split_names import SPLIT, is_split, trained_among
from frostline.errors import EmptyDataset
from frostline.stores.base.listing import Entries, Names
from frostline.stores.base.protocols import Entry, ObjectStore

__all__ = ("IMAGE_SUFFIXES", "ClassFolderFormat", "is_image", "suffix_of")

IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".npy", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})

# The same as ``suffix_of`` decides, for a column of names: a dot that does not begin the last part, and what follows.
_IMAGE = rf"(?i)[^/]\.(?:{'|'.join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))})$"
_FOLDERS = r"^(?P<first>[^/]*)/(?:(?P<second>[^/]*)/)?"

_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")

# Part of every digest: raise it whenever the same files would give another table.
_RULE = "frostline image folders 3"


class ClassFolderFormat:
    """The first folder of a name is the class; deeper folders belong to it.

    Where every first folder is called as a split is, such as ``train`` and ``val``, and has its images in folders of
    its own, the first is the split and the second the class. Such a folder may also have no class folders at all, but
    for one to train on: its images have no label.

    Names with a part that starts with a dot and names without the suffix of an image are passed over.
    """

    name = "folders"
    is_incremental = False

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one image in a folder is enough."""
        return len(_labelled(entries)) > 0

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of(_RULE, _labelled(entries))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:  # noqa: ARG002
        """See ``Format.read``; nothing but the listing is needed."""
        labelled = _labelled(entries).in_order()
        if not labelled:
            raise EmptyDataset(_nothing_at(store.url, entries))
        objects, sizes, etags = labelled.table.columns
        has_splits = _has_splits(labelled)
        labels, classes = _classes(labelled, "second" if has_splits else "first")
        ids, offsets = stable_ids(Names(objects)), np.zeros(len(labelled), np.int64)
        columns = [pa.array(ids), objects, objects, pa.array(offsets), sizes, pa.array(labels), etags]
        table = pa.table(columns, schema=COLUMNS)
        if has_splits:
            splits = [pc.utf8_lower(first) for first in _folders(labelled, "first")]
            table = table.append_column(SPLIT, pa.chunked_array(splits, pa.string()))
        return ListedSamples(table=table, classes=classes, digest=labelled.digest(_RULE), divided_by_names=has_splits)


def suffix_of(name: str) -> str:
    """The suffix of an object's name in lower case, with its dot; empty where there is none."""
    base = name.rpartition("/")[2]
    dot = base.rfind(".")
    return base[dot:].lower() if dot > 0 else ""


def is_image(name: str) -> bool:
    """Whether an object's name is that of an image, and not hidden."""
    return suffix_of(name) in IMAGE_SUFFIXES and not is_hidden(name)


def _labelled(entries: Sequence[Entry]) -> Entries:
    """Images, in a folder and not hidden: ``is_image`` of each, and a slash in its name."""
    found = Entries.of(entries)
    objects = found.table["object"]
    hidden = pc.or_(pc.starts_with(objects, "."), pc.match_substring(objects, "/."))
    image = pc.match_substring_regex(objects, _IMAGE)
    return found.where(pc.and_(pc.and_not(image, hidden), pc.match_substring(objects, "/")))


def _folders(labelled: Entries, which: str) -> Iterator[pa.Array]:
    """The first or the second folder of each name, some names at a time; empty where there is no second one."""
    for piece in labelled.pieces():
        yield pc.struct_field(pc.extract_regex(piece["object"], _FOLDERS), which)


def _has_splits(labelled: Entries) -> bool:
    """Whether the first folders are splits, and not classes that happen to be called so."""
    divided: set[str] = set()
    undivided: set[str] = set()
    for firsts, seconds in zip(_folders(labelled, "first"), _folders(labelled, "second"), strict=True):
        names = pc.unique(firsts).to_pylist()
        if not all(map(is_split, names)):
            return False
        divided.update(pc.unique(firsts.filter(pc.not_equal(seconds, ""))).to_pylist())
        undivided.update(pc.unique(firsts.filter(pc.equal(seconds, ""))).to_pylist())
    return bool(divided) and not divided & undivided and trained_among(undivided) is None


def _classes(labelled: Entries, which: str) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """The label of each name, and the names of the classes: of those folders, in their order."""
    seen: dict[str, int] = {}
    labels = np.empty(len(labelled), np.int64)
    done = 0
    for folders in _folders(labelled, which):
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


def _unread(entries: Sequence[Entry]) -> str:
    """What is said of shards that other libraries wrote; empty where there are none."""
    if not any(entry.object.rpartition("/")[2] == _SHARD_INDEX for entry in entries):
        return ""
    for pattern, kind in _UNREAD:
        found = next((entry.object for entry in entries if pattern.search(entry.object)), None)
        if found is not None:
            return (
                f"; {found} is one of the {kind}, which Frostline does not read: write the samples out with that "
                "library, as files in class folders, WebDataset shards or Parquet"
            )
    return ""


def _nothing_at(url: str, entries: Sequence[Entry]) -> str:
    images = sum(is_image(entry.object) for entry in entries)
    beside = f"; {images} images stand in no class folder" if images else ""
    packed = next((entry.object for entry in entries if entry.object.lower().endswith(_PACKED)), None)
    if packed is not None:
        beside += f"; {packed} is compressed as a whole and has no places to read at: unpack it, to a plain tar at most"
    return f"{url} holds no images in class folders (such as cats/1.jpg){beside}{_unread(entries)}"
