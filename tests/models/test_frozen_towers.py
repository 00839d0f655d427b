"""Networks that take several inputs by name, or have several encoders, are frozen by ``freeze`` as by hand."""

import pytest
import torch
from torch import nn

from frostline import preprocess
from frostline.core import TensorSpec
from frostline.core.errors import ModelError, SettingError, UnknownLayer
from frostline.models import cut_network, freeze
from frostline.models.tracing import takes_parts
from support.pairs import TOKENS, pair_inputs, small_clip
from support.texts import tokenizer_of_words


class Pair(nn.Module):
    """Two encoders in turn, the first one's projection between them, called by keywords in any order."""

    def __init__(self):
        super().__init__()
        self.sound = nn.ModuleDict({"stem": nn.Linear(5, 4), "body": nn.Linear(4, 4), "drop": nn.Dropout(0.5)})
        self.sound_projection = nn.Linear(4, 3)
        self.signal = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.spare, self.offset = nn.Linear(2, 2), nn.Parameter(torch.zeros(4))
        self.scores = nn.Linear(3, 2)

    def forward(self, *, signal, sound):
        stem = self.sound["stem"](sound) + self.offset
        projected = self.sound_projection(self.sound["body"](torch.relu(stem)))
        return self.scores(projected + self.signal(signal))


BY_NAME = {"sound": TensorSpec((5,)), "signal": TensorSpec((6,))}


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def owners(model):
    return {name.rpartition(".")[0] for name in trained(model)}


def test_inputs_are_given_by_name_whatever_their_order_in_forward():
    model = freeze(Pair().train(), "sound_projection", input_shape=BY_NAME)
    assert owners(model) == {"signal.0", "signal.1", "signal.2", "spare", "scores"}
    model = freeze(Pair().train(), "features", input_shape=dict(reversed(BY_NAME.items())))
    assert owners(model) == {"scores"}


def test_each_of_several_encoders_is_frozen_up_to_its_layer():
    model = freeze(Pair().train(), ["sound.body", "signal.1"], input_shape=BY_NAME)
    assert owners(model) == {"sound_projection", "signal.2", "spare", "scores"}
    assert [model.get_submodule(path).training for path in ("sound.stem", "signal.1", "signal.2")] == [
        False,
        False,
        True,
    ]
    assert not model.offset.requires_grad


def test_what_was_trained_and_what_was_frozen_elsewhere_stays_so():
    model = Pair().train()
    model.spare.requires_grad_(False)
    freeze(model, ("sound.stem", "signal.0"), input_shape=BY_NAME)
    assert owners(model) == {"sound.body", "sound_projection", "signal.1", "signal.2", "scores"} | {""}
    assert "offset" in trained(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_both_towers_of_clip_are_frozen_as_by_hand():
    model = freeze(small_clip().train(), ["vision_model", "text_model"], input_shape=pair_inputs().inputs)
    assert {name.partition(".")[0] for name in trained(model)} == {
        "visual_projection",
        "text_projection",
        "logit_scale",
    }
    assert not model.vision_model.training
    assert not model.text_model.training
    assert model.visual_projection.training


def test_part_of_each_tower_of_clip_is_the_frozen_part_of_a_job():
    until = ["vision_model.encoder.layers.0", "text_model.encoder.layers.0"]
    inputs = pair_inputs()
    model = freeze(small_clip().train(), until, input_shape=inputs.inputs)
    left = {name for name in trained(model) if ".encoder." in name}
    assert left == {name for name, _ in model.named_parameters() if ".encoder.layers.1." in name}
    assert not any("embed" in name or "pre_layrnorm" in name for name in trained(model))
    network = cut_network(takes_parts(model, inputs.input_slots), (inputs.sample,))
    assert network.fallback is None
    # The hidden states of both, and the mask and the ids, by which the later layers of the text's go.
    assert {(5, 16), (TOKENS, 16)} <= set(network.frost_line.shapes)
    crossing = zip(network.frost_line.shapes, network.frost_line.dtypes, strict=True)
    features = [torch.zeros((2, *shape), dtype=getattr(torch, dtype)) for shape, dtype in crossing]
    with torch.no_grad():
        assert network.head.eval()(features).shape == (2, 2), "it is traced in eval mode where no gradients are made"


def test_texts_are_given_by_name_so_that_a_second_parameter_need_not_be_the_mask():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)).train()
    tokens = preprocess.text(tokenizer_of_words(), max_length=8)
    freeze(model, "transformer.h.0", input_shape=tokens.inputs)
    assert not any(parameter.requires_grad for parameter in model.transformer.h[0].parameters())
    assert any(parameter.requires_grad for parameter in model.transformer.h[1].parameters())


@pytest.mark.parametrize(
    ("until", "why"),
    [
        (["sound.body", "signl"], "no layer 'signl'"),
        (["sound.body", "spare"], "layer 'spare' is never run"),
        ([], "no layer is named"),
        (["sound.body", 3], "until takes the name of a layer, such as layer4, not 3"),
        ([b"x"], "until takes the name of a layer, such as layer4, not bytes"),
        (7, "until takes the name of a layer"),
    ],
)
def test_refuses_layers_that_are_none(until, why):
    with pytest.raises((UnknownLayer, SettingError), match=why):
        freeze(Pair(), until, input_shape=BY_NAME)


def test_names_the_arguments_with_which_a_network_does_not_run():
    model = Pair()
    with pytest.raises(ModelError, match=r"does not run on an input of shape \[5\], called waves: .*waves"):
        freeze(model, ["sound.body", "signal.1"], input_shape={"waves": TensorSpec((5,))})
    assert len(trained(model)) == len(list(model.parameters())), "it is left as it was"
