"""Where a job without a network decodes: here, unless it is told that the node shall."""

import pytest
import torch

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import SettingError
from support.images import image_folder, tiny_preprocess

NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)
SETTINGS = LoaderSettings(samples_per_request=8, cache_bytes=0, skip_allowance=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = image_folder(tmp_path_factory.mktemp("images"), per_class=10)
    next(folder.glob("*/*")).write_bytes(b"no image")
    return folder


def job_for(folder, **options):
    return fl.offload(
        None, fl.Dataset(folder), preprocess=tiny_preprocess(flip=True), settings=SETTINGS, node=NODE, **options
    )


def taken(job):
    batches = list(job.loader(4, shuffle=True, seed=2, epoch=3))
    return torch.cat([batch.ids for batch in batches]), torch.cat([batch.features for batch in batches])


def test_decoding_at_the_node_equals_decoding_in_this_process(folder):
    with job_for(folder, cut=1) as job, job_for(folder) as other:
        assert ("decoding", "node in this process") in job.where
        assert ("decoding", "trainer") in other.where
        for found, expected in zip(taken(job), taken(other), strict=True):
            assert torch.equal(found, expected)
        assert job.statistics().skipped == other.statistics().skipped != ()
        assert job.stages()["trainer: decode"] == 0
        assert other.stages()["trainer: decode"] > 0


def test_a_node_elsewhere_sends_samples_as_they_are_stored(folder, shared_node):
    with job_for(folder, near=shared_node.url) as job:
        assert ("decoding", "trainer") in job.where
        assert len(taken(job)[0]) == 29


def test_refuses_an_unknown_cut_and_names_the_known_ones(folder):
    with pytest.raises(SettingError, match="has cuts 0 to 1"):
        job_for(folder, cut=2)
