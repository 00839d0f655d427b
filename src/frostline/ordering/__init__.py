"""Decides which sample stands where: the order of an epoch, the parts of a split, and rows chosen of a table."""

from frostline.ordering.chosen import Chosen, Places
from frostline.ordering.order import Order
from frostline.ordering.splits import Labels, count_labels, split_at_random, split_by_class, split_by_group

__all__ = (
    "Chosen",
    "Labels",
    "Order",
    "Places",
    "count_labels",
    "split_at_random",
    "split_by_class",
    "split_by_group",
)
