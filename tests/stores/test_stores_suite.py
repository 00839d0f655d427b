"""Folder, memory, S3, Google, Azure and the web do what every store must do: the shipped tests, run on each."""

import uuid
from base64 import b64encode

import pytest

from frostline.stores.open import open_store
from frostline.testing.stores import (
    AccessRefusalTests,
    ListingTests,
    MissingRootTests,
    PicklingTests,
    PruningTests,
    ReadingTests,
    ReadOnlyTests,
    SectionTests,
    SharingTests,
    Staged,
    VersionTests,
    WritingTests,
)
from support.bucket_peer import bucket_peer
from support.seaweed import webdav


class Everything(ReadingTests, VersionTests, ListingTests, SectionTests, WritingTests, PruningTests, SharingTests):
    __test__ = False


@pytest.fixture
def bucket(s3, monkeypatch):
    """A bucket of the real server, which the environment tells of."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("stores")
    return "s3://stores"


class TestFolder(Everything, PicklingTests, MissingRootTests):
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


class TestS3(Everything, PicklingTests, MissingRootTests, AccessRefusalTests):
    __test__ = True

    @pytest.fixture
    def staged(self, bucket):
        store = open_store(f"{bucket}/{uuid.uuid4()}/a b%20")
        return Staged(store=store, put=store.write)

    @pytest.fixture
    def missing(self, bucket):
        return open_store("s3://nowhere")

    @pytest.fixture
    def refused(self, bucket, monkeypatch):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", self.secret)
        return open_store(bucket)


class TestCeph(TestS3):
    """A second implementation of S3, where ``scripts/ceph.sh`` has unpacked it."""

    @pytest.fixture
    def bucket(self, ceph, monkeypatch):
        for name, value in ceph.environment().items():
            monkeypatch.setenv(name, value)
        ceph.make_bucket("stores")
        return "s3://stores"


@pytest.fixture
def google(monkeypatch):
    """A bucket as Google's, which asks for a token."""
    with bucket_peer() as peer:
        peer.token, peer.knows_folders = "token", True
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", peer.token)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", peer.url)
        yield peer


class TestGoogle(Everything, PicklingTests, MissingRootTests, AccessRefusalTests):
    """Against a peer that was written by hand: no server of Google's kind can be run here."""

    __test__ = True

    @pytest.fixture
    def staged(self, google):
        store = open_store("gs://photos/a b%20")
        return Staged(store=store, put=store.write)

    @pytest.fixture
    def missing(self, google):
        return open_store("gs://nowhere")

    @pytest.fixture
    def refused(self, google, monkeypatch):
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", self.secret)
        return open_store("gs://photos")


class TestAzure(Everything, PicklingTests, MissingRootTests, AccessRefusalTests):
    __test__ = True

    @pytest.fixture(autouse=True)
    def account(self, azurite, monkeypatch):
        for name, value in azurite.environment().items():
            monkeypatch.setenv(name, value)
        azurite.make_container("stores")

    @pytest.fixture
    def staged(self):
        store = open_store(f"abfs://stores/{uuid.uuid4()}/a b%20")
        return Staged(store=store, put=store.write)

    @pytest.fixture
    def missing(self):
        return open_store("az://nowhere")

    @pytest.fixture
    def refused(self, monkeypatch):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", b64encode(self.secret.encode()).decode())
        return open_store("az://stores")


class TestWeb(ReadingTests, VersionTests, SharingTests, PicklingTests, ReadOnlyTests):
    """A real web server that lists nothing."""

    __test__ = True

    @pytest.fixture
    def staged(self, s3):
        # One bucket for all: SeaweedFS sets volumes aside for each.
        s3.make_bucket("web")
        folder = f"web/{uuid.uuid4()}"
        url = f"http://{s3.filer}/buckets/{folder}"
        return Staged(store=open_store(url), put=lambda name, data: s3.put(f"{folder}/{name}", data))


@pytest.fixture(scope="module")
def dav(s3, tmp_path_factory):
    """The URL of the real server's WebDAV face."""
    with webdav(s3, tmp_path_factory.mktemp("webdav")) as url:
        yield url


class TestWebDav(ListingTests):
    """A real web server that lists."""

    __test__ = True

    @pytest.fixture
    def staged(self, s3, dav):
        s3.make_bucket("web")
        folder = f"web/{uuid.uuid4()}"
        # Writing makes the folder, which must be there to be listed.
        return Staged(
            store=open_store(f"{dav}/buckets/{folder}"), put=lambda name, data: s3.put(f"{folder}/{name}", data)
        )
