"""Has a loader ask each of several nodes for the rows that it owns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from frostline.config import LoaderSettings
from frostline.core import TensorSpec
from frostline.core.features import array_dtype
from frostline.datasets import Dataset
from frostline.loaders.epoch.fetch import Fetcher, FetchRows
from frostline.prefetch import OwnedRequests, RowOwners
from frostline.transport.protocol import OwnsBlocks, Transport

__all__ = ("fetch_from", "owned_rows")

# Of the window's bytes, those of rows that wait behind it for others before them.
_WAITING_PART = 4


def owned_rows(
    transport: Transport, data: Dataset, settings: LoaderSettings, tensors: Sequence[TensorSpec]
) -> tuple[Callable[[], OwnedRequests] | None, LoaderSettings]:
    """How each pass divides its samples by owner; None where any node will do.

    Args:
        transport: way to the nodes.
        data: data set that is read, a part of another one perhaps.
        settings: settings of the window.
        tensors: tensors of a row as the window hands it out; none where it hands out encoded samples.

    Returns:
        What divides the samples, and the settings with which it does: the order is kept, since rows wait for those
        before them, and a part of the window's bytes is for them.
    """
    if not isinstance(transport, OwnsBlocks):
        return None, settings
    reach, url, whole = transport, data.url, len(data.whole)
    chosen, waiting_bytes = data.selection.rows, settings.window_bytes // _WAITING_PART
    row_bytes = sum(math.prod(tensor.shape) * array_dtype(tensor.dtype).itemsize for tensor in tensors)
    row_bytes = row_bytes or data.samples.encoded_bytes // max(1, len(data))

    def owners() -> RowOwners:
        return reach.owners(url, whole)

    def whole_rows(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return rows if chosen is None else chosen.at(rows)

    def owned() -> OwnedRequests:
        return OwnedRequests(
            owners,
            whole_rows,
            request_rows=settings.samples_per_request,
            max_rows=waiting_bytes // max(1, row_bytes),
        )

    return owned, replace(settings, slack=0, window_bytes=max(1, settings.window_bytes - waiting_bytes))


def fetch_from(
    fetcher: Fetcher, fetch: Callable[[Fetcher], FetchRows]
) -> Callable[[tuple[str, ...]], FetchRows] | None:
    """What makes requests of certain nodes, the one to ask first in front; None where any node will do.

    Args:
        fetcher: fetcher of the job.
        fetch: makes what makes requests with a fetcher.
    """
    transport = fetcher.transport
    if not isinstance(transport, OwnsBlocks):
        return None
    reach = transport

    def of(nodes: tuple[str, ...]) -> FetchRows:
        return fetch(replace(fetcher, transport=reach.at(nodes)) if nodes else fetcher)

    return of
