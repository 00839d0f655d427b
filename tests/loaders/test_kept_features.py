"""What a job keeps on disk: a later job asks for nothing again, gets the same bits, and notices what has changed."""

import os

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.errors import SettingError
from frostline.core.events import BatchDelivered, RequestFinished
from frostline.models import freeze
from support import plain
from support.images import image_folder, tiny_preprocess
from support.networks import Small

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
            observe=self.observe,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.job.close()

    def observe(self, event):
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


def test_rows_that_are_damaged_on_disk_are_asked_for_again_in_the_middle_of_the_epoch(folder, node):
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
    with Run(folder, node, preprocess=flips, views=2) as first:
        epochs = [first.epoch(number) for number in range(4)]
        assert [asked for _, asked in epochs] == [COUNT, COUNT, 0, 0]
    with Run(folder, node, preprocess=flips, views=2) as second:
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
