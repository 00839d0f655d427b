"""Orders of a loader end to end: ranks, weights, repeats, states, and what may be handed out ahead.

Orders of a job end to end: ranks, ends of epochs, weights, blends, and states to go on from, with a real node.

Ranks in processes of their own, over loopback: they share an epoch, and refuse to when they would not.

Samples that stand in a request more than once: asked for once, handed out at each of their places.

What a loader hands out ahead of what is missing: each sample once, with its own row and label, no further ahead.
"""

import itertools
import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

import frostline as fl
from frostline.cache import FeatureCache, Scope, TieredCache
from frostline.core import FeatureBatch, Route, Samples, Skipped
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import DataError, OrderMismatch, SettingError, Unavailable
from frostline.loaders import ArrayLoader, Epochs
from frostline.loaders.arguments import ALONE
from frostline.loaders.fetch import fetch_each
from frostline.loaders.row_source import RowSource
from frostline.ordering import MixtureOrder, Order, OrderState, RecordedOrder, Replay, Weighted, Weights
from support.images import image_folder, tiny_preprocess
from support.mixing import one_way

pytestmark = pytest.mark.promise("complete")

SETTINGS = LoaderSettings(samples_per_request=8, requests_in_flight=3, cache_bytes=0, max_skipped_fraction=0.2)
NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=15)


@pytest.fixture(scope="module")
def job(folder):
    with plain_job(folder) as job:
        yield job


def plain_job(folder, settings=SETTINGS):
    return fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=settings, node=NODE)


def ids_of(batches):
    return [batch.ids.tolist() for batch in batches]


def all_ranks(job, batch_size, world_size, state=None, **options):
    """The ids of every batch of every rank, and the states that they end with."""
    found, states = [], []
    for rank in range(world_size):
        loader = job.loader(batch_size, shuffle=True, ranks=fl.Ranks(rank=rank, world_size=world_size), **options)
        if state is not None:
            loader.load_state_dict(state)
        found.append(ids_of(loader))
        states.append(loader.state_dict())
    return found, states


def flat(nested):
    return [id for rank in nested for batch in rank for id in batch]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_an_epoch_and_each_step_has_the_samples_that_one_rank_would_take(job, folder, world_size):
    together, _ = all_ranks(job, 8 // world_size, world_size)
    ((alone,), _) = all_ranks(job, 8, 1)
    for number, step in enumerate(alone[:-1]):
        assert sorted(step) == sorted(id for rank in together for id in rank[number])
    assert {len(rank) for rank in together} == {len(alone)}
    assert sorted(flat(together)) == sorted(fl.Dataset(folder).samples.ids.tolist())


@pytest.mark.parametrize(
    ("last", "batches", "rows"), [("keep", 6, 45), ("drop", 5, 40), ("pad", 6, 48), ("uneven", 6, 45)]
)
def test_the_end_of_an_epoch_is_as_asked_for_at_every_rank(job, last, batches, rows):
    found, states = all_ranks(job, 2, 4, last=last)
    assert len(flat(found)) == rows
    assert {len(rank) for rank in found} == ({batches} if last != "uneven" else {5, 6} if rows % 8 < 4 else {6})
    assert {json.dumps(state) for state in states} == {json.dumps(states[0])}
    for rank in range(4):
        loader = job.loader(2, last=last, ranks=fl.Ranks(rank=rank, world_size=4))
        assert len(loader) == len(found[rank])


@pytest.mark.parametrize("stopped", [0, 1, 3, 6])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 7), (3, 2), (2, 5)])
def test_a_run_stopped_in_an_epoch_goes_on_with_the_rest_whatever_the_ranks(
    job, folder, stopped, world_size, batch_size
):
    taken = []
    for rank in range(2):
        loader = job.loader(4, shuffle=True, ranks=fl.Ranks(rank=rank, world_size=2))
        batches = iter(loader)
        taken.append([next(batches).ids.tolist() for _ in range(stopped)])
        state = json.loads(json.dumps(loader.state_dict()))
        batches.close()
    assert state["position"] == min(8 * stopped, 45)
    rest, _ = all_ranks(job, batch_size, world_size, state)
    order = Order(size=45, seed=0, epoch=0).indices(0, 45)
    ids = fl.Dataset(folder).samples.ids[order].tolist()
    assert sorted(flat(taken)) == sorted(ids[: 8 * stopped])
    assert sorted(flat(rest)) == sorted(ids[8 * stopped :])
    if world_size == 1:
        assert flat(rest) == ids[8 * stopped :]


