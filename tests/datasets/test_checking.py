"""Reading every sample of a data set: what cannot be decoded, what is there twice, in whatever format."""

import shutil

import pytest

from frostline.core.events import ProgressMade, SampleSkipped
from frostline.datasets import Dataset
from frostline.datasets.check import check
from frostline.datasets.copy.ready import ingest
from frostline.datasets.reading import SequentialReader
from frostline.preprocess import Applied, imagenet
from support.images import image_folder


def test_samples_with_the_same_bytes_are_found_whatever_their_names(tmp_path):
    folder = image_folder(tmp_path, per_class=3)
    for name in ("a", "b"):
        shutil.copy(folder / "circle" / "000.jpg", folder / "noise" / f"{name}.jpg")
    shutil.copy(folder / "stripe" / "002.jpg", folder / "circle" / "z.jpg")
    checked = check(Dataset(folder), lambda event: None)
    assert checked.duplicates == (
        ("circle/000.jpg", "noise/a.jpg", "noise/b.jpg"),
        ("circle/z.jpg", "stripe/002.jpg"),
    )
    assert (checked.samples, checked.surplus, checked.unreadable) == (12, 3, ())


def test_samples_of_one_size_are_no_duplicates(tmp_path):
    folder = image_folder(tmp_path, per_class=2, size=(16, 16))
    for path in folder.rglob("*.jpg"):
        path.write_bytes(path.read_bytes().ljust(4000, b"\0"))
    assert check(Dataset(folder), lambda event: None).duplicates == ()


def test_names_undecodable_and_missing_samples_and_reads_the_others(tmp_path):
    folder = image_folder(tmp_path, per_class=100, size=(16, 16))
    assert len(Dataset(folder)) == 300
    good = (folder / "circle" / "050.jpg").read_bytes()
    (folder / "circle" / "050.jpg").write_bytes(good[: len(good) // 2].ljust(len(good), b"\0"))
    (folder / "noise" / "007.jpg").unlink()
    (folder / "stripe" / "099.jpg").write_bytes(b"GIF89a" + bytes(len(good)))
    happened = []
    checked = check(Dataset(folder, relist=False), happened.append)
    reasons = {item.object: item.reason for item in checked.unreadable}
    assert set(reasons) == {"circle/050.jpg", "noise/007.jpg", "stripe/099.jpg"}
    assert "there is no object" in reasons["noise/007.jpg"]
    assert [event for event in happened if isinstance(event, SampleSkipped)]
    assert [event.done for event in happened if isinstance(event, ProgressMade)] == [256, 300]


def test_a_ready_formats_records_are_checked_by_their_sums(tmp_path):
    folder = image_folder(tmp_path / "images", per_class=2)
    ingest(Dataset(folder), tmp_path / "ready", Applied.to(imagenet(32), "uint8"), on_event=lambda event: None)
    format = Dataset(tmp_path / "ready")
    assert check(format, lambda event: None).unreadable == ()
    [pixels] = (tmp_path / "ready" / "pixels").iterdir()
    pixels.chmod(0o644)
    data = bytearray(pixels.read_bytes())
    data[5] ^= 255
    pixels.write_bytes(data)
    [lost] = check(Dataset(tmp_path / "ready"), lambda event: None).unreadable
    assert "checksum is wrong" in lost.reason


def test_a_part_is_checked_alone(tmp_path):
    folder = image_folder(tmp_path, per_class=3)
    (folder / "circle" / "000.jpg").write_bytes(b"x")
    checked = check(Dataset(folder).select("label != 'circle'"), lambda event: None)
    assert (checked.samples, checked.unreadable) == (6, ())


class Broken(Exception):
    """Somebody pulls the plug."""


def break_off(data, folder, *, after):
    """Begin a check, and end it as a kill would after so many pieces."""

    def on_event(event):
        if isinstance(event, ProgressMade) and event.done == after:
            raise Broken

    with pytest.raises(Broken):
        check(data, on_event, progress=folder)
    (file,) = folder.iterdir()
    with file.open("ab") as line:
        line.write(b'{"rows":[512,76')


def changed_folder(tmp_path):
    folder = image_folder(tmp_path / "images", per_class=300, size=(16, 16))
    for name in ("001", "299"):
        shutil.copy(folder / "circle" / "000.jpg", folder / "stripe" / f"{name}.jpg")
    for name in ("002", "298"):
        (folder / "noise" / f"{name}.jpg").write_bytes(b"no image")
    return folder


def test_a_check_that_was_broken_off_goes_on_where_it_was_and_finds_the_same(tmp_path, monkeypatch):
    folder = changed_folder(tmp_path)
    whole = check(Dataset(folder), lambda event: None, progress=tmp_path / "whole")
    assert (len(whole.unreadable), whole.surplus) == (2, 2)
    break_off(Dataset(folder), tmp_path / "broken", after=512)
    read = []
    reading = SequentialReader.read
    monkeypatch.setattr(
        SequentialReader, "read", lambda self, samples, names: read.extend(names) or reading(self, samples, names)
    )
    happened = []
    again = check(Dataset(folder, relist=False), happened.append, progress=tmp_path / "broken")
    assert len(read) == 900 - 512
    assert (again.unreadable, again.duplicates, again.samples) == (whole.unreadable, whole.duplicates, 900)
    assert [event.done for event in happened if isinstance(event, ProgressMade)] == [256, 512, 768, 900]
    assert len([event for event in happened if isinstance(event, SampleSkipped)]) == 2
    assert list((tmp_path / "broken").iterdir()) == []


def test_a_check_that_is_broken_off_twice_goes_on_too(tmp_path):
    folder = changed_folder(tmp_path)
    break_off(Dataset(folder), tmp_path / "broken", after=512)
    break_off(Dataset(folder), tmp_path / "broken", after=768)
    happened = []
    again = check(Dataset(folder), happened.append, progress=tmp_path / "broken")
    assert again.surplus == 2
    assert [event.done for event in happened if isinstance(event, ProgressMade)] == [256, 512, 768, 900]


def test_checks_objects_again_that_changed_since_a_broken_check(tmp_path):
    folder = changed_folder(tmp_path)
    break_off(Dataset(folder), tmp_path / "broken", after=512)
    (folder / "circle" / "005.jpg").write_bytes(b"no image either")
    again = check(Dataset(folder), lambda event: None, progress=tmp_path / "broken")
    assert len(again.unreadable) == 3


def test_where_nothing_can_be_kept_a_check_is_made_all_the_same(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    folder = changed_folder(tmp_path)
    checked = check(Dataset(folder), lambda event: None, progress=tmp_path / "file" / "folder")
    assert len(checked.unreadable) == 2
