"""Networks with several inputs by name and several frozen encoders: the same losses as a plain loop of PyTorch."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from frostline import Dataset, LoaderSettings, NodeSettings, loader, offload, preprocess
from frostline.node import resources as opener
from support.pairs import COLUMNS, SIDE, TOKENS, encoded_image, frozen_clip, pair_inputs, small_clip, write_pairs
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
    found = [pair_inputs().unpack(batch.features) for batch in batches]
    assert set(found[0]) == set(plain)
    for name, meant in plain.items():
        assert torch.equal(torch.cat([inputs[name] for inputs in found]), meant), name


@pytest.mark.parametrize("cut", [None, 0, 1])
def test_losses_of_clip_with_two_frozen_towers_are_those_of_a_plain_loop(folder, plain, tmp_path, cut):
    data, model, twin = pairs_of(folder, tmp_path), frozen_clip(), frozen_clip()
    settings = LoaderSettings(replan=False)
    with offload(model, data, preprocess=pair_inputs(), cut=cut, settings=settings, node=SMALL) as job:
        assert job.fallback is None
        assert job.frost_line.shapes == ((16,), (16,)), "both encoders' outputs cross, and nothing else"
        losses, orders = job_losses(job, data, range(2))
    np.testing.assert_allclose(losses, plain_losses(twin, plain, orders), atol=1e-6, rtol=0)
    for (name, value), meant in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(value, meant, atol=1e-6, rtol=1e-5, msg=name)


def adapted_clip(layers):
    """CLIP with adapters in one layer of each tower; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    adapters = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], layers_to_transform=layers, layers_pattern="layers", lora_dropout=0.0
    )
    model = get_peft_model(small_clip(), adapters)
    for name, value in model.named_parameters():
        if "lora_B" in name:  # which begins with zeros, so that nothing would depend on the other half
            torch.nn.init.normal_(value.data, std=0.1)
    return model


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("cut", [None, 0])
def test_adapters_in_both_towers_leave_the_layers_before_them_to_the_node(folder, plain, tmp_path, cut):
    data, model, twin = pairs_of(folder, tmp_path), adapted_clip([1]), adapted_clip([1])
    with offload(
        model, data, preprocess=pair_inputs(), cut=cut, settings=LoaderSettings(replan=False), node=SMALL
    ) as job:
        assert job.fallback is None
        hidden = [shape for shape in job.frost_line.shapes if len(shape) == 2]
        assert hidden == [(TOKENS, 16), (1 + (SIDE // 8) ** 2, 16)], "one tensor of each tower"
        assert set(job.frost_line.dtypes) == {"float32", "int64", "bool"}, "and the captions with their mask"
        losses, orders = job_losses(job, data, range(2))
    np.testing.assert_allclose(losses, plain_losses(twin, plain, orders), atol=1e-6, rtol=0)


@pytest.fixture
def node(shared_node):
    """Address of a node in a process of its own."""
    return shared_node.url


@pytest.mark.parametrize("cut", [None, 1])
def test_a_node_runs_both_towers_and_the_second_epoch_asks_for_no_sample(node, folder, plain, tmp_path, cut):
    data, model, twin = pairs_of(folder, tmp_path), frozen_clip(), frozen_clip()
    asked = {"preprocess": pair_inputs(), "near": node, "cut": cut, "settings": LoaderSettings(replan=False)}
    # With engines to try a slow machine asks for their trials in the second epoch.
    with offload(model, data, accuracy="exact", **asked) as job:
        assert job.fallback is None
        losses, orders = job_losses(job, data, [0])
        first = job.statistics()
        assert first.wire_bytes > 0
        more, later = job_losses(job, data, [1])
        second = job.statistics()  # whose other bytes are those of a look at the node, now and then
        assert (second.fetched, second.answered) == (first.fetched, first.answered)
    np.testing.assert_allclose([*losses, *more], plain_losses(twin, plain, [*orders, *later]), atol=1e-6, rtol=0)
    assert sorted(row for rows in later for row in rows) == list(range(len(data)))


@pytest.mark.parametrize("cut", [None, 1])
def test_features_may_be_narrowed_and_no_part_of_a_sample_is(node, folder, plain, tmp_path, cut):
    data, model, twin = pairs_of(folder, tmp_path), frozen_clip(), frozen_clip()
    settings = LoaderSettings(replan=False, measure_first=cut is None)
    with offload(model, data, preprocess=pair_inputs(), near=node, cut=cut, settings=settings, accuracy="fp16") as job:
        losses, orders = job_losses(job, data, [0])
    np.testing.assert_allclose(losses, plain_losses(twin, plain, orders), atol=1e-6 if cut == 1 else 1e-2, rtol=0)


def test_a_node_without_tokenizers_leaves_all_of_it_to_the_trainer(folder, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(opener, "has_tokenizers", lambda: False)
    data, model, twin = pairs_of(folder, tmp_path), frozen_clip(), frozen_clip()
    with offload(model, data, preprocess=pair_inputs(), node=SMALL, on_event=lambda _: None) as job:
        assert "no package tokenizers" in job.fallback
        losses, orders = job_losses(job, data, [0])
    np.testing.assert_allclose(losses, plain_losses(twin, plain, orders), atol=1e-6, rtol=0)


def test_a_sample_with_a_broken_part_is_skipped_and_the_part_named(tmp_path):
    (tmp_path / "data").mkdir()
    draw = np.random.default_rng(0)
    images = [encoded_image(draw), b"no image", encoded_image(draw), encoded_image(draw)] * 2
    captions = [b"good film", b"bad film", b"\xff\xfe", b"a film"] * 2
    pq.write_table(pa.table({"image": images, "caption": captions}), tmp_path / "data" / "x.parquet")
    asked = {"settings": LoaderSettings(max_skipped_fraction=0.5), "node": SMALL, "on_event": lambda _: None}
    with offload(None, pairs_of(tmp_path / "data", tmp_path), preprocess=pair_inputs(), **asked) as job:
        assert sum(len(batch) for batch in job.loader(batch_size=4)) == 4
        reasons = {skipped.reason.partition(":")[0] for skipped in job.statistics().skipped}
    assert reasons == {"pixel_values", "input_ids"}


def test_workers_of_a_data_loader_make_the_same_inputs(folder, plain, tmp_path):
    with offload(None, pairs_of(folder, tmp_path), preprocess=pair_inputs(), node=SMALL) as job:
        found = [batch.features for batch in DataLoader(job.loader(8), batch_size=None, num_workers=1)]
    assert torch.equal(pair_inputs().unpack(torch.cat(found))["pixel_values"], plain["pixel_values"])


def test_arrays_for_other_frameworks_come_apart_by_name_too(folder, plain, tmp_path):
    with offload(None, pairs_of(folder, tmp_path), preprocess=pair_inputs(), node=SMALL) as job:
        found = [pair_inputs().unpack(batch.features) for batch in job.arrays(8)]
    for name, meant in plain.items():
        np.testing.assert_array_equal(np.concatenate([inputs[name] for inputs in found]), meant.numpy())


class ThreeTowers(torch.nn.Module):
    """A network of a user's own, called by keywords alone: each projection is trained, and runs before the next tower.

    It gives its scores and its embeddings, as a dict.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image = torch.nn.Conv2d(3, 6, 4, stride=4)
        self.words = torch.nn.Embedding(64, 5)
        self.signal = torch.nn.Linear(5, 4)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(width, 4) for width in (6, 5, 4))
        self.scores = torch.nn.Linear(4, 3)
        for tower in (self.image, self.words, self.signal):
            tower.requires_grad_(False).eval()

    def forward(self, *, pixel_values, input_ids, attention_mask, signal):
        image = self.projections[0](self.image(pixel_values).mean((2, 3)))
        shown = attention_mask[..., None].to(torch.float32)
        words = self.projections[1]((self.words(input_ids) * shown).sum(1) / shown.sum(1))
        joined = image + words + self.projections[2](torch.relu(self.signal(signal)))
        return {"scores": self.scores(joined), "joined": joined}


def test_three_towers_of_an_own_network_train_as_in_a_plain_loop(folder, plain, tmp_path):
    table = pq.read_table(folder / "train.parquet")
    signals = np.random.default_rng(2).normal(size=(len(table), 5)).astype(np.float32)
    cells = [io.BytesIO() for _ in signals]
    for file, signal in zip(cells, signals, strict=True):
        np.save(file, signal)
    (tmp_path / "data").mkdir()
    table = table.append_column("wave", pa.array([file.getvalue() for file in cells], pa.binary()))
    pq.write_table(table, tmp_path / "data" / "train.parquet", row_group_size=7)
    data = Dataset(tmp_path / "data", cache=tmp_path / "cache", column={**COLUMNS, "signal": "wave"})
    pixels, tokens = pair_inputs().parts
    inputs = preprocess.named_inputs(pixel_values=pixels, input_ids=tokens, signal=preprocess.array((5,)))
    model, twin = ThreeTowers(), ThreeTowers()

    def loss(output, batch):
        return torch.nn.functional.cross_entropy(output["scores"], batch.labels) + output["joined"].square().mean()

    with offload(model, data, preprocess=inputs, node=SMALL, settings=LoaderSettings(replan=False)) as job:
        assert job.fallback is None
        assert sorted(job.frost_line.shapes) == [(4,), (5,), (6,)]
        losses, orders = job_losses(job, data, range(2), loss=loss)
    optimiser, meant = trained(twin.parameters()), []
    labels, values = torch.tensor(data.samples.labels), {**plain, "signal": torch.from_numpy(signals)}
    for rows in orders:
        output = twin(**{name: value[rows] for name, value in values.items()})
        own = torch.nn.functional.cross_entropy(output["scores"], labels[rows]) + output["joined"].square().mean()
        meant.append(step(own, optimiser))
    np.testing.assert_allclose(losses, meant, atol=1e-6, rtol=0)
