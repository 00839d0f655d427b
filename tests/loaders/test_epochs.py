"""Several epochs through one window: each sample once an epoch, nothing early, nothing asked for twice, any stop."""

import json
import threading
from collections import Counter

import pytest
import torch

import frostline as fl
from frostline.core import FeatureBatch, Route, Samples
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import OrderMismatch, SettingError
from frostline.core.events import EpochFinished, EpochStarted, SetupWarning
from frostline.loaders import ArrayLoader, Epochs, Loader
from frostline.loaders.epoch import in_turn
from frostline.loaders.row_source import RowSource
from frostline.ordering import Order
from frostline.prefetch import NextRequest
from support.images import image_folder, tiny_preprocess

pytestmark = pytest.mark.promise("complete")

NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)
NOTHING_KEPT = LoaderSettings(samples_per_request=8, requests_in_flight=3, cache_bytes=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=10)


def job_for(folder, settings=NOTHING_KEPT, **options):
    options = {"preprocess": tiny_preprocess(), **options}
    return fl.offload(None, fl.Dataset(folder), settings=settings, node=NODE, **options)


def apart(job, batch_size, epochs, **options):
    """The same epochs, each by a loader of its own."""
    return [[batch.ids.tolist() for batch in job.loader(batch_size, epoch=epoch, **options)] for epoch in epochs]


def together(epochs):
    return [[batch.ids.tolist() for batch in loader] for loader in epochs]


@pytest.mark.parametrize("settings", [NOTHING_KEPT, LoaderSettings(samples_per_request=8)], ids=["fetched", "kept"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_epochs_in_a_run_have_the_batches_of_epochs_apart(folder, settings, world_size):
    options = {"shuffle": True, "seed": 4, "ranks": fl.Ranks(rank=world_size - 1, world_size=world_size)}
    with job_for(folder, settings) as job:
        run = job.epochs(4, range(2, 6), **options)
        assert len(run) == 4
        assert together(run) == together(run) == apart(job, 4, range(2, 6), **options)


@pytest.mark.parametrize("max_reorder", [5, None])
def test_reordered_each_sample_comes_once_an_epoch_and_none_before_its_epoch(folder, max_reorder):
    settings = LoaderSettings(samples_per_request=4, requests_in_flight=4, cache_bytes=0, max_reorder=max_reorder)
    with job_for(folder, settings) as job:
        everything = sorted(fl.Dataset(folder).samples.ids.tolist())
        for loader in job.epochs(4, range(4), shuffle=True):
            assert sorted(id for batch in loader for id in batch.ids.tolist()) == everything
        assert loader.state_dict()["position"] == 30
        assert "ahead" not in loader.state_dict()
        several = job.loader(4, shuffle=True, ranks=fl.Ranks(rank=1, world_size=2))
        list(several)
        assert several.state_dict()["position"] == 30


def test_random_views_are_those_of_their_own_epoch(folder):
    with job_for(folder, preprocess=tiny_preprocess(flip=True)) as job:
        for loader in job.epochs(5, range(3), shuffle=True):
            pairs = zip(loader, job.loader(5, shuffle=True, epoch=loader.epoch), strict=True)
            assert all(torch.equal(pair.features, other.features) for pair, other in pairs)


def test_where_features_are_kept_the_second_epoch_crosses_no_network(folder):
    with job_for(folder, LoaderSettings(samples_per_request=4)) as job:
        epochs = iter(job.epochs(4, range(3), shuffle=True))
        list(next(epochs))
        requests = job.statistics().requests
        for loader in epochs:
            list(loader)
        assert job.statistics().requests == requests
        assert job.statistics().from_cache == 60


def test_an_epoch_left_early_is_followed_by_a_complete_one_and_leaves_no_thread(folder):
    with job_for(folder) as job:
        seen = []
        for loader in job.epochs(4, range(3), shuffle=True):
            batches = [batch.ids.tolist() for batch, _ in zip(loader, range(2 + 6 * loader.epoch), strict=False)]
            seen.append(batches)
        assert seen == [whole[: 2 + 6 * epoch] for epoch, whole in enumerate(apart(job, 4, range(3), shuffle=True))]
        for _ in job.epochs(4, range(3)):
            break
        assert not [item for item in threading.enumerate() if item.name.startswith("frostline-prefetch")]


@pytest.mark.parametrize("stopped", [0, 3, 8, 9, 16, 17, 24])
def test_a_run_goes_on_in_the_epoch_in_which_it_was_stopped(folder, stopped):
    with job_for(folder) as job:
        whole = [ids for epoch in apart(job, 4, range(3), shuffle=True) for ids in epoch]
        epochs, seen = job.epochs(4, range(3), shuffle=True), []
        state = epochs.state_dict()
        for batch in (batch for loader in epochs for batch in loader):
            if len(seen) == stopped:
                break
            seen.append(batch.ids.tolist())
            state = epochs.state_dict()
        again = job.epochs(4, range(3), shuffle=True)
        again.load_state_dict(json.loads(json.dumps(state)))
        assert again.state_dict() == state
        rest = [ids for epoch in together(again) for ids in epoch]
        assert seen + rest == whole
        assert again.state_dict()["epoch"] == 2
        assert again.state_dict()["position"] == 30


@pytest.mark.parametrize("settings", [NOTHING_KEPT, LoaderSettings(samples_per_request=8)], ids=["fetched", "kept"])
def test_passes_in_turn_over_different_samples_ask_for_each_once(folder, settings):
    with job_for(folder, settings) as job:
        train, held_out = fl.Dataset(folder).split(0.3, seed=1)
        both = [(train, True), (held_out, False)]
        alone = [[batch.ids.tolist() for batch in job.loader(4, data=data, shuffle=mixes)] for data, mixes in both]
    with job_for(folder, settings) as job:
        for _ in range(2):
            loaders = [job.loader(4, data=data, shuffle=mixes) for data, mixes in both]
            assert [[batch.ids.tolist() for batch in loader] for loader in in_turn(loaders)] == alone
        statistics = job.statistics()
        assert statistics.samples == 60
        assert statistics.from_cache == (0 if settings is NOTHING_KEPT else 30)


def test_a_state_of_no_epoch_to_come_is_refused(folder):
    with job_for(folder) as job:
        state = job.loader(4, epoch=7).state_dict()
        with pytest.raises(OrderMismatch, match="epoch 7, which is none of those to come"):
            job.epochs(4, range(3)).load_state_dict(state)
        with pytest.raises(OrderMismatch, match="seed"):
            job.epochs(4, range(8), seed=1).load_state_dict(state)
        with pytest.raises(SettingError, match="there is none"):
            job.epochs(4, range(0))


def test_an_epoch_that_comes_twice_is_refused_since_a_state_could_not_tell_which(folder):
    with job_for(folder) as job:
        with pytest.raises(SettingError, match="names epoch 0 twice"):
            job.epochs(4, [0, 1, 0])
        with pytest.raises(SettingError, match="names epoch 1 twice"):
            job.arrays(4).epochs([1, 1])
        assert len(job.epochs(4, [2, 0, 1])) == 3


def test_reports_every_epoch_once_in_order(folder):
    events = []
    with job_for(folder, on_event=events.append) as job:
        together(job.epochs(4, range(3)))
    told = [(type(event).__name__, event.epoch) for event in events if isinstance(event, EpochStarted | EpochFinished)]
    assert told == [(name, epoch) for epoch in range(3) for name in ("EpochStarted", "EpochFinished")]


class Store:
    """Sixteen samples whose feature is their epoch; it notes what is asked for, and waits where it is told to."""

    def __init__(self):
        self.asked = []
        self.arrived = threading.Condition()

    def source(self, epoch):
        settings = LoaderSettings(samples_per_request=4, requests_in_flight=2)
        return RowSource(
            fetch=lambda samples, _: self._fetch(epoch, samples),
            request_source=self,
            cache=None,
            unreadable=lambda: torch.zeros(0, dtype=torch.int64).numpy(),
            settings=settings,
            on_event=lambda event: None,
        )

    def next_request(self, left, _again=None):
        return NextRequest(route=Route(1), rows=min(4, left), bytes_per_sample=4)

    def _fetch(self, epoch, samples):
        with self.arrived:
            self.asked.append(epoch)
            self.arrived.notify_all()
        yield FeatureBatch(ids=samples.ids, tensors=(torch.full((len(samples), 1), epoch).numpy(),))

    def wait_for(self, requests):
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.asked) >= requests, timeout=200)


