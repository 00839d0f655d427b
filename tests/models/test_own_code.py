"""The head runs the user's own code: it trains as a plain PyTorch loop does, whatever that code does in Python."""

import copy
import dataclasses
import itertools
import math
import os
import pickle
import random
import sys
from collections import Counter as Counted
from collections import defaultdict, deque
from contextvars import ContextVar
from functools import partial
from types import MethodType

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.optim.swa_utils import AveragedModel, update_bn

from frostline.core import TensorSpec
from frostline.core.errors import ModelError, NotTraceable
from frostline.engines.graph_runner import Runner, leaf_values
from frostline.models import cut_network, freeze
from frostline.models.head import SkippingHead
from frostline.models.portable import make_portable
from frostline.models.tracing import takes_rows, trace
from support.networks import Small
from support.texts import small_bert

pytestmark = pytest.mark.promise(
    "equal", mended="custom backwards, hooks and attributes of a head were left out of its traced graph"
)

SHAPE = (3, 32, 32)
STEPS, ROWS = 4, 6


class Reversal(torch.autograd.Function):
    """Gradient reversal, as domain adaptation (DANN) has it."""

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        return -0.5 * gradient


class Rounding(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(_, x):
        return (x * 8).round() / 8

    @staticmethod
    def backward(_, gradient):
        return gradient


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(context, x, by):
        context.by = by
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.by, None


class Between(Small):
    """Something happens behind the body, where all is trained."""

    def __init__(self):
        torch.manual_seed(3)
        super().__init__()
        self.drop.p = 0.0
        self.hidden = nn.Linear(16, 16)
        self.temperature, self.steps = 1.0, 0

    def between(self, x):
        return x

    def forward(self, x):
        hidden = torch.flatten(self.pool(self.body(self.stem(x))), 1)
        return self.fc(self.drop(self.between(self.hidden(hidden))))


class Reversed(Between):
    def between(self, x):
        return Reversal.apply(x)


class Rounded(Between):
    def between(self, x):
        return Rounding.apply(x)


class Scaled(Between):
    def between(self, x):
        return Scaling.apply(x, 0.1)


class Counting(Between):
    def between(self, x):
        self.steps += 1
        return x / (self.temperature * self.steps)


class Drawing(Between):
    def between(self, x):
        return x * (1 + random.random())


class Choosing(Between):
    draw = random.random

    def between(self, x):
        return x * 1.5 if self.draw() < 0.5 else x


@pytest.mark.parametrize(
    ("draw", "why"),
    [
        (random.random, "it draws random numbers that are not torch's"),
        (np.random.rand, "it draws random numbers that are not torch's"),
        (None, "its code decides by the size of the batch"),
    ],
)
def test_what_tells_two_batches_apart_is_named_by_its_cause(draw, why):
    class Chosen(Choosing):
        def forward(self, x):
            self.draw = draw or (lambda: len(x) % 2)
            return super().forward(x)

    random.seed(1)  # the first number is below a half and the second one above it, of NumPy too
    np.random.seed(1)
    model = Chosen()
    with pytest.raises(NotTraceable, match=why):
        trace(model, [TensorSpec(SHAPE)], training={path: True for path, _ in model.named_modules()})


class Functional(Small):
    """The frost line is the output of a function behind several others, as in DenseNet."""

    def forward(self, x):
        hidden = nn.functional.relu(self.body[0](self.stem(x)) + 0.1, inplace=True)
        pooled = nn.functional.adaptive_avg_pool2d(hidden, 2).mean(dim=(2, 3))
        return self.fc(Reversal.apply(pooled).tanh())


def batches(rows=ROWS):
    draw = torch.Generator().manual_seed(9)
    return [
        (torch.randn(rows, *SHAPE, generator=draw), torch.randint(0, 3, (rows,), generator=draw)) for _ in range(STEPS)
    ]


def trained(model, run, change=lambda _, __: None, given=None):
    """Losses of a few steps with the network, or with what stands for it."""
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 0.2)
    torch.manual_seed(1)
    random.seed(1)
    losses = []
    for step, (pixels, labels) in enumerate(given or batches()):
        change(model, step)
        loss = nn.functional.cross_entropy(run(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def through(network, head=None):
    """The prefix and the head, as a function of pixels."""
    graph = network.prefix.graph

    def run(pixels):
        with torch.no_grad():
            features = Runner(graph).run([pixels], leaf_values(graph, network.prefix.tensors))
        return (network.head if head is None else head)(*features)

    return run


def cut(model, until="stem"):
    """The network, one like it for a plain loop, and the parts of the first."""
    freeze(model.train(), until, input_shape=SHAPE)
    plain = copy.deepcopy(model)
    return model, plain, cut_network(model, SHAPE)


def same_training(build, change=lambda _, __: None, until="stem"):
    model, plain, network = cut(build(), until)
    assert isinstance(network.head, SkippingHead)
    assert trained(model, through(network), change) == trained(plain, plain, change)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    return network


class Inner(nn.Module):
    """Has a module inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Named(Inner):
    """Takes by name alone."""

    def forward(self, *, hidden, scale=1.0):
        return self.inner(hidden) * scale


class Called(Inner):
    """Does something around its forward."""

    def __call__(self, x):
        return super().__call__(x) * 2


class Positions(Inner):
    """Keeps positions from the first batch on, as rotary embeddings do."""

    positions = None

    def forward(self, x):
        hidden = self.inner(x)
        if self.positions is None:
            self.positions = torch.linspace(0, 1, hidden.shape[-1])
        return hidden + self.positions


class Unrecorded(Inner):
    @torch.inference_mode()
    def forward(self, x):
        return self.inner(x).mul_(2)


class Steps(nn.Module):
    """A parametrisation that changes with each use."""

    steps = 0

    def forward(self, weight):
        self.steps += 1
        return weight * (1 + 0.01 * self.steps)


class Unusual(Between):
    """What is written now and then, before the line and behind it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.token = nn.Embedding(8, 16, sparse=True, max_norm=1.0)
        if kind == "sparse":
            self.register_buffer("graph", torch.eye(16).mul(2).to_sparse(), persistent=False)
        if kind == "a forward of the instance":
            self.hidden.forward = MethodType(lambda hidden, x: nn.Linear.forward(hidden, x) * 2, self.hidden)
            self.stem.forward = MethodType(lambda stem, x: nn.Sequential.forward(stem, x) * 2, self.stem)
        if kind == "parametrisations that count":
            nn.utils.parametrize.register_parametrization(self.hidden, "weight", Steps())
        around = {"names": Named, "calls": Called, "positions": Positions, "inference mode": Unrecorded}.get(kind)
        if around:
            self.stem = around(self.stem)
            self.hidden = self.hidden if around is Unrecorded else around(self.hidden)

    def forward(self, x):
        is_named, kind = self.kind == "names", self.kind
        hidden = self.stem(scale=2.0, hidden=x) if is_named else self.stem(x)
        if kind == "inference mode":
            hidden = hidden.clone()
        if kind == "functional calls":
            weights = {name: weight * 2 for name, weight in self.stem.named_parameters()}
            hidden = torch.func.functional_call(self.stem, weights, (x,))
        hidden = torch.flatten(self.pool(self.body(hidden)), 1)
        if kind == "sparse":
            hidden = torch.sparse.mm(self.graph, hidden.t()).t()
        if kind == "an embedding that is sparse and renews itself":
            hidden = hidden + self.token((hidden.mean(1).abs() * 40).long() % 8)
        hidden = self.hidden(scale=2.0, hidden=hidden) if is_named else self.hidden(hidden)
        if kind == "functional calls":
            weights = {name: weight * 2 for name, weight in self.fc.named_parameters()}
            return torch.func.functional_call(self.fc, weights, (hidden,))
        if kind == "experts":
            chosen = (hidden.mean(1) > 0).nonzero().squeeze(1)
            hidden = hidden.index_add(0, chosen, self.hidden(hidden[chosen]))
        return self.fc(hidden)


@pytest.mark.parametrize(
    "kind",
    [
        "a forward of the instance",
        "names",
        "calls",
        "positions",
        "inference mode",
        "functional calls",
        "sparse",
        "an embedding that is sparse and renews itself",
        "experts",
        "parametrisations that count",
    ],
)
def test_what_is_written_now_and_then_is_trained_as_in_the_plain_loop(kind):
    network = same_training(lambda: Unusual(kind))
    assert network.prefix is not None


class Normalised(Functional):
    """Calls functions that take a place for their results and are given none, as timm's XCiT and SwinV2 do."""

    def forward(self, x):
        hidden = nn.functional.normalize(self.body[0](self.stem(x)), dim=1)
        return self.fc(torch.sum(hidden, (2, 3), out=None))


def test_functions_that_could_write_their_results_elsewhere_are_skipped():
    same_training(Normalised, until="body.0")


@pytest.mark.parametrize("until", ["bert.encoder.layer.0", "bert.encoder.layer.1"])
def test_the_head_of_a_network_for_texts_is_the_users_own_code(until):
    """transformers looks at the mask of a batch, which does not cross behind the last layer of the encoder."""
    names = ("input_ids", "attention_mask")
    inputs = tuple(TensorSpec((8,), "int64") for _ in names)
    model = freeze(small_bert().train(), until, input_shape=dict(zip(names, inputs, strict=True)))
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    plain = copy.deepcopy(model)
    network = cut_network(takes_rows(model, names), (TensorSpec((2, 8), "int64"),))
    assert isinstance(network.head, SkippingHead)
    assert network.fallback is None
    draw = torch.Generator().manual_seed(4)
    ids, labels = torch.randint(4, 30, (STEPS, ROWS, 8), generator=draw), torch.randint(0, 2, (STEPS, ROWS))
    masks = torch.arange(8) < torch.tensor([8, 3, 8, 5, 8, 8])[:, None]
    given = [(torch.stack([some, masks.long()], 1), label) for some, label in zip(ids, labels, strict=True)]
    for mine in (model, plain):  # after the cut
        mine.classifier.register_forward_hook(lambda _, __, output: output * 0.5)
        mine.dropout.p = 0.4
    whole = takes_rows(plain, names)
    assert trained(model, through(network), given=given) == trained(plain, whole, given=given)


@pytest.mark.parametrize("kind", [Reversed, Rounded, Scaled])
def test_a_backward_of_the_users_own_is_run(kind):
    network = same_training(kind)
    with pytest.raises(ModelError, match=r"does more than its trace says.*another policy"):
        make_portable(network.head)


def test_a_line_inside_functional_code_is_the_users_own_code_too():
    network = same_training(Functional, until="body.0")
    assert network.frost_line.name.startswith("mean")


def set_dropout(model, step):
    model.drop.p = 0.2 * step


def set_temperature(model, step):
    model.temperature = 1.0 + step


@pytest.mark.parametrize(("kind", "change"), [(Between, set_dropout), (Counting, set_temperature)])
def test_attributes_are_read_and_written_in_each_step(kind, change):
    same_training(kind, change)


def test_draws_of_python_are_the_users_own_and_none_are_taken_before():
    random.seed(5)
    before = random.getstate()
    network = same_training(Drawing)
    random.setstate(before)
    model = freeze(Drawing().train(), "stem", input_shape=SHAPE)
    random.seed(5)
    cut_network(model, SHAPE)
    assert random.getstate() == before
    assert isinstance(network.head, SkippingHead)


COUNTED = {"steps": 0}
CALLS = 0


class Counter:
    def __init__(self):
        self.steps, self.kept = 0, []

    def __call__(self, x):
        self.steps += 1
        self.kept.append(self.steps)
        return x


class Everywhere(Between):
    """Counts, draws and keeps what it saw, in all places that its code can reach; part of it behind the line."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 16))
        self.generator, self.numbers = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.counter = Counter()
        calls = 0

        def closure(x):
            nonlocal calls
            calls += 1
            return x + 0.1 * calls

        self.closure = closure

    def between(self, x):
        global CALLS
        CALLS += 1
        COUNTED["steps"] += 1
        noise = torch.randn(x.shape, generator=self.generator) * float(self.numbers.random())
        self.queue[int(self.steps) % 6] = x.detach().mean(0)
        self.steps += 1
        x = self.closure(self.counter(x)) + self.queue.mean(0) + 0.1 * noise
        return x * (1 + 0.1 * CALLS + 0.2 * COUNTED["steps"])


@pytest.fixture
def fresh(monkeypatch):
    """Global variables as they were, whenever it is called."""

    def begin():
        monkeypatch.setitem(COUNTED, "steps", 0)
        monkeypatch.setattr(sys.modules[__name__], "CALLS", 0)

    begin()
    return begin


def test_what_forward_counts_draws_and_keeps_is_not_changed_by_the_cut(fresh):
    model, plain, network = cut(Everywhere())
    assert (model.steps, CALLS, COUNTED, model.counter.steps, model.counter.kept) == (0, 0, {"steps": 0}, 0, [])
    assert not model.queue.any()
    assert network.prefix is not None
    # Copies share the function, and what it counts.
    function, expected = model.closure.__closure__[0], []
    for net, run in ((model, through(network)), (plain, plain)):
        fresh()
        function.cell_contents = 0
        expected.append(trained(net, run))
    assert expected[0] == expected[1]


class Slotted:
    __slots__ = ("steps",)

    def __init__(self):
        self.steps = 0


class Computed(Slotted):
    """What stands before the slot of the class below cannot be set, and is another value each time."""

    steps = property(lambda self: (0,))

    def __init__(self):
        pass


class Held:
    steps = 0

    def __init__(self):
        self.sum, self.array, self.nested = torch.zeros(1), np.zeros(2), [[0]]


TOTAL, SEEN = torch.zeros(1), ContextVar("seen", default=0)


def hidden():
    return [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))]


def in_context(_):
    SEEN.set(SEEN.get() + 1)
    return SEEN.get()


def in_environment(_):
    os.environ["STEPS"] = str(int(os.environ["STEPS"]) + 1)
    return int(os.environ["STEPS"])


def in_class(held):
    type(held).steps += 1
    return type(held).steps


KEPT = {
    "a tensor": (lambda: torch.zeros(1), lambda kept: kept.add_(1)),
    "a tensor in a list": (lambda: [torch.zeros(1)], lambda kept: kept[0].mul_(0.9).add_(1)),
    "a tensor in a tuple": (lambda: (torch.zeros(1),), lambda kept: kept[0].add_(1)),
    "a global tensor": (lambda: TOTAL, lambda _: TOTAL.add_(1)),
    "a view of a tensor": (lambda: {"queue": torch.zeros(4)}, lambda kept: kept["queue"][1:2].add_(1)),
    "by data": (lambda: torch.zeros(1), lambda kept: kept.data.add_(1)),
    "a counter": (Counted, lambda kept: kept.update(["steps"]) or kept["steps"]),
    "a default": (lambda: defaultdict(int), lambda kept: kept.__setitem__("n", kept["n"] + 1) or kept["n"]),
    "a queue": (lambda: deque([1.0], maxlen=3), lambda kept: kept.append(kept[-1] + 1) or sum(kept)),
    "a long list": (lambda: [0] * 5000, lambda kept: kept.append(1) or len(kept)),
    "an array": (lambda: np.zeros(2), lambda kept: float((kept.__iadd__(1))[0])),
    "an iterator": (lambda: itertools.count(1), next),
    "slots": (Slotted, lambda kept: setattr(kept, "steps", kept.steps + 1) or kept.steps),
    "a slot behind a property": (Computed, lambda kept: kept.steps[0]),
    "a class": (Held, in_class),
    "an object with a tensor": (Held, lambda kept: kept.sum.add_(1)),
    "an object with an array": (Held, lambda kept: float(kept.array.__iadd__(1)[1])),
    "lists in an object": (Held, lambda kept: kept.nested[0].append(1) or len(kept.nested[0])),
    "a context": (lambda: SEEN, in_context),
    "the environment": (dict, in_environment),
    "statistics of a module in a list": (
        hidden,
        lambda kept: kept[0](torch.ones(2, 16)).std() + kept[0][1].running_mean[0],
    ),
}


def described(kept):
    """All that may be another one of what a network keeps."""
    if isinstance(kept, list) and isinstance(kept[0], nn.Module):
        return {name: value.tolist() for name, value in kept[0].state_dict().items()}
    own = [getattr(kept, name, None) for name in ("sum", "array", "nested", "steps")]
    return repr((kept, own, TOTAL, SEEN.get(), os.environ["STEPS"]))


class Keeping(Between):
    def __init__(self, made, used):
        super().__init__()
        self.kept, self.used = made(), used

    def between(self, x):
        return x * (1 + 0.1 * self.used(self.kept))


@pytest.mark.parametrize("kind", KEPT)
def test_whatever_forward_keeps_the_cut_leaves_as_it_was(kind, monkeypatch):
    monkeypatch.setenv("STEPS", "0")
    model = Keeping(*KEPT[kind])
    freeze(model.train(), "stem", input_shape=SHAPE)
    before = described(model.kept)
    network = cut_network(model, SHAPE)
    assert described(model.kept) == before
    assert (network.prefix is not None, type(network.head)) == (True, SkippingHead)


def test_what_cannot_be_put_back_is_refused_in_a_sentence():
    model = Keeping(lambda: (step for step in range(10**6)), next)
    with pytest.raises(ModelError, match=r"takes values of the generator.*let its code count by an attribute"):
        freeze(model.train(), "stem", input_shape=SHAPE)


class Hiding(Between):
    """Has a layer that is no module of its own, and a tensor that learns and is no parameter."""

    def __init__(self, at_stem):
        super().__init__()
        self.at_stem = at_stem
        self.layers, self.prompt = [nn.Linear(16, 16)], torch.full((1, 1, 1), 0.1, requires_grad=True)

    def forward(self, x):
        hidden = self.stem(x)
        hidden = self.body(hidden * 1.5 + self.prompt if self.at_stem else hidden)
        hidden = self.layers[0](torch.flatten(self.pool(hidden), 1))
        return self.fc(hidden if self.at_stem else hidden + self.prompt.view(1, 1))


@pytest.mark.parametrize("at_stem", [True, False])
def test_hidden_layers_and_tensors_that_learn_are_trained_as_in_the_plain_loop(at_stem):
    model, plain, network = cut(Hiding(at_stem), "body")
    assert isinstance(network.head, SkippingHead)
    learned = [[mine.prompt, *mine.layers[0].parameters()] for mine in (model, plain)]
    ours = trained(model, through(network), lambda *_: stepped(learned[0]))
    assert ours == trained(plain, plain, lambda *_: stepped(learned[1]))
    assert all(torch.equal(*pair) for pair in zip(*learned, strict=True))
    assert float(model.prompt.detach()) != pytest.approx(0.1)


def stepped(parameters):
    """One step of gradient descent by hand, with the gradients of the step before."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad * 0.05)
                parameter.grad = None


class Draws(nn.Module):
    """Draws numbers and makes nothing of them, so that what draws behind it gets others."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        self.draw()
        return x


def noise():
    return float(torch.rand(1)), random.random(), float(np.random.rand())


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(3), random.random, lambda: np.random.rand(), lambda: torch.manual_seed(5)]
)
def test_draws_of_frozen_layers_that_are_used_nowhere_are_drawn_in_the_loop(draw):
    model = Between()
    model.stem = nn.Sequential(model.stem, Draws(draw))
    _, plain, network = cut(model)
    assert isinstance(network.head, SkippingHead)
    found = []
    for run in (through(network), plain):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        with torch.no_grad():
            found.append([(run(pixels).sum().item(), noise()) for pixels, _ in batches()])
    assert found[0] == found[1]


@dataclasses.dataclass
class Output:
    scores: torch.Tensor
    hidden: object


class Giving(Between):
    def forward(self, x):
        stem = self.stem(x)
        hidden = self.body(stem)
        return Output(self.fc(torch.flatten(self.pool(hidden), 1)), [hidden, stem])


def test_outputs_that_are_objects_of_the_users_come_whole():
    _, plain, network = cut(Giving(), "body")
    pixels = next(iter(batches()))[0]
    ours, theirs = through(network)(pixels), plain(pixels)
    assert isinstance(network.head, SkippingHead)
    assert torch.equal(ours.scores, theirs.scores)
    assert all(torch.equal(*pair) for pair in zip(ours.hidden, theirs.hidden, strict=True))


class Blocks(Between):
    """Two of its blocks are frozen; layers without weights, and containers, stand behind the line too."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4)))

    def joined(self, x):
        behind = self.blocks(x) * getattr(self, "strength", 1.0)
        return self.more(behind) if hasattr(self, "more") else behind

    def forward(self, x):
        hidden = torch.flatten(self.pool(self.body(self.stem(x))), 1)
        return self.fc(self.drop(self.joined(hidden)))


def of_kind(kind, change):
    def changed(net):
        for module in net.modules():
            if isinstance(module, kind):
                change(module)

    return changed


def doubled(_, __, output):
    return output * 2


WITH_MODULES = {
    "dropout of another strength": of_kind(nn.Dropout, lambda module: setattr(module, "p", 0.6)),
    "modes of some": of_kind(nn.Dropout, lambda module: module.eval()),
    "hook on a layer without weights": lambda net: net.blocks[3][1].register_forward_hook(doubled),
    "hook on a block": lambda net: net.blocks[3].register_forward_hook(doubled),
    "hook on what is frozen in part": lambda net: net.blocks.register_forward_hook(doubled),
    "backward hook on a block": lambda net: net.blocks[3].register_full_backward_hook(lambda _, by, __: (by[0] * 2,)),
    "mode of that": lambda net: net.blocks.eval(),
    "the last blocks": lambda net: [nn.init.constant_(block[0].bias, 0.5) for block in net.blocks[-2:]],
    "a layer of a block": lambda net: net.blocks[3].add_module("1", nn.Tanh()),
    "a layer more in a block": lambda net: net.blocks[3].append(nn.Tanh()),
    "an attribute that is looked for": lambda net: setattr(net, "strength", 2.0),
    "a buffer that is looked for": lambda net: net.register_buffer("strength", torch.full((16,), 2.0)),
    "a parameter that is looked for": lambda net: setattr(net, "strength", nn.Parameter(torch.full((16,), 2.0))),
    "a module that is looked for": lambda net: net.add_module("more", nn.Linear(16, 16)),
}


class TestItIsUsedAsTheNetwork:
    """What a loop does with the network by name, it does with the head."""

    def test_its_modes_are_set_by_the_networks_own_train(self):
        class Norms(Between):
            """Keeps a norm in eval mode, as detectors do."""

            def __init__(self):
                super().__init__()
                self.norm, self.idle = nn.BatchNorm1d(16), nn.Dropout(0.5)
                self.norm.running_mean.fill_(0.1)
                self.strength = 0.0

            def train(self, mode=True):
                super().train(mode)
                self.stem.eval()
                self.norm.eval()
                self.strength = 0.5 if mode else 0.25
                return self

            def between(self, x):
                return self.norm(x) * self.strength

        model, plain, network = cut(Norms())
        loops = [(model, through(network), network.head), (plain, plain, plain)]
        losses = [trained(mine, run, lambda _, step, net=net: net.train(step != 1)) for mine, run, net in loops]
        assert losses[0] == losses[1]
        assert not model.norm.training
        assert torch.equal(model.norm.running_mean, torch.full((16,), 0.1))

    def test_dropout_before_the_line_stays_off(self):
        model = Between()
        model.body.append(nn.Dropout(0.5))
        _, _, network = cut(model, "body")
        network.head.train()
        assert not model.body[-1].training
        assert model.hidden.training

    def test_attributes_of_the_network_are_set_and_read_by_it(self):
        class Tempered(Between):
            def between(self, x):
                return self.drop(x) / self.temperature

        def change(net, step):
            net.temperature = 1.0 + step
            net.drop.p = 0.1 * step

        model, plain, network = cut(Tempered())
        ours = trained(model, through(network), lambda _, step: change(network.head, step))
        assert ours == trained(plain, plain, change)
        assert (network.head.temperature, model.temperature) == (STEPS, STEPS)
        network.head.note = "the network's"
        setattr(network.head, "_mark", "its own")  # noqa: B010 (as libraries mark what they have seen)
        assert model.note == "the network's"
        assert not hasattr(model, "_mark")
        with pytest.raises(AttributeError, match="between"):
            _ = network.head.between

    @pytest.mark.parametrize("step", [*WITH_MODULES])
    def test_its_modules_are_the_networks_own(self, step):
        def change(net, number):
            if number == 1:
                WITH_MODULES[step](net)

        model, plain, network = cut(Blocks(), "blocks.1")
        unchanged = copy.deepcopy(plain)
        before = trained(unchanged, unchanged)
        ours = trained(model, through(network), lambda _, number: change(network.head, number))
        meant = trained(plain, plain, change)
        assert ours == meant != before
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
        copied = copy.deepcopy(network.head)
        torch.manual_seed(2)
        again = through(network, copied)(batches()[0][0])
        torch.manual_seed(2)
        assert torch.equal(again, plain(batches()[0][0]))

    def test_a_part_of_a_module_does_not_run_and_says_so(self):
        _, _, network = cut(Blocks(), "blocks.1")
        assert len(network.head.blocks) == 4
        with pytest.raises(ModelError, match=r"a part of this Sequential is frozen.*call job.head\(batch.features\)"):
            network.head.blocks(torch.zeros(2, 16))
        with pytest.raises(AttributeError, match="'joined' is a method of the network"):
            network.head.joined(torch.zeros(2, 16))

    def test_layers_of_a_sequential_are_known_by_their_numbers(self):
        def change(net, step):
            if step == 1:
                torch.manual_seed(5)
                net[-1] = nn.Linear(8, 3)
                net[-2].negative_slope = 0.5
            assert net[1:][-1] is net[-1]

        def build():
            torch.manual_seed(6)
            frozen = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(), nn.Linear(512, 8))
            return nn.Sequential(frozen, nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 3))

        model, plain, network = cut(build(), "0")
        assert trained(network.head, through(network), change) == trained(plain, plain, change)
        assert model[1].weight is network.head[1].weight
        assert torch.equal(network.head[3].weight, plain[3].weight)
        head = cut(Between())[2].head
        with pytest.raises(TypeError, match="'Between' object is not subscriptable"):
            _ = head[0]
        assert head.body[0] is head.body[:1][0]

    def test_attributes_of_the_network_are_deleted_where_they_are_set(self):
        _, _, network = cut(Between())
        network.head.qconfig = "int8"
        assert network.head.fc.weight is not None
        del network.head.qconfig
        assert not hasattr(network.head, "qconfig")
        with pytest.raises(AttributeError, match="qconfig"):
            del network.head.qconfig
        with pytest.raises(AttributeError, match="stem"):
            del network.head.stem

    def test_names_of_its_own_and_those_of_the_network_are_apart(self):
        class Named(Between):
            def __init__(self):
                super().__init__()
                self._inputs, self._part, self.best, self.criterion = 2.0, None, None, nn.functional.cross_entropy

            def between(self, x):
                return x * self._inputs

        network = same_training(Named)
        assert network.head.best is None
        assert network.head.criterion is nn.functional.cross_entropy

    def test_gradients_by_torch_func_are_those_of_the_network(self):
        _, plain, network = cut(Between())
        found, pixels = [], batches()[0][0]
        for net, given in ((network.head, through(network, lambda features: features)(pixels)), (plain, pixels)):
            weights = {name: value.detach() for name, value in net.named_parameters() if value.requires_grad}

            def score(weights, row, net=net):
                return torch.func.functional_call(net, weights, (row[None],)).logsumexp(1).sum()

            net.eval()
            one = torch.func.jacrev(score)(weights, given[0])
            each = torch.func.vmap(torch.func.grad(score), (None, 0))(weights, given)
            found.append({**one, **{f"each {name}": value for name, value in each.items()}})
        assert found[0].keys() == found[1].keys()
        assert all(torch.allclose(value, found[1][name], rtol=1e-6) for name, value in found[0].items())

    def test_what_else_the_network_takes_is_refused_in_a_sentence(self):
        class Margin(Between):
            def forward(self, x, labels=None):
                scores = super().forward(x)
                return scores if labels is None else scores - nn.functional.one_hot(labels, 3)

        _, _, network = cut(Margin())
        pixels, labels = next(iter(batches()))
        [features] = Runner(network.prefix.graph).run(
            [pixels], leaf_values(network.prefix.graph, network.prefix.tensors)
        )
        for given, named in (((features, labels), {}), ((features,), {"labels": labels})):
            with pytest.raises(ModelError, match="such as labels, has a default there, with which the network was cut"):
                network.head(*given, **named)

    def test_a_buffer_that_forward_replaces_is_the_heads_too(self):
        class Centred(Between):
            """Centres by a mean of what came before, as DINO does."""

            def __init__(self):
                super().__init__()
                self.register_buffer("center", torch.zeros(16))

            def between(self, x):
                self.center = self.center * 0.9 + x.detach().mean(0) * 0.1
                return x - self.center

        network = same_training(Centred)
        state = network.head.state_dict()
        assert state["center"].any()
        network.head.load_state_dict({**state, "center": torch.ones(16)})
        assert torch.equal(copy.deepcopy(network.head).state_dict()["center"], torch.ones(16))
        network.head.eval()
        network.head.double()
        assert network.head.center.dtype == torch.float64


