"""Tars that are compressed as a whole: unpacked once, whole or not at all, and never more than a disk can take."""

import gzip
import os
import threading
import time
import uuid

import pytest

import frostline as fl
from frostline.core import UNPACKED
from frostline.core.config import cache_folder
from frostline.core.errors import BadRequest, DataError, ObjectNotFound
from frostline.datasets.formats.webdataset import CompressedTar, TarCopies, TarReader
from frostline.datasets.reading import open_samples
from frostline.stores.open import open_store
from frostline.stores.protocols import Entry
from support.bucket_peer import bucket_peer
from support.formats import tar_of
from support.images import tiny_preprocess
from support.listing_nodes import listing_node
from support.nodes import jpeg

IMAGES = {f"{'ab'[number % 2]}/{number}.jpg": jpeg(number) for number in range(6)}
TAR = tar_of(IMAGES.items())
PACKED = gzip.compress(TAR)
DAY_S = 86_400.0


class Counting:
    """A store that counts what it gives."""

    def __init__(self, store):
        self._store = store
        self.nbytes = 0
        self.lock = threading.Lock()

    def read_version(self, object, offset, length):
        with self.lock:
            self.nbytes += length
        return self._store.read_version(object, offset, length)


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4()}")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def entry_of(store):
    return CompressedTar.of(next(iter(store.list())))


def loaded(data, **options):
    """Every sample's bytes by its name."""
    with fl.offload(None, data, preprocess=tiny_preprocess(), accuracy="exact", **options) as job:
        names = dict(zip(data.samples.ids.tolist(), data.names, strict=True))
        return {
            names[int(id)].partition("/")[2]: features.numpy().tobytes()
            for batch in job.loader(4)
            for id, features in zip(batch.ids, batch.features, strict=True)
        }


def copies():
    return sorted((cache_folder() / "unpacked").glob("*.tar"))


def test_it_is_the_data_that_the_plain_tar_is(tmp_path):
    for name, data in (("plain", TAR), ("packed", PACKED)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("x.tar" if name == "plain" else "x.tar.gz")).write_bytes(data)
    plain, packed = fl.Dataset(tmp_path / "plain"), fl.Dataset(tmp_path / "packed")
    assert packed.manifest.reading == UNPACKED
    assert packed.classes == plain.classes == ("a", "b")
    assert packed.samples.labels.tolist() == plain.samples.labels.tolist()
    assert loaded(packed) == loaded(plain)
    assert [path.read_bytes() for path in copies()] == [TAR]
    assert {path.stat().st_mode & 0o077 for path in copies()} == {0}
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == ["x.tar.gz"], "nothing is put beside it"


def test_in_a_bucket_it_is_fetched_once(monkeypatch):
    with bucket_peer() as peer:
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        peer.objects["x.tgz"] = PACKED
        url = f"s3://photos/x.tgz?endpoint={peer.url}"
        assert len(loaded(fl.Dataset(url))) == len(IMAGES)
        gets = [target for method, target in peer.seen if method == "GET" and "x.tgz" in target]
        assert len(gets) == 1
        assert len(loaded(fl.Dataset(url))) == len(IMAGES)
        assert [target for method, target in peer.seen if method == "GET" and "x.tgz" in target] == gets


def test_a_node_unpacks_it_for_whoever_trains_elsewhere(tmp_path):
    (tmp_path / "x.tar.gz").write_bytes(PACKED)
    with listing_node(tmp_path) as node:
        data = fl.Dataset(tmp_path, near=node.url)
        assert len(loaded(data, near=node.url)) == len(IMAGES)


def test_plain_tars_beside_compressed_ones_are_the_data(tmp_path):
    (tmp_path / "x.tar").write_bytes(TAR)
    (tmp_path / "x.tar.gz").write_bytes(PACKED)
    (tmp_path / "y.TGZ").write_bytes(PACKED)
    (tmp_path / "z.tar.xz").write_bytes(b"xz")
    data = fl.Dataset(tmp_path)
    assert {name.partition("/")[0] for name in data.names} == {"x.tar"}
    assert [(left.reason, left.names) for left in data.manifest.left_out] == [
        ("that the format webdataset does not use, and --format tar.gz reads", ("x.tar.gz", "y.TGZ")),
        ("with the suffix .tar.xz, which is not read", ("z.tar.xz",)),
    ]
    (tmp_path / "y.TGZ").unlink()
    assert {name.partition("/")[0] for name in fl.Dataset(tmp_path, format="tar.gz").names} == {"x.tar.gz"}


