"""Which reads are stragglers: compared with those before them, counted, and few."""

import pytest

from frostline.stores.retry import HedgedReads


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def known(clock, quantile=0.9, reads=40, took_s=0.5, nbytes=100):
    late = HedgedReads(quantile, clock)
    for _ in range(reads):
        late.record_read(nbytes, clock() - took_s)
    return late


def test_a_read_is_late_after_twice_the_median():
    clock = Clock()
    late = known(clock)
    assert late.wait_s(100, clock()) == pytest.approx(1.0)
    assert late.wait_s(100, None) == pytest.approx(1.0), "one that has not begun is not late"
    assert not late.is_late(100, clock() - 0.9)
    assert late.is_late(100, clock() - 1.1)


def test_makes_a_tenth_of_the_reads_twice():
    clock = Clock()
    late = known(clock)
    assert [late.is_late(100, clock() - 2) for _ in range(6)] == [True] * 4 + [False] * 2
    assert late.wait_s(100, clock() - 2) > 0, "it is asked again later, and not all the time"


def test_reads_are_compared_with_those_that_were_as_large_by_powers_of_two():
    clock = Clock()
    late = known(clock, nbytes=65)
    assert late.is_late(127, clock() - 1.1)
    assert not late.is_late(128, clock() - 1000)


@pytest.mark.parametrize("settings", [{"reads": 19}, {"nbytes": 63}, {"quantile": 1.0}])
def test_calls_no_read_late_before_enough_were_measured(settings):
    clock = Clock()
    late = known(clock, **settings)
    assert not late.is_late(100, clock() - 1000)
    assert late.wait_s(100, clock()) > 0
