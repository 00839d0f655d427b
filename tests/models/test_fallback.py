"""A network that cannot be traced to its end is cut before that, or between two of its modules, or not at all.

It says why where that costs something.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from frostline.core import TensorSpec
from frostline.core.errors import FrozenInTrainMode, ModelError, NothingFrozen
from frostline.models import cut_network, freeze
from frostline.models.artifact import write_prefix
from frostline.models.portable import make_portable
from support.cutting import crossed, finished, remaining_prefix, sent, shipped_engine
from support.networks import Small

SHAPE = (3, 32, 32)


class Branching(Small):
    """Decides on values behind its frozen stem, in Python."""

    def forward(self, x):
        hidden = self.body(self.stem(x))
        pooled = torch.flatten(self.pool(hidden), 1)
        if pooled.mean() > 0.4:
            pooled = pooled * 2
        return self.fc(self.drop(pooled))


class Hiding(Small):
    """Decides on values among its frozen layers, unless it is asked what it does."""

    def forward(self, x):
        hidden = self.body(self.stem(x))
        if not torch.compiler.is_exporting() and hidden.mean() > 0.4:
            hidden = hidden * 2
        return self.fc(self.drop(torch.flatten(self.pool(hidden), 1)))


class Block(nn.Module):
    """Can be traced but for what it does last."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(inplace=True))
        self.other = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        hidden = self.inner(x)
        return self.other(hidden) if hidden.sum() > 0 else hidden


class BranchingInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.block(x).mean((2, 3)))


class Remembering(Branching):
    """Needs its stem's output again later."""

    def forward(self, x):
        early = self.stem(x)
        late = self.body(early)
        if late.mean() > 100:
            late = -late
        return self.fc(self.pool(late).flatten(1)) * early.mean()


class LooksAtItsInput(Branching):
    def forward(self, x):
        scale = 2.0 if x.mean() > 0 else 1.0
        return super().forward(x) * scale


def cut(model, until="body", **options):
    freeze(model.train(), until, input_shape=SHAPE)
    return model, cut_network(model, SHAPE, **options)


def trained_alike(model, network, whole, batch, features):
    """One step each in train mode: outputs, gradients and BatchNorm statistics."""
    network.head.train()
    answers = []
    for run in (lambda: network.head(features), lambda: whole(batch)):
        torch.manual_seed(4)
        answers.append(run())
        answers[-1].square().sum().backward()
    assert torch.equal(*answers)
    gradients = [
        {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
        for net in (model, whole)
    ]
    assert gradients[0].keys() == gradients[1].keys() != set()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in model.state_dict().items())


def experts(x):
    chosen = (x.mean(1) > 0.2).nonzero().squeeze(1)
    return x.index_add(0, chosen, x[chosen].tanh())


def halves(x):
    return torch.cat([row[None] * 0.5 for row in x])


def drawn(x):
    return x * float(np.random.RandomState(len(x)).rand() + np.random.random() * 0)


class Head(Small):
    """What is trained does what no graph can express, before its first weight or behind it."""

    def __init__(self, does):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.does, self.seen = does, []

    def forward(self, x):
        pooled = torch.flatten(self.pool(self.body(self.stem(x))), 1)
        return self.fc(self.does(self.first(self.does(pooled))))


HEADS = {
    "looks": lambda x: x * 2 if x.mean() > 0.1 else x,
    "notes": lambda x: x * (1 + float(x.detach().norm()) / 100),
    "experts": experts,
    "a mask": lambda x: x + x[x > 0.1].mean(),
    "rows": halves,
    "draws of NumPy": drawn,
    "a BatchNorm that counts": nn.BatchNorm1d(16, momentum=None),
}


@pytest.mark.parametrize("does", HEADS)
def test_all_frozen_layers_are_cut_off_whatever_the_code_behind_them_does(does):
    model, network = cut(Head(HEADS[does]))
    assert network.fallback is None
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen <= {path for _, path in network.prefix.graph.leaves}
    batch = torch.randn(8, *SHAPE)
    whole = copy.deepcopy(model)
    trained_alike(model, network, whole, batch, crossed(shipped_engine(network), [batch], network.frost_line))
    with pytest.raises(ModelError, match="was not traced"):
        make_portable(network.head)


