"""Networks are traced by two small runs: what both have in common is the graph, and nothing else is taken for it."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from frostline.core import Dim, TensorSpec
from frostline.core.errors import NotTraceable
from frostline.engines.graph_runner import Runner
from frostline.models import cut_network
from frostline.models.tracing import Trace, trace
from support.cutting import crossed, shipped_engine
from support.networks import Small

INPUTS = (TensorSpec((6,)),)
ROWS = 7


class Does(nn.Module):
    """Whatever is asked between two layers."""

    def __init__(self, does):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.anchor, self.scale = torch.arange(6.0), 2
        self.register_buffer("seen", torch.zeros(6))
        self.alias = self.first.weight.data
        self.does = does

    def forward(self, x):
        return self.last(self.does(self, self.first(x)))


def traced(does) -> tuple[nn.Module, Trace]:
    model = Does(does)
    return model, trace(model, INPUTS, training={path: True for path, _ in model.named_modules()})


def run(model, found, batch):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers()) | dict(found.constants)
    leaves = [tensors[path] for _, path in found.graph.leaves]
    return Runner(found.graph, device=torch.device("cpu")).run([batch], leaves)


def count_up(model, h):
    model.seen = model.seen + 1
    return h + model.seen


def half_without_gradients(_, h):
    with torch.no_grad():
        mean = h.mean(1, keepdim=True)
    return h - mean


def write_down(_, h):
    h = h * 1
    h[:, :2].mul_(3)
    return h.relu_()


CARRIED = {
    "nothing": lambda _, h: h,
    "a size of the batch": lambda _, h: h.view(h.size(0), 2, 3).transpose(1, 2).reshape(len(h), -1),
    "sizes made of it": lambda _, h: (
        h.view(h.shape[0] * 2, 3).view(-1, 6) + torch.ones(2 * h.shape[0] + 1, 1)[1 : h.shape[0] + 1]
    ),
    "a size that is compared with itself": lambda _, h: (
        h if h.shape[0] == h.relu().shape[0] and h.shape[0] >= 1 else -h
    ),
    "a tensor of its own": lambda model, h: h + model.anchor,
    "numbers that no row decides": lambda model, h: h * sum(torch.arange(3).tolist()) + float(model.anchor.max()),
    "a new tensor": lambda _, h: h + torch.tensor([1.0, 2, 3, 4, 5, 6]),
    "parts": lambda _, h: torch.cat(h.split([2, 4], 1)[::-1], 1) + h.chunk(2, 1)[0].mean(),
    "writes": write_down,
    "data": lambda _, h: h + h.data,
    "no gradients for a while": half_without_gradients,
    "a buffer put in another's place": count_up,
    "a batch made square": lambda _, h: h.repeat(1, h.shape[0])[:, :6],
    "a mask that keeps the shape": lambda _, h: torch.where(h > 0, h, h * 0.1),
}
BY_VALUES = {
    "bool": lambda _, h: h if h.sum() > 0 else -h,
    "item": lambda _, h: h * h.max().item(),
    "tolist": lambda _, h: h * h[0].tolist()[0],
    "numpy": lambda _, h: h + torch.from_numpy(h.detach().numpy().copy()),
    "float of a weight": lambda model, h: h * float(model.last.weight.detach()[0, 0]),
    "a number that was written into a constant": lambda model, h: h * _written(model, h),
    "a number that was written over a constant": lambda _, h: h * _written_over(h),
    "a mask that selects": lambda _, h: h + h[h > 0].sum(),
    "nonzero": lambda _, h: h + h.nonzero().shape[0],
    "where of one argument": lambda _, h: h + len(torch.where(h > 0)[0]),
    "a random number": lambda _, h: h if torch.rand(1).item() < 2 else -h,
}
BY_SIZE = {
    "more than many": lambda _, h: h if h.shape[0] > 16 else -h,
    "the most of some": lambda _, h: h * min(h.size(0), 64),
    "exactly so many": lambda _, h: h if h.size()[0] != 32 else -h,
    "half the batch": lambda _, h: torch.cat([h[: h.shape[0] // 2], h[h.shape[0] // 2 :]]),
    "an even one": lambda _, h: h if h.shape[0] % 2 else h * 1,
    "a loop over rows": lambda _, h: torch.stack([h[row] for row in range(h.shape[0])]),
}
OTHERWISE = {
    "random numbers of Python": (lambda _, h: h * random.random(), "draws random numbers that are not torch's"),
    "random numbers of NumPy": (lambda _, h: h + torch.from_numpy(np.random.rand(6)).float(), "draws random numbers"),
    "sparse": (lambda _, h: h + h.to_sparse().to_dense(), "sparse tensors in its own forward"),
    "a weight by another name": (lambda model, h: h @ model.alias, "has a weight or a value once more by another name"),
}


def _written(model, h):
    constant = torch.zeros(6)
    constant[:2].copy_(h[0, :2])
    return float(constant[0])


def _written_over(h):
    constant = torch.zeros(6)
    view = constant[:2]
    torch.add(torch.ones(2), h[0, :2], out=view)
    return float(constant[0])


@pytest.mark.parametrize("kind", CARRIED)
def test_the_graph_gives_what_the_network_gives_for_any_number_of_rows(kind):
    model, found = traced(CARRIED[kind])
    batch = torch.randn(ROWS, 6)
    before = model.seen.clone()
    ours = run(model, found, batch.clone())
    ours_seen, model.seen = model.seen.clone(), before
    assert torch.equal(ours[0], model(batch.clone()))
    assert torch.equal(ours_seen, model.seen)
    gradients = [
        torch.autograd.grad(output.square().sum(), model.first.weight)[0] for output in (ours[0], model(batch.clone()))
    ]
    if kind != "a buffer put in another's place":  # the second run counts on
        assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", BY_VALUES)
def test_code_that_looks_at_values_is_not_traced(kind):
    with pytest.raises(NotTraceable, match="cannot trace Does: its code decides by the values of a tensor"):
        traced(BY_VALUES[kind])


@pytest.mark.parametrize("kind", BY_SIZE)
def test_code_that_decides_by_the_number_of_rows_is_not_traced(kind):
    with pytest.raises(NotTraceable, match="its code decides by the size of the batch"):
        traced(BY_SIZE[kind])


@pytest.mark.parametrize("kind", OTHERWISE)
def test_what_a_graph_cannot_say_is_refused_by_name(kind):
    does, sentence = OTHERWISE[kind]
    with pytest.raises(NotTraceable, match=sentence):
        traced(does)


def test_shapes_and_sizes_are_said_as_lines_of_the_batch():
    _, found = traced(lambda _, h: h.view(h.shape[0] * 2, 3).view(-1, 6))
    assert {node.size for node in found.graph.nodes if node.size} == {Dim(0, 1), Dim(0, 2)}
    assert Dim(0, 2) in next(node for node in found.graph.nodes if node.op == "aten.view.default").shape


def test_a_trace_leaves_weights_buffers_modes_and_random_numbers_as_they_were():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).eval()
    states = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    trace(model, INPUTS, training={path: True for path, _ in model.named_modules()})
    assert all(torch.equal(tensor, states[name]) for name, tensor in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before[1:]


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 8, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.place = nn.Parameter(torch.zeros(1, 17, 8))
        self.token = nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), h], 1) + self.place
        return {"first": h + self.attention(*[self.norm(h)] * 3, need_weights=False)[0], "none": None}


def test_a_size_that_is_read_late_is_known_on_both_sides_of_a_cut_in_half_precision():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), Folds(), nn.Linear(6, 2)).to(torch.bfloat16)
    model[:3].requires_grad_(False)
    network = cut_network(model, INPUTS)
    assert network.fallback is None
    batch = torch.randn(5, 6)
    features = crossed(shipped_engine(network), [batch], network.frost_line)
    features = [feature.view(torch.bfloat16) for feature in features]  # which NumPy has no type for
    assert torch.equal(network.head(features), model(batch.to(torch.bfloat16)))


class Folds(nn.Module):
    def forward(self, x):
        return x.view(x.shape[0] * 2, 3).relu().view(x.shape[0], -1)


@pytest.mark.parametrize("build", [Small, Attends])
@pytest.mark.parametrize("training", [True, False])
def test_the_operators_are_those_that_torch_export_gives(build, training):
    model = build().train(training)
    found = trace(model, (TensorSpec((3, 32, 32)),), training={path: training for path, _ in model.named_modules()})
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(model, (torch.zeros(4, 3, 32, 32),), strict=False, dynamic_shapes=(batch,))
    theirs = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    ours = [node.op for node in found.graph.nodes if node.size is None]
    assert ours == [op for op in theirs if "sym_size" not in op and "built-in" not in op]
    assert found.structure.num_leaves == len(tree_leaves(model(torch.zeros(2, 3, 32, 32))))
