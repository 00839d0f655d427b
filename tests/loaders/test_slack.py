"""What a loader hands out ahead of what is missing: each sample once, with its own row and label, no further ahead."""

import itertools
import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import frostline as fl
from frostline.cache import FeatureCache, Scope, TieredCache
from frostline.core import FeatureBatch, Samples, Skipped
from frostline.core.config import LoaderSettings
from frostline.loaders import ArrayLoader, Epochs
from frostline.loaders.arguments import ALONE
from frostline.loaders.row_source import RowSource
from frostline.ordering import Order, RecordedOrder, Replay
from support.mixing import one_way

COUNT, PER_REQUEST = 120, 8
SCOPE = Scope(data="memory://", prefix="", cut=1, preprocess="", engine="none", shapes=((1,),), dtypes=("float32",))


class Data:
    digest = ""

    def __init__(self, count):
        ids = np.arange(count, dtype=np.int64) * 3 + 1000
        zeros = np.zeros(count, np.int64)
        self.samples = Samples(
            ids=ids, objects=[str(item) for item in ids], offsets=zeros, lengths=zeros + 9, labels=np.arange(count)
        )


class Store:
    """Answers each request when it is its turn: so many others are answered before it."""

    def __init__(self, data, waits, lost=()):
        self._places = {int(item): place for place, item in enumerate(data.samples.ids)}
        self._waits, self._lost = waits, set(lost)
        self._answered = threading.Condition()
        self._begun = self._ended = 0

    def fetch(self, samples, _route):
        with self._answered:
            turn = self._begun + self._waits[self._begun % len(self._waits)]
            self._begun += 1
            # The others may need room in the window that this one keeps: then it goes on without them.
            self._answered.wait_for(lambda: self._ended >= turn, timeout=0.005)
        ids = [int(item) for item in samples.ids]
        kept = np.array([item for item in ids if item not in self._lost], np.int64)
        skipped = tuple(Skipped(id=item, object=str(item), reason="truncated") for item in ids if item in self._lost)
        yield FeatureBatch(ids=kept, tensors=(kept[:, None].astype(np.float32),), skipped=skipped)
        with self._answered:
            self._ended += 1
            self._answered.notify_all()


def loader(data, store, cache, *, batch_size=10, replay=None, ranks=ALONE, **settings):
    source = RowSource(
        fetch=store.fetch,
        dealer=one_way(PER_REQUEST, 4),
        cache=cache,
        unreadable=lambda: np.zeros(0, np.int64),
        settings=LoaderSettings(samples_per_request=PER_REQUEST, requests_in_flight=4, **settings),
        observe=lambda event: None,
    )
    order = Order(size=len(data.samples), seed=5, epoch=0)
    order = order if replay is None else Replay(recorded=replay, order=order)
    return ArrayLoader(
        lambda epoch: source, data, order=order, batch_size=batch_size, ranks=ranks, record=not ranks.are_several
    )


def kept(data, rows):
    """A cache that holds some rows."""
    cache = TieredCache(FeatureCache(SCOPE, 1 << 20), None)
    ids = data.samples.ids[rows]
    cache.put(ids, (ids[:, None].astype(np.float32),))
    return cache


@given(
    slack=st.sampled_from([0, 3, 20, None]),
    held=st.sampled_from([0, 0.3, 0.9]),
    waits=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    lost=st.sets(st.integers(0, COUNT - 1), max_size=4),
)
def test_every_sample_comes_once_with_its_own_row_whatever_is_late(slack, held, waits, lost):
    data = Data(COUNT)
    rows = np.flatnonzero(np.random.default_rng(len(waits)).random(COUNT) < held)
    lost = {int(data.samples.ids[item]) for item in lost if item not in set(rows.tolist())}
    cache = kept(data, rows) if held else None
    batches = list(loader(data, Store(data, waits, lost), cache, slack=slack))
    ids = np.concatenate([batch.ids for batch in batches])
    assert sorted(ids.tolist()) == sorted(set(data.samples.ids.tolist()) - lost)
    assert all(len(batch) == 10 for batch in batches[:-1])
    for batch in batches:
        assert (batch.features[:, 0] == batch.ids).all()
        assert (batch.labels * 3 + 1000 == batch.ids).all()
    order = data.samples.ids[Order(size=COUNT, seed=5, epoch=0).indices(0, COUNT)]
    expected = [int(index) for index in order if int(index) not in lost]
    if slack == 0:
        assert ids.tolist() == expected


