"""When requests may go: what a bucket lets through, and that a rate stays just under what a store allows."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.request_timing import AdaptiveRate, TokenBucket

steps = st.lists(st.floats(0, 3), min_size=1, max_size=60)


@given(steps, st.floats(0.5, 50), st.integers(1, 20))
def test_a_bucket_never_lets_more_through_than_its_rate_and_what_it_holds(pauses, per_s, maximum):
    bucket, now, gone = TokenBucket.create(per_s, maximum=maximum, now_s=0.0), 0.0, []
    for pause in pauses:
        now += pause
        bucket, wait = bucket.take(now)
        gone.append(now + wait)
    for first, start in enumerate(gone):
        for last in range(first, len(gone)):
            assert last - first + 1 <= maximum + (gone[last] - start) * per_s + 1 + 1e-6


@given(st.floats(0.5, 50), st.integers(1, 20), st.floats(0, 100))
def test_a_full_bucket_lets_all_it_holds_through_at_once(per_s, maximum, now):
    bucket = TokenBucket.create(per_s, maximum=maximum, now_s=now)
    for _ in range(maximum):
        bucket, wait = bucket.take(now)
        assert wait == 0
    assert bucket.take(now)[1] == pytest.approx(1 / per_s)


def test_refuses_an_invalid_token_bucket():
    with pytest.raises(ValueError, match="more than no request"):
        TokenBucket.create(0, maximum=1, now_s=0)


def test_nothing_waits_until_a_store_refuses():
    rate = AdaptiveRate()
    for number in range(1000):
        rate, wait = rate.admit(number / 1000)
        assert wait == 0
        rate = rate.speed_up(number / 1000)
    assert not rate.is_bounded


happenings = st.lists(st.tuples(st.sampled_from(["sent", "well", "refused"]), st.floats(0, 2)), max_size=80)


@given(happenings)
def test_the_rate_falls_by_refusals_and_grows_by_successes_within_bounds(happened):
    rate, now = AdaptiveRate(), 0.0
    for what, pause in happened:
        now += pause
        before = rate.rate_per_s
        if what == "sent":
            rate, wait = rate.admit(now)
            assert rate.rate_per_s == before
            assert wait >= 0
        elif what == "well":
            rate = rate.speed_up(now)
            assert rate.rate_per_s >= before
        else:
            rate = rate.slow_down(now, sent_at_s=now)
            assert rate.rate_per_s <= max(before, rate.min_per_s)
            assert rate.is_bounded
        assert rate.rate_per_s >= rate.min_per_s


@given(happenings, st.floats(0, 30))
def test_nothing_goes_before_the_time_that_a_store_asked_for(happened, asked_s):
    rate = AdaptiveRate().slow_down(5.0, sent_at_s=5.0, wait_s=asked_s)
    now = 5.0
    for _, pause in happened:
        now += pause
        rate, wait = rate.admit(now)
        assert now + wait >= 5.0 + asked_s - 1e-9


def test_refusals_of_what_was_sent_before_a_fall_change_nothing():
    rate = AdaptiveRate(rate_per_s=100.0).slow_down(10.0, sent_at_s=9.9)
    assert rate.rate_per_s == 85
    assert rate.slow_down(10.1, sent_at_s=9.95).rate_per_s == 85
    assert rate.slow_down(10.2, sent_at_s=10.05).rate_per_s < 85


def test_refusals_of_a_first_burst_do_not_keep_the_rate_low():
    rate = AdaptiveRate()
    for number in range(5):
        rate = rate.speed_up(number / 1000)
    rate = rate.slow_down(0.010, sent_at_s=0.006).slow_down(0.020, sent_at_s=0.012)
    assert (rate.is_bounded, rate.refused_per_s) == (True, 0)
    assert rate.admit(0.020)[1] >= 1 / rate.rate_per_s
    now = 0.020
    while now < 4.0:
        rate, wait = rate.admit(now)
        now += wait
        rate = rate.speed_up(now)
    assert rate.rate_per_s > 50
    assert rate.slow_down(now, sent_at_s=now).refused_per_s == rate.rate_per_s


@pytest.mark.parametrize("allowed", [5, 50, 400])
@pytest.mark.parametrize("workers", [16, 64])
def test_the_rate_stays_just_under_what_a_store_allows(allowed, workers):
    taken, refused = simulate(allowed, workers, seconds=120)
    assert taken >= 0.85 * min(allowed, workers / ROUND_TRIP_S)
    assert refused <= max(0.03 * taken, 0.25)


ROUND_TRIP_S = 0.05


def simulate(allowed, workers, seconds):
    """Requests a second that went well and were refused, of a store that refuses what its bucket has no token for."""
    rate, store = AdaptiveRate(), TokenBucket.create(allowed, maximum=max(1, allowed / 10), now_s=0.0)
    answers, idle, gate_s, now = [], workers, 0.0, 0.0
    taken = refused = 0
    while now < seconds:
        if idle and (not answers or gate_s <= answers[0][0]):
            # One at a time stands at the gate, and goes when the rate lets it; the next one comes after it.
            rate, wait = rate.admit(max(now, gate_s))
            gate_s = now = max(now, gate_s) + wait
            after, must_wait = store.take(now)
            store = store if must_wait else after
            heapq.heappush(answers, (now + ROUND_TRIP_S, not must_wait, now))
            idle -= 1
            continue
        now, is_taken, sent = heapq.heappop(answers)
        rate = rate.speed_up(now) if is_taken else rate.slow_down(now, sent_at_s=sent)
        counts = now > seconds / 2  # what it has learned by then
        taken, refused = taken + (counts and is_taken), refused + (counts and not is_taken)
        idle, gate_s = idle + 1, max(gate_s, now)
    return taken / (seconds / 2), refused / (seconds / 2)
