"""Copies in other formats: whole or taken up again, under names that are safe and unique.

Copies between formats and stores: every sample once, with its class, metadata and bytes, also after a kill.

What copies are called and say: readable names in folders, numbers of classes in shards, the order of rows.
"""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import uuid
from datetime import datetime
from decimal import Decimal
from io import BytesIO

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import frostline as fl
from frostline.cli import main
from frostline.cli.ingest import FORMS
from frostline.cli.show import ProgressBar
from frostline.core.errors import DataError, ObjectNotFound, SampleError, SettingError, TooManySkipped
from frostline.core.events import ColumnsDropped, SetupWarning
from frostline.datasets import Dataset
from frostline.datasets.copy import repack as module
from frostline.datasets.copy.layout import PACKERS, FolderNames, divide_samples, scale_image, suffix_by_content
from frostline.datasets.copy.ready import ingest
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.base import COLUMNS
from frostline.datasets.formats.cql import CqlTables
from frostline.datasets.reading import open_samples
from frostline.preprocess import Applied, imagenet
from frostline.stores.local import FolderStore
from frostline.stores.open import open_store
from frostline.stores.protocols import LABELS, Entry
from support.formats import tar_of
from support.images import image_folder
from support.nodes import until


def quiet(_):
    pass


def copied(source, destination, format, **options):
    """A small copy, in several parts."""
    options = {"part_bytes": 8_000, "on_event": quiet, **options}
    return repack(source, destination, format, **options)


def contents(data):
    """Class and bytes of every sample, in no order."""
    samples, store = data.samples, open_samples(data.url, data.manifest.reading)
    rows = samples.take(np.arange(len(samples)))
    found = []
    for row in range(len(rows)):
        encoded = store.read(rows.objects[row], int(rows.offsets[row]), int(rows.lengths[row]))
        found.append((data.classes[rows.labels[row]], hashlib.sha256(encoded).hexdigest()))
    return sorted(found)


def files(folder):
    """The bytes of every object of a copy; records of parts also hold the objects' versions."""
    found = (path for path in sorted(folder.rglob("part-*")) if path.suffix != ".json")
    return {str(item.relative_to(folder)): item.read_bytes() for item in found}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return fl.Dataset(image_folder(tmp_path_factory.mktemp("images"), per_class=8))


def test_the_command_line_offers_every_format():
    assert set(FORMS) == {"ready", "cql", *PACKERS}


@pytest.mark.parametrize("format", PACKERS)
def test_every_sample_arrives_once_with_its_class_and_bytes(images, tmp_path, format):
    done = copied(images, tmp_path / "copy", format)
    copy = fl.Dataset(done.url)
    assert contents(copy) == contents(images)
    assert copy.classes == images.classes
    assert done.samples == len(images)
    assert done.parts == done.made > 2


def test_a_copy_of_copies_is_still_the_same_samples(images, tmp_path):
    source = images
    for number, format in enumerate(("webdataset", "parquet", "original")):
        source = fl.Dataset(copied(source, tmp_path / str(number), format).url)
        if format != "original":
            assert sorted(source.column("frostline_source").to_pylist()) == sorted(images.names)
    assert contents(source) == contents(images)


@pytest.mark.parametrize("format", ["webdataset", "parquet"])
def test_metadata_and_the_names_that_samples_had_go_with_them(images, tmp_path, format):
    patients = [f"p{number % 5}" for number in range(len(images))]
    copied(images.with_columns({"patient": patients}), tmp_path, format)
    copy = fl.Dataset(tmp_path)
    source_names = copy.column("frostline_source").to_pylist()
    expected = dict(zip(images.names, patients, strict=True))
    assert dict(zip(source_names, copy.column("patient").to_pylist(), strict=True)) == expected


@pytest.mark.parametrize("format", ["webdataset", "parquet", "original"])
def test_values_that_changed_have_their_part_made_again_and_no_other(images, tmp_path, format):
    values = list(range(len(images)))
    own = images.with_columns({"slide": values})
    first = copied(own, tmp_path, format)
    before = files(tmp_path)
    assert copied(images.with_columns({"slide": values}), tmp_path, format).made == 0
    values[-1] = 1000
    again = copied(images.with_columns({"slide": values}), tmp_path, format)
    if format == "original":  # which has no place for them
        assert again.made == 0
        return
    assert (again.made, again.samples) == (1, first.samples)
    assert len([name for name, data in files(tmp_path).items() if data != before[name]]) == 1
    copy = fl.Dataset(tmp_path)
    assert contents(copy) == contents(images)
    wanted = dict(zip(images.names, values, strict=True))
    assert (
        dict(zip(copy.column("frostline_source").to_pylist(), copy.column("slide").to_pylist(), strict=True)) == wanted
    )
    assert copied(images.with_columns({"slide": values}), tmp_path, format).made == 0


