"""Lets a network that takes several inputs by name take one array in their place, which holds them all."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from frostline.errors import ModelError
from frostline.preprocess.named_inputs import InputPlace, unpacked

__all__ = ("has_several_parts", "takes_parts", "takes_rows")

_SEVERAL = "frostline_several_parts"

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

    return _with_another_face(model, ", ".join(names), forward)


def takes_parts(model: M, places: Sequence[InputPlace]) -> M:
    """The same network, whose ``forward`` takes samples of several parts, ``int64[batch, ...]``.

    It calls the network's own with the inputs by name, and returns what that gives where it is a tensor, or tensors in
    a plain tuple, list or dict; of an output of transformers what ``takes_rows`` returns.

    Args:
        model: network that takes these inputs; see ``takes_rows``.
        places: where each lies in a sample.
    """
    kind = type(model)

    def forward(self: nn.Module, rows: torch.Tensor) -> Any:
        output = kind.forward(self, **unpacked(places, rows))
        return output if type(output) in (tuple, list, dict) else _first_tensor(output)

    said = ", ".join(f"{place.name} {place.spec.dtype}{list(place.spec.shape)}@{place.start}" for place in places)
    return _with_another_face(model, said, forward, {_SEVERAL: True})


def has_several_parts(model: nn.Module) -> bool:
    """Whether it is the face that ``takes_parts`` makes."""
    return bool(getattr(type(model), _SEVERAL, False))


def _with_another_face(model: M, said: str, forward: Callable[..., Any], more: Mapping[str, Any] | None = None) -> M:
    # What it takes is part of the class's name, since kept traces are found by the code and the names of classes.
    kind, members = type(model), {"forward": forward, "__module__": __name__, **(more or {})}
    same = cast(M, object.__new__(type(f"{kind.__name__} of {said}", (kind,), members)))
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
