"""Nothing of a data set is lost without a word.

What is no sample is named and counted: objects, rows, keys of shards, columns, samples of a pass.

Copies of data sets at random between all formats keep samples, classes, labels, splits and metadata.
"""

import csv
import gzip
import io
import json
import logging
import re
import tempfile
import uuid
from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

import frostline as fl
from frostline.cli import main
from frostline.core.errors import DataError, SettingError
from frostline.datasets import Dataset
from frostline.datasets.copy.ready import ingest
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats import left_out
from frostline.datasets.formats.contradictions import contradicting_labels
from frostline.datasets.formats.left_out import LeftOut
from frostline.datasets.formats.parquet import CellCache, CellReader
from frostline.datasets.reading import open_samples
from frostline.preprocess import Applied, imagenet
from frostline.stores.open import open_store
from support.formats import arrow_of, tar_of
from support.images import image_folder

pytestmark = pytest.mark.promise(
    "complete", mended="columns of dates, unread suffixes and rows without data vanished without a word"
)

IMAGE = b"P5 4 4 255\n" + bytes(16)


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4()}")


def put(store, *names):
    for name in names:
        store.write(name, IMAGE)


def said(data):
    return [(one.what, one.reason, one.total, one.names) for one in data.manifest.left_out]


def rows(**columns):
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def test_a_class_whose_images_are_of_a_suffix_that_is_not_read_is_named(store, caplog):
    put(store, "cat/1.jpg", "dog/1.jpg", *(f"frog/{number}.xcf" for number in range(5)), "notes", "in.jpg", "a/.b.jpg")
    assert said(Dataset(store.url)) == [
        ("object", "with a hidden name", 1, ("a/.b.jpg",)),
        ("object", "in no class folder", 1, ("in.jpg",)),
        ("object", "without a suffix", 1, ("notes",)),
        ("object", "with the suffix .xcf, which is not read", 5, ("frog/0.xcf", "frog/1.xcf", "frog/2.xcf")),
    ]
    [record] = [record for record in caplog.records if record.name == "frostline"]
    assert record.levelno == logging.WARNING
    assert "5 objects with the suffix .xcf, which is not read (frog/0.xcf, frog/1.xcf, frog/2.xcf, …)" in record.message
    assert "\n" not in record.message


@pytest.mark.parametrize(
    "folder", ["__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found", ".Trash"]
)
def test_what_a_system_keeps_beside_files_is_no_sample_and_no_class(store, folder):
    put(store, "cat/1.jpg", "dog/1.jpg", f"cat/{folder}/1.jpg/THUMB.jpg", f"{folder}/dog/2.jpg", f"x{folder[1:]}/3.jpg")
    store.write(f"{folder}/1.tar", tar_of([("1.jpg", IMAGE)]))
    data = Dataset(store.url)
    assert (data.classes, len(data)) == (("cat", "dog", f"x{folder[1:]}"), 3)
    [one] = said(data)
    assert one[:3] == ("object", "with a hidden name", 3)
    store.write("seen.tar", tar_of([("1.jpg", IMAGE), (f"{folder}/2.jpg", IMAGE)]))
    assert list(Dataset(store.url, format="webdataset").names) == ["seen.tar/1.jpg"]
    write_rows(store, "parquet", {"image": [IMAGE], "label": [folder]}, name="a")
    with pytest.raises(SettingError, match="cannot be the name of a folder"):
        repack(Dataset(store.url, format="parquet"), f"memory://{uuid.uuid4()}", "original", on_event=print)


@pytest.mark.parametrize("format", ["parquet", "ready"])
def test_the_result_of_a_copy_says_what_of_its_source_is_no_sample(store, tmp_path, format):
    put(store, "cat/1.jpg", "dog/1.jpg", "in.jpg")
    source = Dataset(store.url)
    if format == "ready":
        done = ingest(source, tmp_path, Applied.to(imagenet(4), "uint8"), on_event=lambda _: None)
    else:
        done = repack(source, tmp_path, format, on_event=lambda _: None)
    [left] = json.loads(json.dumps(done.to_json()))["left_out"]
    assert left == {"what": "object", "reason": "in no class folder", "total": 1, "names": ["in.jpg"]}


def test_what_lies_beside_samples_is_named_unless_it_belongs_to_them(store):
    store.write("a.tar", tar_of([("1.jpg", IMAGE), ("2.xcf", IMAGE), ("2.cls", b"3"), ("__meta__", b""), (".x", b"")]))
    put(store, "odd.jpg", "b.bin")
    assert said(Dataset(store.url, format="webdataset")) == [
        ("object", "that the format webdataset does not use", 1, ("odd.jpg",)),
        ("object", "with the suffix .bin, which is not read", 1, ("b.bin",)),
        ("key", "with neither an image nor a sound, but .cls, .xcf", 1, ("a.tar/2",)),
        ("key", "with a hidden name", 2, ("a.tar/.x", "a.tar/__meta__")),
    ]
    assert said(Dataset(store.url, format="folders"))[0][1:] == (
        "that the format folders does not use, and --format webdataset reads", 1, ("a.tar",)
    )  # fmt: skip
    store.write("a.tar", tar_of([("1.jpg", IMAGE)]))
    assert [what for what, *_ in said(Dataset(store.url, format="webdataset"))] == ["object"] * 2


def test_an_empty_folder_of_a_class_on_a_disk_is_named_as_long_as_it_is_empty(tmp_path, caplog):
    for name in ("cat/1.jpg", "dog/1.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(IMAGE)
    for name in ("bee", "cat/deep", ".hidden", "@eaDir"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "bee")
    data = Dataset(tmp_path)
    assert (data.classes, len(data)) == (("cat", "dog"), 2)
    assert said(data) == [("folder", "without any file, which is no class", 1, ("bee/",))]
    assert "1 folder without any file, which is no class (bee/)" in caplog.text
    (tmp_path / "link").unlink()
    (tmp_path / "bee").rmdir()
    (tmp_path / "ape").mkdir()  # the listing is the same, and so is its manifest
    assert said(Dataset(tmp_path)) == [("folder", "without any file, which is no class", 1, ("ape/",))]
    (tmp_path / "ape").rmdir()
    assert said(Dataset(tmp_path)) == []


@pytest.mark.parametrize("around", ["", "all/"])
def test_an_empty_folder_of_a_class_in_one_of_splits_is_named(tmp_path, around):
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / around / name).mkdir(parents=True)
        if name != "val/dog":
            (tmp_path / around / name / "1.jpg").write_bytes(IMAGE)
    data = Dataset(tmp_path)
    assert (data.classes, len(data)) == (("cat", "dog"), 3)
    assert said(data) == [("folder", "without any file, which is no class", 1, (f"{around}val/dog/",))]


