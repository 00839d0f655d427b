"""What formats of tables share: the roles of columns, and tables of single objects made into the table of all."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.declared import first_twice
from frostline.core.errors import DataError, SettingError
from frostline.datasets.formats.base import (
    COLUMNS,
    column_of,
    column_paths,
    is_list,
    is_text,
    label_column,
    nested_names,
    simple_type,
    stable_ids,
    without_extension,
)
from frostline.datasets.formats.folders import MASK_FIELDS, fill_masks
from frostline.datasets.formats.labels import (
    LABEL_FIELDS,
    OTHER_LABELS,
    URL_FIELDS,
    Labelled,
    check_column_names,
    class_labels,
    column_labels,
    column_name,
    find_name,
    label_text,
    names_by_path,
    refuse_labels,
)
from frostline.datasets.formats.left_out import COLUMNS_LEFT, LeftOut, of_names
from frostline.preprocess.steps import MAX_INPUTS, is_argument
from frostline.stores.protocols import Names

__all__ = (
    "LOOKED_AT",
    "ORIENTATION",
    "SAID",
    "ColumnRoles",
    "TableFile",
    "columns_by_input",
    "columns_in_text",
    "columns_of_schema",
    "features_of",
    "finish_table",
    "is_label",
    "is_scalar",
    "json_values",
    "label_texts",
    "may_name_classes",
    "named_labels",
    "names_of_columns",
    "number_lists",
    "omissions_of_table",
    "path_leaf",
    "plain_column",
    "read_back",
    "roles_in",
    "roles_of_parts",
    "texts_of_labels",
    "with_names_for_masks",
    "with_types",
)


SAID = "/said"
"""The column of tables of single objects that holds labels as texts, until all are known; no field is called so."""


class TableFile(NamedTuple):
    """A file of a table, until all of them are put together.

    Attributes:
        table: samples of the file, with labels as texts in ``SAID``.
        classes: names that the numbers of its labels stand for; empty where it has none.
        left_out: rows and columns of it that are no samples.
        is_turned: the data's own reader turns its images as their EXIF data says.
        named: names that the numbers of other columns stand for, by the column.
    """

    table: pa.Table
    classes: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    is_turned: bool
    named: Mapping[str, tuple[str, ...]]


def names_of_columns(
    tables: Sequence[pa.Table], named: Sequence[Mapping[str, tuple[str, ...]]]
) -> dict[str, tuple[str, ...]]:
    """The names that numbers of columns stand for, as all files say that have them; none where files say others.

    Args:
        tables: table of each file, with labels as texts in ``SAID``.
        named: names that the numbers of its columns stand for, by the column.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, names in {name: names for some in named for name, names in some.items()}.items():
        each = zip(tables, named, strict=True)
        said = {some.get(name) for table, some in each if _has_values(table, name)} or {names}
        if None not in said or len(said) > 2:  # where some say nothing, and others one thing, numbers stay numbers
            found[name] = (said.pop() or ()) if len(said) == 1 else ()
    return found


def _has_values(table: pa.Table, name: str) -> bool:
    place = SAID if name == OTHER_LABELS else name  # where labels stand until those of all files are known
    return place in table.schema.names and table[place].null_count < len(table)


def finish_table(table: pa.Table, said: Labelled) -> pa.Table:
    """The table of all samples, with ids and labels in the place of what was said; labels of other kinds beside."""
    ids = stable_ids(Names(table["name"]))
    table = fill_masks(table)
    about = [name for name in table.schema.names if name not in COLUMNS.names and name != SAID]
    table = table.append_column("id", pa.array(ids)).append_column("label", label_column(said.labels))
    table = table.select([*COLUMNS.names, *about])
    return table if said.other is None else table.append_column(OTHER_LABELS, said.other)


