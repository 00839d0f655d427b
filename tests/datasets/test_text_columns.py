"""A column of texts as samples, chosen by name."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frostline import Dataset
from frostline.core.errors import BadRequest, DataError, DataNotFound, SettingError
from frostline.datasets.formats.known import format_named
from frostline.datasets.formats.parquet import Parquet
from frostline.datasets.reading import open_samples
from frostline.wire.listings import ListingRequest
from support.texts import write_reviews


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