@pytest.mark.parametrize(
    ("fields", "kept", "twice"),
    [
        ({"o": {"x": 1}, "o.x": 2}, {"o.x": 2}, ("o.x",)),
        ({"o.x": 2, "o": {"x": 1, "y": 3}}, {"o.x": 2, "o.y": 3}, ("o.x",)),
        ({"a": {"b.c": 1}, "a.b": {"c": 2}}, {"a.b.c": 1}, ("a.b.c",)),
        ({"o": {"x": 1}, "o.y": 2}, {"o.x": 1, "o.y": 2}, ()),
        ({"o": {}, "o.x": 2}, {"o.x": 2}, ()),
    ],
)
def test_fields_of_json_that_would_have_one_name_are_named_and_one_counts(store, fields, kept, twice):
    store.write("a.tar", tar_of([("1.jpg", IMAGE), ("1.json", json.dumps(fields).encode())]))
    data = Dataset(store.url)
    table = data.manifest.columns.table
    assert {name: table[name].to_pylist()[0] for name in table.column_names if "." in name} == kept
    reason = "in an object, called as another field is, which counts"
    assert said(data) == ([("column", reason, 1, twice)] if twice else [])


def test_images_that_no_list_names_are_left_out_and_the_lists_are_not(store):
    put(store, "a b.jpg", "c%20.jpg", "d.jpg")
    store.write("labels.csv", b"file_name,label\na b.jpg,x\nc%20.jpg,y\n")
    assert said(Dataset(store.url)) == [("object", "that the format urls does not use", 1, ("d.jpg",))]


def test_rows_without_a_sample_and_columns_without_a_place_are_named(store):
    images = [IMAGE, None, IMAGE, None, None, None]
    store.write("a.parquet", rows(image=images, label=list("aabbab"), other=images, fine=range(6)))
    data = Dataset(store.url)
    lost = ("a.parquet/1", "a.parquet/3", "a.parquet/4")
    wanted = [("row", "without a sample", 4, lost), ("column", "of a type that is no metadata", 1, ("other",))]
    assert (len(data), said(data)) == (2, wanted)
    assert said(Dataset(store.url)) == wanted, "as it was found again"
    store.write("b.parquet", rows(image=[IMAGE, None], label=["a", "b"]))
    wanted[0] = ("row", "without a sample", 5, lost)
    assert said(Dataset(store.url)) == wanted, "of the first file nothing but the end was read again"


STRUCT = pa.struct({"bytes": pa.binary(), "path": pa.string()})
SHARED = pa.array([IMAGE] * 4).dictionary_encode()
NO_METADATA = "of a type that is no metadata"
TOO_LONG = "of lists too long for metadata"
BESIDE = {
    "images": (pa.array([[IMAGE], [], None, [IMAGE, None]]), NO_METADATA),
    "structs": (pa.array([[{"bytes": IMAGE, "path": None}], [], None, [None]], pa.list_(STRUCT)), NO_METADATA),
    "shared images": (pa.ListArray.from_arrays([0, 1, 2, 3, 4], SHARED), NO_METADATA),
    "by name": (pa.array([[("a", IMAGE)], [], None, []], pa.map_(pa.string(), pa.binary())), NO_METADATA),
    "hashes": (pa.array([b"1234"] * 4, pa.binary(4)), NO_METADATA),
    "a view": (pa.array([[1], [2], None, []], pa.list_view(pa.int64())), NO_METADATA),
    "long": (pa.array([list(range(4000))] * 4), TOO_LONG),
    "one long": (pa.array([[], [], [], list(range(40000))]), TOO_LONG),
    "runs": (pa.RunEndEncodedArray.from_arrays(pa.array([2, 4], pa.int32()), pa.array(["x", "y"])), NO_METADATA),
    "either": (
        pa.UnionArray.from_sparse(pa.array([0, 1, 0, 1], pa.int8()), [pa.array([1, 2, 3, 4]), pa.array(list("abcd"))]),
        NO_METADATA,
    ),
}


def write_rows(store, format, columns, name="a"):
    """Write columns as a file of a format, an Arrow file in several batches."""
    table = pa.table(columns)
    if format == "parquet":
        store.write(f"{name}.parquet", rows(**columns))
        return Dataset(store.url)
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    store.write(f"{name}.arrow", out.getvalue())
    return Dataset(store.url)


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_column_that_has_no_place_beside_the_samples_is_named(store, format, name):
    column, reason = BESIDE[name]
    if format == "parquet" and name in ("runs", "either"):
        with pytest.raises(pa.ArrowNotImplementedError):  # Parquet has no such columns
            rows(column=column)
        return
    if format == "arrow" and name == "shared images":
        with pytest.raises(DataError, match="has columns that are dictionaries"):
            len(write_rows(store, format, {"image": [IMAGE] * 4, name: column}))
        return
    data = write_rows(store, format, {"image": [IMAGE] * 4, "label": list("abab"), name: column, "fine": range(4)})
    assert (len(data), data.classes, data.column("fine").to_pylist()) == (4, ("a", "b"), [0, 1, 2, 3])
    assert said(data) == [("column", reason, 1, (name,))] == said(Dataset(store.url))
    with pytest.raises(SettingError):
        data.column(name)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_the_fields_of_structs_are_metadata_or_named_whatever_they_are_called(store, format):
    fields = {"w": 4, "bytes": IMAGE, "path": "p"}
    empty = {**fields, "bytes": None, "path": None}
    structs = [fields, empty, None, fields] if format == "arrow" else [fields, None, None, fields]
    meta = [{"x": None, "id": 1, "thumb": IMAGE}, None, {"x": [1, 2], "id": None}, {"x": [], "id": 3}]
    columns = {"the.image": structs, "label": list("abab"), "meta": meta, "in.side": [{"a.b": row} for row in range(4)]}
    data = write_rows(store, format, columns)
    assert data.samples.labels.tolist() == [0, 1]
    assert data.column("meta.id").to_pylist() == [1, 3]
    assert data.column("meta.x").to_pylist() == [None, "[]"]
    assert data.column("in.side.a.b").to_pylist() == [0, 3]
    lost = tuple(f"a.{format}/{row}" for row in (1, 2))
    assert said(data) == [
        ("row", "without a sample", 2, lost),
        ("column", NO_METADATA, 2, ("the.image.w", "meta.thumb")),
    ]


