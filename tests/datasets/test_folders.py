"""Class folders: which images and sounds belong to which class, and labels from what samples say.

Which objects of a listing are labelled images.

Labels that are no classes are refused with a sentence, in every format that says labels.

Sounds and arrays as data sets: found in class folders and tars, copied with their names, and checked.
"""

import io
import json
import random
import re
import tarfile
import uuid
from datetime import date
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import DataError, EmptyDataset, SampleError, SettingError
from frostline.datasets import Dataset
from frostline.datasets.check import check
from frostline.datasets.copy.layout import suffix_by_content
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.folders import ClassFolderFormat, suffix_of
from frostline.datasets.formats.labels import encode_labels, text_label
from frostline.preprocess import imagenet
from frostline.preprocess.apply import decode_into
from frostline.stores.open import open_store
from frostline.stores.protocols import Entry
from support.formats import tar_of
from support.signals import array_bytes, some_arrays, write_arrays

FORMAT = ClassFolderFormat()


class Nothing:
    """A store that is not to be asked for anything."""

    url = "memory://nothing"


def listed(entries):
    return FORMAT.read(Nothing(), entries)


def listing_of(*names):
    return listed([Entry(name, 10 + len(name), "etag") for name in names])


def column(listing, name):
    return listing.table[name].to_pylist()


def test_the_first_folder_is_the_class_and_deeper_ones_belong_to_it():
    listing = listing_of("dog/b.jpg", "cat/kittens/a.png", "cat/z.JPEG", "dog/old/x/y.webp")
    assert listing.classes == ("cat", "dog")
    assert column(listing, "object") == ["cat/kittens/a.png", "cat/z.JPEG", "dog/b.jpg", "dog/old/x/y.webp"]
    assert column(listing, "name") == column(listing, "object")
    assert column(listing, "label") == [0, 0, 1, 1]
    assert column(listing, "length") == [10 + len(name) for name in column(listing, "object")]


@pytest.mark.parametrize(
    "name",
    ["cat/notes.txt", "cat/.hidden.jpg", ".trash/a.jpg", "cat/.cache/a.jpg", "cat/jpg", "cat/.jpg", "cat/a.jpg.part"],
)
def test_skips_hidden_names_and_files_that_are_no_images(name):
    listing = listing_of("cat/a.jpg", name)
    assert column(listing, "object") == ["cat/a.jpg"]
    assert listing.digest == listing_of("cat/a.jpg").digest


def test_archives_are_named_with_what_to_do_about_them():
    entries = [Entry("shards/train-0.tar.xz", 1, ""), Entry("readme.txt", 1, "")]
    with pytest.raises(EmptyDataset, match=r"shards/train-0\.tar\.xz is compressed as a whole"):
        listed(entries)


def test_images_in_no_folder_count_where_there_are_no_others():
    listing = listing_of("a.jpg", "b.jpg", "cat/c.jpg")
    assert column(listing, "object") == ["cat/c.jpg"]
    listing = listing_of("b.jpg", "a.jpg", "cat/notes.txt", ".hidden.jpg")
    assert column(listing, "object") == ["a.jpg", "b.jpg"]
    assert column(listing, "label") == [None, None]
    assert listing.classes == ()
    assert not FORMAT.claims([Entry("a.jpg", 1, "")]), "lists beside them may say more"


names = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0/."), min_size=1)
entries = st.builds(lambda folder, base, size, etag: Entry(f"{folder}/{base}.jpg", size, etag), names, names,
                    st.integers(0, 1 << 40), names)  # fmt: skip


@given(st.lists(entries, min_size=1, unique_by=lambda entry: entry.object), st.randoms())
def test_digest_and_table_do_not_depend_on_the_order_of_the_listing(entries, source: random.Random):
    shuffled = source.sample(entries, len(entries))
    assert FORMAT.digest(shuffled) == FORMAT.digest(entries)
    assert listed(shuffled).digest == FORMAT.digest(entries)
    assert listed(shuffled).table.equals(listed(entries).table)


@given(st.lists(entries, min_size=1, unique_by=lambda entry: entry.object), st.data())
def test_any_change_of_a_name_size_or_etag_changes_the_digest(entries, data):
    row = data.draw(st.integers(0, len(entries) - 1))
    before = entries[row]
    after = data.draw(
        st.sampled_from(
            [
                before._replace(size=before.size + 1),
                before._replace(etag=before.etag + "x"),
                before._replace(object="x" + before.object),
            ]
        )
    )
    changed = [*entries[:row], after, *entries[row + 1 :]]
    assert FORMAT.digest(changed) != FORMAT.digest(entries)


