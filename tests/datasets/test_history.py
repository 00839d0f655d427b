"""Old manifests of some data: the newest few stay, and those that splits belong to; nobody's reading is in the way."""

import uuid

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import frostline as fl
from frostline.core.errors import AccessDenied
from frostline.datasets.manifest import load_manifest
from frostline.datasets.manifest_store import HISTORY_BYTES, KEPT, history_of, history_text, tidied
from frostline.stores.open import open_store
from support.images import image_folder

DIGESTS = st.integers(0, 40).map(lambda number: f"{number:064x}")


def manifests(store):
    return {item.object for item in store.list() if item.object.startswith(".frostline/manifests/")}


def grown(folder, number):
    """The data with one more object, listed."""
    (folder / "noise" / f"more-{number}.jpg").write_bytes(b"x" * number)
    return fl.Dataset(folder, cache=folder.parent / "cache", beside=True).manifest


def test_the_newest_manifests_stay_and_older_ones_go(tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=2)
    built = [grown(folder, number).digest for number in range(7)]
    assert manifests(open_store(str(folder))) == {f".frostline/manifests/{item}.parquet" for item in built[-KEPT:]}
    (folder / "noise" / "more-6.jpg").unlink()
    assert fl.Dataset(folder, cache=tmp_path / "cache", beside=True).manifest.found, "going back one step finds it"


def test_a_manifest_whose_splits_were_saved_stays(tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=4)
    grown(folder, 0)
    data = fl.Dataset(folder, cache=tmp_path / "cache", beside=True)
    data.save_splits(data.split({"train": 0.5, "test": 0.5}))
    for number in range(1, 8):
        grown(folder, number)
    assert f".frostline/manifests/{data.digest}.parquet" in manifests(open_store(str(folder)))
    assert len(manifests(open_store(str(folder)))) == KEPT + 1


def test_manifests_from_before_there_was_a_history_count_as_old(tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=2)
    store = open_store(str(folder))
    for number in range(9):
        store.write(f".frostline/manifests/{number:064x}.parquet", b"old")
    built = grown(folder, 1).digest
    there = manifests(store)
    assert f".frostline/manifests/{built}.parquet" in there
    assert len(there) == KEPT


class ReadOnly:
    """A store that takes no writes."""

    def __init__(self, folder):
        self._store = open_store(str(folder))
        self.url, self.read, self.list = self._store.url, self._store.read, self._store.list

    def write(self, object, data):
        raise AccessDenied(f"no access to {object}")


def test_manifests_of_other_data_in_the_cache_folder_stay(tmp_path):
    cache = tmp_path / "cache"
    folders = [image_folder(tmp_path / name, per_class=2) for name in ("one", "two")]
    for folder in folders:
        for number in range(6):
            (folder / "noise" / f"{number}.png").write_bytes(b"x" * number)
            load_manifest(ReadOnly(folder), cache=cache)
    assert len(list((cache / ".frostline" / "manifests").iterdir())) == 2 * KEPT
    assert all(load_manifest(ReadOnly(folder), cache=cache).found for folder in folders)


def test_readers_of_an_old_manifest_read_on(tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=2)
    first = fl.Dataset(folder, cache=tmp_path / "cache", beside=True)
    names = list(first.names)
    for number in range(KEPT + 2):
        grown(folder, number)
    assert [first.names[row] for row in range(len(first))] == names
    assert first.samples.take(np.arange(2)).objects == names[:2]


def test_a_store_in_memory_is_tidied_too():
    store = open_store(f"memory://{uuid.uuid4()}")
    for number in range(KEPT + 3):
        store.write(f"a/{number}.jpg", b"x")
        fl.Dataset(store.url).manifest  # noqa: B018 (which builds it)
    assert len(manifests(store)) == KEPT


@given(st.lists(DIGESTS, unique=True), DIGESTS, st.frozensets(DIGESTS), st.frozensets(DIGESTS))
def test_only_what_is_there_old_and_named_by_nothing_goes(history, built, there, named):
    found = tidied(history, built, there=there, named=named)
    assert found.digests[0] == built
    assert built not in found.gone
    assert set(found.gone) <= there - named
    assert len(there - set(found.gone) - named) <= KEPT
    assert len(history_text(found.digests)) == HISTORY_BYTES
    assert history_of(history_text(found.digests)) == found.digests


@given(st.binary(max_size=200))
def test_a_damaged_history_counts_as_empty(text):
    assert all(len(item) == 64 for item in history_of(text))
