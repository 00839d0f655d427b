"""What depends on what in a graph, and the graph split at a cut: the part before it and the part after it. Pure.

What depends on what in a graph, operations that work in place included. Pure.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from frostline.core import Cut, Dim, Graph, GraphNode, Ref
from frostline.core.graph import Argument, references

__all__ = (
    "MOVING",
    "Flow",
    "after",
    "before",
    "changes",
    "frozen_first",
    "frozen_reach",
    "guard_inputs",
    "is_random",
    "map_cut",
    "packet_of",
    "prune",
    "reads",
    "replace_values",
    "same_values",
    "sources_of_change",
    "substitute",
    "uses_batch_statistics",
)


MOVING = frozenset(
    {
        "alias",
        "cat",
        "chunk",
        "clone",
        "contiguous",
        "detach",
        "expand",
        "expand_as",
        "flatten",
        "flip",
        "getitem",
        "movedim",
        "narrow",
        "permute",
        "repeat",
        "reshape",
        "reshape_as",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "stack",
        "swapaxes",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
    }
)
"""Operators that give elements of what they are given, moved or repeated, and no others."""


@dataclass(frozen=True)
class Flow:
    """What depends on what in a graph.

    Only values that depend on the *values* of the input count as data: what follows from its shape alone
    (positions, an expanded class token) is made again on either side and never crosses.
    """

    graph: Graph

    @cached_property
    def roots(self) -> dict[str, str]:
        """The name of the memory that each value lies in: equal for values that share it."""
        found = {name: name for name in (*self.graph.inputs, *(name for name, _ in self.graph.leaves))}
        for node in self.graph.nodes:
            found[node.name] = found.get(node.storage, node.storage) or node.name
        return found

    @cached_property
    def _reading(self) -> list[list[str]]:
        """For each node, and last for the outputs, the names that it reads."""
        leaving = [name for output in self.graph.outputs for name in references(output)]
        return [*map(reads, self.graph.nodes), leaving]

    @cached_property
    def depends(self) -> list[tuple[str, ...]]:
        """Names of what must have happened before each node, and last before the outputs.

        That is what it reads, and whatever has written to the same memory since that was made: after
        ``half = x[:, :8]; half.zero_()`` whoever reads ``x`` depends on the node that is named ``zero_`` too.
        """
        return [tuple(self._since(names, index)) for index, names in enumerate(self._reading)]

    def _since(self, names: Iterable[str], index: int) -> Iterator[str]:
        for name in dict.fromkeys(names):
            yield name
            yield from (self.graph.nodes[writer].name for writer in self._writers_since(name) if writer < index)

    def _writers_since(self, name: str) -> list[int]:
        made = self._made.get(name, -1)
        return [writer for writer in self._writers.get(self.roots[name], ()) if writer > made]

    @cached_property
    def _made(self) -> dict[str, int]:
        return {node.name: index for index, node in enumerate(self.graph.nodes)}

    @cached_property
    def _writers(self) -> dict[str, list[int]]:
        """For each memory the nodes that write to it, in order."""
        found: dict[str, list[int]] = {}
        for index, node in enumerate(self.graph.nodes):
            for root in self.memory_written(node):
                found.setdefault(root, []).append(index)
        return found

    def memory_written(self, node: GraphNode) -> set[str]:
        """The memory that a node writes to, by the names in ``roots``."""
        return {self.roots[name] for name in (changes(node), *node.writes) if name}

    def is_written_later(self, name: str) -> bool:
        """Whether some node writes to the memory of a value after it was made."""
        return bool(self._writers_since(name))

    @cached_property
    def data(self) -> frozenset[str]:
        """Names of all values that depend on the values of the graph's inputs."""
        found = set(self.graph.inputs)
        for node, needs in zip(self.graph.nodes, self.depends, strict=False):
            if node.size is None and any(name in found for name in needs):
                found.add(node.name)
        return frozenset(found)

    @cached_property
    def last_use(self) -> dict[str, int]:
        """Index of the last node that needs each value; ``len(nodes)`` for the graph's outputs.

        Reading a size is no use: it keeps nothing alive, since any tensor of the batch tells it.
        """
        uses: dict[str, int] = {}
        for index, needs in enumerate(self.depends):
            if index == len(self.graph.nodes) or self.graph.nodes[index].size is None:
                uses.update(dict.fromkeys(needs, index))
        return uses

    @cached_property
    def entangled(self) -> tuple[range, ...]:
        """Node indices behind which no cut may stand.

        Data is written there under one name and read under another, and two copies would no longer be one.
        """
        both = zip(self.depends, self._reading, strict=True)
        hidden = {self.roots[name] for needs, read in both for name in set(needs) - set(read)}
        return tuple(self._span(root) for root in sorted(hidden) if self._holds_data(root))

    def _holds_data(self, root: str) -> bool:
        return any(self.roots[name] == root for name in self.data)

    def _span(self, root: str) -> range:
        """From the node that makes the memory to the last that needs it."""
        own = {name for name, other in self.roots.items() if other == root}
        first = next((place for place, node in enumerate(self.graph.nodes) if node.name in own), 0)
        starts = -1 if own & set(self.graph.inputs) else first
        return range(starts, max(self.last_use.get(name, starts) for name in own))

    def needed_names(self) -> frozenset[str]:
        """Names of the nodes that the outputs, or a change of a leaf, depend on."""
        wanted = set(self.depends[-1])
        leaves = {name for name, _ in self.graph.leaves}
        for node, needs in zip(reversed(self.graph.nodes), reversed(self.depends[:-1]), strict=True):
            if node.name in wanted or self.roots.get(changes(node)) in leaves:
                wanted.update((node.name, *needs))
        return frozenset(node.name for node in self.graph.nodes if node.name in wanted)


