"""Builds classifiers of transformers, of images, texts or both, from a folder or the hub, out of safetensors."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frostline.core.errors import ModelError, SettingError, UnknownModel, WeightsMismatch, WeightsMissing
from frostline.core.events import Observer, SetupWarning
from frostline.core.files import read_regular
from frostline.models.modules import all_in_eval, modes, zeros
from frostline.models.tracing import cast_inputs
from frostline.preprocess import Preprocess, named_inputs
from frostline.preprocess.tokens import TextTokenizer
from frostline.training.pretrained import (
    TOKENIZER_FILES,
    Built,
    guard_fetch,
    guard_read,
    import_package,
    no_bars,
    pad_id_of,
    processor_of,
    texts_for,
    tokenizer_in,
)
from frostline.training.settings import IMAGES, RANDOM, TEXTS

__all__ = (
    "PairScores",
    "Scores",
    "TextScores",
    "as_loaded",
    "as_saved",
    "config_of",
    "from_hugging_face",
    "tokenizer_named",
)

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_PROCESSOR, _PROCESSORS = "preprocessor_config.json", "processor_config.json"
# A thousand times what one has that names no classes.
_MAX_CONFIG_BYTES = 16 << 20
_PATTERNS = (_CONFIG, _PROCESSOR, _PROCESSORS, *TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json")
_IMAGES, _TEXTS = "AutoModelForImageClassification", "AutoModelForSequenceClassification"
_PAIRS = "AutoModel"
_PAIR = ("pixel_values", "input_ids")


class Scores(nn.Module):
    """A classifier of transformers that gives its scores, where the network itself gives them with more around them.

    Args:
        network: classifier whose output has ``logits``.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The scores ``[batch, classes]`` for images ``[batch, channels, height, width]``."""
        scores: torch.Tensor = self.network(pixels).logits
        return scores

    def get_base_model(self) -> nn.Module:
        """The network inside, by whose paths layers may be named too, as PEFT calls it."""
        return self.network


class TextScores(Scores):
    """The same of a network that takes token ids and an attention mask."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """The scores ``[batch, classes]`` for ids and mask ``[batch, tokens]``."""
        scores: torch.Tensor = self.network(input_ids=input_ids, attention_mask=attention_mask).logits
        return scores


class PairScores(Scores):
    """A classifier of images with a text each, by the embeddings that a network such as CLIP gives of both.

    Args:
        network: network whose output has ``image_embeds`` and ``text_embeds``.
        embeddings: both of them, for a sample or more.
    """

    def __init__(self, network: nn.Module, embeddings: torch.Tensor) -> None:
        super().__init__(network)
        self.classifier = nn.Linear(embeddings.shape[1], 1, dtype=embeddings.dtype)

    def forward(  # type: ignore[override]
        self, pixel_values: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """The scores ``[batch, classes]`` for images, and for ids and mask ``[batch, tokens]``."""
        inputs = {"pixel_values": pixel_values, "input_ids": input_ids, "attention_mask": attention_mask}
        scores: torch.Tensor = self.classifier(_embeddings(self.network, inputs))
        return scores


_INSIDE = "network."


def as_saved(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a network, or of a part of it, under the names that transformers reads where it is one of its own."""
    if not _is_its_own(model):
        return dict(tensors)
    return {name.removeprefix(_INSIDE): tensor for name, tensor in tensors.items()}


