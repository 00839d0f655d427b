"""Some rows of docs/networks.md: what its command measures is what the page says."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from support.matrices import sampled

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "networks.md"
SOME = {
    ("torchvision convnext_tiny", "bfloat16"),
    ("diffusers AutoencoderKL, its encoder", "bfloat16"),
    ("timm mixer_s32_224", "float32"),
    ("timm vit_tiny_patch16_224 + LoRA", "bfloat16"),
    ("transformers CLIPModel", "bfloat16"),
    ("transformers GPT2ForSequenceClassification", "float32"),
    ("transformers LlamaForCausalLM", "bfloat16"),
    ("transformers SegformerForSemanticSegmentation", "float32"),
    ("transformers Wav2Vec2ForSequenceClassification", "float32"),
    ("transformers WhisperForAudioClassification", "bfloat16"),
}
USUAL = (
    "torchvision convnext_tiny",
    "timm vit_tiny_patch16_224 + LoRA",
    "transformers GPT2ForSequenceClassification",
    "transformers Wav2Vec2ForSequenceClassification",
)


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield runpy.run_path(str(BENCHMARKS / "network_table.py"))
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def results():
    [*_, latest] = sorted((BENCHMARKS / "results").glob("*-networks.json"))
    return json.loads(latest.read_text(encoding="utf-8"))["figures"]["networks"]


@pytest.mark.parametrize(("title", "dtype"), sampled(sorted(SOME), USUAL))
def test_a_network_gives_what_the_table_says(tools, results, title, dtype):
    row = next(row for row in tools["NETWORKS"] if row.title == title)
    said = next(row for row in results if (row["network"], row["dtype"]) == (title, dtype))
    found = tools["measured"](row, dtype)
    for name in ("failure", "until", "cuts", "frost_line", "bytes", "input_bytes", "fallback", "gradients"):
        assert found.get(name) == said.get(name), name
    assert tools["equal"](found) == "to the bit"


def test_the_page_shows_the_committed_figures(tools, results):
    page = PAGE.read_text(encoding="utf-8")
    assert tools["with_table"](page, results) == page


def test_every_network_of_the_command_is_in_the_table_in_both_dtypes(tools, results):
    measured = [(row["network"], row["until"], row["dtype"]) for row in results]
    assert measured == [(row.title, row.until, dtype) for row in tools["NETWORKS"] for dtype in tools["DTYPES"]]


def test_a_failed_network_is_a_row_with_its_reason(tools):
    row = next(row for row in tools["NETWORKS"] if row.title == "timm mixer_s32_224")
    broken = type(row)(name="odd", library="timm", build=lambda: 1 / 0, inputs=row.inputs, until="a")
    found = [tools["measured"](broken, dtype) for dtype in tools["DTYPES"]]
    assert "| timm odd (1) | `a` |" in tools["table"](found)
    assert "1. timm odd: division by zero." in tools["table"](found)
