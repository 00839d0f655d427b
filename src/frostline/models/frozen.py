"""How far the frozen part of a traced network reaches, where it may be cut, and which tensors it holds.

Works out ahead what a frozen part makes of its weights alone, where nodes do not run the operators that do it.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from frostline.core import Cut, Graph, GraphNode, Ref, TensorSpec
from frostline.core.errors import FrozenInTrainMode, ModelError, NothingFrozen, UnsafeArtifact
from frostline.engines.graph_runner import Runner, leaf_values, refused_call
from frostline.engines.measure import node_operations
from frostline.models.artifact import Prefix
from frostline.models.cuts import (
    DTYPE_BYTES,
    contiguous_copies,
    enumerate_cuts,
    is_put_back,
    split_encoder_outputs,
    transposed_values,
)
from frostline.models.freezing import before_the_line, frozen_modules, requested_line, trained_paths, used_parameters
from frostline.models.graph import (
    Flow,
    before,
    frozen_first,
    frozen_reach,
    guard_inputs,
    prune,
    reads,
    same_values,
    sources_of_change,
)
from frostline.models.modules import all_in_eval, modes
from frostline.models.row_check import MixedRows, differs, mixed_rows
from frostline.models.tracing import (
    UNFIT,
    Trace,
    are_close,
    device_of,
    has_several_parts,
    observe_run,
    random_batch,
    run_whole,
)

__all__ = (
    "ALIKE",
    "NOBODY_FROZE",
    "FrozenPart",
    "FrozenRest",
    "equals_whole",
    "features_of",
    "find_frozen",
    "fold_constants",
    "frozen_rest",
    "has_alike_features",
    "minds_its_mode",
    "named_tensors",
    "order_graph",
    "own_paths",
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


def fold_constants(
    graph: Graph, known: Mapping[str, Sequence[str]], tensors: Callable[[Graph], Mapping[str, torch.Tensor]]
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The graph with constants in the places of these values, and the constants by their names in its leaves.

    Args:
        graph: the frozen part.
        known: values, as ``_foldable`` gives them.
        tensors: function that finds the tensors that a graph's leaves name.
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
        moved: the reason why the frost line lies before the layer that ``freeze`` was given, in a sentence; empty where
            it does not.
        mixing: the operations before which it ends because they mix the samples of a batch, the first one found last.
        row_s: seconds that a row took in eager PyTorch each time that it was checked, the newest last.
    """

    traced: Trace
    frost_line: Cut
    turned: frozenset[str]
    cuts: tuple[Cut, ...]
    prefix: Prefix
    stopped_by: str
    moved: str
    mixing: tuple[MixedRows, ...] = ()
    row_s: list[float] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Paths in the network of the parameters and buffers that the frozen part is computed from."""
        leaves = before(self.traced.graph, self.frost_line).leaves
        return tuple(path for _, path in leaves if path not in self.traced.constants)

    @property
    def modules(self) -> frozenset[str]:
        """Paths of the modules that compute it, of those around them alone, and of frozen ones that left no trace."""
        nodes, line = self.traced.graph.nodes, self.frost_line.after
        inside, behind = (
            {node.module.partition("@")[0] for node in part} for part in (nodes[: line + 1], nodes[line + 1 :])
        )
        around = {path[:end] for path in inside for end, mark in enumerate(path) if mark == "."}
        shared = {path[:end] for path in behind for end, mark in enumerate(f"{path}.") if mark == "."}
        idle = {path for path, trains in self.traced.training.items() if not trains}  # such as dropout in eval mode
        return frozenset(filter(None, inside | ((around | idle) - shared)))


def features_of(part: FrozenPart, batch: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """What the frozen part gives at the frost line."""
    leaves = [leaf.to(device) for leaf in leaf_values(part.prefix.graph, part.prefix.tensors)]
    began_s = time.perf_counter()
    with torch.no_grad():
        features = list(Runner(part.prefix.graph, device=device).run(batch, leaves))
    part.row_s.append((time.perf_counter() - began_s) / len(batch[0]))
    return features


ALIKE = (
    "two tensors at its frost line are the same for all samples that are made up to check it, as where one is chosen "
    "by a word that none of them has"
)
"""What is said where ``has_alike_features`` is true."""


def has_alike_features(part: FrozenPart, features: Sequence[torch.Tensor]) -> bool:
    """Whether some of these tensors at the frost line cannot be told from each other by their values.

    Those that the graph makes alike, as where an encoder runs twice on the same, are left out.
    """
    same = same_values(part.traced.graph)
    named = zip((same.get(name, name) for name in part.frost_line.tensors), features, strict=True)
    return any(
        name != other
        and (feature.dtype, feature.numel()) == (another.dtype, another.numel())
        and not differs(feature.reshape(-1), another.reshape(-1), in_place=True)
        for (name, feature), (other, another) in combinations(named, 2)
    )


def equals_whole(
    model: nn.Module,
    part: FrozenPart,
    head: Callable[..., Any],
    inputs: Sequence[TensorSpec],
    flags: Mapping[str, bool],
    *,
    batches: int = 1,
    is_own_code: bool = True,
) -> bool:
    """Whether prefix and head together do what the whole network does on random batches, but for the order of sums.

    Compared are outputs, gradients, the tensors that these flow to, buffers, and how far random numbers are drawn, in
    the modes in which the head is trained and in eval mode. The network is left as it was.

    Args:
        model: the whole network.
        part: the frozen part.
        head: head that goes on from there.
        inputs: specifications of the network's inputs.
        flags: the modes in which the head is trained.
        batches: number of random batches.
        is_own_code: the head runs the network's own code.
    """
    device = device_of(model)
    for seed in range(1, batches + 1):
        batch = random_batch(model, inputs, _ROWS_OF_A_CHECK, torch.Generator().manual_seed(seed))
        try:
            features = features_of(part, batch, device)
        except UNFIT:
            return False
        for training in (flags, all_in_eval(model)):
            try:
                with modes(model, training):  # a head may write in place
                    ours = observe_run(model, partial(head, [feature.clone() for feature in features]), seed)
                with modes(model, training):
                    if not is_own_code:  # a trace does not know what the network counts
                        observe_run(model, partial(run_whole, model, batch), seed)
                    theirs = observe_run(model, partial(run_whole, model, batch), seed)
            except UNFIT:
                return False
            if not are_close(ours, theirs):
                return False
    return True


_ROWS_OF_A_CHECK = 3  # a BatchNorm gives two rows the same whatever they are
# Of the batch on which modes are compared.
_ROWS = 2


def training_flags(model: nn.Module, inputs: Sequence[TensorSpec], *, frozen_in_eval: bool = False) -> dict[str, bool]:
    """The modes in which the head will be trained: everything in train mode but what is frozen.

    That is what is frozen whole, and what has no parameters, runs before the frost line alone and is in eval mode.

    Args:
        model: the parameters that are trained require gradients.
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
    return minds_its_mode(module) or not type(module).__module__.startswith("torch.nn.")


