"""The memory of a run is known before it runs, on both sides of every cut."""

import pytest
import torch
from torch import nn

from frostline.core import Cut, Graph, GraphNode, Ref
from frostline.core.errors import UnsafeArtifact
from frostline.engines.graph_runner import leaf_values
from frostline.engines.measure import dry_run, observed_memory
from frostline.engines.torch import TorchEngine
from frostline.models import cut_network

SHAPE = (3, 16, 16)
PIXELS = 4 * 3 * 16 * 16


class Narrowing(nn.Module):
    """Wide first, narrow later, so that the peak of what is left falls from cut to cut."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(3, 16, 1)
        self.middle = nn.Conv2d(16, 4, 1)
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        return self.last(self.middle(self.wide(x)))


def engine():
    prefix = cut_network(Narrowing().requires_grad_(False), SHAPE).prefix
    return TorchEngine(prefix.graph, prefix.cuts, prefix.tensors)


def test_a_footprint_counts_what_lives_beside_each_other_up_to_the_cut():
    sides = [engine().footprint(number) for number in (1, 2, 3, 4)]
    assert [side.fixed_bytes for side in sides] == [0, 0, 0, 0]
    wide, middle = 16 * PIXELS // 3, 4 * PIXELS // 3
    assert [side.bytes_per_sample for side in sides] == [PIXELS, PIXELS + wide, wide + middle, wide + middle]


def test_the_footprint_of_the_rest_counts_what_lives_behind_the_cut():
    sides = [engine().remaining_footprint(number) for number in (1, 2, 3, 4)]
    wide, middle, last = (channels * PIXELS // 3 for channels in (16, 4, 1))
    assert [side.bytes_per_sample for side in sides] == [wide + middle, wide + middle, middle + last, 0]


def test_what_a_run_of_a_few_samples_takes_is_what_shapes_alone_say():
    prefix = cut_network(Narrowing().requires_grad_(False), SHAPE).prefix
    leaves = leaf_values(prefix.graph, prefix.tensors)
    said = dry_run(prefix.graph, leaves, prefix.cuts)
    assert observed_memory(prefix.graph, leaves, prefix.cuts, [torch.zeros(2, *SHAPE)]) == said


def test_a_footprint_tells_the_bytes_of_any_batch():
    side = engine().footprint(2)
    assert side.at(32) == 32 * side.bytes_per_sample


def test_weights_are_counted_apart():
    weights = sum(parameter.nbytes for parameter in Narrowing().parameters())
    assert engine().weight_bytes == weights


def node(name, op, *args):
    return GraphNode(name=name, op=f"aten.{op}", args=args)


def test_a_graph_that_writes_to_its_weights_under_another_name_is_refused():
    nodes = (
        node("half", "slice.Tensor", Ref("w"), 0, 0, 2),
        node("more", "add_.Tensor", Ref("half"), 1),
        node("y", "mul.Tensor", Ref("x"), Ref("w")),
    )
    graph = Graph(inputs=("x",), leaves=(("w", "w"),), nodes=nodes, outputs=(Ref("y"),))
    cuts = [
        Cut(
            number=number,
            name=name,
            after=after,
            tensors=(name,),
            shapes=((4,),),
            dtypes=("float32",),
            bytes_per_sample=16,
        )
        for number, name, after in ((1, "x", -1), (2, "y", 2))
    ]
    with pytest.raises(UnsafeArtifact, match="changes its own weights"):
        TorchEngine(graph, cuts, {"w": torch.ones(4)})


def test_a_peak_that_changes_its_place_with_the_batch_is_still_bounded():
    """Up to 16 rows the constant is the most there is at once, at 32 what the samples take."""
    nodes = (
        node("table", "zeros.default", (1000,)),
        node("more", "add.Scalar", Ref("table"), 1),
        node("one", "sum.default", Ref("more")),
        node("wide", "repeat.default", Ref("x"), (1, 25)),
        node("y", "mul.Tensor", Ref("wide"), Ref("one")),
    )
    graph = Graph(inputs=("x",), leaves=(), nodes=nodes, outputs=(Ref("y"),))
    cuts = [
        Cut(number=1, name="x", after=-1, tensors=("x",), shapes=((4,),), dtypes=("float32",), bytes_per_sample=16),
        Cut(number=2, name="y", after=4, tensors=("y",), shapes=((100,),), dtypes=("float32",), bytes_per_sample=400),
    ]
    side = TorchEngine(graph, cuts, {}).footprint(2)
    assert side.at(8) >= 8_000
    assert 0 <= side.at(32) - (32 * 800 + 4) < 32
