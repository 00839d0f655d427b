"""The ready format: the same pixels with no decode, whole or not there, taken up again after a kill."""

import copy
import json
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import frostline as fl
from frostline.cli import main
from frostline.core.config import NodeSettings
from frostline.core.errors import DataError, SampleError, SettingError, TooManySkipped
from frostline.core.events import SampleSkipped
from frostline.datasets.copy import ready
from frostline.datasets.copy import ready as module
from frostline.datasets.copy.ready import ingest
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.ready import TABLE, part_name
from frostline.node import Node
from frostline.preprocess import (
    Applied,
    CenterCrop,
    ColorJitter,
    Decode,
    Normalize,
    Preprocess,
    RandomHorizontalFlip,
    Resize,
    efficientnet_lite,
    imagenet,
)
from frostline.preprocess.apply import steps_left, unpack_record
from frostline.stores.local import FolderStore, MmapFolder
from frostline.stores.open import open_store
from frostline.wire.messages import FeatureRequest
from support import plain
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import is_idle, joined, until, within_budget

PLAIN = Normalize(mean=(0.0,) * 3, std=(1.0,) * 3)
SQUARE = Preprocess(steps=(Decode(), Resize(256), CenterCrop(256), PLAIN))


def quiet(_):
    pass


def made_ready(source, destination, preprocess, *, dtype="uint8", object_bytes=1 << 20, **options):
    """The ready format of a data set."""
    options = {"on_event": quiet, **options}
    ingest(source, destination, Applied.to(preprocess, dtype), object_bytes=object_bytes, **options)
    return fl.Dataset(destination)


def rows(data, preprocess, **options):
    """Pixels, labels and ids of an epoch, as a plain loader hands them out."""
    with fl.offload(None, data, preprocess=preprocess, **options) as job:
        batches = list(job.loader(16, shuffle=True, seed=3, epoch=1))
    return [np.concatenate(column) for column in zip(*((b.features, b.labels, b.ids) for b in batches), strict=True)]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def some_photographs(photographs):
    data = fl.Dataset(photographs)
    return data.take(np.linspace(0, len(data) - 1, 12).astype(np.int64))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=8)


AUGMENTED = Preprocess(
    steps=(*SQUARE.steps[:-1], RandomHorizontalFlip(), ColorJitter(0.4, 0.4, 0.4, 0.1), *imagenet(224, True).steps[1:])
)


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize(
    ("kept", "declared"),
    [
        (imagenet(224), imagenet(224)),
        (efficientnet_lite(96), efficientnet_lite(96)),
        (SQUARE, imagenet(224)),
        (SQUARE, AUGMENTED),
        (AUGMENTED, AUGMENTED),
    ],
)
def test_photographs_give_the_same_pixels_to_the_bit(some_photographs, tmp_path, kept, declared, cut):
    format = made_ready(some_photographs, tmp_path / "ready", kept)
    assert same(rows(format, declared, cut=cut), rows(some_photographs, declared, cut=cut))


def test_nothing_is_decoded_when_it_is_read(images, tmp_path):
    format = made_ready(fl.Dataset(images), tmp_path, imagenet(32))
    rest = steps_left(imagenet(32), format.manifest.applied)
    assert [type(step).__name__ for step in rest.steps] == ["Stored", "Normalize"]


def test_ids_labels_classes_and_names_are_those_of_the_images(images, tmp_path):
    source = fl.Dataset(images)
    format = made_ready(source, tmp_path, imagenet(32), object_bytes=20_000)
    assert format.samples.ids.tolist() == source.samples.ids.tolist()
    assert format.samples.labels.tolist() == source.samples.labels.tolist()
    assert (format.classes, format.names) == (source.classes, tuple(source.samples.objects))
    part = format.take(np.array([5, 2]))
    assert part.names == (source.samples.objects[5], source.samples.objects[2])
    assert set(format.samples.offsets % 512) == {0}


