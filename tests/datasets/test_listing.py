"""Listing a store: the same objects whether at once or folder by folder, and how far it is."""

import pytest

from frostline.core.errors import AccessDenied, DataNotFound, StoreUnavailable
from frostline.core.events import PhaseStarted, ProgressMade
from frostline.datasets import Dataset
from frostline.datasets.manifest import list_all
from frostline.stores.open import open_store
from frostline.stores.protocols import Entry, Sectioned

NAMES = ("top.txt", "a/1.jpg", "a/deep/er/2.jpg", "b c/ü✓.jpg", "b c/x.jpg", ".frostline/y", "a.b/1.jpg", "a-/z.png")


def filled(url):
    store = open_store(url)
    for name in NAMES:
        store.write(name, name.encode())
    return store


@pytest.mark.parametrize("root", ["memory://listing-one", "memory://listing-two/deep/er"])
def test_folder_by_folder_gives_what_a_listing_gives(root):
    store = filled(root)
    assert isinstance(store, Sectioned)
    assert sorted(list_all(store, lambda event: None)) == sorted(store.list())
    assert {entry.object for entry in list_all(store, lambda event: None)} == set(NAMES)


def test_a_bucket_is_listed_folder_by_folder(s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("sections")
    for name in NAMES:
        s3.put(f"sections/under/{name}", name.encode())
    for root in ("s3://sections", "s3://sections/under"):
        store = open_store(root)
        assert isinstance(store, Sectioned)
        assert sorted(list_all(store, lambda event: None)) == sorted(store.list())
    with pytest.raises(DataNotFound):
        list_all(open_store("s3://no-such-bucket"), lambda event: None)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessDenied):
        list_all(open_store("s3://sections"), lambda event: None)


class Sections:
    """A store of two folders, one of which cannot be listed."""

    def sections(self):
        return [Entry("x", 1, "")], ("good/", "bad/")

    def list_section(self, folder):
        if folder == "bad/":
            raise StoreUnavailable("the store did not give bad/")
        return [Entry(f"{folder}1", 1, "")]


def test_a_folder_that_cannot_be_listed_fails_the_whole_listing():
    with pytest.raises(StoreUnavailable, match="did not give bad/"):
        list_all(Sections(), lambda event: None)


class Many:
    """A store that lists at once."""

    def list(self):
        return (Entry(f"a/{number}", 1, "") for number in range(25_000))


def test_a_listing_says_how_far_it_is(tmp_path):
    happened = []
    assert len(list_all(Many(), happened.append)) == 25_000
    assert happened == [
        PhaseStarted(name="listing the data"),
        ProgressMade(done=10_000, total=0),
        ProgressMade(done=20_000, total=0),
    ]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"x")
    phases = []
    assert len(Dataset(tmp_path, observe=phases.append)) == 1
    assert phases == [
        PhaseStarted(name="listing the data"),
        ProgressMade(done=1, total=0),
        PhaseStarted(name="building the manifest"),
    ]
