"""Metrics over batches are those over all samples at once, and say so where they have no meaning."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, mean_absolute_error, roc_auc_score, root_mean_squared_error

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
