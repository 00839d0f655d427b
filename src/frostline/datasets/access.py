"""How whoever reads a data set's samples gets at them: what must be served, and a reader in their own process."""

from frostline.core import URLS
from frostline.datasets.dataset import Dataset
from frostline.datasets.formats.url_reader import places_in
from frostline.datasets.sequential import SequentialReader

__all__ = ("reader_of", "refreshed_here", "roots_of")


def roots_of(data: Dataset) -> tuple[str, ...]:
    """What a node must serve for a data set: its URL, and if its samples are URLs, the places in which they lie.

    Raises:
        SettingError: a node listed the data, and none of it can be read from here.
    """
    data.source.require_store()
    if data.manifest.reading != URLS:
        return (data.url,)
    return tuple(dict.fromkeys((data.url, *places_in(data.manifest.columns))))


def refreshed_here(data: Dataset) -> Dataset:
    """The data set as ``Dataset.refreshed`` gives it, for a copy that reads the samples from their own store.

    Raises:
        SettingError: a node listed the data, and none of it can be read from here.
    """
    data.source.require_store()
    return data.refreshed()


def reader_of(data: Dataset, *, maximum: int) -> SequentialReader:
    """A reader of a data set's samples in this process.

    Args:
        data: data set to read.
        maximum: requests under way at once.

    Raises:
        SettingError: a node listed the data, and none of it can be read from here.
    """
    return SequentialReader(data.url, data.manifest.reading, maximum=maximum, roots=roots_of(data))
