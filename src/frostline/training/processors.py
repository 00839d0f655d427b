"""Reads a pretrained network's own image processor and tokenizer into preprocessing steps.

Says a network's ``preprocessor_config.json``, as transformers writes it, in preprocessing steps.

Finds the tokenizer of a network: that of its own folder, or the file or the repository that the user names.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from frostline.core.errors import ModelError, SettingError, WeightsMissing
from frostline.preprocess import CenterCrop, Decode, Normalize, Preprocess, Resize, Squeeze, Step, text
from frostline.preprocess.steps import CHANNELS, Mode
from frostline.preprocess.tokens import TextTokenizer
from frostline.training.pretrained import import_package, reading

__all__ = ("TOKENIZER_FILES", "Processor", "pad_id_of", "processor_of", "texts_for", "tokenizer_in")


_FILTERS: Mapping[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}
_SQUEEZED_FROM = 384
"""From this side on ConvNeXt's processor crops nothing."""
_BROKEN = (AttributeError, LookupError, OSError, TypeError, ValueError, ZeroDivisionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """How a network's images are prepared.

    Attributes:
        preprocess: steps that come nearest to what the file says.
        otherwise: sentences on where they differ from it; mostly none.
    """

    preprocess: Preprocess
    otherwise: tuple[str, ...] = ()


_MODES: Mapping[int, Mode] = {CHANNELS[mode]: mode for mode in CHANNELS}


def processor_of(file: Path) -> Processor:
    """Read the file of an image processor.

    Raises:
        ModelError: It is none, or says nothing that steps can say.
    """
    try:
        says = json.loads(file.read_text())
        # Where images and texts have one file, what is said of images stands in an object of its own.
        return _processor(says.get("image_processor", says))
    except _BROKEN as error:
        raise ModelError(f"{file} says no preparation of images that can be followed: {error}") from error


def _processor(says: Mapping[str, Any]) -> Processor:
    kernel = int(says.get("resample", 2))
    otherwise = []
    if kernel not in _FILTERS:
        otherwise.append(f"its images are resized by filter {kernel} of Pillow where it was made, and here by bicubic")
    levels = _levels(says)
    scaled = _scaled(says, _FILTERS.get(kernel, "bicubic"))
    steps = (Decode(mode=_MODES.get(len(levels.mean), "RGB")), *scaled, levels)
    return Processor(preprocess=Preprocess(steps=steps), otherwise=tuple(otherwise))


def _scaled(says: Mapping[str, Any], kernel: Literal["bilinear", "bicubic"]) -> tuple[Step, ...]:
    """How an image becomes a square: its shorter side is scaled and the middle cut out, or all of it is squeezed."""
    size = says.get("size")
    shortest = size.get("shortest_edge") if isinstance(size, Mapping) else None
    if says.get("do_center_crop"):
        crop = CenterCrop(size=_square(says["crop_size"]))
        if shortest:
            return Resize(shorter=int(shortest), filter=kernel), crop
        whole = Squeeze(size=_square(size), filter=kernel)
        return (whole,) if whole.size == crop.size else (whole, crop)
    if shortest and "crop_pct" in says and int(shortest) < _SQUEEZED_FROM:
        shorter = int(int(shortest) / float(says["crop_pct"] or 0.875))
        return Resize(shorter=shorter, filter=kernel), CenterCrop(size=int(shortest))
    return (Squeeze(size=int(shortest) if shortest else _square(size), filter=kernel),)


def _square(size: object) -> int:
    if isinstance(size, int):
        return size
    if not isinstance(size, Mapping) or size.get("height") != size.get("width"):
        raise ValueError(f"images become squares here, and its size is {size}")
    return int(size["height"])


def _levels(says: Mapping[str, Any]) -> Normalize:
    """Mean and standard deviation on the scale of pixels, which the file says on a scale of its own."""
    factor = float(says.get("rescale_factor", 1 / 255)) if says.get("do_rescale", True) else 1.0
    moved = 1.0 if says.get("rescale_offset") else 0.0
    normalised = bool(says.get("do_normalize", True))
    mean = says["image_mean"] if normalised else [0.0, 0.0, 0.0]
    std = says["image_std"] if normalised else [1.0, 1.0, 1.0]
    return Normalize(
        mean=tuple((float(value) + moved) / factor for value in mean), std=tuple(float(value) / factor for value in std)
    )


_JSON, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
_BESIDE = (_CONFIG, "special_tokens_map.json", "added_tokens.json", "merges.txt")
_MAX_LENGTH = 128

TOKENIZER_FILES = (_JSON, *_VOCABULARIES, *_BESIDE)
"""Names of the files that a tokenizer of transformers may have."""


def texts_for(tokenizer: TextTokenizer, max_length: int | None, config: object = None) -> Preprocess:
    """The preprocessing of texts for a network.

    Args:
        tokenizer: see ``preprocess.text``.
        max_length: number of tokens of a text; None takes 128, or as many as the network has positions for.
        config: configuration of transformers, which may say how many positions there are.

    Raises:
        SettingError: The network has fewer positions, or the tokenizer cannot be used.
    """
    positions = getattr(config, "max_position_embeddings", None)
    maximum = positions if isinstance(positions, int) and positions > 0 else None
    if max_length is not None and maximum is not None and max_length > maximum:
        raise SettingError(f"--max-length {max_length}: the network has positions for {maximum} tokens")
    return text(tokenizer, max_length or min(_MAX_LENGTH, maximum or _MAX_LENGTH))


def tokenizer_in(name: str, folder: Path) -> TextTokenizer:
    """The tokenizer that ``save_pretrained`` wrote into a folder.

    Args:
        name: the folder or the repository, as the user gave it.
        folder: the folder.

    Raises:
        WeightsMissing: The folder holds none.
        ModelError: It cannot be read.
    """
    if not any((folder / file).is_file() for file in (_JSON, *_VOCABULARIES)):
        raise WeightsMissing(
            f"{name}: {folder} holds no {_JSON}, which turns texts into the network's tokens: bring it there, or name "
            "a tokenizer with --tokenizer FILE or hf:OWNER/NAME"
        )
    # Without its configuration transformers would guess what a tokenizer does, and the file says all of it.
    if (folder / _JSON).is_file() and not (folder / _CONFIG).is_file():
        return folder / _JSON
    return _read(name, folder)


def _read(name: str, folder: Path) -> Any:
    hf = import_package("transformers", "transformers")
    with reading(f"{name}, its tokenizer,", folder):
        found = hf.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    # Decoders such as GPT-2 are published without one; what stands at its places is masked out.
    if found.pad_token_id is None and found.eos_token is not None:
        found.pad_token = found.eos_token
    return found


def pad_id_of(texts: Preprocess) -> int:
    """Id of the token that texts are padded with."""
    return int(json.loads(texts.tokenizer)["padding"]["pad_id"])
