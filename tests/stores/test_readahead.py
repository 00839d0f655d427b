"""Reading places before they are asked for: the same bytes, within the memory there is, and as many at once as said."""

import itertools
import random
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from contextlib import closing

import pytest

from frostline.core.errors import ObjectNotFound, StoreUnavailable
from frostline.node.memory import Pool
from frostline.stores.open import open_store
from frostline.stores.protocols import ByteRange
from frostline.stores.readahead import ReadAhead, ReadAheadQueue, SecondReads
from frostline.stores.reads import BatchedReads
from frostline.stores.retry import HedgedReads, Wrapped

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

    def __init__(self, store, *offsets):
        super().__init__(store)
        self._held = set(offsets)
        self.asked = Counter()
        self.is_reading, self.go = threading.Event(), threading.Event()

    def read_version(self, object, offset, length):
        self.asked[offset] += 1
        if offset in self._held and self.asked[offset] == 1:
            self.is_reading.set()
            assert self.go.wait(60)
        return self._store.read_version(object, offset, length)


class Many(Wrapped):
    """A store that is given many places at once, and counts how many."""

    def __init__(self, store, error=None):
        super().__init__(store)
        self.given = []
        self._error = error

    def read_many(self, places, *, maximum=32):
        self.given.append(len(places))
        yield from BatchedReads(self._store).read_many(places[:1] if self._error else places, maximum=maximum)
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


def line(threads, room=None, maximum=32):
    return ReadAheadQueue((room or Pool(1 << 20)).take, threads, maximum=maximum)


def places(count):
    return [ByteRange("x", number, 2) for number in range(count)]


def test_as_many_reads_are_under_way_as_there_are_threads(memory, threads):
    with closing(ReadAhead(Met(memory, 32), line(threads))) as ahead:
        ahead.expect(places(64))
        assert [bytes(ahead.read(*place)) for place in places(64)] == [DATA[n : n + 2] for n in range(64)]


def test_a_store_that_takes_many_places_is_given_them_at_once(memory, threads):
    store = Many(memory)
    with closing(ReadAhead(store, line(threads))) as ahead:
        ahead.expect(places(200))
        assert [bytes(ahead.read(*place)) for place in places(200)] == [DATA[n : n + 2] for n in range(200)]
    assert store.given == [200]


def test_no_more_is_read_than_there_is_room_for_and_all_of_it_is_given_back(memory, threads):
    room = Pool(10)
    ahead = ReadAhead(memory, line(threads, room))
    ahead.expect(places(50))
    for place in places(20):
        assert bytes(ahead.read(*place)) == DATA[place.offset : place.offset + 2]
    ahead.close()
    threads.shutdown()
    assert room.statistics().peak_bytes == 10
    assert room.statistics().reserved_bytes == 0


def test_reads_unannounced_and_repeated_ranges_alone(memory, threads):
    with closing(ReadAhead(memory, line(threads))) as ahead:
        ahead.expect(places(2))
        for place in (*places(2), *places(2), ByteRange("x", 9, 5), ByteRange("x", 9, 0)):
            assert bytes(ahead.read(*place)) == DATA[place.offset : place.offset + place.length]


@pytest.mark.parametrize("wrapped", [Wrapped, Many])
def test_reports_a_fault_for_its_own_range_alone(memory, threads, wrapped):
    with closing(ReadAhead(wrapped(memory), line(threads))) as ahead:
        ahead.expect([*places(2), ByteRange("y", 0, 1)])
        with pytest.raises(ObjectNotFound):
            ahead.read("y", 0, 1)
        assert bytes(ahead.read("x", 1, 2)) == DATA[1:3]


def test_a_store_that_fails_under_way_fails_what_it_had_not_given(memory, threads):
    store = Many(memory, StoreUnavailable("gone"))
    with closing(ReadAhead(store, line(threads))) as ahead:
        ahead.expect(places(3))
        assert bytes(ahead.read("x", 0, 2)) == DATA[:2]
        with pytest.raises(StoreUnavailable, match="gone"):
            ahead.read("x", 2, 2)


class Waited(HedgedReads):
    """Tells when somebody waits for a read."""

    def __init__(self):
        super().__init__(0.95)
        self.is_waited_for = threading.Event()

    def wait_s(self, nbytes, begun_at):
        self.is_waited_for.set()
        return super().wait_s(nbytes, begun_at)


