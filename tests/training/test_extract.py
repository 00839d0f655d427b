"""Bulk extraction: the same file in one go, after a kill and over several nodes; whole or not there."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import frostline as fl
from frostline.core import REFERENCE
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import SettingError
from frostline.core.events import ProgressMade
from frostline.node.process import start_node
from frostline.training.extract import Parts, Ranges, extract
from frostline.training.feature_files import check_suffix
from frostline.training.settings import ExtractSettings, JobSettings
from support.images import image_folder
from support.nodes import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=12)


@pytest.fixture(scope="module")
def node(shared_node):
    return shared_node


def quiet(_):
    pass


def settings(folder, out, *near, part_bytes=1 << 20, **loader):
    job = JobSettings(
        data=str(folder),
        model="support.networks:Small",
        until="stem",
        near=near[0] if near else None,
        also_near=near[1:],
        loader=LoaderSettings(cache_bytes=0, **loader),
        node=NodeSettings(memory_bytes=512 << 20),
    )
    return ExtractSettings(job=job, out=out, part_bytes=part_bytes)


@pytest.fixture(scope="module")
def whole(folder, node, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "features.parquet"
    extract(settings(folder, out, node.url), quiet)
    return pq.read_table(out)


def features(table):
    return table["features"].combine_chunks().to_numpy_ndarray()


def small_parts(folder, out, whole, *near, **loader):
    """Settings that make several parts."""
    return settings(folder, out, *near, part_bytes=7 * features(whole)[0].nbytes, **loader)


def test_parts_join_to_the_same_table(folder, node, whole, tmp_path):
    done = extract(small_parts(folder, tmp_path / "f.parquet", whole, node.url), quiet)
    table = pq.read_table(tmp_path / "f.parquet")
    assert table.equals(whole)
    assert (done.samples, done.taken_up) == (36, 0)
    assert (done.to_json()["engine"], done.to_json()["engine_error"]) == (REFERENCE, 0.0)
    assert done.shape == features(whole).shape[1:]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".f.parquet.state", "f.parquet"]


def test_safetensors_hold_the_same(folder, node, whole, tmp_path):
    out = tmp_path / "f.safetensors"
    extract(small_parts(folder, out, whole, node.url), quiet)
    tensors = load_file(out)
    assert np.array_equal(tensors["features"], features(whole))
    assert tensors["ids"].tolist() == whole["id"].to_pylist()
    assert tensors["labels"].tolist() == whole["label"].to_pylist()
    with safe_open(out, "numpy") as file:
        assert json.loads(file.metadata()["classes"]) == ["circle", "noise", "stripe"]


def test_a_sample_without_a_label_is_of_no_class(folder, tmp_path, node):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a.jpg", "b.jpg"):
        shutil.copy(folder / "circle" / "000.jpg", data / name)
    for listed, label, classes in (("a.jpg,cat\nb.jpg,\n", [0, None], ["cat", None]), ("", [None, None], [None, None])):
        (data / "labels.csv").write_text(f"file_name,label\n{listed}") if listed else (data / "labels.csv").unlink()
        extract(settings(data, tmp_path / "f.parquet", node.url), quiet)
        table = pq.read_table(tmp_path / "f.parquet").sort_by("object")
        assert (table["label"].to_pylist(), table["class"].to_pylist()) == (label, classes)


def test_another_suffix_is_refused_before_anything_is_done(folder, tmp_path):
    with pytest.raises(SettingError, match=r"\.parquet, \.safetensors or \.lance"):
        check_suffix(tmp_path / "f.csv")
    with pytest.raises(SettingError, match=r"f\.npz"):
        extract(settings(folder / "nowhere", tmp_path / "f.npz"), quiet)


class Stopped(Exception):
    pass


def stop_after(rows):
    def on_event(event):
        if isinstance(event, ProgressMade) and event.total and event.done >= rows:  # a listing knows no total
            raise Stopped

    return on_event


@pytest.fixture(scope="module")
def stopped(folder, node, whole, tmp_path_factory):
    """A folder with what an extraction to f.parquet had made when it was stopped."""
    place = tmp_path_factory.mktemp("stopped")
    # One request at a time and small ones, so that rows are counted before all have arrived.
    few = {"samples_per_request": 8, "requests_in_flight": 1, "window_bytes": 1}
    with pytest.raises(Stopped):
        extract(small_parts(folder, place / "f.parquet", whole, node.url, **few), stop_after(30))
    assert not (place / "f.parquet").exists()
    return place


@pytest.mark.parametrize("damage", [None, "cut", "flipped", "gone"])
def test_reuses_complete_files_of_an_earlier_run(folder, node, whole, stopped, tmp_path, damage):
    out = tmp_path / "f.parquet"
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    [folder_of_parts] = tmp_path.iterdir()
    parts = sorted(folder_of_parts.glob("*.parquet"))
    spoil(parts[1], damage)
    done = extract(small_parts(folder, out, whole, node.url), quiet)
    assert pq.read_table(out).equals(whole)
    assert done.taken_up == 7 * (len(parts) - (damage is not None))
    assert done.taken_up > 0
    assert not folder_of_parts.exists()


def spoil(path, damage):
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    elif damage == "gone":
        path.unlink()


def test_parts_of_another_extraction_are_not_mixed_in(tmp_path):
    ids = np.arange(10, dtype=np.int64)
    out, ranges = tmp_path / "f.parquet", Ranges(rows=10, rows_per_part=4)
    first = Parts(out, {"features": "a"}, ids.take, ranges)
    (tmp_path / ".f.parquet.parts" / "000001.parquet").write_bytes(b"left over")
    again = Parts(out, {"features": "a"}, ids.take, ranges)
    assert len(list((tmp_path / ".f.parquet.parts").iterdir())) == 2
    other = Parts(out, {"features": "b"}, ids.take, ranges)
    assert [parts.has_replaced for parts in (first, again, other)] == [False, False, True]
    assert len(list((tmp_path / ".f.parquet.parts").iterdir())) == 1
    first.remove()
    assert not list(tmp_path.iterdir())


def test_samples_that_cannot_be_read_have_no_row_also_where_a_part_is_of_them_alone(node, whole, tmp_path):
    images = image_folder(tmp_path / "images", per_class=12)
    names = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.jpg"))
    broken = [names[2], *names[7:14], names[-1]]  # the second part has no row
    for name in broken:
        (images / name).write_bytes(b"no image")
    done = extract(small_parts(images, tmp_path / "f.parquet", whole, node.url, max_skipped_fraction=0.5), quiet)
    table = pq.read_table(tmp_path / "f.parquet")
    assert table["object"].to_pylist() == [name for name in names if name not in broken]
    assert [sample.object for sample in done.skipped] == broken
    kept = np.array([name not in broken for name in names])
    assert np.array_equal(features(table), features(whole)[kept])


def test_resumes_a_killed_extraction_over_two_nodes_though_one_dies(folder, node, whole, tmp_path):
    out = tmp_path / "f.parquet"
    size = 2 * features(whole)[0].nbytes
    verb = [sys.executable, "-c", "from frostline.cli import main; main()", "extract", "--data", str(folder)]
    verb += ["--model", "support.networks:Small", "--until", "stem", "--out", str(out), "--part-size", str(size)]
    parts = tmp_path / ".f.parquet.parts"
    with subprocess.Popen([*verb, "--near", node.url], stdout=subprocess.DEVNULL) as process:
        until(lambda: process.poll() is not None or len(list(parts.glob("0*.parquet"))) >= 2)
        process.send_signal(signal.SIGKILL)
    made = len(list(parts.glob("0*.parquet")))
    with start_node((fl.Dataset(folder).url,), NodeSettings(memory_bytes=512 << 20)) as dying:

        def on_event(event):
            if isinstance(event, ProgressMade) and event.total:
                os.kill(dying.pid, signal.SIGKILL) if dying.pid else None

        small = {"samples_per_request": 8, "requests_in_flight": 2, "window_bytes": 1 << 16}
        asked = settings(folder, out, dying.url, node.url, part_bytes=size, **small)
        done = extract(asked, on_event)
    assert done.taken_up == 2 * made
    assert pq.read_table(out).equals(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".f.parquet.state", "f.parquet"]
