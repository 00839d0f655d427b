"""How whoever reads a data set's samples gets at them: what must be served, and a reader in their own process."""

from frostline.core import URLS
from frostline.datasets.dataset import Dataset
from frostline.datasets.formats.known import check_inputs, part_names
from frostline.datasets.formats.url_reader import places_in
from frostline.datasets.sequential import SequentialReader
from frostline.errors import SettingError
from frostline.preprocess import Preprocess
from frostline.preprocess.applied import steps_left

__all__ = ("reader_of", "refreshed_here", "require_one_part", "roots_of", "steps_left_of")


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


def steps_left_of(preprocess: Preprocess, data: Dataset) -> Preprocess:
    """What is left to do of a preprocessing on a data set's samples: all of it, but where they are a ready format.

    Raises:
        SettingError: the ready format was made with other steps, or the parts of samples are called otherwise.
    """
    check_inputs(data.source.format, preprocess)
    return steps_left(preprocess, data.manifest.applied)


def require_one_part(data: Dataset) -> None:
    """Make sure that each sample is one part, as it has to be to be copied or checked.

    Raises:
        SettingError: samples have several parts.
    """
    if part_names(data.source.format):
        raise SettingError(
            f"samples of {data.url} have several parts, and only those of one are copied or checked: name one column, "
            "as in column='image'"
        )
