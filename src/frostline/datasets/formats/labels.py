"""Decides labels, classes and splits from what samples, folders and files say of themselves. Pure."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import filterfalse
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.errors import DataError
from frostline.datasets.formats.base import COLUMNS, TARGET_COLUMNS, flattened, list_column

__all__ = (
    "LABEL_FIELDS",
    "NO_CLASSES",
    "OTHER_LABELS",
    "SOURCE",
    "SPLIT",
    "TAKEN",
    "URL_FIELDS",
    "Labelled",
    "are_divided",
    "classified",
    "columns_of",
    "folder_splits",
    "is_split",
    "joined",
    "labelled",
    "no_class",
    "numbered",
    "said_by",
    "scored_among",
    "splits_of",
    "splits_said",
    "trained_among",
    "with_splits",
)


LABEL_FIELDS = ("label", "cls", "class", "class_name")
"""Fields and columns that say a sample's label, the first that is there."""

URL_FIELDS = ("url", "uri", "image_url", "file_name", "path", "image")
"""Columns of lists that say where a sample is, the first that is there."""

OTHER_LABELS = "frostline_label"
"""The column of labels that are no classes: numbers with a sign or a fraction, or lists as texts."""

NO_CLASSES = (
    "a label says a class, by its name or by a whole number from 0, and is empty or null where a sample has none: "
    "declare targets of other kinds, as by Dataset(url, targets='label') or --targets label of frostline train"
)
"""What is said of labels that are none of a class."""

# More would not be classes but something else that was taken for them.
_MAX_CLASSES = 1 << 24
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
# Targets of another kind: with a sign, a point or an exponent, and lists.
_ANY_NUMBER = re.compile(r"[-+]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|inf|Infinity)")
_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")
_LIST = re.compile(r"\[.*\]", re.DOTALL)


def classified(said: Sequence[str | None], names: Sequence[str] = ()) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels and the classes' names.

    Where every sample that says anything gives a whole number, numbers are labels and their texts are the names of the
    classes, from 0 to the greatest. Else the texts are names, in their order.

    Args:
        said: label that each sample states; None where it states none.
        names: names of all classes, by label, where the data has them; they count where every label is one of them.

    Raises:
        DataError: a number is too large to be that of a class, or the labels are targets of another kind: negative
            numbers, numbers with a fraction, lists.
    """
    texts = sorted({text for text in said if text is not None})
    if names and set(texts) <= set(names):
        return _placed(said, names)
    if all(_NUMBER.fullmatch(text) for text in texts):
        return numbered(np.array([-1 if text is None else int(text) for text in said], np.int64))
    _check_classes(texts)
    return _placed(said, texts)


class Labelled(NamedTuple):
    """What the samples of a data set say of themselves.

    Attributes:
        labels: ``int64[n]``, number of each sample's class; -1 where it has none.
        classes: names of the classes, by label.
        other: column of labels that are no classes; None where labels are classes.
    """

    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    other: pa.Array | None = None


def labelled(said: Sequence[str | None], names: Sequence[str] = ()) -> Labelled:
    """Labels as classes, where they are some; else a column of the numbers or lists that they are, and no classes.

    Args:
        said: as of ``classified``.
        names: likewise.

    Raises:
        DataError: a number is too large to be that of a class, or numbers, names and lists are mixed.
    """
    texts = {text for text in said if text is not None}
    if not (names and texts <= set(names)):
        if _others(sorted(texts)) and all(map(_ANY_NUMBER.fullmatch, texts)):
            return _with_others(said, _numbers(said, texts))
        if texts and all(map(_is_list, texts)):
            return _with_others(said, pa.array(said, pa.string()))
    return Labelled(*classified(said, names))


def _with_others(said: Sequence[str | None], column: pa.Array) -> Labelled:
    return Labelled(np.full(len(said), -1, np.int64), (), column)


def _numbers(said: Sequence[str | None], texts: set[str]) -> pa.Array:
    if all(map(_WHOLE.fullmatch, texts)):
        return pa.array([None if text is None else int(text) for text in said], pa.int64())
    return pa.array([None if text is None else float(text) for text in said], pa.float64())


def _is_list(text: str) -> bool:
    try:
        return _LIST.fullmatch(text) is not None and isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False


def numbered(labels: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels that are numbers already, and names for them.

    Raises:
        DataError: a number is too large to be that of a class.
    """
    greatest = int(labels.max(initial=-1))
    if greatest >= _MAX_CLASSES:
        raise DataError(f"{greatest} is no number of a class: labels are names, or numbers below {_MAX_CLASSES}")
    return labels, tuple(str(number) for number in range(greatest + 1))


