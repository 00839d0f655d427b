"""Splits that the data itself says: by its folders, by the names of its files, or in a column."""

import json
import shutil
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frostline.core.events import ColumnsDropped
from frostline.datasets import Dataset
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.labels import scored_among, splits_of, trained_among
from frostline.stores.open import open_store
from frostline.testing.formats import EXAMPLES
from support.formats import parquet_of, tar_of, webdataset_files

SOME, OTHERS = EXAMPLES[:3], EXAMPLES[3:]


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4()}")


def put(store, *names):
    for name in names:
        store.write(name, name.encode())
    return Dataset(store.url)


def splits_in(data):
    return {name: sorted(data[name].names) for name in data.splits_brought}


def labels_in(data):
    labels = data.samples.labels.tolist()
    return {name: None if label < 0 else data.classes[label] for name, label in zip(data.names, labels, strict=True)}


@pytest.mark.parametrize(
    ("one", "other"),
    [("train", "val"), ("Training", "Testing"), ("train", "valid"), ("train", "validation"), ("TRAIN", "TEST"),
     ("training", "dev"), ("train", "eval")],
)  # fmt: skip
def test_folders_of_splits_with_folders_of_classes_are_splits(store, one, other):
    data = put(store, f"{one}/cat/1.jpg", f"{one}/dog/2.jpg", f"{other}/cat/deep/3.jpg", "readme.jpg")
    assert data.classes == ("cat", "dog")
    assert splits_in(data) == {
        one.lower(): [f"{one}/cat/1.jpg", f"{one}/dog/2.jpg"],
        other.lower(): [f"{other}/cat/deep/3.jpg"],
    }
    assert labels_in(data) == {
        f"{one}/cat/1.jpg": "cat", f"{one}/dog/2.jpg": "dog", f"{other}/cat/deep/3.jpg": "cat"
    }  # fmt: skip
    assert data.select(f"split == '{other.lower()}'").names == [f"{other}/cat/deep/3.jpg"]
    assert data.statistics().splits == ((one.lower(), 2), (other.lower(), 1))


@pytest.mark.parametrize(
    "names",
    [
        ("test/1.jpg", "other/2.jpg"),
        ("test/a/1.jpg", "other/a/2.jpg"),
        ("train/1.jpg", "test/2.jpg", "val/3.jpg"),
        ("train/a/1.jpg", "train/2.jpg", "test/a/3.jpg"),
        ("train/1.jpg", "test/a/2.jpg"),
        ("train/a/1.jpg", "trams/a/2.jpg", "buses/a/3.jpg"),
        ("train station/a/1.jpg", "test tube/b/2.jpg"),
        ("data/train/1.jpg", "data/other/2.jpg"),
    ],
)
def test_class_folders_named_like_splits_stay_classes(store, names):
    data = put(store, *names)
    assert data.classes == tuple(sorted({name.partition("/")[0] for name in names}))
    assert not data.splits
    assert "split" not in data.columns


def test_images_beside_the_folders_of_splits_are_in_none(store):
    data = put(store, "train/cat/1.jpg", "train/dog/2.jpg", "val/cat/3.jpg", "docs/1.png", "docs/figures/2.png")
    assert data.classes == ("cat", "dog")
    assert splits_in(data) == {"train": ["train/cat/1.jpg", "train/dog/2.jpg"], "val": ["val/cat/3.jpg"]}
    assert labels_in(data)["docs/figures/2.png"] is None


def test_folders_of_splits_may_lie_in_one_folder(store):
    data = put(store, "data/train/cat/1.jpg", "data/val/cat/2.jpg", "data/val/dog/3.jpg")
    assert data.classes == ("cat", "dog")
    assert splits_in(data) == {"train": ["data/train/cat/1.jpg"], "val": ["data/val/cat/2.jpg", "data/val/dog/3.jpg"]}


@pytest.mark.parametrize(("one", "other"), [("train_set", "val_set"), ("images-train", "images-test")])
def test_a_word_within_the_names_of_folders_says_the_split_where_they_share_classes(store, one, other):
    data = put(store, f"{one}/cat/1.jpg", f"{one}/dog/2.jpg", f"{other}/cat/3.jpg")
    assert data.classes == ("cat", "dog")
    assert splits_in(data) == {
        "train": [f"{one}/cat/1.jpg", f"{one}/dog/2.jpg"],
        other.rpartition("-")[2].partition("_")[0]: [f"{other}/cat/3.jpg"],
    }


def test_images_for_the_last_test_may_have_no_classes(store):
    data = put(store, "train/cat/1.jpg", "train/dog/2.jpg", "test/3.jpg", "test/4.jpg")
    assert data.classes == ("cat", "dog")
    assert splits_in(data)["test"] == ["test/3.jpg", "test/4.jpg"]
    assert labels_in(data["test"]) == {"test/3.jpg": None, "test/4.jpg": None}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("train-00000-of-00001", "test-00000-of-00001"),
        ("data/train-0", "data/validation-0"),
        ("train/0000", "val/0000"),
        ("default/partial-train/0000", "default/test/0000"),
        ("cifar10-train-000001", "cifar10-test-000001"),
        ("train2017", "val2017"),
    ],
)
@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_files_whose_names_say_splits_are_splits(store, format, one, other):
    suffix = {"parquet": "parquet", "webdataset": "tar"}[format]
    pack = {"parquet": parquet_of, "webdataset": lambda some: tar_of(webdataset_files(some))}[format]
    store.write(f"{one}.{suffix}", pack(SOME))
    store.write(f"{other}.{suffix}", pack(OTHERS))
    data = Dataset(store.url)
    train, held_out = data.splits_brought
    assert [len(data[train]), len(data[held_out])] == [len(SOME), len(OTHERS)]
    assert all(name.startswith(f"{one}.") for name in data[train].names)


