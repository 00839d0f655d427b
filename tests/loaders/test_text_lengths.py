"""Texts of several lengths run in buckets in the frozen layers: the losses of a plain padded loop, and less work."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from frostline import Dataset, LoaderSettings, NodeSettings, freeze, offload, preprocess
from frostline.core.errors import UnsafeArtifact
from frostline.core.graph import buckets
from frostline.engines import graph_runner
from frostline.engines.graph_runner import LengthRunner, Runner, leaf_values
from frostline.engines.measure import GraphLimits
from frostline.jobs.partition import PartitionedModel
from frostline.models.artifact import Prefix, header_of, inspect_prefix, read_prefix, write_prefix
from frostline.node.process import start_node
from support.signals import job_losses, rows_by_id
from support.texts import plain_losses, small_bert, small_distilbert, tokenizer_of_words, write_reviews

TOKENS = 60
UNTIL = {"distilbert": "distilbert.transformer.layer.0", "bert": "bert.encoder.layer.0"}
MAKE = {"distilbert": small_distilbert, "bert": small_bert}
LIMITS = GraphLimits(max_nodes=5_000, max_values=50_000, max_run_s=60, max_operation_s=20, operations_per_s=1e10)


def tokens(length=TOKENS):
    return preprocess.text(tokenizer_of_words(), max_length=length)


def frozen(kind="distilbert", until=None):
    model = MAKE[kind]()
    for module in model.modules():  # dropout draws in another order where rows are cached
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_rate"):
            module.dropout_rate = 0.0
    return freeze(model.train(), until or UNTIL[kind], input_shape=tokens().inputs)


def prefix_of(kind="distilbert", *, made=None, **options):
    model = frozen(kind) if made is None else made
    return PartitionedModel.of(model, tokens(), frozen_in_eval=True, **options).parts.prefix


def batch_of(counts, length=TOKENS):
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


@pytest.mark.parametrize("kind", UNTIL)
def test_features_of_every_length_are_those_of_padded_texts_and_zeros_behind_them(kind):
    prefix = prefix_of(kind)
    bucketed, whole, leaves = runners(prefix)
    counts = [1, 3, 16, 17, 24, 25, 33, 47, 59, 60]
    batch, lengths = batch_of(counts), buckets(TOKENS)
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


@pytest.mark.parametrize("kind", UNTIL)
def test_a_text_of_as_many_tokens_as_the_network_has_positions_is_shortened_too(kind):
    maximum = tokens(64)
    model = freeze(MAKE[kind]().train(), UNTIL[kind], input_shape=maximum.inputs)
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
    counts = np.random.default_rng(0).integers(17, TOKENS, 64).tolist()
    _Counting.seen = []
    bucketed.run(batch_of(counts), prefix.cuts[-1].number)
    computed = sum(rows * length for rows, length in _Counting.seen)
    assert 1 - sum(counts) / computed <= 0.13, "with rows that fill a run"
    assert {length for _, length in _Counting.seen} <= set(buckets(TOKENS))
    assert computed < 0.75 * len(counts) * TOKENS


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
    model = freeze(MeanOfAll(), "mix", input_shape=tokens().inputs)
    assert prefix_of(made=model).lengths is None


def test_texts_padded_on_the_left_and_exact_jobs_keep_their_padding():
    tokenizer = tokenizer_of_words()
    tokenizer.enable_padding(direction="left", pad_id=0, pad_token="[PAD]")
    from transformers import PreTrainedTokenizerFast

    left = preprocess.text(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", padding_side="left"), TOKENS
    )
    assert PartitionedModel.of(frozen(), left, frozen_in_eval=True).parts.prefix.lengths is None
    assert prefix_of(may_shorten=False).lengths is None
    assert prefix_of().lengths is not None


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
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
def test_losses_are_those_of_a_plain_padded_loop(reviews, tmp_path, monkeypatch, near, cut):
    folder, texts = reviews
    data, settings = Dataset(folder, cache=tmp_path, column="text"), LoaderSettings(follow=False)
    small = NodeSettings(memory_bytes=1 << 29, device_batch=16)
    asked = {"preprocess": tokens(), "cut": cut, "settings": settings, "frozen_in_eval": True}
    if near:
        with start_node((str(folder),), small) as node, offload(frozen(), data, near=node.url, **asked) as job:
            assert job.fallback is None
            losses, orders = job_losses(job, rows_by_id(data, "parquet"), range(2))
    else:
        monkeypatch.setattr(graph_runner, "Runner", _Counting)
        _Counting.seen = []
        with offload(frozen(), data, node=small, **asked) as job:
            losses, orders = job_losses(job, rows_by_id(data, "parquet"), range(2))
        assert {length for _, length in _Counting.seen} > {16, 24}
    np.testing.assert_allclose(
        losses, plain_losses(frozen(), texts, data.samples.labels, orders, TOKENS), atol=1e-6, rtol=0
    )


def test_order_is_the_seeds_and_a_resumed_epoch_goes_on_with_the_same_features(reviews, tmp_path):
    folder, _ = reviews
    data, small = Dataset(folder, cache=tmp_path, column="text"), NodeSettings(memory_bytes=1 << 29, device_batch=16)
    asked = {"preprocess": tokens(), "node": small, "frozen_in_eval": True, "settings": LoaderSettings(follow=False)}
    with offload(frozen(), data, accuracy="exact", **asked) as job:
        exact = [batch.ids.tolist() for batch in job.loader(8, shuffle=True, seed=3)]
    with offload(frozen(), data, **asked) as job:
        loader = job.loader(8, shuffle=True, seed=3)
        whole, state = [], None
        for number, batch in enumerate(loader):
            whole.append(batch)
            state = loader.state_dict() if number == 1 else state
    assert [batch.ids.tolist() for batch in whole] == exact
    with offload(frozen(), data, **asked) as job:
        again = job.loader(8, shuffle=True, seed=3)
        again.load_state_dict(state)
        rest = list(again)
    assert [batch.ids.tolist() for batch in rest] == exact[2:]
    for batch, before in zip(rest, whole[2:], strict=True):
        assert all(map(torch.equal, batch.features, before.features))