class Sized(nn.Module):
    """How many values there are only the values tell, before the line and behind it."""

    def __init__(self, at):
        super().__init__()
        torch.manual_seed(4)
        self.stem, self.last, self.fc = nn.Conv2d(3, 6, 3, stride=4), nn.Linear(6, 6), nn.Linear(6, 3)
        self.at = at

    def forward(self, x):
        hidden = self.stem(x).mean((2, 3))
        hidden = self.last(_less_the_distinct(hidden)) if self.at == "before" else self.last(hidden)
        return self.fc(_less_the_distinct(hidden) if self.at == "behind" else hidden)


def _less_the_distinct(x):
    found, places = torch.unique(x, dim=0, return_inverse=True)
    return found[places] - found.mean(0)


@pytest.mark.parametrize("at", ["before", "behind"])
def test_sizes_that_values_tell_are_left_to_the_loop(at):
    network = same_training(lambda: Sized(at), until="last")
    if at == "before":
        assert "its code decides by the values of a tensor" in network.fallback
    else:
        assert network.fallback is None


def test_a_layer_that_does_almost_nothing_is_not_taken_for_the_line():
    class NearlyIdle(Small):
        """A BatchNorm as it begins divides by the root of 1.00001."""

        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(8)
            self.fc = nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(torch.flatten(self.pool(self.norm(self.stem(x))), 1))

    same_training(NearlyIdle, until="norm")


