"""WebDataset shards: where members lie, what labels they have, and what is said of broken ones."""

import gzip
import io
import json
import tarfile
import uuid

import pytest

from frostline.core.errors import DataError, EmptyDataset
from frostline.datasets import Dataset
from frostline.datasets.formats.labels import columns_of, encode_labels, named_columns, text_label
from frostline.datasets.formats.webdataset import WebDataset
from frostline.stores.open import open_store
from frostline.testing.formats import EXAMPLES
from support.formats import put_webdataset, tar_of, webdataset_files

FORMAT = WebDataset()


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4()}")


def read(store, *files, **options):
    store.write("x.tar", tar_of(files, **options))
    return FORMAT.read(store, list(store.list()))


def labels(listed):
    names = [None if label is None else listed.classes[label] for label in listed.table["label"].to_pylist()]
    return dict(zip((name.partition("/")[2] for name in listed.table["name"].to_pylist()), names, strict=True))


def refused(store, data):
    store.write("bad.tar", data)
    with pytest.raises(DataError) as caught:
        FORMAT.read(store, list(store.list()))
    assert "bad.tar" in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("fmt", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_members_are_found_whatever_way_their_names_are_written(store, fmt):
    long = "/".join(["l" * 90] * 2) if fmt == tarfile.USTAR_FORMAT else "ü" * 200
    listed = read(store, ("a/1.jpg", b"one"), (f"{long}/2.jpg", b"second"), ("./a/3.JPG", b"x" * 600), fmt=fmt)
    rows = listed.table.to_pylist()
    assert [row["name"] for row in rows] == ["x.tar/a/1.jpg", f"x.tar/{long}/2.jpg", "x.tar/a/3.JPG"]
    assert [bytes(store.read("x.tar", row["offset"], row["length"])) for row in rows] == [b"one", b"second", b"x" * 600]
    assert listed.classes == tuple(sorted({"a", long.partition("/")[0]}))


def test_of_large_members_little_more_than_the_headers_is_read(tmp_path):
    store, asked = open_store(str(tmp_path)), []
    put_webdataset(store, [example._replace(data=bytes(1 << 20)) for example in EXAMPLES])
    read = store.read_version

    def counted(object, offset, length):
        asked.append(length)
        return read(object, offset, length)

    store.read_version = counted
    listed = FORMAT.read(store, list(store.list()))
    assert listed.table["length"].to_pylist() == [1 << 20] * len(EXAMPLES)
    assert sum(asked) < (12 << 20) / 20
    assert len(asked) <= 3 * len(EXAMPLES)


def test_a_label_is_what_cls_says_or_the_json_or_the_folder():
    store = open_store(f"memory://{uuid.uuid4()}")
    listed = read(
        store,
        ("f/1.jpg", b"1"), ("f/1.cls", b" owl\n"), ("f/1.json", b'{"label": "cat"}'),
        ("f/2.jpg", b"2"), ("f/2.json", b'{"label": "cat", "cls": "dog"}'),
        ("f/3.jpg", b"3"), ("f/3.json", b'{"other": 1}'),
        ("4.jpg", b"4"),
    )  # fmt: skip
    assert labels(listed) == {"f/1.jpg": "owl", "f/2.jpg": "cat", "f/3.jpg": "f", "4.jpg": None}


def test_numbers_are_labels_as_they_are():
    store = open_store(f"memory://{uuid.uuid4()}")
    listed = read(store, ("1.jpg", b"1"), ("1.cls", b"7"), ("2.jpg", b"2"), ("2.json", b'{"cls": 2}'), ("3.jpg", b"3"))
    assert listed.table["label"].to_pylist() == [7, 2, None]
    assert listed.classes == tuple("01234567")


def test_numbers_among_names_are_names():
    found = encode_labels([*map(text_label, ("3", "cat", "", "3", "007"))])
    assert found.classes == ("007", "3", "cat")
    assert found.labels.tolist() == [1, 2, -1, 1, 0]
    assert found.are_names
    for large in ("123456789", "1e300", "9" * 30):
        with pytest.raises(DataError, match="is no number of a class"):
            encode_labels([text_label(large)])


def test_lists_in_the_json_are_columns_of_json():
    rows = [
        {"tags": ["a", "b"], "box": [[1, 2.5]], "odd": [{"a": 1}], "objects": {"bbox": [[1, 2]], "n": 1}, "mixed": [1]},
        {
            "tags": [],
            "objects": {"bbox": []},
            "mixed": ["x", 1],
            "long": [1.5] * 10_000,
            "objects.deep": {"x": {"y": 1}},
        },
    ]
    found, left = columns_of(rows, "a.tar")
    assert {name: column.to_pylist() for name, column in found.items()} == {
        "box": ["[[1, 2.5]]", None], "mixed": ["[1]", '["x", 1]'], "objects.bbox": ["[[1, 2]]", "[]"],
        "objects.deep.x": [None, '{"y": 1}'], "objects.n": [1, None], "odd": ['[{"a": 1}]', None],
        "tags": ['["a", "b"]', "[]"],
    }  # fmt: skip
    assert [str(one) for one in left] == ["1 column of lists too long for metadata (long)"]
    _, left = columns_of([{f"{number:03}": number for number in range(258)}, {"000": 1}], "a.tar")
    assert [str(one) for one in left] == ["2 columns beyond the 256 that most samples have (256, 257)"]


def test_scalar_fields_of_the_json_are_columns():
    rows = [
        {"width": 3, "score": 1, "seen": True, "text": "é", "mixed": 1, "box": [1], "label": 4, "half": "\ud800"},
        {"width": 4, "score": 0.5, "text": None, "mixed": "two", "box": "\ud800"},
    ]
    columns = {name: column.to_pylist() for name, column in named_columns(columns_of(rows, "")[0]).items()}
    assert columns == {
        "box": ["[1]", "?"], "half": ["?", None], "meta_label": [4, None], "mixed": ["1", "two"], "score": [1.0, 0.5],
        "seen": [True, None], "text": ["é", None], "width": [3, 4],
    }  # fmt: skip


def test_joins_the_columns_of_several_shards(store):
    for number, value in enumerate((1, 0.5, None)):
        about = {"a": value, "b": "x" if number else 3, "c": number} if value else {}
        files = [("k/1.jpg", b"1"), ("k/1.json", json.dumps(about).encode())]
        store.write(f"{number}.tar", tar_of(files))
    table = FORMAT.read(store, list(store.list())).table
    assert table["a"].to_pylist() == [1.0, 0.5, None]
    assert table["b"].to_pylist() == ["3", "x", None]
    assert table["c"].to_pylist() == [0, 1, None]


def test_keys_end_at_the_first_dot_and_other_members_belong_to_no_sample(store):
    files = [
        ("a/1.seg.png", b"mask"), ("a/1.jpg", b"image"), ("a/1.txt", b"words"), ("a/._1.jpg", b"mac"),
        ("__meta.jpg", b"meta"), ("a/2.txt", b"words only"), ("b.c/3.jpeg", b"image"),
        ("../4.jpg", b"image"), ("__classes__", b'["a", "b.c"]'),
    ]  # fmt: skip
    listed = read(store, *files)
    assert labels(listed) == {"a/1.jpg": "a", "b.c/3.jpeg": "b.c"}
    hidden = [left for left in listed.left_out if "hidden" in str(left)]
    assert [name.partition("/")[2] for left in hidden for name in left.names] == ["../4.jpg", "__meta.jpg", "a/._1.jpg"]


def test_a_tar_that_is_cut_off_gets_a_sentence_wherever_it_is_cut(store):
    data = tar_of(webdataset_files(EXAMPLES))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        last = tar.getmembers()[-1]
    end = last.offset_data + 512
    for length in (end, end - 100, last.offset_data, last.offset_data - 200, 512 * 7, 100):
        assert "bad.tar" in refused(store, data[:length])


def test_a_head_of_a_sparse_file_that_is_none_is_said_in_words(store):
    head = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9", "GNU.sparse.name": "a.jpg"}
    info, file = tarfile.TarInfo("a.jpg"), io.BytesIO()
    info.size, info.pax_headers = 9, head
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(b"no number"))
    store.write("a.tar", file.getvalue())
    with pytest.raises(DataError, match=r"a.tar is damaged"):
        read(store)