@pytest.mark.parametrize("nested", [False, True])
def test_images_that_rows_of_parquet_share_are_read(store, nested):
    images = pa.array([IMAGE, None, IMAGE, b"other"]).dictionary_encode()
    column = pa.StructArray.from_arrays([images, pa.nulls(4, pa.string())], ["bytes", "path"]) if nested else images
    data = write_rows(store, "parquet", {"image": column, "label": list("aabb")})
    assert data.samples.labels.tolist() == [0, 1, 1]
    assert data.samples.lengths.tolist() == [len(IMAGE), len(IMAGE), 5]
    assert said(data) == [("row", "without a sample", 1, ("a.parquet/1",))]
    samples, reader = data.samples, CellReader(open_store(store.url), CellCache())
    places = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    assert [bytes(reader.read(*place)) for place in places] == [IMAGE, IMAGE, b"other"]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"views": [[IMAGE]] * 4}, "several images a row in its column 'views'"),
        ({"views": [[[{"bytes": IMAGE}]]] * 4}, "several images a row in its column 'views'"),
        ({"views": pa.array([[IMAGE]] * 4, pa.list_view(pa.binary()))}, "several images a row in its column 'views'"),
        ({"data": [{"image": IMAGE, "label": "a"}] * 4}, "images within another column, as 'data.image'"),
        ({"data": [{"in": {"image": {"bytes": IMAGE, "path": ""}}}] * 4}, "another column, as 'data.in.image'"),
        ({"image": [IMAGE] * 4, "a.b": range(4), "a": [{"b": 1}] * 4}, "two columns called 'a.b'"),
        ({"image.bytes": [IMAGE] * 4, "image": [{"bytes": IMAGE}] * 4}, "two columns called 'image.bytes'"),
    ],
)
@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_images_that_cannot_be_told_apart_from_a_schema_get_a_sentence(store, format, columns, sentence):
    with pytest.raises(DataError, match=sentence):
        len(write_rows(store, format, columns))


@pytest.mark.parametrize("name", ["labels.csv", "list.csv"])
@pytest.mark.parametrize(
    ("kept", "written"),
    [
        ("images/e\u0301té.jpg", "été.jpg"),
        ("images/été.jpg", "e\u0301te\u0301.jpg"),
        ("images/e\u0301té.jpg", "images/été"),
        ("images/summer.jpg", "images\\summer.jpg"),
        ("images/e\u0301té.jpg", "images\\été.jpg"),
    ],
)
def test_names_in_lists_are_found_as_a_mac_or_windows_writes_them(store, name, kept, written):
    store.write(kept, IMAGE)
    store.write("images/other.jpg", IMAGE)
    store.write(name, f"file_name,label\n{written},summer\nother.jpg,winter\n".encode())
    data = Dataset(store.url)
    assert {
        data.classes[label]: object for object, label in zip(data.samples.objects, data.samples.labels, strict=True)
    } == {
        "summer": kept,
        "winter": "images/other.jpg",
    }


def test_of_two_names_that_look_alike_a_list_means_the_one_that_it_writes(store):
    names = ["images/e\u0301.jpg", "images/\u00e9.jpg"]
    for name in names:
        store.write(name, IMAGE)
    store.write("labels.csv", f"file_name,label\n{names[0]},a\n{names[1]},b\n".encode())
    data = Dataset(store.url)
    assert dict(zip(data.samples.objects, data.samples.labels.tolist(), strict=True)) == {names[0]: 0, names[1]: 1}


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_struct_called_label_is_metadata_of_which_a_field_may_be_named(store, format):
    labels = [{"name": name, "id": number} for number, name in enumerate("bab")] + [None]
    data = write_rows(store, format, {"image": [IMAGE] * 4, "label": labels})
    assert data.samples.labels.tolist() == [-1] * 4
    assert data.column("label.id").to_pylist() == [0, 1, 2, None]
    with pytest.raises(DataError, match=re.escape("--label label.name (in Python label='label.name')")):
        data.selection.require_classes(2, data.url)
    named = fl.Dataset(data.url, label="label.name")
    assert (named.classes, named.samples.labels.tolist()) == (("a", "b"), [1, 0, 1, -1])


@pytest.mark.parametrize("image", [b"P5 1 1 255\n1", IMAGE])
@pytest.mark.parametrize("nested", [False, True])
def test_views_of_arrow_files_are_labels_and_metadata_and_no_images(store, image, nested):
    names = pa.array(["b", None, "a", "b"]).cast(pa.string_view())
    columns = {"image": [image] * 4, "label": names, "site": names}
    data = write_rows(store, "arrow", columns)
    assert (data.classes, data.samples.labels.tolist()) == (("a", "b"), [1, -1, 0, 1])
    assert data.column("site").to_pylist() == names.to_pylist()
    views = pa.array([image] * 4).cast(pa.binary_view())
    columns["image"] = pa.StructArray.from_arrays([views], ["bytes"]) if nested else views
    with pytest.raises(DataError, match=r"has views in its column 'image(\.bytes)?'.* or as Parquet"):
        len(write_rows(store, "arrow", columns))


def test_what_came_beside_the_data_since_the_manifest_was_built_is_named_too(store):
    put(store, "cat/1.jpg")
    assert said(Dataset(store.url)) == []
    put(store, "cat/1.xcf")
    data = Dataset(store.url)
    assert data.manifest.found
    assert said(data) == [("object", "with the suffix .xcf, which is not read", 1, ("cat/1.xcf",))]
    assert data.statistics().left_out == (LeftOut(*said(data)[0]),)


def kinds_of(store, folder):
    """Five samples with a column of names and one of whole numbers, in the format that a folder is called by."""
    names = ["cat", "dog", None, "cat", "owl"]
    fields = [{"Category": name, "grade": 2.0 * row} for row, name in enumerate(names)]
    if folder == "webdataset":
        labels = [json.dumps({"label": "x", **one}).encode() for one in fields]
        images = [(f"{row}.pgm", IMAGE) for row in range(len(fields))]
        members = [*images, *((f"{row}.json", label) for row, label in enumerate(labels))]
        store.write("a.tar", tar_of(members))
    elif folder == "parquet":
        images = [IMAGE] * len(fields)
        store.write("a.parquet", rows(image=images, Category=names, grade=[one["grade"] for one in fields]))
    else:
        place = "" if folder == "urls" else "images/"
        put(store, *(f"{place}{row}.pgm" for row in range(5)))
        lines = [f"{row},{one['Category'] or ''},{one['grade']}" for row, one in enumerate(fields)]
        store.write("labels.csv", "\n".join(["image_id,Category,grade", *lines]).encode())
    return store.url


