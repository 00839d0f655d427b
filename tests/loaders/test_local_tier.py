"""Samples of a store away from this machine are read from it once, whatever is done to them in each epoch."""

import shutil
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

import frostline as fl
from frostline.cli import main
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.datasets.copy.repack import repack
from frostline.node import Node
from frostline.stores.cloud import DriverStore
from support.images import image_folder, tiny_preprocess
from support.nodes import request


@pytest.fixture
def bucket(s3, tmp_path, monkeypatch):
    """Puts folders into buckets of a store, and gives their URLs."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def put(folder):
        name = f"tier-{abs(hash(str(tmp_path)))}-{folder.name}"
        s3.put_folder(folder, name)
        return f"s3://{name}"

    return put


def epochs(url, count, *, node=None, relist=True, **loading):
    """Features of each epoch in the order of ids, and the bytes read from the store by its end."""
    # On a busy machine a read would else be made a second time.
    node = replace(node or NodeSettings(memory_bytes=1 << 28), hedge_quantile=1.0)
    settings = LoaderSettings(samples_per_request=4, hedge_quantile=1.0)
    data, preprocess = fl.Dataset(url, relist=relist), tiny_preprocess(flip=True)
    with fl.offload(None, data, preprocess=preprocess, node=node, settings=settings) as job:
        found, read = [], []
        for epoch in range(count):
            batches = list(job.arrays(4, **{"shuffle": True, "seed": 1, "epoch": epoch, **loading}))
            ids = np.concatenate([batch.ids for batch in batches])
            rows = np.concatenate([np.asarray(batch.features) for batch in batches])
            found.append(rows[np.argsort(ids)])
            read.append(job.statistics().wire_bytes)
    return found, read


@pytest.fixture
def store_reads(monkeypatch):
    """Names of the objects that stores were asked for, also by whoever reads ahead."""
    read, names = DriverStore.read_version, []

    def counted(store, object, offset, length):
        names.append(object)
        return read(store, object, offset, length)

    monkeypatch.setattr(DriverStore, "read_version", counted)
    return names


def test_with_random_augmentation_a_second_epoch_reads_nothing_of_the_store(bucket, store_reads, tmp_path):
    folder = image_folder(tmp_path / "photos")
    url = bucket(folder)
    found, read = epochs(url, 3)
    assert sum(name.endswith(".jpg") for name in store_reads) == len(fl.Dataset(url))
    assert read[0] >= fl.Dataset(url).samples.encoded_bytes
    assert read[1:] == [read[0]] * 2
    local, _ = epochs(str(folder), 3)
    assert all(map(np.array_equal, found, local))
    assert not np.array_equal(found[0], found[1]), "another view each epoch"
    again, read = epochs(url, 1)  # another job
    assert (np.array_equal(again[0], found[0]), read) == (True, [0])


def test_shards_are_read_once_also_in_blocks(bucket, store_reads, tmp_path):
    repack(fl.Dataset(image_folder(tmp_path / "photos")), tmp_path / "shards", "webdataset", observe=lambda event: None)
    url = bucket(tmp_path / "shards")
    _, read = epochs(url, 2, shuffle=fl.BlockShuffle(samples=4, mixed=2))
    assert read[0] > 0
    assert read[1] == read[0]
    after_one = store_reads[:]
    _, read = epochs(url, 2, shuffle=fl.BlockShuffle(samples=4, mixed=2))
    assert read == [0, 0]
    assert [read for read in store_reads[len(after_one) :] if read.endswith(".tar")] == []


def test_none_is_kept_where_that_is_asked_for_and_none_of_local_folders(bucket, tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=4)
    url = bucket(folder)
    _, read = epochs(url, 2, node=NodeSettings(memory_bytes=1 << 28, local_tier_bytes=0))
    assert read[1] >= 2 * fl.Dataset(url).samples.encoded_bytes
    epochs(str(folder), 1)
    assert not (tmp_path / "cache" / "frostline" / "samples").exists()


def test_an_object_that_changed_is_read_anew(bucket, tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=4)
    url = bucket(folder)
    before, _ = epochs(url, 1)
    shutil.copyfile(folder / "noise" / "000.jpg", folder / "circle" / "000.jpg")
    bucket(folder)
    after, read = epochs(url, 1)
    assert read[0] > 0
    assert sum(not np.array_equal(item, other) for item, other in zip(before[0], after[0], strict=True)) == 1


def test_serves_local_copies_as_they_were_listed(bucket, tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=4)
    url = bucket(folder)
    before, _ = epochs(url, 1)
    shutil.copyfile(folder / "noise" / "000.jpg", folder / "circle" / "000.jpg")
    bucket(folder)
    after, read = epochs(url, 1, relist=False)
    assert (np.array_equal(before[0], after[0]), read) == (True, [0])


def test_a_named_folder_and_size_reach_the_node_by_the_command_line(bucket, tmp_path):
    url = bucket(image_folder(tmp_path / "photos", per_class=4))
    here = tmp_path / "here"
    how = ("--data", url, "--model", "support.networks:Small", "--until", "stem", "--epochs", "1", "--trials", "0")
    for size in ("0", "1GiB"):
        with pytest.raises(SystemExit) as ended:
            main(["train", *how, "--augment", "--local-tier", str(here), "--local-tier-size", size])
        assert not ended.value.code
        assert here.exists() == (size != "0")
    assert len(list(here.iterdir())) == 12


def test_a_node_says_what_its_tier_did(bucket, tmp_path):
    url = bucket(image_folder(tmp_path / "photos", per_class=4))
    samples = fl.Dataset(url).samples.take(np.arange(12))
    with Node(NodeSettings(memory_bytes=1 << 28), (url,)) as node:
        assert node.statistics().local_tier is None
        for _ in range(2):
            with closing(node.features(request(tmp_path, 1, samples=samples, data=url))) as answer:
                assert sum(len(batch) for batch in answer) == 12
        found = node.statistics()
    assert (found.local_tier.kept, found.local_tier.hits, found.totals.tier_hits) == (12, 12, 12)
    assert found.totals.bytes_read == samples.lengths.sum()
