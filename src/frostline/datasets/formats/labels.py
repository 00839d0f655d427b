"""Decides labels, classes and splits from what samples, folders and files say of themselves. Pure."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from itertools import filterfalse
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.declared import first_twice
from frostline.core.errors import DataError
from frostline.datasets.formats.base import COLUMNS, TARGET_COLUMNS, flatten_row, list_column
from frostline.datasets.formats.left_out import COLUMNS_LEFT, LeftOut, of_names

__all__ = (
    "CLASSES",
    "KEY_FOLDERS",
    "LABEL_FIELDS",
    "NO_CLASSES",
    "OTHER_LABELS",
    "SOURCE",
    "SPLIT",
    "TAKEN",
    "URL_FIELDS",
    "Labelled",
    "are_divided",
    "are_numbers",
    "check_column_names",
    "class_labels",
    "class_name",
    "class_number",
    "class_table",
    "classes_in",
    "column_labels",
    "columns_of",
    "common_table",
    "divided_by_keys",
    "encode_labels",
    "find_name",
    "folder_splits",
    "in_order",
    "inner_splits",
    "is_split",
    "join_tables",
    "label_field",
    "label_text",
    "named_columns",
    "names_by_path",
    "no_class",
    "no_classes",
    "refuse_labels",
    "require_one_kind",
    "scoring_splits",
    "split_names",
    "split_of",
    "splits_of",
    "text_label",
    "training_split",
    "with_names",
    "with_splits",
)


LABEL_FIELDS = ("label", "cls", "class", "class_name")
"""Fields and columns that say a sample's label, the first that is there; see ``find_name``."""

URL_FIELDS = (
    "url", "uri", "image_url", "file_name", "path", "file_path", "image_path", "image_file", "image", "image_name",
    "file", "image_id", "id",
)  # fmt: skip
"""Columns of lists that say where a sample is, the first that is there."""

OTHER_LABELS = "frostline_label"
"""The column of labels that are no classes: numbers with a sign or a fraction, or lists as texts."""

NO_CLASSES = (
    "a label says a class, by its name or by a whole number from 0, and is empty or null where a sample has none: "
    "declare targets of other kinds, as by Dataset(url, targets='label') or --targets label of frostline train"
)
"""What is said of labels that are none of a class."""


def refuse_labels(object: str, column: str, kind: pa.DataType) -> DataError:
    """The error of a column of labels whose type says no classes."""
    why = NO_CLASSES
    if pa.types.is_struct(kind):
        why = "the field that says the class needs a column of its own, as by pyarrow's table.flatten(): then name that"
    return DataError(f"{object} has a column {column!r} of the type {kind}, and {why}")


# More would not be classes but something else that was taken for them.
_MAX_CLASSES = 1 << 24
# Targets of another kind: with a sign, a point or an exponent, and lists.
_ANY_NUMBER = re.compile(r"[-+]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|inf|Infinity)")
_DIGITS = re.compile(r"[0-9]{1,18}")
_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")
# Those of postal codes and of names that are filled up: no number is written so.
_LEADING_ZERO = re.compile(r"0[0-9]+")
_LIST = re.compile(r"\[.*\]", re.DOTALL)
# A name among labels as they are said; numbers and lists stand there as they are written.
_NAME = '"'


_NO_LETTER = re.compile(r"[\W_]+")


def find_name(names: Sequence[str], fields: Sequence[str]) -> str | None:
    """The first of some fields among names, as people match them: ``File Name`` is ``file_name``; None for none."""
    exact = next((field for field in fields if field in names), None)
    if exact is not None:
        return exact
    plain = {_letters(name): name for name in reversed(names)}
    return next((plain[_letters(field)] for field in fields if _letters(field) in plain), None)


def label_field(about: Mapping[str, Any]) -> str | None:
    """The field of JSON that says a label: ``label`` also where it is null; None where there is none."""
    # The fields of an object that is called as labels are stay metadata, of which one may be named as the label.
    can_be = [name for name, value in about.items() if not isinstance(value, dict)]
    said = [name for name in can_be if about[name] is not None]
    return find_name(can_be, LABEL_FIELDS[:1]) or find_name(said, LABEL_FIELDS)


@lru_cache(1 << 12)
def _letters(name: str) -> str:
    return _NO_LETTER.sub("", name.casefold())


