"""The parts of a split: shares of classes, of groups and of everything; the same for the same seed, and none lost."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import SettingError
from frostline.ordering import count_labels, places_by_label, split_at_random, split_by_class, split_by_group
from frostline.ordering.orders import draw_of_stretches, permute, permute_each, round_keys, width_of

seeds = st.integers(0, (1 << 63) - 1)
label_lists = st.lists(st.integers(-1, 5), max_size=200).map(lambda item: np.array(item, np.int64))
share_lists = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(lambda ones: [item / sum(ones) for item in ones])


def labels_of(labels, step=7):
    return count_labels(lambda: (labels[start : start + step] for start in range(0, len(labels), step)))


def split(labels, shares, seed=0, step=7):
    return split_by_class(labels_of(np.asarray(labels, np.int64), step), shares, seed)


@given(label_lists)
def test_labels_are_counted_whatever_pieces_they_come_in(labels):
    counted = labels_of(labels)
    assert len(counted) == len(labels)
    for label in range(-1, 6):
        place = label - counted.first
        found = counted.counts[place] if 0 <= place < len(counted.counts) else 0
        assert found == np.sum(labels == label)
    assert counted.is_ascending == bool(np.all(labels[:-1] <= labels[1:]))


@given(label_lists)
def test_places_by_label_are_those_of_a_stable_sort(labels):
    found = np.concatenate([np.zeros(0, np.int64), *places_by_label(labels_of(labels))])
    assert found[np.argsort(labels, kind="stable")].tolist() == list(range(len(labels)))


@given(label_lists, share_lists, seeds)
def test_kept_positions_give_the_same_parts_without_the_labels(labels, shares, seed):
    counted = labels_of(labels)
    kept = [item.astype(np.uint32) for item in places_by_label(counted)]
    known = replace(counted, pieces=lambda: pytest.fail("read the labels"), places=lambda: iter(kept))
    assert np.array_equal(split_by_class(known, shares, seed), split_by_class(counted, shares, seed))


@given(label_lists, st.floats(0, 1, exclude_max=True), seeds)
def test_a_share_of_every_class_is_held_out(labels, share, seed):
    parts = split(labels, (1 - share, share), seed)
    for label in np.unique(labels):
        total, held = np.sum(labels == label), np.sum(parts[labels == label])
        assert held < total
        assert abs(held - total * share) <= 1
        assert held >= 1 or share == 0 or total == 1


@given(label_lists, share_lists, seeds)
def test_several_parts_each_have_their_share_of_every_class(labels, shares, seed):
    parts = split(labels, shares, seed)
    assert len(parts) == len(labels)
    for label in np.unique(labels):
        counts = np.bincount(parts[labels == label], minlength=len(shares))
        assert counts[0] >= 1
        assert np.all(np.abs(counts - counts.sum() * np.array(shares)) <= len(shares))


@given(label_lists, seeds, st.randoms())
def test_metrics_of_each_class_do_not_depend_on_the_order_of_classes(labels, seed, source):
    # Each class is drawn from by its own label and size, wherever its rows stand.
    parts = split(labels, (0.6, 0.3, 0.1), seed)
    order = np.argsort(labels, kind="stable")
    assert np.array_equal(split(labels[order], (0.6, 0.3, 0.1), seed), parts[order])


def test_a_split_never_changes_between_versions():
    labels = np.repeat(np.arange(3), 8)
    assert np.flatnonzero(split(labels, (0.75, 0.25), 1)).tolist() == [5, 7, 12, 15, 18, 22]
    assert np.flatnonzero(split(np.zeros(70_000), (0.9999, 0.0001), 1, step=1 << 16)).tolist() == [
        1730,
        17502,
        26357,
        30747,
        41599,
        57552,
        66340,
    ]


def test_large_classes_are_divided_as_exactly_as_small_ones():
    labels = np.tile([0, 1, 0, 2], 50_000)
    for shares in ((0.8, 0.2), (0.5, 0.3, 0.2)):
        parts = split(labels, shares, seed=3, step=1 << 15)
        for label, total in ((0, 100_000), (1, 50_000), (2, 50_000)):
            assert np.bincount(parts[labels == label]).tolist() == [round(total * share) for share in shares]
    other = split(labels, (0.5, 0.3, 0.2), seed=4, step=1 << 15)
    assert not np.array_equal(parts, other)


@given(st.integers(1, 400), st.data(), seeds)
def test_draws_one_sample_of_each_stretch(size, data, key):
    count = data.draw(st.integers(1, size))
    drawn = draw_of_stretches(size, count, key)
    assert len(drawn) == count
    for number, place in enumerate(drawn.tolist()):
        assert number * size // count <= place < (number + 1) * size // count


@given(st.lists(st.integers(17, 64), min_size=1, max_size=5), seeds)
def test_several_permutations_at_once_equal_single_ones(sizes, seed):
    assert len({width_of(size) for size in sizes}) == 1
    keys = [round_keys(seed, place) for place in range(len(sizes))]
    which = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.concatenate([np.arange(size) for size in sizes])
    found = permute_each(positions, which, np.array(sizes), np.array(keys, np.uint64))
    alone = [permute(0, size, size, key) for size, key in zip(sizes, keys, strict=True)]
    assert np.array_equal(found, np.concatenate(alone))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=200), share_lists, seeds)
def test_a_group_is_never_divided_and_parts_are_near_their_shares(groups, shares, seed):
    _, codes, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    parts = split_by_group(codes, shares, seed)
    for group in np.unique(codes):
        assert len(np.unique(parts[codes == group])) == 1
    counts = np.bincount(parts, minlength=len(shares))
    assert np.all(np.abs(counts - len(codes) * np.array(shares)) <= sizes.max() + 1)


@given(st.integers(0, 300), share_lists, seeds)
def test_a_random_split_has_its_shares_of_all_rows(size, shares, seed):
    parts = split_at_random(size, shares, seed)
    counts = np.bincount(parts, minlength=len(shares))
    assert counts.sum() == size
    assert np.all(np.abs(counts - size * np.array(shares)) <= len(shares))


def test_a_split_depends_on_the_seed_alone():
    labels = np.repeat(np.arange(3), 50)
    one, same, other = (split(labels, (0.8, 0.2), seed).tolist() for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("shares", [(), (0.5,), (-0.1, 1.1), (0.6, 0.6), (0.0, 1.0), (0.5, 0.4)])
def test_shares_that_make_no_whole_are_refused(shares):
    with pytest.raises(SettingError, match="split"):
        split([0, 0, 1], shares)