def test_an_archive_beside_data_of_another_format_changes_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(jpeg(1))
    (tmp_path / "backup.tar.gz").write_bytes(PACKED)
    assert list(fl.Dataset(tmp_path).names) == ["a/1.jpg"]


def test_a_copy_that_somebody_removed_is_made_again(tmp_path):
    (tmp_path / "x.tar.gz").write_bytes(PACKED)
    samples = fl.Dataset(tmp_path).samples
    store = open_samples(str(tmp_path), UNPACKED)
    place = samples.objects[0], int(samples.offsets[0]), int(samples.lengths[0])
    first = bytes(store.read(*place))
    for path in copies():
        path.unlink()
    assert bytes(store.read(*place)) == first
    assert len(copies()) == 1


def test_after_a_change_the_old_copy_goes_and_old_samples_are_left_out(tmp_path):
    (tmp_path / "x.tar.gz").write_bytes(PACKED)
    before = fl.Dataset(tmp_path)
    listed = before.samples
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(tar_of([("a/9.jpg", jpeg(9))])))
    assert len(loaded(fl.Dataset(tmp_path))) == 1
    assert len(copies()) == 1
    store = open_samples(str(tmp_path), UNPACKED)
    with pytest.raises(ObjectNotFound, match=r"x\.tar\.gz .*has changed"):
        store.read(listed.objects[0], int(listed.offsets[0]), int(listed.lengths[0]))


def test_shards_that_did_not_change_are_not_unpacked_again(tmp_path):
    (tmp_path / "x.tar.gz").write_bytes(PACKED)
    assert len(fl.Dataset(tmp_path)) == len(IMAGES)
    for path in copies():
        path.unlink()
    (tmp_path / "y.tar.gz").write_bytes(gzip.compress(tar_of([("a/9.jpg", jpeg(9))])))
    assert len(fl.Dataset(tmp_path)) == len(IMAGES) + 1
    assert len(copies()) == 1, "that of y.tar.gz alone"


