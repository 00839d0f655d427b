"""Decides what the objects of a copy in class folders are called: as in the source, where that is safe and unique."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from frostline.datasets.dataset import Dataset
from frostline.datasets.formats.folders import SAMPLE_SUFFIXES, suffix_of
from frostline.datasets.formats.labels import SOURCE
from frostline.datasets.formats.split_names import SPLIT

__all__ = ("FolderNames",)

_MAX_BYTES, _MAX_BYTES_A_PART = 1000, 200
_AT_ONCE = 1 << 16


class FolderNames:
    """Where each sample of a data set lies in class folders.

    It is called as in the source, or as it was before its first copy, and lies in the folder of its class, or of split
    and class where the data brings splits. What could meet another sample's name, and what is no name for a file, is
    called by the sample's id.

    Args:
        source: data set with labels.
    """

    def __init__(self, source: Dataset) -> None:
        self._source = source
        self._root = f"{source.url}/"
        self._has_sources = SOURCE in source.columns and not source.column(SOURCE).null_count
        self._has_splits = bool(source.splits_brought) and not source.column(SPLIT).null_count
        whole = np.zeros(len(source), np.int64)
        stems = np.zeros(len(source), np.int64)
        for start in range(0, len(source), _AT_ONCE):
            for row, place in enumerate(self._places(start, min(start + _AT_ONCE, len(source))), start):
                whole[row] = _number(place)
                # Another place that gets this suffix would be the same.
                stems[row] = _number(place[: -len(suffix)]) if (suffix := _suffix(place)) else -1
        values, counts = np.unique(whole, return_counts=True)
        self._unsure = np.union1d(values[counts > 1], np.intersect1d(values, stems))

    def objects(self, start: int, stop: int) -> Sequence[str]:
        """The places of some samples, their suffixes as they were; empty for those that are called by their ids."""
        places = list(self._places(start, stop))
        is_unsure = np.isin([_number(place) for place in places], self._unsure)
        return ["" if bad or not _is_name(place) else place for place, bad in zip(places, is_unsure, strict=True)]

    def _places(self, start: int, stop: int) -> Iterator[str]:
        rows = np.arange(start, stop, dtype=np.int64)
        part = self._source.take(rows)
        names = part.column(SOURCE).to_pylist() if self._has_sources else list(part.names)
        splits = part.column(SPLIT).to_pylist() if self._has_splits else [""] * len(rows)
        classes = self._source.classes
        for name, split, label in zip(names, splits, part.samples.labels.tolist(), strict=True):
            yield _place(name.removeprefix(self._root), split, classes[label] if label >= 0 else "")


def _place(name: str, split: str, folder: str) -> str:
    """A name within the folders of its split and its class, which it may have already."""
    first, _, rest = name.partition("/")
    if split and first.lower() == split.lower():
        return name if rest.startswith(f"{folder}/") else f"{split}/{folder}/{rest}"
    inner = name if name.startswith(f"{folder}/") else f"{folder}/{name}"
    return f"{split}/{inner}" if split else inner


def _suffix(place: str) -> str:
    suffix = suffix_of(place)
    return suffix if suffix in SAMPLE_SUFFIXES else ""


def _number(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _is_name(place: str) -> bool:
    """Whether stores and systems of files take it, and listings show it."""
    return len(place.encode(errors="surrogatepass")) <= _MAX_BYTES and all(
        part.isprintable()
        and not part.startswith(".")
        and 0 < len(part.encode()) <= _MAX_BYTES_A_PART
        and not set(part) & set('\\:*?"<>|')
        for part in place.split("/")
    )
