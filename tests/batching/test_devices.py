"""Which of several devices takes the next batch."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.batching import DeviceLoad, batch_seconds, combined_speed, first_to_finish


def simulated(seconds, batches, outstanding, *, knows=True):
    """Batches that each device took, and when all were done, where so many batches are under way at once."""
    counts, waiting, free_at = [0] * len(seconds), [0.0] * len(seconds), [0.0] * len(seconds)
    known = list(seconds) if knows else [None] * len(seconds)
    under_way, now, given_out = [], 0.0, 0
    while given_out < batches or under_way:
        if given_out < batches and len(under_way) < outstanding:
            loads = [DeviceLoad(waiting_s=w, batch_s=s) for w, s in zip(waiting, known, strict=True)]
            number = first_to_finish(loads)
            cost = batch_seconds(loads)[number]
            waiting[number] += cost
            counts[number] += 1
            given_out += 1
            free_at[number] = max(now, free_at[number]) + seconds[number]
            heapq.heappush(under_way, (free_at[number], number, cost))
            continue
        now, number, cost = heapq.heappop(under_way)
        waiting[number] -= cost
        known[number] = seconds[number]
    return counts, now


@pytest.mark.parametrize("seconds", [(1.0, 1.0), (1.0, 3.0), (4.0, 2.0, 1.0), (0.3, 0.7)])
@pytest.mark.parametrize("knows", [True, False], ids=["speeds known", "speeds measured on the way"])
def test_batches_go_to_devices_in_proportion_to_their_speeds(seconds, knows):
    counts, took_s = simulated(seconds, 1200, outstanding=24, knows=knows)
    speed = sum(1 / each for each in seconds)
    for count, each in zip(counts, seconds, strict=True):
        assert count == pytest.approx(1200 / each / speed, rel=0.05)
    assert took_s <= 1.05 * 1200 / speed


def test_a_slow_device_is_left_alone_where_the_fast_one_is_done_sooner():
    assert simulated((1.0, 10.0), 5, outstanding=5)[0] == [5, 0]
    assert simulated((1.0, 3.5), 5, outstanding=5) == ([4, 1], 4.0)


def test_one_that_may_take_none_is_given_none():
    loads = [DeviceLoad(waiting_s=0, batch_s=1, may_take=False), DeviceLoad(waiting_s=90, batch_s=9)]
    assert first_to_finish(loads) == 1


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.one_of(st.none(), st.floats(1e-6, 1e3))), min_size=1, max_size=9),
    st.data(),
)
def test_nobody_who_may_would_finish_it_sooner(drawn, data):
    may = data.draw(st.lists(st.booleans(), min_size=len(drawn), max_size=len(drawn)).filter(any))
    loads = [DeviceLoad(waiting_s=w, batch_s=s, may_take=m) for (w, s), m in zip(drawn, may, strict=True)]
    ends = [load.waiting_s + seconds for load, seconds in zip(loads, batch_seconds(loads), strict=True)]
    number = first_to_finish(loads)
    assert may[number]
    assert ends[number] == min(end for end, one_may in zip(ends, may, strict=True) if one_may)


def test_the_speed_of_all_is_the_sum():
    assert combined_speed([0.5]) == 1
    assert combined_speed([0.5, 0.5]) == 2
    assert combined_speed([1.0, 2.0, 4.0]) == 1.75
    assert combined_speed([1.0, None]) == 2
    assert combined_speed([None, None, None]) == 3
