"""Writes into a prefix's file how it runs on fewer tokens, and checks what such a file says."""

from collections.abc import Sequence
from typing import Any

from frostline.core import Cut, Graph
from frostline.core.token_lengths import Lengths, Stretch, at_length, buckets
from frostline.errors import UnsafeArtifact
from frostline.models.files.graph_file import integer

__all__ = ("lengths_from_json", "lengths_to_json")

_MAX_STRETCHES = 100_000
_MAX_TOKENS = 8192  # as of preprocess.text


def lengths_to_json(lengths: Lengths) -> dict[str, Any]:
    """How a graph becomes one for fewer tokens, as plain values."""
    return {
        "max_length": lengths.max_length,
        "stretches": [[stretch.node, list(stretch.path), stretch.per_token] for stretch in lengths.stretches],
        "shapes": [[list(grows) for grows in cut] for cut in lengths.shapes],
    }


def lengths_from_json(value: dict[str, Any], graph: Graph, cuts: Sequence[Cut]) -> Lengths:
    """The inverse of ``lengths_to_json``, from wherever it came; may also raise any of ``graph_file.BROKEN``.

    Args:
        value: plain values.
        graph: graph that they are about.
        cuts: its cuts.

    Raises:
        UnsafeArtifact: They do not fit the graph.
    """
    if len(value["stretches"]) > _MAX_STRETCHES:
        raise UnsafeArtifact(f"a prefix names up to {_MAX_STRETCHES} numbers that grow with the tokens")
    lengths = Lengths(
        max_length=integer(value["max_length"]),
        stretches=tuple(
            Stretch(node=integer(node), path=tuple(map(integer, path)), per_token=integer(per_token))
            for node, path, per_token in value["stretches"]
        ),
        shapes=tuple(tuple(tuple(map(integer, grows)) for grows in cut) for cut in value["shapes"]),
    )
    places = [place for stretch in lengths.stretches for place in (stretch.node, *stretch.path)]
    if min(places, default=0) < 0 or not all(stretch.path for stretch in lengths.stretches):
        raise UnsafeArtifact("a number that grows with the tokens is named by places from 0 on")
    if not 1 <= lengths.max_length <= _MAX_TOKENS or cuts[0].shapes != ((2, lengths.max_length),):
        raise UnsafeArtifact("a prefix that grows with the tokens takes ids and mask of as many as it says")
    shapes = at_length(graph, cuts, lengths, buckets(lengths.max_length)[0])[1]
    if any(size < 0 for cut in shapes for shape in cut.shapes for size in shape):
        raise UnsafeArtifact("a tensor of fewer tokens has a negative size")
    return lengths
