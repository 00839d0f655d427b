"""Reading places before they are asked for: the same bytes, within the room there is, and as many at once as said."""

import threading
import uuid
from collections import Counter
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing

import pytest

from frostline.errors import ObjectNotFound, StoreUnavailable
from frostline.node.memory import Pool
from frostline.stores.ahead import Ahead, SecondReads
from frostline.stores.faces import Place
from frostline.stores.joined import Joined
from frostline.stores.late import LateReads
from frostline.stores.objects import open_store
from frostline.stores.wrapped import Wrapped

DATA = bytes(range(256))


class Met(Wrapped):
    """Answers reads once so many of them are under way."""

    def __init__(self, store, together):
        super().__init__(store)
        self._barrier = threading.Barrier(together)

    def read_version(self, object, offset, length):
        self._barrier.wait(60)
        return self._store.read_version(object, offset, length)


class Held(Wrapped):
    """Answers the first read of each of some places when it may, and all others at once."""

    def __init__(self, store, *offsets, error=None):
        super().__init__(store)
        self._held = set(offsets)
        self._error = error
        self.asked = Counter()
        self.is_reading, self.go = threading.Event(), threading.Event()

    def read_version(self, object, offset, length):
        self.asked[offset] += 1
        if offset in self._held:
            if self.asked[offset] == 1:
                self.is_reading.set()
                assert self.go.wait(60)
            elif self._error:
                raise self._error
        return self._store.read_version(object, offset, length)


class Many(Wrapped):
    """A store that is given many places at once, and counts how many."""

    def __init__(self, store, error=None):
        super().__init__(store)
        self.given = []
        self._error = error

    def read_many(self, places, *, most=32):
        self.given.append(len(places))
        yield from Joined(self._store).read_many(places[:1] if self._error else places, most=most)
        if self._error:
            raise self._error


@pytest.fixture
def memory():
    store = open_store(f"memory://{uuid.uuid4()}")
    store.write("x", DATA)
    return store


@pytest.fixture
def threads():
    with ThreadPoolExecutor(32) as pool:
        yield pool


def places(count):
    return [Place("x", number, 2) for number in range(count)]


def test_as_many_reads_are_under_way_as_there_are_threads(memory, threads):
    with closing(Ahead(Met(memory, 32), Pool(1 << 20).take, threads)) as ahead:
        ahead.expect(places(64))
        assert [bytes(ahead.read(*place)) for place in places(64)] == [DATA[n : n + 2] for n in range(64)]


def test_a_store_that_takes_many_places_is_given_them_at_once(memory, threads):
    store = Many(memory)
    with closing(Ahead(store, Pool(1 << 20).take, threads)) as ahead:
        ahead.expect(places(200))
        assert [bytes(ahead.read(*place)) for place in places(200)] == [DATA[n : n + 2] for n in range(200)]
    assert store.given == [200]


def test_no_more_is_read_than_there_is_room_for_and_all_of_it_is_given_back(memory, threads):
    room = Pool(10)
    ahead = Ahead(memory, room.take, threads)
    ahead.expect(places(50))
    for place in places(20):
        assert bytes(ahead.read(*place)) == DATA[place.offset : place.offset + 2]
    ahead.close()
    threads.shutdown()
    assert room.statistics().peak_bytes == 10
    assert room.statistics().reserved_bytes == 0


def test_what_nobody_told_of_and_what_is_asked_for_again_is_read_by_itself(memory, threads):
    with closing(Ahead(memory, Pool(1 << 20).take, threads)) as ahead:
        ahead.expect(places(2))
        for place in (*places(2), *places(2), Place("x", 9, 5), Place("x", 9, 0)):
            assert bytes(ahead.read(*place)) == DATA[place.offset : place.offset + place.length]


@pytest.mark.parametrize("wrapped", [Wrapped, Many])
def test_what_is_wrong_with_one_place_is_said_of_that_one(memory, threads, wrapped):
    with closing(Ahead(wrapped(memory), Pool(1 << 20).take, threads)) as ahead:
        ahead.expect([*places(2), Place("y", 0, 1)])
        with pytest.raises(ObjectNotFound):
            ahead.read("y", 0, 1)
        assert bytes(ahead.read("x", 1, 2)) == DATA[1:3]


def test_a_store_that_fails_under_way_fails_what_it_had_not_given(memory, threads):
    store = Many(memory, StoreUnavailable("gone"))
    with closing(Ahead(store, Pool(1 << 20).take, threads)) as ahead:
        ahead.expect(places(3))
        assert bytes(ahead.read("x", 0, 2)) == DATA[:2]
        with pytest.raises(StoreUnavailable, match="gone"):
            ahead.read("x", 2, 2)


def test_who_waits_for_a_read_under_way_is_freed_at_the_end_and_its_memory_when_it_ends(memory, threads):
    store, room = Held(memory, 0), Pool(1 << 20)
    ahead = Ahead(store, room.take, threads)
    ahead.expect(places(1))
    assert store.is_reading.wait(60)
    waits = threads.submit(ahead.read, *places(1)[0])
    ahead.close()
    with pytest.raises(CancelledError):
        waits.result(60)
    assert room.statistics().reserved_bytes == 2
    store.go.set()
    threads.shutdown()
    assert room.statistics().reserved_bytes == 0


def test_who_waits_for_a_read_that_had_not_begun_is_freed_too(memory):
    store, room = Held(memory, 0), Pool(1 << 20)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        ahead = Ahead(store, room.take, one)
        ahead.expect(places(2))
        assert store.is_reading.wait(60)
        waits = other.submit(ahead.read, *places(2)[1])
        ahead.close()
        with pytest.raises(CancelledError):
            waits.result(60)
        store.go.set()
    assert store.asked == {0: 1}
    assert room.statistics().reserved_bytes == 0


def all_read(memory, threads, store, quantile=0.95):
    """Forty places, of which the last but one is held up; how often one was read again."""
    room, again = Pool(1 << 20), Counter()
    second = SecondReads(late=LateReads(quantile), threads=threads, made=lambda: again.update("x"))
    with closing(Ahead(store, room.take, threads, second)) as ahead:
        ahead.expect(places(40))
        found = [bytes(ahead.read(*place)) for place in places(40)]
    assert found == [DATA[number : number + 2] for number in range(40)]
    store.go.set()
    threads.shutdown()
    assert room.statistics().reserved_bytes == 0
    return again["x"]


def test_a_straggler_is_read_a_second_time_by_who_waits_for_it_and_no_other_read_is(memory, threads):
    store = Held(memory, 38)
    assert all_read(memory, threads, store) == 1
    assert store.asked[38] == 2
    assert sum(store.asked.values()) == 41


def test_the_first_read_counts_where_the_second_fails(memory, threads):
    store = Held(memory, 38, error=StoreUnavailable("gone"))
    threading.Timer(0.3, store.go.set).start()
    assert all_read(memory, threads, store) == 1


def test_none_is_made_twice_where_nobody_wants_that(memory, threads):
    store = Held(memory, 38)
    threading.Timer(0.3, store.go.set).start()
    assert all_read(memory, threads, store, quantile=1.0) == 0
    assert sum(store.asked.values()) == 40