def test_many_who_ask_at_once_wait_for_one_copy(store, tmp_path):
    store.write("x.tar.gz", PACKED)
    counting = Counting(store)
    reader = TarReader(counting, store.url, TarCopies(tmp_path / "copies"))
    tar = entry_of(store)
    found = []
    threads = [threading.Thread(target=lambda: found.append(bytes(reader.read(str(tar), 0, 10)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [TAR[:10]] * 8
    assert counting.nbytes == len(PACKED)


@pytest.mark.parametrize(
    ("packed", "sentence"),
    [
        (PACKED[:-400], "is cut off"),
        (PACKED[:100] + b"damage" * 9 + PACKED[154:], "or damaged"),
        (b"BZh9" + PACKED, "is not compressed by gzip"),
        (gzip.compress(TAR[:-11_000]), "is cut off or damaged"),
        (gzip.compress(b"no tar at all" * 100), "no plain tar"),
    ],
    ids=["half", "damaged", "another format", "half a tar", "no tar"],
)
def test_what_is_no_whole_compressed_tar_is_refused_and_leaves_nothing(store, packed, sentence):
    store.write("x.tar.gz", packed)
    with pytest.raises(DataError, match=sentence) as caught:
        len(fl.Dataset(store.url))
    assert "x.tar.gz" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((cache_folder() / "unpacked").glob(".partial-*"))


def test_members_of_gzip_one_after_the_other_are_one_file(store):
    half = len(TAR) // 2
    store.write("x.tar.gz", gzip.compress(TAR[:half]) + gzip.compress(TAR[half:]))
    assert len(fl.Dataset(store.url)) == len(IMAGES)


@pytest.mark.promise("data", mended="the header of a compressed tar was read byte by byte, however long it was")
def test_a_header_of_any_length_takes_little_of_a_processor(store, tmp_path):
    begun = b"\x1f\x8b\x08\x08" + bytes(6)
    store.write("x.tar.gz", begun + b"a" * (32 << 20))
    began_s = time.process_time()
    with pytest.raises(DataError, match=r"x.tar.gz is cut off"):
        TarCopies(tmp_path).path_of(store, store.url, entry_of(store))
    assert time.process_time() - began_s < 3


def test_a_tar_that_unpacks_to_too_much_is_refused_before_the_disk_is_full(store):
    store.write("x.tar.gz", gzip.compress(bytes(120 << 20), 9))
    with pytest.raises(DataError, match=r"would unpack to more than 500 times its \d+ kB"):
        len(fl.Dataset(store.url))
    assert not copies()


def test_a_tar_of_tiny_texts_is_within_the_bound(store, tmp_path):
    store.write("x.tar.gz", gzip.compress(tar_of((f"{number}.cls", b"1") for number in range(2000)), 9))
    tar = entry_of(store)
    assert TarReader(store, store.url, TarCopies(tmp_path)).entry_of(tar).size < 200 * tar.size


def test_half_of_the_free_disk_is_the_most_that_a_copy_takes(store, tmp_path):
    store.write("x.tar.gz", PACKED)
    tar = entry_of(store)
    tight = TarCopies(tmp_path, free_bytes=lambda _: 2 * len(TAR) - 2)
    with pytest.raises(DataError, match=r"half of the free disk of .*: set XDG_CACHE_HOME to a larger disk"):
        tight.path_of(store, store.url, tar)
    assert not list(tmp_path.glob("*.tar"))
    assert TarCopies(tmp_path, free_bytes=lambda _: 2 * len(TAR)).path_of(store, store.url, tar).stat().st_size == len(
        TAR
    )


def test_a_copy_that_nobody_opened_for_a_week_makes_room(store, tmp_path):
    for name in ("old", "used", "new"):
        store.write(f"{name}.tar.gz", PACKED)
    tars = {entry.object[:-7]: CompressedTar.of(entry) for entry in store.list()}
    now = TarCopies(tmp_path)
    old, used = (now.path_of(store, store.url, tars[name]) for name in ("old", "used"))
    later = used.stat().st_mtime + 8 * DAY_S
    os.utime(used, (later, later))
    new = TarCopies(tmp_path, clock=lambda: later).path_of(store, store.url, tars["new"])
    assert not old.exists()
    assert used.exists()
    assert new.parent == tmp_path


def test_copies_together_take_half_of_the_disk_and_the_least_used_go_for_others(store, tmp_path):
    disk, names = 8 * len(TAR), [f"{number}.tar.gz" for number in range(12)]
    now_s = [time.time() + 1000]

    def taken():
        return sum(path.stat().st_size for path in tmp_path.iterdir())

    tight = TarCopies(tmp_path, free_bytes=lambda _: disk - taken(), clock=lambda: now_s[0])
    made = []
    for name in names:
        store.write(name, PACKED)
        path = tight.path_of(store, store.url, CompressedTar(name, len(PACKED), ""))
        os.utime(path, (now_s[0], now_s[0]))
        made.append(path)
        now_s[0] += 100
        assert taken() <= disk // 2
    assert [path.exists() for path in made] == 8 * [False] + 4 * [True]
    for path in made[8:]:
        os.utime(path, (now_s[0], now_s[0]))
    with pytest.raises(DataError, match="more than 0 B, half of the free disk"):  # all of them are in use
        tight.path_of(store, store.url, CompressedTar(names[0], len(PACKED), ""))


def test_names_of_tars_that_are_nowhere_leave_nothing(store, tmp_path):
    for number in range(3):
        with pytest.raises(ObjectNotFound):
            TarCopies(tmp_path).path_of(store, store.url, CompressedTar(f"{number}.tar.gz", 9, ""))
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_no_compressed_tar_or_leads_out_is_refused():
    for name in ("x.tar.gz", "x.tar.gz#-1.a", "x.tar.gz#1e3.a", f"x#{'9' * 30}."):
        with pytest.raises(BadRequest, match="is no compressed tar"):
            CompressedTar.parse(name)
    tar = CompressedTar.of(Entry("a#b/ü.tar.gz", 12, 'W/"x.y#z"'))
    assert CompressedTar.parse(str(tar)) == tar