LATE = 12  # steps, more than a network is run when it is cut


class CountingStem(nn.Module):
    """Changes with each batch, by a count or by a list of what it saw."""

    def __init__(self, layer, keep):
        super().__init__()
        self.layer, self.keep, self.steps, self.seen = layer, keep, 0, []

    def forward(self, x):
        if self.keep == "count":
            self.steps += 1
        elif self.keep == "count late":
            self.steps += 1
            return self.layer(x) * (2 if self.steps > LATE else 1)
        self.seen.append(len(x))
        return self.layer(x) * (1 + self.steps + (len(self.seen) if self.keep == "list" else 0))


@pytest.mark.parametrize("keep", ["count", "count late", "list"])
def test_a_frozen_layer_that_counts_runs_in_the_users_loop(keep):
    model = Between()
    model.body = CountingStem(model.body, keep)
    model, plain, network = cut(model, "body")
    given = [batch for _ in range(LATE) for batch in batches()]
    assert trained(model, through(network), given=given) == trained(plain, plain, given=given)


class Observing(nn.Module):
    """A layer whose weights are rounded as for quantization: observers learn at first how many rows there are."""

    def __init__(self, layer, plain):
        super().__init__()
        self.layer, self.plain = layer, plain
        for name, value in (("least", torch.inf), ("most", -torch.inf), ("scale", 1.0)):
            self.register_buffer(name, torch.full((0,), value))
        self.register_buffer("zero", torch.zeros(0, dtype=torch.int32))
        self.seen = torch.zeros(0)

    def forward(self, x):
        weight = self.layer.weight
        if self.plain:
            (self.seen if len(self.seen) else self.seen.resize_(len(weight)).zero_()).add_(1)
            self.least.resize_(len(weight)).copy_(weight.detach().amin(1))
            return self.layer(x) / (1 + self.least.abs().max() + self.seen.mean())
        on = torch.ones(1, dtype=torch.int64)
        ranges = (self.least, self.most, self.scale, self.zero)
        rounded = torch.fused_moving_avg_obs_fake_quant(weight, on, on, *ranges, 0.01, -128, 127, 0, True, True)
        return nn.functional.linear(x, rounded, self.layer.bias)


