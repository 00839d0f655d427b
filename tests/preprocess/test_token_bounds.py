"""Which tokenizers a node runs for others: those of published kinds, and none that takes any time or memory."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from frostline.preprocess.tokens import text_bytes, why_unbounded
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
        (made(None, grown(8)), "make a text too long"),
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


def changed(content, **values):
    return json.dumps({**json.loads(content), **values}).encode()


def template(single, special):
    special = {name: {"id": name, "ids": ids, "tokens": [name] * len(ids)} for name, ids in special.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


WORDS = tokenizer_of_words().to_str().encode()
THREE = {"type": "Sequence", "processors": [template([{"Sequence": {"id": "A", "type_id": 0}}], {})] * 3}
CUT = {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
A_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
MANY = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(use_regex=False)] * 12)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (made(None, grown(4, "aaaa")), "make a text too long"),
        (made(None, normalizers.Sequence([normalizers.NFKD(), normalizers.Replace("a", "\ufdfa"), normalizers.NFKD()])),
         "make a text too long"),
        (made(None, normalizers.Sequence([normalizers.Prepend("aaaaaaaaaaaaaaaa")] * 3)), "make a text too long"),
        (made(None, None, MANY), "make a text too long"),
        (made(None, None, pre_tokenizers.Sequence([pre_tokenizers.Metaspace()] * 5)), "make a text too long"),
        (changed(WORDS, truncation={"max_length": 8192, "stride": 8191, "strategy": "LongestFirst"}), "it cuts off"),
        (changed(WORDS, truncation={"max_length": 1 << 40, "stride": 0}), "cuts at more than 8192"),
        (changed(WORDS, padding={"strategy": {"Fixed": 10**9}, "pad_token": "x"}), "pads to more than 8192"),
        (changed(WORDS, padding={"strategy": "BatchLongest", "pad_to_multiple_of": 10**9}), "pads to more than 8192"),
        (changed(WORDS, padding={"strategy": {"Fixed": 8}, "pad_token": "x" * 10**6}), "more than 64 characters"),
        (made(models.WordLevel({"a": 0}, unk_token="x" * 10**6)), "more than 64 characters"),
        (made(models.BPE({"a": 0}, [], continuing_subword_prefix="x" * 1000)), "more than 64 characters"),
        (changed(WORDS, added_tokens=[{"id": 0, "content": "x" * 1000}]), "more than 512 characters"),
        (changed(WORDS, post_processor=template([A_TEXT] * 1000, {})), "has it several times"),
        (changed(WORDS, post_processor=template([A_TEXT], {"c": [1] * 10**6})), "by more than 64 tokens"),
        (changed(WORDS, post_processor=THREE), "several times"),
        (changed(WORDS, post_processor={"type": "BertProcessing", "sep": ["x" * 1000, 1], "cls": ["y", 2]}), "64 char"),
        (changed(WORDS, post_processor={"type": "Magic"}), "'Magic' is unknown"),
    ],
)  # fmt: skip
def test_what_multiplies_a_text_or_its_tokens_is_refused(content, said):
    assert said in why_unbounded(content)


def test_more_entries_than_any_published_tokenizer_has_are_refused():
    content = made(models.WordLevel({str(number): number for number in range((1 << 19) + 1)}))
    assert "more than 524288 entries" in why_unbounded(content)


STEPS = {
    "replace": (normalizers.Replace("a", "bé"), None),
    "replace 4": (normalizers.Replace("b", "aaaa"), None),
    "prepend": (normalizers.Prepend("\u2581"), None),
    "blanks": (normalizers.Replace(" ", "\u2581"), None),
    "lower": (normalizers.Lowercase(), None),
    "nfd": (normalizers.NFD(), None),
    "nfkd": (normalizers.NFKD(), None),
    "nfkc": (normalizers.NFKC(), None),
    "bert": (normalizers.BertNormalizer(strip_accents=True), None),
    "bytes": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes and a blank": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": (None, pre_tokenizers.Metaspace()),
    "letters": (None, pre_tokenizers.Split(Regex(r"\s+"), "isolated")),
    "punctuation": (None, pre_tokenizers.Punctuation()),
}


@settings(max_examples=150)
@example(["bytes", "prepend"], "?")
@given(
    st.lists(st.sampled_from(sorted(STEPS)), max_size=4),
    st.text(alphabet="ab !?\u0130\ufdfa\u1f82\uac01\u4e00\u0390\u00e9", min_size=1, max_size=40),
)
def test_no_text_becomes_longer_than_is_reserved_for_it(names, text):
    parts = [STEPS[name] for name in names]
    content = made(
        None,
        normalizers.Sequence([step for step, _ in parts if step is not None]),
        pre_tokenizers.Sequence([step for _, step in parts if step is not None]),
    )
    tokenizer, encoded = Tokenizer.from_str(content.decode()), text.encode()
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
    # A token is a letter at least, and `text_bytes` reserves 400 bytes for each that there may be.
    assert sum(len(piece) for piece, _ in pieces) <= text_bytes(content, encoded) // 400


@pytest.mark.parametrize(
    ("pre_tokenizer", "text"),
    [
        (pre_tokenizers.Split("a", "isolated"), "a" * 100_000),
        (pre_tokenizers.ByteLevel(), "\u4e00" * 30_000),
        (pre_tokenizers.Punctuation(), "!" * 100_000),
        (pre_tokenizers.Whitespace(), "a b " * 25_000),
        (pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(use_regex=False)] * 3), "\u4e00" * 20_000),
    ],
)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFKD(), normalizers.Replace("a", "aaaa")])
@pytest.mark.usefixtures("plain_starts")
def test_tokenizing_takes_no_more_memory_than_is_reserved(normalizer, pre_tokenizer, text):
    letters = {letter: place for place, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = made(models.BPE(letters, []), normalizer, pre_tokenizer)
    body = changed(
        tokenizer, truncation={"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    )
    # Settings of the allocator, which other tests may have left, decide what is given back on the way.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    said = subprocess.run(
        [sys.executable, "-c", PEAK, text], input=body, capture_output=True, check=True, timeout=120, env=environment
    ).stdout
    assert int(said) <= text_bytes(body, text.encode()) + (4 << 20)


PEAK = """
import sys
from pathlib import Path
from tokenizers import Tokenizer
def of(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
tokenizer = Tokenizer.from_buffer(sys.stdin.buffer.read())
tokenizer.encode("a")
before = of("VmRSS")
tokenizer.encode(sys.argv[1])
print(of("VmHWM") - before)
"""