def test_grey_and_16_bit_formats_keep_what_the_network_takes(images, tmp_path):
    source = fl.Dataset(images)
    grey = Preprocess(steps=(Decode("L"), Resize(32), CenterCrop(32), Normalize(mean=(3.0,), std=(2.0,))))
    assert same(rows(made_ready(source, tmp_path / "grey", grey), grey), rows(source, grey))
    half = made_ready(source, tmp_path / "half", imagenet(32), dtype="fp16")
    ours, exact = rows(half, imagenet(32), accuracy="fp16")[0], rows(source, imagenet(32))[0]
    assert np.array_equal(ours, exact.astype(np.float16).astype(np.float32))
    with pytest.raises(SettingError, match="accuracy='fp16'"):
        rows(half, imagenet(32))
    with pytest.raises(SettingError, match="random"):
        Applied.to(imagenet(32, augment=True), "fp16")


@pytest.mark.parametrize(("mode", "dtype"), [("RGB", "uint8"), ("RGB", "fp16"), ("L", "uint8"), ("L", "fp16")])
def test_a_format_becomes_images_with_the_same_pixels(some_photographs, tmp_path, mode, dtype):
    channels = {"RGB": 3, "L": 1}[mode]
    rest = (CenterCrop(96), Normalize(mean=(124.0, 116.5, 103.0)[:channels], std=(58.0, 57.0, 0.5)[:channels]))
    declared = Preprocess(steps=(Decode(mode), Resize(112), *rest))
    format = made_ready(some_photographs, tmp_path / "ready", declared, dtype=dtype)
    repack(format, tmp_path / "images", "original", on_event=quiet)
    ours, images = fl.Dataset(tmp_path / "images"), Preprocess(steps=(Decode(mode), *rest))
    assert {Path(name).suffix for name in ours.names} == {".png"}
    found, wanted = (
        sorted(map(np.ndarray.tobytes, rows(*item)[0])) for item in ((ours, images), (some_photographs, declared))
    )
    assert found == wanted


def test_a_format_becomes_another_as_its_images_would(some_photographs, tmp_path):
    squares = made_ready(some_photographs, tmp_path / "squares", SQUARE)
    for name, declared, dtype in (
        ("crops", imagenet(224), "uint8"),
        ("half", imagenet(224), "fp16"),
        ("same", SQUARE, "uint8"),
    ):
        made_ready(squares, tmp_path / name, declared, dtype=dtype)
        made_ready(some_photographs, tmp_path / "direct" / name, declared, dtype=dtype)
        ours, direct = (path / "pixels" / "000000.ready" for path in (tmp_path / name, tmp_path / "direct" / name))
        assert ours.read_bytes() == direct.read_bytes()
    with pytest.raises(SettingError, match=r"this ready format was made with .* does not start with that"):
        made_ready(squares, tmp_path / "other", efficientnet_lite(96))


def test_damaged_records_are_left_out_of_a_copy(images, tmp_path):
    format = made_ready(fl.Dataset(images), tmp_path / "ready", imagenet(32))
    path = tmp_path / "ready" / "pixels" / "000000.ready"
    path.chmod(0o644)
    contents = bytearray(path.read_bytes())
    contents[int(format.samples.offsets[2])] ^= 1
    path.write_bytes(contents)
    format = fl.Dataset(tmp_path / "ready")
    for to in ("webdataset", "ready"):
        seen = []
        if to == "ready":
            ingest(format, tmp_path / "copy", format.manifest.applied, max_skipped_fraction=0.1, on_event=seen.append)
        else:
            repack(format, tmp_path / to, to, max_skipped_fraction=0.1, on_event=seen.append)
        (skipped,) = (event for event in seen if isinstance(event, SampleSkipped))
        assert "damaged record" in skipped.reason


