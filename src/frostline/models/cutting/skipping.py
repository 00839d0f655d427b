"""A head for networks that cannot be traced: the user's own forward, with its leading modules skipped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from frostline.core import Graph, TensorSpec
from frostline.engines.base.runner import Runner
from frostline.engines.machine.isolation import computing
from frostline.errors import ModelError
from frostline.models.cutting.head import Head, tensor_paths
from frostline.models.tracing.border import fed_specs

__all__ = ("ChainedModule", "SkippingHead", "replay")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainedModule:
    """A module in a chain, each of which takes exactly the tensor that the one before it gave.

    Attributes:
        path: path of the module.
        module: the module.
        gives: shape and dtype of what it gives, a sample.
    """

    path: str
    module: nn.Module
    gives: TensorSpec


class SkippingHead(Head):
    """Runs the user's own forward, with the modules of a chain skipped.

    What the chain would have computed comes from the activations at the frost line; everything before it, the
    network's input among it, is only a shape. The network's code may ask for its shape, dtype and device; where it
    asks for more, it is told that there is nothing.

    Args:
        model: the user's network.
        chain: its leading modules, at least one.
        inputs: specifications of the network's inputs.
        rest: from the frost line to what the last module of the chain gives; mostly nothing.
        leaves: the tensors of ``rest``, by the names in the network.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: Sequence[ChainedModule],
        inputs: Sequence[TensorSpec],
        rest: Graph,
        leaves: Mapping[str, torch.Tensor],
    ) -> None:
        skipped = {id(inner) for link in chain for inner in link.module.modules()}
        modules = {path: module for path, module in model.named_modules() if id(module) not in skipped}
        inside = tuple(f"{link.path}." for link in chain)
        super().__init__(model, [path for path in tensor_paths(model) if not path.startswith(inside)], modules)
        self._chain = tuple(chain)
        self._inputs = tuple(inputs)
        self._rest = rest
        self._leaves = dict(leaves)

    def _run(self, tensors: list[torch.Tensor]) -> Any:
        device = tensors[0].device
        leaves = [self._leaves[tensor].to(device) for _, tensor in self._rest.leaves]
        with torch.no_grad():
            [given] = Runner(self._rest, device=device).run(tensors, leaves)
        with computing():
            # A copy, since the network may go on in place and does not own what was delivered.
            return replay(self._model[0], self._chain, self._inputs, given.clone())


def replay(model: nn.Module, chain: Sequence[ChainedModule], inputs: Sequence[TensorSpec], given: torch.Tensor) -> Any:
    """Run the network with the modules of the chain skipped.

    Args:
        model: the network.
        chain: at least one module.
        inputs: specifications of the network's inputs.
        given: output of the last module of the chain; the network may write to it.

    Raises:
        ModelError: The network asks for something that was skipped, or runs its modules in another order.
    """
    absent = [_absent(spec, given) for spec in (*fed_specs(model, inputs), *(link.gives for link in chain[:-1]))]
    steps = _Steps([*absent[len(inputs) - 1 :], given])
    with ExitStack() as stack:
        for place, link in enumerate(chain):
            stack.enter_context(_replaced(link, steps.at(place, link.path)))
        output = model(*absent[: len(inputs)])
    if steps.done != len(chain):
        raise ModelError("the network did not run the modules that it ran before")
    return output


class _Steps:
    """Hands every skipped module's result out, when it is its turn and it is given what it was."""

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values = values
        self.done = 0

    def at(self, place: int, path: str) -> Callable[..., torch.Tensor]:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs or len(args) != 1 or args[0] is not self._values[place] or self.done != place:
                raise ModelError(f"the network runs its frozen module {path!r} otherwise than when it was cut")
            self.done += 1
            return self._values[place + 1]

        return forward


@contextmanager
def _replaced(link: ChainedModule, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Give a module another forward for a while; its hooks and its attributes stay."""
    own = vars(link.module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


class _Absent(torch.Tensor):
    """A tensor of which there is only the shape."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _ABOUT:
            name = getattr(func, "__name__", str(func))
            raise ModelError(f"the network asks for values ({name}) that were skipped: they are not delivered")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def _absent(spec: TensorSpec, like: torch.Tensor) -> torch.Tensor:
    one = torch.zeros((), dtype=getattr(torch, spec.dtype), device=like.device)
    return one.expand(len(like), *spec.shape).as_subclass(_Absent)


_ABOUT = frozenset(
    {
        torch.Tensor.__len__,
        torch.Tensor.dim,
        torch.Tensor.get_device,
        torch.Tensor.is_floating_point,
        torch.Tensor.numel,
        torch.Tensor.size,
        *(getattr(torch.Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "layout", "ndim", "shape")),
    }
)
"""What may be asked of a tensor that is not there."""
