"""Where a training stands between two steps, as one value with which another process goes on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from frostline.events import Evaluated

__all__ = ("Checkpoint", "Checkpointer", "random_state", "restore_random_state")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A training between two steps.

    Attributes:
        epoch: epoch under way, or the next one where all of one was trained and scored.
        epoch_steps: steps taken in that epoch.
        steps: steps of the whole run; 0 where nobody knows yet.
        order: state of the loader of that epoch; None where the epoch has not begun.
        losses: loss of every step so far.
        epoch_losses: mean loss of every epoch that was trained to its end.
        samples: samples handed to the head so far.
        scores: scores of the held-out samples after each epoch.
        is_over: no step is left.
        head: tensors of the head, by name.
        optimizer: tensors of the optimiser's state, by number of the parameter and name.
        best: tensors of the head that was best so far; empty where held-out loss decides nothing.
        best_epoch: epoch of that head; None where there is none.
        random: states of PyTorch's random generators.
    """

    epoch: int
    epoch_steps: int
    steps: int
    order: Mapping[str, Any] | None
    losses: tuple[float, ...]
    epoch_losses: tuple[float, ...]
    samples: int
    scores: tuple[Evaluated, ...] = ()
    is_over: bool = False
    head: Mapping[str, torch.Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    best: Mapping[str, torch.Tensor] = field(default_factory=dict)
    best_epoch: int | None = None
    random: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return len(self.losses)


class Checkpointer(Protocol):
    """Keeps checkpoints, and says when one is wanted."""

    def is_due(self, step: int, *, ends_epoch: bool) -> bool:
        """Whether to make one after so many steps; ``ends_epoch`` says that an epoch was just scored."""

    def keep(self, checkpoint: Checkpoint) -> None:
        """Keep one, before the tensors in it change again."""


def random_state() -> dict[str, torch.Tensor]:
    """The states of PyTorch's random generators, by device; those of accelerators where they are in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"cuda:{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Let the generators go on from there; those of accelerators that are not here are left out."""
    torch.set_rng_state(states["cpu"])
    for device, state in states.items():
        if device != "cpu" and torch.cuda.is_available() and int(device.partition(":")[2]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