class Quantized(Between):
    def __init__(self, *names, plain=False):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        for name in names:
            setattr(self, name, Observing(getattr(self, name), plain))

    def forward(self, x):
        hidden = torch.flatten(self.pool(self.body(self.stem(x))), 1)
        return self.fc(self.drop(self.hidden(self.inner(hidden))))


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("names", [("hidden",), ("inner", "hidden")])
def test_observers_that_learn_their_size_are_the_loops_and_begin_as_they_were(names, plain):
    model, plain_model, network = cut(Quantized(*names, plain=plain), "inner")
    assert all(tensor.shape == (0,) for tensor in (model.hidden.least, model.hidden.seen))
    run = through(network) if network.prefix else network.head  # resizing is not traced
    assert trained(model, run) == trained(plain_model, plain_model)
    assert model.hidden.least.shape == (16,)
    assert all(torch.equal(value, plain_model.state_dict()[name]) for name, value in model.state_dict().items())
    assert plain or (network.frost_line.name == "inner:linear") == (len(names) == 1)


class Averaging(Between):
    """Keeps averages of weights as MoCo and BYOL do, some in a list, and learns to give what these give."""

    def __init__(self, at):
        super().__init__()
        self.average, self.at = copy.deepcopy(self.hidden).requires_grad_(False), at
        self.hidden_average = [copy.deepcopy(self.fc.weight.detach())]

    def keep(self):
        pairs = [*zip(self.hidden.parameters(), self.average.parameters(), strict=True)]
        for own, average in (*pairs, (self.fc.weight, *self.hidden_average)):
            average.data = average.data * 0.9 + own.data * 0.1

    def forward(self, x):
        if self.at == "first":
            self.keep()
        hidden = torch.flatten(self.pool(self.body(self.stem(x))), 1)
        if self.at == "behind":
            self.keep()
        apart = (self.hidden(hidden) - self.average(hidden)).square().mean(1, keepdim=True)
        return self.fc(self.hidden(hidden)) + apart + self.hidden_average[0].sum(1)


@pytest.mark.parametrize("at", ["first", "behind"])
def test_averages_that_are_put_in_the_place_of_weights_are_moved_by_the_loop_alone(at):
    model, plain, network = cut(Averaging(at), "stem")
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert torch.equal(model.hidden_average[0], plain.hidden_average[0])
    run = through(network) if network.prefix else network.head
    assert trained(model, run) == trained(plain, plain)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


class Perturbed(Between):
    """Computes gradients in its forward: by the features as they come, or by others of the same values."""

    def __init__(self, *, learns_anew=False):
        super().__init__()
        self.learns_anew = learns_anew

    def forward(self, x):
        hidden = torch.flatten(self.pool(self.body(self.stem(x))), 1)
        if self.learns_anew:
            hidden = hidden.detach().requires_grad_(True)
        shift = torch.zeros_like(hidden, requires_grad=True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.fc(self.hidden(hidden + shift)).logsumexp(1).sum(), shift)
        return self.fc(self.hidden(hidden + 0.1 * slope.sign()))


