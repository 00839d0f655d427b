"""Ways to train a head that are more than a step per batch, and unusual frozen layers: equal to a plain loop's."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune

from frostline.core import TensorSpec
from frostline.core.errors import ModelError
from frostline.engines.graph_runner import Runner, leaf_values
from frostline.models import cut_network

pytestmark = pytest.mark.promise("equal")

SHAPE = (3, 16, 16)


class Net(nn.Module):
    """Two frozen stages, and three layers that are trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.hidden, self.drop, self.fc = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3)

    def before(self, x):
        return self.body(self.stem(x))

    def behind(self, hidden):
        return self.fc(self.drop(torch.tanh(self.hidden(hidden.mean((2, 3))))))

    def forward(self, x):
        return self.behind(self.before(x))


def frozen(model):
    model.train()
    for part in (model.stem, model.body):
        part.requires_grad_(False).eval()
    return model


def batches(count=4, rows=6):
    draw = torch.Generator().manual_seed(9)
    return [
        (torch.randn(rows, *SHAPE, generator=draw), torch.randint(0, 3, (rows,), generator=draw)) for _ in range(count)
    ]


def features_of(network):
    def given(pixels):
        graph = network.prefix.graph
        with torch.no_grad():
            return Runner(graph).run([pixels], leaf_values(graph, network.prefix.tensors))

    return given


def learned(parameters):
    return [parameter for parameter in parameters if parameter.requires_grad]


