"""Dealing each request to the way on which it is done first: nothing idles, and wrong beliefs are soon corrected.

Ways are simulated as queues in virtual time, behind a window of a few requests.
"""

import heapq
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import Route
from frostline.core.events import BatchDelivered, EpochStarted
from frostline.jobs.router import BothSides
from frostline.prefetch import ShortestWait

pytestmark = pytest.mark.promise("fast", mended="a link idled while the processor behind it was busy")

NODE, TRAINER = Route(9), Route(0)
REQUEST = 8


class World:
    """Ways that do their requests one after another, each at a rate of its own, which may change with time."""

    def __init__(self, rates, priors, *, bound=None, window=8, request=REQUEST, run=None):
        self.now = 0.0
        self.rates = rates
        self.window = window
        self.request = request
        self.request_source = ShortestWait(
            priors,
            samples_per_request=request,
            rows_per_run={} if run is None else {TRAINER: run},
            bytes_per_sample=lambda route: 10,
            clock=lambda: self.now,
            **({} if bound is None else {"bound": bound}),
        )
        self.free_at = dict.fromkeys(priors, 0.0)
        self.done_at = []
        self.assigned = []

    def rate(self, route):
        rate = self.rates[route]
        return rate(self.now) if callable(rate) else rate

    def run(self, samples, until=math.inf):
        """Do so many samples; what was dealt after a moment is in ``assigned``, as (time, route, rows)."""
        ends, left, under_way = [], samples, 0
        while (left or ends) and self.now < until:
            while left and under_way < self.window:
                following = self.request_source.next_request(left)
                assert 1 <= following.rows <= min(left, self.request)
                left -= following.rows
                under_way += 1
                self.assigned.append((self.now, following.route, following.rows))
                begin = max(self.now, self.free_at[following.route])
                self.free_at[following.route] = begin + following.rows / self.rate(following.route)
                heapq.heappush(
                    ends, (self.free_at[following.route], len(self.assigned), following.route, following.rows)
                )
            self.now, _, route, rows = heapq.heappop(ends)
            under_way -= 1
            self.request_source.finish_rows(route, rows)
            self.done_at.append((self.now, rows))
        return self.now

    def share(self, route, after=0.0):
        counts = Counter()
        for at, way, rows in self.assigned:
            counts[way] += rows if at >= after else 0
        return counts[route] / counts.total()


speeds = st.floats(1.0, 300.0)


@given(speeds, speeds, speeds, speeds, st.integers(1, 3000))
def test_every_sample_is_dealt_once_and_no_way_idles_for_long(node, trainer, prior_node, prior_trainer, samples):
    world = World({NODE: node, TRAINER: trainer}, {NODE: prior_node, TRAINER: prior_trainer})
    seconds = world.run(samples)
    assert sum(rows for _, _, rows in world.assigned) == samples == world.request_source.assigned_samples
    # At worst a window of requests goes to the slower way before anything is known of it, or the last one does.
    slack = (world.window + 1) * REQUEST / min(node, trainer)
    assert seconds <= samples / (node + trainer) + slack
    assert math.isclose(sum(world.request_source.shares.values()), 1.0)


@pytest.mark.parametrize("wrong", [0.1, 10.0])
@pytest.mark.parametrize(("node", "trainer"), [(60, 60), (200, 20), (20, 200)])
def test_a_tenfold_wrong_prior_is_corrected_within_a_hundred_samples(wrong, node, trainer):
    world = World({NODE: node, TRAINER: trainer}, {NODE: node * wrong, TRAINER: trainer})
    world.run(4000)
    dealt, corrected_at = 0, None
    for at, _, rows in world.assigned:
        dealt += rows
        if corrected_at is None and dealt > 100 + world.window * REQUEST:
            corrected_at = at
    fair = node / (node + trainer)
    assert world.share(NODE, after=corrected_at) == pytest.approx(fair, abs=0.05)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_node_that_becomes_ten_times_slower_or_faster_gets_what_it_can_do(factor):
    world = World({NODE: lambda now: 60 * (factor if now > 5 else 1), TRAINER: 60}, {NODE: 1, TRAINER: 1})
    world.run(6000)
    fair = factor / (factor + 1)
    assert world.share(NODE, after=7 if factor > 1 else 15) == pytest.approx(fair, abs=0.06)


