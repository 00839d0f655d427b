"""What a declared column of targets holds, and the targets of a batch's rows, read when it is put together."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.declared import first_twice
from frostline.core.errors import DataError, SettingError
from frostline.core.hints import add_hints, suggest_names
from frostline.datasets.formats.base import TARGET_COLUMNS, ManifestColumns, SelectedRows
from frostline.datasets.formats.labels import LABEL_FIELDS, OTHER_LABELS, TAKEN, find_name, no_classes
from frostline.datasets.selection import check_names_agree, values_of

__all__ = (
    "MASK",
    "MULTI_LABEL",
    "NUMBER",
    "RAGGED",
    "TEXT",
    "TEXTS",
    "VECTOR",
    "Declared",
    "KnownNames",
    "LabelledSample",
    "MultiLabel",
    "TargetColumns",
    "TargetSpec",
    "TargetValue",
    "TargetValues",
    "check_classes",
    "checked_targets",
    "list_values",
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
        classes: names of the classes in the order of the vector; by default those that the data's own table of classes
            has for its numbers, else those in the data, in their order.
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
        classes: names of the classes of ``multi_label``, or of those that whole numbers stand for; empty without any.
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
        SettingError: The argument is neither the name of a column nor several of them, or names one twice.
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
    twice = first_twice(names)
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
        raise DataError(f"{url} has no classes: {no_classes(table[OTHER_LABELS])}")


def specs_of(
    declared: Declared, table: pa.Table, url: str, named: Mapping[str, tuple[str, ...]]
) -> tuple[TargetSpec, ...]:
    """What each declared column gives, by all of its values, so that parts of a data set give the same.

    Args:
        declared: columns to look at.
        table: table of a whole manifest.
        url: address of the data, for sentences.
        named: names that numbers stand for, by the column.

    Raises:
        SettingError: there is no such column.
        DataError: a column holds what no loop can be given.
    """
    return tuple(_spec(item, table, url, named) for item in declared)


def _spec(declared: str | MultiLabel, table: pa.Table, url: str, named: Mapping[str, tuple[str, ...]]) -> TargetSpec:
    name = _name(declared)
    if declared == MASK and MASK not in table.column_names and _MASKS in table.column_names:
        return TargetSpec(name=MASK, column=_MASKS, kind=MASK, dtype=_INT, shape=(None, None))
    column = _column_called(name, table.column_names, url)
    spec = _kind_of(name, column, table[column])
    check_names_agree(named, column)
    names = named.get(column, ()) if spec.dtype == _INT else ()
    if isinstance(declared, MultiLabel):
        return _multi_label(declared, spec, table[column], names)
    return replace(spec, classes=names)


def _name(declared: str | MultiLabel) -> str:
    return declared if isinstance(declared, str) else declared.column


def _column_called(name: str, names: Sequence[str], url: str) -> str:
    """A column by the name that the data has for it, which the manifest may have changed."""
    likely = [OTHER_LABELS] if find_name((name,), LABEL_FIELDS) is not None else []
    likely += [f"meta_{name}"] if name in TAKEN else []
    found = next((known for known in (*likely, name) if known in names), None) or find_name(names, (name,))
    if found is None:
        own = [known for known in names if known not in TAKEN]
        raise SettingError(
            f"{url} has no column {name!r} for targets, only {', '.join(own) or 'labels'}{suggest_names(name, own)}; "
            "lists of more than 256 values are in no manifest: bring them with Dataset.with_columns"
        )
    return found


# More do not fit into 64 bits.
_INT_DIGITS = 18


def _kind_of(name: str, column: str, values: pa.ChunkedArray) -> TargetSpec:
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    is_whole = pa.types.is_decimal(kind) and not kind.scale and kind.precision <= _INT_DIGITS
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_whole:
        return TargetSpec(name=name, column=column, kind=NUMBER, dtype=_INT)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
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


def _multi_label(declared: MultiLabel, spec: TargetSpec, values: pa.ChunkedArray, names: tuple[str, ...]) -> TargetSpec:
    is_list = spec.kind == TEXTS or (spec.kind in (RAGGED, VECTOR) and spec.dtype == _INT and len(spec.shape) == 1)
    if not is_list:
        raise DataError(
            f"the column {spec.name!r} holds no lists of classes, by their names or by whole numbers from 0"
        )
    unique = values.unique() if spec.is_json else values
    found = {label for value in unique.to_pylist() for label in list_values(spec, value)}
    if known := declared.classes or names:
        classes, count = known, len(known)
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


def list_values(spec: TargetSpec, value: Any) -> list[Any]:
    """The list that a sample's value is; none where the sample has no value.

    Raises:
        DataError: the text is no JSON of a list.
    """
    found = _parsed(value) if spec.is_json and value is not None else value
    if found is None and value is None:
        return []
    if not isinstance(found, list):
        raise DataError(f"the column {spec.name!r} holds lists, and {str(value)[:50]!r} is not one")
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


TargetValue = npt.NDArray[np.generic] | list[Any]
"""A column of a batch: one array; or a list with an array, a text or a list of texts for each sample."""
TargetValues = TargetValue | dict[str, TargetValue]
"""The targets of a batch: those of a column, or of several by their names."""

_Rows = npt.NDArray[np.int64]


class TargetColumns:
    """The declared targets of a data set, by the rows of its samples. Immutable, safe for threads.

    Args:
        columns: table of the whole manifest.
        rows: rows of the data set; None where it has all of them.
        specs: kinds of the declared columns.
        is_single: one column was declared by its name alone, so that a batch has its values and no dict.

    Attributes:
        specs: the targets as given.
        is_single: True if given as one.

    Raises:
        DataError: samples have no value in a column that cannot say so.
    """

    def __init__(
        self, columns: ManifestColumns, rows: SelectedRows | None, specs: Sequence[TargetSpec], *, is_single: bool
    ) -> None:
        self._columns = columns
        self._rows = rows
        self.specs = tuple(specs)
        self.is_single = is_single
        for spec in specs:
            self._check_values(spec)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._columns) if self._rows is None else len(self._rows)

    @property
    def has_masks(self) -> bool:
        """The samples' masks are among them."""
        return any(spec.kind == MASK for spec in self.specs)

    def at(self, rows: _Rows, masks: TargetValue | None = None) -> TargetValues:
        """The targets of some samples.

        Args:
            rows: rows of the data set's own samples, ``int64[n]``.
            masks: the masks, which are in no column; None where none are declared.

        Raises:
            DataError: a value does not have the shape that its column has.
        """
        places = pa.array(rows if self._rows is None else self._rows.at(rows))
        found: dict[str, TargetValue] = {}
        for spec in self.specs:
            if spec.kind != MASK:
                found[spec.name] = _values(spec, self._taken(spec, places))
            elif masks is not None:
                found[spec.name] = masks
        return found[self.specs[0].name] if self.is_single else found

    def _taken(self, spec: TargetSpec, places: pa.Array) -> pa.Array:
        column = self._columns.table.column(spec.column)
        found = column.take(places).combine_chunks()
        self._columns.forget()
        return found

    def _check_values(self, spec: TargetSpec) -> None:
        column = self._columns.table.column(spec.column)
        if (spec.kind == NUMBER and spec.dtype == "float32") or not column.null_count:
            return
        values = values_of(self._columns, self._rows, spec.column)
        without = values.null_count
        if without:
            how = f", such as select({f'{spec.column} is not None'!r})" if spec.column.isidentifier() else ""
            raise DataError(
                f"{without} of {len(values)} samples have no value in the column {spec.name!r}, which is a target: "
                f"leave them out{how}"
            )


