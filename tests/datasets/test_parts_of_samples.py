"""Samples of several parts: a column of a Parquet file for each."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frostline import Dataset, NodeSettings, loader, preprocess
from frostline.core.errors import BadRequest, DataError, SettingError
from frostline.datasets.check import check
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.known import format_named, format_with
from frostline.datasets.formats.parquet import Cell
from frostline.datasets.reading import open_samples
from frostline.preprocess.steps import unframed
from frostline.stores.protocols import Entry
from frostline.wire.listings import ListingRequest
from support.pairs import COLUMNS, pair_inputs, write_pairs

SMALL = NodeSettings(memory_bytes=1 << 29, device_batch=8)


def records(data, parts=2):
    """The parts of every sample."""
    samples = data.samples
    store = open_samples(data.url, data.manifest.reading)
    cells = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    return [[bytes(part) for part in unframed(store.read(*cell), parts)] for cell in cells]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    return path


def pairs(folder, tmp_path, column=COLUMNS, **options):
    return Dataset(folder, cache=tmp_path / "cache", column=column, **options)


def test_a_sample_is_a_record_of_its_cells_with_the_label_beside_it(folder, tmp_path):
    captions = write_pairs(folder / "train.parquet")
    data = pairs(folder, tmp_path)
    images = pq.read_table(folder / "train.parquet")["image"].to_pylist()
    meant = [[image["bytes"], caption.encode()] for image, caption in zip(images, captions, strict=True)]
    assert records(data) == meant
    assert data.samples.labels.tolist() == [row % 3 for row in range(len(captions))]
    assert "source" in data.columns
    assert "caption" not in data.columns  # the manifest holds no part of a sample


def test_the_order_of_the_columns_is_that_of_the_parts(folder, tmp_path):
    write_pairs(folder / "train.parquet")
    turned = pairs(folder, tmp_path, {"input_ids": "caption", "pixel_values": "image"})
    data = pairs(folder, tmp_path)
    assert records(turned) == [parts[::-1] for parts in records(data)]
    assert turned.digest != data.digest


def test_a_row_without_one_of_its_parts_is_no_sample(folder, tmp_path):
    table = pa.table({"a": ["x", None, "", "y"], "b": [b"1", b"2", b"", None], "label": [0, 1, 0, 1]})
    pq.write_table(table, folder / "x.parquet")
    data = pairs(folder, tmp_path, {"first": "a", "second": "b"})
    assert records(data) == [[b"x", b"1"], [b"", b""]]


def test_files_are_read_again_only_where_they_changed(folder, tmp_path):
    write_pairs(folder / "1.parquet")
    before = pairs(folder, tmp_path)
    assert len(before) == 24
    write_pairs(folder / "2.parquet", rows=8, seed=1)
    after = pairs(folder, tmp_path)
    assert len(after) == 32
    assert records(after)[:24] == records(before)


def test_a_missing_column_is_named(folder, tmp_path):
    write_pairs(folder / "train.parquet")
    with pytest.raises(DataError, match=r"no column 'words' of texts.*image, caption, label"):
        len(pairs(folder, tmp_path, {"pixel_values": "image", "input_ids": "words"}))


@pytest.mark.parametrize(
    "column", [{"a": "image"}, {}, {"a": "image", "b": "image"}, {"a b": "image", "c": "caption"}, "?a=image", "?"]
)
def test_columns_that_make_no_parts_are_refused(tmp_path, column):
    with pytest.raises(SettingError, match="column names"):
        Dataset(tmp_path, column=column)


def test_a_node_is_asked_for_the_columns_by_the_format():
    odd = {"a": "an image & more", "b": "x=y+z#1"}
    format = format_named(format_with(None, odd))
    asked = ListingRequest(data="file:///x", format=format.name)
    assert ListingRequest.from_json(asked.to_json()) == asked
    assert format.name == "parquet:?a=an+image+%26+more&b=x%3Dy%2Bz%231"


@pytest.mark.parametrize("columns", [("image.bytes", "caption"), ("a+b", "c@d#e"), ("one",)])
def test_the_place_of_several_cells_is_a_name_that_says_them_all(columns):
    cell = Cell.of(Entry("x/y.parquet", 12, "etag"), *columns)
    assert Cell.parse(str(cell)) == cell
    assert [alone.columns for alone in cell.alone()] == [(column,) for column in columns]


def test_a_stranger_names_up_to_eight_columns():
    with pytest.raises(BadRequest, match="more than 8 columns"):
        Cell.parse(f"x.parquet#{'+'.join('abcdefghi')}@12.0")


@pytest.mark.parametrize(
    ("column", "declared", "why"),
    [
        (COLUMNS, None, "have the parts pixel_values, input_ids"),
        (COLUMNS, preprocess.imagenet(16), "have the parts pixel_values, input_ids"),
        ("caption", pair_inputs(), "pixel_values, input_ids of parts, and samples have one"),
        ({"input_ids": "caption", "pixel_values": "image"}, pair_inputs(), "in this order"),
    ],
)
def test_parts_and_preprocessing_must_agree(folder, tmp_path, column, declared, why):
    write_pairs(folder / "train.parquet")
    with pytest.raises(SettingError, match=why):
        loader(pairs(folder, tmp_path, column), 8, preprocess=declared, node=SMALL)


def test_samples_of_several_parts_are_not_copied_or_checked(folder, tmp_path):
    write_pairs(folder / "train.parquet")
    data = pairs(folder, tmp_path)
    with pytest.raises(SettingError, match="only those of one"):
        repack(data, tmp_path / "copy", format="parquet", observe=print)
    with pytest.raises(SettingError, match="only those of one"):
        check(data, print)
