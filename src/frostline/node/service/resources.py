"""The resources that a node's tenants share: memory, threads and the device, and the order in which they get them."""

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TypeVar

from frostline.batching import BatchingRule, FairMerging, FirstCome, Hapi
from frostline.checks import devices_of
from frostline.config import NodeSettings, TenantSettings
from frostline.core import FeatureBatch
from frostline.engines.machine.hardware import free_device_bytes, is_accelerator
from frostline.node.request.devices import Devices
from frostline.node.request.executor import Device
from frostline.node.request.feature_cache import shared_bytes
from frostline.node.scheduling.admission import Gate
from frostline.node.scheduling.fair_shares import LockedFairShares, Readers
from frostline.node.scheduling.memory_pool import Lane, Pool, Shares
from frostline.node.scheduling.statistics import Counters, TenantStatistics
from frostline.node.scheduling.tenant_limits import (
    QUOTAS,
    TenantLimits,
    changed_settings,
    check_may_change,
    tenant_to_json,
)
from frostline.node.scheduling.tenants import Account, Tenants
from frostline.node.weights.weight_memory import WeightMemory

__all__ = ("Resources",)

T = TypeVar("T")

# Samples being read or decoded at once: enough to decode some while others wait for the store.
_READERS = 16
_LOG = logging.getLogger("frostline.node")