def omissions_of_table(object: str, columns: Sequence[str], long: Sequence[str] = ()) -> tuple[LeftOut, ...]:
    """What is left out of a file's columns: those whose values are neither samples nor metadata.

    Args:
        object: name of the file.
        columns: paths of columns of other types.
        long: paths of columns of long lists.
    """
    of_type = of_names(COLUMNS_LEFT, "of a type that is no metadata", columns, object)
    return (*of_type, *of_names(COLUMNS_LEFT, "of lists too long for metadata", long, object))


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column in one of few types, so that those of several files go together; nothing of its values is lost.

    Numbers are of 64 bits, or decimals where they are larger; times are whole microseconds, or nanoseconds where they
    are finer; dates are days, and texts are UTF-8.
    """
    column = without_extension(column)
    kind = simple_type(column.type)
    if pa.types.is_temporal(kind):
        return _in_units(column.cast(kind))
    if pa.types.is_decimal(kind):
        return column.cast(kind if kind.bit_width >= _DECIMAL_BITS else pa.decimal128(kind.precision, kind.scale))
    if pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return column.cast(kind)
    if pa.types.is_integer(kind):
        try:
            return column.cast(pa.int64())
        except pa.ArrowInvalid:  # a value that only numbers without a sign have
            return column.cast(kind).cast(_ALL_WHOLE)
    return column.cast(pa.float64() if pa.types.is_floating(kind) else pa.string())


_DECIMAL_BITS = 128
_ALL_WHOLE = pa.decimal128(20, 0)


def _in_units(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_date(kind):
        return column.cast(pa.date32())
    if pa.types.is_time(kind):
        made: Callable[[str], pa.DataType] = pa.time64
    elif pa.types.is_duration(kind):
        made = pa.duration
    elif pa.types.is_timestamp(kind):
        made = partial(pa.timestamp, tz=kind.tz)
    else:  # intervals, which have no unit of their own
        return column.cast(pa.string())
    try:
        return column.cast(made("us"))
    except pa.ArrowInvalid:  # a value has nanoseconds
        return column.cast(made("ns"))


def json_values(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """The values of a column as JSON has them: dates, times and decimals as texts, durations in their units."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_duration(kind):
        return list(column.cast(pa.int64()).to_pylist())
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return list(column.cast(pa.string()).to_pylist())
    return list(column.to_pylist())


