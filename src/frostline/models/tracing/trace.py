"""Traces a network, or finds the trace that an earlier job made of the same network on this machine."""

from collections.abc import Mapping, Sequence

from torch import nn

from frostline.config import cache_folder
from frostline.core import TensorSpec
from frostline.core.collector import collector_rests
from frostline.models.tracing.comparison import agrees
from frostline.models.tracing.fingerprint import fingerprint
from frostline.models.tracing.trace_cache import TraceCache
from frostline.models.tracing.traced import Trace

__all__ = ("trace",)


def trace(model: nn.Module, inputs: Sequence[TensorSpec], *, training: Mapping[str, bool]) -> Trace:
    """Trace ``model``, the batch size left open.

    To import torch.export and to trace with it takes seconds. So traces are kept in the user's cache folder, by a
    fingerprint of the network's code and configuration. A kept trace is used only where it still gives what the
    network gives on a random batch, to the bit.

    Args:
        model: the user's network; left as it was found.
        inputs: what its ``forward`` takes, in order.
        training: for each module path whether it is in train mode while traced.

    Raises:
        NotTraceable: torch.export does not follow it, or it holds what a graph cannot say.
    """
    kept, key = TraceCache(cache_folder() / "traces"), fingerprint(model, inputs, training)
    found = None if key is None else kept.get(key)
    if found is not None and agrees(model, found, inputs):
        return found
    with collector_rests():
        # Imports torch.export with all of torch._dynamo, which takes longer than to trace a small network.
        from frostline.models.tracing.export import export

        made = export(model, inputs, training=training)
    if key is not None:
        kept.put(key, made)
    return made
