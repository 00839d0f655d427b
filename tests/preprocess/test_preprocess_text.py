"""Text as token ids and a mask: equal to transformers' own, and bounded."""

import json
import pickle

import numpy as np
import pytest

from frostline import preprocess
from frostline.core.errors import BadRequest, SampleError, SettingError
from frostline.preprocess import CenterCrop, Preprocess, Tokenize
from frostline.preprocess.apply import decode_into, pixels_needed
from support.texts import TEXTS, tokenizer_of_words

transformers = pytest.importorskip("transformers")


def tokens_of(made, text):
    out = np.full(made.shape, -1, np.int64)
    decode_into(made, text.encode(), out, id=0, view=None)
    return out


def fast_tokenizer(**options):
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer_of_words(), **special, **options)


@pytest.mark.parametrize("options", [{}, {"padding_side": "left"}, {"truncation_side": "left"}])
def test_gives_the_ids_and_the_mask_of_a_fast_tokenizer_of_transformers(options):
    tokenizer = fast_tokenizer(**options)
    made = preprocess.text(tokenizer, max_length=8)
    for text in [*TEXTS, "", "unheard of", "good " * 50, "Ümläute 🙂"]:
        meant = tokenizer(text, padding="max_length", truncation=True, max_length=8)
        assert tokens_of(made, text).tolist() == [meant["input_ids"], meant["attention_mask"]]


def test_a_path_and_a_tokenizer_are_the_same_preprocessing(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer_of_words().save(str(path))
    by_path, by_value = preprocess.text(path, max_length=8), preprocess.text(tokenizer_of_words(), max_length=8)
    assert by_path == by_value
    assert by_path.digest == by_value.digest


def test_says_shape_and_type_of_a_sample():
    made = preprocess.text(tokenizer_of_words(), max_length=16)
    assert (made.shape, made.dtype, made.levels, made.is_random) == ((2, 16), "int64", None, False)
    assert [(spec.shape, spec.dtype) for spec in made.inputs.values()] == [((16,), "int64")] * 2


def test_comes_back_from_json_and_gets_its_tokenizer_by_digest():
    made = preprocess.text(tokenizer_of_words(), max_length=8)
    again = Preprocess.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made
    assert again.digest == made.digest
    assert not again.tokenizer
    assert tokens_of(again.with_tokenizer(made.tokenizer), TEXTS[0]).tolist() == tokens_of(made, TEXTS[0]).tolist()
    with pytest.raises(SettingError, match="SHA-256"):
        again.with_tokenizer(made.tokenizer + b" ")


def test_goes_to_a_worker_with_its_tokenizer():
    made = preprocess.text(tokenizer_of_words(), max_length=8)
    assert pickle.loads(pickle.dumps(made)).tokenizer == made.tokenizer


def test_digest_depends_on_length_and_tokenizer():
    digests = {
        preprocess.text(tokenizer_of_words(*words), length).digest for words in [(), ("more",)] for length in (8, 9)
    }
    assert len(digests) == 4


def test_refuses_an_invalid_tokenizer(tmp_path):
    (tmp_path / "broken.json").write_text('{"model": 3}')
    for strange, said in [
        (tmp_path / "broken.json", "no tokenizer.json"),
        (tmp_path / "none.json", "cannot be read"),
        (3, "not int"),
    ]:
        with pytest.raises(SettingError, match=said):
            preprocess.text(strange)
    with pytest.raises(SettingError, match="pad"):
        preprocess.text(tokenizer_of_words(pad="<nothing>"))


@pytest.mark.parametrize("length", [0, 8193, True, 1.5])
def test_refuses_an_invalid_length(length):
    with pytest.raises(SettingError, match="max_length"):
        preprocess.text(tokenizer_of_words(), length)


@pytest.mark.parametrize("names", [("a",), ("a", "a"), ("a b", "c"), "ab", ("a", 1)])
def test_refuses_names_that_are_no_two_arguments(names):
    with pytest.raises(SettingError, match="names"):
        preprocess.text(tokenizer_of_words(), names=names)


def test_tokenizing_allows_no_other_step():
    step = preprocess.text(tokenizer_of_words()).steps[0]
    for steps in [(step, CenterCrop(3)), (CenterCrop(3), step), (step, step)]:
        with pytest.raises(SettingError):
            Preprocess(steps=steps)
    with pytest.raises(BadRequest, match="SHA-256"):
        Preprocess.from_json({"steps": [{"step": "tokenize", "tokenizer": [], "max_length": 3, "names": ["a", "b"]}]})
    assert isinstance(step, Tokenize)


def test_skips_a_text_that_is_missing_or_too_long():
    made = preprocess.text(tokenizer_of_words(), max_length=8)
    out = np.zeros(made.shape, np.int64)
    for encoded, said in [(b"\xff\xfe", "UTF-8"), (b"a" * ((1 << 18) + 1), "up to 262144")]:
        with pytest.raises(SampleError, match=said):
            decode_into(made, encoded, out, id=0, view=None)


def test_memory_of_a_text_grows_with_it():
    made = preprocess.text(tokenizer_of_words(), max_length=8)
    assert pixels_needed(made, b"") == 0
    assert pixels_needed(made, b"a" * 1000) == -(-400_000 // 22)
    assert pixels_needed(made, "İ".encode() * 500) == -(-800_000 // 22)