def test_a_state_says_what_was_handed_to_the_caller_and_not_what_was_prefetched(job):
    loader = job.loader(4, shuffle=True)
    assert loader.state_dict()["position"] == 0
    positions = [loader.state_dict()["position"] for _ in loader]
    assert positions == [*range(4, 45, 4), 45]
    assert loader.state_dict()["position"] == 45


def test_an_epoch_that_was_over_gives_nothing_more_and_then_itself_again(job):
    loader = job.loader(10, shuffle=True)
    whole = ids_of(loader)
    again = job.loader(10, shuffle=True)
    again.load_state_dict(loader.state_dict())
    assert ids_of(again) == []
    assert ids_of(again) == whole


def test_a_dropped_end_stays_dropped_after_going_on(job):
    loader = job.loader(10, shuffle=True, last="drop")
    batches = iter(loader)
    first = [next(batches).ids.tolist() for _ in range(3)]
    state = loader.state_dict()
    batches.close()
    again = job.loader(10, shuffle=True, last="drop")
    again.load_state_dict(state)
    assert first + ids_of(again) == ids_of(loader)
    assert len(loader) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 1}, "saved with seed 0, and this loader has seed 1: make it with seed=0"),
        ({"epoch": 1}, "in epoch 0, and this loader is of epoch 1: make it with epoch=0"),
        ({"shuffle": False}, "in the order 'shuffled', and this loader's is 'listed'"),
    ],
)
def test_a_state_of_another_order_is_refused_with_what_to_do(job, options, said):
    state = job.loader(4, shuffle=True).state_dict()
    with pytest.raises(OrderMismatch, match=said):
        job.loader(4, **{"shuffle": True, **options}).load_state_dict(state)


def test_a_state_of_other_samples_or_of_a_newer_version_is_refused(job, folder):
    train, held_out = fl.Dataset(folder).split(0.2, 0)
    state = job.loader(4, data=train).state_dict()
    with pytest.raises(OrderMismatch, match="other samples"):
        job.loader(4, data=held_out).load_state_dict(state)
    with pytest.raises(OrderMismatch, match="newer Frostline"):
        job.loader(4, data=train).load_state_dict({**state, "frostline_order": 99})


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """45 images, three of which cannot be read."""
    folder = image_folder(tmp_path_factory.mktemp("broken"), per_class=15)
    for name in ("noise/003.jpg", "stripe/004.jpg", "circle/011.jpg"):
        (folder / name).write_bytes(b"no image")
    return folder


def test_a_state_counts_the_samples_that_could_not_be_read(broken):
    with plain_job(broken) as job:
        whole = ids_of(job.loader(4, shuffle=True))
        assert len(flat([whole])) == 42
    with plain_job(broken) as job:
        for stopped in (2, 7, 10):
            loader = job.loader(4, shuffle=True)
            batches = iter(loader)
            first = [next(batches).ids.tolist() for _ in range(stopped)]
            state = loader.state_dict()
            batches.close()
            again = job.loader(4, shuffle=True)
            again.load_state_dict(state)
            assert first + ids_of(again) == whole


def test_several_ranks_keep_step_where_samples_cannot_be_read(broken):
    with plain_job(broken) as job:
        for _ in range(2):  # the second time it is known which ones
            found, states = all_ranks(job, 4, 3)
            assert [len(rank) for rank in found] == [4, 4, 4]
            assert len(set(flat(found))) == len(flat(found)) == 42
            assert len({json.dumps(state) for state in states}) == 1


