"""Networks that do something unusual before the layer that was asked for: the frost line reaches it all the same."""

import copy

import pytest
import torch
from torch import nn

from frostline.engines.graph_runner import ALLOWED
from frostline.models import cut_network, freeze
from support.cutting import crossed, finished, sent, shipped_engine

TOKENS, WIDTH = 6, 8


class Network(nn.Module):
    """Two layers and a classifier, over tokens; what is unusual happens in between."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.fc = nn.Linear(WIDTH, 3)

    def between(self, hidden):
        return hidden

    def forward(self, x):
        return self.fc(self.second(self.between(self.first(x))).mean(1))


class RotatesWithoutGradients(Network):
    @torch.no_grad()
    def waves(self, hidden):
        angles = torch.arange(TOKENS, device=hidden.device).float()[:, None] * self.second.weight[0]
        return angles.cos(), angles.sin()

    def between(self, hidden):
        cosine, sine = self.waves(hidden)
        return hidden * cosine + hidden.flip(-1) * sine


class Behind(Network):
    """What is unusual happens behind a layer that is trained."""

    def forward(self, x):
        return self.fc(self.between(self.second(self.first(x))).mean(1))


class TurnsGradientsOn(Behind):
    @torch.no_grad()
    def between(self, hidden):
        with torch.enable_grad():
            return hidden * 2


class WritesWithoutGradients(Behind):
    def between(self, hidden):
        doubled = hidden * 2
        with torch.no_grad():
            doubled.mul_(0.5)
        return doubled


class HasPositions(Network):
    """Makes them by operators that no node runs, one of which gives a list."""

    def between(self, hidden):
        rows, _ = torch.meshgrid(torch.linspace(0, 1, TOKENS), torch.linspace(0, 1, WIDTH), indexing="ij")
        return hidden + rows + torch.linspace(1, 2, WIDTH).cosh()


class CoshOfTheData(Network):
    def between(self, hidden):
        return hidden.cosh()


class WritesIntoPositions(Network):
    """What would be a constant is written to in each run."""

    def between(self, hidden):
        rows = torch.linspace(0, 1, WIDTH)
        rows.add_(1)
        return hidden + rows


class BatchSecond(Network):
    """As torch's own attention: the batch is the second dimension for a while, in memory too."""

    def between(self, hidden):
        across = hidden.transpose(0, 1).contiguous()
        return (across.cumsum(0).transpose(0, 1) + hidden).relu()


class Maps(Network):
    """Three feature maps go on from the frozen part, as to a segmentation head."""

    def __init__(self):
        super().__init__()
        self.backbone = Pyramid()

    def forward(self, x):
        one, two, three = self.backbone(x)
        return self.fc((self.second(one) + self.second(three)).mean(1) + two)


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        one = self.layers[0](x).relu()
        two = self.layers[1](one).relu()
        three = self.layers[2](two).relu()
        return one.exp(), two.mean(1), three


def cut(kind, until="second"):
    torch.manual_seed(0)
    model = freeze(kind().train(), until, input_shape=(TOKENS, WIDTH))
    return model, copy.deepcopy(model), cut_network(model, (TOKENS, WIDTH))


def same_at_every_cut(model, plain, network):
    """Outputs and gradients, from what crosses each cut; how many there are."""
    batch = torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    engine = shipped_engine(network)
    meant = plain(batch)
    meant.square().sum().backward()
    for place in network.cuts[1:]:
        given = network.head(finished(network, place, sent(crossed(engine, [batch], place))))
        assert torch.equal(given, meant), place.name
        model.zero_grad()
        given.square().sum().backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all((ours.grad is None) == (theirs.grad is None) for ours, theirs in pairs)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(ours.grad is None or torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)
    return len(network.cuts)


