"""Records a forward pass: which modules it runs, one in another and in order, and what each takes and gives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from frostline.engines.measure.footprint import version_of

__all__ = ("ModuleCall", "record")


@dataclass(slots=True, kw_only=True, eq=False)
class ModuleCall:
    """One run of a module.

    Attributes:
        path: of the module.
        module: that ran.
        taken: the one tensor that it took, None where it took anything else.
        taken_version: how often that tensor had been written to by then.
        given: the one tensor that it gave, None where it gave anything else.
        given_version: how often that tensor had been written to by then.
        inner: the runs of its own modules, in order.
    """

    path: str
    module: nn.Module
    taken: torch.Tensor | None = None
    taken_version: int = 0
    given: torch.Tensor | None = None
    given_version: int = 0
    inner: "list[ModuleCall]" = field(default_factory=list)

    def takes(self, given: torch.Tensor, version: int) -> bool:
        """Whether it took exactly that tensor, unchanged since."""
        return self.taken is given and self.taken_version == version


def record(model: nn.Module, inputs: Sequence[torch.Tensor]) -> ModuleCall:
    """Run the network once and tell what it ran; it is the caller who sets its modes.

    Raises:
        Exception: Whatever the network raises.
    """
    open_calls: list[ModuleCall] = []
    finished: list[ModuleCall] = []

    def begins(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = ModuleCall(path=path, module=module)
            if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
                call.taken, call.taken_version = args[0], version_of(args[0])
            open_calls.append(call)

        return hook

    def ends(_: nn.Module, __: Any, output: Any) -> None:
        call = open_calls.pop()
        if isinstance(output, torch.Tensor):
            call.given, call.given_version = output, version_of(output)
        (open_calls[-1].inner if open_calls else finished).append(call)

    with _hooked(model, begins, ends), torch.no_grad():
        model(*inputs)
    return finished[-1]


@contextmanager
def _hooked(
    model: nn.Module, begins: Callable[[str], Callable[..., None]], ends: Callable[..., None]
) -> Iterator[None]:
    handles = []
    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(begins(path), with_kwargs=True))
            handles.append(module.register_forward_hook(ends))
        yield
    finally:
        for handle in handles:
            handle.remove()
