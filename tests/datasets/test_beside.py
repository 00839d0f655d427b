"""Where manifests and splits are kept: in the user's cache folder of local folders, beside the data of stores."""

import shutil
import uuid

import pytest

from frostline.datasets import Dataset
from frostline.stores.open import open_store
from support.images import image_folder


@pytest.fixture
def folder(tmp_path):
    return image_folder(tmp_path / "photos", per_class=2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "frostline"


def test_leaves_a_local_folder_unchanged(folder, cache):
    before = sorted(folder.rglob("*"))
    data = Dataset(folder)
    place = data.save_splits(data.split({"train": 0.5, "val": 0.5}))
    again = Dataset(folder)
    assert again.manifest.found
    assert (again.splits, again["val"].digest) == (("train", "val"), data["val"].digest)
    assert Dataset(folder, relist=False).digest == data.digest
    assert sorted(folder.rglob("*")) == before
    assert place.startswith(cache.as_uri())
    assert data.manifest.place.startswith(cache.as_uri())


def test_lists_the_classes_of_a_folder(folder, cache):
    from torchvision.datasets import ImageFolder

    data = Dataset(folder)
    assert ImageFolder(str(folder)).classes == list(data.classes)


def test_a_local_folder_has_them_beside_it_where_that_is_asked_for(folder, cache):
    _ = Dataset(folder).manifest  # in the cache folder, which others do not have
    data = Dataset(folder, beside=True)
    place = data.save_splits({"few": data.select("label == 'noise'")})
    assert place.startswith(f"{folder.as_uri()}/.frostline/splits/")
    assert data.manifest.place == f"{folder.as_uri()}/.frostline/manifests/{data.digest}.parquet"
    shutil.rmtree(cache)
    other = Dataset(folder)
    assert (other.manifest.found, other.splits) == (True, ("few",))
    assert Dataset(folder, relist=False).digest == data.digest


def test_a_folder_that_has_a_manifest_beside_it_goes_on_having_it_there(folder, cache):
    _ = Dataset(folder, beside=True).manifest
    shutil.copyfile(folder / "noise" / "000.jpg", folder / "noise" / "more.jpg")
    grown = Dataset(folder)
    assert grown.manifest.place.startswith(f"{folder.as_uri()}/.frostline/")
    assert grown.save_splits({"all": grown}).startswith(f"{folder.as_uri()}/.frostline/")
    assert len(Dataset(folder, relist=False)) == 7


def test_stores_have_them_beside_the_data(cache):
    store = open_store(f"memory://{uuid.uuid4()}")
    store.write("cat/1.jpg", b"x")
    data = Dataset(store.url)
    assert data.manifest.place.startswith(f"{store.url}/.frostline/")
    assert data.save_splits({"all": data}).startswith(f"{store.url}/.frostline/")
    assert not cache.exists()
