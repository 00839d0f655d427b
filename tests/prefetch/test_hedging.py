"""Second requests for stragglers: few, for the late ones alone, and each row is taken once whoever brings it first."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import FeatureBatch, Route, Samples, Skipped
from frostline.core.config import LoaderSettings
from frostline.core.errors import NodeUnreachable, Refused, SettingError
from frostline.core.request_timing import HedgeTimer
from frostline.prefetch import Window, plan_requests
from support.mixing import one_way

WAY = Route(3)
ROWS = 4


def window(count, **settings):
    zeros = np.zeros(count, np.int64)
    table = Samples(ids=np.arange(count) + 100, objects=["x"] * count, offsets=zeros, lengths=zeros + 9, labels=zeros)
    chosen = LoaderSettings(**{"requests_in_flight": 4, "hedge_quantile": 0.9, **settings})
    return Window(plan_requests(table, np.arange(count), np.arange(count), one_way(ROWS, 8)), chosen)


def answer(ids, *, unreadable=()):
    kept = np.array([item for item in ids if item not in unreadable], np.int64)
    skipped = tuple(Skipped(id=int(item), object="x", reason="truncated") for item in ids if item in unreadable)
    return FeatureBatch(ids=kept, tensors=(kept[:, None].astype(np.float32),), skipped=skipped)


def warm(held, answers=20, seconds=1.0):
    """Answer the first requests, each after so many seconds; the time afterwards and the requests under way."""
    now, under_way = 0.0, list(held.asks(0.0))
    for _ in range(answers):
        ask = under_way.pop(0)
        held.take_rows(ask, answer(ask.samples.ids))
        held.finish(ask, now + seconds)
        now += seconds
        under_way += held.asks(now)
        while held.take():
            pass
    return now, under_way


def one_late(held):
    """A window whose only request under way is late; its ask, the second one and the time."""
    now, (*others, first) = warm(held, answers=30)
    for ask in others:
        held.take_rows(ask, answer(ask.samples.ids))
        held.finish(ask, now)
    (second,) = held.asks(now + 1000)
    return first, second, now + 1000


def test_nothing_is_late_before_twenty_answers_came():
    known = HedgeTimer(0.9)
    for _ in range(19):
        known.record(WAY, ROWS, 1.0)
    assert known.late_after_s(WAY, ROWS) is None
    known.record(WAY, ROWS, 1.0)
    assert known.late_after_s(WAY, ROWS) == 2.0


def test_late_is_what_takes_longer_than_the_quantile_and_than_twice_the_median():
    known = HedgeTimer(0.9)
    for seconds in [1.0] * 15 + [5.0] * 5:
        known.record(WAY, ROWS, seconds)
    assert known.late_after_s(WAY, ROWS) == 5.0
    assert known.late_after_s(Route(1), ROWS) is None, "each way has times of its own"


def test_a_request_is_late_beside_those_that_were_at_least_as_long():
    known = HedgeTimer(0.9)
    for rows, seconds in [(8, 0.3), (32, 1.2)]:
        for _ in range(20):
            known.record(WAY, rows, seconds)
    assert known.late_after_s(WAY, 32) == 2.4, "short ones say nothing of it"
    assert known.late_after_s(WAY, 8) == 1.2, "long ones may hold up a short one at the end of an epoch"
    assert known.late_after_s(WAY, 33) is None, "nothing is known of longer ones"


@given(quantile=st.floats(0.5, 0.99), seconds=st.lists(st.floats(0.001, 100), min_size=20, max_size=300))
def test_no_more_are_made_twice_than_lie_above_the_quantile(quantile, seconds):
    known = HedgeTimer(quantile)
    hedges = 0
    for second in seconds:
        known.record(WAY, ROWS, second)
        if known.late_after_s(WAY, ROWS) is not None:
            known.count_hedge(WAY)
            hedges += 1
    assert hedges <= (1 - quantile) * len(seconds) + 1


def test_forgets_old_times_so_that_a_link_may_change():
    known = HedgeTimer(0.9)
    for seconds in [50.0] * 200 + [1.0] * 128:
        known.record(WAY, ROWS, seconds)
    assert known.late_after_s(WAY, ROWS) == 2.0


@pytest.mark.parametrize("quantile", [0, -1, 1.5])
def test_refuses_an_invalid_quantile(quantile):
    with pytest.raises(SettingError, match="hedge_quantile"):
        LoaderSettings(hedge_quantile=quantile)


def test_the_window_wakes_when_a_request_becomes_late_and_makes_it_again():
    held = window(31 * ROWS)
    now, under_way = warm(held, answers=30)
    assert len(under_way) == 1
    late = held.next_wakeup()
    assert now < late < now + 100
    assert held.asks(late - 0.01) == ()
    (second,) = held.asks(late)
    assert second.is_hedge
    assert second.attempt == 2
    assert second.samples.ids.tolist() == under_way[0].samples.ids.tolist()
    assert held.asks(late + 1000) == (), "no third one"
    assert held.statistics().hedges == 1


def test_a_hedge_quantile_of_1_hedges_nothing():
    held = window(31 * ROWS, hedge_quantile=1)
    now, _ = warm(held, answers=30)
    assert held.next_wakeup() is None
    assert held.asks(now + 1e6) == ()


def test_cancels_the_second_attempt_when_the_first_has_finished():
    held = window(31 * ROWS)
    first, second, now = one_late(held)
    held.take_rows(second, answer(second.samples.ids))
    held.finish(second, now)
    assert held.take_abandoned() == (first.number,)
    assert held.take_abandoned() == ()
    held.take_rows(first, answer(first.samples.ids))
    assert held.finish(first, now) is None
    assert held.fail(first, NodeUnreachable("closed"), now) is None
    assert held.statistics().rows_late == ROWS
    assert len(held.take().batch) == ROWS
    assert held.is_done


def test_rows_come_from_whichever_attempt_is_ahead():
    held = window(31 * ROWS)
    first, second, now = one_late(held)
    ids = first.samples.ids
    held.take_rows(first, answer(ids[:1]))
    held.take_rows(second, answer(ids[:3], unreadable=[ids[0], ids[1]]))  # the first one was taken already
    held.take_rows(first, answer(ids[1:], unreadable=[ids[1]]))
    held.finish(first, now)
    came = [held.take(), held.take(), held.take()]
    assert [item.batch.ids.tolist() for item in came] == [[ids[0]], [ids[2]], [ids[3]]]
    assert [item.batch.tensors[0][:, 0].tolist() for item in came] == [[ids[0]], [ids[2]], [ids[3]]]
    assert [[lost.id for lost in item.batch.skipped] for item in came] == [[], [ids[1]], []]
    assert [item.positions.tolist() for item in came] == [[120], [122], [123]]
    assert held.statistics().rows_late == 3


def test_a_second_attempt_is_held_to_what_was_asked_for_too():
    held = window(31 * ROWS)
    _, second, _ = one_late(held)
    with pytest.raises(Refused, match="other samples"):
        held.take_rows(second, answer(second.samples.ids[1:]))


def test_one_attempt_may_fail_while_the_other_goes_on():
    held = window(31 * ROWS)
    first, second, now = one_late(held)
    assert held.fail(first, NodeUnreachable("gone"), now) is None
    held.take_rows(second, answer(second.samples.ids[:1]))
    retried = held.fail(second, NodeUnreachable("gone"), now)
    assert retried.samples == ROWS - 1


@given(
    seed=st.integers(0, 2**32),
    requests=st.integers(1, 8),
    max_reorder=st.sampled_from([0, 5, None]),
    pieces=st.integers(1, 3),
)
def test_every_sample_comes_once_whatever_is_late(seed, requests, max_reorder, pieces):
    """A link whose answers come in pieces, some of them a hundred times slower than others, played event by event."""
    count = 240
    held = window(
        count, requests_in_flight=requests, max_reorder=max_reorder, hedge_quantile=0.6, window_bytes=40 * ROWS * 8
    )
    random, places = np.random.default_rng(seed), []
    tie = itertools.count()
    events, now, hedges = [], 0.0, 0
    while not held.is_done:
        for ask in held.asks(now):
            hedges += ask.is_hedge
            seconds = random.choice([1.0, 1.5, 100.0], p=[0.6, 0.3, 0.1])
            for part in range(pieces):
                when = now + seconds * (part + 1) / pieces
                heapq.heappush(events, (when, next(tie), ask, part))
        while (delivery := held.take()) is not None:
            places += delivery.positions.tolist()
            assert (delivery.positions + 100 == delivery.batch.ids).all()
        wakeup = held.next_wakeup()
        if not events or (wakeup is not None and wakeup < events[0][0]):
            if held.is_done:
                break
            now = max(now, wakeup)
            continue
        now, _, ask, part = heapq.heappop(events)
        held.take_rows(ask, answer(np.array_split(ask.samples.ids, pieces)[part]))
        if part == pieces - 1:
            held.finish(ask, now)
    assert sorted(places) == list(range(count))
    assert hedges == held.statistics().hedges <= 0.4 * count / ROWS + 1
    if max_reorder == 0:
        assert places == sorted(places)
