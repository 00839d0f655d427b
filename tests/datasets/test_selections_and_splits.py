"""Selections and splits: chosen by a text, made by a share, or said by the names of folders and files.

Parts of a data set: by an expression over columns, by shares, by groups and by columns, and kept by name.

Splits that the data itself says: by its folders, by the names of its files, or in a column.
"""

import json
import shutil
import uuid
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from frostline.core.errors import DataError, SettingError
from frostline.core.events import ColumnsDropped
from frostline.datasets import Dataset
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.labels import scoring_splits, splits_of, training_split
from frostline.datasets.selection import parse_expression
from frostline.stores.open import open_store
from frostline.testing.formats import EXAMPLES
from support.formats import parquet_of, tar_of, webdataset_files

CLASSES = ("cat", "dog", "glass")


@pytest.fixture
def data(tmp_path):
    """Thirty samples of each class, sizes from 1 to 30, each patient in one class alone, with three samples."""
    for name in CLASSES:
        (tmp_path / name).mkdir()
        for number in range(30):
            (tmp_path / name / f"{number:02}.jpg").write_bytes(b"x" * (number + 1))
    return Dataset(tmp_path).with_columns(
        {
            "patient": [f"p{row // 3:02}" for row in range(90)],
            "width": [None if row % 10 == 0 else row * 10 for row in range(90)],
            "fold": [row % 4 for row in range(90)],
            "is_sharp": [row % 2 == 0 for row in range(90)],
            "taken at": np.datetime64("2026-01-01", "us") + np.arange(90).astype("timedelta64[D]"),
            "class": [date(2026, 1, 1 + row % 28) for row in range(90)],
            "in zone": [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=row) for row in range(90)],
            "price": [None if row % 10 == 0 else Decimal(row) / 4 for row in range(90)],
        }
    )


def rows_of(part):
    rows = part.selection.rows
    return [] if rows is None else np.concatenate([*rows.pieces(), np.zeros(0, np.int64)]).tolist()


SELECTIONS = {
    "label == 'glass'": lambda row: row >= 60,
    "label != 'glass' and width >= 300": lambda row: 30 <= row < 60 and row % 10,
    "label in ('cat', 'dog') or fold == 3": lambda row: row < 60 or row % 4 == 3,
    "label not in ['cat']": lambda row: row >= 30,
    "not (width < 880)": lambda row: row >= 88,
    "100 < width <= 120": lambda row: row in (11, 12),
    "width is None": lambda row: row % 10 == 0,
    "width is not None and not is_sharp": lambda row: row % 10 and row % 2,
    "is_sharp == True": lambda row: row % 2 == 0,
    "'at/0' in name": lambda row: row < 10,
    "length == 7": lambda row: row % 30 == 6,
    "patient == 'p29'": lambda row: row >= 87,
    "-1 < label and 700 <= width": lambda row: row >= 70 and row % 10,
    "object == name": lambda row: True,
    "patient < 'p01' and offset == 0": lambda row: row < 3,
    "column('taken at') >= '2026-03-01'": lambda row: row >= 59,
    "'2026-01-03T00:00:00' <= column('taken at') < '2026-01-05'": lambda row: row in (2, 3),
    "column('class') in ('2026-01-01', '2026-01-28')": lambda row: row % 28 in (0, 27),
    "column('in zone') == '2026-01-01T05:00:00Z'": lambda row: row == 5,
    "column('width') == 50": lambda row: row == 5,
    "width not in (10, 20)": lambda row: row % 10 and row not in (1, 2),
    "not (width in (10, 20))": lambda row: row % 10 and row not in (1, 2),
    "patient in ()": lambda row: False,
    "price > 2": lambda row: row % 10 and row > 8,
    "2.249999999999999 < price <= 10000000000": lambda row: row % 10 and row >= 9,
    "price == 2.25": lambda row: row == 9,
    "price in (2.25, 3, 1e-9)": lambda row: row in (9, 12),
    "price not in (2.25, 3)": lambda row: row % 10 and row not in (9, 12),
    "price < -1e20": lambda row: False,
}


def test_parts_know_how_many_samples_they_share(data):
    first, second = data.take(np.arange(30)), data.select("fold == 0")
    both = len({*rows_of(first)} & {*rows_of(second)})
    assert first.selection.count_shared(second.selection) == second.selection.count_shared(first.selection) == both
    assert data.selection.count_shared(second.selection) == len(second)
    assert first.selection.count_shared(data.take(np.arange(30, 90)).selection) == 0


