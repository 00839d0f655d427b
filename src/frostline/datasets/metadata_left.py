"""Says which metadata columns of a data set stay behind where what is made of it has no place for them."""

from collections.abc import Sequence

from frostline.datasets.dataset import Dataset
from frostline.datasets.forms.faces import COLUMNS
from frostline.events import ColumnsLeft, Observer

__all__ = ("metadata_in", "say_what_is_left")


def metadata_in(columns: Sequence[str]) -> tuple[str, ...]:
    """Those of a data set's columns that are not of its samples' own."""
    return tuple(name for name in columns if name not in COLUMNS.names)


def say_what_is_left(source: Dataset, observe: Observer) -> None:
    """Tell of the metadata columns of a data set, if it has any, before something without them is made of it."""
    left = metadata_in(source.columns)
    if left:
        observe(ColumnsLeft(url=source.url, columns=left))