def test_changed_values_are_renewed_without_making_pixels_again(images, tmp_path):
    applied = Applied.to(imagenet(32), "uint8")
    scores = [0.5, float("nan"), *map(float, range(2, len(images)))]
    options = {"object_bytes": 20_000, "on_event": quiet}
    first = ingest(images.with_columns({"score": scores}), tmp_path, applied, **options)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    scores[-1] = 1000.0
    again = ingest(images.with_columns({"score": scores}), tmp_path, applied, **options)
    assert (first.made, again.made, again.digest) == (first.objects, 0, first.digest)
    changed = {time.name for time in times if time.stat().st_mtime_ns != times[time]}
    assert changed == {f"{first.objects - 1:06}.parquet", "samples.parquet"}
    assert repr(fl.Dataset(tmp_path).column("score").to_pylist()) == repr(scores)
    times = {time: time.stat().st_mtime_ns for time in times}
    ingest(images.with_columns({"score": scores}), tmp_path, applied, **options)
    assert {time: time.stat().st_mtime_ns for time in times} == times


def test_a_users_own_columns_arrive_whatever_they_are_called(images, tmp_path):
    mine = {
        name: [f"{name} {row}" for row in range(len(images))] for name in ("source", "image", "meta_image", "class")
    }
    own = images.with_columns(mine)
    wanted = dict(zip(images.names, zip(*mine.values(), strict=True), strict=True))
    source = own
    for number, format in enumerate(("webdataset", "parquet", "webdataset", "parquet")):
        source = fl.Dataset(copied(source, tmp_path / str(number), format).url)
        image = "image" if number == 0 else "meta_meta_image"
        there = [source.column(name).to_pylist() for name in ("source", image, "meta_image", "class")]
        names = source.column("frostline_source").to_pylist()
        assert dict(zip(names, zip(*there, strict=True), strict=True)) == wanted
        assert set(source.columns) == {*COLUMNS.names, "source", image, "meta_image", "class", "frostline_source"}
    assert contents(source) == contents(images)


def test_samples_without_a_label_have_none_in_a_copy_either(tmp_path):
    shards, files = tmp_path / "shards", []
    for number in range(4):
        about = {"class": "dog", **({"label": None} if number % 2 else {})}
        files += [(f"{number}.jpg", b"image %d" % number), (f"{number}.json", json.dumps(about).encode())]
    FolderStore(str(shards)).create()
    (shards / "0.tar").write_bytes(tar_of(files))
    source = fl.Dataset(shards)
    for number, format in enumerate(("webdataset", "parquet", "webdataset")):
        source = fl.Dataset(copied(source, tmp_path / str(number), format).url)
        assert source.samples.labels.tolist() == [0, -1, 0, -1]
        assert source.column("class").to_pylist() == [None, "dog", None, "dog"]


@pytest.mark.parametrize(("format", "says"), [("original", True), ("parquet", False), ("webdataset", False)])
def test_columns_that_have_no_place_are_named_before_a_copy_begins(images, tmp_path, format, says):
    happened = []
    own = images.with_columns({"patient": ["p"] * len(images)})
    copied(own, tmp_path, format, on_event=happened.append)
    left = [event for event in happened if isinstance(event, ColumnsDropped)]
    assert left == ([ColumnsDropped(url=images.url, columns=("patient",))] if says else [])
    assert not says or happened[0] == left[0]


def test_metadata_goes_into_a_ready_format_too(images, tmp_path):
    happened, count = [], len(images)
    about = {
        "patient": [f"p{row % 3}" if row else None for row in range(count)],
        "slide": [row * (row % 2) for row in range(count)],
        "score": [row / 2 for row in range(count)],
        "seen": [row % 2 == 0 for row in range(count)],
    }
    own = images.with_columns(about | {"boxes": [[1, 2]] * count})
    applied = Applied.to(imagenet(32), "uint8")
    for _ in range(2):
        ingest(own, tmp_path / "one", applied, object_bytes=20_000, on_event=happened.append)
        ready = fl.Dataset(tmp_path / "one")
        assert {name: ready.column(name).to_pylist() for name in about} == about
    assert happened[0] == ColumnsDropped(url=images.url, columns=("boxes",))
    assert len(ready.select("patient == 'p1' and score > 2")) == len([row for row in range(5, count) if row % 3 == 1])
    happened.clear()
    ingest(images, tmp_path / "two", applied, on_event=happened.append)
    assert not [event for event in happened if isinstance(event, ColumnsDropped)]
    with pytest.raises(SettingError, match="made otherwise"):
        ingest(images, tmp_path / "one", applied, object_bytes=20_000, on_event=quiet)


