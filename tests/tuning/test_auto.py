"""Our own rule over simulated links: what it reaches, from where, how fast it follows, and its bounds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.core.config import LoaderSettings
from frostline.tuning import AutoTuning, Observation, Setting, rule_of
from support.queues import Queues

REQUEST = 160_000
MAX = Setting(requests=128, window_bytes=256 << 20)
LINKS = {
    "round_trip_s": st.sampled_from([0.0, 0.02, 0.05, 0.075, 0.15]),
    "bytes_per_s": st.sampled_from([6e6, 12.5e6, 40e6]),
}
SIMULATED = settings(max_examples=8, deadline=None)


def queues(start=8, **figures):
    return Queues(AutoTuning(MAX, requests=start), **figures)


def ideal(round_trip_s, bytes_per_s, **_):
    """With as many requests as allowed, by Little's law."""
    return min(bytes_per_s, MAX.requests * REQUEST / (round_trip_s + 0.0005 + REQUEST / bytes_per_s))


def kept(run, start, stop=float("inf")):
    return [change.after for at, change in run.changes if start <= at < stop and not change.is_trial]


@pytest.mark.parametrize(("nodes", "requests"), [(1, 8), (2, 8), (8, 32), (100, 64)])
def test_a_window_over_several_nodes_begins_with_four_requests_for_each(nodes, requests):
    assert rule_of(LoaderSettings(), nodes=nodes).setting.requests == requests
    assert rule_of(LoaderSettings(requests_in_flight=5), nodes=nodes).setting.requests == 5
    assert rule_of(LoaderSettings(tuning="fixed"), nodes=nodes).setting.requests == 8


@pytest.mark.parametrize("round_trip_s", [0.0, 0.02, 0.075, 0.15])
def test_from_cold_the_rate_that_a_link_can_give_is_reached_within_ten_seconds(round_trip_s):
    run = queues(round_trip_s=round_trip_s, bytes_per_s=125e6).run(30)
    best = ideal(round_trip_s, 125e6)
    assert run.rate(8, 10) >= 0.95 * best
    assert run.rate(10, 30) >= 0.95 * best


def test_a_link_that_has_room_for_all_that_is_asked_is_leapt_through_and_not_climbed():
    run = queues(round_trip_s=0.15, bytes_per_s=125e6).run(5)
    assert [change.after.requests for _, change in run.changes[:3]] == [16, 64, 128]
    assert [change.before.requests for _, change in run.changes[:3]] == [8, 16, 64]


def test_a_leap_too_far_is_followed_by_half_of_it():
    run = queues(round_trip_s=0.15, bytes_per_s=20e6).run(20)  # 19 requests fill it
    assert 64 in [change.after.requests for _, change in run.changes]
    assert kept(run, 0)[-1].requests <= 32
    assert run.rate(10, 20) >= 0.95 * ideal(0.15, 20e6)


@SIMULATED
@given(start=st.integers(1, 128), seed=st.integers(0, 9), spread=st.sampled_from([0.0, 0.3]), **LINKS)
def test_it_converges_from_any_start_whatever_the_link(start, seed, spread, **link):
    run = queues(start, seed=seed, spread=spread, **link).run(60)
    assert run.rate(30, 60) >= 0.93 * ideal(**link)


@SIMULATED
@given(start=st.integers(1, 200), seed=st.integers(0, 9), data=st.data(), **LINKS)
def test_it_stays_within_its_bounds_whatever_happens(start, seed, data, **link):
    maximum = Setting(
        requests=data.draw(st.integers(1, 40)), window_bytes=REQUEST * data.draw(st.sampled_from([1, 3, 10, 50]))
    )
    held = Queues(AutoTuning(maximum, requests=start), seed=seed, **link)
    for _ in range(3):
        run = held.run(
            10,
            round_trip_s=data.draw(LINKS["round_trip_s"]),
            loop_bytes_per_s=data.draw(st.sampled_from([3e6, 30e6, 1e9])),
            refuses_above=data.draw(st.sampled_from([None, 5])),
        )
    assert all(
        1 <= setting.requests <= maximum.requests and 1 <= setting.window_bytes <= maximum.window_bytes
        for _, setting in run.settings
    )
    assert run.max_held <= maximum.window_bytes
    assert all(change.reason for _, change in run.changes)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"round_trip_s": 0.02}, {"round_trip_s": 0.15}),
        ({"round_trip_s": 0.075, "bytes_per_s": 12.5e6}, {"bytes_per_s": 125e6}),
        ({"round_trip_s": 0.075, "loop_bytes_per_s": 5e6}, {"loop_bytes_per_s": 1e9}),
        ({"servers": 4, "service_s": 0.02, "round_trip_s": 0.0}, {"servers": 40}),
    ],
)
def test_it_asks_for_more_where_more_is_needed_later(before, after):
    held = queues(**before)
    held.run(60)
    run = held.run(40, **after)
    now = {"round_trip_s": 0.0, "bytes_per_s": 125e6, **before, **after}
    reachable = min(ideal(now["round_trip_s"], now["bytes_per_s"]), now.get("servers", 1000) * REQUEST / 0.02)
    assert run.rate(85, 100) >= 0.93 * reachable


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"round_trip_s": 0.15, "bytes_per_s": 25e6}, {"round_trip_s": 0.0}),
        ({"round_trip_s": 0.075, "bytes_per_s": 125e6}, {"bytes_per_s": 6e6}),
        ({"round_trip_s": 0.15}, {"loop_bytes_per_s": 5e6}),
    ],
)
def test_it_asks_for_less_where_less_is_enough_later(before, after):
    held = queues(**before)
    many = held.run(30).settings[-1][1]
    run = held.run(150, **after)
    fewer = run.settings[-1][1]
    assert fewer.requests <= many.requests / 2
    assert fewer.window_bytes < many.window_bytes
    now = {"round_trip_s": 0.0, "bytes_per_s": 125e6, **before, **after}
    wanted = min(ideal(now["round_trip_s"], now["bytes_per_s"]), now.get("loop_bytes_per_s", 1e9))
    assert run.rate(120, 180) >= 0.95 * wanted