@pytest.mark.parametrize("last", ["drop", "pad"])
def test_ranks_that_are_promised_as_many_rows_have_them_where_samples_cannot_be_read(broken, last):
    with plain_job(broken) as job:
        for _ in range(2):  # the second time it is known which ones
            found, states = all_ranks(job, 4, 2, last=last)
            sizes = [[len(batch) for batch in rank] for rank in found]
            assert sizes == [[4] * 5 + [3] * (last == "pad")] * 2
            # Rows of the same batch come again, and nobody else's.
            assert all(set(mine).isdisjoint(theirs) for mine, theirs in zip(found[0][:5], found[1][:5], strict=True))
            assert len(set(flat(found))) >= 37
            assert len({json.dumps(state) for state in states}) == 1


def test_a_step_of_a_rank_of_which_nothing_can_be_read_ends_the_job_with_a_sentence(broken):
    with plain_job(broken) as job, pytest.raises(DataError, match=r"none of the samples that rank \d takes in step"):
        all_ranks(job, 1, 3)


def test_samples_are_drawn_by_weights_in_the_order_of_seed_and_epoch(job, folder):
    data = fl.Dataset(folder)
    weights = np.arange(45.0)
    ids = flat([ids_of(job.loader(8, weights=weights, num_samples=100, seed=3, epoch=2))])
    order = Weighted(weights=Weights(weights), size=100, seed=3, epoch=2)
    assert ids == data.samples.ids[order.at(np.arange(100))].tolist()
    assert len(set(ids)) < 45


def test_classes_are_drawn_by_their_weights(job, folder):
    data = fl.Dataset(folder)
    one, other, *rest = data.classes
    loader = job.loader(50, weights={one: 3, other: 1, **dict.fromkeys(rest, 0)}, num_samples=400)
    labels = torch.cat([batch.labels for batch in loader])
    assert set(labels.tolist()) == {0, 1}
    assert 260 < int((labels == 0).sum()) < 340  # 300 expected, 9 the standard deviation
    assert len(loader) == 8


def test_drawn_samples_that_come_twice_in_a_request_have_their_own_pixels(job, folder):
    pixels = {
        int(id): feature for batch in job.loader(9) for id, feature in zip(batch.ids, batch.features, strict=True)
    }
    weights = [1.0, 1.0, *[0.0] * 43]
    for batch in job.loader(8, weights=weights, num_samples=32):
        assert all(torch.equal(feature, pixels[int(id)]) for id, feature in zip(batch.ids, batch.features, strict=True))


def test_drawn_samples_share_the_cache_and_go_on_after_a_stop(folder):
    with plain_job(folder, LoaderSettings(samples_per_request=8)) as job:
        options = {"weights": np.arange(45.0), "num_samples": 90}
        whole = ids_of(job.loader(8, **options))
        loader = job.loader(8, **options)
        batches = iter(loader)
        first = [next(batches).ids.tolist() for _ in range(5)]
        again = job.loader(8, **options)
        again.load_state_dict(loader.state_dict())
        assert first + ids_of(again) == whole
        assert job.statistics().from_cache > 0


def blend_of(folder, **options):
    data = fl.Dataset(folder)
    return fl.Mixture(parts=[data.select(f"label == '{name}'") for name in data.classes[:2]], ratios=[2, 1], **options)


def test_a_mixture_has_its_shares_in_every_batch(job, folder):
    blend = blend_of(folder)
    batches = list(job.loader(6, data=blend, shuffle=True))
    assert [sorted(batch.labels.tolist()) for batch in batches[:3]] == [[0, 0, 0, 0, 1, 1]] * 3
    ids = [id for batch in batches for id in batch.ids.tolist()]
    order = MixtureOrder.of([15, 15], [2, 1], seed=0, epoch=0)
    assert ids == blend.concatenate().samples.ids[order.at(np.arange(len(order)))].tolist()
    assert len(set(ids)) == len(ids) == len(order)


def test_over_epochs_a_mixture_takes_every_sample_of_a_part_before_any_comes_again(job, folder):
    seen = [
        id
        for epoch in range(2)
        for batch in job.loader(5, data=blend_of(folder), shuffle=True, epoch=epoch)
        for id, label in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True)
        if label == 1
    ]
    assert len(set(seen[:15])) == min(15, len(seen))


