"""The verb train on texts of Parquet files: the network's folder has the tokenizer, and losses are a plain loop's."""

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import frostline as fl
from frostline.core.errors import SettingError, WeightsMissing
from frostline.training.networks import load_model
from support.commands import run, run_json
from support.texts import TEXTS, small_bert, small_distilbert, tokenizer_of_words, write_reviews

UNTIL = "distilbert.transformer.layer.0"
TOKENS = 12
pytestmark = pytest.mark.usefixtures("no_hub")


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reviews")
    return folder, write_reviews(folder / "x.parquet", rows=40)


def saved(folder, model=None, tokenizer="file"):
    """A folder as people have them: a network, and a tokenizer as its package or as transformers writes it."""
    folder.mkdir(exist_ok=True)
    model = small_distilbert() if model is None else model
    model.save_pretrained(folder)
    if tokenizer == "file":
        tokenizer_of_words().save(str(folder / "tokenizer.json"))
    elif tokenizer == "transformers":
        fast_tokenizer().save_pretrained(folder)
    return model.eval()


def fast_tokenizer(**options):
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer_of_words(), **special, **options)


def batch_of(preprocess):
    """Token ids and mask of some texts."""
    from frostline.preprocess.apply import decode_into

    rows = np.zeros((len(TEXTS), *preprocess.shape), np.int64)
    for row, words in zip(rows, TEXTS, strict=True):
        decode_into(preprocess, words.encode(), row, id=0, view=None)
    return torch.from_numpy(rows)


@pytest.mark.parametrize("tokenizer", ["file", "transformers"])
@pytest.mark.parametrize("make", [small_bert, small_distilbert])
def test_a_folder_gives_its_network_and_its_tokenizer(tmp_path, make, tokenizer):
    theirs = saved(tmp_path, make(), tokenizer)
    found = load_model(f"hf:{tmp_path}", classes=2)
    rows = batch_of(found.preprocess)
    meant = fast_tokenizer()(list(TEXTS), padding="max_length", truncation=True, max_length=64, return_tensors="pt")
    assert torch.equal(rows[:, 0], meant["input_ids"])
    assert torch.equal(rows[:, 1], meant["attention_mask"])
    with torch.no_grad():
        given = found.model.eval()(rows[:, 0], rows[:, 1])
        assert torch.equal(given, theirs(rows[:, 0], attention_mask=rows[:, 1]).logits)
    assert found.plain_preprocess == found.preprocess


def test_a_text_has_128_tokens_or_as_many_as_the_network_has_positions_for(tmp_path):
    saved(tmp_path / "short")
    saved(tmp_path / "long", small_distilbert_of(512))
    assert load_model(f"hf:{tmp_path / 'short'}", classes=2).preprocess.shape == (2, 64)
    assert load_model(f"hf:{tmp_path / 'long'}", classes=2).preprocess.shape == (2, 128)
    assert load_model(f"hf:{tmp_path / 'long'}", classes=2, max_length=300).preprocess.shape == (2, 300)
    with pytest.raises(SettingError, match="--max-length 65: the network has positions for 64 tokens"):
        load_model(f"hf:{tmp_path / 'short'}", classes=2, max_length=65)


def small_distilbert_of(positions):
    config = hf.DistilBertConfig(
        vocab_size=64, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=positions
    )
    return hf.DistilBertForSequenceClassification(config)


def test_a_decoder_without_a_padding_token_pads_with_its_end_token(tmp_path):
    config = hf.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=2, eos_token_id=3
    )
    theirs = saved(tmp_path, hf.GPT2ForSequenceClassification(config), None)
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer_of_words(pad="the end"), eos_token="[SEP]")
    tokenizer.save_pretrained(tmp_path)
    found = load_model(f"hf:{tmp_path}", classes=2)
    rows = batch_of(found.preprocess)
    theirs.config.pad_token_id = 3
    with torch.no_grad():
        given = found.model.eval()(rows[:, 0], rows[:, 1])
        assert torch.equal(given, theirs(input_ids=rows[:, 0], attention_mask=rows[:, 1]).logits)


def test_another_tokenizer_is_taken_from_a_file_or_another_folder(tmp_path):
    saved(tmp_path / "bare", tokenizer=None)
    saved(tmp_path / "other", tokenizer="transformers")
    tokenizer_of_words().save(str(tmp_path / "own.json"))
    by_file = load_model(f"hf:{tmp_path / 'bare'}", classes=2, tokenizer=str(tmp_path / "own.json"))
    by_folder = load_model(f"hf:{tmp_path / 'bare'}", classes=2, tokenizer=f"hf:{tmp_path / 'other'}")
    assert torch.equal(batch_of(by_file.preprocess), batch_of(by_folder.preprocess))


def test_a_factory_takes_texts_where_a_tokenizer_is_named(tmp_path):
    tokenizer_of_words().save(str(tmp_path / "own.json"))
    made = load_model("support.texts:small_words", classes=5, tokenizer=str(tmp_path / "own.json"), max_length=8)
    rows = batch_of(made.preprocess)
    assert made.model(rows[:, 0], rows[:, 1]).shape == (len(TEXTS), 5)