def test_a_trainer_that_is_busy_for_a_while_gets_less_and_then_its_part_again():
    world = World({NODE: 60, TRAINER: lambda now: 6 if 5 < now < 15 else 60}, {NODE: 1, TRAINER: 1})
    world.run(6000)
    counts = Counter()
    for at, way, rows in world.assigned:
        if 8 < at < 14:
            counts[way] += rows
    assert counts[TRAINER] / counts.total() < 0.25
    assert world.share(TRAINER, after=25) == pytest.approx(0.5, abs=0.05)


def test_what_bounds_a_way_bounds_what_it_is_dealt_and_is_told():
    world = World({NODE: 50, TRAINER: 50}, {NODE: 1, TRAINER: 1}, bound=lambda way: math.inf if way.cut else 10.0)
    world.run(3000)
    assert world.share(TRAINER, after=5) == pytest.approx(1 / 6, abs=0.05)
    assert world.request_source.is_bound
    free = World({NODE: 50, TRAINER: 50}, {NODE: 1, TRAINER: 1})
    free.run(3000)
    assert not free.request_source.is_bound
    assert free.request_source.samples_per_s == pytest.approx(100, rel=0.1)


def test_nothing_is_dealt_to_a_way_that_is_closed_and_few_samples_wait_for_the_other():
    world = World({NODE: 60, TRAINER: 60}, {NODE: 1, TRAINER: 1})
    world.request_source.close(NODE)
    world.run(200)
    assert {route for _, route, _ in world.assigned} == {TRAINER}
    world.request_source.open(NODE)
    begun = world.now
    world.run(2000)
    assert world.share(NODE, after=begun) == pytest.approx(0.5, abs=0.05)


def source_at(now, *, run=1, passing=math.inf):
    """Deals at the time in a list; the trainer runs so many rows at once, and so many a second reach it."""
    return ShortestWait(
        {NODE: 60, TRAINER: 1},
        samples_per_request=32,
        bytes_per_sample=lambda _: 1,
        clock=lambda: now[0],
        bound=lambda _: passing,
        rows_per_run={TRAINER: run},
    )


def test_requests_are_short_while_a_way_is_closed():
    request_source = source_at([0.0])
    request_source.close(NODE)
    assert request_source.next_request(100).rows == 8
    request_source.open(NODE)
    assert request_source.next_request(200).rows == 32
    assert request_source.next_request(5).rows == 2


@pytest.mark.parametrize(("run", "lengths"), [(8, [32, 8, 24, 16, 16, 8, 8, 8, 8]), (32, [32, 32, 32, 32])])
def test_the_last_requests_are_short_and_none_is_shorter_than_a_run(run, lengths):
    request_source, left = source_at([0.0], run=run), 128
    for length in lengths:
        assert request_source.next_request(left).rows == length
        left -= length


@pytest.mark.parametrize(("node", "trainer"), [(17, 15), (13, 40), (3.5, 3.5), (100, 90)])
@pytest.mark.parametrize("samples", [300, 500, 1041])
def test_both_sides_end_within_a_run_of_each_other(node, trainer, samples):
    world = World({NODE: node, TRAINER: trainer}, {NODE: 1, TRAINER: 1}, window=4, request=32, run=8)
    assert world.run(samples) <= samples / (node + trainer) + 8 / min(node, trainer)


@pytest.mark.parametrize(("speed", "passing"), [(6, 11), (6, 5), (13, 5), (6, 2.5), (60, 11)])
@pytest.mark.parametrize("run", [8, 16])
def test_a_thin_link_carries_all_the_time_what_the_trainer_can_do(speed, passing, run):
    """A whole request takes seconds there: it is dealt in parts, or as a run when nothing waits."""
    world = World(
        {NODE: speed, TRAINER: min(speed, passing)},
        {NODE: 1, TRAINER: 1},
        request=32,
        run=run,
        bound=lambda way: math.inf if way.cut else passing,
    )
    both = speed + min(speed, passing)
    assert world.run(500) <= 500 / both + 1.5 * run / min(speed, passing)