def steps(head, given, optimizer):
    losses = []
    for pixels, labels in batches():
        loss = cross_entropy(head(*given(pixels)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_quasi_newton(head, given, _):
    optimizer, losses = torch.optim.LBFGS(learned(head.parameters()), lr=0.1, max_iter=4), []
    for pixels, labels in batches():
        features = given(pixels)

        def closure(features=features, labels=labels):
            optimizer.zero_grad()
            loss = cross_entropy(head(*features), labels)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def by_two_runs_per_batch(head, given, _):
    """Sharpness-aware minimization."""
    parameters, losses = learned(head.parameters()), []
    optimizer = torch.optim.SGD(parameters, 0.1)
    for pixels, labels in batches():
        features = given(pixels)
        loss = cross_entropy(head(*features), labels)
        ups = [0.05 * slope for slope in torch.autograd.grad(loss, parameters)]
        torch._foreach_add_([parameter.data for parameter in parameters], ups)
        optimizer.zero_grad()
        cross_entropy(head(*features), labels).backward()
        torch._foreach_sub_([parameter.data for parameter in parameters], ups)
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_penalised_gradients(head, given, _):
    parameters, losses = learned(head.parameters()), []
    optimizer = torch.optim.SGD(parameters, 0.1)
    for pixels, labels in batches():
        loss = cross_entropy(head(*given(pixels)), labels)
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        loss = loss + 0.1 * sum(slope.square().sum() for slope in slopes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_scaled_and_clipped_gradients(head, given, model):
    optimizer, losses = torch.optim.SGD(learned(head.parameters()), 0.1), []
    scaler = torch.amp.GradScaler("cpu")
    for pixels, labels in batches():
        loss = cross_entropy(head(*given(pixels)), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def by_gradients_of_each_sample(head, given, _):
    head.eval()
    weights = {name: value.detach() for name, value in head.named_parameters() if value.requires_grad}

    def loss(weights, feature, label):
        return cross_entropy(functional_call(head, weights, (feature[None],)), label[None])

    pixels, labels = batches()[0]
    slopes = vmap(grad(loss), in_dims=(None, 0, 0))(weights, *given(pixels), labels)
    return [value.square().sum().item() for value in slopes.values()]


def by_forward_mode(head, given, _):
    head.eval()
    weights = {name: value.detach() for name, value in head.named_parameters() if value.requires_grad}
    features = given(batches()[0][0])
    ones = {name: torch.ones_like(value) for name, value in weights.items()}
    found = jvp(lambda weights: functional_call(head, weights, tuple(features)), (weights,), (ones,))
    return [value.sum().item() for value in found]


LEARNS = {
    "all parameters, decayed": lambda head, given, model: steps(
        head, given, torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.5, foreach=True)
    ),
    "a fused optimizer": lambda head, given, model: steps(
        head, given, torch.optim.Adam(model.parameters(), 0.01, fused=True)
    ),
    "groups of frozen and trained parameters": lambda head, given, model: steps(
        head,
        given,
        torch.optim.AdamW([{"params": [*model.stem.parameters()]}, {"params": learned(model.parameters())}], 0.01),
    ),
    "quasi-Newton": by_quasi_newton,
    "two runs per batch": by_two_runs_per_batch,
    "penalised gradients": by_penalised_gradients,
    "scaled and clipped gradients": by_scaled_and_clipped_gradients,
    "gradients of each sample": by_gradients_of_each_sample,
    "forward mode": by_forward_mode,
}


def same(build, learn):
    model, plain = frozen(build()), frozen(build())
    network, found = cut_network(model, SHAPE), []
    for head, given, whole in (
        (network.head, features_of(network), model),
        (plain, lambda pixels: [pixels], plain),
    ):
        torch.manual_seed(1)
        found.append(learn(head, given, whole))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    theirs = plain.state_dict()
    assert all(torch.allclose(value, theirs[name], atol=1e-6) for name, value in model.state_dict().items())
    return network


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own forward mode
@pytest.mark.parametrize("way", LEARNS)
def test_each_way_to_learn_is_that_of_the_plain_loop(way):
    same(Net, LEARNS[way])


class Precise(Net):
    def __init__(self):
        super().__init__()
        self.stem.double()
        self.body.double()

    def before(self, x):
        return super().before(x.double()).float()


class Complex(Net):
    """Complex numbers cross the frost line, and are weighed behind it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 1, 1, dtype=torch.complex64))

    def before(self, x):
        return torch.fft.fft2(super().before(x))

    def behind(self, hidden):
        return super().behind((hidden * self.weight).abs())


class Pooled(Net):
    """Its frozen layers run in another thread."""

    def before(self, x):
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(super().before, x).result()


class Beside(Net):
    """A thread of its own looks at what the first frozen layers gave, while others run."""

    def before(self, x):
        hidden, means = self.stem(x), []
        thread = Thread(target=lambda: means.append(float(hidden.detach().mean())))
        thread.start()
        given = self.body(hidden)
        thread.join()
        return given * (1 + means[0])


class Remembering(Net):
    """Keeps what it saw in a plain list, and goes by it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def behind(self, hidden):
        self.seen.append(hidden.mean().item())
        return super().behind(hidden) * (1 + 0.01 * len(self.seen)) + self.seen[-1]


def changed(path, change):
    def build():
        model = Net()
        change(model.get_submodule(path))
        return model

    return build


def with_hook(hook, path="hidden", kind="register_full_backward_hook"):
    return changed(path, lambda module: getattr(module, kind)(hook))


UNUSUAL = {
    "pruned before the line": changed("stem.0", lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
    "pruned behind it": changed("hidden", lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
    "weights by their norms": changed("stem.0", parametrizations.weight_norm),
    "spectral norms": changed("stem.0", parametrizations.spectral_norm),
    "spectral norms that learn": changed("fc", parametrizations.spectral_norm),
    "orthogonal weights": changed("hidden", parametrizations.orthogonal),
    "64 bits before the line": Precise,
    "complex numbers": Complex,
    "threads": Pooled,
    "a thread that looks at values": Beside,
    "a list": Remembering,
    "a pre-hook that changes what a frozen layer takes": with_hook(
        lambda _, given: (given[0] + 1,), "body", "register_forward_pre_hook"
    ),
    "a hook on gradients at the line": with_hook(lambda *_: None, "body"),
    "a hook that changes gradients": with_hook(lambda _, given, __: tuple(0.5 * slope for slope in given), "fc"),
    "statistics of each instance": changed(
        "body", lambda body: body.append(nn.InstanceNorm2d(8, affine=True, track_running_stats=True))
    ),
    "statistics over processes": changed("body", lambda body: body.append(nn.SyncBatchNorm(8))),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_layers_have_the_losses_of_the_plain_loop(kind):
    network = same(UNUSUAL[kind], LEARNS["all parameters, decayed"])
    assert "thread" not in kind or "computes in threads of its own" in network.fallback


@pytest.mark.parametrize("given", [lambda rows: rows.numpy(), lambda rows: rows.tolist(), lambda _: None])
def test_what_are_no_tensors_are_refused_with_the_line_to_write(given):
    network = cut_network(frozen(Net()), SHAPE)
    with pytest.raises(ModelError, match=r"takes tensors: write job\.head\(batch\.features\)"):
        network.head(given(torch.rand(2, *network.frost_line.shapes[0])))


@pytest.mark.parametrize("part", [lambda rows: rows[0], lambda rows: rows[:, :2]])
def test_a_part_of_features_is_told_by_its_shape(part):
    network = cut_network(frozen(Net()), SHAPE)
    features = part(torch.rand(2, *network.frost_line.shapes[0]))
    with pytest.raises(ModelError, match=r"features"):
        network.head(features)


def test_an_embedding_that_renews_its_weights_as_it_runs_is_named():
    model = nn.Sequential(nn.Embedding(50, 8, max_norm=0.5), nn.Linear(8, 8), nn.Flatten(), nn.Linear(56, 3))
    model[:2].requires_grad_(False)
    with pytest.raises(ModelError, match="0 changes from run to run"):
        cut_network(copy.deepcopy(model), (TensorSpec((7,), "int64"),))