@pytest.mark.parametrize(
    ("build", "until", "where"),
    [
        (Branching, "body", "flatten"),
        (Branching, "stem", "stem.2:relu"),
        (BranchingInside, "block.inner", "block.inner.1:relu"),
        (Hiding, "body", "body.2:relu"),
    ],
)
def test_an_untraceable_network_is_cut_behind_its_leading_frozen_layers(build, until, where):
    model = freeze(build().train(), until, input_shape=SHAPE)
    whole = copy.deepcopy(model)
    network = cut_network(model, SHAPE)
    assert network.frost_line.name == where
    if build is Hiding:
        assert "looks at values before the frost line" in network.fallback
        assert "up to 'body'" in network.fallback
    else:
        assert network.fallback is None
    batch = torch.randn(8, *SHAPE)
    engine = shipped_engine(network)
    for place in network.cuts[1:]:
        features = finished(network, place, sent(crossed(engine, [batch], place)))
        with torch.no_grad():
            assert torch.equal(network.head.eval()(features), whole.eval()(batch)), place.name
    kept = [feature.clone() for feature in features]
    whole.load_state_dict(model.state_dict())
    freeze(whole.train(), until, input_shape=SHAPE)
    trained_alike(model, network, whole, batch, features)
    assert all(torch.equal(feature, two) for feature, two in zip(features, kept, strict=True)), (
        "features were overwritten"
    )


class Base(nn.Module):
    """Takes more than one tensor and gives more, as the networks inside classifiers of transformers do."""

    def __init__(self):
        super().__init__()
        self.front, self.rest = Small().stem, Small().body

    def forward(self, x, mask=None):
        hidden = self.rest(self.front(x))
        # Masked as transformers masks sounds in training: by NumPy's global generator.
        kept = np.random.random() if self.training else 1.0
        is_high = not torch.compiler.is_exporting() and hidden.mean() > 100
        return {"last": -hidden if is_high else hidden * kept, "mask": mask}


class OverABase(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.fc = Base(), nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.base(x, mask=None)["last"].mean((2, 3)))


def test_finds_the_first_modules_of_one_with_several_outputs():
    model, network = cut(OverABase(), "base")
    assert "up to 'base.rest'" in network.fallback
    assert network.prefix is not None
    model.eval()
    batch = torch.randn(4, *SHAPE)
    features = crossed(shipped_engine(network), [batch], network.frost_line)
    assert torch.equal(network.head.eval()(features), model(batch))


def test_inside_the_chain_every_legal_cut_is_there():
    _, network = cut(Hiding())
    assert [place.name for place in network.cuts][:4] == ["encoded", "pixels", "stem.0:conv2d", "stem.1:batch_norm"]
    assert [place.name for place in network.cuts][-2:] == ["body.1:batch_norm", "body.2:relu"]
    assert network.cuts[-1].is_relu


def test_both_branches_are_taken_as_the_features_say():
    model, network = cut(Branching())
    model.eval()
    for value in (0.0, 1.0):
        features = torch.full((8, 16), value)
        with torch.no_grad():
            pooled = features * (2 if value > 0.4 else 1)
            assert torch.allclose(network.head(features), model.fc(pooled))


def test_values_that_are_needed_later_cross_too():
    """The stem gives its output to two, of which the trace has one alone: the network's code is asked what it holds."""
    model, network = cut(Remembering())
    assert network.fallback is None
    assert len(network.frost_line.tensors) == 2
    batch, whole = torch.randn(8, *SHAPE), copy.deepcopy(model)
    trained_alike(model, network, whole, batch, crossed(shipped_engine(network), [batch], network.frost_line))


def test_the_head_shares_its_parameters_and_leaves_the_skipped_modules_alone():
    model, network = cut(Branching())
    names = dict(network.head.named_parameters())
    assert set(names) == {"fc.weight", "fc.bias"}
    assert names["fc.weight"] is model.fc.weight
    network.head.train()
    assert model.drop.training
    assert not model.stem[1].training
    assert "forward" not in vars(model.stem)


def test_finding_the_cut_leaves_the_network_unchanged():
    model = freeze(Branching().train(), "stem", input_shape=SHAPE)
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    buffers = [id(buffer) for buffer in model.buffers()]
    cut_network(model, SHAPE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [id(buffer) for buffer in model.buffers()] == buffers
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("build", [LooksAtItsInput])
def test_a_network_that_looks_at_its_input_gets_its_input(build):
    model, network = cut(build())
    assert network.prefix is None
    assert [place.name for place in network.cuts] == ["encoded", "pixels"]
    assert "the whole network runs here" in network.fallback
    batch = torch.randn(8, *SHAPE)
    model.eval()
    with torch.no_grad():
        assert torch.equal(network.head(batch), model(batch))
    assert set(network.head.state_dict()) == set(model.state_dict())
    assert remaining_prefix(network, network.frost_line).nodes == ()


def test_the_whole_network_as_head_keeps_frozen_layers_in_their_mode():
    model, network = cut(LooksAtItsInput())
    network.head.train()
    assert not model.stem[1].training
    assert model.drop.training
    assert next(network.head.parameters()) is next(model.parameters())


def test_an_untraceable_network_of_several_inputs_gets_its_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4).requires_grad_(False)
            self.fc = nn.Linear(4, 2)

        def forward(self, a, b):
            return self.fc(self.first(a)) if b.sum() > 0 else self.fc(a)

    model = Two()
    network = cut_network(model, (TensorSpec((4,)), TensorSpec((4,))))
    assert network.frost_line.name == "inputs"
    a, b = torch.rand(8, 4), torch.rand(8, 4)
    assert torch.equal(network.head([a, b]), model(a, b))


