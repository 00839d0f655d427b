"""Targets that a data set declares: what each format's columns give, for which samples, and what is refused."""

import io
import json
import uuid
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import frostline as fl
from frostline.core.errors import DataError, SettingError
from frostline.datasets import Dataset
from frostline.stores.open import open_store
from support.formats import tar_of

pytestmark = pytest.mark.promise("labels", mended="samples without a label were of class -1")

TABLE = {
    "score": [0.5, None, 2.0, -1.25],
    "count": [3, 1, 4, 1],
    "vector": [[1.0, 2.0], [3.5, 4.0], [5.0, 6.0], [7.0, 8.25]],
    "tags": [["a"], ["b", "a"], [], ["c"]],
    "kinds": [[0, 2], [], [1], [4]],
    "boxes": [[[0, 1, 2, 3]], [], [[4, 5, 6, 7], [8, 9, 10, 11.5]], [[1, 1, 1, 1]]],
    "caption": ["one", "two", "three", "four"],
}
ROWS = [{name: values[row] for name, values in TABLE.items()} for row in range(4)]


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4()}")


def parquet(**columns):
    table = pa.table({"image": [b"x"] * len(next(iter(columns.values()))), **columns})
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def as_parquet(store):
    half = [{name: values[part] for name, values in TABLE.items()} for part in (slice(0, 2), slice(2, 4))]
    boxes = pa.list_(pa.list_(pa.float64()))
    for number, columns in enumerate(half):
        columns["vector"] = pa.array(columns["vector"], pa.list_(pa.float32(), 2))
        columns["boxes"] = pa.array(columns["boxes"], boxes)
        store.write(f"{number}.parquet", parquet(**columns))
    return


def as_tar(store):
    files = [(f"{row}.{kind}", data) for row, about in enumerate(ROWS)
             for kind, data in (("jpg", b"x"), ("json", json.dumps(about).encode()))]  # fmt: skip
    store.write("0.tar", tar_of(files[:4]))
    store.write("1.tar", tar_of(files[4:]))
    return


def as_csv(store):
    lines = ["file_name," + ",".join(TABLE)]
    for row, about in enumerate(ROWS):
        store.write(f"{row}.jpg", b"x")
        cells = ["" if value is None else value if isinstance(value, str) else json.dumps(value)
                 for value in about.values()]  # fmt: skip
        lines.append(f"{row}.jpg," + ",".join('"' + cell.replace('"', '""') + '"' if cell else "" for cell in cells))
    store.write("list.csv", "\n".join(lines).encode())
    return "urls"


def as_list(store):
    for row in range(4):
        store.write(f"{row}.jpg", b"x")
    out = io.BytesIO()
    pq.write_table(pa.table({"file_name": [f"{row}.jpg" for row in range(4)], **TABLE}), out)
    store.write("list.parquet", out.getvalue())
    return "urls"


FORMS = {"parquet": as_parquet, "webdataset": as_tar, "csv": as_csv, "list": as_list}


def plain(value):
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()


@pytest.mark.parametrize("format", FORMS)
def test_columns_of_every_kind_are_what_the_table_says(store, format):
    data = Dataset(store.url, format=FORMS[format](store), targets=list(TABLE))
    rows = np.array([2, 0, 3])
    found = data.target_columns.at(rows)
    assert list(found) == list(TABLE)
    for name, value in found.items():
        assert plain(value) == [TABLE[name][row] for row in rows], name
    types = {name: value.dtype.name for name, value in found.items() if isinstance(value, np.ndarray)}
    assert types == {"score": "float32", "count": "int64", "vector": "float32"}
    assert [part.shape for part in data.target_columns.at(np.array([1, 2]))["boxes"]] == [(0, 4), (2, 4)]
    assert {part.dtype.name for part in found["boxes"]} == {"float32"}
    assert np.isnan(data.target_columns.at(np.array([1]))["score"]).all()
    assert [(spec.kind, spec.shape) for spec in data.target_columns.specs] == [
        ("number", ()), ("number", ()), ("vector", (2,)), ("texts", (None,)), ("ragged", (None,)),
        ("ragged", (None, 4)), ("text", ()),
    ]  # fmt: skip


