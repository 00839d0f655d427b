"""Decides labels and classes from what samples say of themselves: numbers as they are, names in their order."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from frostline.datasets.formats.base import COLUMNS, TARGET_COLUMNS
from frostline.datasets.formats.lists import flattened, list_column
from frostline.errors import DataError

__all__ = (
    "LABEL_FIELDS",
    "NO_CLASSES",
    "OTHER_LABELS",
    "SOURCE",
    "TAKEN",
    "URL_FIELDS",
    "Labelled",
    "classified",
    "columns_of",
    "joined",
    "labelled",
    "no_class",
    "numbered",
    "said_by",
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
