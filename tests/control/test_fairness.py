"""Shares are weighted max-min fair, in proportion where that is asked for, and never above the capacity."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.control.shares import proportional, weighted_max_min

pytestmark = pytest.mark.promise("apart")

# The twin fills in steps, which are nothing where an amount is the smallest float.
AMOUNTS = st.one_of(st.just(0.0), st.floats(1e-6, 1e9))
MEMBERS = st.lists(
    st.tuples(st.integers(0, 3), st.one_of(AMOUNTS, st.just(float("inf"))), st.floats(0.01, 100)),
    min_size=1,
    max_size=40,
)
CAPACITIES = st.lists(AMOUNTS, min_size=4, max_size=4)


def filled(capacity, demand, weight):
    """Progressive filling, step by step: the naive twin."""
    share, open_ = [0.0] * len(demand), set(range(len(demand)))
    while open_ and capacity > 0:
        total = sum(weight[member] for member in open_)
        step = min([capacity / total, *((demand[member] - share[member]) / weight[member] for member in open_)])
        for member in open_:
            share[member] += step * weight[member]
        capacity -= step * total
        done = {member for member in open_ if share[member] >= demand[member] * (1 - 1e-12)}
        if not done:
            break
        open_ -= done
    return share


def arrays(capacities, members):
    group, demand, weight = zip(*members, strict=True)
    return np.array(capacities), np.array(demand), np.array(weight), np.array(group, np.int64)


@given(CAPACITIES, MEMBERS)
@settings(deadline=None)
def test_max_min_shares_are_those_of_progressive_filling(capacities, members):
    found = weighted_max_min(*arrays(capacities, members))
    for group, capacity in enumerate(capacities):
        own = [number for number, member in enumerate(members) if member[0] == group]
        exact = filled(capacity, [members[number][1] for number in own], [members[number][2] for number in own])
        assert found[own] == pytest.approx(exact, rel=1e-6, abs=1e-6 * max(1.0, capacity))


@pytest.mark.parametrize("rule", [weighted_max_min, proportional])
@given(capacities=CAPACITIES, members=MEMBERS)
@settings(deadline=None)
def test_shares_are_within_capacity_and_demand_and_waste_nothing(rule, capacities, members):
    capacity, demand, weight, group = arrays(capacities, members)
    share = rule(capacity, demand, weight, group)
    given = np.bincount(group, share, len(capacity))
    wanted = np.bincount(group, np.minimum(demand, capacity[group]), len(capacity))
    assert (share >= 0).all()
    assert (share <= demand).all()
    assert (given <= capacity * (1 + 1e-12)).all()
    assert given == pytest.approx(np.minimum(capacity, wanted), rel=1e-9, abs=1e-6)


def test_an_unused_share_goes_to_those_with_demand():
    alone = np.array([100.0]), np.array([10.0, np.inf, np.inf]), np.array([2.0, 1.0, 1.0]), np.zeros(3, np.int64)
    assert weighted_max_min(*alone).tolist() == [10, 45, 45]
    assert proportional(*alone).tolist() == [10, 45, 45]


def test_what_is_left_goes_in_proportion_to_demand_where_that_is_the_rule():
    members = np.array([100.0]), np.array([0.0, 100.0, 40.0]), np.array([2.0, 1.0, 1.0]), np.zeros(3, np.int64)
    assert weighted_max_min(*members).tolist() == [0, 60, 40]
    assert proportional(*members) == pytest.approx([0, 25 + 50 * 75 / 90, 25 + 50 * 15 / 90])