@settings(SIMULATED, max_examples=4)
@given(seed=st.integers(0, 9), spread=st.sampled_from([0.0, 0.2]), **LINKS)
def test_keeps_a_steady_number_of_requests_on_a_steady_link(seed, spread, **link):
    run = queues(seed=seed, spread=spread, **link).run(200)
    requests = [item.requests for item in kept(run, 60)]
    assert not requests or max(requests) <= 2.5 * min(requests)
    tried = sum(change.is_trial for at, change in run.changes if at >= 60)
    assert 1 <= tried <= 40, "it tries again for ever, and seldom"


def test_a_store_that_refuses_is_asked_for_less_and_only_rarely_for_more():
    held = queues(round_trip_s=0.15, refuses_above=40)
    run = held.run(120)
    assert run.settings[-1][1].requests <= 40
    refused = [at for at, change in run.changes if "failed" in change.reason]
    assert 1 <= len(refused) <= 3
    assert run.rate(60, 120) >= 0.6 * 40 * REQUEST / 0.15


def test_a_loop_that_takes_much_at_once_gets_a_deeper_window():
    shallow = Queues(AutoTuning(Setting(requests=16, window_bytes=64 << 20), requests=16), round_trip_s=0.05)
    run = shallow.run(20)
    before = run.settings[-1][1].window_bytes
    assert before < 32 << 20
    run = shallow.run(60, spread=2.0, service_s=0.05)
    assert run.settings[-1][1].window_bytes > before


@pytest.mark.parametrize("round_trip_s", [0.0, 0.15])
def test_a_window_that_begins_small_grows_to_what_the_requests_need(round_trip_s):
    def after(first):
        held = Queues(AutoTuning(MAX, requests=8, window_bytes=first), round_trip_s=round_trip_s, bytes_per_s=125e6)
        return held.run(30)

    small, whole = after(10 * REQUEST), after(None)
    assert small.settings[0][1].window_bytes == 10 * REQUEST
    assert small.rate(10, 30) >= 0.95 * whole.rate(10, 30)
    # Nothing is asked for beyond it before it was seen to be too little.
    assert small.max_held <= whole.max_held


def test_answers_without_bytes_ramps_failures_and_ends_say_nothing():
    said = {
        "seconds": 0.1,
        "bytes_arrived": 8 * REQUEST,
        "bytes_handed_out": 8 * REQUEST,
        "stalled_s": 0.1,
        "took_s": (0.01,) * 8,
        "failures": 0,
        "ready_bytes": 0,
        "expected_bytes": 8 * REQUEST,
        "requests_in_flight": 8,
        "requests_allowed": 8,
        "is_full": False,
        "is_ending": False,
    }
    for nothing in ({"bytes_arrived": 0}, {"requests_allowed": 7}, {"failures": 1}, {"is_ending": True}):
        rule = AutoTuning(MAX, requests=8)
        answers = [rule.look(Observation(**{**said, **nothing}, now_s=0.1 * number)) for number in range(50)]
        assert all(answer is None or "failed" in answer.reason for answer in answers), nothing
    rule = AutoTuning(MAX, requests=8)
    assert any(rule.look(Observation(**said, now_s=0.1 * number)) for number in range(50))


def test_every_change_says_what_was_measured():
    run = queues(round_trip_s=0.075).run(10)
    reasons = [change.reason for _, change in run.changes]
    assert "the loop waits 100.0 % of the time: are 16 requests faster?" in reasons
    assert any("MB/s with 16" in reason and "MB/s with 8" in reason for reason in reasons)
