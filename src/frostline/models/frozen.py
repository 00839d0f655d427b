"""How far the frozen part of a traced network reaches, where it may be cut, and which tensors it holds.

Works out ahead what a frozen part makes of its weights alone, where nodes do not run the operators that do it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from frostline.core import Cut, Graph, GraphNode, Ref, TensorSpec, Token
from frostline.core.errors import FrozenInTrainMode, ModelError, NothingFrozen
from frostline.engines.graph_runner import ALLOWED, Runner, leaf_values
from frostline.models.artifact import Prefix
from frostline.models.cuts import DTYPE_BYTES, ended_apart, enumerate_cuts, is_put_back, straightened, transposed
from frostline.models.freezing import asked_line, before_the_line, frozen_modules, used_parameters
from frostline.models.graph import (
    Flow,
    before,
    frozen_first,
    frozen_reach,
    guard_inputs,
    prune,
    reads,
    sources_of_change,
)
from frostline.models.tracing import Trace, has_several_parts

__all__ = (
    "FrozenPart",
    "find_frozen",
    "folded",
    "named_tensors",
    "ordered",
    "refuse_train_mode",
    "training_flags",
)


def _foldable(graph: Graph, strange: Collection[str], changing: Collection[str]) -> dict[str, tuple[str, ...]]:
    """For each strange node that depends on frozen tensors alone the values that can stand for it.

    Such are the grids and divisions from which networks make positions. The values are tensors of one shape for any
    batch: the node's own, or the parts of the list that it gives.

    Args:
        graph: the whole network.
        strange: names of the nodes that cannot be shipped.
        changing: names of the nodes at which a forward pass stops being a fixed function of the input.
    """
    flow = Flow(graph)
    fixed = _fixed(flow, changing)
    found = {node.name: _values(graph, node) for node in graph.nodes if node.name in strange and node.name in fixed}
    return {
        name: tuple(value.name for value in values)
        for name, values in found.items()
        if values and not any(flow.is_written_later(value.name) for value in values)
    }


def folded(
    graph: Graph, known: Mapping[str, Sequence[str]], tensors: Callable[[Graph], Mapping[str, torch.Tensor]]
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The graph with constants in the places of these values, and the constants by their names in its leaves.

    Args:
        graph: the frozen part.
        known: values, as ``_foldable`` gives them.
        tensors: finds the tensors that a graph's leaves name.
    """
    names = {name for values in known.values() for name in values}
    wanted = [node.name for node in graph.nodes if node.name in names]
    if not wanted:
        return graph, {}
    making = replace(prune(replace(graph, outputs=tuple(map(Ref, wanted)))), inputs=())
    leaves = leaf_values(making, tensors(making))
    device = next((leaf.device for leaf in leaves), torch.device("cpu"))
    with torch.no_grad():
        values = Runner(making, device=device).run([], leaves)
    constants = {f"constant:{name}": _dense(value) for name, value in zip(wanted, values, strict=True)}
    nodes = tuple(node for node in graph.nodes if node.name not in wanted)
    paths = zip(wanted, constants, strict=True)
    return prune(replace(graph, leaves=(*graph.leaves, *paths), nodes=nodes)), constants


def _fixed(flow: Flow, changing: Collection[str]) -> set[str]:
    """Names of the values that depend on leaves alone, and not on the size of the batch."""
    found = {name for name, _ in flow.graph.leaves}
    for node, needs in zip(flow.graph.nodes, flow.depends, strict=False):
        if node.size is None and node.name not in changing and found.issuperset(needs):
            found.add(node.name)
    return found


def _values(graph: Graph, node: GraphNode) -> list[GraphNode]:
    """The node where it gives a tensor, or whoever takes a part of its list; none where something is none of these."""
    if _is_a_constant(node):
        return [node]
    readers = [reader for reader in graph.nodes if node.name in reads(reader)]
    is_a_list = all(reader.op == "operator.getitem" and _is_a_constant(reader) for reader in readers)
    return readers if is_a_list else []


def _is_a_constant(node: GraphNode) -> bool:
    return node.dtype in DTYPE_BYTES and node.shape is not None and not any(dim.per_sample for dim in node.shape)