def prune(graph: Graph) -> Graph:
    """The graph without idle dropout, and without what neither its outputs nor a change of a leaf depend on."""
    graph = _without_idle_dropout(graph)
    wanted = Flow(graph).needed_names()
    nodes = tuple(node for node in graph.nodes if node.name in wanted)
    read = {name for node in nodes for name in reads(node)}
    read.update(name for output in graph.outputs for name in references(output))
    return replace(graph, nodes=nodes, leaves=tuple(leaf for leaf in graph.leaves if leaf[0] in read))


def _without_idle_dropout(graph: Graph) -> Graph:
    """Dropout in eval mode, or with probability 0, gives its input back (at::dropout), whatever the flag says."""
    idle = {node.name: node.args[0] for node in graph.nodes if _is_dropout(node) and not is_random(node)}
    if not idle:
        return graph
    nodes = tuple(substitute(node, idle) for node in graph.nodes if node.name not in idle)
    return replace(graph, nodes=nodes, outputs=tuple(replace_values(output, idle) for output in graph.outputs))


def substitute(node: GraphNode, values: Mapping[str, Argument]) -> GraphNode:
    """The node, reading other values in place of the named ones."""
    kwargs = tuple((name, replace_values(value, values)) for name, value in node.kwargs)
    memory = replace_values(Ref(node.storage), values)
    return replace(
        node,
        args=tuple(replace_values(arg, values) for arg in node.args),
        kwargs=kwargs,
        storage=memory.name if isinstance(memory, Ref) else "",
        writes=tuple(references(tuple(replace_values(Ref(name), values) for name in node.writes))),
    )


def replace_values(argument: Argument, values: Mapping[str, Argument]) -> Argument:
    """The argument, with other values in place of the named ones."""
    while isinstance(argument, Ref) and argument.name in values:
        argument = values[argument.name]
    return tuple(replace_values(item, values) for item in argument) if isinstance(argument, tuple) else argument