@pytest.mark.parametrize("folder", ["webdataset", "parquet", "urls", "folders"])
def test_the_column_of_labels_can_be_named_in_every_format(store, folder):
    url = kinds_of(store, folder)
    data = Dataset(url, label="category")
    assert (data.classes, data.samples.labels.tolist()) == (("cat", "dog", "owl"), [0, 1, -1, 0, 2])
    assert data.column("Category").to_pylist() == ["cat", "dog", None, "cat", "owl"]
    assert len(data.select("label == 'cat'")) == 2
    assert data.select("label is not None").classes == data.classes
    numbers = Dataset(url, label="grade")
    assert (len(numbers.classes), numbers.samples.labels.tolist()) == (9, [0, 2, 4, 6, 8])
    assert len({numbers.digest, data.digest, Dataset(url).digest}) == 3
    data.save_splits({"odd": data.take(np.array([1, 3]))})
    named = data.take(np.array([1, 3])).names
    assert Dataset(url)["odd"].names == Dataset(url, label="grade")["odd"].names == named
    with pytest.raises(SettingError, match="no column 'colour' of labels, only"):
        _ = Dataset(url, label="colour").samples


@pytest.mark.parametrize("name", ["label", "Label", "LABEL", " label", "Class Name", "className", "CLS"])
@pytest.mark.parametrize("format", ["parquet", "arrow", "webdataset", "csv", "jsonl", "urls in parquet", "partitions"])
def test_a_column_of_labels_is_known_however_it_is_written(store, format, name):
    names = ["dog", "cat", "dog"]
    match format:
        case "parquet" | "arrow":
            write_rows(store, format, {"Image": [IMAGE] * 3, name: names, "other": [b"x"] * 3})
        case "partitions":
            for row, kind in enumerate(names):
                store.write(f"{name}={kind}/{row}.parquet", rows(image=[IMAGE]))
        case "webdataset":
            fields = [(f"{row}.json", json.dumps({name: kind}).encode()) for row, kind in enumerate(names)]
            store.write("a.tar", tar_of([*((f"{row}.pgm", IMAGE) for row in range(3)), *fields]))
        case _:
            put(store, *(f"{row}.pgm" for row in range(3)))
            said = [{"File Name": f"{row}.pgm", name: kind} for row, kind in enumerate(names)]
            if format == "csv":
                lines = [f"File Name,{name}", *(",".join(one.values()) for one in said)]
                store.write("a.csv", "\n".join(lines).encode())
            elif format == "jsonl":
                store.write("a.jsonl", "\n".join(map(json.dumps, said)).encode())
            else:
                store.write("a.parquet", rows(**{key: [one[key] for one in said] for key in said[0]}))
    how = {"format": "urls" if format.startswith("urls") else None}
    data = Dataset(store.url, **how)
    labels = [data.classes[label] for label in data.samples.labels.tolist()]
    assert (data.classes, sorted(labels)) == (("cat", "dog"), sorted(names))
    assert name == "label" or name not in data.columns, "what is the label is no metadata"
    assert Dataset(store.url, label=name.upper(), **how).classes == data.classes


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_columns_of_images_masks_and_targets_are_known_however_they_are_written(store, format):
    columns = {"Thumb": [b"no"] * 2, "IMAGE": [IMAGE] * 2, "Seg": [IMAGE] * 2, "Labels": [1, 2], "Price": [0.5, 1.5]}
    data = write_rows(store, format, columns)
    assert data.samples.lengths.tolist() == [len(IMAGE)] * 2
    assert data.samples.take(np.arange(2)).targets is not None
    assert said(data) == [("column", NO_METADATA, 1, ("Thumb",))]
    assert [spec.column for spec in Dataset(store.url, targets="price").target_columns.specs] == ["Price"]


