"""Where a graph may be cut, and how far its frozen part reaches. Pure: a graph in, cuts out."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from frostline.core import Cut, Graph, Node, Ref
from frostline.core.graph import Argument, Dim, references

__all__ = (
    "DTYPE_BYTES",
    "Flow",
    "changes",
    "enumerate_cuts",
    "frozen_reach",
    "is_random",
    "pixel_cuts",
    "prune",
    "reads",
    "replaced",
    "sources_of_change",
    "substitute",
    "uses_batch_statistics",
)

DTYPE_BYTES = {"bool": 1, "uint8": 1, "float16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8}
"""What may cross a cut: the dtypes that NumPy and Arrow have too."""

_BATCH = Dim(0, 1)


@dataclass(frozen=True)
class Flow:
    """What depends on what in a graph.

    Only values that depend on the *values* of the input count as data: what follows from its shape alone
    (positions, an expanded class token) is made again on either side and never crosses.
    """

    graph: Graph

    @cached_property
    def data(self) -> frozenset[str]:
        """Names of all values that depend on the values of the graph's inputs."""
        found = set(self.graph.inputs)
        for node in self.graph.nodes:
            if node.size is None and any(name in found for name in reads(node)):
                found.add(node.name)
        return frozenset(found)

    @cached_property
    def last_use(self) -> dict[str, int]:
        """Index of the last node that reads each value; ``len(nodes)`` for the graph's outputs.

        Reading a size is no use: it keeps nothing alive, since any tensor of the batch tells it.
        """
        uses: dict[str, int] = {}
        for index, node in enumerate(self.graph.nodes):
            if node.size is None:
                uses.update(dict.fromkeys(reads(node), index))
        for output in self.graph.outputs:
            uses.update(dict.fromkeys(references(output), len(self.graph.nodes)))
        return uses

    def needed(self) -> frozenset[str]:
        """Names of the nodes that the outputs, or a change of a leaf, depend on."""
        wanted = {name for output in self.graph.outputs for name in references(output)}
        leaves = {name for name, _ in self.graph.leaves}
        for node in reversed(self.graph.nodes):
            if node.name in wanted or changes(node) in leaves:
                wanted.update((node.name, *reads(node)))
        return frozenset(node.name for node in self.graph.nodes if node.name in wanted)


def prune(graph: Graph) -> Graph:
    """The graph without idle dropout, and without what neither its outputs nor a change of a leaf depend on."""
    graph = _without_idle_dropout(graph)
    wanted = Flow(graph).needed()
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
    return replace(graph, nodes=nodes, outputs=tuple(replaced(output, idle) for output in graph.outputs))


def substitute(node: Node, values: Mapping[str, Argument]) -> Node:
    """The node, reading other values in place of the named ones."""
    kwargs = tuple((name, replaced(value, values)) for name, value in node.kwargs)
    return replace(node, args=tuple(replaced(one, values) for one in node.args), kwargs=kwargs)


def replaced(argument: Argument, values: Mapping[str, Argument]) -> Argument:
    """The argument, with other values in place of the named ones."""
    while isinstance(argument, Ref) and argument.name in values:
        argument = values[argument.name]
    return tuple(replaced(one, values) for one in argument) if isinstance(argument, tuple) else argument


def reads(node: Node) -> list[str]:
    """Names of all values that a node reads."""
    return [*references(node.args), *references(tuple(value for _, value in node.kwargs))]


def changes(node: Node) -> str:
    """Name of the value that a node changes in place, or nothing.

    In ATen the overloads that write to their first argument end in an underscore.
    """
    packet = node.op.rpartition(".")[0]
    first = node.args[0] if node.args else None
    return first.name if packet.endswith("_") and isinstance(first, Ref) else ""


def sources_of_change(graph: Graph, trainable: Collection[str]) -> frozenset[str]:
    """Names of the nodes at which a forward pass stops being a fixed function of the input.

    They are the users of trainable leaves, active dropout and other random operators, BatchNorm that uses
    or updates the statistics of the batch, and everything else that changes a leaf in place.

    Args:
        graph: traced with the training flags as they will be.
        trainable: names of the leaves that are trained.
    """
    leaves = {name for name, _ in graph.leaves}
    return frozenset(
        node.name
        for node in graph.nodes
        if changes(node) in leaves
        or is_random(node)
        or uses_batch_statistics(node)
        or set(reads(node)) & set(trainable)
    )


_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "uniform", "native_dropout", "rrelu")