def test_the_command_says_which_columns_stay_behind(images, tmp_path, capsys):
    shards = copied(images, tmp_path / "shards", "webdataset")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["ingest", str(tmp_path / "shards"), str(tmp_path / "copy"), "--format", "original", "--json"])
    said = "".join(capsys.readouterr().err.split())  # a line is folded within words that are longer than it
    assert (
        "".join(f"the copy cannot hold these columns, which stay with {shards.url}: frostline_source".split()) in said
    )


def test_the_command_copies_the_format_that_is_named_where_several_lie_together(images, tmp_path, capsys):
    place = tmp_path / "both"
    copied(images.take(np.arange(5)), place, "webdataset")
    image_folder(place, per_class=1)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["ingest", str(place), str(tmp_path / "a"), "--from", "webdataset", "--format", "parquet", "--json"])
    assert json.loads(capsys.readouterr().out)["samples"] == 5
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["ingest", str(place), str(tmp_path / "b"), "--from", "webdatset", "--format", "parquet"])
    assert "webdataset" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["webdataset", "ready"])
def test_the_command_copies_the_samples_that_are_asked_for(images, tmp_path, capsys, format):
    how = ["--preprocess", "imagenet:32"] if format == "ready" else []
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["ingest", images.url, str(tmp_path / "copy"), "--format", format, "--where", "label == 'noise'", *how])
    copy = fl.Dataset(tmp_path / "copy")
    assert copy.statistics().per_class[copy.classes.index("noise")] == ("noise", len(copy))
    assert 0 < len(copy) < len(images)


def test_where_there_is_no_terminal_lines_say_how_far_a_copy_is(images, tmp_path, capsys):
    with ProgressBar(line_every_s=0) as progress:
        copied(images, tmp_path / "often", "parquet", on_event=progress)
    assert "copying to parquet: 24 of 24\n" in capsys.readouterr().err


def test_copies_between_stores(images, s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("copies")
    shards = copied(images, "s3://copies/shards", "webdataset")
    done = copied(fl.Dataset(shards.url), "s3://copies/folders", "original")
    assert contents(fl.Dataset(done.url)) == contents(images)


def test_leaves_a_complete_copy_unchanged(images, tmp_path):
    first = copied(images, tmp_path, "webdataset")
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("part-*")}
    again = copied(images, tmp_path, "webdataset")
    assert (again.made, again.samples, again.objects) == (0, first.samples, first.objects)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("part-*")} == times


def test_writes_a_lost_or_truncated_part_again_identically(images, tmp_path):
    copied(images, tmp_path, "webdataset")
    before = files(tmp_path)
    (tmp_path / "part-000000.tar").unlink()
    (tmp_path / "part-000001.tar").write_bytes(b"short")
    assert copied(images, tmp_path, "webdataset").made == 2
    assert files(tmp_path) == before


@pytest.mark.parametrize("left", [b"", b"no JSON", b"[1]", b'{"number": 0}', b"[" * 100_000])
def test_a_part_whose_record_is_damaged_is_made_again(images, tmp_path, left):
    copied(images, tmp_path, "webdataset")
    before = files(tmp_path)
    (tmp_path / ".frostline" / "ingest" / "part-000000.json").write_bytes(left)
    assert copied(images, tmp_path, "webdataset").made == 1
    assert files(tmp_path) == before


@pytest.mark.parametrize("left", [b"", b"no JSON", b"\xff", b"[" * 60_000])
def test_a_copy_that_does_not_know_any_more_what_it_is_gets_a_sentence(images, tmp_path, left):
    copied(images, tmp_path, "webdataset")
    (tmp_path / ".frostline" / "ingest" / "what.json").write_bytes(left)
    with pytest.raises(SettingError, match=r"what\.json at .* is damaged, .* remove all that lies there") as caught:
        copied(images, tmp_path, "webdataset")
    assert "\n" not in str(caught.value)


def test_an_object_damaged_at_the_same_size_is_noticed_by_its_version_and_made_again(images, tmp_path):
    copied(images, tmp_path, "webdataset")
    before = files(tmp_path)
    damage(tmp_path / "part-000001.tar", later_s=10)
    assert copied(images, tmp_path, "webdataset").made == 1
    assert files(tmp_path) == before


def test_an_object_damaged_behind_the_stores_back_is_noticed_when_all_is_verified(images, tmp_path):
    copied(images, tmp_path, "webdataset")
    before = files(tmp_path)
    damage(tmp_path / "part-000001.tar", later_s=0)
    assert copied(images, tmp_path, "webdataset").made == 0
    assert copied(images, tmp_path, "webdataset", verify=True).made == 1
    assert files(tmp_path) == before


def test_a_copy_that_was_moved_is_read_once_and_not_made_again(images, tmp_path, monkeypatch):
    copied(images, tmp_path, "webdataset")
    for path in tmp_path.rglob("part-*.tar"):
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**10))
    assert copied(images, tmp_path, "webdataset").made == 0
    before, read = FolderStore.read_version, []
    monkeypatch.setattr(FolderStore, "read_version", lambda self, *place: read.append(place[0]) or before(self, *place))
    assert copied(images, tmp_path, "webdataset").made == 0
    assert read
    assert not [name for name in read if name.endswith(".tar")]


