"""Frozen layers that a network runs after trained ones, as where encoders stand side by side, are cut too."""

import copy

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from frostline.core import Graph, GraphNode, Ref, TensorSpec
from frostline.core.errors import NothingFrozen
from frostline.models import cut_network
from frostline.models.graph import frozen_first
from frostline.models.tracing import takes_parts
from frostline.preprocess.steps import place_inputs
from support.cutting import crossed, finished, shipped_engine

pytestmark = pytest.mark.promise("equal")

SHAPE = (3, 8, 8)


class Encoders(nn.Module):
    """Each has a projection that is trained, and that runs before the next encoder does."""

    def __init__(self, count=2):
        super().__init__()
        torch.manual_seed(0)
        self.encoders = nn.ModuleList(nn.Conv2d(3, 4 + place, 3) for place in range(count)).requires_grad_(False)
        self.projections = nn.ModuleList(nn.Linear(4 + place, 2) for place in range(count))

    def forward(self, x):
        pairs = zip(self.encoders, self.projections, strict=True)
        return torch.cat([projection(torch.relu(encoder(x)).mean((2, 3))) for encoder, projection in pairs], 1)


class WritesWhatWasRead(Encoders):
    """The second encoder's output overwrites what the first projection has read."""

    def forward(self, x):
        first = self.encoders[0](x)
        projected = self.projections[0](first.mean((2, 3)))
        first.copy_(self.encoders[1](x)[:, :4])
        return projected + self.projections[1](self.encoders[1](x).mean((2, 3))) + first.mean((1, 2, 3))[:, None]


def same_at_every_cut(model, shape=SHAPE):
    """That each cut gives the answer and the gradients of the network; the cuts."""
    plain, batch = copy.deepcopy(model), torch.randn(8, *shape)
    network = cut_network(model, shape)
    meant = plain(batch.clone())
    meant.square().sum().backward()
    engine = shipped_engine(network) if network.prefix else None
    for cut in network.cuts[1:]:
        features = [batch] if engine is None else finished(network, cut, crossed(engine, [batch], cut))
        found = network.head(features)
        assert torch.equal(found, meant), cut.name
        model.zero_grad()
        found.square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), cut.name
    return network.cuts


def test_both_encoders_run_before_the_first_projection():
    cuts = same_at_every_cut(Encoders())
    assert cuts[-1].shapes == ((5,), (4,))


def test_a_layer_that_writes_to_what_a_trained_one_has_read_stays_behind_it():
    cuts = same_at_every_cut(WritesWhatWasRead())
    assert all("copy" not in cut.name for cut in cuts)


def test_the_head_follows_its_modes_with_encoders_side_by_side():
    class Dropping(Encoders):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    model = Dropping()
    network, batch = cut_network(model, SHAPE), torch.randn(8, *SHAPE)
    features = crossed(shipped_engine(network), [batch], network.frost_line)
    for mode in (True, False, True):
        network.head.train(mode)
        model.train(mode)
        torch.manual_seed(4)
        found = network.head(features)
        torch.manual_seed(4)
        assert torch.equal(found, model(batch)), mode


def test_memory_that_is_read_as_whole_numbers_ends_the_frozen_part():
    class Reads(Encoders):
        def forward(self, x):
            bits = self.encoders[0](x).contiguous().view(torch.int32) % 2
            return self.projections[0](bits.to(torch.float32).mean((2, 3)))

    network = cut_network(Reads(), SHAPE)
    assert network.frost_line.name.startswith("encoders.0")
    assert "a node does not run aten.view.dtype" in network.fallback


def test_nothing_is_moved_where_no_frozen_layer_stands_behind_a_trained_one():
    nodes = tuple(
        GraphNode(name=name, op=op, args=args)
        for name, op, args in [
            ("a", "aten.linear.default", (Ref("x"), Ref("frozen"))),
            ("b", "aten.linear.default", (Ref("a"), Ref("trained"))),
            ("c", "aten.relu.default", (Ref("a"),)),
        ]
    )
    graph = Graph(inputs=("x",), leaves=(("frozen", "f"), ("trained", "t")), nodes=nodes, outputs=(Ref("b"), Ref("c")))
    assert frozen_first(graph, {"b"}) is graph
    assert [node.name for node in frozen_first(graph, {"a"}).nodes] == ["a", "b", "c"]


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_what_each_part_of_a_sample_gives_may_cross_the_frost_line(parts):
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoders = nn.ModuleList(nn.Linear(6, 3 + place) for place in range(parts)).requires_grad_(False)
            self.projections = nn.ModuleList(nn.Linear(3 + place, 2) for place in range(parts))

        def forward(self, **inputs):
            rows = [inputs[f"part_{place}"] for place in range(parts)]
            layers = zip(self.projections, self.encoders, rows, strict=True)
            return sum(made(torch.relu(kept(row))) for made, kept, row in layers)

    places = place_inputs((f"part_{place}", TensorSpec((6,), "float32")) for place in range(parts))
    network = cut_network(takes_parts(Joined(), places), (TensorSpec((3 * parts,), "int64"),))
    assert sorted(shape[0] for shape in network.frost_line.shapes) == list(range(3, 3 + parts))


STEPS = {
    "add": lambda item, other: item + other,
    "relu in place": lambda item, _: torch.relu_(item),
    "slice in place": lambda item, _: (item[:, :2].mul_(2), item)[1],
    "turn": lambda item, _: item.transpose(2, 3),
}
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(["frozen", "trained", *STEPS]), st.integers(0, 3), st.integers(0, 3)),
    min_size=3,
    max_size=8,
)


class Mixed(nn.Module):
    """Frozen and trained layers in any order, each on one of the last four values, some of which are written to."""

    def __init__(self, program):
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.frozen = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)
        self.trained = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        made = [self.frozen(x)]
        for name, first, second in self.program:
            item, other = made[first % len(made)], made[second % len(made)]
            made.insert(0, getattr(self, name)(item) if name not in STEPS else STEPS[name](item, other))
        return sum(made[:3]).mean((2, 3))


@settings(max_examples=20)
@given(program=PROGRAMS)
@example(program=[("add", 0, 0), ("frozen", 0, 0), ("trained", 0, 0)])
@example(program=[("trained", 0, 0), ("frozen", 1, 0), ("add", 0, 1)])
@example(program=[("trained", 0, 0), ("slice in place", 1, 0), ("frozen", 0, 0), ("frozen", 2, 0)])
@example(program=[("add", 1, 0), ("turn", 0, 0), ("trained", 0, 0)])
@example(program=[("frozen", 0, 0), ("trained", 1, 0), ("relu in place", 2, 0), ("frozen", 0, 0)])
def test_every_cut_of_a_random_network_with_trained_layers_amid_gives_its_answer(program):
    model = Mixed(program)
    try:
        copy.deepcopy(model)(torch.randn(2, 4, 6, 6)).sum().backward()
    except RuntimeError:  # autograd itself minds what is written over
        assume(False)
    try:
        same_at_every_cut(model, (4, 6, 6))
    except NothingFrozen:
        assume(False)
