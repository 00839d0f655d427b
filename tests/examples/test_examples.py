"""Every example runs as it stands there, on a folder of images, and says what it found."""

import re
from pathlib import Path

import pytest

from support.images import image_folder
from support.quick_forms import prepared_processes, run_script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUNS = {
    "adapter_with_reference.py": (
        ["--model", "vit_tiny_patch16_224", "--random", "--epochs", "2"],
        r"epoch 2: loss \d\.\d+, 0\.\d+ from the network without adapters\nblocks up to .*blocks\.9",
    ),
    "k_fold.py": (
        ["--folds", "3", "--epochs", "2", "--weights", "none"],
        r"fold 3: [\d.]+% of 6 photographs are right\nmean [\d.]+%; 72 of 90 samples came from memory",
    ),
    "lightning_finetuning.py": (
        ["--epochs", "2", "--unfreeze", "1", "--weights", "none"],
        r"loss \d+\.\d+; the frost line is at (pixels|encoded) now",
    ),
    "moving_average.py": (
        ["--epochs", "2", "--weights", "none"],
        r"epoch 2: [\d.]+% are right by the weights\nepoch 2: [\d.]+% are right by their average",
    ),
    "transformers_trainer.py": (
        ["--model", "network", "--out", "run", "--epochs", "1"],
        r"loss \d+\.\d+ on 3 held-out photographs",
    ),
}
TIMEOUT_S = 250


@pytest.fixture(scope="module")
def processes():
    with prepared_processes() as context:
        yield context


def network_of_transformers(folder):
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ViTForImageClassification(ViTConfig(image_size=64, **sizes)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)


def test_every_example_is_run():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(RUNS)


@pytest.mark.parametrize("example", RUNS)
def test_an_example_runs_and_says_what_it_found(processes, tmp_path, monkeypatch, example):
    monkeypatch.chdir(tmp_path)
    arguments, says = RUNS[example]
    if "network" in arguments:
        network_of_transformers(tmp_path / "network")
    photos, output = image_folder(tmp_path / "photos", per_class=6), tmp_path / "output.txt"
    code = run_script(processes, EXAMPLES / example, [photos, *arguments], output, TIMEOUT_S)
    said = output.read_text(errors="replace")
    assert code == 0, said[-4000:]
    assert re.search(says, said), said[-4000:]
