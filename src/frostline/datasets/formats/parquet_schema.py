"""Decides which columns of a Parquet file are image, label and metadata; Hugging Face's own words come first."""

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from frostline.datasets.formats.labels import LABEL_FIELDS
from frostline.datasets.formats.targets import MASK_FIELDS

__all__ = ("ColumnRoles", "columns_of_schema", "is_label", "is_scalar")

# Where no words say it: what image columns are called, and then the first that could be one.
_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "data")

# Where labels are images, they are masks.
_MASK_NAMES = (*MASK_FIELDS, *LABEL_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRoles:
    """What the columns of a file are.

    Attributes:
        image: path of the leaf with the encoded images.
        mask: path of the leaf with the encoded masks; None where no column is one.
        label: name of the column; None where no column is one.
        other: name of a column that is called as labels are and holds something else; None where none is.
        classes: names that a label's number stands for; empty where it is its own.
        about: scalar columns beside them.
    """

    image: str
    mask: str | None
    label: str | None
    other: str | None
    classes: tuple[str, ...]
    about: tuple[str, ...]


def columns_of_schema(schema: pa.Schema) -> ColumnRoles | None:
    """What the columns are; None where none can hold images.

    Args:
        schema: schema of the file; the metadata of Hugging Face's ``datasets`` names images, labels and classes.
    """
    features = _features(schema)
    leaves = {field.name: path for field in schema if (path := _image_leaf(field)) is not None}
    named = [name for name in leaves if _kind(features.get(name)) == "Image"]
    likely = [*named, *(name for name in _IMAGE_NAMES if name in leaves), *leaves]
    image = next(iter([*(name for name in likely if name not in _MASK_NAMES), *likely]), None)
    if image is None:
        return None
    mask = next((name for name in _MASK_NAMES if name in leaves and name != image), None)
    numbered = [name for name in schema.names if _kind(features.get(name)) == "ClassLabel"]
    wanted = [*(name for name in LABEL_FIELDS if name in numbered), *numbered, *LABEL_FIELDS]
    label = next((name for name in wanted if name in schema.names and is_label(schema.field(name).type)), None)
    other = next((name for name in LABEL_FIELDS if name not in leaves and _is_other(schema, name)), None)
    about = tuple(field.name for field in schema if is_scalar(field.type) and field.name != label)
    classes = features[label].get("names") if label is not None and label in numbered else None
    names = tuple(map(str, classes)) if isinstance(classes, list) else ()
    return ColumnRoles(
        image=leaves[image],
        mask=None if mask is None else leaves[mask],
        label=label,
        other=other if label is None else None,
        classes=names,
        about=about,
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


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_label(kind: pa.DataType) -> bool:
    """Whether a column of that type can say labels."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_integer(plain) or pa.types.is_boolean(plain) or _is_text(plain)


def _is_other(schema: pa.Schema, name: str) -> bool:
    return name in schema.names and not pa.types.is_null(schema.field(name).type)


def is_scalar(kind: pa.DataType) -> bool:
    """Whether a column of that type can be metadata."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_integer(plain) or pa.types.is_floating(plain) or pa.types.is_boolean(plain) or _is_text(plain)
