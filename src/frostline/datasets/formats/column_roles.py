"""Decides which column of a file holds images, masks, labels and metadata, by schema and by name. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.formats.labels import LABEL_FIELDS, NO_CLASSES, URL_FIELDS
from frostline.datasets.formats.lists import in_json, is_list, list_names
from frostline.datasets.formats.tables import plain
from frostline.datasets.formats.targets import MASK_FIELDS
from frostline.datasets.parquet.number_lists import number_lists
from frostline.errors import DataError, SettingError
from frostline.preprocess.named_inputs import MAX_INPUTS, is_argument

__all__ = (
    "ColumnRoles",
    "columns_by_input",
    "columns_in_text",
    "columns_of_schema",
    "is_label",
    "is_scalar",
    "is_target",
    "labels_said",
    "roles_in",
    "roles_of_parts",
)

# Begins what says several columns by the inputs that are made of them.
_SEVERAL = "?"

# Where no words say it: what image columns are called, and then the first that could be one.
_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "data")

# Where labels are images, they are masks.
_MASK_NAMES = (*MASK_FIELDS, *LABEL_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRoles:
    """What the columns of a file are.

    Attributes:
        image: path of the leaf with the encoded images, or with what else the samples are.
        mask: path of the leaf with the encoded masks; None where no column is one.
        label: name of the column; None where no column is one.
        other: name of a column that is called as labels are and holds something else; None where none is.
        classes: names that a label's number stands for; empty where it is its own.
        about: scalar columns beside them.
        lists: paths of columns of lists.
    """

    image: str
    mask: str | None
    label: str | None
    other: str | None
    classes: tuple[str, ...]
    about: tuple[str, ...]
    lists: tuple[str, ...] = ()


def columns_of_schema(schema: pa.Schema, column: str | None = None) -> ColumnRoles | None:
    """What the columns are; None where none can hold samples, or the chosen one cannot.

    Args:
        schema: schema of the file; the metadata of Hugging Face's ``datasets`` names images, labels and classes.
        column: name of the column with the samples: texts, lists of numbers or binary; by default images.
    """
    features = _features(schema)
    leaves = {field.name: path for field in schema if (path := _image_leaf(field)) is not None}
    named = [name for name in leaves if _kind(features.get(name)) == "Image"]
    likely = [*named, *(name for name in _IMAGE_NAMES if name in leaves), *leaves]
    image = next(iter([*(name for name in likely if name not in _MASK_NAMES), *likely]), None)
    if column is not None:
        image, chosen = column, _chosen_leaf(schema, column)
        leaves = {} if chosen is None else {column: chosen}
    if image is None or image not in leaves:
        return None
    mask = next((name for name in _MASK_NAMES if name in leaves and name != image), None)
    numbered = [name for name in schema.names if _kind(features.get(name)) == "ClassLabel"]
    wanted = [*(name for name in LABEL_FIELDS if name in numbered), *numbered, *LABEL_FIELDS]
    can_be = {name for name in schema.names if name != image and is_label(schema.field(name).type)}
    label = next((name for name in wanted if name in can_be), None)
    other = next((name for name in LABEL_FIELDS if name not in leaves and _is_other(schema, name)), None)
    other = other if label is None else None
    about = tuple(field.name for field in schema if is_scalar(field.type) and field.name not in (label, other, image))
    classes = features[label].get("names") if label is not None and label in numbered else None
    names = tuple(map(str, classes)) if isinstance(classes, list) else ()
    return ColumnRoles(
        image=leaves[image],
        mask=None if mask is None else leaves[mask],
        label=label,
        other=other,
        classes=names,
        about=about,
        lists=tuple(name for name in list_names(schema) if name not in (other, image)),
    )


def _features(schema: pa.Schema) -> dict[str, Any]:
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


def _chosen_leaf(schema: pa.Schema, column: str) -> str | None:
    if schema.names.count(column) != 1:
        return None
    field = schema.field(column)
    return column if _is_text(field.type) or number_lists(field.type) is not None else _image_leaf(field)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_label(kind: pa.DataType) -> bool:
    """Whether a column of that type can say labels."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_integer(plain) or pa.types.is_boolean(plain) or _is_text(plain)


