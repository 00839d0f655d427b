"""The optimisers of recipes: PyTorch's own updates on the parameters of a head, and their state by name.

The first object of a class of ``torch.optim`` imports PyTorch's compiler (``torch._compile._disable_dynamo``): 1.2 s of
a processor, a quarter of what a job takes to its first step, to mark functions that nobody compiles here. The updates
themselves are functions that need none of it, and are called as ``torch.optim.Adam``, ``AdamW`` and ``SGD`` call them.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from frostline.wire.recipes import Recipe

__all__ = ("Optimizer",)

_MOMENTUM: Final = 0.9
_BETAS: Final = (0.9, 0.999)
_EPSILON: Final = 1e-8
# Where a recipe says none, as in PyTorch.
_DECAYS: Final = {"adam": 0.0, "adamw": 0.01, "sgd": 0.0}
_STEP: Final = "step"


class Optimizer:
    """Takes the steps of a recipe. For one thread at a time.

    Args:
        recipe: names the optimiser, its learning rate and its weight decay.
        parameters: trained parameters; their place here is their number in the state.
    """

    def __init__(self, recipe: Recipe, parameters: Iterable[torch.Tensor]) -> None:
        self._name = recipe.optimizer
        self._rate = recipe.learning_rate
        self._decay = _DECAYS[self._name] if recipe.weight_decay is None else recipe.weight_decay
        self._parameters = list(parameters)
        self._state: dict[int, dict[str, torch.Tensor]] = {}

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Train these too from the next step on."""
        self._parameters.extend(parameters)

    def clear_gradients(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Change each parameter that has a gradient.

        Args:
            share: part of the recipe's learning rate, from 0 to 1.
        """
        numbers = [number for number, parameter in enumerate(self._parameters) if parameter.grad is not None]
        if not numbers:
            return
        if self._name == "sgd":
            self._step_by_momentum(numbers, self._rate * share)
        else:
            self._step_by_moments(numbers, self._rate * share)

    def state(self) -> dict[str, torch.Tensor]:
        """What was learned of each parameter, under ``NUMBER.NAME``, with PyTorch's names; views, no copies."""
        return {f"{number}.{name}": value for number, own in self._state.items() for name, value in own.items()}

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from there; the inverse of ``state``."""
        self._state = {}
        for place, tensor in tensors.items():
            number, _, name = place.partition(".")
            parameter = self._parameters[int(number)]
            # Counts of steps stay where they are, as PyTorch has them: reading one must not wait for an accelerator.
            own = tensor.clone() if name == _STEP else tensor.to(parameter.device, parameter.dtype, copy=True)
            self._state.setdefault(int(number), {})[name] = own

    def _step_by_moments(self, numbers: list[int], rate: float) -> None:
        for number in numbers:
            if number not in self._state:
                moments = {name: torch.zeros_like(self._parameters[number]) for name in ("exp_avg", "exp_avg_sq")}
                self._state[number] = {_STEP: torch.zeros(()), **moments}
        adam(
            [self._parameters[number] for number in numbers],
            self._gradients(numbers),
            [self._state[number]["exp_avg"] for number in numbers],
            [self._state[number]["exp_avg_sq"] for number in numbers],
            [],
            [self._state[number][_STEP] for number in numbers],
            has_complex=any(self._parameters[number].is_complex() for number in numbers),
            decoupled_weight_decay=self._name == "adamw",
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=rate,
            weight_decay=self._decay,
            eps=_EPSILON,
            maximize=False,
        )

    def _step_by_momentum(self, numbers: list[int], rate: float) -> None:
        momenta = [self._state.get(number, {}).get("momentum_buffer") for number in numbers]
        sgd(
            [self._parameters[number] for number in numbers],
            self._gradients(numbers),
            momenta,
            has_sparse_grad=any(gradient.is_sparse for gradient in self._gradients(numbers)),
            weight_decay=self._decay,
            momentum=_MOMENTUM,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for number, momentum in zip(numbers, momenta, strict=True):
            if momentum is not None:
                self._state[number] = {"momentum_buffer": momentum}

    def _gradients(self, numbers: list[int]) -> list[torch.Tensor]:
        found = (self._parameters[number].grad for number in numbers)
        return [gradient for gradient in found if gradient is not None]
