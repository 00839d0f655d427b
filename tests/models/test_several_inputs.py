"""Networks that take several tensors, whole numbers among them, are cut like those that take pixels."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from frostline.core import TensorSpec
from frostline.core.errors import BadRequest, ModelError, UnsafeArtifact
from frostline.engines.graph_runner import leaf_values
from frostline.engines.measure import cut_values, timed_run
from frostline.models import cut_network, freeze
from frostline.models.tracing import takes_parts
from frostline.preprocess.steps import place_inputs
from support.cutting import crossed, finished, shipped_engine

WORDS, LENGTH = 100, 12
TEXT = (TensorSpec((LENGTH,), "int64"), TensorSpec((LENGTH,), "int64"))


def tiny_bert(layers=3):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_hidden_layers=layers, **sizes)).train()


def text(rows=8):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, LENGTH + 1, (rows, 1), generator=generator)
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
    return [ids, (torch.arange(LENGTH)[None] < lengths).long()]


def frozen_bert():
    return freeze(tiny_bert(), "bert.encoder.layer.1", input_shape=TEXT)


def test_between_the_layers_of_bert_hidden_state_and_raw_mask_cross():
    network = cut_network(frozen_bert(), TEXT)
    cut = network.frost_line
    assert cut.name.startswith("bert.encoder.layer.1")
    assert cut.shapes == ((LENGTH, 32), (LENGTH,))
    assert cut.dtypes == ("float32", "bool")
    assert cut.bytes_per_sample == LENGTH * 32 * 4 + LENGTH


def test_bert_answers_from_every_cut_what_it_answers_whole():
    model = frozen_bert()
    whole = copy.deepcopy(model)
    network = cut_network(model, TEXT)
    engine = shipped_engine(network)
    batch = text()
    for cut in network.cuts[1:]:
        features = finished(network, cut, crossed(engine, batch, cut))
        answers = []
        for run in (lambda given=features: network.head(given), lambda: whole(*batch)):
            torch.manual_seed(5)
            answers.append(run())
        assert type(answers[0]) is type(answers[1])
        assert torch.equal(answers[0].logits, answers[1].logits), cut.name


def test_sends_one_tensor_once_the_mask_is_no_longer_needed():
    network = cut_network(tiny_bert().eval().requires_grad_(False), TEXT)
    pooled = next(cut for cut in network.cuts if cut.name == "bert.pooler:select")
    assert pooled.shapes == ((32,),)
    assert pooled.bytes_per_sample == 128


def test_the_first_cut_of_such_a_network_is_its_inputs():
    first = cut_network(frozen_bert(), TEXT).cuts[1]
    assert first.name == "inputs"
    assert first.tensors == ("input_ids", "attention_mask")
    assert first.bytes_per_sample == 2 * LENGTH * 8


def test_seconds_and_values_at_the_cuts_are_measured_with_all_inputs():
    prefix = cut_network(frozen_bert(), TEXT).prefix
    leaves = leaf_values(prefix.graph, prefix.tensors)
    batch = [item.numpy() for item in text()]
    clock = iter(range(10_000))
    seconds = timed_run(prefix.graph, leaves, prefix.cuts, batch, repeats=2, clock=lambda: next(clock))[0]
    assert seconds.shape == (2, len(prefix.cuts))
    values = cut_values(prefix.graph, leaves, prefix.cuts, batch)
    mask = values[prefix.cuts[-1].number][1]
    assert (mask == batch[1].astype(bool)).all()


def test_a_word_that_the_network_does_not_know_is_a_sentence():
    network = cut_network(frozen_bert(), TEXT)
    engine = shipped_engine(network)
    ids, mask = (item.numpy() for item in text())
    for wrong in (ids + WORDS, ids - WORDS):
        with pytest.raises(UnsafeArtifact, match="does not run on these samples"):
            engine.run([wrong, mask], network.frost_line.number)


@pytest.mark.parametrize("change", [lambda ids, mask: [ids], lambda ids, mask: [ids, mask.astype(np.int32)]])
def test_inputs_of_another_number_or_dtype_are_refused(change):
    network = cut_network(frozen_bert(), TEXT)
    ids, mask = (item.numpy() for item in text())
    with pytest.raises(BadRequest, match="the prefix takes inputs"):
        shipped_engine(network).run(change(ids, mask), network.frost_line.number)


def test_the_memory_on_both_sides_is_known():
    network = cut_network(frozen_bert(), TEXT)
    engine = shipped_engine(network)
    hidden = LENGTH * 32 * 4
    assert all(engine.footprint(cut.number).bytes_per_sample > hidden for cut in network.cuts[2:])
    assert engine.remaining_footprint(2).bytes_per_sample > hidden
    assert engine.remaining_footprint(network.frost_line.number).bytes_per_sample == 0


@pytest.mark.parametrize("inputs", [(), (TensorSpec((4,), "complex64"),), (TensorSpec((4,)), 3)])
def test_inputs_that_cannot_be_carried_are_named(inputs):
    with pytest.raises(ModelError, match="inputs must be tensors of"):
        cut_network(nn.Linear(4, 2), inputs)


class Pair(nn.Module):
    """Two images, of which one is needed until late."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2).requires_grad_(False)
        self.second = nn.Conv2d(1, 4, 3, stride=2).requires_grad_(False)
        self.fc = nn.Linear(4, 2)

    def forward(self, image, depth):
        hidden = torch.relu(self.first(image))
        return self.fc((hidden * torch.sigmoid(self.second(depth))).mean((2, 3)))