class Resources:
    """All shared resources of a node. Safe for threads.

    Args:
        settings: settings of the node: its budget, its tenants and its batching rule.

    Attributes:
        counters: counters of the node.
        tenants: tenants of the node.
        pools: memory pools by name.
        devices: devices that run prefixes.
        readers: threads that read and decode samples.
        waiters: threads that only wait for stores, for reading ahead.
        gate: admits requests.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._threads = settings.decode_threads
        self._compute_threads = settings.compute_threads
        self.counters = Counters()
        self.tenants = Tenants(settings.tenants, self.counters)
        self._changing = threading.Lock()
        self._fair_shares = LockedFairShares(self.tenants.weights)
        # The other rules serve as baselines and know no tenants: memory too is given in order of arrival.
        self._memory_shares = fair_shares = self._fair_shares if settings.batching == "fair" else None
        named = devices_of(settings.device)
        free = [nbytes for nbytes in map(free_device_bytes, named) if nbytes is not None]
        device_bytes = min(free, default=None)
        self.pools = Shares.of(settings.memory_bytes - shared_bytes(settings), device_bytes).pools(fair_shares)
        self._work = self.pools["work"]
        rooms = _device_pools(self.pools["device"], named)
        self.devices = Devices(
            [
                Device(
                    name=name,
                    memory=memory,
                    rule=_rule(settings, self.pools),
                    fair_shares=self._fair_shares,
                    counters=self.counters,
                )
                for name, memory in zip(settings.device.split(","), rooms, strict=True)
            ]
        )
        self.readers = _readers(max(_READERS, settings.decode_threads), settings)
        self.waiters = _readers(settings.read_threads, settings)
        self.gate = Gate(settings.max_requests, self.pools["messages"], self._work, self.tenants.accounts)

    def lane(self, account: Account, device_s: Callable[[], float] = float) -> Lane:
        """A request's access to the memory for work.

        Args:
            account: account of the tenant that asks.
            device_s: returns the expected device seconds of its next batch; 0 if it needs no device.
        """
        total_bytes = self._work.total_bytes
        return Lane(self._work, lambda: account.claim(device_s(), total_bytes), account.settings.work_bytes)

    def weight_memory(self) -> "WeightMemory[T]":
        """Make the memory for weights, ordered by the tenants' fair shares; a node needs one."""
        return WeightMemory(self.pools["weights"], self._memory_shares, self.counters)

    def charged(
        self, made: Generator[FeatureBatch, None, None], account: Account, counters: Counters
    ) -> Generator[FeatureBatch, None, None]:
        """Yield batches that never run on the device, and charge their tenant for the threads that they used.

        Without the charge they would always be next. A node whose threads all read and decode is as busy as one whose
        device runs.

        Args:
            made: batches of the request.
            account: account of the tenant that asks.
            counters: counters of this request alone.
        """
        paid_s = 0.0
        with closing(made):
            for batch in made:
                done = counters.totals()
                took_s = done.read_s / _READERS + done.decode_s / self._threads
                self._fair_shares.begin(account.name)
                self._fair_shares.charge(account.name, took_s - paid_s)
                paid_s = took_s
                yield batch
                del batch  # so that its memory is freed with the next step

    def tried(self, account: Account, trial_s: float) -> None:
        """Charge a tenant for trials of engines, which use all threads of the node, as device seconds."""
        account.tried(trial_s)
        self._fair_shares.owe(account.name, trial_s)

    def trained(self, account: Account, processor_s: float) -> None:
        """Charge a tenant for a head that is trained beside the node.

        Args:
            account: account of the tenant.
            processor_s: core seconds; they are divided by the node's compute threads.
        """
        train_s = processor_s / self._compute_threads
        account.trained(train_s)
        self._fair_shares.charge(account.name, train_s)

    def change_tenant(self, asker: Account, name: str, body: object) -> TenantSettings:
        """Change the weight and quotas of a tenant until the node ends, and log it as ``tenant_changed``.

        Args:
            asker: account that asks.
            name: name of the tenant to change.
            body: a PATCH, as JSON gave it; see ``tenant_limits.changed_settings``.

        Raises:
            Forbidden: The asker may change nothing.
            UnknownName: There is no such tenant.
            BadRequest: The change makes no sense.
        """
        check_may_change(self.tenants, asker)
        with self._changing:
            account = self.tenants.named(name)
            before, after = account.settings, changed_settings(account.settings, body)
            if before != after:
                account.change(after)
                self._fair_shares.change_weight(name, after.weight)
                told = {"tenant": name, "by": asker.name, "before": tenant_to_json(before)}
                _LOG.info("tenant_changed", extra={"fields": {**told, "after": tenant_to_json(after)}})
        return after

    def limits(self) -> list[TenantLimits]:
        """What each tenant uses, and may be bound to while the node runs."""
        return [
            TenantLimits(account, self._work, lambda: len(self.devices.in_service()))
            for account in self.tenants.accounts
        ]

    def statistics(self, asker: Account | None, weight_bytes: Callable[[str], int]) -> dict[str, TenantStatistics]:
        """The state of the tenants, by name.

        Args:
            asker: account that asks; tenants that it may not see are left out. None sees all.
            weight_bytes: returns the bytes of a tenant's prefixes and engines.
        """
        accounts = self.tenants.accounts
        seen = [account for account in accounts if asker is None or asker.settings.sees_all or account is asker]
        return {account.name: self._standing(account, weight_bytes(account.name)) for account in seen}

    def _standing(self, account: Account, weight_bytes: int) -> TenantStatistics:
        return TenantStatistics(
            weight=account.settings.weight,
            requests_in_progress=account.inside,
            work_bytes=self._work.held_bytes(account.name),
            weight_bytes=weight_bytes,
            quotas={name: getattr(account.settings, name) for name in QUOTAS},
            totals=account.counters.totals(),
        )


def _readers(threads: int, settings: NodeSettings) -> Readers:
    # With several tenants, no tenant gets more than half of the threads, in case its store is slow.
    return Readers(threads, threads if len(settings.tenants) <= 1 else max(1, threads // 2))


def _device_pools(pool: Pool, named: Sequence[str]) -> Sequence[Pool]:
    """The memory for activations of each device: accelerators have their own, parts of a processor share the node's."""
    if len(named) == 1:
        return [pool]
    each_bytes = pool.total_bytes if is_accelerator(named[0]) else pool.total_bytes // len(named)
    return [Pool(each_bytes) for _ in named]


def _rule(settings: NodeSettings, pools: dict[str, Pool]) -> BatchingRule:
    if settings.batching == "hapi":
        return Hapi(pools["device"].total_bytes + pools["weights"].total_bytes)
    return FairMerging() if settings.batching == "fair" else FirstCome()
