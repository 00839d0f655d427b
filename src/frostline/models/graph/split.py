"""Split a graph at a cut: the part before it and the part after it, each a graph of its own. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from frostline.core import Cut, Dim, Graph, GraphNode, Ref
from frostline.core.graph import Argument
from frostline.models.graph.flow import Flow, changes, packet_of, prune, replaced, substitute

__all__ = ("after", "before", "guard_inputs", "is_same", "moved")

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
    outputs = tuple(replaced(output, values) for output in part.outputs)
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


def moved(cut: Cut, graph: Graph, other: Graph) -> Cut | None:
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


def is_same(graph: Graph, other: Graph) -> bool:
    """Whether two graphs compute the same step by step, sizes of the batch called whatever they are."""
    return _without_sizes(graph) == _without_sizes(other)


def _without_sizes(graph: Graph) -> tuple[GraphNode, ...]:
    sizes: dict[str, Argument] = {node.name: Ref(f"{node.size}") for node in graph.nodes if node.size is not None}
    return tuple(substitute(node, sizes) for node in graph.nodes if node.size is None)


def guard_inputs(graph: Graph) -> Graph:
    """The graph with a copy made of every input that it would overwrite, so that the caller's stays as it was."""
    copies = {name: f"{name}__copy" for name in _overwritten(graph)}
    if not copies:
        return graph
    clones = tuple(GraphNode(name=copy, op="aten.clone.default", args=(Ref(name),)) for name, copy in copies.items())
    instead = {name: Ref(copy) for name, copy in copies.items()}
    nodes = tuple(substitute(node, instead) for node in graph.nodes)
    outputs = tuple(replaced(output, instead) for output in graph.outputs)
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
