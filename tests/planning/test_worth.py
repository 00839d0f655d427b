"""Whether measuring pays: never more than its share of what is left of the job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.planning.replanning import MEASURING_SHARE as SHARE
from frostline.planning.replanning import is_worth_measuring, is_worth_trying

RATES = st.floats(0.1, 1e5)


@given(st.integers(1, 10**9), RATES)
def test_measuring_takes_at_most_its_share_of_what_is_left(samples_left, samples_per_s):
    if is_worth_measuring(samples_left=samples_left, samples_per_s=samples_per_s):
        assert 2.0 + 64 / samples_per_s <= SHARE * samples_left / samples_per_s


@given(st.integers(1, 10**8), RATES)
def test_more_work_is_never_a_reason_to_measure_less(samples_left, samples_per_s):
    if is_worth_measuring(samples_left=samples_left, samples_per_s=samples_per_s):
        assert is_worth_measuring(samples_left=samples_left * 2, samples_per_s=samples_per_s)


@pytest.mark.parametrize(("samples", "is_worth"), [(1_000, False), (1_000_000, True)])
def test_measures_for_jobs_of_hours_but_not_for_jobs_of_half_a_minute(samples, is_worth):
    assert is_worth_measuring(samples_left=samples, samples_per_s=30.0) is is_worth


@given(st.integers(1, 10**8), RATES)
def test_more_work_is_never_a_reason_not_to_try_an_engine(samples_left, samples_per_s):
    if is_worth_trying(samples_left=samples_left, samples_per_s=samples_per_s):
        assert samples_left > 48
        assert is_worth_trying(samples_left=samples_left * 2, samples_per_s=samples_per_s)


@pytest.mark.parametrize(
    ("samples", "samples_per_s", "is_worth"),
    [(48, 2.0, False), (1_000, 2.0, True), (1_000, 70.0, True), (300, 70.0, True), (200, 500.0, False)],
)
def test_tries_engines_on_few_samples_of_a_slow_network_and_many_of_a_fast_one(samples, samples_per_s, is_worth):
    assert is_worth_trying(samples_left=samples, samples_per_s=samples_per_s) is is_worth


@pytest.mark.parametrize(
    ("speed_up", "is_worth"), [(None, True), (0.9, False), (1.0, False), (1.2, False), (2.0, True)]
)
def test_an_engine_is_tried_by_what_it_gave_on_hardware_like_the_nodes(speed_up, is_worth):
    assert is_worth_trying(samples_left=200, samples_per_s=6.6, speed_up=speed_up) is is_worth