@pytest.mark.parametrize("learns_anew", [False, True])
def test_code_that_computes_gradients_is_followed_up_to_there(learns_anew):
    assert same_training(partial(Perturbed, learns_anew=learns_anew), until="body").fallback is None
    model = Perturbed()
    with pytest.raises(NotTraceable, match="its code computes gradients itself"):
        trace(model, [TensorSpec(SHAPE)], training={path: True for path, _ in model.named_modules()})


class Local(Between):
    """A layer learns within the network's forward, by an optimiser of its own, or gathers gradients for another."""

    def __init__(self, kind):
        super().__init__()
        self.aside = nn.Linear(16, 3)
        self.own = None if kind is None else kind(self.aside.parameters(), 0.1)

    def between(self, x):
        if self.training and torch.is_grad_enabled():
            loss = self.aside(x.detach()).logsumexp(1).mean()
            if self.own is not None:
                self.own.zero_grad()
            loss.backward()
            if self.own is not None:
                self.own.step()
        return x + self.aside(x).mean(1, keepdim=True).detach()


@pytest.mark.parametrize("kind", [None, partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam])
def test_layers_that_learn_in_the_forward_begin_as_they_were(kind):
    model, plain, network = cut(Local(kind), "body")
    assert model.aside.weight.grad is None
    assert kind is None or not model.own.state
    losses = []
    for each, run in ((model, through(network) if network.prefix else network.head), (plain, plain)):
        losses.append([])
        optimizer = torch.optim.SGD(each.parameters() if kind is None else each.fc.parameters(), 0.2)
        for pixels, labels in batches():
            loss = nn.functional.cross_entropy(run(pixels), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


def apart(row):
    return row - row.mean()


def apart_in_place(row):
    return row.clone().sub_(row.mean())


def slopes(row):
    return torch.func.grad(lambda x: x.square().sum())(row)


@pytest.mark.parametrize("of_each", [apart, apart_in_place, slopes, torch.vmap(apart)])
def test_frozen_code_may_be_mapped_over_samples(of_each):
    class Mapped(Between):
        def forward(self, x):
            return super().forward(x + torch.vmap(of_each)(x))

    network = same_training(Mapped, until="body")
    assert network.fallback is None


class Growing(Between):
    """Makes layers, and weights and buffers too, when it first runs."""

    def __init__(self, *, makes_more):
        super().__init__()
        self.adapters, self.makes_more = nn.ModuleDict(), makes_more
        self.register_parameter("shift", None)

    def between(self, x):
        if "a" not in self.adapters:
            self.adapters["a"] = nn.Linear(16, 16)
            self.register_buffer("mean", x.detach().mean(0), persistent=False)
            self.register_buffer("least", x.detach().amin(0))
            if self.makes_more:
                self.extra, self.shift = nn.Linear(16, 16), nn.Parameter(torch.randn(16))
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        x = self.extra(x) + self.shift if self.makes_more else x
        return self.adapters["a"](x) - self.mean - self.least


@pytest.mark.parametrize("makes_more", [False, True])
def test_layers_that_code_makes_as_it_runs_are_the_heads(makes_more):
    _, plain, network = cut(Growing(makes_more=makes_more))
    assert (network.prefix is None) == makes_more
    assert not makes_more or "makes layers as it runs" in network.fallback
    assert not makes_more or "run it once on a batch before" in network.fallback
    losses = []
    for run, whole in ((through(network) if network.prefix else network.head, network.head), (plain, plain)):
        torch.manual_seed(5)
        (pixels, _), *others = batches()
        run(pixels)
        losses.append(trained(whole, run, given=others))
    assert losses[0] == losses[1]
    ours, theirs = network.head.state_dict(), plain.state_dict()
    assert all(name in ours or name.startswith("stem") for name in theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


class NamedAsHeads(nn.Module):
    """Has names that a head could have for something else."""

    def __init__(self, *names):
        super().__init__()
        torch.manual_seed(0)
        self._model = Between()
        self.names = names
        for name in names:
            setattr(self, name, nn.Linear(3, 3))

    def forward(self, x):
        x = self._model(x)
        for name in self.names:
            x = getattr(self, name)(x)
        return x


def names_of_a_head():
    return sorted(set(dir(SkippingHead)) - set(dir(nn.Module)) - {"_abc_impl"})


def test_a_networks_names_are_none_of_the_heads_own():
    assert all(name.endswith("_") for name in names_of_a_head())
    others = (name.strip("_") for name in names_of_a_head() if name.strip("_").isidentifier())
    names = ("reads", "taken", "_part", "_plan", "_flags", "_look", "_places", "_shared", "awaits_pass", *others)
    names = [*dict.fromkeys(name for name in names if not hasattr(nn.Module, name))]
    model, plain, network = cut(NamedAsHeads(*names), "_model.body")
    assert trained(model, through(network)) == trained(plain, plain)
    assert {name.partition(".")[0] for name in network.head.state_dict()} == {"_model", *names}


class Shrinking(Between):
    """Writes into weights by ways that no operation of torch tells of."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def between(self, x):
        weight = self.fc.weight.detach()
        {"numpy": weight.numpy, "array": partial(np.asarray, weight), "dlpack": partial(torch.from_dlpack, weight)}[
            self.way
        ]()[...] *= 0.97
        return x


@pytest.mark.parametrize("way", ["numpy", "array", "dlpack"])
def test_weights_that_code_writes_by_numpy_are_written_by_the_loop_alone(way):
    plain = Shrinking(way).train()
    for layer in (plain.stem, plain.body):
        layer.requires_grad_(False).eval()
    model, _, network = cut(Shrinking(way), "body")
    assert torch.equal(model.fc.weight, plain.fc.weight)
    assert trained(model, through(network) if network.prefix else network.head) == trained(plain, plain)


class Layers(nn.Module):
    """An encoder of which every layer is used, as sums of hidden states are in SUPERB and ELMo."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.embed = nn.Conv2d(3, 16, 8, stride=8)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(4))
        self.weights = nn.Parameter(torch.randn(5))
        self.fc = nn.Linear(16, 3)
        self.use = use
        self.requires_grad_(False).eval()
        self.weights.requires_grad_(True)
        self.fc.requires_grad_(True)

    def forward(self, x):
        states = [self.embed(x).flatten(2).transpose(1, 2)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        if self.use == "class tokens":
            return self.fc((torch.stack([state[:, 0] for state in states]) * self.weights[:, None, None]).sum(0))
        if self.use == "two":
            return self.fc(states[2].mean(1) * self.weights[0] + states[-1].mean(1))
        return self.fc((torch.stack(states) * self.weights.softmax(0)[:, None, None, None]).sum(0).mean(1))


@pytest.mark.parametrize(("use", "tensors"), [("class tokens", 5), ("hidden states", 5), ("two", 2)])
def test_several_outputs_of_an_encoder_cross_together(use, tensors):
    model = Layers(use)
    plain, network = copy.deepcopy(model), cut_network(model, SHAPE)
    assert network.fallback is None
    assert network.rest is None
    assert len(network.frost_line.tensors) == tensors
    assert trained(model, through(network)) == pytest.approx(trained(plain, plain), rel=1e-6)


class Stages(nn.Module):
    """Trained layers take what frozen ones give at several places, some behind others, and the input too."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        widths = [(3, 6), (6, 6), (6, 6), (6, 6)]
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv2d(*sizes, 3, stride=2), nn.ReLU()) for sizes in widths)
        self.encoder = nn.Sequential(*self.stages)
        self.requires_grad_(False).eval()
        self.beside, self.fc = nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in widths), nn.Linear(6, 3)
        self.of_input, self.use, self.kept = nn.Conv2d(3, 6, 1), use, {}
        if use == "hooks":
            for number in (0, 3):
                self.stages[number].register_forward_hook(lambda _, __, output, at=number: self.keep(at, output))

    def keep(self, number, output):
        self.kept[number] = output

    def taken(self, x):
        if self.use == "hooks":
            self.encoder(x)
            return [*self.kept.values()]
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return {"all": found, "apart": found[::3], "the input": found[-1:]}[self.use]

    def forward(self, x):
        if self.use == "by turns":
            total = 0
            for stage, beside in zip(self.stages, self.beside, strict=True):
                x = stage(x)
                total = beside(x).mean((2, 3)) + total
            return self.fc(total)
        total = sum(beside(given).mean((2, 3)) for beside, given in zip(self.beside, self.taken(x), strict=False))
        return self.fc(total + self.of_input(x).mean((2, 3)) if self.use == "the input" else total)


@pytest.mark.parametrize(
    "build",
    [
        *(partial(Stages, use) for use in ("all", "apart", "by turns", "the input", "hooks")),
        *(partial(Layers, use) for use in ("hidden states", "two")),
    ],
)
def test_frozen_layers_between_what_crosses_are_not_run_again(build, monkeypatch):
    model, plain = build(), build()
    network = cut_network(model, SHAPE)
    assert network.fallback is None
    assert trained(model, through(network)) == pytest.approx(trained(plain, plain), rel=1e-6)
    run = []
    for kind in (nn.Conv2d, nn.Linear):

        def forward(self, x, own=kind.forward):
            run.extend([] if isinstance(x, FakeTensor) else [self.weight])
            return own(self, x)

        monkeypatch.setattr(kind, "forward", forward)
    through(network)(batches()[0][0])
    assert run
    assert all(weight.requires_grad for weight in run)


class SumOfStates(nn.Module):
    """A trained sum of all hidden states of a frozen encoder, to which nobody gives a mask."""

    def __init__(self):
        import transformers as hf

        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
        self.encoder = hf.BertModel(hf.BertConfig(vocab_size=40, **sizes), add_pooling_layer=False)
        self.encoder.requires_grad_(False).eval()
        self.weights, self.fc = nn.Parameter(torch.zeros(4)), nn.Linear(16, 3)

    def forward(self, ids):
        states = torch.stack(self.encoder(ids, output_hidden_states=True).hidden_states)
        return self.fc((states * self.weights.softmax(0)[:, None, None, None]).sum(0).mean(1))


def test_hidden_states_that_a_library_notes_cross_without_running_layers_again(monkeypatch):
    model, plain = SumOfStates(), SumOfStates()
    network = cut_network(model, (TensorSpec((8,), "int64"),))
    assert (network.fallback, network.rest, len(network.frost_line.tensors)) == (None, None, 4)
    draw = torch.Generator().manual_seed(4)
    given = [(torch.randint(1, 40, (ROWS, 8), generator=draw), torch.randint(0, 3, (ROWS,))) for _ in range(STEPS)]
    assert trained(model, through(network), given=given) == trained(plain, plain, given=given)
    run, own = [], nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: run.append(layer) or own(layer, x))
    through(network)(given[0][0])
    assert run == [model.fc]


def test_frozen_work_outside_modules_that_is_done_again_is_told():
    class Functions(Stages):
        def taken(self, x):
            first = self.stages[0](x)
            return [first, nn.functional.conv2d(first, self.stages[1][0].weight, stride=2)]

    model, plain = Functions("all"), Functions("all")
    network = cut_network(model, SHAPE)
    assert len(network.frost_line.tensors) == 2
    assert network.fallback.startswith(
        "frozen layers run here too, since tensors at the frost line (1) are made of others"
    )
    assert trained(model, through(network)) == pytest.approx(trained(plain, plain), rel=1e-6)


class Writing(Small):
    """Works in place on what crosses the frost line."""

    is_late = False

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 2.0))

    def forward(self, x):
        hidden = torch.flatten(self.pool(self.body(self.stem(x))), 1)
        return self.fc(hidden * self.scale if self.is_late else hidden.mul_(self.scale))


class WritingData(Writing):
    """Writes where nobody counts it."""

    def forward(self, x):
        hidden = torch.flatten(self.pool(self.body(self.stem(x))), 1)
        if not self.is_late:
            hidden.data.mul_(0.5)
        return self.fc(hidden * self.scale)


class WritingArray(Writing):
    """Writes into a part, through NumPy."""

    def forward(self, x):
        hidden = torch.flatten(self.pool(self.body(self.stem(x))), 1)
        if not self.is_late:
            hidden.detach().numpy()[:, 1] = 0
        return self.fc(hidden * self.scale)


@pytest.mark.parametrize("kind", [Writing, WritingData, WritingArray])
def test_code_that_works_in_place_leaves_the_batch_as_it_was(kind):
    _, _, network = cut(kind(), "body")
    features = [torch.rand(5, *shape) for shape in network.frost_line.shapes]
    before = [feature.clone() for feature in features]
    first, second = network.head(*features), network.head(*features)
    assert torch.equal(first, second)
    assert all(torch.equal(feature, kept) for feature, kept in zip(features, before, strict=True))


@pytest.mark.parametrize("kind", [Writing, WritingData, WritingArray])
def test_code_that_begins_to_write_into_activations_is_told(kind):
    model = kind()
    model.is_late = True
    model, _, network = cut(model, "body")
    features = [torch.rand(5, *shape) for shape in network.frost_line.shapes]
    features[0][0] = math.nan  # as where rows that are not finite are allowed
    network.head(*features)
    model.is_late = False
    with pytest.raises(ModelError, match="writes into its activations at the frost line, which it did not when"):
        network.head(*features)


class TestCopies:
    def test_a_copy_computes_and_learns_with_its_own_weights(self):
        model, plain, network = cut(Reversed())
        first = trained(model, through(network))
        copied = copy.deepcopy(network.head)
        kept = {name: tensor.clone() for name, tensor in network.head.state_dict().items()}
        again = trained(copied, through(network, copied))
        assert all(torch.equal(tensor, kept[name]) for name, tensor in network.head.state_dict().items())
        assert all(parameter.grad is not None for parameter in copied.parameters())
        assert [*first, *again] == [*trained(plain, plain), *trained(plain, plain)]

    def test_a_copy_shares_frozen_weights_and_nothing_else(self):
        model, _, network = cut(Between())
        copied = copy.deepcopy(network.head)
        own = {parameter.data_ptr() for parameter in model.parameters()}
        assert own.isdisjoint(parameter.data_ptr() for parameter in copied.parameters())

    def test_averaged_weights_are_those_of_the_averaged_network(self):
        _, plain, network = cut(Between())
        averages = []
        for trained_one, run in ((network.head, through(network)), (plain, plain)):
            trained(trained_one, run)
            averaged = AveragedModel(trained_one)
            trained(trained_one, run)
            averaged.update_parameters(trained_one)
            averages.append(averaged.eval())
        network.head.eval()
        plain.eval()
        pixels = batches()[0][0]
        with torch.no_grad():
            assert torch.equal(through(network, averages[0])(pixels), averages[1](pixels))

    def test_statistics_of_an_average_are_learned_anew_for_the_head_alone(self):
        model, plain, network = cut(Between())
        graph, pixels = network.prefix.graph, [pixels for pixels, _ in batches()]
        with torch.no_grad():
            features = [Runner(graph).run([some], leaf_values(graph, network.prefix.tensors)) for some in pixels]
            averaged = AveragedModel(network.head)
            update_bn(features, averaged)
            plain.body[1].reset_running_stats()
            plain.body[1].momentum = None
            for some in pixels:
                plain(some)
        found, meant = averaged.module.state_dict(), plain.state_dict()
        assert all(torch.equal(found[name], meant[name]) for name in found)
        assert "body.1.running_mean" in found
        assert not model.body[1].num_batches_tracked, "the network itself has its own"

    def test_a_head_is_pickled_and_saved_whole(self, tmp_path):
        model, _, network = cut(Reversed())
        trained(model, through(network))
        pixels = batches()[0][0]
        torch.save(network.head, tmp_path / "head.pt")
        loaded = [pickle.loads(pickle.dumps(network.head)), torch.load(tmp_path / "head.pt", weights_only=False)]
        meant = through(network)(pixels)
        for head in loaded:
            assert list(head.state_dict()) == list(network.head.state_dict())
            assert torch.equal(through(network, head)(pixels), meant)


def test_a_last_batch_of_one_row_is_refused_by_batch_norm_itself():
    class Norm(Between):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def between(self, x):
            return self.norm(x)

    model, _, network = cut(Norm())
    before = model.norm.running_mean.clone()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        through(network)(torch.randn(1, *SHAPE))
    assert torch.equal(model.norm.running_mean, before)


class TestHooks:
    def test_hooks_of_all_kinds_run_and_stop_when_they_are_removed(self):
        model, _, network = cut(Between())
        seen = []
        handles = [
            model.hidden.register_forward_pre_hook(lambda *_: seen.append("before")),
            model.hidden.register_forward_hook(lambda *_: seen.append("after")),
            model.hidden.register_full_backward_hook(lambda *_: seen.append("back")),
        ]
        pixels = batches()[0][0]
        through(network)(pixels).sum().backward()
        assert seen == ["before", "after", "back"]
        for handle in handles:
            handle.remove()
        through(network)(pixels).sum().backward()
        assert len(seen) == 3

    @pytest.mark.parametrize("early", [True, False])
    def test_a_hook_changes_what_is_learned_as_in_the_plain_loop(self, early):
        model = Between()
        if early:
            model.hidden.register_forward_hook(lambda _, __, output: output * 2)
        model, plain, network = cut(model)
        if not early:
            for net in (model, plain):
                net.hidden.register_forward_hook(lambda _, __, output: output * 2)
        assert trained(model, through(network)) == trained(plain, plain)

    def test_activations_and_their_gradients_are_there_for_maps_of_attention(self):
        model, plain, network = cut(Between())
        found = []
        for net, run in ((model, through(network)), (plain, plain)):
            kept = []
            handle = net.body.register_forward_hook(lambda _, __, output, kept=kept: kept.append(output))
            scores = run(batches()[0][0])
            handle.remove()
            [gradient] = torch.autograd.grad(scores[:, 0].sum(), kept)
            found.append((kept[0] * gradient.mean((2, 3), keepdim=True)).sum(1))
        assert torch.equal(*found)

    def test_a_penalty_on_activations_is_part_of_the_loss(self):
        model, plain, network = cut(Between())
        losses = []
        for net, run in ((model, through(network)), (plain, plain)):
            kept = []
            net.hidden.register_forward_hook(lambda _, __, output, kept=kept: kept.append(output))
            scores = run(batches()[0][0])
            loss = scores.square().sum() + kept[0].abs().sum()
            loss.backward()
            losses.append((loss.item(), net.hidden.weight.grad.clone()))
        assert losses[0][0] == losses[1][0]
        assert torch.equal(losses[0][1], losses[1][1])


class Stored:
    """Keeps what a layer gave, as decoders of fastai's U-Nets read it."""

    def __init__(self, layer):
        layer.register_forward_hook(self.keep)
        self.value = None

    def keep(self, _, __, output):
        self.value = output


class Decoder(Small):
    def __init__(self):
        torch.manual_seed(3)
        super().__init__()
        self.stored = Stored(self.stem)
        self.fc = nn.Linear(24, 3)

    def forward(self, x):
        deep = self.pool(self.body(self.stem(x))).flatten(1)
        return self.fc(torch.cat([self.stored.value.mean((2, 3)), deep], 1))


def test_what_a_hook_of_a_frozen_layer_kept_crosses_too():
    network = same_training(Decoder, until="body")
    assert network.fallback is None


class TestAdapters:
    @pytest.fixture
    def adapted(self):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        tuned = get_peft_model(Between(), LoraConfig(target_modules=["hidden"], modules_to_save=["fc"], r=4))
        tuned.add_adapter("second", LoraConfig(target_modules=["hidden"], modules_to_save=["fc"], r=2))
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.3)
        return tuned.train()

    def parts(self, tuned):
        tuned.base_model.model.body.eval()
        tuned.base_model.model.stem.eval()
        plain = copy.deepcopy(tuned)
        return plain, cut_network(tuned, SHAPE)

    def test_a_disabled_adapter_is_disabled(self, adapted):
        plain, network = self.parts(adapted)
        pixels = batches()[0][0]
        enabled = through(network)(pixels)
        with adapted.disable_adapter(), plain.disable_adapter():
            assert torch.equal(through(network)(pixels), plain(pixels))
            assert not torch.equal(through(network)(pixels), enabled)
        assert torch.equal(through(network)(pixels), plain(pixels))

    def test_an_adapter_before_the_line_that_is_disabled_is_told(self):
        from peft import LoraConfig, get_peft_model

        tuned = get_peft_model(Between(), LoraConfig(target_modules=["body.0", "hidden"], r=2)).train()
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.3)
            if "body" in name:
                parameter.requires_grad_(False)
        _, network = self.parts(tuned)
        assert network.frost_line.name.startswith("base_model.model.pool") or "flatten" in network.frost_line.name
        features = [torch.rand(4, *shape) for shape in network.frost_line.shapes]
        network.head(*features)
        with (
            tuned.disable_adapter(),
            pytest.raises(ModelError, match=r"'_adapters_disabled' of the network.*refreeze"),
        ):
            network.head(*features)

    def test_another_adapter_is_the_one_that_learns(self, adapted):
        plain, network = self.parts(adapted)
        for tuned in (adapted, plain):
            tuned.set_adapter("second")
        assert trained(adapted, through(network)) == trained(plain, plain)
        names = [name for name, parameter in network.head.named_parameters() if parameter.requires_grad]
        assert names
        assert all("second" in name for name in names)

    def test_adapters_with_dropout_are_merged_and_taken_apart_while_they_learn(self):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            target_modules=["hidden"], modules_to_save=["fc"], r=4, lora_dropout=0.3, init_lora_weights=False
        )
        torch.manual_seed(0)
        tuned = get_peft_model(Between(), config).train()
        plain, network = self.parts(tuned)

        def change(network, step):
            if step == 1:
                network.merge_adapter()
            if step == 2:
                network.unmerge_adapter()

        assert trained(tuned, through(network), change) == trained(plain, plain, change)


