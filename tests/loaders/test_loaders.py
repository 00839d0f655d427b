"""Loaders: plain ones, NumPy arrays, encoded samples, and what their arguments may be.

The plain loader: what a job without a network gives, in one call, which leaves nothing behind.

Batches as NumPy arrays: those of the PyTorch loader, in the same memory, with the same states, on any path.

What a job and its loaders are given: what makes no sense is one sentence that names the knob.

Encoded samples as they lie in the store, and loaders that are set apart for one pass.
"""

import gc
import inspect
import itertools
import json
import re
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import OrderMismatch, SettingError
from frostline.datasets.copy.ready import ingest
from frostline.loaders import Arrays
from frostline.loaders.adapters.base import FrameworkIterator
from frostline.loaders.torch_loader import arrays_of, batch_of
from frostline.prefetch.requests import Slabs
from frostline.preprocess import Applied
from frostline.testing.small_jobs import BATCH, small_job
from support.images import image_folder, tiny_preprocess
from support.networks import Small


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=4)


def ids_of(loader):
    return [batch.ids.tolist() for batch in loader]


def test_gives_what_a_job_without_a_network_gives(folder):
    plain = fl.loader(folder, 3, preprocess=tiny_preprocess(), shuffle=True, seed=5, epoch=2)
    with fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess()) as job:
        expected = list(job.loader(3, shuffle=True, seed=5, epoch=2))
    found = list(plain)
    assert ids_of(found) == ids_of(expected)
    assert all(torch.equal(item.features, other.features) for item, other in zip(found, expected, strict=True))


def test_takes_a_part_of_a_data_set_and_several_epochs(folder):
    part, _ = fl.Dataset(folder).split(0.5, seed=0)
    epochs = [
        ids_of(loader) for loader in fl.loader(part, 2, preprocess=tiny_preprocess(), shuffle=True).epochs(range(3))
    ]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert all(sorted(itertools.chain(*epoch)) == sorted(part.samples.ids.tolist()) for epoch in epochs)


def test_threads_end_when_the_job_and_all_its_loaders_are_dropped(folder):
    before = set(threading.enumerate())
    loader = fl.loader(folder, 2, preprocess=tiny_preprocess())
    later = loader.in_epoch(1)
    del loader
    gc.collect()
    assert len(ids_of(later)) == 6
    del later
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before


def test_refuses_what_it_does_not_know(folder):
    with pytest.raises(TypeError, match="shufle"):
        fl.loader(folder, 2, shufle=True)
    with pytest.raises(SettingError, match="batch_size"):
        fl.loader(folder, "2")


SETTINGS = LoaderSettings(samples_per_request=8, requests_in_flight=3)
NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = image_folder(tmp_path_factory.mktemp("images"), per_class=10)
    with fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=SETTINGS, node=NODE) as job:
        yield job


def assert_alike(arrays, batch):
    assert arrays.ids.tolist() == batch.ids.tolist()
    assert arrays.labels.tolist() == batch.labels.tolist()
    assert np.array_equal(arrays.features, batch.features.numpy())
    assert len(arrays) == len(batch)


@pytest.mark.parametrize("world_size", [1, 2])
def test_arrays_are_the_batches_of_the_loader(job, world_size):
    options = {"shuffle": True, "seed": 3, "ranks": fl.Ranks(rank=world_size - 1, world_size=world_size)}
    loader, arrays = job.loader(7, **options), job.arrays(7, **options)
    assert len(arrays) == len(loader)
    for array, other in zip(arrays, loader, strict=True):
        assert_alike(array, other)
        assert isinstance(array, Arrays)
        assert array.features.flags.writeable
        assert array.features.flags.c_contiguous
        assert (array.features.dtype, array.labels.dtype, array.ids.dtype) == (np.float32, np.int64, np.int64)


def test_a_run_of_tensors_goes_on_in_arrays_and_back(job):
    whole = [batch.ids.tolist() for batch in job.loader(4, shuffle=True)]
    seen, state, make = [], None, (job.loader, job.arrays)
    for turn in range(8):
        loader = make[turn % 2](4, shuffle=True)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        seen.append(next(batches).ids.tolist())
        state = loader.state_dict()
        batches.close()
    assert seen == whole


def test_epochs_come_as_arrays_too(job):
    found = [[item.ids.tolist() for item in epoch] for epoch in job.arrays(8, shuffle=True).epochs(range(3))]
    assert found == [[item.ids.tolist() for item in epoch] for epoch in job.epochs(8, range(3), shuffle=True)]


@pytest.mark.parametrize("augment", [fl.FeatureNoise(), fl.FeatureMixup()])
def test_augmented_arrays_are_the_augmented_tensors(job, augment):
    options = {"shuffle": True, "seed": 1, "epoch": 2, "augment": augment}
    for arrays, batch in zip(job.arrays(8, **options), job.loader(8, **options), strict=True):
        assert_alike(arrays, batch)
        assert (arrays.mixed is None) == (batch.mixed is None)
        if arrays.mixed is not None:
            assert arrays.mixed.labels.tolist() == batch.mixed.labels.tolist()
            assert arrays.mixed.weights.tolist() == batch.mixed.weights.tolist()


