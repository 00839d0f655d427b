"""A node's memory: pools in which requests wait, and weights that are evicted.

A real node process stays within its memory budget under deliberate overload.

The memory for weights: the wait queue, evictions, and that every reservation is released.

A memory pool: released memory wakes only the thread that gets it.
"""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from frostline.batching import FairShares
from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings, TenantSettings
from frostline.core.errors import FrostlineError, OverBudget, Overloaded
from frostline.node.memory import Cancelled, LockedFairShares, Pool
from frostline.node.process import start_node
from frostline.node.statistics import Counters
from frostline.node.tenants import Account
from frostline.node.weights import WeightMemory, prefix_key
from support.nodes import artifact_of, jpeg, make_images, request, samples_of, small_network, until

pytestmark = [pytest.mark.promise("bounded"), pytest.mark.usefixtures("plain_starts")]

BUDGET = 400 << 20
SIDE = 224
PACKED = ((1, "zstd"), (2, "fp16"), (3, "int8+sparse+lz4"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = make_images(tmp_path_factory.mktemp("images") / "here", 24, size=(400, 300))
    for name, size in (("large", (2400, 1800)), ("larger", (4000, 3000))):
        (folder / f"{name}.jpg").write_bytes(jpeg(0, size))
    (folder / "huge.bin").write_bytes(b"\0")
    with (folder / "huge.bin").open("r+b") as file:
        file.truncate(3 << 30)
    return folder


def memory_of(pid, field):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def asked(transport, message):
    """Read an answer, however it ends."""
    with suppress(FrostlineError):
        for batch in transport.features(message):
            del batch


def stalled(url, message):
    """A connection that asks and never reads."""
    host, port = url.removeprefix("http://").split(":")
    peer = socket.create_connection((host, int(port)))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps(message.to_json()).encode()
    peer.sendall(
        f"POST /v1/features HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return peer


def load(images, digest, last):
    """Requests that want too much: many samples at early cuts, large images, lengths that lie."""
    samples = samples_of(images)
    many = samples.take(np.arange(len(samples)).repeat(3))
    many.ids[:] = np.arange(len(many))
    lying = samples.take(np.arange(len(samples)))
    lying.lengths[::2] = 1 << 33
    return [
        *(request(images, cut, digest, samples=many, side=SIDE) for cut in (0, 1, 2, 3, last) for _ in range(2)),
        *(request(images, cut, digest, samples=many, side=SIDE, codec=codec) for cut, codec in PACKED),
        *(request(images, cut, digest, samples=lying, side=SIDE) for cut in (0, 1)),
        request(images, 1, samples=samples, side=4096),
    ]


def test_a_node_stays_within_its_budget_whatever_is_asked(images):
    network = small_network(side=SIDE)
    digest, body = artifact_of(network)
    last = network.cuts[-1].number
    few = samples_of(images).take(np.arange(2))
    with ExitStack() as stack:
        node = stack.enter_context(start_node((images.as_uri(),), NodeSettings(memory_bytes=BUDGET, max_requests=12)))
        transport = stack.enter_context(closing(HttpTransport(node.url, LoaderSettings())))
        tiny = artifact_of(small_network())
        transport.put_prefix(*tiny)
        for cut in (0, 1, last):  # what the runtime takes once; a few kilobytes of work
            asked(transport, request(images, cut, tiny[0], samples=few))
        baseline = memory_of(node.pid, "VmRSS")
        Path(f"/proc/{node.pid}/clear_refs").write_text("5")  # VmHWM starts anew

        transport.put_prefix(digest, body)
        for width in (900, 901):
            transport.put_prefix(*artifact_of(small_network(width=width)))
        messages = load(images, digest, last)
        with ThreadPoolExecutor(10) as threads:
            with stalled(node.url, messages[0]), stalled(node.url, messages[2]):
                list(threads.map(partial(uploaded, transport), (40 << 20, 60 << 20, 120 << 20)))
                transport.put_prefix(digest, body)  # nobody used it, so that it was evicted for what was announced
                list(threads.map(partial(asked, transport), messages[-5:]))
            list(threads.map(partial(asked, transport), messages))
        peak = memory_of(node.pid, "VmHWM")
        statistics = transport.node_statistics()
        until(lambda: transport.node_statistics()["requests_in_progress"] == 0)
        after = transport.node_statistics()["memory"]

    assert peak - baseline <= BUDGET, f"{(peak - baseline) >> 20} MiB"
    for name, share in statistics["memory"].items():
        minimum = {"messages": 0.2, "ahead": -1.0}.get(name, 0.6)  # else this is no load; folders are not read ahead
        assert minimum * share["total_bytes"] < share["peak_bytes"] <= share["total_bytes"], name
    assert sum(share["total_bytes"] for share in statistics["memory"].values()) <= BUDGET
    assert all(share["reserved_bytes"] == 0 for name, share in after.items() if name != "weights")
    assert statistics["totals"]["finished"] > 5
    print(f"{(peak - baseline) >> 20} MiB above the idle node's {baseline >> 20}", statistics)


def uploaded(transport, nbytes):
    with suppress(FrostlineError):
        transport.put_prefix(f"{nbytes:064x}", bytes(nbytes))


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
        return Account(settings, Counters(), tenants=2, clock=lambda: self.now)

    def reserve(self, name, nbytes, tenant="ann", longest_s=0.0, is_abandoned=lambda: False):
        asked = {"counted_bytes": nbytes, "longest_s": longest_s, "is_abandoned": is_abandoned}
        return self.weights.reserve(key_of(name), nbytes, self.account(tenant), **asked)

    def bring(self, name, nbytes, tenant="ann", **fields):
        reservation = self.reserve(name, nbytes, tenant, **fields)
        if reservation is not None:
            with reservation:
                reservation.keep(name.upper())
        return reservation is not None

    def has(self, name):
        return key_of(name) in self.weights

    @contextmanager
    def using(self, name, tenant="ann"):
        with self.weights.pin(key_of(name), tenant) as value:
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
        with pytest.raises(Overloaded, match="in use leave no memory"):
            bench.reserve("b", 80)
        bench.weights.charge_prefix("a", 1.0)
        brought = thread.submit(bench.bring, "b", 80, "ann", longest_s=60)
        until(lambda: is_refused(bench, "a"))
        assert bench.has("a"), "its request goes on"
        assert not brought.done()
    assert brought.result() is True
    assert (bench.has("a"), bench.has("b"), bench.free_bytes) == (False, True, 20)


def is_refused(bench, name):
    try:
        with bench.weights.pin(key_of(name), "ann"):
            return False
    except Overloaded:
        return True


def test_withdraws_an_eviction_when_no_request_waits():
    bench = Bench()
    bench.bring("a", 80)
    bench.weights.charge_prefix("a", 5.0)
    with bench.using("a"):
        with pytest.raises(Overloaded):
            bench.reserve("b", 80)
        assert not is_refused(bench, "a")
    assert bench.has("a")


def test_evicts_other_weights_if_a_use_does_not_end():
    bench = Bench()
    for name, served_s in (("slow", 9.0), ("quick", 2.0)):
        bench.bring(name, 50)
        bench.weights.charge_prefix(name, served_s)
    with ThreadPoolExecutor(1) as thread, bench.using("slow"):
        with bench.using("quick"):
            brought = thread.submit(bench.bring, "b", 50, "ann", longest_s=600)
            until(lambda: is_refused(bench, "slow"))
            assert not is_refused(bench, "quick")
            bench.now += 11
            until(lambda: is_refused(bench, "quick"))
            assert not is_refused(bench, "slow")
        assert brought.result() is True
        assert (bench.has("slow"), bench.has("quick")) == (True, False)


def test_weights_leave_after_half_a_minute_and_what_still_uses_them_is_ended():
    bench, begun, ended = Bench(), threading.Event(), threading.Event()

    def slow():
        with bench.weights.pin(key_of("a"), "ann", ended.set):
            begun.set()
            assert ended.wait(60)

    bench.bring("a", 80)
    with ThreadPoolExecutor(2) as threads:
        use = threads.submit(slow)
        assert begun.wait(60)
        brought = threads.submit(bench.bring, "b", 80, "bob", longest_s=600)
        bench.now += 29
        assert not is_refused(bench, "a")
        bench.now += 2
        until(lambda: is_refused(bench, "a"))
        assert not ended.is_set(), "it may end by itself"
        bench.now += 5
        assert brought.result(60) is True
        use.result(60)
    assert (ended.is_set(), bench.has("a"), bench.has("b")) == (True, False, True)


def test_never_evicts_weights_in_long_use_by_a_training():
    bench = Bench()
    bench.bring("a", 80)
    bench.weights.charge_prefix("a", 99.0)
    bench.now += 99
    with bench.weights.pin(key_of("a"), None):
        with pytest.raises(Overloaded):
            bench.reserve("b", 80)
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
        with bench.reserve(name, nbytes, tenant, longest_s=600) as reservation:
            got.append(name)
            reservation.keep(name.upper())

    with ThreadPoolExecutor(2) as threads:
        with bench.using("a"):
            rich = threads.submit(bring, "rich", 80, "rich")
            until(lambda: bench.weights.waiting == 1)
            poor = threads.submit(bring, "poor", 90, "poor")
            until(lambda: bench.weights.waiting == 2)
            with pytest.raises(Overloaded):
                bench.reserve("small", 20, "rich")  # there is memory, but it is promised
            shares.charge("ann", 9.0)
            bench.weights.charge_prefix("a", 9.0)
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
            bench.reserve("b", 80, "bob")
        shares.charge("ann", 3.0)
        shares.begin("ann")
        bench.now += 5
        assert shares.tag("bob") == 0.0, "its place is kept while it is away"
        bench.weights.charge_prefix("a", 3.0)
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
            bench.reserve("b", 80, "bob")
        shares.charge("ann", 3.0)
        shares.begin("ann")
        bench.now += 11
        with pytest.raises(Overloaded):
            bench.reserve("c", 80, "cat")
    assert shares.tag("bob") == 3.0


def test_one_of_many_requests_makes_the_weights_and_the_others_find_them():
    bench = Bench()
    made = []

    def bring():
        reservation = bench.reserve("a", 60, longest_s=600)
        if reservation is not None:
            with reservation:
                made.append(1)
                reservation.keep("A")

    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(bring) for _ in range(40)]:
            future.result()
    assert len(made) == 1
    assert bench.free_bytes == 40
    assert bench.weights.owned_bytes("ann") == 60


def test_releases_memory_for_weights_that_were_not_made():
    bench = Bench()
    with pytest.raises(ValueError, match="broken"), bench.reserve("a", 60):
        raise ValueError("broken")
    assert bench.free_bytes == 100
    assert bench.weights.owned_bytes("ann") == 0
    assert bench.bring("a", 60)


def test_a_reservation_shrinks_or_grows_by_evicting_unused_weights():
    bench = Bench()
    with bench.reserve("a", 60) as reservation:
        reservation.resize(40)
        reservation.keep("A")
    assert bench.free_bytes == 60
    with bench.reserve("b", 50) as reservation:
        reservation.resize(70)
        reservation.keep("B")
    assert (bench.has("a"), bench.free_bytes) == (False, 30)
    with bench.using("b"), bench.reserve("c", 30) as reservation, pytest.raises(Overloaded):
        reservation.resize(31)
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
        bench.reserve("huge", 51, "ann")
    with pytest.raises(OverBudget, match="--memory"):
        bench.reserve("huge", 101, "bob")
    with bench.using("a"), pytest.raises(Overloaded, match="ann"):
        bench.reserve("b", 30, "ann")
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
        one = threads.submit(bench.reserve, "b", 80, "ann", 600, cut.is_set)
        other = threads.submit(bench.reserve, "c", 80, "ann", 600)
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


def test_released_memory_wakes_only_the_thread_that_gets_it():
    pool = Pool(100)
    held = [pool.reserve(50, lambda: False), pool.reserve(50, lambda: False)]
    looked = [0] * 8

    def wait(number):
        def look():
            looked[number] += 1
            return False

        return pool.reserve(50, look)

    with ThreadPoolExecutor(8) as threads:
        waiting = []
        for number in range(8):
            waiting.append(threads.submit(wait, number))
            until(lambda: pool.statistics().waiting == len(waiting))
        until(lambda: all(looked))
        before = list(looked)
        held[0].shrink(10)
        held[0].release()
        first = waiting[0].result()
        assert looked[1:] == before[1:]
        for reservation in (held[1], first):
            reservation.release()
        for future in waiting[1:]:
            future.result().release()
    assert pool.statistics().reserved_bytes == 0


def test_a_cancelled_wait_ends_and_those_behind_it_go_on():
    pool = Pool(100)
    held = pool.reserve(60, lambda: False)
    cut = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        large = threads.submit(pool.reserve, 90, cut.is_set)
        until(lambda: pool.statistics().waiting == 1)
        small = threads.submit(pool.reserve, 40, lambda: False)
        until(lambda: pool.statistics().waiting == 2)
        cut.set()
        pool.wake()
        with pytest.raises(Cancelled):
            large.result()
        small.result().release()
    held.release()
    assert pool.statistics().reserved_bytes == 0


def test_a_wait_that_timed_out_leaves_the_memory_to_others():
    pool = Pool(100)
    with pool.reserve(60, lambda: False):
        with pytest.raises(Cancelled):
            pool.reserve(90, lambda: False, longest_s=0.01)
        pool.reserve(40, lambda: False).release()
    assert pool.statistics().waiting == 0
