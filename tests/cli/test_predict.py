"""The verb predict: a run's network says of each sample what it says of it in plain PyTorch."""

import csv
import io
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from frostline.preprocess import imagenet
from frostline.preprocess.apply import decode_into
from frostline.training.networks import load_model
from support.commands import run, run_json, trained
from support.images import image_folder

MODEL = ("--model", "support.networks:Small", "--until", "stem", "--accuracy", "exact")
HOW = ("--epochs", "2", "--batch-size", "8", "--val-share", "0.25")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Class folders, the same images in one folder, and a table of them with numbers and lists of labels."""
    root = tmp_path_factory.mktemp("data")
    image_folder(root / "classes", per_class=6)
    paths = sorted((root / "classes").rglob("*.jpg"))
    (root / "unlabelled" / "new").mkdir(parents=True)
    for number, path in enumerate(paths):
        shutil.copy(path, root / "unlabelled" / "new" / f"{number:03}.jpg")
    shutil.copy(paths[0], root / "unlabelled" / "loose.jpg")
    draw = np.random.default_rng(0)
    columns = {
        "image": [path.read_bytes() for path in paths],
        "score": draw.random(len(paths)).tolist(),
        "tags": [["a", "b"][: 1 + number % 2] for number in range(len(paths))],
    }
    (root / "table").mkdir()
    pq.write_table(pa.table(columns), root / "table" / "x.parquet")
    return root


@pytest.fixture(scope="module")
def classified(data, near, tmp_path_factory):
    """The folder of a run on the class folders; read it, don't write to it."""
    return trained(tmp_path_factory.mktemp("run"), "--data", data / "classes", *MODEL, *HOW, *near)


def scores_of(run_folder, encoded):
    """What the saved network says of images, without Frostline's nodes."""
    tensors = load_file(run_folder / "model.safetensors")
    outputs = json.loads((run_folder / "frostline.json").read_text())["outputs"]
    model = load_model("support.networks:Small", classes=outputs, weights=str(run_folder / "model.safetensors")).model
    assert model.state_dict().keys() == tensors.keys()
    pixels = np.empty((len(encoded), 3, 224, 224), np.float32)
    for number, image in enumerate(encoded):
        decode_into(imagenet(224), image, pixels[number], id=number, view=None)
    with torch.no_grad():
        return model.eval()(torch.from_numpy(pixels))


def test_classes_and_their_probabilities_are_those_of_the_network(capsys, data, near, classified, tmp_path):
    out = tmp_path / "said.parquet"
    asked = (
        "predict",
        "--run",
        classified,
        *MODEL[:2],
        "--data",
        data / "unlabelled",
        *near,
        "--accuracy",
        "exact",
        "--out",
        out,
    )
    summary, table = run_json(capsys, *asked), pq.read_table(out)
    images = sorted((data / "unlabelled" / "new").iterdir())
    assert table["object"].to_pylist() == [f"new/{path.name}" for path in images]
    likely, best = scores_of(classified, [path.read_bytes() for path in images]).softmax(1).max(1)
    classes = json.loads((classified / "frostline.json").read_text())["classes"]
    assert table["prediction"].to_pylist() == [classes[number] for number in best]
    np.testing.assert_allclose(table["probability"].to_numpy(), likely.numpy(), rtol=1e-5)
    assert summary["samples"] == len(images) == sum(summary["counts"].values())
    assert (summary["skipped"], summary["out"]) == (0, str(out))
    [left] = summary["left_out"]
    assert (left["reason"], left["total"], left["names"]) == ("in no class folder", 1, ["loose.jpg"])
    assert json.loads((classified / "report.json").read_text())["left_out"] == []


def test_a_table_goes_to_stdout_where_no_file_is_named(capsys, data, near, classified):
    code, out, err = run(capsys, "predict", "--run", classified, *MODEL[:2], "--data", data / "classes", *near)
    assert code == 0, err
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [*rows[0]] == ["object", "prediction", "probability"]
    assert len(rows) == len(list((data / "classes").rglob("*.jpg")))


