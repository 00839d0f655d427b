"""Makes the optimiser and the learning rates of a recipe, and takes its state apart into tensors by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from frostline.processors import collector_rests
from frostline.wire.recipes import Recipe

__all__ = ("load_optimizer_state", "make_optimizer", "make_scheduler", "optimizer_state")


def make_optimizer(recipe: Recipe, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimiser of a recipe, over these parameters in this order."""
    decay: dict[str, Any] = {} if recipe.weight_decay is None else {"weight_decay": recipe.weight_decay}
    with collector_rests():
        match recipe.optimizer:
            case "sgd":
                return torch.optim.SGD(parameters, recipe.learning_rate, momentum=0.9, **decay)
            case "adamw":
                return torch.optim.AdamW(parameters, recipe.learning_rate, **decay)
            case _:
                return torch.optim.Adam(parameters, recipe.learning_rate, **decay)


def make_scheduler(
    recipe: Recipe, optimizer: torch.optim.Optimizer, *, steps: int, done: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """What sets the learning rate of each step; None where it stays as it is.

    Args:
        recipe: how to train.
        optimizer: optimiser that gets the rates.
        steps: number of all steps.
        done: number of steps that were taken.
    """
    if not recipe.changes_rate:
        return None
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    # It works the rate out of the step's number alone, so that a run goes on with the same one to the bit.
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: recipe.rate_share(step, steps), done - 1)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What it has learned of each parameter, under ``NUMBER.NAME``; its settings are those of the recipe."""
    return {
        f"{number}.{name}": value
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let an optimiser go on from there; the inverse of ``optimizer_state``."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for place, tensor in tensors.items():
        number, _, name = place.partition(".")
        state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
