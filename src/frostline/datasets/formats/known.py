"""Decides which format a listing has: the first that claims it, or the one that was named."""

from collections.abc import Sequence

from frostline.datasets.formats.arrow import ArrowFiles
from frostline.datasets.formats.base import Format
from frostline.datasets.formats.cql import CqlTables
from frostline.datasets.formats.folders import ClassFolderFormat
from frostline.datasets.formats.masks import MaskPairs
from frostline.datasets.formats.parquet import Parquet
from frostline.datasets.formats.ready_format import ReadyFormat
from frostline.datasets.formats.url_lists import UrlLists
from frostline.datasets.formats.webdataset import WebDataset
from frostline.errors import SettingError, nearest
from frostline.stores.base.protocols import Entry

__all__ = ("FORMATS", "format_named", "format_of")

FORMATS: tuple[Format, ...] = (
    ReadyFormat(),
    CqlTables(),
    MaskPairs(),
    ClassFolderFormat(),
    WebDataset(),
    Parquet(),
    ArrowFiles(),
    UrlLists(),
)
"""In the order in which they are asked."""

# Says what it found nothing of, where no format claims a listing.
_LAST: Format = ClassFolderFormat()


def format_of(entries: Sequence[Entry]) -> Format:
    """The first format that claims a listing; class folders where none does."""
    return next((format for format in FORMATS if format.claims(entries)), _LAST)


def format_named(name: str) -> Format:
    """The format of that name; ``parquet:COLUMN`` is Parquet with its samples in that column.

    Raises:
        SettingError: no format has that name.
    """
    kind, _, column = name.partition(":")
    if kind == Parquet().name and column:
        return Parquet(column)
    names = [format.name for format in FORMATS]
    if name not in names:
        raise SettingError(f"format: there is no {name!r}, only {', '.join(names)}{nearest(name, names)}")
    return FORMATS[names.index(name)]
