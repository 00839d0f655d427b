"""Says what a declared column of targets holds: numbers, vectors, lists of any length, texts, or several labels."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.formats.base import TARGET_COLUMNS
from frostline.datasets.formats.labels import LABEL_FIELDS, OTHER_LABELS, TAKEN, no_class
from frostline.errors import DataError, SettingError, nearest

__all__ = (
    "MASK",
    "MULTI_LABEL",
    "NUMBER",
    "RAGGED",
    "TEXT",
    "TEXTS",
    "VECTOR",
    "Declared",
    "MultiLabel",
    "TargetSpec",
    "check_classes",
    "checked_targets",
    "listed",
    "specs_of",
)

NUMBER, VECTOR, RAGGED, TEXT, TEXTS, MULTI_LABEL = "number", "vector", "ragged", "text", "texts", "multi_label"
MASK = "mask"
"""The kind of masks, and the name by which they are declared beside columns."""

_INT, _FLOAT, _OBJECT = "int64", "float32", "object"
_MASKS = TARGET_COLUMNS.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiLabel:
    """A column of lists of classes, given as a vector of zeros and ones: one number a class.

    Attributes:
        column: name of the column; its lists hold names of classes, or whole numbers from 0.
        classes: names of the classes in the order of the vector; those in the data, in their order, by default.
    """

    column: str
    classes: tuple[str, ...] = ()


Declared = tuple[str | MultiLabel, ...]
"""Columns of targets as a data set is asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What a declared column gives for a sample.

    Attributes:
        name: name by which it was declared.
        column: name of the manifest's column.
        kind: ``number``, ``vector``, ``ragged`` (lists of any length), ``text``, ``texts`` (lists of them),
            ``multi_label``, or ``mask``: the class of each pixel of the network's input.
        dtype: ``int64`` or ``float32``; ``object`` for texts.
        shape: shape of a sample's value; None stands for a length that differs from sample to sample.
        classes: names of the classes of ``multi_label``, where they have names.
        is_json: the manifest keeps the values as JSON.
    """

    name: str
    column: str
    kind: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    classes: tuple[str, ...] = ()
    is_json: bool = False

    @property
    def is_fixed(self) -> bool:
        """A batch of it is one array."""
        return self.kind in (NUMBER, VECTOR, MULTI_LABEL)


def checked_targets(targets: Any) -> tuple[Declared | None, bool]:
    """The columns that ``Dataset(targets=)`` names, None where it names none of them; and whether it is a single one.

    Raises:
        SettingError: it is neither the name of a column nor several of them, or names one twice.
    """
    if targets is None:
        return None, False
    if isinstance(targets, str | MultiLabel):
        return (targets,), True
    if not isinstance(targets, Sequence) or not all(isinstance(name, str | MultiLabel) for name in targets):
        raise SettingError(
            "targets takes the name of a column, a MultiLabel, several of these, or () for no targets at all, not "
            f"{targets!r}"
        )
    names = [_name(declared) for declared in targets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingError(f"targets names the column {twice!r} twice: name it once")
    return tuple(targets), False


def check_classes(table: pa.Table, url: str) -> None:
    """Make sure that labels are classes, where no targets are declared.

    Args:
        table: table of a whole manifest.
        url: address of the data, for sentences.

    Raises:
        DataError: labels are numbers with a sign or a fraction, or lists.
    """
    if OTHER_LABELS in table.column_names:
        column = table[OTHER_LABELS]
        first = column.drop_null()[0] if pa.types.is_string(column.type) else pc.min(column)
        raise DataError(f"{url} has no classes: {no_class(str(first.as_py()))}")


def specs_of(declared: Declared, table: pa.Table, url: str) -> tuple[TargetSpec, ...]:
    """What each declared column gives, by all of its values, so that parts of a data set give the same.

    Args:
        declared: columns to look at.
        table: table of a whole manifest.
        url: address of the data, for sentences.

    Raises:
        SettingError: there is no such column.
        DataError: a column holds what no loop can be given.
    """
    return tuple(_spec(item, table, url) for item in declared)


def _spec(declared: str | MultiLabel, table: pa.Table, url: str) -> TargetSpec:
    name = _name(declared)
    if declared == MASK and MASK not in table.column_names and _MASKS in table.column_names:
        return TargetSpec(name=MASK, column=_MASKS, kind=MASK, dtype=_INT, shape=(None, None))
    column = _column_called(name, table.column_names, url)
    spec = _kind_of(name, column, table[column])
    return _multi_label(declared, spec, table[column]) if isinstance(declared, MultiLabel) else spec


def _name(declared: str | MultiLabel) -> str:
    return declared if isinstance(declared, str) else declared.column


def _column_called(name: str, names: Sequence[str], url: str) -> str:
    """A column by the name that the data has for it, which the manifest may have changed."""
    likely = [OTHER_LABELS] if name in LABEL_FIELDS else []
    likely += [f"meta_{name}"] if name in TAKEN else []
    found = next((known for known in (*likely, name) if known in names), None)
    if found is None:
        raise SettingError(
            f"{url} has no column {name!r} for targets, only {', '.join(names)}{nearest(name, names)}; lists of more "
            "than 256 values are in no manifest: bring them with Dataset.with_columns"
        )
    return found


def _kind_of(name: str, column: str, values: pa.ChunkedArray) -> TargetSpec:
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return TargetSpec(name=name, column=column, kind=NUMBER, dtype=_INT)
    if pa.types.is_floating(kind):
        return TargetSpec(name=name, column=column, kind=NUMBER, dtype=_FLOAT)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _kind_of_texts(name, column, values)
    if pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        return _kind_of_lists(name, column, values)
    raise DataError(
        f"the column {name!r} has the type {kind}, and targets are numbers, texts, lists of them, or lists of lists of "
        "numbers"
    )


def _kind_of_texts(name: str, column: str, values: pa.ChunkedArray) -> TargetSpec:
    texts = (values.cast(pa.string()) if pa.types.is_dictionary(values.type) else values).drop_null()
    first = next((_parsed(text) for text in texts.slice(0, 1).to_pylist()), None)
    if not isinstance(first, list) or not _all(texts, r"(?s)^\s*\[.*\]\s*$"):
        return TargetSpec(name=name, column=column, kind=TEXT, dtype=_OBJECT)
    if _any(texts, '"'):
        return TargetSpec(name=name, column=column, kind=TEXTS, dtype=_OBJECT, shape=(None,), is_json=True)
    dtype = _FLOAT if _any(texts, "[.eENI]") else _INT
    if _any(texts, r"^\s*\[\s*\["):
        inner = next(parsed[0] for text in texts.to_pylist() if (parsed := _parsed(text)) and isinstance(parsed, list))
        shape: tuple[int | None, ...] = (None, len(inner) if isinstance(inner, list) else 0)
        return TargetSpec(name=name, column=column, kind=RAGGED, dtype=dtype, shape=shape, is_json=True)
    commas = pc.min_max(pc.count_substring(texts, ","))
    if commas["min"].as_py() < commas["max"].as_py() or _any(texts, r"^\s*\[\s*\]\s*$"):
        return TargetSpec(name=name, column=column, kind=RAGGED, dtype=dtype, shape=(None,), is_json=True)
    length = commas["max"].as_py() + 1
    return TargetSpec(name=name, column=column, kind=VECTOR, dtype=dtype, shape=(length,), is_json=True)


def _kind_of_lists(name: str, column: str, values: pa.ChunkedArray) -> TargetSpec:
    inner = values.type.value_type
    if pa.types.is_string(inner) or pa.types.is_large_string(inner):
        return TargetSpec(name=name, column=column, kind=TEXTS, dtype=_OBJECT, shape=(None,))
    lengths = pc.min_max(pc.list_value_length(values))
    if pa.types.is_nested(inner):
        widths = pc.list_value_length(pc.list_flatten(values)).drop_null()
        dtype = _FLOAT if pa.types.is_floating(inner.value_type) else _INT
        shape = (None, widths[0].as_py() if len(widths) else 0)
        return TargetSpec(name=name, column=column, kind=RAGGED, dtype=dtype, shape=shape)
    dtype = _FLOAT if pa.types.is_floating(inner) else _INT
    if lengths["min"].as_py() != lengths["max"].as_py() or not lengths["max"].as_py():
        return TargetSpec(name=name, column=column, kind=RAGGED, dtype=dtype, shape=(None,))
    return TargetSpec(name=name, column=column, kind=VECTOR, dtype=dtype, shape=(lengths["max"].as_py(),))


def _multi_label(declared: MultiLabel, spec: TargetSpec, values: pa.ChunkedArray) -> TargetSpec:
    is_list = spec.kind == TEXTS or (spec.kind in (RAGGED, VECTOR) and spec.dtype == _INT and len(spec.shape) == 1)
    if not is_list:
        raise DataError(
            f"the column {spec.name!r} holds no lists of classes, by their names or by whole numbers from 0"
        )
    unique = values.unique() if spec.is_json else values
    found = {label for value in unique.to_pylist() for label in listed(spec, value)}
    if declared.classes:
        classes, count = declared.classes, len(declared.classes)
    elif spec.kind == TEXTS:
        classes = tuple(sorted(found))
        count = len(classes)
    else:
        classes, count = (), max(found, default=-1) + 1
    return TargetSpec(
        name=spec.name,
        column=spec.column,
        kind=MULTI_LABEL,
        dtype=_FLOAT,
        shape=(count,),
        classes=classes,
        is_json=spec.is_json,
    )


def listed(spec: TargetSpec, value: Any) -> list[Any]:
    """The list that a sample's value is; none where the sample has no value.

    Raises:
        DataError: the text is no JSON of a list.
    """
    found = _parsed(value) if spec.is_json and value is not None else value
    if found is None and value is None:
        return []
    if not isinstance(found, list):
        raise DataError(f"the column {spec.name!r} holds lists, and {str(value)[:50]!r} is none")
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _all(texts: pa.ChunkedArray, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _any(texts: pa.ChunkedArray, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())
