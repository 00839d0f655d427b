"""Each option of a recipe does what it does in a plain loop of PyTorch, and goes on after a checkpoint."""

import os
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from frostline.core.errors import BadRequest, SettingError
from frostline.core.events import Evaluated, HeadSelected, RowsNotFinite
from frostline.ordering import Order
from frostline.training.loop import Optimizer, UnfrozenHead
from frostline.training.objective import objective_of
from frostline.training.report.report import Record, recipe_in_words
from frostline.training.settings import JobSettings, TrainSettings
from frostline.wire.recipes import Recipe, event_from_json, event_to_json
from support.loops import a_loop, digits, divided
from support.trainings import ignore

FEW = 200
SCHEDULERS = {
    "constant": lambda optimizer, left: ConstantLR(optimizer, 1.0, left),
    "cosine": CosineAnnealingLR,
    "linear": lambda optimizer, left: LinearLR(optimizer, 1.0, 0.0, left),
}


def few_digits():
    features, labels = digits()
    return features[:FEW], labels[:FEW]


def scheduled(recipe, optimizer, steps):
    """The same learning rates by PyTorch's own schedulers."""
    warm = round(recipe.warm_up * steps) if recipe.warm_up < 1 else int(recipe.warm_up)
    behind = SCHEDULERS[recipe.schedule](optimizer, steps - warm)
    if not warm:
        return behind
    rising = LinearLR(optimizer, 1 / (warm + 1), 1.0, warm)
    return SequentialLR(optimizer, [rising, behind], [warm])


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step()`:UserWarning")
def plain_losses(recipe):
    """The losses of a loop that knows nothing of Frostline."""
    features, labels = few_digits()
    train = ~divided(labels, 0)
    features, labels = features[train], labels[train]
    torch.manual_seed(0)
    head = nn.Sequential(nn.Dropout(0.2), nn.Linear(64, 10))
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[recipe.optimizer]
    how = {"momentum": 0.9} if recipe.optimizer == "sgd" else {}
    if recipe.weight_decay is not None:
        how["weight_decay"] = recipe.weight_decay
    optimizer = kind(head.parameters(), recipe.learning_rate, **how)
    scheduler, losses = None, []
    torch.manual_seed(recipe.seed)
    for epoch in range(recipe.epochs):
        order = torch.from_numpy(Order(size=len(labels), seed=0, epoch=epoch, shuffle=True).indices(0, len(labels)))
        batches = order.split(recipe.batch_size)
        scheduler = scheduler or scheduled(recipe, optimizer, recipe.epochs * len(batches))
        for rows in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bf16):
                scores = head(features[rows])
            assert scores.dtype == (torch.bfloat16 if recipe.bf16 else torch.float32)
            loss = nn.functional.cross_entropy(scores.float(), labels[rows], label_smoothing=recipe.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses


RECIPES = {
    "as it is by default": Recipe(epochs=2),
    "cosine behind a warm-up": Recipe(epochs=3, schedule="cosine", warm_up=0.2),
    "linear behind steps of warm-up": Recipe(epochs=3, schedule="linear", warm_up=4, optimizer="sgd"),
    "a warm-up alone": Recipe(epochs=2, warm_up=6),
    "weight decay": Recipe(epochs=2, weight_decay=0.3),
    "none, where there is some by default": Recipe(epochs=2, optimizer="adamw", weight_decay=0.0),
    "label smoothing": Recipe(epochs=2, label_smoothing=0.2),
    "bfloat16": Recipe(epochs=2, bf16=True),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step()`:UserWarning")