def test_arrays_become_tensors_and_back_without_a_copy():
    ids = np.arange(3)
    one = Arrays(features=(np.ones((3, 2), np.float16), np.zeros((3, 4), np.int32)), labels=ids, ids=ids)
    batch = batch_of(one)
    assert [tensor.dtype for tensor in batch.features] == [torch.float16, torch.int32]
    batch.features[0][1, 1] = 9
    assert one.features[0][1, 1] == 9
    back = arrays_of(batch)
    assert all(np.shares_memory(*pair) for pair in zip(back.features, one.features, strict=True))


@pytest.fixture(scope="module")
def job_of_arguments(tmp_path_factory):
    with small_job(tmp_path_factory.mktemp("images")) as job:
        yield job


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": "8"}, "batch_size takes a whole number, not '8'"),
        ({"batch_size": 2.5}, "batch_size takes a whole number, not 2.5"),
        ({"seed": "x"}, "seed takes a whole number, not 'x'"),
        ({"epoch": None}, "epoch takes a whole number, not NoneType"),
        ({"shuffle": "yes"}, "shuffle takes True or False or BlockShuffle, not 'yes'"),
        ({"replay": 1}, "replay takes RecordedOrder or None, not 1"),
        ({"ranks": (0, 2)}, "ranks takes Ranks or None, not tuple"),
        ({"data": "photos"}, "data takes Dataset or Mixture or None, not 'photos'"),
        ({"weights": {"odd": 1.0}, "shuffle": True}, "leave out shuffle"),
    ],
)
@pytest.mark.parametrize("kind", ["loader", "arrays"])
def test_an_option_of_another_type_is_refused_by_its_name(job_of_arguments, kind, options, said):
    with pytest.raises(SettingError, match=said):
        getattr(job_of_arguments, kind)(**{"batch_size": BATCH, **options})


@pytest.mark.parametrize("kind", ["loader", "arrays", "epochs"])
def test_an_unknown_option_is_refused_in_the_name_of_the_called_method(job_of_arguments, kind):
    given = (BATCH, range(2)) if kind == "epochs" else (BATCH,)
    with pytest.raises(TypeError, match=rf"^Job\.{kind}\(\) got an unexpected keyword argument 'shufle'"):
        getattr(job_of_arguments, kind)(*given, shufle=True)


def test_arrays_take_what_loaders_take_and_say_what_an_option_is_called(job_of_arguments):
    with pytest.raises(TypeError, match="did you mean shuffle"):
        job_of_arguments.arrays(BATCH, shufle=True)
    with pytest.raises(TypeError, match="'change'"):
        job_of_arguments.arrays(BATCH, change=None)
    defaults = {
        parameter.name: parameter.default
        for parameter in inspect.signature(job_of_arguments.loader).parameters.values()
    }
    defaults.pop("batch_size")
    assert len(job_of_arguments.arrays(BATCH, **defaults)) == len(job_of_arguments.loader(BATCH))


def test_help_shows_the_options_of_an_epoch_by_name(job_of_arguments):
    for function in (job_of_arguments.loader, job_of_arguments.arrays, job_of_arguments.epochs, fl.loader):
        assert list(inspect.signature(function).parameters)[-3:] == ["targets", "record", "replay"]


def test_numbers_of_numpy_are_taken_and_states_hold_pythons(job_of_arguments):
    loader = job_of_arguments.loader(np.int64(BATCH), seed=np.int32(3), epoch=np.int64(1), shuffle=True)
    assert (
        json.loads(json.dumps(loader.state_dict()))
        == job_of_arguments.loader(BATCH, seed=3, epoch=1, shuffle=True).state_dict()
    )


@pytest.mark.parametrize("epochs", [3, "012", None, [0, 1.5]])
def test_epochs_that_are_no_numbers_are_refused(job_of_arguments, epochs):
    for make in (lambda: job_of_arguments.epochs(BATCH, epochs), lambda: job_of_arguments.arrays(BATCH).epochs(epochs)):
        with pytest.raises(SettingError, match=r"epochs (names .* such as range\(10\)|takes a whole number, not 1\.5)"):
            make()


@pytest.mark.parametrize("state", [None, 3, [], "state"])
def test_refuses_an_invalid_state(job_of_arguments, state):
    for loader in (
        job_of_arguments.loader(BATCH),
        job_of_arguments.arrays(BATCH),
        job_of_arguments.epochs(BATCH, range(2)),
    ):
        with pytest.raises(OrderMismatch, match="no state of a loader"):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"settings": {}}, "settings takes LoaderSettings or None, not dict"),
        ({"node": 3}, "node takes NodeSettings or None, not 3"),
        ({"preprocess": 224}, "preprocess takes steps, not 224: write frostline.preprocess.imagenet"),
        ({"data": 3}, "data takes a Dataset, a path or a URL, not 3"),
    ],
)
def test_a_job_of_something_else_is_refused(job_of_arguments, options, said):
    with pytest.raises(SettingError, match=said):
        fl.offload(None, **{"data": job_of_arguments.data, "settings": LoaderSettings(), **options})


