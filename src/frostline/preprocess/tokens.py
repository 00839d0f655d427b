"""Turns text into token ids and an attention mask, by tokenizers whose time and memory are bounded.

The ``tokenizers`` package bounds neither: its patterns backtrack, replacements may grow a text without end, and
models look words up by each of their parts.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core.errors import SampleError, SettingError
from frostline.core.files import read_regular

__all__ = (
    "MAX_TOKENIZER_BYTES",
    "TextTokenizer",
    "checked_content",
    "content_digest",
    "fit_length",
    "has_tokenizers",
    "opened_tokenizer",
    "text_bytes",
    "tokenizers_name",
    "tokens_into",
    "why_unbounded",
)


TextTokenizer = Any
"""Path of a ``tokenizer.json``, a ``tokenizers.Tokenizer``, or a fast tokenizer of transformers."""

MAX_TOKENIZER_BYTES = 32 << 20
"""Maximum size of a tokenizer's JSON; those of large multilingual models take 17 MB."""

_MAX_TEXT_BYTES = 1 << 18  # forty thousand words: whoever means more keeps documents, not samples
_KEPT = 4  # tokenizers that are open at once in a process; each takes several times its JSON
# Tokens to pad with, where nothing says which: those of BERT's and of RoBERTa's and T5's families.
_PADS = ("[PAD]", "<pad>")
_LACKING = "text needs the package tokenizers: pip install 'frostline[text]'"


@cache
def tokenizers_name() -> str:
    """What tokenizes here, with its version."""
    try:
        return f"tokenizers {version('tokenizers')}"
    except PackageNotFoundError:
        return "tokenizers, not installed"


def has_tokenizers() -> bool:
    """Whether the ``tokenizers`` package is installed."""
    try:
        import_module("tokenizers")
    except ImportError:
        return False
    return True


