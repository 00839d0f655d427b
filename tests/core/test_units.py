"""Numbers as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.units import (
    cut_for_log,
    in_bytes,
    in_multiple,
    in_percent,
    in_rate,
    in_samples_per_s,
    in_seconds,
    in_times,
    metric_name,
)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (5_480_211, "5.48 MB"), (999_999, "1.00 MB"), (154e9, "154 GB")],
)
def test_bytes_have_three_digits_and_a_unit(count, words):
    assert in_bytes(count) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (0.00085, "850 µs"), (0.0125, "12.5 ms"), (0.9999, "1.00 s"), (41.26, "41.3 s"),
     (99.96, "1 min 40 s"), (200, "3 min 20 s"), (3599.6, "1 h 0 min"), (7500, "2 h 5 min")],
)  # fmt: skip
def test_seconds_have_the_unit_a_person_would_choose(seconds, words):
    assert in_seconds(seconds) == words


@given(st.floats(0, 1e18))
def test_every_size_and_time_is_short(value):
    assert len(in_bytes(value)) <= 8 or value >= 1e18
    assert in_seconds(min(value, 1e7))


def test_rates_have_four_digits():
    assert [in_rate(rate) for rate in (0.04812, 48.123, 1920.4, math.inf)] == ["0.04812", "48.12", "1920", "no bound"]
    assert in_bytes(math.inf) == "no bound"


def test_formats_shares_and_ratios():
    assert in_percent(0.837) == "83.7 %"
    assert [in_times(ratio) for ratio in (None, 3.21, 46.4, 12345)] == ["–", "3.2 ×", "46 ×", "12,345 ×"]


def test_a_multiple_never_has_an_exponent():
    assert [in_multiple(ratio) for ratio in (1.6, 1.234, 20, 100, 4683.2)] == ["1.6", "1.23", "20", "100", "4,683"]


def test_a_rate_without_a_bound_has_no_unit():
    assert [in_samples_per_s(rate) for rate in (48.123, math.inf)] == ["48.12 samples/s", "no bound"]


def test_metrics_have_the_whole_name_of_their_unit():
    assert [metric_name(field) for field in ("busy_s", "bytes", "rows")] == ["busy_seconds", "bytes", "rows"]


def test_a_long_text_is_cut_for_a_log_with_a_count():
    assert cut_for_log("x" * 16_384) == "x" * 16_384
    assert cut_for_log("x" * 16_384 + "y" * 2000) == "x" * 16_384 + " ... (2,000 characters more)"
