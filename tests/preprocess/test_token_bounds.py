"""Which tokenizers a node runs for strangers: those of published kinds, and none that takes any time or memory."""

import json

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from frostline.preprocess.tokens import why_unbounded
from support.texts import tokenizer_of_words

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


SLOW = "none of those that are known to end soon"


def made(model=None, normalizer=None, pre_tokenizer=None):
    tokenizer = Tokenizer(models.BPE() if model is None else model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer.to_str().encode()


@pytest.mark.parametrize(
    "content",
    [
        tokenizer_of_words().to_str().encode(),
        made(
            models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"),
            normalizers.BertNormalizer(),
            pre_tokenizers.BertPreTokenizer(),
        ),
        made(None, None, pre_tokenizers.ByteLevel()),
        made(
            None,
            None,
            pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GPT4), "isolated"), pre_tokenizers.ByteLevel()]),
        ),
        made(models.Unigram([("a", -1.0)], 0), normalizers.Replace(Regex(" {2,}"), " "), pre_tokenizers.Metaspace()),
        made(None, normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])),
    ],
)
def test_tokenizers_of_published_kinds_are_bounded(content):
    assert why_unbounded(content) is None


def grown(steps, content="ab"):
    return normalizers.Sequence([normalizers.Replace("a", content)] * steps)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (made(None, None, pre_tokenizers.Split(Regex("(a+)+b"), "isolated")), SLOW),
        (made(None, normalizers.Replace(Regex("(a|a)*c"), "")), SLOW),
        (made(None, normalizers.Replace("", "x")), SLOW),
        (made(None, normalizers.Replace("a", "a" * 100_000)), "make a text too long"),
        (made(None, grown(5)), "make a text too long"),
        (made(None, grown(17, "b")), "more than 16 steps"),
        (made(models.WordPiece({"a": 0}, unk_token="a", max_input_chars_per_word=10**9)), "max_input_chars_per_word"),
        (made(models.Unigram([("a" * 600, -1.0)], 0)), "pieces of more than 512 characters"),
        (b"{", "cannot be read"),
        (b"[]", "no object"),
        (b'{"model": 3}', "cannot be read"),
        (json.dumps({"normalizer": {"type": "Precompiled"}}).encode(), "'Precompiled' is unknown"),
        (json.dumps({"model": {"type": "Magic"}}).encode(), "'Magic' is unknown"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_may_take_any_time_or_memory_says_why(content, said):
    assert said in why_unbounded(content)