def damage(file, *, later_s):
    """Change a byte of a file, so that its time is later by so much, or the same."""
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[700] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + later_s * 10**9))


def test_a_copy_that_was_killed_goes_on_and_is_the_same(tmp_path):
    source = image_folder(tmp_path / "images", per_class=40)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    verb = [sys.executable, "-c", "from frostline.cli import main; raise SystemExit(main())"]
    verb += ["ingest", str(source), str(broken), "--format", "parquet", "--object-size", "8kB", "--json"]
    with subprocess.Popen(verb, stdout=subprocess.DEVNULL) as process:
        # A part counts once it was read back and written down, which is later than its object is there.
        until(lambda: process.poll() is not None or len(list(broken.glob(".frostline/ingest/[!.]*"))) >= 2)
        process.send_signal(signal.SIGKILL)
    # Where the kill falls decides whether it leaves any; of one that fell into a write, this is what is there.
    (broken / ".frostline" / "ingest" / ".partial-0123456789abcdef").write_bytes(b"begun")
    (broken / ".partial-0123456789abcdef").write_bytes(b"begun")
    undisturbed = copied(fl.Dataset(source), whole, "parquet")
    done = copied(fl.Dataset(source), broken, "parquet")
    assert files(broken) == files(whole)
    assert done.made < undisturbed.made
    assert contents(fl.Dataset(broken)) == contents(fl.Dataset(source))
    assert not list(broken.rglob(".partial-*"))


def test_removes_unfinished_files_of_a_killed_copy_from_class_folders_alone(images, tmp_path):
    place, begun = tmp_path / "copy", ".partial-0123456789abcdef"
    copied(images, place, "original")
    (place / ".frostline" / "manifests").mkdir(parents=True)
    left = [place / begun, place / "circle" / begun]
    somebodys = [place / ".frostline" / "manifests" / begun, place / "circle" / "mine.partial-1"]
    for entry in (*left, *somebodys):
        entry.write_bytes(b"begun")
    assert copied(images, place, "original").made == 0
    assert [item.exists() for item in (*left, *somebodys)] == [False] * 2 + [True] * 2


def test_class_folders_have_nothing_but_the_classes_and_are_taken_up_all_the_same(images, tmp_path):
    from torchvision.datasets import ImageFolder

    first = copied(images, tmp_path / "copy", "original")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == list(images.classes)
    assert ImageFolder(str(tmp_path / "copy")).classes == list(images.classes)
    assert copied(images, tmp_path / "copy", "original").made == 0
    (tmp_path / "copy" / "noise" / "000.jpg").unlink()
    assert copied(images, tmp_path / "copy", "original").made == 1
    assert contents(fl.Dataset(first.url)) == contents(images)
    few = images.select("label == 'noise'")
    with pytest.raises(SettingError, match="holds a copy of other data"):
        copied(few, tmp_path / "copy", "original")
    shutil.rmtree(tmp_path / "copy")
    copied(few, tmp_path / "copy", "original")
    assert contents(fl.Dataset(first.url)) == contents(few)


def test_a_place_that_holds_something_else_is_refused(images, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SettingError, match=r"is not empty, it holds mine\.txt"):
        copied(images, tmp_path, "parquet")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["mine.txt"]


def test_a_copy_made_otherwise_is_refused(images, tmp_path):
    copied(images, tmp_path, "parquet")
    with pytest.raises(SettingError, match="made otherwise"):
        copied(images, tmp_path, "webdataset")


def test_a_ready_format_is_made_of_parquet_too(images, tmp_path):
    parquet = fl.Dataset(copied(images, tmp_path / "parquet", "parquet").url)
    made = ingest(parquet, tmp_path / "ready", Applied.to(imagenet(32), "uint8"), on_event=quiet)
    assert made.samples == len(images)
    assert not made.skipped


def test_notices_bytes_that_differ_from_those_written(images, tmp_path, monkeypatch):
    class Forgetful(FolderStore):
        def write(self, object, data):
            super().write(object, bytes(data)[:-1] + b"?" if object.endswith(".tar") else data)

    monkeypatch.setattr(module, "open_store", Forgetful)
    with pytest.raises(DataError, match="came back"):
        copied(images, tmp_path / "copy", "webdataset")


