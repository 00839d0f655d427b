"""Every format passes the shipped tests, on a folder, in memory and on S3; tables do on a real Cassandra."""

import uuid

import pytest

from frostline.datasets.formats.arrow import ArrowFiles
from frostline.datasets.formats.cql import CqlTables
from frostline.datasets.formats.folders import ClassFolderFormat, MaskPairs
from frostline.datasets.formats.parquet import Parquet
from frostline.datasets.formats.ready import ReadyFormat
from frostline.datasets.formats.urls import UrlLists
from frostline.datasets.formats.webdataset import CompressedTars, WebDataset
from frostline.stores.open import open_store
from frostline.testing.formats import ODD_EXAMPLES, FormatTests, MaskTests
from support import formats
from support.cassandra import KEYSPACE, PASSWORD, USER
from support.images import tiny_preprocess


class Stores:
    """On three stores."""

    @pytest.fixture(params=["folder", "memory", "s3"])
    def store(self, request, tmp_path, monkeypatch):
        if request.param == "folder":
            return open_store(str(tmp_path))
        if request.param == "memory":
            return open_store(f"memory://{uuid.uuid4()}/a b%20")
        server = request.getfixturevalue("s3")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        server.make_bucket("formats")
        return open_store(f"s3://formats/{uuid.uuid4()}")


class TestClassFolders(Stores, FormatTests):
    format = ClassFolderFormat()

    def put(self, store, examples, part=0):
        formats.put_folders(store, examples, part)


class TestWebDataset(Stores, FormatTests, MaskTests):
    format = WebDataset()

    def put(self, store, examples, part=0):
        formats.put_webdataset(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_webdataset(store, examples)


class TestCompressedTars(Stores, FormatTests, MaskTests):
    format = CompressedTars()

    def put(self, store, examples, part=0):
        formats.put_compressed(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_compressed(store, examples)


class TestMaskPairs(Stores, FormatTests, MaskTests):
    format = MaskPairs()
    needs_masks = True

    def put(self, store, examples, part=0):
        formats.put_masks(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_pairs(store, examples)


class TestParquet(Stores, FormatTests, MaskTests):
    format = Parquet()
    reads_again = True

    def put(self, store, examples, part=0):
        formats.put_parquet(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_parquet(store, examples)


class TestArrowFiles(Stores, FormatTests, MaskTests):
    format = ArrowFiles()
    reads_again = True

    def put(self, store, examples, part=0):
        formats.put_arrow(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_arrow(store, examples)


class TestReadyFormat(Stores, FormatTests, MaskTests):
    format = ReadyFormat()

    def put(self, store, examples, part=0):
        formats.put_ready(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_ready(store, examples)

    def size_of(self, example):
        return tiny_preprocess().shape[1:]


class TestUrlLists(Stores, FormatTests, MaskTests):
    format = UrlLists()
    odd = tuple(
        example for example in ODD_EXAMPLES if "?" not in example.key
    )  # what follows it in a bucket's URL are options
    reads_again = True

    def put(self, store, examples, part=0):
        formats.put_urls(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_urls(store, examples)


@pytest.fixture(scope="module")
def table(cql):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
        store = open_store(f"cql://{USER}@{cql.place}/{KEYSPACE}/suite?protocol=3")
        store.create()
        yield store


@pytest.fixture(scope="module")
def session(cql):
    with cql.session() as session:
        yield session


class TestCqlTables(FormatTests):
    format = CqlTables()
    beside = ()

    @pytest.fixture
    def store(self, table, session):
        # Far cheaper than a new table or an empty one.
        for (key,) in session.execute(f"SELECT id FROM {KEYSPACE}.suite"):
            session.execute(f"DELETE FROM {KEYSPACE}.suite WHERE id = %s", (key,))
        return table

    def put(self, store, examples, part=0):
        formats.put_table(store, examples, part)


class TestTablesWithMasks(MaskTests):
    format = CqlTables()

    @pytest.fixture
    def store(self, table):
        store = open_store(table.url.replace("/suite", f"/m{uuid.uuid4().hex}"))
        store.create(has_masks=True)
        return store

    def put_masked(self, store, examples):
        formats.put_masked_table(store, examples)
