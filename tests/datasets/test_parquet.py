"""Parquet files: images and texts in cells, read in place.

Parquet: which columns are what, cells read in place, each row group once, and what is said of bad files.

A column of texts as samples, chosen by name.
"""

import base64
import io
import json
import threading
import time as time_module
import tracemalloc
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, time, timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from PIL import Image

import frostline as fl
from frostline import Dataset
from frostline.core.config import LoaderSettings
from frostline.core.errors import (
    BadRequest,
    DataError,
    DataNotFound,
    EmptyDataset,
    ObjectNotFound,
    SampleError,
    SettingError,
)
from frostline.core.events import SampleSkipped
from frostline.core.system import give_back_freed
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.cells_apart import CellsApart, column_of_group
from frostline.datasets.formats.known import format_named
from frostline.datasets.formats.parquet import Cell, CellCache, CellReader, Parquet
from frostline.datasets.formats.ranges import written_out_bytes
from frostline.datasets.formats.tables import columns_of_schema
from frostline.datasets.reading import open_samples
from frostline.engines.machine import can_measure, look_anew, peak_bytes, resident_bytes
from frostline.preprocess import CenterCrop, Decode, Normalize, Preprocess
from frostline.stores.open import open_store
from frostline.stores.protocols import Entry
from frostline.testing.formats import EXAMPLES
from frostline.wire.listings import ListingRequest
from support.formats import arrow_of, parquet_of, put_parquet
from support.texts import write_reviews

FORMAT = Parquet()
BINARY = pa.field("image", pa.struct({"bytes": pa.binary(), "path": pa.string()}))


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4()}")


def read(store):
    return FORMAT.read(store, list(store.list()))


def put_table(store, name="x.parquet", **columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    store.write(name, sink.getvalue().to_pybytes())


def refused(store, data):
    store.write("bad.parquet", data)
    with pytest.raises(DataError) as caught:
        read(store)
    assert "bad.parquet" in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def found(store, listed, reader=None):
    reader = reader or open_samples(store.url, listed.reading)
    rows = listed.table.to_pylist()
    return [bytes(reader.read(row["object"], row["offset"], row["length"])) for row in rows]


def run_here(kind, asked, pieces, *, made_bytes, may_take):
    """What a child does, in this process."""
    made = memoryview(bytearray(made_bytes))
    answer = column_of_group(asked, [memoryview(piece) for piece in pieces], made)
    return answer, bytes(made[: answer[0]])


def readers(store, nbytes=64 << 20):
    """A reader that decodes in this process, and one that has it done as a node with tenants does."""
    return [CellReader(store, CellCache(nbytes), decoder=decoder) for decoder in (None, CellsApart(run_here, "ann"))]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "zstd"},
        {"use_dictionary": False},
        {"version": "1.0"},
        {"data_page_version": "2.0", "data_page_size": 1},
        {"use_dictionary": False, "column_encoding": "DELTA_LENGTH_BYTE_ARRAY"},
    ],
)
def test_images_are_found_as_structs_and_as_plain_bytes_however_they_are_packed(store, nested, options):
    put_parquet(store, EXAMPLES, nested=nested, **options)
    listed = read(store)
    for reader in readers(store):
        assert found(store, listed, reader) == [example.data for example in EXAMPLES]
    assert [listed.classes[label] for label in listed.table["label"].to_pylist()] == [
        example.label for example in EXAMPLES
    ]
    assert listed.table["key"].to_pylist() == [example.key for example in EXAMPLES]


def test_classes_have_the_names_and_the_order_that_hugging_face_gives_them(store):
    names = ("fish", "whale", "cat", "dog")
    put_parquet(store, EXAMPLES, names=names)
    listed = read(store)
    assert listed.classes == names
    assert listed.table["label"].to_pylist() == [names.index(example.label) for example in EXAMPLES]


def write_hugging_face(store, name, kind, table, features):
    """A file of that name and kind whose schema says what its columns are, as Hugging Face's does."""
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    sink = pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(table, sink)
    else:
        sink.write(arrow_of(table, 1))
    store.write(f"{name}.{kind}", sink.getvalue().to_pybytes())


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_another_column_of_classes_has_its_names_where_it_is_the_label(store, kind, tmp_path):
    features = {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": ["zebra", "ant"]},
        "fine": {"_type": "ClassLabel", "names": ["z2", "a1", "m3", "nobody"]},
    }

    def put(name, fine, features):
        table = pa.table({"image": [png(1), png(2)], "label": [0, 1], "fine": fine})
        write_hugging_face(store, name, kind, table, features)

    put("a", [2, 0], features)
    put("b", pa.array([-1, None], pa.int64()), features)
    for _ in range(2):  # as it was found again
        data = Dataset(store.url, label="fine", cache=tmp_path)
        assert data.classes == ("z2", "a1", "m3", "nobody")
        assert data.samples.labels[:].tolist() == [2, 0, -1, -1]
        assert Dataset(store.url, cache=tmp_path).classes == ("zebra", "ant")
        assert Dataset(store.url, cache=tmp_path).column("fine").to_pylist() == [2, 0, -1, None]
    for label, classes, is_said in (("fine", data.classes, False), ("label", ("zebra", "ant"), True)):
        for format in ("webdataset", "parquet"):
            happened, copy = [], tmp_path / f"{label}-{format}"
            repack(Dataset(store.url, label=label, cache=tmp_path), copy, format, on_event=happened.append)
            assert Dataset(copy, cache=tmp_path).classes == classes
            said = any("of fine a copy has the numbers, and not the names" in str(event) for event in happened)
            assert said == (is_said and format == "webdataset")
    again = Dataset(tmp_path / "label-parquet", label="fine", cache=tmp_path)
    assert (again.classes, again.samples.labels[:].tolist()) == (("z2", "a1", "m3", "nobody"), [2, 0, -1, -1])
    put("b", [0, 1], {name: features[name] for name in ("image", "label")})
    assert Dataset(store.url, label="fine", cache=tmp_path).classes == ("0", "1", "2"), "not all files name them"
    turned = {**features, "fine": {"_type": "ClassLabel", "names": ["a1", "z2", "m3", "nobody"]}}
    put("b", [0, 1], turned)
    for _ in range(2):  # as it was found again
        for options in ({"label": "fine"}, {"targets": "fine"}):
            with pytest.raises(DataError, match="'fine' stand for other names of classes in some files"):
                _ = Dataset(store.url, cache=tmp_path, **options).targets
        assert Dataset(store.url, cache=tmp_path).classes == ("zebra", "ant")
    put("b", pa.nulls(2, pa.int64()), turned)
    assert Dataset(store.url, label="fine", cache=tmp_path).classes == ("z2", "a1", "m3", "nobody"), "it has no numbers"
    twice = {**features, "fine": {"_type": "ClassLabel", "names": ["crane", "owl", "crane", "ox"]}}
    put("a", [2, 0], twice)
    put("b", [0, 1], twice)
    with pytest.raises(DataError, match="column 'fine' has two classes called 'crane'"):
        _ = Dataset(store.url, label="fine", cache=tmp_path).samples
    put("a", [2, 0], features)
    put("b", [0, 4], features)
    with pytest.raises(DataError, match="column 'fine' has a label 4 and names for 4 classes only"):
        _ = Dataset(store.url, label="fine", cache=tmp_path).samples


