"""Features in an object store: several nodes find them, few objects hold them, and no trouble there reaches anybody."""

import hashlib
import os
import threading
from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.cache import SharedStore
from frostline.cache.shared_layout import ObjectIndex, PackedObject, WriteBuffer, keys_of, pack_rows, runs_of
from frostline.core.errors import AccessDenied, OutOfSpace, StoreUnavailable
from frostline.stores.open import open_store
from support import stored

pytestmark = pytest.mark.promise("complete")

LONG_S = 60.0


def opened(url, *, memory_bytes=16 << 20, wait_s=LONG_S, wrap=lambda store: store, **options):
    def store_at(folder):
        return wrap(open_store(f"{url}/{folder}" if folder else url))

    options = {"budget_bytes": 1 << 30, **options}
    return closing(SharedStore(store_at, memory_bytes=memory_bytes, wait_s=wait_s, **options))


def offer(store, numbers, scope=stored.SCOPE):
    keys = stored.keys(numbers, scope)
    store.get_into(scope, keys, stored.LAYOUT, stored.LAYOUT.empty(len(keys)))  # as a node does first
    store.offer(scope, keys, stored.tensors(numbers))


def objects(url):
    """Of rows, with their sizes."""
    return {item.object: item.size for item in open_store(url).list() if item.object.endswith(".rows1")}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shared").mkdir()
    return (tmp_path / "shared").as_uri()


def test_finds_features_of_another_node_to_the_bit(folder):
    with opened(folder) as one:
        offer(one, range(100))
        assert stored.checked(one, range(100)) in ([], list(range(100)))  # written yet or not
    with opened(folder) as other:
        assert stored.checked(other, range(50, 150)) == list(range(50, 100))
        assert stored.checked(other, range(100), scope=b"another scope".ljust(32)) == []
        assert other.statistics().hits == 50


def test_rows_of_many_requests_share_an_object(folder):
    with opened(folder) as store:
        for start in range(0, 128, 8):
            offer(store, range(start, start + 8))
    assert len(objects(folder)) == 1
    assert store.statistics().kept == 128
    assert store.statistics().bytes == sum(objects(folder).values())


def test_an_object_is_written_while_the_node_runs_once_there_are_enough_rows_for_it(folder):
    written = threading.Event()

    class Telling(Wrapped):
        def write(self, name, data):
            self.store.write(name, data)
            written.set()

    with opened(folder, memory_bytes=1 << 20, wrap=Telling) as store:
        offer(store, range(64))
        assert written.wait(LONG_S)


def test_rows_are_written_once(folder):
    with opened(folder) as store:
        offer(store, range(20))
        offer(store, range(10, 30))
    with opened(folder) as store:
        offer(store, range(40))
    assert store.statistics().kept == 10
    assert sum(PackedObject.parse(name, size).rows for name, size in objects(folder).items()) == 40


def test_treats_tampered_objects_as_misses_and_writes_them_again(folder, tmp_path):
    with opened(folder) as store:
        offer(store, range(16))
    (path,) = (tmp_path / "shared").rglob("*.rows1")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1  # in the last row
    path.write_bytes(data)
    with opened(folder) as store:
        assert stored.checked(store, range(16)) == list(range(15))
        assert store.statistics().damaged == 1
        offer(store, range(16))
    with opened(folder) as store:
        assert stored.checked(store, range(16)) == list(range(16))


@pytest.mark.parametrize("change", [lambda data: b"\1" + data[1:], lambda data: data[:-1], lambda data: b""])
def test_an_object_whose_keys_or_length_are_wrong_holds_nothing(folder, tmp_path, change):
    with opened(folder) as store:
        offer(store, range(16))
    (path,) = (tmp_path / "shared").rglob("*.rows1")
    path.write_bytes(change(path.read_bytes()))
    with opened(folder) as store:
        assert stored.checked(store, range(16)) == []


def test_rows_moved_to_another_scope_are_misses(folder, tmp_path):
    other = b"another scope".ljust(32)
    with opened(folder) as store:
        offer(store, range(16))
    (path,) = (tmp_path / "shared").rglob("*.rows1")
    moved = tmp_path / "shared" / other.hex() / path.name
    moved.parent.mkdir()
    path.rename(moved)
    with opened(folder) as store:
        assert stored.checked(store, range(16), scope=other) == []
        assert store.statistics().damaged == 1


def test_objects_may_be_removed_at_any_time(folder, tmp_path):
    with opened(folder) as store:
        offer(store, range(16))
    with opened(folder) as store:
        assert stored.checked(store, range(4)) == list(range(4))
        next((tmp_path / "shared").rglob("*.rows1")).unlink()
        assert stored.checked(store, range(16)) == []
        assert store.statistics().failed == 0
        offer(store, range(16))
    assert len(objects(folder)) == 1


def test_no_more_is_written_than_the_budget_whoever_wrote_it(folder):
    with opened(folder, budget_bytes=200_000) as store:
        offer(store, range(16))
    there = sum(objects(folder).values())
    with opened(folder, budget_bytes=there + 1000) as store:
        offer(store, range(16, 32))
    assert store.statistics().rejected == 16
    assert sum(objects(folder).values()) == there


