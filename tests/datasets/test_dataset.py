"""Data sets as people open them: what they say of themselves, where manifests are kept, what was listed before.

A data set: its samples, its manifest, its parts, and what is said of bad ones.

Where manifests and splits are kept: in the user's cache folder of local folders, beside the data of stores.

Old manifests of some data: the newest few stay, and those that splits belong to; nobody's reading is in the way.
"""

import os
import pickle
import re
import shutil
import threading
import uuid
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import frostline as fl
from frostline.core.errors import AccessDenied, DataError, DataNotFound, EmptyDataset, SettingError
from frostline.datasets import Dataset
from frostline.datasets.formats.base import stable_ids
from frostline.datasets.manifest import load_manifest
from frostline.datasets.manifest_store import HISTORY_BYTES, KEPT, history_of, history_text, prune_history
from frostline.stores.local import FolderStore
from frostline.stores.open import open_store
from frostline.stores.protocols import Entry
from support.images import image_folder

FILES = {
    "cat/1.jpg": b"one",
    "cat/two words #2?.png": b"second",
    "cat/deep/3.jpg": b"third!!",
    "dog/1%20.jpg": b"4",
    "dog/ü✓.webp": b"fifth",
    "dog/notes.txt": b"no image",
    ".hidden/x.jpg": b"hidden",
}


def fill(folder, files=FILES):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def rows(dataset):
    samples = dataset.samples
    columns = (samples.ids, samples.offsets, samples.lengths, samples.labels)
    return [list(samples.objects), *(column.tolist() for column in columns)]


def manifests(folder):
    return sorted((folder / ".frostline" / "manifests").iterdir())


def test_a_folder_of_class_folders_is_a_data_set(tmp_path):
    dataset = Dataset(str(fill(tmp_path)))
    assert dataset.classes == ("cat", "dog")
    assert len(dataset) == 5
    assert list(dataset.samples.objects) == sorted(name for name in FILES if "x" not in name)
    assert dataset.samples.labels.tolist() == [0, 0, 0, 1, 1]
    for name, length in zip(dataset.samples.objects, dataset.samples.lengths.tolist(), strict=True):
        assert bytes(open_store(dataset.url).read(name, 0, length)) == FILES[name]


class ListedLast:
    """A store that is done listing once a manifest was read from it."""

    def __init__(self, store):
        self._store = store
        self._was_read = threading.Event()
        self.url = store.url

    def read(self, object, offset, length):
        data = self._store.read(object, offset, length)
        if object.endswith(".parquet"):
            self._was_read.set()
        return data

    def list(self):
        assert self._was_read.wait(60), "the manifest was to be read meanwhile"
        yield from self._store.list()

    def write(self, object, data):
        self._store.write(object, data)


def test_the_last_manifest_is_read_while_the_data_is_listed(tmp_path):
    digest = Dataset(fill(tmp_path), manifest_location="data").digest
    found = load_manifest(ListedLast(open_store(tmp_path.as_uri())), cache=tmp_path / "cache")
    assert (found.digest, found.found) == (digest, True)


def test_a_manifest_that_was_read_in_vain_is_not_taken(tmp_path):
    before = Dataset(fill(tmp_path), manifest_location="data").digest
    fill(tmp_path, {"cat/new.jpg": b"new"})
    found = load_manifest(ListedLast(open_store(tmp_path.as_uri())), cache=tmp_path / "cache")
    assert found.digest != before
    assert len(found.samples) == 6


def test_nothing_is_read_until_it_is_needed(tmp_path):
    dataset = Dataset(tmp_path / "later")
    assert dataset.url == (tmp_path / "later").as_uri()
    fill(tmp_path / "later")
    assert len(dataset) == 5


def test_the_manifest_is_built_once_and_found_after_that(tmp_path):
    first, second = Dataset(str(fill(tmp_path)), manifest_location="data"), Dataset(str(tmp_path))
    assert not first.statistics().manifest_found
    assert second.statistics().manifest_found
    assert rows(first) == rows(second)
    assert first.digest == second.digest
    assert first.manifest.etags == second.manifest.etags
    assert [path.as_uri() for path in manifests(tmp_path)] == [second.statistics().manifest]
    assert manifests(tmp_path)[0].name == f"{first.digest}.parquet"