OF_CLASSES = {"_type": "ClassLabel", "names": ["z2", "a1", "nobody"]}
WAYS_OF_LISTS = {
    "Sequence": {"_type": "Sequence", "feature": OF_CLASSES},
    "List": {"_type": "List", "feature": OF_CLASSES},
    "LargeList": {"_type": "LargeList", "feature": OF_CLASSES},
    "list": [OF_CLASSES],
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("way", WAYS_OF_LISTS)
@pytest.mark.parametrize("name", ["tags", "label"])
def test_numbers_in_lists_and_structs_have_the_names_of_their_table_of_classes(store, tmp_path, kind, way, name):
    feature = WAYS_OF_LISTS[way]
    boxes = [{"category": [0, 1], "kind": 1, "n": 5}, {"category": [1], "kind": 0, "n": 6}]
    features = {"image": {"_type": "Image"}, name: feature}
    features["objects"] = {"category": feature, "kind": OF_CLASSES, "n": {"_type": "Value", "dtype": "int64"}}
    if way == "Sequence":  # as of a list of structs, which datasets writes as a struct of lists
        features["others"] = {"_type": "Sequence", "feature": {"kind": OF_CLASSES}}
    table = pa.table({"image": [png(1), png(2)], name: [[0], [1, 0]], "objects": boxes, "others": [{"kind": [1]}] * 2})
    write_hugging_face(store, "a", kind, table, features)
    for _ in range(2):  # as it was found again
        for column in (name, "objects.category"):
            data = Dataset(store.url, targets=fl.MultiLabel(column=column), cache=tmp_path)
            [spec] = data.target_columns.specs
            assert (spec.classes, spec.shape) == (("z2", "a1", "nobody"), (3,)), "also the one without samples"
            assert data.targets.tolist() == ([[1, 0, 0], [1, 1, 0]] if column == name else [[1, 1, 0], [0, 1, 0]])
            plain = Dataset(store.url, targets=column, cache=tmp_path)
            assert plain.target_columns.specs[0].classes == ("z2", "a1", "nobody")
        if name == "tags":
            data = Dataset(store.url, label="objects.kind", cache=tmp_path)
            assert (data.classes, data.samples.labels[:].tolist()) == (("z2", "a1", "nobody"), [1, 0])
    happened = []
    repack(Dataset(store.url, targets=(), cache=tmp_path), tmp_path / "copy", "parquet", on_event=happened.append)
    [reason] = [event.reason for event in happened if "not the names" in str(event)]
    assert "objects.category" in reason, "of lists, which are texts in a manifest"
    assert not any(column in reason for column in ("objects.kind", "objects.n"))
    copy = Dataset(tmp_path / "copy", label="objects.kind", cache=tmp_path)
    assert copy.classes == ("z2", "a1", "nobody"), "a column of numbers carries its table"


@pytest.mark.parametrize("kind", ["urls", "folders"])
def test_a_list_in_parquet_has_the_names_of_its_table_of_classes(store, tmp_path, kind):
    for row in range(3):
        store.write(f"{'images/' if kind == 'folders' else ''}{row}.png", png(row))
    names = [f"{row}.png" for row in range(3)]
    table = pa.table({"file_name": names, "label": [1, -1, 0], "fine": [1, 0, 1], "tags": [[0], [], [1, 0]]})
    features = {"label": OF_CLASSES, "fine": OF_CLASSES, "tags": [OF_CLASSES]}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    store.write("metadata.parquet", sink.getvalue().to_pybytes())

    def listed(**options):
        return Dataset(store.url, cache=tmp_path, format=kind, **options)

    for _ in range(2):  # as it was found again
        for label, numbers in ((None, [1, -1, 0]), ("fine", [1, 0, 1])):
            data = listed(label=label)
            assert (data.classes, data.samples.labels[:].tolist()) == (("z2", "a1", "nobody"), numbers)
        data = listed(targets=fl.MultiLabel(column="tags"))
        assert data.target_columns.specs[0].classes == ("z2", "a1", "nobody")
        assert data.targets.tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 0]]
    plain = pa.table({"file_name": names, "label": [1, 3, 0]}).replace_schema_metadata(table.schema.metadata)
    sink = pa.BufferOutputStream()
    pq.write_table(plain, sink)
    store.write("metadata.parquet", sink.getvalue().to_pybytes())
    if kind == "urls":
        with pytest.raises(DataError, match=r"metadata\.parquet has a label 3 and names for 3 classes only"):
            _ = listed().samples
    else:
        [left] = listed().manifest.left_out
        assert "has a label 3 and names for 3 classes only" in left.reason


def test_a_label_that_no_class_has_gets_a_sentence(store):
    features = b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a"]}}}}'
    table = pa.table({"image": [b"1", b"2"], "label": [0, 4]}).replace_schema_metadata({"huggingface": features})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    assert "has a label 4 and names for 1 classes only" in refused(store, sink.getvalue().to_pybytes())


def test_a_table_of_classes_that_calls_two_alike_is_refused(store):
    features = b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["crane", "owl", "crane"]}}}}'
    table = pa.table({"image": [b"1", b"2"], "label": [0, 2]}).replace_schema_metadata({"huggingface": features})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    assert "has two classes called 'crane' in its table of classes" in refused(store, sink.getvalue().to_pybytes())


def test_chooses_by_name_among_several_possible_columns():
    def said(**features):
        return {"huggingface": json.dumps({"info": {"features": features}})}

    fields = [
        pa.field("thumb", pa.binary()),
        BINARY,
        ("label", pa.string()),
        ("fine", pa.int64()),
        ("size", pa.int32()),
    ]
    plain = columns_of_schema(pa.schema(fields))
    assert (plain.image, plain.label, plain.classes, plain.about) == ("image.bytes", "label", (), ("fine", "size"))
    features = said(thumb={"_type": "Image"}, fine={"_type": "ClassLabel", "names": ["a", "b"]})
    words = columns_of_schema(pa.schema(fields, metadata=features))
    assert (words.image, words.label, words.classes, words.about) == ("thumb", "fine", ("a", "b"), ("label", "size"))
    assert columns_of_schema(pa.schema([("label", pa.int64()), ("words", pa.string())])) is None
    assert columns_of_schema(pa.schema(fields, metadata={"huggingface": "{"})) == plain


def test_rows_without_an_image_are_left_out_and_those_without_a_label_have_none(store):
    put_table(store, image=[b"one", None, b"three"], label=["a", "b", None], score=pa.array([1, 2, None], pa.uint8()))
    listed = read(store)
    assert listed.table["offset"].to_pylist() == [0, 2]
    assert listed.table["label"].to_pylist() == [0, None]
    assert listed.table["score"].to_pylist() == [1, None]
    assert found(store, listed) == [b"one", b"three"]