@pytest.mark.parametrize(
    ("passing", "run", "rows"), [(math.inf, 8, 8), (42.0, 8, 8), (10.0, 8, 2), (0.1, 8, 1), (10.0, 32, 32)]
)
def test_a_thin_link_is_soon_free_for_what_opens_a_way(passing, run, rows):
    """Where the weights take longer on their way, runs that are filled up would cost more than the wait."""
    now = [100.0]
    request_source = source_at(now, run=run, passing=passing)
    request_source.close(NODE)
    assert request_source.next_request(100).rows == rows
    now[0] += 6
    assert request_source.next_request(100).rows == run


def test_samples_that_nobody_asked_for_yet_are_dealt_again_whole_and_counted_once():
    now = [100.0]
    request_source = source_at(now, run=8, passing=1e9)
    request_source.close(NODE)
    dealt = [request_source.next_request(100).rows for _ in range(4)]
    again = request_source.next_request(dealt[-1], TRAINER)
    assert (again.route, again.rows) == (TRAINER, dealt[-1]), "no other way is open"
    request_source.open(NODE)
    again = request_source.next_request(dealt[-1], TRAINER)
    assert (again.route, again.rows) == (NODE, dealt[-1])
    assert request_source.assigned_samples == sum(dealt)
    assert request_source.shares == {TRAINER: 0.75, NODE: 0.25}


def test_nothing_is_kept_short_for_a_way_that_is_not_expected_to_open():
    request_source = source_at([100.0], run=8, passing=10.0)
    assert request_source.has_choice
    request_source.close(NODE)
    assert request_source.has_choice
    assert request_source.next_request(100).rows == 2
    request_source.close(NODE, is_expected=False)
    assert not request_source.has_choice
    assert request_source.next_request(100).rows == 8
    request_source.close(NODE)
    assert request_source.has_choice, "a loop went on for longer than it seemed"
    request_source.open(NODE)
    assert request_source.has_choice


def test_a_way_whose_runs_are_filled_up_gets_whole_runs_even_while_another_is_closed():
    """A trainer that runs eager torch with so many rows, whatever a request has: 8 of 32 would take as long as all."""
    now = [0.0]
    request_source = source_at(now, run=32)
    request_source.close(NODE)
    assert request_source.next_request(100).rows == 32
    assert request_source.next_request(20).rows == 20
    request_source.open(NODE)
    for _ in range(200):
        now[0] += 0.01
        following = request_source.next_request(1000)
        assert following.rows == 32 or following.route == NODE
        request_source.finish_rows(following.route, following.rows)


def test_a_way_that_begins_again_is_believed_as_at_first():
    world = World({NODE: 60, TRAINER: 2}, {NODE: 60, TRAINER: 60})
    world.run(400)
    world.rates[TRAINER] = 60
    world.request_source.begin_again(TRAINER)
    begun = world.now
    world.run(3000)
    assert world.share(TRAINER, after=begun) == pytest.approx(0.5, abs=0.05)


def test_a_way_that_begins_again_has_the_speed_that_was_measured_apart():
    """A prior that is wrong would give all that may be under way to the other side, and this one nothing."""
    world = World({NODE: 60, TRAINER: 2}, {NODE: 60, TRAINER: 30})
    world.run(400)
    world.rates[TRAINER] = 60
    world.request_source.begin_again(TRAINER, 60.0)
    assert world.request_source.observed_speed(TRAINER) == 60.0
    begun = world.now
    world.run(600)
    assert world.share(TRAINER, after=begun) == pytest.approx(0.5, abs=0.05)


def test_no_more_than_a_few_rows_wait_for_a_way_that_is_to_do_something_else_soon():
    now = [0.0]
    request_source = source_at(now)
    request_source.open(NODE, max_waiting=16)
    dealt = Counter()
    for _ in range(20):
        following = request_source.next_request(1000)
        dealt[following.route] += following.rows
        assert following.rows <= 8
    assert 0 < dealt[NODE] <= 16
    request_source.finish_rows(NODE, 8)
    request_source.open(NODE)
    for _ in range(20):
        following = request_source.next_request(1000)
        dealt[following.route] += following.rows
    assert dealt[NODE] > 32