@pytest.mark.parametrize("lost", ["tokenizer.json", "all"])
def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path, lost):
    saved(tmp_path, tokenizer=None if lost == "all" else "transformers")
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(
        WeightsMissing, match=r"holds no tokenizer.json, .* or name a tokenizer with --tokenizer"
    ) as why:
        load_model(f"hf:{tmp_path}", classes=2)
    assert "\n" not in str(why.value)


def test_refuses_text_options_for_images_and_image_options_for_texts(tmp_path):
    saved(tmp_path)
    with pytest.raises(SettingError, match="--augment crops and flips images"):
        load_model(f"hf:{tmp_path}", classes=2, augment=True)
    with pytest.raises(SettingError, match="--max-length is for texts"):
        load_model("support.networks:Small", classes=2, max_length=8)
    with pytest.raises(SettingError, match=r"there\.json cannot be read"):
        load_model(f"hf:{tmp_path}", classes=2, tokenizer=str(tmp_path / "there.json"))


def test_frostline_trains_a_classifier_of_texts_in_one_command(capsys, reviews, near, tmp_path):
    folder, texts = reviews
    saved(tmp_path / "model")
    asked = ["--data", folder, "--column", "text", "--model", f"hf:{tmp_path / 'model'}", "--until", UNTIL]
    asked += ["--max-length", TOKENS, *near, "--batch-size", 8, "--epochs", 2, "--out", tmp_path / "out"]
    report = run_json(capsys, "train", *asked, "--accuracy", "exact")
    assert report["settings"]["column"] == "text"
    assert report["settings"]["max_length"] == TOKENS
    assert report["losses"] == pytest.approx(plain_losses(tmp_path / "model", folder, texts), abs=1e-6)
    theirs = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", local_files_only=True)
    assert theirs.config.num_labels == 2
    ours = load_model(
        f"hf:{tmp_path / 'model'}", classes=2, weights=str(tmp_path / "out" / "model.safetensors"), max_length=TOKENS
    ).model.eval()
    ids, mask = torch.randint(0, 20, (4, TOKENS)), torch.ones((4, TOKENS), dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(ours(ids, mask), theirs.eval()(ids, attention_mask=mask).logits)


def plain_losses(model, folder, texts):
    """What a loop over the whole network loses, on the order of the verb."""
    network = hf.AutoModelForSequenceClassification.from_pretrained(model)
    for parameter in [*network.distilbert.embeddings.parameters(), *layer_of(network).parameters()]:
        parameter.requires_grad_(False)
    data = fl.Dataset(folder, column="text")
    places = {id: row for row, id in enumerate(data.samples.ids.tolist())}
    train, _ = data.split(0.2)
    labels = torch.tensor(data.samples.labels)
    optimizer = torch.optim.Adam([each for each in network.parameters() if each.requires_grad], 2e-3)
    losses = []
    torch.manual_seed(0)
    for epoch in range(2):
        network.train()
        network.distilbert.embeddings.eval()
        layer_of(network).eval()
        for batch in fl.loader(train, 8, shuffle=True, epoch=epoch, preprocess=tokens()):
            rows = [places[id] for id in batch.ids.tolist()]
            some = fast_tokenizer()(
                [texts[row] for row in rows], padding="max_length", max_length=TOKENS, truncation=True
            )
            scores = network(**{name: torch.tensor(some[name]) for name in ("input_ids", "attention_mask")}).logits
            losses.append(step(scores, labels[rows], optimizer))
    return losses


def tokens():
    return fl.preprocess.text(tokenizer_of_words(), TOKENS)


def layer_of(network):
    return network.distilbert.transformer.layer[0]


def step(scores, labels, optimizer):
    loss = nn.functional.cross_entropy(scores, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_plan_and_extract_take_texts_too(capsys, reviews, near, tmp_path):
    saved(tmp_path / "model")
    asked = ["--data", reviews[0], "--column", "text", "--model", f"hf:{tmp_path / 'model'}", "--until", UNTIL]
    asked += ["--max-length", TOKENS, *near]
    # One tensor crosses behind the last layer, where a file of features begins: the mask is used up.
    for verb, more in (("plan", ()), ("extract", ("--until", "features", "--out", tmp_path / "features.parquet"))):
        code, _, errors = run(capsys, verb, *asked, *more)
        assert not code, errors


def test_reports_a_missing_tokenizer_in_one_sentence(capsys, reviews, near, tmp_path):
    saved(tmp_path / "model", tokenizer=None)
    asked = ["--data", reviews[0], "--column", "text", "--model", f"hf:{tmp_path / 'model'}", "--until", UNTIL]
    code, _, errors = run(capsys, "train", *asked, *near)
    assert code
    assert "--tokenizer" in errors
    assert "Traceback" not in errors


def test_the_head_is_trained_beside_the_store_too(capsys, reviews, tmp_path):
    saved(tmp_path / "model")
    asked = ["--data", reviews[0], "--column", "text", "--model", f"hf:{tmp_path / 'model'}", "--until", UNTIL]
    asked += ["--max-length", TOKENS, "--epochs", 1, "--batch-size", 8, "--policy", "all_in_store", "--memory", "1GB"]
    run_json(capsys, "train", *asked)