def test_images_are_scaled_down_and_unreadable_ones_are_named(tmp_path):
    source = image_folder(tmp_path / "images", per_class=4)
    (source / "circle" / "broken.jpg").write_bytes(b"\xff\xd8 no image")
    done = copied(fl.Dataset(source), tmp_path / "copy", "original", shorter_side=24, max_skipped_fraction=0.1)
    assert [sample.object for sample in done.skipped] == ["circle/broken.jpg"]
    assert done.samples == 12
    small = [path.read_bytes() for path in (tmp_path / "copy").glob("*/*.jpg")]
    assert {Image.open(BytesIO(item)).size for item in small} == {(30, 24)}
    with pytest.raises(TooManySkipped):
        copied(fl.Dataset(source), tmp_path / "other", "original", shorter_side=24, max_skipped_fraction=0)


def test_small_images_keep_their_bytes_and_others_their_kind():
    file = BytesIO()
    Image.new("RGB", (60, 40)).save(file, "PNG")
    assert scale_image(file.getvalue(), 40) == file.getvalue()
    smaller = Image.open(BytesIO(scale_image(file.getvalue(), 20)))
    assert (smaller.format, smaller.size) == ("PNG", (30, 20))
    with pytest.raises(SampleError):
        scale_image(b"no image", 20)


@pytest.mark.parametrize("side", [20, 40])
def test_scaled_images_are_turned_where_their_own_reader_turns_them(side):
    file, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (60, 40)).save(file, "PNG", exif=exif)
    turned = Image.open(BytesIO(scale_image(file.getvalue(), side, is_turned=True)))
    assert (turned.size, turned.getexif().get(0x0112)) == ((side, side * 3 // 2), None)
    assert (scale_image(file.getvalue(), side) == file.getvalue()) == (side == 40)


def test_a_copy_that_is_read_with_other_pixels_says_so(tmp_path):
    file, said = BytesIO(), []
    Image.new("RGB", (60, 40)).save(file, "PNG")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a"])})
    rows = {"image": [{"bytes": file.getvalue(), "path": None}], "label": [0]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    source = fl.Dataset(tmp_path / "saved")
    assert source.manifest.is_turned
    for side, wanted in ((None, True), (20, False)):
        said.clear()
        copied(source, tmp_path / f"copy-{side}", "webdataset", shorter_side=side, on_event=said.append)
        reasons = [event.reason for event in said if isinstance(event, SetupWarning)]
        assert any("Decode(orientation='exif')" in reason for reason in reasons) == wanted
    assert not fl.Dataset(tmp_path / "copy-None").manifest.is_turned


@pytest.mark.parametrize("orientation", [None, 3, 6])
@pytest.mark.parametrize("side", [None, 24])
@pytest.mark.parametrize("format", [*PACKERS, "ready"])
def test_a_copy_of_images_that_are_not_turned_has_the_same_pixels(tmp_path, format, side, orientation):
    """Of folders torchvision turns none; of a copy in Parquet, which says that it holds images, ``datasets`` would."""
    ramp = np.add.outer(2 * np.arange(40), 3 * np.arange(56)).astype(np.uint8)
    for name in ("a", "b"):
        (tmp_path / "source" / name).mkdir(parents=True)
        exif = Image.Exif()
        exif[0x0112] = orientation or 1
        Image.fromarray(ramp).save(tmp_path / "source" / name / "0.png", exif=exif)
    source, said = fl.Dataset(tmp_path / "source"), []
    steps = imagenet(24)
    if format == "ready":
        ingest(source, tmp_path / "copy", Applied.to(steps, "uint8"), on_event=said.append)
    else:
        copied(source, tmp_path / "copy", format, shorter_side=side, on_event=said.append)
    copy = fl.Dataset(tmp_path / "copy", transform=steps)
    expected = source.with_transform(steps)
    for (pixels, label), (wanted, of_label) in zip(copy, expected, strict=True):
        assert label == of_label
        # Scaled twice, a ramp is about the same.
        assert np.abs(pixels - wanted).max() < (0.5 if side and format != "ready" else 1e-6)
    assert not [event for event in said if isinstance(event, SetupWarning)]


def test_a_copy_in_parquet_of_images_that_are_turned_is_read_as_they_are(tmp_path):
    file, said = BytesIO(), []
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 56, 3), np.uint8)).save(file, "PNG", exif=exif)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a"])})
    rows = {"image": [{"bytes": file.getvalue(), "path": None}], "label": [0]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    source = fl.Dataset(tmp_path / "saved", transform=imagenet(24))
    copied(source, tmp_path / "copy", "parquet", on_event=said.append)
    copy = fl.Dataset(tmp_path / "copy", transform=imagenet(24))
    assert source.manifest.is_turned
    assert copy.manifest.is_turned
    assert np.array_equal(copy[0][0], source[0][0])
    assert not [event for event in said if isinstance(event, SetupWarning)]


@given(st.lists(st.integers(-1, 50), max_size=60), st.integers(1, 100), st.integers(1, 20))
def test_parts_are_every_sample_in_order_within_their_bounds(lengths, max_bytes, max_rows):
    parts = divide_samples(np.array(lengths, np.int64), max_bytes=max_bytes, max_rows=max_rows)
    assert [row for part in parts for row in part] == list(range(len(lengths)))
    for part in parts:
        assert 1 <= len(part) <= max_rows
        assert len(part) == 1 or sum(max(0, lengths[row]) for row in part) <= max_bytes


def test_an_image_without_a_name_gets_the_suffix_of_its_content():
    for kind, suffix in (("JPEG", ".jpg"), ("PNG", ".png"), ("WEBP", ".webp"), ("BMP", ".bmp"), ("TIFF", ".tif")):
        file = BytesIO()
        Image.new("RGB", (4, 4)).save(file, kind)
        assert suffix_by_content(file.getvalue()) == suffix


def test_the_command_copies_and_says_what_it_did(images, tmp_path, capsys):
    source = images.url.removeprefix("file://")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["ingest", source, str(tmp_path / "copy"), "--format", "webdataset", "--json"])
    assert json.loads(capsys.readouterr().out)["samples"] == 24
    damage(tmp_path / "copy" / "part-000000.tar", later_s=0)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["ingest", source, str(tmp_path / "copy"), "--format", "webdataset", "--verify", "--json"])
    assert json.loads(capsys.readouterr().out)["made"] == 1
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["ingest", source, str(tmp_path / "other"), "--format", "parquet", "--preprocess", "imagenet:32"])
    assert "for --format ready" in capsys.readouterr().err


