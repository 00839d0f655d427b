"""Decides whether a stranger's tokenizer takes bounded time and memory for any text. Pure.

The ``tokenizers`` package bounds neither: its patterns backtrack, replacements may grow a text without end, and models
look words up by each of their parts.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ("why_unbounded",)

_NORMALIZERS = frozenset(
    {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Prepend", "Replace", "Sequence", "Strip"}
    | {"StripAccents"}
)
_PRE_TOKENIZERS = frozenset(
    {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Sequence", "Split"}
    | {"UnicodeScripts", "Whitespace", "WhitespaceSplit"}
)
_MODELS = frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"})
# Of GPT-2, of GPT-4 and Llama 3, of Qwen 2, of CLIP, and of models that join blanks.
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS
_PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        _GPT4,
        _GPT4.replace("{1,3}", ""),
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        r"\s+",
        r" {2,}",
    }
)
_MAX_STEPS = 16
_MAX_GROWING_STEPS = 4
_MAX_INSERTED = 4  # characters in the place of one
_MAX_WORD = 128  # the usual bound is 100; the time of WordPiece grows with its third power
_MAX_PIECE = 512  # characters of a piece of Unigram, which looks for all pieces at each place


def why_unbounded(content: bytes) -> str | None:
    """Why a tokenizer may take any time or memory for a text, in a few words; None where both are bounded.

    Args:
        content: JSON of the tokenizer, as the ``tokenizers`` package writes it.
    """
    try:
        value = json.loads(content)
        return _why(value) if isinstance(value, dict) else "it is no object"
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        return f"it cannot be read ({type(error).__name__})"


def _why(value: Mapping[str, Any]) -> str | None:
    normalizers, pre_tokenizers = list(_steps(value, "normalizer")), list(_steps(value, "pre_tokenizer"))
    strange = [step for step in normalizers if step.get("type") not in _NORMALIZERS]
    strange += [step for step in pre_tokenizers if step.get("type") not in _PRE_TOKENIZERS]
    if strange:
        return f"its step {str(strange[0].get('type'))[:40]!r} is unknown here"
    if max(len(normalizers), len(pre_tokenizers)) > _MAX_STEPS:
        return f"it has more than {_MAX_STEPS} steps"
    patterns = [_pattern(step) for step in (*normalizers, *pre_tokenizers)]
    unknown = [pattern for pattern in patterns if pattern is not None and pattern not in _PATTERNS]
    if unknown:
        return f"its pattern {unknown[0][:60]!r} is none of those that are known to end soon"
    growing = [_inserted(step) for step in normalizers if _inserted(step) > 1]
    if len(growing) > _MAX_GROWING_STEPS or max(growing, default=0) > _MAX_INSERTED:
        return "its replacements make a text too long"
    return _why_model(value.get("model") or {})


def _why_model(model: Mapping[str, Any]) -> str | None:
    kind = model.get("type")
    if kind not in _MODELS:
        return f"its model {str(kind)[:40]!r} is unknown here"
    if kind == "WordPiece" and model.get("max_input_chars_per_word", 0) > _MAX_WORD:
        return f"its max_input_chars_per_word is above {_MAX_WORD}"
    if kind == "Unigram" and any(len(piece) > _MAX_PIECE for piece, _ in model.get("vocab", ())):
        return f"it has pieces of more than {_MAX_PIECE} characters"
    return None


def _steps(value: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """All steps of a kind, those of sequences in each other too."""
    left = [value[name]] if value.get(name) else []
    while left:
        step = left.pop()
        yield step
        left += [*step.get("normalizers", ()), *step.get("pretokenizers", ())]


def _pattern(step: Mapping[str, Any]) -> str | None:
    """The pattern of a step that may take long: a regular expression, or an empty text, which is found everywhere."""
    pattern = step.get("pattern")
    if not isinstance(pattern, dict):
        return None
    return str(pattern["Regex"]) if "Regex" in pattern else (None if pattern.get("String") else "")


def _inserted(step: Mapping[str, Any]) -> int:
    """Characters that a step puts in the place of one."""
    return len(str(step.get("content", ""))) if step.get("type") == "Replace" else len(str(step.get("prepend", "")))