@pytest.mark.parametrize(("name", "suffix"), [("a/b.JPG", ".jpg"), ("a.b/c", ""), ("a/.jpg", ""), ("x.tar.gz", ".gz")])
def test_a_suffix_is_that_of_the_last_part_in_lower_case(name, suffix):
    assert suffix_of(name) == suffix


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
        (pa.array([[1, 0], [0, 1]]), ("'[1, 0]'",)),
        (pa.array([-1, 1]), ("'-1'",)),
        (pa.array([Decimal("0.25"), Decimal("1.5")]), ("'0.25'",)),
        (pa.array([3, -7], pa.int8()), ("'-7'",)),
        (pa.array([0.0, 1.0, None, 2.5]), ("'2.5'",)),
        (pa.array([0.0, float("inf")]), ("'inf'",)),
        (pa.array(["[1, 2]", "[]"]), ("'[",)),
    ],
)
def test_columns_of_other_targets_are_refused(store, labels, words):
    store.write("x.parquet", parquet(labels, score=labels))
    refused(store, *words)
    with pytest.raises(DataError, match=re.escape(words[0])):
        Dataset(store.url, label="score").classes  # noqa: B018


@pytest.mark.parametrize("format", ["parquet", "urls"])
def test_a_column_called_label_that_says_when_is_metadata_and_another_can_be_named(store, format):
    days = [date(2024, 5, 1), date(2024, 5, 2)]
    columns = {"url": ["1.jpg", "2.jpg"], "category": ["cat", "dog"]}
    store.write("1.jpg", b"x")
    store.write("2.jpg", b"x")
    store.write("x.parquet", parquet(pa.array(days), **columns))
    data = Dataset(store.url, format=format)
    assert (data.classes, data.column("meta_label").to_pylist()) == ((), days)
    assert Dataset(store.url, format=format, label="category").classes == ("cat", "dog")


def test_prefers_a_column_of_classes_to_another_column_called_label(store):
    store.write("x.parquet", parquet(pa.array([[1.0], [2.0]]), **{"class": ["cat", "dog"]}))
    assert Dataset(store.url).classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("labels", "classes", "numbers"),
    [
        (pa.array([0.0, 1.0, None, 3.0]), ("0", "1", "2", "3"), [0, 1, -1, 3]),
        (pa.array([2.0, float("nan"), 0.0], pa.float32()), ("0", "1", "2"), [2, -1, 0]),
        (pa.array([2, None, 0], pa.decimal128(10, 0)), ("0", "1", "2"), [2, -1, 0]),
        (pa.array([2, None, 0], pa.decimal128(10, 3)), ("0", "1", "2"), [2, -1, 0]),
        (pa.array(["2019", "2020", None, "2019"]), ("2019", "2020"), [0, 1, -1, 0]),
        (pa.array(["10", "9", "0"]), ("0", "9", "10"), [2, 1, 0]),
        (pa.array(["10115", "01099", "10115"]).dictionary_encode(), ("01099", "10115"), [1, 0, 1]),
        (pa.array(["0.5", "2", "-1"]), ("-1", "0.5", "2"), [1, 2, 0]),
        (pa.array(["NA", "null", "nan", None, ""]), ("NA", "nan", "null"), [0, 2, 1, -1, -1]),
        (pa.array([1, 0, None], pa.uint8()).dictionary_encode(), ("0", "1"), [1, 0, -1]),
    ],
    ids=str,
)
def test_numbers_are_numbers_of_classes_and_texts_are_names_whatever_stands_in_them(store, labels, classes, numbers):
    store.write("x.parquet", parquet(labels))
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (classes, numbers)
    assert data.column("label").to_pylist() == [None if number < 0 else number for number in numbers]
    assert len(data.select("label is not None")) == sum(number >= 0 for number in numbers)
    assert len(data.select(f"label != '{classes[0]}'")) == sum(number > 0 for number in numbers)


def test_shards_say_numbers_by_cls_and_names_by_texts_of_their_json(store):
    members = [(f"{row}.jpg", b"x") for row in range(4)]
    numbers = [(f"{row}.cls", text) for row, text in enumerate((b"1.0", b"0", b" 2\n", b"0.0"))]
    store.write("x.tar", tar_of([*members, *numbers]))
    assert Dataset(store.url).samples.labels.tolist() == [1, 0, 2, 0]
    said = (1.0, 0, None, 3.0)
    numbers = [(f"{row}.json", json.dumps({"label": label}).encode()) for row, label in enumerate(said)]
    store.write("x.tar", tar_of([*members, *numbers]))
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("0", "1", "2", "3"), [1, 0, -1, 3])
    years = [(f"{row}.json", json.dumps({"label": str(2019 + row % 2)}).encode()) for row in range(4)]
    store.write("x.tar", tar_of([*members, *years]))
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("2019", "2020"), [0, 1, 0, 1])
    # What was known of the first shard is names still.
    store.write("y.tar", tar_of([("9.jpg", b"x"), ("9.json", b'{"label": "2024"}')]))
    assert Dataset(store.url).classes == ("2019", "2020", "2024")


