"""A run's files come whole or not at all."""

import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from frostline.core.errors import OutOfSpace, SettingError
from frostline.training.feature_files import Contents, tensor_column, write_features
from frostline.training.run_config import atomic_file, keep_report, make_folder, write_bytes, write_tensors, write_text


@contextmanager
def files_no_longer_than(size):
    """The system refuses to let a file grow past this, much as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_reports_a_full_disk_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "report.json"
    write_text(path, "old")
    with files_no_longer_than(4096), pytest.raises(OutOfSpace, match=r"no space left to write .*report\.json"):
        write_bytes(path, bytes(1 << 20))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_while_writing_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("frostline.training.run_config.os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "report.json", "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("kept", mended="a killed extraction or prediction left a hidden file beside its result for ever")
def test_what_a_killed_process_left_is_removed_and_what_another_one_writes_stays(tmp_path):
    path, neighbour = tmp_path / "p[1].csv", tmp_path / ".other.csv.00000000.part"
    child = os.fork()
    if child == 0:
        with atomic_file(path) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    [left] = tmp_path.iterdir()
    assert left.stat().st_size == 1 << 20
    os.mkfifo(tmp_path / ".p[1].csv.0000000f.part")
    neighbour.touch()
    with atomic_file(path) as first:
        first.write(b"first")
        write_text(path, "second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert sorted(tmp_path.iterdir()) == sorted([path, neighbour])


def test_a_new_text_replaces_the_old_one(tmp_path):
    path = tmp_path / "report.json"
    write_text(path, "old")
    write_text(path, "new – whole")
    assert path.read_text(encoding="utf-8") == "new – whole"


def test_each_report_that_another_run_replaces_is_kept_once(tmp_path):
    keep_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for text in ("first", "first", "second", "second", "first"):
        write_text(tmp_path / "report.json", text)
        keep_report(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "report.json": "first", "report.1.json": "first", "report.2.json": "second"
    }  # fmt: skip


def test_a_missing_folder_is_a_sentence():
    with pytest.raises(SettingError, match="No such file or directory; choose another folder"):
        write_text(Path("/nowhere/at/all/report.json"), "")


def test_a_file_in_the_place_of_a_folder_is_a_sentence(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(SettingError, match="cannot write"):
        make_folder(tmp_path / "out")
    with pytest.raises(SettingError, match="cannot write"):
        make_folder(tmp_path / "out" / "below")


def test_a_folder_is_made_with_those_above_it(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_tied_weights_are_there_under_each_name(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    tensors = {"embed": weight, "head": weight, "part": weight[1:], "turned": weight.T}
    write_tensors(tmp_path / "model.safetensors", tensors)
    back = load_file(tmp_path / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_lance_data_set_stays_where_another_one_does_not_take_its_place(tmp_path, monkeypatch, error):
    rows = np.ones((2, 3), np.float32)
    table = pa.table({"id": [1, 2], "label": [0, 1], "features": tensor_column(rows)})
    contents = Contents(rows=2, shape=(3,), dtype="float32", classes=())
    out, rename = tmp_path / "f.lance", Path.rename
    write_features(out, [table], contents)
    before = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def refuse(path, target):
        if path.suffix == ".part":
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else SettingError):
        write_features(out, [table], contents)
    assert {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["f.lance"]
