"""Finds out whether a network's frozen part may run on short texts as they are, instead of padded ones."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from frostline.core import Cut, Graph, GraphNode, Ref, TensorSpec
from frostline.core.graph import Argument
from frostline.core.token_lengths import Lengths, at_length, bucket_of, buckets, stretches
from frostline.engines.base.length_runner import LengthRunner
from frostline.engines.base.runner import Runner, leaf_values
from frostline.errors import ModelError
from frostline.models.cutting.cut import cut_network
from frostline.models.files.artifact import Prefix
from frostline.models.graph.flow import changes
from frostline.models.modes import all_in_eval, modes
from frostline.models.tracing.comparison import UNFIT, kept_buffers, whole
from frostline.models.tracing.export import device_of

__all__ = ("shortened",)

# Relative errors by which sums of another order differ, in 32 bits and in 16.
_ERROR, _ERROR_OF_16_BITS = 1e-4, 3e-2
_TRIED = 64  # tokens of the longest text that is tried: enough for several buckets, and quick
_SLICED = 4  # arguments of a slice: the tensor, its dimension, from where and up to where


def shortened(model: nn.Module, prefix: Prefix, tokenizer: bytes, *, frozen_in_eval: bool) -> Prefix:
    """The frozen part, with its lengths where it may run on fewer tokens; as it was where texts have to be padded.

    It is traced once more, at the fewest tokens. Both traces may differ in numbers that grow with the tokens alone, and
    the network has to give the same for texts with padding and without it, on a few that are made up.

    Args:
        model: the network, which takes ids and mask as the rows of one array.
        prefix: its frozen part.
        tokenizer: JSON of the tokenizer.
        frozen_in_eval: see ``cut_network``.
    """
    (_, max_length), padding = prefix.input_shape, json.loads(tokenizer)["padding"]
    shortest = buckets(max_length)[0]
    if shortest >= max_length or str(padding["direction"]) != "Right":
        return prefix
    if any(changes(node) for node in prefix.graph.nodes):
        return prefix
    try:
        short = cut_network(model, (TensorSpec((2, shortest), "int64"),), frozen_in_eval=frozen_in_eval).prefix
        found = None if short is None else _compared(prefix, short.graph, max_length, shortest)
        texts = _texts(bucket_of(_TRIED, buckets(max_length)), int(padding["pad_id"]), device_of(model))
        return found if found is not None and _holds(model, found, texts) else prefix
    except UNFIT:
        return prefix


def _compared(prefix: Prefix, short: Graph, max_length: int, shortest: int) -> Prefix | None:
    """The frozen part with its lengths, which nothing has tried yet; None where its traces differ in more."""
    if len(short.nodes) != len(prefix.graph.nodes):
        return None
    short = _named_alike(short, prefix.graph)
    graph = _sliced(prefix.graph, short, max_length)
    found = stretches(graph, short, max_length, shortest)
    if found is None:
        return None
    sizes = {node.name: node.shape for node in short.nodes}
    shapes = []
    for cut in prefix.cuts:
        grows = [
            _growth(shape, (2, shortest) if name in short.inputs else _per_sample(sizes[name]), max_length - shortest)
            for name, shape in zip(cut.tensors, cut.shapes, strict=True)
        ]
        shapes.append(tuple(grows))
    return replace(prefix, graph=graph, lengths=Lengths(max_length=max_length, stretches=found, shapes=tuple(shapes)))


def _named_alike(short: Graph, full: Graph) -> Graph:
    """The graph with the names of another one's operations, place by place."""
    pairs = list(zip(short.nodes, full.nodes, strict=True))
    names = {node.name: other.name for node, other in pairs}
    nodes = tuple(replace(_renamed_node(node, names), name=other.name) for node, other in pairs)
    return replace(short, nodes=nodes, outputs=tuple(_renamed(output, names) for output in short.outputs))


def _renamed_node(node: GraphNode, names: Mapping[str, str]) -> GraphNode:
    kwargs = tuple((name, _renamed(value, names)) for name, value in node.kwargs)
    return replace(node, args=tuple(_renamed(value, names) for value in node.args), kwargs=kwargs)


