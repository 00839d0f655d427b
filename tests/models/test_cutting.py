"""Where the frost line lies, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from frostline.core import Ref
from frostline.core.errors import FrozenInTrainMode, ModelError, NothingFrozen, SettingError, UnknownLayer
from frostline.engines.graph_runner import Runner, leaf_values
from frostline.engines.torch import TorchEngine
from frostline.models import cut_network, freeze
from support.cutting import remaining_prefix
from support.networks import Small

SHAPE = (3, 32, 32)


def frozen(until: str) -> Small:
    return freeze(Small().train(), until, input_shape=SHAPE)


def test_active_dropout_stays_with_the_head():
    network = cut_network(frozen("pool"), SHAPE)
    assert network.frost_line.name.startswith("flatten")
    network.head.train()
    torch.manual_seed(0)
    one, two = (network.head(torch.ones(8, 16)) for _ in range(2))
    assert not torch.equal(one, two)


def test_the_head_shares_parameters_and_names_with_the_network():
    model = frozen("stem")
    network = cut_network(model, SHAPE)
    names = dict(network.head.named_parameters())
    assert set(names) == {"body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "fc.weight", "fc.bias"}
    assert all(names[name] is parameter for name, parameter in model.named_parameters() if name in names)
    assert set(network.head.state_dict()) < set(model.state_dict())


def test_the_head_follows_the_mode_of_the_network():
    model = frozen("stem")
    network = cut_network(model, SHAPE)
    features = torch.rand(8, 8, 15, 15)
    model.eval()
    before = model.body[1].running_mean.clone()
    network.head(features)
    assert torch.equal(model.body[1].running_mean, before)
    model.train()
    network.head(features)
    assert not torch.equal(model.body[1].running_mean, before)


def test_training_the_head_leaves_frozen_layers_in_eval_mode():
    model = frozen("stem")
    cut_network(model, SHAPE).head.train()
    assert not model.stem[1].training
    assert model.body[1].training


def test_a_head_whose_buffers_were_replaced_uses_the_new_ones():
    model = frozen("stem")
    network = cut_network(model, SHAPE)
    features = torch.rand(8, 8, 15, 15)
    network.head.train()
    network.head(features)
    for name, buffer in list(model.body[1].named_buffers()):  # as .to() does: new tensors take their place
        model.body[1].register_buffer(name, buffer.clone())
    replaced = model.body[1].running_mean
    before = replaced.clone()
    network.head(features)
    assert model.body[1].running_mean is replaced
    assert not torch.equal(replaced, before)


def test_a_frozen_batch_norm_in_train_mode_is_refused_with_its_name():
    model = frozen("body")
    model.train()
    with pytest.raises(FrozenInTrainMode, match=r"BatchNorm2d 'stem\.1'"):
        cut_network(model, SHAPE)
    network = cut_network(model, SHAPE, frozen_in_eval=True)
    batch = torch.rand(8, *SHAPE)
    features = TorchEngine(network.prefix.graph, network.prefix.cuts, network.prefix.tensors).run(batch.numpy(), 3)
    model.eval()
    with torch.no_grad():
        assert torch.equal(torch.from_numpy(features[0]), model.stem[1](model.stem[0](batch)))


def test_names_the_first_trained_parameter_where_only_layers_behind_it_are_frozen():
    model = Small()
    list(model.parameters())[-1].requires_grad_(False)
    with pytest.raises(NothingFrozen, match=r"stem\.0\.weight"):
        cut_network(model, SHAPE)


def test_says_that_nobody_froze_a_network_whose_parameters_are_all_trained():
    with pytest.raises(NothingFrozen, match="every parameter is trained"):
        cut_network(Small(), SHAPE)


def test_weights_shared_between_frozen_and_trained_layers_hold_the_frost_line_back():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.relu(self.first(x.flatten(1)[:, :4])))

    model = Tied()
    model.first.bias.requires_grad_(False)
    network = cut_network(model, SHAPE)
    assert network.frost_line.bytes_per_sample == 16
    assert "first" not in network.frost_line.name


def in_memory_of(layer):
    return nn.Parameter(layer.weight.data[:4, :4].t(), requires_grad=False)


SHARED = {
    "a frozen weight": lambda net: setattr(net.second, "weight", in_memory_of(net.third)),
    "a buffer": lambda net: net.second.register_buffer("scale", net.third.bias.data[:4]),
    "by data": lambda net: setattr(net.second.weight, "data", net.third.weight.data[:4, :4]),
    "through NumPy": lambda net: setattr(
        net.second.bias, "data", torch.from_numpy(net.third.bias.detach().numpy())[:4]
    ),
}


class Sharing(nn.Module):
    """Three layers, of which the first two are frozen."""

    def __init__(self, share, *, is_traced):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 8)
        self.requires_grad_(False).third.requires_grad_(True)
        self.is_traced = is_traced
        share(self)

    def forward(self, x):
        hidden = self.second(torch.relu(self.first(x))) * getattr(self.second, "scale", 1.0)
        if not self.is_traced and float(hidden.detach().sum()) > 100:
            hidden = hidden * 2
        return self.third(torch.tanh(hidden))


@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize("kind", SHARED)
def test_frozen_tensors_in_the_memory_of_trained_ones_are_the_loops(kind, is_traced):
    model, plain = (Sharing(SHARED[kind], is_traced=is_traced) for _ in range(2))
    network = cut_network(model, (6,))
    graph = network.prefix.graph
    weights = [weight.clone() for weight in leaf_values(graph, network.prefix.tensors)]  # as a node has them
    draw, losses = torch.Generator().manual_seed(3), ([], [])
    given = [torch.randn(5, 6, generator=draw) for _ in range(4)]
    for found, net, run in (
        (losses[0], model, lambda x: network.head(*Runner(graph).run([x], weights))),
        (losses[1], plain, plain),
    ):
        optimizer = torch.optim.SGD(net.third.parameters(), 0.1)
        for rows in given:
            loss = run(rows).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_memory_of_a_trained_weight_is_named_where_nothing_is_frozen_before_it():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[0].requires_grad_(False).weight.data = model[2].weight.data
    with pytest.raises(NothingFrozen, match=r"'2\.weight' is trained, and '0\.weight' lies in its memory; give that a"):
        cut_network(model, (6,))


def test_weights_side_by_side_in_one_memory_are_apart():
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    memory = torch.randn(54)
    model[1].weight.data, model[3].weight.data = memory[:36].view(6, 6), memory[36:].view(3, 6)
    model[1].requires_grad_(False)
    assert cut_network(model, (6,)).frost_line.name == "2:tanh"


def test_several_outputs_keep_their_structure():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            pooled = self.conv(x).mean((2, 3))
            return {"scores": self.fc(pooled), "pooled": pooled}

    model = Two()
    network = cut_network(model, SHAPE)
    batch = torch.rand(8, *SHAPE)
    engine = TorchEngine(network.prefix.graph, network.prefix.cuts, network.prefix.tensors)
    found = network.head(*map(torch.from_numpy, engine.run(batch.numpy(), network.frost_line.number)))
    expected = model(batch)
    assert set(found) == {"scores", "pooled"}
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_pixels_are_not_overwritten_by_a_network_that_works_in_place():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(torch.relu_(x).mean((2, 3)))

    network = cut_network(InPlace(), SHAPE)
    batch = torch.randn(8, *SHAPE).numpy()
    before = copy.deepcopy(batch)
    TorchEngine(network.prefix.graph, network.prefix.cuts, network.prefix.tensors).run(batch, network.frost_line.number)
    assert (batch == before).all()


def test_cuts_never_cross_with_what_the_shape_alone_decides():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 4), requires_grad=False)
            self.proj = nn.Linear(32, 4).requires_grad_(False)
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            tokens = self.proj(x.flatten(1, 2))
            tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], 1)
            return self.fc(tokens.reshape(x.shape[0], -1, 4)[:, 0])

    model = Positions().eval()
    network = cut_network(model, SHAPE)
    engine = TorchEngine(network.prefix.graph, network.prefix.cuts, network.prefix.tensors)
    batch = torch.rand(16, *SHAPE)
    for cut in network.cuts[1:]:
        assert len(cut.tensors) == 1
        rest = remaining_prefix(network, cut)
        assert all(Ref(name) for name in rest.inputs)
        assert engine.run(batch.numpy(), cut.number)[0].shape == (16, *cut.shapes[0])


class Rectified(nn.Module):
    """Two ReLUs side by side, then what keeps their values and what does not."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x):
        both = torch.cat([torch.relu(self.left(x)), nn.functional.relu6(self.right(x))], 1)
        pooled = nn.functional.max_pool2d(both, 2).flatten(2).transpose(1, 2).contiguous()
        less = pooled - 0.5
        return nn.functional.hardtanh(less, 0.0, 2.0), nn.functional.hardtanh(less)


