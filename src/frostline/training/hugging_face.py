"""Builds image classifiers of transformers from a folder or from the Hugging Face hub, read from safetensors alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frostline.errors import ModelError, UnknownModel, WeightsMismatch, WeightsMissing
from frostline.events import NotAsAsked, Observer
from frostline.training.image_processors import processor_of
from frostline.training.libraries import Built, fetching, import_package, no_bars, reading
from frostline.training.settings import RANDOM

__all__ = ("Scores", "from_hugging_face")

_CONFIG, _PROCESSOR, _WEIGHTS = "config.json", "preprocessor_config.json", "model.safetensors"
_PATTERNS = (_CONFIG, _PROCESSOR, "*.safetensors", "*.safetensors.index.json")


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


def from_hugging_face(name: str, observe: Observer, *, pretrained: bool) -> Built:
    """Build ``hf:OWNER/NAME`` of the hub, or ``hf:FOLDER`` that ``save_pretrained`` wrote.

    No code that comes with a network is run, and weights are read from safetensors alone, in the precision in which
    they were saved.

    Args:
        name: as the user gave it.
        observe: told when files are fetched, and where images are prepared otherwise than the network's files say.
        pretrained: load the weights; else they are random.

    Raises:
        UnknownModel: The name is neither a folder nor an owner with a name.
        WeightsMissing: The files are neither here nor can they be fetched; the message names them.
        WeightsMismatch: The file lacks weights of the network.
        ModelError: transformers cannot be imported, or makes no image classifier of them.
    """
    hf = import_package("transformers", "transformers")
    folder = _folder(name, observe)
    _check_files(name, folder, pretrained=pretrained)
    with _quiet(hf), reading(name, folder):
        config = hf.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        model = _loaded(hf, folder) if pretrained else hf.AutoModelForImageClassification.from_config(config)
    processor = processor_of(folder / _PROCESSOR)
    for reason in processor.otherwise:
        observe(NotAsAsked(reason=f"{name}: {reason}"))
    source = f"{_WEIGHTS} of {folder}" if pretrained else RANDOM
    return Built(model=Scores(model), preprocess=processor.preprocess, weights=source)


def _folder(name: str, observe: Observer) -> Path:
    wanted = name.partition(":")[2]
    if Path(wanted).is_dir():
        return Path(wanted)
    owner, _, rest = wanted.partition("/")
    if not owner or not rest or "/" in rest or wanted.startswith((".", "~")):
        raise UnknownModel(f"there is no folder {wanted!r}, and no model of the hub is called so: write hf:OWNER/NAME")
    return _in_hub_cache(name, wanted, observe)


def _in_hub_cache(name: str, repository: str, observe: Observer) -> Path:
    """The folder of a repository in the hub's cache, into which it is fetched where it is not there yet."""
    hub = import_package("huggingface_hub", "huggingface_hub")
    found = hub.try_to_load_from_cache(repository, _CONFIG)
    weights = hub.try_to_load_from_cache(repository, _WEIGHTS)
    if isinstance(found, str) and isinstance(weights, str):
        return Path(found).parent
    remedy = (
        f"bring {_WEIGHTS}, {_CONFIG} and {_PROCESSOR} of {repository} into a folder and write hf:FOLDER; --weights "
        f"{RANDOM} needs the last two alone, and freezes layers that have learned nothing"
    )
    with fetching(name, hub.hf_hub_url(repository, _WEIGHTS), remedy, observe), no_bars(hub.utils):
        return Path(hub.snapshot_download(repository, allow_patterns=list(_PATTERNS)))


def _check_files(name: str, folder: Path, *, pretrained: bool) -> None:
    if not (folder / _CONFIG).is_file():
        raise UnknownModel(f"{name}: {folder} holds no {_CONFIG}, so it is no folder that save_pretrained wrote")
    if not (folder / _PROCESSOR).is_file():
        raise WeightsMissing(
            f"{name}: {folder} holds no {_PROCESSOR}, which says how the network's images are prepared: bring it there"
        )
    if pretrained and not any(folder.glob("*.safetensors")):
        raise WeightsMissing(
            f"{name}: {folder} holds no {_WEIGHTS}, and weights are read from safetensors alone: bring it there, give "
            f"weights of your own with --weights FILE, or --weights {RANDOM}"
        )


def _loaded(hf: Any, folder: Path) -> nn.Module:
    model, about = hf.AutoModelForImageClassification.from_pretrained(
        folder,
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    # A classifier may be missing, as it is trained; nothing that is frozen may.
    inside = f"{model.base_model_prefix}."
    lacking = sorted(key for key in about["missing_keys"] if str(key).startswith(inside))
    if lacking:
        raise WeightsMismatch(f"{folder} lacks {len(lacking)} of the network's tensors, such as {lacking[0]}")
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
