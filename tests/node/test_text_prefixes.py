"""Prefixes that bring a tokenizer: bounded, checked in another process, and used only as the request names it."""

import json
from dataclasses import replace

import pytest
import torch

from frostline.core.errors import OverBudget, UnsafeArtifact
from frostline.engines.measure import GraphLimits
from frostline.models import artifact, cut_network, freeze
from frostline.models.artifact import header_of, read_outline, read_prefix, tokenizer_of, write_prefix
from frostline.models.tracing import takes_rows
from frostline.node.inspection import Inspector
from frostline.preprocess import text
from support.texts import small_distilbert, tokenizer_of_words

LIMITS = GraphLimits(max_nodes=2000, max_values=50_000, max_run_s=60, max_operation_s=10, operations_per_s=1e9)


@pytest.fixture(scope="module")
def prefix():
    tokens = text(tokenizer_of_words(), max_length=12)
    model = freeze(small_distilbert(), "distilbert.transformer.layer.0", input_shape=tokens.inputs)
    found = cut_network(takes_rows(model, tokens.tokens.names), (tokens.sample,), frozen_in_eval=True)
    return replace(found.prefix, tokenizer=tokens.tokenizer)


@pytest.fixture(scope="module")
def inspector():
    with Inspector() as made:
        yield made


def inspect(inspector, body):
    asked = {"max_rows": 32, "max_check_s": 30.0, "limits": LIMITS, "tokenizer": tokenizer_of(body)}
    return inspector.inspect(header_of(body), **asked)


def test_a_tokenizer_travels_in_the_file_of_the_prefix(prefix):
    body = write_prefix(prefix)
    assert body == write_prefix(prefix)
    assert read_prefix(body).tokenizer == tokenizer_of(body) == prefix.tokenizer
    assert set(read_prefix(body).tensors) == set(prefix.tensors)
    assert read_outline(header_of(body)).tokenizer == b""  # it has the sizes alone
    assert tokenizer_of(write_prefix(replace(prefix, tokenizer=b""))) == b""


def test_a_tokenizer_is_read_in_another_process_first(prefix, inspector):
    body = write_prefix(prefix)
    assert inspect(inspector, body).memory
    for broken in (b"{}", b"\xff" * 10, b'{"model": {"type": "BPE"}}', prefix.tokenizer[:-20]):
        with pytest.raises(UnsafeArtifact, match="tokenizer"):
            inspect(inspector, write_prefix(replace(prefix, tokenizer=broken)))


def test_a_tokenizer_whose_time_nothing_bounds_is_left_to_the_trainer(prefix, inspector):
    slow = json.loads(prefix.tokenizer)
    slow["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    with pytest.raises(OverBudget, match="does not run this tokenizer"):
        inspect(inspector, write_prefix(replace(prefix, tokenizer=json.dumps(slow).encode())))


def test_a_tokenizer_that_is_too_large_is_refused(prefix, monkeypatch):
    body = write_prefix(prefix)
    monkeypatch.setattr(artifact, "MAX_TOKENIZER_BYTES", 100)
    for read in (read_prefix, tokenizer_of, lambda whole: read_outline(header_of(whole))):
        with pytest.raises(UnsafeArtifact, match="tokenizer"):
            read(body)


def test_refuses_a_tokenizer_entry_of_another_type(prefix, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(torch, "frombuffer", lambda *_, **__: torch.zeros(3, 3))
        body = write_prefix(prefix)
    with pytest.raises(UnsafeArtifact, match="tokenizer"):
        read_prefix(body)
