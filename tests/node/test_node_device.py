"""The device by itself: rows of several requests in one run, those nobody wants any more, and those that fail."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from frostline.batching import FirstCome, Hapi, Merging
from frostline.config import TenantSettings
from frostline.engines.torch_eager import TorchEngine
from frostline.errors import UnsafeArtifact
from frostline.node.device import Device
from frostline.node.memory import Abandoned, Pool
from frostline.node.queued import Batch, Call, Work
from frostline.node.statistics import Counters
from frostline.node.tenants import Tenants
from frostline.node.turns import Turns
from support.nodes import SIDE, small_network

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
        self.work = Work(engine=engine, cut=cut, run_rows=RUN_ROWS)
        self.counters = Counters()
        self.account = Tenants((), self.counters).everybody
        self.pool = Pool(int(runs_at_once * self.work.nbytes(RUN_ROWS)))
        self.device = Device(name="cpu", memory=self.pool, rule=rule, turns=Turns({}), counters=self.counters)

    def batch(self, rows, seed=0, is_abandoned=lambda: False):
        slab = np.zeros((RUN_ROWS, 3, SIDE, SIDE), np.float32)
        slab[:rows] = np.random.default_rng(seed).normal(size=(rows, 3, SIDE, SIDE))
        return Batch(
            account=self.account,
            is_abandoned=is_abandoned,
            work=self.work,
            slab=slab,
            rows=rows,
            served=lambda _: None,
        )

    def call(self, call):
        return Call(account=self.account, is_abandoned=lambda: False, call=call)

    def expected(self, batch):
        alone = batch.slab.copy()
        alone[batch.rows :] = 0
        return [one[: batch.rows] for one in self.work.engine.run(alone, self.work.cut)]

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
    made = Bench(engine_of(network, kind), network.cuts[-1].number, rule or Merging(), runs_at_once)
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
def test_rows_of_several_requests_fill_runs_up_and_come_out_as_they_would_alone(network, sizes):
    with bench(network) as made:
        batches = [made.batch(rows, seed) for seed, rows in enumerate(sizes)]
        run_together(made, batches)
        totals = made.counters.totals()
        assert totals.runs == 1 + -(-sum(sizes) // RUN_ROWS)
        assert totals.rows_run == 1 + RUN_ROWS * (totals.runs - 1)
        assert totals.compute_s > 0


@pytest.mark.parametrize("rule", [FirstCome(), Hapi(free_bytes=1), Hapi(free_bytes=1 << 30)])
def test_the_rules_to_compare_with_give_the_same_features(network, rule):
    with bench(network, rule) as made:
        batches = [made.batch(rows, seed) for seed, rows in enumerate((32, 20, 7))]
        expected = [made.expected(batch) for batch in batches]
        with made.busy():
            for batch in batches:
                made.device.enqueue(batch)
        for batch, wanted in zip(batches, expected, strict=True):
            for one, other in zip(batch.future.result(60), wanted, strict=True):
                assert np.allclose(one[: len(other)], other, rtol=1e-5, atol=1e-6)
        assert made.counters.totals().rows_merged == 0


def test_what_nobody_wants_does_not_run_and_leaves_its_place_to_others(network):
    with bench(network) as made:
        cancelled, kept = made.batch(20, 1), made.batch(20, 2)
        wanted = made.expected(kept)
        with made.busy():
            made.device.enqueue(cancelled)
            made.device.enqueue(kept)
            assert cancelled.future.cancel()
        same(kept.future.result(60), wanted)
        assert made.counters.totals().rows_merged == 0


def test_the_rest_of_a_request_of_which_some_has_run_is_given_up_when_nobody_wants_it(network):
    gone = threading.Event()
    with bench(network) as made:
        first, second = made.batch(20, 1), made.batch(20, 2, gone.is_set)
        first.future.add_done_callback(lambda _: gone.set())  # twelve rows of the second have run by then
        with made.busy():
            made.device.enqueue(first)
            made.device.enqueue(second)
        with pytest.raises(Abandoned):
            second.future.result(60)
        assert second.ran == 12
        assert made.counters.totals().runs == 2


class Fussy(TorchEngine):
    """Fails on values that it does not like, as a network may that looks numbers up in a table."""

    def run(self, inputs, cut):
        if np.isnan(inputs).any():
            raise UnsafeArtifact("the prefix does not run on these samples")
        return super().run(inputs, cut)


def test_a_request_whose_samples_fail_does_not_take_others_with_it(network):
    with bench(network, kind=Fussy) as made:
        good, bad, other = made.batch(10, 1), made.batch(10, 2), made.batch(10, 3)
        expected = [made.expected(one) for one in (good, other)]
        bad.slab[3, 0, 0, 0] = np.nan
        with made.busy():
            for one in (good, bad, other):
                made.device.enqueue(one)
        same(good.future.result(60), expected[0])
        same(other.future.result(60), expected[1])
        with pytest.raises(UnsafeArtifact):
            bad.future.result(60)
        assert made.counters.totals().runs == 4  # the broken one is paid for, and the one in which it stood is not


def test_a_call_that_fails_tells_its_caller_alone(network):
    with bench(network) as made:
        failing = made.call(lambda: 1 / 0)
        batch = made.batch(8)
        wanted = made.expected(batch)
        made.device.enqueue(failing)
        made.device.enqueue(batch)
        with pytest.raises(ZeroDivisionError):
            failing.future.result(60)
        same(batch.future.result(60), wanted)


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
    spent = [one.counters.totals().compute_s for one in accounts]
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
def test_a_run_begins_in_the_last_pieces_of_the_one_before_where_there_is_memory_for_both(
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
        other.asked = asked = made.work.engine.asked
        first, second = made.batch(RUN_ROWS), made.batch(RUN_ROWS)
        second.work = Work(engine=other, cut=made.work.cut, run_rows=RUN_ROWS)
        with made.busy():
            made.device.enqueue(first)
            made.device.enqueue(made.call(lambda: asked.append(("call", 0))))
            made.device.enqueue(second)
        second.future.result(60)
    assert [what for what, _ in asked] == ["begin", "drain", "outputs", "call", "begin", "drain", "outputs"]


def test_a_run_that_fails_takes_none_with_it_that_began_behind_it(network):
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


def test_tenants_take_turns_behind_each_other_and_no_second_is_paid_for_twice(network):
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
    assert 0 < sum(one.counters.totals().compute_s for one in accounts) <= time.perf_counter() - began