_KEEPING = frozenset(
    {
        *("alias", "clone", "contiguous", "detach", "flatten", "lift_fresh_copy", "permute", "reshape", "squeeze", "t"),
        *("to", "to_copy", "transpose", "type_as", "unflatten", "unsqueeze", "view"),
        *("dropout", "feature_dropout", "alpha_dropout"),  # of a frozen layer, which is in eval mode
    }
)


def same_values(graph: Graph) -> dict[str, str]:
    """The first node that gives the same numbers as each node, as far as the graph alone tells."""
    first: dict[object, str] = {}
    found: dict[str, str] = {}
    for node in graph.nodes:
        own = substitute(node, {name: Ref(same) for name, same in found.items() if name != same})
        kept = reads(own) if packet_of(node) in _KEEPING else []
        found[node.name] = kept[0] if kept else first.setdefault((own.op, own.args, own.kwargs), node.name)
    return found


def reads(node: GraphNode) -> list[str]:
    """Names of all values that a node reads."""
    return [*references(node.args), *references(tuple(value for _, value in node.kwargs))]


def changes(node: GraphNode) -> str:
    """Name of the value that a node changes in place, or nothing.

    In ATen the overloads that write to their first argument end in an underscore, as ``relu_``, or are Python's
    own, as ``__iand__``; ``__and__`` writes nothing, and ``detach_`` no value.
    """
    packet = node.op.rpartition(".")[0].rpartition(".")[2]
    if packet == "detach_":
        return ""
    writes = packet.startswith("__i") if packet.endswith("__") else packet.endswith("_")
    first = node.args[0] if node.args else None
    return first.name if writes and isinstance(first, Ref) else ""


def packet_of(node: GraphNode) -> str:
    """The operator without its overload, the same whether it works in place or not: ``relu`` for ``relu_.default``."""
    return node.op.split(".")[1].strip("_")


def sources_of_change(graph: Graph, trainable: Collection[str]) -> frozenset[str]:
    """Names of the nodes at which a forward pass stops being a fixed function of the input.

    They are the users of trainable leaves, active dropout and other random operators, BatchNorm that uses
    or updates the statistics of the batch, and everything else that changes a leaf in place.

    Args:
        graph: the graph, traced with the training flags as they will be.
        trainable: names of the leaves that are trained.
    """
    flow = Flow(graph)
    leaves = {name for name, _ in graph.leaves}
    return frozenset(
        node.name
        for node in graph.nodes
        if not leaves.isdisjoint(flow.memory_written(node))
        or is_random(node)
        or uses_batch_statistics(node, flow.data)
        or set(reads(node)) & set(trainable)
    )


_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "uniform", "native_dropout", "rrelu")


def is_random(node: GraphNode) -> bool:
    """Whether two runs of the node may differ: random operators, and dropout that is active."""
    packet = packet_of(node)
    if _is_dropout(node):
        return bool(node.args[2]) and node.args[1] != 0.0
    if packet == "scaled_dot_product_attention":
        probability = node.args[4] if len(node.args) > 4 else dict(node.kwargs).get("dropout_p", 0.0)
        return probability != 0.0
    return packet.startswith(_RANDOM)


def _is_dropout(node: GraphNode) -> bool:
    return packet_of(node) in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


def uses_batch_statistics(node: GraphNode, data: Collection[str]) -> bool:
    """Whether the node normalises by the statistics of the batch, or updates running ones by them.

    BatchNorm in train mode does; where it is given weights to normalise, there is no batch in it. InstanceNorm
    always normalises by the sample's own statistics, and only updates running ones where it has any.

    Args:
        node: node of a graph.
        data: names of the values that depend on those of the input.
    """
    if node.op not in ("aten.batch_norm.default", "aten.instance_norm.default") or not node.args[5]:
        return False
    has_running = node.args[3] is not None
    normalises_batch = node.op == "aten.batch_norm.default" and any(name in data for name in references(node.args[0]))
    return has_running or normalises_batch


