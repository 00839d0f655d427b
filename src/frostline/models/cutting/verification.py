"""Verifies a cut by running both: prefix and head together must do what the whole network does, to the bit."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from frostline.core import TensorSpec
from frostline.engines.base.runner import Runner, leaf_values
from frostline.models.cutting.frozen import FrozenPart
from frostline.models.cutting.head import Head
from frostline.models.modes import all_in_eval, modes
from frostline.models.tracing.comparison import UNFIT, are_same, observed, whole
from frostline.models.tracing.inputs import random
from frostline.models.tracing.traced import device_of

__all__ = ("equals_whole",)

_ROWS = 8
_SEEDS = (1, 2)


def equals_whole(
    model: nn.Module, part: FrozenPart, head: Head, inputs: Sequence[TensorSpec], flags: Mapping[str, bool]
) -> bool:
    """Whether prefix and head together do what the whole network does, to the bit, on two random batches.

    Compared are outputs, gradients and buffers, with the modes in which the head is trained and in eval mode. The
    network is left as it was.

    Args:
        model: the whole network.
        part: its frozen part.
        head: what is to go on from there.
        inputs: what the network takes.
        flags: the modes in which the head is trained.
    """
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
                    ours = observed(model, partial(head, features), seed)
                    theirs = observed(model, partial(whole, model, batch), seed)
            except UNFIT:
                return False
            if not are_same(ours, theirs):
                return False
    return True
