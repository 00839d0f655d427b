"""Batches of an exact size from rows that come in pieces."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.prefetch import BatchAssembler, Gathered, RowRange


def rows(ids):
    ids = np.asarray(ids, np.int64)
    return ids, ids[:, None] * np.ones(3, np.float32)


def all_batches(assembler, pieces):
    batches = [batch for piece in pieces for batch in assembler.add(*rows(piece))]
    last = assembler.finish()
    return batches if last is None else [*batches, last]


@given(pieces=st.lists(st.lists(st.integers(0, 1000), max_size=20), max_size=10), size=st.integers(1, 8))
def test_every_row_comes_once_in_order_in_batches_of_the_size(pieces, size):
    batches = all_batches(BatchAssembler(batch_size=size, drop_last=False), pieces)
    flat = [item for piece in pieces for item in piece]
    assert [item for ids, _ in batches for item in ids.tolist()] == flat
    assert all(len(ids) == size for ids, _ in batches[:-1])
    assert all((values == ids[:, None]).all() for ids, values in batches)


@given(pieces=st.lists(st.lists(st.integers(0, 1000), max_size=20), max_size=10), size=st.integers(1, 8))
def test_a_last_batch_with_fewer_rows_is_dropped_on_request(pieces, size):
    batches = all_batches(BatchAssembler(batch_size=size, drop_last=True), pieces)
    assert len(batches) == sum(map(len, pieces)) // size
    assert all(len(ids) == size for ids, _ in batches)


@given(filled=st.integers(1, 7), minimum=st.integers(0, 8))
def test_a_batch_that_lacks_rows_is_filled_up_with_its_own_in_turn(filled, minimum):
    assembler = BatchAssembler(batch_size=8, drop_last=False)
    assert not list(assembler.add(*rows(range(filled))))
    ids, values = assembler.finish(minimum)
    assert ids.tolist() == [number % filled for number in range(max(filled, minimum))]
    assert (values == ids[:, None]).all()
    assert assembler.finish(minimum) is None


@given(sources=st.lists(st.integers(0, 2), max_size=30), size=st.integers(1, 8))
def test_rows_of_several_sources_are_merged_in_order(sources, size):
    assembler = BatchAssembler(batch_size=size, drop_last=False)
    parts = [
        RowRange(places=(places := np.flatnonzero(np.array(sources, int) == source)), columns=rows(places))
        for source in range(3)
    ]
    batches = [*assembler.merge(*parts), *filter(None, [assembler.finish()])]
    assert [item for ids, _ in batches for item in ids.tolist()] == list(range(len(sources)))
    assert all((values == ids[:, None]).all() for ids, values in batches)


@given(
    sources=st.lists(st.integers(0, 2), max_size=40),
    size=st.integers(1, 8),
    width=st.sampled_from([3, 5000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_of_a_table_are_gathered_in_order(sources, size, width, seed):
    ids = np.arange(len(sources))
    order = np.random.default_rng(seed).permutation(len(sources))
    table = np.empty((len(sources), width), np.float32)
    table[order] = ids[:, None]
    parts = [
        RowRange(
            places=(places := np.flatnonzero(np.array(sources, int) == source)),
            columns=(ids[places], Gathered(table=table, rows=order[places])),
            is_kept=source == 0,
        )
        for source in range(3)
    ]
    assembler = BatchAssembler(batch_size=size, drop_last=False)
    found = [(batch, assembler.kept) for batch in assembler.merge(*parts)]
    last = assembler.finish()
    found += [] if last is None else [(last, assembler.kept)]
    assert [item for (ids, _), _ in found for item in ids.tolist()] == ids.tolist()
    for (ids, values), kept in found:
        assert (values == ids[:, None]).all()
        assert kept == sum(sources[item] == 0 for item in ids.tolist())


def test_fills_batches_one_by_one_from_a_table():
    assembler = BatchAssembler(batch_size=4, drop_last=False)
    rows = np.random.default_rng(0).permutation(10)
    table = np.arange(10)[:, None] * np.ones(3, np.int16)
    batches = [*assembler.add(rows, Gathered(table=table, rows=rows)), assembler.finish()]
    assert [len(ids) for ids, _ in batches] == [4, 4, 2]
    assert all((values == ids[:, None]).all() for ids, values in batches)


@given(held=st.integers(0, 4), count=st.integers(1, 12))
def test_batches_that_are_held_stay_as_they_are_whatever_comes_after_them(held, count):
    assembler = BatchAssembler(batch_size=16, drop_last=False)
    kept = deque(maxlen=held)
    for number in range(count):
        kept.extend(assembler.add(np.full(16, number), np.full((16, 2048), number, np.float32)))
        assert all((values == ids[0]).all() for ids, values in kept)


def test_a_batch_that_was_given_away_is_never_written_again():
    assembler = BatchAssembler(batch_size=2, drop_last=False)
    (first,) = assembler.add(*rows([1, 2]))
    (_,) = assembler.add(*rows([3, 4]))
    assert first[0].tolist() == [1, 2]


def test_rows_are_copied_when_they_come():
    assembler = BatchAssembler(batch_size=2, drop_last=False)
    borrowed = np.array([5])
    assert list(assembler.add(borrowed)) == []
    borrowed[:] = 0
    assert [item.tolist() for item in assembler.finish()] == [[5]]


def test_rows_of_another_shape_are_refused():
    assembler = BatchAssembler(batch_size=4, drop_last=False)
    list(assembler.add(np.zeros((1, 3), np.float32)))
    with pytest.raises(ValueError, match="cannot take rows like"):
        list(assembler.add(np.zeros((1, 4), np.float32)))