def _values(spec: TargetSpec, column: pa.Array) -> TargetValue:
    if spec.kind == NUMBER:
        return _numbers(spec, column)
    values: list[Any] = column.to_pylist()
    if spec.kind == TEXT:
        return values
    lists = [list_values(spec, value) for value in values]
    if spec.kind == TEXTS:
        return lists
    if spec.kind == MULTI_LABEL:
        return _many_hot(spec, lists)
    if spec.kind == VECTOR:
        return _array(spec, lists, (len(lists), *spec.shape))
    return [_array(spec, value, (len(value), *spec.shape[1:])) for value in lists]


def _numbers(spec: TargetSpec, column: pa.Array) -> TargetValue:
    plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    wide = plain.cast(pa.float64() if spec.dtype == "float32" else pa.int64())
    return np.array(wide.to_numpy(zero_copy_only=False), spec.dtype)


def _array(spec: TargetSpec, values: list[Any], shape: tuple[int | None, ...]) -> npt.NDArray[np.generic]:
    if not values:
        return np.zeros([length or 0 for length in shape], spec.dtype)
    try:
        found = np.array(values, spec.dtype)
    except (OverflowError, TypeError, ValueError):
        found = np.zeros(0)
    if found.shape != shape:
        raise DataError(
            f"the column {spec.name!r} holds {spec.dtype} values of the shape {list(spec.shape)}, and "
            f"{str(values)[:60]} has another one"
        )
    return found


