"""Puts a network's modules into other modes for a while, and leaves the network as it was."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ("all_in_eval", "modes")

_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def modes(model: nn.Module, training: Mapping[str, bool]) -> Iterator[None]:
    """Set the modules' modes, and put these and all other attributes back.

    Flags are set one by one, whatever ``train()`` overrides may do beside. A forward pass may leave things in a module
    (a cache of what it worked out, a buffer that was replaced); where it was only a trace, they are not even real.

    Args:
        model: any network.
        training: for each module path whether it is to be in train mode.
    """
    kept = [(vars(module), _attributes(module)) for module in model.modules()]
    try:
        for path, module in model.named_modules():
            module.training = training[path]
        yield
    finally:
        for attributes, before in kept:
            for name in attributes.keys() - {name for name, _, _ in before}:
                del attributes[name]
            attributes.update((name, _restored(value, content)) for name, value, content in before)


def all_in_eval(model: nn.Module) -> dict[str, bool]:
    """The modes of a network in eval mode."""
    return {path: False for path, _ in model.named_modules()}


def _attributes(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Name, value, and a shallow copy of the value where it is a plain container."""
    return [(name, value, value.copy() if type(value) in _CONTAINERS else None) for name, value in vars(module).items()]


def _restored(value: Any, content: Any) -> Any:
    """The same object with its content of before."""
    if content is not None and not _holds(value, content):
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(content)
    return value


def _holds(value: Any, content: Any) -> bool:
    """Whether a container holds the very same objects still."""
    ours, theirs = (
        [*mapping, *(mapping.values() if isinstance(mapping, dict) else ())] for mapping in (value, content)
    )
    return len(ours) == len(theirs) and all(our is other for our, other in zip(ours, theirs, strict=True))