def test_ranks_share_a_mixture_and_resume_it(job, folder):
    blend = blend_of(folder, ends="all")
    ((alone,), _) = all_ranks(job, 6, 1, data=blend)
    loader = job.loader(6, data=blend, shuffle=True)
    batches = iter(loader)
    first = next(batches).ids.tolist()
    state = loader.state_dict()
    batches.close()
    rest, _ = all_ranks(job, 3, 2, state, data=blend)
    assert sorted(first + flat(rest)) == sorted(flat([alone]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": [1.0]}, "1 weights were given for 45 samples"),
        ({"weights": {"nothing": 1.0}}, "no class 'nothing'"),
        ({"num_samples": 5}, "give weights too"),
        ({"last": "most"}, "last must be one of keep"),
        ({"batch_size": 0}, "batch_size"),
        ({"record": True, "ranks": fl.Ranks(rank=1, world_size=2)}, "2 ranks keep the epoch's order"),
    ],
)
def test_an_order_that_makes_no_sense_is_a_sentence(job, options, said):
    with pytest.raises(SettingError, match=said):
        job.loader(**{"batch_size": 4, **options})


def test_refuses_a_mixture_of_other_data_or_by_weights(job, folder, tmp_path):
    other = fl.Dataset(image_folder(tmp_path, per_class=2))
    with pytest.raises(SettingError, match="can be joined"):
        job.loader(4, data=fl.Mixture(parts=[fl.Dataset(folder), other], ratios=[1, 1]))
    with pytest.raises(SettingError, match="make another job"):
        job.loader(4, data=fl.Mixture(parts=[other], ratios=[1]))
    with pytest.raises(SettingError, match="at least one part"):
        job.loader(4, data=fl.Mixture(parts=[], ratios=[]))
    with pytest.raises(SettingError, match="a mixture has ratios"):
        job.loader(4, data=blend_of(folder), weights=[1.0] * 30)


def test_replays_a_loaders_epoch_with_the_same_features(folder):
    with plain_job(folder, LoaderSettings(samples_per_request=4, cache_bytes=0, max_reorder=None)) as job:
        loader = job.loader(4, shuffle=True, epoch=3, record=True)
        first = list(loader)
        again = job.loader(4, shuffle=True, epoch=3, replay=loader.recorded_order())
        pairs = zip(first, again, strict=True)
        assert all(
            torch.equal(pair.ids, other.ids) and torch.equal(pair.features, other.features) for pair, other in pairs
        )
        with pytest.raises(OrderMismatch, match="epoch 3"):
            job.loader(4, shuffle=True, epoch=2, replay=loader.recorded_order())
        with pytest.raises(OrderMismatch, match="other samples"):
            job.loader(4, shuffle=True, epoch=3, replay=loader.recorded_order(), data=fl.Dataset(folder).split(0.5)[0])
        with pytest.raises(SettingError, match="record=True"):
            again.recorded_order()


WORLD = 3


@pytest.fixture(scope="module")
def seen(shared_node, tmp_path_factory):
    """What each of three ranks saw."""
    place = tmp_path_factory.mktemp("ranks")
    folder, other = image_folder(place / "images", per_class=10), image_folder(place / "other", per_class=11)
    command = [sys.executable, "-m", "support.ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(folder), str(other), shared_node.url, str(place)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        return [json.loads(rank.communicate(timeout=200)[0]) for rank in ranks], fl.Dataset(folder)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_ranks_of_a_process_group_share_an_epoch_without_being_told(seen):
    found, data = seen
    assert sorted(id for item in found for batch in item["ids"] for id in batch) == sorted(data.samples.ids.tolist())
    assert [len(item["ids"]) for item in found] == [3, 3, 3]
    assert found[0]["state"] == found[1]["state"] == found[2]["state"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("seed", "the seed differs: rank 0 has 0, rank 1 has 1"),
        ("epoch", "the epoch differs: rank 0 has 0, rank 1 has 7"),
        ("manifest", "the manifest of the samples differs"),
        ("store", "the seed differs: rank 0 has 0, rank 1 has 1"),
        ("workers", "the seed differs: rank 0 has 0, rank 1 has 1"),
    ],
)
def test_ranks_that_differ_are_refused_everywhere_with_what_differs_and_where(seen, what, said):
    assert all(said in event["said"][what] and "rank 1 has" in event["said"][what] for event in seen[0])


