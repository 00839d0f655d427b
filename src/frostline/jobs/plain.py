"""The plain loader: batches of a data set for a loop, with no network to divide and no job to close."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frostline.config import LoaderSettings, NodeSettings
from frostline.datasets import Dataset
from frostline.events import Observer
from frostline.jobs.loader_factory import LoaderFactory
from frostline.jobs.offload import offload
from frostline.loaders.epoch.arguments import shows_options
from frostline.preprocess import Preprocess

if TYPE_CHECKING:  # of PyTorch
    from frostline.loaders.torch.loader import Loader

__all__ = ("loader",)


@shows_options(LoaderFactory.arrays)
def loader(
    data: Dataset | str | Path,
    batch_size: int,
    *,
    preprocess: Preprocess | None = None,
    near: str | Sequence[str] | None = None,
    settings: LoaderSettings | None = None,
    node: NodeSettings | None = None,
    observe: Observer | None = None,
    **options: Any,
) -> "Loader":
    """Load a data set's samples in batches, preprocessed, with nothing frozen.

    Several epochs are ``frostline.loader(...).epochs(range(10))``. Connections and threads end when the loader and
    those made from it are dropped, or with the process. Statistics, and arrays for other frameworks, are those of a
    job: see ``offload`` with no model.

    Args:
        data: A data set, a part of one, or the URL or path of one.
        batch_size: Rows of every batch but perhaps the last.
        preprocess: Way from encoded bytes to a sample's pixels; ImageNet's at 224 pixels by default.
        near: URLs of nodes beside the data, as ``offload`` takes them; without one this process reads the data.
        settings: How to ask, as ``offload`` takes it.
        node: Settings of the node in this process.
        observe: Observer of what happens, as ``offload`` takes it.
        **options: Options of the epoch, such as ``shuffle=True``; see ``EpochOptions``.

    Raises:
        SettingError: Something makes no sense; see ``offload`` and ``Job.loader``.
        DataError: The data cannot be listed.
        TypeError: An option is unknown.
    """
    data = data if isinstance(data, Dataset) else Dataset(data)
    job = offload(None, data, preprocess=preprocess, near=near, settings=settings, node=node, observe=observe)
    job.close_when_unused()
    return job.loader(batch_size, **options)
