"""Jobs over several nodes: each node keeps its own part, and order, values, states and failures are those of one."""

import numpy as np
import pytest

import frostline as fl
from frostline.core.config import LoaderSettings
from support.images import image_folder, tiny_preprocess
from support.many_nodes import epoch, hits, job, same, some_nodes

PER_CLASS = 128
COUNT = 3 * PER_CLASS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=PER_CLASS, size=(40, 36))


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Two epochs with one node."""
    with some_nodes(folder, tmp_path_factory.mktemp("kept"), 1) as (nodes, urls), job(folder, urls) as running:
        found = [epoch(running, number) for number in (0, 1)]
        assert hits(nodes) == COUNT
        return found


@pytest.mark.parametrize("count", [2, 3])
def test_a_second_epoch_on_several_nodes_hits_as_on_one_with_the_same_batches(folder, alone, tmp_path, count):
    with some_nodes(folder, tmp_path, count) as (nodes, urls), job(folder, urls) as running:
        assert same(epoch(running, 0), alone[0])
        assert hits(nodes) == 0
        assert same(epoch(running, 1), alone[1])
        assert hits(nodes) == COUNT
        each = [node.statistics().totals.samples / 2 for node in nodes]
        assert max(each) <= 1.6 * COUNT / count  # 24 blocks of 16 rows divide roughly


def test_another_job_and_a_part_of_the_data_find_what_the_first_job_left(folder, tmp_path):
    with some_nodes(folder, tmp_path, 3) as (nodes, urls):
        with job(folder, urls) as first:
            epoch(first, 0)
        before = hits(nodes)
        part, _ = fl.Dataset(folder).split(0.5, seed=1)
        with job(folder, urls[::-1], part) as second:
            taken = sum(len(batch) for batch in epoch(second, 5))
        assert hits(nodes) - before == taken == len(part)


def test_a_run_goes_on_from_a_state_where_it_was(folder, alone, tmp_path):
    with some_nodes(folder, tmp_path, 2) as (_, urls), job(folder, urls) as running:
        loader = running.loader(16, shuffle=True, seed=3, epoch=0)
        taken = []
        for batch in loader:
            taken.append(batch)
            if len(taken) == 5:
                break
        state = loader.state_dict()
        again = running.loader(16, shuffle=True, seed=3, epoch=0)
        again.load_state_dict(state)
        assert same([*taken, *again], alone[0])


def test_epochs_that_run_into_each_other_keep_their_order(folder, alone, tmp_path):
    with some_nodes(folder, tmp_path, 2) as (_, urls), job(folder, urls) as running:
        found = [list(loader) for loader in running.epochs(16, range(2), shuffle=True, seed=3)]
    assert all(map(same, found, alone))


def test_samples_that_cannot_be_read_are_skipped_and_the_order_stays(tmp_path):
    images = image_folder(tmp_path / "images", per_class=40, size=(40, 36))
    for name in ("circle/003.jpg", "noise/017.jpg", "stripe/039.jpg"):
        (images / name).write_bytes(b"no image")
    found = []
    for count in (1, 3):
        nodes = some_nodes(images, tmp_path / f"kept-{count}", count)
        with nodes as (_, urls), job(images, urls, skip_allowance=0.1) as running:
            found.append(epoch(running, 0))
    assert same(*found)
    assert sum(map(len, found[0])) == 117


def test_plain_and_encoded_samples_come_in_order_too(folder, tmp_path):
    settings = LoaderSettings(samples_per_request=8, cache_bytes=0)
    found = []
    for count in (1, 3):
        with (
            some_nodes(folder, tmp_path / str(count), count) as (_, urls),
            fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), near=urls, settings=settings) as run,
        ):
            pixels = list(run.arrays(32, shuffle=True, seed=2))
            encoded = list(run.arrays(32, shuffle=True, seed=2, encoded=True))
        found.append((pixels, encoded))
    for one_node, several in zip(*found, strict=True):
        for expected, batch in zip(one_node, several, strict=True):
            assert np.array_equal(batch.ids, expected.ids)
            assert batch.features.tolist() == expected.features.tolist()
