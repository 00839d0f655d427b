"""Texts, classified by networks with frozen layers: the losses of a plain loop, at each text's own length.

Texts from Parquet, classified by a DistilBERT with frozen layers: the same losses as a plain loop.

Texts of several lengths run in buckets in the frozen layers: the losses of a plain padded loop, and less work.
"""

import copy
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from frostline import Dataset, LoaderSettings, NodeSettings, freeze, loader, offload, preprocess
from frostline.core.errors import BadRequest, UnsafeArtifact
from frostline.core.events import SetupWarning
from frostline.core.graph import buckets
from frostline.engines import graph_runner
from frostline.engines.graph_runner import LengthRunner, Runner, leaf_values
from frostline.engines.measure import GraphLimits
from frostline.jobs.partition import PartitionedModel
from frostline.models.artifact import Prefix, header_of, inspect_prefix, read_prefix, write_prefix
from frostline.models.graph import after
from frostline.node import resources as opener
from frostline.node.process import start_node
from support.signals import job_losses, rows_by_id
from support.texts import plain_losses, small_bert, small_distilbert, tokenizer_of_words, write_reviews

TOKENS = 12
FROST_LINE = 8
UNTIL = "distilbert.transformer.layer.0"


@pytest.fixture
def reviews(tmp_path):
    (tmp_path / "data").mkdir()
    texts = write_reviews(tmp_path / "data" / "train.parquet")
    return Dataset(tmp_path / "data", cache=tmp_path / "cache", column="text"), texts


def tokens():
    return preprocess.text(tokenizer_of_words(), max_length=TOKENS)


def frozen(seed=0):
    model = small_distilbert(seed)
    model.dropout.p = 0.0
    for layer in model.modules():  # dropout draws in another order where rows are cached
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    for block in model.distilbert.transformer.layer:
        block.attention.dropout_rate = 0.0
    return freeze(model.train(), UNTIL, input_shape=tokens().inputs)


