"""A channels-last network is cut like any other: its values are sent in the order of their memory, uncopied."""

import json

import pytest
import torch
from safetensors.torch import load, save

from frostline.core import Ref
from frostline.core.errors import UnsafeArtifact
from frostline.models import cut_network, freeze
from frostline.models.artifact import read_prefix, write_prefix
from support.cutting import crossed, finished, shipped_engine
from support.matrices import sampled
from support.networks import Small, build

SHAPE = (3, 32, 32)


def channels_last(name):
    return build(name).to(memory_format=torch.channels_last).eval()


@pytest.mark.parametrize("name", sampled(["mobilenet_v3_large", "resnet18"], usual=("resnet18",)))
def test_every_cut_gives_the_answer_of_the_channels_last_network_to_the_bit(name):
    model = channels_last(name).requires_grad_(False)
    network = cut_network(model, SHAPE)
    engine = shipped_engine(network)
    batch = torch.randn(8, *SHAPE)
    with torch.no_grad():
        expected = model(batch)
        assert torch.equal(model(batch.to(memory_format=torch.channels_last)), expected)
    for cut in network.cuts[1:]:
        features = finished(network, cut, crossed(engine, [batch], cut))
        assert torch.equal(network.head(features), expected), cut.name


def test_it_has_the_cuts_of_the_same_network_in_the_usual_order():
    turned, usual = (
        cut_network(model.requires_grad_(False), SHAPE)
        for model in (channels_last("resnet18"), build("resnet18").eval())
    )
    assert [cut.name for cut in turned.cuts] == [cut.name for cut in usual.cuts]
    assert [cut.bytes_per_sample for cut in turned.cuts] == [cut.bytes_per_sample for cut in usual.cuts]
    assert [cut.is_relu for cut in turned.cuts] == [cut.is_relu for cut in usual.cuts]


def test_channels_are_last_in_what_crosses():
    network = cut_network(channels_last("resnet18").requires_grad_(False), SHAPE)
    cut = next(cut for cut in network.cuts if cut.name == "layer2.0.relu:relu")
    assert cut.shapes == ((4, 4, 128),)


def test_its_head_trains_to_the_same_gradients():
    model = freeze(Small().to(memory_format=torch.channels_last).train(), "stem", input_shape=SHAPE)
    batch = torch.randn(8, *SHAPE)
    network = cut_network(model, SHAPE)
    [features] = crossed(shipped_engine(network), [batch], network.frost_line)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = []
    for run in (lambda: network.head(features), lambda: model(batch)):
        torch.manual_seed(0)
        found.append(torch.autograd.grad(run().square().sum(), trained))
    assert all(torch.equal(item, two) for item, two in zip(*found, strict=True))


def test_weights_keep_the_order_of_their_memory_on_the_way():
    prefix = cut_network(channels_last("resnet18").requires_grad_(False), SHAPE).prefix
    read = read_prefix(write_prefix(prefix))
    assert {name: tensor.stride() for name, tensor in read.tensors.items()} == {
        name: tensor.stride() for name, tensor in prefix.tensors.items()
    }
    assert all(torch.equal(read.tensors[name], prefix.tensors[name]) for name in prefix.tensors)


def test_nothing_is_computed_or_copied_for_it():
    network = cut_network(channels_last("resnet18").requires_grad_(False), SHAPE)
    extra = {node.op for node in network.prefix.graph.nodes if node.args and node.args[0] == Ref("relu_")}
    assert extra == {"aten.permute.default"}
    assert "aten.clone.default" not in {node.op for node in network.prefix.graph.nodes}


@pytest.mark.parametrize("order", [[0, 2, 3, 3], [0, 1], [0, 2, 3, 4], "0123", [0, 2, 3, True]])
def test_refuses_an_invalid_order(order):
    body = write_prefix(
        cut_network(Small().to(memory_format=torch.channels_last).eval().requires_grad_(False), SHAPE).prefix
    )
    length = int.from_bytes(body[:8], "little")
    graph = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["frostline.prefix"])
    name = next(iter(graph["orders"]))
    graph["orders"][name] = order
    with pytest.raises(UnsafeArtifact):
        read_prefix(save(load(body), metadata={"frostline.prefix": json.dumps(graph)}))
