"""A file that is a data set by its name is one to every verb."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frostline.datasets import Dataset
from support.commands import run, run_json
from support.formats import tar_of
from support.nodes import jpeg

MODEL = ("--model", "support.networks:Small", "--until", "stem")
IMAGES = {f"{number}.jpg": jpeg(number) for number in range(8)}
NAMES = ("x.csv", "x.tar", "x.tar.gz", "x.parquet", "x.arrow")


def _table():
    images = pa.array([{"bytes": data, "path": None} for data in IMAGES.values()])
    return pa.table({"image": images, "label": [number % 2 for number in range(len(IMAGES))]})


def _put_files(folder):
    """Five data sets of the same images of two classes, each as one file, and the images of the list."""
    tar = tar_of([(f"{'ab'[row % 2]}/{name}", IMAGES[name]) for row, name in enumerate(IMAGES)])
    (folder / "x.tar").write_bytes(tar)
    (folder / "x.tar.gz").write_bytes(gzip.compress(tar))
    (folder / "x.csv").write_text(
        "\n".join(["path,label", *(f"images/{name},{'ab'[row % 2]}" for row, name in enumerate(IMAGES))])
    )
    pq.write_table(_table(), folder / "x.parquet")
    with pa.OSFile(str(folder / "x.arrow"), "wb") as file, pa.ipc.new_stream(file, _table().schema) as writer:
        writer.write_table(_table())
    (folder / "images").mkdir()
    for name, data in IMAGES.items():
        (folder / "images" / name).write_bytes(data)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    _put_files(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_every_verb_takes_a_file_by_its_name(capsys, files, near, tmp_path, name):
    url, out = files / name, tmp_path / "run"
    there = sorted(path.name for path in files.iterdir())

    assert run_json(capsys, "index", "--data", url, "--check")["samples"] == len(IMAGES)
    run_json(capsys, "plan", "--data", url, *MODEL, *near)
    report = run_json(capsys, "train", "--data", url, *MODEL, *near, "--epochs", 1, "--val-share", 0.25, "--out", out)
    assert (report["train_samples"], report["val_samples"], len(report["classes"])) == (6, 2, 2)
    run_json(capsys, "extract", "--data", url, *MODEL, *near, "--out", tmp_path / "features.parquet")
    assert pq.read_table(tmp_path / "features.parquet").num_rows == len(IMAGES)
    table = tmp_path / "said.parquet"
    assert run(capsys, "predict", "--run", out, *MODEL[:2], "--data", url, *near, "--out", table)[0] == 0
    assert pq.read_table(table).num_rows == len(IMAGES)
    for form in ("ready", "original", "parquet"):
        how = ("--format", form, *(("--preprocess", "imagenet:32") if form == "ready" else ()))
        run_json(capsys, "ingest", url, tmp_path / form, *how)
        assert len(Dataset(tmp_path / form).samples) == len(IMAGES)
    assert sorted(path.name for path in files.iterdir()) == there, "nothing is written beside the file"