@pytest.mark.parametrize(
    "declared",
    [
        imagenet(192),
        efficientnet_lite(224),
        imagenet(224, augment=True),
        Preprocess(steps=(Decode("L"), Resize(256), CenterCrop(256), Normalize(mean=(0.0,), std=(1.0,)))),
        Preprocess(steps=(Decode(reduced=True), Resize(256), CenterCrop(256), PLAIN)),
        Preprocess(steps=(Decode(), Resize(256), CenterCrop(226), PLAIN)),
        Preprocess(steps=(Decode(), Resize(256), CenterCrop(260), PLAIN)),
    ],
)
def test_a_preprocessing_that_starts_otherwise_is_refused(declared):
    with pytest.raises(SettingError, match=r"made with .*Resize\(shorter=256.* does not start with that"):
        Applied.to(SQUARE, "uint8").rest(declared)


def test_images_of_several_sizes_cannot_be_kept():
    with pytest.raises(SettingError, match="CenterCrop"):
        Applied.to(imagenet(224, augment=True), "uint8")


def test_leaves_a_complete_ready_format_unchanged(images, tmp_path):
    source, applied = fl.Dataset(images), Applied.to(imagenet(32), "uint8")
    first = ingest(source, tmp_path, applied, object_bytes=20_000, on_event=quiet)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = ingest(source, tmp_path, applied, object_bytes=20_000, on_event=quiet)
    assert (first.made, again.made) == (first.objects, 0)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert again.digest == first.digest


def test_refuses_two_at_once_and_clears_up_after_a_killed_one(images, tmp_path):
    source, store = fl.Dataset(images), FolderStore(str(tmp_path))
    made_ready(source, tmp_path, imagenet(32))
    half = tmp_path / "pixels" / ".partial-0123"
    half.write_bytes(b"half")
    with store.lock_for_writing(), pytest.raises(DataError, match="another process"):
        made_ready(source, tmp_path, imagenet(32))
    assert half.exists()
    made_ready(source, tmp_path, imagenet(32))
    assert not half.exists()


def test_other_data_or_other_steps_do_not_mix(images, tmp_path):
    source = fl.Dataset(images)
    made_ready(source, tmp_path / "one", imagenet(32))
    with pytest.raises(SettingError, match="choose another destination"):
        made_ready(source, tmp_path / "one", imagenet(40))
    with pytest.raises(SettingError, match="is not empty"):
        made_ready(source, images, imagenet(32))
    with pytest.raises(SettingError, match="does not start with that"):
        made_ready(fl.Dataset(tmp_path / "one"), tmp_path / "two", imagenet(40))
    for declared, preset in ((efficientnet_lite(32), "efficientnet_lite:32"), (imagenet(64), "imagenet:64")):
        with pytest.raises(SettingError, match=f"frostline ingest SRC DEST --preprocess {preset}$"):
            fl.offload(None, fl.Dataset(tmp_path / "one"), preprocess=declared)
    with pytest.raises(SettingError, match=r"or make another ready format$"):
        fl.offload(None, fl.Dataset(tmp_path / "one"), preprocess=fl.preprocess.imagenet(32, augment=True))


def test_writes_lost_parts_again_and_refuses_an_incomplete_format(images, tmp_path):
    source = fl.Dataset(images)
    whole = made_ready(source, tmp_path, imagenet(32), object_bytes=20_000)
    objects = sorted((tmp_path / "pixels").iterdir())
    good = objects[1].read_bytes()
    objects[0].unlink()
    objects[1].chmod(0o644)
    objects[1].write_bytes(good[:-512])
    (tmp_path / part_name(2)).write_bytes(b"rubbish")
    with pytest.raises(DataError, match="run frostline ingest again"):
        len(fl.Dataset(tmp_path))
    (tmp_path / TABLE).unlink()
    with pytest.raises(DataError, match="is not whole"):
        len(fl.Dataset(tmp_path))
    made = ingest(source, tmp_path, Applied.to(imagenet(32), "uint8"), object_bytes=20_000, on_event=quiet)
    assert made.made == 3
    assert objects[1].read_bytes() == good
    assert fl.Dataset(tmp_path).samples.ids.tolist() == whole.samples.ids.tolist()