def _renamed(value: Argument, names: Mapping[str, str]) -> Argument:
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    return tuple(_renamed(item, names) for item in value) if isinstance(value, tuple) else value


def _sliced(full: Graph, short: Graph, max_length: int) -> Graph:
    """The graph with a slice of all, where a trace at as many tokens as there are positions has left it out."""
    nodes = []
    for node, other in zip(full.nodes, short.nodes, strict=True):
        is_all = (node.op, other.op) == ("aten.alias.default", "aten.slice.Tensor") and len(other.args) == _SLICED
        nodes.append(replace(node, op=other.op, args=(*node.args, *other.args[1:-1], max_length)) if is_all else node)
    return replace(full, nodes=tuple(nodes))


def _per_sample(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, tuple):
        raise ModelError("a value has no shape that grows with the batch")
    return tuple(dim.fixed for dim in shape[1:])


def _growth(shape: Sequence[int], short: Sequence[int], fewer: int) -> tuple[int, ...]:
    """Growth of each dimension with a token."""
    found = [divmod(size - less, fewer) for size, less in zip(shape, short, strict=True)]
    if any(rest for _, rest in found):
        raise ModelError("a dimension does not grow in line with the tokens")
    return tuple(grows for grows, _ in found)


def _texts(max_length: int, pad: int, device: torch.device) -> torch.Tensor:
    """One made-up text for each of a few lengths: ids and mask."""
    lengths = buckets(max_length)
    counts = [lengths[0] - 3, lengths[len(lengths) // 2] - 1, max_length]
    rows = torch.zeros((len(counts), 2, max_length), dtype=torch.int64, device=device)
    rows[:, 0] = pad
    for row, count in zip(rows, counts, strict=True):
        # Ids above and below that of padding, which every vocabulary has.
        row[0, :count] = (torch.arange(count, device=device) * 3 + count) % 4 + (pad + 1 if pad < 4 else 0)
        row[1, :count] = 1
    return rows


def _holds(model: nn.Module, prefix: Prefix, texts: torch.Tensor) -> bool:
    """Whether the network, and its frozen part in buckets, give for some texts what they give for padded ones."""
    lengths = prefix.lengths
    assert lengths is not None, "they were compared"
    longest = int(texts.shape[2])
    graph, cuts = at_length(prefix.graph, prefix.cuts, lengths, longest)
    filled = nn.functional.pad(texts, (0, lengths.max_length - longest))
    leaves = [leaf.to(texts.device) for leaf in leaf_values(prefix.graph, prefix.tensors)]
    bucketed = LengthRunner(prefix.graph, prefix.cuts, leaves, lengths, device=texts.device)
    last = prefix.cuts[-1]
    if not bucketed.takes(last.number):
        return False
    with torch.no_grad(), modes(model, all_in_eval(model)), kept_buffers(model):
        padded = whole(model, [texts])
        bare = [whole(model, [row[None, :, : int(row[1].sum())]])[0] for row in texts]
        if not all(_is_close(own, other) for own, other in zip(bare, padded, strict=True)):
            return False
        full = Runner(graph, cuts=cuts, device=texts.device).run([texts], leaves, upto=cuts[-1])
        short = bucketed.run(filled, last.number)
    return all(_agree(last, lengths, place, full[place], short[place], texts) for place in range(len(full)))


def _agree(
    cut: Cut, lengths: Lengths, place: int, full: torch.Tensor, short: torch.Tensor, texts: torch.Tensor
) -> bool:
    """Whether a tensor is the same where the texts have tokens."""
    grows = lengths.shapes[cut.number - 1][place]
    for row, other, text in zip(full, short, texts, strict=True):
        tokens = int(text[1].sum())
        region = tuple(
            slice(0, tokens if per_token else size) for per_token, size in zip(grows, row.shape, strict=True)
        )
        if not _is_close(other[region], row[region]):
            return False
    return True


def _is_close(value: torch.Tensor, meant: torch.Tensor) -> bool:
    if not meant.is_floating_point():
        return torch.equal(value, meant)
    error = _ERROR if meant.dtype == torch.float32 else _ERROR_OF_16_BITS
    off, size = (value - meant).float(), meant.float()
    return bool(off.square().mean().sqrt() <= error * size.square().mean().sqrt())
