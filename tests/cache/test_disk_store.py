"""The cache on disk: what it finds, how much it takes, and whose features are evicted."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frostline.cache import FeatureStore, RowLayout
from frostline.core.errors import SettingError
from support.stored import LAYOUT, SCOPE, checked, keys, put, tensors, writing

SMALL = 16 << 20
OTHER = hashlib.sha256(b"another scope").digest()
LARGE = RowLayout(shapes=((256, 100),), dtypes=("float32",))  # 102 kB: several pages a row

numbers = st.lists(st.integers(0, 30), unique=True)


def folder_bytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir() if not path.name.endswith("-shm"))


def test_rows_come_back_to_the_last_bit_and_others_are_misses(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        assert put(store, range(40)) == 40
        assert checked(store, range(30, 50)) == list(range(30, 40))
        assert store.contains(SCOPE, keys(range(39, 41))).tolist() == [True, False]
        statistics = store.statistics()
    assert (statistics.hits, statistics.misses, statistics.kept) == (10, 10, 40)
    assert statistics.resets == statistics.failed == statistics.damaged == 0


def test_rows_outlive_the_store_that_kept_them(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        put(store, range(40))
    with FeatureStore(tmp_path, SMALL) as store:
        assert checked(store, range(40)) == list(range(40))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=3),
    dtype=st.sampled_from(["float32", "float16", "int64", "bool", "uint8"]),
    steps=st.lists(st.tuples(numbers, numbers), max_size=6),
)
def test_it_answers_like_a_dictionary_whatever_the_rows_look_like(tmp_path, shapes, dtype, steps):
    layout = RowLayout(shapes=tuple(shapes), dtypes=(dtype,) * len(shapes))
    scope = hashlib.sha256(repr((layout, steps)).encode()).digest()
    kept = set()
    with FeatureStore(tmp_path, SMALL) as store:
        for added, asked in steps:
            put(store, added, scope, layout)
            kept |= set(added)
            assert checked(store, asked, scope, layout) == [number for number in asked if number in kept]


def test_finds_no_row_of_another_scope(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        put(store, range(5))
        out = LAYOUT.empty(5)
        assert not store.get_into(OTHER, keys(range(5)), LAYOUT, out).any()


def test_rows_without_a_name_are_neither_kept_nor_found(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        assert store.put(SCOPE, [None, *keys([1])], tensors([0, 1])) == 1
        assert store.get_into(SCOPE, [*keys([1]), None], LAYOUT, LAYOUT.empty(2)).tolist() == [True, False]


def test_putting_cached_rows_again_keeps_them(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        assert put(store, range(10)) == 10
        assert put(store, range(5, 15)) == 5
        assert checked(store, range(15)) == list(range(15))


def test_a_full_cache_keeps_what_came_first_and_stays_within_its_bytes(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        for first in range(0, 320, 16):  # 33 MB of 102 kB each
            put(store, range(first, first + 16), layout=LARGE)
            assert folder_bytes(tmp_path) <= SMALL
        found = checked(store, range(320), layout=LARGE)
        statistics = store.statistics()
    assert found[:100] == list(range(100))
    assert 0.6 * SMALL < len(found) * LARGE.nbytes < SMALL
    assert statistics.rejected == 320 - len(found) > 0
    assert statistics.bytes <= statistics.budget_bytes
    assert statistics.failed == statistics.resets == 0


def test_evicts_unused_features_and_keeps_those_in_use(tmp_path):
    now_s = [1000.0]
    with FeatureStore(tmp_path, SMALL, idle_s=60.0, clock=lambda: now_s[0]) as store:
        put(store, range(160), layout=LARGE)
        held = len(checked(store, range(160), layout=LARGE))
        now_s[0] += 59
        assert put(store, range(20), OTHER, LARGE) < 20  # a little space may be left
        assert len(checked(store, range(160), layout=LARGE)) == held  # asked for now: stays another minute
        now_s[0] += 59
        before = len(checked(store, range(20), OTHER, LARGE))
        now_s[0] += 2
        assert put(store, range(20), OTHER, LARGE) == 20 - before
        assert checked(store, range(20), OTHER, LARGE) == list(range(20))
        assert store.statistics().cleared > 0
        assert folder_bytes(tmp_path) <= SMALL


def test_features_are_released_though_the_clock_is_set_back(tmp_path):
    now_s = [10_000.0]
    with FeatureStore(tmp_path, SMALL, idle_s=60.0, clock=lambda: now_s[0]) as store:
        put(store, range(160), layout=LARGE)
        now_s[0] -= 3600
        checked(store, range(160), layout=LARGE)
        now_s[0] += 59
        assert put(store, range(20), OTHER, LARGE) < 20
        now_s[0] += 2
        put(store, range(20), OTHER, LARGE)
        assert checked(store, range(20), OTHER, LARGE) == list(range(20))


def test_several_threads_read_and_write_at_once(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store, ThreadPoolExecutor(12) as threads:

        def one(first):
            put(store, range(first, first + 16))
            return checked(store, range(first, first + 16))

        starts = [16 * (number % 20) for number in range(60)]
        assert all(
            found == list(range(first, first + 16))
            for first, found in zip(starts, threads.map(one, starts), strict=True)
        )
        assert store.statistics().kept == 320


def test_several_processes_share_a_folder(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        writers = [writing(tmp_path, SMALL, first, first + 320) for first in (0, 160, 320)]
        errors = [writer.communicate()[1] for writer in writers]
        assert errors == [""] * 3
        assert checked(store, range(640)) == list(range(640))
        put(store, range(640))
        assert store.statistics().resets == store.statistics().damaged == 0


def test_a_smaller_budget_than_before_is_held_to(tmp_path):
    with FeatureStore(tmp_path, 4 * SMALL) as store:
        put(store, range(320), layout=LARGE)
    assert folder_bytes(tmp_path) > SMALL
    with FeatureStore(tmp_path, SMALL) as store:
        put(store, range(320), layout=LARGE)
        assert folder_bytes(tmp_path) <= SMALL


def test_a_row_larger_than_a_batch_may_be_is_turned_away(tmp_path):
    huge = RowLayout(shapes=((1 << 21,),), dtypes=("float32",))
    with FeatureStore(tmp_path, SMALL) as store:
        assert store.put(SCOPE, keys([1]), huge.empty(1)) == 0
        assert store.statistics().rejected == 1


@pytest.mark.parametrize("budget_bytes", [0, SMALL - 1])
def test_a_budget_too_small_is_a_sentence(tmp_path, budget_bytes):
    with pytest.raises(SettingError, match="at least"):
        FeatureStore(tmp_path, budget_bytes)


def test_a_folder_that_cannot_be_used_is_a_sentence(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SettingError, match="cannot be used"):
        FeatureStore(tmp_path / "file", SMALL)


def test_accepts_tensors_that_are_not_contiguous(tmp_path):
    wide = np.arange(4 * 6, dtype=np.float32).reshape(4, 6)
    with FeatureStore(tmp_path, SMALL) as store:
        assert store.put(SCOPE, keys(range(2)), (wide[::2, ::2],)) == 2
        layout = RowLayout(shapes=((3,),), dtypes=("float32",))
        out = layout.empty(2)
        assert store.get_into(SCOPE, keys(range(2)), layout, out).all()
    assert np.array_equal(out[0], wide[::2, ::2])