def close_under_who_waits(store, threads, room, expected):
    """Close what reads ahead while somebody waits for the last of some places, who is told."""
    late = Waited()
    ahead = ReadAhead(store, line(threads, room), SecondReads(late=late, threads=threads, made=int))
    ahead.expect(expected)
    assert store.is_reading.wait(60)
    with ThreadPoolExecutor(1) as other:
        waits = other.submit(ahead.read, *expected[-1])
        assert late.is_waited_for.wait(60)
        ahead.close()
        with pytest.raises(CancelledError):
            waits.result(60)


def test_frees_waiters_at_once_and_memory_when_the_read_ends(memory, threads):
    store, room = Held(memory, 0), Pool(1 << 20)
    close_under_who_waits(store, threads, room, places(1))
    assert room.statistics().reserved_bytes == 2
    store.go.set()
    threads.shutdown()
    assert room.statistics().reserved_bytes == 0


def test_frees_waiters_for_a_read_that_no_thread_began(memory):
    store, room = Held(memory, 0), Pool(1 << 20)
    with ThreadPoolExecutor(1) as one:
        close_under_who_waits(store, one, room, places(2))
        store.go.set()
    assert store.asked == {0: 1}
    assert room.statistics().reserved_bytes == 0


def test_reads_nothing_after_close(memory, threads):
    store, room = Held(memory), Pool(1 << 20)
    ahead = ReadAhead(store, line(threads, room))
    ahead.close()
    ahead.expect(places(3))
    with pytest.raises(CancelledError):
        ahead.read(*places(1)[0])
    assert not store.asked
    assert room.statistics().reserved_bytes == 0