def frozen_reach(graph: Graph, changing: Collection[str]) -> int:
    """Index of the last node before the first of ``changing``; all nodes where there is none; -1 for none."""
    for index, node in enumerate(graph.nodes):
        if node.name in changing:
            return index - 1
    return len(graph.nodes) - 1


def frozen_first(graph: Graph, changing: Collection[str]) -> Graph:
    """The graph with what is frozen before what changes, where frozen layers stand behind something that changes.

    So it is where encoders stand side by side, and what is trained behind the first one is traced before the second.
    Nodes keep their order otherwise, and none moves past one that writes to memory that it reads, or the reverse.

    Args:
        graph: graph of a network.
        changing: names of the nodes at which it stops being a fixed function of the input.
    """
    late = _behind(graph, changing)
    weights = {name for name, _ in graph.leaves}
    first = next((place for place, node in enumerate(graph.nodes) if node.name in late), len(graph.nodes))
    data = Flow(graph).data
    layers = (node for node in graph.nodes[first:] if node.name in data - late and not weights.isdisjoint(reads(node)))
    if next(layers, None) is None:
        return graph
    return replace(graph, nodes=tuple(sorted(graph.nodes, key=lambda node: node.name in late)))


def _behind(graph: Graph, changing: Collection[str]) -> set[str]:
    """Names of the nodes that change, and of all that must come after one of them."""
    flow = Flow(graph)
    late: set[str] = set()
    memory: set[str] = set()
    for node, needs in zip(graph.nodes, flow.depends, strict=False):
        if node.name in changing or not late.isdisjoint(needs) or not memory.isdisjoint(flow.memory_written(node)):
            late.add(node.name)
            memory.update(flow.roots[name] for name in (node.name, *reads(node)))
    return late


# Operators that give back what they were given where nothing is to be done: whether they did in the trace need not
# be what they do here, since what crosses a cut arrives contiguous.
_MAY_ALIAS = frozenset({"contiguous", "expand_as", "flatten", "reshape", "reshape_as", "to", "type_as"})


def before(graph: Graph, cut: Cut) -> Graph:
    """The part of ``graph`` from its input to the cut; its outputs are the values that cross."""
    nodes = graph.nodes[: cut.after + 1]
    return prune(replace(graph, nodes=nodes, outputs=tuple(Ref(name) for name in cut.tensors)))


def after(graph: Graph, cut: Cut) -> Graph:
    """The part of ``graph`` from the cut to its outputs; its inputs are the values that cross.

    Whatever else it needs from before the cut is made again: what does not depend on the values of the input, and
    what is only an expansion of a value that crosses. Sizes of the batch are read from the first value that crosses.
    """
    if cut.number <= 1:
        return guard_inputs(graph)
    flow = Flow(graph)
    owners = {flow.roots[name]: name for name in cut.tensors}
    again = [node for node in _made_again(flow, cut) if node.size is None]
    rest = [*again, *(node for node in graph.nodes[cut.after + 1 :] if node.size is None)]
    nodes = tuple(replace(node, storage=owners.get(flow.roots[node.name], node.storage)) for node in rest)
    part = replace(graph, inputs=cut.tensors, nodes=nodes)
    return guard_inputs(prune(_with_sizes(part, graph, cut.tensors[0])))


def _made_again(flow: Flow, cut: Cut) -> list[GraphNode]:
    """The nodes before the cut that are needed behind it, in their order."""
    places = {node.name: place for place, node in enumerate(flow.graph.nodes)}
    behind = range(cut.after + 1, len(flow.graph.nodes))
    open_ends = [name for place in (*behind, -1) for name in flow.depends[place]]
    wanted: set[int] = set()
    while open_ends:
        name = open_ends.pop()
        place = places.get(name, cut.after + 1)
        if name not in cut.tensors and place <= cut.after and place not in wanted:
            wanted.add(place)
            # A size is worked out from what crosses, whatever it was read from.
            open_ends.extend(flow.depends[place] if flow.graph.nodes[place].size is None else ())
    return [flow.graph.nodes[place] for place in sorted(wanted)]