def find_frozen(
    model: nn.Module, traced: Trace, inputs: Sequence[TensorSpec], mixing: tuple[MixedRows, ...] = ()
) -> FrozenPart | str:
    """The frozen part of a trace; or, where no cut lies in it though nothing is trained there, why.

    It ends before an operation that mixes the samples of a batch, which is found by running it.

    Args:
        model: owner of the tensors that the trace names.
        traced: the traced, made with ``training_flags``.
        inputs: specifications of the network's inputs.
        mixing: operations that are known to mix samples.

    Raises:
        NothingFrozen: No operation comes before the first trainable layer.
    """
    part = _frozen_before(model, traced, inputs, mixing)
    if isinstance(part, str):
        return part
    try:
        found = mixed_rows(part.prefix, device_of(model))
    except ModelError as error:
        return str(error)
    if found is None:
        return part
    return find_frozen(model, traced, inputs, (*mixing, replace(found, node=_traced_name(traced, found.node))))


def _traced_name(traced: Trace, name: str) -> str:
    """The name of an operation as it was traced, of one that was added to it behind."""
    names = {node.name for node in traced.graph.nodes}
    while name not in names and "__" in name:
        name = name.rpartition("__")[0]
    return name


def _frozen_before(
    model: nn.Module, traced: Trace, inputs: Sequence[TensorSpec], mixing: tuple[MixedRows, ...]
) -> FrozenPart | str:
    """The frozen part up to the last place that few tensors cross, or, where that loses much of it, to its end."""
    found = _frozen_upto(model, traced, inputs, mixing, several=False)
    if not isinstance(found, str) and _work(model, found, inputs).missed < _MISSED:
        return found
    wider = _frozen_upto(model, traced, inputs, mixing, several=True)
    if isinstance(wider, str):
        return found
    return wider if isinstance(found, str) or wider.frost_line.after > found.frost_line.after else found


