"""Batches for a framework that takes them ahead of its loop: what is left, overtaken, and only looked at."""

import pytest

from frostline.core.errors import OrderMismatch
from frostline.loaders.adapters.base import FrameworkIterator
from frostline.testing.small_jobs import BATCH, small_job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    with small_job(tmp_path_factory.mktemp("images")) as job:
        yield job


def ids(batches):
    return [found.tolist() for (found,) in batches]


def test_ends_an_abandoned_pass_silently_and_reports_an_overtaken_one(job):
    feed = FrameworkIterator(job.arrays(BATCH, shuffle=True), ("ids",))
    first = feed.batches()
    next(first)
    feed.close()
    assert list(first) == []
    second = feed.batches()
    next(second)
    third = feed.batches()
    whole = ids(third)
    assert sum(map(len, whole)) == len(job.data)
    with pytest.raises(OrderMismatch, match="another pass"):
        next(second)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_pass_that_was_only_peeked_at_begins_again(job, taken):
    epochs = job.arrays(BATCH, shuffle=True).epochs(range(2))
    expected = [[found.ids.tolist() for found in epoch] for epoch in epochs]
    feed = FrameworkIterator(job.arrays(BATCH, shuffle=True).epochs(range(2)), ("ids",), ahead=2)
    looking = feed.batches()
    assert next(looking)[0].tolist() == expected[0][0]
    feed.took(taken)
    feed.begin_again()
    assert ids(feed.batches()) == expected[taken]


def test_a_restarted_pass_begins_where_it_was_set(job):
    state = job.arrays(BATCH, shuffle=True).state_after(2)
    whole = [found.ids.tolist() for found in job.arrays(BATCH, shuffle=True)]
    feed = FrameworkIterator(job.arrays(BATCH, shuffle=True), ("ids",), ahead=1)
    feed.load_state_dict(state)
    next(feed.batches())
    feed.begin_again()
    assert feed.state_dict() == state
    assert ids(feed.batches()) == whole[2:]


def test_batches_held_from_an_overtaken_pass_do_not_count(job):
    feed = FrameworkIterator(job.arrays(BATCH, shuffle=True), ("ids",), ahead=2)
    older = feed.batches()
    next(older)
    overtaken = feed.under_way
    newer = feed.batches()
    next(newer)
    feed.took(own=overtaken)
    assert feed.state_dict()["position"] == 0
    feed.took(own=feed.under_way)
    assert feed.state_dict()["position"] == BATCH
