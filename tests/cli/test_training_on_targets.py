"""The verb train on declared targets: numbers, vectors, several labels, and classes of a column of their own."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import nn

import frostline as fl
from frostline.training.networks import load_model
from support.commands import run, run_json
from support.formats import tar_of

ROWS = 40
MODEL = "support.networks:Small"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures whose brightness is their score, and whose tags say which colours are strong."""
    folder, draw = tmp_path_factory.mktemp("targets"), np.random.default_rng(0)
    columns = {name: [] for name in ("image", "score", "vector", "tags", "kind", "gap", "words")}
    for row in range(ROWS):
        strong = draw.integers(0, 2, 3)
        pixels = draw.integers(0, 100, (48, 48, 3)) + 120 * strong
        out = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(out, "PNG")
        columns["image"].append(out.getvalue())
        columns["score"].append(float(strong.mean()))
        columns["vector"].append(strong.astype(float).tolist())
        columns["tags"].append([name for name, is_strong in zip("bgr", strong, strict=True) if is_strong])
        columns["kind"].append(int(strong[0]))
        columns["gap"].append(None if row == 3 else 1.5)
        columns["words"].append("text")
    pq.write_table(pa.table(columns), folder / "x.parquet")
    return folder


def asked(folder, near, *options):
    plain = ("train", "--data", folder, "--model", MODEL, "--until", "stem", "--batch-size", 8, "--accuracy", "exact")
    return *plain, *near, *options


LEARNED = {
    "score": ("mse", "score", 1, nn.functional.mse_loss),
    "vector": ("mse", "vector", 3, nn.functional.mse_loss),
    "tags": ("bce", fl.MultiLabel(column="tags"), 3, nn.functional.binary_cross_entropy_with_logits),
    "kind": ("cross-entropy", "kind", 2, nn.functional.cross_entropy),
}


@pytest.mark.parametrize("column", LEARNED)
def test_losses_and_scores_are_those_of_a_plain_loop(capsys, folder, near, tmp_path, column):
    loss, declared, outputs, loss_of = LEARNED[column]
    out = tmp_path / "out"
    how = ("--targets", column, "--loss", loss, "--epochs", 2, "--out", out)
    report = run_json(capsys, *asked(folder, near, *how))
    assert report == json.loads((out / "report.json").read_text())
    assert (report["settings"]["targets"], report["settings"]["loss"]) == (column, loss)

    network = load_model(MODEL, classes=outputs)
    fl.freeze(network.model, "stem", input_shape=network.preprocess.shape)
    data = fl.Dataset(folder, targets=declared)
    with fl.offload(network.model, data, preprocess=network.preprocess, near=near[1], accuracy="exact") as job:
        train, held = job.data.split(0.2)
        torch.manual_seed(0)
        parameters = [parameter for parameter in job.head.parameters() if parameter.requires_grad]
        optimizer, losses = torch.optim.Adam(parameters, 2e-3), []
        for epoch in range(2):
            job.head.train()
            for batch in job.loader(8, data=train, shuffle=True, epoch=epoch):
                scores = job.head(batch.features)
                targets = batch.targets[:, None] if column == "score" else batch.targets
                found = loss_of(scores, targets)
                optimizer.zero_grad()
                found.backward()
                optimizer.step()
                losses.append(found.item())
        job.head.eval()
        batch = next(iter(job.loader(len(held), data=held)))
        scores = job.head(batch.features).detach().numpy()
    assert report["losses"] == pytest.approx(losses, rel=1e-6)
    for name, value in scores_of(column, scores, batch.targets.numpy()).items():
        assert report["val_score"][name] == pytest.approx(value, rel=1e-5)
        assert report["val_scores"][name][-1] == report["val_score"][name]
    assert report["val_accuracy"] == (report["val_score"]["accuracy"] if column == "kind" else None)
    page = (out / "report.html").read_text()
    words = {"mse": "mean absolute error", "bce": "macro-F1", "cross-entropy": "held-out samples right"}
    assert words[loss] in page


