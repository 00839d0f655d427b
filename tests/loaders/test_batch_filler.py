"""Batches are filled where rows arrive: the same as a plain loop makes, whatever is missing, kept, late or left."""

import os
import threading
from queue import Empty, SimpleQueue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.cache import FeatureCache, Scope, TieredCache
from frostline.core import FeatureBatch, Samples, Skipped, TensorSpec
from frostline.core.config import LoaderSettings
from frostline.core.errors import OverBudget
from frostline.core.events import SampleSkipped
from frostline.loaders import ArrayLoader
from frostline.loaders.batches import Arrivals, BatchFiller
from frostline.loaders.row_source import RowSource
from frostline.ordering import Order
from support.mixing import one_way
from support.threads import no_thread_is_left

PER_REQUEST, ROW_BYTES = 4, 4
SCOPE = Scope(data="memory://", prefix="", cut=1, preprocess="", engine="none", shapes=((1,),), dtypes=("float32",))


class Data:
    digest = ""

    def __init__(self, count):
        ids, zeros = np.arange(count) * 3 + 7, np.zeros(count, np.int64)
        self.samples = Samples(
            ids=ids, objects=[str(item) for item in ids], offsets=zeros, lengths=zeros + 9, labels=ids
        )


class Memory:
    """Remembers in which threads batches were begun."""

    def __init__(self):
        self.threads = []

    def empty(self, shape, dtype):
        self.threads.append(threading.current_thread())
        return np.empty(shape, dtype)


def answering(lost=()):
    def fetch(samples, _route):
        for item in samples.ids.tolist():  # a row at a time
            is_lost = item in lost
            ids = np.array([] if is_lost else [item], np.int64)
            skipped = (Skipped(id=item, object=str(item), reason="truncated"),) if is_lost else ()
            yield FeatureBatch(ids=ids, tensors=(ids[:, None].astype(np.float32),), skipped=skipped)

    return fetch


def encoded(fetch):
    """The same rows as they are stored."""

    def fetched(samples, route):
        for batch in fetch(samples, route):
            rows = [str(item).encode() for item in batch.ids.tolist()]
            yield FeatureBatch(ids=batch.ids, encoded=rows, skipped=batch.skipped)

    return fetched


def decoding(broken=()):
    def decode(batch, samples):
        names = dict(zip(samples.ids.tolist(), samples.objects, strict=True))
        assert [str(item).encode() for item in batch.ids.tolist()] == list(batch.encoded)
        ids = batch.ids[~np.isin(batch.ids, list(broken))]
        lost = [item for item in batch.ids.tolist() if item in broken]
        skipped = tuple(Skipped(id=item, object=names[item], reason="no image") for item in lost)
        return FeatureBatch(ids=ids, tensors=(ids[:, None].astype(np.float32),), skipped=skipped)

    return decode


