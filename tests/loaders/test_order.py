"""Orders of a job end to end: ranks, ends of epochs, weights, blends, and states to go on from, with a real node."""

import json

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import DataError, OrderMismatch, SettingError
from frostline.ordering import MixtureOrder, Order, Weighted, Weights
from support.images import image_folder, tiny_preprocess

SETTINGS = LoaderSettings(samples_per_request=8, requests_in_flight=3, cache_bytes=0, skip_allowance=0.2)
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
    assert ids == blend.joined().samples.ids[order.at(np.arange(len(order)))].tolist()
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
    with pytest.raises(SettingError, match="a blend has ratios"):
        job.loader(4, data=blend_of(folder), weights=[1.0] * 30)


def test_replays_a_loaders_epoch_with_the_same_features(folder):
    with plain_job(folder, LoaderSettings(samples_per_request=4, cache_bytes=0, slack=None)) as job:
        loader = job.loader(4, shuffle=True, epoch=3, record=True)
        first = list(loader)
        again = job.loader(4, shuffle=True, epoch=3, replay=loader.recorded())
        pairs = zip(first, again, strict=True)
        assert all(
            torch.equal(pair.ids, other.ids) and torch.equal(pair.features, other.features) for pair, other in pairs
        )
        with pytest.raises(OrderMismatch, match="epoch 3"):
            job.loader(4, shuffle=True, epoch=2, replay=loader.recorded())
        with pytest.raises(OrderMismatch, match="other samples"):
            job.loader(4, shuffle=True, epoch=3, replay=loader.recorded(), data=fl.Dataset(folder).split(0.5)[0])
        with pytest.raises(SettingError, match="record=True"):
            again.recorded()