def content_digest(content: bytes) -> str:
    """SHA-256 of a tokenizer's JSON, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def checked_content(content: bytes, digest: str) -> None:
    """Make sure that a tokenizer is the one that a preprocessing names.

    Raises:
        SettingError: The tokenizer is another one.
    """
    if content_digest(content) != digest:
        raise SettingError("the tokenizer is not the one that the preprocessing names: its SHA-256 is another")


def fit_length(tokenizer: TextTokenizer, max_length: int) -> bytes:
    """The JSON of a tokenizer that pads and cuts every text to one length.

    Args:
        tokenizer: see ``preprocess.text``; it stays as it is.
        max_length: number of tokens.

    Raises:
        SettingError: see ``preprocess.text``.
    """
    content, pad, sides = _said(tokenizer)
    copy = _parsed(content)
    copy.enable_truncation(max_length, direction=sides["truncation"])
    copy.enable_padding(length=max_length, direction=sides["padding"], **(pad or _pad_of(copy)))
    # Sorted, so that the same tokenizer has the same digest whatever order its package writes in.
    fit = json.dumps(json.loads(copy.to_str()), sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    if len(fit) > MAX_TOKENIZER_BYTES:
        raise SettingError(f"a tokenizer takes up to {MAX_TOKENIZER_BYTES >> 20} MiB as JSON, not {len(fit)} bytes")
    return fit


def tokens_into(tokenizer: bytes, encoded: bytes | memoryview, out: npt.NDArray[np.int64]) -> None:
    """Tokenize one text. Safe for threads.

    Args:
        tokenizer: JSON that ``fit_length`` made.
        encoded: text in UTF-8.
        out: ``int64[2, max_length]``; row 0 takes token ids, row 1 the attention mask.

    Raises:
        SampleError: The text is not UTF-8, or is too long.
    """
    assert tokenizer, "a text is tokenized with a tokenizer"
    if len(encoded) > _MAX_TEXT_BYTES:
        raise SampleError(f"its text has {len(encoded)} bytes, and up to {_MAX_TEXT_BYTES} are tokenized")
    try:
        found = opened_tokenizer(tokenizer).encode(str(encoded, "utf-8"))
    except UnicodeDecodeError as error:
        raise SampleError("it is no text in UTF-8") from error
    if len(found.ids) != out.shape[1]:
        raise SampleError(f"its tokenizer gives {len(found.ids)} tokens, not {out.shape[1]}")
    out[0], out[1] = found.ids, found.attention_mask


@lru_cache(maxsize=_KEPT)
def opened_tokenizer(content: bytes) -> Any:
    """A tokenizer of its JSON, made once.

    Raises:
        SettingError: The JSON is no tokenizer, or the ``tokenizers`` package is not installed.
    """
    return _parsed(content)


def _said(tokenizer: TextTokenizer) -> tuple[bytes, dict[str, Any] | None, dict[str, str]]:
    """The JSON of a tokenizer, what it pads with where it says so, and on which sides it pads and cuts."""
    sides = {"padding": "right", "truncation": "right"}
    if isinstance(tokenizer, str | PathLike):
        return _file(Path(tokenizer)), None, sides
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None:  # a fast tokenizer of transformers says these itself
        sides = {"padding": tokenizer.padding_side, "truncation": tokenizer.truncation_side}
        return inner.to_str().encode(), _pad_of_transformers(tokenizer), sides
    if not hasattr(tokenizer, "to_str"):
        raise SettingError(
            "tokenizer takes a path of a tokenizer.json, a tokenizers.Tokenizer or a fast tokenizer of transformers, "
            f"not {type(tokenizer).__name__}"
        )
    return tokenizer.to_str().encode(), None, sides


def _file(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise SettingError(
            f"tokenizer: {path} cannot be read: {error.strerror}; give the path of a tokenizer.json, or a tokenizer, "
            "as of transformers.AutoTokenizer.from_pretrained(name)"
        ) from error


def _parsed(content: bytes) -> Any:
    if not has_tokenizers():
        raise SettingError(_LACKING)
    with _Said():
        return import_module("tokenizers").Tokenizer.from_buffer(content)


class _Said:
    """Translates the errors of the ``tokenizers`` package, which have no class of their own."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception or kind is ValueError:
            raise SettingError(f"tokenizer: this is no tokenizer.json: {str(error)[:200]}") from error


def _pad_of_transformers(tokenizer: TextTokenizer) -> dict[str, Any]:
    if tokenizer.pad_token_id is None:
        raise SettingError("tokenizer has no token to pad with: set tokenizer.pad_token, such as to its eos_token")
    token = str(tokenizer.pad_token)
    return {"pad_id": tokenizer.pad_token_id, "pad_token": token, "pad_type_id": tokenizer.pad_token_type_id}


def _pad_of(tokenizer: Any) -> dict[str, Any]:
    kept = tokenizer.padding
    if kept is not None:
        return {name: kept[name] for name in ("pad_id", "pad_token", "pad_type_id")}
    token = next((token for token in _PADS if tokenizer.token_to_id(token) is not None), None)
    if token is None:
        raise SettingError(f"tokenizer has none of {' and '.join(_PADS)} to pad with: call its enable_padding first")
    return {"pad_id": tokenizer.token_to_id(token), "pad_token": token}


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
_POST_PROCESSORS = frozenset({"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"})
_MAX_STEPS = 16
_MAX_GROWTH = 128
_MAX_WORD = 128  # the usual bound is 100; the time of WordPiece grows with its third power
_MAX_PIECE = 512  # characters of a piece of Unigram, which looks for all pieces at each place
_MAX_ADDED = 64  # characters of a token that stands for others, and tokens that a text is framed by
_MAX_LENGTH = 8192  # as of preprocess.text
_MAX_ENTRIES = 1 << 19  # twice the vocabularies of today's multilingual models; each takes some 230 bytes
# The most bytes that a byte of UTF-8 becomes; U+FDFA has 18 letters in its compatible form. What comes from a library's
# file of rules (Precompiled) is such a form.
_UNICODE_GROWTH = {"BertNormalizer": 3, "Lowercase": 2, "NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Precompiled": 11}
# Blanks around each ideograph, and letters that are longer when they are small.
_AND_MORE = {"BertNormalizer": 1, "Lowercase": 1}
# Measured at the peak, for each byte of a text of which each letter is a token.
_BYTES_PER_BYTE = 400