def loader(
    count,
    batch_size,
    fetch,
    *,
    cache=None,
    memory=None,
    last="keep",
    on_event=lambda event: None,
    decode=None,
    piece_rows=2,
    max_finished_bytes=None,
    **chosen,
):
    data = Data(count)
    source = RowSource(
        fetch=fetch,
        request_source=one_way(PER_REQUEST, ROW_BYTES),
        cache=cache,
        unreadable=lambda: np.zeros(0, np.int64),
        settings=LoaderSettings(**{"samples_per_request": PER_REQUEST, "requests_in_flight": 3, **chosen}),
        on_event=on_event,
        memory=memory,
        tensors=(TensorSpec(((2 << 20) // piece_rows,), "uint8"),),
        decode=decode,
        max_finished_bytes=max_finished_bytes,
    )
    order = Order(size=count, seed=2, epoch=0)
    return ArrayLoader(lambda _: source, data, order=order, batch_size=batch_size, last=last)


def cache_of(ids):
    cache = TieredCache(FeatureCache(SCOPE, 1 << 16), None)
    if len(ids):
        cache.put(ids, (ids[:, None].astype(np.float32),))
    return cache


def naive(count, batch_size, last, lost):
    """A loop over the order that leaves out what cannot be read."""
    ids = Data(count).samples.ids[Order(size=count, seed=2, epoch=0).at(np.arange(count))]
    ids = [item for item in ids.tolist() if item not in lost]
    batches = [ids[start : start + batch_size] for start in range(0, len(ids), batch_size)]
    return [batch for batch in batches if last == "keep" or len(batch) == batch_size]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    with no_thread_is_left():
        yield


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 60),
    batch_size=st.integers(1, 17),
    last=st.sampled_from(["keep", "drop"]),
    max_reorder=st.sampled_from([0, 0, 3, None]),
    window_rows=st.integers(1, 40),
    decodes=st.booleans(),
    piece_rows=st.integers(1, 5),
    chance=st.randoms(use_true_random=False),
)
def test_batches_are_those_of_a_plain_loop(
    count, batch_size, last, max_reorder, window_rows, decodes, piece_rows, chance
):
    ids = Data(count).samples.ids
    lost = {item for item in ids.tolist() if chance.random() < 0.15}
    fetch, decode = answering(lost), None
    if decodes:
        broken = {item for item in lost if chance.random() < 0.5}
        fetch, decode = encoded(answering(lost - broken)), decoding(broken)
    kept = cache_of(np.array([item for item in ids.tolist() if item not in lost and chance.random() < 0.3], np.int64))
    made = loader(
        count,
        batch_size,
        fetch,
        cache=kept,
        last=last,
        max_reorder=max_reorder,
        window_bytes=window_rows * ROW_BYTES,
        decode=decode,
        piece_rows=piece_rows,
    )
    expected = naive(count, batch_size, last, lost)
    for _ in range(2):  # the second epoch finds in the cache what the first one fetched
        found = list(made)
        for entry in found:
            assert (entry.features[:, 0] == entry.ids).all()
            assert (entry.labels == entry.ids).all()
        batches = [item.ids.tolist() for item in found]
        assert [len(batch) for batch in batches] == [len(value) for value in expected]
        if max_reorder == 0:
            assert batches == expected
        else:
            every = [item for batch in batches for item in batch]
            assert len(set(every)) == len(every)
            assert last == "drop" or sorted(every) == sorted(item for batch in expected for item in batch)


@settings(deadline=None, max_examples=30)
@given(taken=st.integers(0, 6), max_reorder=st.sampled_from([0, 5, None]))
def test_a_pass_that_is_left_leaves_the_state_where_the_loop_was(taken, max_reorder):
    made = loader(40, 6, answering(), max_reorder=max_reorder)
    passing = iter(made)
    before = [item for _ in range(taken) for item in next(passing).ids.tolist()]
    state = made.state_dict()
    passing.close()
    made.load_state_dict(state)
    after = [item for batch in made for item in batch.ids.tolist()]
    assert sorted(before + after) == sorted(Data(40).samples.ids.tolist())


def test_the_loops_thread_fills_no_batch():
    memory = Memory()
    assert len(list(loader(64, 8, answering(), memory=memory))) == 8
    assert threading.current_thread() not in memory.threads


def test_a_loop_that_stalls_finds_its_batches_finished():
    memory, finished = Memory(), threading.Event()

    def fetch(samples, route):
        yield from answering()(samples, route)
        if last_id in samples.ids:
            finished.set()

    last_id = naive(64, 8, "keep", ())[-1][-1]
    passing = iter(loader(64, 8, fetch, memory=memory))
    next(passing)
    assert finished.wait(60)
    assert len(list(passing)) == 7
    assert threading.current_thread() not in memory.threads


def test_batches_that_wait_count_in_the_windows_bytes():
    asked, enough = [], threading.Event()

    def fetch(samples, route):
        asked.extend(samples.ids.tolist())
        if len(asked) >= 16:
            enough.set()
        yield from answering()(samples, route)

    passing = iter(loader(400, 4, fetch, window_bytes=8 * ROW_BYTES, requests_in_flight=1))
    next(passing)
    assert enough.wait(60)
    # Of the next batch nothing counts, the window holds eight rows, and a request is of four.
    assert len(asked) <= 4 + 4 + 8 + 4
    assert len(list(passing)) == 99


def test_a_failure_comes_after_the_batches_that_were_finished_before_it():
    def fetch(samples, route):
        if failing in samples.ids:
            raise OverBudget("too large")
        yield from answering()(samples, route)

    order = naive(24, 4, "keep", ())
    failing = order[3][0]
    passing = iter(loader(24, 4, fetch, requests_in_flight=1))
    found = []
    with pytest.raises(OverBudget, match="too large"):
        found.extend(item.ids.tolist() for item in passing)
    assert found == order[: len(found)]
    assert len(found) <= 3


def test_reports_events_in_the_loops_thread():
    told = []
    lost = {7, 10, 13}
    made = loader(30, 4, answering(lost), on_event=lambda event: told.append((event, threading.current_thread())))
    assert sum(map(len, made)) == 27
    assert {thread for _, thread in told} == {threading.current_thread()}
    assert {event.id for event, _ in told if isinstance(event, SampleSkipped)} == lost


class EndsBetween(SimpleQueue):
    """The pass loses a sample and ends just after the loop looked at what happened, and before it asks for the end."""

    def __init__(self):
        super().__init__()
        self.looked = threading.Event()

    def get_nowait(self):
        try:
            return super().get_nowait()
        except Empty:
            if not self.looked.is_set():
                self.looked.set()
                self.put(self.get(timeout=60))  # wait for what happens, and leave it there
            raise


@pytest.mark.parametrize("failure", [None, OverBudget("no memory")])
def test_what_is_lost_as_a_pass_ends_is_told_before_its_end(failure):
    lost, told = SampleSkipped(id=3, object="3", reason="truncated"), []
    happened = EndsBetween()

    def steps():
        assert happened.looked.wait(60)
        happened.put(lost)
        if failure is not None:
            raise failure
        yield from ()

    class Bringer:
        """What brings rows: it has none."""

        bytes_taken = 0
        listen = hold_after = stall_begins = stall_ends = staticmethod(lambda *_: None)
        next_event = happened.get

    arrivals, ending = (
        Arrivals(prefetcher=Bringer(), happened=happened),
        StopIteration if failure is None else OverBudget,
    )
    with BatchFiller(steps(), arrivals, told.append, lambda: None, None) as filler, pytest.raises(ending):
        next(filler)
    assert told == [lost]


def test_reports_an_undecodable_sample_once_by_name():
    told = []
    made = loader(30, 4, encoded(answering({7})), decode=decoding({10, 13}), on_event=told.append)
    assert [len(item) for item in made] == [4] * 6 + [3]
    skipped = [event for event in told if isinstance(event, SampleSkipped)]
    assert {(sample.id, sample.object) for sample in skipped} == {(7, "7"), (10, "10"), (13, "13")}
    assert len(skipped) == 3


def test_little_is_decoded_before_the_loop_takes_it():
    decoded, enough = [], threading.Event()
    at_once = len(os.sched_getaffinity(0)) + 1
    lock = threading.Lock()

    def decode(batch, samples):
        with lock:
            decoded.extend(batch.ids.tolist())
            if len(decoded) >= 4 + 4:
                enough.set()
        return decoding()(batch, samples)

    # A finished batch is more than may wait.
    passing = iter(loader(400, 4, encoded(answering()), decode=decode, max_finished_bytes=60, requests_in_flight=1))
    taken = len(next(passing).ids)
    assert enough.wait(60)
    for batch in passing:
        # One batch waits; and of the next one a piece for each thread, and one more.
        assert len(decoded) <= taken + 4 + 4 + 2 * at_once
        taken += len(batch.ids)
    assert taken == len(decoded) == 400


def test_a_pass_that_is_left_decodes_no_more():
    decoded = []

    def decode(batch, samples):
        decoded.append(len(batch))
        return decoding()(batch, samples)

    passing = iter(loader(4000, 4, encoded(answering()), decode=decode, max_finished_bytes=60))
    next(passing)
    passing.close()
    assert sum(decoded) < 400


def test_errors_of_decoding_reach_the_loop():
    def decode(batch, samples):
        if failing in batch.ids:
            raise OverBudget("too large")
        return decoding()(batch, samples)

    order = naive(24, 4, "keep", ())
    failing = order[3][0]
    with pytest.raises(OverBudget, match="too large"):
        list(loader(24, 4, encoded(answering()), decode=decode))