MOMENT = datetime.fromisoformat("2024-05-01T08:30:00.250000")
ODD = {
    "day": [date(2024, 5, 1), date(2024, 5, 2), None],
    "at": [MOMENT, MOMENT + timedelta(days=1), None],
    "there": pa.array([MOMENT, None, MOMENT], pa.timestamp("ms", "Europe/Berlin")),
    "fine": pa.array([1, 2, None], pa.timestamp("ns")),
    "clock": [time(8, 30, 0, 5), time(9), None],
    "lasts": [timedelta(seconds=1.5), timedelta(days=2), None],
    "price": [Decimal("0.25"), Decimal("12.50"), None],
    "small": pa.array([Decimal("1.5"), None, Decimal("2.5")], pa.decimal32(4, 1)),
    "nothing": pa.nulls(3),
    "view": pa.array(["x", "y", None], pa.string_view()),
    "camera": [{"make": "N", "year": 2024, "lens": {"mm": 35}}, {"make": "C", "year": 2020, "lens": None}, None],
    "counts": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
    "boxes": [[{"x": 1, "name": "cat"}], [], None],
}


def test_columns_of_every_type_are_metadata(store):
    put_table(store, image=[b"1", b"2", b"3"], label=["a", "b", "a"], **ODD)
    data = Dataset(store.url)
    assert data.manifest.left_out == ()
    values = {name: data.column(name).to_pylist() for name in data.columns[7:] if name not in ("fine", "there")}
    assert data.column("fine").cast(pa.int64()).to_pylist() == [1, 2, None]
    assert data.column("there").type == pa.timestamp("us", "Europe/Berlin")
    assert values == {
        **{name: ODD[name] for name in ("day", "at", "clock", "lasts", "price")},
        "small": [Decimal("1.5"), None, Decimal("2.5")], "nothing": [None] * 3, "view": ["x", "y", None],
        "camera.make": ["N", "C", None], "camera.year": [2024, 2020, None], "camera.lens": ['{"mm": 35}', None, None],
        "counts": ['{"a": 1}', "{}", None], "boxes": ['[{"x": 1, "name": "cat"}]', "[]", None],
    }  # fmt: skip
    for chosen, rows in {
        "day >= '2024-05-02'": ["2"], "at < '2024-05-02'": ["1"], "clock > '08:45'": ["2"], "price >= 1.5": ["2"],
        "price is None": ["3"], "column('camera.year') == 2020": ["2"], "fine is not None": ["1", "2"],
        "there is None": ["2"],
    }.items():  # fmt: skip
        assert [name[-1] for name in data.select(chosen).names] == [str(int(row) - 1) for row in rows], chosen
    price = Dataset(store.url, targets="price").take(np.arange(2)).target_columns
    assert price.at(np.arange(2)).tolist() == [0.25, 12.5]
    with pytest.raises(SettingError, match="clock"):
        data.select("clock > 'noon'")


def test_columns_of_types_that_databases_write_are_what_they_say(store):
    some = [uuid.UUID(int=1), None]
    put_table(
        store,
        image=[b"1", b"2"],
        label=pa.array([1, 0], pa.bool8()),
        key=pa.array([one and one.bytes for one in some], pa.uuid()),
        about=pa.array(['{"a": 1}', None], pa.json_()),
        hash=pa.array([2**64 - 1, None], pa.uint64()),
    )
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("False", "True"), [1, 0])
    columns = {name: data.column(name).to_pylist() for name in data.columns[7:]}
    assert columns == {
        "key": [str(some[0]), None], "about": ['{"a": 1}', None], "hash": [Decimal(2**64 - 1), None],
    }  # fmt: skip


def test_what_a_writer_has_not_finished_is_no_part_of_its_table(store):
    for name in ("a", "_temporary/0/a", "site=_x/a"):
        put_table(store, f"{name}.parquet", image=[b"1"], label=["x"])
    assert [name.rpartition("/")[0] for name in Dataset(store.url).names] == ["a.parquet", "site=_x/a.parquet"]
    [left] = Dataset(store.url).manifest.left_out
    assert left.names == ("_temporary/0/a.parquet",)


@pytest.mark.parametrize(
    ("log", "kind"),
    [("_delta_log/00.json", "Delta"), ("metadata/v1.metadata.json", "Iceberg"), (".hoodie/hoodie.properties", "Hudi")],
)
def test_tables_with_a_log_are_refused_until_their_files_are_named(store, log, kind):
    put_table(store, "data/a.parquet", image=[b"1"], label=["x"])
    store.write(log, b"{}")
    with pytest.raises(EmptyDataset, match=f"{log} belongs to a table of {kind}, whose log says which of its files"):
        _ = Dataset(store.url).samples
    assert len(Dataset(store.url, format="parquet")) == 1


def test_columns_of_several_files_become_of_one_type(store):
    images = {"image": [b"1"]}
    put_table(store, "a.parquet", **images, at=pa.array([5], pa.timestamp("s")), price=[Decimal("0.25")], odd=[1])
    put_table(
        store, "b.parquet", **images, at=pa.array([7], pa.timestamp("ns")), price=[Decimal("100.125")], odd=[MOMENT]
    )
    data = Dataset(store.url)
    assert data.column("at").cast(pa.int64()).to_pylist() == [5 * 10**9, 7]
    assert data.column("price").to_pylist() == [Decimal("0.25"), Decimal("100.125")]
    assert data.column("odd").to_pylist() == ["1", "2024-05-01 08:30:00.250000"]


def test_numbers_in_one_file_and_names_in_another_are_no_classes_together(store):
    put_table(store, "a.parquet", image=[b"1", b"2"], label=[None, "cat"])
    put_table(store, "b.parquet", image=[b"1"], label=[1])
    put_table(store, "c.parquet", image=[b"1"], label=pa.array([None], pa.string()))
    with pytest.raises(DataError, match=r"numbers in b.parquet \(1\) and names in a.parquet \(cat\)"):
        read(store)
    put_table(store, "b.parquet", image=[b"1"], label=["1"])
    listed = read(store)
    assert listed.classes == ("1", "cat")
    assert listed.table["label"].to_pylist() == [None, 1, 0, None]


@pytest.mark.parametrize("nested", [True, False])
def test_arrows_view_types_are_texts_and_binary_values(store, nested):
    data = [b"1", b"a longer image of many bytes"]
    image = pa.array(data, pa.binary_view())
    image = pa.StructArray.from_arrays([image], ["bytes"]) if nested else image
    put_table(store, image=image, label=pa.array(["cat", "dog"], pa.string_view()))
    listed = read(store)
    assert found(store, listed) == data
    assert (listed.classes, listed.table["label"].to_pylist()) == (("cat", "dog"), [0, 1])


def test_folders_of_partitions_are_columns_and_labels(store):
    for folder, images in (
        ("label=cat/site=north%20a/year=2024", [b"1"]),
        ("label=dog/site=b/year=2020", [b"2", b"3"]),
    ):
        put_table(store, f"{folder}/x.parquet", image=images)
    put_table(store, "label=dog/site=__HIVE_DEFAULT_PARTITION__/year=2020/id=7/y.parquet", image=[b"4"])
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("cat", "dog"), [0, 1, 1, 1])
    assert data.column("site").to_pylist() == ["north a", None, "b", "b"]
    assert data.column("year").to_pylist() == [2024, 2020, 2020, 2020]
    assert data.column("meta_id").to_pylist() == [None, 7, None, None]
    put_table(store, "label=10/year=new/z.parquet", image=[b"5"])
    again, fresh = Dataset(store.url), Dataset(store.url, manifest_location="data", cache=None)
    assert again.classes == ("10", "cat", "dog")
    assert again.column("year").to_pylist() == ["new", "2024", "2020", "2020", "2020"]
    assert again.manifest.columns.table.equals(read(store).table)
    assert fresh.digest == again.digest


