"""The window: each sample exactly once, in order, within its bytes, whatever fails."""

import itertools
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from frostline.core import FeatureBatch, Route, Samples, Skipped
from frostline.core.config import LoaderSettings
from frostline.core.errors import NodeUnreachable, Overloaded, Refused, StoreUnavailable
from frostline.prefetch import ShortestWait, Window, plan_requests
from frostline.prefetch.requests import PlannedRequest, deal_again
from frostline.prefetch.window import Failing, delay_s
from support.mixing import one_way

pytestmark = pytest.mark.promise("complete")

ROW_BYTES = 16
NODE, TRAINER = Route(9), Route(0)


def table(count):
    ids = np.arange(count, dtype=np.int64) * 7 + 3
    return Samples(
        ids=ids,
        objects=[f"{item}.jpg" for item in ids],
        offsets=np.zeros(count, np.int64),
        lengths=np.full(count, 100, np.int64),
        labels=np.zeros(count, np.int64),
    )


def window(
    count=40,
    *,
    per_request=4,
    row_bytes=ROW_BYTES,
    jitter=float,
    has_choice=lambda: True,
    request_source=None,
    **settings,
):
    chosen = LoaderSettings(samples_per_request=per_request, **settings)
    everything = np.arange(count)
    request_source = request_source or one_way(per_request, row_bytes)
    asked = plan_requests(table(count), everything, everything, request_source)
    return Window(
        asked,
        chosen,
        jitter=jitter,
        has_choice=has_choice,
        deal_again=lambda request: deal_again(request, request_source),
    )


def answer(ids, *, unreadable=()):
    ids = np.asarray(ids, np.int64)
    kept = ids[~np.isin(ids, unreadable)]
    skipped = tuple(Skipped(id=int(item), object="x", reason="truncated") for item in ids if item in unreadable)
    return FeatureBatch(ids=kept, tensors=(np.zeros((len(kept), ROW_BYTES), np.uint8),), skipped=skipped)


def take_all(held):
    taken = []
    while (delivery := held.take()) is not None:
        taken.append(delivery)
    return taken


def run_to_the_end(held, now=0.0):
    """Answer everything whole; the positions in the order in which they came out."""
    positions = []
    while not held.is_done:
        asks = held.asks(now)
        for ask in asks:
            held.take_rows(ask, answer(ask.samples.ids))
            assert held.finish(ask, now) is None
        taken = take_all(held)
        positions += [place for delivery in taken for place in delivery.positions.tolist()]
        if not asks and not taken:
            now = held.next_wakeup()
            assert now is not None, "the window neither asks, nor hands out, nor waits for a time"
    return positions


def test_encoded_samples_that_wait_to_be_handed_out_take_the_room_of_their_bytes():
    held = window(16, row_bytes=0, requests_in_flight=8, window_bytes=800, ramp=False)
    first, second = held.asks(0.0)  # of 4 samples, each with 100 bytes
    rows = np.empty(4, object)
    rows[:] = [bytes(100)] * 4
    held.take_rows(second, FeatureBatch(ids=second.samples.ids, tensors=(rows,)))
    held.finish(second, 0.0)
    assert (held.statistics().ready_bytes, held.asks(0.0)) == (400, ())
    held.take_rows(first, FeatureBatch(ids=first.samples.ids, tensors=(rows,)))
    held.finish(first, 0.0)
    assert len(take_all(held)) == 2
    assert len(held.asks(0.0)) == 2


