"""Networks with several inputs by name and several frozen encoders: the same losses as a plain loop of PyTorch."""

import numpy as np
import pytest
import torch

from frostline import Dataset, LoaderSettings, NodeSettings, loader, offload, preprocess
from frostline.node.process.subprocess import start_node
from support.pairs import COLUMNS, SIDE, TOKENS, frozen_clip, pair_inputs, write_pairs
from support.texts import tokenizer_of_words

SMALL = NodeSettings(memory_bytes=1 << 29, device_batch=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs")
    write_pairs(path / "train.parquet")
    return path


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    """The inputs of all samples, as somebody makes them who loads each column by itself."""
    from transformers import PreTrainedTokenizerFast

    images = Dataset(folder, cache=tmp_path_factory.mktemp("cache"), column="image")
    pixels = [batch.features for batch in loader(images, 8, preprocess=preprocess.imagenet(SIDE), node=SMALL)]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of_words(), pad_token="[PAD]")
    captions = write_pairs(tmp_path_factory.mktemp("again") / "train.parquet")
    some = tokenizer(captions, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    names = ("input_ids", "attention_mask")
    return {"pixel_values": torch.cat(pixels), **{name: some[name] for name in names}}


def pairs_of(folder, tmp_path):
    return Dataset(folder, cache=tmp_path / "cache", column=COLUMNS)


def contrasted(scores):
    """The loss of CLIP: each image belongs to its own caption, and the reverse."""
    own = torch.arange(len(scores))
    return (torch.nn.functional.cross_entropy(scores, own) + torch.nn.functional.cross_entropy(scores.t(), own)) / 2


def trained(parameters):
    return torch.optim.SGD([value for value in parameters if value.requires_grad], lr=0.1)


def step(loss, optimiser):
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return loss.item()


def job_losses(job, data, epochs, *, loss=lambda output, batch: contrasted(output)):
    """The losses of a job's head, and the rows of each batch."""
    places = {id: row for row, id in enumerate(data.samples.ids.tolist())}
    optimiser = trained(job.head.parameters())
    losses, orders = [], []
    for epoch in epochs:
        for batch in job.loader(batch_size=8, shuffle=True, seed=3, epoch=epoch):
            losses.append(step(loss(job.head(batch.features), batch), optimiser))
            orders.append([places[id] for id in batch.ids.tolist()])
    return losses, orders


def plain_losses(model, inputs, orders):
    """What a loop over the whole network loses in that order."""
    optimiser = trained(model.parameters())
    outputs = (model(**{name: values[rows] for name, values in inputs.items()}) for rows in orders)
    return [step(contrasted(output.logits_per_image), optimiser) for output in outputs]


def test_inputs_are_those_of_each_column_by_itself(folder, plain, tmp_path):
    batches = loader(pairs_of(folder, tmp_path), 8, preprocess=pair_inputs(), node=SMALL)
    found = [pair_inputs().unpacked(batch.features) for batch in batches]
    assert set(found[0]) == set(plain)
    for name, meant in plain.items():
        assert torch.equal(torch.cat([inputs[name] for inputs in found]), meant), name


@pytest.mark.parametrize("cut", [None, 0, 1])
def test_losses_of_clip_with_two_frozen_towers_are_those_of_a_plain_loop(folder, plain, tmp_path, cut):
    data, model, twin = pairs_of(folder, tmp_path), frozen_clip(), frozen_clip()
    settings = LoaderSettings(follow=False)
    with offload(model, data, preprocess=pair_inputs(), cut=cut, settings=settings, node=SMALL) as job:
        assert job.fallback is None
        assert job.frost_line.shapes == ((16,), (16,)), "both encoders' outputs cross, and nothing else"
        losses, orders = job_losses(job, data, range(2))
    np.testing.assert_allclose(losses, plain_losses(twin, plain, orders), atol=1e-6, rtol=0)
    for (name, value), meant in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(value, meant, atol=1e-6, rtol=1e-5, msg=name)


@pytest.fixture(scope="module")
def node(folder):
    """A node in a process of its own."""
    with start_node((str(folder),), SMALL) as process:
        yield process.url


@pytest.mark.parametrize("cut", [None, 1, 2])
def test_a_node_runs_both_towers_and_the_second_epoch_moves_no_bytes(node, folder, plain, tmp_path, cut):
    data, model, twin = pairs_of(folder, tmp_path), frozen_clip(), frozen_clip()
    asked = {"preprocess": pair_inputs(), "near": node, "cut": cut, "settings": LoaderSettings(follow=False)}
    with offload(model, data, **asked) as job:
        assert job.fallback is None
        losses, orders = job_losses(job, data, [0])
        received = job.statistics().wire_bytes
        assert received > 0
        more, later = job_losses(job, data, [1])
        assert job.statistics().wire_bytes == received
    np.testing.assert_allclose([*losses, *more], plain_losses(twin, plain, [*orders, *later]), atol=1e-6, rtol=0)
    assert sorted(row for rows in later for row in rows) == list(range(len(data)))
