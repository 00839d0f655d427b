"""The plain loader: what a job without a network gives, in one call, which leaves nothing behind."""

import gc
import itertools
import threading

import pytest
import torch

import frostline as fl
from frostline.core.errors import SettingError
from support.images import image_folder, tiny_preprocess


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


def test_ends_its_threads_when_it_is_dropped_and_not_while_a_loader_made_from_it_lives(folder):
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