class Labelled(NamedTuple):
    """What the samples of a data set say of themselves.

    Attributes:
        labels: number of each sample's class, ``int64[n]``; -1 where it has none.
        classes: names of the classes, by label.
        other: column of labels that are no classes; None where labels are classes.
        are_names: labels were said by names; False where their numbers were said.
    """

    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    other: pa.Array | None = None
    are_names: bool = False


def encode_labels(said: pa.ChunkedArray | pa.Array | Sequence[str | None], names: Sequence[str] = ()) -> Labelled:
    """Labels as classes, where they are some; else a column of the numbers or lists that they are, and no classes.

    Where every sample that says anything says a whole number, also one such as 1.0, numbers are labels, and their texts
    are the names of the classes, from 0 to the greatest. Else labels are names, in their order; names that are whole
    numbers stand in the order of their values.

    Args:
        said: labels, as ``label_text`` and ``text_label`` give them; null where a sample has none.
        names: names of all classes, by label, where the data has them; they count where every label is one of them.

    Raises:
        DataError: a number is too large to be that of a class, or numbers, names and lists are mixed.
    """
    column = said if isinstance(said, pa.ChunkedArray | pa.Array) else pa.array(said, pa.string())
    found = pc.dictionary_encode(column)
    found = found.unify_dictionaries().combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    distinct: list[str] = found.dictionary.to_pylist() if len(found) else []
    texts = [class_name(label) for label in distinct]
    if names and set(texts) <= set(names):
        return _placed(found, texts, names, are_names=distinct != texts or not are_numbers(names))
    numbers = [label for label in distinct if _ANY_NUMBER.fullmatch(label)]
    lists = [label for label in distinct if _is_list(label)]
    if len(numbers) == len(distinct):
        whole = [class_number(label) for label in distinct]
        if None not in whole:
            return _numbered(found, [number for number in whole if number is not None])
        return _with_others(found, _numbers(distinct))
    if distinct and len(lists) == len(distinct):
        return _with_others(found, pa.array(distinct, pa.string()))
    if lists:
        raise DataError(no_class(lists[0]))
    return _placed(found, texts, in_order(texts), are_names=True)


def _taken(found: pa.Array, values: Sequence[int | None]) -> npt.NDArray[np.int64]:
    """A value for each sample, by the number of what it says; -1 where it says nothing."""
    if not len(found):
        return np.zeros(0, np.int64)
    places = pa.array(values, pa.int64()).take(found.indices)
    return np.array(pc.fill_null(places, -1).to_numpy(zero_copy_only=False), np.int64)


def _placed(found: pa.Array, texts: Sequence[str], names: Sequence[str], *, are_names: bool) -> Labelled:
    place = {name: number for number, name in enumerate(names)}
    return Labelled(_taken(found, [place[text] for text in texts]), tuple(names), are_names=are_names)


def _with_others(found: pa.Array, values: pa.Array) -> Labelled:
    return Labelled(np.full(len(found), -1, np.int64), (), values.take(found.indices))


def class_number(label: str) -> int | None:
    """The number of a class that a label says, also one such as 1.0; None where it says none."""
    if not _ANY_NUMBER.fullmatch(label):
        return None
    if _DIGITS.fullmatch(label):
        return int(label)
    number = float(label)
    return int(number) if number.is_integer() and number >= 0 else None


def _numbers(labels: Sequence[str]) -> pa.Array:
    if all(map(_WHOLE.fullmatch, labels)):
        return pa.array(list(map(int, labels)), pa.int64())
    return pa.array(list(map(float, labels)), pa.float64())


def _is_list(text: str) -> bool:
    try:
        return _LIST.fullmatch(text) is not None and isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False


def in_order(names: Iterable[str]) -> list[str]:
    """Names of classes in their order: that of texts, or of the values where all of them are whole numbers."""
    different = set(names)
    if all(map(_DIGITS.fullmatch, different)):
        return sorted(different, key=lambda name: (int(name), name))
    return sorted(different)


def _numbered(found: pa.Array, numbers: Sequence[int]) -> Labelled:
    greatest = max(numbers, default=-1)
    if greatest >= _MAX_CLASSES:
        raise DataError(f"{greatest} is no number of a class: labels are names, or numbers below {_MAX_CLASSES}")
    return Labelled(_taken(found, numbers), tuple(str(number) for number in range(greatest + 1)))


