"""Reading every sample of a data set: what cannot be decoded, what is there twice, in whatever form."""

import shutil

from frostline.datasets import Dataset
from frostline.datasets.checking import check
from frostline.datasets.ingest import ingest
from frostline.events import Counted, SampleSkipped
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


def test_what_cannot_be_decoded_or_is_gone_is_named_and_the_rest_is_read(tmp_path):
    folder = image_folder(tmp_path, per_class=100, size=(16, 16))
    assert len(Dataset(folder)) == 300
    good = (folder / "circle" / "050.jpg").read_bytes()
    (folder / "circle" / "050.jpg").write_bytes(good[: len(good) // 2].ljust(len(good), b"\0"))
    (folder / "noise" / "007.jpg").unlink()
    (folder / "stripe" / "099.jpg").write_bytes(b"GIF89a" + bytes(len(good)))
    happened = []
    checked = check(Dataset(folder, relist=False), happened.append)
    reasons = {one.object: one.reason for one in checked.unreadable}
    assert set(reasons) == {"circle/050.jpg", "noise/007.jpg", "stripe/099.jpg"}
    assert "there is no object" in reasons["noise/007.jpg"]
    assert [one for one in happened if isinstance(one, SampleSkipped)]
    assert [one.done for one in happened if isinstance(one, Counted)] == [256, 300]


def test_a_ready_forms_records_are_checked_by_their_sums(tmp_path):
    folder = image_folder(tmp_path / "images", per_class=2)
    ingest(Dataset(folder), tmp_path / "ready", Applied.to(imagenet(32), "uint8"), observe=lambda event: None)
    form = Dataset(tmp_path / "ready")
    assert check(form, lambda event: None).unreadable == ()
    [pixels] = (tmp_path / "ready" / "pixels").iterdir()
    pixels.chmod(0o644)
    data = bytearray(pixels.read_bytes())
    data[5] ^= 255
    pixels.write_bytes(data)
    [lost] = check(form, lambda event: None).unreadable
    assert "checksum is wrong" in lost.reason


def test_a_part_is_checked_alone(tmp_path):
    folder = image_folder(tmp_path, per_class=3)
    (folder / "circle" / "000.jpg").write_bytes(b"x")
    checked = check(Dataset(folder).select("label != 'circle'"), lambda event: None)
    assert (checked.samples, checked.unreadable) == (6, ())