@pytest.mark.parametrize(
    ("ratios", "ends", "said"),
    [([0, 3], "first", "above 0, not 0, 3"), ([1], "first", "needs as many ratios"), ([1, 1], "soon", "soon")],
)
def test_refuses_an_invalid_mixture_when_it_is_made(job_of_arguments, ratios, ends, said):
    with pytest.raises(SettingError, match=said):
        fl.Mixture(parts=job_of_arguments.data.split(0.5), ratios=ratios, ends=ends)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_dataloader_that_would_batch_again_says_what_to_give(job_of_arguments, batch_size):
    with pytest.raises(SettingError, match="give DataLoader batch_size=None"):
        next(iter(DataLoader(job_of_arguments.loader(BATCH), batch_size=batch_size)))


@pytest.mark.parametrize("make", [lambda job: job.loader(BATCH), lambda job: job.epochs(BATCH, range(2)), lambda _: 3])
def test_a_frameworks_loader_of_tensors_says_what_to_give(job_of_arguments, make):
    with pytest.raises(SettingError, match=re.escape("loader takes what job.arrays(...) gives")):
        FrameworkIterator(make(job_of_arguments), ("features",))


@pytest.fixture(scope="module")
def folder_of_encoded(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=6)


@pytest.fixture(scope="module")
def job_of_encoded(folder_of_encoded):
    with plain_job(folder_of_encoded) as job:
        yield job


def plain_job(folder, model=None):
    return fl.offload(model, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=SETTINGS, node=NODE)


def ids_of_encoded(batches):
    return [batch.ids.tolist() for batch in batches]


def test_encoded_samples_are_the_bytes_of_their_objects_in_the_order_of_the_pixels(job_of_encoded, folder_of_encoded):
    samples = job_of_encoded.data.samples
    objects = dict(zip(samples.ids.tolist(), samples.take(np.arange(len(samples))).objects, strict=True))
    pixels = list(
        job_of_encoded.arrays(5, shuffle=True)
    )  # kept from here on, and not given in the encoded samples' place
    for batch, decoded in zip(job_of_encoded.arrays(5, shuffle=True, encoded=True), pixels, strict=True):
        assert batch.features.dtype == object
        assert batch.ids.tolist() == decoded.ids.tolist()
        assert batch.labels.tolist() == decoded.labels.tolist()
        for id, encoded in zip(batch.ids.tolist(), batch.features, strict=True):
            assert isinstance(encoded, bytes)
            assert encoded == (folder_of_encoded / objects[id]).read_bytes()


def test_a_run_of_encoded_samples_goes_on_in_pixels(job_of_encoded):
    encoded, whole = (
        job_of_encoded.arrays(4, shuffle=True, encoded=True),
        ids_of_encoded(job_of_encoded.arrays(4, shuffle=True)),
    )
    batches = iter(encoded)
    first = [next(batches).ids.tolist() for _ in range(2)]
    state = json.loads(json.dumps(encoded.state_dict()))
    batches.close()
    rest = job_of_encoded.arrays(4, shuffle=True)
    rest.load_state_dict(state)
    assert first + ids_of_encoded(rest) == whole


def test_gives_no_encoded_column_where_there_is_none(job_of_encoded, folder_of_encoded, tmp_path):
    with pytest.raises(SettingError, match="classes of decoded pixels"):
        job_of_encoded.arrays(4, encoded=True, targets=True)
    ingest(
        fl.Dataset(folder_of_encoded),
        tmp_path / "ready",
        Applied.to(tiny_preprocess(), "uint8"),
        on_event=lambda _: None,
    )
    with plain_job(tmp_path / "ready") as ready, pytest.raises(SettingError, match="ready format"):
        ready.arrays(4, encoded=True)
    torch.manual_seed(0)
    model = fl.freeze(Small(), "body", input_shape=(3, 32, 32))
    with plain_job(folder_of_encoded, model) as other, pytest.raises(SettingError, match="without a model"):
        other.arrays(4, encoded=True)


def test_memory_of_batches_begins_where_a_cache_line_does_unless_it_holds_objects():
    slabs = Slabs()
    for rows in range(64, 70):
        assert slabs.empty((rows, 1001), np.dtype(np.float32)).ctypes.data % 64 == 0
    assert slabs.empty((10_000,), np.dtype(object)).tolist() == [None] * 10_000


def test_a_copied_loader_takes_the_next_pass_and_the_original_the_one_after(job_of_encoded):
    whole = ids_of_encoded(job_of_encoded.arrays(4, shuffle=True))
    state = job_of_encoded.arrays(4, shuffle=True).state_dict() | {"position": 8}
    loader, epochs = job_of_encoded.arrays(4, shuffle=True), job_of_encoded.arrays(4, shuffle=True).epochs([0])
    for item in (loader, epochs):
        item.load_state_dict(state)
        apart = item.set_apart()
        assert apart.state_dict() == state
        for read, wanted in ((apart, whole[2:]), (item, whole), (apart, whole)):
            passes = [read] if item is loader else read
            assert [ids for each in passes for ids in ids_of_encoded(each)] == wanted
