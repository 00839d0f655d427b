"""Extraction into a file that is there: what did not change is kept, and the file is that of a run from scratch."""

import json
import os
import shutil
from pathlib import Path

import lance
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.numpy import load_file

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.errors import NotFinite, SettingError
from frostline.core.events import ProgressMade
from frostline.training.extract import Previous, extract
from frostline.training.settings import ExtractSettings, JobSettings
from support.images import image_folder

pytestmark = pytest.mark.promise("kept")

PART_BYTES = 2_000_000  # some five rows


class Stopped(Exception):
    """Whoever runs it has had enough."""


def quiet(_):
    pass


@pytest.fixture
def node(shared_node):
    return shared_node


@pytest.fixture
def images(tmp_path):
    return image_folder(tmp_path / "images", per_class=6)


def made(images, out, node, on_event=quiet, *, until="stem", model="Small", **loader):
    """Extract in parts of a few rows."""
    job = JobSettings(
        data=str(images),
        model=f"support.networks:{model}",
        until=until,
        near=node.url,
        accuracy="exact",
        loader=LoaderSettings(cache_bytes=0, max_skipped_fraction=0.5, **loader),
    )
    return extract(ExtractSettings(job=job, out=out, part_bytes=PART_BYTES), on_event)


def change(images):
    """One image changes, one goes, two come, one of them in front of all others."""
    names = sorted(path for path in images.rglob("*.jpg"))
    pixels = np.random.default_rng(9).integers(0, 255, (48, 60, 3), np.uint8)
    Image.fromarray(pixels).save(names[3])
    names[7].unlink()
    shutil.copy(names[0], names[0].with_name("000-new.jpg"))
    shutil.copy(names[1], names[-1].with_name("zzz.jpg"))


def contents_of(out):
    """The bytes of a file; of a Lance data set, whose files are called at random, its table."""
    return lance.dataset(str(out)).to_table() if out.suffix == ".lance" else out.read_bytes()


@pytest.mark.parametrize("suffix", [".parquet", ".safetensors", ".lance"])
def test_computes_what_changed_alone_and_gives_the_bytes_of_a_run_from_scratch(images, node, tmp_path, suffix):
    out, fresh = tmp_path / f"f{suffix}", tmp_path / f"fresh{suffix}"
    first = made(images, out, node)
    assert (first.computed, first.kept) == (first.samples, 0)
    bytes_then = contents_of(out)
    same = made(images, out, node)
    assert (same.computed, same.kept, same.samples) == (0, first.samples, first.samples)
    assert contents_of(out) == bytes_then
    change(images)
    again = made(images, out, node)
    assert (again.computed, again.kept, again.samples) == (3, first.samples - 2, first.samples + 1)
    assert again.to_json()["kept"] == again.kept
    scratch = made(images, fresh, node)
    assert scratch.kept == 0
    assert contents_of(out) == contents_of(fresh)
    assert contents_of(out) != bytes_then
    assert made(images, out, node).computed == 0


def test_a_stopped_run_is_taken_up_and_the_old_file_stays_until_then(images, node, tmp_path):
    out, fresh = tmp_path / "f.parquet", tmp_path / "fresh.parquet"
    made(images, out, node)
    bytes_then = out.read_bytes()
    for path in sorted(images.rglob("*.jpg"))[:8]:
        os.utime(path, ns=(1, 1))

    def stop(event):
        if isinstance(event, ProgressMade) and event.total and event.done > len(fl.Dataset(images)) - 6:
            raise Stopped

    few = {"samples_per_request": 1, "requests_in_flight": 1, "window_bytes": 1}
    with pytest.raises(Stopped):
        made(images, out, node, stop, **few)
    assert out.read_bytes() == bytes_then
    again = made(images, out, node)
    assert again.computed + again.kept + again.taken_up == again.samples
    made(images, fresh, node)
    assert out.read_bytes() == fresh.read_bytes()


