"""Where the rows of a loader come from, as a job makes it: requests, what decodes them, caches, memory and bounds."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline.cache import TieredCache
from frostline.config import LoaderSettings
from frostline.core import TensorSpec
from frostline.events import Observer
from frostline.loaders.epoch.batch_finisher import BatchFinisher
from frostline.loaders.epoch.block_reads import BlockSource
from frostline.loaders.epoch.fetch import FetchRows
from frostline.loaders.epoch.local_stage import Decode
from frostline.prefetch.assemble import Memory
from frostline.prefetch.owned_requests import OwnedRequests
from frostline.prefetch.requests import Dealer
from frostline.prefetch.tuner import Tuner

__all__ = ("RowSource",)


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSource:
    """Where a loader's rows come from; made by a job.

    Attributes:
        fetch: makes one request and yields rows at the frost line.
        dealer: says which way the next request takes.
        cache: keeps features between epochs; None where they differ from epoch to epoch.
        unreadable: ids that are known to be unreadable; they are not asked for again.
        settings: settings of the window.
        observe: told what happens.
        catch_up: tells it what happened in workers; for the loop's thread.
        has_targets: the last tensor of every row is its sample's mask.
        finisher: gives batches their declared targets and maps their samples; None where there is nothing to do.
        tuner: tuner of the windows' bounds; None leaves them as they are set.
        memory: where batches lie; None for memory of this process.
        tensors: tensors of every row, its mask apart, where that is known beforehand.
        blocks: reads samples in blocks before they are asked for; None where nobody does.
        begins_short: the first requests of a window are shorter; not where a network runs, which rows fill up.
        decode: decodes what ``fetch`` brings encoded; None where it brings nothing that is. For several threads.
        max_finished_bytes: maximum bytes of finished batches that wait for the loop; the last of them may be more. None
            where the window bounds them, which holds their rows.
        owned: divides a pass's samples by the nodes that own them; None where any node will do.
        fetch_from: as ``fetch``, of nodes by their names, the one to ask first in front.
    """

    fetch: FetchRows
    dealer: Dealer
    cache: TieredCache | None
    unreadable: Callable[[], npt.NDArray[np.int64]]
    settings: LoaderSettings
    observe: Observer
    has_targets: bool = False
    finisher: BatchFinisher | None = None
    tuner: Tuner | None = None
    memory: Memory | None = None
    tensors: tuple[TensorSpec, ...] = ()
    blocks: BlockSource | None = None
    begins_short: bool = False
    decode: Decode | None = None
    max_finished_bytes: int | None = None
    catch_up: Callable[[], None] = _nothing
    owned: Callable[[], OwnedRequests] | None = None
    fetch_from: Callable[[tuple[str, ...]], FetchRows] | None = None
