"""A node's device: which rows run together, and how runs are divided.

The device alone: rows of several requests in one run, cancelled requests, and requests that fail.

A tenant's heavy network holds up neither the light request of another nor the node, once its client has gone.
"""

import json
import select
import socket
import threading
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch

from frostline.batching import FairMerging, FirstCome, Hapi
from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings, TenantSettings
from frostline.core.errors import UnsafeArtifact
from frostline.engines.torch import TorchEngine
from frostline.models.artifact import digest_of
from frostline.node import device as device_module
from frostline.node.device import Device, ExclusiveCall, QueuedRows, RowWork
from frostline.node.memory import Cancelled, LockedFairShares, Pool
from frostline.node.process import start_node
from frostline.node.statistics import Counters
from frostline.node.tenants import Tenants
from frostline.wire.connection import address_of
from support.hostile import X, artifact, chain, node
from support.nodes import SIDE, artifact_of, joined, make_images, request, small_network, until
from support.tenants import tenant, token_of
from support.threads import asked_of_threads

RUN_ROWS = 32


@pytest.fixture(scope="module")
def network():
    return small_network()


def engine_of(network, kind=TorchEngine):
    prefix = network.prefix
    return kind(prefix.graph, prefix.cuts, prefix.tensors)


class Bench:
    """A device, and work for it."""

    def __init__(self, engine, cut, rule, runs_at_once):
        self.work = RowWork(engine=engine, cut=cut, run_rows=RUN_ROWS)
        self.counters = Counters()
        self.account = Tenants((), self.counters).everybody
        self.pool = Pool(int(runs_at_once * self.work.nbytes(RUN_ROWS)))
        self.device = Device(
            name="cpu", memory=self.pool, rule=rule, fair_shares=LockedFairShares({}), counters=self.counters
        )

    def batch(self, rows, seed=0, is_abandoned=lambda: False):
        slab = np.zeros((RUN_ROWS, 3, SIDE, SIDE), np.float32)
        slab[:rows] = np.random.default_rng(seed).normal(size=(rows, 3, SIDE, SIDE))
        return QueuedRows(
            account=self.account,
            is_abandoned=is_abandoned,
            work=self.work,
            slab=slab,
            rows=rows,
            served=lambda _: None,
        )

    def call(self, call):
        return ExclusiveCall(account=self.account, is_abandoned=lambda: False, call=call)

    def expected(self, batch):
        alone = batch.slab.copy()
        alone[batch.rows :] = 0
        return [tensor[: batch.rows] for tensor in self.work.engine.run(alone, self.work.cut)]

    @contextmanager
    def busy(self):
        """While something else runs."""
        begun, go = threading.Event(), threading.Event()
        blocking = self.call(lambda: (begun.set(), go.wait(60)))
        self.device.enqueue(blocking)
        assert begun.wait(60)
        try:
            yield
        finally:
            go.set()
        blocking.future.result(60)


@contextmanager
def bench(network, rule=None, kind=TorchEngine, runs_at_once=9):
    made = Bench(engine_of(network, kind), network.cuts[-1].number, rule or FairMerging(), runs_at_once)
    try:
        yield made
    finally:
        made.device.close()
        assert made.device.waiting == 0
        assert made.pool.statistics().reserved_bytes == 0


def same(results, expected):
    for made, wanted in zip(results, expected, strict=True):
        assert np.array_equal(made[: len(wanted)], wanted)


def run_together(made, batches):
    """All of them wait before the first runs; each gets what it would alone."""
    expected = [made.expected(batch) for batch in batches]
    with made.busy():
        for batch in batches:
            made.device.enqueue(batch)
    for batch, wanted in zip(batches, expected, strict=True):
        same(batch.future.result(60), wanted)