def test_a_partition_called_split_is_the_split(store):
    for split, image in (("train", b"1"), ("test", b"2")):
        put_table(store, f"split={split}/x.parquet", image=[image], label=["a"])
    data = Dataset(store.url)
    assert data.splits_brought == ("train", "test")
    assert data["test"].names == ["split=test/x.parquet/0"]


def test_what_a_file_says_itself_goes_before_its_folder(store):
    put_table(store, "label=cat/site=a/x.parquet", image=[b"1", b"2"], label=["dog", "cow"], site=["b", "c"])
    data = Dataset(store.url)
    assert (data.classes, data.column("site").to_pylist()) == (("cow", "dog"), ["b", "c"])


def put_file(folder, name, format, table, rows=3):
    """Write a table as a Parquet file of small row groups, or as an Arrow file of small batches."""
    if format == "parquet":
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=rows)
    else:
        (folder / f"{name}.arrow").write_bytes(arrow_of(table, rows))


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_rows_that_say_paths_alone_are_read_from_there(tmp_path, format):
    (tmp_path / "data/images").mkdir(parents=True)
    for name in ("a b.jpg", "c.jpg"):
        (tmp_path / "data/images" / name).write_bytes(name.encode())
    (tmp_path / "d.jpg").write_bytes(b"d")
    paths = ["images/a b.jpg", None, "images/c.jpg", str(tmp_path / "d.jpg"), "images/gone.jpg"]
    images = pa.array([{"bytes": None, "path": path} for path in paths], BINARY.type)
    put_file(tmp_path / "data", "x", format, pa.table({"image": images, "label": list("xyxyx")}))
    how = {"cache": tmp_path / "cache", "format": format}
    data = Dataset(tmp_path / "data", **how)
    assert data.manifest.reading == "urls"
    assert data.samples.labels.tolist() == [0, 0, 1, 0]
    assert [(one.what, one.total, one.names) for one in data.manifest.left_out] == [("row", 1, (f"x.{format}/1",))]
    reader = open_samples(data.url, "urls", roots=("file:///",))
    samples = data.samples.take(np.arange(3))
    places = zip(samples.objects, samples.lengths.tolist(), strict=True)
    assert [bytes(reader.read(object, 0, length)) for object, length in places] == [b"a b.jpg", b"c.jpg", b"d"]
    assert Dataset(tmp_path / "data", **how).manifest.found
    # Beside rows that hold their images, those that lie with the data are read from there.
    put_file(tmp_path / "data", "y", format, pa.table({"image": [b"0"], "label": ["x"]}))
    data = Dataset(tmp_path / "data", **how)
    assert list(data.names) == [f"x.{format}/0", f"x.{format}/2", f"y.{format}/0"]
    assert [(one.reason, one.names) for one in data.manifest.left_out] == [
        ("without a sample", (f"x.{format}/1",)),
        ("with the path of an image that is not here", (f"x.{format}/3", f"x.{format}/4")),
    ]