def test_whole_numbers_of_a_list_may_have_a_point_and_names_stay_as_they_are(store):
    for name in "abcd":
        store.write(f"{name}.jpg", b"x")
    store.write("l.csv", b"file_name,label\na.jpg,0.0\nb.jpg,\nc.jpg,2.0\nd.jpg,1.0\n")
    data = Dataset(store.url, format="urls")
    assert (data.classes, data.samples.labels.tolist()) == (("0", "1", "2"), [0, -1, 2, 1])


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_names_that_are_bytes_are_labels_and_no_masks(store, kind, format):
    images = [b"P5 1 1 255\n" + bytes([row]) for row in range(4)]
    table = pa.table({"image": images, "label": pa.array([b"cat", "hübsch".encode(), None, b"cat"], kind)})
    out = io.BytesIO()
    if format == "parquet":
        pq.write_table(table, out)
    elif kind == pa.binary_view():
        return  # such columns of Arrow files are no cells that are read in place
    else:
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
    store.write(f"x.{format}", out.getvalue())
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("cat", "hübsch"), [0, 1, -1, 0])
    assert not data.has_targets


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


@pytest.mark.parametrize("label", [-1, 0.25, [0, 1]])
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
    assert classes_of("v1.5", "2.0", "-1") == ("-1", "2.0", "v1.5")
    assert classes_of("001", "002") == ("001", "002")
    assert classes_of("10115", "01099") == ("01099", "10115"), "a postal code is no number"


def classes_of(*texts):
    return encode_labels([text_label(text) for text in texts]).classes


def labels_by_name(data):
    return {name: label if label < 0 else data.classes[label]
            for name, label in zip(data.names, data.samples.labels.tolist(), strict=True)}  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "written"),
    [("images", "images/{}.jpg"), ("train_images", "{}.jpg"), ("train", "{}"), ("deep/images", "./images/{}.jpg")],
)
def test_a_list_beside_a_folder_of_images_says_their_labels(store, folder, written):
    for number in range(5):
        store.write(f"{folder}/{number}.jpg", b"x")
    rows = [f"{written.format(number)},{('cat', 'dog')[number % 2]},{number}" for number in (3, 2, 1, 0, 7)]
    store.write("labels.csv", "\n".join(["image_id,label,age", *rows]).encode())
    store.write("sample_submission.csv", b"image_id,label\n4,cat\n")
    data = Dataset(store.url)
    wanted = {f"{folder}/{number}.jpg": -1 if number == 4 else ("cat", "dog")[number % 2] for number in range(5)}
    assert labels_by_name(data) == wanted
    assert data.column("age").to_pylist() == [0, 1, 2, 3, None]
    left = {(one.reason, one.names) for one in data.manifest.left_out}
    assert left == {
        ("of labels.csv that name no image here", (written.format(7),)),
        ("that the format folders does not use", ("sample_submission.csv",)),
    }
    assert data.manifest.reading == "objects"
    store.write("labels.csv", "\n".join(["image_id,label", f"{written.format(0)},owl"]).encode())
    assert Dataset(store.url).classes == ("owl",), "another list is another manifest"