def test_the_command_names_the_column_of_labels_and_copies_by_it(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    kinds_of(open_store(str(tmp_path / "data")), "parquet")
    for command in (
        ["index", "--data", str(tmp_path / "data"), "--label", "category", "--json"],
        ["ingest", str(tmp_path / "data"), str(tmp_path / "copy"), "--format", "webdataset", "--label", "CATEGORY"],
        ["index", "--data", str(tmp_path / "copy"), "--json"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 0
        out = capsys.readouterr().out
        if command[0] == "index":
            assert json.loads(out)["per_class"] == {"cat": 2, "dog": 1, "owl": 1}


def test_the_command_says_it_in_one_line_and_in_its_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = image_folder(tmp_path / "data", per_class=1)
    (folder / "top.jpg").write_bytes(IMAGE)
    with pytest.raises(SystemExit):
        main(["index", "--data", str(folder), "--json"])
    out, errors = capsys.readouterr()
    [found] = json.loads(out)["left_out"]
    assert (found["what"], found["total"], found["names"]) == ("object", 1, ["top.jpg"])
    assert " ".join(errors.split()).count("1 object in no class folder (top.jpg)") == 1


def test_a_pass_that_had_to_do_without_samples_says_so_once_at_its_end(tmp_path, caplog):
    folder = image_folder(tmp_path / "data", per_class=2)
    (folder / "circle" / "9.jpg").write_bytes(b"")
    loader = fl.loader(str(folder), 2, preprocess=fl.preprocess.imagenet(28))
    for _ in range(2):
        caplog.clear()
        assert sum(len(batch.ids) for batch in loader) == 6
        [line] = [record.message for record in caplog.records if record.name == "frostline"]
        assert line.startswith("left out of the pass: 1 sample (circle/9.jpg: ")


parts = st.text("ab.é", min_size=1, max_size=3)
suffixes = st.sampled_from([".jpg", ".png", ".wav", ".xcf", ".JPG", ".npy", ".cls", ".txt", ""])
folders = st.lists(parts | st.sampled_from(["images", "masks", "train", "label=b"]), max_size=2)
names = st.builds(lambda folders, base, suffix: "/".join([*folders, base + suffix]), folders, parts, suffixes)


FILES = {"parquet": "parquet", "arrow": "arrow", "webdataset": "tar", "tar.gz": "tar.gz", "urls": "csv"}


def put_rows(store, format, number, there):
    """A file whose rows hold an image where they are true, and none where they are false; masks likewise."""
    images = [IMAGE if is_there else None for is_there in there]
    members = [(f"{row}.{'pgm' if image else 'xcf'}", IMAGE) for row, image in enumerate(images)]
    match format:
        case "parquet" | "arrow":
            write_rows(store, format, {"image": pa.array(images, pa.binary())}, name=str(number))
        case "webdataset":
            store.write(f"{number}.tar", tar_of(members))
        case "tar.gz":
            store.write(f"{number}.tar.gz", gzip.compress(tar_of(members)))
        case "urls":
            lines = [f"c/{number}-{row}.pgm" if image else '""' for row, image in enumerate(images)]
            put(store, *(line for line in lines if line.startswith("c")))
            store.write(f"{number}.csv", "\n".join(["file_name", *lines, ""]).encode())
        case "table":
            put(store, *(f"{number}/{number}-{row}.pgm" for row, image in enumerate(images) if image))
            lines = [f"{number}-{row}.pgm,9" for row in range(len(images))]
            store.write(f"{number}/metadata.csv", "\n".join(["file_name,size", *lines, ""]).encode())
        case "masks":
            put(store, *(f"images/{number}-{row}.pgm" for row in range(len(images))))
            put(store, *(f"masks/{number}-{row}.pgm" for row, image in enumerate(images) if image))


def objects_of(data, store):
    """The store's objects that samples and masks of a data set lie in."""
    samples = data.samples.take(np.arange(len(data)))
    found = [*samples.objects, *(samples.targets.objects if samples.targets is not None else ())]
    return {name.rpartition("#")[0] or name.removeprefix(f"{store.url}/") for name in found if name}


files = st.lists(st.lists(st.booleans(), max_size=4), max_size=2)


@pytest.mark.parametrize("kind", ["folders", "table", "masks", "webdataset", "tar.gz", "parquet", "arrow", "urls"])
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(loose=st.sets(names.filter(lambda name: not {".", ".."} & set(name.split("/"))), max_size=12), files=files)
def test_samples_and_what_is_left_out_are_all_objects_and_rows(kind, loose, files, monkeypatch, tmp_path):
    # A name of a store that is a folder of another is none in a file system, and is one in a bucket.
    store, format = open_store(f"memory://{uuid.uuid4()}"), "folders" if kind == "table" else kind
    monkeypatch.setattr(left_out, "_NAMED", 100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = [[True, False, True], *files]
    for number, there in enumerate(files):
        put_rows(store, kind, number, there)
    used = {f"{number}.{FILES[kind]}" for number in range(len(files)) if kind in FILES}
    used |= {f"{number}/metadata.csv" for number, there in enumerate(files) if kind == "table" and any(there)}
    put(store, *loose, "first/1.jpg")
    objects = {entry.object for entry in store.list()}
    data = Dataset(store.url, format=format)
    try:
        left = [(one.what, name) for one in data.manifest.left_out for name in one.names]
    except DataError as error:
        assume("would both be the" not in str(error))  # of images with masks: refused by their names
        raise
    lost = {name for what, name in left if what == "object"}
    assert sum(one.total for one in data.manifest.left_out) == len(left)
    assert len([what for what, _ in left if what == "object"]) == len(lost)
    taken = objects_of(data, store) | used
    assert not lost & taken
    assert lost | taken == objects
    rows_of_files = [there for there in files if kind in FILES or (kind == "table" and any(there))]
    assert len(left) - len(lost) == sum(there.count(False) for there in rows_of_files)
    assert kind not in FILES or len(data) == sum(map(sum, files))
    assert said(Dataset(store.url, format=format)) == said(data)


FORMATS = ("parquet", "webdataset", "original", "ready")
FIRST, LAST = datetime.fromisoformat("1900-01-01"), datetime.fromisoformat("2200-01-01")
NAMES = st.text(st.characters(categories=["L", "N"], max_codepoint=0x24F), min_size=1, max_size=5)
VALUES = {
    "whole": st.integers(-(1 << 60), 1 << 60),
    "share": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "is odd": st.booleans(),
    "words": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=6),
    "day": st.dates(date(1900, 1, 1), date(2200, 1, 1)),
    "at": st.datetimes(FIRST, LAST),
    "lasts": st.timedeltas(timedelta(days=-9), timedelta(days=9)),
    "price": st.decimals(-9999, 9999, places=3),
}


@st.composite
def some_data(draw):
    """The classes, with some that no sample has, and the rows of a data set."""
    classes = [f"c{name}" for name in draw(st.lists(NAMES, min_size=1, max_size=5, unique_by=str.lower))]
    columns = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4))
    rows = draw(
        st.lists(
            st.fixed_dictionaries(
                {"label": st.sampled_from(range(len(classes))), **{name: st.none() | VALUES[name] for name in columns}}
            ),
            min_size=3,
            max_size=8,
        )
    )
    return classes, columns, rows


def grey(value):
    return b"P5 4 4 255\n" + bytes([value] * 16)


def image_of(row):
    return grey(10 + 8 * row)


def mask_of(row):
    return grey(1 + row)


def masked(row):
    """Whether a row of data with masks has one: not all do."""
    return row % 3 != 1


def as_rows(folder, format, split, rows, columns, classes, has_masks):
    """A file of a table, of Hugging Face's kind where it is Parquet."""
    kinds = {name: pa.array([None, *(value for value in rows[name] if value is not None)]).type for name in columns}
    kinds |= {"price": pa.decimal128(10, 3)} if "price" in columns else {}
    table = {"image": [image_of(row) for row in rows["row"]]}
    if has_masks:
        table["mask"] = pa.array([mask_of(row) if masked(row) else None for row in rows["row"]], pa.binary())
    table |= {name: pa.array(rows[name], kinds[name]) for name in columns}
    if format == "arrow":
        labels = pa.array([classes[label] for label in rows["label"]], pa.string())
        (folder / f"{split}.arrow").write_bytes(arrow_of(pa.table({**table, "label": labels}), 2))
        return
    features = {"image": {"_type": "Value"}, "label": {"_type": "ClassLabel", "names": classes}}
    said = {"huggingface": json.dumps({"info": {"features": features}})}
    labels = pa.array(rows["label"], pa.int64())
    pq.write_table(pa.table({**table, "label": labels}).replace_schema_metadata(said), folder / f"{split}.parquet")


def as_shard(folder, format, split, rows, columns, classes, has_masks):
    members = []
    for place, row in enumerate(rows["row"]):
        about = {"label": classes[rows["label"][place]], **{name: rows[name][place] for name in columns}}
        members += [(f"{row}.pgm", image_of(row)), (f"{row}.json", json.dumps(about, default=str).encode())]
        members += [(f"{row}.mask.pgm", mask_of(row))] if has_masks and masked(row) else []
    shard = tar_of(members)
    (folder / f"{split}.{FILES[format]}").write_bytes(gzip.compress(shard) if format == "tar.gz" else shard)


def as_list(folder, format, split, rows, columns, classes, has_masks):
    """A list with its images beside it: of urls at the root, of annotated folders in one called images."""
    place = "images/" if format == "annotated" else ""
    lines = []
    for number, row in enumerate(rows["row"]):
        put_file(folder / f"{place}{row}.pgm", image_of(row))
        line = {"file_name": f"{place}{row}.pgm", "label": classes[rows["label"][number]]}
        line |= {name: rows[name][number] for name in columns}
        if has_masks and format != "annotated":
            line["mask"] = f"m/{row}.pgm" if masked(row) else None
            put_file(folder / f"m/{row}.pgm", mask_of(row))
        lines.append(line)
    if format == "jsonl":
        text = "\n".join(json.dumps(line, default=str) for line in lines)
    else:
        out = io.StringIO()
        writer = csv.DictWriter(out, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
        text = out.getvalue()
    (folder / f"{split}.{'jsonl' if format == 'jsonl' else 'csv'}").write_bytes(text.encode())


def as_folders(folder, format, split, rows, columns, classes, has_masks):
    """Class folders, or those of images and of masks; they say nothing else."""
    for label, row in zip(rows["label"], rows["row"], strict=True):
        if format == "masks":
            put_file(folder / f"images/{classes[label]}/{row}.pgm", image_of(row))
            if masked(row):
                put_file(folder / f"masks/{classes[label]}/{row}.pgm", mask_of(row))
        else:
            put_file(folder / ("" if split == "all" else split) / f"{classes[label]}/{row}.pgm", image_of(row))


def put_file(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


SOURCES = {
    "parquet": as_rows, "arrow": as_rows, "webdataset": as_shard, "tar.gz": as_shard, "csv": as_list, "jsonl": as_list,
    "annotated": as_list, "folders": as_folders, "masks": as_folders,
}  # fmt: skip
NO_SPLITS, NO_COLUMNS = ("annotated", "masks"), ("folders", "masks")


def value_at(reader, object, offset, length):
    return Image.open(io.BytesIO(bytes(reader.read(object, offset, length)))).getpixel((0, 0)) if length else None


def told(data, columns, rows_by_id):
    """What a data set says of each sample, by its row: class, mask and columns; of pixels the ids tell the row."""
    samples = data.samples.take(np.arange(len(data)))
    reader = open_samples(data.url, data.manifest.reading)
    places = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    if rows_by_id is not None:
        rows = [rows_by_id[id] for id in samples.ids.tolist()]
    else:
        rows = [(value_at(reader, *place) - 10) // 8 for place in places]
    masks = [None] * len(rows)
    if (targets := samples.targets) is not None:
        places = zip(targets.objects, targets.offsets.tolist(), targets.lengths.tolist(), strict=True)
        masks = [value_at(reader, *place) for place in places]
    labels = [None if label < 0 else data.classes[label] for label in samples.labels.tolist()]
    said = zip(labels, masks, *(data.column(name).to_pylist() for name in columns), strict=True)
    found = {row: repr(about) for row, about in zip(rows, said, strict=True)}
    assert len(found) == len(data)
    return found, dict(zip(samples.ids.tolist(), rows, strict=True))


def copied(source, destination, format):
    if format == "ready":
        ingest(source, destination, Applied.to(imagenet(4), "uint8"), on_event=lambda _: None)
    else:
        repack(source, destination, format, on_event=lambda _: None)
    return Dataset(destination)


# About 10 s of a processor in all; those of `make test-long` are ten times as many.
EXAMPLES = max(2, settings.default.max_examples // 10)
# Without shrinking: a file of a few rows is small, and writing it some hundred times takes minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@pytest.mark.parametrize("kind", SOURCES)
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow], phases=PHASES)
@given(data=some_data(), is_divided=st.booleans(), has_masks=st.booleans(), last=st.sampled_from(FORMATS))
def test_copies_from_every_format_into_every_other_keep_all_that_is_said_of_samples(
    kind, data, is_divided, has_masks, last
):
    classes, columns, rows = data
    columns = [] if kind in NO_COLUMNS else columns
    splits = ("train", "val") if is_divided and kind not in NO_SPLITS else ("all",)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        for number, split in enumerate(splits):
            some = list(enumerate(rows))[number :: len(splits)]
            by_name = {name: [row[name] for _, row in some] for name in ("label", *columns)}
            by_name["row"] = [place for place, _ in some]
            SOURCES[kind](folder / "source", kind, split, by_name, columns, classes, has_masks)
        format = "urls" if kind in ("csv", "jsonl") else None  # folders of masks beside it could be those of classes
        source = Dataset(folder / "source", cache=folder / "cache", format=format)
        has_splits = set(source.splits) == {"train", "val"}
        assert has_splits or len(splits) == 1 or kind == "folders"  # which may be classes by their names
        columns = [*columns, *(["split"] if has_splits else [])]
        said, ids = told(source, columns, None)
        assert [about.split(",")[0] for _, about in sorted(said.items())] == [
            f"({classes[row['label']]!r}" for row in rows
        ] or kind == "folders"
        for format in FORMATS:
            copy = copied(source, folder / format, format)
            check_copy(source, copy, format, columns, ids)
            if format == "parquet":
                check_copy(copy, copied(copy, folder / "last", last), last, columns, told(copy, (), None)[1])


def check_copy(source, copy, format, columns, ids):
    """A copy says of each sample what its source does, but for columns for which class folders have no place."""
    columns = [name for name in columns if name == "split" or format != "original"]
    assert copy.classes == source.classes
    assert copy.splits_brought == source.splits_brought
    assert copy.manifest.left_out == ()
    is_pixels = format == "ready"
    found, _ = told(copy, columns, ids if is_pixels else None)
    assert found == told(source, columns, None)[0]
    if not is_pixels and format != "original":
        names = dict(zip(copy.samples.ids.tolist(), copy.column("frostline_source").to_pylist(), strict=True))
        has_names = "frostline_source" in source.columns
        before = source.column("frostline_source").to_pylist() if has_names else list(source.names)
        assert sorted(names.values()) == sorted(before)


def test_a_json_that_says_another_class_than_cls_is_named_once(store, caplog):
    members = [(f"{key}.jpg", IMAGE) for key in range(6)]
    cls = [(f"{key}.cls", text) for key, text in enumerate((b"cat", b"dog", b"3", b"cat", b"dog"))]
    fields = ({"label": "dog"}, {"label": "dog"}, {"cls": "3"}, {"label": None}, {"className": "cat"}, {"label": "ox"})
    json_of = [(f"{key}.json", json.dumps(about).encode()) for key, about in enumerate(fields)]
    store.write("a.tar", tar_of([*members, *cls, *json_of]))
    data = Dataset(store.url)
    assert [data.classes[label] for label in data.samples.labels] == ["cat", "dog", "3", "cat", "dog", "ox"]
    wanted = (
        "label",
        "of .json against .cls, which counts",
        2,
        ("a.tar/0.jpg: dog, not cat", "a.tar/4.jpg: cat, not dog"),
    )
    assert said(data) == [wanted]
    assert said(Dataset(store.url)) == [wanted], "as it was found again"
    store.write("b.tar", tar_of([("9.jpg", IMAGE), ("9.cls", b"cat"), ("9.json", b'{"label": "cat"}')]))
    assert said(Dataset(store.url)) == [wanted], "of the first shard nothing was read again"
    for options, is_said in (
        ({"targets": ()}, True),
        ({"label": "meta_label"}, False),
        ({"targets": "meta_label"}, False),
    ):
        caplog.clear()
        assert len(Dataset(store.url, **options)) == 7
        assert [wanted[1] in record.message for record in caplog.records] == [True] * is_said, "where none is named"


def test_a_number_of_cls_stands_for_the_name_that_most_of_its_samples_have(store):
    def shard(*pairs):
        rows = [(str(key), text, name) for key, (text, name) in enumerate(pairs)]
        both = ([(f"{key}.jpg", IMAGE), (f"{key}.cls", text), (f"{key}.json", name)] for key, text, name in rows)
        return tar_of([member for members in both for member in members])

    cat, dog = b'{"label": "cat"}', b'{"label": "dog"}'
    store.write("a.tar", shard((b"0", cat), (b"0", cat), (b"1.0", dog)))
    assert said(Dataset(store.url)) == []
    store.write("b.tar", shard((b"0", dog), (b"1", dog)))
    reason = "of .json against .cls, which counts"
    assert said(Dataset(store.url)) == [("label", reason, 1, ("b.tar/0.jpg: dog, not 0",))]
    table = ("__classes__", b'["dog", "cat"]')
    for name in ("a.tar", "b.tar"):
        members = [
            ("0.jpg", IMAGE),
            ("0.cls", b"0"),
            ("0.json", cat),
            ("1.jpg", IMAGE),
            ("1.cls", b"1"),
            ("1.json", cat),
        ]
        store.write(name, tar_of([table, *members]))
    names = ("a.tar/0.jpg: cat, not dog", "b.tar/0.jpg: cat, not dog")
    assert said(Dataset(store.url)) == [("label", reason, 2, names)], "by the table that shards declare"


def test_a_folder_that_is_called_as_another_class_than_the_label_of_a_key_is_named(store):
    keys = [("cat/1", b"dog"), ("train/dog/2", b"dog"), ("dog/cat/3", b"cat"), ("part/4", b"cat")]
    store.write("a.tar", tar_of([one for key, text in keys for one in ((f"{key}.jpg", IMAGE), (f"{key}.cls", text))]))
    reason = "of folders against .cls or .json, which count"
    assert said(Dataset(store.url)) == [("label", reason, 1, ("a.tar/cat/1.jpg: cat, not dog",))]


def numbered(folders, numbers):
    """A shard whose keys lie in these folders, each with one of these numbers."""
    pairs = enumerate(zip(folders, numbers, strict=True))
    return tar_of(
        [
            part
            for key, (folder, number) in pairs
            for part in ((f"{folder}{key}.jpg", IMAGE), (f"{folder}{key}.cls", number))
        ]
    )


@pytest.mark.parametrize("around", ["", "train/"])
def test_a_number_beside_the_folder_of_another_one_is_named(store, around):
    folders, numbers = ["cat/"] * 8 + ["dog/"] * 8, [b"0"] * 8 + [b"1"] * 8
    numbers[3] = b"1"
    store.write("a.tar", numbered([f"{around}{folder}" for folder in folders], numbers))
    name = f"a.tar/{around}cat/3.jpg"
    reason = "of folders against .cls or .json, which count"
    assert said(Dataset(store.url)) == [("label", reason, 1, (f"{name}: cat, not 1",))]


@pytest.mark.parametrize(
    ("folders", "numbers"),
    [
        (["cam1/", "cam2/"] * 6, [b"0"] * 6 + [b"1"] * 6),
        ([f"day{day}/" for day in range(12)], [b"0"] * 6 + [b"1"] * 6),
        (["all/"] * 12, [b"0"] * 6 + [b"1"] * 6),
        ([""] * 12, [b"0"] * 6 + [b"1"] * 6),
        (["0/"] * 6 + ["1/"] * 6, [b"0"] * 6 + [b"1"] * 6),
        (["cat/"] * 6 + ["dog/"] * 6, [b"0"] * 6 + [b"1"] * 6),
    ],
)
def test_folders_that_name_no_numbers_or_agree_with_them_are_passed_over(store, folders, numbers):
    store.write("a.tar", numbered(folders, numbers))
    assert said(Dataset(store.url)) == []


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("field", ["label", "class"])
def test_a_folder_that_says_another_label_than_the_rows_in_it_is_named(store, kind, field):
    write_rows(store, kind, {"image": [IMAGE] * 2, "label": ["dog", "cat"]}, name=f"{field}=cat/a")
    write_rows(store, kind, {"image": [IMAGE] * 2, "label": ["dog", None]}, name=f"{field}=dog/b")
    data = Dataset(store.url)
    assert [None if label < 0 else data.classes[label] for label in data.samples.labels] == ["dog", "cat", "dog", None]
    reason = f"of folders {field}=… against the files in them, which count"
    [one] = said(data)
    assert one[:3] == ("label", reason, 1)
    assert one[3][0].endswith("/0: cat, not dog")
    assert said(Dataset(store.url)) == [one]
    write_rows(store, kind, {"image": [IMAGE], "label": ["ox"]}, name=f"{field}=cat/c")
    assert said(Dataset(store.url))[0][2] == 2


def test_of_a_list_and_class_folders_that_disagree_one_counts_and_the_other_is_named(store):
    put(store, "cat/1.jpg", "cat/2.jpg", "dog/3.jpg")
    rows_of_list = b"file_name,label\ncat/1.jpg,dog\ncat/2.jpg,cat\ndog/3.jpg,\n"
    store.write("metadata.csv", rows_of_list)
    data = Dataset(store.url)
    assert [data.classes[label] for label in data.samples.labels] == ["cat", "cat", "dog"]
    wanted = ("label", "of metadata.csv against the folders, which count", 1, ("cat/1.jpg: dog, not cat",))
    assert said(data) == [wanted]
    data = Dataset(store.url, file_column="file_name")
    assert [None if label < 0 else data.classes[label] for label in data.samples.labels] == ["dog", "cat", None]
    assert said(data) == [("label", "of folders against lists, which count", 1, ("cat/1.jpg: cat, not dog",))]


def test_a_list_beside_class_folders_is_named_with_the_option_that_reads_it(store):
    put(store, "cat/1.jpg", "cat/2.jpg", "dog/3.jpg", "sample_submission.csv")
    store.write("labels.csv", b"file_name,label\ncat/1.jpg,dog\n")
    data = Dataset(store.url)
    assert [data.classes[label] for label in data.samples.labels] == ["cat", "cat", "dog"]
    reason = "that the format folders does not use"
    assert said(data) == [
        ("object", f"{reason} where folders are classes, and --file-column COLUMN reads", 1, ("labels.csv",)),
        ("object", reason, 1, ("sample_submission.csv",)),
    ]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("COCO", ("annotations/instances_train2017.json", "annotations/captions_val2017.json")),
        ("COCO", ("images/_annotations.coco.json", "images/train.coco.json")),
        ("YOLO", ("labels/1.txt", "labels/train/2.txt")),
        ("Pascal VOC", ("Annotations/1.xml", "Annotations/2.xml")),
    ],
)
def test_annotations_beside_images_are_named_as_such_with_what_gives_them_as_targets(store, kind, names):
    put(store, "images/1.jpg", "images/2.jpg", *names)
    boxes = [[[1, 2, 3, 4], [5, 6, 7, 8]], []]
    [(what, reason, total, found)] = said(Dataset(store.url))
    assert (what, total, set(found)) == ("object", 2, set(names))
    assert reason.startswith(f"with annotations of {kind}, such as boxes, which are not read")
    assert "targets='objects.bbox'" in reason
    rows_of_list = ({"file_name": f"{1 + row}.jpg", "objects": {"bbox": box}} for row, box in enumerate(boxes))
    store.write("images/metadata.jsonl", "\n".join(map(json.dumps, rows_of_list)).encode())
    data = Dataset(store.url, targets="objects.bbox")
    assert [sample[1].tolist() for sample in data] == boxes


def test_classes_that_differ_in_blanks_alone_stay_apart_in_every_copy(store):
    names = [" a", "7", "[1]", "a", "a "]
    put(store, *(f"{name}/{number}.jpg" for number, name in enumerate(names)))
    urls = [f"memory://{uuid.uuid4()}" for _ in range(4)]
    for url, kind in zip(urls, ("webdataset", "webdataset", "parquet", "original"), strict=True):
        repack(Dataset(urls[0] if url == urls[1] else store.url), url, kind, on_event=lambda _: None)
        data = Dataset(url)
        assert data.classes == tuple(names)
        assert sorted(data.samples.labels.tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("field", ["said", "other", "image_path", "names", "key", "classes"])
def test_a_field_whose_name_the_listing_uses_itself_is_metadata_and_no_label(store, field):
    members = [(f"{key}.json", json.dumps({"label": name, field: "x"}).encode()) for key, name in enumerate("ba")]
    store.write("a/1.tar", tar_of([*members, ("0.jpg", IMAGE), ("1.jpg", IMAGE)]))
    write_rows(store, "parquet", {"image": [IMAGE] * 2, "label": ["b", "a"], field: ["x"] * 2}, name="b/1")
    write_rows(store, "arrow", {"image": [IMAGE] * 2, "label": ["b", "a"], field: ["x"] * 2}, name="c/1")
    put(store, "d/1.jpg", "d/2.jpg")
    store.write("d/list.csv", f"file,label,{field}\n1.jpg,b,x\n2.jpg,a,x\n".encode())
    for folder in "abcd":
        for _ in range(2):  # as it is listed, and as it is found again
            data = Dataset(f"{store.url}/{folder}")
            assert (data.classes, data.samples.labels.tolist()) == (("a", "b"), [1, 0])
            assert data.column(field).to_pylist() == ["x", "x"]


def test_two_fields_that_would_be_one_column_are_named_and_none_is_lost_in_silence(store):
    fields = ({"id": 1, "meta_id": 2, "label": "a"}, {"id": 3, "meta_id": 4, "label": "b"})
    members = [(f"{key}.json", json.dumps(about).encode()) for key, about in enumerate(fields)]
    store.write("a.tar", tar_of([*members, ("0.jpg", IMAGE), ("1.jpg", IMAGE)]))
    data = Dataset(store.url)
    assert data.column("meta_id").to_pylist() == [2, 4]
    assert [one[2:] for one in said(data)] == [(1, ("id",))]
    for kind in ("parquet", "arrow"):
        url = f"memory://{uuid.uuid4()}"
        with pytest.raises(DataError, match=r"has columns called 'id' and 'meta_id', .* rename one of them"):
            len(write_rows(open_store(url), kind, {"image": [IMAGE], "id": [1], "meta_id": [2]}))
    put(store, "a/1.jpg")
    store.write("a/list.csv", b"file,id,meta_id\n1.jpg,1,2\n")
    with pytest.raises(DataError, match="has columns called 'id' and 'meta_id'"):
        len(Dataset(f"{store.url}/a", format="urls"))


def test_numbers_of_json_that_a_number_would_round_keep_their_digits(store):
    values = {
        "hash": [2**64 - 1, 1],
        "mixed": [2**53 + 1, 0.5],
        "huge": [10**400, 1],
        "near": [2**53, 0.5],
        "i": [1, None],
    }
    rows_of_json = [{name: column[row] for name, column in values.items()} for row in range(2)]
    members = [(f"{key}.json", json.dumps(about).encode()) for key, about in enumerate(rows_of_json)]
    store.write("a.tar", tar_of([*members, ("0.jpg", IMAGE), ("1.jpg", IMAGE)]))
    data = Dataset(store.url)
    assert list(map(int, data.column("hash").to_pylist())) == values["hash"]
    assert len(data.select(f"hash == {2**64 - 1}")) == 1
    assert len(data.select(f"hash == {2**64 - 2}")) == 0
    assert data.column("mixed").to_pylist() == ["9007199254740993", "0.5"]
    assert data.column("huge").to_pylist() == [str(10**400), "1"]
    assert data.column("near").to_pylist() == [2.0**53, 0.5]
    assert data.column("i").to_pylist() == [1, None]


def count_apart(pairs):
    """The number of pairs of labels that contradict each other, by a loop over the samples."""
    said = {'"a"': "a", '"b"': "b", "0": 0, "1": 1, "1.0": 1}
    both = [(said[one], said[other]) for one, other in pairs if one in said and other in said]
    alike = [pair for pair in both if type(pair[0]) is type(pair[1])]
    named = [sorted(pair, key=lambda label: isinstance(label, str)) for pair in both if pair not in alike]
    total = sum(one != other for one, other in alike)
    for number in (0, 1):
        names = [name for of, name in named if of == number]
        usual = max(names.count(name) for name in names) if names else 0
        total += len(names) - usual
    return total


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(*[st.sampled_from([None, '"a"', '"b"', "0", "1", "1.0", "0.5", "-1", "[1]"])] * 2), max_size=12)
)
def test_labels_that_contradict_each_other_are_those_that_a_loop_finds(pairs):
    said, others = [one for one, _ in pairs], [other for _, other in pairs]
    found = contradicting_labels("of x", [str(row) for row in range(len(pairs))], said, others)
    assert sum(one.total for one in found) == count_apart(pairs)
    for name, _, said_twice in (one.partition(": ") for left in found for one in left.names):
        assert {*said_twice.split(", not ")} == {label.strip('"') for label in pairs[int(name)]}