def said_by(label: object) -> str | None:
    """A label found in JSON or in a table, as text; None where it says nothing."""
    match label:
        case None | "":
            return None
        case bool() | int() | str():
            return str(label).strip() or None
        case float() if label.is_integer():
            return str(int(label))
        case float():
            return None if math.isnan(label) else repr(label)
        case list():
            return json.dumps(label)
        case _:
            raise DataError(no_class(str(label)))


def no_class(label: str) -> str:
    """What is said of a label that is none of a class."""
    return f"a label is {label[:50]!r}, and {NO_CLASSES}"


def _check_classes(texts: Sequence[str]) -> None:
    """Make sure that texts which are not all numbers of classes are names, and not targets of another kind."""
    if others := _others(texts):
        raise DataError(no_class(others[0]))


def _others(texts: Sequence[str]) -> list[str]:
    """Those of the texts that are neither names nor numbers of classes."""
    others = [text for text in texts if _LIST.fullmatch(text)]
    if all(map(_ANY_NUMBER.fullmatch, texts)):  # among names a number is a name, such as that of a version
        others += [text for text in texts if not text.isdigit()]
    return others


def _placed(said: Sequence[str | None], names: Sequence[str]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    place: dict[str | None, int] = {name: number for number, name in enumerate(names)}
    return np.array([place.get(text, -1) for text in said], np.int64), tuple(names)


SOURCE = "frostline_source"
"""The column that says what a sample was called before it was first copied; what users call ``source`` is their own."""

# Data whose fields are names of things would else have as many columns as samples.
_MAX_COLUMNS = 256
# What a table without masks calls its columns must not make it one with masks.
TAKEN = frozenset([*COLUMNS.names, *TARGET_COLUMNS.names])
"""The names of a sample's own columns: a field that is called so becomes another column."""
_INT64 = range(-(1 << 63), 1 << 63)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, pa.Array]:
    """One column a field that is scalar or a list wherever it stands, null where it does not; the 256 commonest.

    Whole numbers, other numbers, truth values and texts become columns of their type; a field with several kinds of
    values becomes texts, and so do lists (``formats.lists``). A field named as one of a sample's own columns gets
    ``meta_`` before its name.
    """
    rows = [flattened(row) for row in rows]
    count = Counter(name for row in rows for name in row)
    nested = {name for row in rows for name, value in row.items() if isinstance(value, dict | list)}
    lists = {name: list_column([row.get(name) for row in rows]) for name in nested}
    names = [name for name, _ in count.most_common() if lists.get(name, ()) is not None][:_MAX_COLUMNS]
    return {
        column_name(name): lists[name] if name in lists else _column([row.get(name) for row in rows])
        for name in sorted(names)
    }


def column_name(field: str) -> str:
    """The name of a field's column."""
    return f"meta_{_text(field)}" if field in TAKEN else _text(field)


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables below each other; a column missing in one is null there, and one of several types becomes texts."""
    types: dict[str, set[pa.DataType]] = {}
    for table in tables:
        for field in table.schema:
            if not pa.types.is_null(field.type):
                types.setdefault(field.name, set()).add(field.type)
    mixed = {name for name, kinds in types.items() if len(kinds) > 1 and not kinds <= {pa.int64(), pa.float64()}}
    return pa.concat_tables([_with_texts(table, mixed) for table in tables], promote_options="permissive")


def _with_texts(table: pa.Table, names: set[str]) -> pa.Table:
    for place, name in enumerate(table.schema.names):
        if name in names:
            table = table.set_column(place, name, table[name].cast(pa.string()))
    return table


def _column(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int} and all(value is None or value in _INT64 for value in values):
        return pa.array(values, pa.int64() if kinds else pa.null())
    if kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    return pa.array([None if value is None else _said(value) for value in values], pa.string())


def _said(value: Any) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    # JSON can escape halves of characters, which cannot be written down.
    return value.encode("utf-8", "replace").decode()


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
