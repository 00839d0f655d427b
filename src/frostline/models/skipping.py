"""Runs a network's own forward from the frost line on: what lies before it is skipped, or runs on shapes alone.

Where tensors at the frost line come from is found out by their values: the network runs once on a few rows, and each
operation's result is compared with what the frozen part gives. Later runs count operations up to those, and put
activations in their places.
"""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_unflatten

from frostline.core import Graph, GraphNode, TensorSpec
from frostline.core.errors import ModelError
from frostline.engines.machine import compute_slot
from frostline.engines.measure import version_of
from frostline.models.absent import MADE_LIKE, Absent, NoValues, Run, Unsteady, no_values_for
from frostline.models.modules import (
    CallRecorder,
    CountedCall,
    all_in_eval,
    inverse_order,
    laid_out,
    memory_order,
    modes,
    watch_reads,
    with_forwards,
)
from frostline.models.outside import PLAIN, plain_copy, state_of
from frostline.models.tracing import cast_inputs, cast_specs, device_of, output_leaves

__all__ = (
    "RECORDING",
    "SkipPlan",
    "enclosed_modules",
    "makes_same_features",
    "plan_of",
    "run_behind",
    "silent_threads",
    "to_the_line",
    "whole_plan",
    "written_activations",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Where a tensor at the frost line takes the place of what the network's own code makes.

    Attributes:
        operation: number of operations on absent tensors before the one that makes it; below 0 for the inputs.
        result: number of it among the operation's results.
        name: the operation.
        tensor: number of it among the tensors that cross the frost line.
        order: dimensions of the network's tensor, from the outermost in memory to the innermost.
    """

    operation: int
    result: int
    name: str
    tensor: int
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Absence:
    """What is known of a tensor that is not computed.

    Attributes:
        shape: size of each dimension without rows, and its growth with each row.
        order: dimensions from the outermost in memory to the innermost.
        dtype: type of its numbers.
    """

    shape: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    def of(self, rows: int) -> torch.Tensor:
        """The shape alone, for so many rows."""
        sizes = [fixed + rows * grows for fixed, grows in self.shape]
        laid = torch.empty([sizes[dim] for dim in self.order], dtype=self.dtype, device="meta")
        return laid.permute(inverse_order(self.order))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crossing:
    """A tensor at the frost line that a skipped call gives.

    Attributes:
        placement: the place that it comes from.
        shape: the shape, a sample.
    """

    placement: _Placement
    shape: tuple[int, ...]

    def of(self, plan: "SkipPlan", features: Sequence[torch.Tensor]) -> torch.Tensor:
        """The activation in its place."""
        feature = features[self.placement.tensor]
        laid = _given(plan, self.placement, features, (len(feature), *self.shape))
        if laid is None:
            raise ModelError(f"features of shape {[*feature.shape]} do not fit the frost line: give batch.features")
        return laid


@dataclass(frozen=True, slots=True, kw_only=True)
class _SkippedCall:
    """One call of a module that nothing behind the frost line needs.

    Attributes:
        path: path of the module.
        call: number of its calls before this one.
        starts: number of operations on absent tensors before it.
        ends: number of those when it is done.
        gives: result of the call, with an ``_Absence`` or a ``_Crossing`` in the place of each tensor.
    """

    path: str
    call: int
    starts: int
    ends: int
    gives: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipPlan:
    """What of a network's own forward is skipped, and where activations come in; data alone.

    Attributes:
        placements: the place where activations come in, in order.
        skipped: calls that are skipped, in order.
        idle: paths of the modules that run before the frost line alone.
        reads: path of a module, name and value of each of its attributes that is read before the frost line and is
            not changed by a run.
        asked: paths of the modules that are asked for their mode there, or may be unseen: no other mode matters.
        written: numbers of the activations into which the network writes, so that it is given copies of these.
        learning: numbers of those that require gradients in the network, as where checkpoints of activations need it.
        inside: paths of modules that count as one operation where they are called with activations alone, since the
            frozen part has all that they do.
    """

    placements: tuple[_Placement, ...]
    skipped: tuple[_SkippedCall, ...] = ()
    idle: frozenset[str] = frozenset()
    reads: tuple[tuple[str, str, Any], ...] = ()
    asked: frozenset[str] = frozenset()
    written: frozenset[int] = frozenset()
    learning: frozenset[int] = frozenset()
    inside: frozenset[str] = frozenset()

    @property
    def taken(self) -> frozenset[int]:
        """Numbers of the tensors that take a place; the network's own code makes all others again."""
        return frozenset(placement.tensor for placement in self.placements)


def _given(
    plan: SkipPlan, placement: _Placement, features: Sequence[torch.Tensor], shape: Sequence[int]
) -> torch.Tensor | None:
    """An activation as the network takes it: itself where nobody writes into it and it lies as it must, else a copy."""
    feature, order = features[placement.tensor], placement.order
    lies = tuple(order) == tuple(range(len(order))) and feature.is_contiguous()
    fits = feature.shape[:1] == torch.Size(shape)[:1] and feature.numel() == torch.Size(shape).numel()
    # Of an inference tensor nobody would see that something is written.
    if not (lies and fits) or feature.is_inference() or placement.tensor in plan.written:
        found = laid_out(feature, shape, order)
    else:
        found = (feature if feature.requires_grad else feature.detach()).view(tuple(shape))
    if found is not None and placement.tensor in plan.learning and not found.requires_grad:
        found.requires_grad_(torch.is_grad_enabled())
    return found


class _Reached(BaseException):
    """The last activation has come in; no error, so that no network's own code takes it for one."""


@contextmanager
def silent_threads() -> Iterator[None]:
    """Have nothing printed of what ends threads of the network's own code in a trial: what it shows is said once."""
    own = threading.excepthook

    def tell(ended: threading.ExceptHookArgs) -> None:
        if not isinstance(ended.exc_value, NoValues | Unsteady | _Reached):
            own(ended)

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = own


@contextmanager
def to_the_line(model: nn.Module, flags: Mapping[str, bool], *, is_cast: bool = False) -> Iterator[None]:
    """Have the network compute what the frozen part does within the block, whatever the caller's own block says."""
    uncast = nullcontext() if is_cast else torch.autocast(device_of(model).type, enabled=False)
    with modes(model, flags), torch.no_grad(), uncast:
        yield


def enclosed_modules(graph: Graph, line: int) -> frozenset[str]:
    """Paths of the modules of which all that was traced lies before the frost line.

    Args:
        graph: the whole network.
        line: index of the last node before it.
    """

    def around(nodes: Sequence[GraphNode]) -> set[str]:
        paths = {node.module.partition("@")[0] for node in nodes}
        return {path[:end] for path in paths for end, mark in enumerate(f"{path}.") if mark == "."}

    return frozenset(around(graph.nodes[: line + 1]) - around(graph.nodes[line + 1 :]) - {""})


def whole_plan(
    model: nn.Module,
    inputs: Sequence[TensorSpec],
    batch: Sequence[torch.Tensor],
    features: Sequence[torch.Tensor],
    flags: Mapping[str, bool],
    inside: frozenset[str] = frozenset(),
) -> SkipPlan | None:
    """What ``plan_of`` finds, and the activations into which the network writes in each mode.

    Args:
        model: the user's network, left as it was.
        inputs: specifications of its inputs.
        batch: a few rows, as they are prepared.
        features: tensors that its frozen part gives for them.
        flags: the modes in which the head is trained.
        inside: see ``SkipPlan``.

    Raises:
        Unsteady: See ``plan_of``.
    """
    inside = frozenset(path for path in inside if not _has_hooks_inside(model.get_submodule(path)))
    with to_the_line(model, flags):
        plan = plan_of(model, cast_inputs(model, batch), features, inside)
    if plan is None:
        return None
    for training in (flags, all_in_eval(model)):
        with modes(model, training):
            written = written_activations(model, plan, inputs, features)
        plan = replace(plan, written=plan.written | written)
    return plan


def plan_of(
    model: nn.Module,
    batch: Sequence[torch.Tensor],
    features: Sequence[torch.Tensor],
    inside: frozenset[str] = frozenset(),
) -> SkipPlan | None:
    """Find out where the tensors at the frost line come from, and what need not run before it.

    It is the caller who sets modes, and puts buffers back.

    Args:
        model: the user's network.
        batch: a few rows, as the network takes them.
        features: tensors that its frozen part gives for them.
        inside: see ``SkipPlan``.

    Returns:
        None where the network's code does not make such tensors, or looks at values before the frost line.

    Raises:
        Unsteady: The next run gives other features at the frost line, or makes them by other modules.
    """
    before = {id(module): dict(vars(module)) for module in model.modules()}
    found: list[tuple[_Placement, torch.Tensor]] = []
    calls: list[CountedCall] = []
    entries: list[int] = []
    for error in _ERRORS:  # what is equal first: a layer that does almost nothing gives almost the same
        found.clear()
        entries.clear()
        calls = _run_on(model, batch, partial(_recognised, features, error, found), inside, entries=entries)
        if {placement.tensor for placement, _ in found} == set(range(len(features))):
            break
    if not found:
        return None
    placed = {id(value): placement for placement, value in found}
    counted = [call for call in calls if _is_counted(call, inside, entries)]
    calls = [call for call in calls if not _is_within(call, [*map(id, counted)])]
    plan = SkipPlan(placements=tuple(placed.values()), idle=_idle(model, calls, placed), inside=inside)
    others, learning, reads, asked = _run_again(model, plan, batch, features, before)
    skipped = tuple(_skippable(model, calls, others, plan, placed, entries))
    if not {*entries} <= {place for call in skipped for place in range(call.starts, call.ends)}:
        return None  # what counted as one operation would run as it is
    return replace(plan, skipped=skipped, reads=reads, asked=asked, learning=learning)


def _run_on(
    model: nn.Module,
    batch: Sequence[torch.Tensor],
    placed: Callable[[int, int, str, torch.Tensor], torch.Tensor | None],
    inside: Collection[str],
    *,
    learns: bool = False,
    entries: list[int] | None = None,
) -> list[CountedCall]:
    run = Run(batch[0].device, len(batch[0]), placed, is_real=True, learns=learns)
    with torch.set_grad_enabled(learns):
        given = [run.take(place, tensor.clone()) for place, tensor in enumerate(batch)]
        calls = _recorded(model, run, given, inside)
    if entries is not None:
        entries.extend(run.entries)
    return calls


def _is_counted(call: CountedCall, inside: Collection[str], entries: Collection[int]) -> bool:
    """Whether a call counted as one operation."""
    return call.path in inside and call.starts in entries and call.ends == call.starts + 1


def makes_same_features(
    model: nn.Module,
    plan: SkipPlan,
    batch: Sequence[torch.Tensor],
    features: Sequence[torch.Tensor],
    *,
    is_moved: bool = False,
) -> bool:
    """Whether a network makes these features at the frost line, by other kernels where its tensors were moved."""
    with suppress(Unsteady):
        _run_to_the_line(model, plan, batch, features, _ERROR_OF_MOVED if is_moved else _ERRORS[-1])
        return True
    return False


_OTHER = "its frozen layers give something else in the next run, by what their code keeps in Python"
_ERROR_OF_MOVED = 5e-2  # in 16 bits, or on a device that multiplies in fewer
_UNKNOWN = object()


def _run_again(
    model: nn.Module,
    plan: SkipPlan,
    batch: Sequence[torch.Tensor],
    features: Sequence[torch.Tensor],
    before: Mapping[int, Mapping[str, Any]],
) -> tuple[list[CountedCall], frozenset[int], tuple[tuple[str, str, Any], ...], frozenset[str]]:
    """What ``_calls_on`` finds, the attributes that are read before the frost line, and who is asked for its mode.

    It has to give the same features; where it does not, the rows of before say whether that is by their number. What
    the first run has set, as transformers notes that its hooks are there, is the network's own and left out.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    first: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
    asked: set[int] = set()

    def read(module: nn.Module, name: str, value: Any) -> None:
        first.setdefault((id(module), name), (module, value))

    with watch_reads(model, read, lambda module: asked.add(id(module))):
        is_same = False  # also where it fails
        try:
            calls, learning, is_same = _calls_on(model, plan, batch, features)
        finally:
            if not is_same:
                _run_to_the_line(model, plan, batch, features, _ERRORS[-1])
    reads = tuple(_steady(first, paths, before, plan.idle))
    return calls, learning, reads, frozenset(paths[key] for key in asked)


def _run_to_the_line(
    model: nn.Module, plan: SkipPlan, batch: Sequence[torch.Tensor], features: Sequence[torch.Tensor], error: float
) -> None:
    """Run a network up to the frost line; raises ``Unsteady`` where it makes other features there."""
    places = {(placement.operation, placement.result): placement for placement in plan.placements}
    if plan.placements[-1].operation < 0:
        return

    def placed(place: int, number: int, _: str, value: torch.Tensor) -> torch.Tensor | None:
        placement = places.pop((place, number), None)
        if placement is None:
            return None
        laid = laid_out(features[placement.tensor], value.shape, placement.order)
        if laid is None or not _is_close(laid, value, error):
            raise Unsteady(_OTHER)
        if not places:
            raise _Reached
        return value.clone()

    _run_on(model, batch, placed, plan.inside)
    if places:
        raise Unsteady(_OTHER)


def _steady(
    first: Mapping[tuple[int, str], tuple[nn.Module, Any]],
    paths: Mapping[int, str],
    before: Mapping[int, Mapping[str, Any]],
    idle: Collection[str],
) -> Iterator[tuple[str, str, Any]]:
    """What was read and stays as it is, and as it was before the first run."""
    for (key, name), (module, value) in first.items():
        if plain_copy(vars(module).get(name)) != value:
            if paths[key] in idle:
                raise Unsteady(f"its frozen layer {paths[key]!r} counts in its attribute {name!r} as it runs")
        elif plain_copy(before.get(key, {}).get(name, _UNKNOWN)) == value:
            yield paths[key], name, value


def _recognised(
    features: Sequence[torch.Tensor],
    error: float,
    found: list[tuple[_Placement, torch.Tensor]],
    place: int,
    number: int,
    name: str,
    value: torch.Tensor,
) -> torch.Tensor | None:
    """The value itself, where it is one of those at the frost line."""
    if name in MADE_LIKE or value.dim() == 0 or type(value) is not torch.Tensor:
        return None
    order = memory_order(value)
    for tensor, feature in enumerate(features):
        if feature.dtype == value.dtype and feature.numel() == value.numel():
            laid = laid_out(feature, value.shape, order)
            if laid is not None and _is_close(laid, value, error):
                placement = _Placement(operation=place, result=number, name=name, tensor=tensor, order=order)
                found.append((placement, value.clone()))
                return found[-1][1]
    return None


_ERRORS = (0.0, 1e-7, 1e-5)  # of values that two kernels of torch give for the same


def _is_close(tensor: torch.Tensor, other: torch.Tensor, error: float) -> bool:
    if torch.equal(tensor, other):
        return True
    if not tensor.is_floating_point():
        return False
    off, size = (tensor - other).float().norm(), other.float().norm()
    return bool(off <= error * size)


def _uncompiled() -> AbstractContextManager[object]:
    """Let nothing be compiled, where something may be: the compiler does not follow tensors that are not there."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _recorded(model: nn.Module, run: Run, inputs: Sequence[torch.Tensor], inside: Collection[str]) -> list[CountedCall]:
    recorder = CallRecorder(lambda: run.count)

    def forward(path: str, own: Callable[..., Any]) -> Callable[..., Any]:
        return recorder.forward(path, (lambda *args, **kwargs: run.call(own, args, kwargs)) if path in inside else own)

    modules = {path: module for path, module in model.named_modules() if path}
    with compute_slot(), _uncompiled(), with_forwards(modules, forward), suppress(_Reached):
        model(*inputs)
    return recorder.calls


def _calls_on(
    model: nn.Module, plan: SkipPlan, batch: Sequence[torch.Tensor], features: Sequence[torch.Tensor]
) -> tuple[list[CountedCall], frozenset[int], bool]:
    """The calls of modules up to the frost line on one row more, which tensors there learn, and if these are the same.

    They have values: PyTorch's shapes without values import torch._dynamo, which takes longer than some rows do.
    """
    last = plan.placements[-1]
    if last.operation < 0:
        return [], frozenset(), True
    tensors = {(placement.operation, placement.result): placement.tensor for placement in plan.placements}
    given = _placing(plan, [torch.cat([feature, feature[:1]]) for feature in features])
    seen: list[tuple[int, bool, bool]] = []

    def placed(place: int, number: int, name: str, value: torch.Tensor) -> torch.Tensor | None:
        if (tensor := given(place, number, name, value)) is not None:
            seen.append((tensors[place, number], value.requires_grad, _is_close(tensor, value, _ERRORS[-1])))
        if (place, number) == (last.operation, last.result):
            raise _Reached
        return tensor

    calls = _run_on(model, [torch.cat([rows, rows[:1]]) for rows in batch], placed, plan.inside, learns=True)
    learning = frozenset(tensor for tensor, learns, _ in seen if learns)
    return calls, learning, len(seen) == len(tensors) and all(is_close for *_, is_close in seen)


def _meta(spec: TensorSpec, rows: int) -> torch.Tensor:
    return torch.empty((rows, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta")


def _placing(
    plan: SkipPlan, features: Sequence[torch.Tensor]
) -> Callable[[int, int, str, torch.Tensor], torch.Tensor | None]:
    """Puts activations in the places of what the network's code would make."""
    places = {(placement.operation, placement.result): placement for placement in plan.placements}

    def placed(place: int, number: int, name: str, value: torch.Tensor) -> torch.Tensor | None:
        placement = places.get((place, number))
        if placement is None:
            return None
        laid = None
        if placement.name == name and value.dim() == len(placement.order):
            laid = _given(plan, placement, features, value.shape)
        if laid is None:
            raise ModelError(
                f"the network computes {name} of shape {list(value.shape)} where it computed {placement.name} at the "
                f"frost line when it was cut, and it was given {list(features[placement.tensor].shape)}: give "
                "batch.features whole; where these are, its code before the frost line has changed: make the job again"
            )
        return laid

    return placed


def _skippable(
    model: nn.Module,
    calls: Sequence[CountedCall],
    others: Sequence[CountedCall],
    plan: SkipPlan,
    placed: Mapping[int, _Placement],
    entries: Collection[int],
) -> Iterator[_SkippedCall]:
    """The outermost calls that may be skipped."""
    alike = {(call.path, call.call): call for call in others}
    taken: list[int] = []
    for call in calls:
        if _is_within(call, taken) or call.structure is None or call.ends <= call.starts:
            continue
        module = model.get_submodule(call.path)
        if any(parameter.requires_grad for parameter in module.parameters()) or _has_hooks_inside(module):
            continue
        other = alike.get((call.path, call.call))
        is_at_line = _is_layer(module) and _is_at_line(call, plan, placed)
        if _is_counted(call, plan.inside, entries):
            leaves = _given_by_call(call, other, placed)
        else:
            leaves = _crossing(call, plan, placed) if is_at_line else _absences(call, other, plan)
        if leaves is not None:
            taken.append(id(call))
            gives = tree_unflatten(leaves, call.structure)
            yield _SkippedCall(path=call.path, call=call.call, starts=call.starts, ends=call.ends, gives=gives)


RECORDING = ("transformers.utils.output_capturing",)
"""Where hooks come from that note what layers give and change nothing; transformers sets them at the first forward."""


def _has_hooks_inside(module: nn.Module) -> bool:
    """Whether somebody has hooks on modules in it, which do not run where it is skipped whole."""
    return any(
        getattr(hook, "__module__", "") not in RECORDING
        for inner in module.modules()
        if inner is not module
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks)  # noqa: SLF001
        for hook in hooks.values()
    )


def _is_layer(module: nn.Module) -> bool:
    """Whether it is one of torch's own: other code may do more with a tensor at the frost line, as values have it."""
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


def _is_within(call: CountedCall, taken: Sequence[int]) -> bool:
    parent = call.parent
    while parent is not None:
        if id(parent) in taken:
            return True
        parent = parent.parent
    return False


def _is_at_line(call: CountedCall, plan: SkipPlan, placed: Mapping[int, _Placement]) -> bool:
    """Whether a call gives tensors at the frost line as they came in, and all that came in within it."""
    inside = {placement for placement in plan.placements if call.starts <= placement.operation < call.ends}
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    given = {placed.get(id(tensor)) for tensor in tensors if version_of(tensor) == 0}
    return bool(inside) and len(tensors) == len(inside) and given == inside


def _crossing(call: CountedCall, plan: SkipPlan, placed: Mapping[int, _Placement]) -> list[Any] | None:
    """The leaves of what such a call gives; None where they are of an unknown kind."""
    found = [
        _Crossing(placement=placed[id(leaf)], shape=tuple(leaf.shape[1:])) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in call.leaves
    ]
    is_over = call.ends <= plan.placements[-1].operation + 1
    return found if is_over and all(isinstance(leaf, _Crossing) or type(leaf) in PLAIN for leaf in found) else None


def _absences(call: CountedCall, other: CountedCall | None, plan: SkipPlan) -> list[Any] | None:
    """The leaves of what a call gives of which nothing is there, from its like on one more row; None where some is."""
    if other is None or (call.starts, call.ends) != (other.starts, other.ends) or call.structure != other.structure:
        return None
    if not _is_idle(call, plan):
        return None
    return [_absence(*pair) for pair in zip(call.leaves, other.leaves, strict=True)]


def _given_by_call(call: CountedCall, other: CountedCall | None, placed: Mapping[int, _Placement]) -> list[Any] | None:
    """The leaves of what a call gives that counted as one operation; None where some are of an unknown kind."""
    # The last one to be placed ends the other run, in which its call has no leaves.
    others = [None] * len(call.leaves) if other is None or other.structure is None else other.leaves
    pairs = [*zip(call.leaves, others, strict=True)]
    if any(isinstance(leaf, Absent) and not isinstance(more, Absent) for leaf, more in pairs):
        return None
    found = [
        _Crossing(placement=placed[id(leaf)], shape=tuple(leaf.shape[1:]))
        if id(leaf) in placed
        else _absence(leaf, more)
        for leaf, more in pairs
    ]
    return found if all(isinstance(leaf, _Crossing | _Absence) or type(leaf) in PLAIN for leaf in found) else None


def _is_idle(call: CountedCall, plan: SkipPlan) -> bool:
    if call.ends < 0 or call.ends > plan.placements[-1].operation:
        return False
    if any(call.starts <= placement.operation < call.ends for placement in plan.placements):
        return False
    kinds = [isinstance(leaf, Absent) or type(leaf) in PLAIN for leaf in call.leaves]
    return all(kinds) and any(isinstance(leaf, Absent) for leaf in call.leaves)


def _idle(model: nn.Module, calls: Sequence[CountedCall], placed: Collection[int]) -> frozenset[str]:
    """Paths of the modules that give nothing but what is absent or crosses the frost line, in all their calls."""
    busy = {call.path for call in calls if not _gives_nothing(call, placed)}
    frozen = {
        path
        for path in {call.path for call in calls} - busy
        if not any(parameter.requires_grad for parameter in model.get_submodule(path).parameters())
    }
    return frozenset(frozen)


def _gives_nothing(call: CountedCall, placed: Collection[int]) -> bool:
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and all(isinstance(leaf, Absent) or id(leaf) in placed for leaf in tensors)


def _absence(leaf: Any, other: Any) -> Any:
    """A leaf of what a skipped call returns, from what it was on a few rows and on one more."""
    if not isinstance(leaf, Absent):
        return leaf
    rows = leaf.run.rows
    pairs = zip(leaf.known.shape, other.known.shape, strict=True)
    shape = tuple((size - (more - size) * rows, more - size) for size, more in pairs)
    return _Absence(shape=shape, order=memory_order(leaf.known), dtype=leaf.known.dtype)


def run_behind(model: nn.Module, plan: SkipPlan, inputs: Sequence[TensorSpec], features: Sequence[torch.Tensor]) -> Any:
    """What the network's own forward returns for activations at the frost line, which stay as they are.

    Args:
        model: the user's network.
        plan: calls that are skipped, and where activations come in.
        inputs: specifications of its inputs.
        features: tensors that cross the frost line, of ``[batch, ...]`` each.

    Raises:
        ModelError: The network asks for something that was skipped, or its code before the frost line has changed.
    """
    rows, last = len(features[0]), plan.placements[-1]
    given_at, before_the_line = _placing(plan, features), ExitStack()
    with before_the_line:

        def placed(place: int, number: int, name: str, value: torch.Tensor) -> torch.Tensor | None:
            tensor = given_at(place, number, name, value)
            if (place, number) == (last.operation, last.result):
                before_the_line.close()  # compiled layers that are trained run compiled
            return tensor

        run = Run(features[0].device, rows, placed, last=max(-1, last.operation))
        skipper = _Skipper(run, plan, features, before_the_line.close)
        modules = {path: model.get_submodule(path) for path in skipper.paths}
        before_the_line.enter_context(_uncompiled())
        with compute_slot(), with_forwards(modules, skipper.forward):
            given = [run.take(place, _meta(spec, rows)) for place, spec in enumerate(cast_specs(model, inputs))]
            before = [*map(state_of, features)]
            output = model(*given)
    if any(isinstance(leaf, Absent) for leaf in output_leaves(output)):
        raise ModelError(no_values_for("returned"))
    if before != [*map(state_of, features)]:
        raise ModelError(
            "the network writes into its activations at the frost line, which it did not when it was cut, so that the "
            "batch is changed: make the job again, or call job.refreeze()"
        )
    return output


def written_activations(
    model: nn.Module, plan: SkipPlan, inputs: Sequence[TensorSpec], features: Sequence[torch.Tensor]
) -> frozenset[int]:
    """Numbers of the activations into which a network writes, by one run in the modes that it is in."""
    copies = [feature.clone() for feature in features]
    with torch.no_grad(), suppress(ModelError):
        run_behind(model, plan, inputs, copies)
    pairs = zip(map(version_of, copies), copies, features, strict=True)  # nobody counts what is written into their data
    return frozenset(number for number, (version, now, own) in enumerate(pairs) if version or not torch.equal(now, own))


class _Skipper:
    """Gives what skipped calls gave, as far as anything is known of it."""

    def __init__(self, run: Run, plan: SkipPlan, features: Sequence[torch.Tensor], reached: Callable[[], None]) -> None:
        self._run = run
        self._reached = reached
        self._plan = plan
        self._features = features
        self._counts: dict[str, int] = {}
        self._skipped = {(call.path, call.call): call for call in plan.skipped}
        self.paths = list(dict.fromkeys(call.path for call in plan.skipped))

    def forward(self, path: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            number = self._counts.get(path, 0)
            self._counts[path] = number + 1
            call = self._skipped.get((path, number))
            return own(*args, **kwargs) if call is None else self._skip(call)

        return forward

    def _skip(self, call: _SkippedCall) -> Any:
        if self._run.count != call.starts:
            raise ModelError(
                f"frozen module {call.path!r} was called in another order, or behind other operations, than when the "
                "network was traced: make the job again, or call job.refreeze()"
            )
        self._run.count = call.ends
        if call.ends > self._plan.placements[-1].operation:
            self._reached()
        return self._leaf(call.gives) if isinstance(call.gives, _Absence) else tree_map(self._leaf, call.gives)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, _Crossing):
            return leaf.of(self._plan, self._features)
        return self._run.hide(leaf.of(self._run.rows)) if isinstance(leaf, _Absence) else leaf