def test_losses_are_those_of_a_plain_loop(name):
    record, (features, labels) = Record(ignore), few_digits()
    loop, _, _ = a_loop(RECIPES[name], record, features=features, labels=labels)
    loop.run()
    assert record.losses == pytest.approx(plain_losses(RECIPES[name]), rel=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("decay", [None, 0.1])
def test_an_optimiser_takes_the_steps_of_pytorchs_class_to_the_bit(name, decay):
    """Also where parameters come later, have no gradient in a step, or its state was kept in between."""
    recipe = Recipe(optimizer=name, weight_decay=decay, learning_rate=0.01)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    how = ({"momentum": 0.9} if name == "sgd" else {}) | ({} if decay is None else {"weight_decay": decay})
    own, theirs = ([torch.linspace(-1, 1, size).requires_grad_() for size in (5, 7, 3)] for _ in range(2))
    optimizer, plain = Optimizer(recipe, own[:2]), kind(theirs[:2], 0.01, **how)
    for step in range(9):
        share = recipe.rate_share(step, 9) if step % 2 else 0.5
        if step == 3:
            optimizer.add(own[2:])
            plain.add_param_group({"params": theirs[2:]})
        if step == 6:
            optimizer, before = Optimizer(recipe, own), optimizer
            optimizer.load_state(before.state())
        optimizer.clear_gradients()
        plain.zero_grad()
        for parameters in (own, theirs):
            used = parameters[step % 2 :]
            torch.stack([(parameter**2).sum() * (1 + step) for parameter in used]).sum().backward()
        for group in plain.param_groups:
            group["lr"] = 0.01 * share
        optimizer.step(share)
        plain.step()
        assert all(torch.equal(mine, other) for mine, other in zip(own, theirs, strict=True)), step
    learned = plain.state_dict()["state"]
    assert optimizer.state().keys() == {
        f"{number}.{key}" for number, values in learned.items() for key, value in values.items() if value is not None
    }
    assert all(torch.equal(optimizer.state()[f"{n}.{key}"], learned[n][key]) for n in learned for key in learned[n])


@given(
    st.sampled_from(list(SCHEDULERS)),
    st.integers(1, 30),
    st.one_of(st.integers(0, 10).map(float), st.floats(0, 0.9)),
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step()`:UserWarning")
def test_learning_rates_are_those_of_pytorchs_schedulers(schedule, steps, warm_up):
    recipe = Recipe(epochs=1, schedule=schedule, warm_up=warm_up)
    warm = round(warm_up * steps) if warm_up < 1 else int(warm_up)
    if warm >= steps:
        assert [recipe.rate_share(step, steps) for step in range(steps)] == [
            (step + 1) / (warm + 1) for step in range(steps)
        ]
        return
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    scheduler, found = scheduled(recipe, optimizer, steps), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [recipe.rate_share(step, steps) for step in range(steps)] == pytest.approx(found, abs=1e-6)


class Keeps:
    """Keeps the checkpoint of one epoch's end, its tensors copied."""

    def __init__(self, epoch):
        self.epoch, self.kept = epoch, None

    def is_due(self, step, *, ends_epoch):
        return ends_epoch

    def keep(self, checkpoint):
        if checkpoint.epoch == self.epoch:
            import copy

            self.kept = copy.deepcopy(checkpoint)


def test_a_schedule_goes_on_from_a_checkpoint_with_the_same_bits():
    recipe, (features, labels) = Recipe(epochs=4, schedule="cosine", warm_up=0.3), few_digits()
    whole, checkpointer = Record(ignore), Keeps(2)
    loop, _, _ = a_loop(recipe, whole, features=features, labels=labels, checkpointer=checkpointer)
    loop.run()
    again = Record(ignore)
    loop, _, _ = a_loop(recipe, again, features=features, labels=labels)
    loop.run(checkpointer.kept)
    assert again.losses == whole.losses[len(checkpointer.kept.losses) :]


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_head_resumes_between_epochs_also_where_layers_are_unfrozen(epoch):
    recipe, (features, labels) = Recipe(epochs=4, schedule="linear", warm_up=3), few_digits()

    def a_run(record, **how):
        torch.manual_seed(1)
        head = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
        head[0].requires_grad_(False)
        head[2].requires_grad_(False)
        left = {1: head[2], 2: head[0]}

        def unfreeze(epoch):
            due = [left.pop(place).requires_grad_(True) for place in sorted(left) if place <= epoch]
            return UnfrozenHead(head=head, added=[list(layer.parameters()) for layer in due]) if due else None

        return a_loop(recipe, record, features=features, labels=labels, head=head, unfreeze=unfreeze, **how)[0], head

    whole, checkpointer = Record(ignore), Keeps(epoch)
    loop, first = a_run(whole, checkpointer=checkpointer)
    loop.run()
    again = Record(ignore)
    loop, second = a_run(again)
    loop.run(checkpointer.kept)
    assert again.losses == whole.losses[len(checkpointer.kept.losses) :] != []
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first.parameters(), second.parameters(), strict=True))


def test_patience_ends_epochs_that_were_asked_for_and_keeps_the_best_head():
    record = Record(ignore)
    loop, _, _ = a_loop(Recipe(epochs=60, learning_rate=0.1, patience=2), record)
    loop.run()
    losses = [score.loss for score in record.scores]
    assert len(losses) < 60
    assert record.kept == HeadSelected(epoch=losses.index(min(losses)), epochs=len(losses))
    assert len(losses) - 1 - record.kept.epoch == 2


@pytest.mark.parametrize("breaks_off_after", [None, 2, 3])
def test_the_best_head_of_before_layers_are_unfrozen_comes_back_whole(breaks_off_after):
    recipe, (features, labels) = Recipe(epochs=9, learning_rate=0.01, patience=2), few_digits()
    begun = {}

    def a_run(record, **how):
        torch.manual_seed(1)
        head = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
        head[:2].requires_grad_(False).eval()
        begun.update({name: tensor.clone() for name, tensor in head.state_dict().items()})
        left = [head[:2]]

        def unfreeze(epoch):
            if epoch < 2 or not left:
                return None
            layers = left.pop().requires_grad_(True).train()
            with torch.no_grad():
                head[2].weight.mul_(-50)  # so that no score from here on is better than those before
            return UnfrozenHead(head=head, added=[list(layers.parameters())])

        return a_loop(
            recipe, record, features=features, labels=labels, head=head, unfreeze=unfreeze, last_unfreeze=2, **how
        ), head

    record, checkpointer = Record(ignore), Keeps(breaks_off_after)
    (loop, *_), head = a_run(record, checkpointer=checkpointer)
    loop.run()
    if breaks_off_after is not None:
        record = Record(ignore)
        (loop, *_), head = a_run(record)
        loop.run(checkpointer.kept)
    assert record.kept == HeadSelected(epoch=1, epochs=4)
    same = {name: torch.equal(parameter, begun[name]) for name, parameter in head.named_parameters()}
    assert same == {name: not name.startswith("2.") for name in same}


def test_what_is_frozen_in_a_head_is_not_copied_with_the_best_one():
    record, (features, labels), checkpointer = Record(ignore), few_digits(), Keeps(3)
    head = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
    head[0].requires_grad_(False)
    recipe = Recipe(epochs=8, learning_rate=0.1, patience=7)
    loop, _, held_out = a_loop(recipe, record, features=features, labels=labels, head=head, checkpointer=checkpointer)
    loop.run()
    assert {name.partition(".")[0] for name in checkpointer.kept.best} == {"1", "2"}
    assert {"1.running_mean", "1.weight", "2.weight"} < checkpointer.kept.best.keys()
    scores = head.eval()(held_out[0]).detach()
    best = min(score.loss for score in record.scores)
    assert float(nn.functional.cross_entropy(scores, held_out[1])) == pytest.approx(best, rel=1e-5)
    assert record.kept.epoch + 1 < len(record.scores)


def test_label_smoothing_is_for_training_and_held_out_losses_are_plain():
    record, (features, labels) = Record(ignore), few_digits()
    recipe = Recipe(epochs=1, label_smoothing=0.5)
    loop, head, (held_features, held_labels) = a_loop(recipe, record, features=features, labels=labels)
    loop.run()
    with torch.no_grad():
        plain = nn.functional.cross_entropy(head.eval()(held_features), held_labels)
    assert record.scores[0].loss == pytest.approx(float(plain), rel=1e-5)


def test_metrics_of_classes_are_scored_in_the_order_asked_for():
    from sklearn.metrics import f1_score

    record, objective = Record(ignore), objective_of(metrics=("macro_f1", "accuracy"))
    loop, head, (features, labels) = a_loop(Recipe(epochs=2), record, objective=objective)
    loop.run()
    said = head.eval()(features).argmax(1)
    assert list(record.kept_scores) == ["macro_f1", "accuracy"]
    assert record.kept_scores["macro_f1"] == pytest.approx(f1_score(labels, said, average="macro"))
    assert record.kept_scores["accuracy"] == pytest.approx(float((said == labels).float().mean()))
    assert [len(values) for values in record.scores_by_name.values()] == [2, 2]


def test_the_default_metric_imports_no_library():
    code = """
import sys
from frostline.training.loop import Optimizer, UnfrozenHead
from frostline.training.objective import objective_of
objective_of().begin().scores
print("sklearn" in sys.modules)
"""
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Recipe(schedule="cosine"), "say how many epochs"),
        (lambda: Recipe(warm_up=0.1), "say how many epochs"),
        (lambda: Recipe(warm_up=1.5), "whole number of steps"),
        (lambda: Recipe(schedule="steep"), "schedule must be one of constant, cosine, linear"),
        (lambda: Recipe(weight_decay=-1.0), "weight_decay"),
        (lambda: Recipe(label_smoothing=1.0), "label_smoothing"),
        (lambda: Recipe(patience=0), "patience"),
        (lambda: objective_of(metrics=("auroc",)), "no metric 'auroc' for classes: --metrics is of accuracy, macro_f1"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(SettingError, match=words):
        make()


def test_a_recipe_and_its_scores_travel_as_json():
    recipe = Recipe(epochs=3, schedule="linear", warm_up=0.5, weight_decay=0.1, bf16=True, patience=4)
    assert Recipe.from_json(recipe.to_json()) == recipe
    found = RowsNotFinite(rows=2, total=5, first="sample a.jpg")
    assert event_from_json(event_to_json(found)) == found
    event = Evaluated(epoch=1, samples=2, loss=0.5, scores={"accuracy": 0.25, "macro_f1": float("inf")})
    assert event_from_json(event_to_json(event)) == event
    for scores in ("much", {"accuracy": "much"}, None):
        with pytest.raises(BadRequest):
            event_from_json({**event_to_json(event), "scores": scores})


def test_a_recipe_is_said_in_words():
    settings = {"optimizer": "sgd", "learning_rate": 0.01, "batch_size": 8, "loss": "cross-entropy"}
    assert recipe_in_words(settings) == "sgd at 0.01, batches of 8"
    said = recipe_in_words({**settings, "schedule": "cosine", "warm_up": 0.05, "weight_decay": 0.1, "bf16": True})
    assert said.endswith("weight decay 0.1, warm-up of 5.0 %, cosine learning rate, computed in bfloat16")
    assert recipe_in_words({}) == ""


def test_every_option_of_a_recipe_is_said_where_it_is_not_as_by_default():
    default = Recipe().to_json()
    never = {"epochs", "seed", "selects"}  # a report has them in places of their own
    for name in default.keys() - never:
        other = f"other {name}" if isinstance(default[name], str) else 3
        assert recipe_in_words({**default, name: other}) != recipe_in_words(default), name


@pytest.mark.parametrize("nodes", [{"near": ""}, {"near": "http://store:7070", "also_near": ("",)}])
def test_a_node_without_an_address_is_refused(nodes):
    with pytest.raises(SettingError, match="--near is empty: write --near http://store-1:7070, or leave it out"):
        JobSettings(data="photos", model="demo:efficientnet_lite0", until="features", **nodes)


def test_a_runs_settings_fill_every_field_of_its_recipe_but_who_selects():
    """A field that they leave as it is by default would be trained without, here and beside the store."""
    job = JobSettings(data="photos", model="demo:efficientnet_lite0", until="features", seed=5)
    recipe = TrainSettings(
        job=job,
        epochs=3,
        batch_size=7,
        optimizer="sgd",
        learning_rate=0.5,
        weight_decay=0.1,
        label_smoothing=0.1,
        schedule="cosine",
        warm_up=2.0,
        patience=4,
        bf16=True,
    ).recipe
    assert [field.name for field in fields(Recipe) if getattr(recipe, field.name) == field.default] == ["selects"]