def test_a_changed_listing_has_another_manifest_and_the_old_ids(tmp_path):
    before = Dataset(str(fill(tmp_path)))
    ids = dict(zip(before.samples.objects, before.samples.ids.tolist(), strict=True))
    fill(tmp_path, {"cat/0.jpg": b"new", "dog/notes.md": b"no image"})
    after = Dataset(str(tmp_path))
    assert after.digest != before.digest
    assert not after.manifest.found
    assert len(after) == 6
    assert ids.items() <= dict(zip(after.samples.objects, after.samples.ids.tolist(), strict=True)).items()


def test_an_image_written_over_changes_the_digest(tmp_path):
    before = Dataset(str(fill(tmp_path))).digest
    os.utime(tmp_path / "cat" / "1.jpg", ns=(1, 1))
    assert Dataset(str(tmp_path)).digest != before


def last_byte_of_ids(path):
    """A place in the table's data: of what Parquet writes around it, not every bit means anything."""
    ids = pq.ParquetFile(path).metadata.row_group(0).column(0)
    return (ids.dictionary_page_offset or ids.data_page_offset) + ids.total_compressed_size - 1


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other", "a class", "no JSON"])
def test_a_damaged_manifest_is_rebuilt(tmp_path, damage):
    whole = rows(Dataset(str(fill(tmp_path)), manifest_location="data"))
    [path] = manifests(tmp_path)
    good = path.read_bytes()
    middle = last_byte_of_ids(path)
    bad = {
        "empty": b"",
        "cut": good[:middle],
        "flipped": good[:middle] + bytes([good[middle] ^ 255]) + good[middle + 1 :],
        "other": b"PAR1" + bytes(100) + b"PAR1",
        "a class": good.replace(b'"cat"', b'"cap"'),
        "no JSON": good.replace(b'"cat"', b'"cat('),
    }[damage]
    assert bad != good
    path.write_bytes(bad)
    again = Dataset(str(tmp_path))
    assert rows(again) == whole
    assert not again.manifest.found
    assert path.read_bytes() == good


def test_the_manifest_of_another_listing_under_this_name_is_not_believed(tmp_path):
    Dataset(str(fill(tmp_path / "one")), manifest_location="data").manifest  # noqa: B018
    two = Dataset(str(fill(tmp_path / "two", {"a/1.jpg": b"x", "b/2.jpg": b"y"})), manifest_location="data")
    digest = two.digest
    [path] = manifests(tmp_path / "two")
    path.write_bytes(manifests(tmp_path / "one")[0].read_bytes())
    again = Dataset(str(tmp_path / "two"), manifest_location="data")
    assert (again.digest, len(again), again.manifest.found) == (digest, 2, False)


class ReadOnly:
    """A store that takes no writes."""

    def __init__(self, url):
        self._store = open_store(url)
        self.url = self._store.url
        self.read = self._store.read
        self.list = self._store.list

    def write(self, object, data):
        raise AccessDenied(f"no access to {object}")


def test_the_manifest_of_a_read_only_store_is_kept_in_the_cache_folder(tmp_path):
    store, cache = ReadOnly(str(fill(tmp_path / "data"))), tmp_path / "cache" / "frostline"
    built, found = load_manifest(store, cache=cache), load_manifest(store, cache=cache)
    assert (built.found, found.found) == (False, True)
    assert built.place == found.place
    assert built.place.startswith(cache.as_uri())
    assert not (tmp_path / "data" / ".frostline").exists()
    assert built.samples.ids.tolist() == found.samples.ids.tolist()


@pytest.mark.parametrize("place", ["file", "file/frostline", "/dev/null/x", "/proc/x", "refused"])
def test_data_is_read_where_no_cache_folder_can_be_made(tmp_path, monkeypatch, caplog, place):
    (tmp_path / "file").touch()
    usual = load_manifest(open_store(str(fill(tmp_path / "data"))), cache=tmp_path / "usual")
    if place == "refused":

        def refuse(store):
            raise AccessDenied(f"no access to {store.url}: Read-only file system")

        monkeypatch.setattr(FolderStore, "create", refuse)
    cache = tmp_path / place
    for _ in range(2):
        manifest = load_manifest(open_store(str(fill(tmp_path / "data"))), cache=cache)
        assert (manifest.found, manifest.place) == (False, "")
        assert manifest.samples.ids.tolist() == usual.samples.ids.tolist()
    assert f"nothing more can be kept in {cache}" in caplog.text
    assert not (tmp_path / "refused").exists()