@pytest.mark.parametrize(("column", "loss"), [("score", "mse"), ("tags", "bce")])
def test_numbers_and_several_labels_are_those_of_the_network(capsys, data, near, tmp_path, column, loss):
    how = (*MODEL, *HOW, *near, "--targets", column, "--loss", loss)
    folder = trained(tmp_path / "run", "--data", data / "table", *how)
    out = tmp_path / "said.csv"
    said = run(
        capsys,
        "predict",
        "--run",
        folder,
        *MODEL[:2],
        "--data",
        data / "table",
        *near,
        "--accuracy",
        "exact",
        "--out",
        out,
    )
    assert said[0] == 0, said[2]
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    encoded = pq.read_table(data / "table" / "x.parquet")["image"].to_pylist()
    scores = scores_of(folder, encoded)
    if loss == "mse":
        np.testing.assert_allclose([float(row["prediction"]) for row in rows], scores[:, 0].numpy(), rtol=1e-4)
        return
    likely = [[float(value) for value in row["probabilities"].split(";")] for row in rows]
    np.testing.assert_allclose(likely, scores.sigmoid().numpy(), rtol=1e-4)
    names = [[name for name, value in zip("ab", row, strict=True) if value > 0.5] for row in likely]
    assert [row["prediction"] for row in rows] == [";".join(labels) for labels in names]


def test_explains_what_cannot_be_predicted(capsys, data, near, classified, tmp_path):
    for run_folder, options, sentence in (
        (tmp_path, (), "there is no run in"),
        (tmp_path, ("--out", "said.txt"), "are written to .csv or .parquet"),
        (tmp_path, ("--json",), "name a file (--out)"),
    ):
        code, _, err = run(capsys, "predict", "--run", run_folder, "--data", data / "unlabelled", *near, *options)
        assert code == 2
        assert sentence in " ".join(err.split())
    folder = shutil.copytree(classified, tmp_path / "run")
    (folder / "model.safetensors").unlink()
    code, _, err = run(capsys, "predict", "--run", folder, *MODEL[:2], "--data", data / "unlabelled", *near)
    assert code == 2
    assert "which is written when it ends" in " ".join(err.split())


@pytest.mark.promise(
    "data", mended="a run folder had predict make a classifier of a million outputs that learned nothing"
)
@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({"outputs": 1 << 20, "classes": []}, {}, "gives 3 scores for a sample, and its config says 1048576"),
        ({"outputs": 4, "classes": []}, {}, "gives 3 scores for a sample, and its config says 4"),
        ({"classes": ["a"]}, {}, "it names 1 classes for 3 scores"),
        ({"classes": ["a"] * 9}, {}, "it names 9 classes for 3 scores"),
        ({"classes": ["a", "b", "\ud800"]}, {}, "cannot be read"),
        ({}, {"samples": "arrays:" + "9" * 5000}, "--samples says images"),
        ({}, {"samples": "waves:1@" + "9" * 5000}, "--samples says images"),
    ],
)
def test_a_config_that_does_not_fit_its_network_is_refused(
    capsys, data, near, classified, tmp_path, config, options, said
):
    folder = tmp_path / "given"
    shutil.copytree(classified, folder)
    written = json.loads((folder / "frostline.json").read_text())
    changed = {**written, **config, "options": {**written["options"], **options}}
    (folder / "frostline.json").write_text(json.dumps(changed))
    code, _, err = run(capsys, "predict", "--run", folder, *MODEL[:2], "--data", data / "unlabelled", *near)
    assert code == 2
    assert said in " ".join(err.split())


def test_samples_that_are_not_finite_are_counted_in_both_results(capsys, data, near, tmp_path):
    model = ("--model", "support.networks:Rooted")
    more = (*model, *MODEL[2:], "--epochs", "1", "--batch-size", "8", "--val-share", "0", "--allow-nonfinite")
    folder = trained(tmp_path / "run", "--data", data / "classes", *more, *near)
    report = json.loads((folder / "report.json").read_text())
    assert 0 < report["nonfinite"] < report["samples"]
    assert "gave Inf or NaN for sample circle/" in report["first_nonfinite"]
    assert report["first_nonfinite"] in (folder / "report.html").read_text()
    for name in ("noise", "stripe"):
        shutil.copytree(data / "classes" / name, tmp_path / "bright" / name)
    learned = trained(tmp_path / "learned", "--data", tmp_path / "bright", *more, *near)
    assert json.loads((learned / "report.json").read_text())["nonfinite"] == 0
    capsys.readouterr()
    asked = ("predict", "--run", learned, *model, "--data", data / "classes", *near, "--out", tmp_path / "said.csv")
    said = run_json(capsys, *asked, "--allow-nonfinite")
    assert (said["nonfinite"], said["samples"]) == (report["nonfinite"], report["samples"])
    assert "gave Inf or NaN for sample circle/" in said["first_nonfinite"]