def test_marks_a_cut_as_relu_where_all_its_values_are_a_relus_output():
    cuts = cut_network(Rectified().eval().requires_grad_(False), SHAPE).cuts
    assert [cut.name for cut in cuts if cut.is_relu] == ["cat", "max_pool2d", "flatten", "contiguous"]
    assert "sub" in [cut.name for cut in cuts]


class WithoutClassifier(nn.Module):
    """As timm makes one with ``num_classes=0``, and one whose last parameter is its own."""

    def __init__(self, *, has_scale: bool):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.ones(())) if has_scale else 1.0

    def forward(self, images):
        return self.norm(self.stem(images)).mean((2, 3)) * self.scale


@pytest.mark.parametrize(
    ("has_scale", "last"), [(False, r"'norm' \(BatchNorm2d\)"), (True, "WithoutClassifier itself")]
)
def test_a_network_without_a_classifier_is_not_frozen_up_to_one(has_scale, last):
    model = WithoutClassifier(has_scale=has_scale)
    with pytest.raises(UnknownLayer, match=rf"no classifier that 'features' would leave: {last}.*num_classes"):
        freeze(model, "features", input_shape=SHAPE)
    assert all(parameter.requires_grad for parameter in model.parameters())


class TestFreeze:
    def test_freezes_what_runs_before_the_layers_output_and_nothing_else(self):
        model = frozen("stem")
        frozen_names = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        assert frozen_names == {"stem.0.weight", "stem.0.bias", "stem.1.weight", "stem.1.bias"}

    def test_features_means_all_but_the_classifier(self):
        model = frozen("features")
        assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == {
            "fc.weight",
            "fc.bias",
        }

    def test_freezes_a_layers_train_mode_state_with_it(self):
        class Masking(nn.Linear):
            def __init__(self):
                super().__init__(4, 4)
                self.filling = nn.Parameter(torch.ones(4))

            def forward(self, x):
                return super().forward(x) + (self.filling if self.training else 0.0)

        model = freeze(nn.Sequential(Masking(), nn.Linear(4, 2)).train(), "0", input_shape=(4,))
        assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
            "1.weight",
            "1.bias",
        ]
        assert not model[0].training

    def test_an_unknown_layer_is_answered_with_the_nearest_names(self):
        with pytest.raises(UnknownLayer, match=r"did you mean.*stem"):
            frozen("sten")

    def test_a_layer_that_never_runs_is_refused(self):
        model = Small()
        model.spare = nn.Linear(2, 2)
        with pytest.raises(UnknownLayer, match="never run"):
            freeze(model, "spare", input_shape=SHAPE)

    @pytest.mark.parametrize("given", [(None, "stem"), ("resnet18", "stem"), (Small(), None)])
    def test_refuses_a_missing_network_by_its_name(self, given):
        with pytest.raises(SettingError, match=r"^(model takes a torch.nn.Module|until takes the name of a .*), not "):
            freeze(*given)

    def test_an_input_that_does_not_fit_is_a_sentence(self):
        with pytest.raises(ModelError, match=r"does not run on an input of shape \[1, 32, 32\]"):
            freeze(Small(), "stem", input_shape=(1, 32, 32))

    def test_parameters_used_outside_of_modules_are_seen(self):
        class Positioned(nn.Module):
            def __init__(self):
                super().__init__()
                self.position = nn.Parameter(torch.zeros(1, 3, 1, 1))
                self.body = nn.Conv2d(3, 4, 3)
                self.fc = nn.Linear(4, 2)

            def forward(self, x):
                return self.fc(self.body(x + self.position).mean((2, 3)))

        model = freeze(Positioned(), "body", input_shape=SHAPE)
        assert not model.position.requires_grad


