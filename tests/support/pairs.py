"""Images with captions in Parquet files, and small networks that take both."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from frostline import preprocess
from support.texts import TEXTS, tokenizer_of_words

__all__ = (
    "COLUMNS",
    "SIDE",
    "TOKENS",
    "encoded_array",
    "encoded_image",
    "frozen_clip",
    "pair_inputs",
    "small_clip",
    "write_pairs",
    "write_processor",
)

SIDE, TOKENS = 16, 8
COLUMNS = {"pixel_values": "image", "input_ids": "caption"}


def pair_inputs():
    """Preprocessing of an image and of its caption."""
    text = preprocess.text(tokenizer_of_words(), max_length=TOKENS)
    return preprocess.named_inputs(pixel_values=preprocess.imagenet(SIDE), input_ids=text)


def encoded_image(draw):
    """A PNG of noise, of some size."""
    height, width = draw.integers(20, 30, 2)
    file = io.BytesIO()
    Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def encoded_array(array):
    """An array as ``.npy`` bytes."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write_processor(folder):
    """The file that says how the images of ``small_clip`` are prepared."""
    says = {
        "do_center_crop": True,
        "crop_size": {"height": SIDE, "width": SIDE},
        "size": {"shortest_edge": SIDE},
        "resample": 3,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(says))


def write_pairs(path, rows=24, seed=0):
    """A Parquet file with the columns ``image``, ``caption``, ``label`` and ``source``; its captions."""
    draw = np.random.default_rng(seed)
    images = [{"bytes": encoded_image(draw), "path": f"{row}.png"} for row in range(rows)]
    captions = [f"{TEXTS[row % 4]} {'very ' * int(draw.integers(0, 4))}" for row in range(rows)]
    labels, sources = [row % 3 for row in range(rows)], [f"page {row}" for row in range(rows)]
    table = pa.table({"image": images, "caption": captions, "label": labels, "source": sources})
    pq.write_table(table, path, row_group_size=10)
    return captions


def small_clip(seed=0):
    """A CLIP with random weights."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        "vocab_size": 64,
        "max_position_embeddings": TOKENS,
        "eos_token_id": 3,
        "bos_token_id": 2,
        "pad_token_id": 0,
    }
    image = {"image_size": SIDE, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config={**sizes, **text}, vision_config={**sizes, **image}, projection_dim=8))


def frozen_clip(seed=0):
    """The same with both encoders frozen; projections and scale are trained."""
    model = small_clip(seed).train()
    for encoder in (model.vision_model, model.text_model):
        encoder.requires_grad_(False).eval()
    return model
