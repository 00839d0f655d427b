"""Puts low-rank adapters into a network, and merges what they learned into its own weights for the file."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from frostline.core.errors import SettingError
from frostline.models.freezing import classifier_of, layer_of, used_parameters
from frostline.models.modules import AnyInputs
from frostline.training.recipe import LowRank

__all__ = ("add_adapters", "check_trained", "check_unfrozen", "merged_state")

_OWN = "lora_"
_SHOWN = 6


def add_adapters(model: nn.Module, lora: LowRank, inputs: AnyInputs, *, seed: int) -> None:
    """Give the linear layers and convolutions at the places adapters, in place; these and the classifier are trained.

    Args:
        model: the network, which is changed: all of its own parameters but the classifier's are frozen.
        lora: the modules and the rank of the adapters.
        inputs: one sample, as ``freeze`` takes it.
        seed: seed of the adapters.

    Raises:
        SettingError: there is no such module, none of its layers can take an adapter, or peft is not installed.
    """
    classifier, last = classifier_of(model, used_parameters(model, inputs))
    able = [path for path in _able(model) if path != classifier]
    chosen = [path for path in able if lora.has(path)]
    missing = [module for module in lora.modules if not any(f".{module}." in f".{path}." for path in chosen)]
    if missing:
        raise SettingError(_refusal(model, missing[0], able))
    peft = _peft()
    config = peft.LoraConfig(
        target_modules=chosen, r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, bias="none"
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    last.requires_grad_(True)


def check_trained(model: nn.Module, until: str) -> None:
    """Do nothing if all adapters are trained.

    Raises:
        SettingError: some lie in the frozen part.
    """
    names = [name for name, parameter in model.named_parameters() if _OWN in name and not parameter.requires_grad]
    if names:
        raise SettingError(
            f"the adapter of {names[0].partition(f'.{_OWN}')[0]} lies before the end of {until!r}, up to which all is "
            "frozen: name an earlier layer (--until), or a later layer (--lora)"
        )


def check_unfrozen(model: nn.Module, layers: Iterable[str]) -> None:
    """Do nothing if no layer that is trained later has an adapter, which stands for the training of its own weights.

    Raises:
        SettingError: one has.
        UnknownLayer: the network has no such layer.
    """
    for layer in layers:
        for path, module in layer_of(model, layer).named_modules(prefix=layer):
            if hasattr(module, "lora_A"):
                raise SettingError(
                    f"{path} has an adapter, which is trained in place of its weights: leave it out of --unfreeze, "
                    " or give it no adapter (--lora)"
                )


def merged_state(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """The tensors of the network without adapters that computes the same."""
    layers = {path: module for path, module in model.named_modules() if hasattr(module, "base_layer")}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if _OWN in name:
            continue
        path, inner, own = name.rpartition(".base_layer.")
        layer: Any = layers.get(path) if inner else None
        is_changed = layer is not None and own == "weight"
        state[f"{path}.{own}" if inner else name] = (
            tensor + layer.get_delta_weight("default").to(tensor.dtype) if is_changed else tensor
        )
    return state


def _able(model: nn.Module) -> Iterator[str]:
    """Paths of the modules that take adapters."""
    # Attention of PyTorch's own reads its layers' weights without running the layers.
    apart = [f"{path}." for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    for path, module in model.named_modules():
        is_plain = isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        if path and is_plain and not path.startswith(tuple(apart)):
            yield path


def _refusal(model: nn.Module, path: str, able: list[str]) -> str:
    shown = ", ".join(able[-_SHOWN:]) or "none of this network"
    there = any(f".{path}." in f".{name}." for name, _ in model.named_modules())
    why = "has no linear layer or convolution that takes an adapter" if there else "is no module of the network"
    return f"{path!r} {why}; modules that take one are {shown}{' and others' if len(able) > _SHOWN else ''} (--lora)"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise SettingError(
            f"adapters need the package peft, which cannot be imported ({error}): pip install 'frostline[lora]'"
        ) from error
    return peft