def test_requests_begin_in_the_order_in_which_they_came(memory):
    """Memory for four places: the second request has none at first, and a third one comes while some is given back."""
    order, room = [], Pool(8)

    class Told(Wrapped):
        def read_version(self, object, offset, length):
            order.append(offset)
            return self._store.read_version(object, offset, length)

    with ThreadPoolExecutor(1) as one:
        waiting, all_places = line(one, room), places(12)
        first, second, third = (ReadAhead(Told(memory), waiting) for _ in range(3))
        first.expect(all_places[:4])
        second.expect(all_places[4:8])
        for place in all_places[:2]:
            first.read(*place)
        third.expect(all_places[8:])
        for ahead, some in ((first, all_places[2:4]), (second, all_places[4:8]), (third, all_places[8:])):
            for place in some:
                ahead.read(*place)
    assert sorted(order) == list(range(12))
    assert [number // 4 for number in order] == sorted(number // 4 for number in order)
    assert room.statistics().reserved_bytes == 0


def test_a_place_larger_than_all_room_holds_no_other_up(memory, threads):
    room = Pool(4)
    with closing(ReadAhead(memory, ReadAheadQueue(room.take, threads, maximum=4, max_bytes=4))) as ahead:
        ahead.expect([ByteRange("x", 0, 5), *places(2)])
        assert bytes(ahead.read(*places(2)[1])) == DATA[1:3]
        assert room.statistics().peak_bytes > 0, "those after it were begun"
        assert bytes(ahead.read("x", 0, 5)) == DATA[:5]


def all_read(memory, threads, store, quantile=0.95):
    """Forty places, of which the last but one is held up; how often one was read again."""
    room, again = Pool(1 << 20), Counter()
    second = SecondReads(late=HedgedReads(quantile), threads=threads, made=lambda: again.update("x"))
    with closing(ReadAhead(store, line(threads, room), second)) as ahead:
        ahead.expect(places(40))
        found = [bytes(ahead.read(*place)) for place in places(40)]
    assert found == [DATA[number : number + 2] for number in range(40)]
    store.go.set()
    threads.shutdown()
    assert room.statistics().reserved_bytes == 0
    return again["x"]


def test_only_a_late_read_is_hedged(memory, threads):
    store = Held(memory, 38)
    assert all_read(memory, threads, store) == 1
    assert store.asked[38] == 2
    assert sum(store.asked.values()) == 41


def test_the_first_read_counts_where_the_second_fails(memory, threads):
    class Failing(Held):
        def read_version(self, object, offset, length):
            if offset == 38 and self.asked[38]:
                self.go.set()
                self.asked[38] += 1
                raise StoreUnavailable("gone")
            return super().read_version(object, offset, length)

    store = Failing(memory, 38)
    assert all_read(memory, threads, store) == 1
    assert store.asked[38] == 2


def test_makes_no_read_twice_where_hedging_is_off(memory, threads):
    store = Held(memory, 38)
    threading.Timer(0.3, store.go.set).start()
    assert all_read(memory, threads, store, quantile=1.0) == 0
    assert sum(store.asked.values()) == 40


class Later(Executor):
    """Does what it is given when it is told to, and tells that it was given something."""

    def __init__(self):
        self.calls = []
        self.given = int

    def submit(self, call, *args):
        self.calls.append(lambda: call(*args))
        self.given()


def known(quantile=0.5):
    late = HedgedReads(quantile)
    for _ in range(20):
        late.record_read(2, late.now())
    return late


def test_does_not_hedge_a_read_that_nobody_waits_for(memory, threads):
    store, later, room, (place,), made = Held(memory, 0), Later(), Pool(1 << 20), places(1), Counter()
    later.given = store.go.set
    second = SecondReads(late=known(), threads=later, made=lambda: made.update("x"))
    with closing(ReadAhead(store, line(threads, room), second)) as ahead:
        ahead.expect([place])
        assert bytes(ahead.read(*place)) == DATA[:2]
        (make,) = later.calls
        make()
    assert store.asked == {0: 1}
    assert not made
    threads.shutdown()
    assert room.statistics().reserved_bytes == 0


def test_a_second_read_that_ends_late_lets_a_newer_read_of_the_same_place_be(memory, threads):
    later, room, (place,) = Later(), Pool(1 << 20), places(1)
    is_second, may_end, done = threading.Event(), threading.Event(), []

    class Slow(Held):
        def read_version(self, object, offset, length):
            if self.asked[0] == 1:
                is_second.set()
                assert may_end.wait(60)
            return super().read_version(object, offset, length)

    store = Slow(memory, 0)

    def given():
        # The second read begins, and while it is under way the first one comes.
        thread = threading.Thread(target=later.calls[0])
        thread.start()
        done.append(thread)
        assert is_second.wait(60)
        store.go.set()

    later.given = given
    with closing(ReadAhead(store, line(threads, room), SecondReads(late=known(), threads=later, made=int))) as ahead:
        ahead.expect([place])
        assert bytes(ahead.read(*place)) == DATA[:2]
        store.asked[0] = 2  # for the newer read is not held up
        ahead.expect([place])
        may_end.set()
        done[0].join(60)
        assert bytes(ahead.read(*place)) == DATA[:2]
    assert store.asked[0] == 4, "what was begun anew was taken"
    threads.shutdown()
    assert room.statistics().reserved_bytes == 0


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_together_each_gets_its_bytes_and_all_memory_is_given_back(memory, seed):
    """Requests that share a line, read out of order and twice, and close at any time; the store straggles and fails."""
    chance, room = random.Random(seed), Pool(24)
    pauses = [chance.choice([0, 0, 0, 0.001, 0.03]) for _ in range(997)]
    turn = itertools.count()

    class Uneven(Wrapped):
        def read_version(self, object, offset, length):
            number = next(turn)
            time.sleep(pauses[number % 997])
            if number % 61 == 0:
                raise StoreUnavailable("gone")
            return self._store.read_version(object, offset, length)

    def asks(number):
        own = random.Random(1000 * seed + number)
        ahead = ReadAhead(Uneven(memory), waiting, SecondReads(late=late, threads=urgent, made=int))
        wanted = own.sample(places(100), 20)
        ahead.expect(wanted)
        for place in [*wanted, *wanted[:3]][: own.choice([5, 23, 23])]:
            try:
                assert bytes(ahead.read(*place)) == DATA[place.offset : place.offset + 2]
            except StoreUnavailable:
                ahead.expect([place])
        ahead.close()

    late = HedgedReads(0.8)
    with ThreadPoolExecutor(4) as reads, ThreadPoolExecutor(2) as urgent:
        waiting = line(reads, room, maximum=4)
        with ThreadPoolExecutor(6) as callers:
            for done in [callers.submit(asks, number) for number in range(30)]:
                done.result(60)
    assert room.statistics().reserved_bytes == 0
    assert room.statistics().peak_bytes <= 24
