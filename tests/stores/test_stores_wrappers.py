"""Stores around stores: those that ask again, and those that join neighbouring reads."""

import pickle
import uuid
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import ObjectNotFound, StoreThrottled, StoreUnavailable
from frostline.core.request_timing import TokenBucket
from frostline.stores.cloud import cloud_store
from frostline.stores.open import open_store
from frostline.stores.protocols import ByteRange
from frostline.stores.reads import BatchedReads
from frostline.stores.retry import Retrying, Wrapped
from frostline.stores.urls import parse_url
from frostline.testing.stores import (
    ListingTests,
    ManyReadingTests,
    ReadingTests,
    SharingTests,
    Staged,
    VersionTests,
    WritingTests,
)
from support.bucket_peer import bucket_peer
from support.throttle import Throttle


def memory():
    return open_store(f"memory://{uuid.uuid4()}")


class Wrappers(ReadingTests, VersionTests, ListingTests, WritingTests, SharingTests):
    __test__ = False

    @pytest.fixture
    def staged(self):
        store = self.wrapped(memory())
        return Staged(store=store, put=store.write)


class TestPatient(Wrappers):
    __test__ = True

    def wrapped(self, store):
        return Retrying(store)


class TestJoined(ManyReadingTests):
    __test__ = True

    @pytest.fixture(params=[0, 1 << 20])
    def staged(self, request):
        store = memory()
        return Staged(store=BatchedReads(store, max_gap_bytes=request.param), put=store.write)


class Time:
    """Time that passes when somebody waits."""

    def passing(self):
        """The time, of which a little passes whenever a server looks."""
        self.now_s += 1e-3
        return self.now_s

    def __init__(self):
        self.now_s = 0.0

    def now(self):
        return self.now_s

    def wait(self, seconds):
        self.now_s += seconds


class ProgressMade(Wrapped):
    """Counts what it is asked."""

    def __init__(self, store):
        super().__init__(store)
        self.reads = []

    def read_version(self, object, offset, length):
        self.reads.append((object, offset, length))
        return self._store.read_version(object, offset, length)


class Throttling(Wrapped):
    """Refuses what comes faster than a rate."""

    def __init__(self, store, per_s, time, retry_after_s=0.0):
        super().__init__(store)
        self._time = time
        self._bucket = TokenBucket.create(per_s, maximum=per_s / 10, now_s=0.0)
        self._retry_after_s = retry_after_s
        self.refused = self.taken = 0

    def _call(self, call):
        self._time.now_s += 1e-3
        after, must_wait = self._bucket.take(self._time.now_s)
        if must_wait:
            self.refused += 1
            raise StoreThrottled("slow down", retry_after_s=self._retry_after_s)
        self._bucket = after
        self.taken += 1
        return call()


def test_a_retrying_store_settles_just_under_the_allowed_rate_and_loses_nothing():
    time = Time()
    throttling = Throttling(memory(), 50, time)
    throttling.write("x", b"x")
    store = Retrying(throttling, now=time.now, wait=time.wait)
    for _ in range(2000):
        assert bytes(store.read("x", 0, 1)) == b"x"
    learned_s, refused = time.now_s, throttling.refused
    for _ in range(2000):
        store.read("x", 0, 1)
    assert 2000 / (time.now_s - learned_s) >= 0.85 * 50
    assert throttling.refused - refused <= 0.03 * 2000
    assert 0.7 * 50 <= store.statistics().rate_per_s <= 1.3 * 50


def test_a_retrying_store_waits_as_long_as_the_server_says():
    time = Time()
    throttling = Throttling(memory(), 10, time, retry_after_s=7.0)
    throttling.write("x", b"x")
    Retrying(throttling, now=time.now, wait=time.wait).read("x", 0, 1)
    assert throttling.refused == 1
    assert time.now_s >= 7.0


class Away(Wrapped):
    """Gives no answer from one time until another."""

    def __init__(self, store, time, since_s, until_s, error=StoreUnavailable):
        super().__init__(store)
        self._time, self._since_s, self._until_s = time, since_s, until_s
        self._error, self.failures = error, 0

    def _call(self, call):
        self._time.now_s += 1e-3
        if self._since_s <= self._time.now_s < self._until_s:
            self.failures += 1
            raise self._error("no answer")
        return call()


def test_gives_up_once_the_retry_time_is_over():
    time = Time()
    refusing = Away(memory(), time, 0, 1e9, error=StoreThrottled)
    with pytest.raises(StoreThrottled, match="no answer"):
        Retrying(refusing, retry_for_s=5, now=time.now, wait=time.wait).read("x", 0, 1)
    assert 5 <= time.now_s <= 60


def test_a_store_that_never_answered_is_tried_three_times():
    time = Time()
    away = Away(memory(), time, 0, 1e9)
    with pytest.raises(StoreUnavailable, match="no answer"):
        Retrying(away, now=time.now, wait=time.wait).read("x", 0, 1)
    assert away.failures == 3