def read_back(values: pa.Array | Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The inverse of ``json_values``.

    Raises:
        ArrowException: a value is none of that type.
    """
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    found = values if isinstance(values, pa.Array) else _array(values, kind)
    if pa.types.is_time(kind):  # which Arrow reads from no text of their own
        moments = pc.binary_join_element_wise("1970-01-01", found.cast(pa.string()), " ")
        return moments.cast(pa.timestamp(kind.unit)).cast(kind)
    if pa.types.is_duration(kind):
        return found.cast(pa.int64()).cast(kind)
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return found.cast(pa.string()).cast(kind)
    return found.cast(kind)


def with_types(table: pa.Table, types: bytes) -> pa.Table:
    """A table with the types that columns had before they were written as JSON; others stay as they are.

    Args:
        table: samples of a shard.
        types: schema of Arrow that holds them; empty where there is none.
    """
    with suppress(pa.ArrowException, OSError):
        for field in pa.ipc.read_schema(pa.py_buffer(types)) if types else ():
            place = table.schema.get_field_index(field.name)
            if place >= 0 and is_scalar(field.type):
                column = read_back(table[field.name].combine_chunks(), field.type)
                table = table.set_column(place, field.name, column)
    return table


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_duration(kind):
        return pa.array(values, pa.int64())
    return pa.array(values, pa.string() if pa.types.is_temporal(kind) or pa.types.is_decimal(kind) else kind)


def number_lists(kind: pa.DataType) -> tuple[pa.DataType, tuple[int, ...]] | None:
    """The type of the numbers of a column of lists, and the shape of each value but for its first length.

    None where it is no column of lists of numbers; lists whose own items are lists of any length are none either. Lists
    of fixed lengths may lie in each other, and so may tensors of one shape.
    """
    kind = _storage(kind)
    if not _is_list(kind):
        return None
    inner, shape = kind.value_type, []
    while pa.types.is_fixed_size_list(inner):
        shape.append(inner.list_size)
        inner = inner.value_type
    is_number = pa.types.is_integer(inner) or (pa.types.is_floating(inner) and inner != pa.float16())
    return (inner, tuple(shape)) if is_number else None


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


# Begins what says several columns by the inputs that are made of them.
_SEVERAL = "?"

# Where no words say it: what image columns are called, and then the first that could be one.
_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "data")

# Where labels are images, they are masks.
_MASK_NAMES = (*MASK_FIELDS, *LABEL_FIELDS)


ORIENTATION = b"frostline.orientation"
"""In a schema's metadata, what counts before Hugging Face's: ``stored`` where a copy's source turns no images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRoles:
    """What the columns of a file are.

    Attributes:
        image: path of the leaf with the encoded images, or with what else the samples are.
        mask: path of the leaf with the encoded masks; None where no column is one.
        label: name of the column; None where no column is one.
        other: name of a column that is called as labels are and holds something else; None where none is.
        classes: names that a label's number stands for; empty where it is its own.
        about: paths of scalar columns beside them.
        lists: paths of columns of lists, maps and structs.
        left: columns that are none of these, such as other binary ones.
        is_turned: Hugging Face's ``datasets`` reads the images, which turns them as their EXIF data says; of a copy of
            ours, its source is read so.
        named: names that the numbers of other columns stand for, by what the column is called among metadata.
    """

    image: str
    mask: str | None
    label: str | None
    other: str | None
    classes: tuple[str, ...]
    about: tuple[str, ...]
    lists: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    is_turned: bool = False
    named: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def columns_of_schema(schema: pa.Schema, column: str | None = None) -> ColumnRoles | None:
    """What the columns are; None where none can hold samples, or the chosen one cannot.

    Args:
        schema: schema of the file; the metadata of Hugging Face's ``datasets`` names images, labels and classes.
        column: name of the column with the samples: texts, lists of numbers or binary; by default images.
    """
    features = features_of(schema)
    leaves = {field.name: path for field in schema if (path := _image_leaf(field)) is not None}
    named = [name for name in leaves if _kind(features.get(name)) == "Image"]
    called = (name for field in _IMAGE_NAMES if (name := find_name([*leaves], (field,))) is not None)
    likely = [*named, *called, *leaves]
    image = next(iter([*(name for name in likely if find_name((name,), _MASK_NAMES) is None), *likely]), None)
    if column is not None:
        image, chosen = column, _chosen_leaf(schema, column)
        leaves = {} if chosen is None else {column: chosen}
    if image is None or image not in leaves:
        return None
    mask = find_name([name for name in leaves if name != image], _MASK_NAMES)
    numbered = [name for name in schema.names if _kind(features.get(name)) == "ClassLabel"]
    can_be = [name for name in schema.names if name != image and is_label(schema.field(name).type)]
    of_classes = [name for name in can_be if name in numbered]
    label = find_name(of_classes, LABEL_FIELDS) or next(iter(of_classes), None) or find_name(can_be, LABEL_FIELDS)
    other = find_name([name for name in schema.names if name not in leaves and _is_other(schema, name)], LABEL_FIELDS)
    other = other if label is None else None
    used = {label, other, image, mask, *leaves}
    names = frozenset(schema.names)
    beside = [(path, kind) for path, kind in column_paths(schema) if column_of(names, path) not in used]
    images = [name for name in leaves if name not in (label, other, image, mask)]
    about = tuple(path for path, kind in beside if is_scalar(kind))
    nested = nested_names(schema)
    kept = {*about, *nested}
    lists = tuple(path for path, _ in beside if path in nested)
    classes = names_by_path(features)
    return ColumnRoles(
        image=leaves[image],
        mask=None if mask is None else leaves[mask],
        label=label,
        other=other,
        classes=classes.get(label or "", ()),
        about=about,
        lists=lists,
        left=(
            *images,
            *(path for name in (image, mask) if name is not None for path in _fields_beside(schema.field(name))),
            *(path for path, _ in beside if path not in kept),
        ),
        is_turned=_kind(features.get(image)) == "Image" and (schema.metadata or {}).get(ORIENTATION) != b"stored",
        named={
            OTHER_LABELS if path == other else column_name(path): names
            for path, names in classes.items()
            if names and path in (*about, *lists, other)
        },
    )


def features_of(schema: pa.Schema) -> dict[str, Any]:
    """What a schema says of columns to Hugging Face's ``datasets``, by column; empty where it says nothing."""
    try:
        said = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = said["info"]["features"]
        return features if isinstance(features, dict) else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _kind(feature: Any) -> str | None:
    return feature.get("_type") if isinstance(feature, dict) else None


def _image_leaf(field: pa.Field) -> str | None:
    if _is_binary(field.type):
        return str(field.name)
    if pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
        return f"{field.name}.bytes" if _is_binary(field.type.field("bytes").type) else None
    return None


def _fields_beside(field: pa.Field) -> list[str]:
    """The paths of what a struct of images holds beside the images and the paths of their files."""
    fields = field.type if pa.types.is_struct(field.type) else ()
    return [f"{field.name}.{inner.name}" for inner in fields if inner.name not in ("bytes", "path")]


def path_leaf(schema: pa.Schema, leaf: str | None) -> str | None:
    """The path of the leaf with the paths of files whose contents another leaf holds; None where there is none.

    Args:
        schema: schema of the file.
        leaf: path of the leaf with the contents, such as ``image.bytes``.
    """
    column, _, field = (leaf or "").rpartition(".")
    kind = dict(column_paths(schema)).get(f"{column}.path") if field == "bytes" else None
    return f"{column}.path" if kind is not None and is_text(kind) else None


def _chosen_leaf(schema: pa.Schema, column: str) -> str | None:
    if schema.names.count(column) != 1:
        return None
    field = schema.field(column)
    return column if is_text(field.type) or number_lists(field.type) is not None else _image_leaf(field)


def _is_binary(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def is_label(kind: pa.DataType) -> bool:
    """Whether a column of that type can say labels of classes, which names and numbers do."""
    plain = simple_type(kind)
    is_number = pa.types.is_integer(plain) or pa.types.is_floating(plain) or pa.types.is_decimal(plain)
    return is_text(plain) or bool(is_number or pa.types.is_boolean(plain))


def _is_other(schema: pa.Schema, name: str) -> bool:
    """Whether a column holds labels of another kind, or something that is refused.

    Dates and times are metadata, and so are the fields of a struct, of which one may be named as the label.
    """
    kind = schema.field(name).type
    return not (pa.types.is_null(kind) or pa.types.is_temporal(kind) or pa.types.is_struct(kind))


def is_scalar(kind: pa.DataType) -> bool:
    """Whether a column of that type can be metadata."""
    plain = simple_type(kind)
    is_number = pa.types.is_integer(plain) or pa.types.is_floating(plain) or pa.types.is_decimal(plain)
    is_time = pa.types.is_temporal(plain) and not pa.types.is_interval(plain)
    return bool(is_number or is_time or pa.types.is_boolean(plain) or pa.types.is_null(plain)) or is_text(plain)


def columns_in_text(columns: str | Mapping[str, str]) -> str:
    """The column with the samples, or the columns with their parts, as one text: ``?pixel_values=image&...``.

    Raises:
        SettingError: there are fewer than two parts or more than eight, or one is called as no argument can be.
    """
    text = columns if isinstance(columns, str) else _SEVERAL + urlencode(dict(columns))
    columns_by_input(text)
    return text


def columns_by_input(text: str | None) -> dict[str, str]:
    """The inverse of ``columns_in_text``: columns by the inputs that are made of them; none where there is one column.

    Raises:
        SettingError: see ``columns_in_text``.
    """
    if text is None or not text.startswith(_SEVERAL):
        return {}
    pairs = parse_qsl(text[len(_SEVERAL) :], keep_blank_values=True)
    found = dict(pairs)
    if not 2 <= len(found) <= MAX_INPUTS or len(found) != len(pairs) or len(set(found.values())) != len(found):
        raise SettingError(f"column names from 2 to {MAX_INPUTS} inputs and for each a column of its own, not {text!r}")
    if not all(map(is_argument, found)):
        raise SettingError(f"column names arguments of the network, such as pixel_values, not {text!r}")
    return found


def roles_of_parts(object: str, schema: pa.Schema, text: str | None) -> tuple[ColumnRoles, tuple[str, ...]]:
    """What the columns of a file are, and the paths of the leaves that samples are made of: one, or one a part.

    Args:
        object: name of the file, for the sentences.
        schema: schema of the file.
        text: the column, or the columns by input; by default the one with images.

    Raises:
        DataError: see ``roles_in``.
    """
    columns = list(columns_by_input(text).values())
    if not columns:
        roles = roles_in(object, schema, text)
        return roles, (roles.image,)
    roles = roles_in(object, schema, columns[0])
    label = None if roles.label in columns else roles.label
    about, lists, left = (
        tuple(path for path in some if column_of(schema.names, path) not in columns)
        for some in (roles.about, roles.lists, roles.left)
    )
    parts = [roles_in(object, schema, column) for column in columns]
    is_turned = any(part.is_turned for part in parts)
    roles = replace(roles, label=label, about=about, lists=lists, left=left, is_turned=is_turned)
    return roles, tuple(part.image for part in parts)


def roles_in(object: str, schema: pa.Schema, column: str | None = None) -> ColumnRoles:
    """What the columns of a file are, where it holds samples and labels that can be.

    Args:
        object: name of the file, for the sentences.
        schema: schema of the file.
        column: column with the samples, as for ``columns_of_schema``.

    Raises:
        DataError: no column can hold samples, or labels are targets of no kind; the sentence names the columns.
    """
    twice = first_twice(schema.names) or first_twice(path for path, _ in column_paths(schema))
    if twice is not None:
        raise DataError(f"{object} has two columns called {twice!r}: give each its own name")
    columns = columns_of_schema(schema, column)
    if columns is None:
        raise DataError(_lacks(object, schema, column))
    check_column_names(object, (*columns.about, *columns.lists))
    kind = None if columns.other is None else schema.field(columns.other).type
    if kind is not None and not is_list(kind):
        raise refuse_labels(object, str(columns.other), kind)
    return columns


def _lacks(object: str, schema: pa.Schema, column: str | None) -> str:
    names = ", ".join(schema.names)[:200]
    several = next((field.name for field in schema if column in (None, field.name) and _holds_images(field.type)), None)
    if several is not None:
        return (
            f"{object} has several images a row in its column {several!r}, and a column has one: write each into a "
            "column of its own (all rows need as many), and name those by the network's inputs, as in "
            "column={'left': 'image_1', 'right': 'image_2'}"
        )
    fields = [field for field in schema if column is None or field.name == column.partition(".")[0]]
    within = next((path for field in fields if _image_leaf(field) is None for path in _images_within(field)), None)
    if within is not None:
        return (
            f"{object} has images within another column, as {within!r}: write them into a column of their own, which "
            f"is binary, or a struct with the binary field 'bytes'; its columns are {names}"
        )
    if column is not None:
        return f"{object} has no column {column!r} of texts, lists of numbers or binary values; its columns are {names}"
    return (
        f"{object} has no column of images: one is binary, or a struct with the binary field 'bytes'; "
        f"its columns are {names}{_hint(schema)}"
    )


def _holds_images(kind: pa.DataType) -> bool:
    is_one = _is_list(kind) or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    return is_one and (_image_leaf(pa.field("", kind.value_type)) is not None or _holds_images(kind.value_type))


def _images_within(field: pa.Field) -> Iterator[str]:
    """The paths of images in the fields of a struct, however deep."""
    for inner in field.type if pa.types.is_struct(field.type) else ():
        path = pa.field(f"{field.name}.{inner.name}", inner.type)
        if _image_leaf(path) is not None or _holds_images(inner.type):
            yield path.name
        yield from _images_within(path)


def _hint(schema: pa.Schema) -> str:
    texts = [field.name for field in schema if is_text(field.type)]
    url = next((name for name in URL_FIELDS if name in texts), None)
    if url is not None:
        return f"; if {url} says where images are, name the format: format='urls', or --format urls"
    if not texts:
        return ""
    return (
        f"; if samples are the texts in {texts[0]}, name the column: column={texts[0]!r}, or --column {texts[0]}; if "
        f"they say which file each sample is, file_column={texts[0]!r}, or --file-column {texts[0]}"
    )


# Longer values are no names of classes.
_LONGEST_NAME = 256
LOOKED_AT = 64
"""Values of a column by which it is judged whether they are names or masks."""


def may_name_classes(columns: ColumnRoles) -> bool:
    """Whether the column of masks is called as labels are, and its type does not say that they are images."""
    return columns.label is None and columns.mask is not None and find_name((columns.mask,), LABEL_FIELDS) is not None


def with_names_for_masks(columns: ColumnRoles, values: Sequence[bytes]) -> ColumnRoles:
    """The roles where a binary column that is called as labels are holds names and no masks; else as they were.

    Args:
        columns: roles for which ``may_name_classes`` holds.
        values: first values of that column.
    """
    return replace(columns, label=columns.mask, mask=None) if values and all(map(_is_name, values)) else columns


def _is_name(value: bytes) -> bool:
    try:
        return len(value) <= _LONGEST_NAME and value.decode().isprintable()
    except UnicodeDecodeError:
        return False


# What Hugging Face writes for a sample without a class, where classes have names.
_NO_CLASS = -1


def label_texts(object: str, columns: ColumnRoles, beside: pa.Table) -> pa.ChunkedArray | pa.Array:
    """What samples say of themselves: names of classes where numbers stand for them, null where nothing.

    Args:
        object: name of the file, for the sentences.
        columns: roles of its columns.
        beside: columns beside the images, that of the labels among them.

    Raises:
        DataError: a label is a number of no class, or no text in UTF-8.
    """
    if columns.label is None:
        other = None if columns.other is None else beside[columns.other]
        return pa.nulls(len(beside), pa.string()) if other is None else column_labels(other, label_text)
    return texts_of_labels(object, beside[columns.label], columns.classes)


def texts_of_labels(object: str, column: pa.ChunkedArray, classes: Sequence[str]) -> pa.ChunkedArray | pa.Array:
    """What a column of labels says, by the names that its numbers stand for where there are some.

    Raises:
        DataError: a label is a number of no class, or no text in UTF-8, or two numbers have one name.
    """
    values = _without_nan(without_extension(column))
    if not classes or not _are_whole(values):
        return column_labels(values, label_text)
    return named_labels(object, values.cast(pa.int64()), classes)


def named_labels(place: str, numbers: pa.ChunkedArray, classes: Sequence[str]) -> pa.ChunkedArray:
    """What numbers say that stand for names of classes; the numbers, where one of them can be no class.

    Args:
        place: the file or the column, for the sentence.
        numbers: whole numbers; -1 and null where a sample has no class.
        classes: the names.

    Raises:
        DataError: a number has no name, or two have the same.
    """
    if (twice := first_twice(classes)) is not None:
        raise DataError(f"{place} has two classes called {twice!r} in its table of classes: give each its own name")
    greatest = pc.max(numbers).as_py()
    if greatest is not None and greatest >= len(classes):
        raise DataError(f"{place} has a label {greatest} and names for {len(classes)} classes only")
    minimum = pc.min(numbers).as_py()
    if minimum is not None and minimum < _NO_CLASS:
        return numbers.cast(pa.string())
    numbers = pc.if_else(pc.greater_equal(numbers, 0), numbers, pa.scalar(None, pa.int64()))
    names = class_labels(classes, are_names=True)
    return pa.chunked_array([pa.array(names, pa.string()).take(numbers.combine_chunks())])


def _without_nan(values: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_floating(values.type):
        return values
    values = values.cast(pa.float64())
    return pc.if_else(pc.is_nan(values), pa.scalar(None, pa.float64()), values)


def _are_whole(values: pa.ChunkedArray) -> bool:
    """Whether a column holds whole numbers, also as floats, which they become where one of them is missing."""
    if pa.types.is_decimal(values.type):
        there = values.drop_null()
        return bool(pc.all(pc.equal(pc.floor(there), there)).as_py())
    if pa.types.is_floating(values.type):
        there = values.drop_null()
        return bool(pc.all(pc.equal(pc.floor(there), there)).as_py()) and not pc.any(pc.is_inf(there)).as_py()
    return bool(pa.types.is_integer(values.type))