@pytest.mark.parametrize("instead", [b'"Circle"', b'"circle('], ids=["another name", "no JSON"])
def test_a_flipped_bit_in_the_name_of_a_class_is_noticed(images, tmp_path, instead):
    made_ready(fl.Dataset(images), tmp_path, imagenet(32))
    good = (tmp_path / TABLE).read_bytes()
    bad = good.replace(b'"circle"', instead)
    assert bad != good
    (tmp_path / TABLE).chmod(0o644)
    (tmp_path / TABLE).write_bytes(bad)
    with pytest.raises(DataError, match="is damaged: run frostline ingest again"):
        len(fl.Dataset(tmp_path))


def test_an_object_damaged_at_the_same_size_is_made_again_when_all_is_verified(images, tmp_path):
    source = fl.Dataset(images)
    made_ready(source, tmp_path / "ready", imagenet(32), object_bytes=20_000)
    before = {path.name: path.read_bytes() for path in (tmp_path / "ready" / "pixels").iterdir()}
    name = sorted(before)[1]
    damaged = tmp_path / "ready" / "pixels" / name
    damaged.chmod(0o644)
    damaged.write_bytes(bytes(len(before[name])))
    options = {"object_bytes": 20_000, "on_event": quiet}
    applied = Applied.to(imagenet(32), "uint8")
    assert ingest(source, tmp_path / "ready", applied, **options).made == 0
    assert ingest(source, tmp_path / "ready", applied, verify=True, **options).made == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "ready" / "pixels").iterdir()} == before


def test_a_damaged_record_is_skipped_and_never_handed_out(images, tmp_path):
    format = made_ready(fl.Dataset(images), tmp_path, imagenet(32))
    [path] = (tmp_path / "pixels").iterdir()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(int(format.samples.offsets[4]) + 77)
        file.write(b"\xff\x00\xff")
    format, heard = fl.Dataset(tmp_path), []
    ids = rows(format, imagenet(32), on_event=heard.append)[2]
    assert set(format.samples.ids.tolist()) - set(ids.tolist()) == {int(format.samples.ids[4])}
    assert ["checksum" in item.reason for item in heard if isinstance(item, SampleSkipped)] == [True]


@pytest.mark.parametrize("length", [1, 1 << 20, 1 << 62], ids=["short", "long", "absurd"])
def test_a_wrongly_named_record_costs_none_of_those_read_with_it(images, tmp_path, length):
    format = made_ready(fl.Dataset(images), tmp_path, imagenet(32))
    samples = format.samples.take(np.arange(8))
    lengths = samples.lengths.copy()
    lengths[[3, 5]] = length
    asked = {
        "data": format.url, "prefix": None, "cut": 1, "reading": format.manifest.reading,
        "preprocess": format.manifest.applied.rest(imagenet(32)).to_json(),
    }  # fmt: skip
    with Node(NodeSettings(memory_bytes=256 << 20), (format.url,)) as node:
        whole = joined(node.features(FeatureRequest(samples=samples, **asked)))
        ids, (pixels,), _, skipped = joined(
            node.features(FeatureRequest(samples=replace(samples, lengths=lengths), **asked))
        )
        assert skipped == samples.ids[[3, 5]].tolist()
        assert ids == [item for item in whole[0] if item not in skipped]
        np.testing.assert_array_equal(pixels, np.delete(whole[1][0], [3, 5], axis=0))
        assert within_budget(node)
        assert is_idle(node)