def test_agreeing_ranks_go_on_after_a_refusal_and_a_single_rank_asks_none(seen):
    assert all(not {"nothing", "alone"} & event["said"].keys() for event in seen[0])


def test_a_rank_that_never_comes_is_named(seen):
    assert "rank 1 did not say what it is about to read" in seen[0][0]["said"]["absent"]


def state_of(epoch):
    return OrderState(
        manifest="m", order="shuffle", seed=1, epoch=epoch, position=0, samples=9, batch_size=4, last="keep"
    )


def agreeing(store, epochs_of, run):
    """Ranks in threads, each of which makes ``Ranks`` and agrees on the epochs of each; what went wrong."""
    failed = []

    def rank(number, made):
        try:
            for epochs in made:
                ranks = fl.Ranks.by_store(store, number, len(epochs_of), run=run)
                for epoch in epochs:
                    ranks.agree(state_of(epoch))
        except OrderMismatch as error:
            failed.append(str(error))

    threads = [threading.Thread(target=rank, args=item) for item in enumerate(epochs_of)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return failed


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4), st.integers(2, 3), st.integers(1, 3))
def test_ranks_by_a_store_may_be_made_once_or_for_each_epoch_and_in_each_start(made, count, starts):
    store = HashStore()
    for start in range(starts):
        assert agreeing(store, [made] * count, str(start)) == []


def test_ranks_by_a_store_that_are_made_for_each_epoch_still_refuse_another_epoch():
    failed = agreeing(HashStore(), [[[0], [1]], [[0], [2]]], "")
    assert len(failed) == 2
    assert all("the epoch differs: rank 0 has 1, rank 1 has 2" in error for error in failed)


def test_what_an_earlier_start_left_in_the_store_is_not_read():
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=200))
    with pytest.raises(Unavailable, match="rank 1 did not say"):  # it was killed before it could
        fl.Ranks.by_store(store, 0, 2, run="0").agree(state_of(0))
    store.set_timeout(timedelta(seconds=60))
    assert agreeing(store, [[[0], [1]]] * 2, "1") == []


def test_without_a_process_group_there_is_one_rank():
    assert fl.Ranks.current() == fl.Ranks()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_refuses_an_unknown_rank_in_one_sentence(rank, world_size):
    with pytest.raises(SettingError, match="rank must lie"):
        fl.Ranks(rank=rank, world_size=world_size)
    with pytest.raises(SettingError, match=r"rank takes a whole number, not 1\.0"):
        fl.Ranks(rank=1.0, world_size=2)


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
        request_source=one_way(PER_REQUEST, 4),
        cache=cache,
        unreadable=lambda: np.zeros(0, np.int64),
        settings=LoaderSettings(samples_per_request=PER_REQUEST, requests_in_flight=4, **settings),
        on_event=lambda event: None,
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
    max_reorder=st.sampled_from([0, 3, 20, None]),
    held=st.sampled_from([0, 0.3, 0.9]),
    waits=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    lost=st.sets(st.integers(0, COUNT - 1), max_size=4),
)
def test_every_sample_comes_once_with_its_own_row_whatever_is_late(max_reorder, held, waits, lost):
    data = Data(COUNT)
    rows = np.flatnonzero(np.random.default_rng(len(waits)).random(COUNT) < held)
    lost = {int(data.samples.ids[item]) for item in lost if item not in set(rows.tolist())}
    cache = kept(data, rows) if held else None
    batches = list(loader(data, Store(data, waits, lost), cache, max_reorder=max_reorder))
    ids = np.concatenate([batch.ids for batch in batches])
    assert sorted(ids.tolist()) == sorted(set(data.samples.ids.tolist()) - lost)
    assert all(len(batch) == 10 for batch in batches[:-1])
    for batch in batches:
        assert (batch.features[:, 0] == batch.ids).all()
        assert (batch.labels * 3 + 1000 == batch.ids).all()
    order = data.samples.ids[Order(size=COUNT, seed=5, epoch=0).indices(0, COUNT)]
    expected = [int(index) for index in order if int(index) not in lost]
    if max_reorder == 0:
        assert ids.tolist() == expected


