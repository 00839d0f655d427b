"""Where adapters go, what is refused, and that the merged network computes what the adapted one does."""

import pytest
import torch

from frostline.core.errors import SettingError
from frostline.models.cutting import cut_network
from frostline.models.freezing import freeze
from frostline.training.lora import add_adapters, check_trained, merged_state
from frostline.training.recipe import LowRank
from support.networks import Blocks

SHAPE = (3, 32, 32)
_LINEAR = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


def adapted(text="layers.2-3:r=4", until="layers.1"):
    model = Blocks()
    add_adapters(model, LowRank.parse(text), SHAPE, seed=0)
    freeze(model, until, input_shape=SHAPE)
    check_trained(model, until)
    return model


def test_a_place_is_read_with_its_range_rank_scale_and_dropout():
    assert LowRank.parse("layers.9-11:r=8") == LowRank(
        modules=("layers.9", "layers.10", "layers.11"), rank=8, alpha=8.0, dropout=0.0
    )
    found = LowRank.parse("stem, vit.layers.3:r=2, alpha=16, dropout=0.1")
    assert found == LowRank(modules=("stem", "vit.layers.3"), rank=2, alpha=16.0, dropout=0.1)
    assert found.has("vit.layers.3.mlp.fc1")
    assert found.has("encoder.stem")
    assert not found.has("vit.layers.31.mlp")


@pytest.mark.parametrize(
    "text",
    ["", "layers", "layers:8", "layers.3:r=0", "layers.3-1:r=8", ":r=8", "a:r=x", "a:r=8,b=2", "a:r=8,dropout=1"],
)
def test_anything_else_is_refused_with_the_way_to_say_it(text):
    with pytest.raises(SettingError, match=r"such as layers\.10-11:r=8"):
        LowRank.parse(text)


def test_adapters_and_the_classifier_alone_are_trained():
    model = adapted()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"fc.weight", "fc.bias"} | {
        f"layers.{layer}.linear.lora_{half}.default.weight" for layer in (2, 3) for half in "AB"
    }


def test_the_merged_network_gives_what_the_adapted_one_gives():
    model, plain = adapted("layers.2-3:r=4,alpha=12"), Blocks()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    plain.load_state_dict(merged_state(model))
    batch = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    ours, merged, before = model.eval()(batch), plain.eval()(batch), Blocks().eval()(batch)
    torch.testing.assert_close(merged, ours)
    assert (before - ours).abs().max() > 0.01


def test_a_transformer_with_adapters_is_cut_where_it_is_without_them():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=4)
    add_adapters(model, LowRank.parse("blocks.2-3:r=2"), SHAPE, seed=0)
    freeze(model, "blocks.1", input_shape=SHAPE)
    adapted_layers = [path for path, module in model.named_modules() if hasattr(module, "base_layer")]
    assert adapted_layers == [f"blocks.{block}.{name}" for block in (2, 3) for name in _LINEAR]
    network = cut_network(model.train(), SHAPE, frozen_in_eval=True)
    assert network.fallback is None
    assert network.frost_line.name.startswith("blocks.1")


@pytest.mark.parametrize(
    ("text", "until", "words"),
    [
        ("layers.7:r=4", "layers.1", r"'layers.7' is no module of the network; .* layers.2.linear, layers.3.linear"),
        ("layers.2.norm:r=4", "layers.1", "'layers.2.norm' has no linear layer or convolution that takes an adapter"),
        ("layers.1-2:r=4", "layers.1", "the adapter of layers.1.linear lies before the end of 'layers.1'"),
        ("fc:r=4", "layers.1", "'fc' has no linear layer or convolution"),
    ],
)
def test_what_takes_no_adapter_is_refused_with_modules_that_do(text, until, words):
    with pytest.raises(SettingError, match=words):
        adapted(text, until)


def test_layers_whose_weights_are_read_without_running_them_take_none():
    model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.nn.Linear(8, 2))
    with pytest.raises(SettingError, match=r"modules that take one are 0\.linear1, 0\.linear2 "):
        add_adapters(model, LowRank.parse("0.self_attn:r=2"), (3, 8), seed=0)