def test_ids_come_from_names_alone_and_never_change():
    names = ["cat/1.jpg", "dog/ü✓.webp"]
    assert stable_ids(names).tolist() == [7566175874434105497, 9088653293669414869]
    assert stable_ids(names[::-1]).tolist() == stable_ids(names).tolist()[::-1]
    many = stable_ids([f"class/{number}.jpg" for number in range(20_000)])
    assert many.dtype == np.int64
    assert (many >= 0).all()
    assert len(np.unique(many)) == len(many)


def test_two_names_of_one_id_are_named():
    with pytest.raises(DataError, match="'a' and 'a' have the same 63-bit id"):
        stable_ids(["a", "b", "a"])


def test_a_split_holds_out_a_share_of_every_class(tmp_path):
    files = {f"{name}/{number}.jpg": b"x" for name, count in (("a", 40), ("b", 10)) for number in range(count)}
    dataset = Dataset(str(fill(tmp_path, files)))
    train, held_out = dataset.split(0.2, seed=1)
    assert dict(held_out.statistics().per_class) == {"a": 8, "b": 2}
    assert sorted([*train.samples.objects, *held_out.samples.objects]) == sorted(files)
    assert train.classes == held_out.classes == ("a", "b")
    assert len({dataset.digest, train.digest, held_out.digest}) == 3
    again, other = dataset.split(0.2, seed=1)[1], dataset.split(0.2, seed=2)[1]
    assert again.digest == held_out.digest != other.digest
    with pytest.raises(SettingError):
        dataset.split(1.0, seed=1)


def test_taken_rows_keep_their_order_and_their_columns(tmp_path):
    dataset = Dataset(str(fill(tmp_path)))
    part = dataset.take(np.array([3, 0]))
    assert rows(part) == [[column[3], column[0]] for column in rows(dataset)]
    assert part.manifest.etags == (dataset.manifest.etags[3], dataset.manifest.etags[0])
    assert part.url == dataset.url
    assert len(dataset.take(np.array([], np.int64))) == 0


def test_statistics_say_what_the_data_set_holds(tmp_path):
    statistics = Dataset(str(fill(tmp_path))).statistics()
    assert statistics.samples == 5
    assert statistics.per_class == (("cat", 3), ("dog", 2))
    assert (statistics.total_bytes, statistics.min_bytes, statistics.max_bytes) == (22, 1, 7)
    assert statistics.mean_bytes == pytest.approx(4.4)
    assert statistics.formats[0] == (".jpg", 3)
    assert dict(statistics.formats) == {".jpg": 3, ".png": 1, ".webp": 1}


def test_explains_a_missing_an_empty_and_an_unlabelled_folder(tmp_path):
    with pytest.raises(DataNotFound, match="there is no folder"):
        len(Dataset(tmp_path / "nothing"))
    with pytest.raises(EmptyDataset, match="holds no images or sounds, in class folders"):
        len(Dataset(tmp_path))
    fill(tmp_path, {"1.jpg": b"x", "2.jpg": b"y"})
    with pytest.raises(DataError, match="not one of the 2 samples"):
        Dataset(tmp_path).selection.require_classes(2, "the folder")
    assert not (tmp_path / ".frostline").exists()


def test_one_class_is_a_data_set_but_nothing_to_train_on(tmp_path):
    dataset = Dataset(str(fill(tmp_path, {"cat/1.jpg": b"x"})))
    assert len(dataset) == 1
    with pytest.raises(DataError, match=r"has 1 class \('cat'\); training needs at least 2"):
        dataset.selection.require_classes(2, dataset.url)
    fill(tmp_path, {"dog/1.jpg": b"x"})
    Dataset(str(tmp_path)).selection.require_classes(2, "the folder")


def test_folders_of_classes_in_one_around_them_are_named(tmp_path):
    fill(tmp_path, {f"pets/{name}/{number}.jpg": b"x" for name in ("cat", "dog") for number in range(2)})
    dataset = Dataset(str(tmp_path))
    with pytest.raises(DataError, match=rf"needs at least 2: {dataset.url}/pets holds cat, dog, which may be what to"):
        dataset.selection.require_classes(2, dataset.url)
    Dataset(tmp_path / "pets").selection.require_classes(2, "the folder")
    fill(tmp_path, {"pets/1.jpg": b"x"})
    with pytest.raises(DataError, match=r"training needs at least 2$"):
        Dataset(tmp_path).selection.require_classes(2, "the folder")


