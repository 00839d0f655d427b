"""The verb train with recipes of its own: in the report, refused when they change, and known to predict."""

import csv
import io
import json

import pytest
import torch
from safetensors.torch import load_file

from frostline.cli import main
from support.images import image_folder

MODEL = ("--model", "support.networks:Small", "--until", "stem", "--accuracy", "exact")
LOSS = """
import torch

def focal(scores, targets):
    likely = torch.log_softmax(scores, 1).gather(1, targets[:, None])
    return -((1 - likely.exp()) ** 2 * likely).mean()

def vector(scores, targets):
    return scores
"""


@pytest.fixture(scope="module", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=6)


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return ended.value.code, said.out, " ".join(said.err.split())


def test_a_recipe_of_ones_own_is_reported_kept_and_refused_when_it_changes(capsys, folder, near, tmp_path):
    file, out = tmp_path / "losses.py", tmp_path / "run"
    file.write_text(LOSS)
    recipe = ("--loss", f"{file}:focal", "--metrics", "macro_f1,accuracy", "--schedule", "cosine", "--warm-up", 0.1)
    how = ("--epochs", 2, "--batch-size", 4, "--val-share", 0.25, "--weight-decay", 0.01, "--bf16", "--patience", 2)
    asked = ("train", "--data", folder, *MODEL, *near, *recipe, *how, "--out", out)
    code, said, err = run(capsys, *asked, "--json")
    assert code == 0, err
    report = json.loads(said)
    assert list(report["val_score"]) == ["macro_f1", "accuracy"]
    assert [len(values) for values in report["val_scores"].values()] == [2, 2]
    assert report["val_accuracy"] == report["val_score"]["accuracy"]
    for name, value in (("schedule", "cosine"), ("warm_up", 0.1), ("weight_decay", 0.01), ("bf16", True)):
        assert report["settings"][name] == value
    page = " ".join((out / "report.html").read_text().split())
    assert "warm-up of 10.0 %, cosine learning rate, patience of 2 epochs, computed in bfloat16" in page
    assert "held-out macro-F1" in page
    again = ("--resume", out, *MODEL[:2], *recipe[:2], *near)
    for option, value in (("--schedule", "linear"), ("--metrics", "accuracy"), ("--weight-decay", 0.5)):
        code, _, err = run(capsys, "train", *again, option, value)
        assert (code, f"began with {option}" in err) == (2, True), err
    code, said, err = run(capsys, "train", *again, "--json")
    assert code == 0, err
    assert json.loads(said)["losses"] == report["losses"]
    file.write_text(LOSS.replace("** 2", "** 3"))
    code, _, err = run(capsys, "train", *again)
    assert (code, "the lines of the loss function's file" in err) == (2, True), err
    file.unlink()  # what was learned needs it no more
    code, said, err = run(capsys, "predict", "--run", out, *MODEL[:2], "--data", folder, *near)
    assert code == 0, err
    rows = list(csv.DictReader(io.StringIO(said)))
    assert len(rows) == len(list(folder.rglob("*.jpg")))
    assert all(torch.isfinite(tensor).all() for tensor in load_file(out / "model.safetensors").values())


def test_what_draws_the_report_is_imported_beside_the_first_epoch(capsys, folder, near, tmp_path, monkeypatch):
    imported = []
    monkeypatch.setattr("frostline.training.run.import_module", imported.append)
    asked = ("train", "--data", folder, *MODEL, *near, "--out", tmp_path / "run")
    code, _, err = run(capsys, *asked, "--lr", -1, "--epochs", 1)
    assert (code, imported) == (2, []), err
    code, _, err = run(capsys, *asked, "--epochs", 2)
    assert (code, imported) == (0, ["frostline.training.report.page"]), err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--loss", "nowhere.py:loss"), "nowhere.py cannot be read"),
        (("--loss", "LOSSES:nothing"), "has no function 'nothing'"),
        (("--loss", "LOSSES:vector", "--epochs", 1), "must give the mean loss of a batch as one number"),
        (("--loss", "huber"), "loss is one of cross-entropy, bce, mse or FILE.py:FUNCTION"),
        (("--task", "numbers"), "cross-entropy is for classes, not for numbers"),
        (("--loss", "LOSSES:focal", "--task", "labels"), "--targets"),
        (("--metrics", "auroc"), "no metric 'auroc' for classes"),
        (("--schedule", "cosine"), "say how many epochs there are"),
        (("--val-share", 0, "--patience", 3), "patience counts epochs"),
        (("--label-smoothing", 0.1, "--loss", "LOSSES:focal"), "label_smoothing is of the loss cross-entropy"),
        (("--metrics", "macro_f1", "--policy", "all_in_store"), "accuracy alone"),
        (("--lora", "body:r=2", "--policy", "all_in_store"), "trains no adapters"),
        (("--loss", "LOSSES:focal", "--policy", "all_in_store"), "no functions of one's own"),
    ],
)
def test_what_a_recipe_cannot_be_is_refused_in_a_sentence(capsys, folder, near, tmp_path, options, words):
    file = tmp_path / "losses.py"
    file.write_text(LOSS)
    options = [str(option).replace("LOSSES", str(file)) for option in options]
    code, _, err = run(capsys, "train", "--data", folder, *MODEL, *near, *options)
    assert (code, words in err) == (2, True), err
