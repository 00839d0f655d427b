"""Batches as NumPy arrays: those of the PyTorch loader, in the same memory, with the same states, on any path."""

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.loaders import Arrays
from frostline.loaders.torch_loader import arrays_of, batch_of
from support.images import image_folder, tiny_preprocess

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
