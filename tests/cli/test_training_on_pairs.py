"""The verbs on samples of an image and a text: one command trains on both, and losses are those of a loop."""

import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import frostline as fl
from frostline.core.errors import SettingError
from frostline.training.networks import load_model
from frostline.training.settings import by_input
from support.commands import run, run_json
from support.pairs import COLUMNS, SIDE, TOKENS, encoded_array, small_clip, write_pairs, write_processor
from support.texts import small_bert, tokenizer_of_words

COLUMN = ",".join(f"{name}={column}" for name, column in COLUMNS.items())
UNTIL = "vision_model.encoder.layers.0+text_model.encoder.layers.0"
HOW = ("--batch-size", 8, "--epochs", 2, "--accuracy", "exact")
pytestmark = pytest.mark.usefixtures("no_hub")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder / "train.parquet", rows=30)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder as people have them: a small CLIP, its tokenizer, and how its images are prepared."""
    folder = tmp_path_factory.mktemp("clip")
    small_clip().save_pretrained(folder)
    tokenizer_of_words().save(str(folder / "tokenizer.json"))
    write_processor(folder)
    return folder


def test_trains_on_both_in_one_command_as_a_plain_loop_and_predicts(capsys, pairs, model, near, tmp_path):
    asked = ("--data", pairs, "--column", COLUMN, "--model", f"hf:{model}", "--until", UNTIL, *near, *HOW)
    report = run_json(capsys, "train", *asked, "--out", tmp_path / "run")
    assert report["fallback"] is None
    assert report["settings"]["column"] == COLUMN
    network, losses = plain_losses(model, pairs)
    assert report["losses"] == pytest.approx(losses, abs=1e-6)

    table = tmp_path / "predictions.csv"
    code, _, err = run(capsys, "predict", "--run", tmp_path / "run", "--data", pairs, *near, "--out", table)
    assert code == 0, err
    rows = list(csv.DictReader(table.read_text().splitlines()))
    with torch.no_grad():
        [batch] = fl.loader(fl.Dataset(pairs, column=COLUMNS), 30, preprocess=network.preprocess)
        scores = network.model.eval()(**network.preprocess.unpack(batch.features))
    assert [row["prediction"] for row in rows] == [str(number) for number in scores.argmax(1).tolist()]
    assert [float(row["probability"]) for row in rows] == pytest.approx(scores.softmax(1).amax(1).tolist(), abs=1e-5)


def plain_losses(model, pairs):
    """What a loop over the whole network loses, frozen by hand, on the order of the verb."""
    data = fl.Dataset(pairs, column=COLUMNS)
    network = load_model(f"hf:{model}", classes=3, parts={"pixel_values": "images", "input_ids": "texts"})
    clip = network.model.network
    frozen = [clip.vision_model.embeddings, clip.vision_model.pre_layrnorm, clip.vision_model.encoder.layers[0]]
    frozen += [clip.text_model.embeddings, clip.text_model.encoder.layers[0]]
    for module in frozen:
        module.requires_grad_(False)
    optimizer = torch.optim.Adam([each for each in network.model.parameters() if each.requires_grad], 2e-3)
    losses, (train, _) = [], data.split(0.2)
    torch.manual_seed(0)
    for epoch in range(2):
        network.model.train()
        for module in frozen:
            module.eval()
        for batch in fl.loader(train, 8, shuffle=True, epoch=epoch, preprocess=network.preprocess):
            scores = network.model(**network.preprocess.unpack(batch.features))
            loss = nn.functional.cross_entropy(scores, batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return network, losses


def test_a_folder_gives_the_embeddings_of_both_and_a_classifier_behind_them(model):
    found = load_model(f"hf:{model}", classes=5, parts={"input_ids": "texts", "pixel_values": "images"})
    assert found.preprocess.part_names == ("input_ids", "pixel_values")
    assert found.preprocess.tokens.max_length == TOKENS
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn((3, 3, SIDE, SIDE), generator=draw)
    ids = torch.randint(4, 20, (3, TOKENS), generator=draw)
    inputs = {"pixel_values": pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    theirs = small_clip().eval()(**inputs)
    with torch.no_grad():
        meant = found.model.classifier(torch.cat([theirs.image_embeds, theirs.text_embeds], 1))
        assert torch.equal(found.model.eval()(**inputs), meant)
    assert meant.shape == (3, 5)


def test_augment_draws_other_images_and_leaves_texts_alone(model):
    parts = {"pixel_values": "images", "input_ids": "texts"}
    found = load_model(f"hf:{model}", classes=2, parts=parts, augment=True)
    assert found.preprocess.is_random
    assert [part.is_random for part in found.preprocess.parts] == [True, False]
    assert not found.plain_preprocess.is_random


def test_plan_and_extract_take_both_too(capsys, pairs, model, near, tmp_path):
    asked = ("--data", pairs, "--column", COLUMN, "--model", f"hf:{model}", "--until", "features", *near)
    code, said, errors = run(capsys, "plan", *asked, "--json")
    assert not code, errors
    assert json.loads(said)["mixture"]
    code, _, errors = run(capsys, "extract", *asked, "--out", tmp_path / "features.parquet")
    assert not code, errors
    assert np.stack(pq.read_table(tmp_path / "features.parquet")["features"].to_pylist()).shape == (30, 16)


def small_signals():
    """A network of the user's own that takes an image, a text and a signal."""

    class Signals(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.image, self.words = nn.Conv2d(3, 4, 16, stride=16), nn.Embedding(64, 4)
            self.signal, self.scores = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, *, signal, pixel_values, input_ids, attention_mask):
            words = (self.words(input_ids) * attention_mask[..., None].to(torch.float32)).sum(1)
            return self.scores(self.image(pixel_values).mean((2, 3)) + words + torch.relu(self.signal(signal)))

    return Signals()


