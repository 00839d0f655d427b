"""Encoded samples as they lie in the store, and loaders that are set apart for one pass."""

import json

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import SettingError
from frostline.datasets.copy.ready import ingest
from frostline.prefetch.requests import Slabs
from frostline.preprocess import Applied
from support.images import image_folder, tiny_preprocess
from support.networks import Small

SETTINGS = LoaderSettings(samples_per_request=8, requests_in_flight=3)
NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=6)


@pytest.fixture(scope="module")
def job(folder):
    with plain_job(folder) as job:
        yield job


def plain_job(folder, model=None):
    return fl.offload(model, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=SETTINGS, node=NODE)


def ids_of(batches):
    return [batch.ids.tolist() for batch in batches]


def test_encoded_samples_are_the_bytes_of_their_objects_in_the_order_of_the_pixels(job, folder):
    samples = job.data.samples
    objects = dict(zip(samples.ids.tolist(), samples.take(np.arange(len(samples))).objects, strict=True))
    pixels = list(job.arrays(5, shuffle=True))  # kept from here on, and not given in the encoded samples' place
    for batch, decoded in zip(job.arrays(5, shuffle=True, encoded=True), pixels, strict=True):
        assert batch.features.dtype == object
        assert batch.ids.tolist() == decoded.ids.tolist()
        assert batch.labels.tolist() == decoded.labels.tolist()
        for id, encoded in zip(batch.ids.tolist(), batch.features, strict=True):
            assert isinstance(encoded, bytes)
            assert encoded == (folder / objects[id]).read_bytes()


def test_a_run_of_encoded_samples_goes_on_in_pixels(job):
    encoded, whole = job.arrays(4, shuffle=True, encoded=True), ids_of(job.arrays(4, shuffle=True))
    batches = iter(encoded)
    first = [next(batches).ids.tolist() for _ in range(2)]
    state = json.loads(json.dumps(encoded.state_dict()))
    batches.close()
    rest = job.arrays(4, shuffle=True)
    rest.load_state_dict(state)
    assert first + ids_of(rest) == whole


def test_gives_no_encoded_column_where_there_is_none(job, folder, tmp_path):
    with pytest.raises(SettingError, match="classes of decoded pixels"):
        job.arrays(4, encoded=True, targets=True)
    ingest(fl.Dataset(folder), tmp_path / "ready", Applied.to(tiny_preprocess(), "uint8"), observe=lambda _: None)
    with plain_job(tmp_path / "ready") as ready, pytest.raises(SettingError, match="ready format"):
        ready.arrays(4, encoded=True)
    torch.manual_seed(0)
    model = fl.freeze(Small(), "body", input_shape=(3, 32, 32))
    with plain_job(folder, model) as other, pytest.raises(SettingError, match="without a model"):
        other.arrays(4, encoded=True)


def test_memory_of_batches_begins_where_a_cache_line_does_unless_it_holds_objects():
    slabs = Slabs()
    for rows in range(64, 70):
        assert slabs.empty((rows, 1001), np.dtype(np.float32)).ctypes.data % 64 == 0
    assert slabs.empty((10_000,), np.dtype(object)).tolist() == [None] * 10_000


def test_a_copied_loader_takes_the_next_pass_and_the_original_the_one_after(job):
    whole = ids_of(job.arrays(4, shuffle=True))
    state = job.arrays(4, shuffle=True).state_dict() | {"position": 8}
    loader, epochs = job.arrays(4, shuffle=True), job.arrays(4, shuffle=True).epochs([0])
    for item in (loader, epochs):
        item.load_state_dict(state)
        apart = item.set_apart()
        assert apart.state_dict() == state
        for read, wanted in ((apart, whole[2:]), (item, whole), (apart, whole)):
            passes = [read] if item is loader else read
            assert [ids for each in passes for ids in ids_of(each)] == wanted