def contents_of(data):
    samples = data.samples.take(np.arange(len(data)))
    reader = open_samples(data.url, data.manifest.reading)
    places = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    return [bytes(reader.read(object, offset, length)) for object, offset, length in places]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_rows_that_say_paths_and_rows_that_hold_images_are_samples_of_one_column(tmp_path, format):
    root = tmp_path / "data"
    for name in ("images/a#x@3.ab.jpg", "images/c.jpg", "images/e.jpg", "images/d.jpg", "others/d.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.rpartition("/")[2].encode())
    values = [
        (b"0", None), (None, "images/a#x@3.ab.jpg"), (None, None), (None, "images/gone.jpg"), (b"4", "images/c.jpg"),
        (None, f"{root}/images/c.jpg"), (None, "../secret.jpg"), (None, "d.jpg"), (None, "http://a/b.jpg?c"),
    ]  # fmt: skip
    (tmp_path / "secret.jpg").write_bytes(b"no")
    images = pa.array([{"bytes": data, "path": path} for data, path in values], BINARY.type)
    put_file(root, "x", format, pa.table({"image": images, "label": list("xyxyxyxyx"), "site": list(range(9))}))
    put_file(root, "y", format, pa.table({"image": [b"y"], "label": ["y"], "site": [9]}))
    data = Dataset(root, cache=tmp_path / "cache", format=format)
    assert contents_of(data) == [b"0", b"a#x@3.ab.jpg", b"4", b"c.jpg", b"y"]
    assert data.samples.labels.tolist() == [0, 1, 0, 1, 1]
    assert data.column("site").to_pylist() == [0, 1, 4, 5, 9]
    left = {(one.what, one.reason): (one.total, one.names) for one in data.manifest.left_out}
    assert left == {
        ("row", "without a sample"): (1, (f"x.{format}/2",)),
        ("row", "with the path of an image that is not here"): (3, tuple(f"x.{format}/{row}" for row in (3, 6, 8))),
        ("row", "with the path of several images"): (1, (f"x.{format}/7",)),
        ("object", f"that the format {format} does not use"): (
            3,
            ("images/d.jpg", "images/e.jpg", "others/d.jpg"),
        ),
    }
    assert Dataset(root, cache=tmp_path / "cache", format=format).manifest.found
    # An image that is there now, or has changed, makes another manifest; other rows are the same.
    (root / "images/gone.jpg").write_bytes(b"back")
    (root / "images/c.jpg").write_bytes(b"other")
    again = Dataset(root, cache=tmp_path / "cache", format=format)
    assert contents_of(again) == [b"0", b"a#x@3.ab.jpg", b"back", b"4", b"other", b"y"]
    assert set(data.samples.ids.tolist()) < set(again.samples.ids.tolist())


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_row_whose_image_comes_later_is_read_then_though_its_file_stays(tmp_path, format):
    images = pa.array([{"bytes": b"0", "path": None}, {"bytes": None, "path": "late.jpg"}], BINARY.type)
    put_file(tmp_path, "x", format, pa.table({"image": images, "label": [0, 1]}))
    assert contents_of(Dataset(tmp_path, format=format)) == [b"0"]
    (tmp_path / "late.jpg").write_bytes(b"late")
    assert contents_of(Dataset(tmp_path, format=format)) == [b"0", b"late"]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_masks_whose_paths_rows_say_are_read_from_there_or_their_rows_are_left_out(tmp_path, format, inside):
    root = tmp_path / "data"
    for name in ("i/0.png", "m/0.png", "m/1.png", "m/2.png", "m/3.png", "n/3.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(len(name)))
    held = png(1) if inside else None
    values = [
        ((held, "i/0.png"), (None, "m/0.png")),
        ((held, "i/0.png"), (held, None)),
        ((held, "i/0.png"), (None, "gone.png")),
        ((None, "i/0.png"), (None, f"{root}/m/1.png")),
        ((held, "i/0.png"), (None, "3.png")),
        ((held, "i/0.png"), (b"" if inside else None, "m/2.png")),
        ((held, "i/0.png"), (None, None)),
        ((None, "i/0.png"), (held, None)),
    ]
    cells = [[{"bytes": data, "path": path} for data, path in column] for column in zip(*values, strict=True)]
    columns = dict(zip(("image", "mask"), (pa.array(column, BINARY.type) for column in cells), strict=True))
    put_file(root, "x", format, pa.table({**columns, "row": range(len(values))}))
    data = Dataset(root, cache=tmp_path / "cache", format=format)
    if inside:
        assert data.column("row").to_pylist() == [0, 1, 3, 5, 6, 7]
        left = {one.reason: one.names for one in data.manifest.left_out if one.what == "row"}
        assert left == {
            "with the path of a mask that is not here": (f"x.{format}/2",),
            "with the path of several masks": (f"x.{format}/4",),
        }
        masks = [png(7), png(1), png(7), png(7), b"", png(1)]
    else:  # a path that leads nowhere is one of a mask that cannot be read, as in a list
        assert data.column("row").to_pylist() == [0, 1, 2, 3, 5, 6, 7]
        masks = [png(7), b"", None, png(7), png(7), b"", b""]
    targets = data.samples.take(np.arange(len(data))).targets
    reader = open_samples(data.url, data.manifest.reading, roots=("file:///",))
    places = zip(targets.objects, targets.offsets.tolist(), targets.lengths.tolist(), strict=True)
    found = [
        bytes(reader.read(*place)) if place[0] and mask else b"" for place, mask in zip(places, masks, strict=True)
    ]
    assert found == [mask or b"" for mask in masks]
    assert [int(w) for w in targets.widths] == [8 if mask != b"" else 0 for mask in masks]


def test_a_node_reads_images_beside_parquet_files_and_notices_one_that_changed(tmp_path, shared_node):
    (tmp_path / "images").mkdir()
    for name, data in (("a", 1), ("b", 2)):
        (tmp_path / f"images/{name}.png").write_bytes(png(data))
    values = [(png(0), None), (None, "images/a.png"), (None, "images/b.png")]
    images = pa.array([{"bytes": data, "path": path} for data, path in values], BINARY.type)
    pq.write_table(pa.table({"image": images, "label": [0, 1, 0]}), tmp_path / "x.parquet")
    data = Dataset(tmp_path, format="parquet")
    seen, steps = [], Preprocess(steps=(Decode(), CenterCrop(8), Normalize(mean=(0.0,) * 3, std=(1.0,) * 3)))
    batches = list(fl.loader(data, 8, preprocess=steps, near=shared_node.url))
    assert sorted(batches[0].features[:, 0, 0, 0].tolist()) == [0, 1, 2]
    (tmp_path / "images/b.png").write_bytes(png(200))
    settings = LoaderSettings(max_skipped_fraction=0.5)
    batches = list(fl.loader(data, 8, preprocess=steps, near=shared_node.url, settings=settings, on_event=seen.append))
    assert sorted(batches[0].features[:, 0, 0, 0].tolist()) == [0, 1]
    assert [event.changed for event in seen if isinstance(event, SampleSkipped)] == [True]


def png(value):
    sink = io.BytesIO()
    Image.new("RGB", (8, 8), (value,) * 3).save(sink, "PNG")
    return sink.getvalue()


def test_two_columns_of_one_name_get_a_sentence(store):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays([pa.array([b"1"]), pa.array([1]), pa.array([2])], ["image", "x", "x"]), sink)
    assert "two columns called 'x'" in refused(store, sink.getvalue().to_pybytes())


def test_files_without_images_get_a_sentence(store):
    put_table(store, name="bad.parquet", words=["a"], label=[1])
    with pytest.raises(DataError, match=r"bad\.parquet has no column of images.*its columns are words, label"):
        read(store)
    put_table(store, name="bad.parquet", image=pa.array([None], BINARY.type))
    with pytest.raises(EmptyDataset, match="not one row of the 1 Parquet files"):
        read(store)


def test_a_list_of_urls_without_its_format_says_which_to_name(store):
    sink = io.BytesIO()
    pq.write_table(pa.table({"url": ["https://a/1.jpg"], "label": ["cat"]}), sink)
    store.write("list.parquet", sink.getvalue())
    with pytest.raises(DataError, match="if url says where images are, name the format: format='urls'"):
        Parquet().read(store, list(store.list()))


def test_damaged_and_cut_off_files_get_a_sentence(store):
    data = parquet_of(EXAMPLES)
    for bad in (
        b"",
        b"PAR1",
        data[: len(data) // 2],
        data[:-3],
        bytes(len(data)),
        data[:4] + b"\xff" * 300 + data[304:],
    ):
        assert "is no Parquet file, or is damaged or cut off" in refused(store, bad)


class Keys(pe.KmsClient):
    """Keys that are not kept from anybody."""

    def __init__(self, config):
        super().__init__()

    def wrap_key(self, key, name):
        return base64.b64encode(key)

    def unwrap_key(self, key, name):
        return base64.b64decode(key)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_files_get_a_sentence(store, plaintext_footer):
    factory = pe.CryptoFactory(Keys)
    options = {"footer_key": "f", "column_keys": {"c": ["image"]}, "plaintext_footer": plaintext_footer}
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), pe.EncryptionConfiguration(**options))
    sink = pa.BufferOutputStream()
    table = pa.table({"image": [b"1"], "label": [0]})
    with pq.ParquetWriter(sink, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    assert "is encrypted" in refused(store, data)
    store.write("encrypted.parquet", data)
    entry = next(entry for entry in store.list() if entry.object == "encrypted.parquet")
    with pytest.raises(ObjectNotFound, match="is encrypted"):
        CellReader(store, CellCache()).read(str(Cell.of(entry, "image")), 0, 1)


def test_a_cell_has_a_name_whatever_its_file_and_column_are_called():
    assert Cell.parse("a#@1.b") == Cell("a", (), 1, "b")  # the whole object
    for file, column in (("a.parquet", "image.bytes"), ("a#b@1.2/x.parquet", "a/b#c@d ü%"), ("x", "..")):
        cell = Cell.of(Entry(file, 12, "etag"), column)
        assert Cell.parse(str(cell)) == cell
        assert str(cell).startswith(f"{file}#")
    for bad in ("a.parquet", "a.parquet#", "a#b@", "a#b@x.1", "a#b@²", "a#b@" + "9" * 30):
        with pytest.raises(BadRequest, match="is no column of a Parquet file"):
            Cell.parse(bad)


def test_a_file_that_has_changed_since_it_was_listed_is_not_read(store):
    put_parquet(store, EXAMPLES)
    listed = read(store)
    reader = open_samples(store.url, "cells")
    assert found(store, listed, reader) == [example.data for example in EXAMPLES]
    changed = [example._replace(data=example.data[::-1]) for example in EXAMPLES]
    put_parquet(store, changed)
    fresh = open_samples(store.url, "cells")
    with pytest.raises(ObjectNotFound, match=r"train-00000\.parquet .*changed"):
        found(store, listed, fresh)
    # Whoever kept the old ones gives them to those who ask for them, and the new ones to others.
    assert found(store, read(store), reader) == [item.data for item in changed]


def test_cells_that_are_not_there_are_not_found(store):
    put_parquet(store, EXAMPLES)
    row = read(store).table.to_pylist()[0]
    reader = open_samples(store.url, "cells")
    for object, offset, length in (
        (row["object"], 99, row["length"]),
        (row["object"], 0, row["length"] + 1),
        (row["object"].replace("image.bytes", "nothing"), 0, 1),
        ("no" + row["object"], 0, 1),
    ):
        with pytest.raises(ObjectNotFound):
            reader.read(object, offset, length)


class Counting:
    """A store that counts what is read of it."""

    def __init__(self, store):
        self._store = store
        self.bytes_read = 0
        self.lock = threading.Lock()

    def read_version(self, object, offset, length):
        with self.lock:
            self.bytes_read += length
        return self._store.read_version(object, offset, length)


def photographs_like(rows=64, size=20_000):
    random = np.random.default_rng(0)
    return [EXAMPLES[0]._replace(key=f"{row}", data=random.bytes(size + row)) for row in range(rows)]


def test_threads_share_a_row_group_that_is_read_once(store):
    examples = photographs_like()
    data = parquet_of(examples, group=16)
    store.write("x.parquet", data)
    listed = read(store)
    counting = Counting(store)
    reader = CellReader(counting, CellCache())
    rows = listed.table.to_pylist()
    order = np.random.default_rng(1).permutation(np.repeat(np.arange(len(rows)), 4)).tolist()
    with ThreadPoolExecutor(16) as threads:
        got = list(threads.map(lambda row: reader.read(rows[row]["object"], row, rows[row]["length"]), order))
    assert got == [examples[row].data for row in order]
    assert counting.bytes_read < 1.1 * len(data) + 16 * (64 << 10)


def test_decoded_columns_stay_within_their_bound_and_those_used_last_stay(store):
    examples = photographs_like()
    store.write("x.parquet", parquet_of(examples, group=8))
    listed = read(store)
    cache = CellCache(4 * 8 * 21_000)
    reader = CellReader(store, cache)
    for _ in range(2):
        assert found(store, listed, reader) == [example.data for example in examples]
        assert 0 < cache.used_bytes <= 4 * 8 * 21_000
    with pytest.raises(SampleError, match=r"row group .* is too large"):
        found(store, listed, CellReader(store, CellCache(8 * 21_000)))


@pytest.mark.promise("apart", mended="Parquet files of two tenants whose stores hung held all memory for columns")
def test_each_tenant_has_a_part_of_the_memory_for_columns():
    cache = CellCache(60, lambda: 3)

    def taken(tenant, nbytes):
        with cache.holding(tenant, nbytes):
            return cache.used_bytes

    with ThreadPoolExecutor(1) as pool:
        with cache.holding("ann", 25), cache.holding("bob", 25):
            waits = pool.submit(taken, "ann", 1)
            assert taken("cy", 10) == 60
            assert not waits.done()
        assert waits.result(60) <= 51
    assert taken("ann", 60) == 60, "who is alone may have all of it"
    assert cache.used_bytes == 0


def bytes_of(data):
    samples = data.samples
    store = open_samples(data.url, data.manifest.reading)
    cells = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    return [bytes(store.read(*cell)) for cell in cells]


def reviews(folder, tmp_path, **options):
    return Dataset(folder, cache=tmp_path / "cache", **options)


def test_samples_are_the_texts_of_the_column_in_utf_8(tmp_path):
    (tmp_path / "data").mkdir()
    texts = write_reviews(tmp_path / "data" / "train.parquet")
    data = reviews(tmp_path / "data", tmp_path, column="text")
    assert bytes_of(data) == [text.encode() for text in texts]
    assert data.samples.labels.tolist() == [row % 2 for row in range(len(texts))]
    assert "title" in data.columns
    assert "text" not in data.columns  # the manifest holds no sample


def test_another_column_is_another_data_set_and_the_same_format_the_same(tmp_path):
    (tmp_path / "data").mkdir()
    write_reviews(tmp_path / "data" / "train.parquet")
    by_text, by_title = (reviews(tmp_path / "data", tmp_path, column=name) for name in ("text", "title"))
    assert by_text.digest != by_title.digest
    assert bytes_of(by_title)[3] == b"review 3"
    assert reviews(tmp_path / "data", tmp_path, format="parquet:text").digest == by_text.digest
    with pytest.raises(DataNotFound, match="parquet:title, not parquet:text"):  # the manifest that was built last
        len(reviews(tmp_path / "data", tmp_path, column="text", relist=False))


def test_empty_texts_stay_and_missing_ones_are_left_out(tmp_path):
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": ["a", "", None, "b"], "label": [0, 1, 0, 1]}), tmp_path / "data" / "x.parquet")
    data = reviews(tmp_path / "data", tmp_path, column="text")
    assert bytes_of(data) == [b"a", b"", b"b"]


def test_without_a_choice_the_error_names_the_column_to_choose(tmp_path):
    (tmp_path / "data").mkdir()
    write_reviews(tmp_path / "data" / "train.parquet")
    with pytest.raises(DataError, match="column='text'"):
        len(reviews(tmp_path / "data", tmp_path))
    with pytest.raises(DataError, match=r"no column 'words' of texts.*text, title, label"):
        len(reviews(tmp_path / "data", tmp_path, column="words"))


def test_a_column_is_of_parquet_alone(tmp_path):
    with pytest.raises(SettingError, match="column= chooses"):
        Dataset(tmp_path, column="text", format="webdataset")
    with pytest.raises(SettingError, match="column takes"):
        Dataset(tmp_path, column=3)
    assert isinstance(format_named("parquet:text"), Parquet)


def test_a_node_is_asked_for_the_column_by_the_format():
    asked = ListingRequest(data="file:///x", format="parquet:a text")
    assert ListingRequest.from_json(asked.to_json()) == asked
    with pytest.raises(BadRequest, match="format"):
        ListingRequest.from_json({**asked.to_json(), "format": "parquet:\n"})


SWELLING = 1_000_000  # bytes of a cell of which each row says no more than its place or its beginning


def swelling(form, rows=1_500):
    """A Parquet file of a few kB whose cells take 1.5 GB where each is written out by itself."""
    cells = [row.to_bytes(8, "big") + bytes(SWELLING - 8) for row in range(4)]
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30}
    places = np.arange(300 if form == "fixed" else rows) % 4  # Arrow writes these out before it writes them
    if form == "prefixes":  # which Arrow writes only of what is written out
        options |= {"use_dictionary": False, "column_encoding": {"image": "DELTA_BYTE_ARRAY"}}
        column = pa.array(cells[:1] * 200)
    elif form == "fixed":
        column = pa.DictionaryArray.from_arrays(places % 1, pa.array(cells[:1], pa.binary(SWELLING)))
    else:
        column = pa.DictionaryArray.from_arrays(
            places, pa.array(cells, pa.binary() if form == "dictionary" else pa.string())
        )
    if form == "dictionary":
        column = pa.StructArray.from_arrays([column, pa.nulls(rows, pa.string())], ["bytes", "path"])
    return table_bytes({"image": column}, **options), cells