def test_explains_a_file_that_is_no_tar_or_damaged(store):
    data = bytearray(tar_of(webdataset_files(EXAMPLES)))
    assert "no plain tar" in refused(store, gzip.compress(bytes(data)))
    assert "no plain tar" in refused(store, b"\xff" * 2048)
    assert "no plain tar" in refused(store, b"")
    data[3 * 1024 + 10] ^= 255
    assert "damaged" in refused(store, bytes(data))


def test_bad_members_are_named(store):
    assert "'a/1.jpg' twice" in refused(store, tar_of([("a/1.jpg", b"1"), ("a/1.jpg", b"2")]))
    assert "'1.json' in bad.tar is no JSON" in refused(store, tar_of([("1.jpg", b"1"), ("1.json", b"{")]))
    assert "the label of '1'" in refused(store, tar_of([("1.jpg", b"1"), ("1.cls", b"\xff")]))
    assert "hold no images or sounds; 1 key with neither an image nor a sound, but .mp4 (bad.tar/1)" in refused(
        store, tar_of([("1.mp4", b"1")])
    )
    info = tarfile.TarInfo("1\udcff.jpg")
    data = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + bytes(1024)
    assert "cannot be written in UTF-8" in refused(store, data)


def test_members_of_which_nothing_is_taken_are_named(store):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, kind in (("a.jpg", tarfile.REGTYPE), ("b.jpg", tarfile.LNKTYPE), ("c.jpg", tarfile.SYMTYPE),
                           ("d", tarfile.DIRTYPE), ("e.jpg", tarfile.FIFOTYPE)):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.jpg"
            tar.addfile(info)
    store.write("1.tar", made.getvalue())
    store.write(
        "2.tar", tar_of([("f.jpg", b"1"), ("f.png", b"2"), ("f.txt", b"3"), ("f.json", b"[1]"), ("f.cls", b"0")])
    )
    listed = FORMAT.read(store, list(store.list()))
    assert labels(listed) == {"a.jpg": None, "f.jpg": "0"}
    assert [str(one) for one in listed.left_out] == [
        "3 keys that are links, pipes or devices (1.tar/b.jpg, 1.tar/c.jpg, 1.tar/e.jpg)",
        "3 columns of members that are not read (.json without an object, .png, .txt)",
    ]


