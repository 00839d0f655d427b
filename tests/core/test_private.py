"""What Frostline caches is made for its user alone, whatever the user's own mask allows."""

import os
import stat
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from frostline.cache import FeatureStore
from frostline.control.changes import ControlEvent
from frostline.control.settings import read_control_settings
from frostline.control.store import RecordStore
from frostline.core.errors import SettingError
from frostline.core.files import append_line, make_private_folder
from frostline.datasets import source
from frostline.datasets.check import CheckedRows, CheckProgress
from frostline.datasets.dataset import Dataset
from frostline.datasets.manifest import load_manifest
from frostline.engines.recipe import converted_files
from frostline.jobs.profiling import MeasuredPrefix, ProfileCache, ProfileKey
from frostline.node.tenants import read_tenants
from frostline.stores.disk_tier import LocalTier
from frostline.stores.local import FolderStore
from frostline.training.feature_files import Contents, tensor_column, write_features
from frostline.training.run_config import make_folder, write_text
from support.commands import trained
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

    with converted_files(tmp_path / "engines", "onnx", convert):
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


def test_a_run_and_all_that_it_writes_is_its_users_alone(tmp_path):
    out, trace = tmp_path / "runs" / "first", tmp_path / "trace.json"
    data = image_folder(tmp_path / "images", per_class=4)
    how = ("--model", "support.networks:Small", "--until", "stem", "--checkpoint-every", 1, "--epochs", 1)
    trained(out, "--data", data, *how, "--trace", trace)
    assert_is_private(tmp_path / "runs")
    names = {path.name for path in (tmp_path / "runs").rglob("*")}
    assert names >= {"checkpoints", "frostline.json", "model.safetensors", "report.json", "report.html"}
    assert modes(tmp_path)[str(trace)] == 0o600


@pytest.mark.parametrize("suffix", [".parquet", ".safetensors", ".lance"])
def test_features_and_what_is_kept_beside_them_are_their_users_alone(tmp_path, suffix):
    out = tmp_path / "deep" / f"features{suffix}"
    make_folder(out.parent)
    tensors = tensor_column(np.zeros((2, 3), np.float32))
    columns = {"id": [1, 2], "label": [0, 1], "features": tensors}
    write_features(out, [pa.table(columns)], Contents(rows=2, shape=(3,), dtype="float32", classes=("a", "b")))
    assert_is_private(tmp_path / "deep")


def test_a_control_planes_state_is_its_users_alone(tmp_path):
    with closing(RecordStore(tmp_path / "state")) as store:
        store.write({}, {1: ControlEvent(number=1, at_s=1.0, kind="changed", tenant=None, sentence="x")})
        found = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert found == dict.fromkeys(("state", "state-shm", "state-wal"), "0o600")


TENANT = '[[tenant]]\nname = "ann"\ntoken_sha256 = "' + "0" * 64 + '"\n'


def begin_state(path):
    RecordStore(path).close()


@pytest.mark.parametrize(
    ("read", "text"), [(read_tenants, TENANT), (read_control_settings, "[capacity]\n" + TENANT), (begin_state, "")]
)
@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o644, 0o602, 0o660, 0o664, 0o622, 0o666, 0o777])
def test_a_file_that_others_may_write_to_does_not_say_who_may_do_what(tmp_path, monkeypatch, read, text, mode):
    path = tmp_path / "file.toml"
    path.write_text(text)
    path.chmod(mode)
    monkeypatch.setattr(os, "getegid", lambda: path.stat().st_gid + 1)
    if mode & 0o022:
        with pytest.raises(SettingError, match=rf"others may write to .*mode {mode:04o}.*chmod go-w {path}"):
            read(path)
    else:
        read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("read", [read_tenants, read_control_settings])
@pytest.mark.parametrize("theirs", ["file", "folder", "link"])
def test_what_is_of_another_user_does_not_say_who_may_do_what(tmp_path, read, theirs):
    (tmp_path / "folder").mkdir()
    path, link = tmp_path / "folder" / "file", tmp_path / "link"
    path.write_text(TENANT if read is read_tenants else "[capacity]\n" + TENANT)
    link.symlink_to(path)
    read(link)
    os.chown(tmp_path / theirs if theirs != "file" else path, 1234, -1, follow_symlinks=False)
    with pytest.raises(SettingError, match=r"is of another user \(number 1234\).*chown 0 .*or mount it to be read"):
        read(link)


@pytest.mark.parametrize(("mode", "is_refused"), [(0o755, False), (0o775, True), (0o777, True), (0o1777, False)])
def test_a_file_that_others_may_replace_does_not_say_who_may_do_what(tmp_path, monkeypatch, mode, is_refused):
    path = tmp_path / "shared" / "tenants.toml"
    path.parent.mkdir()
    path.write_text(TENANT)
    path.parent.chmod(mode)
    monkeypatch.setattr(os, "getegid", lambda: path.stat().st_gid + 1)
    if is_refused:
        with pytest.raises(SettingError, match=f"others may write to {path.parent}, the folder of {path}"):
            read_tenants(path)
    else:
        read_tenants(path)
    begin_state(path.with_name("state"))  # in a volume, whose rights a cluster gives


def test_what_is_mounted_to_be_read_alone_nobody_changes(tmp_path, monkeypatch):
    path, is_read_alone = tmp_path / "tenants.toml", SimpleNamespace(f_flag=os.ST_RDONLY)
    path.write_text(TENANT)
    path.chmod(0o666)
    tmp_path.chmod(0o777)
    monkeypatch.setattr(os, "statvfs", lambda path: is_read_alone)
    assert [tenant.name for tenant in read_tenants(path)] == ["ann"]


def test_a_users_own_group_is_nobody_else(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(TENANT)
    path.chmod(0o664)
    os.chown(path, -1, os.getegid())
    assert [tenant.name for tenant in read_tenants(path)] == ["ann"]


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


def test_a_line_is_written_through_no_link_that_its_user_did_not_name(tmp_path):
    owned, link = tmp_path / "owned", tmp_path / "steps.jsonl"
    owned.write_bytes(b"mine\n")
    link.symlink_to(owned)
    with pytest.raises(OSError, match="symbolic links"):
        append_line(link, b"theirs\n")
    assert owned.read_bytes() == b"mine\n"
    append_line(link, b"a log\n", may_be_link=True)
    assert owned.read_bytes() == b"mine\na log\n"
