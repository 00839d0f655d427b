"""The linear programme: as good as the best of all basic solutions, whatever the numbers."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from frostline.planning.plan import optimum

pytestmark = pytest.mark.promise("fast")

seconds = st.one_of(st.just(0.0), st.floats(1e-9, 1e3), st.sampled_from([1e-3, 1.0, 2.0]))


coarse = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0])


@st.composite
def tables(draw, ways=5, resources=4, cells=seconds):
    n, r = draw(st.integers(1, ways)), draw(st.integers(1, resources))
    rows = draw(st.lists(st.lists(cells, min_size=r, max_size=r), min_size=n, max_size=n))
    return np.array(rows)


def solved(costs, weights=None):
    return optimum(costs, np.zeros(len(costs)) if weights is None else weights)


def min_seconds(costs):
    """Of all basic solutions: as many ways as tight resources, exactly, in fractions."""
    table = [[Fraction(item) for item in row] for row in costs.tolist()]
    ways, resources = range(len(table)), range(len(table[0]))
    found = [
        seconds
        for size in range(1, min(len(table), len(table[0])) + 1)
        for used in combinations(ways, size)
        for tight in combinations(resources, size)
        if (seconds := basic_solution(table, used, tight)) is not None
    ]
    return float(min(found))


def basic_solution(table, used, tight):
    """Seconds of the busiest resource where the tight ones are equally busy; None where there is no such mixture."""
    rows = [[*(table[way][resource] for way in used), Fraction(-1), Fraction(0)] for resource in tight]
    shares_and_seconds = solve([[*([Fraction(1)] * len(used)), Fraction(0), Fraction(1)], *rows])
    if shares_and_seconds is None:
        return None
    *shares, seconds = shares_and_seconds
    if min(shares) < 0:
        return None
    loads = [
        sum(share * table[way][index] for share, way in zip(shares, used, strict=True))
        for index in range(len(table[0]))
    ]
    return seconds if max(loads) <= seconds else None


def solve(rows):
    """Gauss and Jordan; None where the solution is not the only one."""
    size = len(rows)
    for column in range(size):
        pivot = next((row for row in range(column, size) if rows[row][column] != 0), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [row / rows[column][column] for row in rows[column]]
        for row in range(size):
            if row != column and rows[row][column] != 0:
                factor = rows[row][column]
                rows[row] = [item - factor * two for item, two in zip(rows[row], rows[column], strict=True)]
    return [row[-1] for row in rows]


@given(tables())
def test_no_mixture_is_faster(costs):
    assert solved(costs).seconds == pytest.approx(min_seconds(costs), rel=5e-6, abs=0)


@given(tables(), st.lists(st.floats(0, 1e7), min_size=5, max_size=5))
def test_shares_sum_to_one_and_are_at_most_as_many_as_resources(costs, weights):
    found = solved(costs, np.array(weights[: len(costs)]))
    assert found.shares.sum() == pytest.approx(1)
    assert found.shares.min() >= 0
    assert np.count_nonzero(found.shares) <= costs.shape[1]
    assert found.seconds == pytest.approx((found.shares @ costs).max(), rel=1e-12)


@given(tables(ways=8, resources=5), st.randoms(use_true_random=False))
def test_neither_order_nor_duplicates_change_the_seconds(costs, random):
    places = shuffled(costs, random)
    assert solved(costs[places]).seconds == pytest.approx(solved(costs).seconds, rel=5e-6)


@given(tables(ways=8, resources=5, cells=coarse), st.randoms(use_true_random=False))
def test_neither_order_nor_duplicates_change_the_weight(costs, random):
    weights = np.array([random.choice([0.0, 1.0, 5.0, 100.0]) for _ in costs])
    places = shuffled(costs, random)
    first, second = solved(costs, weights), solved(costs[places], weights[places])
    assert second.shares @ weights[places] == pytest.approx(first.shares @ weights, abs=0.01)


def shuffled(costs, random):
    places = [*range(len(costs)), *(random.randrange(len(costs)) for _ in range(5))]
    random.shuffle(places)
    return places


@given(tables(), st.integers(0, 3), st.floats(1, 1000))
def test_more_of_a_resource_never_slows(costs, resource, times):
    assume(resource < costs.shape[1])
    more = costs.copy()
    more[:, resource] /= times
    assert solved(more).seconds <= solved(costs).seconds * (1 + 5e-6)


@given(tables(), st.integers(0, 3), st.floats(0.2, 5))
def test_a_price_is_the_slope_of_the_throughput(costs, resource, times):
    """The throughput is concave, so that its slope bounds it from above on both sides."""
    assume(resource < costs.shape[1])
    here = solved(costs)
    assume(here.seconds > 0)
    other = costs.copy()
    other[:, resource] /= times
    there = solved(other)
    assume(there.seconds > 0)
    gain = here.seconds / there.seconds - 1
    assert gain <= here.prices[resource] * (times - 1) + 1e-5


@given(tables())
def test_prices_sum_to_one_and_only_busy_resources_have_one(costs):
    found = solved(costs)
    if found.seconds == 0:
        assert found.prices.tolist() == [0.0] * costs.shape[1]
        return
    assert found.prices.min() >= 0
    assert found.prices.sum() == pytest.approx(1)
    loads = found.shares @ costs
    assert (found.prices * (found.seconds - loads)).max() <= 1e-5 * found.seconds


def test_prices_are_the_differences_where_the_optimum_is_not_degenerate():
    costs = np.array([[0.001, 0.040, 0.010], [0.020, 0.002, 0.0]])
    here = solved(costs)
    for resource in range(3):
        other = costs.copy()
        other[:, resource] /= 1.0001
        gain = here.seconds / solved(other).seconds - 1
        assert gain / 0.0001 == pytest.approx(here.prices[resource], rel=1e-3, abs=1e-6)


def test_two_ways_that_need_different_things_are_mixed():
    found = solved(np.array([[1.0, 0.0], [0.0, 1.0]]))
    assert found.shares.tolist() == pytest.approx([0.5, 0.5], abs=1e-5)
    assert found.seconds == pytest.approx(0.5, rel=1e-5)
    assert found.prices.tolist() == pytest.approx([0.5, 0.5])


def test_of_equally_fast_mixtures_the_lightest_is_taken():
    costs = np.array([[1.0, 0.5], [1.0, 0.2], [1.0, 0.9]])
    assert solved(costs, np.array([3.0, 2.0, 7.0])).shares.tolist() == [0, 1, 0]
    assert solved(costs, np.array([3.0, 4.0, 1.0])).shares.tolist() == [0, 0, 1]


def test_takes_the_lightest_of_the_ways_that_cost_nothing():
    found = solved(np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]), np.array([5.0, 2.0, 1.0]))
    assert (found.shares.tolist(), found.seconds, found.prices.tolist()) == ([0, 1, 0], 0.0, [0, 0])


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1e3])
def test_the_unit_of_time_does_not_matter(unit):
    costs = np.array([[0.3, 0.9], [0.8, 0.1], [0.5, 0.5]])
    found, scaled = solved(costs), solved(costs * unit)
    assert scaled.seconds == pytest.approx(found.seconds * unit, rel=1e-6)
    assert scaled.shares == pytest.approx(found.shares, abs=1e-5)


@settings(max_examples=20)
@given(st.integers(1, 900), st.integers(0, 1000))
def test_hundreds_of_ways_are_not_too_many(ways, seed):
    generator = np.random.default_rng(seed)
    costs = generator.lognormal(-5, 2, (ways, 5))
    found = solved(costs, generator.lognormal(10, 2, ways))
    assert np.count_nonzero(found.shares) <= 5
    assert found.seconds <= costs.max(axis=1).min() * (1 + 5e-6)
