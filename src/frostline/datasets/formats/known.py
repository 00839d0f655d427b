"""Decides which format a listing has: the first that claims it, or the one that was named."""

from collections.abc import Mapping, Sequence

from frostline.core.config import check_type
from frostline.core.errors import SettingError
from frostline.core.hints import suggest_names
from frostline.datasets.formats.arrow import ArrowFiles
from frostline.datasets.formats.base import Format
from frostline.datasets.formats.cql import CqlTables
from frostline.datasets.formats.folders import MaskPairs, twin_folders
from frostline.datasets.formats.lists import AnnotatedFolders
from frostline.datasets.formats.parquet import Parquet
from frostline.datasets.formats.ready import ReadyFormat
from frostline.datasets.formats.tables import columns_by_input, columns_in_text
from frostline.datasets.formats.urls import UrlLists
from frostline.datasets.formats.webdataset import CompressedTars, WebDataset
from frostline.preprocess import Preprocess
from frostline.stores.protocols import Entry

__all__ = ("FORMATS", "check_inputs", "format_named", "format_of", "format_with", "part_names")

FORMATS: tuple[Format, ...] = (
    ReadyFormat(),
    CqlTables(),
    MaskPairs(),
    AnnotatedFolders(),
    WebDataset(),
    Parquet(),
    ArrowFiles(),
    UrlLists(),
    CompressedTars(),
)
"""In the order in which they are asked."""

# Says what it found nothing of, where no format claims a listing.
_LAST: Format = AnnotatedFolders()


def format_of(entries: Sequence[Entry]) -> Format:
    """The first format that claims a listing; class folders where none does.

    Two folders of images that may be those of masks are none of classes: the format of masks says what to do.
    """
    found = next((format for format in FORMATS if format.claims(entries)), _LAST)
    return MaskPairs() if found.name == _LAST.name and twin_folders(entries) is not None else found


def format_named(name: str) -> Format:
    """The format of that name; ``parquet:COLUMN`` is Parquet with its samples in that column.

    Raises:
        SettingError: no format has that name.
    """
    kind, _, column = name.partition(":")
    if kind == Parquet().name and column:
        return Parquet(columns_in_text(column))
    names = [format.name for format in FORMATS]
    if name not in names:
        raise SettingError(f"format: there is no {name!r}, only {', '.join(names)}{suggest_names(name, names)}")
    return FORMATS[names.index(name)]


def format_with(format: str | None, column: str | Mapping[str, str] | None) -> str | None:
    """The name of a format, that of Parquet files where samples, or parts of samples, lie in given columns.

    Args:
        format: name that was asked for; None for none.
        column: name of the column, or names of columns by the inputs that are made of them; None for none.

    Raises:
        SettingError: no format has that name, or no columns are chosen in it, or the columns make no sense.
    """
    if column is None:
        return None if format is None else format_named(format).name
    check_type("column", column, str, Mapping)
    kind = Parquet().name
    if format not in (None, kind):
        raise SettingError(f"column= chooses a column of Parquet files: format is {kind} or left out, not {format!r}")
    return format_named(f"{kind}:{columns_in_text(column)}").name


def part_names(format: str | None) -> tuple[str, ...]:
    """The inputs that are made of the parts of a format's samples, in their order; none where samples have one part.

    Args:
        format: name of the format as it was asked for; None for none.
    """
    return tuple(columns_by_input((format or "").partition(":")[2]))


def check_inputs(format: str | None, preprocess: Preprocess) -> None:
    """Make sure that a preprocessing makes its inputs of the parts that samples of a format have, in their order.

    Args:
        format: name of the format as it was asked for; None for none.
        preprocess: the steps from encoded bytes to the network's inputs.

    Raises:
        SettingError: The preprocessing makes its inputs of other parts.
    """
    names = part_names(format)
    if preprocess.part_names == names:
        return
    if not names:
        raise SettingError(
            f"preprocess makes the inputs {', '.join(preprocess.part_names)} of parts, and samples have one: say which "
            "column is which, as in Dataset(url, column={'pixel_values': 'image', 'input_ids': 'caption'})"
        )
    raise SettingError(
        f"samples have the parts {', '.join(names)}: declare preprocess=preprocess.named_inputs(...) of these names, "
        "in this order"
    )
