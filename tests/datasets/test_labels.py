"""Labels that are no classes are refused with a sentence, in every format that says labels."""

import io
import json
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frostline.core.errors import DataError
from frostline.datasets import Dataset
from frostline.datasets.formats.labels import classified
from frostline.stores.open import open_store
from support.formats import tar_of

FEATURES = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}}}


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4()}")


def refused(store, *words, format=None):
    with pytest.raises(DataError) as caught:
        _ = Dataset(store.url, format=format).samples
    said = str(caught.value)
    assert all(word in said for word in (*words, "a whole number from 0", "targets='label'"))
    assert "\n" not in said


def parquet(labels, features=None, **columns):
    table = pa.table({"image": [b"x"] * len(labels), "label": labels, **columns})
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (pa.array([0.5, 1.5]), ("'0.5'",)),
        (pa.array([0.0, 1.0, None]), ("'0.0'",)),
        (pa.array([[1, 0], [0, 1]]), ("'[1, 0]'",)),
        (pa.array([{"a": 1}, {"a": 2}]), ("x.parquet", "'label'", "struct<")),
        (pa.array([-1, 1]), ("'-1'",)),
        (pa.array([3, -7], pa.int8()), ("'-7'",)),
        (pa.array(["0.5", "2"]), ("'0.5'",)),
        (pa.array(["[1, 2]", "[]"]), ("'[",)),
    ],
)
def test_columns_of_other_targets_are_refused(store, labels, words):
    store.write("x.parquet", parquet(labels))
    refused(store, *words)


def test_prefers_a_column_of_classes_to_another_column_called_label(store):
    store.write("x.parquet", parquet(pa.array([[1.0], [2.0]]), **{"class": ["cat", "dog"]}))
    assert Dataset(store.url).classes == ("cat", "dog")


def test_truth_values_are_classes(store):
    store.write("x.parquet", parquet(pa.array([True, False, None])))
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("False", "True"), [1, 0, -1])


def test_reads_class_minus_one_as_none_only_where_hugging_face_names_the_classes(store):
    store.write("x.parquet", parquet(pa.array([1, -1, 0]), FEATURES))
    assert Dataset(store.url).samples.labels.tolist() == [1, -1, 0]
    store.write("x.parquet", parquet(pa.array([1, -2]), FEATURES))
    refused(store, "'-2'")


@pytest.mark.parametrize("label", [b"-1", b"0.25", b"[0, 1]", b"1e-3"])
def test_members_of_shards_that_say_other_targets_are_refused(store, label):
    store.write("x.tar", tar_of([("1.jpg", b"x"), ("1.cls", label), ("2.jpg", b"x"), ("2.cls", b"3")]))
    refused(store, "'[0, 1]'" if label == b"[0, 1]" else f"'{float(label)}'".removesuffix(".0'"))


@pytest.mark.parametrize("label", [-1, 0.25, "-1", "0.5", [0, 1]])
def test_json_in_shards_that_says_other_targets_is_refused(store, label):
    members = [("1.jpg", b"x"), ("1.json", json.dumps({"label": label}).encode())]
    store.write("x.tar", tar_of([*members, ("2.jpg", b"x"), ("2.json", b'{"label": 3}')]))
    refused(store, repr(str(label)))


@pytest.mark.parametrize("label", ["0.5", "-4", '"[1, 2]"'])
def test_lists_that_say_other_targets_are_refused(store, label):
    store.write("1.jpg", b"x")
    store.write("labels.csv", f"file_name,label\n1.jpg,{label}\n".encode())
    refused(store, label.strip('"'), format="urls")
    assert Dataset(store.url, format="urls", targets="label").samples.labels.tolist() == [-1]


def test_lists_as_parquet_say_them_by_the_type_of_their_column(store):
    store.write("1.jpg", b"x")
    out = io.BytesIO()
    pq.write_table(pa.table({"url": ["1.jpg"], "label": [[1, 2]]}), out)
    store.write("list.parquet", out.getvalue())
    refused(store, "'[1, 2]'", format="urls")


def test_among_names_a_number_is_a_name():
    assert classified(["v1.5", "2.0", "-1"])[1] == ("-1", "2.0", "v1.5")
    assert classified(["001", "002"])[1] == ("001", "002")