JPEG, PNG = b"\xff\xd8\xff the rest", b"\x89PNG\r\n\x1a\nthe rest"


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4()}")


def copied_of_copied_names(source, format):
    url = f"memory://{uuid.uuid4()}"
    repack(source, url, format, on_event=lambda event: None)
    return Dataset(url)


def objects_of(data):
    return sorted(item.object for item in open_store(data.url).list() if not item.object.startswith("."))


def tar(store, name, *names):
    files = [(name, JPEG + name.encode()) for name in names]
    store.write(name, tar_of([*files, *((f"{name.rpartition('.')[0]}.cls", b"cat") for name in names)]))


@pytest.mark.parametrize("between", ["webdataset", "parquet"])
def test_folders_that_went_through_another_format_have_their_names_again(store, between):
    names = ["cat/1.jpg", "cat/old/2.jpg", "dog/1.jpg", "dog/1.png"]
    for name in names:
        store.write(name, (PNG if name.endswith("png") else JPEG) + name.encode())
    assert objects_of(copied_of_copied_names(copied_of_copied_names(Dataset(store.url), between), "original")) == names


def test_members_of_shards_are_called_as_they_were(store):
    tar(store, "train.tar", "cat/1.jpg", "b.jpg")
    assert objects_of(copied_of_copied_names(Dataset(store.url), "original")) == [
        "cat/train.tar/b.jpg",
        "cat/train.tar/cat/1.jpg",
    ]


def test_rows_get_the_suffix_of_their_content(store):
    out = io.BytesIO()
    pq.write_table(pa.table({"image": [JPEG, PNG], "label": ["cat", "dog"]}), out)
    store.write("x.parquet", out.getvalue())
    assert objects_of(copied_of_copied_names(Dataset(store.url), "original")) == [
        "cat/x.parquet/0.jpg",
        "dog/x.parquet/1.png",
    ]


def test_folders_of_splits_are_made_where_the_source_has_splits(store):
    names = ["train/cat/1.jpg", "train/dog/1.jpg", "val/cat/1.jpg"]
    for name in names:
        store.write(name, JPEG + name.encode())
    copy = copied_of_copied_names(copied_of_copied_names(Dataset(store.url), "webdataset"), "original")
    assert objects_of(copy) == names
    assert (copy.splits, copy.classes) == (("train", "val"), ("cat", "dog"))


def of_classes(store, *names, **columns):
    out = io.BytesIO()
    pq.write_table(pa.table({"image": [JPEG, PNG], "label": names, **columns}), out)
    store.write("x.parquet", out.getvalue())
    return Dataset(store.url)


@pytest.mark.parametrize(
    "names", [("train", "test"), ("Training", "val"), ("train_a", "test_a"), ("label=a", "01"), ("gas_mask", "gas")]
)
def test_classes_that_are_called_as_splits_are_classes_in_folders_too(store, names):
    source = of_classes(store, *names)
    copy = copied_of_copied_names(source, "original")
    assert (copy.classes, copy.splits, contents(copy)) == (source.classes, (), contents(source))


def test_classes_that_would_be_read_as_something_else_are_not_copied_into_folders(store, tmp_path):
    with pytest.raises(SettingError, match="images, masks would be taken for images and their masks"):
        copied_of_copied_names(of_classes(store, "images", "masks"), "original")
    with pytest.raises(SettingError, match="'train' would be taken for another split"):
        copied_of_copied_names(of_classes(store, "train", "b", split=["train", "test"]), "original")
    with pytest.raises(ObjectNotFound, match="File name too long"):
        copied(of_classes(store, "a" * 256, "b"), tmp_path / "copy", "original")