def as_loaded(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of ``as_saved``; names that are the network's own already stay."""
    if not _is_its_own(model) or tensors.keys() <= model.state_dict().keys():
        return dict(tensors)
    return {f"{_INSIDE}{name}": tensor for name, tensor in tensors.items()}


def config_of(model: nn.Module, outputs: int, classes: Sequence[str]) -> str | None:
    """The ``config.json`` with which transformers loads a network of its own; None for every other.

    Args:
        model: whole network, as it was trained.
        outputs: number of scores that it gives.
        classes: names of the classes, in the order of the scores; empty where numbers are learned.
    """
    if not _is_its_own(model):
        return None
    network: Any = model.network
    config = copy.deepcopy(network.config)
    config.num_labels = outputs
    if len(classes) == outputs:
        config.id2label = dict(enumerate(classes))
        config.label2id = {name: number for number, name in enumerate(classes)}
    config.architectures = [type(network).__name__]
    return str(config.to_json_string())


def _is_its_own(model: nn.Module) -> bool:
    """Whether a network is one of transformers, with nothing of ours that has tensors around it."""
    return isinstance(model, Scores) and not isinstance(model, PairScores)


def from_hugging_face(
    name: str,
    on_event: Observer,
    *,
    pretrained: bool,
    tokenizer: str | None = None,
    max_length: int | None = None,
    parts: Mapping[str, str] | None = None,
) -> Built:
    """Build ``hf:OWNER/NAME`` of the hub, or ``hf:FOLDER`` that ``save_pretrained`` wrote.

    It is a classifier of images where transformers makes one of its configuration, else of texts; of samples that have
    an image and a text, one on the embeddings of both. No code that comes
    with a network is run, and weights are read from safetensors alone, in the precision in which they were saved.

    Args:
        name: the name as the user gave it.
        on_event: function that is called when files are fetched, and where images are prepared otherwise than the
            network's files say.
        pretrained: load the weights; else they are random.
        tokenizer: tokenizer of texts, see ``tokenizer_named``; None takes that of the folder.
        max_length: number of tokens of a text; None takes 128, or as many as the network has positions for.
        parts: kind of each input, in words of ``training.settings``; None where samples are one image or text.

    Raises:
        UnknownModel: The name is neither a folder nor an owner with a name.
        WeightsMissing: The files are neither here nor can they be fetched; the message names them.
        WeightsMismatch: The file lacks weights of the network.
        ModelError: transformers cannot be imported, or makes no classifier of them.
        SettingError: A tokenizer or a length is given for images, or cannot be used.
    """
    hf = import_package("transformers", "transformers")
    folder = _folder(name, on_event)
    _check_config(name, folder)
    with _quiet(hf), guard_read(name, folder):
        config = hf.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if parts:
        _check_pair(name, config, parts)
        kind, text_config = _PAIRS, getattr(config, "text_config", config)
    else:
        kind, text_config = _TEXTS if _takes_texts(config) else _IMAGES, config
    if kind == _IMAGES and (tokenizer is not None or max_length is not None):
        raise SettingError(f"{name} classifies images: leave out --tokenizer and --max-length")
    made = {}
    if kind != _TEXTS:
        made["pixel_values"] = _processed(name, folder, on_event)
    if kind != _IMAGES:
        found = tokenizer_in(name, folder) if tokenizer is None else tokenizer_named(tokenizer, on_event)
        made["input_ids"] = texts_for(found, max_length, text_config)
    preprocess = named_inputs(**{part: made[part] for part in parts}) if parts else next(iter(made.values()))
    _check_weights(name, folder, pretrained=pretrained)
    maker = getattr(hf, kind)
    with _quiet(hf), guard_read(name, folder):
        model = _loaded(maker, folder, is_whole=kind == _PAIRS) if pretrained else maker.from_config(config)
    source = f"{_WEIGHTS} of {folder}" if pretrained else RANDOM
    return Built(model=_scoring(name, kind, model, preprocess), preprocess=preprocess, weights=source)


def tokenizer_named(name: str, on_event: Observer) -> TextTokenizer:
    """The tokenizer that ``--tokenizer`` names: a ``tokenizer.json``, ``hf:FOLDER`` or ``hf:OWNER/NAME``.

    Args:
        name: the name as the user gave it.
        on_event: function that is called when files are fetched.

    Raises:
        UnknownModel: A name behind ``hf:`` is neither a folder nor an owner with a name.
        WeightsMissing: The tokenizer does not exist, or cannot be fetched.
    """
    return tokenizer_in(name, _folder(name, on_event)) if name.startswith("hf:") else Path(name)


def _takes_texts(config: Any) -> bool:
    kinds = import_package("transformers.models.auto.modeling_auto", "transformers")
    images, texts = kinds.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, kinds.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    return type(config) not in images and type(config) in texts


def _check_pair(name: str, config: Any, parts: Mapping[str, str]) -> None:
    """Do nothing if a network embeds an image and a text, and these are what it is given.

    Raises:
        ModelError: The network embeds no such pair.
        SettingError: Other inputs are named.
    """
    kinds = import_package("transformers.models.auto.modeling_auto", "transformers")
    if type(config) not in kinds.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"{name} embeds no images with texts, as CLIP does: name the one column that it takes (--column), or write "
            "a function that returns a network of these inputs (--model package.module:factory)"
        )
    if set(parts) != set(_PAIR) or parts[_PAIR[0]] != IMAGES or parts[_PAIR[1]] != TEXTS:
        raise SettingError(
            f"{name} takes an image as pixel_values and a text as input_ids: name a column for each (--column "
            f"pixel_values=image,input_ids=caption), and leave out --samples; it is given {', '.join(parts)}"
        )


def _scoring(name: str, kind: str, model: Any, preprocess: Preprocess) -> Scores:
    if kind == _IMAGES:
        return Scores(model)
    if kind == _TEXTS:
        return _text_scores(model, preprocess)
    return _pair_scores(name, model, preprocess)


def _pair_scores(name: str, model: nn.Module, preprocess: Preprocess) -> Scores:
    slots = preprocess.input_slots
    sample = zip(slots, cast_inputs(model, zeros([slot.spec for slot in slots], 1)), strict=True)
    with modes(model, all_in_eval(model)), torch.no_grad():
        try:
            embeddings = _embeddings(model, {place.name: tensor for place, tensor in sample})
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise ModelError(f"{name} gives no embeddings of an image and a text, as CLIP does: {why}") from error
    return PairScores(model, embeddings)


