"""Folders of Hugging Face's ``datasets``: what the library writes is read in place, and what is wrong is said."""

import io
import json
import time
import uuid

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from PIL import Image

import frostline as fl
from frostline.core.errors import DataError
from frostline.datasets.formats.arrow import ArrowFiles, splits_of_folders
from frostline.datasets.reading import open_samples
from frostline.stores.open import open_store
from support.formats import ENCODED, arrow_of

FORMAT = ArrowFiles()
NAMES = ["stripe", "circle", "noise"]
FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=NAMES),
        "who": datasets.Value("string"),
        "box": datasets.List(datasets.Value("int32")),
    }
)


def photograph(number):
    out = io.BytesIO()
    Image.fromarray(np.full((8, 9, 3), number % 250, np.uint8)).save(out, "jpeg")
    return out.getvalue()


def saved(count=25):
    rows = range(count)
    return datasets.Dataset.from_dict(
        {
            "image": [{"bytes": photograph(row), "path": None} for row in rows],
            "label": [row % 3 for row in rows],
            "who": [f"ü{row}" for row in rows],
            "box": [[row, 2] for row in rows],
        },
        features=FEATURES,
    )


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4()}")


def read(store):
    return FORMAT.read(store, list(store.list()))


def contents(data):
    reader, samples = open_samples(data.url, data.manifest.reading), data.samples
    places = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    return [bytes(reader.read(*place)) for place in places]


def refused(store, data):
    store.write("bad.arrow", data)
    with pytest.raises(DataError) as caught:
        read(store)
    assert "bad.arrow" in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_saved(data, whole):
    assert contents(data) == [row["image"]["bytes"] for row in whole.cast_column("image", datasets.Image(decode=False))]
    assert data.classes == tuple(NAMES)
    assert data.samples.labels.tolist() == whole["label"][:]
    assert data.column("who").to_pylist() == whole["who"][:]
    assert data.splits == ()


def test_reads_a_folder_saved_by_datasets_in_place(tmp_path):
    whole = saved(250)
    whole.save_to_disk(tmp_path / "d", num_shards=2)
    check_saved(fl.Dataset(tmp_path / "d"), whole)


def test_a_folder_that_datasets_saved_is_read_from_a_bucket(tmp_path, s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("saved")
    whole = saved(250)
    whole.save_to_disk(tmp_path / "d", num_shards=2)
    store = open_store(f"s3://saved/{uuid.uuid4()}")
    for path in (tmp_path / "d").iterdir():
        store.write(path.name, path.read_bytes())
    check_saved(fl.Dataset(store.url), whole)


def test_splits_of_a_dictionary_keep_their_names_whatever_they_are(tmp_path):
    splits = {"train": saved(9), "extra": saved(4), "test": saved(5)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "d")
    data = fl.Dataset(tmp_path / "d")
    assert data.splits == ("train", "test", "extra")
    assert {name: len(data[name]) for name in data.splits} == {"train": 9, "extra": 4, "test": 5}
    assert contents(data["extra"]) == [photograph(row) for row in range(4)]
    assert fl.Dataset(tmp_path / "d").splits == data.splits  # from the manifest, too


def test_reads_a_saved_dictionary_with_a_single_split(tmp_path):
    datasets.DatasetDict({"unsupervised": saved(3)}).save_to_disk(tmp_path / "d")
    assert len(fl.Dataset(tmp_path / "d")["unsupervised"]) == 3


def test_folders_of_splits_are_those_of_the_dictionary_they_lie_in():
    files = ["a/train/0.arrow", "a/x/deep/0.arrow", "b/0.arrow"]
    assert splits_of_folders(files, [*files, "a/dataset_dict.json"]) == {files[0]: "train", files[1]: "x"}
    assert splits_of_folders(files, files) is None
    assert splits_of_folders(files, [*files, ".cache/dataset_dict.json"]) is None


def test_ignores_the_cache_files_of_datasets_map(tmp_path):
    saved(6).save_to_disk(tmp_path / "d")
    again = datasets.load_from_disk(str(tmp_path / "d")).map(lambda row: {"who": row["who"] + "!"})
    assert list((tmp_path / "d").glob("cache-*.arrow"))
    assert len(fl.Dataset(tmp_path / "d")) == len(again) == 6


def test_images_of_files_are_in_what_datasets_saves(tmp_path):
    (tmp_path / "1.jpg").write_bytes(photograph(1))
    rows = datasets.Dataset.from_dict({"image": [str(tmp_path / "1.jpg")]}).cast_column("image", datasets.Image())
    rows.save_to_disk(tmp_path / "d")
    assert contents(fl.Dataset(tmp_path / "d")) == [photograph(1)]


def test_reads_only_headers_and_the_columns_beside_the_images(store):
    images = pa.array([{"bytes": bytes(300_000), "path": None}] * 30, ENCODED)
    data = arrow_of(pa.table({"image": images, "label": [0, 1, 2] * 10}), 3)
    store.write("0.arrow", data)
    read_bytes = []

    class Counting:
        url, list = store.url, store.list

        def read_version(self, object, offset, length):
            read_bytes.append(length)
            return store.read_version(object, offset, length)

    assert len(FORMAT.read(Counting(), list(store.list())).table) == 30
    assert sum(read_bytes) < len(data) / 20
    assert len(read_bytes) <= 2 * 10 + 1


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), ENCODED])
def test_reads_plain_image_columns_and_leaves_out_rows_without_an_image(store, kind):
    cells = [b"one", None, b"", b"three"]
    cells = cells if kind != ENCODED else [None if cell is None else {"bytes": cell, "path": "x"} for cell in cells]
    table = pa.table({"n": [1, 2, 3, 4], "image": pa.array(cells, kind), "label": ["a", "b", "c", None]})
    store.write("0.arrow", arrow_of(table, 2))
    listed = read(store)
    places = listed.table.select(["object", "offset", "length"]).to_pylist()
    assert [bytes(store.read(**place)) for place in places] == [b"one", b"", b"three"]
    assert listed.table["n"].to_pylist() == [1, 3, 4]
    assert listed.table["name"].to_pylist() == ["0.arrow/0", "0.arrow/2", "0.arrow/3"]
    assert listed.table["label"].to_pylist() == [0, 1, None]