def test_fifty_thousand_samples_list_and_split_in_seconds(tmp_path):
    class Many(ReadOnly):
        def list(self):
            return (Entry(f"class{number % 100}/{number}.jpg", number, "") for number in range(50_000))

    store = Many(str(tmp_path))
    store.list = lambda: Many.list(store)
    assert len(load_manifest(store, cache=tmp_path).samples) == 50_000
    assert load_manifest(store, cache=tmp_path).found


def use(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_a_bucket_gives_the_same_samples_as_a_folder(s3, monkeypatch, tmp_path):
    use(monkeypatch, s3.environment())
    folder = Dataset(str(fill(tmp_path)))
    s3.put_folder(tmp_path, "same")
    bucket = Dataset("s3://same")
    assert rows(bucket) == rows(folder)
    assert bucket.classes == folder.classes
    assert not bucket.manifest.found
    assert Dataset("s3://same/").manifest.found
    assert bucket.statistics().manifest == f"s3://same/.frostline/manifests/{bucket.digest}.parquet"


def test_a_bucket_that_takes_no_writes_has_its_manifest_in_the_cache_folder(s3, monkeypatch, tmp_path):
    s3.put_folder(fill(tmp_path / "data"), "readonly")
    use(monkeypatch, s3.reader())
    for found in (False, True):
        dataset = Dataset("s3://readonly", cache=tmp_path / "cache")
        assert len(dataset) == 5
        assert dataset.manifest.found is found
        assert dataset.manifest.place.startswith("file://")


def test_a_bad_bucket_gets_a_sentence(s3, monkeypatch):
    use(monkeypatch, s3.environment())
    with pytest.raises(DataNotFound, match="there is nothing at s3://nowhere"):
        len(Dataset("s3://nowhere"))
    s3.make_bucket("empty")
    with pytest.raises(EmptyDataset, match="s3://empty/photos holds no images"):
        len(Dataset("s3://empty/photos"))
    use(monkeypatch, s3.environment(secret="hunter2"))
    with pytest.raises(AccessDenied) as caught:
        len(Dataset("s3://empty"))
    assert "hunter2" not in str(caught.value)


def test_real_photographs_are_a_data_set(photographs, tmp_path):
    link = Path(tmp_path / "photographs")
    link.mkdir()
    for folder in Path(photographs).iterdir():
        if folder.is_dir() and not folder.name.startswith("."):
            (link / folder.name).symlink_to(folder)
    dataset = Dataset(link)
    dataset.selection.require_classes(2, dataset.url)
    assert dataset.statistics().mean_bytes > 10_000


def test_a_file_that_is_given_as_a_folder_gets_a_sentence_that_names_its_folder(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"x")
    with pytest.raises(DataNotFound, match=f"is a file, .* folder {re.escape(str(tmp_path))}"):
        _ = Dataset(tmp_path / "train.bin").samples


def test_a_data_set_travels_without_who_is_told_of_its_listing(tmp_path):
    told = []
    data = Dataset(image_folder(tmp_path, per_class=2), on_event=lambda event: told.append(event))
    there = pickle.loads(pickle.dumps(data))
    assert there.samples.ids.tolist() == data.samples.ids.tolist()
    assert told, "it is told here"


@pytest.fixture
def folder(tmp_path):
    return image_folder(tmp_path / "photos", per_class=2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "frostline"


def test_leaves_a_local_folder_unchanged(folder, cache):
    before = sorted(folder.rglob("*"))
    data = Dataset(folder)
    place = data.save_splits(data.split({"train": 0.5, "val": 0.5}))
    again = Dataset(folder)
    assert again.manifest.found
    assert (again.splits, again["val"].digest) == (("train", "val"), data["val"].digest)
    assert Dataset(folder, relist=False).digest == data.digest
    assert sorted(folder.rglob("*")) == before
    assert place.startswith(cache.as_uri())
    assert data.manifest.place.startswith(cache.as_uri())


def test_lists_the_classes_of_a_folder(folder, cache):
    from torchvision.datasets import ImageFolder

    data = Dataset(folder)
    assert ImageFolder(str(folder)).classes == list(data.classes)


def test_a_local_folder_has_them_beside_it_where_that_is_asked_for(folder, cache):
    _ = Dataset(folder).manifest  # in the cache folder, which others do not have
    data = Dataset(folder, manifest_location="data")
    place = data.save_splits({"few": data.select("label == 'noise'")})
    assert place.startswith(f"{folder.as_uri()}/.frostline/splits/")
    assert data.manifest.place == f"{folder.as_uri()}/.frostline/manifests/{data.digest}.parquet"
    shutil.rmtree(cache)
    other = Dataset(folder)
    assert (other.manifest.found, other.splits) == (True, ("few",))
    assert Dataset(folder, relist=False).digest == data.digest


def test_a_folder_that_has_a_manifest_beside_it_goes_on_having_it_there(folder, cache):
    _ = Dataset(folder, manifest_location="data").manifest
    shutil.copyfile(folder / "noise" / "000.jpg", folder / "noise" / "more.jpg")
    grown = Dataset(folder)
    assert grown.manifest.place.startswith(f"{folder.as_uri()}/.frostline/")
    assert grown.save_splits({"all": grown}).startswith(f"{folder.as_uri()}/.frostline/")
    assert len(Dataset(folder, relist=False)) == 7


def test_stores_have_them_beside_the_data(cache):
    store = open_store(f"memory://{uuid.uuid4()}")
    store.write("cat/1.jpg", b"x")
    data = Dataset(store.url)
    assert data.manifest.place.startswith(f"{store.url}/.frostline/")
    assert data.save_splits({"all": data}).startswith(f"{store.url}/.frostline/")
    assert not cache.exists()


DIGESTS = st.integers(0, 40).map(lambda number: f"{number:064x}")


def manifests_of_history(store):
    return {item.object for item in store.list() if item.object.startswith(".frostline/manifests/")}


def grown(folder, number):
    """The data with one more object, listed."""
    (folder / "noise" / f"more-{number}.jpg").write_bytes(b"x" * number)
    return fl.Dataset(folder, cache=folder.parent / "cache", manifest_location="data").manifest


def test_the_newest_manifests_stay_and_older_ones_go(tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=2)
    built = [grown(folder, number).digest for number in range(7)]
    assert manifests_of_history(open_store(str(folder))) == {
        f".frostline/manifests/{item}.parquet" for item in built[-KEPT:]
    }
    (folder / "noise" / "more-6.jpg").unlink()
    assert fl.Dataset(folder, cache=tmp_path / "cache", manifest_location="data").manifest.found, (
        "going back one step finds it"
    )


def test_a_manifest_whose_splits_were_saved_stays(tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=4)
    grown(folder, 0)
    data = fl.Dataset(folder, cache=tmp_path / "cache", manifest_location="data")
    data.save_splits(data.split({"train": 0.5, "test": 0.5}))
    for number in range(1, 8):
        grown(folder, number)
    assert f".frostline/manifests/{data.digest}.parquet" in manifests_of_history(open_store(str(folder)))
    assert len(manifests_of_history(open_store(str(folder)))) == KEPT + 1


def test_manifests_from_before_there_was_a_history_count_as_old(tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=2)
    store = open_store(str(folder))
    for number in range(9):
        store.write(f".frostline/manifests/{number:064x}.parquet", b"old")
    built = grown(folder, 1).digest
    there = manifests_of_history(store)
    assert f".frostline/manifests/{built}.parquet" in there
    assert len(there) == KEPT


class ReadOnly_of_history:
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
            load_manifest(ReadOnly_of_history(folder), cache=cache)
    assert len(list((cache / ".frostline" / "manifests").iterdir())) == 2 * KEPT
    assert all(load_manifest(ReadOnly_of_history(folder), cache=cache).found for folder in folders)


def test_readers_of_an_old_manifest_read_on(tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=2)
    first = fl.Dataset(folder, cache=tmp_path / "cache", manifest_location="data")
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
    assert len(manifests_of_history(store)) == KEPT


@given(st.lists(DIGESTS, unique=True), DIGESTS, st.frozensets(DIGESTS), st.frozensets(DIGESTS))
def test_only_what_is_there_old_and_named_by_nothing_goes(history, built, there, named):
    found = prune_history(history, built, there=there, named=named)
    assert found.digests[0] == built
    assert built not in found.gone
    assert set(found.gone) <= there - named
    assert len(there - set(found.gone) - named) <= KEPT
    assert len(history_text(found.digests)) == HISTORY_BYTES
    assert history_of(history_text(found.digests)) == found.digests


@given(st.binary(max_size=200))
def test_a_damaged_history_counts_as_empty(text):
    assert all(len(item) == 64 for item in history_of(text))