class Sixteen:
    digest = ""
    ids = torch.arange(16).numpy()
    samples = Samples(ids=ids, objects=[""] * 16, offsets=ids, lengths=ids, labels=ids)


def test_the_next_epoch_is_asked_for_while_one_ends_and_handed_out_only_after_it():
    store = Store()
    loader = Loader(ArrayLoader(store.source, Sixteen, order=Order(size=16, seed=0, epoch=0), batch_size=8))
    for epoch in Epochs(loader, range(4)):
        batches = iter(epoch)
        first = next(batches)
        store.wait_for(4 * min(4, epoch.epoch + 2))  # all of this epoch and of the next, and no more than that
        assert set(store.asked) <= set(range(epoch.epoch + 2))
        rows = torch.cat([first.features, *(batch.features for batch in batches)])
        assert rows.tolist() == [[epoch.epoch]] * 16
    assert Counter(store.asked) == dict.fromkeys(range(4), 4)  # nothing twice


def test_a_pass_in_turn_is_asked_for_while_the_one_before_it_ends_and_once():
    store = Store()
    orders = [Order(size=16, seed=0, epoch=number) for number in range(2)]
    passes = in_turn([Loader(ArrayLoader(store.source, Sixteen, order=order, batch_size=8)) for order in orders])
    for number, loader in enumerate(passes):
        batches = iter(loader)
        first = next(batches)
        store.wait_for(8)  # both of them whole
        rows = torch.cat([first.features, *(batch.features for batch in batches)])
        assert rows.tolist() == [[number]] * 16
    assert Counter(store.asked) == {0: 4, 1: 4}
    assert not [item for item in threading.enumerate() if item.name.startswith("frostline-prefetch")]


@pytest.mark.parametrize(("shuffle", "said"), [(True, 1), (fl.BlockShuffle(mixed=4), 1), (False, 0)])
def test_a_second_pass_in_the_order_of_the_first_is_told_once(folder, shuffle, said):
    """PyTorch's own loader would shuffle anew, and its loop would not change its epoch."""
    told = []
    with job_for(folder, on_event=told.append) as job:
        loader = job.loader(4, shuffle=shuffle)
        next(iter(loader))
        for _ in range(3):
            list(loader)
        warned = [event.reason for event in told if isinstance(event, SetupWarning)]
        assert len(warned) == said
        assert all("set_epoch" in reason for reason in warned)
        told.clear()
        meant = [batch.ids.tolist() for batch in job.loader(4, shuffle=shuffle, epoch=1)]
        for part in (loader.sampler, loader.batch_sampler):  # as loops of several processes set it
            loader.set_epoch(0)
            part.set_epoch(1)
            assert [batch.ids.tolist() for batch in loader] == meant
        for epoch in range(2):
            loader.set_epoch(epoch)
            list(job.loader(4, shuffle=shuffle, epoch=epoch))
            if epoch:
                list(loader)
        assert not [event for event in told if isinstance(event, SetupWarning)]
