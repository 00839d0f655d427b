"""Iterators for frameworks that take batches ahead, and augmentation in feature space.

Batches for a framework that takes them ahead of its loop: what is left, overtaken, and only looked at.

Augmentation in feature space: seeded, alike in every batch where it can be, and of the strength that was asked.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import View
from frostline.core.errors import OrderMismatch, SettingError
from frostline.loaders import Batch, FeatureMixup, FeatureNoise
from frostline.loaders.adapters.base import FrameworkIterator
from frostline.testing.small_jobs import BATCH, small_job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    with small_job(tmp_path_factory.mktemp("images")) as job:
        yield job


def ids(batches):
    return [found.tolist() for (found,) in batches]


def test_ends_an_abandoned_pass_silently_and_reports_an_overtaken_one(job):
    feed = FrameworkIterator(job.arrays(BATCH, shuffle=True), ("ids",))
    first = feed.batches()
    next(first)
    feed.close()
    assert list(first) == []
    second = feed.batches()
    next(second)
    third = feed.batches()
    whole = ids(third)
    assert sum(map(len, whole)) == len(job.data)
    with pytest.raises(OrderMismatch, match="another pass"):
        next(second)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_pass_that_was_only_peeked_at_begins_again(job, taken):
    epochs = job.arrays(BATCH, shuffle=True).epochs(range(2))
    expected = [[found.ids.tolist() for found in epoch] for epoch in epochs]
    feed = FrameworkIterator(job.arrays(BATCH, shuffle=True).epochs(range(2)), ("ids",), ahead=2)
    looking = feed.batches()
    assert next(looking)[0].tolist() == expected[0][0]
    feed.count_taken(taken)
    feed.begin_again()
    assert ids(feed.batches()) == expected[taken]


def test_a_restarted_pass_begins_where_it_was_set(job):
    state = job.arrays(BATCH, shuffle=True).state_after(2)
    whole = [found.ids.tolist() for found in job.arrays(BATCH, shuffle=True)]
    feed = FrameworkIterator(job.arrays(BATCH, shuffle=True), ("ids",), ahead=1)
    feed.load_state_dict(state)
    next(feed.batches())
    feed.begin_again()
    assert feed.state_dict() == state
    assert ids(feed.batches()) == whole[2:]


def test_batches_held_from_an_overtaken_pass_do_not_count(job):
    feed = FrameworkIterator(job.arrays(BATCH, shuffle=True), ("ids",), ahead=2)
    older = feed.batches()
    next(older)
    overtaken = feed.under_way
    newer = feed.batches()
    next(newer)
    feed.count_taken(own=overtaken)
    assert feed.state_dict()["position"] == 0
    feed.count_taken(own=feed.under_way)
    assert feed.state_dict()["position"] == BATCH


VIEW = View(seed=3, epoch=1)


def batch(rows=16, shape=(4, 5, 5)):
    generator = torch.Generator().manual_seed(0)
    return Batch(
        features=torch.randn(rows, *shape, generator=generator) * 3,
        labels=torch.arange(rows) % 3,
        ids=torch.arange(rows) * 1_000_000_007 + (1 << 60),
    )


def rows_of(whole, rows):
    return Batch(features=whole.features[rows], labels=whole.labels[rows], ids=whole.ids[rows])


@given(rows=st.lists(st.integers(0, 15), min_size=1, unique=True))
def test_the_noise_of_a_sample_is_the_same_in_every_batch(rows):
    noise = FeatureNoise(share=0.2)
    assert torch.equal(noise(rows_of(batch(), rows), VIEW).features, noise(batch(), VIEW).features[rows])


@pytest.mark.parametrize("augment", [FeatureNoise(), FeatureMixup()], ids=["noise", "mixup"])
def test_the_same_epoch_is_augmented_alike_and_others_are_not(augment):
    features = augment(batch(), VIEW).features
    assert torch.equal(features, augment(batch(), VIEW).features)
    assert not torch.equal(features, augment(batch(), View(seed=3, epoch=2)).features)
    assert not torch.equal(features, augment(batch(), View(seed=4, epoch=1)).features)


def test_the_noise_is_as_strong_as_its_share_says():
    whole = batch(shape=(64, 64))
    error = FeatureNoise(share=0.1)(whole, VIEW).features - whole.features
    share = error.square().mean((1, 2)).sqrt() / whole.features.square().mean((1, 2)).sqrt()
    assert torch.allclose(share, torch.full_like(share, 0.1), rtol=0.1)


def test_no_noise_changes_nothing():
    assert torch.equal(FeatureNoise(share=0)(batch(), VIEW).features, batch().features)


def test_a_mixture_is_what_its_weights_and_labels_say():
    whole = batch()
    mixed = FeatureMixup(alpha=1.0)(whole, VIEW)
    assert torch.equal(mixed.labels, whole.labels)
    assert ((mixed.mixed.weights >= 0) & (mixed.mixed.weights <= 1)).all()
    for row, weight in enumerate(mixed.mixed.weights):
        fits = [
            torch.allclose(mixed.features[row], weight * whole.features[row] + (1 - weight) * whole.features[other])
            and mixed.mixed.labels[row] == whole.labels[other]
            for other in range(len(whole))
        ]
        assert any(fits)


def test_masks_stay_as_they_are():
    whole = batch()
    mask = torch.arange(16)[:, None] % 4
    two = Batch(features=(whole.features, mask), labels=whole.labels, ids=whole.ids)
    for augment in (FeatureNoise(), FeatureMixup()):
        assert torch.equal(augment(two, VIEW).features[1], mask)


def test_half_precision_stays_half_precision():
    whole = batch()
    half = Batch(features=whole.features.half(), labels=whole.labels, ids=whole.ids)
    for augment in (FeatureNoise(), FeatureMixup()):
        assert augment(half, VIEW).features.dtype == torch.float16


def test_a_mixture_moves_to_a_device_whole():
    moved = FeatureMixup()(batch(), VIEW).to("meta")
    assert {moved.features.device.type, moved.mixed.labels.device.type, moved.mixed.weights.device.type} == {"meta"}


@pytest.mark.parametrize(("kind", "value"), [(FeatureNoise, -0.1), (FeatureNoise, float("inf")), (FeatureMixup, 0)])
def test_a_strength_that_makes_no_sense_is_a_sentence(kind, value):
    with pytest.raises(SettingError):
        kind(**{"share" if kind is FeatureNoise else "alpha": value})