def test_a_store_that_went_away_is_waited_for():
    time = Time()
    away = Away(memory(), time, 10, 40)
    store = Retrying(away, now=time.now, wait=time.wait)
    store.write("x", b"x")
    time.wait(10)
    assert bytes(store.read("x", 0, 1)) == b"x"
    assert 40 <= time.now_s <= 46
    assert away.failures <= 15


def test_a_store_is_asked_no_more_often_than_the_user_says():
    time = Time()
    store = pickle.loads(pickle.dumps(Retrying(memory(), requests_per_s=10)))
    assert store.__reduce__()[0].keywords["requests_per_s"] == 10
    store = Retrying(memory(), requests_per_s=10, now=time.now, wait=time.wait)
    for _ in range(21):
        store.write("x", b"x")
    assert time.now_s == pytest.approx(2.0)


def test_the_wait_for_a_store_that_went_away_ends():
    time = Time()
    store = Retrying(Away(memory(), time, 10, 1e9), retry_for_s=20, now=time.now, wait=time.wait)
    with pytest.raises(ObjectNotFound):
        store.read("x", 0, 1)  # which is an answer too
    time.wait(10)
    with pytest.raises(StoreUnavailable, match="no answer"):
        store.read("x", 0, 1)
    assert 30 <= time.now_s <= 36


def test_a_pickled_retrying_store_forgets_its_learned_rate(tmp_path):
    store = pickle.loads(pickle.dumps(Retrying(open_store(str(tmp_path)))))
    store.write("x", b"x")
    assert not store.statistics().is_bounded


def test_a_server_that_throttles_is_asked_again_until_it_answers(monkeypatch):
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    with bucket_peer() as peer:
        peer.objects["x"] = b"0123456789"
        answers = iter([(429, {"Retry-After": "1"}, b""), (503, {}, b"<Error><Code>SlowDown</Code></Error>")])
        peer.answers = lambda: next(answers, None)
        store = open_store(f"gs://photos?endpoint={peer.url}")
        assert bytes(store.read("x", 3, 4)) == b"3456"
        assert len(peer.seen) == 3


REFUSALS = [(503, b"<Error><Code>SlowDown</Code></Error>"), (503, b"busy"), (429, b"")]


@pytest.mark.parametrize("answer", REFUSALS, ids=["SlowDown", "503", "429"])
def test_a_server_that_refuses_is_asked_just_under_the_rate_that_it_allows(monkeypatch, answer):
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    time, allowed = Time(), 50
    with bucket_peer() as peer:
        peer.objects["x"] = b"0123456789"
        throttle = Throttle(allowed, time.passing, answer)
        peer.answers = throttle
        url = f"gs://photos?endpoint={peer.url}"
        store = cloud_store(url, parse_url(url), now=time.now, wait=time.wait)
        for _ in range(400):
            assert bytes(store.read("x", 3, 4)) == b"3456"
        since_s, refused = time.now_s, throttle.refused
        for _ in range(800):
            assert bytes(store.read("x", 3, 4)) == b"3456"
    assert since_s <= 400 / allowed + 10, "it learned the limit in some seconds"
    assert 0.8 * allowed <= 800 / (time.now_s - since_s) <= allowed
    assert 1 <= throttle.refused - refused <= 0.03 * 800
    assert throttle.taken == 1200


def test_many_threads_lose_nothing_to_a_server_that_refuses(monkeypatch):
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    with bucket_peer() as peer, ThreadPoolExecutor(32) as threads:
        peer.objects |= {str(number): str(number).encode() for number in range(600)}
        throttle = Throttle(400, monotonic)
        peer.answers = throttle
        store = open_store(f"gs://photos?endpoint={peer.url}")
        found = list(threads.map(lambda name: bytes(store.read(name, 0, len(name))), peer.objects))
    assert found == list(peer.objects.values())
    assert throttle.taken == len(found)


places = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 120), st.integers(0, 40)), max_size=30)


@given(places, st.integers(0, 50), st.integers(1, 200), st.integers(1, 4))
def test_joined_reads_give_what_single_ones_give(asked, gap, max_bytes, maximum):
    store = memory()
    for name in "ab":
        store.write(name, bytes(range(ord(name), ord(name) + 100)))
    counted = ProgressMade(store)
    joined = BatchedReads(counted, max_gap_bytes=gap, max_bytes=max_bytes)
    found = dict(joined.read_many([ByteRange(*request) for request in asked], maximum=maximum))
    assert sorted(found) == list(range(len(asked)))
    for row, request in enumerate(asked):
        try:
            wanted = bytes(store.read(*request))
        except ObjectNotFound:
            assert isinstance(found[row], ObjectNotFound)
        else:
            assert bytes(found[row][0]) == wanted


def test_neighbours_are_read_by_one_request():
    store = ProgressMade(memory())
    store.write("x", bytes(10_000))
    joined = BatchedReads(store, max_gap_bytes=10, max_bytes=5000)
    list(joined.read_many([ByteRange("x", start, 95) for start in range(0, 10_000, 100)]))
    assert store.reads == [("x", 0, 4995), ("x", 5000, 4995)]
