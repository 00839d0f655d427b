"""Split a graph at a cut: the part before it and the part after it, each a graph of its own. Pure."""

from dataclasses import replace

from frostline.core import Cut, Dim, Graph, Node, Ref
from frostline.core.graph import Argument
from frostline.errors import NotTraceable
from frostline.models.cuts import Flow, changes, prune, replaced, substitute

__all__ = ("after", "before", "guard_inputs")

# Overloads whose result may share memory with their first argument, beside the in-place ones (ATen's schemas
# mark them with an alias annotation that is not a write). An in-place operator on such a result writes to its source.
_VIEWS = frozenset(
    {
        "alias",
        "chunk",
        "contiguous",
        "detach",
        "dropout",
        "expand",
        "expand_as",
        "flatten",
        "getitem",
        "movedim",
        "narrow",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "to",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
    }
)


def before(graph: Graph, cut: Cut) -> Graph:
    """The part of ``graph`` from its input to the cut; its outputs are the values that cross."""
    nodes = graph.nodes[: cut.after + 1]
    return prune(replace(graph, nodes=nodes, outputs=tuple(Ref(name) for name in cut.tensors)))


def after(graph: Graph, cut: Cut) -> Graph:
    """The part of ``graph`` from the cut to its outputs; its inputs are the values that cross.

    What does not depend on the values of the input but is needed later is made again; sizes of the batch are
    read from the first value that crosses.

    Raises:
        NotTraceable: A size is needed that is no simple multiple of the batch.
    """
    if cut.number <= 1:
        return guard_inputs(graph)
    flow = Flow(graph)
    remake = _Remake(graph, flow.data | {node.name for node in graph.nodes[cut.after + 1 :]}, cut.tensors[0])
    nodes: list[Node] = []
    for node in graph.nodes[cut.after + 1 :]:
        nodes.extend(remake.resolve(node))
    outputs = tuple(remake.argument(output, nodes) for output in graph.outputs)
    return guard_inputs(prune(replace(graph, inputs=cut.tensors, nodes=tuple(nodes), outputs=outputs)))


def guard_inputs(graph: Graph) -> Graph:
    """The graph with a copy made of every input that it would overwrite, so that the caller's stays as it was."""
    touched = _overwritten(graph)
    copies = {name: f"{name}__copy" for name in graph.inputs if name in touched}
    if not copies:
        return graph
    clones = tuple(Node(name=copy, op="aten.clone.default", args=(Ref(name),)) for name, copy in copies.items())
    instead = {name: Ref(copy) for name, copy in copies.items()}
    nodes = tuple(substitute(node, instead) for node in graph.nodes)
    outputs = tuple(replaced(output, instead) for output in graph.outputs)
    return replace(graph, nodes=clones + nodes, outputs=outputs)


def _overwritten(graph: Graph) -> set[str]:
    """Names of the inputs that a node changes, directly or through views."""
    source = {name: name for name in graph.inputs}
    touched = set()
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if not isinstance(first, Ref) or first.name not in source:
            continue
        if changes(node):
            touched.add(source[first.name])
        if changes(node) or node.op.split(".")[1] in _VIEWS:
            source[node.name] = source[first.name]
    return touched


class _Remake:
    """Brings what a later part needs from before the cut: sizes, and tensors that no sample decides."""

    def __init__(self, graph: Graph, there: frozenset[str], batch_of: str) -> None:
        self._nodes = {node.name: node for node in graph.nodes}
        self._there = set(there) | {name for name, _ in graph.leaves} | set(graph.inputs)
        self._batch_of = batch_of
        self._sizes: dict[Dim, str] = {}

    def resolve(self, node: Node) -> list[Node]:
        """The node, with the nodes that must be made again before it."""
        if node.size is not None:
            return []
        made: list[Node] = []
        args = self.argument(node.args, made)
        kwargs = tuple((name, self.argument(value, made)) for name, value in node.kwargs)
        assert isinstance(args, tuple)
        return [*made, replace(node, args=args, kwargs=kwargs)]

    def argument(self, argument: Argument, made: list[Node]) -> Argument:
        if isinstance(argument, tuple):
            return tuple(self.argument(one, made) for one in argument)
        if not isinstance(argument, Ref):
            return argument
        node = self._nodes.get(argument.name)
        if node is not None and node.op == "aten.sym_size.int" and node.size is None:
            raise NotTraceable(f"size {node.name} of the network is no simple multiple of the batch")
        if node is not None and node.size is not None:
            return self._size(node.size, made)
        if argument.name not in self._there:
            assert node is not None
            self._there.add(node.name)
            made.extend(self.resolve(node))
        return argument

    def _size(self, size: Dim, made: list[Node]) -> Argument:
        """``per_sample * batch + fixed``, with the batch read from what crosses the cut."""
        if size.per_sample == 0:
            return size.fixed
        if size not in self._sizes:
            made.extend(self._size_nodes(size))
        return Ref(self._sizes[size])

    def _size_nodes(self, size: Dim) -> list[Node]:
        name = f"{self._batch_of}__size_{size.per_sample}_{size.fixed}".replace("-", "m")
        steps: list[tuple[str, tuple[Argument, ...]]] = [("aten.sym_size.int", (Ref(self._batch_of), 0))]
        if size.per_sample != 1:
            steps.append(("operator.mul", (Ref(f"{name}__0"), size.per_sample)))
        if size.fixed:
            steps.append(("operator.add", (Ref(f"{name}__{len(steps) - 1}"), size.fixed)))
        self._sizes[size] = f"{name}__{len(steps) - 1}"
        return [Node(name=f"{name}__{place}", op=op, args=args, size=size) for place, (op, args) in enumerate(steps)]