def test_splits_and_classes_of_keys_are_those_of_the_same_folders(store):
    listed = read(
        store, ("train/cat/1.jpg", b"1"), ("train/dog/2.jpg", b"2"), ("val/cat/3.jpg", b"3"), ("val/dog/4.jpg", b"4")
    )
    assert labels(listed) == {
        "train/cat/1.jpg": "cat", "train/dog/2.jpg": "dog", "val/cat/3.jpg": "cat", "val/dog/4.jpg": "dog",
    }  # fmt: skip
    assert listed.table["split"].to_pylist() == ["train", "train", "val", "val"]
    assert listed.divided_by_names
    listed = read(store, ("train/1.jpg", b"1"), ("train/1.cls", b"1"), ("test/2.jpg", b"2"))
    assert (labels(listed), listed.table["split"].to_pylist()) == (
        {"train/1.jpg": "1", "test/2.jpg": None}, ["train", "test"]
    )  # fmt: skip


def test_folders_of_partitions_around_shards_are_labels_and_columns(store):
    store.write("site=n/label=cat/1.tar", tar_of([("a.jpg", b"1")]))
    store.write("site=s/label=dog/1.tar", tar_of([("a.jpg", b"1"), ("a.json", b'{"label": {"name": "x"}}')]))
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("cat", "dog"), [0, 1])
    assert [data.column(name).to_pylist() for name in ("site", "label.name")] == [["n", "s"], [None, "x"]]


def test_shards_without_images_get_a_sentence(store):
    with pytest.raises(EmptyDataset, match=r"1 tars at memory://.* hold no images"):
        read(store, ("a/1.txt", b"words"))


def test_a_shard_that_changes_while_it_is_read_gets_a_sentence(store):
    store.write("x.tar", tar_of([("a/1.jpg", b"1")]))
    entries = list(store.list())
    store.write("x.tar", tar_of([("a/1.jpg", b"2")]))
    with pytest.raises(DataError, match=r"x\.tar changed while it was read"):
        FORMAT.read(store, entries)


