"""Verifies a cut by running both: prefix and head together must do what the whole network does, to the bit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from frostline.core import TensorSpec
from frostline.engines.apart import computing
from frostline.engines.runner import Runner, leaf_values
from frostline.errors import ModelError
from frostline.models.frozen import FrozenPart, training_flags
from frostline.models.head import Head
from frostline.models.inputs import random
from frostline.models.modes import all_in_eval, modes
from frostline.models.trace import device_of

__all__ = ("UNFIT", "equals_whole")

UNFIT = (ArithmeticError, AssertionError, AttributeError, LookupError, ModelError, RuntimeError, TypeError, ValueError)
"""What a network may raise on an input that nobody has chosen for it."""

_ROWS = 8
_SEEDS = (1, 2)


def equals_whole(model: nn.Module, part: FrozenPart, head: Head, inputs: Sequence[TensorSpec]) -> bool:
    """Whether prefix and head together do what the whole network does, to the bit, on two random batches.

    Compared are outputs, gradients and buffers, with the modes in which the head is trained and in eval mode. The
    network is left as it was.

    Args:
        model: the whole network.
        part: its frozen part.
        head: what is to go on from there.
        inputs: what the network takes.
    """
    flags = training_flags(model)
    device = device_of(model)
    runner = Runner(part.prefix.graph, device=device)
    leaves = [leaf.to(device) for leaf in leaf_values(part.prefix.graph, part.prefix.tensors)]
    for seed in _SEEDS:
        batch = random(inputs, _ROWS, torch.Generator().manual_seed(seed), device)
        for training in (flags, all_in_eval(model)):
            try:
                with modes(model, training):
                    with torch.no_grad():
                        features = list(runner.run(batch, leaves))
                    ours = _observed(model, partial(head, features), seed)
                    theirs = _observed(model, partial(_whole, model, batch), seed)
            except UNFIT:
                return False
            if not _same(ours, theirs):
                return False
    return True


def _whole(model: nn.Module, batch: Sequence[torch.Tensor]) -> Any:
    with computing():
        return model(*(one.clone() for one in batch))


def _observed(model: nn.Module, run: Callable[[], Any], seed: int) -> list[Any]:
    """The leaves of what a run returns, its gradients, and the buffers that it leaves; they are put back."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with _kept_buffers(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        outputs = tree_leaves(run())
        sums = [one.square().sum() for one in outputs if isinstance(one, torch.Tensor) and one.requires_grad]
        gradients = torch.autograd.grad(sums, trained, allow_unused=True) if sums and trained else ()
        return [*outputs, *gradients, *(buffer.clone() for buffer in model.buffers())]


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    buffers = [(*path.rpartition("."), buffer, buffer.clone()) for path, buffer in model.named_buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, _, name, buffer, before in buffers:
                setattr(model.get_submodule(owner), name, buffer.copy_(before))


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(ours) == len(theirs) and all(_is_same(one, other) for one, other in zip(ours, theirs, strict=True))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
