"""Decides which format a listing has: the first that claims it, or the one that was named."""

from collections.abc import Callable, Mapping, Sequence

from frostline.core import URLS
from frostline.core.config import check_type
from frostline.core.errors import SettingError
from frostline.core.hints import suggest_names
from frostline.datasets.formats.arrow import ArrowFiles
from frostline.datasets.formats.base import Format, ListedSamples
from frostline.datasets.formats.cql import CqlTables
from frostline.datasets.formats.folders import MaskPairs, twin_folders
from frostline.datasets.formats.lists import AnnotatedFolders
from frostline.datasets.formats.modalities import FoldersOfPairs
from frostline.datasets.formats.parquet import Parquet
from frostline.datasets.formats.ready import ReadyFormat
from frostline.datasets.formats.tables import columns_by_input, columns_in_text
from frostline.datasets.formats.urls import UrlLists
from frostline.datasets.formats.webdataset import CompressedTars, WebDataset
from frostline.preprocess import Preprocess
from frostline.stores.protocols import Entry, ObjectStore

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

    Two folders of images that may be those of masks are none of classes: the format of masks says what to do. So are
    not folders that hold pictures of the same things.
    """
    found = next((format for format in FORMATS if format.claims(entries)), _LAST)
    if found.name != _LAST.name:
        return found
    if twin_folders(entries) is not None:
        return MaskPairs()
    return FoldersOfPairs() if FoldersOfPairs().claims(entries) else found


class FilesInColumn:
    """Lists with a named column that says which file each sample is, whatever lies beside them.

    Where a listing looks like folders of images, these are the samples, and the lists say what they are; else the rows
    of the lists are the samples, those of Parquet files too.

    Args:
        files: name of the column. The format's name has it behind a colon.
    """

    is_incremental = True

    def __init__(self, files: str) -> None:
        self.name = f"{_FILES}:{files}"
        self._folders, self._urls = AnnotatedFolders(files), UrlLists(files)

    def claims(self, entries: Sequence[Entry]) -> bool:  # noqa: ARG002
        """See ``Format.claims``: nothing, since it is named."""
        return False

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return self._of(entries).digest(entries)

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``."""
        return self._of(entries).read(store, entries, before)

    def _of(self, entries: Sequence[Entry]) -> Format:
        return self._folders if format_of(entries).name == _LAST.name else self._urls


_FILES = "files"


def format_named(name: str) -> Format:
    """The format of that name; ``parquet:COLUMN`` is Parquet with its samples in that column.

    ``folders:COLUMN``, ``urls:COLUMN`` and, for either of them, ``files:COLUMN`` are lists in which that column says
    which file each sample is.

    Raises:
        SettingError: no format has that name.
    """
    kind, _, column = name.partition(":")
    if kind == Parquet().name and column:
        return Parquet(columns_in_text(column))
    listed: dict[str, Callable[[str], Format]] = {_LAST.name: AnnotatedFolders, URLS: UrlLists, _FILES: FilesInColumn}
    if kind in listed and column:
        return listed[kind](column)
    names = [format.name for format in FORMATS]
    if name not in names:
        raise SettingError(f"format: there is no {name!r}, only {', '.join(names)}{suggest_names(name, names)}")
    return FORMATS[names.index(name)]


def format_with(
    format: str | None, column: str | Mapping[str, str] | None, file_column: str | None = None
) -> str | None:
    """The name of a format, that of Parquet files where samples, or parts of samples, lie in given columns.

    Args:
        format: name that was asked for; None for none.
        column: name of the column, or names of columns by the inputs that are made of them; None for none.
        file_column: column of lists that says which file each sample is; None for none.

    Raises:
        SettingError: no format has that name, or no columns are chosen in it, or the columns make no sense.
    """
    if file_column is not None:
        check_type("file_column", file_column, str)
        if column is not None or format not in (None, _LAST.name, URLS) or not file_column:
            raise SettingError(
                "file_column= names the column of a list that says which file each sample is, and column= one that "
                f"holds samples: give one of them; format is left out, {_LAST.name} or {URLS}, not {format!r}"
            )
        return format_named(f"{format or _FILES}:{file_column}").name
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
    kind, _, columns = (format or "").partition(":")
    return tuple(columns_by_input(columns)) if kind == Parquet().name else ()


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