def test_rows_that_come_no_more_do_not_count_as_waiting():
    now = [0.0]
    request_source = ShortestWait(
        {NODE: 1, TRAINER: 1}, samples_per_request=8, bytes_per_sample=lambda _: 1, clock=lambda: now[0]
    )
    both = [request_source.next_request(100).route, request_source.next_request(100).route]
    assert set(both) == {NODE, TRAINER}
    for route in both:
        now[0] += 1
        request_source.finish_rows(route, 8)
    request_source.next_request(100), request_source.next_request(100)
    request_source.drop_rows(NODE, 8)
    assert request_source.next_request(100).route == NODE
    now[0] = 100.0  # nothing was heard of either: what was asked for was lost, and both are free
    assert {request_source.next_request(100).route, request_source.next_request(100).route} == {NODE, TRAINER}


def test_the_shares_are_what_is_believed_before_anything_was_dealt():
    request_source = ShortestWait(
        {NODE: 3, TRAINER: 1}, samples_per_request=8, bytes_per_sample=lambda _: 1, clock=float
    )
    assert request_source.shares == {NODE: 0.75, TRAINER: 0.25}
    assert request_source.takes([NODE, TRAINER])
    assert not request_source.takes([NODE, Route(3)])


def test_a_way_behind_a_link_gets_a_request_before_anything_is_known():
    request_source = ShortestWait(
        {NODE: 1, TRAINER: 1},
        samples_per_request=32,
        bytes_per_sample=lambda _: 1,
        clock=float,
        bound=lambda way: math.inf if way.cut else 35.0,
    )
    assert {request_source.next_request(800).route, request_source.next_request(800).route} == {NODE, TRAINER}


def test_requests_follow_one_another_over_a_link_while_the_one_before_is_computed():
    """A link gives 35 rows a second and a processor takes 67: one request at a time would leave both waiting."""
    now = [0.0]
    request_source = ShortestWait(
        {NODE: 60, TRAINER: 60},
        samples_per_request=32,
        bytes_per_sample=lambda _: 1,
        clock=lambda: now[0],
        bound=lambda way: math.inf if way.cut else 35.0,
    )
    for at in (0.0, 0.95):
        now[0] = at
        while (following := request_source.next_request(800)).route != TRAINER:
            assert request_source.assigned_samples < 800, (
                "the trainer's second request is dealt when the first has crossed"
            )
        assert following.rows == 32
    assert request_source.observed_speed(TRAINER) == 0, "nothing was computed by then"


def routes_of(sides, rows=400):
    return {sides.next_request(rows).route for _ in range(rows // REQUEST)}


def test_a_loop_that_hardly_waits_keeps_the_trainers_processor():
    sides = BothSides(World({NODE: 1, TRAINER: 1}, {NODE: 1, TRAINER: 1}).request_source)
    sides.on_event(EpochStarted(epoch=0, samples=100), 0.0)
    for batch in range(20):
        sides.on_event(BatchDelivered(epoch=0, samples=8, from_cache=0, stall_s=0.01), float(batch))
    assert routes_of(sides) == {NODE}
    sides.on_event(BatchDelivered(epoch=0, samples=8, from_cache=0, stall_s=0.9), 20.0)
    assert TRAINER in routes_of(sides)
    sides.close(NODE)
    assert routes_of(sides) == {TRAINER}


@pytest.mark.parametrize(("node", "routes"), [(30, {NODE}), (10, {NODE, TRAINER})])
def test_a_trainer_no_faster_than_the_node_leaves_frozen_work_to_it(node, routes):
    """Eight rows take the loop 0.4 s, and it waits for them as long, since it was given the other work too."""
    world = World({NODE: node, TRAINER: 100}, {NODE: 1, TRAINER: 1})
    world.run(200)
    sides = BothSides(world.request_source)
    sides.on_event(EpochStarted(epoch=0, samples=100), 0.0)
    for batch in range(3):
        sides.on_event(BatchDelivered(epoch=0, samples=8, from_cache=0, stall_s=0.4), 0.8 * batch)
    assert routes_of(sides) == routes
