"""The verbs on sounds and arrays: what samples are is known by their files, and answers are those of plain PyTorch."""

import csv
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import frostline as fl
from frostline.cli import main
from frostline.core import CELLS
from frostline.core.errors import DataError, SettingError
from frostline.datasets.reading import open_samples
from frostline.preprocess.apply import decode_into
from frostline.training.settings import describe_samples, preprocess_of
from support.signals import array_bytes, signal_network, some_arrays, spectrogram_network, write_arrays
from support.sounds import some_waves, write_sounds

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

ROWS = 12
HOW = ("--until", "1", "--accuracy", "exact")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sounds in class folders; arrays in class folders, and in columns of lists."""
    root = tmp_path_factory.mktemp("data")
    write_sounds(root / "sounds", *some_waves(rows=ROWS))
    arrays, labels = some_arrays(rows=ROWS)
    write_arrays(root / "arrays", "folders", arrays, labels)
    (root / "lists").mkdir()
    flat = pa.array([array.reshape(-1) for array in arrays])
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.stack(arrays))
    table = pa.table({"flat": flat, "tensor": tensors, "label": labels})
    pq.write_table(table, root / "lists" / "x.parquet", row_group_size=5)
    return root


def run(capsys, verb, *options):
    with pytest.raises(SystemExit) as ended:
        main([verb, *map(str, options)])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    return said.out


def inputs_of(data, preprocess):
    """Every sample as the network takes it, in the order of the data."""
    samples, store = data.samples, open_samples(data.url, data.manifest.reading)
    rows = np.empty((len(data), *preprocess.shape), np.float32)
    places = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    for row, place in zip(rows, places, strict=True):
        decode_into(preprocess, bytes(store.read(*place)), row, id=0, view=None)
    return torch.from_numpy(rows)


@pytest.mark.parametrize(
    ("name", "network", "kind"),
    [("sounds", spectrogram_network, "sounds:0.3"), ("arrays", signal_network, "arrays:3x40")],
)
def test_the_verbs_know_samples_by_their_suffixes(capsys, data, near, tmp_path, name, network, kind):
    found = fl.Dataset(data / name)
    assert describe_samples(found) == kind
    how = ("--data", data / name, "--model", f"support.signals:{network.__name__}", *HOW, *near)

    assert json.loads(run(capsys, "plan", *how, "--json"))

    run(capsys, "extract", *how, "--out", tmp_path / "features.parquet")
    features = pq.read_table(tmp_path / "features.parquet")["features"].combine_chunks().to_numpy_ndarray()
    inputs = inputs_of(found, preprocess_of(kind))
    torch.manual_seed(0)
    with torch.no_grad():
        np.testing.assert_allclose(features, network()[:4](inputs).numpy(), rtol=1e-5, atol=1e-6)

    run(capsys, "train", *how, "--epochs", 2, "--batch-size", 4, "--out", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "frostline.json").read_text())["options"]["samples"] == kind
    model = network()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    said = run(
        capsys, "predict", "--run", tmp_path / "run", *how[2:4], "--data", data / name, "--accuracy", "exact", *near
    )
    rows = {row["object"]: row for row in csv.DictReader(io.StringIO(said))}
    with torch.no_grad():
        likely, best = model.eval()(inputs).softmax(1).max(1)
    for object, probability, label in zip(found.names, likely.tolist(), best.tolist(), strict=True):
        assert rows[object]["prediction"] == str(label)
        assert float(rows[object]["probability"]) == pytest.approx(probability, abs=1e-5)


def test_lists_of_numbers_in_parquet_are_arrays(capsys, data, near, tmp_path):
    table = pq.read_table(data / "lists" / "x.parquet")
    for column, shape in (("flat", (120,)), ("tensor", (3, 40))):
        found = fl.Dataset(data / "lists", column=column)
        assert found.manifest.reading == CELLS
        assert describe_samples(found, is_column_named=True) == f"arrays:{'x'.join(map(str, shape))}"
        expected = np.array(table["flat"].to_pylist(), np.float32).reshape(-1, *shape)
        assert np.array_equal(inputs_of(found, preprocess_of(f"arrays:{'x'.join(map(str, shape))}")), expected)
    out = tmp_path / "f.safetensors"
    how = ("--data", data / "lists", "--column", "tensor", "--model", "support.signals:signal_network")
    run(capsys, "extract", *how, *HOW, *near, "--out", out)
    assert len(load_file(out)["features"]) == ROWS


def test_lists_of_lists_of_any_length_are_no_samples_and_missing_lists_none(tmp_path):
    pq.write_table(
        pa.table({"x": [[1.0, 2.0], None, [3.0, 4.0]], "y": [[[1.0]], [[2.0], []], []]}), tmp_path / "x.parquet"
    )
    data = fl.Dataset(tmp_path, column="x")
    store = open_samples(data.url, data.manifest.reading)
    sample = data.samples.take(np.array([1]))
    assert len(data) == 2
    read = bytes(store.read(sample.objects[0], int(sample.offsets[0]), int(sample.lengths[0])))
    assert read == array_bytes(np.array([3.0, 4.0]))
    with pytest.raises(DataError, match="has no column 'y' of texts, lists of numbers or binary values"):
        len(fl.Dataset(tmp_path, column="y"))


def test_images_as_arrays_of_numpy_stay_images(tmp_path):
    write_arrays(tmp_path, "folders", [np.zeros((8, 8, 3), np.uint8)] * 2, [0, 1])
    assert describe_samples(fl.Dataset(tmp_path)) == "images"


@pytest.mark.parametrize(
    ("words", "shape", "dtype"),
    [
        ("sounds:0.5", (1, 80, 51), "float32"),
        ("waves:0.5@8000", (4000,), "float32"),
        ("arrays:12x5", (12, 5), "float32"),
        ("arrays:7:int64", (7,), "int64"),
    ],
)
def test_words_say_what_samples_are(words, shape, dtype):
    made = preprocess_of(words)
    assert (made.shape, made.dtype) == (shape, dtype)


@pytest.mark.parametrize("words", ["sound", "sounds", "sounds:-1", "arrays:", "arrays:3x", "arrays:3:int8", "texts"])
def test_refuses_words_that_say_nothing(words):
    with pytest.raises(SettingError, match="--samples says images, sounds:SECONDS") as caught:
        preprocess_of(words)
    assert "\n" not in str(caught.value)