CLASSES = "classes.json"
"""The object beside class folders that holds the table of their classes."""


def are_numbers(classes: Sequence[str]) -> bool:
    """Whether classes have no names but their numbers."""
    return all(name == str(number) for number, name in enumerate(classes))


def class_table(classes: Sequence[str]) -> bytes:
    """The table of classes as copies carry it: their names in the order of their numbers, as JSON; or how many.

    Many thousand classes without names would else be as large as samples are.
    """
    return json.dumps(len(classes) if are_numbers(classes) else list(classes), ensure_ascii=True).encode()


def classes_in(table: bytes) -> tuple[str, ...]:
    """The inverse of ``class_table``; empty where it is none."""
    try:
        found = json.loads(table)
    except (ValueError, RecursionError):
        return ()
    if isinstance(found, int) and 0 <= found <= _MAX_CLASSES:
        return tuple(map(str, range(found)))
    is_table = isinstance(found, list) and all(isinstance(name, str) for name in found)
    return tuple(map(_text, found)) if is_table and len(set(found)) == len(found) else ()


def common_table(tables: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], str]:
    """The one table of classes that several objects declare, and which of them do: ``all``, ``some`` or none.

    The names are empty where none does, or two declare different ones.
    """
    different = set(tables)
    declared = different - {()}
    names = next(iter(declared)) if len(declared) == 1 else ()
    return names, "" if not declared else "all" if len(different) == 1 else "some"