def test_images_that_cannot_be_read_are_left_out_up_to_the_allowance(images, tmp_path):
    broken = shutil.copytree(images, tmp_path / "broken")
    (broken / "noise" / "003.jpg").write_bytes(b"no image")
    with pytest.raises(TooManySkipped, match="1 of 24"):
        made_ready(fl.Dataset(broken), tmp_path / "none", imagenet(32), max_skipped_fraction=0)
    heard = []
    format = made_ready(
        fl.Dataset(broken), tmp_path / "some", imagenet(32), max_skipped_fraction=0.1, on_event=heard.append
    )
    assert [item.object for item in heard if isinstance(item, SampleSkipped)] == ["noise/003.jpg"]
    assert len(format) == 23
    assert "noise/003.jpg" not in format.names


def test_objects_of_a_local_format_are_read_only_and_mapped(images, tmp_path):
    format = made_ready(fl.Dataset(images), tmp_path, imagenet(32))
    [path] = (tmp_path / "pixels").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    store = MmapFolder(FolderStore(str(tmp_path)))
    name, offset, length = format.samples.objects[0], int(format.samples.offsets[3]), int(format.samples.lengths[3])
    view = store.read(name, offset, length)
    assert bytes(view) == path.read_bytes()[offset : offset + length]
    assert type(view.obj).__name__ == "mmap"
    assert view.readonly
    replaced = path.with_name("new")
    replaced.write_bytes(bytes(path.stat().st_size))
    replaced.chmod(0o444)
    replaced.replace(path)
    assert not any(store.read(name, offset, length))
    assert any(view)
    path.chmod(0o644)
    assert isinstance(store.read(name, offset, length), bytes)


