"""What a job keeps: features for later epochs and jobs, and samples beside the node.

What a job keeps on disk: a later job asks for nothing again, gets the same bits, and notices what has changed.

Samples of a store away from this machine are read from it once, whatever is done to them in each epoch.

A first epoch trains on samples while later ones are extracted, in shuffled order; neither waits for all others.
"""

import os
import shutil
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.cli import main
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import SettingError
from frostline.core.events import BatchDelivered, RequestFinished
from frostline.datasets.copy.repack import repack
from frostline.models import freeze
from frostline.node import Node
from frostline.stores.cloud import DriverStore
from support import plain
from support.images import image_folder, tiny_preprocess
from support.many_nodes import job, some_nodes
from support.networks import Small
from support.nodes import request, until

COUNT = 48
BATCH = 8


@pytest.fixture
def node(shared_node):
    return shared_node


@pytest.fixture
def folder(tmp_path):
    return image_folder(tmp_path / "images", per_class=16)  # 48: whole batches of eight


def frozen():
    torch.manual_seed(1)
    return freeze(Small().train(), "stem", input_shape=(3, 32, 32))


class Run:
    """A job with a cache on disk beside its images, and what it asked for."""

    def __init__(self, folder, node, *, preprocess=None, accuracy="exact", **settings):
        self.asked = 0
        self.taken = []
        cache = str(folder.parent / "kept")
        settings = {"samples_per_request": 8, "device_batch": 8, "cache_folder": cache, **settings}
        self.job = fl.offload(
            frozen(),
            fl.Dataset(folder),
            preprocess=preprocess or tiny_preprocess(),
            near=node.url,
            accuracy=accuracy,
            settings=LoaderSettings(**settings),
            on_event=self.on_event,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.job.close()

    def on_event(self, event):
        match event:
            case RequestFinished():
                self.asked += event.samples
            case BatchDelivered():
                self.taken.append(event)
            case _:
                pass

    def epoch(self, number=0, **options):
        """All rows of an epoch, and how many were asked for."""
        before = self.asked
        batches = list(self.job.loader(BATCH, shuffle=True, seed=3, epoch=number, **options))
        return batches, self.asked - before


def same(one, other):
    return all(
        torch.equal(a.features, b.features) and torch.equal(a.labels, b.labels) and torch.equal(a.ids, b.ids)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("cache_bytes", [0, 40_000, 1 << 30], ids=["disk alone", "little memory", "memory"])
def test_a_second_job_asks_for_no_features_and_gets_the_same_bits(folder, node, cache_bytes):
    with Run(folder, node, cache_bytes=cache_bytes) as first:
        expected, asked = first.epoch()
        assert asked == COUNT
        again, asked = first.epoch()
        assert asked == 0
    with Run(folder, node, cache_bytes=cache_bytes) as second:
        found, asked = second.epoch()
        assert asked == 0
        assert second.job.statistics().from_cache == COUNT
    assert same(expected, again)
    assert same(expected, found)


@pytest.mark.parametrize(
    ("settings", "flip", "keeps"),
    [
        ({"cache_bytes": 1 << 30, "cache_folder": None}, False, True),
        ({"cache_bytes": 40_000, "cache_folder": None}, False, False),
        ({"cache_bytes": 40_000}, False, True),  # the rest is on disk
        ({"cache_bytes": 1 << 30}, True, False),
    ],
    ids=["memory", "little memory", "disk", "random views"],
)
def test_a_job_says_whether_all_features_are_kept(folder, node, settings, flip, keeps):
    with Run(folder, node, preprocess=tiny_preprocess(flip=flip), **settings) as run:
        assert run.job.keeps_features is keeps
        run.epoch(0)
        assert (run.epoch(1)[1] == 0) is keeps


@pytest.mark.parametrize("cache_bytes", [0, 40_000, 1 << 30], ids=["disk alone", "little memory", "memory"])
def test_each_batch_says_how_many_of_its_rows_came_from_a_cache(folder, node, cache_bytes):
    few = fl.Dataset(folder).take(np.arange(0, COUNT, 3))
    with Run(folder, node, cache_bytes=cache_bytes) as run:
        run.epoch(data=few)
        run.taken.clear()
        batches, asked = run.epoch(1)
        kept = set(few.samples.ids.tolist())
        found = [sum(item in kept for item in batch.ids.tolist()) for batch in batches]
        assert [event.from_cache for event in run.taken] == found
        assert [event.samples for event in run.taken] == [BATCH] * 6
        assert asked == COUNT - len(few)


def test_training_from_the_disk_has_the_losses_of_the_plain_loop(folder, node):
    with Run(folder, node) as first:
        first.epoch()
    with Run(folder, node) as second:
        torch.manual_seed(0)
        ours = plain.through(second.job, batch_size=BATCH, epochs=2)
        assert second.asked == 0
    torch.manual_seed(1)
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    data = fl.Dataset(folder)
    expected = plain.losses(model, folder, data, tiny_preprocess(), batch_size=BATCH, epochs=2)
    assert ours == expected


def test_rows_damaged_on_disk_are_asked_for_again_in_mid_epoch(folder, node):
    with Run(folder, node) as first:
        expected, _ = first.epoch()
    (file,) = (folder.parent / "kept").glob("*.sqlite")
    data = bytearray(file.read_bytes())
    for row in (3, 17, 30):
        place = data.find(expected[row // BATCH].features[row % BATCH].numpy().tobytes())
        data[place + 100] ^= 1
    file.write_bytes(data)
    with Run(folder, node) as second:
        found, asked = second.epoch()
        assert asked == 3
        assert second.job.statistics().from_cache == COUNT - 3
    with Run(folder, node) as third:
        assert third.epoch()[1] == 0
    assert same(expected, found)


def test_an_image_that_changed_is_asked_for_again_and_no_other(folder, node):
    with Run(folder, node) as first:
        first.epoch()
    changed = folder / "noise" / "003.jpg"
    changed.write_bytes((folder / "circle" / "002.jpg").read_bytes())
    os.utime(changed, ns=(1, 1))
    with Run(folder, node) as second:
        assert second.epoch()[1] == 1


@pytest.mark.parametrize(("one", "other"), [("exact", "int8"), ("float32", "exact")])
def test_jobs_that_allow_another_accuracy_keep_their_own_features(folder, node, one, other):
    with Run(folder, node, accuracy=one) as first:
        first.epoch()
    with Run(folder, node, accuracy=other) as second:
        assert second.epoch()[1] == COUNT


def test_a_number_of_views_is_computed_once_each_and_then_returns(folder, node):
    flips = tiny_preprocess(flip=True)
    with Run(folder, node, preprocess=flips, cached_augmentations=2) as first:
        epochs = [first.epoch(number) for number in range(4)]
        assert [asked for _, asked in epochs] == [COUNT, COUNT, 0, 0]
    with Run(folder, node, preprocess=flips, cached_augmentations=2) as second:
        assert second.epoch(1)[1] == 0
        assert second.epoch(6)[1] == 0
    with Run(folder, node, preprocess=flips) as fresh:
        expected = [fresh.epoch(number) for number in range(3)]
        assert [asked for _, asked in expected] == [COUNT, COUNT, COUNT]
    rows = [by_id(batches) for batches, _ in epochs]
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[1], rows[3])
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], by_id(expected[0][0]))
    assert not torch.equal(rows[2], by_id(expected[2][0]))


def by_id(batches):
    ids = torch.cat([batch.ids for batch in batches])
    return torch.cat([batch.features for batch in batches])[ids.argsort()]


def test_augmented_features_are_not_what_is_kept(folder, node):
    noise = fl.FeatureNoise(share=0.5)
    with Run(folder, node) as run:
        noisy, _ = run.epoch(augment=noise)
        again, asked = run.epoch(augment=noise)
        assert asked == 0
        pure, _ = run.epoch()
    with Run(folder, node) as run:
        assert same(run.epoch()[0], pure)
    assert same(noisy, again)
    assert not torch.equal(noisy[0].features, pure[0].features)


def test_a_cache_too_small_on_disk_is_a_sentence(folder, node):
    with pytest.raises(SettingError, match="at least"):
        Run(folder, node, cache_disk_bytes=1000)


def test_features_from_another_machine_are_kept_unless_a_setting_forbids_it(folder, node, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    kept = tmp_path / "user" / "frostline" / "features"
    with Run(folder, node, cache_folder=None) as here:
        here.epoch()
    monkeypatch.setattr(import_module("frostline.jobs.offload"), "is_loopback", lambda _: False)
    for setting in ("cache_bytes", "cache_disk_bytes"):
        with Run(folder, node, cache_folder=None, **{setting: 0}) as forbidden:
            forbidden.epoch()
    assert not kept.exists()
    with Run(folder, node, cache_folder=None) as first:
        expected, asked = first.epoch()
        assert asked == COUNT
    assert kept.stat().st_mode & 0o077 == 0
    with Run(folder, node, cache_folder=None) as second:
        found, asked = second.epoch()
    assert asked == 0
    assert same(found, expected)


def refuses_to_open(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_a_job_without_room_for_features_keeps_none_and_goes_on(folder, node, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(import_module("frostline.jobs.offload"), "is_loopback", lambda _: False)
    kept = tmp_path / "user" / "frostline" / "features"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=60 << 20))
        with Run(folder, node, cache_folder=None) as little:
            assert little.epoch()[1] == COUNT
    kept.rmdir()
    kept.write_text("no folder")
    with Run(folder, node, cache_folder=None) as none:
        assert none.epoch()[1] == COUNT
    kept.unlink()
    monkeypatch.setattr("frostline.cache.disk.sqlite3.connect", refuses_to_open)
    with Run(folder, node, cache_folder=None) as unusable:
        assert unusable.epoch()[1] == COUNT
    with pytest.raises(SettingError, match="cannot be used"):
        Run(folder, node, cache_folder=str(kept))


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
    repack(
        fl.Dataset(image_folder(tmp_path / "photos")), tmp_path / "shards", "webdataset", on_event=lambda event: None
    )
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


COUNT_OF_EXTRACTION_OVERLAPS_TRAINING = 96


@pytest.fixture(scope="module")
def folder_of_extraction_overlaps_training(tmp_path_factory):
    return image_folder(
        tmp_path_factory.mktemp("images"), per_class=COUNT_OF_EXTRACTION_OVERLAPS_TRAINING // 3, size=(40, 36)
    )


def test_while_the_first_batch_is_trained_all_others_are_extracted_in_shuffled_order(
    folder_of_extraction_overlaps_training, tmp_path
):
    with (
        some_nodes(folder_of_extraction_overlaps_training, tmp_path, 1) as ([node], urls),
        job(folder_of_extraction_overlaps_training, urls) as running,
    ):
        with closing(iter(running.loader(BATCH, shuffle=True, seed=3))) as batches:
            first = next(batches)
            until(
                lambda: node.statistics().totals.finished >= COUNT_OF_EXTRACTION_OVERLAPS_TRAINING // BATCH
            )  # and the loop takes nothing meanwhile
            found = torch.cat([first.ids, *(batch.ids for batch in batches)]).tolist()
        again = torch.cat([batch.ids for batch in running.loader(BATCH, shuffle=True, seed=3)]).tolist()
    assert found == again != sorted(found)


def test_a_slow_loop_bounds_what_is_extracted_ahead_by_its_window(folder_of_extraction_overlaps_training, tmp_path):
    narrow = {"window_bytes": 3 * BATCH * 8 * 15 * 15 * 4, "requests_in_flight": 2}
    nodes = some_nodes(folder_of_extraction_overlaps_training, tmp_path, 1)
    with nodes as ([node], urls), job(folder_of_extraction_overlaps_training, urls, **narrow) as running:
        batches = iter(running.loader(BATCH, shuffle=True, seed=3))
        next(batches)
        until(lambda: node.statistics().totals.finished >= 2)
        assert node.statistics().totals.finished < COUNT_OF_EXTRACTION_OVERLAPS_TRAINING // BATCH
        assert sum(len(batch) for batch in batches) == COUNT_OF_EXTRACTION_OVERLAPS_TRAINING - BATCH
