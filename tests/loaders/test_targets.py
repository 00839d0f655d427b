"""Segmentation through a job: the masks of a batch belong to its features, whatever way those took."""

import copy
import uuid

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import SettingError, TooManySkipped
from frostline.datasets.copy.repack import repack
from frostline.node import Node
from frostline.node.process import start_node
from support import masks
from support.cassandra import KEYSPACE, PASSWORD, USER
from support.images import tiny_preprocess
from support.nodes import served

NODE = NodeSettings(memory_bytes=1 << 30)


@pytest.fixture(scope="module")
def folder(photographs, tmp_path_factory):
    return masks.photographs_with_masks(photographs, tmp_path_factory.mktemp("segmentation") / "data")


@pytest.fixture(scope="module")
def segmenter():
    torch.manual_seed(2)
    return fl.freeze(masks.Segmenter().train(), "backbone", input_shape=(3, masks.SIDE, masks.SIDE))


def trained(model, url, preprocess, near=None, epochs=2, settings=None):
    with fl.offload(copy.deepcopy(model), fl.Dataset(url), preprocess=preprocess, near=near, settings=settings) as job:
        return masks.through(job, epochs=epochs)


@pytest.mark.parametrize("preprocess", [masks.MIDDLE, masks.RANDOM], ids=["middle", "random"])
def test_a_decoder_learns_through_a_node_what_it_learns_from_files(folder, segmenter, preprocess, shared_node):
    data = fl.Dataset(folder)
    twin = copy.deepcopy(segmenter)
    ours = trained(segmenter, folder, preprocess, shared_node.url)
    plain = masks.losses(twin, folder, data, preprocess, epochs=2)
    assert len(ours) == 6
    assert ours == plain
    assert plain[-1] < plain[0]


def test_the_losses_from_s3_are_those_from_a_folder(folder, segmenter, s3, monkeypatch):
    s3.put_folder(folder, "segmentation")
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    assert trained(segmenter, "s3://segmentation", masks.RANDOM) == trained(segmenter, folder, masks.RANDOM)


def test_the_losses_from_a_table_whose_labels_are_masks_are_those_from_a_folder(folder, segmenter, cql, monkeypatch):
    monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
    table = f"{KEYSPACE}.segmentation"
    with cql.session() as session:
        session.execute(f"CREATE TABLE {table} (id uuid PRIMARY KEY, name text, label blob, data blob)")
        put = f"INSERT INTO {table} (id, name, label, data) VALUES (%s, %s, %s, %s)"
        for image in sorted((folder / "images").iterdir()):
            (mask,) = (folder / "masks").glob(f"{image.stem}.*")
            session.execute(put, (uuid.uuid4(), f"images/{image.name}", mask.read_bytes(), image.read_bytes()))
    url = f"cql://{USER}@{cql.place}/{KEYSPACE}/segmentation?protocol=3"
    data = fl.Dataset(url)
    with start_node((data.url,), NODE) as node:
        ours = trained(segmenter, url, masks.RANDOM, node.url)
    assert ours == trained(segmenter, folder, masks.RANDOM)


@pytest.fixture
def small(tmp_path):
    """Twelve small grey pictures, of which number n has the mask n everywhere."""
    folder = tmp_path / "data"
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for number in range(12):
        np.save(folder / "images" / f"{number:02}.npy", np.full((40, 40), 20 * number, np.uint8))
        np.save(folder / "masks" / f"{number:02}.npy", np.full((40, 40), number, np.uint16))
    return folder


def of(batches):
    """Which masks came, one number a sample; each must be one number."""
    found = [batch.targets.flatten(1) for batch in batches]
    assert all((item == item[:, :1]).all() for item in found)
    return [item[:, 0].tolist() for item in found]


def settings_for(folder, **changes):
    return LoaderSettings(samples_per_request=4, device_batch=8, **changes)


def loading(folder, **changes):
    return fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=settings_for(folder, **changes))


