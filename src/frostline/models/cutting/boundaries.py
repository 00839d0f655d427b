"""Cuts a network that cannot be traced as a whole, behind the longest chain of its leading modules that can be."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from frostline.core import TensorSpec
from frostline.engines.machine.isolation import computing
from frostline.engines.measure.footprint import version_of
from frostline.errors import ModelError, NothingFrozen, NotTraceable
from frostline.models.cutting.frozen import FrozenPart, find_frozen, named_tensors
from frostline.models.cutting.head import equals_whole
from frostline.models.cutting.skipping import ChainedModule, SkippingHead, replay
from frostline.models.graph.flow import prune, sources_of_change
from frostline.models.graph.frontiers import DTYPE_BYTES
from frostline.models.graph.split import after
from frostline.models.modes import all_in_eval, modes
from frostline.models.tracing.border import fed
from frostline.models.tracing.comparison import UNFIT
from frostline.models.tracing.export import device_of
from frostline.models.tracing.recording import ModuleCall, random, record, zeros
from frostline.models.tracing.trace_cache import trace

__all__ = ("cut_at_a_boundary",)

_RECORDED_ROWS = 2


def cut_at_a_boundary(
    model: nn.Module, inputs: Sequence[TensorSpec], flags: Mapping[str, bool]
) -> tuple[FrozenPart, SkippingHead, str] | str:
    """Find the longest leading chain of frozen modules that can be traced one behind the other.

    Each takes exactly the tensor that the one before it gave, the first the network's one input; a module that cannot
    be traced itself, or is not frozen whole, is searched inside. What is found is verified before it is trusted: on
    two random batches, in train and in eval mode, outputs, gradients and buffers of the head must be bit for bit
    those of the whole network.

    Args:
        model: the user's network; left as it was.
        inputs: specifications of its inputs.
        flags: the modes in which its head will be trained, by the paths of its modules.

    Returns:
        The frozen part, the head, and the path of the chain's last module; or why there is none.

    Raises:
        ModelError: The network does not run on such inputs at all.
    """
    whole, batch = _recorded(model, inputs)
    if len(inputs) != 1:
        return "a network of several inputs is not cut between its modules"
    chain, _ = _chained(whole.inner, batch[0], version_of(batch[0]), flags)
    for length in range(len(chain), 0, -1):
        found = _cut_behind(model, chain[:length], inputs, flags)
        if found is not None:
            return *found, chain[length - 1].path
    return "no frozen modules at its start follow one upon the other"


def _cut_behind(
    model: nn.Module, chain: Sequence[ChainedModule], inputs: Sequence[TensorSpec], flags: Mapping[str, bool]
) -> tuple[FrozenPart, SkippingHead] | None:
    """The frozen part and the head for this chain, if they hold what they must."""
    if not _can_be_skipped(model, chain, inputs):
        return None
    together = _Chain(chain)
    try:
        traced = trace(together, inputs, training=flags)
        part = find_frozen(together, traced, inputs)
    except (NotTraceable, NothingFrozen):
        return None
    if isinstance(part, str):
        return None
    rest = after(part.traced.graph, part.frost_line)
    head = SkippingHead(model, chain, inputs, rest, named_tensors(together, part.traced, rest))
    return (part, head) if equals_whole(model, part, head, inputs, flags) else None


class _Chain(nn.Module):
    """Modules of a network one behind the other, each at its own path."""

    def __init__(self, chain: Sequence[ChainedModule]) -> None:
        super().__init__()
        self._links = tuple(chain)
        for link in chain:
            *owners, name = link.path.split(".")
            place: nn.Module = self
            for owner in owners:
                if owner not in dict(place.named_children()):
                    place.add_module(owner, nn.Module())
                place = place.get_submodule(owner)
            place.add_module(name, link.module)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for link in self._links:
            value = link.module(value)
        return value


def _recorded(model: nn.Module, inputs: Sequence[TensorSpec]) -> tuple[ModuleCall, list[torch.Tensor]]:
    """One run in eval mode and the batch it was on: random numbers, or zeros where the network minds those."""
    device = device_of(model)
    batches = [random(inputs, _RECORDED_ROWS, torch.Generator().manual_seed(0), device)]
    batches.append(zeros(inputs, _RECORDED_ROWS, device))
    batches = [fed(model, batch) for batch in batches]
    why = ""
    for batch in batches:
        try:
            with modes(model, all_in_eval(model)), computing():
                return record(model, batch), batch
        except UNFIT as error:
            why = _first_line(error)
    shapes = " and ".join(str(list(spec.shape)) for spec in inputs)
    raise ModelError(f"the network does not run on an input of shape {shapes}: {why}")


def _chained(
    calls: Sequence[ModuleCall], value: torch.Tensor, version: int, flags: Mapping[str, bool]
) -> tuple[list[ChainedModule], torch.Tensor]:
    """The links that follow upon a value, and the value that the last of them gave."""
    chain: list[ChainedModule] = []
    for call in calls:
        if call.given is None or not call.takes(value, version):
            # What takes or gives more than one tensor may begin with modules that do not.
            inner, value = _chained(call.inner, value, version, flags)
            return [*chain, *inner], value
        spec = _spec(call.given)
        if spec is not None and _is_fixed(call, flags):
            chain.append(ChainedModule(path=call.path, module=call.module, gives=spec))
        else:
            inner, last = _chained(call.inner, value, version, flags)
            chain.extend(inner)
            if not inner or last is not call.given:
                break
        value, version = call.given, call.given_version
    return chain, value


def _is_fixed(call: ModuleCall, flags: Mapping[str, bool]) -> bool:
    """Whether the module can be traced, and nothing in it is trained or changes from run to run."""
    spec = None if call.taken is None else _spec(call.taken)
    if spec is None or any(parameter.requires_grad for parameter in call.module.parameters()):
        return False
    own = {path: flags[f"{call.path}.{path}".rstrip(".")] for path, _ in call.module.named_modules()}
    try:
        graph = prune(trace(call.module, [spec], training=own).graph)
    except NotTraceable:
        return False
    return not sources_of_change(graph, ())


def _spec(value: torch.Tensor) -> TensorSpec | None:
    dtype = str(value.dtype).removeprefix("torch.")
    is_batch = value.dim() > 0 and len(value) == _RECORDED_ROWS and dtype in DTYPE_BYTES
    return TensorSpec(tuple(value.shape[1:]), dtype) if is_batch else None


def _can_be_skipped(model: nn.Module, chain: Sequence[ChainedModule], inputs: Sequence[TensorSpec]) -> bool:
    """Whether the network asks for nothing else that the chain computes: the cheapest of the checks, made first."""
    batch = fed(model, random(inputs, _RECORDED_ROWS, torch.Generator().manual_seed(0), device_of(model)))
    try:
        with modes(model, all_in_eval(model)), computing(), torch.no_grad():
            replay(model, chain, inputs, _Chain(chain)(batch[0]))
    except UNFIT:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
