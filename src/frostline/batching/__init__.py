"""Decides how many samples run at once, which ones together, and whose turn it is. Pure: no clock, no threads."""

from frostline.batching.budget import ANYBODY, Allowance, Claim, MemoryBudget
from frostline.batching.eviction import DRAINED_WITHIN_S, Evictable, Incoming, to_evict
from frostline.batching.forming import (
    ROWS,
    BatchingRule,
    FairMerging,
    FirstCome,
    Hapi,
    Limit,
    QueuedRequest,
    QueueHead,
    Turn,
    batch_size,
    padded,
    readable_bytes,
    stretches_of_bytes,
    stretches_of_work,
)
from frostline.batching.shares import FairShares

__all__ = (
    "ANYBODY",
    "DRAINED_WITHIN_S",
    "ROWS",
    "Allowance",
    "BatchingRule",
    "Claim",
    "Evictable",
    "FairMerging",
    "FairShares",
    "FirstCome",
    "Hapi",
    "Incoming",
    "Limit",
    "MemoryBudget",
    "QueueHead",
    "QueuedRequest",
    "Turn",
    "batch_size",
    "padded",
    "readable_bytes",
    "stretches_of_bytes",
    "stretches_of_work",
    "to_evict",
)
