"""Makes the optimiser that a recipe names, and takes its state apart into tensors by name."""

from collections.abc import Mapping, Sequence

import torch

from frostline.processors import collector_rests
from frostline.wire.recipes import Recipe

__all__ = ("load_optimizer_state", "make_optimizer", "optimizer_state")


def make_optimizer(recipe: Recipe, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimiser of a recipe, over these parameters in this order."""
    with collector_rests():
        match recipe.optimizer:
            case "sgd":
                return torch.optim.SGD(parameters, recipe.learning_rate, momentum=0.9)
            case "adamw":
                return torch.optim.AdamW(parameters, recipe.learning_rate)
            case _:
                return torch.optim.Adam(parameters, recipe.learning_rate)


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
