"""Decides which sample stands where: orders of epochs, shares of ranks, states to go on from, splits, chosen rows."""

from frostline.ordering.mixture import Interleaving, MixtureOrder
from frostline.ordering.orders import (
    BlockOrder,
    BlockShuffle,
    Chosen,
    EpochOrder,
    Order,
    RowIndices,
    Weighted,
    Weights,
    weights_by_class,
)
from frostline.ordering.shards import EVEN, LAST, Gather, Progress, ReadingPlan, Resumed, Shard, check_agreement
from frostline.ordering.splits import (
    Labels,
    count_labels,
    places_by_label,
    split_at_random,
    split_by_class,
    split_by_group,
)
from frostline.ordering.state import OrderState, RecordedOrder, Replay

__all__ = (
    "EVEN",
    "LAST",
    "BlockOrder",
    "BlockShuffle",
    "Chosen",
    "EpochOrder",
    "Gather",
    "Interleaving",
    "Labels",
    "MixtureOrder",
    "Order",
    "OrderState",
    "Progress",
    "ReadingPlan",
    "RecordedOrder",
    "Replay",
    "Resumed",
    "RowIndices",
    "Shard",
    "Weighted",
    "Weights",
    "check_agreement",
    "count_labels",
    "places_by_label",
    "split_at_random",
    "split_by_class",
    "split_by_group",
    "weights_by_class",
)
