"""What copies are called and say: readable names in folders, numbers of classes in shards, the order of rows."""

import io
import json
import tarfile
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frostline.datasets import Dataset
from frostline.datasets.copy.layout import FolderNames
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.cql import CqlTables
from frostline.stores.open import open_store
from frostline.stores.protocols import LABELS, Entry
from support.formats import tar_of

JPEG, PNG = b"\xff\xd8\xff the rest", b"\x89PNG\r\n\x1a\nthe rest"


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4()}")


def copied(source, format):
    url = f"memory://{uuid.uuid4()}"
    repack(source, url, format, observe=lambda event: None)
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
    assert objects_of(copied(copied(Dataset(store.url), between), "original")) == names


def test_members_of_shards_are_called_as_they_were(store):
    tar(store, "train.tar", "cat/1.jpg", "b.jpg")
    assert objects_of(copied(Dataset(store.url), "original")) == ["cat/train.tar/b.jpg", "cat/train.tar/cat/1.jpg"]


def test_rows_get_the_suffix_of_their_content(store):
    out = io.BytesIO()
    pq.write_table(pa.table({"image": [JPEG, PNG], "label": ["cat", "dog"]}), out)
    store.write("x.parquet", out.getvalue())
    assert objects_of(copied(Dataset(store.url), "original")) == ["cat/x.parquet/0.jpg", "dog/x.parquet/1.png"]


def test_folders_of_splits_are_made_where_the_source_has_splits(store):
    names = ["train/cat/1.jpg", "train/dog/1.jpg", "val/cat/1.jpg"]
    for name in names:
        store.write(name, JPEG + name.encode())
    copy = copied(copied(Dataset(store.url), "webdataset"), "original")
    assert objects_of(copy) == names
    assert (copy.splits, copy.classes) == (("train", "val"), ("cat", "dog"))


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
    copy = copied(data, "original")
    assert len(copy) == len(objects_of(copy)) == len(names)


def test_shards_say_the_number_of_the_class_to_others_and_its_name_to_us(store):
    for name in ("cat/1.jpg", "dog/2.jpg"):
        store.write(name, JPEG + name.encode())
    copy = copied(Dataset(store.url), "webdataset")
    assert copy.classes == ("cat", "dog")
    assert copy.samples.labels.tolist() == [0, 1]
    [shard] = objects_of(copy)
    size = next(item.size for item in open_store(copy.url).list() if item.object == shard)
    with tarfile.open(fileobj=io.BytesIO(bytes(open_store(copy.url).read(shard, 0, size)))) as packed:
        members = {getmember.name: packed.extractfile(getmember).read() for getmember in packed.getmembers()}
    keys = sorted({name.partition(".")[0] for name in members})
    assert sorted((members[f"{key}.jpg"], members[f"{key}.cls"]) for key in keys) == [
        (JPEG + b"cat/1.jpg", b"0"), (JPEG + b"dog/2.jpg", b"1")
    ]  # fmt: skip
    again = copied(copy, "webdataset")
    assert (again.classes, again.columns) == (copy.classes, copy.columns)


def test_a_field_that_is_null_in_every_sample_is_a_column_of_nothing(store):
    files = []
    for number in range(4):
        files += [(f"{number}.jpg", JPEG), (f"{number}.json", json.dumps({"label": "cat", "note": None}).encode())]
    store.write("x.tar", tar_of(files))
    data = Dataset(store.url)
    assert data.column("note").null_count == len(data.select("note is None")) == 4
    assert Dataset(store.url).manifest.found
    for format in ("parquet", "webdataset"):
        assert len(copied(data, format)) == 4


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