def test_a_network_of_ones_own_takes_what_its_first_sample_and_samples_say(capsys, near, tmp_path):
    (tmp_path / "data").mkdir()
    write_pairs(tmp_path / "data" / "x.parquet", rows=12)
    table = pq.read_table(tmp_path / "data" / "x.parquet")
    signals = np.random.default_rng(2).normal(size=(len(table), 5))
    table = table.append_column("wave", pa.array(map(encoded_array, signals), pa.binary()))
    pq.write_table(table, tmp_path / "data" / "x.parquet")
    tokenizer_of_words().save(str(tmp_path / "own.json"))
    asked = ("--data", tmp_path / "data", "--column", f"{COLUMN},signal=wave", *near, "--until", "image+words+signal")
    asked += ("--model", f"{__name__}:small_signals", "--epochs", 1, "--batch-size", 4)
    asked += ("--tokenizer", tmp_path / "own.json", "--max-length", TOKENS)
    report = run_json(capsys, "train", *asked, "--out", tmp_path / "run")
    assert report["fallback"] is None
    said = json.loads((tmp_path / "run" / "frostline.json").read_text())["options"]["samples"]
    assert said == "pixel_values=images,input_ids=texts,signal=arrays:5"


def refusals(pairs, model, bert):
    hugging_face = ("--model", f"hf:{model}", "--until", "features")
    own = ("--model", "support.texts:small_words", "--until", "features")
    return [
        (("--column", "pixel_values=image,=caption", *hugging_face), "--column says NAME=VALUE once for each input"),
        (("--column", "pixel_values=image", *hugging_face), "column names from 2 to 8 inputs"),
        (("--column", "pixel_values=image,input_ids=captoin", *hugging_face), "no column 'captoin'"),
        (("--column", "pixels=image,input_ids=caption", *hugging_face), "an image as pixel_values and a text as input"),
        (("--column", COLUMN, "--samples", "arrays:5", *hugging_face), "--samples says what inputs are by their names"),
        (("--column", COLUMN, "--samples", "wave=arrays:5", *hugging_face), "--column names pixel_values, input_ids"),
        (("--column", COLUMN, "--samples", "pixel_values=arrays:x", *own), "--samples says images"),
        (("--column", COLUMN, "--samples", "pixel_values=arrays:5", *hugging_face), "leave out --samples"),
        (("--column", COLUMN, "--model", f"hf:{bert}", "--until", "features"), "embeds no images with texts"),
        (("--column", COLUMN, "--model", "torchvision:resnet18", "--until", "layer3"), "takes one input"),
        (("--column", COLUMN, *own), "input_ids is a text: name its tokenizer (--tokenizer)"),
        (("--column", COLUMN, "--model", f"hf:{model}", "--until", "vision_model+txt_model"), "no layer 'txt_model'"),
    ]


def test_what_makes_no_sense_is_refused_in_one_sentence_that_names_the_option(capsys, pairs, model, near, tmp_path):
    small_bert().save_pretrained(tmp_path / "bert")
    for arguments, why in refusals(pairs, model, tmp_path / "bert"):
        code, _, errors = run(capsys, "train", "--data", pairs, *arguments, *near)
        assert code == 2, errors
        assert why in " ".join(errors.split()), errors
        assert "Traceback" not in errors


def test_what_an_option_says_of_inputs_is_read_in_its_order():
    assert by_input(" pixel_values = image , input_ids=caption", "--column") == COLUMNS
    assert by_input("caption", "--column") == by_input(None, "--column") == {}
    for wrong in ("a=b,c", "a=b,a=c", "a b=c,d=e", "a=,b=c"):
        with pytest.raises(SettingError, match="--column says NAME=VALUE"):
            by_input(wrong, "--column")


def test_a_file_for_both_processors_is_read_too(model, tmp_path):
    small_clip().save_pretrained(tmp_path)
    tokenizer_of_words().save(str(tmp_path / "tokenizer.json"))
    own = json.loads((model / "preprocessor_config.json").read_text())
    says = {"image_processor": own, "processor_class": "CLIPProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(says))
    parts = {"pixel_values": "images", "input_ids": "texts"}
    found = load_model(f"hf:{tmp_path}", classes=2, parts=parts)
    assert found.preprocess == load_model(f"hf:{model}", classes=2, parts=parts).preprocess
