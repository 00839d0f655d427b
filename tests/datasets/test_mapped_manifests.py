"""Large manifests: read from a mapped copy, the same rows as in memory, whole or not there."""

import io
import multiprocessing
import os
import pickle
import tarfile
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from frostline.core.errors import DataNotFound
from frostline.core.nouns import Texts, take_texts
from frostline.datasets import Dataset, selection
from frostline.datasets import source as sources
from frostline.datasets.copy.ready import ingest
from frostline.datasets.formats.base import COLUMNS, ArrowTexts, ManifestColumns, PartOfSamples, WholeSamples
from frostline.datasets.manifest import load_manifest
from frostline.datasets.mapped import StoreFile, copy_of
from frostline.ordering import Chosen, RowIndices
from frostline.preprocess import Applied
from frostline.stores.open import open_store
from support.images import image_folder, tiny_preprocess


def folder(root, classes=("cat", "dog", "ü✓"), per_class=50):
    for name in classes:
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            (root / name / f"{number}.jpg").write_bytes(b"x" * (number + 1))
    return root


def loaded(root, cache, **options):
    return load_manifest(open_store(str(root)), cache=cache, in_memory_bytes=0, **options)


def columns(samples):
    texts = [list(samples.objects), list(samples.versions)]
    return [*texts, *(item.tolist() for item in (samples.ids, samples.offsets, samples.lengths, samples.labels))]