class Dropping(nn.Module):
    """Dropout before, between and behind dense layers, as in AlexNet and the VGGs."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.between = nn.Sequential(*(between or (nn.Dropout(0.5),)))
        self.fc6, self.relu, self.drop = nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5)
        self.fc7 = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc7(self.drop(self.relu(self.fc6(self.between(self.features(x))))))


class DropPath(nn.Module):
    """A module of somebody's own that minds its mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("between", [nn.Dropout(0.5), nn.BatchNorm1d(16, affine=False), DropPath()])
def test_freezes_layers_without_parameters_between_frozen_ones(between):
    torch.manual_seed(0)
    model = freeze(Dropping(between).train(), "relu", input_shape=SHAPE)
    assert not between.training
    assert model.drop.training
    network = cut_network(model, SHAPE)
    assert (network.frost_line.name, network.fallback) == ("relu:relu", None)
    pixels = torch.rand(4, *SHAPE)
    engine = TorchEngine(network.prefix.graph, network.prefix.cuts, network.prefix.tensors)
    features = torch.from_numpy(engine.run((pixels.numpy(),), network.frost_line.number)[0])
    network.head.train()
    outputs = []
    for run, taken in ((network.head, features), (model, pixels)):
        torch.manual_seed(3)
        outputs.append(run(taken))
    assert torch.equal(*outputs)


