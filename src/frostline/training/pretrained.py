"""Builds networks of torchvision and timm, with the weights that these publish, from their own caches.

Reads what a pretrained network brings for its inputs: the image processor that transformers wrote, as preprocessing
steps, and its tokenizer, which may be another file or repository that the user names.
"""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch
from safetensors import SafetensorError
from torch import nn

from frostline.core.errors import ModelError, SettingError, UnknownModel, WeightsMissing
from frostline.core.events import Observer, PhaseStarted
from frostline.core.files import read_regular
from frostline.core.hints import suggest_names
from frostline.core.units import in_bytes
from frostline.preprocess import CenterCrop, Decode, Normalize, Preprocess, Resize, imagenet, text
from frostline.preprocess.tokens import TextTokenizer
from frostline.preprocess.transforms import Processor, processor_from_json
from frostline.training.settings import RANDOM

__all__ = (
    "TOKENIZER_FILES",
    "Built",
    "from_timm",
    "from_torchvision",
    "guard_fetch",
    "guard_read",
    "import_package",
    "no_bars",
    "pad_id_of",
    "processor_of",
    "texts_for",
    "tokenizer_in",
)

_TIMM_FILES = ("model.safetensors", "pytorch_model.bin")
_UNREADABLE = (
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    UnpicklingError,
    ValueError,
)
_ANSWERS_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Built:
    """A network as its library builds it.

    Attributes:
        model: the model with the classifier that its weights have.
        preprocess: preprocessing that its weights expect.
        weights: the source that they came from, in words.
    """

    model: nn.Module
    preprocess: Preprocess
    weights: str


def from_torchvision(name: str, on_event: Observer, *, pretrained: bool) -> Built:
    """Build a network of torchvision, such as ``torchvision:resnet18``.

    Args:
        name: the name as the user gave it.
        on_event: function that is called when weights are fetched.
        pretrained: load torchvision's default weights of it; else they are random.

    Raises:
        UnknownModel: The library has no network of that name.
        WeightsMissing: The weights are neither in torch's cache nor can they be fetched.
        ModelError: torchvision cannot be imported, or the weights cannot be read.
    """
    models = import_package("torchvision.models", "torchvision")
    wanted = name.partition(":")[2]
    known = models.list_models(module=models)
    if wanted not in known:
        raise UnknownModel(f"torchvision has no model {wanted!r}{suggest_names(wanted, known)}")
    default = getattr(models.get_model_weights(wanted), "DEFAULT", None)
    preprocess = imagenet(224) if default is None else _torchvision_preprocess(default.transforms())
    if not pretrained:
        return Built(model=models.get_model(wanted, weights=None), preprocess=preprocess, weights=RANDOM)
    if default is None:
        raise WeightsMissing(f"torchvision publishes no weights of {wanted}: {_OWN}")
    file = _in_torch_cache(name, default.url, on_event)
    with guard_read(name, file):
        model = models.get_model(wanted, weights=default, progress=False)
    return Built(model=model, preprocess=preprocess, weights=f"{default} of torchvision, from {file}")


def from_timm(name: str, on_event: Observer, *, pretrained: bool) -> Built:
    """Build a network of timm, such as ``timm:resnet18`` or ``timm:resnet18.a1_in1k``; as ``from_torchvision`` does."""
    timm = import_package("timm", "timm")
    wanted = name.partition(":")[2]
    if not timm.is_model(wanted):
        raise UnknownModel(f"timm has no model {wanted!r}{suggest_names(wanted, timm.list_models())}")
    try:
        timm.get_pretrained_cfg(wanted)
    except RuntimeError as error:  # behind the dot are no weights of it
        raise UnknownModel(f"timm has no model {wanted!r}: {error}") from error
    if not pretrained:
        model, weights = timm.create_model(wanted, pretrained=False), RANDOM
    else:
        model, weights = _pretrained_timm(timm, name, wanted, on_event)
    return Built(model=model, preprocess=_timm_preprocess(model.pretrained_cfg), weights=weights)


def import_package(module: str, package: str) -> Any:
    """Import a module of a package that Frostline can do without.

    Raises:
        ModelError: The package cannot be imported; the message names it.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # the latter two where it was built for another PyTorch
        at_fault = "torchvision" if "torchvision" in f"{error}" else package  # timm and transformers import it too
        mend = f"install the {at_fault} that belongs to this PyTorch"
        if isinstance(error, ImportError):
            mend = f"pip install {package!r}" if "[" in package else f"pip install {package}"
        raise ModelError(f"this model needs {package}, which cannot be imported ({error}): {mend}") from error


_LEARNED_NOTHING = f"--weights {RANDOM}, which freezes layers that have learned nothing"
_OWN = f"give weights of your own with --weights FILE, or {_LEARNED_NOTHING}"


def _pretrained_timm(timm: Any, name: str, wanted: str, on_event: Observer) -> tuple[nn.Module, str]:
    config = timm.get_pretrained_cfg(wanted)
    if config is None or not config.has_weights:
        raise WeightsMissing(f"timm publishes no weights of {wanted}: {_OWN}")
    if config.hf_hub_id:
        file, source = _in_hub_cache(name, config, on_event), f"{config.hf_hub_id} of the Hugging Face hub"
    else:
        file, source = _in_torch_cache(name, config.url, on_event), f"{wanted} of timm"
    with guard_read(name, file):
        # Given as a file, it is read without asking the network whether there is a newer one.
        overlay = {"file": str(file), "custom_load": config.custom_load}
        model = timm.create_model(wanted, pretrained=True, pretrained_cfg_overlay=overlay)
    return model, f"{source}, from {file}"


def _in_torch_cache(name: str, url: str, on_event: Observer) -> Path:
    """The path of a file in the cache of torch's hub, which is fetched where it is not there yet."""
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(url).path).name
    if not file.exists():
        with guard_fetch(name, url, f"put {file.name} into {file.parent}, {_OWN}", on_event):
            file.parent.mkdir(parents=True, exist_ok=True)
            digest = torch.hub.HASH_REGEX.search(file.name)
            torch.hub.download_url_to_file(url, str(file), digest and digest.group(1), progress=False)
    return file