def _frozen_upto(
    model: nn.Module,
    traced: Trace,
    inputs: Sequence[TensorSpec],
    mixing: tuple[MixedRows, ...],
    *,
    several: bool,
) -> FrozenPart | str:
    """The same; with ``several`` as many tensors may cross at its end as at a layer that the user named."""
    graph, changing, trainable = order_graph(model, traced.graph, inputs, mixing)
    refused = ((node.name, refused_call(node)) for node in graph.nodes)
    strange = {name: what for name, what in refused if what}
    known = _foldable(graph, strange, changing)
    strange = {name: op for name, op in strange.items() if name not in known}
    asked = _asked_end(model, graph, frozen_reach(graph, changing), several=several)
    turned = transposed_values(graph, inputs, reach=frozen_reach(graph, changing), asked=asked)
    graph = contiguous_copies(graph, turned)
    if not _computes(graph, frozen_reach(graph, changing)):
        if mixing:
            return mixing[-1].why
        raise NothingFrozen(_why_nothing(model, graph, trainable, frozen_reach(graph, changing)))
    reach = frozen_reach(graph, {*changing, *strange})
    stopped_by = strange.get(graph.nodes[reach + 1].name, "") if _is_left_out(graph, changing, reach) else ""
    cuts = enumerate_cuts(graph, inputs, reach=reach, asked=_asked_end(model, graph, reach, several=several))
    if len(cuts) <= 2:
        if not (mixing or stopped_by or _has_layers(graph, reach)):
            raise NothingFrozen(_why_nothing(model, graph, trainable, reach))
        return mixing[-1].why if mixing else _why_no_cut(stopped_by)
    frozen, constants = fold_constants(before(graph, cuts[-1]), known, partial(named_tensors, model, traced))
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
        mixing=mixing,
    )


# Less than this is what an adapter leaves of its own layer, and said in ``explain()`` alone; behind what is trained
# nothing else can be had, and only where most of the work lies there was freezing in vain.
_MISSED, _IN_VAIN = 0.2, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRest:
    """Frozen layers that run at the trainer, since they lie behind the frost line.

    Attributes:
        layers: number of modules whose own parameters are frozen.
        share: part of the frozen work that they do.
        why: the reason why they lie there.
        is_lost: the most of it, or as much as could have run at the node.
    """

    layers: int
    share: float
    why: str
    is_lost: bool

    def __str__(self) -> str:
        many = f"{self.layers} frozen layer{'s run' if self.layers > 1 else ' runs'} at the trainer"
        return f"{many} ({self.share:.0%} of the frozen work)"