def is_target(kind: pa.DataType) -> bool:
    """Whether a column of that type can say labels that are no classes."""
    return bool(pa.types.is_floating(kind) or is_list(kind))


def _is_other(schema: pa.Schema, name: str) -> bool:
    return name in schema.names and not pa.types.is_null(schema.field(name).type)


def is_scalar(kind: pa.DataType) -> bool:
    """Whether a column of that type can be metadata."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_integer(plain) or pa.types.is_floating(plain) or pa.types.is_boolean(plain) or _is_text(plain)


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
    about = tuple(name for name in roles.about if name not in columns)
    paths = tuple(roles_in(object, schema, column).image for column in columns)
    return replace(roles, label=label, about=about), paths


def roles_in(object: str, schema: pa.Schema, column: str | None = None) -> ColumnRoles:
    """What the columns of a file are, where it holds samples and labels that can be.

    Args:
        object: name of the file, for the sentences.
        schema: schema of the file.
        column: as of ``columns_of_schema``.

    Raises:
        DataError: no column can hold samples, or labels are targets of no kind; the sentence names the columns.
    """
    columns = columns_of_schema(schema, column)
    if columns is None:
        raise DataError(_lacks(object, schema, column))
    kind = None if columns.other is None else schema.field(columns.other).type
    if kind is not None and not is_target(kind):
        raise DataError(f"{object} has a column {columns.other!r} of the type {kind}, and {NO_CLASSES}")
    return columns


def _lacks(object: str, schema: pa.Schema, column: str | None) -> str:
    names = ", ".join(schema.names)[:200]
    if column is not None:
        return f"{object} has no column {column!r} of texts, lists of numbers or binary values; its columns are {names}"
    return (
        f"{object} has no column of images: one is binary, or a struct with the binary field 'bytes'; "
        f"its columns are {names}{_hint(schema)}"
    )


def _hint(schema: pa.Schema) -> str:
    texts = [field.name for field in schema if _is_text(field.type)]
    url = next((name for name in URL_FIELDS if name in texts), None)
    if url is not None:
        return f"; if {url} says where images are, name the format: format='urls', or --format urls"
    return f"; if samples are the texts in {texts[0]}, name the column: column={texts[0]!r}" if texts else ""


# What Hugging Face writes for a sample without a class, where classes have names.
_NO_CLASS = -1


def labels_said(object: str, columns: ColumnRoles, beside: pa.Table) -> pa.ChunkedArray | pa.Array:
    """What samples say of themselves, as texts: names of classes where numbers stand for them, null where nothing.

    Args:
        object: name of the file, for the sentences.
        columns: roles of its columns.
        beside: columns beside the images, that of the labels among them.

    Raises:
        DataError: a label is a number of no class.
    """
    if columns.label is None:
        return pa.nulls(len(beside), pa.string()) if columns.other is None else in_json(beside[columns.other])
    values = plain(beside[columns.label])
    if pa.types.is_boolean(values.type):
        return pc.if_else(values, "True", "False")
    if not columns.classes or not pa.types.is_integer(values.type):
        return values.cast(pa.string())
    greatest = pc.max(values).as_py()
    if greatest is not None and greatest >= len(columns.classes):
        raise DataError(f"{object} has a label {greatest} and names for {len(columns.classes)} classes only")
    minimum = pc.min(values).as_py()
    if minimum is not None and minimum < _NO_CLASS:
        return values.cast(pa.string())
    numbers = pc.if_else(pc.greater_equal(values, 0), values, pa.scalar(None, values.type))
    return pa.chunked_array([pa.array(columns.classes, pa.string()).take(numbers.combine_chunks())])
