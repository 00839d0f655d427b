"""Mixtures: shares to the sample in every beginning, each data set's samples all before any comes again."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.core.errors import SettingError
from frostline.ordering import Interleaving, MixtureOrder

whole_ratios = st.lists(st.integers(1, 60), min_size=1, max_size=7)
any_ratios = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)
member_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(ratios=whole_ratios)
def test_every_member_gets_its_share_within_one_after_any_number_of_turns(ratios):
    pattern = Interleaving(ratios)
    turns = pattern.length * 2 + 3
    members, _ = pattern.at(np.arange(turns))
    bound = 1 - Fraction(1, max(2, 2 * len(ratios) - 2))
    for member, ratio in enumerate(ratios):
        had = np.cumsum(members == member) * sum(ratios)
        ideal = np.arange(1, turns + 1) * ratio
        assert np.abs(had - ideal).max() <= bound * sum(ratios)


@settings(max_examples=12)  # patterns of 65,536 turns
@given(ratios=any_ratios)
def test_shares_are_the_ratios_or_next_to_them(ratios):
    turns = Interleaving(ratios)
    assert np.array(turns.counts) / turns.length == pytest.approx(
        np.array(ratios) / sum(ratios), abs=len(ratios) / 65_536
    )


@pytest.mark.parametrize(
    ("ratios", "counts"),
    [
        ([0.7, 0.3], (7, 3)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([1, 1, 2], (1, 1, 2)),
        ([5], (1,)),
        ([0.5, 0.25, 0.25], (2, 1, 1)),
    ],
)
def test_ratios_that_whole_numbers_have_are_exact(ratios, counts):
    assert Interleaving(ratios).counts == counts


@given(ratios=whole_ratios, data=st.data())
def test_turns_are_found_from_positions_and_positions_from_turns(ratios, data):
    pattern = Interleaving(ratios)
    positions = np.array(data.draw(st.lists(st.integers(0, 10**12), min_size=1, max_size=10)), np.int64)
    for position, member, turn in zip(
        positions.tolist(), *(item.tolist() for item in pattern.at(positions)), strict=True
    ):
        assert pattern.position_of(member, turn) == position
        assert pattern.turns_before(member, position) == turn
        assert pattern.turns_before(member, position + 1) == turn + 1


@given(sizes=member_sizes, data=st.data(), seed=st.integers(0, 2**63 - 1))
def test_no_sample_comes_again_before_all_of_its_data_set_came_over_all_epochs(sizes, data, seed):
    ratios = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    ends = data.draw(st.sampled_from(["first", "all", 1, 17, 100]))
    came = [[] for _ in sizes]
    for epoch in range(3):
        mixture = MixtureOrder.of(sizes, ratios, seed=seed, epoch=epoch, ends=ends)
        members, rows = mixture.members_at(np.arange(len(mixture)))
        for member, mine in enumerate(came):
            mine.extend(rows[members == member].tolist())
    for size, mine in zip(sizes, came, strict=True):
        for start in range(0, len(mine) - size + 1, size):
            assert sorted(mine[start : start + size]) == list(range(size))


@given(sizes=member_sizes, data=st.data())
def test_an_epoch_ends_when_the_first_data_set_or_the_last_was_seen_whole(sizes, data):
    ratios = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))

    def counts(ends):
        mixture = MixtureOrder.of(sizes, ratios, seed=0, epoch=0, ends=ends)
        members, _ = mixture.members_at(np.arange(len(mixture)))
        return np.bincount(members, minlength=len(sizes)), members

    found, _ = counts("first")
    assert np.all(found <= sizes)
    assert np.any(found == sizes)
    found, members = counts("all")
    assert np.all(found >= sizes)
    assert found[members[-1]] == sizes[members[-1]]


@given(sizes=member_sizes, epoch=st.integers(0, 2**63 - 1), data=st.data())
def test_any_position_is_found_alone(sizes, epoch, data):
    mixture = MixtureOrder.of(sizes, [1 + number for number in range(len(sizes))], seed=5, epoch=epoch, ends=200)
    positions = np.array(data.draw(st.lists(st.integers(0, 199), max_size=10)), np.int64)
    assert np.array_equal(mixture.at(positions), mixture.at(np.arange(200))[positions])


def test_rows_are_numbered_one_data_set_after_the_other():
    mixture = MixtureOrder.of([3, 2], [2, 1], seed=0, epoch=0, ends="all", shuffle=False)
    assert mixture.at(np.arange(len(mixture))).tolist() == [0, 3, 1, 2, 4]


def test_mixtures_never_change_between_versions():
    mixture = MixtureOrder.of([1000, 10], [0.9, 0.1], seed=3, epoch=2)
    assert mixture.at(np.arange(12)).tolist() == [405, 276, 750, 152, 977, 1001, 564, 208, 581, 319, 68, 303]


def test_mixtures_are_named_by_all_that_decides_what_comes():
    def name(sizes=(5, 6), ratios=(1, 2), **options):
        return MixtureOrder.of(sizes, ratios, seed=0, epoch=0, **options).name

    others = [name(), name((6, 5)), name(ratios=(2, 1)), name(ends="all"), name(ends=7), name(shuffle=False)]
    assert len(set(others)) == 6
    assert name() == name(ratios=(0.5, 1.0))


def test_mixtures_of_a_hundred_million_samples_take_constant_memory():
    mixture = MixtureOrder.of([90_000_000, 10_000_000, 1_000], [0.9, 0.0999, 0.0001], seed=1, epoch=5, ends="all")
    tracemalloc.start()
    try:
        starts = np.linspace(0, len(mixture) - 4096, 20, dtype=np.int64).tolist()
        rows = np.concatenate([mixture.at(np.arange(start, start + 4096)) for start in starts])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(mixture) >= 100_000_000
    assert len(np.unique(rows)) > 20 * 4095
    assert peak < 4_000_000


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"ratios": [1, 0]}, "above 0"),
        ({"ratios": [1, float("nan")]}, "above 0"),
        ({"ratios": []}, "members"),
        ({"ratios": [1]}, "as many ratios"),
        ({"sizes": [3, 0]}, "number 1 has none"),
        ({"ends": "never"}, "ends must be"),
        ({"ends": -1}, "size"),
        ({"seed": -1}, "seed"),
    ],
)
def test_refuses_an_invalid_mixture(terms, said):
    terms = {"sizes": [3, 4], "ratios": [1, 1], "seed": 0, "epoch": 0, **terms}
    with pytest.raises(SettingError, match=said):
        MixtureOrder.of(terms.pop("sizes"), terms.pop("ratios"), **terms)
