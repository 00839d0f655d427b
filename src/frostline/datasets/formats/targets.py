"""What formats with masks share: the fields that name masks, and the columns that a table gets for them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.formats.base import TARGET_COLUMNS, ListedSamples
from frostline.preprocess.decoder import size_of
from frostline.stores.base.protocols import Readable

__all__ = ("MASK_FIELDS", "NO_MASK", "Mask", "Size", "filled", "known_sizes", "size_at", "target_columns")

MASK_FIELDS = ("mask", "masks", "segmentation", "segmentation_mask", "annotation", "seg")
"""Columns, and kinds of members of shards, that hold a sample's mask or say where it is; the first that is there."""

Size = tuple[int, int]
"""Width and height in pixels; zeros where nobody knows them."""

# Of an image's head, which says how large it is; where it is not enough, the whole is read.
_HEAD_BYTES = 4096


class Mask(NamedTuple):
    """Where the mask of a sample is.

    Attributes:
        object: name of its object; empty where the sample has none.
        offset: where it starts there.
        length: bytes of it.
        etag: version of its object, empty where the store has none.
    """

    object: str
    offset: int
    length: int
    etag: str


NO_MASK = Mask("", 0, 0, "")


def target_columns(masks: Sequence[Mask], sizes: Sequence[Size]) -> dict[str, pa.Array]:
    """``TARGET_COLUMNS`` of some samples.

    Args:
        masks: one a sample.
        sizes: width and height of each sample's image; zeros where nobody knows them.
    """
    columns = [*zip(*masks, strict=True), *zip(*sizes, strict=True)] or [()] * len(TARGET_COLUMNS)
    return {field.name: pa.array(values, field.type) for field, values in zip(TARGET_COLUMNS, columns, strict=True)}


def filled(table: pa.Table) -> pa.Table:
    """A table of which some parts had masks: their columns are where they belong, and the others' samples have none."""
    if TARGET_COLUMNS.names[0] not in table.schema.names:
        return table
    for field in TARGET_COLUMNS:
        empty = "" if field.type == pa.string() else 0
        column = pc.fill_null(table[field.name].cast(field.type), empty)
        table = table.set_column(table.schema.get_field_index(field.name), field, column)
    beside = [name for name in table.schema.names if name not in TARGET_COLUMNS.names]
    return table.select([*beside, *TARGET_COLUMNS.names])


def size_at(store: Readable, object: str, offset: int, length: int) -> Size:
    """The size of an image, from its head; zeros where its header is broken, which reading it will say.

    Raises what ``Readable.read`` raises.
    """
    if not length:
        return 0, 0
    size = size_of(store.read(object, offset, min(length, _HEAD_BYTES)))
    return size if 0 not in size or length <= _HEAD_BYTES else size_of(store.read(object, offset, length))


def known_sizes(before: ListedSamples | None) -> Mapping[tuple[str, str], Size]:
    """Width and height of the images of an earlier listing that had masks, by the object's name and version."""
    if before is None or TARGET_COLUMNS.names[0] not in before.table.schema.names:
        return {}
    names = ("object", "etag", "target_length", "target_width", "target_height")
    rows = zip(*(before.table[name].to_pylist() for name in names), strict=True)
    # Of an image that had no mask nobody asked for its size.
    return {(name, etag): (width, height) for name, etag, mask, width, height in rows if etag and mask}
