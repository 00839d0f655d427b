"""Samples that stand in a request more than once: asked for once, handed out at each of their places."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import FeatureBatch, Route, Samples, Skipped
from frostline.loaders.fetch import fetch_each

ROUTE = Route(1)


def samples_of(ids):
    ids = np.array(ids, np.int64)
    return Samples(ids=ids, objects=[str(item) for item in ids], offsets=0 * ids, lengths=0 * ids, labels=ids)


def answer(samples, sizes, unreadable):
    """The rows of a node that answers some at a time, and cannot read some."""
    start = 0
    while start < len(samples):
        some = samples.ids[start : start + next(sizes)]
        start += len(some)
        kept = np.array([item for item in some.tolist() if item not in unreadable], np.int64)
        lost = [Skipped(id=item, object=str(item), reason="broken") for item in some.tolist() if item in unreadable]
        yield FeatureBatch(ids=kept, tensors=(kept[:, None] * 10, kept + 1), skipped=tuple(lost))


@given(ids=st.lists(st.integers(0, 9), min_size=1, max_size=30), unreadable=st.sets(st.integers(0, 9)), data=st.data())
def test_every_place_gets_its_samples_rows_and_each_sample_is_asked_for_once(ids, unreadable, data):
    asked = []
    sizes = iter(lambda: data.draw(st.integers(1, 5)), None)

    def fetch(samples, route):
        assert route == ROUTE
        asked.extend(samples.ids.tolist())
        return answer(samples, sizes, unreadable)

    batches = list(fetch_each(fetch, samples_of(ids), ROUTE))
    assert asked == list(dict.fromkeys(ids))
    came = [item for batch in batches for item in batch.ids.tolist()]
    assert came == [item for item in ids if item not in unreadable]
    assert [sample.id for batch in batches for sample in batch.skipped] == [item for item in ids if item in unreadable]
    full = [batch for batch in batches if len(batch)]
    assert all(np.array_equal(batch.tensors[0][:, 0], batch.ids * 10) for batch in full)
    assert all(np.array_equal(batch.tensors[1], batch.ids + 1) for batch in full)


def test_closing_ends_the_answer_that_is_under_way():
    closed = []

    def fetch(samples, _):
        try:
            yield from answer(samples, iter([1, 1, 1]), set())
        finally:
            closed.append(True)

    rows = fetch_each(fetch, samples_of([3, 3, 4]), ROUTE)
    assert next(rows).ids.tolist() == [3, 3]
    rows.close()
    assert closed == [True]