def test_sends_an_input_that_later_layers_need_unchanged():
    model = Pair()
    network = cut_network(model, (TensorSpec((3, 16, 16)), TensorSpec((1, 16, 16))))
    assert any("depth" in cut.tensors for cut in network.cuts[2:])
    engine = shipped_engine(network)
    batch = [torch.rand(8, 3, 16, 16), torch.rand(8, 1, 16, 16)]
    expected = model(*batch)
    for cut in network.cuts[1:]:
        features = finished(network, cut, crossed(engine, batch, cut))
        assert torch.equal(network.head(features), expected), cut.name


class Twins(nn.Module):
    """One frozen encoder for several images of a sample, as in siamese and triplet networks."""

    gain = 1.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projection = nn.Linear(6, 4)
        self.encoder.requires_grad_(False)

    def forward(self, anchor, positive, negative=None):
        images = [image for image in (anchor, positive, negative) if image is not None]
        found = [self.projection(self.encoder(image * self.gain)) for image in images]
        return nn.functional.cosine_similarity(found[0], found[1]) - (found[-1] - found[0]).square().sum(1)


@pytest.mark.promise("equal", mended="both images of a pair had the features of the first one")
@pytest.mark.parametrize("names", [("anchor", "positive"), ("negative", "anchor", "positive")])
def test_each_image_of_a_pair_or_a_triplet_has_its_own_features(names):
    places = place_inputs((name, TensorSpec((3, 9, 9), "float32")) for name in names)
    samples = np.zeros((8, places[-1].end), np.int64)
    given = {name: torch.randn(8, 3, 9, 9) for name in names}
    for place in places:
        for row, image in zip(samples, given[place.name], strict=True):
            place.within(row)[...] = image.numpy()
    plain, model = Twins(), Twins()
    network = cut_network(takes_parts(model, places), (TensorSpec(samples.shape[1:], "int64"),))
    assert len(network.frost_line.tensors) == len(names)
    features = crossed(shipped_engine(network), [torch.from_numpy(samples)], network.frost_line)
    for run in (lambda: network.head(features), lambda: plain(**given)):
        run().sum().backward()
    assert torch.allclose(network.head(features), plain(**given), rtol=1e-6, atol=1e-6)
    assert torch.allclose(model.projection.weight.grad, plain.projection.weight.grad, rtol=1e-5, atol=1e-6)
    assert network.head.makes_the_same_()
    model.gain = 2.0
    assert not network.head.makes_the_same_(), "other numbers are seen in what the check makes up"


class Chosen(nn.Module):
    """Uses a text's first word and the one behind which it ends, as text encoders of CLIP do; both are frozen."""

    END = 9

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 8).requires_grad_(False)
        self.first, self.last = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, ids):
        hidden = torch.tanh(self.words(ids))
        first, last = hidden[:, 0], hidden[torch.arange(len(ids)), (ids == self.END).int().argmax(-1)]
        return self.first(first) + self.last(last)


@pytest.mark.promise("equal", mended="two tensors that were alike in all trials were taken for one")
@pytest.mark.parametrize("is_known", [False, True])
def test_tensors_that_no_made_up_sample_tells_apart_are_left_to_the_network(is_known):
    model = Chosen()
    model.END = 1 if is_known else Chosen.END
    network = cut_network(model, (TensorSpec((LENGTH,), "int64"),))
    ids = torch.randint(2, WORDS, (8, LENGTH))
    ids[torch.arange(8), 1 + torch.arange(8) % 5] = model.END
    assert ("two tensors at its frost line are the same for all samples" in (network.fallback or "")) != is_known
    features = [ids] if network.prefix is None else crossed(shipped_engine(network), [ids], network.frost_line)
    assert torch.allclose(network.head(features), model(ids), rtol=1e-6, atol=1e-6)
