"""PRISMA's rule as it is described, and what it does over simulated links."""

import pytest

from frostline.tuning import AutoTuning, FixedWindow, Observation, Prisma, Setting
from support.queues import Queues

MAX = Setting(requests=64, window_bytes=256 << 20)
ROWS, REQUEST = 10, 160_000


def look(now_s, ready, *, in_flight=1):
    return Observation(
        now_s=now_s,
        seconds=0.01,
        bytes_arrived=0,
        bytes_handed_out=0,
        stalled_s=0.0,
        took_s=(),
        failures=0,
        ready_bytes=ready,
        expected_bytes=in_flight * REQUEST,
        requests_in_flight=in_flight,
        requests_allowed=in_flight,
        is_full=False,
        is_ending=False,
    )


def shown(percents, every_s=0.01):
    """The rule after looks at so full a buffer of ten slots."""
    rule = Prisma(MAX, rows_per_request=ROWS)
    rule.look(look(0.0, 0))  # says how large a request is
    first = rule.setting
    changes = [
        rule.look(look(number * every_s, percent * REQUEST // 100)) for number, percent in enumerate(percents, start=1)
    ]
    return rule, first, [change for change in changes if change is not None]


def test_it_begins_with_one_producer_and_ten_slots():
    _, first, _ = shown([])
    assert first == Setting(requests=1, window_bytes=2 * REQUEST)


@pytest.mark.parametrize("percent", [0, 30, 60, 79])
def test_adds_a_producer_where_the_buffer_is_empty_or_steady(percent):
    rule, first, changes = shown([percent] * 11)
    assert len(changes) == 1
    assert rule.setting == Setting(requests=2, window_bytes=first.window_bytes + REQUEST)


def test_a_buffer_between_them_gets_ten_more_slots():
    rule, first, _ = shown([10, 90] * 6)
    assert rule.setting == Setting(requests=1, window_bytes=first.window_bytes + REQUEST)


def test_it_decides_on_ten_samples_at_least_and_every_tenth_of_a_second_at_most():
    assert shown([0] * 9, every_s=0.05)[2] == []
    assert len(shown([0] * 100)[2]) == 9
    assert len(shown([0] * 20, every_s=0.05)[2]) == 2


def test_a_buffer_that_is_full_and_steady_stops_it_for_ever():
    rule, first, changes = shown([90] * 11 + [0] * 500)
    assert (rule.setting, changes) == (first, [])


def test_it_latches_where_ours_follows():
    def over(rule):
        held = Queues(rule, round_trip_s=0.05, loop_bytes_per_s=0.5e6)
        held.run(30)
        return held.run(40, loop_bytes_per_s=1e9).rate(55, 70)

    assert over(Prisma(MAX, rows_per_request=32)) < 0.2 * over(AutoTuning(MAX, requests=8))


@pytest.mark.parametrize("round_trip_s", [0.02, 0.05])
def test_keeps_an_explicit_setting(round_trip_s):
    run = Queues(FixedWindow(Setting(requests=4, window_bytes=1 << 20)), round_trip_s=round_trip_s).run(20)
    assert run.changes == []
    assert {setting for _, setting in run.settings} == {Setting(requests=4, window_bytes=1 << 20)}