def test_a_format_in_a_bucket_gives_the_same_pixels(images, s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("formats")
    source = fl.Dataset(images)
    format = made_ready(source, "s3://formats/one", imagenet(32), object_bytes=20_000)
    assert same(rows(format, imagenet(32)), rows(source, imagenet(32)))
    again = ingest(source, "s3://formats/one", Applied.to(imagenet(32), "uint8"), object_bytes=20_000, on_event=quiet)
    assert again.made == 0


def test_training_on_a_format_has_the_losses_of_a_plain_loop_on_the_images(images, tmp_path):
    source, flipped = fl.Dataset(images), tiny_preprocess(flip=True)  # the flip is left to the job
    format = made_ready(source, tmp_path, tiny_preprocess())
    model = fl.freeze(Small(), "stem", input_shape=(3, 32, 32))
    twin = copy.deepcopy(model)
    with fl.offload(model, format, preprocess=flipped) as job:
        ours = plain.through(job, batch_size=8, epochs=2)
    assert ours == plain.losses(twin, images, source, flipped, batch_size=8, epochs=2)


def test_a_node_stays_within_its_budget_on_formats_of_any_size(images, tmp_path):
    large = Preprocess(steps=(Decode(), Resize(1024), CenterCrop(1024), CenterCrop(128), PLAIN))
    format = made_ready(fl.Dataset(images), tmp_path, Preprocess(steps=(*large.steps[:3], PLAIN)))
    rest = steps_left(large, format.manifest.applied)
    with Node(NodeSettings(memory_bytes=256 << 20), (format.url,)) as node:
        asked = FeatureRequest(data=format.url, samples=format.samples, prefix=None, cut=1, preprocess=rest.to_json())
        ids, *_ = joined(batch for batch in node.features(asked))
        assert within_budget(node)
        assert is_idle(node)
    assert ids == format.samples.ids.tolist()


def test_a_format_in_another_store_gives_the_same_pixels(images):
    source = fl.Dataset(images)
    format = made_ready(source, "memory://formats/one", imagenet(32), object_bytes=20_000)
    assert same(rows(format, imagenet(32)), rows(source, imagenet(32)))
    assert open_store(format.url).url == "memory://formats/one"


def test_a_killed_ingest_goes_on_where_it_was(tmp_path):
    images = image_folder(tmp_path / "images", per_class=120)
    straight = made_ready(fl.Dataset(images), tmp_path / "straight", imagenet(128), object_bytes=500_000)
    verb = [
        sys.executable,
        "-c",
        "from frostline.cli import main; main()",
        "ingest",
        str(images),
        str(tmp_path / "ready"),
    ]
    verb += ["--preprocess", "imagenet:128", "--object-size", "500000", "--json"]
    parts = tmp_path / "ready" / ".frostline" / "ready" / "parts"
    with subprocess.Popen(verb, stdout=subprocess.DEVNULL) as process:
        until(lambda: process.poll() is not None or len(list(parts.glob("*.parquet"))) >= 3)
        process.send_signal(signal.SIGKILL)
    done = json.loads(subprocess.run(verb, check=True, capture_output=True).stdout)
    assert 0 < done["made"] < done["objects"]
    format = fl.Dataset(tmp_path / "ready")
    assert format.samples.ids.tolist() == straight.samples.ids.tolist()
    for path in sorted((tmp_path / "straight" / "pixels").iterdir()):
        assert (tmp_path / "ready" / "pixels" / path.name).read_bytes() == path.read_bytes()


def test_notices_bytes_that_differ_from_those_written(images, tmp_path, monkeypatch):
    class Forgetful(FolderStore):
        def write(self, object, data):
            super().write(object, bytes(data)[:-1] + b"?" if object.startswith("pixels/") else data)

    monkeypatch.setattr(module, "open_store", Forgetful)
    monkeypatch.setattr(ready, "_READ_BACK_BYTES", 1000)
    with pytest.raises(DataError, match="came back"):
        made_ready(fl.Dataset(images), tmp_path / "format", imagenet(32))
    assert not (tmp_path / "format" / TABLE).exists()
    monkeypatch.undo()
    assert len(made_ready(fl.Dataset(images), tmp_path / "format", imagenet(32))) == len(fl.Dataset(images))


def test_ignores_a_record_of_another_length():
    with pytest.raises(SampleError, match="no record"):
        unpack_record(Applied.to(imagenet(32), "uint8").stored, bytes(100))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "either --resize N or --preprocess"),
        (["--resize", "32", "--preprocess", "imagenet:32"], "either --resize N or --preprocess"),
        (["--resize", "32", "--dtype", "fp16"], "give its --preprocess"),
        (["--preprocess", "nowhere"], "none of the presets"),
        (["--preprocess", "{images}/circle/000.jpg"], "none of the presets"),
        (["--resize", "0"], "from 1 to 4096"),
    ],
)
def test_a_mistake_on_the_command_line_is_a_one_sentence_error(images, tmp_path, capsys, arguments, sentence):
    with pytest.raises(SystemExit) as ended:
        main(["ingest", str(images), str(tmp_path / "to"), *(argument.format(images=images) for argument in arguments)])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not Path(tmp_path / "to").exists()


def test_the_command_copies_a_ready_format_unchanged(images, tmp_path, capsys):
    made_ready(fl.Dataset(images), tmp_path / "ready", imagenet(32))
    with pytest.raises(SystemExit) as ended:
        main(["ingest", str(tmp_path / "ready"), str(tmp_path / "copy"), "--json"])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["samples"] == 24
    assert fl.Dataset(tmp_path / "copy").manifest.applied == fl.Dataset(tmp_path / "ready").manifest.applied


def test_the_command_takes_a_file_and_prints_a_summary(images, tmp_path, capsys):
    (tmp_path / "steps.json").write_text(json.dumps(imagenet(32).to_json()))
    with pytest.raises(SystemExit) as ended:
        main(["ingest", str(images), str(tmp_path / "to"), "--preprocess", str(tmp_path / "steps.json")])
    assert not ended.value.code
    assert "24 samples in 1 object, 86.0 kB in all, at file:" in capsys.readouterr().out
    assert len(fl.Dataset(tmp_path / "to")) == 24