@pytest.mark.parametrize("name", ["x.feather", "x.ipc", "X.Arrow"])
def test_files_are_known_by_the_names_that_pandas_and_polars_give_them(store, name):
    table = pa.table({"image": [b"1", b"2"], "label": ["a", "b"]})
    out = io.BytesIO()
    pyarrow.feather.write_feather(table, out, compression="uncompressed")
    store.write(name, out.getvalue())
    data = fl.Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("a", "b"), [0, 1])
    pyarrow.feather.write_feather(table, out := io.BytesIO())
    store.write(name, out.getvalue())
    with pytest.raises(DataError, match=f"{name} .*compress"):
        _ = fl.Dataset(store.url).samples


def test_files_that_can_be_entered_in_their_middle_are_read_too(store):
    out = pa.BufferOutputStream()
    table = pa.table({"image": [b"one", b"two"], "label": [1, 0]})
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    store.write("0.arrow", out.getvalue().to_pybytes())
    places = read(store).table.select(["object", "offset", "length"]).to_pylist()
    assert [bytes(store.read(**place)) for place in places] == [b"one", b"two"]


def test_data_without_images_is_refused_by_the_names_of_its_columns(store):
    assert "audio, text" in refused(store, arrow_of(pa.table({"audio": [[1.0]], "text": ["x"]})))


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_batches_are_refused(store, codec):
    out = pa.BufferOutputStream()
    table = pa.table({"image": [bytes(1000)] * 4, "label": [1, 0, 1, 0]})
    with pa.ipc.new_stream(out, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    assert "compress" in refused(store, out.getvalue().to_pybytes())


def test_columns_that_are_dictionaries_are_refused(store):
    table = pa.table({"image": [b"1", b"2"], "who": pa.array(["a", "b"]).dictionary_encode()})
    assert "dictionaries" in refused(store, arrow_of(table))


def test_whatever_a_file_lacks_or_is_changed_to_is_refused_or_read_within_it(store):
    whole = arrow_of(pa.table({"image": [b"one", b"two", b"three"] * 5, "label": [0, 1, 2] * 5, "t": ["x"] * 15}))
    for size in range(0, len(whole) - 1, 7):
        refused(store, whole[:size])
    draw = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for place in draw.integers(0, len(whole), 3):
            damaged[place] = draw.integers(0, 256)
        store.write("bad.arrow", bytes(damaged))
        try:
            table = read(store).table
        except DataError:
            continue
        ends = np.asarray(table["offset"]) + np.asarray(table["length"])
        assert (np.asarray(table["length"]) >= 0).all()
        assert ends.max(initial=0) <= len(damaged)


def test_the_class_names_of_files_that_did_not_change_are_kept(tmp_path):
    saved(6).save_to_disk(tmp_path / "train")
    cache = tmp_path / "cache"
    first = fl.Dataset(tmp_path / "train", cache=cache)
    assert first.classes == tuple(NAMES)
    assert first.manifest.left_out == (), "all that it wrote belongs to the data"
    saved(4).save_to_disk(tmp_path / "more")
    (tmp_path / "more" / "data-00000-of-00001.arrow").rename(tmp_path / "train" / "more.arrow")
    both = fl.Dataset(tmp_path / "train", cache=cache)
    assert both.classes == first.classes
    assert len(both) == 10
    assert json.loads((tmp_path / "train" / "state.json").read_text())["_data_files"]


@pytest.mark.promise(
    "bounded", mended="a file of 3,000 columns took 13 s of a core to list, and one of 20,000 ten minutes"
)
def test_a_file_of_many_columns_is_listed_in_a_time_that_grows_with_their_number(store):
    many = {f"c{number}": [1, 2] for number in range(2_000)}
    store.write("x.arrow", arrow_of(pa.table({"image": pa.array([b"one", b"other"]), **many})))
    began_s = time.process_time()
    assert len(read(store).table) == 2
    assert time.process_time() - began_s < 2.0