@pytest.mark.parametrize("format", FORMS)
def test_several_labels_are_a_vector_of_zeros_and_ones(store, format):
    columns = [fl.MultiLabel(column="tags"), fl.MultiLabel(column="kinds")]
    data = Dataset(store.url, format=FORMS[format](store), targets=columns)
    tags, kinds = (data.target_columns.at(np.arange(4))[name] for name in ("tags", "kinds"))
    assert tags.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert kinds.tolist() == [[1, 0, 1, 0, 0], [0] * 5, [0, 1, 0, 0, 0], [0, 0, 0, 0, 1]]
    assert tags.dtype == kinds.dtype == np.float32
    assert data.target_columns.specs[0].classes == ("a", "b", "c")
    given = "urls" if format in ("csv", "list") else None
    ordered = Dataset(store.url, format=given, targets=fl.MultiLabel(column="tags", classes=("c", "b", "a")))
    assert ordered.target_columns.at(np.array([1])).tolist() == [[0, 1, 1]]
    few = Dataset(store.url, format=given, targets=fl.MultiLabel(column="tags", classes=("a",)))
    with pytest.raises(DataError, match="'b', which is none of its 1 classes"):
        few.target_columns.at(np.array([1]))


def test_parts_have_the_targets_of_their_own_samples_and_kinds_of_the_whole(store):
    as_parquet(store)
    part = Dataset(store.url, targets="tags").take([3, 1]).take([1, 0])
    assert part.target_columns.at(np.array([0, 1])) == [["b", "a"], ["c"]]
    vectors = Dataset(store.url, targets="kinds").select("count == 4")
    assert vectors.target_columns.specs[0].kind == "ragged"
    assert plain(vectors.target_columns.at(np.array([0]))) == [[1]]


def test_samples_without_a_value_are_refused_unless_it_is_a_float(store):
    store.write("x.parquet", parquet(n=[1, None, None], t=["a", None, "b"], v=[[1], None, [2]], f=[0.5, None, 1.0]))
    for name, count in (("n", 2), ("t", 1), ("v", 1)):
        with pytest.raises(DataError, match=f"{count} of 3 samples have no value in the column '{name}'.*select"):
            _ = Dataset(store.url, targets=name).target_columns
        rest = Dataset(store.url, targets=name).select(f"{name} is not None")
        assert len(rest.target_columns.at(np.arange(len(rest)))) == 3 - count
    assert np.isnan(Dataset(store.url, targets="f").target_columns.at(np.arange(3))).tolist() == [False, True, False]


def test_decimals_are_numbers_and_lists_of_them_lists_of_numbers(store):
    price = pa.array([Decimal("0.25"), None], pa.decimal128(9, 2))
    columns = {
        "price": price,
        "count": pa.array([Decimal(3), Decimal(4)], pa.decimal128(9, 0)),
        "pair": pa.array([[Decimal("0.5"), Decimal("1")], [Decimal("2"), Decimal("3.25")]], pa.list_(price.type)),
        "label": pa.array([Decimal("0.5"), Decimal("1.5")], pa.decimal128(9, 2)),
    }
    store.write("a.parquet", parquet(**columns))
    data = Dataset(store.url, targets=[*columns])
    assert len(data.target_columns) == 2
    found = data.target_columns.at(np.arange(2))
    assert {name: values.dtype.name for name, values in found.items()} == {
        "price": "float32", "count": "int64", "pair": "float32", "label": "float32",
    }  # fmt: skip
    assert np.array_equal(found["price"], [0.25, np.nan], equal_nan=True)
    assert [found[name].tolist() for name in ("count", "pair", "label")] == [[3, 4], [[0.5, 1], [2, 3.25]], [0.5, 1.5]]
    assert data.column("price").to_pylist() == price.to_pylist()


def test_labels_that_are_no_classes_are_targets_where_they_are_declared(store):
    store.write("a.parquet", parquet(label=[0.5, 1.0]))
    store.write("b.parquet", parquet(label=pa.array([3, None], pa.int64())))
    data = Dataset(store.url, targets="label")
    assert data.samples.labels.tolist() == [-1] * 4
    found = data.target_columns.at(np.arange(4))
    assert found[:3].tolist() == [0.5, 1, 3]
    assert np.isnan(found[3])
    with pytest.raises(DataError, match="targets='label'"):
        _ = Dataset(store.url).samples
    assert Dataset(store.url, targets=()).samples.labels.tolist() == [-1] * 4
    assert Dataset(store.url, targets=()).target_columns is None