def test_nothing_half_written_stays_of_a_data_set_that_is_refused(tmp_path):
    store = open_store(str(tmp_path))
    data = tar_of(webdataset_files(EXAMPLES))
    store.write("bad.tar", data[: len(data) // 2])
    with pytest.raises(DataError, match=r"bad\.tar is cut off"):
        len(Dataset(tmp_path))
    assert [entry.object for entry in store.list()] == ["bad.tar"]


def test_a_data_set_of_shards_is_listed_once_and_then_found(tmp_path):
    put_webdataset(open_store(str(tmp_path)), EXAMPLES)
    first, second = Dataset(tmp_path), Dataset(tmp_path)
    assert (first.manifest.found, second.manifest.found) == (False, True)
    assert first.classes == second.classes == ("cat", "dog", "fish")
    assert list(first.samples.ids) == list(second.samples.ids)
    assert len(second) == len(EXAMPLES)


def test_images_may_have_names_of_several_parts_as_webdataset_groups_them(store):
    files = [
        ("1.image.jpg", b"one"),
        ("1.image.mask.txt", b"-"),
        ("1.cls", b"3"),
        ("2.jpg", b"two"),
        ("2.small.jpg", b"2"),
    ]
    store.write("0.tar", tar_of([*files, ("3.mask.png", b"mask"), ("3.photo.png", b"three")]))
    rows = [(row["name"], row["length"]) for row in WebDataset().read(store, list(store.list())).table.to_pylist()]
    assert rows == [("0.tar/1.image.jpg", 3), ("0.tar/2.jpg", 3), ("0.tar/3.photo.png", 5)]


def test_refuses_two_images_of_one_key_without_an_order(store):
    store.write("0.tar", tar_of([("1.left.jpg", b"one"), ("1.right.jpg", b"two")]))
    with pytest.raises(DataError, match="both be the sample of '1'"):
        WebDataset().read(store, list(store.list()))


def test_names_with_several_dots_say_what_those_with_one_say(store):
    listed = read(
        store,
        ("1.image.jpg", b"1"), ("1.label.cls", b"owl"),
        ("2.v1.image.jpg", b"2"), ("2.v1.meta.json", b'{"label": "cat", "score": 3}'),
        ("3.jpg", b"3"), ("3.cls", b"owl"), ("3.other.cls", b"cat"),
        ("4.jpg", b"4"), ("4.a.cls", b"owl"), ("4.b.cls", b"cat"),
    )  # fmt: skip
    assert labels(listed) == {"1.image.jpg": "owl", "2.v1.image.jpg": "cat", "3.jpg": "owl", "4.jpg": None}
    assert listed.table["score"].to_pylist() == [None, 3, None, None]
    listed = read(store, ("1.v1.image.pgm", b"P5 1 1 255\n\0"), ("1.v1.mask.pgm", b"P5 1 1 255\n\0"))
    assert listed.table["target_length"].to_pylist() == [12]
    assert listed.table["name"].to_pylist() == ["x.tar/1.v1.image.pgm"]


def test_a_mark_that_windows_writes_before_texts_is_no_part_of_a_label(store):
    bom = b"\xef\xbb\xbf"
    listed = read(store, ("1.jpg", b"1"), ("1.cls", bom + b"3\r\n"), ("2.jpg", b"2"), ("2.cls", b"0"))
    assert (listed.table["label"].to_pylist(), listed.classes, listed.left_out) == ([3, 0], tuple("0123"), ())
    listed = read(store, ("1.jpg", b"1"), ("1.json", bom + b'\n{"label": "cat"}'))
    assert (labels(listed), listed.left_out) == ({"1.jpg": "cat"}, ())


def test_numbers_of_cls_are_those_of_the_table_of_classes_that_shards_declare(store):
    table = ("__classes__", b'["zebra", "ant", "unseen"]')
    members = [("1.jpg", b"1"), ("1.cls", b"0"), ("2.jpg", b"2"), ("3.jpg", b"3"), ("3.cls", b"1.0")]
    store.write("a.tar", tar_of([table, *members]))
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("zebra", "ant", "unseen"), [0, -1, 1])
    store.write("b.tar", tar_of([table, ("4.jpg", b"4"), ("4.cls", b"2"), ("5.jpg", b"5"), ("5.cls", b"1")]))
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("zebra", "ant", "unseen"), [0, -1, 1, 2, 1])
    store.write("b.tar", tar_of([("4.jpg", b"4"), ("4.cls", b"ant"), ("5.jpg", b"5")]))
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("zebra", "ant", "unseen"), [0, -1, 1, 1, -1])
    store.write("b.tar", tar_of([table, ("4.jpg", b"4"), ("4.cls", b"3")]))
    with pytest.raises(DataError, match=r"b\.tar has a label 3 and names for 3 classes only"):
        len(Dataset(store.url))
