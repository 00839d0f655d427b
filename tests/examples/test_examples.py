"""Every example runs as it stands there, on a little data of its kind, and says what it found."""

import json
import re
import subprocess
import sys
from contextlib import ExitStack, chdir
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.images import image_folder
from support.prepared import prepared_starts

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 250


@pytest.fixture(scope="module", autouse=True)
def _prepared_starts():
    with prepared_starts("torchvision", "timm", "transformers.models.auto"):
        yield


def photos(folder):
    return image_folder(folder / "photos", per_class=6)


def scenes(folder):
    """Images, each with its mask of dark and bright pixels."""
    draw = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (folder / "scenes" / kind).mkdir(parents=True)
    for number in range(8):
        bright = np.repeat(np.repeat(draw.random((4, 4)) < 0.5, 16, 0), 16, 1)
        Image.fromarray((bright[..., None] * [200, 180, 160] + 20).astype(np.uint8)).save(
            folder / "scenes" / "images" / f"{number}.jpg"
        )
        Image.fromarray(bright.astype(np.uint8)).save(folder / "scenes" / "masks" / f"{number}.png")
    return folder / "scenes"


def sounds(folder):
    from support.sounds import some_waves, write_sounds

    write_sounds(folder / "sounds", *some_waves(rows=16))
    return folder / "sounds"


def reviews(folder):
    from transformers import PreTrainedTokenizerFast

    from support.texts import small_distilbert, tokenizer_of_words, write_reviews

    (folder / "reviews").mkdir()
    write_reviews(folder / "reviews" / "reviews.parquet")
    small_distilbert().save_pretrained(folder / "network")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of_words(), pad_token="[PAD]", model_input_names=["input_ids", "attention_mask"]
    ).save_pretrained(folder / "network")
    return folder / "reviews"


def photos_and_a_network(folder):
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ViTForImageClassification(ViTConfig(image_size=64, **sizes)).save_pretrained(folder / "network")
    ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder / "network")
    return photos(folder)


PLAIN = ["--weights", "none", "--epochs", "2"]
RUNS = {
    "adapter_with_reference.py": (
        photos,
        ["--model", "vit_tiny_patch16_224", "--random", "--epochs", "2"],
        r"epoch 2: loss \d\.\d+, 0\.\d+ from the network without adapters\nblocks up to .*blocks\.9",
    ),
    "embeddings_to_parquet.py": (
        photos,
        ["--random"],
        r"18 embeddings of 512 numbers in embeddings\.parquet\nnearest to circle/000\.jpg: \w+/\d+\.jpg, \w+/",
    ),
    "image_classification.py": (
        photos,
        PLAIN,
        r"epoch 2: [\d.]+% of 3 held-out photographs are right\n(.|\n)*frozen layers up to",
    ),
    "k_fold.py": (
        photos,
        ["--folds", "3", *PLAIN],
        r"fold 3: [\d.]+% of 6 photographs are right\nmean [\d.]+%; 72 of 90 samples came from memory",
    ),
    "lightning_finetuning.py": (
        photos,
        ["--unfreeze", "1", *PLAIN],
        r"loss \d+\.\d+; the frost line is at (pixels|encoded) now",
    ),
    "many_nodes.py": (
        photos,
        PLAIN,
        r"epoch 2: loss \d+\.\d+\nhttp://127\.0\.0\.1:\d+: [1-9]\d* requests\nhttp://localhost:\d+: [1-9]\d* requests",
    ),
    "moving_average.py": (
        photos,
        PLAIN,
        r"epoch 2: [\d.]+% are right by the weights\nepoch 2: [\d.]+% are right by their average",
    ),
    "s3_loop.py": (
        photos,
        ["--weights", "none", "--stop-after", "2"],
        r"step 1: loss \d+\.\d+\nstep 2: loss \d+\.\d+\n(.|\n)*going on behind 2 steps\nstep 3: loss \d+\.\d+\n$",
    ),
    "segmentation.py": (
        scenes,
        ["--classes", "2", "--side", "64", *PLAIN],
        r"epoch 2: loss \d+\.\d+, [\d.]+% of the pixels were right",
    ),
    "sound_classification.py": (
        sounds,
        ["--seconds", "0.3", *PLAIN],
        r"epoch 2: loss \d+\.\d+, \d+ of 16 sounds were right",
    ),
    "text_classification.py": (
        reviews,
        ["--model", "network", "--until", "distilbert.transformer.layer.0", "--max-length", "16", "--epochs", "2"],
        r"epoch 2: loss \d+\.\d+\n24 of 48 texts came from memory",
    ),
    "transformers_trainer.py": (
        photos_and_a_network,
        ["--model", "network", "--out", "run", "--epochs", "1"],
        r"loss \d+\.\d+ on 3 held-out photographs",
    ),
}


def test_every_example_is_run():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(RUNS)
    assert len(RUNS) >= 10


@pytest.mark.parametrize("example", RUNS)
def test_an_example_runs_and_says_what_it_found(tmp_path, monkeypatch, request, example):
    monkeypatch.chdir(tmp_path)
    make, arguments, says = RUNS[example]
    data, again = make(tmp_path), False
    if example == "many_nodes.py":  # two names of one node: each is asked for its own part
        url = request.getfixturevalue("shared_node").url
        arguments = [*arguments, "--near", url, "--near", url.replace("127.0.0.1", "localhost")]
    if example == "s3_loop.py":
        server, again = request.getfixturevalue("s3"), True
        server.put_folder(data, "loop")
        data = "s3://loop"
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
    output, said = tmp_path / "output.txt", ""
    for _ in range(1 + again):
        command = [sys.executable, EXAMPLES / example, data, *arguments]
        with output.open("wb") as file:
            done = subprocess.run(command, stdout=file, stderr=file, timeout=TIMEOUT_S)
        said += output.read_text(errors="replace")
        assert done.returncode == 0, said[-4000:]
        arguments = [*arguments[:2]]  # the second time to its end
    assert re.search(says, said), said[-4000:]


# What fetches weights over the network, which tests do without.
RANDOM = ("pretrained=True", "pretrained=False")


@pytest.mark.parametrize("notebook", sorted(path.name for path in EXAMPLES.glob("*.ipynb")))
def test_a_notebook_runs_from_its_first_cell_to_its_last(tmp_path, notebook):
    photos(tmp_path)
    cells = json.loads((EXAMPLES / notebook).read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 4
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code"), "clear the outputs"
    names = {}
    with chdir(tmp_path):
        for number, cell in enumerate(code):
            exec(compile(cell.replace(*RANDOM), f"{notebook}[{number}]", "exec"), names)
    assert len(names["x"])


def test_the_first_lines_of_the_readme_are_a_loop_that_runs(tmp_path):
    """But for the node, its folder and the fetched weights, as they stand there."""
    photos(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```python\n(import timm.*?)^```", text, re.M | re.S)
    assert len(lines.splitlines()) == 5
    names = {}
    with chdir(tmp_path), ExitStack() as stack:
        here = lines.replace(*RANDOM).replace(', near="http://store-1:7070"', "").replace("/data/photos", "photos")
        exec(here, names)
        stack.callback(names["job"].close)
        assert names["loss"].item() > 0