@given(
    max_reorder=st.sampled_from([0, 3, 20, None]),
    count=st.sampled_from([7, 30, COUNT]),
    held=st.sampled_from([0, 0.3, 1]),
    waits=st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_every_sample_comes_once_an_epoch_through_one_window(max_reorder, count, held, waits):
    data = Data(count)
    rows = np.flatnonzero(np.random.default_rng(count).random(count) < held)
    cache = kept(data, rows) if held else None
    for epoch in Epochs(loader(data, Store(data, waits), cache, max_reorder=max_reorder), range(3)):
        batches = list(epoch)
        ids = np.concatenate([batch.ids for batch in batches])
        assert sorted(ids.tolist()) == data.samples.ids.tolist()
        assert all((batch.features[:, 0] == batch.ids).all() for batch in batches)
        if max_reorder == 0:
            order = Order(size=count, seed=5, epoch=epoch.epoch).indices(0, count)
            assert ids.tolist() == data.samples.ids[order].tolist()


@given(
    max_reorder=st.sampled_from([0, 20, None]),
    waits=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    lost=st.sets(st.integers(0, COUNT - 1), max_size=4),
)
def test_replays_a_recorded_order_whatever_is_late(max_reorder, waits, lost):
    data = Data(COUNT)
    lost = {int(data.samples.ids[item]) for item in lost}
    first = loader(data, Store(data, waits, lost), None, max_reorder=max_reorder)
    came = [batch.ids.tolist() for batch in first]
    recorded = RecordedOrder.from_bytes(first.recorded_order().to_bytes())
    again = loader(data, Store(data, waits[::-1]), None, max_reorder=0, replay=recorded)
    assert [batch.ids.tolist() for batch in again] == came


@given(
    max_reorder=st.sampled_from([0, 3, 20, None]),
    then=st.sampled_from([0, 20, None]),
    held=st.sampled_from([0, 0.5]),
    waits=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    lost=st.sets(st.integers(0, COUNT - 1), max_size=4),
    batches=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    world_size=st.sampled_from([1, 2]),
)
def test_a_run_goes_on_from_any_state_with_each_sample_once(max_reorder, then, held, waits, lost, batches, world_size):
    data = Data(COUNT)
    rows = np.flatnonzero(np.random.default_rng(len(waits)).random(COUNT) < held)
    # Several ranks refuse a step in which one of them has nothing that can be read.
    lost = {int(data.samples.ids[item]) for item in lost if item not in set(rows.tolist()) and world_size == 1}
    came, state = [], None
    for number in batches:  # stopped and taken up again, each time as another process would
        run = loader(data, Store(data, waits, lost), kept(data, rows) if held else None, max_reorder=max_reorder)
        if state is not None:
            run.load_state_dict(json.loads(json.dumps(state)))
        came += [batch.ids.tolist() for batch in itertools.islice(run, number)]
        state = run.state_dict()
    for rank in range(world_size):
        slacks = {"max_reorder": then if world_size == 1 else 0}
        ranks = fl.Ranks(rank=rank, world_size=world_size)
        rest = loader(data, Store(data, waits, lost), None, batch_size=3, ranks=ranks, **slacks)
        rest.load_state_dict(state)
        came += [batch.ids.tolist() for batch in rest]
        assert rest.state_dict()["position"] == COUNT
    assert sorted(itertools.chain(*came)) == sorted(set(data.samples.ids.tolist()) - lost)


@pytest.mark.parametrize("max_reorder", [8, 40])
def test_no_sample_comes_further_ahead_of_a_missing_one_than_the_slack(max_reorder):
    data = Data(COUNT)
    order = Order(size=COUNT, seed=5, epoch=0).indices(0, COUNT)
    ids = [int(item) for item in data.samples.ids[order]]
    places = {item: place for place, item in enumerate(ids)}
    cache = kept(data, order[1::2])
    batches = list(loader(data, Store(data, [4, 0, 0, 2]), cache, max_reorder=max_reorder))
    came = [places[int(item)] for batch in batches for item in batch.ids]
    missing = np.ones(COUNT, bool)
    for place in came:
        assert place - int(np.argmax(missing)) <= max_reorder + 2 * PER_REQUEST, (
            "its own request's places come in one go"
        )
        missing[place] = False
    assert came != sorted(came)