@pytest.mark.parametrize("max_reorder", [5, None])
def test_finishes_each_epoch_before_the_next_whatever_the_slack(max_reorder):
    settings = LoaderSettings(samples_per_request=4, requests_in_flight=8, max_reorder=max_reorder, ramp=False)
    places = np.arange(16)
    asked = plan_requests(table(16), places, places, one_way(4, ROW_BYTES))
    held = Window((replace(request, epoch=int(request.positions[0]) // 8) for request in asked), settings)
    first, *others = held.asks(0.0)
    assert [ask.epoch for ask in (first, *others)] == [0, 0, 1, 1]
    for ask in others:
        held.take_rows(ask, answer(ask.samples.ids))
        held.finish(ask, 0.0)
    assert [delivery.positions.tolist() for delivery in take_all(held)] in ([[4, 5, 6, 7]], [])
    held.take_rows(first, answer(first.samples.ids))
    taken = [place for delivery in take_all(held) for place in delivery.positions.tolist()]
    assert set(taken) >= {0, 1, 2, 3, *range(8, 16)}


def test_an_iterator_that_is_exhausted_may_continue_later():
    places = np.arange(8)
    everything = list(plan_requests(table(8), places, places, one_way(4, ROW_BYTES)))
    left = [everything[:1], everything[1:]]

    class Drawn:
        def __iter__(self):
            return self

        def __next__(self):
            if not left[0]:
                raise StopIteration
            return left[0].pop(0)

    held = Window(Drawn(), LoaderSettings(samples_per_request=4))
    assert run_to_the_end(held) == [0, 1, 2, 3]
    del left[0]
    assert [ask.samples.ids.tolist() for ask in held.asks(0.0)] == [(places[4:] * 7 + 3).tolist()]


@given(
    count=st.integers(2, 60),
    per_request=st.integers(1, 5),
    requests=st.integers(2, 6),
    window_rows=st.integers(1, 70),
    late=st.integers(0, 8),
    ramp=st.booleans(),
)
def test_an_answer_that_is_late_keeps_nothing_from_being_asked_for_while_bytes_allow(
    count, per_request, requests, window_rows, late, ramp
):
    bounds = {"requests_in_flight": requests, "window_bytes": window_rows * ROW_BYTES, "max_reorder": 0, "ramp": ramp}
    held = window(count, per_request=per_request, hedge_quantile=1, **bounds)
    place, handed_out, asked = 0, [], []
    while asks := held.asks(0.0):
        for ask in asks:
            asked += ask.samples.ids.tolist()
            if place != late:
                held.take_rows(ask, answer(ask.samples.ids))
                held.finish(ask, 0.0)
            place += 1
        handed_out += [item for delivery in take_all(held) for item in delivery.batch.ids.tolist()]
    assert asked == table(count).ids[: len(asked)].tolist()
    before = min(count, late * per_request)  # what the late one does not hold back
    assert handed_out == asked[:before]
    if before == count:
        assert held.is_done
    else:
        following = min(per_request, count - len(asked))
        assert len(asked) > before
        assert following == 0 or len(asked) - before + following > window_rows, "the next one does not fit"


class Disorder(RuleBasedStateMachine):
    """Answers come in any order, in pieces, late, twice or not at all."""

    @initialize(
        rows=st.lists(st.booleans(), min_size=1, max_size=60),
        per_request=st.integers(1, 7),
        requests=st.integers(1, 5),
        window_rows=st.integers(1, 30),
        max_reorder=st.sampled_from([0, 0, 1, 3, 10, None]),
    )
    def start(self, rows, per_request, requests, window_rows, max_reorder):
        samples = table(len(rows))
        self.wanted = np.flatnonzero(rows)  # the others are in the trainer's cache
        self.bound = window_rows * ROW_BYTES
        settings = LoaderSettings(
            requests_in_flight=requests, window_bytes=self.bound, retry_for_s=1e9, max_reorder=max_reorder
        )
        self.max_reorder = 1 << 62 if max_reorder is None else max_reorder
        order = np.random.default_rng(0).permutation(len(rows))
        self.ids = samples.ids[order]
        parts = plan_requests(samples, order[self.wanted], self.wanted, one_way(per_request, ROW_BYTES))
        self.window = Window(parts, settings)
        self.requests = requests
        self.places = {int(item): place for place, item in enumerate(self.ids)}
        self.asked, self.came = [], set()  # places asked for, by stretch; places that arrived or were skipped
        self.now = 0.0
        self.under_way = []  # [ask, rows answered]
        self.computing = set()
        self.given_up = []
        self.out = []
        self.unreadable = set()

    @rule()
    def ask(self):
        for ask in self.window.asks(self.now):
            self.under_way.append([ask, 0])
            places = [self.places[int(item)] for item in ask.samples.ids]
            if places[-1] not in {request[-1] for request in self.asked}:
                self.asked.append(places)

    @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, 100.0]))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def arrive(self, data):
        one = data.draw(st.sampled_from(self.under_way))
        left = one[0].samples.ids[one[1] :]
        ids = left[: data.draw(st.integers(0, len(left)))]
        lost = [int(i) for i in ids if data.draw(st.integers(0, 9)) == 0]
        self.unreadable.update(lost)
        self.window.take_rows(one[0], answer(ids, unreadable=lost))
        self.came.update(self.places[int(i)] for i in ids)
        one[1] += len(ids)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def receive(self, data):
        ask = data.draw(st.sampled_from(self.under_way))[0]
        self.window.mark_received(ask, self.now)
        self.computing.add(ask.number)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def end(self, data):
        one = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove(one)
        retry = self.window.finish(one[0], self.now)
        assert (retry is None) == (one[1] == len(one[0].samples))
        self.given_up.append(one[0])

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), kind=st.sampled_from(["node", "store", "busy"]))
    def fail(self, data, kind):
        one = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove(one)
        self.given_up.append(one[0])
        reason = {
            "node": NodeUnreachable("gone"),
            "store": StoreUnavailable("slow down"),
            "busy": Overloaded("busy", retry_after_s=3.0),
        }[kind]
        retry = self.window.fail(one[0], reason, self.now)
        left = len(one[0].samples) - one[1]
        assert (retry is None) == (left == 0)
        if retry is not None:
            assert retry.samples == left
            assert retry.delay_s >= (3.0 if kind == "busy" else 0.1)

    @precondition(lambda self: self.given_up)
    @rule(data=st.data())
    def come_late(self, data):
        ask = data.draw(st.sampled_from(self.given_up))
        self.window.take_rows(ask, answer(ask.samples.ids))
        assert self.window.finish(ask, self.now) is None
        assert self.window.fail(ask, NodeUnreachable("gone"), self.now) is None

    @rule()
    def hand_out(self):
        missing = self.first_missing()
        delivery = self.window.take()
        if delivery is None:
            return
        assert all(place - missing <= self.max_reorder for place in delivery.positions), (
            "no further ahead than the max_reorder"
        )
        self.out.append(delivery)
        assert delivery.stop <= delivery.reach <= delivery.stop + self.max_reorder + 1
        if self.max_reorder == 0:
            assert delivery.reach == delivery.stop

    def first_missing(self):
        asked = {place for places in self.asked for place in places}
        return min(asked - self.came, default=1 << 62)

    @invariant()
    def within_its_bytes(self):
        if not hasattr(self, "window"):
            return
        now = self.window.statistics()
        assert now.expected_bytes >= 0
        assert now.ready_bytes >= 0
        assert now.requests_in_flight == len([1 for ask, _ in self.under_way if ask.number not in self.computing])
        assert now.requests_in_flight <= self.requests
        held = now.expected_bytes + now.ready_bytes
        if held > self.bound:
            out = self.handed_out()
            within = sum(any(place not in out for place in places) for places in self.asked)
            assert within == 1, "only a lone stretch may be larger than the window"

    @invariant()
    def what_came_out_is_a_beginning_of_the_order_and_what_the_slack_allows(self):
        if not hasattr(self, "window"):
            return
        places = [place for item in self.out for place in item.positions.tolist()]
        for item in self.out:
            assert self.ids[item.positions].tolist() == item.batch.ids.tolist()
        stop = self.out[-1].stop if self.out else 0
        expected = [p for p in self.wanted.tolist() if p < stop and int(self.ids[p]) not in self.unreadable]
        assert len(set(places)) == len(places)
        assert sorted(place for place in places if place < stop) == expected
        if self.max_reorder == 0:
            assert places == expected

    def handed_out(self):
        """Places that left the window."""
        skipped = {self.places[sample.id] for delivery in self.out for sample in delivery.batch.skipped}
        return skipped | {place for item in self.out for place in item.positions.tolist()}

    def teardown(self):
        if not hasattr(self, "window"):
            return
        for ask, _ in self.under_way:
            self.window.fail(ask, NodeUnreachable("gone"), self.now)
        while not self.window.is_done:
            asks = self.window.asks(self.now)
            for ask in asks:
                self.window.take_rows(ask, answer(ask.samples.ids))
                self.window.finish(ask, self.now)
            taken = take_all(self.window)
            self.out += taken
            self.came |= self.handed_out()
            if not asks and not taken and not self.window.is_done:
                self.now = max(self.now, self.window.next_wakeup())
        self.what_came_out_is_a_beginning_of_the_order_and_what_the_slack_allows()
        skipped = [sample.id for delivery in self.out for sample in delivery.batch.skipped]
        came = sorted([int(i) for delivery in self.out for i in delivery.batch.ids] + skipped)
        assert came == sorted(self.ids[self.wanted].tolist())
        assert self.window.statistics().expected_bytes == self.window.statistics().ready_bytes == 0