def table_bytes(columns, **options):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, store_schema=False, **options)
    return file.getvalue()


def grown_by(call):
    """By how many bytes this process grows at most while something is called, and what that gives."""
    give_back_freed()
    look_anew()
    before = resident_bytes()
    found = call()
    return peak_bytes() - before, found


@pytest.mark.promise("bounded", mended="a dictionary of one large cell was written out for each row")
@pytest.mark.skipif(not can_measure(), reason="this system does not say how much a process takes")
@pytest.mark.parametrize("where", ["here", "apart"])
@pytest.mark.parametrize("form", ["dictionary", "text", "prefixes", "fixed"])
def test_a_small_file_is_read_in_hardly_more_memory_than_its_pages_have(store, form, where):
    data, cells = swelling(form)
    assert len(data) < 100_000
    store.write("x.parquet", data)
    [entry] = store.list()
    object = str(Cell.of(entry, "image.bytes" if form == "dictionary" else "image"))
    reader = readers(store)[where == "apart"]

    def read_all():
        try:
            return [reader.read(object, row, SWELLING) for row in range(4)]
        except (ObjectNotFound, SampleError) as error:
            return str(error)

    grown, said = grown_by(read_all)
    assert grown < 150 << 20
    assert said == cells if form in ("dictionary", "text") else "bytes of" in said


