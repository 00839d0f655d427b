"""Decides which sample stands where: orders of epochs, shares of ranks, states to go on from, splits, chosen rows."""

from frostline.ordering.block_shuffle import BlockOrder, BlockShuffle
from frostline.ordering.chosen import Chosen, RowIndices
from frostline.ordering.mixture import Interleaving, MixtureOrder
from frostline.ordering.order import EpochOrder, Order
from frostline.ordering.rank_agreement import Gather, ReadingPlan, check_agreement
from frostline.ordering.recorded import RecordedOrder, Replay
from frostline.ordering.sharding import EVEN, LAST, Progress, Resumed, Shard
from frostline.ordering.splits import (
    Labels,
    count_labels,
    places_by_label,
    split_at_random,
    split_by_class,
    split_by_group,
)
from frostline.ordering.state import OrderState
from frostline.ordering.weighted import Weighted, Weights, weights_by_class

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
