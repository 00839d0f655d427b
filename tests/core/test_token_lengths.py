"""Lengths to which texts are padded, and graphs for fewer tokens: pure, and small in padding on real texts."""

import ast
import re
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import Cut, Dim, Graph, GraphNode, Ref
from frostline.core.graph import (
    Lengths,
    at_length,
    bucket_of,
    buckets,
    stretches,
    subgraph_for,
    weightless_values,
)


@given(st.integers(1, 8192))
def test_buckets_rise_in_multiples_of_eight_to_the_whole_length(max_length):
    found = buckets(max_length)
    assert list(found) == sorted(set(found))
    assert found[-1] == max_length
    assert all(length % 8 == 0 for length in found[:-1])
    assert len(found) <= 40


@given(st.integers(1, 8192), st.integers(0, 8192))
def test_a_text_gets_the_least_bucket_that_holds_it(max_length, tokens):
    found, lengths = bucket_of(min(tokens, max_length), buckets(max_length)), buckets(max_length)
    assert found >= min(tokens, max_length)
    assert all(length < min(tokens, max_length) for length in lengths if length < found)


@pytest.fixture(scope="module")
def docstrings():
    """The docstrings of the top modules of Python's standard library: real texts that are on every machine."""
    found = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(file.read_bytes())
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
        texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        found += [text for text in texts if text]
    return found


@pytest.mark.parametrize("max_length", [128, 512])
def test_real_texts_are_padded_by_less_than_a_tenth(docstrings, max_length):
    assert len(docstrings) > 1_000
    # Words and marks, and one token more on either side, as BERT's tokenizer has them before it splits rare words.
    tokens = [min(len(re.findall(r"\w+|[^\w\s]", text)) + 2, max_length) for text in docstrings]
    lengths = buckets(max_length)
    assert 1 - sum(tokens) / sum(bucket_of(count, lengths) for count in tokens) < 0.1
    assert 1 - sum(tokens) / (len(tokens) * max_length) > 0.5, "padded to one length, more than half would be padding"


def node(name, op, *args, **kwargs):
    return GraphNode(name=name, op=op, args=args, kwargs=tuple(kwargs.items()), shape=(Dim(0, 1),))


def graph_of(tokens, *, hidden=32, made=None):
    nodes = (
        node("place", "aten.arange.default", tokens, device=3),
        node("mask", "aten.expand.default", Ref("x"), (-1, 2 * tokens + 1, hidden)),
        node("words", "aten.view.default", Ref("weight"), (hidden, -1), out=(tokens,)),
        node("end", made or "aten.add.Tensor", Ref("words"), Ref("mask")),
    )
    return Graph(inputs=("x",), leaves=(("weight", "a.weight"),), nodes=nodes, outputs=(Ref("end"),))


def cuts_of(tokens):
    cut = {"name": "", "dtypes": ("float32",), "bytes_per_sample": 0}
    return (
        Cut(number=1, after=-1, tensors=("x",), shapes=((2, tokens),), **cut),
        Cut(number=2, after=2, tensors=("words",), shapes=((tokens, 32),), **cut),
    )


@given(st.integers(17, 300), st.integers(16, 299))
def test_a_graph_for_fewer_tokens_is_what_a_trace_at_these_is(tokens, fewer):
    fewer = min(fewer, tokens - 1)
    # As wide as one of the two lengths: what is no length must stay, whatever number it is.
    full, short = graph_of(tokens, hidden=tokens), graph_of(16, hidden=tokens)
    found = stretches(full, short, tokens, 16)
    lengths = Lengths(max_length=tokens, stretches=found, shapes=(((0, 1),), ((1, 0),)))
    graph, cuts = at_length(full, cuts_of(tokens), lengths, fewer)
    assert graph == graph_of(fewer, hidden=tokens)
    assert [cut.shapes for cut in cuts] == [((2, fewer),), ((fewer, 32),)]


def test_graphs_that_differ_in_more_than_lengths_are_not_stretched():
    assert stretches(graph_of(32), graph_of(16, made="aten.mul.Tensor"), 32, 16) is None
    assert stretches(graph_of(32), graph_of(16, hidden=31), 32, 16) is None


def test_tells_operations_without_weights_apart():
    assert weightless_values(graph_of(32), ["weight"]) == {"x", "place", "mask"}
    assert [node.name for node in subgraph_for(graph_of(32), ["mask"]).nodes] == ["mask"]