def names_by_path(features: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The names that numbers stand for, by the path of their column; also those in lists, and in fields of structs.

    Args:
        features: features of Hugging Face's ``datasets``, by column.
    """
    found: dict[str, tuple[str, ...]] = {}
    for column, feature in features.items():
        inner = _within_lists(feature)
        is_struct = isinstance(inner, dict) and not isinstance(inner.get("_type"), str)
        fields = {f"{column}.{name}": value for name, value in inner.items()} if is_struct else {column: inner}
        for path, field in fields.items():
            match _within_lists(field):
                case {"_type": "ClassLabel", "names": list(names)}:
                    found[path] = tuple(map(str, names))
    return found


def _within_lists(feature: Any) -> Any:
    """The feature of the values of lists, in each of the ways in which ``datasets`` wrote it; another one as it is."""
    while True:
        match feature:
            case {"_type": "Sequence" | "List" | "LargeList", "feature": inner} | [inner]:
                feature = inner
            case _:
                return feature


def with_names(table: pa.Table, said: str, names: Sequence[str]) -> pa.Table:
    """A table whose labels are names where they are numbers of classes, and a table of classes gives these names.

    Args:
        table: samples of an object.
        said: name of the column with labels as texts.
        names: table of classes; empty where there is none.

    Raises:
        DataError: a number has no name.
    """
    numbers = {label: class_number(label) for label in table[said].unique().to_pylist() if label is not None}
    whole = [number for number in numbers.values() if number is not None]
    if not whole or len(whole) < len(numbers) or not names or are_numbers(names):
        return table
    if max(whole) >= len(names):
        raise DataError(
            f"{table['object'][0].as_py()} has a label {max(whole)} and names for {len(names)} classes only"
        )
    column = column_labels(table[said], lambda label: None if label is None else _name(names[numbers[label] or 0]))
    return table.set_column(table.schema.get_field_index(said), said, column)


def label_text(label: object, *, is_exact: bool = False) -> str | None:
    """A label of JSON, of a table or of a file of Parquet, as ``encode_labels`` takes it; None where it says nothing.

    A text is a name, also one of digits, and a number is a number.

    Args:
        label: value that says the label.
        is_exact: True where blanks around a name belong to it.
    """
    match label:
        case None:
            return None
        case bool():
            return _name(str(label))
        case str():
            return label if _is_list(label) else _name(label if is_exact else label.strip())
        case bytes():
            return _name(_decoded(label).strip())
        case int():
            return str(label)
        case float():
            return None if math.isnan(label) else repr(label)
        case Decimal():
            return str(int(label)) if label == label.to_integral_value() else repr(float(label))
        case list():
            return json.dumps(label)
        case _:
            raise DataError(no_class(str(label)))


def text_label(text: str | None) -> str | None:
    """A label of a file of plain text, in which nothing but the text itself tells a number from a name.

    What is written with zeros in front, such as a postal code, is a name.
    """
    plain = (text or "").strip()
    is_number = _ANY_NUMBER.fullmatch(plain) and not _LEADING_ZERO.fullmatch(plain)
    return plain if is_number or _is_list(plain) else _name(plain)


def class_name(said: str) -> str:
    """The name of a class that a label says; of a number its text."""
    return str(json.loads(said)) if said.startswith(_NAME) else said


def require_one_kind(labels: Iterable[tuple[pa.ChunkedArray, str]]) -> None:
    """Make sure that labels are numbers in all files, or names: nobody says which number stands for which name.

    Args:
        labels: column of each file, as ``label_text`` gives labels, and the file's name.

    Raises:
        DataError: The labels are numbers in one file and names in another.
    """
    first: dict[bool, tuple[str, str]] = {}
    for column, file in labels:
        one = next((label for label in column.unique().to_pylist() if label is not None), None)
        if one is not None:
            first.setdefault(class_name(one) == one, (class_name(one), file))
    if len(first) == 2:
        (number, numbered), (name, named) = first[True], first[False]
        raise DataError(
            f"labels are numbers in {numbered} ({number}) and names in {named} ({name}), and nothing says which number "
            "stands for which name: write the same kind into all files"
        )


def class_labels(names: Sequence[str], *, are_names: bool) -> list[str | None]:
    """What ``encode_labels`` made classes of, by label."""
    return [_name(name) if are_names else name for name in names]


def column_labels(column: pa.ChunkedArray | pa.Array, said: Callable[[Any], str | None]) -> pa.ChunkedArray | pa.Array:
    """The labels of a column, each different one asked for once."""
    if pa.types.is_integer(column.type):
        return column.cast(pa.string())
    if pa.types.is_nested(column.type):
        return pa.array([said(value) for value in column.to_pylist()], pa.string())
    if pa.types.is_string_view(column.type) or pa.types.is_binary_view(column.type):  # which make no dictionaries
        column = column.cast(pa.string() if pa.types.is_string_view(column.type) else pa.binary())
    found = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    found = found.unify_dictionaries().combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    if not len(column):
        return pa.array([], pa.string())
    return pa.array([said(value) for value in found.dictionary.to_pylist()], pa.string()).take(found.indices)


def _name(text: str) -> str | None:
    return json.dumps(_text(text), ensure_ascii=False) if text else None


def _decoded(label: bytes) -> str:
    try:
        return label.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"a label is {label[:20]!r}, which is no text in UTF-8") from error


def no_class(label: str) -> str:
    """What is said of a label that is none of a class."""
    return f"a label is {label[:50]!r}, and {NO_CLASSES}"


def no_classes(column: pa.ChunkedArray | pa.Array) -> str:
    """What is said of labels that are no classes: texts that are lists, or numbers of which some are none of classes.

    Args:
        column: labels, null where a sample has none.
    """
    if not pa.types.is_string(column.type):
        fraction = pc.not_equal(pc.floor(column), column)
        column = column.filter(pc.or_(pc.or_(pc.less(column, 0), fraction), pc.is_inf(column)))
    return no_class(str(column.drop_null()[0].as_py()))


SOURCE = "frostline_source"
"""The column that says what a sample was called before it was first copied; what users call ``source`` is their own."""

# Data whose fields are names of things would else have as many columns as samples.
_MAX_COLUMNS = 256
# What a table without masks calls its columns must not make it one with masks.
TAKEN = frozenset([*COLUMNS.names, *TARGET_COLUMNS.names])
"""The names of a sample's own columns: a field that is called so becomes another column."""
_INT64 = range(-(1 << 63), 1 << 63)
_DECIMALS = range(1 - 10**38, 10**38)


def columns_of(rows: Sequence[Mapping[str, Any]], object: str) -> tuple[dict[str, pa.Array], tuple[LeftOut, ...]]:
    """One column a field of JSON, null where it does not stand, and what is left out: long lists, and many fields.

    Whole numbers, other numbers, truth values and texts become columns of their type; a field with several kinds of
    values, or with numbers that a number would round, becomes texts. The fields of an object are fields of their own,
    and what is nested deeper, as lists are, is text in JSON. Of more than 256 fields, those are columns that most rows
    have.

    Args:
        rows: the rows.
        object: name of the object that holds them.
    """
    inner = set[str]()
    rows = [flatten_row(row, inner) for row in rows]
    count = Counter(name for row in rows for name in row)
    nested = {name for row in rows for name, value in row.items() if isinstance(value, dict | list)}
    lists = {name: list_column([row.get(name) for row in rows]) for name in nested}
    twice = sorted(name for name in count if column_name(name) != _text(name) and column_name(name) in count)
    names = [name for name, _ in count.most_common() if lists.get(name, ()) is not None and name not in twice]
    long = sorted(name for name, column in lists.items() if column is None)
    left = (
        *of_names(COLUMNS_LEFT, "of lists too long for metadata", long, object),
        *of_names(COLUMNS_LEFT, "in an object, called as another field is, which counts", sorted(inner), object),
        *of_names(COLUMNS_LEFT, "called as samples' own are, while another has the name with meta_", twice, object),
        *of_names(COLUMNS_LEFT, f"beyond the {_MAX_COLUMNS} that most samples have", names[_MAX_COLUMNS:], object),
    )
    return {
        _text(name): lists[name] if name in lists else _column([row.get(name) for row in rows])
        for name in sorted(names[:_MAX_COLUMNS])
    }, left


def named_columns(columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """Columns as a table of samples calls them: those named as one of a sample's own get ``meta_`` before it."""
    return {column_name(name): column for name, column in columns.items()}


def column_name(field: str) -> str:
    """The name of a field's column."""
    return f"meta_{_text(field)}" if field in TAKEN else _text(field)


def check_column_names(object: str, fields: Iterable[str]) -> None:
    """Make sure that no two fields of a file would be one column.

    Raises:
        DataError: A field has the name of a sample's own column, and another one the name that it would get.
    """
    twice = first_twice(map(column_name, fields))
    if twice is not None:
        raise DataError(
            f"{object} has columns called {twice.removeprefix('meta_')!r} and {twice!r}, and the first would be called "
            "as the second, since samples have a column of its name: rename one of them"
        )


def join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables below each other; a column missing in one is null there, and one of several types becomes texts."""
    types: dict[str, set[pa.DataType]] = {}
    for table in tables:
        for field in table.schema:
            if not pa.types.is_null(field.type):
                types.setdefault(field.name, set()).add(field.type)
    mixed = {name for name, kinds in types.items() if not _go_together(kinds)}
    return pa.concat_tables([_with_texts(table, mixed) for table in tables], promote_options="permissive")


def _go_together(kinds: set[pa.DataType]) -> bool:
    """Whether columns of these types become one of numbers, of decimals, or of times in the finest unit."""
    return kinds <= {pa.int64(), pa.float64()} or len({(kind.id, getattr(kind, "tz", None)) for kind in kinds}) == 1


def _with_texts(table: pa.Table, names: set[str]) -> pa.Table:
    for place, name in enumerate(table.schema.names):
        if name in names:
            table = table.set_column(place, name, table[name].cast(pa.string()))
    return table


def _column(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    whole = [value for value in values if type(value) is int]
    if kinds <= {int} and all(value in _INT64 for value in whole):
        return pa.array(values, pa.int64() if kinds else pa.null())
    if kinds == {int} and all(value in _DECIMALS for value in whole):
        return pa.array([None if value is None else Decimal(value) for value in values], pa.decimal128(38, 0))
    if kinds <= {int, float} and all(value in _DECIMALS and float(value) == value for value in whole):
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
_INNER_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
# What stands beside them in the names of folders without classes.
_OF_SPLITS = frozenset(
    {"data", "image", "images", "img", "imgs", "jpeg", "jpg", "photo", "photos", "pictures", "png", "set", "split"}
)
# As the Hugging Face hub calls the parts of a split.
_PART = re.compile(r"(?:^|/)([^/]+)-\d{5}-of-\d{5}(?:-[0-9a-f]{16})?\.parquet$")
# More values than people have splits: the column says something else.
_MAX = len(_TRAINED) + len(_SCORED)


def is_split(name: str) -> bool:
    """Whether a folder or a value is called as a split is."""
    return name.lower() in (*_TRAINED, *_SCORED)


def training_split(splits: Iterable[str]) -> str | None:
    """The split to train on; None where none is called so."""
    return _first(_TRAINED, splits)


def scoring_splits(splits: Iterable[str]) -> Sequence[str]:
    """The splits to score, those for validation before those for the last test."""
    return sorted(filter(_is_scored, splits), key=lambda name: _SCORED.index(name.lower()))


def are_divided(splits: Iterable[str]) -> bool:
    """Whether there are a split to train on and one to score."""
    names = list(splits)
    return training_split(names) is not None and bool(scoring_splits(names))


def folder_splits(
    folders: Iterable[str], pairs: Callable[[], Iterable[tuple[str, str]]], *, are_classes: bool = False
) -> dict[str, str]:
    """The split of each folder that is one, and not a class that happens to be called so; empty where none is.

    Where all folders are called exactly as splits, they are some, if one of them has class folders, and those without
    are not for training. Beside other folders, a split to train on and one to score must both have class folders. A
    word within a name says a split, as in ``train_set``, where every folder says another one, and they share a class.
    Where none has class folders, as ``train2017`` beside ``val2017``, a split to train on and one to score are some if
    nothing but numbers and words for images stands beside the splits' names.

    Args:
        folders: name of the first folder in the path of each image.
        pairs: function that gives the pairs of first and second folder that there are; the second is empty where there
            is none.
        are_classes: True where a table of classes lies beside the folders, so that those without class folders are
            classes.
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
    if not divided and not mixed and not are_classes:
        is_clear = len(words) == len(names) == len(set(words.values())) and are_divided(words.values())
        return words if is_clear and all(map(_says_split_alone, names)) else {}
    if len(exact) == len(names):
        bare = names - divided - mixed
        return exact if divided and not mixed and training_split(bare) is None else {}
    if exact.keys() <= divided and are_divided(exact.values()):
        return exact
    if len(words) == len(names) == len(set(words.values())) and names <= divided and are_divided(words.values()):
        return words if set.intersection(*seconds.values()) else {}
    return {}


def inner_splits(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The split of each folder within those of classes that is one; empty where none is.

    They are some where each of several classes has one to train on, and there is one to score: what is scored would
    else be trained on.

    Args:
        pairs: pairs of first and second folder that there are; the second is empty where there is none.
    """
    inner: dict[str, set[str]] = {}
    for first, second in pairs:
        inner.setdefault(first, set()).add(second)
    splits = {name: name.lower() for names in inner.values() for name in names if is_split(name)}
    are_all = len(inner) > 1 and all(training_split(names) is not None for names in inner.values())
    return splits if are_all and are_divided(splits.values()) else {}


def splits_of(files: Sequence[str]) -> dict[str, str] | None:
    """The split of each file that says one, where the files say at least two: those that say none are in none.

    A file says a split where one word of its name is that of a split, such as ``train-00000.parquet`` and
    ``cifar-test-01.tar``, or one word of the folder that it lies in, of the innermost such folder. Beside such files,
    where all others are called as the Hugging Face hub calls the parts of a split, each says its own, whatever it is:
    ``extra-00000-of-00001.parquet``.
    """
    found = {file: split for file in files if (split := split_of(file)) is not None}
    parts = {file: part[1] for file in files if file not in found and (part := _PART.search(file))}
    if found and len(found) + len(parts) == len(files):
        found |= parts
    return found if len(set(found.values())) > 1 else None


def split_names(table: pa.Table, *, divided_by_names: bool = False) -> tuple[str, ...]:
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
    return () if others and not divided_by_names else (*sorted(trained), *scoring_splits(names), *sorted(others))


def with_splits(
    table: pa.Table, files: Sequence[str], rows: Sequence[int], said: Mapping[str, str] | None = None
) -> tuple[pa.Table, bool]:
    """A table with the column ``split`` that the names of its files say, and whether they say any.

    A column that the data itself calls so stays as it is.

    Args:
        table: samples of all files.
        files: the names, in the table's order.
        rows: number of rows of each file.
        said: splits of files where the data itself says them, whatever they are called; by default names say them.
    """
    splits = splits_of(files) if said is None else said
    if splits is None or SPLIT in table.schema.names:
        return table, False
    each = [pa.repeat(pa.scalar(splits.get(file), pa.string()), count) for file, count in zip(files, rows, strict=True)]
    return table.append_column(SPLIT, pa.chunked_array(each, pa.string())), True


KEY_FOLDERS = "^(?:(?P<first>[^/]*)/)?(?:(?P<second>[^/]*)/)?"
"""The first and the second folder of a key; empty where it has none."""


def divided_by_keys(tables: Sequence[pa.Table], shards: Sequence[str], said: str) -> tuple[list[pa.Table], bool]:
    """The tables with the splits that the first folders of keys are, as in ``train/cat/1.jpg``, and whether any is.

    The second folder then says the label where the first would have. The second may be the splits as well, as in
    ``cat/train/1.jpg``, and says no label.

    Args:
        tables: samples of each shard.
        shards: names of the shards.
        said: name of the column with labels as texts.
    """
    keys = (pc.utf8_slice_codeunits(table["name"], len(shard) + 1) for table, shard in zip(tables, shards, strict=True))
    found = [pc.extract_regex(names, KEY_FOLDERS).combine_chunks() for names in keys]
    folders = [(pc.struct_field(parts, "first"), pc.struct_field(parts, "second")) for parts in found]
    firsts = {name for first, _ in folders for name in pc.unique(first).to_pylist()}
    pairs = partial(_pairs_of, folders)
    if SPLIT in {name for table in tables for name in table.column_names}:
        return list(tables), False
    if splits := folder_splits(firsts, pairs):
        return [_divided(table, *both, splits, said) for table, both in zip(tables, folders, strict=True)], True
    seconds = {name for _, second in folders for name in pc.unique(second).to_pylist()}
    inner = inner_splits(pairs()) if training_split(seconds - {None}) is not None else {}
    if not inner:
        return list(tables), False
    each = [pa.array([inner.get(name) for name in second.to_pylist()], pa.string()) for _, second in folders]
    return [table.append_column(SPLIT, column) for table, column in zip(tables, each, strict=True)], True


def _pairs_of(folders: Iterable[tuple[pa.Array, pa.Array]]) -> set[tuple[str, str]]:
    return {pair for first, second in folders for pair in zip(first.to_pylist(), second.to_pylist(), strict=True)}


def _divided(table: pa.Table, first: pa.Array, second: pa.Array, splits: Mapping[str, str], label: str) -> pa.Table:
    each = pa.array([splits.get(name) for name in first.to_pylist()], pa.string())
    by_folder = pa.array([label_text(name or None) for name in first.to_pylist()], pa.string())
    inner = pa.array([label_text(name or None) for name in second.to_pylist()], pa.string())
    is_moved = pc.and_(pc.is_valid(each), pc.fill_null(pc.equal(table[label], by_folder), False))
    said = pc.if_else(is_moved, inner, table[label])
    return table.set_column(table.schema.get_field_index(label), label, said).append_column(SPLIT, each)


def split_of(file: str) -> str | None:
    """The split that the name of a file or of the folder that it lies in says; None where none does, or several do."""
    for part in reversed(file.split("/")):
        if _words_of(part):
            return _word_of(part)
    return None


def _words_of(name: str) -> set[str]:
    return {word for word in _words_in(name) if is_split(word)}


def _words_in(name: str) -> list[str]:
    """The words of a name, also those that only a capital begins, as in ``trainLabels``."""
    return _NO_WORD.split(_INNER_WORD.sub(" ", name).lower())


def _word_of(name: str) -> str | None:
    """The one word of a name that is that of a split; None where there is none, or several."""
    said = _words_of(name)
    return said.pop() if len(said) == 1 else None


def _is_scored(name: str) -> bool:
    return name.lower() in _SCORED


def _says_split_alone(name: str) -> bool:
    """Whether nothing stands in the name of a folder but that of a split, numbers and words for images."""
    return all(is_split(word) or word in _OF_SPLITS for word in _words_in(name) if word)


def _first(words: Sequence[str], names: Iterable[str]) -> str | None:
    known = {name.lower(): name for name in names}
    return next((known[word] for word in words if word in known), None)


def _is_text(kind: pa.DataType) -> bool:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(plain) or pa.types.is_large_string(plain))