def _with_sizes(part: Graph, whole: Graph, batch_of: str) -> Graph:
    """The part with all sizes that it reads worked out from the batch of one of its inputs."""
    sizes = {node.name: node.size for node in whole.nodes if node.size is not None}
    made = {size: list(_size_nodes(size, batch_of)) for size in sizes.values() if size.per_sample}
    values: dict[str, Argument] = {
        name: Ref(made[size][-1].name) if size.per_sample else size.fixed for name, size in sizes.items()
    }
    nodes = tuple(substitute(node, values) for node in part.nodes)
    outputs = tuple(replace_values(output, values) for output in part.outputs)
    return replace(part, nodes=(*(node for some in made.values() for node in some), *nodes), outputs=outputs)


def _size_nodes(size: Dim, batch_of: str) -> Iterator[GraphNode]:
    """``per_sample * batch + fixed``, step by step."""
    name = f"{batch_of}__size_{size.per_sample}_{size.fixed}".replace("-", "m")
    yield GraphNode(name=f"{name}__0", op="aten.sym_size.int", args=(Ref(batch_of), 0), size=Dim(0, 1))
    if size.per_sample != 1:
        args = (Ref(f"{name}__0"), size.per_sample)
        yield GraphNode(name=f"{name}__1", op="operator.mul", args=args, size=Dim(0, size.per_sample))
    if size.fixed:
        last = f"{name}__{1 if size.per_sample != 1 else 0}"
        yield GraphNode(name=f"{name}__2", op="operator.add", args=(Ref(last), size.fixed), size=size)


def map_cut(cut: Cut, graph: Graph, other: Graph) -> Cut | None:
    """A cut of one trace as it stands in another of the same network, with those of its tensors that are made there.

    What only one mode computes, such as an auxiliary output in train mode, is not there in the other.

    Returns:
        None where all nodes before the cut, or all of its tensors, are missing.
    """
    places = {node.name: place for place, node in enumerate(other.nodes)}
    there = [places[node.name] for node in graph.nodes[: cut.after + 1] if node.name in places]
    place = places.get(graph.nodes[cut.after].name, max(there, default=-1))
    kept = [
        index for index, name in enumerate(cut.tensors) if name in other.inputs or places.get(name, place + 1) <= place
    ]
    if place < 0 or not kept:
        return None
    return replace(
        cut,
        after=place,
        tensors=tuple(cut.tensors[index] for index in kept),
        shapes=tuple(cut.shapes[index] for index in kept),
        dtypes=tuple(cut.dtypes[index] for index in kept),
    )


def guard_inputs(graph: Graph) -> Graph:
    """The graph with a copy made of every input that it would overwrite, so that the caller's stays as it was."""
    copies = {name: f"{name}__copy" for name in _overwritten(graph)}
    if not copies:
        return graph
    clones = tuple(GraphNode(name=copy, op="aten.clone.default", args=(Ref(name),)) for name, copy in copies.items())
    instead = {name: Ref(copy) for name, copy in copies.items()}
    nodes = tuple(substitute(node, instead) for node in graph.nodes)
    outputs = tuple(replace_values(output, instead) for output in graph.outputs)
    return replace(graph, nodes=clones + nodes, outputs=outputs)


def _overwritten(graph: Graph) -> Sequence[str]:
    """The inputs that a node changes, directly or through another name for the same memory."""
    roots = Flow(graph).roots
    owners = {name: name for name in graph.inputs}
    touched = set()
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if packet_of(node) in _MAY_ALIAS and isinstance(first, Ref) and roots[first.name] in owners:
            owners.setdefault(roots[node.name], owners[roots[first.name]])
        if changes(node):
            touched.add(owners.get(roots[changes(node)]))
    return [name for name in graph.inputs if name in touched]