class TestAround:
    def test_autocast_around_the_head_says_once_that_frozen_layers_are_not_cast(self):
        _, plain, network = cut(Between())
        run, pixels = through(network), batches()[0][0]
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.warns(UserWarning, match="autocast .* reaches what the head computes alone") as told:
                scores = run(pixels)
            assert told[0].filename == __file__, "whoever called the head"
            assert torch.equal(run(pixels), scores)  # warnings are errors here
        assert scores.dtype == torch.bfloat16
        assert torch.allclose(scores.float(), plain(pixels), atol=0.05)

    def test_a_head_that_is_cast_says_once_that_frozen_layers_are_not(self):
        _, _, network = cut(Between())
        features = through(network, lambda features: features)(batches()[0][0])
        network.head.double()
        assert network.head(features.double()).dtype == torch.float64  # no rounding is lost
        network.head.bfloat16()
        with pytest.warns(UserWarning, match="a cast of features to bfloat16 is on around job.head and reaches"):
            scores = network.head(features.bfloat16())
        assert torch.equal(network.head(features.bfloat16()), scores)

    def test_features_that_are_not_dense_are_refused_in_a_sentence(self):
        _, _, network = cut(Between())
        features = through(network, lambda features: features)(batches()[0][0])
        for others in (features.to_sparse(), torch.nested.nested_tensor([*features], layout=torch.jagged)):
            with pytest.raises(
                ModelError, match=r"and takes dense ones, as batch\.features are: give it features.to_dense"
            ):
                network.head(others)

    def test_nothing_is_said_of_autocast_that_changes_no_frozen_layer(self):
        _, plain, network = cut(Between().bfloat16())
        pixels = batches()[0][0].bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(through(network)(pixels), plain(pixels))

    def test_checkpoints_of_activations_in_the_head_give_the_same_gradients(self):
        from torch.utils.checkpoint import checkpoint

        class Checkpointed(Between):
            def between(self, x):
                return checkpoint(self.hidden, x.relu(), use_reentrant=False)

        same_training(Checkpointed)

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
    @pytest.mark.parametrize("asks", ["a hook of the stem", "its code", "nobody"])
    @pytest.mark.parametrize("blocks", ["behind the line", "all"])
    def test_checkpoints_that_run_again_backwards_get_the_gradients_that_they_need(self, blocks, asks):
        """Frozen embeddings whose outputs require gradients, so that layers behind them may be checkpointed."""
        from torch.utils.checkpoint import checkpoint

        again = partial(checkpoint, use_reentrant=True)

        class Checkpointed(Between):
            def forward(self, x):
                hidden = self.stem(x)
                if asks == "its code":
                    hidden.requires_grad_(True)
                hidden = again(self.body, hidden) if blocks == "all" else self.body(hidden)
                hidden = again(lambda x: self.hidden(torch.flatten(self.pool(x), 1)), hidden)
                return self.fc(hidden)

        def build():
            model = Checkpointed()
            if asks == "a hook of the stem":
                model.stem.register_forward_hook(lambda _, __, output: output.requires_grad_(True))
            return model

        network = same_training(build, until="body")
        line = "flatten" if asks == "nobody" else "stem" if blocks == "all" else "body"
        assert network.frost_line.name.startswith(line)
        assert asks == "nobody" or "pass use_reentrant=False" in network.fallback

    def test_gradients_of_features_that_are_asked_for_are_there(self):
        model, _, network = cut(Between())
        features = [torch.rand(4, *shape, requires_grad=True) for shape in network.frost_line.shapes]
        network.head(*features).sum().backward()
        given = [feature.grad for feature in features]
        again = [feature.detach().requires_grad_(True) for feature in features]
        hidden = torch.flatten(model.pool(model.body(again[0])), 1)
        model.fc(model.drop(model.between(model.hidden(hidden)))).sum().backward()
        assert torch.equal(given[0], again[0].grad)

    # PyTorch hides this one where it asks, but not from a filter that makes errors of warnings.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
    def test_a_compiled_head_learns_the_same(self):
        _, plain, network = cut(Reversed())
        model, compiled = network.head, torch.compile(network.head, backend="eager")
        with pytest.warns(UserWarning, match="compile your trained layers") as said:
            assert trained(model, through(network, compiled)) == trained(plain, plain)
        assert len(said) == 1

    def test_a_compiler_that_shall_leave_nothing_out_is_told_what_to_compile(self):
        _, _, network = cut(Between())
        compiled = torch.compile(network.head, backend="eager", fullgraph=True)
        with pytest.raises(RuntimeError, match="compile your trained layers"):
            through(network, compiled)(torch.randn(2, *SHAPE))

    def test_a_compiled_layer_of_the_head_is_run_compiled(self):
        model, plain, network = cut(Between())
        model.hidden.compile(backend="eager")
        assert trained(model, through(network)) == trained(plain, plain)

    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
    @pytest.mark.parametrize("named", ["the network", "module 'fc' of the network"])
    def test_a_network_that_torch_jit_has_compiled_is_refused_in_a_sentence(self, named):
        model = freeze(Between(), "stem", input_shape=SHAPE)
        if named == "the network":
            model = torch.jit.trace(model.eval(), batches()[0][0])
        else:
            model.fc = torch.jit.script(model.fc)
        for make in (lambda: cut_network(model, SHAPE), lambda: freeze(model, "body", input_shape=SHAPE)):
            with pytest.raises(ModelError, match=f"{named} is what torch.jit made of one.*as it was before that"):
                make()

    @pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
    def test_exporting_the_head_is_refused_in_a_sentence(self):
        model, _, network = cut(Between())
        features = through(network, lambda features: features)(batches()[0][0])
        for export in (
            torch.jit.script,
            lambda head: torch.jit.trace(head, features),
            lambda head: torch.export.export(head, (features,)),
            torch.fx.symbolic_trace,
        ):
            with pytest.raises(ModelError, match=r"torch\.jit.*cannot write down.*export the network itself"):
                export(network.head)
        torch.jit.trace(model.eval(), torch.randn(2, *SHAPE))

    def test_a_layer_without_a_shape_is_named(self):
        model = Between()
        model.fc = nn.LazyLinear(3)
        for layer in (model.stem, model.body):
            layer.requires_grad_(False).eval()
        for act in (cut_network, lambda model, shape: freeze(model, "body", input_shape=shape)):
            with pytest.raises(ModelError, match=r"'fc\.weight' has no shape yet: run the network once"):
                act(model, SHAPE)
        assert model.train()(torch.randn(2, *SHAPE)).shape == (2, 3)  # and it gets its shape as ever

    def test_layers_whose_weights_are_elsewhere_are_named(self):
        from accelerate import cpu_offload

        model = Between()
        for layer in (model.stem, model.body):
            layer.requires_grad_(False).eval()
        with pytest.raises(ModelError, match=r"'stem\.0\.weight' has a shape and no values, as accelerate's"):
            cut_network(cpu_offload(model, torch.device("cpu")), SHAPE)


