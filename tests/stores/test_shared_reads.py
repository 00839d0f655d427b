"""Joined reads for threads that ask one by one: the same bytes, fewer requests, within the memory that there is."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

import frostline as fl
from frostline.core.errors import ObjectNotFound, StoreUnavailable
from frostline.datasets.copy.repack import repack
from frostline.stores.open import open_store
from frostline.stores.protocols import ByteRange
from frostline.stores.reads import SharedReads
from frostline.testing.formats import Example
from support import formats
from support.asked import Bytes, versions_read
from support.images import image_folder, tiny_preprocess


class Memory:
    """So many bytes, of which pieces are taken and given back."""

    def __init__(self, nbytes):
        self.free = self.total = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes):
        with self._lock:
            if nbytes > self.free:
                return None
            self.free -= nbytes
            return Piece(self, nbytes)


class Piece:
    def __init__(self, memory, nbytes):
        self._memory, self._nbytes = memory, nbytes

    def release(self):
        with self._memory._lock:  # noqa: SLF001 (its own)
            self._memory.free += self._nbytes
            self._nbytes = 0


places = st.lists(
    st.builds(ByteRange, st.sampled_from("ab"), st.integers(0, 1050), st.integers(0, 40)), max_size=40, unique=True
)


def found(store, place):
    try:
        return store.read_version(*place)
    except ObjectNotFound:
        return None


@given(places, st.integers(0, 50), st.integers(1, 300), st.integers(0, 600), st.integers(1, 8))
def test_each_place_gives_what_it_gives_by_itself_and_all_memory_comes_back(asked, gap, maximum, reservation, workers):
    store, memory = Bytes(), Memory(reservation)
    together = SharedReads(store, asked, memory.take, max_gap_bytes=gap, max_bytes=maximum)
    with ThreadPoolExecutor(workers) as threads:
        got = list(threads.map(lambda place: found(together, place), asked))
    assert got == [found(Bytes(), place) for place in asked]
    together.close()
    assert memory.free == memory.total


def test_reads_neighbours_by_one_request_and_releases_taken_bytes():
    asked = [ByteRange("a", start, 10) for start in range(0, 1000, 10)]
    store, memory = Bytes(), Memory(1000)
    together = SharedReads(store, asked, memory.take, max_bytes=250)
    assert together.joins
    assert [len(together.read(*place)) for place in asked] == [10] * 100
    assert store.asked == [("a", start, 250) for start in range(0, 1000, 250)]
    assert memory.free == 1000
    together.read(*asked[3])
    assert store.asked[-1] == asked[3]


def test_reads_single_and_unannounced_ranges_alone():
    store = Bytes()
    together = SharedReads(store, [ByteRange("a", 0, 10), ByteRange("b", 0, 10)], Memory(1000).take)
    assert not together.joins
    for place in (("a", 0, 10), ("b", 0, 10), ("b", 500, 7)):
        together.read_version(*place)
    assert store.asked == [("a", 0, 10), ("b", 0, 10), ("b", 500, 7)]


def test_without_room_each_is_read_by_itself():
    asked = [ByteRange("a", start, 10) for start in range(0, 100, 10)]
    store = Bytes()
    together = SharedReads(store, asked, lambda nbytes: None)
    for place in asked:
        together.read(*place)
    assert store.asked == asked


def test_an_object_cut_short_loses_only_the_samples_behind_its_end():
    asked = [ByteRange("a", start, 10) for start in range(960, 1040, 10)]
    together = SharedReads(Bytes(), asked, Memory(1000).take)
    assert [found(together, place) is None for place in asked] == [False] * 4 + [True] * 4


def test_starts_the_next_read_while_waiting_for_a_joined_one():
    started, go_on = [threading.Event(), threading.Event()], threading.Event()

    class Slow(Bytes):
        def read_version(self, object, offset, length):
            started[offset // 100].set()
            assert go_on.wait(60)
            return super().read_version(object, offset, length)

    asked = [ByteRange("a", start, 50) for start in range(0, 200, 50)]
    store = Slow()
    together = SharedReads(store, asked, Memory(1000).take, max_bytes=100)
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(together.read, *place) for place in asked[:2]]
        assert all(item.wait(60) for item in started)
        go_on.set()
        assert [len(item.result()) for item in both] == [50, 50]
    assert sorted(store.asked) == [("a", 0, 100), ("a", 100, 100)]


def test_a_store_that_fails_tells_all_who_wait():
    class Failing(Bytes):
        def read_version(self, object, offset, length):
            raise StoreUnavailable("no answer")

    asked = [ByteRange("a", start, 50) for start in range(0, 200, 50)]
    memory = Memory(1000)
    together = SharedReads(Failing(), asked, memory.take)
    for place in asked:
        with pytest.raises(StoreUnavailable, match="no answer"):
            together.read(*place)
    together.close()
    assert memory.free == 1000


@pytest.fixture
def shards(tmp_path):
    """Two tars in memory, and how they are read: object, offset and length of each request, once counting began."""
    root = image_folder(tmp_path, per_class=40)
    examples = [Example(path.stem, path.parent.name, path.read_bytes()) for path in sorted(root.rglob("*.jpg"))]
    store = open_store(f"memory://{tmp_path.name}")
    for part in range(2):
        formats.put_webdataset(store, examples[part::2], part)
    data = fl.Dataset(store.url)
    assert len(data) == 120
    return data


@pytest.fixture
def requests(monkeypatch):
    return versions_read(monkeypatch)


def test_a_node_reads_samples_in_order_by_few_requests(shards, requests):
    whole = shards.samples.encoded_bytes
    with fl.offload(None, shards, preprocess=tiny_preprocess()) as job:
        requests.clear()
        rows = sum(len(batch.labels) for batch in job.loader(20))
    assert rows == 120
    assert len(requests) <= 120 / 8
    # Between two images of a tar lie their labels and headers, at most some kilobytes here.
    assert whole <= sum(length for _, _, length in requests) <= whole + 120 * 4096


def test_a_copy_reads_its_source_by_few_requests(shards, requests, tmp_path):
    whole = shards.samples.encoded_bytes
    done = repack(shards, tmp_path / "copy", "original", on_event=lambda event: None)
    assert (done.samples, done.skipped) == (120, ())
    assert len(requests) <= 120 / 8
    assert whole <= sum(length for _, _, length in requests) <= whole + 120 * 4096