def is_random(node: Node) -> bool:
    """Whether two runs of the node may differ: random operators, and dropout that is active."""
    packet = node.op.split(".")[1].rstrip("_")
    if _is_dropout(node):
        return bool(node.args[2]) and node.args[1] != 0.0
    if packet == "scaled_dot_product_attention":
        probability = node.args[4] if len(node.args) > 4 else dict(node.kwargs).get("dropout_p", 0.0)
        return probability != 0.0
    return packet.startswith(_RANDOM)


def _is_dropout(node: Node) -> bool:
    return node.op.split(".")[1].rstrip("_") in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


def uses_batch_statistics(node: Node) -> bool:
    """Whether the node is a BatchNorm or InstanceNorm in train mode (argument ``training`` or ``use_input_stats``)."""
    return node.op in ("aten.batch_norm.default", "aten.instance_norm.default") and bool(node.args[5])


def frozen_reach(graph: Graph, changing: Collection[str]) -> int:
    """Index of the last node before the first of ``changing``; all nodes where there is none; -1 for none."""
    for index, node in enumerate(graph.nodes):
        if node.name in changing:
            return index - 1
    return len(graph.nodes) - 1


def enumerate_cuts(graph: Graph, input_shape: tuple[int, ...], *, reach: int, most_tensors: int = 1) -> tuple[Cut, ...]:
    """Every legal cut up to node index ``reach``, in order, from cut 0 (the encoded sample) on.

    A cut stands after each data node at which at most ``most_tensors`` values are still needed later and
    each of them has the batch as its first dimension and fixed other dimensions. The last is the frost line.
    """
    flow = Flow(graph)
    cuts = list(pixel_cuts(input_shape))
    names: dict[str, int] = {}
    for after, live in _frontiers(flow, reach):
        if len(live) > most_tensors or not all(map(_can_cross, live)):
            continue
        cuts.append(_cut(len(cuts), after, live, graph, names))
    return (cuts[0], replace(cuts[1], tensors=graph.inputs), *cuts[2:])


def pixel_cuts(input_shape: tuple[int, ...]) -> tuple[Cut, Cut]:
    """The two cuts that every job has: 0, the encoded sample, and 1, the preprocessed pixels."""
    encoded = Cut(number=0, name="encoded", after=-2, tensors=(), shapes=(), dtypes=(), bytes_per_sample=0)
    pixels = Cut(
        number=1,
        name="pixels",
        after=-1,
        tensors=("pixels",),
        shapes=(input_shape,),
        dtypes=("float32",),
        bytes_per_sample=_bytes_per_sample(input_shape, "float32"),
    )
    return encoded, pixels


def _frontiers(flow: Flow, reach: int) -> Iterator[tuple[int, list[Node]]]:
    """After each data node up to ``reach``: its index and the data nodes that later nodes still need."""
    live: list[Node] = []
    for index, node in enumerate(flow.graph.nodes[: reach + 1]):
        live = [one for one in live if flow.last_use.get(one.name, -1) > index]
        if node.name not in flow.data:
            continue
        if flow.last_use.get(node.name, -1) > index:
            live.append(node)
        if live and flow.last_use.get(flow.graph.inputs[0], -1) <= index:
            yield index, list(live)


def _can_cross(node: Node) -> bool:
    if node.shape is None or node.dtype not in DTYPE_BYTES:
        return False
    return node.shape[0] == _BATCH and all(dim.per_sample == 0 for dim in node.shape[1:]) if node.shape else False


def _cut(number: int, after: int, live: list[Node], graph: Graph, names: dict[str, int]) -> Cut:
    shapes = tuple(tuple(dim.fixed for dim in node.shape[1:]) for node in live if node.shape)
    return Cut(
        number=number,
        name=_place(graph.nodes[after], names),
        after=after,
        tensors=tuple(node.name for node in live),
        shapes=shapes,
        dtypes=tuple(node.dtype for node in live),
        bytes_per_sample=sum(_bytes_per_sample(shape, node.dtype) for shape, node in zip(shapes, live, strict=True)),
        is_relu=len(live) == 1 and _is_relu(live[0]),
    )


def _is_relu(node: Node) -> bool:
    packet = node.op.split(".")[1].rstrip("_")
    return packet in ("relu", "relu6") or (packet == "hardtanh" and node.args[1] == 0.0)


def _place(node: Node, names: dict[str, int]) -> str:
    """The module, and the operator where that says more; numbered where the same place comes again."""
    packet = node.op.split(".")[1].rstrip("_")
    name = f"{node.module}:{packet}" if node.module else packet
    names[name] = names.get(name, 0) + 1
    return name if names[name] == 1 else f"{name}#{names[name]}"


def _bytes_per_sample(shape: tuple[int, ...], dtype: str) -> int:
    size = DTYPE_BYTES[dtype]
    for dim in shape:
        size *= dim
    return size
