"""Bytes that cross, at 224 x 224 pixels in float32: what the cuts are for. And networks of three libraries."""

import pytest
import torch

from frostline.models import cut_network, freeze
from support.cutting import crossed, finished, shipped_engine
from support.matrices import sampled
from support.networks import build

PIXELS = 3 * 224 * 224 * 4


@pytest.mark.parametrize(
    ("name", "until", "place", "nbytes"),
    sampled(
        [
            ("alexnet", "features", "flatten", 36_864),
            ("convnext_tiny", "features", "classifier.0:permute", 3_072),
            ("densenet121", "features", "flatten", 4_096),
            ("efficientnet_lite0", "features", "view", 5_120),
            ("mobilenet_v3_large", "features", "flatten", 3_840),
            ("resnet18", "features", "flatten", 2_048),
            ("resnet50", "features", "flatten", 8_192),
            ("vgg19", "features", "flatten", 100_352),
            ("vit_small", "features", "select", 1_536),
        ],
        usual=("alexnet", "resnet18"),
    ),
)
def test_the_frost_line_lies_where_least_crosses(name, until, place, nbytes):
    """Behind pooling, flattening and the choice of the class token, which are no modules."""
    network = cut_network(freeze(build(name, side=224).train(), until), (3, 224, 224))
    assert network.frost_line.name.endswith(place)
    assert network.frost_line.bytes_per_sample == nbytes
    assert network.cuts[1].bytes_per_sample == PIXELS
    assert network.fallback is None


def test_behind_the_first_dense_layer_of_alexnet_16_kilobytes_cross():
    """The dropout between its frozen layers is off; that behind the frost line is the head's and stays on."""
    model = freeze(build("alexnet").train(), "classifier.2")
    network = cut_network(model, (3, 224, 224))
    assert (network.frost_line.name, network.fallback) == ("classifier.2:relu", None)
    assert network.frost_line.bytes_per_sample == 16_384
    assert network.frost_line.is_relu
    assert [model.classifier[place].training for place in (0, 3)] == [False, True]


def test_sends_only_the_class_token_behind_a_vision_transformer():
    network = cut_network(build("vit_small", side=224).eval().requires_grad_(False), (3, 224, 224))
    minimum = min(network.cuts[1:-1], key=lambda cut: cut.bytes_per_sample)
    assert minimum.shapes == ((384,),)


@pytest.mark.long
def test_a_vgg_ships_a_quarter_behind_its_last_pooling():
    cuts = {cut.name: cut for cut in cut_network(freeze(build("vgg19").train(), "features"), (3, 224, 224)).cuts}
    assert cuts["features.35:relu"].bytes_per_sample == 401_408
    assert cuts["features.36:max_pool2d"].bytes_per_sample == 100_352
    assert cuts["features.36:max_pool2d"].is_relu


SIDE = 96


def from_transformers(name, config, **sizes):
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


def from_timm(name):
    import timm

    torch.manual_seed(0)
    return timm.create_model(name)


SMALL = {"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 192, "image_size": SIDE}
LIBRARIES = {
    "hf ViT": lambda: from_transformers("ViTForImageClassification", "ViTConfig", num_hidden_layers=2, **SMALL),
    "hf DeiT": lambda: from_transformers("DeiTForImageClassification", "DeiTConfig", num_hidden_layers=2, **SMALL),
    "hf ConvNext": lambda: from_transformers(
        "ConvNextForImageClassification", "ConvNextConfig", depths=[1, 1, 1, 1], hidden_sizes=[16, 24, 32, 40]
    ),
    "hf Swin": lambda: from_transformers(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=SIDE,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=3,
    ),
    "hf ResNet": lambda: from_transformers(
        "ResNetForImageClassification", "ResNetConfig", depths=[1, 1], hidden_sizes=[16, 24], embedding_size=8
    ),
    "timm RegNet": lambda: from_timm("regnety_002"),
    "timm MobileNetV4": lambda: from_timm("mobilenetv4_conv_small_035"),
    "timm GhostNet": lambda: from_timm("ghostnet_050"),
}


@pytest.mark.parametrize("name", sampled(LIBRARIES, usual=("hf ViT", "hf Swin", "timm MobileNetV4")))
def test_networks_of_transformers_and_timm_return_from_any_cut_what_they_return(name):
    inputs = (3, SIDE, SIDE)
    model = freeze(LIBRARIES[name]().train(), "features", input_shape=inputs)
    network = cut_network(model, inputs)
    engine = shipped_engine(network)
    batch = torch.randn(8, *inputs)
    model.eval()
    with torch.no_grad():
        expected = model(batch)
        for cut in network.cuts[1::3]:
            answer = network.head(finished(network, cut, crossed(engine, [batch], cut)))
            assert type(answer) is type(expected)
            assert torch.equal(getattr(answer, "logits", answer), getattr(expected, "logits", expected)), cut.name