def text_bytes(tokenizer: bytes, encoded: bytes | memoryview) -> int:
    """An upper bound of the memory that tokenizing a text takes, in bytes.

    Args:
        tokenizer: JSON that ``fit_length`` made, and ``why_unbounded`` says None of; empty where nothing is tokenized.
        encoded: text in UTF-8.
    """
    if not tokenizer:
        return 0
    return _BYTES_PER_BYTE * _growth(tokenizer, _forms_growth(encoded)) * len(encoded)


def _forms_growth(encoded: bytes | memoryview) -> int:
    """The most bytes that a byte of a text takes in its decomposed forms, on average and rounded up; of ASCII 0."""
    if len(encoded) > _MAX_TEXT_BYTES or (content := bytes(encoded)).isascii():
        return 0
    text = content.decode(errors="replace")
    return max(-(-len(unicodedata.normalize(form, text).encode()) // len(content)) for form in ("NFD", "NFKD"))


@lru_cache(maxsize=4 * _KEPT)
def _growth(content: bytes, forms_growth: int) -> int:
    return _growth_of(json.loads(content), forms_growth)


def _growth_of(value: Mapping[str, Any], forms_growth: int | None = None) -> int:
    """The most bytes that a byte of a text becomes before it is divided into tokens, as all steps multiply them.

    Args:
        value: the tokenizer.
        forms_growth: bytes that a byte takes in the text's decomposed forms; None for any text. A step may put any
            letter into the text, for which the bounds of any text hold again.
    """
    growth, bytes_levels = 1, 0
    for step in (*_steps(value, "normalizer"), *_steps(value, "pre_tokenizer")):
        kind = step.get("type")
        if kind in _UNICODE_GROWTH:
            most = _UNICODE_GROWTH[kind]
            growth *= most if forms_growth is None else max(1, min(most, forms_growth + _AND_MORE.get(kind, 0)))
        elif kind in ("Replace", "Prepend"):
            growth *= _inserted(step)
            forms_growth = forms_growth if _inserts(step).isascii() else None
        elif kind == "Metaspace":
            growth, forms_growth = growth * 4, None
        elif kind == "ByteLevel":  # the first makes a letter of each byte, and the next two of most letters
            growth *= (2 if bytes_levels else 1) * (2 if step.get("add_prefix_space", True) else 1)
            bytes_levels, forms_growth = bytes_levels + 1, None
    return growth


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
    if _growth_of(value) > _MAX_GROWTH:
        return "its steps make a text too long"
    return _why_model(value.get("model") or {}) or _why_ends(value) or _why_frame(value)


def _why_model(model: Mapping[str, Any]) -> str | None:
    kind = model.get("type")
    if kind not in _MODELS:
        return f"its model {str(kind)[:40]!r} is unknown here"
    if kind == "WordPiece" and model.get("max_input_chars_per_word", 0) > _MAX_WORD:
        return f"its max_input_chars_per_word is above {_MAX_WORD}"
    if kind == "Unigram" and any(len(piece) > _MAX_PIECE for piece, _ in model.get("vocab", ())):
        return f"it has pieces of more than {_MAX_PIECE} characters"
    if max(len(model.get("vocab", ())), len(model.get("merges", ()))) > _MAX_ENTRIES:
        return f"its vocabulary has more than {_MAX_ENTRIES} entries"
    standing = [model.get(name) or "" for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")]
    return _why_long(standing)


def _why_long(tokens: Iterable[str]) -> str | None:
    """Each stands for many places of a text, and would be copied for each of them."""
    is_long = any(len(token) > _MAX_ADDED for token in tokens)
    return f"a token of its own has more than {_MAX_ADDED} characters" if is_long else None


def _why_ends(value: Mapping[str, Any]) -> str | None:
    """Why cutting or padding is unbounded: what is cut off may be kept many times over."""
    cut, padding, added = value.get("truncation") or {}, value.get("padding") or {}, value.get("added_tokens") or ()
    if cut.get("stride", 0) or cut.get("max_length", 0) > _MAX_LENGTH:
        return f"it keeps what it cuts off, or cuts at more than {_MAX_LENGTH} tokens"
    strategy = padding.get("strategy", {})
    length = strategy.get("Fixed", 0) if isinstance(strategy, dict) else 0
    if max(length, padding.get("pad_to_multiple_of") or 0) > _MAX_LENGTH:
        return f"it pads to more than {_MAX_LENGTH} tokens"
    if len(added) > _MAX_ENTRIES or any(len(token["content"]) > _MAX_PIECE for token in added):
        return f"it has more than {_MAX_ENTRIES} tokens of its own, or one of more than {_MAX_PIECE} characters"
    return _why_long([padding.get("pad_token", "")])


def _why_frame(value: Mapping[str, Any]) -> str | None:
    """Why what frames a text is unbounded."""
    frames = list(_steps(value, "post_processor"))
    strange = [frame for frame in frames if frame.get("type") not in _POST_PROCESSORS]
    if strange:
        return f"its step {str(strange[0].get('type'))[:40]!r} is unknown here"
    templates = [frame for frame in frames if frame.get("type") == "TemplateProcessing"]
    texts = [piece for frame in templates for piece in frame["single"] if "Sequence" in piece]
    special = [token for frame in templates for token in frame["special_tokens"].values()]
    count = sum(len(frame["single"]) + len(frame["pair"]) for frame in templates)
    count += sum(len(token["ids"]) + len(token["tokens"]) for token in special)
    if len(frames) > _MAX_STEPS or len(texts) > 1 or count > _MAX_ADDED:
        return f"it frames a text by more than {_MAX_ADDED} tokens, or has it several times"
    pairs = [frame.get(name) or ("", 0) for frame in frames for name in ("sep", "cls")]
    return _why_long([*(name for token in special for name in token["tokens"]), *(token for token, _ in pairs)])


def _steps(value: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """All steps of a kind in turn, those of sequences in each other too."""
    left = [value[name]] if value.get(name) else []
    while left:
        step = left.pop()
        yield step
        inner = [*step.get("normalizers", ()), *step.get("pretokenizers", ()), *step.get("processors", ())]
        left += reversed(inner)


def _pattern(step: Mapping[str, Any]) -> str | None:
    """The pattern of a step that may take long: a regular expression, or an empty text, which is found everywhere."""
    pattern = step.get("pattern")
    if not isinstance(pattern, dict):
        return None
    return str(pattern["Regex"]) if "Regex" in pattern else (None if pattern.get("String") else "")


def _inserts(step: Mapping[str, Any]) -> str:
    """What a step puts into a text."""
    return str(step.get("prepend" if step.get("type") == "Prepend" else "content", ""))


def _inserted(step: Mapping[str, Any]) -> int:
    """The most bytes that a step makes of one."""
    nbytes, pattern = len(_inserts(step).encode()), step.get("pattern")
    if step.get("type") == "Prepend":  # before each part of a text between two tokens of the tokenizer's own
        return 1 + nbytes  # a text, or a part of one, may be a single byte
    found = len(str(pattern["String"]).encode()) if isinstance(pattern, dict) and "String" in pattern else 1
    return max(1, -(-nbytes // max(1, found)))