def test_evicts_unused_weights_and_forgets_them(folder):
    first, second = (bytes([number]) * 32 for number in range(2))
    with opened(folder) as store:
        offer(store, range(16), scope=first)
    there = sum(objects(folder).values())
    with opened(folder, budget_bytes=there + 1000, idle_s=0.0) as store:
        assert stored.checked(store, range(16), scope=first) == list(range(16))
        offer(store, range(16, 32), scope=second)
    assert store.statistics().cleared >= 1
    assert not store.contains(first, stored.keys(range(16), first)).any()
    assert [name.partition("/")[0] for name in objects(folder)] == [second.hex()]
    with opened(folder) as store:
        assert stored.checked(store, range(16, 32), scope=second) == list(range(16, 32))


def test_keeps_old_features_that_another_node_uses(folder, tmp_path):
    used, unused, new = (bytes([number]) * 32 for number in range(3))
    with opened(folder) as store:
        offer(store, range(16), scope=used)
        offer(store, range(16), scope=unused)
    for path in (tmp_path / "shared").rglob("*"):
        os.utime(path, (1000, 1000))
    with opened(folder) as other:
        assert stored.checked(other, range(16), scope=used) == list(range(16))
    with opened(folder, budget_bytes=sum(objects(folder).values()) + 1000) as store:
        offer(store, range(16), scope=new)
    assert {name.partition("/")[0] for name in objects(folder)} == {used.hex(), new.hex()}


def test_objects_that_may_not_be_removed_cost_the_new_rows_and_nothing_else(folder):
    class Kept(Wrapped):
        def remove(self, name):
            raise AccessDenied(f"{name} may not be removed")

    with opened(folder) as store:
        offer(store, range(16))
    with opened(folder, budget_bytes=sum(objects(folder).values()) + 1000, idle_s=0.0, wrap=Kept) as store:
        offer(store, range(16, 32), scope=bytes(32))
    assert store.statistics().rejected == 16
    assert store.statistics().failed == 1
    assert len(objects(folder)) == 1


def test_tolerates_an_object_deleted_between_listing_and_first_read(folder):
    class Vanishing(Wrapped):
        def read(self, name, offset, length):
            self.store.remove(name)
            return self.store.read(name, offset, length)

    with opened(folder) as store:
        offer(store, range(16))
    with opened(folder, wrap=Vanishing) as store:
        assert stored.checked(store, range(16)) == []
        offer(store, range(16))
        assert store.statistics().failed == 0
    with opened(folder) as store:
        assert stored.checked(store, range(16)) == list(range(16))


class Wrapped:
    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)


class ClientDisconnected(Wrapped):
    def read(self, *_):
        raise StoreUnavailable("it is gone")

    def list(self):
        raise StoreUnavailable("it is gone")

    def write(self, *_):
        raise StoreUnavailable("it is gone")


class Full(Wrapped):
    def write(self, *_):
        raise OutOfSpace("it is full")


@pytest.mark.parametrize("trouble", [ClientDisconnected, Full])
def test_a_store_that_refuses_everything_does_no_harm(folder, trouble):
    with opened(folder, wrap=trouble) as store:
        for _ in range(3):
            offer(store, range(16))
            assert stored.checked(store, range(16)) == []
    counted = store.statistics()
    assert counted.kept == 0
    assert counted.rejected >= 16
    assert counted.failed == 1, "it is left alone for a while after that"


def test_requests_go_on_without_a_store_that_hangs(folder):
    answers = threading.Event()

    class Silent(Wrapped):
        def read(self, *place):
            assert answers.wait(LONG_S)
            return self.store.read(*place)

    with opened(folder) as store:
        offer(store, range(16))
    with opened(folder, wrap=Silent, wait_s=0.01) as store:
        assert stored.checked(store, range(16)) == []
        answers.set()
    with opened(folder) as store:  # the same without the silence
        assert stored.checked(store, range(16)) == list(range(16))


def test_drops_and_counts_late_responses(folder):
    answers, asked = threading.Event(), threading.Event()

    class SilentValues(Wrapped):
        def read(self, name, offset, length):
            if offset:  # the keys come first
                asked.set()
                assert answers.wait(LONG_S)
            return self.store.read(name, offset, length)

    with opened(folder) as store:
        offer(store, range(16))
    with opened(folder, wrap=SilentValues, wait_s=0.2) as store:
        found = []
        while not asked.is_set():
            found += stored.checked(store, range(16))
        assert found == []
        assert store.statistics().late == 16
        answers.set()


