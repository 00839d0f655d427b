"""Reads in blocks: the same bytes, a request a block, within the memory that there is, whatever fails."""

import threading
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import ObjectNotFound, StoreUnavailable
from frostline.node.memory import Pool
from frostline.stores.protocols import ByteRange
from frostline.stores.readahead import BlockReads
from support.asked import Bytes

places = st.lists(
    st.builds(ByteRange, st.sampled_from("ab"), st.integers(0, 1050), st.integers(0, 40)), max_size=40, unique=True
)


def room_of(nbytes):
    pool = Pool(max(1, nbytes))
    return pool, lambda wanted: pool.take(wanted) if wanted <= pool.total_bytes else None


def found(store, place):
    try:
        return store.read_version(*place)
    except ObjectNotFound:
        return None


@given(places, st.integers(0, 40), st.integers(0, 3000), st.integers(1, 8), st.data())
def test_each_place_gives_what_it_gives_by_itself_and_all_memory_comes_back(asked, begun, nbytes, workers, data):
    pool, room = room_of(nbytes)
    with ThreadPoolExecutor(4) as waiting, ThreadPoolExecutor(workers) as threads:
        reads = BlockReads(Bytes(), waiting, room)
        half = len(asked) // 2
        reads.expect(asked[:half])
        reads.expect(asked[half:])
        reads.begin(begun)
        wanted = data.draw(st.permutations(asked))
        got = list(threads.map(lambda place: found(reads, place), wanted))
        assert got == [found(Bytes(), place) for place in wanted]
        reads.close()
    assert pool.statistics().reserved_bytes == 0


def test_reads_a_block_by_one_request_and_releases_its_samples_singly():
    pool, room = room_of(100_000)
    asked = [ByteRange("a", start, 10) for start in range(0, 1000, 10)]
    store = Bytes()
    with ThreadPoolExecutor(1) as waiting:
        reads = BlockReads(store, waiting, room)
        reads.expect(asked)
        assert reads.holds(asked)
        held = []
        for place in reversed(asked):
            assert len(reads.read(*place)) == 10
            held.append(pool.statistics().reserved_bytes)
    assert store.asked == [("a", 0, 1000)]
    assert held == list(range(990, -10, -10))
    reads.read(*asked[3])
    assert store.asked[-1] == asked[3], "who asks again reads it alone"


class Later(Executor):
    """Does what it is given when it is told to."""

    def __init__(self):
        self.calls = []

    def submit(self, call, *arguments):
        self.calls.append((call, arguments))

    def work(self):
        while self.calls:
            call, arguments = self.calls.pop(0)
            call(*arguments)


def test_no_more_begins_than_may_and_than_there_is_room_for():
    asked = [ByteRange("a", start, 100) for start in range(0, 800_000, 100_000)]
    for may, nbytes, begun in ((0, 10_000, 0), (1, 10_000, 1), (8, 10_000, 8), (8, 250, 2)):
        pool, room = room_of(nbytes)
        store, threads = Bytes(1 << 20), Later()
        reads = BlockReads(store, threads, room)
        reads.expect(asked)
        assert reads.told == 8
        reads.begin(may)
        threads.work()
        assert store.asked == asked[:begun]
        assert pool.statistics().reserved_bytes == 100 * begun


def test_taking_a_batch_frees_memory_for_the_next():
    asked = [ByteRange("a", start, 100) for start in range(0, 800_000, 100_000)]
    store, threads = Bytes(1 << 20), Later()
    reads = BlockReads(store, threads, room_of(250)[1])
    reads.expect(asked)
    reads.begin(8)
    for number, place in enumerate(asked):
        threads.work()
        assert len(store.asked) == min(number + 2, 8)
        reads.read(*place)
    assert store.asked == asked


def test_starts_an_unbegun_read_or_reads_alone_without_memory():
    asked = [ByteRange("a", start, 10) for start in range(0, 40, 10)]
    for nbytes, made in ((1000, [("a", 0, 40)]), (20, asked)):
        store = Bytes()
        with ThreadPoolExecutor(1) as waiting:
            reads = BlockReads(store, waiting, room_of(nbytes)[1])
            reads.expect(asked)
            for place in asked:
                reads.read(*place)
        assert store.asked == made


def test_releases_forgotten_ranges_and_reads_them_alone():
    pool, room = room_of(1000)
    asked = [ByteRange("a", start, 10) for start in range(0, 40, 10)]
    store = Bytes()
    with ThreadPoolExecutor(1) as waiting:
        reads = BlockReads(store, waiting, room)
        reads.expect(asked)
        reads.read(*asked[0])
        reads.forget(reads.told)
        assert pool.statistics().reserved_bytes == 0
        assert not reads.holds(asked[1:2])
        assert reads.read(*asked[1]) == Bytes().read_version(*asked[1])[0]
    assert store.asked == [("a", 0, 40), asked[1]]


def test_a_store_that_fails_tells_who_waits_and_each_is_read_alone_afterwards():
    class Failing(Bytes):
        fails = True

        def read_version(self, object, offset, length):
            if self.fails:
                raise StoreUnavailable("no answer")
            return super().read_version(object, offset, length)

    pool, room = room_of(1000)
    asked = [ByteRange("a", start, 50) for start in range(0, 200, 50)]
    store = Failing()
    with ThreadPoolExecutor(1) as waiting:
        reads = BlockReads(store, waiting, room)
        reads.expect(asked)
        with pytest.raises(StoreUnavailable, match="no answer"):
            reads.read(*asked[0])
        store.fails = False
        assert [len(reads.read(*place)) for place in asked] == [50] * 4
    assert store.asked == asked
    assert pool.statistics().reserved_bytes == 0


def test_several_who_ask_for_samples_of_a_block_share_its_request():
    started, go_on = threading.Event(), threading.Event()

    class Slow(Bytes):
        def read_version(self, object, offset, length):
            started.set()
            assert go_on.wait(60)
            return super().read_version(object, offset, length)

    asked = [ByteRange("a", start, 50) for start in range(0, 200, 50)]
    store = Slow()
    with ThreadPoolExecutor(1) as waiting, ThreadPoolExecutor(4) as threads:
        reads = BlockReads(store, waiting, room_of(1000)[1])
        reads.expect(asked)
        all_of_it = [threads.submit(reads.read, *place) for place in asked]
        assert started.wait(60)
        go_on.set()
        assert [len(item.result()) for item in all_of_it] == [50] * 4
    assert store.asked == [("a", 0, 200)]
