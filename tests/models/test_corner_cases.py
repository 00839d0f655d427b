"""What networks do beside calling one layer after the other: shared weights, constants, views, several outputs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_structure

from frostline.models import cut_network
from frostline.models.portable import make_portable
from support.cutting import crossed, finished, sent, shipped_engine

SHAPE = (3, 16, 16)


class SharesFrozenWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1).requires_grad_(False)
        self.second = nn.Conv2d(3, 3, 3, padding=1).requires_grad_(False)
        self.second.weight = self.first.weight
        self.again = self.first
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(self.again(torch.relu(self.second(torch.relu(self.first(x))))).mean((2, 3)))


class HoldsConstants(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = (x - torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)) / 0.25
        hidden = self.conv(x) * self.scale + torch.arange(4, device=x.device).view(1, 4, 1, 1)
        return self.fc(hidden.mean((2, 3)) * torch.tensor([1.0, 2.0, 3.0, 4.0]))


class CutsThroughViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).requires_grad_(False)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.conv(x)
        turned = hidden.permute(0, 2, 3, 1)
        half = turned[..., 2:6]
        chosen = half[:, ::2, 0]
        return self.fc(chosen.transpose(1, 2).contiguous().mean(2))


class GivesATuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        pooled = self.conv(x).mean((2, 3))
        return self.fc(pooled), [pooled, {"twice": pooled * 2}], None, 3


class StandardisesItsWeights(nn.Module):
    """As in NFNet: BatchNorm of the weights, which knows no batch."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.norm = nn.InstanceNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        weight = functional.batch_norm(self.conv.weight.reshape(1, 4, -1), None, None, training=True)
        hidden = functional.conv2d(x, weight.reshape_as(self.conv.weight), self.conv.bias)
        return self.fc(torch.relu(self.norm(hidden)).mean((2, 3)))


class CountsItsRuns(nn.Module):
    """Keeps a tensor that it made in its last run, and a buffer that it replaces."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.register_buffer("runs", torch.zeros(()))
        self.seen = {}
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        self.runs = self.runs + 1
        self.seen["last"] = self.conv(x)
        return self.fc(self.seen["last"].mean((2, 3)))


NETWORKS = (SharesFrozenWeights, HoldsConstants, CutsThroughViews, GivesATuple, StandardisesItsWeights)


@pytest.mark.parametrize("build", NETWORKS)
def test_such_a_network_gives_its_answer_and_its_gradients_from_every_cut(build):
    torch.manual_seed(0)
    model = build()
    whole = copy.deepcopy(model)
    network = cut_network(model, SHAPE)
    assert network.fallback is None
    engine = shipped_engine(network)
    batch = torch.randn(8, *SHAPE)
    expected = whole(batch)
    tree_leaves(expected)[0].sum().backward()
    for cut in network.cuts[1:]:
        answer = network.head(finished(network, cut, sent(crossed(engine, [batch], cut))))
        assert tree_structure(answer) == tree_structure(expected)
        for leaf, other in zip(tree_leaves(answer), tree_leaves(expected), strict=True):
            assert torch.equal(leaf, other) if isinstance(leaf, torch.Tensor) else leaf == other, cut.name
        model.fc.zero_grad()
        tree_leaves(answer)[0].sum().backward()
        assert torch.equal(model.fc.weight.grad, whole.fc.weight.grad)


def test_a_weight_that_two_layers_share_is_counted_once():
    network = cut_network(SharesFrozenWeights(), SHAPE)
    assert shipped_engine(network).weight_bytes == 4 * (3 * 3 * 3 * 3 + 3 + 3)


def test_a_chosen_part_of_a_view_crosses_without_the_rest():
    network = cut_network(CutsThroughViews(), SHAPE)
    minimum = min(network.cuts[2:], key=lambda cut: cut.bytes_per_sample)
    assert minimum.bytes_per_sample == 4 * 4
    assert any(cut.name == "contiguous" for cut in network.cuts)


def test_tracing_leaves_nothing_behind_in_the_network():
    model = CountsItsRuns()
    kept = model.runs
    assert make_portable(cut_network(model, SHAPE).head)
    assert model.seen == {}
    assert model.runs is kept
    assert float(model.runs) == 0


@pytest.mark.parametrize("build", [HoldsConstants, StandardisesItsWeights])
def test_a_head_that_changes_mode_goes_on_from_the_same_features(build):
    model = build()
    network = cut_network(model, SHAPE)
    features = crossed(shipped_engine(network), [torch.randn(8, *SHAPE)], network.frost_line)
    trained = network.head.train()(features)
    assert torch.equal(network.head.eval()(features), trained)
    assert model.fc.training is False


class AuxiliaryInTrainMode(nn.Module):
    """As GoogLeNet: a second output that exists in train mode only, from frozen layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.aside = nn.Linear(4, 2).requires_grad_(False)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        pooled = self.conv(x).mean((2, 3))
        if self.training:
            return self.fc(pooled), self.aside(pooled)
        return self.fc(pooled)


def test_an_output_of_one_mode_crosses_in_that_mode_alone():
    model = AuxiliaryInTrainMode()
    network = cut_network(model, SHAPE)
    batch = torch.randn(8, *SHAPE)
    features = crossed(shipped_engine(network), [batch], network.frost_line)
    for mode in (True, False):
        network.head.train(mode)
        model.train(mode)
        expected = tree_leaves(model(batch))
        assert all(
            torch.equal(leaf, other) for leaf, other in zip(tree_leaves(network.head(features)), expected, strict=True)
        )
