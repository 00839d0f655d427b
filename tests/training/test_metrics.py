"""Metrics over batches are those over all samples at once, and say so where they have no meaning.

What a share to hold out makes of classes that are too small for it is said before they are scored.
"""

import math
import uuid
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, mean_absolute_error, roc_auc_score, root_mean_squared_error

from frostline.datasets import Dataset
from frostline.datasets.dataset import few_of_a_class, split_in_two
from frostline.datasets.selection import alike_classes, numbers_among_names, numbers_without_samples
from frostline.stores.open import open_store
from frostline.training.metrics import make_metrics, metrics_of
from frostline.wire.recipes import METRICS_OF


def over_batches(task, scores, targets, size=7):
    metrics = make_metrics(task, METRICS_OF[task])
    for said, meant in zip(scores.split(size), targets.split(size), strict=True):
        for metric in metrics.values():
            metric.add(said, meant)
    return {name: metric.value for name, metric in metrics.items()}


def test_labels_and_numbers_are_scored_as_scikit_learn_scores_them_whole():
    draw = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(50, 4, generator=draw), (torch.rand(50, 4, generator=draw) > 0.6).float()
    found = over_batches("labels", scores, labels)
    assert found["macro_f1"] == pytest.approx(f1_score(labels, scores > 0, average="macro"))
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, scores, average="macro"))
    found, numbers = over_batches("numbers", scores, labels), labels.numpy()
    assert found["mae"] == pytest.approx(mean_absolute_error(numbers, scores), rel=1e-6)
    assert found["rmse"] == pytest.approx(np.sqrt(((numbers - scores.numpy()) ** 2).mean()), rel=1e-6)
    assert found["rmse"] == pytest.approx(root_mean_squared_error(numbers.ravel(), scores.ravel()), rel=1e-6)


def test_a_label_that_all_samples_have_or_none_has_no_area():
    scores = torch.tensor([[0.1, 2.0, -1.0], [0.4, -2.0, -1.0], [0.2, 1.0, -1.0]])
    labels = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    assert over_batches("labels", scores, labels)["auroc"] == 1.0
    assert math.isnan(over_batches("labels", scores[:, ::2], labels[:, ::2])["auroc"])
    # Nobody has the last one, and nobody says it.
    assert over_batches("labels", scores, labels)["macro_f1"] == 1.0


def test_before_anything_is_counted_metrics_are_zero():
    for task, names in METRICS_OF.items():
        assert {metric.value for metric in make_metrics(task, names).values()} == {0.0}


def test_each_task_has_metrics_of_its_own():
    assert metrics_of("classes") == ("accuracy",)
    assert metrics_of("labels") == ("macro_f1", "auroc")
    assert metrics_of("numbers", ("rmse", "rmse")) == ("rmse",)


@pytest.mark.parametrize(
    ("classes", "counts", "said"),
    [
        (["0", "1", "2"], {1: 4, 2: 4}, "2 of 3 classes have samples: labels are numbers up to 2, and none is 0;"),
        ([*map(str, range(2021))], {-1: 1, 2019: 1, 2020: 2}, "2 of 2,021 classes have samples"),
        (["0", "1"], {0: 1, 1: 1, -1: 9}, ""),
        (["0", "1"], {-1: 9}, ""),
        (["zebra", "ant", "unseen"], {0: 1, 1: 1}, ""),
    ],
)
def test_numbers_that_no_sample_has_are_said_and_names_are_not(classes, counts, said):
    found = numbers_without_samples(classes, counts)
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (["Cat", "Dog", "cat"], "'Cat' and 'cat';"),
        (["caf\u00e9", "cafe\u0301", "tea"], r"'caf\xe9' and 'cafe\u0301';"),
        (
            [letter * times for times in range(1, 6) for letter in "aA"],
            "'a' and 'A', 'aa' and 'AA', 'aaa' and 'AAA' and 2",
        ),
        (["cat", "cat 2", "dog"], ""),
        (["0", "1"], ""),
    ],
)
def test_classes_that_are_called_alike_are_said(classes, said):
    found = alike_classes(classes)
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (["0", "zebra"], "1 of 2 classes are called by numbers, as 0, and others by names, as 'zebra': all are taken"),
        (["007", "cat"], ""),
        (["007", "10"], ""),
        (["0", "1"], ""),
        (["cat", "dog"], ""),
        ([], ""),
    ],
)
def test_numbers_among_names_of_classes_are_said(classes, said):
    found = numbers_among_names(classes)
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("counts", "share", "words"),
    [
        ([2] * 20, 0.2, ["20 of 20 classes have so few samples", "50% of all samples are held out, and 20% were"]),
        ([1, 1, 40], 0.2, ["2 of 3 classes have a single sample, which is trained on and never scored"]),
        ([1, 2, 40], 0.2, ["1 of 3 classes have so few", "; 1 of 3 classes have a single sample"]),
        ([1] * 8, 0.25, ["8 of 8 classes have a single sample, which is trained on and never scored"]),
        ([3] * 3, 0.2, ["3 of 3 classes have so few samples", "33% of all samples are held out, and 20% were"]),
        ([10, 3, 40], 0.2, []),
        ([1, 9], 0.0, []),
        ([2] * 20, 0.5, []),
    ],
)
def test_classes_too_small_for_the_share_to_hold_out_are_said_at_the_start(counts, share, words):
    store = open_store(f"memory://{uuid.uuid4()}")
    for label, count in enumerate(counts):
        for number in range(count):
            store.write(f"{label:02}/{number}.jpg", b"x")
    data = Dataset(store.url)
    _, held_out = split_in_two(data, share, 0)
    said = few_of_a_class(data.selection.per_label, share, len(held_out) / len(data))
    assert all(word in said for word in words)
    assert bool(said) == bool(words)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        data.split(share)
        data.split(share, balanced=False)
    assert [str(warning.message) for warning in warned] == ([said] if words else [])
    assert all(warning.filename == __file__ for warning in warned)
