"""The demo's set: made once, whole or not at all, the same for a seed."""

import errno

import pytest
from PIL import Image

from frostline.core.errors import OutOfSpace, SettingError
from frostline.datasets import Dataset
from frostline.demo import make

pytest.importorskip("skimage")
pytest.importorskip("sklearn")


def test_the_set_is_a_data_set_of_twelve_classes(tmp_path):
    seen = []
    made = make(tmp_path / "set", per_class=2, seed=0, progress=lambda done, total: seen.append((done, total)))
    dataset = Dataset(made.directory)
    assert made.made
    assert dataset.classes == made.classes
    assert len(made.classes) == 12
    assert len(dataset) == made.images == 24
    assert dataset.samples.encoded_bytes == made.total_bytes
    assert made.mean_bytes > 20_000
    assert seen[-1] == (24, 24)
    with Image.open(made.directory / "cat" / "cat-0001.jpg") as image:
        assert (image.format, image.size, image.mode) == ("JPEG", (512, 384), "RGB")


def test_a_second_call_finds_it_and_the_same_seed_makes_the_same_bytes(tmp_path):
    one = make(tmp_path / "one", per_class=1, seed=3)
    two = make(tmp_path / "two", per_class=1, seed=3)
    other = make(tmp_path / "other", per_class=1, seed=4)
    names = [f"{name}/{name}-0000.jpg" for name in one.classes]
    read = [[(made.directory / name).read_bytes() for name in names] for made in (one, two, other)]
    assert read[0] == read[1]
    assert all(a != b for a, b in zip(read[0], read[2], strict=True))
    again = make(tmp_path / "one", per_class=1, seed=3)
    assert (again.made, again.total_bytes) == (False, one.total_bytes)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(SettingError, match="holds something else"):
        make(tmp_path / "mine", per_class=1)
    make(tmp_path / "set", per_class=1)
    with pytest.raises(SettingError, match="holds something else"):
        make(tmp_path / "set", per_class=2)


def test_an_empty_folder_may_stand_there_already(tmp_path):
    assert make(tmp_path, per_class=1).made


def test_an_interrupted_run_leaves_nothing(tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "set", per_class=1, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_reports_a_full_disk_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OutOfSpace, match="the disk is full"):
        make(tmp_path / "set", per_class=1)
    assert list(tmp_path.iterdir()) == []