def frozen_rest(model: nn.Module, part: FrozenPart, inputs: Sequence[TensorSpec]) -> FrozenRest | None:
    """The frozen layers behind the frost line; None where there are none."""
    graph = part.traced.graph
    work = _work(model, part, inputs)
    if not work.layers:
        return None
    if work.missed >= _MISSED:
        where = part.frost_line.name
        why = f"no place behind {where} is crossed by few enough tensors; freeze up to a layer that gives one"
    else:
        why = _why_behind(graph, work.reach, trained_paths(model))
    is_lost = work.missed >= _MISSED or work.share >= _IN_VAIN
    return FrozenRest(layers=len(work.layers), share=work.share, why=why, is_lost=is_lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The frozen work behind the frost line.

    Attributes:
        reach: index of the last node before which nothing changes.
        layers: paths of the modules whose frozen parameters it uses.
        missed: part of all frozen work that could have been done before the line.
        share: part of all frozen work that it is.
    """

    reach: int
    layers: frozenset[str]
    missed: float
    share: float


def _work(model: nn.Module, part: FrozenPart, inputs: Sequence[TensorSpec]) -> _Work:
    graph, line = part.traced.graph, part.frost_line.after
    named = dict(model.named_parameters(remove_duplicate=False))
    of_trained = trained_paths(model)
    trained = {name for name, path in graph.leaves if path in of_trained}
    reach, data = frozen_reach(graph, sources_of_change(graph, trained)), Flow(graph).data
    layers = _layers_used(graph, {path for path, parameter in named.items() if not parameter.requires_grad})
    could_go = [place for place in range(line + 1, reach + 1) if graph.nodes[place].name in data]
    cannot = [place for place in range(max(line, reach) + 1, len(graph.nodes)) if layers[place]]
    found = frozenset[str]().union(*(layers[place] for place in (*could_go, *cannot)))
    if not found:
        return _Work(reach=reach, layers=found, missed=0.0, share=0.0)
    costs = _costs(model, part, inputs)
    lost, behind = (sum(costs[place] for place in places) for places in (could_go, cannot))
    whole = max(1, sum(costs[: line + 1]) + lost + behind)
    return _Work(reach=reach, layers=found, missed=lost / whole, share=(lost + behind) / whole)


def _costs(model: nn.Module, part: FrozenPart, inputs: Sequence[TensorSpec]) -> Sequence[int]:
    """What each node computes; where that cannot be told without values, how many numbers of weights it reads."""
    graph = part.traced.graph
    tensors = named_tensors(model, part.traced, graph)
    leaves = {name: tensors[path] for name, path in graph.leaves}
    try:
        return node_operations(graph, list(leaves.values()), inputs)
    except UnsafeArtifact:
        return [sum(leaves[name].numel() for name in reads(node) if name in leaves) for node in graph.nodes]


def _layers_used(graph: Graph, frozen: Collection[str]) -> list[frozenset[str]]:
    """For each node with an input that is a frozen weight, or made of these alone, the modules that own them."""
    owners = {name: frozenset([path.rpartition(".")[0]]) for name, path in graph.leaves if path in frozen}
    weights, found = set(owners), []
    for node in graph.nodes:
        read = reads(node)
        found.append(frozenset[str]().union(*(owners[name] for name in read if name in weights)))
        if read and weights.issuperset(read):
            weights.add(node.name)
            owners[node.name] = found[-1]
    return found


def _why_behind(graph: Graph, reach: int, of_trained: Mapping[str, str]) -> str:
    if reach + 1 >= len(graph.nodes):
        return "nothing behind them is trained"
    first, paths = graph.nodes[reach + 1], dict(graph.leaves)
    together = (node for node in graph.nodes[reach + 1 :] if node.module == first.module)
    trained = (paths[name] for node in together for name in reads(node) if paths.get(name) in of_trained)
    path = next(trained, None)
    if path is not None:
        return f"parameter {of_trained[path]!r} before them is trained{_alias(path, of_trained)}"
    return f"{first.module or 'the network'} before them changes from run to run"


def order_graph(
    model: nn.Module, graph: Graph, inputs: Sequence[TensorSpec], mixing: Sequence[MixedRows] = ()
) -> tuple[Graph, frozenset[str], set[str]]:
    """A traced graph pruned and with its frozen layers first, the nodes that change, and the leaves that are trained.

    Nodes that are left to the head though they are frozen count as nodes that change.

    Args:
        model: owner of the tensors that the graph names.
        graph: the whole network as it was traced.
        inputs: specifications of the network's inputs.
        mixing: operations that mix the samples of a batch, which count as nodes that change.
    """
    graph = prune(graph)
    trained = trained_paths(model)
    trainable = {name for name, path in graph.leaves if path in trained}
    changing = sources_of_change(graph, trainable) | {mixed.node for mixed in mixing}
    graph = frozen_first(graph, changing)
    if has_several_parts(model):
        graph, late = split_encoder_outputs(graph, inputs, changing)
        changing |= late
    return graph, changing, trainable


def refuse_train_mode(model: nn.Module, frozen: Graph, inputs: Sequence[TensorSpec]) -> None:
    """Do nothing if every module that the frozen part runs behaves as in eval mode.

    Those that say so by their class are known; for all others the network is run once in the modes that the frozen
    modules are in, and once in eval mode.

    Args:
        model: the network, in its own modes.
        frozen: graph of the frozen part.
        inputs: specifications of the network's inputs.

    Raises:
        FrozenInTrainMode: A module is in train mode, and behaves otherwise there.
    """
    paths = {node.module.partition("@")[0] for node in frozen.nodes}
    for path, module in model.named_modules():
        if path in paths and module.training and minds_its_mode(module):
            raise _in_train_mode(path, module, "where its output depends on the batch")
    inside = [
        f"{outer}.{path}".strip(".")
        for outer, module in frozen_modules(model)
        if any(not outer or _is_in(path, outer) for path in paths)
        for path, inner in module.named_modules()
        if inner.training
    ]
    path = _first_minding(model, inside, inputs)
    if path is not None:
        raise _in_train_mode(path, model.get_submodule(path), "where it computes something else")


def _in_train_mode(path: str, module: nn.Module, why: str) -> FrozenInTrainMode:
    return FrozenInTrainMode(
        f"{type(module).__name__} {path!r} is frozen but in train mode, {why}; put it into eval mode by .eval() or "
        "frostline.freeze, or pass frozen_in_eval=True to have the frozen layers run in eval mode"
    )


def _first_minding(model: nn.Module, paths: Sequence[str], inputs: Sequence[TensorSpec]) -> str | None:
    """The first of some modules that changes what comes out when it is in train mode; None where none does."""
    if not paths:
        return None
    try:
        if not _changes_in_train_mode(model, paths, inputs):
            return None
        fewest, most = 0, len(paths)  # so many are not enough, and so many are
        while most - fewest > 1:
            middle = (fewest + most) // 2
            is_enough = _changes_in_train_mode(model, paths[:middle], inputs)
            fewest, most = (fewest, middle) if is_enough else (middle, most)
    except UNFIT:  # whoever traces it has said what is wrong
        return None
    return paths[most - 1]


def _changes_in_train_mode(model: nn.Module, paths: Sequence[str], inputs: Sequence[TensorSpec]) -> bool:
    """Whether frozen modules give or draw anything else with some modules in train mode than with all in eval mode."""
    ours, theirs = (_given_by_frozen(model, some, inputs) for some in (paths, ()))
    return len(ours) != len(theirs) or any(
        differs(given, meant, in_place=False) for given, meant in zip(ours, theirs, strict=True)
    )


def _given_by_frozen(model: nn.Module, training: Collection[str], inputs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """What the frozen modules give on a random batch, the buffers behind it, and how far random numbers were drawn."""
    given: list[torch.Tensor] = []

    def ended(_: nn.Module, __: Any, output: Any) -> None:
        given.extend(leaf.detach().clone() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))

    device = device_of(model)
    batch = random_batch(model, inputs, _ROWS, torch.Generator().manual_seed(0))

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            run_whole(model, batch)
        drawn = torch.tensor(np.random.get_state(legacy=False)["state"]["pos"])
        states = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [*given, drawn, torch.get_rng_state(), *states]

    flags = {path: path in training for path, _ in model.named_modules()}
    hooks = [module.register_forward_hook(ended) for _, module in frozen_modules(model)]
    try:
        with modes(model, flags):
            return observe_run(model, run, 0, gradients=False)
    finally:
        for hook in hooks:
            hook.remove()


def named_tensors(model: nn.Module, traced: Trace, graph: Graph) -> dict[str, torch.Tensor]:
    """The tensors of a part of a trace, by the names in its leaves."""
    tensors = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
        **traced.constants,
    }
    return {path: tensors[path].detach() for _, path in graph.leaves}


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


def minds_its_mode(module: nn.Module) -> bool:
    """Whether the output of one of torch's modules depends on whether it is in train mode."""
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    return isinstance(module, (*_NORMS, *_INSTANCE_NORMS)) and bool(module.track_running_stats)


def _has_layers(graph: Graph, reach: int) -> bool:
    """Whether a frozen weight is used on the values of the input; ids and mask of a text are taken apart before."""
    data, weights = Flow(graph).data, {name for name, _ in graph.leaves}
    return any(node.name in data and not weights.isdisjoint(reads(node)) for node in graph.nodes[: reach + 1])


def _is_left_out(graph: Graph, changing: Collection[str], reach: int) -> bool:
    """Whether something behind the reach would be frozen, if a node ran what ends it: no trained layer is before it."""
    flow, rest = Flow(graph), graph.nodes[reach + 1 :]
    if not rest or rest[0].name in changing:  # a trained layer, which no node would run anyway
        return False
    behind = set(changing)
    for node, needs in zip(graph.nodes, flow.depends, strict=False):
        if not behind.isdisjoint(needs):
            behind.add(node.name)
    return any(node.name in flow.data and node.name not in behind for node in rest)


_FREEZE = "freeze layers with frostline.freeze(model, until=...)"
_NO_MODEL = "or load data without a model: frostline.loader(data, ...)"
NOBODY_FROZE = f"nothing is frozen: every parameter is trained; {_FREEZE}, {_NO_MODEL}"
"""What a network is told of which all is trained."""


def _why_nothing(model: nn.Module, graph: Graph, trainable: set[str], reach: int) -> str:
    first = graph.nodes[reach + 1] if reach + 1 < len(graph.nodes) else None
    paths = dict(graph.leaves)
    path = next((paths[name] for name in (() if first is None else reads(first)) if name in trainable), None)
    if all(parameter.requires_grad for parameter in model.parameters()):
        return NOBODY_FROZE
    where = "the network" if first is None or not first.module else first.module
    cause, mend = f"{where} changes from run to run", _FREEZE
    if path is not None:
        cause, mend = _trained_first(model, path)
    return f"nothing is frozen before the first layer that changes: {cause}; {mend}, {_NO_MODEL}"


def _trained_first(model: nn.Module, path: str) -> tuple[str, str]:
    """That a parameter at the start of a network of which others are frozen is trained, and what to do about it.

    It is named by the other paths too at which the network holds it, as where layers are tied.
    """
    parameters, of_trained = dict(model.named_parameters(remove_duplicate=False)), trained_paths(model)
    if path != of_trained[path]:
        cause = f"parameter {of_trained[path]!r} is trained{_alias(path, of_trained)}"
        return cause, "give that a copy of its own, as by .clone(), or freeze both"
    others = [repr(name) for name, tensor in parameters.items() if tensor is parameters[path] and name != path]
    if others:
        cause = f"parameter {path!r} (the same as {' and '.join(others)}) is trained"
        return cause, "untie them, as by tie_word_embeddings=False in a config of transformers, or freeze both"
    frozen = sum(not parameter.requires_grad for parameter in model.parameters())
    many = "1 other is" if frozen == 1 else f"{frozen} others are"
    mend = f"call requires_grad_(False) of it too, or {_FREEZE}"
    return f"parameter {path!r} is trained, though {many} frozen", mend


def _alias(path: str, of_trained: Mapping[str, str]) -> str:
    return "" if path == of_trained[path] else f", and {path!r} lies in its memory"


def _why_moved(model: nn.Module, graph: Graph, line: Cut, changing: Collection[str]) -> str:
    """Why the frost line lies before the last node of the layer that was asked for; empty where it does not."""
    end = _asked_end(model, graph)
    if line.after >= end or end == len(graph.nodes):
        return ""
    first = next((node for node in graph.nodes[: end + 1] if node.name in changing), None)
    trained = trained_paths(model)
    paths = dict(graph.leaves)
    names = [] if first is None else [paths[name] for name in reads(first) if paths.get(name) in trained]
    if first is None:
        why = "there is no later place that only a few tensors cross, sample by sample; freeze up to another"
    elif names:
        why = (
            f"parameter {trained[names[0]]!r} is trained{_alias(names[0], trained)}; call requires_grad_(False) of it, "
        )
        why += "or freeze up to before it"
    else:
        where = first.module or "the network"
        why = f"{where} changes from run to run, as in train mode; put it into eval mode, or pass frozen_in_eval=True"
    return f"the frost line is at {line.name}, not behind {requested_line(model)} as asked: {why}"


def _asked_end(model: nn.Module, graph: Graph, reach: int = -1, *, several: bool = False) -> int:
    """Index of the last node of the layer that was asked for that does anything with the input; else all nodes.

    Of a network whose encoders take a part of the sample each, all of which may cross, it is the last frozen layer.

    Args:
        model: owner of the graph.
        graph: whole network.
        reach: index of the last node that is frozen; -1 where only a layer that was asked for counts.
        several: True if it is the last frozen layer, where none was asked for.
    """
    asked, data = requested_line(model), Flow(graph).data
    if asked is None and (several or has_several_parts(model)):
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
    return "there is no place in the frozen part that few tensors cross, sample by sample"


def own_paths(model: nn.Module, part: FrozenPart, rest: Graph | None, inside: tuple[str, ...]) -> list[str]:
    """Paths of the tensors that are not the frozen part's alone."""
    used = set() if rest is None else {path for _, path in rest.leaves}
    frozen = {path for _, path in part.prefix.graph.leaves} - used
    owners = {path.rpartition(".")[0] for path in frozen} - {path.rpartition(".")[0] for path in used}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    frozen_tensors = {id(tensor) for path, tensor in named if path in frozen}  # which may have other paths too
    return [
        path
        for path, tensor in named
        if path in used
        or tensor.requires_grad
        or not (id(tensor) in frozen_tensors or path.rpartition(".")[0] in owners or path.startswith(inside))
    ]