@pytest.mark.parametrize("cut", [None, 0, 1])
def test_losses_of_the_head_are_those_of_a_plain_loop(reviews, cut):
    data, texts = reviews
    model, twin = frozen(), frozen()
    settings, node = LoaderSettings(replan=False), NodeSettings(memory_bytes=1 << 29, device_batch=8)
    with offload(model, data, preprocess=tokens(), cut=cut, settings=settings, node=node, frozen_in_eval=True) as job:
        assert job.fallback is None
        assert UNTIL in job.frost_line.name
        losses, orders = job_losses(job, rows_by_id(data, "parquet"), range(2))
    meant = plain_losses(twin, texts, data.samples.labels, orders, TOKENS)
    np.testing.assert_allclose(losses, meant, atol=1e-6, rtol=0)
    assert sorted(row for rows in orders[: len(orders) // 2] for row in rows) == list(range(len(texts)))


class LooksAtItsTexts(torch.nn.Module):
    """Decides by its input: nothing of it can be cut."""

    def __init__(self):
        super().__init__()
        self.classifier = frozen()

    def forward(self, input_ids, attention_mask):
        scale = 2.0 if int(input_ids.sum()) > 0 else 1.0
        return self.classifier(input_ids, attention_mask).logits * scale


def test_a_network_that_is_not_cut_gets_the_same_tokens_made_here(reviews):
    data, _ = reviews
    told = []
    with offload(LooksAtItsTexts(), data, preprocess=tokens(), on_event=told.append) as job:
        assert job.fallback
        assert [job.fallback] == [event.reason for event in told if isinstance(event, SetupWarning)]
        found = [batch.features for batch in job.loader(batch_size=8)]
        scores = job.head(found[0])
    with offload(None, data, preprocess=tokens()) as job:
        meant = [batch.features for batch in job.loader(batch_size=8)]
    assert torch.equal(torch.cat(found), torch.cat(meant))
    assert scores.shape[0] == len(found[0])


@pytest.fixture(scope="module")
def node(shared_node, tmp_path_factory):
    """A node in a process of its own, and the folder that it serves."""
    folder = tmp_path_factory.mktemp("served")
    texts = write_reviews(folder / "train.parquet")
    return shared_node.url, folder, texts


@pytest.mark.parametrize("cut", [None, 1, -1])
def test_a_node_tokenizes_and_the_second_epoch_asks_for_no_sample(node, tmp_path, cut):
    url, folder, texts = node
    data, model, twin = Dataset(folder, cache=tmp_path, column="text"), frozen(), frozen()
    settings = LoaderSettings(replan=False)
    cut = FROST_LINE if cut == -1 else cut
    asked = {"preprocess": tokens(), "near": url, "cut": cut, "settings": settings, "frozen_in_eval": True}
    with offload(model, data, **asked) as job:
        assert job.fallback is None
        assert UNTIL in job.frost_line.name
        losses, orders = job_losses(job, rows_by_id(data, "parquet"), range(1))
        first = job.statistics()
        assert first.wire_bytes > 0
        more, later = job_losses(job, rows_by_id(data, "parquet"), range(1))
        second = job.statistics()  # whose other bytes are those of a look at the node, now and then
        assert (second.fetched, second.answered) == (first.fetched, first.answered)
    meant = plain_losses(twin, texts, data.samples.labels, [*orders, *later], TOKENS)
    np.testing.assert_allclose([*losses, *more], meant, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cut", [None, 1])
def test_features_may_be_narrowed_and_token_ids_are_not(node, tmp_path, cut):
    url, folder, texts = node
    data, twin = Dataset(folder, cache=tmp_path, column="text"), frozen()
    settings = LoaderSettings(replan=False, measure_first=cut is None)
    asked = {"preprocess": tokens(), "near": url, "cut": cut, "settings": settings, "frozen_in_eval": True}
    with offload(frozen(), data, accuracy="fp16", **asked) as job:
        losses, orders = job_losses(job, rows_by_id(data, "parquet"), range(1))
    meant = plain_losses(twin, texts, data.samples.labels, orders, TOKENS)
    np.testing.assert_allclose(losses, meant, atol=1e-6 if cut == 1 else 1e-2, rtol=0)


def test_a_node_lists_the_column_for_a_trainer(node, tmp_path):
    url, folder, texts = node
    data = Dataset(folder, cache=tmp_path, column="text", near=url)
    assert len(data) == len(texts)
    batch = next(iter(loader(data, 8, preprocess=tokens())))
    assert batch.features.shape == (8, 2, TOKENS)


def test_workers_of_a_data_loader_tokenize(reviews):
    data, texts = reviews
    small = NodeSettings(memory_bytes=1 << 29, device_batch=8)
    with offload(None, data, preprocess=tokens(), node=small) as job:
        meant = [batch.features for batch in job.loader(8)]
        found = [batch.features for batch in DataLoader(job.loader(8), batch_size=None, num_workers=1)]
    assert torch.equal(torch.cat(found), torch.cat(meant))
    assert len(torch.cat(found)) == len(texts)


def test_a_broken_text_is_skipped_and_named(tmp_path):
    (tmp_path / "data").mkdir()
    table = pa.table({"text": [b"good film", b"\xff\xfe", b"bad film"] * 4, "label": [0, 1, 1] * 4})
    pq.write_table(table, tmp_path / "data" / "x.parquet")
    data = Dataset(tmp_path / "data", cache=tmp_path / "cache", column="text")
    settings = LoaderSettings(max_skipped_fraction=0.5)
    small = NodeSettings(memory_bytes=1 << 29, device_batch=8)
    asked = {"preprocess": tokens(), "settings": settings, "node": small, "on_event": lambda _: None}
    with offload(frozen(), data, frozen_in_eval=True, **asked) as job:
        assert sum(len(batch) for batch in job.loader(batch_size=4)) == 8
        assert len(job.statistics().skipped) == 4


def test_a_node_refuses_a_tokenizer_that_did_not_come_with_the_prefix(reviews):
    data, _ = reviews
    other = preprocess.text(tokenizer_of_words("more"), max_length=TOKENS)
    small = NodeSettings(memory_bytes=1 << 29, device_batch=8)
    asked = {"preprocess": tokens(), "node": small, "cut": 1, "frozen_in_eval": True}
    with offload(frozen(), data, **asked) as job, pytest.raises(BadRequest, match="SHA-256"):
        next(iter(job.loader(8, preprocess=other)))


def test_a_node_without_the_package_leaves_the_work_to_the_trainer(reviews, monkeypatch):
    data, texts = reviews
    monkeypatch.setattr(opener, "has_tokenizers", lambda: False)
    events, model, twin = [], frozen(), frozen()
    small = NodeSettings(memory_bytes=1 << 29, device_batch=8)
    with offload(model, data, preprocess=tokens(), node=small, frozen_in_eval=True, on_event=events.append) as job:
        assert "no package tokenizers" in job.fallback
        losses, orders = job_losses(job, rows_by_id(data, "parquet"), range(1))
    meant = plain_losses(twin, texts, data.samples.labels, orders, TOKENS)
    np.testing.assert_allclose(losses, meant, atol=1e-6, rtol=0)
    assert any("tokenizers" in event.reason for event in events if isinstance(event, SetupWarning))


def test_a_job_without_a_model_gives_tokens(reviews):
    data, _ = reviews
    batch = next(iter(loader(data, 8, preprocess=tokens())))
    assert batch.features.dtype == torch.int64
    assert batch.features.shape == (8, 2, TOKENS)


TOKENS_OF_TEXT_LENGTHS = 60
UNTIL_OF_TEXT_LENGTHS = {"distilbert": "distilbert.transformer.layer.0", "bert": "bert.encoder.layer.0"}
MAKE = {"distilbert": small_distilbert, "bert": small_bert}
LIMITS = GraphLimits(max_nodes=5_000, max_values=50_000, max_run_s=60, max_operation_s=20, operations_per_s=1e10)


def tokens_of_text_lengths(length=TOKENS_OF_TEXT_LENGTHS):
    return preprocess.text(tokenizer_of_words(), max_length=length)


def frozen_of_text_lengths(kind="distilbert", until=None):
    model = MAKE[kind]()
    for module in model.modules():  # dropout draws in another order where rows are cached
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_rate"):
            module.dropout_rate = 0.0
    return freeze(model.train(), until or UNTIL_OF_TEXT_LENGTHS[kind], input_shape=tokens_of_text_lengths().inputs)


def prefix_of(kind="distilbert", *, made=None, **options):
    model = frozen_of_text_lengths(kind) if made is None else made
    return PartitionedModel.of(model, tokens_of_text_lengths(), frozen_in_eval=True, **options).parts.prefix


def batch_of(counts, length=TOKENS_OF_TEXT_LENGTHS):
    rows = torch.zeros((len(counts), 2, length), dtype=torch.int64)
    draw = torch.Generator().manual_seed(0)
    for row, count in zip(rows, counts, strict=True):
        row[0, :count] = torch.randint(1, 40, (count,), generator=draw)
        row[1, :count] = 1
    return rows


def runners(prefix):
    leaves = leaf_values(prefix.graph, prefix.tensors)
    return (
        LengthRunner(prefix.graph, prefix.cuts, leaves, prefix.lengths),
        Runner(prefix.graph, cuts=prefix.cuts),
        leaves,
    )


@pytest.mark.parametrize("kind", UNTIL_OF_TEXT_LENGTHS)
def test_features_of_every_length_are_those_of_padded_texts_and_zeros_behind_them(kind):
    prefix = prefix_of(kind)
    bucketed, whole, leaves = runners(prefix)
    counts = [1, 3, 16, 17, 24, 25, 33, 47, 59, 60]
    batch, lengths = batch_of(counts), buckets(TOKENS_OF_TEXT_LENGTHS)
    for cut in prefix.cuts[1:]:
        if not bucketed.takes(cut.number):
            continue
        found, meant = bucketed.run(batch, cut.number), whole.run([batch], leaves, upto=cut)
        for value, padded in zip(found, meant, strict=True):
            assert value.shape == padded.shape
            assert value.dtype == padded.dtype
    last = prefix.cuts[-1]
    assert bucketed.takes(last.number)
    (hidden, mask), (padded, whole_mask) = bucketed.run(batch, last.number), whole.run([batch], leaves, upto=last)
    assert torch.equal(mask, whole_mask)
    for row, (count, value, meant) in enumerate(zip(counts, hidden, padded, strict=True)):
        bucket = min(length for length in lengths if length >= count)
        np.testing.assert_allclose(value[:count].detach(), meant[:count].detach(), atol=1e-6, err_msg=str(row))
        assert not value[bucket:].any()


@pytest.mark.parametrize("kind", UNTIL_OF_TEXT_LENGTHS)
def test_a_text_of_as_many_tokens_as_the_network_has_positions_is_shortened_too(kind):
    maximum = tokens_of_text_lengths(64)
    model = freeze(MAKE[kind]().train(), UNTIL_OF_TEXT_LENGTHS[kind], input_shape=maximum.inputs)
    prefix = PartitionedModel.of(model, maximum, frozen_in_eval=True).parts.prefix
    bucketed, whole, leaves = runners(prefix)
    batch, last = batch_of([5, 30, 64], 64), prefix.cuts[-1]
    found, meant = bucketed.run(batch, last.number), whole.run([batch], leaves, upto=last)
    np.testing.assert_allclose(found[0][:, :5].detach(), meant[0][:, :5].detach(), atol=1e-6)


def test_features_do_not_depend_on_the_texts_beside_them():
    bucketed, _, _ = runners(prefix := prefix_of())
    counts = [1, 5, 16, 17, 20, 23, 25, 33, 47, 59, 60, 2, 3, 4, 5, 6, 18, 28, 29]
    batch, cut = batch_of(counts), prefix.cuts[-1].number
    with torch.inference_mode():
        together = bucketed.run(batch, cut)
        for row in range(len(counts)):
            alone = bucketed.run(batch[row : row + 1], cut)
            assert all(torch.equal(value[0], other[row]) for value, other in zip(alone, together, strict=True))
        turned = bucketed.run(batch.flip(0), cut)
        assert all(torch.equal(value.flip(0), other) for value, other in zip(turned, together, strict=True))


class _Counting(Runner):
    """Counts the tokens that runs are given."""

    seen: ClassVar[list] = []

    def run(self, inputs, leaves, **options):
        if options.get("upto") is not None:
            self.seen.append((len(inputs[0]), inputs[0].shape[2]))
        return super().run(inputs, leaves, **options)


def test_short_texts_cost_what_their_bucket_holds(monkeypatch):
    monkeypatch.setattr(graph_runner, "Runner", _Counting)
    _Counting.seen = []
    bucketed, _, _ = runners(prefix := prefix_of())
    counts = np.random.default_rng(0).integers(17, TOKENS_OF_TEXT_LENGTHS, 64).tolist()
    _Counting.seen = []
    bucketed.run(batch_of(counts), prefix.cuts[-1].number)
    computed = sum(rows * length for rows, length in _Counting.seen)
    assert 1 - sum(counts) / computed <= 0.13, "with rows that fill a run"
    assert {length for _, length in _Counting.seen} <= set(buckets(TOKENS_OF_TEXT_LENGTHS))
    assert computed < 0.75 * len(counts) * TOKENS_OF_TEXT_LENGTHS


def test_the_file_of_a_prefix_says_how_it_runs_on_fewer_tokens():
    prefix = prefix_of()
    body = write_prefix(prefix)
    assert read_prefix(body).lengths == prefix.lengths
    assert inspect_prefix(header_of(body), max_rows=8, limits=LIMITS).memory


def changed(prefix, change):
    value = prefix.lengths
    return write_prefix(replaced_lengths(prefix, change(value)))


def replaced_lengths(prefix, lengths):
    return Prefix(
        graph=prefix.graph, cuts=prefix.cuts, tensors=prefix.tensors, tokenizer=prefix.tokenizer, lengths=lengths
    )


def with_stretches(lengths, **changes):
    from dataclasses import replace

    first, *rest = lengths.stretches
    return replace(lengths, stretches=(replace(first, **changes), *rest))


@pytest.mark.parametrize(
    "changes", [{"per_token": -1000}, {"node": 10_000}, {"node": -1}, {"path": (9,)}, {"path": ()}, {"path": (0, 0)}]
)
def test_a_strangers_prefix_that_takes_more_on_fewer_tokens_is_refused(changes):
    prefix = prefix_of()
    body = changed(prefix, lambda lengths: with_stretches(lengths, **changes))
    with pytest.raises(UnsafeArtifact):
        inspect_prefix(header_of(body), max_rows=8, limits=LIMITS)


class MeanOfAll(nn.Module):
    """A network that reads its padding too."""

    def __init__(self):
        super().__init__()
        self.words, self.mix, self.scores = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        return self.scores(self.mix(self.words(input_ids) + attention_mask[..., None]).mean(1))


def test_a_network_that_reads_its_padding_is_given_it():
    model = freeze(MeanOfAll(), "mix", input_shape=tokens_of_text_lengths().inputs)
    assert prefix_of(made=model).lengths is None


class Pooled(MeanOfAll):
    """Its scores do not depend on padding; what its head takes of that may."""

    def __init__(self, pool):
        super().__init__()
        self.pool, self.norm = pool, nn.BatchNorm1d(8)

    def forward(self, input_ids, attention_mask):
        return self.scores(self.pool(self, self.mix(self.words(input_ids)), attention_mask[..., None]))


def mean_of_words(_, hidden, mask):
    return (hidden * mask).sum(1) / mask.sum(1)


POOLED = {
    "mean of the words": (mean_of_words, True),
    "largest of the words": (lambda _, hidden, mask: hidden.masked_fill(mask == 0, -1e9).amax(1), False),
    "mean behind a norm that learns of all": (
        lambda self, hidden, mask: mean_of_words(self, self.norm(hidden.transpose(1, 2)).transpose(1, 2), mask),
        False,
    ),
}


@pytest.mark.parametrize("pool", POOLED)
def test_padding_is_computed_for_heads_that_mind_what_stands_there(pool):
    pooled, is_shortened = POOLED[pool]
    model = freeze(Pooled(pooled), "mix", input_shape=tokens_of_text_lengths().inputs)
    prefix, plain = prefix_of(made=model), copy.deepcopy(model)
    assert (prefix.lengths is not None) == is_shortened
    head = PartitionedModel.of(model, tokens_of_text_lengths(), frozen_in_eval=True).parts.head
    batch, last = batch_of([3, 17, 60]), prefix.cuts[-1]
    leaves = leaf_values(prefix.graph, prefix.tensors)
    if is_shortened:
        features = LengthRunner(prefix.graph, prefix.cuts, leaves, prefix.lengths).run(batch, last.number)
    else:
        features = Runner(prefix.graph, cuts=prefix.cuts).run([batch], leaves, upto=last)
    for training in (True, False):
        found, meant = head.train(training)(*features), plain.train(training)(*batch.unbind(1))
        np.testing.assert_allclose(found.detach(), meant.detach(), rtol=1e-5, atol=1e-6)
        assert torch.allclose(model.norm.running_var, plain.norm.running_var)


class Attended(MeanOfAll):
    """Its frozen layers weigh the words: where their scores are cut off from that, a zero is the score of a word."""

    def __init__(self):
        super().__init__()
        self.score, self.norm = nn.Linear(8, 1), nn.LayerNorm(8)

    def forward(self, input_ids, attention_mask):
        hidden = self.mix(self.words(input_ids))
        scores = self.score(hidden)[..., 0].masked_fill(attention_mask == 0, -1e9)
        return self.scores(self.norm((scores.softmax(1)[..., None] * hidden).sum(1)))


def test_padding_is_computed_for_layers_behind_a_cut_that_read_it():
    prefix = prefix_of(made=freeze(Attended(), "norm", input_shape=tokens_of_text_lengths().inputs))
    batch, last = batch_of([3, 17, 60]), prefix.cuts[-1]
    leaves = leaf_values(prefix.graph, prefix.tensors)
    assert "norm" in last.name
    [meant] = Runner(prefix.graph).run([batch], leaves)
    for cut in prefix.cuts[1:] if prefix.lengths else ():
        bucketed = LengthRunner(prefix.graph, prefix.cuts, leaves, prefix.lengths)
        if bucketed.takes(cut.number):
            rest = after(prefix.graph, cut)
            [found] = Runner(rest).run(bucketed.run(batch, cut.number), leaf_values(rest, prefix.tensors))
            np.testing.assert_allclose(found.detach(), meant.detach(), rtol=1e-4, atol=1e-5, err_msg=cut.name)


def test_texts_padded_on_the_left_and_exact_jobs_keep_their_padding():
    tokenizer = tokenizer_of_words()
    tokenizer.enable_padding(direction="left", pad_id=0, pad_token="[PAD]")
    from transformers import PreTrainedTokenizerFast

    left = preprocess.text(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", padding_side="left"),
        TOKENS_OF_TEXT_LENGTHS,
    )
    assert PartitionedModel.of(frozen_of_text_lengths(), left, frozen_in_eval=True).parts.prefix.lengths is None
    assert prefix_of(may_shorten=False).lengths is None
    assert prefix_of().lengths is not None


@pytest.fixture(scope="module")
def reviews_of_text_lengths(tmp_path_factory):
    """Texts of 3 to 15 tokens and, since many are joined, some of up to 60."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("reviews")
    short = write_reviews(folder / "x.parquet", rows=96)
    texts = [" ".join(short[row : row + 1 + row % 9]) for row in range(40)]
    pq.write_table(pa.table({"text": texts, "label": [row % 2 for row in range(40)]}), folder / "x.parquet")
    return folder, texts


@pytest.mark.parametrize("cut", [None, 1])
@pytest.mark.parametrize("near", [False, True])
def test_losses_are_those_of_a_plain_padded_loop(reviews_of_text_lengths, tmp_path, monkeypatch, near, cut):
    folder, texts = reviews_of_text_lengths
    data, settings = Dataset(folder, cache=tmp_path, column="text"), LoaderSettings(replan=False)
    small = NodeSettings(memory_bytes=1 << 29, device_batch=16)
    asked = {"preprocess": tokens_of_text_lengths(), "cut": cut, "settings": settings, "frozen_in_eval": True}
    if near:
        with (
            start_node((str(folder),), small) as node,
            offload(frozen_of_text_lengths(), data, near=node.url, **asked) as job,
        ):
            assert job.fallback is None
            losses, orders = job_losses(job, rows_by_id(data, "parquet"), range(2))
    else:
        monkeypatch.setattr(graph_runner, "Runner", _Counting)
        _Counting.seen = []
        with offload(frozen_of_text_lengths(), data, node=small, **asked) as job:
            losses, orders = job_losses(job, rows_by_id(data, "parquet"), range(2))
        assert {length for _, length in _Counting.seen} > {16, 24}
    np.testing.assert_allclose(
        losses,
        plain_losses(frozen_of_text_lengths(), texts, data.samples.labels, orders, TOKENS_OF_TEXT_LENGTHS),
        atol=1e-6,
        rtol=0,
    )


def test_order_is_the_seeds_and_a_resumed_epoch_goes_on_with_the_same_features(reviews_of_text_lengths, tmp_path):
    folder, _ = reviews_of_text_lengths
    data, small = Dataset(folder, cache=tmp_path, column="text"), NodeSettings(memory_bytes=1 << 29, device_batch=16)
    asked = {
        "preprocess": tokens_of_text_lengths(),
        "node": small,
        "frozen_in_eval": True,
        "settings": LoaderSettings(replan=False),
    }
    with offload(frozen_of_text_lengths(), data, accuracy="exact", **asked) as job:
        exact = [batch.ids.tolist() for batch in job.loader(8, shuffle=True, seed=3)]
    with offload(frozen_of_text_lengths(), data, **asked) as job:
        loader = job.loader(8, shuffle=True, seed=3)
        whole, state = [], None
        for number, batch in enumerate(loader):
            whole.append(batch)
            state = loader.state_dict() if number == 1 else state
    assert [batch.ids.tolist() for batch in whole] == exact
    with offload(frozen_of_text_lengths(), data, **asked) as job:
        again = job.loader(8, shuffle=True, seed=3)
        again.load_state_dict(state)
        rest = list(again)
    assert [batch.ids.tolist() for batch in rest] == exact[2:]
    for batch, before in zip(rest, whole[2:], strict=True):
        assert all(map(torch.equal, batch.features, before.features))