def test_gives_every_sample_a_distinct_valid_name(store):
    names = ["a.jpg", "cat/a.jpg", "a", "b:c.jpg", "x\ty.jpg", "l" * 90 + "/" + "m" * 230 + ".jpg"]
    rows = ["file_name,label"]
    for number, name in enumerate(names):
        store.write(f"{number}.jpg", JPEG + name.encode())
        rows.append(f"{number}.jpg,cat")
    store.write("labels.csv", "\n".join(rows).encode())
    data = Dataset(store.url, format="urls").with_columns({"frostline_source": names})
    found = FolderNames(data).objects(0, len(names))
    # The first two would be one; the third gets a suffix, and would be one with both.
    assert found == ["", "", "", "", "", ""]
    others = Dataset(store.url, format="urls").with_columns(
        {"frostline_source": [f"d/{number}" for number in range(6)]}
    )
    assert FolderNames(others).objects(1, 3) == ["cat/d/1", "cat/d/2"]
    copy = copied_of_copied_names(data, "original")
    assert len(copy) == len(objects_of(copy)) == len(names)


def test_shards_say_the_number_of_the_class_to_others_and_its_name_to_us(store):
    for name in ("cat/1.jpg", "dog/2.jpg"):
        store.write(name, JPEG + name.encode())
    copy = copied_of_copied_names(Dataset(store.url), "webdataset")
    assert copy.classes == ("cat", "dog")
    assert copy.samples.labels.tolist() == [0, 1]
    [shard] = objects_of(copy)
    size = next(item.size for item in open_store(copy.url).list() if item.object == shard)
    with tarfile.open(fileobj=io.BytesIO(bytes(open_store(copy.url).read(shard, 0, size)))) as packed:
        members = {getmember.name: packed.extractfile(getmember).read() for getmember in packed.getmembers()}
    assert json.loads(members.pop("__classes__")) == ["cat", "dog"], "other readers pass over a name like this"
    keys = sorted({name.partition(".")[0] for name in members})
    assert sorted((members[f"{key}.jpg"], members[f"{key}.cls"]) for key in keys) == [
        (JPEG + b"cat/1.jpg", b"0"), (JPEG + b"dog/2.jpg", b"1")
    ]  # fmt: skip
    again = copied_of_copied_names(copy, "webdataset")
    assert (again.classes, again.columns) == (copy.classes, copy.columns)


def rows_with_classes(folder, names, labels):
    """A Parquet file as Hugging Face writes it, of samples whose classes have names."""
    images = [JPEG + bytes([number]) for number in range(len(labels))]
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
    table = pa.table({"image": images, "label": pa.array(labels, pa.int64())})
    folder.mkdir()
    said = json.dumps({"info": {"features": features}})
    pq.write_table(table.replace_schema_metadata({"huggingface": said}), folder / "data.parquet")
    return Dataset(folder)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["zebra", "ant", "monkey", "unseen"], [0, 1, 2, 0, 1, 2]),
        ([str(number) for number in range(12)], [11, 2, 10, 0, 2]),
        (["2", "1", "0"], [0, 1, 2]),
        (["2020", "2019", "a b", "é"], [1, 0, 1, 0]),
    ],
    ids=["with one unseen", "numbers", "numbers turned round", "odd names"],
)
@pytest.mark.parametrize("way", [("webdataset",), ("original",), ("parquet", "webdataset", "original", "webdataset")])
def test_every_copy_carries_the_table_of_classes(tmp_path, names, labels, way):
    data = rows_with_classes(tmp_path / "rows", names, labels)
    assert (data.classes, data.samples.labels.tolist()) == (tuple(names), labels)
    for number, format in enumerate(way):
        copied(data, tmp_path / str(number), format)
        data = Dataset(tmp_path / str(number))
        assert data.classes == tuple(names)
        assert sorted(data.samples.labels.tolist()) == sorted(labels)
        said = {data.classes[label] for label in data.samples.labels.tolist()}
        assert said == {names[label] for label in labels}


