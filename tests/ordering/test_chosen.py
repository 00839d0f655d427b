"""Rows chosen of a table, as a bitmap and as a list."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.ordering import Chosen, RowIndices


@given(st.integers(0, 3000), st.floats(0, 1), st.integers(0, 1 << 30), st.data())
def test_any_row_of_a_choice_is_found_by_its_position(size, share, seed, data):
    mask = np.random.default_rng(seed).random(size) < share
    rows, chosen = np.flatnonzero(mask), Chosen.where(mask)
    assert len(chosen) == len(rows)
    assert [row for piece in chosen.pieces() for row in piece.tolist()] == rows.tolist()
    if len(rows):
        positions = np.array(data.draw(st.lists(st.integers(-len(rows), len(rows) - 1))), np.int64)
        assert chosen.at(positions).tolist() == rows[positions].tolist()
    with pytest.raises(IndexError):
        chosen.at(np.array([len(rows)]))


@given(st.lists(st.integers(0, 2), max_size=1500), st.integers(0, 2))
def test_a_choice_can_be_made_in_four_ways(parts, number):
    parts = np.array(parts, np.uint8)
    rows = np.flatnonzero(parts == number)
    ways = [
        Chosen.where(parts == number),
        Chosen.equal(parts, number),
        Chosen.of(iter([rows[1:], rows[:1]]), len(parts)),
        Chosen(np.packbits(parts == number, bitorder="little"), len(parts)),
    ]
    for chosen in ways:
        assert chosen.at(np.arange(len(rows))).tolist() == rows.tolist()
        assert chosen.fingerprint == ways[0].fingerprint


def test_choices_that_differ_have_other_fingerprints():
    masks = [np.array([True, False]), np.array([False, True]), np.array([True, False, False])]
    assert len({Chosen.where(mask).fingerprint for mask in masks}) == 3
    assert RowIndices(np.array([1, 0])).fingerprint != RowIndices(np.array([0, 1])).fingerprint


def test_a_list_of_rows_keeps_its_order():
    places = RowIndices(np.array([5, 1, 1, 3]))
    assert places.at(np.array([3, 0])).tolist() == [3, 5]
    assert np.concatenate(list(places.pieces())).tolist() == [5, 1, 1, 3]


def test_bits_must_be_as_many_as_the_rows():
    with pytest.raises(ValueError, match="9 rows need 2 bytes"):
        Chosen(np.zeros(1, np.uint8), 9)