def column_as(suffix, columns):
    """A list with these columns as a file of that suffix."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if suffix == ".parquet":
        pq.write_table(pa.table(columns), out := io.BytesIO())
        return out.getvalue()
    if suffix == ".jsonl":
        return "\n".join(map(json.dumps, rows)).encode()
    separator = "\t" if suffix == ".tsv" else ","
    return "\n".join(
        separator.join(map(str, some)) for some in (columns, *zip(*columns.values(), strict=True))
    ).encode()


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("folder", "name"), [("scans/", "{}.png"), ("scans/", "/home/ann/old/{}.png"), ("", "{}"), ("", "{}.png")]
)
def test_the_column_that_says_which_file_a_row_is_about_can_be_named(store, suffix, folder, name):
    keys = ["007", "08", "9"]
    for key in keys:
        store.write(f"{folder}{key}.png", b"x")
    columns = {"snap no": [name.format(key) for key in keys], "id": ["9", "007", "08"], "label": ["b", "a", "b"]}
    store.write(f"list{suffix}", column_as(suffix, columns))
    store.write("about.csv", b"station,height\na,1\n")
    data = Dataset(store.url, file_column="Snap_No")
    named = {name.rpartition("/")[2]: label for name, label in labels_by_name(data).items()}
    assert named == {"007.png": "b", "08.png": "a", "9.png": "b"}
    assert [one.names for one in data.manifest.left_out] == [("about.csv",)]
    with pytest.raises(DataError, match=r"has no column 'Kode'; its columns are "):
        _ = Dataset(store.url, file_column="Kode").samples


@pytest.mark.parametrize("folder", ["scans/", ""])
@pytest.mark.parametrize(
    ("column", "names"),
    [
        ("id_code", "{}"), ("image_name", "{}"), ("Image Index", "{}.png"), ("uuid", "{}"), ("", "{}.png"),
    ],
)  # fmt: skip
def test_the_column_with_names_of_files_is_found_without_naming(store, folder, column, names):
    for key in ("a1", "b2", "03"):
        store.write(f"{folder}{key}.png", b"x")
    rows = [
        f"{names.format(key)},{number},{label}"
        for number, (key, label) in enumerate(zip(("03", "a1"), "xy", strict=True))
    ]
    store.write("train.csv", "\n".join([f"{column},id,label", *rows]).encode())
    found = {name.rpartition("/")[2]: label for name, label in labels_by_name(Dataset(store.url)).items()}
    assert {name: label for name, label in found.items() if label != -1} == {"03.png": "x", "a1.png": "y"}


def test_paths_of_a_list_may_begin_above_the_root_and_never_lead_beside_it(tmp_path):
    root = tmp_path / "CheXpert small"
    written(root, "train/patient1/s/v.jpg", "train/patient2/s/v.jpg", "valid/patient3/s/v.jpg", "top.jpg")
    (root / "list.csv").write_text(
        "Path,label\nCheXpert small/train/patient1/s/v.jpg,a\nx/CheXpert small/valid/patient3/s/v.jpg,b\n"
        "CheXpert small/top.jpg,a\nother/train/patient9/s/v.jpg,b\ntrain/CheXpert small/patient2/s/v.jpg,b\n"
    )
    data = Dataset(root, cache=tmp_path / "cache")
    assert data.classes == ("a", "b"), "folders of patients are no classes where a list names their images"
    assert labels_by_name(data) == {
        "train/patient1/s/v.jpg": "a", "train/patient2/s/v.jpg": -1, "valid/patient3/s/v.jpg": "b"
    }  # fmt: skip
    names = [one.names for one in data.manifest.left_out if "name no image" in one.reason]
    assert names == [
        ("CheXpert small/top.jpg", "other/train/patient9/s/v.jpg", "train/CheXpert small/patient2/s/v.jpg")
    ]
    root.rename(tmp_path / "renamed")
    assert Dataset(tmp_path / "renamed", cache=tmp_path / "cache").classes == ("a", "b")


def test_capitals_of_a_list_are_those_of_windows_where_nothing_is_called_so(store):
    for name in (
        "Scans/A1.PNG",
        "Scans/b.png",
        "Scans/c.png",
        "Scans/C.png",
        "Scans/é.JPG",
        "Scans/D.png",
        "Scans/d.PNG",
    ):
        store.write(name, b"x")
    rows = ["a1.png,p", "scans\\B,q", "c.png,r", "C:\\old\\scans\\E\u0301.jpg,s", "d.Png,t"]
    store.write("list.csv", "\n".join(["file_name,label", *rows]).encode())
    data = Dataset(store.url)
    named = {name: label for name, label in labels_by_name(data).items() if label != -1}
    assert named == {"Scans/A1.PNG": "p", "Scans/b.png": "q", "Scans/c.png": "r", "Scans/é.JPG": "s"}
    assert [(one.names, one.reason) for one in data.manifest.left_out] == [
        (("d.Png",), "of list.csv that name several images")
    ]


def test_what_names_no_file_of_a_list_is_refused_in_a_sentence(store):
    store.write("scans/a.png", b"x")
    store.write("list.parquet", column_as(".parquet", {"height": [1], "at": [date(2020, 1, 1)]}))
    for column, sentence in (
        ("height", "no row names an image by its column 'height': list.parquet: its rows name none, as '1'"),
        ("at", "list.parquet has no paths, URLs or ids in its column 'at'"),
    ):
        with pytest.raises(DataError, match=re.escape(sentence)):
            _ = Dataset(store.url, file_column=column).samples
    with pytest.raises(SettingError, match="format is left out, folders or urls, not 'parquet'"):
        Dataset(store.url, file_column="height", format="parquet")


def test_of_files_that_are_not_there_the_likely_one_is_named(store):
    for name in ("a.png", "C.PNG", "d/e.png", "f/e.png"):
        store.write(f"images/{name}", b"x")
    store.write("labels.csv", b"file_name,label\na.jpg,x\n")
    [one] = Dataset(store.url).manifest.left_out
    assert "its rows name none, as 'a.jpg, but images/a.png is there'" in one.reason
    with pytest.raises(DataError, match=r"a\.jpg is listed and missing \(images/a\.png is there\)"):
        _ = Dataset(store.url, format="urls").samples
    store.write("labels.csv", b"file_name,label\na.png,x\nc.jpg,y\ne.jpg,y\ng.jpg,y\n")
    [one] = [one for one in Dataset(store.url).manifest.left_out if "name no image here" in one.reason]
    assert one.names == ("c.jpg, but images/C.PNG is there", "e.jpg", "g.jpg")


PAIRS = "hold files of the same 12 names, as views of the same things do, and classes do not: where they are classes"


@pytest.mark.parametrize(
    ("folders", "names", "said"),
    [
        (("sat", "map"), "{}.png", "map and sat"),
        (("left", "right"), "{folder}_{:04}.jpg", "left and right"),
        (("train/T1", "train/T2"), "{}.jpg", "T1 and T2"),
        (("rgb/train", "depth/train"), "{}.png", "depth and rgb"),
        (("x", "y", "z"), "{key}.png", None),
        (("cat", "dog"), "{}.png", None),
        (("cat", "dog"), "{folder}{}.png", None),
        (("cat", "dog"), "a ({}).png", None),
        (("cat", "dog"), "1-{}.png", None),
        (("a", "b"), "{}.png", None),
        (("train/cat", "train/dog"), "{}.png", None),
        (("cat/left", "cat/right", "dog/left", "dog/right"), "{}.png", None),
        (("train", "test"), "{key}.png", None),
    ],
)
def test_folders_with_views_of_the_same_things_are_no_classes(store, folders, names, said):
    for folder in folders:
        for number in range(12):
            name = names.format(number, folder=folder.rpartition("/")[2], key=f"{5**number % 97}q")
            store.write(f"{folder}/{name}", b"x")
    store.write("readme.txt", b"x")
    as_classes = Dataset(store.url, format="folders")
    assert len(as_classes) == 12 * len(folders)
    if said is None:
        assert Dataset(store.url).classes == as_classes.classes
        return
    with pytest.raises(DataError, match=f"^{said} at {store.url} {PAIRS}, say format='folders' "):
        _ = Dataset(store.url).samples
    store.write(f"{folders[0]}/more.png", b"x")
    assert len(Dataset(store.url)) == len(as_classes) + 1, "classes, of which one has an image more"


def test_pictures_of_two_domains_are_no_classes(store):
    for name in ("trainA/1.jpg", "trainB/2.jpg", "trainB/3.jpg", "testA/4.jpg"):
        store.write(name, b"x")
    with pytest.raises(DataError, match=r"testA, trainA and trainB at .* are pictures of two domains by their names"):
        _ = Dataset(store.url).samples


def test_a_list_of_something_else_beside_images_is_named_and_not_taken(store):
    for number in range(2):
        store.write(f"images/{number}.jpg", b"x")
    store.write("stations.csv", b"station,height\na,1\n")
    store.write("other.csv", b"file_name,label\nz.jpg,q\n")
    for _ in range(2):  # as it was found again
        data = Dataset(store.url)
        assert data.classes == ("images",)
        [other, stations] = data.manifest.left_out
        assert (other.names, stations.names) == (("other.csv",), ("stations.csv",))
        assert other.reason == "that says nothing of the samples: its rows name none, as 'z.jpg'"
        assert "its columns are station, height" in stations.reason


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        (("train", "test"), ("train", "test")),
        (("train2017", "val2017"), ("train", "val")),
        (("images/train", "images/val"), ("train", "val")),
        (("trainImages", "Test_Images"), ("train", "test")),
        (("train", "things"), ()),
        (("bullet_train", "test_tube"), ()),
        (("train", "trained"), ()),
    ],
)
def test_folders_that_are_called_as_splits_and_have_no_classes_are_no_classes(store, folders, splits):
    for folder in folders:
        store.write(f"{folder}/1.jpg", b"x")
    data = Dataset(store.url)
    assert data.splits == splits
    assert data.classes == (() if splits else tuple(sorted(folders)))
    if not folders[0].startswith("images/"):
        store.write("classes.json", json.dumps(sorted(folders)).encode())
        data = Dataset(store.url)
        assert (data.classes, data.splits) == (tuple(sorted(folders)), ()), "as a copy says its classes"


@pytest.mark.parametrize("around", ["data/", "data/raw/v1/", "a/b/c/d/e/f/g/h/"])
def test_splits_are_found_in_the_folders_around_them(store, around):
    for name in ("train/cat/1.jpg", "train/dog/1.jpg", "val/cat/1.jpg"):
        store.write(f"{around}{name}", b"x")
    data = Dataset(store.url)
    assert (data.classes, data.splits) == (("cat", "dog"), ("train", "val"))
    store.write("beside/1.jpg", b"x")
    data = Dataset(store.url)
    assert (set(data.classes), data.splits) == ({around.partition("/")[0], "beside"}, ())


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("a/train/1.jpg", "a/test/1.jpg", "b/train/1.jpg", "b/test/1.jpg"), ["test", "train", "test", "train"]),
        (("cat/Train/1.jpg", "cat/val/a/1.jpg", "dog/Train/1.jpg", "dog/2.jpg"), ["train", "val", None, "train"]),
        (("toy/training/good/1.png", "toy/test/bad/1.png", "nut/training/1.png", "nut/truth/bad/1.png"),
         ["training", None, "test", "training"]),
        (("toy/train/1.jpg", "toy/test/1.jpg", "dog/1.jpg"), None),
        (("toy/train/1.jpg", "toy/car/1.jpg", "real/train/1.jpg", "real/car/1.jpg"), None),
        (("toy/test/1.jpg", "real/test/1.jpg"), None),
    ],
)  # fmt: skip
def test_splits_may_lie_within_the_folders_of_classes(store, names, splits):
    for name in names:
        store.write(name, b"x")
    data = Dataset(store.url)
    assert labels_by_name(data) == {name: name.partition("/")[0] for name in names}
    assert (data.column("split").to_pylist() if data.splits else None) == splits
    store.write("classes.json", json.dumps(sorted({name.partition("/")[0] for name in names})).encode())
    assert Dataset(store.url).splits == data.splits, "as a copy says its classes"
    shards = open_store(f"memory://{uuid.uuid4()}")
    shards.write("x.tar", tar_of([(name, b"x") for name in sorted(names)]))
    keys = Dataset(shards.url)
    assert keys.classes == data.classes
    assert (keys.column("split").to_pylist() if keys.splits else None) == splits


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("train/cat/images/1.jpg", "train/dog/images/1.jpg", "val/images/1.jpg"), {"val/images/1.jpg": -1}),
        (("x/train/cat/1.jpg", "x/train/dog/1.jpg", "x/test/Images/a/1.jpg"), {"x/test/Images/a/1.jpg": -1}),
        (("train/cat/1.jpg", "train/images/1.jpg", "val/images/1.jpg"), {"val/images/1.jpg": "images"}),
        (("train/cat/1.jpg", "train/dog/1.jpg", "val/images/1.jpg", "val/cat/1.jpg"), {"val/images/1.jpg": "images"}),
    ],
)
def test_images_alone_is_no_class_of_a_split_to_score_unless_one_trains_on_it(store, names, labels):
    for name in names:
        store.write(name, b"x")
    data = Dataset(store.url)
    assert labels_by_name(data).items() >= labels.items()
    assert ("images" in data.classes) == ("images" in labels.values())
    assert len(data.splits) == 2


def test_what_lists_say_of_splits_goes_with_the_images_that_they_mean(store):
    for name in ("train/1.png", "train/2.png", "test/1.png"):
        store.write(name, b"x")
    store.write("trainLabels.csv", b"id,label\n1,frog\n2,truck\n")
    data = Dataset(store.url)
    assert labels_by_name(data) == {"train/1.png": "frog", "train/2.png": "truck", "test/1.png": -1}
    assert (data.splits, data.manifest.left_out) == (("train", "test"), ())


def test_lists_named_as_splits_divide_the_images_of_one_folder(store):
    for name in "abcd":
        store.write(f"images/{name}.jpg", b"x")
    store.write("train.csv", b"url,file_name,label\nhttp://x/1,a.jpg,cat\nhttp://x/2,b.jpg,dog\nhttp://x/2,b.jpg,cat\n")
    store.write("val.csv", b"file_name,label\n/kaggle/input/set/images/c.jpg,dog\na.jpg,dog\n")
    data = Dataset(store.url)
    assert data.column("split").to_pylist() == ["train", "train", "val", None]
    assert labels_by_name(data) == {
        "images/a.jpg": -1, "images/b.jpg": -1, "images/c.jpg": "dog", "images/d.jpg": -1,
    }  # fmt: skip
    assert [(one.reason, one.names) for one in data.manifest.left_out] == [
        ("of train.csv that give an image another label", ("b.jpg",)),
        ("of val.csv that give an image another label", ("a.jpg",)),
        ("of val.csv that put an image into another split", ("val.csv",)),
    ]


def parquet_from(columns):
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def test_parquet_beside_images_says_what_its_columns_say_of_them(store):
    for name in ("train/a.jpg", "train/b.jpg", "test/c.jpg"):
        store.write(name, b"x")
    about = {"file_name": ["a.jpg", "b.jpg"], "label": ["x", "y"], "at": [{"site": "n", "raw": b"1"}, None]}
    store.write("train/metadata.parquet", parquet_from(about))
    store.write("test/metadata.parquet", parquet_from({"file_name": ["c.jpg"], "label": ["x"]}))
    data = Dataset(store.url)
    assert labels_by_name(data) == {"test/c.jpg": "x", "train/a.jpg": "x", "train/b.jpg": "y"}
    assert (data.splits, data.column("at.site").to_pylist()) == (("train", "test"), [None, "n", None])
    assert [str(one) for one in data.manifest.left_out] == ["1 column of a type that is no metadata (at.raw)"]


def test_folders_of_images_are_no_classes_where_lists_name_the_images_without_labels(store):
    for name in ("part_1_images/a.jpg", "part_2_images/b.jpg", "audio/c.jpg"):
        store.write(name, b"x")
    store.write("meta.csv", b"image_id,dx\na,nv\nb,mel\nc,\n")
    assert (Dataset(store.url).classes, Dataset(store.url, label="dx").classes) == ((), ("mel", "nv"))
    with pytest.raises(DataError, match=r"not one of the 3 samples of here has a label: .* such as --label dx"):
        Dataset(store.url).selection.require_classes(2, "here")
    with pytest.raises(SettingError, match=r"no column 'label' of labels, only dx$"):
        _ = Dataset(store.url, label="label").samples


def test_folders_that_are_classes_stay_and_lists_called_metadata_add_columns(store):
    for name in ("cat/1.jpg", "dog/1.jpg", "dog/2.jpg"):
        store.write(name, b"x")
    store.write("labels.csv", b"file_name,label\ncat/1.jpg,x\n")
    rows = [
        {"file_name": "1.jpg", "text": "a"},
        {"file_name": "2.jpg", "text": "b"},
        {"file_name": "2.jpg", "text": "c"},
    ]
    store.write("dog/metadata.jsonl", "\n".join(map(json.dumps, rows)).encode())
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("cat", "dog"), [0, 1, 1])
    assert data.column("text").to_pylist() == [None, "a", "b"]
    assert [(one.what, one.names) for one in data.manifest.left_out] == [
        ("object", ("labels.csv",)), ("row", ("2.jpg",))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "written", "meant"),
    [
        ("metadata.csv", "0/a.jpg", "0/a.jpg"),
        ("metadata.csv", "0/a", "0/a.jpg"),
        ("metadata.csv", "b.jpg", "1/b.jpg"),
        ("metadata.csv", "a.jpg", "several"),
        ("metadata.csv", "a", "several"),
        ("metadata.csv", "deep/c", "1/deep/c.jpg"),
        ("0/metadata.csv", "a.jpg", "0/a.jpg"),
        ("0/metadata.csv", "a", "0/a.jpg"),
        ("0/metadata.csv", "0/a.jpg", "0/a.jpg"),
        ("0/metadata.csv", "b.jpg", None),
        ("0/metadata.csv", "b", None),
        ("0/metadata.csv", "deep/c.jpg", None),
        ("0/metadata.csv", "1/b.jpg", "1/b.jpg"),
        ("0/metadata.csv", "../1/b.jpg", "1/b.jpg"),
        ("0/metadata.csv", "top.jpg", None),
        ("1/metadata.csv", "c", "1/deep/c.jpg"),
        ("1/metadata.csv", "d.jpg", "several"),
        ("1/deep/metadata.csv", "a.jpg", None),
        ("1/deep/metadata.csv", "d", "1/deep/d.jpg"),
        ("1/lists/metadata.csv", "a.jpg", "1/a.jpg"),
        ("1/lists/metadata.csv", "2.jpg", None),
        ("lists/metadata.csv", "b", "1/b.jpg"),
        ("lists/metadata.csv", "a", "several"),
    ],
)
def test_a_list_means_images_within_its_own_folder_and_never_one_of_several(store, table, written, meant):
    for name in ("0/a.jpg", "0/2.jpg", "1/a.jpg", "1/b.jpg", "1/deep/c.jpg", "1/deep/d.jpg", "1/x/d.jpg", "top.jpg"):
        store.write(name, b"x")
    # Of a list of which nothing is found it would be said that it is none.
    found = {"0/metadata.csv": "2.jpg", "1/deep/metadata.csv": "c.jpg"}.get(table, "b.jpg")
    store.write(table, f"file_name,note\n{written},yes\n{'' if meant == '1/b.jpg' else found},no\n".encode())
    data = Dataset(store.url)
    noted = [name for name, note in zip(data.names, data.column("note").to_pylist(), strict=True) if note == "yes"]
    assert noted == ([meant] if meant not in (None, "several") else [])
    left = {one.reason: one.names for one in data.manifest.left_out if one.what == "row"}
    what = {None: f"of {table} that name no image here", "several": f"of {table} that name several images"}.get(meant)
    assert left.get(what) == ((written,) if what else None)


def test_rows_of_url_lists_mean_files_of_their_own_folder(store):
    for name in ("a.jpg", "b.jpg", "0/a.jpg", "0/c.jpg", "1/c.jpg", "1/m.png", "0/m.png"):
        store.write(name, b"x")
    store.write("x.csv", b"file_name,mask,label\na.jpg,1/m.png,x\nc.jpg,,y\nb,m,z\n")
    store.write("0/y.csv", b"file_name,label\na.jpg,x\nb.jpg,y\n1/c.jpg,z\n")
    data = Dataset(store.url, format="urls")
    names = [name.removeprefix(f"{store.url}/") for name in data.names]
    assert names == ["0/a.jpg", "0/b.jpg", "1/c.jpg", "a.jpg"], "0/b.jpg is not there, and is named when it is read"
    left = {one.reason: one.names for one in data.manifest.left_out if one.what == "row"}
    assert left == {"with the path of several images": ("c.jpg",), "with the path of several masks": ("b",)}


SOUND = b"RIFF\x24\0\0\0WAVE" + bytes(20)


def quiet(_):
    """Observe nothing."""


def written(folder, *names):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(SOUND + bytes([number]))
    return folder


def objects(data):
    return list(data.samples.objects)


def test_sounds_in_class_folders_are_a_data_set(tmp_path):
    names = ["no/1.wav", "no/2.FLAC", "yes/a/3.ogg", "yes/4.opus"]
    data = Dataset(written(tmp_path / "data", *names, "yes/notes.txt", "yes/.5.wav", "6.wav"), cache=tmp_path)
    assert sorted(objects(data)) == sorted(names)
    assert data.classes == ("no", "yes")


def test_folders_of_splits_are_seen_among_sounds(tmp_path):
    data = Dataset(written(tmp_path / "data", "train/no/1.wav", "test/no/2.wav"), cache=tmp_path)
    assert sorted(data.splits) == ["test", "train"]
    assert data.classes == ("no",)


def test_where_there_are_images_the_sounds_beside_them_are_no_samples(tmp_path):
    data = Dataset(written(tmp_path / "data", "no/1.wav", "no/1.jpg", "yes/2.jpg"), cache=tmp_path)
    assert objects(data) == ["no/1.jpg", "yes/2.jpg"]


def test_sounds_in_no_folder_are_samples_without_classes(tmp_path):
    data = Dataset(written(tmp_path / "data", "1.wav", "2.wav"), cache=tmp_path)
    assert objects(data) == ["1.wav", "2.wav"]
    assert data.classes == ()


def test_a_sound_is_the_sample_of_a_key_without_an_image(tmp_path):
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "0.tar", "w") as tar:
        for name in ("1.wav", "1.cls", "2.flac", "2.jpg", "2.cls", "3.audio.wav", "3.cls"):
            content = b"0" if name.endswith("cls") else SOUND
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data = Dataset(tmp_path / "data", cache=tmp_path)
    assert list(data.whole.names) == ["0.tar/1.wav", "0.tar/2.jpg", "0.tar/3.audio.wav"]


@pytest.mark.parametrize("format", ["webdataset", "original", "parquet"])
def test_sounds_and_arrays_are_copied_as_they_are(tmp_path, format):
    written(tmp_path / "sounds", "no/1.wav", "yes/2.flac")
    arrays, labels = some_arrays(rows=4, shape=(2, 3))
    write_arrays(tmp_path / "arrays", "folders", arrays, labels)
    for kind in ("sounds", "arrays"):
        source = Dataset(tmp_path / kind, cache=tmp_path / "cache")
        repack(source, tmp_path / f"{kind}-copy", format, on_event=quiet)
        copy = Dataset(tmp_path / f"{kind}-copy", cache=tmp_path / "cache")
        assert copy.classes == source.classes
        assert len(copy) == len(source)


@pytest.mark.parametrize(
    ("start", "suffix"),
    [(SOUND, ".wav"), (b"RIFF\x24\0\0\0WEBP", ".webp"), (b"fLaC", ".flac"), (b"OggS", ".ogg"), (b"\x93NUMPY", ".npy")],
)
def test_first_bytes_say_what_a_sample_is(start, suffix):
    assert suffix_by_content(start + bytes(20)) == suffix


def test_a_check_reads_arrays_of_any_shape_and_names_those_that_are_cut_off(tmp_path):
    arrays, labels = some_arrays(rows=4, shape=(2, 3, 5))
    write_arrays(tmp_path / "data", "folders", arrays, labels)
    broken = tmp_path / "data" / "1" / "003.npy"
    broken.write_bytes(broken.read_bytes()[:-1])
    np.save(tmp_path / "data" / "1" / "004.npy", np.array(["a"]))
    found = check(Dataset(tmp_path / "data", cache=tmp_path), on_event=quiet)
    reasons = {skipped.object: skipped.reason for skipped in found.unreadable}
    assert set(reasons) == {"1/003.npy", "1/004.npy"}
    assert "broken array" in reasons["1/003.npy"]
    assert "are no numbers" in reasons["1/004.npy"]


def test_a_check_decodes_whole_sounds(tmp_path):
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    from support.sounds import some_waves, write_sounds

    write_sounds(tmp_path / "data", *some_waves(4), kind="FLAC")
    broken = tmp_path / "data" / "1" / "003.flac"
    broken.write_bytes(broken.read_bytes()[:-500])
    found = check(Dataset(tmp_path / "data", cache=tmp_path), on_event=quiet)
    assert [skipped.object for skipped in found.unreadable] == ["1/003.flac"]


def test_explains_what_to_declare_as_targets():
    images, out = imagenet(8), np.zeros((3, 8, 8), np.float32)
    for encoded, said in [
        (SOUND, r"declare .*preprocess\.audio"),
        (array_bytes(np.zeros(3)), r"with preprocess\.array"),
    ]:
        with pytest.raises(SampleError, match=said):
            decode_into(images, encoded, out, id=0, view=None)