@pytest.mark.parametrize("damage", ["file", "state", "network"])
def test_a_file_that_is_damaged_or_of_another_network_is_made_anew(images, node, tmp_path, damage):
    out, fresh = tmp_path / "f.parquet", tmp_path / "fresh.parquet"
    made(images, out, node)
    state = tmp_path / ".f.parquet.state"
    if damage == "file":
        data = bytearray(out.read_bytes())
        data[len(data) // 2] ^= 1
        out.write_bytes(data)
    elif damage == "state":
        state.write_bytes(state.read_bytes()[:-9])
    until = "body" if damage == "network" else "stem"
    again = made(images, out, node, until=until)
    assert (again.computed, again.kept) == (again.samples, 0)
    made(images, fresh, node, until=until)
    assert out.read_bytes() == fresh.read_bytes()


def test_a_sample_whose_store_tells_no_version_is_always_computed():
    before = Previous(np.array([5, 3]), np.array([7, 0], np.uint64), lambda rows: rows)
    rows = before.rows_of(np.array([3, 4, 5, 5]), np.array([0, 1, 7, 8], np.uint64))
    assert rows.tolist() == [-1, -1, 0, -1]
    assert Previous.read(Path("nothing"), {}).rows_of(np.array([1]), np.array([1], np.uint64)).tolist() == [-1]


def test_a_lance_data_set_has_the_rows_of_the_parquet_file(images, node, tmp_path):
    for name in ("f.lance", "f.parquet"):
        made(images, tmp_path / name, node)
    found, expected = lance.dataset(str(tmp_path / "f.lance")).to_table(), pq.read_table(tmp_path / "f.parquet")
    for column in ("id", "object", "label", "class"):
        assert found[column].to_pylist() == expected[column].to_pylist()
    features = expected["features"].combine_chunks().to_numpy_ndarray()
    lists = found["features"].combine_chunks()
    assert np.array_equal(np.asarray(lists.flatten()), features.reshape(-1))
    assert json.loads(found.schema.field("features").metadata[b"shape"]) == list(features.shape[1:])
    names = {path.name for path in tmp_path.iterdir()} - {"images"}
    assert names == {"f.lance", ".f.lance.state", "f.parquet", ".f.parquet.state"}, "nothing half-written is left"


def test_a_sample_without_a_label_has_no_class_and_a_null(node, tmp_path):
    folder = image_folder(tmp_path / "all", per_class=3)
    (tmp_path / "images").mkdir()
    for number, path in enumerate(sorted(folder.rglob("*.jpg"))[:4]):
        shutil.copy(path, tmp_path / "images" / f"{number}.jpg")
    shutil.rmtree(folder)
    made(tmp_path / "images", tmp_path / "f.parquet", node)
    assert pq.read_table(tmp_path / "f.parquet", columns=["label", "class"]).to_pylist() == 4 * [
        {"label": None, "class": None}
    ]
    (tmp_path / "labels.csv").write_text("file_name,label\n0.jpg,dog\n1.jpg,cat\n3.jpg,dog\n")
    for out in ("f.parquet", "f.safetensors"):
        made(tmp_path, tmp_path / out, node)
    assert pq.read_table(tmp_path / "f.parquet", columns=["label", "class"]).to_pylist() == [
        {"label": 1, "class": "dog"}, {"label": 0, "class": "cat"}, {"label": None, "class": None},
        {"label": 1, "class": "dog"},
    ]  # fmt: skip
    assert load_file(tmp_path / "f.safetensors")["labels"].tolist() == [1, 0, -1, 1]


def test_a_damaged_lance_data_set_is_made_anew(images, node, tmp_path):
    out = tmp_path / "f.lance"
    made(images, out, node)
    before = contents_of(out)
    (data,) = (out / "data").iterdir()
    data.write_bytes(data.read_bytes()[:-9])
    again = made(images, out, node)
    assert (again.computed, again.kept) == (again.samples, 0)
    assert contents_of(out) == before


def test_what_else_lies_at_the_name_is_left_alone(images, node, tmp_path, monkeypatch):
    for name in ("f.lance", "g.parquet"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("-")
        with pytest.raises(SettingError, match="is a folder that holds something else"):
            made(images, tmp_path / name, node)
    (tmp_path / "h.lance").write_text("-")
    with pytest.raises(SettingError, match="is a file, and a Lance data set is a folder"):
        made(images, tmp_path / "h.lance", node)
    monkeypatch.setattr("frostline.training.feature_files.find_spec", lambda _: None)
    with pytest.raises(SettingError, match="needs the package pylance, which is not installed"):
        made(images, tmp_path / "i.lance", node)
    assert (tmp_path / "f.lance" / "mine.txt").read_text() == "-"


def test_rows_that_are_not_finite_are_counted_and_never_kept(images, node, tmp_path):
    out, asked = tmp_path / "f.parquet", {"model": "Rooted", "allow_nonfinite": True}

    def stop(event):
        if isinstance(event, ProgressMade) and event.total and event.done > len(fl.Dataset(images)) - 6:
            raise Stopped

    few = {"samples_per_request": 1, "requests_in_flight": 1, "window_bytes": 1}
    with pytest.raises(Stopped):
        made(images, out, node, stop, **asked, **few)
    with pytest.raises(NotFinite, match=r"for sample circle/\d+\.jpg"):
        made(images, out, node, model="Rooted")
    with pytest.raises(Stopped):
        made(images, out, node, stop, **asked, **few)
    first = made(images, out, node, **asked)
    assert first.taken_up > 0
    table = pq.read_table(out)
    broken = ~np.isfinite(table["features"].combine_chunks().to_numpy_ndarray()).all((1, 2, 3))
    assert broken.sum() == first.nonfinite == 6
    names = table.filter(broken)["object"].to_pylist()
    assert f"sample {names[0]} (id " in first.first_nonfinite
    assert first.first_nonfinite.endswith("in float32 by torch-eager")
    again = made(images, out, node, **asked)
    assert (again.computed, again.kept, again.nonfinite) == (6, again.samples - 6, 6)
    assert again.first_nonfinite == first.first_nonfinite
    with pytest.raises(NotFinite, match=r"for sample circle/\d+\.jpg"):
        made(images, out, node, model="Rooted")
