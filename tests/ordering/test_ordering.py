"""The order of an epoch: every row once, the same for ever, in little memory."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import SettingError
from frostline.ordering import Order

seeds = st.integers(0, (1 << 63) - 1)


@given(size=st.integers(0, 3000), seed=seeds, epoch=seeds, shuffle=st.booleans())
def test_every_row_has_exactly_one_position(size, seed, epoch, shuffle):
    rows = Order(size=size, seed=seed, epoch=epoch, shuffle=shuffle).indices(0, size)
    assert rows.dtype == np.int64
    assert np.array_equal(np.sort(rows), np.arange(size))


@given(size=st.integers(1, 1 << 62), seed=seeds, data=st.data())
def test_rows_of_a_huge_epoch_lie_within_it_and_differ(size, seed, data):
    start = data.draw(st.integers(0, size))
    stop = min(size, start + 100)
    rows = Order(size=size, seed=seed, epoch=1).indices(start, stop)
    assert len(np.unique(rows)) == stop - start
    assert np.all((rows >= 0) & (rows < size))


@given(size=st.integers(1, 500), seed=seeds, data=st.data())
def test_a_stretch_is_the_same_however_it_is_asked_for(size, seed, data):
    order = Order(size=size, seed=seed, epoch=2)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert np.array_equal(order.indices(start, stop), order.indices(0, size)[start:stop])


def test_without_shuffle_the_order_is_the_manifests():
    assert Order(size=10, seed=5, epoch=3, shuffle=False).indices(2, 6).tolist() == [2, 3, 4, 5]


def test_the_order_never_changes_between_versions():
    assert Order(size=10, seed=0, epoch=0).indices(0, 10).tolist() == [5, 2, 8, 6, 0, 4, 9, 7, 1, 3]
    assert Order(size=1000, seed=7, epoch=3).indices(0, 8).tolist() == [862, 396, 100, 381, 896, 648, 650, 907]
    last = Order(size=10**9, seed=7, epoch=3).indices(10**9 - 4, 10**9).tolist()
    assert last == [131384317, 678713085, 260810101, 536258495, 400267413][-4:]


def test_all_orders_of_four_rows_come_about_equally_often():
    seen = Counter(tuple(Order(size=4, seed=seed, epoch=0).indices(0, 4).tolist()) for seed in range(2400))
    assert len(seen) == 24
    assert 60 <= min(seen.values()) <= max(seen.values()) <= 145  # 100 expected, 10 the standard deviation


def test_seeds_and_epochs_give_other_orders():
    whole = [
        Order(size=100, seed=seed, epoch=epoch).indices(0, 100).tolist() for seed in range(5) for epoch in range(5)
    ]
    assert len({tuple(rows) for rows in whole}) == 25


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 11)])
def test_positions_outside_the_epoch_are_refused(start, stop):
    with pytest.raises(IndexError):
        Order(size=10, seed=0, epoch=0).indices(start, stop)


@pytest.mark.parametrize("wrong", [{"size": -1}, {"seed": -1}, {"epoch": 1 << 63}, {"size": 1 << 63}])
def test_refuses_an_invalid_order_by_name(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        Order(**{"size": 1, "seed": 0, "epoch": 0, **wrong})