def test_a_plain_loader_gives_masks_beside_pixels(small):
    with loading(small) as job:
        (batch, *_) = job.loader(5)
        assert batch.targets.shape == (5, 32, 32)
        assert batch.targets.dtype == torch.int64
        assert batch.to("cpu").targets.equal(batch.targets)
        assert of(job.loader(5)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
        order = of(job.loader(12, shuffle=True, seed=1))[0]
        assert sorted(order) == list(range(12))
        assert order != sorted(order)


@pytest.mark.parametrize("format", ["original", "webdataset", "parquet"])
def test_masks_belong_to_their_images_in_every_format(small, tmp_path, format):
    repack(fl.Dataset(small), tmp_path / "copy", format, part_bytes=1 << 14, observe=print)
    with loading(tmp_path / "copy") as job:
        for batch in job.loader(5, shuffle=True, seed=2):
            brightness = 64 * batch.features.flatten(1).mean(1) + 127
            assert torch.allclose(brightness / 20, batch.targets[:, 0, 0].float(), atol=0.1)


def test_a_part_of_the_data_has_its_own_masks(small):
    with loading(small) as job:
        part = fl.Dataset(small).take(np.array([7, 3, 5]))
        assert of(job.loader(2, data=part)) == [[7, 3], [5]]


def test_masks_are_optional(small):
    with loading(small) as job:
        assert all(batch.targets is None for batch in job.loader(5, targets=False))
        with pytest.raises(SettingError, match="FeatureMixup"):
            next(iter(job.loader(5, augment=fl.FeatureMixup())))
        assert all(batch.mixed for batch in job.loader(5, targets=False, augment=fl.FeatureMixup()))


def test_samples_without_masks_have_no_targets(tmp_path):
    (tmp_path / "cat").mkdir()
    np.save(tmp_path / "cat" / "1.npy", np.zeros((40, 40), np.uint8))
    with loading(tmp_path) as job:
        assert next(iter(job.loader(1))).targets is None
        with pytest.raises(SettingError, match="has no masks"):
            job.loader(1, targets=True)


def test_cached_features_keep_their_masks_and_notice_a_changed_one(small, tmp_path):
    kept = {"cache_folder": str(tmp_path / "kept")}
    with loading(small, **kept) as job:
        first = of(job.loader(5, shuffle=True, seed=3))
        assert of(job.loader(5, shuffle=True, seed=3)) == first
        statistics = job.statistics()
        assert statistics.from_cache == 12
    with loading(small, **kept) as job:
        assert of(job.loader(12)) == [list(range(12))]
        assert job.statistics().from_cache == 12
    np.save(small / "masks" / "04.npy", np.full((40, 40), 44, np.uint16))
    with loading(small, **kept) as job:
        assert of(job.loader(12)) == [[0, 1, 2, 3, 44, *range(5, 12)]]
        assert job.statistics().from_cache == 11
        assert all(batch.targets is None for batch in job.loader(5, targets=False))


REASONS = {
    "the mask has 20 x 40 pixels and its image 40 x 40": np.zeros((40, 20), np.uint8),
    "is no mask: one is [H, W] of whole numbers": np.zeros((40, 40, 3), np.uint8),
    "it has no mask": None,
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("over", ["process", "http"])
def test_a_sample_without_a_good_mask_is_left_out_and_named(small, reason, over):
    place = small / "masks" / "05.npy"
    place.unlink()
    if REASONS[reason] is not None:
        np.save(place, REASONS[reason])
    with Node(NodeSettings(device_batch=8), (small.as_uri(),)) as node, served(node) as url:
        near = url if over == "http" else None
        settings = settings_for(small, skip_allowance=0.1)
        data = fl.Dataset(small)
        with fl.offload(None, data, preprocess=tiny_preprocess(), near=near, settings=settings) as job:
            for _ in range(2):
                assert of(job.loader(4)) == [[0, 1, 2, 3], [4, 6, 7, 8], [9, 10, 11]]
            (skipped,) = job.statistics().skipped
            assert reason in skipped.reason
            assert skipped.object.endswith("05.npy")
        with loading(small, skip_allowance=0.0) as job, pytest.raises(TooManySkipped, match=r"05\.npy"):
            list(job.loader(4))


def test_a_mask_that_changes_behind_a_job_is_left_out(small):
    with loading(small) as job:
        np.save(small / "masks" / "05.npy", np.full((40, 40), 9, np.uint16))
        assert of(job.loader(12)) == [[0, 1, 2, 3, 4, *range(6, 12)]]
        (skipped,) = job.statistics().skipped
        assert skipped.object == "masks/05.npy"
        assert "changed" in skipped.reason


def test_leaving_an_epoch_early_leaves_nothing_behind(small):
    with loading(small) as job:
        for _ in range(3):
            next(iter(job.loader(2)))
        assert of(job.loader(12)) == [list(range(12))]
