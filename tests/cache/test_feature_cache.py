"""The trainer's cache against a dictionary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.cache import FeatureCache, Scope
from frostline.core.errors import SettingError

SCOPE = Scope(
    data="s3://a", prefix="ab", cut=3, preprocess="cd", engine="e", shapes=((3,), ()), dtypes=("float32", "int16")
)
ROW_BYTES = 3 * 4 + 2
ids_lists = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**63 - 1)), max_size=30)


def tensors(ids):
    ids = np.asarray(ids, np.int64)
    return (ids[:, None] % 1000 + np.arange(3)).astype(np.float32), (ids % 1000).astype(np.int16)


def put(cache, ids):
    return cache.put(np.asarray(ids, np.int64), tensors(ids))


@given(steps=st.lists(st.tuples(ids_lists, ids_lists), max_size=12), rows=st.integers(0, 60))
def test_it_answers_like_a_dictionary_that_keeps_what_came_first(steps, rows):
    cache, model, budget = FeatureCache(SCOPE, rows * (ROW_BYTES + 64)), {}, rows * (ROW_BYTES + 64)
    for added, asked in steps:
        fresh = [key for key in dict.fromkeys(added) if key not in model][: rows - len(model)]
        assert put(cache, added) == len(fresh)
        model.update((item, [part[0] for part in tensors([item])]) for item in fresh)
        found, got = cache.get(np.array(asked, np.int64))
        assert (
            found.tolist()
            == [request in model for request in asked]
            == cache.contains(np.array(asked, np.int64)).tolist()
        )
        for column, values in enumerate(got):
            expected = [model[request][column] for request in asked if request in model]
            assert values.tolist() == [np.asarray(value).tolist() for value in expected]
        slots = cache.find(np.array(asked, np.int64))
        for column, table in enumerate(cache.tables):
            expected = [model[request][column] for request in asked if request in model]
            assert table[slots[slots >= 0]].tolist() == [np.asarray(value).tolist() for value in expected]
        assert len(cache) == len(model)
        assert cache.statistics().bytes <= budget


def test_a_single_id_can_be_asked_for():
    cache = FeatureCache(SCOPE, 10_000)
    put(cache, [5])
    assert 5 in cache
    assert 6 not in cache


def test_a_row_stays_where_it_was_found():
    cache = FeatureCache(SCOPE, 1 << 20)
    put(cache, [7])
    (slot,), (table, _) = cache.find(np.array([7])), cache.tables
    for start in range(100, 1000, 100):
        put(cache, range(start, start + 100))
    assert cache.find(np.array([7])) == [slot]
    assert table[slot].tolist() == tensors([7])[0][0].tolist()


def test_a_budget_beyond_the_machine_takes_memory_for_the_rows_alone():
    cache = FeatureCache(SCOPE, 1 << 45)
    assert put(cache, range(8)) == 8
    assert cache.get(np.arange(8))[1][0].tolist() == tensors(range(8))[0].tolist()
    assert cache.statistics().bytes < 8 * (ROW_BYTES + 64) + 1


def test_more_memory_than_can_be_named_is_a_sentence():
    cache = FeatureCache(SCOPE, 1 << 62)
    with pytest.raises(SettingError, match="lower cache_bytes"):
        put(cache, [1])


def test_a_full_cache_hits_its_share_of_every_later_epoch():
    cache = FeatureCache(SCOPE, 30 * (ROW_BYTES + 64))
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(100)
        found, _ = cache.get(order)
        assert found.sum() == (30 if epoch else 0)
        put(cache, order[~found])
    assert cache.statistics().hits == 60
    assert cache.statistics().rejected == 70 * 3


def test_gives_the_caller_copies_of_its_own():
    cache = FeatureCache(SCOPE, 10_000)
    put(cache, [1, 2])
    _, (first, _) = cache.get(np.array([1]))
    first[:] = -1
    assert cache.get(np.array([1]))[1][0].tolist() == tensors([1])[0].tolist()


def test_a_caller_may_reuse_arrays_that_it_put():
    cache = FeatureCache(SCOPE, 10_000)
    borrowed = tensors([1])
    cache.put(np.array([1]), borrowed)
    borrowed[0][:] = -1
    assert cache.get(np.array([1]))[1][0].tolist() == tensors([1])[0].tolist()


def test_a_budget_of_nothing_keeps_nothing():
    cache = FeatureCache(SCOPE, 0)
    assert put(cache, [1, 2, 3]) == 0
    assert cache.get(np.array([1, 2]))[0].tolist() == [False, False]
    assert cache.statistics().rejected == 3


def test_an_empty_cache_finds_nothing():
    found, got = FeatureCache(SCOPE, 10_000).get(np.array([1, 2]))
    assert found.tolist() == [False, False]
    assert got == ()


def test_rows_of_another_shape_are_refused():
    cache = FeatureCache(SCOPE, 10_000)
    put(cache, [1])
    with pytest.raises(ValueError, match="cannot keep rows like"):
        cache.put(np.array([2]), (np.zeros((1, 4), np.float32), np.zeros(1, np.int16)))


def test_keeps_no_further_rows_beyond_a_bound_that_comes_later():
    cache = FeatureCache(SCOPE, 100 * (ROW_BYTES + 64))
    rows = tuple(np.zeros((8, *shape), dtype) for shape, dtype in zip(SCOPE.shapes, SCOPE.dtypes, strict=True))
    assert cache.put(np.arange(8), rows) == 8
    cache.bound(10 * (ROW_BYTES + 64))
    assert cache.put(np.arange(8, 16), rows) == 2
    cache.bound(0)
    assert cache.put(np.arange(16, 24), rows) == 0
    assert len(cache) == 10
