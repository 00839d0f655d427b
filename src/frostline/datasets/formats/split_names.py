"""Decides which splits the names of folders and files say, and which of them are for training and for scoring. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import filterfalse

import pyarrow as pa
import pyarrow.compute as pc

__all__ = (
    "SPLIT",
    "are_divided",
    "folder_splits",
    "is_split",
    "scored_among",
    "splits_of",
    "splits_said",
    "trained_among",
    "with_splits",
)

SPLIT = "split"
"""The column that says which split a sample belongs to."""

# As people write them, each in the order in which one is taken where there are several.
_TRAINED = ("train", "training")
_SCORED = ("val", "valid", "validation", "dev", "eval", "evaluation", "test", "testing")
_NO_WORD = re.compile(r"[^a-z]+")
# As the Hugging Face hub calls the parts of a split.
_PART = re.compile(r"(?:^|/)([^/]+)-\d{5}-of-\d{5}(?:-[0-9a-f]{16})?\.parquet$")
# More values than people have splits: the column says something else.
_MAX = len(_TRAINED) + len(_SCORED)


def is_split(name: str) -> bool:
    """Whether a folder or a value is called as a split is."""
    return name.lower() in (*_TRAINED, *_SCORED)


def trained_among(splits: Iterable[str]) -> str | None:
    """The split to train on; None where none is called so."""
    return _first(_TRAINED, splits)


def scored_among(splits: Iterable[str]) -> Sequence[str]:
    """The splits to score, those for validation before those for the last test."""
    return sorted(filter(_is_scored, splits), key=lambda name: _SCORED.index(name.lower()))


def are_divided(splits: Iterable[str]) -> bool:
    """Whether there are a split to train on and one to score."""
    names = list(splits)
    return trained_among(names) is not None and bool(scored_among(names))


def folder_splits(folders: Iterable[str], pairs: Callable[[], Iterable[tuple[str, str]]]) -> dict[str, str]:
    """The split of each folder that is one, and not a class that happens to be called so; empty where none is.

    Where all folders are called exactly as splits, they are some, if one of them has class folders, and those without
    are not for training. Beside other folders, a split to train on and one to score must both have class folders. A
    word within a name says a split, as in ``train_set``, where every folder says another one, and they share a class.

    Args:
        folders: first folders of all images.
        pairs: gives the pairs of first and second folder that there are; the second is empty where there is none.
    """
    names = set(folders)
    exact = {name: name.lower() for name in names if is_split(name)}
    words = {name: word for name in names if (word := _word_of(name)) is not None}
    if not exact and len(words) < len(names):
        return {}
    seconds: dict[str, set[str]] = {}
    for first, second in pairs():
        seconds.setdefault(first, set()).add(second)
    divided = {name for name, inner in seconds.items() if "" not in inner}
    mixed = {name for name, inner in seconds.items() if "" in inner and len(inner) > 1}
    if len(exact) == len(names):
        bare = names - divided - mixed
        return exact if divided and not mixed and trained_among(bare) is None else {}
    if exact.keys() <= divided and are_divided(exact.values()):
        return exact
    if len(words) == len(names) == len(set(words.values())) and names <= divided and are_divided(words.values()):
        return words if set.intersection(*seconds.values()) else {}
    return {}


def splits_of(files: Sequence[str]) -> dict[str, str] | None:
    """The split of each file that says one, where the files say at least two: those that say none are in none.

    A file says a split where one word of its name is that of a split, such as ``train-00000.parquet`` and
    ``cifar-test-01.tar``, or one word of the folder that it lies in, of the innermost such folder. Beside such files,
    where all others are called as the Hugging Face hub calls the parts of a split, each says its own, whatever it is:
    ``extra-00000-of-00001.parquet``.
    """
    found = {file: split for file in files if (split := _split_of(file)) is not None}
    parts = {file: part[1] for file in files if file not in found and (part := _PART.search(file))}
    if found and len(found) + len(parts) == len(files):
        found |= parts
    return found if len(set(found.values())) > 1 else None


def splits_said(table: pa.Table, *, divided_by_names: bool = False) -> tuple[str, ...]:
    """The splits that a table's column ``split`` names, those to train on first; none where it has other values too.

    Args:
        table: table of samples.
        divided_by_names: the column was made of the splits' names: whatever it holds is one, and those of other names
            come last.
    """
    if SPLIT not in table.schema.names or not _is_text(table.schema.field(SPLIT).type):
        return ()
    values = pc.unique(table[SPLIT]).drop_null()
    if not divided_by_names and not 0 < len(values) <= _MAX:
        return ()
    names: list[str] = values.to_pylist()
    trained, others = [name for name in names if name.lower() in _TRAINED], [*filterfalse(is_split, names)]
    return () if others and not divided_by_names else (*sorted(trained), *scored_among(names), *sorted(others))


def with_splits(
    table: pa.Table, files: Sequence[str], rows: Sequence[int], said: Mapping[str, str] | None = None
) -> tuple[pa.Table, bool]:
    """A table with the column ``split`` that the names of its files say, and whether they say any.

    A column that the data itself calls so stays as it is.

    Args:
        table: samples of all files.
        files: their names, in the table's order.
        rows: number of rows of each file.
        said: splits of files where the data itself says them, whatever they are called; by default names say them.
    """
    splits = splits_of(files) if said is None else said
    if splits is None or SPLIT in table.schema.names:
        return table, False
    each = [pa.repeat(pa.scalar(splits.get(file), pa.string()), count) for file, count in zip(files, rows, strict=True)]
    return table.append_column(SPLIT, pa.chunked_array(each, pa.string())), True


def _split_of(file: str) -> str | None:
    for part in reversed(file.split("/")):
        if _words_of(part):
            return _word_of(part)
    return None


def _words_of(name: str) -> set[str]:
    return {word for word in _NO_WORD.split(name.lower()) if is_split(word)}


def _word_of(name: str) -> str | None:
    """The one word of a name that is that of a split; None where there is none, or several."""
    said = _words_of(name)
    return said.pop() if len(said) == 1 else None


def _is_scored(name: str) -> bool:
    return name.lower() in _SCORED


def _first(words: Sequence[str], names: Iterable[str]) -> str | None:
    known = {name.lower(): name for name in names}
    return next((known[word] for word in words if word in known), None)


def _is_text(kind: pa.DataType) -> bool:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(plain) or pa.types.is_large_string(plain))
