"""Refuses folders that hold pictures of the same things, such as ``sat`` and ``map``, and would look like classes.

Classes may have the same names of files too: the folders' own names tell.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import pyarrow.compute as pc

from frostline.core.errors import DataError
from frostline.datasets.formats.base import ListedSamples, digest_of
from frostline.datasets.formats.folders import samples_in_folders
from frostline.datasets.formats.labels import is_split
from frostline.stores.protocols import Entry, ObjectStore

__all__ = ("FoldersOfPairs",)

# Fewer may have the same names by chance, and more folders are classes, or are not looked through.
_FEWEST, _MAX_FOLDERS = 10, 24
# What one picture of a thing is called, and not a class.
_PICTURES = re.compile(
    r"(?i)^(?:sat|satellite|aerial|maps?|left|right|rgb|colou?r|depth|disparity|thermal|infrared|ir|nir|visible|"
    r"before|after|pre|post|input|output|source|flair|t1|t1ce|t2|lr|hr|(?:im|img|image)[_-]?[0-9ab])$"
)
# As CycleGAN has it: pictures of two kinds, no two of them of one thing.
_DOMAIN = re.compile(r"(?:train|test|val)_?[AB]")


class _Folders(NamedTuple):
    """Folders with the same names of files.

    Attributes:
        folders: names of the folders.
        shared: number of names; zero where the folders' own names tell.
    """

    folders: tuple[str, ...]
    shared: int


class FoldersOfPairs:
    """Folders that would be classes by their place, and are pictures of the same things by the names of their files."""

    name = "folders"
    is_incremental = False

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: some folders beside each other, all of which have the same names of files."""
        return _pairs_in(entries) is not None

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of("frostline folders of pairs 1", entries)

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> NoReturn:  # noqa: ARG002
        """Refuse them.

        Raises:
            DataError: The folders are no classes; the sentence says what else to ask for.
        """
        found = _pairs_in(entries)
        assert found is not None, "these entries were claimed"
        names = f"{', '.join(found.folders[:-1])} and {found.folders[-1]} at {store.url}"
        why = "are pictures of two domains by their names, and no classes"
        if found.shared:
            why = f"hold files of the same {found.shared} names, as views of the same things do, and classes do not"
        raise DataError(
            f"{names} {why}: where they are classes, say format='folders' (--format folders); one folder alone is read "
            "by its own URL; pairs as inputs of one network are columns of Parquet files (--column left=A,right=B)"
        )


def _pairs_in(entries: Sequence[Entry]) -> _Folders | None:
    """The folders that would be classes and hold pictures of the same things; None for all other listings."""
    names = samples_in_folders(entries).table["object"]
    different = pc.value_counts(pc.replace_substring_regex(names, r"/[^/]*$", ""))
    if not 2 <= len(different) <= _MAX_FOLDERS:
        return None
    counts = {count["values"]: count["counts"] for count in different.to_pylist()}
    if all(map(_DOMAIN.fullmatch, counts)):
        return _Folders(tuple(sorted(counts)), 0)
    each: list[str] = names.to_pylist()
    return _same_names(each, counts, 0) or _same_names(each, counts, -1)


def _same_names(names: Sequence[str], counts: Mapping[str, int], place: int) -> _Folders | None:
    """Folders with the same names of files, where the folder at that place of paths would be the class.

    Args:
        names: names of objects in folders.
        counts: number of objects in each folder.
        place: 0 for the first folder of a name; -1 for the last one, which lies in that of a split.
    """
    sizes: dict[str, dict[str, int]] = {}
    for path, count in counts.items():
        folder, around = _apart(path, place)
        if is_split(folder) or (place and not is_split(around.rpartition("/")[2])):
            return None
        beside = sizes.setdefault(around if place else "", {})
        beside[folder] = beside.get(folder, 0) + count
    if not all(map(_may_be_pairs, sizes.values())):
        return None
    stems: dict[str, dict[str, set[str]]] = {}
    for name in names:
        path, _, base = name.rpartition("/")
        folder, around = _apart(path, place)
        stem = f"{'' if place else around}/{base.rpartition('.')[0]}"
        stems.setdefault(around if place else "", {}).setdefault(folder, set()).add(stem)
    if stems.keys() != sizes.keys() or not all(map(_are_pairs, stems.values())):
        return None
    first = stems[min(stems)]
    return _Folders(tuple(sorted(first)), len(next(iter(first.values()))))


def _may_be_pairs(counts: Mapping[str, int]) -> bool:
    """Whether folders beside each other have the same number of files, several."""
    return len(counts) > 1 and len({*counts.values()}) == 1 and min(counts.values()) >= _FEWEST


def _apart(path: str, place: int) -> tuple[str, str]:
    """The folder at a place of a path, and what is left of the path."""
    if place:
        around, _, folder = path.rpartition("/")
        return folder, around
    folder, _, rest = path.partition("/")
    return folder, rest


def _are_pairs(beside: Mapping[str, set[str]]) -> bool:
    """Whether folders that are called as pictures of one thing hold the same names of files.

    A folder's own name may stand in front of them, or behind them.
    """
    known = {frozenset(stems) for stems in beside.values()}
    if len(known) > 1:
        known = {frozenset(_without(stem, folder) for stem in stems) for folder, stems in beside.items()}
    if len(known) > 1 or len(beside) < 2 or len(next(iter(known))) < _FEWEST:
        return False
    return all(map(_PICTURES.match, beside))


def _without(stem: str, folder: str) -> str:
    path, _, base = stem.rpartition("/")
    return f"{path}/{base.removeprefix(folder).removesuffix(folder)}"