def _in_hub_cache(name: str, config: Any, on_event: Observer) -> Path:
    """The path of a file in the cache of the Hugging Face hub, which is fetched where it is not there yet."""
    hub = import_package("huggingface_hub", "huggingface_hub")
    repository, _, revision = config.hf_hub_id.partition("@")
    files = (config.hf_hub_filename,) if config.hf_hub_filename else _TIMM_FILES
    for file in files:
        found = hub.try_to_load_from_cache(repository, file, revision=revision or None)
        if isinstance(found, str):
            return Path(found)
    url = hub.hf_hub_url(repository, files[0], revision=revision or None)
    remedy = f"bring {files[0]} of {repository} and give it with --weights FILE, or {_LEARNED_NOTHING}"
    with guard_fetch(name, url, remedy, on_event), no_bars(hub.utils):
        return Path(_first_there(hub, repository, files, revision or None))


def _first_there(hub: Any, repository: str, files: Sequence[str], revision: str | None) -> str:
    for file in files[:-1]:
        try:
            return str(hub.hf_hub_download(repository, file, revision=revision))
        except hub.errors.RemoteEntryNotFoundError:
            continue
    return str(hub.hf_hub_download(repository, files[-1], revision=revision))


@contextmanager
def guard_fetch(name: str, url: str, remedy: str, on_event: Observer) -> Iterator[None]:
    """Ask for the head of a file before its body is fetched: libraries wait long for a network that is not there.

    Args:
        name: the model, as the user gave it.
        url: the place where the file is.
        remedy: advice where it cannot be had.
        on_event: function that is called with the name of the file and its size.

    Raises:
        WeightsMissing: The file cannot be fetched.
    """
    try:
        on_event(PhaseStarted(name=f"fetching weights, {_announced(url)}"))
        yield
    except (OSError, RuntimeError) as error:
        why = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
        raise WeightsMissing(
            f"the pretrained weights of {name} are not on this machine, and {url} cannot be fetched ({why}): {remedy}"
        ) from error


def _announced(url: str) -> str:
    """A file's name and size."""
    name = Path(urlsplit(url).path).name
    try:
        head = Request(url, method="HEAD")  # noqa: S310 - an address that the library names
        with urlopen(head, timeout=_ANSWERS_WITHIN_S) as answer:  # noqa: S310 - it is read by nothing else
            length = answer.headers.get("Content-Length")
    except HTTPError:  # the server is there: what it says to its own client is clearer
        length = None
    return f"{name} ({in_bytes(int(length))})" if length else name


@contextmanager
def no_bars(utils: Any) -> Iterator[None]:
    """Keep the hub's progress bars off a terminal that has one."""
    if utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


@contextmanager
def guard_read(name: str, file: Path) -> Iterator[None]:
    """Say what was read, where a library cannot read it.

    Args:
        name: the model, as the user gave it.
        file: file or folder of its weights.

    Raises:
        ModelError: The library fails.
    """
    try:
        yield
    except _UNREADABLE as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"the weights of {name} in {file} cannot be loaded: {why}") from error


def _torchvision_preprocess(preset: Any) -> Preprocess:
    """The resizing, crop and scale of numbers that torchvision declares for its weights."""
    kernel: Literal["bilinear", "bicubic"] = "bicubic" if preset.interpolation.value == "bicubic" else "bilinear"
    return _preprocess(preset.resize_size[0], preset.crop_size[0], kernel, preset.mean, preset.std)


def _timm_preprocess(config: Mapping[str, Any]) -> Preprocess:
    """The resizing, crop and scale of numbers that timm declares for its weights."""
    size = config.get("input_size", (3, 224, 224))[-1]
    mean, std = config.get("mean", (0.485, 0.456, 0.406)), config.get("std", (0.229, 0.224, 0.225))
    kernel: Literal["bilinear", "bicubic"] = "bilinear" if config.get("interpolation") == "bilinear" else "bicubic"
    return _preprocess(int(size / config.get("crop_pct", 0.875)), size, kernel, mean, std)


def _preprocess(
    shorter: int, size: int, kernel: Literal["bilinear", "bicubic"], mean: Iterable[float], std: Iterable[float]
) -> Preprocess:
    scale = Normalize(mean=tuple(255 * value for value in mean), std=tuple(255 * value for value in std))
    return Preprocess(steps=(Decode(), Resize(shorter=shorter, filter=kernel), CenterCrop(size=size), scale))


_BROKEN = (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, ZeroDivisionError)
# Those that are published have a few kilobytes.
_MAX_PROCESSOR_BYTES = 1 << 20


def processor_of(file: Path) -> Processor:
    """Read the file of an image processor.

    Raises:
        ModelError: The file is no image processor, or does something that no step can do.
    """
    try:
        says = json.loads(read_regular(file, _MAX_PROCESSOR_BYTES))
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
        ModelError: The tokenizer cannot be read.
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
    with guard_read(f"{name}, its tokenizer,", folder):
        found = hf.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    # Decoders such as GPT-2 are published without one; what stands at its places is masked out.
    if found.pad_token_id is None and found.eos_token is not None:
        found.pad_token = found.eos_token
    return found


def pad_id_of(texts: Preprocess) -> int:
    """Id of the token that texts are padded with."""
    return int(json.loads(texts.tokenizer)["padding"]["pad_id"])
