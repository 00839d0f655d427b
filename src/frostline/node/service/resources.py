"""What a node's tenants share, its places, memory and device, and the order in which they get them."""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeVar

from frostline.batching import BatchingRule, FirstCome, Hapi, Merging
from frostline.config import NodeSettings
from frostline.core import FeatureBatch
from frostline.engines.machine.hardware import free_device_bytes
from frostline.node.request.executor import Device
from frostline.node.request.feature_cache import shared_bytes
from frostline.node.scheduling.admission import Gate
from frostline.node.scheduling.fair_queue import FairQueue
from frostline.node.scheduling.memory_pool import Lane, Pool, Shares
from frostline.node.scheduling.read_pool import Readers
from frostline.node.scheduling.statistics import Counters, TenantStatistics
from frostline.node.scheduling.tenants import Account, Tenants
from frostline.node.weights.weight_memory import WeightMemory

__all__ = ("Sharing",)

T = TypeVar("T")

# Samples in work at once: enough to decode some while others wait for what is being read.
_READERS = 16


class Sharing:
    """Everything that has to be divided. Safe for threads.

    Args:
        settings: what there is to divide, between whom, and by which rule.

    Attributes:
        counters: of the node.
        tenants: who asks.
        pools: the memory.
        device: what runs prefixes.
        readers: what reads and decodes samples.
        waiters: what waits for stores beyond that, and does nothing else.
        gate: lets requests in.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._threads = settings.decode_threads
        self._compute_threads = settings.compute_threads
        self.counters = Counters()
        self.tenants = Tenants(settings.tenants, self.counters)
        self._turns = FairQueue(self.tenants.weights)
        # The rules to compare with know no tenants: there, memory too goes to who came first.
        self._memory_turns = turns = self._turns if settings.batching == "fair" else None
        device_bytes = free_device_bytes(settings.device)
        self.pools = Shares.of(settings.memory_bytes - shared_bytes(settings), device_bytes).pools(turns)
        self._work = self.pools["work"]
        self.device = Device(
            name=settings.device,
            memory=self.pools["device"],
            rule=_rule(settings, self.pools),
            turns=self._turns,
            counters=self.counters,
        )
        self.readers = _readers(max(_READERS, settings.decode_threads), settings)
        self.waiters = _readers(settings.read_threads, settings)
        self.gate = Gate(settings.max_requests, self.pools["messages"], self._work, self.tenants.accounts)

    def lane(self, account: Account, device_s: Callable[[], float] = float) -> Lane:
        """The way of a request into the memory for work.

        Args:
            account: whose it is.
            device_s: what its next batch will probably take of the device; nothing where it needs none.
        """
        total_bytes = self._work.total_bytes
        return Lane(self._work, lambda: account.claim(device_s(), total_bytes), account.settings.work_bytes)

    def places(self) -> "WeightMemory[T]":
        """The memory for weights, by whose turn it is; one is enough for a node."""
        return WeightMemory(self.pools["weights"], self._memory_turns, self.counters)

    def charged(
        self, made: Generator[FeatureBatch, None, None], account: Account, counters: Counters
    ) -> Generator[FeatureBatch, None, None]:
        """Batches that never run on the device, for which their tenant is charged what they took of the threads.

        Otherwise they would always be next. A node that reads and decodes with all its threads is as busy as one whose
        device runs.

        Args:
            made: the batches.
            account: whose they are.
            counters: of the request alone.
        """
        paid_s = 0.0
        with closing(made):
            for batch in made:
                done = counters.totals()
                took_s = done.read_s / _READERS + done.decode_s / self._threads
                self._turns.begin(account.name)
                self._turns.charge(account.name, took_s - paid_s)
                paid_s = took_s
                yield batch
                del batch  # its memory is given back with the next step

    def tried(self, account: Account, trial_s: float) -> None:
        """Charge a tenant for trials of engines, which have all threads of the node: their seconds are the device's."""
        account.tried(trial_s)
        self._turns.owe(account.name, trial_s)

    def trained(self, account: Account, processor_s: float) -> None:
        """Charge a tenant for a head that is trained beside the node.

        Args:
            account: whose it is.
            processor_s: seconds of a core; as many threads as the node computes with would have had them at once.
        """
        train_s = processor_s / self._compute_threads
        account.trained(train_s)
        self._turns.charge(account.name, train_s)

    def statistics(self, asker: Account | None, weight_bytes: Callable[[str], int]) -> dict[str, TenantStatistics]:
        """Where tenants stand.

        Args:
            asker: what it may not see is left out; None sees all.
            weight_bytes: what a tenant's prefixes and engines take.
        """
        accounts = self.tenants.accounts
        seen = [account for account in accounts if asker is None or asker.settings.sees_all or account is asker]
        return {one.name: self._standing(one, weight_bytes(one.name)) for one in seen}

    def _standing(self, account: Account, weight_bytes: int) -> TenantStatistics:
        return TenantStatistics(
            weight=account.settings.weight,
            requests_in_work=account.inside,
            work_bytes=self._work.held_bytes(account.name),
            weight_bytes=weight_bytes,
            totals=account.counters.totals(),
        )


def _readers(threads: int, settings: NodeSettings) -> Readers:
    # With several tenants, half of the threads are left to those whose stores are not slow.
    return Readers(threads, threads if len(settings.tenants) <= 1 else max(1, threads // 2))


def _rule(settings: NodeSettings, pools: dict[str, Pool]) -> BatchingRule:
    if settings.batching == "hapi":
        return Hapi(pools["device"].total_bytes + pools["weights"].total_bytes)
    return Merging() if settings.batching == "fair" else FirstCome()
