"""The product's first promise: wherever the network is cut, the answer is the same, to the bit."""

import copy

import numpy as np
import pytest
import torch

from frostline.models import cut_network, freeze
from support.cutting import crossed, finished, sent, shipped_engine
from support.matrices import sampled
from support.networks import NETWORKS, UNTIL, batch_of, build, inputs_of

pytestmark = pytest.mark.promise("equal")

IMAGES = (
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_lite0",
    "mobilenet_v3_large",
    "resnet18",
    "vit_small",
)
USUAL = ("efficientnet_lite0", "resnet18", "vit_small")
"""Separable convolutions, residual blocks with BatchNorm, and attention; the others are alike."""


@pytest.fixture(scope="module")
def frozen(request):
    """A network of that name with its frost line, and as it was cut: to trace one takes longer than to test it."""
    inputs = inputs_of(request.param)
    model = freeze(build(request.param).train(), UNTIL[request.param], input_shape=inputs)
    plain = copy.deepcopy(model)
    return request.param, plain, model, cut_network(model, inputs)


def scores(answer):
    """The output that is trained on: transformers returns a value of its own class."""
    return getattr(answer, "logits", answer)


def earlier_cuts(network, count=3):
    """The frost line, and cuts spread evenly over what lies before it inside the network."""
    places = np.linspace(2, len(network.cuts) - 1, count + 1).astype(int)
    return [network.cuts[place] for place in reversed(places)]


@pytest.mark.parametrize("name", sampled(IMAGES, usual=("resnet18", "vit_small")))
def test_every_cut_of_the_whole_network_gives_the_uncut_answer_to_the_bit(name):
    side = 64 if name in ("alexnet", "vit_small") else 32
    model = build(name, side=side).eval().requires_grad_(False)
    network = cut_network(model, inputs_of(name, side))
    engine = shipped_engine(network)
    batch = batch_of(name, 8, side)
    with torch.no_grad():
        expected = model(*batch)
    wrong = []
    for cut in network.cuts[1:]:
        features = crossed(engine, batch, cut)
        assert not cut.is_relu or (features[0] >= 0).all(), cut.name
        if not torch.equal(network.head(finished(network, cut, features)), expected):
            wrong.append(cut.name)
    assert wrong == []


@pytest.mark.parametrize("frozen", sampled(IMAGES, USUAL), indirect=True)
def test_an_answer_does_not_depend_on_company_or_place_in_the_batch(frozen):
    name, _, _, network = frozen
    engine = shipped_engine(network)
    [batch] = batch_of(name, 24)
    last = network.frost_line.number
    first, second = (engine.run(batch[start : start + 16].numpy(), last)[0] for start in (0, 8))
    padded = engine.run(np.concatenate([batch[8:16].numpy(), np.zeros_like(batch[:8].numpy())]), last)[0]
    assert (first[8:] == second[:8]).all()
    assert (padded[:8] == second[:8]).all()


@pytest.mark.parametrize("frozen", sampled(NETWORKS, (*USUAL, "bert")), indirect=True)
def test_a_network_that_is_cut_shipped_and_trained_is_the_network(frozen):
    """Features over the wire, losses, gradients, BatchNorm statistics and dropout, in train and in eval mode."""
    name, plain, model, network = frozen
    assert network.fallback is None
    engine = shipped_engine(network)
    batch, labels = batch_of(name, 8), torch.arange(8) % 2
    features, *others = (finished(network, cut, sent(crossed(engine, batch, cut))) for cut in earlier_cuts(network))
    assert all(torch.equal(feature, two) for other in others for feature, two in zip(features, other, strict=True))
    kept = [feature.clone() for feature in features]
    network.head.train()
    ours, theirs = (
        torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad], 0.05)
        for module in (network.head, plain)
    )
    for step in range(2):
        losses = []
        for optimizer, run in ((ours, lambda: network.head(features)), (theirs, lambda: plain(*batch))):
            torch.manual_seed(step)
            answer = run()
            loss = torch.nn.functional.cross_entropy(scores(answer), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((type(answer), loss.item()))
        assert losses[0] == losses[1]
    assert all(torch.equal(feature, two) for feature, two in zip(features, kept, strict=True)), (
        "features were overwritten"
    )
    trained = plain.state_dict()
    assert all(torch.equal(value, trained[key]) for key, value in model.state_dict().items())
    network.head.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(scores(network.head(features)), scores(plain(*batch)))
