"""Draws by weights: the given frequencies, the same draws whatever is asked first, and nothing of weight 0."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import SettingError
from frostline.ordering import Order, Weighted, Weights, weights_by_class

SOME = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=50).filter(lambda them: sum(them) > 0)


def chi_square(found, shares):
    """Pearson's statistic of counts against the shares that they should have; about as large as its degrees."""
    expected = np.asarray(shares) / np.sum(shares) * np.sum(found)
    return float(np.sum((found - expected) ** 2 / expected))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_samples_are_drawn_as_often_as_their_weights_say(seed):
    weights = [1, 2, 3, 4, 10, 0.5, 7, 7]
    rows = Weighted(weights=Weights(weights), size=200_000, seed=seed, epoch=3).at(np.arange(200_000))
    # With 7 degrees of freedom one in 100,000 right generators is beyond 35.
    assert chi_square(np.bincount(rows, minlength=8), weights) < 35


def test_draws_that_follow_each_other_are_independent():
    rows = Weighted(weights=Weights([1, 1, 2]), size=100_000, seed=4, epoch=0).at(np.arange(100_000))
    pairs = np.bincount(3 * rows[:-1] + rows[1:], minlength=9)
    assert chi_square(pairs, np.outer([1, 1, 2], [1, 1, 2]).ravel()) < 40  # 8 degrees of freedom


@given(weights=SOME, seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**63 - 1), data=st.data())
def test_a_draw_depends_on_seed_epoch_and_position_alone(weights, seed, epoch, data):
    order = Weighted(weights=Weights(weights), size=500, seed=seed, epoch=epoch)
    positions = np.array(data.draw(st.lists(st.integers(0, 499), max_size=20)), np.int64)
    whole = order.at(np.arange(500))
    assert np.array_equal(order.at(positions), whole[positions])
    assert np.all(np.asarray(weights)[whole] > 0)


def test_the_draws_never_change_between_versions():
    order = Weighted(weights=Weights([1, 2, 3, 4]), size=10**12, seed=7, epoch=1)
    assert order.at(np.arange(12)).tolist() == [2, 2, 3, 1, 3, 1, 3, 0, 1, 2, 1, 1]
    assert order.at(np.array([10**12 - 1])).tolist() == [0]


def test_epochs_and_seeds_draw_differently():
    weights = Weights(np.ones(1000))
    drawn = {
        tuple(Weighted(weights=weights, size=50, seed=seed, epoch=epoch).at(np.arange(50)).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(drawn) == 16


def test_the_highest_draw_is_the_last_sample_that_has_a_weight():
    weights = Weights([0.0, 0.1, 0.2, 0.0])
    assert weights.rows(np.array([0, 2**64 - 1], np.uint64)).tolist() == [1, 2]


def test_orders_are_named_by_their_kind_and_their_weights():
    names = {Weighted(weights=Weights(item), size=9, seed=0, epoch=0).name for item in ([1, 2], [1, 2], [2, 1])}
    assert len(names) == 2
    assert Order(size=9, seed=0, epoch=0).name == "shuffled"
    assert Order(size=9, seed=0, epoch=0, shuffle=False).name == "listed"


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [1, float("nan")], [1, float("inf")], [[1, 2]]])
def test_refuses_invalid_weights(weights):
    with pytest.raises(SettingError, match="weights"):
        Weights(weights)


def test_classes_get_the_shares_of_their_weights_however_many_samples_they_have():
    labels = np.array([0] * 90 + [1] * 9 + [5])
    weights = weights_by_class(labels, {0: 1, 1: 1, 5: 2})
    assert [weights[labels == label].sum() for label in (0, 1, 5)] == pytest.approx([1, 1, 2])
    with pytest.raises(SettingError, match="label 5 has samples and no weight"):
        weights_by_class(labels, {0: 1, 1: 1})
    with pytest.raises(SettingError, match="label 2 has a weight and no samples"):
        weights_by_class(labels, {0: 1, 1: 1, 5: 0, 2: 1})