def test_a_module_that_runs_behind_the_frost_line_too_keeps_its_mode():
    model = Dropping()
    model.drop = model.between[0]
    freeze(model.train(), "relu", input_shape=SHAPE)
    assert model.drop.training
    network = cut_network(model, SHAPE)
    assert network.frost_line.name.startswith("features")
    assert "not behind relu as asked: between.0 changes from run to run" in network.fallback


def test_reports_a_frost_line_moved_by_train_mode_unless_the_job_may_set_the_mode():
    model = freeze(Dropping().train(), "relu", input_shape=SHAPE)
    model.train()
    moved = cut_network(model, SHAPE)
    assert moved.frost_line.name.startswith("features")
    assert moved.fallback.startswith(f"the frost line is at {moved.frost_line.name}, not behind relu as asked")
    kept = cut_network(model, SHAPE, frozen_in_eval=True)
    assert (kept.frost_line.name, kept.fallback) == ("relu:relu", None)


def test_a_parameter_that_is_trained_before_the_layer_that_was_asked_for_is_named():
    model = freeze(Dropping().train(), "relu", input_shape=SHAPE)
    model.fc6.bias.requires_grad_(True)
    assert "not behind relu as asked: parameter 'fc6.bias' is trained" in cut_network(model, SHAPE).fallback


def test_dropout_before_a_layer_frozen_by_hand_stays_on_as_it_does_without_frostline():
    model = Dropping().train()
    for layer in (model.features, model.fc6):
        layer.requires_grad_(False)
    network = cut_network(model, SHAPE)
    assert network.frost_line.name.startswith("features")
    assert network.fallback is None
    assert cut_network(model.eval(), SHAPE).frost_line.name == "relu:relu"