def test_an_untraceable_network_with_nothing_frozen_is_the_users_to_mend():
    with pytest.raises(NothingFrozen, match="freeze layers"):
        cut_network(Branching(), SHAPE)


def test_reports_a_network_that_fails_on_the_given_input_as_the_users_error():
    model = freeze(Branching().train(), "stem", input_shape=SHAPE)
    for wrong in ((1, 32, 32), (3, 2, 2)):
        with pytest.raises(ModelError, match=r"does not run on an input of shape \["):
            cut_network(model, wrong)
    small = freeze(Small().train(), "stem", input_shape=SHAPE)
    with pytest.raises(ModelError, match=r"does not run on an input of shape \[1, 32, 32\]"):
        cut_network(small, (1, 32, 32))


@pytest.mark.parametrize(("build", "line"), [(Branching, "flatten"), (Hiding, "body.2:relu")])
def test_a_frozen_layer_of_the_chain_in_train_mode_is_refused(build, line):
    model = freeze(build(), "body", input_shape=SHAPE).train()
    with pytest.raises(FrozenInTrainMode, match="BatchNorm2d"):
        cut_network(model, SHAPE)
    assert cut_network(model, SHAPE, frozen_in_eval=True).frost_line.name == line


def test_a_head_that_is_asked_for_what_was_skipped_says_so():
    class Late(Branching):
        asks = False

        def forward(self, x):
            answer = super().forward(x)
            return answer + x.mean() if self.asks else answer

    model, network = cut(Late())
    model.asks = True
    with pytest.raises(ModelError, match=r"asks for values \(mean\) that were skipped.*uses or returns them"):
        network.head(torch.rand(8, 16, 1, 1))


class Odd(Small):
    """Computes with an operator that nodes do not run."""

    def forward(self, x):
        hidden = torch.special.bessel_j0(self.stem(x))
        return self.fc(torch.flatten(self.pool(self.body(hidden)), 1))


def test_an_operator_that_nodes_do_not_run_ends_the_frozen_part():
    model, network = cut(Odd())
    assert "does not run aten.special_bessel_j0.default" in network.fallback
    assert network.frost_line.name == "stem.2:relu"
    assert write_prefix(network.prefix)
    batch = torch.randn(8, *SHAPE)
    model.eval()
    features = crossed(shipped_engine(network), [batch], network.frost_line)
    with torch.no_grad():
        assert torch.equal(network.head(features), model(batch))


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_nothing_is_said_of_a_trained_layer_whose_operator_nodes_do_not_run(cell):
    class Recurrent(Small):
        """Takes the columns of the last picture one by one, so that frozen views stand between the trained steps."""

        def __init__(self):
            super().__init__()
            self.cell = cell(8, 16)

        def forward(self, x):
            state = None
            for column in self.stem(x).mean(2).unbind(-1)[:3]:
                state = self.cell(column, state)
            return self.fc(state[0] if isinstance(state, tuple) else state)

    network = cut_network(freeze(Recurrent().train(), "stem", input_shape=SHAPE), SHAPE)
    assert network.frost_line.number > 1
    assert network.fallback is None


def test_an_operator_at_the_very_start_that_nodes_do_not_run_leaves_the_input():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(torch.special.bessel_j0(x).mean((2, 3)))

    network = cut_network(First(), SHAPE)
    assert network.prefix is None
    assert network.fallback.startswith("the frozen part begins with aten.special_bessel_j0.default")


def test_a_frozen_part_without_a_place_that_few_tensors_cross_leaves_the_input():
    class Turned(nn.Module):
        """Works on samples along the second dimension, as sequences often lie."""

        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4).requires_grad_(False)
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            return self.fc(self.first(x.transpose(0, 1).contiguous())).mean(0)

    model = Turned()
    network = cut_network(model, (5, 4))
    assert network.prefix is None
    assert "no place in the frozen part that few tensors cross" in network.fallback
    batch = torch.rand(8, 5, 4)
    assert torch.equal(network.head(batch), model(batch))


def test_a_network_that_is_traced_whole_has_nothing_to_say():
    assert cut_network(freeze(Small().train(), "stem", input_shape=SHAPE), SHAPE).fallback is None


@pytest.mark.parametrize(("factor", "dtype"), [(1e30, torch.float32), (6e4, torch.float16)])
def test_a_frozen_part_that_overflows_on_random_samples_is_told_as_that(factor, dtype):
    class Overflowing(Small):
        def forward(self, x):
            return self.fc(torch.flatten(self.pool(self.body(self.stem(x)) * factor * factor), 1))

    model = freeze(Overflowing().to(dtype).train(), "body", input_shape=SHAPE)
    network = cut_network(model, SHAPE)
    assert network.fallback.startswith("its frozen layers give Inf or NaN for random samples")
    assert "convert the network to float32 or bfloat16" in network.fallback