@pytest.mark.parametrize(("said", "expected"), [(["-2", "3"], [-2, 3]), (["0.5", "2"], [0.5, 2.0])])
def test_labels_of_shards_are_kept_when_one_shard_changes(store, said, expected):
    for number, label in enumerate(said):
        store.write(f"{number}.tar", tar_of([(f"{number}.jpg", b"x"), (f"{number}.cls", label.encode())]))
    assert Dataset(store.url, targets="cls").target_columns.at(np.arange(2)).tolist() == expected
    store.write("2.tar", tar_of([("2.jpg", b"x"), ("2.cls", b"7")]))
    assert Dataset(store.url, targets="cls").target_columns.at(np.arange(3)).tolist() == [*expected, 7]


def test_takes_classes_as_targets_and_refuses_a_sample_without_a_class(store):
    store.write("x.parquet", parquet(label=["b", "a", None]))
    assert Dataset(store.url, targets="label").take([0, 1]).target_columns.at(np.arange(2)).tolist() == [1, 0]
    with pytest.raises(DataError, match="1 of 3 samples have no value in the column 'label'"):
        _ = Dataset(store.url, targets="label").target_columns


def test_lists_within_a_struct_are_columns_as_hugging_face_keeps_boxes(store):
    objects = [{"bbox": [[1.0, 2.0, 3.0, 4.0]], "category": [7]}, {"bbox": [], "category": []}]
    store.write("x.parquet", parquet(objects=objects))
    data = Dataset(store.url, targets=["objects.bbox", "objects.category"])
    found = data.target_columns.at(np.arange(2))
    assert plain(found) == {"objects.bbox": [[[1, 2, 3, 4]], []], "objects.category": [[7], []]}
    assert found["objects.bbox"][1].shape == (0, 4)


def test_long_lists_are_in_no_manifest_and_are_brought_by_the_user(store):
    long = [np.arange(1000.0) + row for row in range(3)]
    store.write("x.parquet", parquet(long=[row.tolist() for row in long]))
    data = Dataset(store.url, targets="embedding")
    assert "long" not in data.columns
    with pytest.raises(SettingError, match=r"no column 'embedding'.*with_columns"):
        _ = data.target_columns
    found = data.with_columns({"embedding": long}).target_columns.at(np.array([2, 0]))
    assert found.dtype == np.float32
    assert np.array_equal(found, np.stack([long[2], long[0]]))
    ragged = Dataset(store.url, targets="b").with_columns({"b": [[[1, 2]], [], [[3, 4], [5, 6]]]})
    assert plain(ragged.target_columns.at(np.array([1, 2]))) == [[], [[3, 4], [5, 6]]]


def test_refuses_invalid_targets(store):
    store.write("x.parquet", parquet(n=[1, 2], box=[[[1, 2], [3]], [[1, 2]]]))
    for targets in (3, ["n", "n"], [1], b"n"):
        with pytest.raises(SettingError, match="targets"):
            Dataset(store.url, targets=targets)
    with pytest.raises(SettingError, match="no column 'm' for targets"):
        _ = Dataset(store.url, targets="m").target_columns
    with pytest.raises(DataError, match="'n' holds no lists of classes"):
        _ = Dataset(store.url, targets=fl.MultiLabel(column="n")).target_columns
    with pytest.raises(DataError, match="'box' holds int64 values of the shape"):
        Dataset(store.url, targets="box").target_columns.at(np.arange(2))


def test_texts_that_only_look_like_lists_stay_texts(store):
    store.write("x.parquet", parquet(t=["[a photo] of [x]", "[b]"], u=["[1]", "no"]))
    assert Dataset(store.url, targets="t").target_columns.at(np.arange(2)) == ["[a photo] of [x]", "[b]"]
    assert Dataset(store.url, targets="u").target_columns.at(np.arange(2)) == ["[1]", "no"]


def test_mapped_manifests_have_the_same_targets(store, monkeypatch):
    as_parquet(store)
    expected = plain(Dataset(store.url, targets=list(TABLE)).target_columns.at(np.array([3, 0])))
    from frostline.datasets import source

    load = source.load_manifest
    monkeypatch.setattr(source, "load_manifest", lambda *args, **named: load(*args, **named, in_memory_bytes=0))
    data = Dataset(store.url, targets=list(TABLE))
    assert data.manifest.columns.is_mapped
    assert plain(data.target_columns.at(np.array([3, 0]))) == expected