class ZeroGradient(torch.autograd.Function):
    """Its backward is not the derivative of its forward, and what it keeps is kept apart from that."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(context, inputs, output):
        context.save_for_backward(*inputs)

    @staticmethod
    def backward(context, gradient):
        return torch.zeros_like(gradient)


class Pyramid(Between):
    """Pooling to one pixel behind the frost line, with BatchNorm behind that, as in DeepLab's pyramid."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Sequential(nn.Unflatten(1, (16, 1, 1)), nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.Flatten())


class TestReports:
    """What others have reported of PyTorch and of what is built on it, beside a plain loop (docs/decisions, 98)."""

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning", "ignore:torch.compile leaves")
    def test_numbers_of_python_that_a_compiler_draws_once_for_all_are_drawn_in_each_step(self):
        model, plain, network = cut(Drawing())
        run = through(network, torch.compile(network.head, backend="eager"))
        assert trained(model, run) == trained(plain, plain)

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning", "ignore:torch.compile leaves")
    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_backward_that_a_compiler_drops_is_run(self, compiled):
        class Sine(Between):
            def between(self, x):
                return ZeroGradient.apply(x) + 0.1 * x

        model, plain, network = cut(Sine())
        run = through(network, torch.compile(network.head, backend="eager") if compiled else network.head)
        assert trained(model, run) == trained(plain, plain)

    def test_one_row_behind_a_pooling_to_one_pixel_is_refused_as_in_the_plain_loop(self):
        model, plain, network = cut(Pyramid())
        pixels = torch.randn(1, *SHAPE)
        for run in (plain, through(network)):
            with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
                run(pixels)
        for name, value in plain.state_dict().items():
            assert torch.equal(value, model.state_dict()[name])

    def test_weighted_sums_of_an_encoders_layers_are_trained_behind_the_encoder(self):
        import transformers as hf

        torch.manual_seed(0)
        config = hf.WhisperConfig(
            d_model=16,
            encoder_layers=3,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_mel_bins=8,
            max_source_positions=10,
            vocab_size=64,
            use_weighted_layer_sum=True,
            num_labels=3,
            classifier_proj_size=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        model = hf.WhisperForAudioClassification(config).train()
        model.freeze_encoder()
        model.encoder.eval()
        plain, network = copy.deepcopy(model), cut_network(model, (8, 20))
        assert len(network.frost_line.tensors) > 1
        draw = torch.Generator().manual_seed(3)
        given = [(torch.randn(4, 8, 20, generator=draw), torch.randint(0, 3, (4,), generator=draw)) for _ in range(3)]
        losses = trained(model, lambda x: through(network)(x).logits, given=given)
        assert losses == pytest.approx(trained(plain, lambda x: plain(x).logits, given=given), rel=1e-6)
        assert torch.allclose(model.layer_weights, plain.layer_weights, rtol=1e-6)


class Tokened(Between):
    """A parameter of a module that holds others too, which the head has without its module."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.ones(16))

    def between(self, x):
        return x * self.token


class TestReplaced:
    def test_a_module_that_is_put_into_the_head_runs_and_learns(self):
        model, plain, network = cut(Between())
        network.head.fc, plain.fc = nn.Linear(16, 3, bias=False), nn.Linear(16, 3, bias=False)
        with torch.no_grad():
            network.head.fc.weight.copy_(plain.fc.weight)
        assert trained(network.head, through(network)) == trained(plain, plain)
        assert torch.equal(network.head.fc.weight, plain.fc.weight)
        assert model.fc.bias is not None
        assert model.fc.weight.grad is None

    def test_adapters_that_are_injected_into_the_head_run_and_learn(self):
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(target_modules=["hidden"], r=2, init_lora_weights=False)
        _, plain, network = cut(Between())
        torch.manual_seed(4)
        inject_adapter_in_model(config, network.head)
        torch.manual_seed(4)
        inject_adapter_in_model(config, plain)
        plain.stem.requires_grad_(False)
        assert trained(network.head, through(network)) == trained(plain, plain)
        copied = copy.deepcopy(network.head)
        pixels = batches()[0][0]
        assert torch.equal(through(network, copied)(pixels), plain(pixels))

    def test_layers_that_a_converter_swaps_inside_the_head_run(self):
        _, plain, network = cut(Between())
        for model in (network.head, plain):
            model.get_submodule("body").add_module("1", nn.GroupNorm(4, 16))
        assert trained(network.head, through(network)) == trained(plain, plain)
        assert "body.1.running_mean" not in network.head.state_dict()

    @pytest.mark.parametrize("replaced", ["module 'hidden'", "parameter 'token'"])
    def test_what_the_network_has_in_place_of_the_heads_own_is_told(self, replaced):
        model, _, network = cut(Tokened())
        pixels = batches()[0][0]
        if "module" in replaced:
            model.hidden = nn.Linear(16, 16)
        else:
            model.token = nn.Parameter(torch.zeros(16))
        with pytest.raises(ModelError, match=rf"{replaced} of the network was replaced .*job\.refreeze"):
            through(network)(pixels)


class Watched(nn.Module):
    """Does something else about outliers, wherever it is not traced."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return without_outliers(self.inside(x))


def without_outliers(x):
    is_high = not torch.compiler.is_exporting() and float(x.abs().max()) > 50
    return x.clamp(-1, 1) if is_high else x


class Peeking(Between):
    """Looks at values before its frost line, within a frozen module."""

    def __init__(self):
        super().__init__()
        self.body = Watched(self.body)


class PeekingOutside(Between):
    """Looks at values before its frost line, between frozen modules."""

    def forward(self, x):
        hidden = without_outliers(self.body(self.stem(x)) * 1.0)
        return self.fc(self.between(self.hidden(torch.flatten(self.pool(hidden), 1))))


@pytest.mark.parametrize("kind", [Peeking, PeekingOutside])
def test_what_code_decides_by_values_before_the_line_is_decided_in_each_step(kind):
    """A trace holds one outcome, and random rows do not show the other."""
    model, plain, network = cut(kind(), "body")
    assert "its code looks at values before the frost line" in network.fallback
    run = network.head if network.prefix is None else through(network)
    given = [(pixels * 1e4 ** (step % 2), labels) for step, (pixels, labels) in enumerate(batches())]
    losses = trained(model, run, given=given)
    assert losses == trained(plain, plain, given=given)


MANY = dict.fromkeys(range(5000), False)  # more than are compared whenever the head is called


def test_code_before_the_line_that_has_changed_is_told(monkeypatch):
    class Changing(Functional):
        def forward(self, x):
            return super().forward(x + 1 if MANY[0] else x)

    _, _, network = cut(Changing(), "body.0")
    monkeypatch.setitem(MANY, 0, True)
    with pytest.raises(ModelError, match=r"than when the network was traced|has changed; make the job again"):
        through(network)(batches()[0][0])
