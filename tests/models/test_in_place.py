"""Networks that work in place are cut where it does no harm, and compute what they did."""

import pytest
import torch
from torch import nn

from frostline.models import cut_network
from support.cutting import crossed, finished, remaining_prefix, shipped_engine

SHAPE = (3, 16, 16)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.second = nn.Conv2d(4, 4, 3).requires_grad_(False)
        self.fc = nn.Linear(4, 2)


class WritesToASlice(Base):
    def forward(self, x):
        hidden = self.first(x)
        hidden[:, :1].mul_(2)
        hidden = self.second(hidden)
        hidden.view(hidden.shape[0], -1).add_(1)
        return self.fc(torch.relu(hidden).mean((2, 3)))


class MakesAConstantInPlace(Base):
    def forward(self, x):
        hidden = self.first(x)
        scale = torch.zeros(1, 4, 1, 1)
        scale[:, 1:2] = 3.0
        scale[:, 2:] += 1
        return self.fc(torch.relu_(self.second(hidden) * scale).mean((2, 3)))


class WritesToItsInput(Base):
    def forward(self, x):
        x[:, :1] = 0
        return self.fc(self.second(self.first(x)).mean((2, 3)))


class ReadsBeforeItWrites(Base):
    def forward(self, x):
        hidden = self.first(x)
        mask = hidden > 0.5
        hidden[:, 0].zero_()
        return self.fc(self.second(hidden * mask).mean((2, 3)))


class StartsTheHeadInPlace(Base):
    def forward(self, x):
        hidden = self.second(self.first(x))
        return self.fc(torch.relu_(hidden * 1.0).mean((2, 3)))


NETWORKS = (WritesToASlice, MakesAConstantInPlace, WritesToItsInput, ReadsBeforeItWrites, StartsTheHeadInPlace)


@pytest.mark.parametrize("build", NETWORKS)
def test_a_network_that_works_in_place_gives_its_answer_from_every_cut(build):
    model = build()
    network = cut_network(model, SHAPE)
    engine = shipped_engine(network)
    batch = torch.randn(8, *SHAPE)
    expected = model(batch.clone())
    for cut in network.cuts[1:]:
        features = finished(network, cut, crossed(engine, [batch], cut))
        assert torch.equal(network.head(features), expected), cut.name


def test_places_no_cut_where_a_value_is_written_under_another_name():
    """Between the slice and the last reader of the whole, two copies would no longer be one."""
    names = [cut.name for cut in cut_network(WritesToASlice(), SHAPE).cuts]
    assert names == ["encoded", "pixels", "relu", "mean"]


def test_a_constant_that_is_made_in_place_is_made_again_behind_the_cut():
    network = cut_network(MakesAConstantInPlace(), SHAPE)
    cut = next(cut for cut in network.cuts if cut.name == "first:conv2d")
    ops = [node.op for node in remaining_prefix(network, cut).nodes]
    assert ops.index("aten.zeros.default") < ops.index("aten.fill_.Tensor") < ops.index("aten.conv2d.default")
