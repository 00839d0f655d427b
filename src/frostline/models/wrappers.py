"""Finds the network inside wrappers that say how it runs, and its modules by their paths inside or outside of these."""

import sys
from collections.abc import Iterator

from torch import nn

from frostline.errors import ModelError

__all__ = ("is_split", "not_averaged", "resolved_path", "unwrapped")

_INNER = ("_orig_mod", "module")


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``, or the network itself.

    These say where and how a network runs, not what it computes: a job runs the frozen part by its own engines, and the
    trained part as a head of its own. Parameters are the same objects inside and outside. Wrappers that compute
    something themselves, as PEFT's do, are part of the network.

    Raises:
        ModelError: Its parameters are split over processes, so that nobody has the frozen part whole.
    """
    if is_split(model):
        raise ModelError(
            "fully_shard has split the network's parameters over processes, and frozen layers are needed whole: make "
            "the job of the network as it is without, and then call fully_shard(job.head); make the optimiser of "
            "job.head.parameters() behind that"
        )
    return list(_layers(model))[-1]


def is_split(model: nn.Module) -> bool:
    """Whether parameters of a network, or of a part of it, are split over processes by FSDP."""
    # As below: nothing is split where nobody has imported what splits.
    splits = sys.modules.get("torch.distributed.fsdp")
    kinds = () if splits is None else (splits.FSDPModule, splits.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())


def not_averaged(model: nn.Module) -> str | None:
    """Why gradients of the head are not averaged over the processes as the wrapped network's are; None where none is.

    Args:
        model: network as the user gave it.
    """
    data_parallel = [layer for layer in _layers(model) if isinstance(layer, nn.parallel.DistributedDataParallel)]
    if all(layer.process_group.size() == 1 for layer in data_parallel):
        return None
    return (
        "DistributedDataParallel averages the gradients of the network that it wraps when that runs, and a job runs "
        "its head alone: wrap job.head in DistributedDataParallel too, or the processes train apart"
    )


def resolved_path(model: nn.Module, path: str) -> str:
    """The path of a module in ``unwrapped(model)``, which may be said as the wrapper has it, or as the network inside.

    Args:
        model: wrapped or not.
        path: dotted path; one that names no module is given back without the names of wrappers.
    """
    *around, model = _layers(model)
    for _ in around:
        path = _without(path, _INNER)
    paths = dict(model.named_modules())
    tuned = getattr(model, "get_base_model", None)
    if path in paths or not callable(tuned):
        return path
    base = tuned()
    outer = next((name for name, module in paths.items() if module is base), "")
    return f"{outer}.{path}" if f"{outer}.{path}" in paths else path


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The network and what it wraps, from the outside in."""
    layer: nn.Module | None = model
    while layer is not None:
        yield layer
        layer = _inner(layer)


def _inner(model: nn.Module) -> nn.Module | None:
    # Importing the compiler takes seconds, and nothing is compiled where nobody has imported it.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    is_compiled = compiler is not None and issubclass(type(model), compiler.OptimizedModule)
    is_parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    name = "_orig_mod" if is_compiled else "module" if is_parallel else None
    return None if name is None else model.get_submodule(name)


def _without(path: str, names: tuple[str, ...]) -> str:
    first, _, rest = path.partition(".")
    return rest if first in names else path
