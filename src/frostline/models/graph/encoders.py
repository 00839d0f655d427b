"""Ends each of several encoders where the fewest tensors cross, when layers inside them are trained. Pure."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from frostline.core import Graph, TensorSpec
from frostline.models.graph.flow import Flow, frozen_reach, reads
from frostline.models.graph.frontiers import crosses_permuted, narrowest

__all__ = ("ended_apart",)


def ended_apart(graph: Graph, inputs: Sequence[TensorSpec], changing: Collection[str]) -> tuple[Graph, frozenset[str]]:
    """The graph with what is frozen behind each encoder's own narrowest place moved behind all that is before one.

    With it the names of what was moved.

    Where an adapter is trained within a layer, what is frozen of that layer is computed by then too, and each encoder
    would have half a dozen tensors cross. So each ends where the fewest tensors of it cross behind its first weights;
    of places that are equally narrow, at the last.

    Args:
        graph: with its frozen layers first (``models.graph.flow.frozen_first``).
        inputs: specifications of its inputs, which the encoders share.
        changing: names of the nodes at which it stops being a fixed function of the input.
    """
    reach = frozen_reach(graph, changing)
    encoders = _encoders(graph, reach)
    late = frozenset(name for encoder in encoders for name in _behind(graph, inputs, encoder, encoders, changing))
    frozen = sorted(graph.nodes[: reach + 1], key=lambda node: node.name in late)
    return replace(graph, nodes=(*frozen, *graph.nodes[reach + 1 :])), late


def _encoders(graph: Graph, reach: int) -> list[set[str]]:
    """Names of the frozen nodes that hang together without the inputs, for each such group with weights."""
    data, inputs = Flow(graph).data, set(graph.inputs)
    groups: list[set[str]] = []
    for node in graph.nodes[: reach + 1]:
        if node.name in data:
            near = {node.name, *(name for name in reads(node) if name in data and name not in inputs)}
            joined = [group for group in groups if not group.isdisjoint(near)]
            groups = [group for group in groups if group.isdisjoint(near)] + [near.union(*joined)]
    weights = {name for name, _ in graph.leaves}
    reading = {node.name for node in graph.nodes if not weights.isdisjoint(reads(node))}
    return [group for group in groups if not group.isdisjoint(reading)]


def _behind(
    graph: Graph,
    inputs: Sequence[TensorSpec],
    encoder: set[str],
    encoders: Sequence[set[str]],
    changing: Collection[str],
) -> Iterator[str]:
    """Names of an encoder's nodes behind its narrowest place; none where it has no such place."""
    others = {name for other in encoders if other is not encoder for name in other}
    # To this encoder the others are as constant as weights are.
    alone = replace(
        graph,
        nodes=tuple(node for node in graph.nodes if node.name not in others),
        leaves=(*graph.leaves, *((name, name) for name in sorted(others))),
    )
    weights = {name for name, _ in graph.leaves}
    first = next(
        place for place, node in enumerate(alone.nodes) if node.name in encoder and not weights.isdisjoint(reads(node))
    )
    place = narrowest(alone, inputs, crosses_permuted, among=range(first, frozen_reach(alone, changing) + 1))
    if place is not None:
        yield from (node.name for node in alone.nodes[place.after + 1 :] if node.name in encoder)