def test_reads_files_columns_by_the_latest_listing(store):
    store.write("train.tar", tar_of(webdataset_files(SOME)))
    assert not Dataset(store.url).splits
    store.write("test.tar", tar_of(webdataset_files(OTHERS)))
    both = Dataset(store.url)
    assert both.splits == ("train", "test")
    store.write("extra.tar", tar_of(webdataset_files(item._replace(key=f"x{item.key}") for item in SOME)))
    more = Dataset(store.url)
    assert [len(more[name]) for name in more.splits] == [len(SOME), len(OTHERS)]  # the rest is in neither
    store.remove("test.tar")
    fewer = Dataset(store.url)
    assert (fewer.splits, "split" in fewer.columns) == ((), False)


def test_takes_splits_from_a_column_of_the_data_and_keeps_the_column(store):
    rows = [("file_name", "label", "split")]
    for number, split in enumerate(("test", "train", "train", "val")):
        store.write(f"{number}.jpg", b"x")
        rows.append((f"{number}.jpg", "cat", split))
    store.write("labels.csv", "\n".join(map(",".join, rows)).encode())
    data = Dataset(store.url, format="urls")
    assert data.splits == ("train", "val", "test")
    assert [len(data[name]) for name in data.splits] == [2, 1, 1]
    other = open_store(f"memory://{uuid.uuid4()}")
    for number, shard in enumerate(("train.tar", "test.tar")):
        about = json.dumps({"split": f"fold {number}"}).encode()
        other.write(shard, tar_of([("1.jpg", b"x"), ("1.cls", b"cat"), ("1.json", about)]))
    folds = Dataset(other.url)
    assert folds.splits == ()
    assert folds.column("split").to_pylist() == ["fold 1", "fold 0"]


@pytest.mark.parametrize("format", ["webdataset", "parquet"])
def test_a_copy_has_the_splits_that_its_source_has(store, format):
    source = put(store, "train/cat/1.jpg", "train/dog/2.jpg", "val/cat/3.jpg")
    copy = f"memory://{uuid.uuid4()}"
    happened = []
    repack(source, copy, format, observe=happened.append)
    assert not [event for event in happened if isinstance(event, ColumnsDropped)], "nothing stays behind"
    data = Dataset(copy)
    assert {name: len(data[name]) for name in data.splits} == {"train": 2, "val": 1}
    assert data.classes == ("cat", "dog")


def test_prefers_a_saved_split_to_one_of_the_data_with_its_name(tmp_path):
    for name in ("train/cat/1.jpg", "train/cat/2.jpg", "val/cat/3.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    data = Dataset(tmp_path)
    data.save_splits({"train": data.select("name == 'train/cat/1.jpg'")})
    again = Dataset(tmp_path)
    assert again.splits == ("train", "val")
    assert again["train"].names == ["train/cat/1.jpg"]
    shutil.rmtree(tmp_path / "val")
    assert Dataset(tmp_path).splits == ("train",)


def test_names_a_layer_by_its_innermost_module():
    assert splits_of(["train/test-1.tar", "train/2.tar"]) == {"train/test-1.tar": "test", "train/2.tar": "train"}
    assert splits_of(["a/train_test-1.tar", "b/val.tar", "c/Train.tar"]) == {"b/val.tar": "val", "c/Train.tar": "train"}
    assert splits_of(["latest.tar", "contest.tar", "devices.tar", "train.tar"]) is None


def test_prefers_a_validation_split_to_a_test_split_for_scoring():
    assert scored_among(["test", "extra", "Val", "train"]) == ["Val", "test"]
    assert trained_among(["test", "Training"]) == "Training"
    assert trained_among(["test"]) is None


def test_parts_that_are_called_as_the_hub_does_are_splits_whatever_their_names():
    train, extra = "data/train-00000-of-00001.parquet", "data/extra-00000-of-00001-0123456789abcdef.parquet"
    assert splits_of([train, extra]) == {train: "train", extra: "extra"}
    assert splits_of([extra, extra.replace("extra", "more")]) is None
    assert splits_of([train, extra, "notes.parquet"]) is None
    assert splits_of([train, "data/extra.parquet"]) is None


def test_splits_of_other_names_are_never_part_of_those_to_train_on():
    store = open_store(f"memory://{uuid.uuid4()}")
    for split, start in (("train", 0), ("extra", 6)):
        table = pa.table({"image": [bytes([row]) for row in range(start, start + 6)], "label": [0, 1] * 3})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        store.write(f"data/{split}-00000-of-00001.parquet", sink.getvalue().to_pybytes())
    data = Dataset(store.url)
    assert data.splits == ("train", "extra")
    assert {name: len(data[name]) for name in data.splits} == {"train": 6, "extra": 6}