TestDisorder = Disorder.TestCase


def test_rows_come_out_in_order_when_answers_come_in_reverse():
    held = window(8, per_request=4, requests_in_flight=2)
    first, second = held.asks(0)
    held.take_rows(second, answer(second.samples.ids))
    assert held.take() is None
    held.take_rows(first, answer(first.samples.ids))
    assert [item.positions.tolist() for item in take_all(held)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not held.is_done
    held.finish(first, 0)
    held.finish(second, 0)
    assert held.is_done


def test_rows_may_go_ahead_of_a_missing_one_as_far_as_the_slack_goes():
    held = window(16, per_request=4, requests_in_flight=4, max_reorder=7)
    first, second = held.asks(0)
    held.take_rows(second, answer(second.samples.ids))
    held.finish(second, 0)
    ahead = held.take()
    assert (ahead.positions.tolist(), ahead.stop, ahead.reach) == ([4, 5, 6, 7], 0, 8)
    third, *_ = held.asks(0)
    held.take_rows(third, answer(third.samples.ids))
    assert held.take() is None, "place 8 is 8 ahead of place 0"
    held.take_rows(first, answer(first.samples.ids[:1]))
    assert [item.positions.tolist() for item in take_all(held)] == [[0]]
    held.take_rows(first, answer(first.samples.ids[1:]))
    left = take_all(held)
    assert [item.positions.tolist() for item in left] == [[1, 2, 3], [8, 9, 10, 11]]
    assert [item.stop for item in left] == [8, 12]


def test_without_a_bound_whatever_arrived_goes_first():
    held = window(16, per_request=4, requests_in_flight=4, max_reorder=None)
    first, second = held.asks(0)
    places = []
    for ask in (second, *held.asks(0), first):
        held.take_rows(ask, answer(ask.samples.ids))
        held.finish(ask, 0)
        places += [item.positions.tolist() for item in take_all(held)]
    assert places == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_rows_are_handed_out_before_their_answer_is_whole():
    held = window(8, per_request=8)
    (ask,) = held.asks(0)
    held.take_rows(ask, answer(ask.samples.ids[:3]))
    assert held.take().positions.tolist() == [0, 1, 2]
    assert held.take() is None


def test_the_number_of_requests_grows_by_one_with_each_answer():
    held = window(400, requests_in_flight=8)
    asks = list(held.asks(0))
    seen = [len(asks)]
    for _ in range(8):
        ask = asks.pop(0)
        held.take_rows(ask, answer(ask.samples.ids))
        held.finish(ask, 0)
        asks += held.asks(0)
        seen.append(len(asks))
    assert seen == [2, 3, 4, 5, 6, 7, 8, 8, 8]


def test_what_is_here_and_is_computed_makes_room_for_more_under_way_up_to_a_bound():
    held = window(400, requests_in_flight=2)
    computing = []
    while asks := held.asks(0):
        for ask in asks:
            held.mark_received(ask, 0)
        computing += asks
    assert sum(len(ask.samples) for ask in computing) == 4 * 4, "four whole requests"
    assert held.statistics().requests_in_flight == 0
    for ask in computing:
        held.take_rows(ask, answer(ask.samples.ids))
        assert held.finish(ask, 0) is None
    assert len(take_all(held)) == len(computing)
    assert len(held.asks(0)) == 2


def test_what_waits_for_a_slow_processor_is_some_seconds_of_its_work():
    held, now, most = window(4000, requests_in_flight=8), 0.0, []
    computing = deque()
    for _ in range(60):
        while asks := held.asks(now):
            for ask in asks:
                held.mark_received(ask, now)
            computing += asks
        most.append(sum(len(ask.samples) for ask in computing))
        ask = computing.popleft()
        now += len(ask.samples) * 0.3  # a row takes so long
        held.take_rows(ask, answer(ask.samples.ids))
        held.finish(ask, now)
        take_all(held)
    assert most[0] == 4 * 4, "nothing is known of its pace"
    assert set(most[-20:]) == {12}, "the fewest whole requests that are three seconds of work"


@pytest.mark.parametrize("slow", [0, 2])
def test_one_run_that_waited_does_not_let_the_network_idle(slow):
    """A first run makes kernels ready, and another waits until an engine is found; rows take 50 ms of themselves."""
    held, now, computing, waiting = window(4000, requests_in_flight=8), 0.0, deque(), []
    for run in range(6):
        while asks := held.asks(now):
            for ask in asks:
                held.mark_received(ask, now)
            computing += asks
        waiting.append(sum(len(ask.samples) for ask in computing))
        ask = computing.popleft()
        now += 4.0 if run == slow else len(ask.samples) * 0.05
        held.take_rows(ask, answer(ask.samples.ids))
        held.finish(ask, now)
        take_all(held)
    assert min(waiting) >= 4 * 4, "as many as may wait for a quick processor"


def test_while_a_processor_has_no_engine_a_request_more_is_asked_for_each_second():
    held, computing = window(4000, requests_in_flight=1), []

    def ask(now):
        while asks := held.asks(now):
            for asked in asks:
                held.mark_received(asked, 0)
            computing.extend(asks)
        return sum(len(asked.samples) for asked in computing)

    assert ask(0) == 4 * 4
    assert held.next_wakeup() == 1
    assert ask(0.9) == 4 * 4
    assert [ask(now) for now in (1, 2, 5)] == [5 * 4, 6 * 4, 9 * 4]
    assert held.next_wakeup() == 6
    held.bound(requests=1, window_bytes=1)
    assert held.next_wakeup() is None, "only an arrival makes room for bytes"


def test_as_long_as_no_pace_is_known_what_is_under_way_counts_with_what_waits():
    held = window(4000, requests_in_flight=8, ramp=False)
    asks = held.asks(0)
    assert len(asks) == 8, "all that may be under way"
    held.mark_received(asks[0], 0)
    assert not held.asks(0), "it may have seconds of work"


@pytest.mark.parametrize(("row_s", "requests"), [(None, 8), (0.01, 8), (0.3, 3), (1.0, 1), (60.0, 1)])
def test_before_any_pace_is_known_three_seconds_of_work_as_believed_are_asked_for(row_s, requests):
    """A network of a third of a second a row, and a link that brings all of it at once: the node is ready later."""
    request_source = ShortestWait(
        {NODE: 1.0, TRAINER: 1.0},
        samples_per_request=4,
        bytes_per_sample=lambda route: ROW_BYTES,
        clock=lambda: 0.0,
        row_s={} if row_s is None else {TRAINER: row_s},
    )
    request_source.close(NODE)
    held = window(400, requests_in_flight=8, ramp=False, request_source=request_source)
    asks = held.asks(0.0)
    assert len(asks) == requests
    assert {ask.route for ask in asks} == {TRAINER}
    request_source.open(NODE)
    assert {ask.route for ask in held.asks(0.0)} == ({NODE} if requests < 8 else set())


def test_a_request_that_is_held_takes_the_way_that_opened_meanwhile():
    """It must not keep those behind it from a node that became ready while a slow trainer had seconds of work."""
    now = [0.0]
    request_source = ShortestWait(
        {NODE: 1.0, TRAINER: 1.0},
        samples_per_request=4,
        bytes_per_sample=lambda route: ROW_BYTES,
        clock=lambda: now[0],
    )
    request_source.close(NODE)
    held, computing = window(400, requests_in_flight=1, request_source=request_source), []
    while asks := held.asks(now[0]):
        for ask in asks:
            held.mark_received(ask, now[0])
        computing += asks
    assert {ask.route for ask in computing} == {TRAINER}
    dealt = request_source.assigned_samples
    now[0] = 0.5
    assert not held.asks(now[0])
    assert held.next_wakeup() is not None
    assert request_source.assigned_samples == dealt, "what is dealt again is dealt once"
    request_source.open(NODE)
    assert [ask.route for ask in held.asks(now[0])] == [NODE]


def test_a_request_that_is_held_for_good_is_looked_at_four_times_a_second():
    held, now = window(4000, requests_in_flight=1), 0.0
    computing = deque()
    for _ in range(8):
        while asks := held.asks(now):
            for ask in asks:
                held.mark_received(ask, now)
            computing += asks
        ask = computing.popleft()
        now += 4.0  # a row takes a second
        held.take_rows(ask, answer(ask.samples.ids))
        held.finish(ask, now)
        take_all(held)
    held.mark_received(*held.asks(now), now)
    assert not held.asks(now)
    assert held.next_wakeup() == now + 0.25


def test_where_there_is_no_other_way_only_bytes_bound_what_waits_for_a_processor():
    has_choice = [True]
    held, computing = window(4000, requests_in_flight=1, has_choice=lambda: has_choice[-1]), []

    def ask(now):
        while asks := held.asks(now):
            for asked in asks:
                held.mark_received(asked, now)
            computing.extend(asks)
        return sum(len(asked.samples) for asked in computing)

    assert ask(0) == 4 * 4
    held.bound(requests=1, window_bytes=40 * ROW_BYTES)
    has_choice.append(False)
    assert ask(0) == 40


def test_what_is_here_is_asked_of_nobody_a_second_time_though_it_takes_long():
    held = window(4000, requests_in_flight=4, hedge_quantile=0.5)
    now = 0.0
    for _ in range(40):
        for ask in held.asks(now):
            held.take_rows(ask, answer(ask.samples.ids))
            held.finish(ask, now + 0.1)
        take_all(held)
        now += 0.1
    slow = held.asks(now)
    assert slow
    for ask in slow:
        held.mark_received(ask, now)
    assert not any(ask.is_hedge for ask in held.asks(now + 60))


def test_without_a_ramp_all_that_is_allowed_is_asked_for_at_once():
    assert len(window(400, requests_in_flight=8, ramp=False).asks(0)) == 8


def test_after_a_failure_one_request_probes_before_others_follow():
    held = window(400, requests_in_flight=4)
    for ask in held.asks(0):
        held.fail(ask, NodeUnreachable("gone"), 0)
    assert held.asks(0) == ()
    assert held.next_wakeup() == pytest.approx(0.1)
    (probe,) = held.asks(10)
    assert probe.samples.ids[0] == table(1).ids[0]
    assert probe.attempt == 2
    held.take_rows(probe, answer(probe.samples.ids))
    held.finish(probe, 10)
    assert len(held.asks(10)) == 2


def test_rows_that_arrived_before_a_failure_are_not_asked_for_again():
    held = window(8, per_request=8)
    (ask,) = held.asks(0)
    held.take_rows(ask, answer(ask.samples.ids[:5]))
    held.fail(ask, NodeUnreachable("gone"), 0)
    (again,) = held.asks(1)
    assert again.samples.ids.tolist() == table(8).ids[5:].tolist()


def test_delays_double_up_to_a_limit():
    held = window(4, retry_for_s=1000)
    delays, now = [], 0.0
    for _ in range(8):
        (ask,) = held.asks(now)
        delays.append(held.fail(ask, NodeUnreachable("gone"), now).delay_s)
        now += delays[-1]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


@given(jitter=st.floats(0, 1, exclude_max=True), failures=st.integers(1, 40), asked_s=st.floats(0.01, 7))
def test_jitter_spreads_clients_that_failed_together_and_none_comes_before_it_may(jitter, failures, asked_s):
    failing = Failing(samples=4, failures=failures, since=0.0)
    without = delay_s(failing, NodeUnreachable("gone"), 0, 1000)
    assert delay_s(failing, NodeUnreachable("gone"), 0, 1000, jitter) == pytest.approx(without * (1 - jitter / 2))
    busy = Overloaded("busy", retry_after_s=asked_s)
    assert delay_s(failing, busy, 0, 1000, jitter) >= asked_s
    assert delay_s(failing, busy, 0, asked_s, jitter) == pytest.approx(asked_s), "the last attempt is within patience"


def test_windows_that_failed_together_recover_singly():
    luck = itertools.cycle([0.0, 0.2, 0.4, 0.6, 0.8])
    delays = set()
    for _ in range(5):
        held = window(4, jitter=lambda: next(luck))
        delays.add(held.fail(held.asks(0)[0], NodeUnreachable("gone"), 0).delay_s)
    assert len(delays) == 5


def test_leaves_an_overloaded_node_alone_for_the_time_it_asked():
    held = window(4)
    (ask,) = held.asks(0)
    assert held.fail(ask, Overloaded("busy", retry_after_s=7), 0).delay_s == 7
    assert held.asks(6.9) == ()
    assert len(held.asks(7)) == 1


def test_ends_the_job_if_a_node_asks_to_wait_longer_than_the_retry_time():
    held = window(4, retry_for_s=5)
    (ask,) = held.asks(0)
    with pytest.raises(NodeUnreachable, match=r"busy.*retry_for_s \(now 5 s\)"):
        held.fail(ask, Overloaded("busy", retry_after_s=7), 0)


def test_the_last_attempt_is_made_when_the_retry_time_ends():
    held = window(4, retry_for_s=0.25)
    assert held.fail(held.asks(0)[0], NodeUnreachable("gone"), 0).delay_s == pytest.approx(0.1)
    assert held.fail(held.asks(0.1)[0], NodeUnreachable("gone"), 0.1).delay_s == pytest.approx(0.15)
    (last,) = held.asks(0.25)
    with pytest.raises(NodeUnreachable, match="in 3 attempts over 0 s: gone; bring it back, or raise retry_for_s"):
        held.fail(last, NodeUnreachable("gone"), 0.25)


def test_a_store_that_stays_away_is_named_as_such():
    held = window(4, retry_for_s=0)
    (ask,) = held.asks(0)
    with pytest.raises(StoreUnavailable, match="the store did not give 4 samples"):
        held.fail(ask, StoreUnavailable("503"), 0)


def test_the_retry_time_starts_again_when_rows_arrive():
    held = window(4, retry_for_s=1)
    now = 0.0
    for _ in range(4):
        (ask,) = held.asks(now)
        held.take_rows(ask, answer(ask.samples.ids[:1]))
        if held.fail(ask, NodeUnreachable("gone"), now) is not None:
            now += 0.9
    assert take_all(held)[-1].stop == 4


def test_an_answer_that_ends_early_is_asked_for_again():
    held = window(4)
    (ask,) = held.asks(0)
    held.take_rows(ask, answer(ask.samples.ids[:2]))
    assert "ended before its last row" in held.finish(ask, 0).reason
    assert len(held.asks(1)[0].samples) == 2


@pytest.mark.parametrize("ids", [[10, 3], [3, 3], [3, 10, 17, 24, 31], [99]])
def test_an_answer_with_other_samples_is_refused(ids):
    held = window(4)
    (ask,) = held.asks(0)
    with pytest.raises(Refused, match="other samples than were asked for"):
        held.take_rows(ask, answer(ids))


def test_skipped_samples_take_no_place():
    held = window(4)
    (ask,) = held.asks(0)
    held.take_rows(ask, answer(ask.samples.ids, unreadable=[3, 24]))
    delivery = held.take()
    assert delivery.positions.tolist() == [1, 2]
    assert delivery.stop == 4
    assert held.statistics().rows_skipped == 2


def test_bounds_may_change_while_it_runs_and_what_is_under_way_stays():
    held = window(400, requests_in_flight=3)
    asks = list(held.asks(0))
    held.bound(requests=8, window_bytes=5 * 4 * ROW_BYTES)
    for _ in range(6):
        ask = asks.pop(0)
        held.take_rows(ask, answer(ask.samples.ids))
        held.finish(ask, 0)
        take_all(held)
        asks += held.asks(0)
    assert len(asks) == 5, "the bytes allow no more"
    held.bound(requests=1, window_bytes=1)
    assert held.statistics().requests_in_flight == 5
    for ask in asks:
        assert held.asks(0) == ()
        held.take_rows(ask, answer(ask.samples.ids))
        held.finish(ask, 0)
    take_all(held)
    assert len(held.asks(0)) == 1


def test_an_epoch_with_nothing_to_ask_is_done_at_once():
    held = window(0)
    assert held.is_done
    assert held.asks(0) == ()
    assert held.take() is None


def test_encoded_samples_count_with_their_own_lengths():
    held = window(4, per_request=2, row_bytes=0, window_bytes=250)
    (first,) = held.asks(0)
    assert held.statistics().expected_bytes == 200
    assert len(first.samples) == 2


@given(count=st.integers(0, 50), per_request=st.integers(1, 9), bound=st.integers(1, 500), requests=st.integers(1, 6))
def test_without_failures_every_position_comes_once_in_order(count, per_request, bound, requests):
    held = window(count, per_request=per_request, window_bytes=bound, requests_in_flight=requests)
    assert run_to_the_end(held) == list(range(count))


@pytest.mark.promise("complete", mended="the last samples of an epoch that the next owner had were left out")
@given(
    owners=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    per_request=st.integers(1, 4),
    requests=st.integers(1, 4),
    bound=st.integers(1, 200),
)
def test_no_place_counts_as_handed_out_too_early_among_owners(owners, per_request, requests, bound):
    """With one request under way, [0, 2] leaves before [1] was asked for, and an epoch of three would end there."""
    samples, numbers = table(len(owners)), np.array(owners)
    mine = [np.flatnonzero(numbers == owner) for owner in range(3)]
    pieces = [places[start : start + per_request] for places in mine for start in range(0, len(places), per_request)]
    planned = [
        PlannedRequest(
            positions=piece, samples=samples.take(piece), expected_bytes=ROW_BYTES * len(piece), route=Route(cut=1)
        )
        for piece in sorted(pieces, key=lambda piece: int(piece[0]))
    ]
    chosen = LoaderSettings(samples_per_request=per_request, requests_in_flight=requests, window_bytes=bound)
    held, missing = Window(planned, chosen), set(range(len(owners)))
    while not held.is_done:
        for ask in held.asks(0):
            held.take_rows(ask, answer(ask.samples.ids))
            held.finish(ask, 0)
        while (delivery := held.take()) is not None:
            missing -= set(delivery.positions.tolist())
            assert delivery.stop <= min(missing, default=len(owners))
    assert not missing
    assert delivery is None