@pytest.mark.parametrize(
    ("kind", "until"),
    [
        (RotatesWithoutGradients, "first"),
        (RotatesWithoutGradients, "second"),
        (TurnsGradientsOn, "first"),
        (WritesWithoutGradients, "first"),  # which no graph can express
    ],
)
def test_gradients_flow_where_they_do_in_the_network(kind, until):
    model, plain, network = cut(kind, until)
    assert network.fallback is None
    same_at_every_cut(model, plain, network)
    assert (plain.second.weight.grad is None) == (until == "second")


def test_positions_are_shipped_as_constants_where_a_node_does_not_make_them():
    model, plain, network = cut(HasPositions)
    assert network.fallback is None
    assert {node.op for node in network.prefix.graph.nodes} <= ALLOWED
    assert len([path for path in network.prefix.tensors if path.startswith("constant:")]) == 2
    assert same_at_every_cut(model, plain, network) > 3


def test_ends_the_frozen_part_before_an_operation_that_nodes_do_not_run():
    _, _, network = cut(CoshOfTheData)
    assert "a node does not run aten.cosh.default" in network.fallback


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16])
def test_ends_the_frozen_part_before_an_operation_that_nodes_do_not_run_so(dtype):
    class Rounds(Network):
        def between(self, hidden):
            return (9 * hidden).to(dtype).to(hidden.dtype)

    model, plain, network = cut(Rounds)
    assert "a node does not run aten.to.dtype (it takes one of bfloat16, bool" in network.fallback
    assert network.frost_line.name.startswith("mul")
    same_at_every_cut(model, plain, network)


def test_treats_no_tensor_that_is_written_to_as_a_constant():
    model, plain, network = cut(WritesIntoPositions)
    assert "aten.linspace" in network.fallback
    same_at_every_cut(model, plain, network)


def test_a_value_whose_samples_are_no_pieces_of_its_memory_crosses_as_a_copy():
    model, plain, network = cut(BatchSecond)
    assert network.fallback is None
    assert any(node.name.endswith("__laid") for node in network.prefix.graph.nodes)
    assert same_at_every_cut(model, plain, network) > 4


@pytest.fixture
def no_fast_path():
    """Torch's fused encoder layers, which frozen ones take outside of a trace, round otherwise."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.usefixtures("no_fast_path")
def test_torchs_own_encoder_layer_is_cut_behind_each_layer():
    class Encoding(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
            self.layers = nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))
            self.fc = nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.fc(self.layers(x).mean(1))

    model, plain, network = cut(Encoding, "layers.1")
    assert network.fallback is None
    assert network.frost_line.name.startswith("layers.1.")
    same_at_every_cut(model, plain, network)


def test_all_feature_maps_of_the_layer_that_was_asked_for_cross():
    model, plain, network = cut(Maps, "backbone")
    assert network.fallback is None
    assert [len(place.tensors) for place in network.cuts[-2:]] == [1, 3]
    same_at_every_cut(model, plain, network)


def test_more_than_two_tensors_cross_at_the_end_alone_where_no_layer_was_asked_for():
    """And only since much of the frozen work would run at the trainer otherwise."""
    torch.manual_seed(0)
    model = Maps().train()
    model.backbone.requires_grad_(False).eval()
    plain, network = copy.deepcopy(model), cut_network(model, (TOKENS, WIDTH))
    assert [len(place.tensors) for place in network.cuts[-2:]] == [1, 3]
    same_at_every_cut(model, plain, network)


class TrainsALayer(nn.Module):
    """A frozen convolution, and behind it a trained layer whose operator nodes do not run."""

    def __init__(self, layer):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3).requires_grad_(False)
        self.layer = layer
        self.fc = nn.Linear(6, 2)

    def forward(self, x):
        tokens = self.conv(x).flatten(2).transpose(1, 2)
        given = self.layer(tokens)
        return self.fc((given[0] if isinstance(given, tuple) else given).mean(1))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LSTM(6, 6, batch_first=True),
        lambda: nn.GRU(6, 6, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    ],
)
def test_nothing_is_said_of_an_operator_that_only_a_trained_layer_runs(layer):
    network = cut_network(TrainsALayer(layer()), (3, 8, 8))
    assert network.prefix is not None
    assert network.fallback is None
