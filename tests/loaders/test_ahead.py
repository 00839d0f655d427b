"""Samples that are asked for before anybody wants them: each once, in the order of the request, whatever becomes of it.

What was not asked for yet, what failed and what nobody asked for is the request's own.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import FeatureBatch, Samples, Skipped
from frostline.core.errors import NodeUnreachable
from frostline.loaders.ahead import SamplesAhead
from frostline.wire.messages import FeatureRequest
from support.nodes import until

UNREADABLE = 3


def samples(ids, name="{}.jpg"):
    ids = np.asarray(ids, np.int64)
    zeros = np.zeros(len(ids), np.int64)
    objects = [name.format(id) for id in ids.tolist()]
    return Samples(ids=ids, objects=objects, offsets=zeros, lengths=zeros + 9, labels=zeros)


def answer(asked):
    """As a node gives it: each sample's bytes are its object's name; one sample cannot be read."""
    pairs = [pair for pair in zip(asked.ids.tolist(), asked.objects, strict=True) if pair[0] != UNREADABLE]
    skipped = [Skipped(id=UNREADABLE, object="x", reason="truncated")] if UNREADABLE in asked.ids else []
    ids = np.array([id for id, _ in pairs], np.int64)
    return FeatureBatch(ids=ids, encoded=[name.encode() for _, name in pairs], skipped=tuple(skipped))


class Nodes:
    """A transport that answers, and notes what it was asked for."""

    def __init__(self):
        self.asked = []

    def features(self, request):
        self.asked += request.samples.ids.tolist()
        half = len(request.samples) // 2 or 1
        for start in range(0, len(request.samples), half):
            yield answer(request.samples.take(np.arange(start, min(start + half, len(request.samples)))))


def request(ids, *, cut=0, name="{}.jpg"):
    prefix = None if cut == 0 else "p"
    return FeatureRequest(data="file:///d", samples=samples(ids, name), prefix=prefix, cut=cut, preprocess={})


def come(answer):
    """Ids, encoded samples and skipped ids of an answer, in order."""
    batches = list(answer)
    ids = [id for batch in batches for id in batch.ids.tolist()]
    skipped = [item.id for batch in batches for item in batch.skipped]
    return ids, [bytes(sample) for batch in batches for sample in batch.encoded], skipped


@given(
    ahead=st.lists(st.integers(0, 11), unique=True, min_size=1),
    wanted=st.lists(st.lists(st.integers(0, 11), unique=True, min_size=1), min_size=1, max_size=3),
)
def test_requests_get_their_rows_in_order_and_each_that_came_ahead_is_used_once(ahead, wanted):
    nodes, parts = Nodes(), [samples(ahead[start : start + 3]) for start in range(0, len(ahead), 3)]
    left, done = set(ahead), []
    early = SamplesAhead(lambda part: done.append(part) or answer(part), parts, nodes)
    until(lambda: len(done) == len(parts))
    for ids in wanted:
        nodes.asked.clear()
        found, encoded, skipped = come(early.features(request(ids), nodes))
        assert found == [id for id in ids if id != UNREADABLE]
        assert encoded == [f"{id}.jpg".encode() for id in found]
        assert skipped == [id for id in ids if id == UNREADABLE]
        assert nodes.asked == [id for id in ids if id not in left]
        left -= set(ids)


def test_what_was_not_begun_when_it_is_stopped_is_left_to_the_requests():
    may_end, begun, nodes = threading.Event(), [], Nodes()

    def slow(part):
        begun.append(part.ids.tolist())
        assert may_end.wait(60)
        return answer(part)

    early = SamplesAhead(slow, [samples([id]) for id in range(10, 30)], nodes)
    until(lambda: len(begun) == 4)
    early.stop()
    rows = early.features(request(range(10, 30)), nodes)
    may_end.set()
    assert come(rows)[0] == list(range(10, 30))
    assert len(begun) == 4
    assert sorted(nodes.asked + [id for ids in begun for id in ids]) == list(range(10, 30))
    early.close()


def test_what_failed_ahead_is_asked_for_again():
    def fails(_):
        raise NodeUnreachable("gone")

    nodes = Nodes()
    assert come(SamplesAhead(fails, [samples([1, 2])], nodes).features(request([2, 1]), nodes))[0] == [2, 1]
    assert nodes.asked == [2, 1]


@pytest.mark.parametrize(("more", "asked"), [({"name": "masks/{}.png"}, "a mask"), ({"cut": 2}, "features")])
def test_another_object_of_the_same_sample_and_its_features_are_not_its_bytes(more, asked):
    nodes = Nodes()
    early = SamplesAhead(answer, [samples([1, 2])], nodes)
    come(early.features(request([1, 2], **more), nodes))
    assert nodes.asked == [1, 2], asked


def test_who_leaves_waits_for_nothing_that_is_under_way():
    may_end, nodes = threading.Event(), Nodes()
    early = SamplesAhead(lambda part: may_end.wait(60) and answer(part), [samples([1, 2])], nodes)
    rows = early.features(request([1, 2]), nodes)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(list, rows)
        rows.close()
        assert taken.result(30) == []
    may_end.set()
    assert nodes.asked == []
