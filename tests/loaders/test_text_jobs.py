"""Texts from Parquet, classified by a DistilBERT with frozen layers: the same losses as a plain loop."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from frostline import Dataset, LoaderSettings, NodeSettings, freeze, loader, offload, preprocess
from frostline.core.errors import BadRequest
from frostline.core.events import SetupWarning
from frostline.node import resources as opener
from support.signals import job_losses, rows_by_id
from support.texts import plain_losses, small_distilbert, tokenizer_of_words, write_reviews

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
    settings, node = LoaderSettings(follow=False), NodeSettings(memory_bytes=1 << 29, device_batch=8)
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
        scores = self.classifier(input_ids, attention_mask).logits
        return scores * (2.0 if int(input_ids.sum()) > 0 else 1.0)


def test_a_network_that_is_not_cut_gets_the_same_tokens_made_here(reviews):
    data, _ = reviews
    told = []
    with offload(LooksAtItsTexts(), data, preprocess=tokens(), observe=told.append) as job:
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
def test_a_node_tokenizes_and_the_second_epoch_moves_no_bytes(node, tmp_path, cut):
    url, folder, texts = node
    data, model, twin = Dataset(folder, cache=tmp_path, column="text"), frozen(), frozen()
    settings = LoaderSettings(follow=False)
    cut = FROST_LINE if cut == -1 else cut
    asked = {"preprocess": tokens(), "near": url, "cut": cut, "settings": settings, "frozen_in_eval": True}
    with offload(model, data, **asked) as job:
        assert job.fallback is None
        assert UNTIL in job.frost_line.name
        losses, orders = job_losses(job, rows_by_id(data, "parquet"), range(1))
        received = job.statistics().wire_bytes
        assert received > 0
        more, later = job_losses(job, rows_by_id(data, "parquet"), range(1))
        assert job.statistics().wire_bytes == received
    meant = plain_losses(twin, texts, data.samples.labels, [*orders, *later], TOKENS)
    np.testing.assert_allclose([*losses, *more], meant, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cut", [None, 1])
def test_features_may_be_narrowed_and_token_ids_are_not(node, tmp_path, cut):
    url, folder, texts = node
    data, twin = Dataset(folder, cache=tmp_path, column="text"), frozen()
    settings = LoaderSettings(follow=False, measure_first=cut is None)
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
    settings = LoaderSettings(skip_allowance=0.5)
    small = NodeSettings(memory_bytes=1 << 29, device_batch=8)
    asked = {"preprocess": tokens(), "settings": settings, "node": small, "observe": lambda _: None}
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
    with offload(model, data, preprocess=tokens(), node=small, frozen_in_eval=True, observe=events.append) as job:
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
