"""Runs two variants of one network on the same batch, and compares what they give to the bit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from frostline.core import TensorSpec
from frostline.engines.base.runner import Runner
from frostline.engines.machine.isolation import computing
from frostline.errors import ModelError
from frostline.models.modes import modes
from frostline.models.tracing.border import fed
from frostline.models.tracing.export import Trace, device_of, tensor_of
from frostline.models.tracing.recording import random

__all__ = ("UNFIT", "agrees", "are_same", "kept_buffers", "observed", "whole")

UNFIT = (ArithmeticError, AssertionError, AttributeError, LookupError, ModelError, RuntimeError, TypeError, ValueError)
"""What a network may raise on an input that nobody has chosen for it."""

# Two rows tell a trace with an open batch from one that was made for a single sample, at the least cost.
_ROWS = 2
_SEED = 0


def agrees(model: nn.Module, traced: Trace, inputs: Sequence[TensorSpec]) -> bool:
    """Whether a trace gives what the network gives on a random batch, outputs and buffers to the bit.

    Both run in the modes of the trace, with the same random numbers. The network is left as it was.
    """
    device = device_of(model)
    batch = random(inputs, _ROWS, torch.Generator().manual_seed(_SEED), device)
    try:
        with modes(model, traced.training):
            leaves = [tensor_of(model, traced, path) for _, path in traced.graph.leaves]
            run = partial(Runner(traced.graph, device=device).run, [tensor.clone() for tensor in batch], leaves)
            return are_same(observed(model, run, _SEED, gradients=False), _run_whole(model, batch))
    except UNFIT:
        return False


def _run_whole(model: nn.Module, batch: Sequence[torch.Tensor]) -> list[Any]:
    return observed(model, partial(whole, model, batch), _SEED, gradients=False)


def whole(model: nn.Module, batch: Sequence[torch.Tensor]) -> Any:
    """What the network returns for a batch, which stays as it is."""
    with computing():
        return model(*fed(model, [tensor.clone() for tensor in batch]))


def observed(model: nn.Module, run: Callable[[], Any], seed: int, *, gradients: bool = True) -> list[Any]:
    """The leaves of what a run returns, its gradients, and the buffers that it leaves; they are put back.

    Args:
        model: model whose buffers a run may change.
        run: runs it once, in some variant.
        seed: seed of the random numbers that it draws.
        gradients: compute those of the trained parameters too.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and gradients]
    with kept_buffers(model), _seeded(seed):
        outputs = tree_leaves(run())
        sums = [
            output.square().sum() for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        found = torch.autograd.grad(sums, trained, allow_unused=True) if sums and trained else ()
        return [*outputs, *found, *(buffer.clone() for buffer in model.buffers())]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The random numbers of this seed, also those of NumPy, by which transformers masks parts of sounds."""
    state = np.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            np.random.seed(seed)
            yield
    finally:
        np.random.set_state(state)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put the buffers back at the end, whatever a run made of them."""
    buffers = [(*path.rpartition("."), buffer, buffer.clone()) for path, buffer in model.named_buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, _, name, buffer, before in buffers:
                setattr(model.get_submodule(owner), name, buffer.copy_(before))


def are_same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether two lists of observed values are equal, tensors to the bit."""
    return len(ours) == len(theirs) and all(_is_same(our, other) for our, other in zip(ours, theirs, strict=True))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