@given(
    slack=st.sampled_from([0, 3, 20, None]),
    count=st.sampled_from([7, 30, COUNT]),
    held=st.sampled_from([0, 0.3, 1]),
    waits=st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_every_sample_comes_once_an_epoch_through_one_window(slack, count, held, waits):
    data = Data(count)
    rows = np.flatnonzero(np.random.default_rng(count).random(count) < held)
    cache = kept(data, rows) if held else None
    for epoch in Epochs(loader(data, Store(data, waits), cache, slack=slack), range(3)):
        batches = list(epoch)
        ids = np.concatenate([batch.ids for batch in batches])
        assert sorted(ids.tolist()) == data.samples.ids.tolist()
        assert all((batch.features[:, 0] == batch.ids).all() for batch in batches)
        if slack == 0:
            order = Order(size=count, seed=5, epoch=epoch.epoch).indices(0, count)
            assert ids.tolist() == data.samples.ids[order].tolist()


@given(
    slack=st.sampled_from([0, 20, None]),
    waits=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    lost=st.sets(st.integers(0, COUNT - 1), max_size=4),
)
def test_replays_a_recorded_order_whatever_is_late(slack, waits, lost):
    data = Data(COUNT)
    lost = {int(data.samples.ids[item]) for item in lost}
    first = loader(data, Store(data, waits, lost), None, slack=slack)
    came = [batch.ids.tolist() for batch in first]
    recorded = RecordedOrder.from_bytes(first.recorded().to_bytes())
    again = loader(data, Store(data, waits[::-1]), None, slack=0, replay=recorded)
    assert [batch.ids.tolist() for batch in again] == came


@given(
    slack=st.sampled_from([0, 3, 20, None]),
    then=st.sampled_from([0, 20, None]),
    held=st.sampled_from([0, 0.5]),
    waits=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    lost=st.sets(st.integers(0, COUNT - 1), max_size=4),
    batches=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    world_size=st.sampled_from([1, 2]),
)
def test_a_run_goes_on_from_any_state_with_each_sample_once(slack, then, held, waits, lost, batches, world_size):
    data = Data(COUNT)
    rows = np.flatnonzero(np.random.default_rng(len(waits)).random(COUNT) < held)
    # Several ranks refuse a step in which one of them has nothing that can be read.
    lost = {int(data.samples.ids[item]) for item in lost if item not in set(rows.tolist()) and world_size == 1}
    came, state = [], None
    for number in batches:  # stopped and taken up again, each time as another process would
        run = loader(data, Store(data, waits, lost), kept(data, rows) if held else None, slack=slack)
        if state is not None:
            run.load_state_dict(json.loads(json.dumps(state)))
        came += [batch.ids.tolist() for batch in itertools.islice(run, number)]
        state = run.state_dict()
    for rank in range(world_size):
        slacks = {"slack": then if world_size == 1 else 0}
        ranks = fl.Ranks(rank=rank, world_size=world_size)
        rest = loader(data, Store(data, waits, lost), None, batch_size=3, ranks=ranks, **slacks)
        rest.load_state_dict(state)
        came += [batch.ids.tolist() for batch in rest]
        assert rest.state_dict()["position"] == COUNT
    assert sorted(itertools.chain(*came)) == sorted(set(data.samples.ids.tolist()) - lost)


@pytest.mark.parametrize("slack", [8, 40])
def test_no_sample_comes_further_ahead_of_a_missing_one_than_the_slack(slack):
    data = Data(COUNT)
    order = Order(size=COUNT, seed=5, epoch=0).indices(0, COUNT)
    ids = [int(item) for item in data.samples.ids[order]]
    places = {item: place for place, item in enumerate(ids)}
    cache = kept(data, order[1::2])
    batches = list(loader(data, Store(data, [4, 0, 0, 2]), cache, slack=slack))
    came = [places[int(item)] for batch in batches for item in batch.ids]
    missing = np.ones(COUNT, bool)
    for place in came:
        assert place - int(np.argmax(missing)) <= slack + 2 * PER_REQUEST, "its own request's places come in one go"
        missing[place] = False
    assert came != sorted(came)
