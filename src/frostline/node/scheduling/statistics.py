"""What a node did and holds, as values; metrics and pages read these and nothing else."""

import threading
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from frostline.cache import DiskStatistics, SharedStatistics
from frostline.node.scheduling.memory_pool import PoolStatistics
from frostline.stores.objects.disk_tier import TierStatistics

__all__ = ("Counters", "NodeStatistics", "TenantStatistics", "Totals")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a node did since it started.

    Attributes:
        requests: admitted.
        refused_busy: sent away with 429; if it grows, ask with fewer requests in flight or raise ``max_requests``.
        finished: answered whole.
        abandoned: given up by the client.
        failed: ended by an error.
        samples: answered.
        skipped: could not be read or decoded.
        batches: answered.
        bytes_read: from the store; of a read that was made twice, once.
        tier_hits: samples that were read from the node's own disk in place of the store.
        bytes_answered: payload of the answers as they were packed, without framing.
        decoded_again: samples read twice because their image was larger than expected.
        read_again: reads of stragglers that were made a second time.
        uploads: prefixes taken in.
        evicted: prefixes dropped for others; if it grows, give the node more memory.
        cache_hits: samples whose features were found in the cache: neither read nor decoded nor computed.
        cache_misses: samples that were asked for and not found there, where there is a cache.
        read_s: seconds in the store, summed over threads.
        decode_s: seconds of decoding, summed over threads.
        compute_s: seconds in which the device ran.
        trial_s: seconds in which engines were tried, in processes beside the node.
        train_s: what training heads beside the node took of it, as seconds of the device: those of a core, divided by
            the threads that the node computes with.
        encode_s: seconds of packing answers, summed over threads.
        refused_quota: sent away with 429 since their tenant has no more of something.
        expired: given up at their deadline; if it grows, the node has more work than it can do in time.
        runs: of the device.
        rows_run: rows of those runs, the empty ones too.
        rows_merged: rows that filled up runs of other requests; without them there would be more runs.
    """

    requests: int = 0
    refused_busy: int = 0
    finished: int = 0
    abandoned: int = 0
    failed: int = 0
    samples: int = 0
    skipped: int = 0
    batches: int = 0
    bytes_read: int = 0
    tier_hits: int = 0
    bytes_answered: int = 0
    decoded_again: int = 0
    read_again: int = 0
    uploads: int = 0
    evicted: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    compute_s: float = 0.0
    trial_s: float = 0.0
    train_s: float = 0.0
    encode_s: float = 0.0
    refused_quota: int = 0
    expired: int = 0
    runs: int = 0
    rows_run: int = 0
    rows_merged: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStatistics:
    """Where a tenant stands.

    Attributes:
        weight: its share of the device is in proportion to it.
        requests_in_work: admitted and not yet answered whole.
        work_bytes: of the memory for work that it holds.
        weight_bytes: of the prefixes that it uploaded and of the engines that were made for it, while they are held.
        totals: what was done for it; of runs with rows of several, ``compute_s`` is its part by rows.
    """

    weight: float
    requests_in_work: int
    work_bytes: int
    weight_bytes: int
    totals: Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatistics:
    """Where a node stands.

    Attributes:
        uptime_s: since it started.
        requests_in_work: admitted and not yet answered whole.
        prefixes: resident.
        waiting_for_device: batches and measurements that wait for the device, with those that it runs.
        memory: each share of the memory, by its name.
        totals: what it did so far.
        tenants: by name, those that the asker may see.
        cache: how its cache of features stands; None where it has none.
        shared_cache: the same of the one in an object store, as far as this node knows.
        local_tier: how the samples on its own disk stand; None where none were kept so far.
    """

    uptime_s: float
    requests_in_work: int
    prefixes: int
    waiting_for_device: int
    memory: dict[str, PoolStatistics]
    totals: Totals
    tenants: dict[str, TenantStatistics] = field(default_factory=dict)
    cache: DiskStatistics | None = None
    shared_cache: SharedStatistics | None = None
    local_tier: TierStatistics | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return asdict(self)


class Counters:
    """Adds up what happens. Safe for threads.

    Args:
        whole: of which this is a part: what is added here is added there too.
    """

    def __init__(self, whole: "Counters | None" = None) -> None:
        self._whole = whole
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **amounts: float) -> None:
        """Add to some of the fields of ``Totals``."""
        with self._lock:
            self._counts.update(amounts)
        if self._whole is not None:
            self._whole.add(**amounts)

    def totals(self) -> Totals:
        """The sums so far."""
        with self._lock:
            return Totals(**self._counts)
