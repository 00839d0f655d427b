"""The product's first promise: wherever the network is cut, the answer is the same, to the bit."""

import copy

import numpy as np
import pytest
import torch

from frostline.engines.runner import Runner, leaf_values
from frostline.engines.torch_eager import TorchEngine
from frostline.models import cut_network, freeze
from frostline.models.artifact import read_prefix, write_prefix
from support.networks import NETWORKS, UNTIL, build

SHAPE = (3, 224, 224)


def pixels(rows: int) -> torch.Tensor:
    return torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(7))


def shipped_engine(network) -> TorchEngine:
    prefix = read_prefix(write_prefix(network.prefix))
    return TorchEngine(prefix.graph, prefix.cuts, prefix.tensors)


def run_rest(network, cut, features) -> list[torch.Tensor]:
    rest = network.rest_of_prefix(cut)
    with torch.inference_mode():
        return list(Runner(rest).run(features, leaf_values(rest, network.prefix.tensors)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_cut_of_the_whole_network_gives_the_uncut_answer_to_the_bit(name):
    model = build(name).eval().requires_grad_(False)
    network = cut_network(model, SHAPE)
    engine = shipped_engine(network)
    batch = pixels(8)
    with torch.no_grad():
        expected = model(batch)
    wrong = []
    for cut in network.cuts[1:]:
        crossed = [torch.from_numpy(one) for one in engine.run(batch.numpy(), cut.number)]
        assert sum(one[0].numel() * one.element_size() for one in crossed) == cut.bytes_per_sample
        if not torch.equal(network.head(run_rest(network, cut, crossed)), expected):
            wrong.append(cut.name)
    assert wrong == []


@pytest.mark.parametrize("name", NETWORKS)
def test_a_samples_answer_does_not_depend_on_its_company_or_place_in_the_device_batch(name):
    model = build(name).eval().requires_grad_(False)
    network = cut_network(model, SHAPE)
    engine = shipped_engine(network)
    batch = pixels(24)
    last = network.frost_line.number
    first, second = (engine.run(batch[start : start + 16].numpy(), last)[0] for start in (0, 8))
    padded = engine.run(np.concatenate([batch[8:16].numpy(), np.zeros((8, *SHAPE), np.float32)]), last)[0]
    assert (first[8:] == second[:8]).all()
    assert (padded[:8] == second[:8]).all()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NETWORKS)
def test_training_the_head_is_training_the_network(name):
    """Losses, gradients, BatchNorm statistics and dropout are the plain loop's, in train and in eval mode."""
    model = freeze(build(name).train(), UNTIL[name])
    plain = copy.deepcopy(model)
    network = cut_network(model, SHAPE)
    engine = shipped_engine(network)
    batch, labels = pixels(16), torch.arange(16) % 10
    features = [torch.from_numpy(one) for one in engine.run(batch.numpy(), network.frost_line.number)]
    kept = [one.clone() for one in features]
    ours, theirs = (
        torch.optim.SGD([one for one in module.parameters() if one.requires_grad], 0.05)
        for module in (network.head, plain)
    )
    network.head.train()
    for step in range(3):
        losses = []
        for optimizer, run in ((ours, lambda: network.head(features)), (theirs, lambda: plain(batch))):
            torch.manual_seed(step)
            loss = torch.nn.functional.cross_entropy(run(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert all(torch.equal(one, two) for one, two in zip(features, kept, strict=True)), "features were overwritten"
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in model.state_dict().items())
    network.head.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(network.head(features), plain(batch))