def _many_hot(spec: TargetSpec, lists: Sequence[list[Any]]) -> npt.NDArray[np.float32]:
    found = np.zeros((len(lists), *[length or 0 for length in spec.shape]), np.float32)
    places = {name: place for place, name in enumerate(spec.classes)}
    for row, labels in enumerate(lists):
        for label in labels:
            found[row, _place(spec, places, label)] = 1
    return found


def _place(spec: TargetSpec, places: dict[str, int], label: object) -> int:
    if isinstance(label, str) and label in places:
        return places[label]
    if isinstance(label, int) and 0 <= label < (spec.shape[0] or 0):
        return label
    raise DataError(f"the column {spec.name!r} holds {label!r}, which is none of its {spec.shape[0]} classes")


class KnownNames:
    """Names by which users of torchvision, datasets, scikit-learn and pandas know what a data set has."""

    @property
    def class_to_idx(self: Any) -> dict[str, int]:
        """The number of each class by its name, as torchvision's data sets have it."""
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def targets(self: Any) -> TargetValues:
        """The target of each sample, as a batch has them, read from the manifest alone.

        Without declared targets these are the labels, ``int64[len(self)]`` with -1 where a sample has none, as
        torchvision's data sets have them. Masks are not among them: they are read with their samples.

        Raises:
            SettingError: there is no such column, or masks are declared.
            DataError: a column's values cannot be targets, or samples have none where they must.
        """
        columns: TargetColumns | None = self.target_columns
        if columns is None:
            return np.asarray(self.samples.labels, np.int64)
        if columns.has_masks:
            raise SettingError("masks are read with their samples: take the targets of data[0], or of a loader's batch")
        return columns.at(np.arange(len(self)))

    @targets.setter
    def targets(self, _: object) -> NoReturn:
        raise AttributeError(
            "targets are the data's: name the column with others, as in Dataset(url, targets=...), or change each "
            "sample with its label by map=function of a loader"
        )

    def __add__(self, other: Self) -> Self:
        data: Any = self
        joined: Self = data.concatenate(other)
        return joined

    @add_hints
    def shuffle(self, seed: int = 0) -> Self:
        """The same samples in a seeded random order, 8 bytes a sample; a loader with ``shuffle=True`` needs none."""
        data: Any = self
        shuffled: Self = data.take(np.random.default_rng(seed).permutation(len(data)))
        return shuffled

    def column(self: Any, name: str) -> pa.ChunkedArray:
        """A column's values, one a sample, in the samples' order.

        Raises:
            SettingError: the data set has no column of that name.
        """
        return self.selection.column(name)

    def to_pandas(self: Any) -> Any:
        """The columns of the samples as a ``DataFrame`` of pandas, which has to be installed, one row a sample."""
        return pa.table({name: self.column(name) for name in self.columns}).to_pandas()

    @add_hints
    def train_test_split(self, test_size: float = 0.25, *, seed: int = 0) -> dict[str, Self]:
        """Divide each class into a part to train on and a part to test on, as ``split`` does with these two names.

        Args:
            test_size: share of the samples to test on, a float below 1; or about so many of them, an int.
            seed: seed of the draw; the same seed gives the same parts.

        Raises:
            SettingError: the size makes no sense.
            DataError: a part would be empty.
        """
        data: Any = self
        share = test_size / max(1, len(data)) if isinstance(test_size, int) else test_size
        if not 0 < share < 1:
            raise SettingError(f"test_size is a share below 1 or fewer than the {len(data)} samples, not {test_size}")
        parts: dict[str, Self] = data.split({"train": 1 - share, "test": share}, seed)
        return parts


class LabelledSample(tuple[Any, Any]):
    """A sample as torchvision's data sets give it, ``image, label = data[0]``, and as others': ``data[0]["label"]``."""

    __slots__ = ()

    def __getitem__(self, place: Any) -> Any:
        """The image or the label, by number or by a name of it.

        Raises:
            KeyError: a sample has nothing of that name.
        """
        if not isinstance(place, str):
            return super().__getitem__(place)
        if place not in _IN_A_SAMPLE:
            raise KeyError(f"a sample has an image and a label, and no {place!r}: write image, label = data[0]")
        return super().__getitem__(_IN_A_SAMPLE[place])

    def keys(self) -> tuple[str, str]:
        """The names of both, as ``dict(data[0])`` asks for them."""
        return "image", "label"


_IN_A_SAMPLE = {
    **dict.fromkeys(("image", "images", "inputs", "pixel_values", "x"), 0),
    **dict.fromkeys(("label", "labels", "target", "targets", "y"), 1),
}