def _embeddings(network: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    given = network(**inputs)
    return torch.cat([given.image_embeds, given.text_embeds], dim=1)


def _text_scores(model: Any, texts: Preprocess) -> Scores:
    # A decoder finds the last token of a text by it, and refuses batches where it is not said.
    if model.config.pad_token_id is None:
        model.config.pad_token_id = pad_id_of(texts)
    return TextScores(model)


def _processed(name: str, folder: Path, on_event: Observer) -> Preprocess:
    """How the network's images are prepared."""
    files = [folder / _PROCESSOR, folder / _PROCESSORS]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise WeightsMissing(
            f"{name}: {folder} holds no {_PROCESSOR}, which says how the network's images are prepared: bring it there"
        )
    processor = processor_of(file)
    for reason in processor.otherwise:
        on_event(SetupWarning(reason=f"{name}: {reason}"))
    return processor.preprocess


def _folder(name: str, on_event: Observer) -> Path:
    wanted = name.partition(":")[2]
    with suppress(ValueError):  # no folder has such a name
        if Path(wanted).is_dir():
            return Path(wanted)
    owner, _, rest = wanted.partition("/")
    if not owner or not rest or "/" in rest or wanted.startswith((".", "~")):
        raise UnknownModel(f"there is no folder {wanted!r}, and no model of the hub is called so: write hf:OWNER/NAME")
    return _in_hub_cache(name, wanted, on_event)


def _in_hub_cache(name: str, repository: str, on_event: Observer) -> Path:
    """The folder of a repository in the hub's cache, into which it is fetched where it is not there yet."""
    hub = import_package("huggingface_hub", "huggingface_hub")
    try:
        hub.utils.validate_repo_id(repository)
    except ValueError as error:
        raise UnknownModel(f"no model of the hub is called {repository!r}: {error}") from error
    found = hub.try_to_load_from_cache(repository, _CONFIG)
    weights = hub.try_to_load_from_cache(repository, _WEIGHTS)
    if isinstance(found, str) and isinstance(weights, str) and _has_inputs(Path(found).parent):
        return Path(found).parent
    remedy = (
        f"bring {_WEIGHTS}, {_CONFIG} and {_PROCESSOR} (for texts tokenizer.json) of {repository} into a folder and "
        f"write hf:FOLDER; --weights {RANDOM} needs the last two alone, and freezes layers that have learned nothing"
    )
    with guard_fetch(name, hub.hf_hub_url(repository, _WEIGHTS), remedy, on_event), no_bars(hub.utils):
        return Path(hub.snapshot_download(repository, allow_patterns=list(_PATTERNS)))


def _has_inputs(folder: Path) -> bool:
    """Whether files are there that say how inputs are made: whoever fetched a network alone has none of them."""
    return any((folder / file).is_file() for file in (_PROCESSOR, _PROCESSORS, *TOKENIZER_FILES))


def _check_config(name: str, folder: Path) -> None:
    """Do nothing if a configuration is one, of a network that runs no code of the hub.

    Raises:
        UnknownModel: There is none.
        ModelError: The file cannot be read, or names such code.
    """
    file = folder / _CONFIG
    try:
        said = json.loads(read_regular(file, _MAX_CONFIG_BYTES))
    except FileNotFoundError:
        raise UnknownModel(
            f"{name}: {folder} holds no {_CONFIG}, so it is no folder that save_pretrained wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{name}: {file} cannot be read: {error}") from error
    # Such as attn_implementation: "OWNER/KERNEL", which transformers fetches and runs.
    for owner in _objects(said):
        named = [key for key, value in owner.items() if "implementation" in key and "/" in json.dumps(value)]
        if named:
            raise ModelError(f"{name}: {named[0]} in {file} names code of the hub, which is not run: take it out")


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """All objects in a value of JSON, however deep."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            yield found
            left += found.values()
        elif isinstance(found, list):
            left += found


def _check_weights(name: str, folder: Path, *, pretrained: bool) -> None:
    if pretrained and not any(folder.glob("*.safetensors")):
        raise WeightsMissing(
            f"{name}: {folder} holds no {_WEIGHTS}, and weights are read from safetensors alone: bring it there, give "
            f"weights of your own with --weights FILE, or --weights {RANDOM}"
        )


def _loaded(maker: Any, folder: Path, *, is_whole: bool) -> nn.Module:
    model, about = maker.from_pretrained(
        folder,
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    # A classifier may be missing, as it is trained; nothing that is frozen may.
    inside = "" if is_whole else f"{model.base_model_prefix}."
    others = [key for key, *_ in about["mismatched_keys"]]
    for keys, what in ((about["missing_keys"], "lacks"), (others, "has in another shape")):
        lacking = sorted(key for key in keys if str(key).startswith(inside))
        if lacking:
            raise WeightsMismatch(f"{folder} {what} {len(lacking)} of the network's tensors, such as {lacking[0]}")
    if not isinstance(model, nn.Module):
        raise ModelError(f"transformers makes no network of {folder}")
    return model


@contextmanager
def _quiet(hf: Any) -> Iterator[None]:
    """Keep to itself what transformers logs and draws while it loads: where it fails, the error says what matters."""
    logs = hf.utils.logging
    before, has_bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity(logs.CRITICAL)
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(before)
        if has_bars:
            logs.enable_progress_bar()
