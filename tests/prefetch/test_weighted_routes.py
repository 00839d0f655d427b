"""The mixer: every way gets its share, whatever the lengths, and changes touch only what comes later."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import Route, Samples
from frostline.prefetch import WeightedRoutes, plan_requests

ROUTES = (Route(0), Route(3), Route(7, "fp16"), Route(9, "sparse+zstd"))


@st.composite
def mixtures(draw):
    weights = draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=len(ROUTES)))
    return {route: weight / sum(weights) for route, weight in zip(ROUTES, weights, strict=False)}


def mixer(shares, per_request=8):
    return WeightedRoutes(shares, samples_per_request=per_request, bytes_per_sample=lambda route: 10 * route.cut)


def dealt(one, count):
    found = dict.fromkeys(ROUTES, 0)
    while count:
        following = one.next_request(count)
        assert 1 <= following.rows <= count
        found[following.route] += following.rows
        count -= following.rows
    return found


@given(mixtures(), st.integers(1, 16), st.integers(1, 2000))
def test_every_way_is_within_two_requests_of_its_share_at_any_time(shares, per_request, count):
    found = dealt(mixer(shares, per_request), count)
    assert sum(found.values()) == count
    for route, share in shares.items():
        assert abs(found[route] - share * count) <= 2 * per_request


@given(mixtures(), st.integers(1, 500))
def test_the_same_mixture_deals_the_same_ways(shares, count):
    assert dealt(mixer(shares), count) == dealt(mixer(shares), count)


def test_a_change_counts_from_now_on_and_owes_nothing_for_the_past():
    one = mixer({ROUTES[0]: 1.0})
    assert dealt(one, 800)[ROUTES[0]] == 800
    one.change({ROUTES[0]: 0.5, ROUTES[1]: 0.5})
    assert dealt(one, 800) == {ROUTES[0]: 400, ROUTES[1]: 400, ROUTES[2]: 0, ROUTES[3]: 0}
    assert one.assigned_samples == 1600


def test_probes_with_a_single_request_and_changes_no_shares():
    one = mixer({ROUTES[1]: 1.0})
    one.probe(ROUTES[0], 3)
    first, second = one.next_request(100), one.next_request(97)
    assert (first.route, first.rows) == (ROUTES[0], 3)
    assert (second.route, second.rows) == (ROUTES[1], 8)


def test_requests_say_their_way_and_what_they_should_weigh():
    count = 20
    table = Samples(
        ids=np.arange(count),
        objects=[f"{index}" for index in range(count)],
        offsets=np.zeros(count, np.int64),
        lengths=np.full(count, 7),
        labels=np.zeros(count, np.int64),
    )
    made = list(
        plan_requests(table, np.arange(count), np.arange(count), mixer({ROUTES[0]: 0.5, ROUTES[1]: 0.5}, per_request=5))
    )
    assert [item.positions.tolist() for item in made] == [list(range(start, start + 5)) for start in range(0, 20, 5)]
    assert {(item.route, item.expected_bytes) for item in made} == {(ROUTES[0], 35), (ROUTES[1], 150)}
