"""Data sets of the Hugging Face hub: its client's cache is read in place, and no part of it for the whole."""

import os
import sys

import pytest

import datasets
import frostline as fl
from frostline.core.errors import DataNotFound, SettingError
from frostline.datasets.source import missing_parts
from support.images import image_folder, tiny_preprocess

REVISION = "a" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub's client, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached(cache, name, files):
    """What the client leaves behind: blobs, and a snapshot of links to them."""
    root = cache / f"datasets--{name.replace('/', '--')}"
    for folder in ("refs", "blobs"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(REVISION)
    for number, (file, write) in enumerate(files.items()):
        write(root / "blobs" / str(number))
        link = root / "snapshots" / REVISION / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(root / "blobs" / str(number), link.parent))


def photographs(folder):
    """A data set of images as the hub has it, with the names of its classes."""
    image_folder(folder, per_class=4)
    paths = sorted(folder.rglob("*.jpg"))
    names = sorted({path.parent.name for path in paths}, reverse=True)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    labels = [names.index(path.parent.name) for path in paths]
    return datasets.Dataset.from_dict({"image": rows, "label": labels}, features=features)


def test_the_cache_of_the_hub_is_read_in_place_with_its_splits_and_classes(tmp_path, cache):
    whole = photographs(tmp_path / "photos")
    files = {
        "data/train-00000-of-00002.parquet": lambda path: whole.select(range(5)).to_parquet(path),
        "data/train-00001-of-00002.parquet": lambda path: whole.select(range(5, 8)).to_parquet(path),
        "data/test-00000-of-00001.parquet": lambda path: whole.select(range(8, 12)).to_parquet(path),
        "README.md": lambda path: path.write_text("# Photographs"),
    }
    cached(cache, "some/photos", files)
    data = fl.Dataset("hf:some/photos")
    assert data.url.endswith(f"datasets--some--photos/snapshots/{REVISION}")
    assert {name: len(data[name]) for name in data.splits} == {"train": 8, "test": 4}
    assert data.classes == tuple(whole.features["label"].names)
    assert sorted(data.samples.labels.tolist()) == sorted(whole["label"][:])
    assert fl.Dataset(f"hf:some/photos@{REVISION}").url == data.url
    with fl.offload(None, data["train"], preprocess=tiny_preprocess()) as job:
        assert sum(len(batch.labels) for batch in job.loader(batch_size=3)) == 8


def test_names_the_files_to_bring_where_weights_cannot_be_fetched(cache):
    with pytest.raises(DataNotFound, match="some/photos is not in"):
        fl.Dataset("hf:some/photos", near=())
    with pytest.raises(DataNotFound, match=r"some/photos is not in .* cache .* Parquet files .*hf download") as caught:
        fl.Dataset("hf:some/photos")
    assert "\n" not in str(caught.value)


def test_a_split_of_which_a_part_is_missing_is_not_taken_for_the_whole(tmp_path, cache):
    whole = photographs(tmp_path / "photos")
    cached(cache, "some/photos", {"data/train-00001-of-00002.parquet": whole.to_parquet})
    with pytest.raises(DataNotFound, match=r"lacks data/train-00000-of-00002\.parquet"):
        fl.Dataset("hf:some/photos")


def test_a_data_set_without_parquet_files_is_refused(cache):
    cached(cache, "some/text", {"README.md": lambda path: path.write_text("x")})
    with pytest.raises(DataNotFound, match="has no Parquet files"):
        fl.Dataset("hf:some/text")


def test_parts_that_are_missing_are_named():
    assert missing_parts(["a.parquet", "train-00000-of-00001-0123456789abcdef.parquet"]) == []
    assert missing_parts(["d/t-00001-of-00003.parquet", "e/t-00000-of-00001.parquet"]) == [
        "d/t-00000-of-00003.parquet",
        "d/t-00002-of-00003.parquet",
    ]


@pytest.mark.parametrize("url", ["hf:", "hf:photos", "hf:a/b/c", "hf:a/../b", "hf:a/b@", "hf:a/b?x", "hf:a/b--c"])
def test_other_addresses_of_the_hub_are_refused(cache, url):
    with pytest.raises(SettingError, match="write hf:OWNER/DATASET"):
        fl.Dataset(url)


def test_a_node_is_not_asked_for_this_machines_cache():
    with pytest.raises(SettingError, match="leave near= out"):
        fl.Dataset("hf:some/photos", near="http://store:7070")


def test_reports_a_missing_hub_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SettingError, match="huggingface_hub"):
        fl.Dataset("hf:some/photos")
