"""The beginning of a window: short requests, with as many samples under way as whole ones would have."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import FeatureBatch, Route, Samples
from frostline.core.config import LoaderSettings
from frostline.core.errors import NodeUnreachable
from frostline.prefetch import WeightedRoutes, Window, plan_requests
from frostline.prefetch.window import RampLengths, RampUp
from support.mixing import one_way

ROW_BYTES = 16


def table(count):
    return Samples(
        ids=np.arange(count),
        objects=[f"{index}" for index in range(count)],
        offsets=np.zeros(count, np.int64),
        lengths=np.full(count, 7),
        labels=np.zeros(count, np.int64),
    )


def asked(count, request_source):
    return plan_requests(table(count), np.arange(count), np.arange(count), request_source)


@st.composite
def beginnings(draw):
    return LoaderSettings(
        samples_per_request=draw(st.integers(1, 64)),
        requests_in_flight=draw(st.integers(1, 70)),
        ramp=draw(st.booleans()),
    )


def rounds(settings, count, *, is_short):
    """Rows asked for in each round, where all that is under way is answered before anything else is asked for."""
    request_source = one_way(settings.samples_per_request, ROW_BYTES)
    held = Window(
        asked(count, RampUp(request_source, RampLengths.of(settings)) if is_short else request_source), settings
    )
    found = []
    while asks := held.asks(0.0):
        found.append([len(ask.samples) for ask in asks])
        for ask in asks:
            ids = ask.samples.ids
            held.take_rows(ask, FeatureBatch(ids=ids, tensors=(np.zeros((len(ids), ROW_BYTES), np.uint8),)))
            held.finish(ask, 0.0)
        while held.take() is not None:
            pass
    assert held.is_done
    return found


def test_a_window_begins_with_eight_requests_of_eight_samples():
    assert rounds(LoaderSettings(), 64 + 128 + 256 + 256, is_short=False) == [[32] * 2, [32] * 4, [32] * 8, [32] * 8]
    assert rounds(LoaderSettings(), 64 + 128 + 256 + 256, is_short=True) == [[8] * 8, [16] * 8, [32] * 8, [32] * 8]


@given(beginnings())
def test_short_requests_have_about_as_many_samples_under_way(settings):
    count = 8 * settings.samples_per_request * settings.first_requests
    short, whole = (rounds(settings, count, is_short=value) for value in (True, False))
    assert sum(map(sum, short)) == sum(map(sum, whole)) == count
    for item, other in zip(short[:4], whole[:4], strict=False):
        assert len(item) <= settings.first_requests
        assert sum(item) >= 0.5 * min(sum(other), 2 * settings.samples_per_request)
        # A round may end with a request that is one sample too long, and each round doubles what that was.
        assert sum(item) <= 1.5 * sum(other)


@given(beginnings(), st.integers(0, 500))
def test_lengths_only_grow_and_end_at_whole_requests(settings, number):
    lengths = RampLengths.of(settings)
    assert 1 <= lengths.at(number) <= lengths.at(number + 1) <= settings.samples_per_request
    assert lengths.at(10**9) == settings.samples_per_request
    if not settings.ramp:
        assert lengths.at(0) == settings.samples_per_request


@given(st.integers(1, 400), beginnings(), st.floats(0.05, 0.95))
def test_the_order_of_requests_does_not_depend_on_lengths(count, settings, share):
    rows = settings.samples_per_request
    mixer = WeightedRoutes(
        {Route(0): share, Route(1): 1 - share}, samples_per_request=rows, bytes_per_sample=lambda _: 1
    )
    made = list(asked(count, RampUp(mixer, RampLengths.of(settings))))
    assert np.concatenate([item.positions for item in made]).tolist() == list(range(count))
    assert abs(sum(len(item) for item in made if item.route == Route(0)) - share * count) <= 2 * rows


def test_probes_with_a_single_short_request_after_a_failure():
    settings = LoaderSettings(retry_for_s=1e9)
    held = Window(asked(400, RampUp(one_way(32, ROW_BYTES), RampLengths.of(settings))), settings)
    asks = held.asks(0.0)
    for ask in asks:
        held.fail(ask, NodeUnreachable("down"), 0.0)
    assert len(asks) == 8
    assert [len(ask.samples) for ask in held.asks(1e6)] == [8]
    assert held.statistics().requests_allowed == 1


def test_refuses_invalid_lengths():
    for first, whole, requests in ((0, 4, 1), (5, 4, 1), (1, 4, 0)):
        with pytest.raises(ValueError, match="cannot begin"):
            RampLengths(first=first, whole=whole, round_requests=requests)
