"""Lets a network that takes several inputs by name take the rows of one array in their place."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from frostline.errors import ModelError

__all__ = ("takes_rows",)

M = TypeVar("M", bound=nn.Module)


def takes_rows(model: M, names: Sequence[str]) -> M:
    """The same network, whose ``forward`` takes ``x[batch, inputs, ...]`` and returns one tensor.

    It calls the network's own with ``x[:, 0]``, ``x[:, 1]`` and so on, and returns ``logits`` where the network gives
    an output of transformers, else the first tensor of what it gives. Modules, parameters, modes and hooks are those of
    ``model`` itself, which stays as it is: whatever happens to one happens to both.

    Args:
        model: network that takes as many inputs.
        names: names of these inputs in its ``forward``.
    """
    kind = type(model)

    def forward(self: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        inputs = {name: rows[:, place] for place, name in enumerate(names)}
        return _first_tensor(kind.forward(self, **inputs))

    # The names are part of the class's name, since kept traces are found by the code and the names of classes.
    taking = type(f"{kind.__name__} of {', '.join(names)}", (kind,), {"forward": forward, "__module__": __name__})
    same = cast(M, object.__new__(taking))
    object.__setattr__(same, "__dict__", model.__dict__)
    return same


def _first_tensor(output: Any) -> torch.Tensor:
    given = [output]
    if isinstance(output, Mapping):
        given = [output["logits"]] if "logits" in output else list(output.values())
    elif isinstance(output, list | tuple):
        given = list(output)
    found = next((value for value in given if isinstance(value, torch.Tensor)), None)
    if found is None:
        raise ModelError(f"the network gives no tensor, but {type(output).__name__}")
    return found