def test_over_s3_a_second_node_finds_what_the_first_one_wrote(s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("features")
    with opened("s3://features/some/where") as one:
        offer(one, range(64))
    assert one.statistics().objects == 1
    with opened("s3://features/some/where") as other:
        assert stored.checked(other, [*range(0, 64, 3), 64, 65]) == list(range(0, 64, 3))
        assert other.statistics().bytes_read < sum(objects("s3://features/some/where").values())


def test_over_s3_two_nodes_make_room_in_turn_and_neither_is_harmed(s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("bounded")
    url, scopes = "s3://bounded/here", [bytes([number]) * 32 for number in range(6)]
    with opened(url) as store:
        offer(store, range(32), scope=scopes[0])
    budget_bytes = 3 * sum(objects(url).values()) + 1000
    bounds = {"budget_bytes": budget_bytes, "idle_s": 0.0}
    with opened(url, **bounds) as reader:
        for turn, scope in enumerate(scopes[1:]):
            # Known to it before it goes.
            assert stored.checked(reader, range(32), scope=scopes[turn]) == list(range(32))
            with opened(url, **bounds) as one, opened(url, **bounds) as other:
                offer(one, range(32), scope=scope)
                offer(other, range(32, 40), scope=scope)
            assert sum(objects(url).values()) <= budget_bytes
        for scope in scopes[:-1]:
            assert stored.checked(reader, range(32), scope=scope) in ([], list(range(32)))
        assert reader.statistics().failed == one.statistics().failed == other.statistics().failed == 0
    with opened(url) as store:
        assert stored.checked(store, range(40), scope=scopes[-1]) == list(range(40))
        assert stored.checked(store, range(32), scope=scopes[0]) == []


def test_a_store_in_memory_serves_too():
    with opened("memory://shared") as one:
        offer(one, range(8))
    with opened("memory://shared") as other:
        assert stored.checked(other, range(8)) == list(range(8))


# Keys are digests, of which the first half tells rows apart.
KEYS = st.binary(max_size=16).map(lambda name: hashlib.sha256(name).digest()[:16])
ROWS = st.lists(KEYS, min_size=1, max_size=20, unique=True)


@given(ROWS, st.integers(4, 40), st.binary(min_size=32, max_size=32))
def test_an_object_key_names_its_contents(keys, value_bytes, scope):
    rows = [(key, bytes([number]) * value_bytes) for number, key in enumerate(keys)]
    packed, data = pack_rows(scope, rows)
    assert PackedObject.parse(packed.name, len(data)) == packed
    assert keys_of(packed, data[: packed.head_bytes]) == keys
    for place, (_, value) in enumerate(rows):
        assert data[packed.offset(place) :][:value_bytes] == value
    assert PackedObject.parse(packed.name, len(data) + 1) is None


@given(st.sets(st.integers(0, 50)))
def test_neighbours_are_read_together_and_nothing_else_is_read(places):
    found = runs_of(list(places))
    assert sorted(place for run in found for place in run) == sorted(places)
    assert all(item.stop < other.start for item, other in pairwise(found))


@given(st.lists(ROWS, min_size=1, max_size=8))
def test_the_first_object_that_was_seen_to_hold_a_row_is_where_it_lies(groups):
    known, first = ObjectIndex(1000), {}
    for keys in groups:
        packed, _ = pack_rows(stored.SCOPE, [(key, b"value") for key in keys])
        known.add(packed, keys)
        for place, key in enumerate(keys):
            first.setdefault(key, (packed, place))
    assert known.find(stored.SCOPE, list(first)) == list(first.values())
    assert len(known) == len(first)


def test_forgets_unused_scopes_in_favour_of_others():
    known, scopes = ObjectIndex(20), [bytes([number]) * 32 for number in range(4)]
    for scope in scopes:
        packed, _ = pack_rows(scope, [(stored.key(number), b"value") for number in range(8)])
        known.add(packed, stored.keys(range(8)))
    assert [known.find(scope, stored.keys([0]))[0] is None for scope in scopes] == [True, True, False, False]
    assert not known.fits(scopes[3], 13)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 12)), max_size=30))
def test_every_row_that_was_taken_comes_out_once_and_no_more_waits_than_allowed(adds):
    box, taken, given_out = WriteBuffer(max_bytes=300, bundle_bytes=100, linger_s=5.0), set(), []
    for now_s, (scope, first, count) in enumerate(adds):
        scope = bytes([scope])
        rows = [(stored.key(number), b"x" * 20) for number in range(first, first + count)]
        waiting = len(box)
        lost = box.add(scope, rows, now_s)
        taken.update((scope, key) for key, _ in rows[: len(rows) - lost])
        assert len(box) >= waiting
        assert 20 * len(box) <= 300
        while (some := box.take(now_s)) is not None:
            assert 20 * len(some[1]) <= 100
            given_out += [(some[0], key) for key, _ in some[1]]
    while (some := box.take(1000, all=True)) is not None:
        given_out += [(some[0], key) for key, _ in some[1]]
    assert set(given_out) == taken
    assert len(box) == 0


def test_a_limit_of_none_waits_without_end():
    box = WriteBuffer(max_bytes=100, bundle_bytes=50, linger_s=5.0)
    assert box.due_in_s(0.0) is None
    box.add(b"", [(b"key", b"value")], 3.0)
    assert box.due_in_s(4.0) == pytest.approx(4.0)
    assert box.take(7.9) is None
    assert box.take(8.0) == (b"", [(b"key", b"value")])
    assert box.due_in_s(9.0) is None
