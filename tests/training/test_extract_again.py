"""Extraction into a file that is there: what did not change is kept, and the file is that of a run from scratch."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import frostline as fl
from frostline.config import LoaderSettings
from frostline.events import ProgressMade
from frostline.training.extract.extract import extract
from frostline.training.extract.previous import Previous
from frostline.training.settings import ExtractSettings, JobSettings
from support.images import image_folder

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


def made(images, out, node, observe=quiet, *, until="stem", **loader):
    """Extract in parts of a few rows."""
    job = JobSettings(
        data=str(images),
        model="support.networks:Small",
        until=until,
        near=node.url,
        accuracy="exact",
        loader=LoaderSettings(cache_bytes=0, skip_allowance=0.5, **loader),
    )
    return extract(ExtractSettings(job=job, out=out, part_bytes=PART_BYTES), observe)


def change(images):
    """One image changes, one goes, two come, one of them in front of all others."""
    names = sorted(path for path in images.rglob("*.jpg"))
    pixels = np.random.default_rng(9).integers(0, 255, (48, 60, 3), np.uint8)
    Image.fromarray(pixels).save(names[3])
    names[7].unlink()
    shutil.copy(names[0], names[0].with_name("000-new.jpg"))
    shutil.copy(names[1], names[-1].with_name("zzz.jpg"))


@pytest.mark.parametrize("suffix", [".parquet", ".safetensors"])
def test_computes_what_changed_alone_and_gives_the_bytes_of_a_run_from_scratch(images, node, tmp_path, suffix):
    out, fresh = tmp_path / f"f{suffix}", tmp_path / f"fresh{suffix}"
    first = made(images, out, node)
    assert (first.computed, first.kept) == (first.samples, 0)
    bytes_then = out.read_bytes()
    same = made(images, out, node)
    assert (same.computed, same.kept, same.samples) == (0, first.samples, first.samples)
    assert out.read_bytes() == bytes_then
    change(images)
    again = made(images, out, node)
    assert (again.computed, again.kept, again.samples) == (3, first.samples - 2, first.samples + 1)
    assert again.to_json()["kept"] == again.kept
    scratch = made(images, fresh, node)
    assert scratch.kept == 0
    assert out.read_bytes() == fresh.read_bytes()
    assert out.read_bytes() != bytes_then
    assert made(images, out, node).computed == 0


def test_a_run_that_was_stopped_is_taken_up_and_the_file_from_before_stays_until_then(images, node, tmp_path):
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
    assert Previous.found(Path("nothing"), {}).rows_of(np.array([1]), np.array([1], np.uint64)).tolist() == [-1]