def varint(value, length=0):
    """A whole number of Thrift's compact protocol, in so many bytes at least."""
    value, found = 2 * value, b""
    while value > 127 or len(found) + 1 < length:
        found, value = found + bytes([128 | value & 127]), value >> 7
    return found + bytes([value])


def with_footer(data, *lies):
    """The same file, whose footer says other numbers."""
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:-8]
    for before, after in lies:
        assert varint(before) in footer
        footer = footer.replace(varint(before), varint(after, len(varint(before))))
    return data[:start] + footer + data[-8:]


LARGE = 32 << 20


def lying(form):
    """A file of a few kB that takes LARGE bytes, or many times as many, where its numbers are believed."""
    compression = form if form == "brotli" else "zstd"
    options = {"compression": compression, "write_statistics": False, "use_dictionary": form == "dictionary"}
    cells = pa.array([b"small", bytes(LARGE)])
    if form == "rows":
        column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(4_000_000, np.int32)), cells.slice(0, 1))
        data = table_bytes({"image": column}, **options | {"use_dictionary": True}, row_group_size=4_000_000)
        return with_footer(data, (4_000_000, 2))
    if form == "values of a dictionary":
        data = table_bytes({"image": cells.slice(0, 1)}, **options | {"use_dictionary": True, "compression": None})
        about = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0)
        many = bytes.fromhex("4c15") + varint(1 << 28)
        grown = data.replace(bytes.fromhex("4c1502"), many, 1)
        by = len(many) - 3
        places = {about.data_page_offset, about.total_compressed_size, about.total_uncompressed_size}
        return with_footer(grown, *((place, place + by) for place in places))
    data = table_bytes({"image": cells}, **options, dictionary_pagesize_limit=1 << 30)
    about = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0)
    return with_footer(data, (about.total_uncompressed_size, 1_000))


@pytest.mark.promise("bounded", mended="pages that have more bytes than the footer says were decompressed")
@pytest.mark.skipif(not can_measure(), reason="this system does not say how much a process takes")
@pytest.mark.parametrize("form", ["zstd", "brotli", "dictionary", "rows", "values of a dictionary"])
@pytest.mark.parametrize("where", ["here", "apart"])
def test_pages_larger_than_the_footer_says_are_refused_before_decoding(store, form, where):
    data = lying(form)
    assert len(data) < 100_000
    store.write("x.parquet", data)
    [entry] = store.list()

    def read_one():
        with pytest.raises(ObjectNotFound, match=r"x.parquet is no Parquet file, or is damaged"):
            readers(store)[where == "apart"].read(str(Cell.of(entry, "image")), 0, 5)

    assert grown_by(read_one)[0] < LARGE / 2


class Endless:
    """A store whose objects are zeros that end as asked for, and which counts the bytes that it gives."""

    def __init__(self, end):
        self._end = end
        self.nbytes = 0

    def read_version(self, object, offset, length):
        self.nbytes += length
        return bytes(length - len(self._end)) + self._end, ""


@pytest.mark.promise("bounded", mended="an object that is no Parquet file was read by gigabytes for its footer")
@pytest.mark.parametrize("magic", [b"PAR1", b"PARE", bytes(4)])
@pytest.mark.parametrize("said", [9 << 20, 1 << 30, 0xFFFFFFFF])
def test_what_is_no_parquet_file_is_not_read_by_what_it_says_of_its_footer(magic, said):
    store = Endless(said.to_bytes(4, "little") + magic)
    for reader in readers(store):
        with pytest.raises(ObjectNotFound):
            reader.read_version(f"x.parquet#image@{1 << 40}.", 0, 1)
    assert store.nbytes < 9 << 20


@pytest.mark.promise("bounded", mended="the footers of tenants' files were kept by a sixty-fourth of their bytes")
def test_the_footers_that_are_kept_have_a_bound_together():
    footer = 6 << 20
    store = Endless(footer.to_bytes(4, "little") + b"PAR1")

    def says_one_row(kind, asked, pieces, *, made_bytes, may_take):
        return [8, 0, 0, 0], (1).to_bytes(8, "little")

    reader = CellReader(store, CellCache(1 << 30), decoder=CellsApart(says_one_row, "ann"))
    tracemalloc.start()
    try:
        for number in range(20):
            with pytest.raises(ObjectNotFound):  # there is no row of that number
                reader.read_version(f"{number}.parquet#image@{1 << 40}.", 7, 1)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 20 << 20


