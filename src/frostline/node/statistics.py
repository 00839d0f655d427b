"""What a node did and holds, as values; metrics and pages are made from these alone."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from frostline.cache import DiskStatistics, SharedStatistics
from frostline.core.declared import Amount, Count
from frostline.node.memory import PoolStatistics
from frostline.preprocess.decoders import DecoderStatistics
from frostline.stores.disk_tier import TierStatistics

__all__ = ("BOUNDS_S", "STAGES", "Counters", "NodeStatistics", "StageLatency", "TenantStatistics", "Totals")

STAGES = ("read", "decode", "device_wait", "compute", "send")
"""What is timed, in the order in which a batch passes it."""
BOUNDS_S = (1e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds in seconds of the buckets of latencies; a last bucket has none."""

# Amounts that are seconds of one piece of work each.
_TIMED: Mapping[str, str] = {"read_s": "read", "decode_s": "decode"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a node did since it started.

    Attributes:
        requests: the admitted requests.
        refused_busy: requests refused with 429; if it grows, send fewer requests at once or raise ``max_requests``.
        finished: requests that were answered completely.
        abandoned: requests that their client cancelled.
        failed: requests that ended with an error.
        samples: the answered samples.
        skipped: samples that could not be read or decoded.
        batches: the answered batches.
        bytes_read: bytes read from the store; a repeated read counts once.
        tier_hits: samples that were read from the node's own disk instead of the store.
        bytes_sent: the packed payload of the answers, without framing.
        decode_retries: samples that were read twice because their image was larger than expected.
        hedged_reads: slow reads that were repeated (hedged).
        uploads: the uploaded prefixes.
        evicted: prefixes evicted for others; if it grows, give the node more memory.
        cache_hits: samples whose features came from the cache, without reading, decoding or computing.
        cache_misses: samples that were not in the cache, if there is one.
        read_s: seconds of reading from the store, summed over threads.
        decode_s: seconds of decoding, summed over threads.
        compute_s: seconds in which the device ran.
        trial_s: seconds of trials of engines, in processes beside the node.
        train_s: device seconds of training heads beside the node: core seconds divided by the node's compute threads.
        encode_s: seconds of packing answers, summed over threads.
        refused_quota: requests refused with 429 because their tenant has used up a quota.
        expired: requests cancelled at their deadline; if it grows, the node has more work than it can do in time.
        runs: runs of the device.
        rows_run: rows of those runs, padding included.
        rows_merged: rows that filled up runs of other requests; without merging there would be more runs.
        nonfinite: the computed rows with Inf or NaN, which are delivered and not cached.
    """

    requests: Count = 0
    refused_busy: Count = 0
    finished: Count = 0
    abandoned: Count = 0
    failed: Count = 0
    samples: Count = 0
    skipped: Count = 0
    batches: Count = 0
    bytes_read: Count = 0
    tier_hits: Count = 0
    bytes_sent: Count = 0
    decode_retries: Count = 0
    hedged_reads: Count = 0
    uploads: Count = 0
    evicted: Count = 0
    cache_hits: Count = 0
    cache_misses: Count = 0
    read_s: Amount = 0.0
    decode_s: Amount = 0.0
    compute_s: Amount = 0.0
    trial_s: Amount = 0.0
    train_s: Amount = 0.0
    encode_s: Amount = 0.0
    refused_quota: Count = 0
    expired: Count = 0
    runs: Count = 0
    rows_run: Count = 0
    rows_merged: Count = 0
    nonfinite: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLatency:
    """How long a stage took, time after time.

    Attributes:
        counts: number of times it took at most as long as each of ``BOUNDS_S`` and longer than the one before; the last
            of them, longer than all.
        seconds: the sum.
    """

    counts: tuple[Count, ...] = (0,) * (len(BOUNDS_S) + 1)
    seconds: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStatistics:
    """The state of a tenant.

    Attributes:
        weight: weight of the tenant; its share of the device is proportional to it.
        requests_in_progress: the admitted requests that are not yet answered completely.
        work_bytes: bytes that it holds of the memory for work.
        weight_bytes: bytes of its resident prefixes and of the engines made for it.
        quotas: the quotas by their names, as of ``config.TenantSettings``; None is no bound but the node's own.
        totals: work done for it; a run with rows of several tenants is divided by rows in ``compute_s``.
    """

    weight: Amount
    requests_in_progress: Count
    work_bytes: Count
    weight_bytes: Count
    quotas: dict[str, float | None]
    totals: Totals


PAGE_TENANTS = 500
"""Tenants of a page of a node's statistics, of some 600 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatistics:
    """The state of a node.

    Attributes:
        uptime_s: seconds since it started.
        cpu_s: processor seconds of the node's process, summed over cores.
        requests_in_progress: the admitted requests that are not yet answered completely.
        prefixes: number of resident prefixes.
        waiting_for_device: batches and measurements that wait for the device or run on it.
        devices_in_service: number of devices that are given work; fewer than it was started with if some failed.
        memory: state of each memory share, by name.
        totals: work done so far.
        tenants: state of the tenants that the asker may see, by name; a page has ``PAGE_TENANTS`` at most.
        next: number of the first tenant after this page; None where there is none.
        may_change: True if the asker may change their weights and quotas.
        cache: state of its feature cache; None if it has none.
        shared_cache: state of the feature cache in an object store, as far as this node knows.
        local_tier: state of the samples on its own disk; None if none were kept so far.
        latencies: the time that each of ``STAGES`` took: reading a sample, or several that are memory-mapped; decoding
            the same; the wait of rows for a device; a run of it; and from a batch that is made to the wish for the next
            one, in which it is sent.
        wrong_tokens: wrong tokens that came, those that were not looked at included.
        slowed_addresses: addresses that are told nothing more for a while because of them.
        decoders: fate of the processes that decode; None where samples are decoded in the node's own.
    """

    uptime_s: Amount
    cpu_s: Amount
    requests_in_progress: Count
    prefixes: Count
    waiting_for_device: Count
    devices_in_service: Count
    memory: dict[str, PoolStatistics]
    totals: Totals
    tenants: dict[str, TenantStatistics] = field(default_factory=dict)
    next: Count | None = None
    may_change: bool = False
    cache: DiskStatistics | None = None
    shared_cache: SharedStatistics | None = None
    local_tier: TierStatistics | None = None
    latencies: dict[str, StageLatency] = field(default_factory=dict)
    wrong_tokens: int = 0
    slowed_addresses: int = 0
    decoders: DecoderStatistics | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return asdict(self)


class Counters:
    """Adds up what happens. Safe for threads.

    Args:
        whole: counters to which every amount is added too.
    """

    def __init__(self, whole: "Counters | None" = None) -> None:
        self._whole = whole
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._latencies = {stage: [0] * (len(BOUNDS_S) + 1) for stage in STAGES}
        self._stage_s = dict.fromkeys(STAGES, 0.0)

    def add(self, **amounts: float) -> None:
        """Add to some of the fields of ``Totals``."""
        with self._lock:
            self._counts.update(amounts)
        if self._whole is not None:
            self._whole.add(**amounts)
            return
        for name in _TIMED.keys() & amounts.keys():
            self.observe(_TIMED[name], amounts[name])

    def observe(self, stage: str, *seconds: float) -> None:
        """Count how long a stage took, each time; the whole alone keeps that."""
        if self._whole is not None:
            self._whole.observe(stage, *seconds)
            return
        with self._lock:
            for took_s in seconds:
                self._latencies[stage][bisect_left(BOUNDS_S, took_s)] += 1
                self._stage_s[stage] += took_s

    def latencies(self) -> dict[str, StageLatency]:
        """How long each stage took so far."""
        with self._lock:
            return {
                stage: StageLatency(counts=tuple(counts), seconds=self._stage_s[stage])
                for stage, counts in self._latencies.items()
            }

    def totals(self) -> Totals:
        """The sums so far."""
        with self._lock:
            return Totals(**self._counts)
