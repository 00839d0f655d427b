import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.batching import Allowance, FairShares

WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0])
COSTS = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=4)
TENANTS = st.lists(st.tuples(WEIGHTS, COSTS), min_size=2, max_size=6)


def serve(shares, costs, turns, *, asks=lambda _name, _clock: True):
    """Give the device to whose turn it is, over and over; pieces take the costs in turn. Yields what each has."""
    had = dict.fromkeys(costs, 0.0)
    under_way = set()
    pieces = {name: itertools.cycle(cost) for name, cost in costs.items()}
    clock = 0.0
    for _ in range(turns):
        for name in costs:
            if name not in under_way and asks(name, clock):
                shares.arrive(name)
                under_way.add(name)
        name = min(under_way, key=lambda item: (shares.tag(item), item))
        cost = next(pieces[name])
        shares.begin(name)
        shares.charge(name, cost)
        had[name] += cost
        clock += cost
        if not asks(name, clock):
            shares.depart(name)
            under_way.discard(name)
        yield dict(had)


@given(TENANTS)
def test_tenants_that_always_have_work_differ_by_no_more_than_a_piece_of_each(tenants):
    weights = {str(number): weight for number, (weight, _) in enumerate(tenants)}
    costs = {str(number): cost for number, (_, cost) in enumerate(tenants)}
    for had in serve(FairShares(weights), costs, 200):
        for combination, other in itertools.combinations(weights, 2):
            apart = abs(had[combination] / weights[combination] - had[other] / weights[other])
            assert apart <= max(costs[combination]) / weights[combination] + max(costs[other]) / weights[other] + 1e-9


@given(TENANTS)
def test_no_tenant_starves_whatever_others_weigh_and_take(tenants):
    weights = {str(number): weight for number, (weight, _) in enumerate(tenants)}
    costs = {str(number): cost for number, (_, cost) in enumerate(tenants)}
    # Each of the others may be a piece ahead and have a piece more before it is passed.
    longest_s = {
        name: sum(
            weights[other] / weights[name] * max(costs[name]) + 2 * max(costs[other])
            for other in costs
            if other != name
        )
        for name in costs
    }
    waited = dict.fromkeys(costs, 0.0)
    before = dict.fromkeys(costs, 0.0)
    for had in serve(FairShares(weights), costs, 200):
        took = sum(had.values()) - sum(before.values())
        for name in costs:
            waited[name] = 0.0 if had[name] > before[name] else waited[name] + took
            assert waited[name] <= longest_s[name] + 1e-9
        before = had


def test_grants_small_demands_and_divides_the_rest():
    shares = FairShares({"large": 2.0})
    costs = {"large": [1.0], "small": [1.0], "seldom": [1.0]}
    # One piece every twenty seconds, which is less than a quarter of the time.
    due = iter(range(0, 10_000, 20))
    state = {"next": next(due)}

    def asks(name, clock):
        if name != "seldom":
            return True
        if clock < state["next"]:
            return False
        state["next"] = next(due)
        return True

    *_, had = serve(shares, costs, 1200, asks=asks)
    assert had["seldom"] == pytest.approx(60, abs=2)
    assert had["large"] / had["small"] == pytest.approx(2, rel=0.02)


def test_owes_nothing_that_was_not_requested():
    shares = FairShares()
    for had in serve(shares, {"early": [1.0]}, 50):
        assert had["early"] > 0
    shares.arrive("late")
    assert shares.tag("late") == pytest.approx(49)


def test_work_under_way_keeps_a_place_that_is_worth_so_many_seconds():
    shares = FairShares(credit_s=5.0)
    shares.arrive("slow")
    list(serve(shares, {"quick": [1.0]}, 3))
    assert shares.tag("slow") == 0.0
    list(serve(shares, {"quick": [1.0]}, 50))
    assert shares.tag("quick") - shares.tag("slow") == pytest.approx(6)


@given(TENANTS, st.floats(0.1, 1000.0))
def test_a_tenant_in_debt_gets_half_of_its_share_until_paid(tenants, owed_s):
    weights = {str(number): weight for number, (weight, _) in enumerate(tenants)}
    costs = {str(number): cost for number, (_, cost) in enumerate(tenants)}
    shares = FairShares(weights)
    shares.owe("0", owed_s)
    for had in serve(shares, costs, 200):
        paid_s = min(owed_s, had["0"])
        for other in set(costs) - {"0"}:
            apart = abs((had["0"] + paid_s) / weights["0"] - had[other] / weights[other])
            assert apart <= 2 * max(costs["0"]) / weights["0"] + max(costs[other]) / weights[other] + 1e-6


@given(st.floats(0.1, 10.0), st.floats(0.0, 100.0), st.lists(st.floats(0.01, 5.0), max_size=30))
def test_of_an_allowance_what_is_owed_is_paid_with_what_is_used(per_s, owed_s, costs):
    owing, free = Allowance(per_s), Allowance(per_s)
    owing.owe(owed_s)
    assert owing.wait_s(0.0) == 0
    used_s = 0.0
    for cost in costs:
        owing.spend(cost, 0.0)
        used_s += cost
        free.spend(cost, 0.0)
    free.spend(min(owed_s, used_s), 0.0)
    assert owing.wait_s(0.0) == pytest.approx(free.wait_s(0.0), abs=1e-6)