@pytest.mark.parametrize("format", ["parquet", "webdataset", "ready"])
def test_columns_have_their_types_in_every_copy_that_has_a_place_for_them(tmp_path, images, format):
    moment = datetime.fromisoformat("2024-05-01T08:30:00.250000")
    count = len(images)
    kinds = {
        "day": pa.array([moment.date()] * count), "clock": pa.array([moment.time()] * count),
        "at": pa.array([moment] * count), "there": pa.array([moment] * count, pa.timestamp("us", "UTC")),
        "fine": pa.array(range(count), pa.timestamp("ns")), "lasts": pa.array(range(count), pa.duration("us")),
        "price": pa.array([Decimal(f"{row}.25") for row in range(count)]),
        "some": pa.array([None if row % 2 else Decimal("0.5") for row in range(count)]),
    }  # fmt: skip
    table = pa.table({"image": [b"P5 4 4 255\n" + bytes([row] * 16) for row in range(count)], **kinds})
    (tmp_path / "rows").mkdir()
    pq.write_table(table, tmp_path / "rows" / "x.parquet")
    data = Dataset(tmp_path / "rows")
    if format == "ready":
        ingest(data, tmp_path / "copy", Applied.to(imagenet(4), "uint8"), on_event=quiet)
    else:
        copied(data, tmp_path / "copy", format)
    copy = Dataset(tmp_path / "copy")
    for name in kinds:
        assert copy.column(name).type == data.column(name).type, name
        values = [dict(zip(each.names, each.column(name), strict=True)) for each in (data, copy)]
        if format == "ready":
            assert values[0] == values[1]
        else:
            assert sorted(map(str, values[0].values())) == sorted(map(str, values[1].values()))


def test_shards_beside_those_of_a_copy_give_what_a_listing_of_all_gives(tmp_path, store):
    data = rows_with_classes(tmp_path / "rows", ["zebra", "ant"], [0, 1, 0])
    copied(data, store.url, "webdataset")
    assert Dataset(store.url).classes == ("zebra", "ant")
    own = tar_of([("1.jpg", JPEG), ("1.json", b'{"label": "ant"}')])
    store.write("x.tar", own)
    assert Dataset(store.url).classes == ("zebra", "ant"), "all labels are among those that a shard declares"
    other = tar_of([("__classes__", b'["ant", "cat"]'), ("2.jpg", JPEG), ("2.json", b'{"label": "cat"}')])
    store.write("y.tar", other)
    assert Dataset(store.url).classes == ("ant", "cat", "zebra"), "two tables that differ say no order"
    for name in [entry.object for entry in store.list() if entry.object.startswith("part-")]:
        store.remove(name)
    assert Dataset(store.url).classes == ("ant", "cat")
    store.remove("y.tar")
    assert Dataset(store.url).classes == ("ant",)


def test_a_table_of_classes_beside_folders_that_lacks_one_of_them_is_none(store):
    for name in ("zebra/1.jpg", "ant/2.jpg"):
        store.write(name, JPEG)
    for table, classes in (
        (b'["zebra", "ant"]', ("zebra", "ant")),
        (b'["zebra", "ox"]', ("ant", "zebra")),
        (b'["zebra", "ant", "ant"]', ("ant", "zebra")),
        (b'{"0": "zebra", "1": "ant"}', ("ant", "zebra")),
        (b"not JSON", ("ant", "zebra")),
    ):
        store.write("classes.json", table)
        data = Dataset(store.url)
        assert data.classes == classes
        assert {classes[label] for label in data.samples.labels.tolist()} == {"ant", "zebra"}


def test_a_field_that_is_null_in_every_sample_is_a_column_of_nothing(store):
    files = []
    for number in range(4):
        files += [(f"{number}.jpg", JPEG), (f"{number}.json", json.dumps({"label": "cat", "note": None}).encode())]
    store.write("x.tar", tar_of(files))
    data = Dataset(store.url)
    assert data.column("note").null_count == len(data.select("note is None")) == 4
    assert Dataset(store.url).manifest.found
    for format in ("parquet", "webdataset"):
        assert len(copied_of_copied_names(data, format)) == 4


class Table:
    """Rows of a table over CQL, without the table."""

    url, label_column, name_column = "cql://nobody@nowhere/photos/waste", "label", "name"

    def __init__(self, names):
        self._names = names

    def rows(self):
        keys = [f"{number:04}" for number in range(len(self._names))]
        return pa.table({"id": keys, "label": ["cat"] * len(keys), "name": self._names})

    def contents(self, objects):
        raise AssertionError("lengths are known")

    def read(self, object, offset, length):
        raise AssertionError("nothing is to be read")

    read_version = list = write = read


def test_rows_of_files_keep_their_order_in_a_table():
    names = [f"data/{file}.parquet/{row}" for file in (1, 2) for row in range(12)]
    shuffled = [names[place] for place in np.random.default_rng(0).permutation(len(names))]
    table = Table([*shuffled, "cat/10.jpg", "cat/9.jpg"])
    entries = [Entry(f"{number:04}", 3, "v") for number in range(len(names) + 2)]
    listed = CqlTables().read(table, [*entries, Entry(LABELS, 0, "v")])
    # Files stand in the order of their names, as they do in a folder.
    assert listed.table["name"].to_pylist() == ["cat/10.jpg", "cat/9.jpg", *names]
