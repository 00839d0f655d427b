"""How many passes a training makes, and recipes as JSON."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import BadRequest, SettingError
from frostline.wire.recipes import FEW_EPOCHS, Passes, Recipe

LOSSES = st.lists(st.floats(0, 10) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=30)


@given(losses=LOSSES, patience=st.integers(1, 5))
def test_the_pass_with_the_lowest_loss_is_kept_and_the_first_of_several(losses, patience):
    best = Passes(maximum=100, patience=patience).best_pass(losses)
    real = [loss for loss in losses if math.isfinite(loss)]
    assert best == (losses.index(min(real)) if real else 0)


@given(losses=LOSSES, patience=st.integers(1, 5))
def test_stops_after_the_given_epochs_without_a_lower_loss(losses, patience):
    passes = Passes(maximum=100, patience=patience)
    best = passes.best_pass(losses)
    assert passes.are_over(losses) == (len(losses) - 1 - best >= patience)


@given(losses=LOSSES, patience=st.integers(1, 5), since=st.integers(0, 40))
def test_patience_counts_anew_from_a_given_epoch(losses, patience, since):
    passes = Passes(maximum=100, patience=patience)
    waited = len(losses) - max(passes.best_pass(losses) + 1, since)
    assert passes.are_over(losses, since=since) == (waited >= patience)
    if len(losses) <= since:
        assert not passes.are_over(losses, since=since)


def test_ends_where_every_fall_is_noise_though_the_loss_falls_for_ever():
    passes = Recipe().passes(keeps_features=True, has_held_out=True)
    sure = [1.0, 0.1, 0.02, *(0.019 / place for place in range(1, 90))]
    over = next(made for made in range(1, len(sure)) if passes.are_over(sure[:made]))
    assert over < 15
    assert passes.best_pass(sure[:over]) == over - 1, "the head of the lowest loss is kept all the same"
    named = Recipe(patience=passes.patience).passes(keeps_features=True, has_held_out=True)
    assert not named.are_over(sure), "who names a patience means every fall"
    slow = [2.0 - 0.004 * place for place in range(90)]  # more than noise within the patience
    assert not any(passes.are_over(slow[:made]) for made in range(1, 90))


@given(
    losses=st.lists(st.floats(1e-3, 10) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=30),
    patience=st.integers(1, 5),
    noise=st.floats(1e-6, 0.1),
    scale=st.sampled_from([0.125, 1.0, 64.0]),
)
def test_noise_ends_no_later_than_patience_alone_and_has_the_losses_unit(losses, patience, noise, scale):
    plain, noisy = (Passes(maximum=100, patience=patience, noise=share) for share in (0.0, noise))
    assert noisy.are_over(losses) or not plain.are_over(losses)
    assert noisy.are_over([scale * loss for loss in losses]) == noisy.are_over(losses)


def test_makes_the_asked_number_of_epochs_whatever_the_losses():
    for keeps in (True, False):
        passes = Recipe(epochs=3).passes(keeps_features=keeps, has_held_out=True)
        assert passes == Passes(maximum=3)
    assert passes.best_pass([0.1, 9.0]) is None
    assert not passes.are_over([0.1, 9.0, 9.0])


def test_held_out_loss_decides_only_where_passes_cost_little_and_it_may():
    decided = Recipe().passes(keeps_features=True, has_held_out=True)
    assert decided.patience is not None
    test = Recipe(selects=False).passes(keeps_features=True, has_held_out=True)
    unscored = Recipe().passes(keeps_features=True, has_held_out=False)
    assert test == unscored
    assert test.patience is None
    assert FEW_EPOCHS < test.maximum < decided.maximum
    costly = Recipe().passes(keeps_features=False, has_held_out=True)
    assert (costly.maximum, costly.patience) == (FEW_EPOCHS, None)
    assert all(item.reason for item in (decided, test, costly))


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(epochs=7, optimizer="sgd", selects=False)])
def test_a_recipe_comes_back_from_its_json(recipe):
    assert Recipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("name", "value"), [("epochs", 0), ("epochs", "many"), ("epochs", True), ("selects", 1), ("batch_size", None)]
)
def test_refuses_an_invalid_recipe_by_its_field(name, value):
    with pytest.raises(BadRequest, match=name):
        Recipe.from_json({**Recipe().to_json(), name: value})
    missing = Recipe().to_json()
    del missing[name]
    with pytest.raises(BadRequest, match=name):
        Recipe.from_json(missing)


def test_no_epochs_at_all_are_refused():
    with pytest.raises(SettingError, match="epochs"):
        Recipe(epochs=0)
