"""Folder, memory and S3 do what every store must do: the tests that are shipped, run on each."""

import uuid

import pytest

from frostline.stores.objects import open_store
from frostline.testing.stores import (
    ListingTests,
    MissingRootTests,
    ReadingTests,
    RefusalTests,
    SharingTests,
    Staged,
    TravellingTests,
    VersionTests,
    WritingTests,
)


class Everything(ReadingTests, VersionTests, ListingTests, WritingTests, SharingTests):
    __test__ = False


@pytest.fixture
def bucket(s3, monkeypatch):
    """A bucket of the real server, which the environment tells of."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("stores")
    return "s3://stores"


class TestFolder(Everything, TravellingTests, MissingRootTests):
    __test__ = True

    @pytest.fixture
    def staged(self, tmp_path):
        store = open_store(str(tmp_path))
        return Staged(store=store, put=store.write)

    @pytest.fixture
    def missing(self, tmp_path):
        return open_store(str(tmp_path / "nothing"))


class TestMemory(Everything):
    """It stays in its process, so it is not for travelling."""

    __test__ = True

    @pytest.fixture
    def staged(self):
        store = open_store(f"memory://{uuid.uuid4()}/a b%20")
        return Staged(store=store, put=store.write)


class TestS3(Everything, TravellingTests, MissingRootTests, RefusalTests):
    __test__ = True

    @pytest.fixture
    def staged(self, bucket):
        store = open_store(f"{bucket}/{uuid.uuid4()}/a b%20")
        return Staged(store=store, put=store.write)

    @pytest.fixture
    def missing(self, bucket):
        return open_store("s3://nowhere")

    @pytest.fixture
    def refused(self, s3, bucket, monkeypatch):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", self.secret)
        return open_store(bucket)