def test_samples_are_kept_where_a_mask_is_true(data):
    mask = np.arange(90) % 7 == 0
    assert rows_of(data.take(mask)) == list(range(0, 90, 7))
    part = data.take(np.arange(89, -1, -1))
    assert rows_of(part.take(mask)) == list(range(89, -1, -7))
    with pytest.raises(SettingError, match="one value for each of the 90 samples, not 3"):
        part.take(np.ones(3, np.bool_))


@pytest.mark.parametrize("text", SELECTIONS)
def test_a_selection_gives_the_samples_for_which_it_holds(data, text):
    assert rows_of(data.select(text)) == [row for row in range(90) if SELECTIONS[text](row)]


def test_an_expression_of_arrow_selects_too(data):
    assert rows_of(data.select(pc.field("width") > 870)) == [88, 89]
    assert rows_of(data.select((pc.field("label") == 1) & (pc.field("fold") == 0))) == list(range(32, 60, 4))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("widht > 3", r"there is no column 'widht', only id, .*did you mean width"),
        ("label != null", r"there is no column 'null', only id, .*; write None for the value"),
        ("label == 'galss'", r"there is no class 'galss'.*did you mean glass"),
        ("width == 'wide'", "column 'width' holds int64 and cannot be compared with 'wide'"),
        ("patient > 3", "cannot be compared with 3"),
        ("price > '3'", "cannot be compared with '3'"),
        ("price > 1e300", "cannot be compared with 1e.300, which has more digits"),
        ("price > 1e-300", "cannot be compared with 1e-300, which has more digits"),
        ("price > 1e999", "cannot be compared with inf, which has more digits"),
        ("patient == width", "cannot be compared"),
        ("'x' in width", "holds no text"),
        ("width", "a selection compares columns with values"),
        ("column('wide') > 3", "there is no column 'wide'"),
        ("column(width) > 3", "a selection compares columns"),
        ("column('taken at') > 'soon'", r"holds timestamp\[us\], and 'soon' is not one: write it like '2026-11-21'"),
        ("column('in zone') > '2026-01-01'", "write it like '2026-11-21T08:30:00Z'"),
        ("width + 1 > 3", "a selection compares columns"),
        ("camera.make == 'x'", r"not 'camera\.make'; a column of such a name is column\('camera\.make'\)"),
        ("__import__('os').system('true')", "a selection compares columns"),
        ("name.startswith('x') == True", "a selection compares columns"),
        ("[width for width in (1, 2)] == 1", "a selection compares columns"),
        ("width > ", "cannot be read"),
        ("", "cannot be read"),
        ("width > 3; 1", "cannot be read"),
        ("(" * 3000 + "width > 3" + ")" * 3000, "cannot be read"),
        ("width > 3 and " * 1000, "up to 10000 characters"),
    ],
)
def test_refuses_an_invalid_selection(data, text, sentence):
    with pytest.raises(SettingError, match=sentence):
        data.select(text)


def test_an_expression_of_arrow_that_does_not_fit_gets_a_sentence(data):
    with pytest.raises(SettingError, match="does not fit the columns"):
        data.select(pc.field("nothing") > 3)
    with pytest.raises(SettingError, match="says of each sample whether it is wanted"):
        data.select(pc.field("width"))


def test_nothing_of_a_selections_text_is_run(tmp_path):
    schema = pa.schema({"width": pa.int64()})
    mark = tmp_path / "mark"
    with pytest.raises(SettingError):
        parse_expression(f"width == open({str(mark)!r}, 'w').write('x')", schema, ())
    assert not mark.exists()


def test_a_part_of_a_part_keeps_its_order(data):
    part = data.take(np.array([80, 5, 61, 33, 62]))
    assert rows_of(part.select("label == 'glass'")) == [80, 61, 62]
    assert rows_of(data.select("label == 'dog'").select("width > 570")) == [58, 59]
    assert data.select("label == 'dog'").select("label == 'cat'").samples.objects == []
    train, held_out = data.select("label == 'dog'").split(0.5, seed=2)
    assert sorted(rows_of(train) + rows_of(held_out)) == list(range(30, 60))
    assert rows_of(train) == sorted(rows_of(train))
    with pytest.warns(UserWarning, match="single sample"):
        one, other = part.split(0.4, seed=1)
    order = [80, 5, 61, 33, 62]
    assert [row for row in order if row in rows_of(one)] == rows_of(one)
    assert sorted(rows_of(one) + rows_of(other)) == sorted(order)