def test_a_mapped_manifest_has_the_rows_of_one_in_memory(tmp_path):
    data, cache = folder(tmp_path / "data"), tmp_path / "cache"
    built, found = loaded(data, cache), loaded(data, cache)
    plain = load_manifest(open_store(str(data)), cache=cache)
    assert [item.columns.is_mapped for item in (built, found, plain)] == [True, True, False]
    assert [item.found for item in (built, found, plain)] == [False, True, True]
    for item in (built, found):
        assert columns(item.samples) == columns(plain.samples)
        assert (item.names, item.etags, item.classes, item.digest) == (
            plain.names,
            plain.etags,
            plain.classes,
            plain.digest,
        )
        assert item.samples.encoded_bytes == plain.samples.encoded_bytes


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "a class"])
def test_a_damaged_copy_is_made_again(tmp_path, damage):
    data, cache = folder(tmp_path / "data"), tmp_path / "cache"
    whole = loaded(data, cache)
    path = copy_of(cache, open_store(str(data)).url, whole.digest)
    good = path.read_bytes()
    path.unlink()  # the one that is mapped stays as it was
    other = good.replace(b'"cat"', b'"cap"')
    assert other != good
    path.write_bytes(
        {"cut": good[: len(good) // 2], "empty": b"", "other": b"ARROW1" + bytes(64), "a class": other}[damage]
    )
    again = loaded(data, cache)
    assert (columns(again.samples), again.classes) == (columns(whole.samples), whole.classes)
    assert path.read_bytes() == good


def test_a_new_listing_replaces_the_copy_and_leaves_no_other(tmp_path):
    data, cache = folder(tmp_path / "data"), tmp_path / "cache"
    first = loaded(data, cache)
    folder(data, classes=("dog",), per_class=60)
    second = loaded(data, cache)
    assert second.digest != first.digest
    path = copy_of(cache, open_store(str(data)).url, second.digest)
    assert list(path.parent.iterdir()) == [path]
    assert len(first.samples) == 150, "what is mapped stays readable"
    assert first.samples.take(np.array([0])).objects == ["cat/0.jpg"]


@pytest.mark.parametrize(
    "label_of", [lambda name: int(name) % 7, lambda name: int(name) // 50], ids=["mixed", "sorted"]
)
def test_splits_a_memory_mapped_manifest_without_reading_its_labels(tmp_path, monkeypatch, label_of):
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    shard(data / "0.tar", [f"{number:03}" for number in range(200)], label_of)
    plain = Dataset(data, cache=cache)
    parts = [plain.split(0.3, seed=1), tuple(plain.split({"a": 0.5, "b": 0.3, "c": 0.2}, seed=2).values())]
    monkeypatch.setattr(sources, "load_manifest", partial(load_manifest, in_memory_bytes=0))
    monkeypatch.setattr(selection, "count_labels", lambda pieces: pytest.fail("read the labels"))
    mapped = Dataset(data, cache=cache)
    assert mapped.manifest.columns.is_mapped
    assert mapped.columns == plain.columns
    assert columns(mapped.samples) == columns(plain.samples)
    found = [mapped.split(0.3, seed=1), tuple(mapped.split({"a": 0.5, "b": 0.3, "c": 0.2}, seed=2).values())]
    assert [[part.names for part in some] for some in found] == [[part.names for part in some] for some in parts]
    assert mapped.statistics().per_class == tuple(
        (str(class_), len(plain.select(f"label == '{class_}'"))) for class_ in plain.classes
    )
    more = mapped.with_columns({"patient": range(200)})
    assert more.split(0.3, seed=1)[1].names == parts[0][1].names


def test_labels_too_far_apart_are_counted_when_they_are_needed(tmp_path, monkeypatch):
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    shard(data / "0.tar", [f"{number:03}" for number in range(30)], lambda name: int(name) % 2 * 70_000)
    plain = Dataset(data, cache=cache).split(0.3, seed=1)
    monkeypatch.setattr(sources, "load_manifest", partial(load_manifest, in_memory_bytes=0))
    mapped = Dataset(data, cache=cache)
    assert mapped.manifest.columns.is_mapped
    assert mapped.manifest.columns.labels is None
    assert [part.names for part in mapped.split(0.3, seed=1)] == [part.names for part in plain]


def test_removes_files_of_a_killed_copy_and_keeps_those_of_others(tmp_path, monkeypatch):
    ended = multiprocessing.get_context("fork").Process()
    ended.start()
    ended.join()
    data, cache = folder(tmp_path / "data"), tmp_path / "cache"
    copies = copy_of(cache, open_store(str(data)).url, "0" * 64).parent
    pids = {"ended": ended.pid, "own": os.getpid(), "somebody else's": 1, "no number": "x"}
    for pid in pids.values():
        (copies / f".spool-{pid}-0").mkdir(parents=True)
    kill = os.kill

    def as_a_user(pid, signal):
        if pid == 1:
            raise PermissionError
        kill(pid, signal)

    monkeypatch.setattr(os, "kill", as_a_user)
    loaded(data, cache)
    left = {who for who, pid in pids.items() if (copies / f".spool-{pid}-0").exists()}
    assert left == {"own", "somebody else's"}


def test_the_last_manifest_is_opened_without_a_listing(tmp_path):
    data, cache = folder(tmp_path / "data"), tmp_path / "cache"
    with pytest.raises(DataNotFound, match="was built yet: list the data first"):
        len(Dataset(data, cache=cache, relist=False))
    before = Dataset(data, cache=cache)
    assert len(before) == 150
    folder(data, classes=("cow",), per_class=3)
    again = Dataset(data, cache=cache, relist=False)
    assert again.digest == before.digest
    assert again.manifest.found
    assert len(Dataset(data, cache=cache)) == 153
    assert len(Dataset(data, cache=cache, relist=False)) == 153


def test_the_last_manifest_of_another_format_is_not_taken(tmp_path):
    data, cache = folder(tmp_path / "data"), tmp_path / "cache"
    assert len(Dataset(data, cache=cache)) == 150
    with pytest.raises(DataNotFound, match="is of the format folders, not urls: list the data in that format first"):
        len(Dataset(data, cache=cache, format="urls", relist=False))


def test_a_ready_format_is_opened_without_asking_for_a_listing_too(tmp_path):
    data, ready = image_folder(tmp_path / "data", per_class=3), tmp_path / "ready"
    ingest(Dataset(data), str(ready), Applied.to(tiny_preprocess(), "uint8"), on_event=lambda event: None)
    assert Dataset(ready, relist=False).digest == Dataset(ready).digest


def test_parts_of_a_mapped_manifest_are_looked_up_row_by_row(tmp_path):
    whole = loaded(folder(tmp_path / "data"), tmp_path / "cache").samples
    mask = np.arange(150) % 3 == 1
    for rows, places in ((Chosen.where(mask), np.flatnonzero(mask)), (RowIndices(np.array([7, 3, 140])), [7, 3, 140])):
        part, wanted = PartOfSamples(whole, rows), whole.take(np.asarray(places, np.int64))
        assert columns(part) == columns(wanted)
        assert len(part) == len(wanted)
        assert part.encoded_bytes == wanted.encoded_bytes
        some = np.array([2, 0])
        assert columns(part.take(some)) == columns(wanted.take(some))
        assert part.ids_at(some).tolist() == wanted.ids[some].tolist()
        assert part.labels_at(some).tolist() == wanted.labels[some].tolist()


@pytest.mark.parametrize("every", [3, 1000], ids=["read on", "looked up"])
def test_numbers_of_a_large_part_are_those_of_its_rows(every):
    size = (1 << 20) + 77
    numbers = np.arange(size) * 7 % 1001
    texts = pa.DictionaryArray.from_arrays(np.zeros(size, np.int32), ["x"])
    table = {
        name: texts if kind == pa.string() else numbers for name, kind in zip(COLUMNS.names, COLUMNS.types, strict=True)
    }
    whole = WholeSamples(ManifestColumns(pa.table(table)))
    mask = np.arange(size) % every == 2
    for rows, wanted in ((Chosen.where(mask), numbers[mask]), (Chosen.where(mask & False), numbers[:0])):
        part = PartOfSamples(whole, rows)
        assert part.encoded_bytes == wanted.sum()
        for found in (part.labels, part.lengths, part.ids):
            assert np.array_equal(found, wanted)


def _first_names(samples, answers):
    answers.put(samples.take(np.arange(3)).objects)


def test_a_forked_process_reads_what_its_parent_mapped(tmp_path):
    samples = loaded(folder(tmp_path / "data"), tmp_path / "cache").samples
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=_first_names, args=(samples, answers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == ["cat/0.jpg", "cat/1.jpg", "cat/10.jpg"]


def test_texts_are_a_sequence_like_any_other():
    words = [f"wört {number}" for number in range(9000)]
    texts = ArrowTexts(pa.array(words))
    assert isinstance(texts, Texts)
    assert texts == words
    assert list(texts) == words
    assert (texts[0], texts[-1], texts[5:8], texts[::4000]) == (words[0], words[-1], words[5:8], words[::4000])
    assert take_texts(texts, np.array([3, 1])) == take_texts(words, np.array([3, 1])) == [words[3], words[1]]
    assert words[77] in texts
    assert pickle.loads(pickle.dumps(texts)) == words
    assert texts != words[:-1]
    with pytest.raises(IndexError, match="lies outside"):
        texts[9000]


def test_an_object_of_a_store_is_a_file_to_read(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(100)))
    with StoreFile(open_store(str(tmp_path)), "x", 100) as file:
        assert file.read(3) == b"\0\1\2"
        assert file.seek(-2, 2) == 98
        assert file.read() == b"bc"
        assert (file.tell(), file.read(5)) == (100, b"")


class Counting:
    """A store that notes which objects are read."""

    def __init__(self, root):
        store = open_store(str(root))
        self.url, self.list, self.write, self._store = store.url, store.list, store.write, store
        self.read_objects = set()

    def read(self, object, offset, length):
        self.read_objects.add(object)
        return self._store.read(object, offset, length)

    def read_version(self, object, offset, length):
        self.read_objects.add(object)
        return self._store.read_version(object, offset, length)


def shard(path, names, label_of=lambda name: 3):
    with tarfile.open(path, "w") as tar:
        for name in names:
            for suffix, data in (("jpg", b"pixels of " + name.encode()), ("cls", b"%d" % label_of(name))):
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("in_memory_bytes", [0, 1 << 20])
def test_of_a_changed_listing_only_what_changed_is_read_again(tmp_path, in_memory_bytes):
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    for number in range(4):
        shard(data / f"{number}.tar", [f"{number}-{index}" for index in range(5)])
    options = {"cache": cache, "in_memory_bytes": in_memory_bytes}
    first = load_manifest(Counting(data), **options)
    shard(data / "1.tar", ["new-1", "new-2"])
    shard(data / "9.tar", ["nine"])
    (data / "3.tar").unlink()
    store = Counting(data)
    second = load_manifest(store, **options)
    assert {name for name in store.read_objects if name.endswith(".tar")} == {"1.tar", "9.tar"}
    assert len(second.samples) == 5 + 2 + 5 + 1
    fresh = load_manifest(Counting(data), cache=tmp_path / "other", format="webdataset")
    assert columns(second.samples) == columns(fresh.samples)
    kept = dict(zip(first.names, first.samples.ids.tolist(), strict=True))
    assert all(kept.get(name, id_) == id_ for name, id_ in zip(second.names, second.samples.ids.tolist(), strict=True))