@pytest.mark.parametrize("sizes", [(20, 20, 20, 20), (32, 5, 32, 3), (1, 1, 1), (32,), (31, 31)])
def test_rows_of_several_requests_in_one_run_give_the_same_features(network, sizes):
    with bench(network) as made:
        batches = [made.batch(rows, seed) for seed, rows in enumerate(sizes)]
        run_together(made, batches)
        totals = made.counters.totals()
        assert totals.runs == 1 + -(-sum(sizes) // RUN_ROWS)
        assert totals.rows_run == 1 + RUN_ROWS * (totals.runs - 1)
        assert totals.compute_s > 0


@pytest.mark.parametrize("rule", [FirstCome(), Hapi(free_bytes=1), Hapi(free_bytes=1 << 30)])
def test_baseline_rules_give_the_same_features(network, rule):
    with bench(network, rule) as made:
        batches = [made.batch(rows, seed) for seed, rows in enumerate((32, 20, 7))]
        expected = [made.expected(batch) for batch in batches]
        with made.busy():
            for batch in batches:
                made.device.enqueue(batch)
        for batch, wanted in zip(batches, expected, strict=True):
            for tensor, other in zip(batch.future.result(60), wanted, strict=True):
                assert np.allclose(tensor[: len(other)], other, rtol=1e-5, atol=1e-6)
        assert made.counters.totals().rows_merged == 0


def test_cancelled_work_does_not_run(network):
    with bench(network) as made:
        cancelled, kept = made.batch(20, 1), made.batch(20, 2)
        wanted = made.expected(kept)
        with made.busy():
            made.device.enqueue(cancelled)
            made.device.enqueue(kept)
            assert cancelled.future.cancel()
        same(kept.future.result(60), wanted)
        assert made.counters.totals().rows_merged == 0


def test_cancels_the_rest_of_a_request_that_has_begun_to_run(network):
    gone = threading.Event()
    with bench(network) as made:
        first, second = made.batch(20, 1), made.batch(20, 2, gone.is_set)
        first.future.add_done_callback(lambda _: gone.set())  # twelve rows of the second have run by then
        with made.busy():
            made.device.enqueue(first)
            made.device.enqueue(second)
        with pytest.raises(Cancelled):
            second.future.result(60)
        assert second.ran == 12
        assert made.counters.totals().runs == 2


class Fussy(TorchEngine):
    """Fails on values that it does not like, as a network may that looks numbers up in a table."""

    def run_divided(self, inputs, cut, between):
        if np.isnan(inputs).any():
            raise UnsafeArtifact("the prefix does not run on these samples")
        return super().run_divided(inputs, cut, between)


def test_a_request_whose_samples_fail_does_not_take_others_with_it(network):
    with bench(network, kind=Fussy) as made:
        good, bad, other = made.batch(10, 1), made.batch(10, 2), made.batch(10, 3)
        expected = [made.expected(batch) for batch in (good, other)]
        bad.slab[3, 0, 0, 0] = np.nan
        with made.busy():
            for batch in (good, bad, other):
                made.device.enqueue(batch)
        same(good.future.result(60), expected[0])
        same(other.future.result(60), expected[1])
        with pytest.raises(UnsafeArtifact):
            bad.future.result(60)
        assert made.counters.totals().runs == 4  # the broken one is paid for, and the one in which it stood is not


def test_a_failed_call_fails_only_its_caller(network):
    with bench(network) as made:
        failing = made.call(lambda: 1 / 0)
        batch = made.batch(8)
        wanted = made.expected(batch)
        made.device.enqueue(failing)
        made.device.enqueue(batch)
        with pytest.raises(ZeroDivisionError):
            failing.future.result(60)
        same(batch.future.result(60), wanted)


def test_a_device_that_is_never_idle_is_not_asked_again_and_again(network):
    with bench(network) as made:
        before = asked_of_threads()
        with made.busy():
            calls = [made.call(lambda number=number: number) for number in range(200)]
            for call in calls:
                made.device.enqueue(call)
            assert asked_of_threads() <= before + 2
        assert [call.future.result(60) for call in calls] == list(range(200))
        last = made.call(lambda: "awake")
        made.device.enqueue(last)
        assert last.future.result(60) == "awake"


def test_a_call_goes_before_the_rows_of_its_tenant_that_wait(network):
    with bench(network) as made:
        done, batches = [], [made.batch(RUN_ROWS, seed) for seed in range(3)]
        call = made.call(lambda: done.append("call"))
        for number, batch in enumerate(batches):
            batch.served = lambda _, number=number: done.append(number)
        with made.busy():
            for entry in (*batches, call):
                made.device.enqueue(entry)
        batches[-1].future.result(60)
    assert done == ["call", 0, 1, 2]


def test_tenants_take_turns_and_each_is_charged_for_its_own(network):
    with bench(network) as made:
        settings = [TenantSettings(name=name, token_sha256=digit * 64) for name, digit in (("one", "1"), ("two", "2"))]
        accounts = Tenants(settings, made.counters).accounts
        order = []
        with made.busy():
            for number, account in enumerate([accounts[0]] * 3 + [accounts[1]]):
                batch = made.batch(RUN_ROWS, number)
                batch.account = account
                batch.future.add_done_callback(lambda _, name=account.name: order.append(name))
                made.device.enqueue(batch)
    assert order[:2] == ["one", "two"]
    assert sorted(order) == ["one", "one", "one", "two"]
    spent = [account.counters.totals().compute_s for account in accounts]
    assert all(spent)
    assert sum(spent) <= made.counters.totals().compute_s


class Queue(TorchEngine):
    """Takes a batch behind another, and keeps a list of what it was asked for."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.asked = []

    def begin(self, inputs, cut):
        number = sum(what == "begin" for what, _ in self.asked)
        self.asked.append(("begin", number))
        return Pieces(self, number, inputs, cut)


class Pieces:
    def __init__(self, engine, number, inputs, cut):
        self.engine, self.number, self.inputs, self.cut = engine, number, inputs, cut

    def drain(self):
        self.engine.asked.append(("drain", self.number))

    def outputs(self):
        self.engine.asked.append(("outputs", self.number))
        if np.isnan(self.inputs).any():
            raise UnsafeArtifact("the prefix does not run on these samples")
        return self.engine.run(self.inputs, self.cut)


IN_TURN = [("begin", 0), ("drain", 0), ("outputs", 0), ("begin", 1), ("drain", 1), ("outputs", 1)]
BEHIND = [("begin", 0), ("drain", 0), ("begin", 1), ("outputs", 0), ("drain", 1), ("outputs", 1)]


@pytest.mark.parametrize(
    ("runs_at_once", "rows", "asked"),
    [
        (1, (32, 30), IN_TURN),
        (1.9, (32, 30), IN_TURN),
        (2, (32, 30), BEHIND),
        (2, (20, 30), IN_TURN),  # 12 of the second run with the first: what runs is not begun again behind itself
    ],
)
def test_begins_a_run_beside_the_last_pieces_of_the_previous_one_where_memory_allows(
    network, runs_at_once, rows, asked
):
    with bench(network, kind=Queue, runs_at_once=runs_at_once) as made:
        batches = [made.batch(count, count) for count in rows]
        run_together(made, batches)
    assert made.work.engine.asked == asked
    assert made.pool.statistics().peak_bytes <= made.pool.total_bytes


def test_a_call_and_another_network_wait_until_the_run_before_has_ended(network):
    with bench(network, kind=Queue) as made:
        other = engine_of(network, Queue)

        class Asked(list):
            def append(self, what):
                super().append(what)
                if len(self) == 1:  # the first run has begun
                    made.device.enqueue(made.call(lambda: asked.append(("call", 0))))

        other.asked = made.work.engine.asked = asked = Asked()
        first, second = made.batch(RUN_ROWS), made.batch(RUN_ROWS)
        second.work = RowWork(engine=other, cut=made.work.cut, run_rows=RUN_ROWS)
        with made.busy():
            made.device.enqueue(first)
            made.device.enqueue(second)
        second.future.result(60)
    assert [what for what, _ in asked] == ["begin", "drain", "outputs", "call", "begin", "drain", "outputs"]


def test_a_failed_run_does_not_fail_the_run_behind_it(network):
    with bench(network, kind=Queue) as made:
        bad, good = made.batch(RUN_ROWS, 1), made.batch(RUN_ROWS, 2)
        wanted = made.expected(good)
        bad.slab[3, 0, 0, 0] = np.nan
        with made.busy():
            made.device.enqueue(bad)
            made.device.enqueue(good)
        same(good.future.result(60), wanted)
        with pytest.raises(UnsafeArtifact):
            bad.future.result(60)
    assert made.work.engine.asked == BEHIND


def test_tenants_alternate_in_overlapping_runs_and_no_second_is_charged_twice(network):
    began = time.perf_counter()
    with bench(network, kind=Queue) as made:
        settings = [TenantSettings(name=name, token_sha256=digit * 64) for name, digit in (("one", "1"), ("two", "2"))]
        accounts = Tenants(settings, made.counters).accounts
        order = []
        with made.busy():
            for number, account in enumerate([accounts[0]] * 4 + [accounts[1]] * 4):
                batch = made.batch(RUN_ROWS, number)
                batch.account = account
                batch.future.add_done_callback(lambda _, name=account.name: order.append(name))
                made.device.enqueue(batch)
    assert order[:2] == ["one", "two"]
    assert 0 < sum(account.counters.totals().compute_s for account in accounts) <= time.perf_counter() - began


class Told(TorchEngine):
    """Does something between two operations of its first run, and counts them."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.operations = 0
        self.then = lambda: None

    def run_divided(self, inputs, cut, between):
        is_first = not self.operations

        def counted():
            self.operations += 1
            if is_first and self.operations == 2:
                self.then()
            between()

        return super().run_divided(inputs, cut, counted)


@pytest.fixture
def watchful(monkeypatch):
    """Every operation is long enough that the run is looked at behind it."""
    monkeypatch.setattr(device_module, "_SLICE_S", 0.0)


def two_accounts(made):
    settings = [TenantSettings(name=name, token_sha256=digit * 64) for name, digit in (("one", "1"), ("two", "2"))]
    return Tenants(settings, made.counters).accounts


@pytest.mark.usefixtures("watchful")
def test_a_cancelled_run_ends_between_two_operations(network):
    gone = threading.Event()
    with bench(network, kind=Told) as made:
        engine = made.work.engine
        engine.then = gone.set
        unwanted, other = made.batch(RUN_ROWS, 1, gone.is_set), made.batch(RUN_ROWS, 2)
        wanted = made.expected(other)
        made.device.enqueue(unwanted)
        with pytest.raises(Cancelled):
            unwanted.future.result(60)
        assert engine.operations == 2
        assert made.counters.totals().compute_s > 0  # what it took is paid for all the same
        assert made.device.expected_s(made.work) == pytest.approx(1.0)  # and nothing is learnt from it
        made.device.enqueue(other)
        same(other.future.result(60), wanted)


@pytest.mark.usefixtures("watchful")
def test_a_run_continues_until_all_its_requests_are_cancelled(network):
    gone = threading.Event()
    with bench(network, kind=Told) as made:
        made.work.engine.then = gone.set
        first, second = made.batch(20, 1, gone.is_set), made.batch(12, 2)
        wanted = made.expected(second)
        with made.busy():
            made.device.enqueue(first)
            made.device.enqueue(second)
        same(second.future.result(60), wanted)


def heavy_and_light(made):
    """A request of one tenant, one of another that comes while it runs, and the order in which they end."""
    one, two = two_accounts(made)
    heavy, light = made.batch(RUN_ROWS, 1), made.batch(RUN_ROWS, 2)
    heavy.account, light.account = one, two
    order, charged = [], []
    heavy.future.add_done_callback(lambda _: order.append("heavy"))
    light.future.add_done_callback(lambda _: order.append("light"))
    light.future.add_done_callback(lambda _: charged.append(one.counters.totals().compute_s))
    expected = [made.expected(heavy), made.expected(light)]
    made.work.engine.then = lambda: made.device.enqueue(light)
    made.device.enqueue(heavy)
    for batch, wanted in zip((heavy, light), expected, strict=True):
        same(batch.future.result(60), wanted)
    return order, charged, (one, two)


@pytest.mark.usefixtures("watchful")
def test_another_tenant_goes_first_between_two_operations_of_a_long_run(network):
    began = time.perf_counter()
    with bench(network, kind=Told) as made:
        order, charged, accounts = heavy_and_light(made)
        spent = [account.counters.totals().compute_s for account in accounts]
    assert order == ["light", "heavy"]
    assert 0 < charged[0] < spent[0]
    assert all(spent)
    assert sum(spent) <= time.perf_counter() - began  # no second is paid for twice


@pytest.mark.usefixtures("watchful")
def test_finishes_the_current_run_first_without_memory_for_two(network):
    with bench(network, kind=Told, runs_at_once=1.5) as made:
        assert heavy_and_light(made)[0] == ["heavy", "light"]


@pytest.mark.usefixtures("watchful")
def test_baseline_rules_do_not_interrupt_a_run(network):
    with bench(network, FirstCome(), kind=Told) as made:
        assert heavy_and_light(made)[0] == ["heavy", "light"]


@pytest.mark.usefixtures("watchful")
def test_a_cancelled_measurement_ends_between_two_operations_too(network):
    gone = threading.Event()
    seen = []
    with bench(network) as made:

        def between():
            seen.append(1)
            if len(seen) == 2:
                gone.set()
            made.device.between()

        pixels = np.zeros((8, 3, SIDE, SIDE), np.float32)
        measure = made.call(
            lambda: made.work.engine.timed_run(pixels, repeats=2, clock=time.perf_counter, between=between)[0]
        )
        measure.is_abandoned = gone.is_set
        made.device.enqueue(measure)
        with pytest.raises(Cancelled):
            measure.future.result(60)
    assert len(seen) == 2


PRODUCTS, WIDTH = 1500, 1536
"""Some minutes of a core."""
# Long enough that a busy machine has begun with the run before.
DEADLINE_S = 5.0
# An operation is over in a tenth of a second; the rest is for a machine that does other work too.
SLACK_S = 8.0


def heavy_prefix():
    weight = {"ref": "w"}
    products = chain("aten.mm.default", PRODUCTS, weight, begin=weight)
    added = [
        node("s", "aten.sum.default", {"ref": products[-1]["name"]}),
        node("e", "aten.add.Tensor", X, {"ref": "s"}),
    ]
    shape = (3, SIDE, SIDE)
    body = artifact([*products, *added], {"w": torch.zeros(WIDTH, WIDTH)}, shape=shape, inputs=shape)
    return digest_of(body), body


def transport_of(name, url):
    return closing(HttpTransport(url, LoaderSettings(deadline_s=300, token=token_of(name))))


def asked(url, name, message, *headers):
    """A connection on which features were asked for."""
    body = json.dumps(message.to_json()).encode()
    peer = socket.create_connection(address_of(url))
    lines = ("POST /v1/features HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token_of(name)}", *headers)
    peer.sendall("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
    return peer


def test_answers_a_light_request_beside_a_heavy_one_and_ends_that_with_its_client(tmp_path):
    images = make_images(tmp_path / "images", 6)
    network = small_network()
    settings = NodeSettings(memory_bytes=512 << 20, tenants=(tenant("ann"), tenant("bob")), max_run_s=1e9)
    with (
        start_node((images.as_uri(),), settings) as process,
        transport_of("ann", process.url) as ann,
        transport_of("bob", process.url) as bob,
    ):
        heavy = heavy_prefix()
        ann.put_prefix(*heavy)
        bob.put_prefix(*artifact_of(network))
        with asked(process.url, "ann", request(images, 2, heavy[0])) as waiting:
            # It is charged while it runs.
            until(lambda: ann.node_statistics()["tenants"]["ann"]["totals"]["compute_s"] > 0)
            light = request(images, network.cuts[-1].number, artifact_of(network)[0])
            assert len(joined(bob.features(light))[0]) == 6
            assert not select.select([waiting], [], [], 0)[0]
            assert bob.node_statistics()["waiting_for_device"] == 1
        until(lambda: bob.node_statistics()["waiting_for_device"] == 0)
        until(lambda: ann.node_statistics()["tenants"]["ann"]["totals"]["abandoned"] == 1)


def test_a_heavy_run_leaves_the_device_at_the_deadline_that_its_client_has_named(tmp_path):
    images = make_images(tmp_path / "images", 2)
    settings = NodeSettings(memory_bytes=512 << 20, tenants=(tenant("ann"), tenant("bob")), max_run_s=1e9)
    with start_node((images.as_uri(),), settings) as process, transport_of("ann", process.url) as ann:
        heavy = heavy_prefix()
        ann.put_prefix(*heavy)
        began = time.monotonic()
        with asked(process.url, "ann", request(images, 2, heavy[0]), f"Frostline-Deadline: {DEADLINE_S}") as waiting:
            until(lambda: ann.node_statistics()["tenants"]["ann"]["totals"]["compute_s"] > 0)
            until(lambda: ann.node_statistics()["waiting_for_device"] == 0)
            assert time.monotonic() - began < DEADLINE_S + SLACK_S
            assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 503")
        assert ann.node_statistics()["tenants"]["ann"]["totals"]["expired"] == 1