def test_a_part_is_named_by_its_samples(data):
    one, same, other = (data.select(text) for text in ("width > 50", "50 < width", "width > 60"))
    assert one.digest == same.digest != other.digest
    assert len({one.digest, data.digest}) == 2
    assert one.selection.listing == data.selection.listing
    assert one.classes == CLASSES


def test_columns_are_those_of_the_manifest_and_those_added(data):
    assert data.columns[:7] == ("id", "name", "object", "offset", "length", "label", "etag")
    assert data.columns[7:] == ("patient", "width", "fold", "is_sharp", "taken at", "class", "in zone", "price")
    part = data.take(np.array([80, 5]))
    assert part.column("patient").to_pylist() == ["p26", "p01"]
    assert part.column("length").to_pylist() == part.samples.lengths.tolist()
    with pytest.raises(SettingError, match="there is no column 'age'"):
        part.column("age")
    with pytest.raises(SettingError, match="2 values for 90 samples"):
        data.with_columns({"age": [1, 2]})
    with pytest.raises(SettingError, match="its name is taken"):
        data.with_columns({"patient": [""] * 90})
    with pytest.raises(SettingError, match="before select"):
        part.with_columns({"age": [1, 2]})


def test_several_parts_at_once_have_their_shares_of_every_class(data):
    parts = data.split({"train": 0.8, "val": 0.1, "test": 0.1}, seed=5)
    assert list(parts) == ["train", "val", "test"]
    assert {name: dict(part.statistics().per_class) for name, part in parts.items()} == {
        "train": dict.fromkeys(CLASSES, 24),
        "val": dict.fromkeys(CLASSES, 3),
        "test": dict.fromkeys(CLASSES, 3),
    }
    assert sorted(row for part in parts.values() for row in rows_of(part)) == list(range(90))
    assert rows_of(data.split({"a": 0.8, "b": 0.2}, seed=1)["b"]) == rows_of(data.split(0.2, seed=1)[1])


def test_a_grouped_split_keeps_each_group_within_one_part(data):
    parts = data.split({"train": 0.6, "val": 0.2, "test": 0.2}, seed=5, by="patient")
    seen = [set(part.column("patient").to_pylist()) for part in parts.values()]
    assert sum(map(len, seen)) == len(set.union(*seen))
    assert [len(part) for part in parts.values()] == [54, 18, 18]
    train, held_out = data.split(0.2, seed=5, by="patient")
    assert not set(train.column("patient").to_pylist()) & set(held_out.column("patient").to_pylist())
    assert rows_of(data.split(0.2, seed=6, by="patient")[1]) != rows_of(held_out)


def test_groups_do_not_depend_on_where_their_samples_stand(data):
    order = np.random.default_rng(0).permutation(90)
    straight, shuffled = data.split(0.3, 1, by="patient")[1], data.take(order).split(0.3, 1, by="patient")[1]
    assert sorted(rows_of(shuffled)) == rows_of(straight)


def test_a_group_that_is_not_known_is_refused(data):
    with pytest.raises(DataError, match="9 samples have no 'width'"):
        data.split(0.2, by="width")
    with pytest.raises(SettingError, match="there is no column 'person'"):
        data.split(0.2, by="person")
    with pytest.raises(DataError, match="the part 'val' would be empty"):
        data.select("patient == 'p01'").split({"train": 0.9, "val": 0.1}, by="patient")


def test_an_unbalanced_split_has_its_share_of_all_samples(data):
    train, held_out = data.split(0.1, seed=3, balanced=False)
    assert (len(train), len(held_out)) == (81, 9)
    assert rows_of(held_out) != rows_of(data.split(0.1, seed=3)[1])


def test_a_column_divides_by_its_values(data):
    parts = data.split_by("fold")
    assert list(parts) == ["0", "1", "2", "3"]
    assert rows_of(parts["2"]) == list(range(2, 90, 4))
    assert list(data.split_by("is_sharp")) == ["False", "True"]