@pytest.mark.promise("bounded", mended="a footer of 30 bytes took 800 MB while it was read")
@pytest.mark.skipif(not can_measure(), reason="this system does not say how much a process takes")
@pytest.mark.parametrize("form", ["lists in lists", "long", "deep"])
@pytest.mark.parametrize("where", ["here", "apart"])
def test_a_footer_takes_no_more_than_a_bound_while_it_is_read(store, form, where):
    many = varint(500_000)  # lists of a million row groups, of which the first has a million columns
    footer = {
        "lists in lists": bytes.fromhex("150239fc") + many + bytes.fromhex("19fc") + many,
        "long": bytes.fromhex("1502") + bytes(9 << 20),
        "deep": bytes.fromhex("1502") + 500_000 * b"\x9c",
    }[form]
    store.write("x.parquet", b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    [entry] = store.list()

    def read_one():
        with pytest.raises(ObjectNotFound, match="footer of more than 8 MiB" if form == "long" else "no Parquet file"):
            readers(store, 1 << 30)[where == "apart"].read(str(Cell.of(entry, "image")), 0, 5)

    assert grown_by(read_one)[0] < 64 << 20


def test_a_column_that_is_decoded_apart_is_its_tenants_alone_and_checked(store):
    cells = [b"one", b"other", None, b"", b"one"]
    store.write("x.parquet", table_bytes({"image": pa.array(cells)}))
    [entry] = store.list()
    object, cache, asked = str(Cell.of(entry, "image")), CellCache(64 << 20), []

    def reader(tenant, forged=lambda answer, made: (answer, made)):
        def run(kind, about, pieces, **bounds):
            asked.append(tenant)
            return forged(*run_here(kind, about, pieces, **bounds))

        return CellReader(store, cache, decoder=CellsApart(run, tenant))

    for tenant in ("ann", "bob", "ann"):
        read = reader(tenant)
        assert [bytes(read.read(object, row, len(cells[row]))) for row in (0, 1, 3, 4)] == [
            b"one",
            b"other",
            b"",
            b"one",
        ]
        with pytest.raises(ObjectNotFound):
            read.read(object, 2, 0)
    assert asked.count("bob") == 3, "its footer, its plan and the column"
    assert asked.count("ann") == 4, "what was decoded is kept"

    def numbers(place, value):
        return lambda answer, made: (
            answer,
            made[: 8 * place] + value.to_bytes(8, "little", signed=True) + made[8 * place + 8 :],
        )

    forgeries = [
        lambda answer, made: ([*answer[:3], 1 << 62], made),
        lambda answer, made: ([*answer[:2], 1 << 40, 4], made),
        lambda answer, made: ([*answer[:2], -4, 4], made),
        lambda answer, made: ([answer[0], 1 << 62, *answer[2:]], made),
        lambda answer, made: (answer[:1], made),
        lambda answer, made: (answer, made[:24]),
        *(numbers(place, value) for place in (0, 5) for value in (-(1 << 63), (1 << 63) - 1)),
    ]
    for number, forged in enumerate(forgeries):
        with pytest.raises((ObjectNotFound, SampleError)):
            reader(f"tenant {number}", forged).read(object, 0, 3)


def test_a_column_that_ends_its_child_is_not_tried_again_for_each_row(store):
    store.write("x.parquet", table_bytes({"image": pa.array([b"one"] * 3)}))
    [entry] = store.list()
    ended = []

    def run(kind, asked, pieces, **bounds):
        if "place" in asked:
            ended.append(1)
            raise SampleError("the process that decoded it ended")
        return run_here(kind, asked, pieces, **bounds)

    reader = CellReader(store, CellCache(64 << 20), decoder=CellsApart(run, "ann"))
    for row in range(3):
        with pytest.raises(SampleError, match="ended"):
            reader.read(str(Cell.of(entry, "image")), row, 3)
    assert ended == [1]


def test_a_footer_takes_its_part_of_the_memory_for_columns(store):
    store.write("x.parquet", table_bytes({"image": pa.array([b"one"])}))
    [entry] = store.list()
    apart = readers(store, 4 << 10)[1]
    with pytest.raises(SampleError, match=r"a footer that takes \d+ bytes .* 4096 fit"):
        apart.read(str(Cell.of(entry, "image")), 0, 3)


def test_a_damaged_name_of_a_column_is_said_in_words(store):
    data = table_bytes({"image": pa.array([b"one"])})
    store.write("x.parquet", data.replace(b"image", b"im\xffge"))
    [entry] = store.list()
    for reader in readers(store):
        with pytest.raises(ObjectNotFound, match=r"x.parquet is no Parquet file, or is damaged"):
            reader.read(str(Cell.of(entry, "image")), 0, 3)


def test_columns_that_are_read_again_are_not_looked_for_again(store, monkeypatch):
    wide = {f"c{number}": pa.array([1, 2]) for number in range(50)}
    store.write("x.parquet", table_bytes({"image": pa.array([b"one", b"other"]), **wide}))
    [entry] = store.list()
    reader, object = CellReader(store, CellCache()), str(Cell.of(entry, "image"))
    assert reader.read(object, 0, 3) == b"one"
    monkeypatch.setattr("frostline.datasets.formats.parquet.ColumnChunks", None)
    assert reader.read(object, 1, 5) == b"other"


@pytest.mark.skipif(not can_measure(), reason="this system does not say how much a process takes")
def test_listing_writes_no_text_out_for_each_row_that_shares_it(store):
    image, rows = pa.array([EXAMPLES[0].data]), 1_500
    long = pa.array(["x" * SWELLING]).dictionary_encode()
    many = np.zeros(rows, np.int64)
    store.write("x.parquet", table_bytes({"image": image.take(many), "about": long.take(many)}, compression="zstd"))

    def listed():
        with pytest.raises(DataError, match=r"'about' of x.parquet has 1500000000 bytes written out, and \d+ in its"):
            read(store)

    assert grown_by(listed)[0] < 100 << 20


def test_what_columns_take_written_out_counts_shared_values_for_each_row():
    text = pa.array(["a" * 1_000, None, "b" * 10])
    many = pa.array([0, 0, 1, 2, None, 0])
    assert written_out_bytes(text) == 1_010
    assert written_out_bytes(pa.DictionaryArray.from_arrays(many, text)) == 3_010
    assert written_out_bytes(pa.DictionaryArray.from_arrays(many, text.cast(pa.string_view()))) == 3_010
    assert written_out_bytes(text.cast(pa.string_view()).slice(1)) == 10
    assert written_out_bytes(pa.ListArray.from_arrays([0, 2, 3], text)) == 1_010
    assert written_out_bytes(pa.FixedSizeListArray.from_arrays(pa.nulls(4_000), 1_000)) == 64_000
    assert written_out_bytes(pa.StructArray.from_arrays([text, pa.nulls(3)], ["a", "b"])) == 1_010 + 3 * 16 + 3 * 16
    assert written_out_bytes(pa.ListViewArray.from_arrays([0, 0], [3, 3], text)) > 1 << 60


def test_a_file_of_many_columns_is_opened_no_more_often_for_them(store, monkeypatch):
    opened, known = [], pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda *words, **options: opened.append(1) or known(*words, **options))
    for number in (1, 100):
        opened.clear()
        texts = {f"c{place}": pa.array(["a", "b"]) for place in range(number)}
        store.write("x.parquet", table_bytes({"image": pa.array([b"one", b"other"]), **texts}))
        assert len(read(store).table) == 2
        assert len(opened) < 20


@pytest.mark.promise("bounded", mended="a file of 20,000 row groups took minutes to list")
def test_a_file_of_many_row_groups_is_listed_in_a_linear_time(store, monkeypatch):
    opened, known = [], pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda *words, **options: opened.append(1) or known(*words, **options))
    for rows in (100, 1_000):
        opened.clear()
        cells = pa.array([bytes([row % 256]) * 20 for row in range(rows)])
        store.write("x.parquet", table_bytes({"image": cells}, row_group_size=1))
        began_s = time_module.process_time()
        assert len(read(store).table) == rows
        assert time_module.process_time() - began_s < 0.0025 * rows + 0.5
        assert len(opened) < rows + 20


@pytest.mark.promise("complete", mended="a file whose footer has more than 4 MiB was listed, and none of it was read")
def test_a_file_with_the_largest_footer_that_is_listed_is_read(store):
    table, file = pa.table({"image": pa.array([b"one", b"other"])}), io.BytesIO()
    with pq.ParquetWriter(file, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"about": "x" * 8_000_000})
    data = file.getvalue()
    assert 7 << 20 < int.from_bytes(data[-8:-4], "little") < 8 << 20
    store.write("x.parquet", data)
    assert len(read(store).table) == 2
    [entry] = store.list()
    for reader in readers(store, 1 << 30):
        for _ in range(2):
            assert bytes(reader.read(str(Cell.of(entry, "image")), 1, 5)) == b"other"
