"""The default recipe: as good as a solver on the same features, and the best head is kept however training ended."""

from itertools import pairwise

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from frostline.core.events import EpochsChosen, EpochTrained, Evaluated, HeadSelected, StepFinished
from frostline.training.report.report import Record
from frostline.wire.recipes import Recipe
from support.loops import a_loop, digits, divided
from support.trainings import ignore


def scored(head, held_out):
    features, labels = held_out
    head.eval()
    with torch.no_grad():
        scores = head(features)
    return float(nn.functional.cross_entropy(scores, labels)), float((scores.argmax(1) == labels).float().mean())


@pytest.mark.parametrize("seed", range(5))
def test_the_default_recipe_is_as_good_as_a_logistic_regression_on_the_same_features(seed):
    features, labels = digits()
    record = Record(ignore)
    loop, _, _ = a_loop(Recipe(seed=seed), record, features=features, labels=labels, seed=seed)
    loop.run()
    held_out = divided(labels, seed)
    solver = LogisticRegression(max_iter=2000).fit(features[~held_out].numpy(), labels[~held_out].numpy())
    oracle = solver.score(features[held_out].numpy(), labels[held_out].numpy())
    assert record.kept_scores["accuracy"] >= oracle - 0.02


def test_training_ends_when_held_out_loss_falls_no_more_and_the_best_head_is_kept():
    record, events = Record(ignore), []

    def on_event(event):
        events.append(event)
        record(event)

    loop, head, held_out = a_loop(Recipe(learning_rate=0.03), on_event)
    loop.run()
    losses = [score.loss for score in record.scores]
    assert 5 < len(losses) < 100
    assert record.kept == HeadSelected(epoch=losses.index(min(losses)), epochs=len(losses))
    assert len(losses) - 1 - record.kept.epoch == 5
    best = record.scores[record.kept.epoch]
    assert scored(head, held_out) == pytest.approx((best.loss, best.scores["accuracy"]), abs=1e-6)
    assert record.kept_scores["accuracy"] == best.scores["accuracy"]
    assert isinstance(events[0], EpochsChosen)
    # Nobody knows how many steps there will be.
    assert {event.steps for event in events if isinstance(event, StepFinished)} == {0}


def test_a_number_of_epochs_that_was_asked_for_is_made_and_the_last_head_kept():
    record = Record(ignore)
    loop, head, held_out = a_loop(Recipe(epochs=12, learning_rate=0.1), record)
    loop.run()
    losses = [score.loss for score in record.scores]
    assert len(losses) == 12
    assert min(losses) < losses[-1]
    assert record.kept is None
    assert scored(head, held_out) == pytest.approx((losses[-1], record.kept_scores["accuracy"]), abs=1e-6)


@pytest.mark.parametrize(("recipe", "keeps", "epochs"), [(Recipe(), False, 5), (Recipe(selects=False), True, 20)])
def test_epochs_are_few_where_they_are_dear_and_nothing_is_chosen_by_a_test(recipe, keeps, epochs):
    events = []
    loop, _, _ = a_loop(recipe, events.append, keeps_features=keeps)
    loop.run()
    assert isinstance(events[0], EpochsChosen)
    assert events[0].epochs == epochs
    assert sum(isinstance(event, Evaluated) for event in events) == epochs
    assert not any(isinstance(event, HeadSelected) for event in events)


@pytest.mark.parametrize("kind", [StepFinished, EpochTrained, Evaluated])
def test_whatever_ends_it_early_leaves_the_best_head_that_was_scored(kind):
    record, seen = Record(ignore), []

    def on_event(event):
        record(event)
        seen.extend([event] if isinstance(event, kind) else [])
        if len(record.scores) >= 3 and isinstance(event, kind):
            raise KeyboardInterrupt

    loop, head, held_out = a_loop(Recipe(learning_rate=0.3), on_event)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    losses = [score.loss for score in record.scores]
    assert record.kept == HeadSelected(epoch=losses.index(min(losses)), epochs=len(losses))
    assert scored(head, held_out)[0] == pytest.approx(min(losses), abs=1e-6)


def test_running_statistics_are_those_of_the_head_that_was_kept():
    features, _ = digits()
    head = nn.Sequential(nn.BatchNorm1d(features.shape[1]), nn.Linear(features.shape[1], 10))
    record, steps = Record(ignore), []

    def on_event(event):
        record(event)
        if isinstance(event, Evaluated):
            steps.append(int(head[0].num_batches_tracked))

    loop, _, _ = a_loop(Recipe(learning_rate=0.1), on_event, head=head)
    loop.run()
    assert all(item < other for item, other in pairwise(steps))
    assert int(head[0].num_batches_tracked) == steps[record.kept.epoch]