def test_a_column_of_too_many_values_divides_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    for number in range(256):
        (tmp_path / "a" / f"{number}.jpg").write_bytes(b"")
    with pytest.raises(SettingError, match="has 256 values, and a split up to 255 parts"):
        Dataset(tmp_path).split_by("name")


def test_saved_splits_are_there_for_everyone_who_lists_the_same(data, tmp_path):
    parts = data.split({"train": 0.8, "val": 0.2}, seed=1, by="patient")
    data.save_splits(parts)
    other = Dataset(tmp_path)
    assert other.splits == ("train", "val")
    assert other["val"].digest == parts["val"].digest
    assert rows_of(other["train"]) == rows_of(parts["train"])
    other.save_splits({"val": other.take(np.array([9, 3])), "few": other})
    assert Dataset(tmp_path).splits == ("train", "val", "few")
    assert rows_of(Dataset(tmp_path)["val"]) == [3, 9]
    assert rows_of(other.select("label == 'glass'")["val"]) == []
    assert rows_of(other.take(np.array([9, 8, 3]))["val"]) == [9, 3]
    assert dict(other.statistics().splits) == {"train": 72, "val": 2, "few": 90}


def test_refuses_an_unknown_split(data, tmp_path):
    with pytest.raises(SettingError, match=r"has no split 'train', and no other: frostline index --split train=0.8"):
        data["train"]
    data.save_splits({"train": data})
    with pytest.raises(SettingError, match="has no split 'test', only train"):
        data["test"]
    (tmp_path / "cat" / "new.jpg").write_bytes(b"x")
    changed = Dataset(tmp_path)
    assert changed.splits == ()
    with pytest.raises(SettingError, match="the part 'train' is one of other data"):
        changed.save_splits({"train": data})


@pytest.mark.parametrize("damage", ["cut off", "no JSON", "other fields", "gone", "deep", "short", "empty", "a bit"])
def test_splits_that_cannot_be_read_are_refused_by_name_and_stay(data, tmp_path, damage):
    path = Path(unquote(urlsplit(data.save_splits({"train": data.take(3), "test": data.take(2)})).path))
    [about] = path.parent.glob(f"{path.name[:16]}*.json")
    match damage:
        case "cut off":
            path.write_bytes(path.read_bytes()[:100])
        case "gone":
            path.unlink()
        case "a bit":
            table = pq.read_table(path)
            bits = [bytes([some[0] ^ 1, *some[1:]]) for some in table["bits"].to_pylist()]
            pq.write_table(table.set_column(2, "bits", pa.array(bits, pa.large_binary())), path)
            said = {**json.loads(about.read_bytes()), "nbytes": path.stat().st_size}
            about.write_bytes(json.dumps(said).encode().ljust(256))
        case "short" | "empty":
            about.write_bytes(about.read_bytes()[: 100 if damage == "short" else 0])
        case _:
            values = {"no JSON": b"{", "other fields": b'{"schema": 3}', "deep": b"[" * 256}
            about.write_bytes(values[damage].ljust(256))
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    for use in (
        lambda again: again.splits,
        lambda again: again["train"],
        lambda again: again.save_splits({"x": again}),
    ):
        with pytest.raises(SettingError, match=f"the splits that were saved at .*{about.name} cannot be read"):
            use(Dataset(tmp_path))
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    about.unlink()
    assert Dataset(tmp_path).splits == ()


def test_statistics_of_a_part_are_those_of_its_samples(data):
    found = data.select("label == 'dog' and length <= 20").statistics()
    assert (found.samples, found.min_bytes, found.max_bytes, found.total_bytes) == (20, 1, 20, 210)
    assert found.per_class == (("cat", 0), ("dog", 20), ("glass", 0))
    assert (found.quantiles.p5, found.quantiles.p95) == (2, 19)
    assert ("width", "int64") in found.columns
    empty = data.select("length > 99").statistics()
    assert (empty.samples, empty.mean_bytes, empty.quantiles.p50) == (0, 0.0, 0)


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
    repack(source, copy, format, on_event=happened.append)
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
    assert scoring_splits(["test", "extra", "Val", "train"]) == ["Val", "test"]
    assert training_split(["test", "Training"]) == "Training"
    assert training_split(["test"]) is None


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
