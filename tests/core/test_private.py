"""What Frostline caches is made for its user alone, whatever the user's own mask allows."""

import os
import stat
from functools import partial

import pytest

from frostline.cache import FeatureStore
from frostline.core.files import make_private_folder
from frostline.datasets import source
from frostline.datasets.check import CheckedRows, CheckProgress
from frostline.datasets.dataset import Dataset
from frostline.datasets.manifest import load_manifest
from frostline.engines.recipe import kept
from frostline.jobs.profiling import MeasuredPrefix, ProfileCache, ProfileKey
from frostline.stores.disk_tier import LocalTier
from frostline.stores.local import FolderStore
from frostline.training.run_config import make_folder, write_text
from support.images import image_folder
from support.stored import put

SMALL = 16 << 20


@pytest.fixture(autouse=True)
def generous():
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder):
    """The rights of a folder and all that lies in it."""
    return {str(path): stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


def assert_is_private(folder):
    found = modes(folder)
    assert len(found) > 1
    assert {path: oct(mode) for path, mode in found.items() if mode & 0o077} == {}


def test_a_cache_of_features_is_its_users_alone(tmp_path):
    with FeatureStore(tmp_path / "deep" / "cache", SMALL) as store:
        put(store, range(20))
        assert_is_private(tmp_path / "deep")
    assert_is_private(tmp_path / "deep")


def test_a_local_tier_is_its_users_alone(tmp_path):
    tier = LocalTier(tmp_path / "tier", budget_bytes=1000)
    tier.put("0" * 40, b"12345")
    assert_is_private(tmp_path / "tier")


def test_converted_networks_are_their_users_alone(tmp_path):
    def convert(folder):
        (folder / "deep").mkdir()
        (folder / "deep" / "weights").write_bytes(b"1")

    with kept(tmp_path / "engines", "onnx", convert):
        assert_is_private(tmp_path / "engines")


def test_manifests_splits_profiles_and_pieces_of_checks_are_their_users_alone(tmp_path, monkeypatch):
    folder, cache = image_folder(tmp_path / "images"), tmp_path / "cache"
    monkeypatch.setattr(source, "load_manifest", partial(load_manifest, in_memory_bytes=0))
    data = Dataset(folder, cache=cache)
    data.save_splits(data.split({"train": 0.5, "val": 0.5}))
    CheckProgress(cache / "checks" / "a.jsonl").add(CheckedRows(start=0, stop=1, digests={}, unreadable=()))
    key = ProfileKey(prefix="a", hardware="b", engine="c", device_batch=8, codecs=(), packed_cuts=())
    ProfileCache(cache / "profiles").put(key, MeasuredPrefix(cuts=(), codecs=()))
    make_folder(cache / "plans")
    write_text(cache / "plans" / "a.json", "{}")
    assert_is_private(cache)
    assert {path.suffix for path in cache.rglob("*") if path.is_file()} >= {".parquet", ".arrow", ".jsonl", ".json"}


def test_a_folder_that_is_there_keeps_its_rights(tmp_path):
    make_private_folder(tmp_path)
    assert modes(tmp_path)[str(tmp_path)] == stat.S_IMODE(tmp_path.stat().st_mode)
    (tmp_path / "shared").mkdir(mode=0o755)
    make_private_folder(tmp_path / "shared" / "a" / "b")
    found = modes(tmp_path)
    assert found[str(tmp_path / "shared")] == 0o755
    assert found[str(tmp_path / "shared" / "a" / "b")] == 0o700


def test_a_users_own_folder_is_written_as_the_users_mask_says(tmp_path):
    FolderStore(str(tmp_path)).write("a/b.jpg", b"x")
    assert modes(tmp_path)[str(tmp_path / "a" / "b.jpg")] == 0o644