def _dense(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value.detach().clone(memory_format=torch.preserve_format)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrozenPart:
    """What never changes of a traced network.

    Attributes:
        traced: the whole trace, pruned and with its channels-last values ready to cross.
        frost_line: the last cut, as it stands in ``traced``.
        turned: names of the values that were straightened for it (see ``models.cuts``).
        cuts: all legal cuts, from 0 to the frost line, as they stand in the prefix.
        prefix: the part up to the frost line.
        stopped_by: an operator that nodes do not run, before which the part ends; empty where none ends it.
        moved: why the frost line lies before the layer that ``freeze`` was given, in a sentence; empty where it does
            not.
    """

    traced: Trace
    frost_line: Cut
    turned: frozenset[str]
    cuts: tuple[Cut, ...]
    prefix: Prefix
    stopped_by: str
    moved: str


def training_flags(model: nn.Module, inputs: Sequence[TensorSpec], *, frozen_in_eval: bool = False) -> dict[str, bool]:
    """The modes in which the head will be trained: everything in train mode but what is frozen.

    That is what is frozen whole, and what has no parameters, runs before the frost line alone and is in eval mode.

    Args:
        model: its parameters that are trained require gradients.
        inputs: specifications of its inputs.
        frozen_in_eval: put modules that run only before the frost line into eval mode even where they are in train mode
            now.
    """
    frozen = {id(inner) for _, module in frozen_modules(model) for inner in module.modules()}
    idle = [
        module for module in model.modules() if (frozen_in_eval or not module.training) and _may_mind_its_mode(module)
    ]
    if frozen and any(id(module) not in frozen for module in idle):
        frozen.update({id(module) for module in idle} & _before_the_line(model, inputs))
    return {path: id(module) not in frozen for path, module in model.named_modules()}


def _before_the_line(model: nn.Module, inputs: Sequence[TensorSpec]) -> set[int]:
    try:
        used = used_parameters(model, inputs)
    except ModelError:  # whoever traces it says what is wrong
        return set()
    return {id(module) for _, module in before_the_line(model, used)}


def _may_mind_its_mode(module: nn.Module) -> bool:
    """Whether the mode of a module without parameters may matter: torch's own are known, others are not."""
    if next(module.parameters(), None) is not None:
        return False
    return _minds_its_mode(module) or not type(module).__module__.startswith("torch.nn.")


def find_frozen(model: nn.Module, traced: Trace, inputs: Sequence[TensorSpec]) -> FrozenPart | str:
    """The frozen part of a trace; or, where no cut lies in it though nothing is trained there, why.

    Args:
        model: owner of the tensors that the trace names.
        traced: made with ``training_flags``.
        inputs: specifications of the network's inputs.

    Raises:
        NothingFrozen: Nothing can be computed before the first trainable layer.
    """
    graph, changing, trainable = ordered(model, traced.graph, inputs)
    strange = {node.name: node.op for node in graph.nodes if node.op not in ALLOWED or _reads_other_bits(node)}
    known = _foldable(graph, strange, changing)
    strange = {name: op for name, op in strange.items() if name not in known}
    asked = _asked_end(model, graph, frozen_reach(graph, changing))
    turned = transposed(graph, inputs, reach=frozen_reach(graph, changing), asked=asked)
    graph = straightened(graph, turned)
    if not _computes(graph, frozen_reach(graph, changing)):
        raise NothingFrozen(_why_nothing(graph, trainable, frozen_reach(graph, changing)))
    reach = frozen_reach(graph, {*changing, *strange})
    stopped_by = strange.get(graph.nodes[reach + 1].name, "") if reach + 1 < len(graph.nodes) else ""
    cuts = enumerate_cuts(graph, inputs, reach=reach, asked=_asked_end(model, graph, reach))
    if len(cuts) <= 2:
        return _why_no_cut(stopped_by)
    frozen, constants = folded(before(graph, cuts[-1]), known, partial(named_tensors, model, traced))
    frozen = guard_inputs(frozen)
    tensors = named_tensors(model, replace(traced, constants={**traced.constants, **constants}), frozen)
    renumbered = _renumbered(cuts, graph, frozen)
    return FrozenPart(
        traced=replace(traced, graph=graph),
        frost_line=cuts[-1],
        turned=turned,
        cuts=renumbered,
        prefix=Prefix(graph=frozen, cuts=renumbered[1:], tensors=tensors),
        stopped_by=stopped_by,
        moved=_why_moved(model, graph, cuts[-1], changing),
    )


def ordered(model: nn.Module, graph: Graph, inputs: Sequence[TensorSpec]) -> tuple[Graph, frozenset[str], set[str]]:
    """A traced graph pruned and with its frozen layers first, the nodes that change, and the leaves that are trained.

    Nodes that are left to the head though they are frozen count as nodes that change.

    Args:
        model: owner of the tensors that the graph names.
        graph: the whole network as it was traced.
        inputs: specifications of the network's inputs.
    """
    graph = prune(graph)
    trained = {path for path, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    trainable = {name for name, path in graph.leaves if path in trained}
    changing = sources_of_change(graph, trainable)
    graph = frozen_first(graph, changing)
    if has_several_parts(model):
        graph, late = ended_apart(graph, inputs, changing)
        changing |= late
    return graph, changing, trainable


def refuse_train_mode(model: nn.Module, frozen: Graph) -> None:
    """Do nothing if every module that the frozen part runs behaves as in eval mode.

    Raises:
        FrozenInTrainMode: A module is in train mode, and behaves otherwise there.
    """
    paths = {node.module for node in frozen.nodes}
    for path, module in model.named_modules():
        if path in paths and module.training and _minds_its_mode(module):
            raise FrozenInTrainMode(
                f"{type(module).__name__} {path!r} is frozen but in train mode, where its output depends on the batch; "
                "put it into eval mode, or pass frozen_in_eval=True to have the frozen layers run in eval mode"
            )


def named_tensors(model: nn.Module, traced: Trace, graph: Graph) -> dict[str, torch.Tensor]:
    """The tensors of a part of a trace, by the names in its leaves."""
    tensors = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
        **traced.constants,
    }
    return {path: tensors[path].detach() for _, path in graph.leaves}


def _reads_other_bits(node: GraphNode) -> bool:
    """Whether it reads memory as numbers of another type than floats, which a node refuses of a stranger."""
    return node.op == "aten.view.dtype" and Token("dtype", "float32") not in node.args


def _computes(graph: Graph, reach: int) -> bool:
    """Whether anything is done with the values of the input before the first layer that changes."""
    data = Flow(graph).data
    return any(node.name in data for node in graph.nodes[: reach + 1])


def _renumbered(cuts: Sequence[Cut], graph: Graph, frozen: Graph) -> tuple[Cut, ...]:
    """The same cuts with ``after`` counted in the frozen part's own nodes, of which some behind a cut may be gone."""
    places = {node.name: place for place, node in enumerate(frozen.nodes)}
    here = [places.get(node.name, -1) for node in graph.nodes[: cuts[-1].after + 1]]
    return tuple(cut if cut.after < 0 else replace(cut, after=max(here[: cut.after + 1])) for cut in cuts)


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _minds_its_mode(module: nn.Module) -> bool:
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    return isinstance(module, (*_NORMS, *_INSTANCE_NORMS)) and bool(module.track_running_stats)


def _why_nothing(graph: Graph, trainable: set[str], reach: int) -> str:
    first = graph.nodes[reach + 1] if reach + 1 < len(graph.nodes) else None
    paths = dict(graph.leaves)
    names = [] if first is None else [paths[name] for name in reads(first) if name in trainable]
    where = "the network" if first is None or not first.module else first.module
    cause = f"parameter {names[0]!r} is trained" if names else f"{where} changes from run to run"
    return (
        f"nothing is frozen before the first layer that changes: {cause}; freeze layers with "
        "frostline.freeze(model, until=...), or load data without a model: frostline.loader(data, ...)"
    )


def _why_moved(model: nn.Module, graph: Graph, line: Cut, changing: Collection[str]) -> str:
    """Why the frost line lies before the last node of the layer that was asked for; empty where it does not."""
    end = _asked_end(model, graph)
    if line.after >= end or end == len(graph.nodes):
        return ""
    first = next((node for node in graph.nodes[: end + 1] if node.name in changing), None)
    trained = {path for path, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    paths = dict(graph.leaves)
    names = [] if first is None else [paths[name] for name in reads(first) if paths.get(name) in trained]
    if first is None:
        why = "there is no later place that only a few tensors cross, sample by sample; freeze up to another"
    elif names:
        why = f"parameter {names[0]!r} is trained; call requires_grad_(False) of it, or freeze up to before it"
    else:
        where = first.module or "the network"
        why = f"{where} changes from run to run, as in train mode; put it into eval mode, or pass frozen_in_eval=True"
    return f"the frost line is at {line.name}, not behind {asked_line(model)} as asked: {why}"


def _asked_end(model: nn.Module, graph: Graph, reach: int = -1) -> int:
    """Index of the last node of the layer that was asked for that does anything with the input; else all nodes.

    Of a network whose encoders take a part of the sample each, all of which may cross, it is the last frozen layer.

    Args:
        model: owner of the graph.
        graph: whole network.
        reach: index of the last node that is frozen; -1 where only a layer that was asked for counts.
    """
    asked, data = asked_line(model), Flow(graph).data
    if asked is None and has_several_parts(model):
        weights = {name for name, _ in graph.leaves}
        before = [node.name in data and not weights.isdisjoint(reads(node)) for node in graph.nodes[: reach + 1]]
        return reach - before[::-1].index(True) if any(before) else len(graph.nodes)
    inside = [
        place
        for place, node in enumerate(graph.nodes)
        if asked is not None and _is_in(node.module, asked) and node.name in data and not is_put_back(node)
    ]
    return inside[-1] if inside else len(graph.nodes)


def _is_in(path: str, module: str) -> bool:
    # A module's second run is traced as its path with "@1".
    return f"{path.partition('@')[0]}.".startswith(f"{module}.")


def _why_no_cut(stopped_by: str) -> str:
    if stopped_by:
        return f"the frozen part begins with {stopped_by}, which a node does not run"
    return "there is no place in the frozen part that only one or two tensors cross, sample by sample"
