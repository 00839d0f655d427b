"""The memory for weights: the wait queue, evictions, and that every reservation is released."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from frostline.batching import FairShares
from frostline.core.config import TenantSettings
from frostline.core.errors import OverBudget, Overloaded
from frostline.node.memory import Cancelled, LockedFairShares, Pool
from frostline.node.statistics import Counters
from frostline.node.tenants import Account
from frostline.node.weights import WeightMemory, prefix_key
from support.nodes import until


class Bench:
    """A memory of 100 bytes for weights, which by default any tenant may have all of, and a clock that is set."""

    def __init__(self, shares=None, **quotas):
        self.now = 0.0
        self.pool = Pool(100)
        self.counters = Counters()
        self.weights = WeightMemory(self.pool, shares, self.counters, clock=lambda: self.now)
        self.quotas = quotas

    def account(self, name):
        settings = TenantSettings(name=name, token_sha256="0" * 64, weight_bytes=self.quotas.get(name, 1000))
        return Account(settings, Counters(), is_alone=False, clock=lambda: self.now)

    def room(self, name, nbytes, tenant="ann", longest_s=0.0, is_abandoned=lambda: False):
        asked = {"counted_bytes": nbytes, "longest_s": longest_s, "is_abandoned": is_abandoned}
        return self.weights.room(key_of(name), nbytes, self.account(tenant), **asked)

    def bring(self, name, nbytes, tenant="ann", **fields):
        room = self.room(name, nbytes, tenant, **fields)
        if room is not None:
            with room:
                room.keep(name.upper())
        return room is not None

    def has(self, name):
        return key_of(name) in self.weights

    @contextmanager
    def using(self, name, tenant="ann"):
        with self.weights.using(key_of(name), tenant) as value:
            assert value == name.upper()
            yield

    @property
    def free_bytes(self):
        return 100 - self.pool.statistics().reserved_bytes


def key_of(name):
    digest, _, engine = name.partition("/")
    return (digest, engine, 3) if engine else prefix_key(digest)


def test_evicts_idle_weights_least_recently_used_first():
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.bring(name, 30)
        bench.now += 1
    with bench.using("a"):
        pass
    bench.now += 1
    assert bench.bring("d", 40)
    assert [bench.has(name) for name in "abcd"] == [True, False, True, True]
    assert bench.counters.totals().evicted == 1


def test_weights_in_use_are_evicted_only_after_their_turn():
    bench = Bench()
    bench.bring("a", 80)
    with ThreadPoolExecutor(1) as thread, bench.using("a"):
        with pytest.raises(Overloaded, match="in use leave no room"):
            bench.room("b", 80)
        bench.weights.served("a", 1.0)
        brought = thread.submit(bench.bring, "b", 80, "ann", longest_s=60)
        until(lambda: is_refused(bench, "a"))
        assert bench.has("a"), "its request goes on"
        assert not brought.done()
    assert brought.result() is True
    assert (bench.has("a"), bench.has("b"), bench.free_bytes) == (False, True, 20)


def is_refused(bench, name):
    try:
        with bench.weights.using(key_of(name), "ann"):
            return False
    except Overloaded:
        return True


def test_withdraws_an_eviction_when_no_request_waits():
    bench = Bench()
    bench.bring("a", 80)
    bench.weights.served("a", 5.0)
    with bench.using("a"):
        with pytest.raises(Overloaded):
            bench.room("b", 80)
        assert not is_refused(bench, "a")
    assert bench.has("a")


def test_evicts_other_weights_if_a_use_does_not_end():
    bench = Bench()
    for name, served_s in (("slow", 9.0), ("quick", 2.0)):
        bench.bring(name, 50)
        bench.weights.served(name, served_s)
    with ThreadPoolExecutor(1) as thread, bench.using("slow"):
        with bench.using("quick"):
            brought = thread.submit(bench.bring, "b", 50, "ann", longest_s=600)
            until(lambda: is_refused(bench, "slow"))
            assert not is_refused(bench, "quick")
            bench.now += 6
            until(lambda: is_refused(bench, "quick"))
            assert not is_refused(bench, "slow")
        assert brought.result() is True
        assert (bench.has("slow"), bench.has("quick")) == (True, False)


def test_never_evicts_weights_in_long_use_by_a_training():
    bench = Bench()
    bench.bring("a", 80)
    bench.weights.served("a", 99.0)
    bench.now += 99
    with bench.weights.using(key_of("a"), None):
        with pytest.raises(Overloaded):
            bench.room("b", 80)
        assert bench.bring("c", 20), "it does not wait behind what cannot come"
    bench.now += 2
    assert bench.bring("b", 80)


def test_the_wait_queue_is_ordered_by_device_time_and_nobody_overtakes():
    shares = LockedFairShares({})
    shares.charge("rich", 5.0)
    bench = Bench(shares)
    bench.bring("a", 80, "ann")
    got = []

    def bring(name, nbytes, tenant):
        with bench.room(name, nbytes, tenant, longest_s=600) as room:
            got.append(name)
            room.keep(name.upper())

    with ThreadPoolExecutor(2) as threads:
        with bench.using("a"):
            rich = threads.submit(bring, "rich", 80, "rich")
            until(lambda: bench.weights.waiting == 1)
            poor = threads.submit(bring, "poor", 90, "poor")
            until(lambda: bench.weights.waiting == 2)
            with pytest.raises(Overloaded):
                bench.room("small", 20, "rich")  # there is room, but it is promised
            shares.charge("ann", 9.0)
            bench.weights.served("a", 9.0)
        poor.result()
        assert got == ["poor"]
        bench.now += 2
        rich.result()
    assert got == ["poor", "rich"]


def test_a_waiting_tenant_is_owed_device_time_until_it_has_used_its_weights():
    shares = FairShares()
    bench = Bench(shares)
    bench.bring("a", 80, "ann")
    with bench.using("a", "ann"):
        shares.arrive("ann")
        with pytest.raises(Overloaded):
            bench.room("b", 80, "bob")
        shares.charge("ann", 3.0)
        shares.begin("ann")
        bench.now += 5
        assert shares.tag("bob") == 0.0, "its place is kept while it is away"
        bench.weights.served("a", 3.0)
    bench.now += 2
    assert bench.bring("b", 80, "bob")
    assert shares.tag("bob") == 0.0
    with bench.using("b", "bob"):
        shares.arrive("bob")
    assert shares.tag("bob") == 0.0, "its own work keeps it from now on"
    shares.depart("bob")
    assert shares.tag("bob") == 3.0, "and what it did not ask for is not owed"


def test_a_tenant_that_does_not_retry_loses_its_place():
    shares = FairShares()
    bench = Bench(shares)
    bench.bring("a", 80, "ann")
    with bench.using("a", "ann"):
        with pytest.raises(Overloaded):
            bench.room("b", 80, "bob")
        shares.charge("ann", 3.0)
        shares.begin("ann")
        bench.now += 11
        with pytest.raises(Overloaded):
            bench.room("c", 80, "cat")
    assert shares.tag("bob") == 3.0


def test_one_of_many_requests_makes_the_weights_and_the_others_find_them():
    bench = Bench()
    made = []

    def bring():
        room = bench.room("a", 60, longest_s=600)
        if room is not None:
            with room:
                made.append(1)
                room.keep("A")

    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(bring) for _ in range(40)]:
            future.result()
    assert len(made) == 1
    assert bench.free_bytes == 40
    assert bench.weights.owned_bytes("ann") == 60


def test_releases_memory_for_weights_that_were_not_made():
    bench = Bench()
    with pytest.raises(ValueError, match="broken"), bench.room("a", 60):
        raise ValueError("broken")
    assert bench.free_bytes == 100
    assert bench.weights.owned_bytes("ann") == 0
    assert bench.bring("a", 60)


def test_a_reservation_shrinks_or_grows_by_evicting_unused_weights():
    bench = Bench()
    with bench.room("a", 60) as room:
        room.resize(40)
        room.keep("A")
    assert bench.free_bytes == 60
    with bench.room("b", 50) as room:
        room.resize(70)
        room.keep("B")
    assert (bench.has("a"), bench.free_bytes) == (False, 30)
    with bench.using("b"), bench.room("c", 30) as room, pytest.raises(Overloaded):
        room.resize(31)
    assert bench.free_bytes == 30


def test_engines_are_evicted_with_their_prefix_or_alone_if_only_they_are_unused():
    bench = Bench()
    for name in ("a", "a/fast", "a/faster"):
        bench.bring(name, 30)
    bench.now += 2
    with bench.using("a"), bench.using("a/fast"):
        assert bench.bring("b", 30)
    assert [bench.has(name) for name in ("a", "a/fast", "a/faster", "b")] == [True, True, False, True]
    bench.now += 2
    assert bench.bring("c", 70)
    assert [bench.has(name) for name in ("a", "a/fast", "b", "c")] == [False, False, True, True]


def test_a_tenants_quota_evicts_its_own_weights_and_the_refusal_names_it():
    bench = Bench(ann=50)
    bench.bring("theirs", 40, "bob")
    bench.bring("a", 30, "ann")
    with pytest.raises(OverBudget, match="ann"):
        bench.room("huge", 51, "ann")
    with pytest.raises(OverBudget, match="--memory"):
        bench.room("huge", 101, "bob")
    with bench.using("a"), pytest.raises(Overloaded, match="ann"):
        bench.room("b", 30, "ann")
    bench.now += 2
    assert bench.bring("b", 30, "ann")
    assert (bench.has("a"), bench.has("theirs")) == (False, True)
    assert bench.weights.owned_bytes("ann") == 30
    assert bench.weights.left_bytes(key_of("b"), bench.account("ann")) == 20


def test_cancelling_or_closing_ends_a_wait():
    bench = Bench()
    bench.bring("a", 80)
    cut = threading.Event()
    with ThreadPoolExecutor(2) as threads, bench.using("a"), ExitStack() as ending:
        ending.callback(bench.weights.close)
        one = threads.submit(bench.room, "b", 80, "ann", 600, cut.is_set)
        other = threads.submit(bench.room, "c", 80, "ann", 600)
        until(lambda: bench.weights.waiting == 2)
        cut.set()
        bench.weights.wake()
        with pytest.raises(Cancelled):
            one.result()
        assert not other.done()
        bench.weights.close()
        with pytest.raises(Overloaded):
            other.result()
    assert bench.free_bytes == 20
