"""Reads a pretrained network's own image processor and tokenizer into preprocessing steps.

Says a network's ``preprocessor_config.json``, as transformers writes it, in preprocessing steps.

Finds the tokenizer of a network: that of its own folder, or the file or the repository that the user names.
"""

import json
from pathlib import Path
from typing import Any

from frostline.core.errors import ModelError, SettingError, WeightsMissing
from frostline.preprocess import Preprocess, text
from frostline.preprocess.tokens import TextTokenizer
from frostline.preprocess.transforms import Processor, processor_from_json
from frostline.training.pretrained import import_package, reading

__all__ = ("TOKENIZER_FILES", "pad_id_of", "processor_of", "texts_for", "tokenizer_in")


_BROKEN = (AttributeError, LookupError, OSError, TypeError, ValueError, ZeroDivisionError)


def processor_of(file: Path) -> Processor:
    """Read the file of an image processor.

    Raises:
        ModelError: It is none, or says nothing that steps can say.
    """
    try:
        says = json.loads(file.read_text())
        # Where images and texts have one file, what is said of images stands in an object of its own.
        return processor_from_json(says.get("image_processor", says))
    except _BROKEN as error:
        raise ModelError(f"{file} says no preparation of images that can be followed: {error}") from error


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