def scores_of(column, scores, targets):
    """The metrics as their definitions say them."""
    if column == "kind":
        return {"accuracy": (scores.argmax(1) == targets).mean()}
    if column == "tags":
        said, meant = scores > 0, targets > 0
        hits, both = (said & meant).sum(0), said.sum(0) + meant.sum(0)
        return {"macro_f1": np.where(both > 0, 2 * hits / np.maximum(both, 1), 1).mean()}
    errors = scores - targets.reshape(scores.shape)
    return {"mae": np.abs(errors).mean(), "rmse": np.sqrt((errors**2).mean())}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--loss", "mse"), "--targets"),
        (("--targets", "gap", "--loss", "mse"), "1 of 40 samples have no value in the column 'gap'"),
        (("--targets", "words", "--loss", "mse"), "mse is for numbers and vectors"),
        (("--targets", "score", "--loss", "bce"), "holds no lists of classes"),
        (("--targets", "score"), "no whole numbers of classes"),
        (("--targets", "words"), "take it as the label: --label words (in Python label='words')"),
        (("--targets", "nothing", "--loss", "mse"), "no column 'nothing'"),
        (("--targets", "score", "--loss", "mse", "--policy", "all_in_store"), "classes alone"),
    ],
)
def test_refuses_a_loss_that_does_not_fit_the_targets_before_building_a_network(capsys, folder, near, options, words):
    code, _, errors = run(capsys, *asked(folder, near, *options))
    assert code == 2
    assert words in errors


def test_labels_with_fractions_are_learned_where_they_are_named(capsys, folder, near, tmp_path):
    images = pq.read_table(folder / "x.parquet")["image"].to_pylist()[:10]
    members = [(f"{row}.{kind}", data) for row, image in enumerate(images)
               for kind, data in (("png", image), ("json", json.dumps({"label": row / 4}).encode()))]  # fmt: skip
    (tmp_path / "x.tar").write_bytes(tar_of(members))
    code, _, errors = run(capsys, *asked(tmp_path, near, "--epochs", 1))
    assert (code, "targets='label'" in errors) == (2, True)
    how = ("--targets", "label", "--loss", "mse", "--epochs", 1)
    assert run(capsys, *asked(tmp_path, near, *how))[0] == 0


def test_training_says_how_many_samples_have_no_label_and_how_to_leave_them_out(capsys, folder, near, tmp_path):
    images = pq.read_table(folder / "x.parquet")["image"].to_pylist()[:20]
    said = [None if row % 10 == 9 else ("Dog", "dog")[row % 2] for row in range(len(images))]
    for name, labels in (("names", said), ("numbers", [label and 1.0 + 2 * (label == "dog") for label in said])):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / name / "x.parquet")
        code, _, errors = run(capsys, *asked(tmp_path / name, near, "--epochs", 1))
        assert (code, "2 of 20 samples of" in errors) == (2, True), errors
        assert "--where 'label is not None'" in errors
        where = ("--where", "label is not None", "--epochs", 1, "--json")
        code, report, errors = run(capsys, *asked(tmp_path / name, near, *where))
        assert code == 0, errors
        assert json.loads(report)["samples"] + json.loads(report)["val_samples"] == 18
        assert ("2 of 4 classes have samples: labels are numbers" in errors) == (name == "numbers"), errors
        assert ("'Dog' and 'dog'; where they are one" in errors) == (name == "names"), errors


def test_a_split_to_score_that_has_no_labels_is_refused_where_it_is_named(capsys, folder, near, tmp_path):
    images = pq.read_table(folder / "x.parquet")["image"].to_pylist()
    labels = [None if row >= 12 else ("cat", "dog")[row % 2] for row in range(16)]
    for name, rows in (("train", slice(0, 8)), ("val", slice(8, 12)), ("test", slice(12, 16))):
        pq.write_table(pa.table({"image": images[rows], "label": labels[rows]}), tmp_path / f"{name}.parquet")
    code, _, errors = run(capsys, *asked(tmp_path, near, "--epochs", 1, "--val-split", "test"))
    assert (code, "4 of 4 samples of" in errors) == (2, True), errors
    assert run(capsys, *asked(tmp_path, near, "--epochs", 1))[0] == 0, "the test split takes no part"


def test_a_function_of_ones_own_learns_labels_where_it_is_said_so(capsys, folder, near, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from torch.nn.functional import binary_cross_entropy_with_logits as loss\n")
    how = ("--targets", "tags", "--epochs", 1, "--json")
    reports = []
    for options in (("--loss", "bce"), ("--loss", f"{file}:loss", "--task", "labels", "--metrics", "auroc")):
        code, said, errors = run(capsys, *asked(folder, near, *how, *options))
        assert code == 0, errors
        reports.append(json.loads(said))
    named, own = reports
    assert own["losses"] == named["losses"]
    assert list(named["val_score"]) == ["macro_f1", "auroc"]
    assert own["val_score"] == {"auroc": named["val_score"]["auroc"]}
    assert own["classes"] == named["classes"]
