"""Says transforms of torchvision and timm and processors of transformers in steps, as far as steps can say them.

A node runs steps and nobody's code. What of a transform cannot be said in steps stays the user's own function of a
sample; it runs at the trainer, behind the steps.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Literal

from frostline.core.errors import SettingError
from frostline.preprocess.spec import Preprocess
from frostline.preprocess.steps import (
    CHANNELS,
    CenterCrop,
    ColorJitter,
    Decode,
    Mode,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Squeeze,
    Step,
)

__all__ = (
    "Declared",
    "Form",
    "ProcessedImage",
    "Processor",
    "Transform",
    "as_function",
    "declare",
    "from_transform",
    "name_of",
    "processor_from_json",
)

Transform = Callable[[Any], Any] | Preprocess
"""A preprocessing, or what takes an image of Pillow: a transform, a processor, or any function."""

Filter = Literal["bilinear", "bicubic"]


class Form(StrEnum):
    """What a transform's image is at some place in it."""

    IMAGE = "an image of Pillow"
    PIXELS = "a tensor uint8[C, H, W]"
    LEVELS = "a tensor float32[C, H, W] from 0 to 255"
    UNIT = "a tensor float32[C, H, W] from 0 to 1"
    NORMALISED = "a tensor float32[C, H, W], normalised"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A transform in steps, and what of it is left.

    Attributes:
        preprocess: steps that a node runs; None where none of the transform can be said in steps.
        parts: names of the parts of the transform that the steps stand for.
        rest: functions that are left, each of what the one before it gives.
        form: form that the first of them takes.
        otherwise: sentences on where the steps differ from the transform; mostly none.
    """

    preprocess: Preprocess | None
    parts: tuple[str, ...] = ()
    rest: tuple[Callable[[Any], Any], ...] = ()
    form: Form = Form.IMAGE
    otherwise: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Nothing is left of the transform, and it gives what a network takes."""
        return self.preprocess is not None and not self.rest and self.form not in (Form.IMAGE, Form.PIXELS)

    def __str__(self) -> str:
        left = ", ".join(map(name_of, self.rest)) or "making a tensor"
        if self.preprocess is None:
            return f"all of transform ({left}) runs here, for each sample"
        return f"of transform, {', '.join(self.parts)} run at the node, and {left} here, for each sample"


def declare(transform: Transform) -> Declared:
    """Say a transform in steps, as far as that goes.

    Resize, CenterCrop, RandomResizedCrop, RandomHorizontalFlip, ColorJitter, Normalize and what makes tensors are said
    in steps, those of torchvision in both versions and those of timm, also as the presets of torchvision's weights;
    and image processors of transformers. The first part that cannot be said, and all behind it, is left. Steps draw
    their randomness from the epoch's seed, and scale images of Pillow: a transform that makes a tensor before it
    resizes it differs from that by rounding.

    Raises:
        SettingError: The argument is nothing that takes an image.
    """
    if isinstance(transform, Preprocess):
        return Declared(preprocess=transform, form=Form.NORMALISED)
    if not callable(transform):
        raise SettingError(
            f"transform takes a transform of torchvision or timm, an image processor of transformers, a function of an "
            f"image, or frostline.preprocess steps, not {type(transform).__name__}{_line_for(transform)}"
        )
    if line := _to_call_first(transform):
        raise SettingError(
            f"transform is called with an image, and {name_of(transform)} makes a transform: write {line}"
        )
    processor = getattr(transform, "image_processor", transform)
    if _is_processor(processor):
        return _of_processor(processor)
    if not _takes_one(transform):
        raise SettingError(
            f"transform is called with an image alone, which {name_of(transform)} does not take: write a function of "
            "one argument; one that changes labels too is given to a loader, as map=function of a Sample"
        )
    return _of_parts(transform)


def _takes_one(transform: Callable[..., Any]) -> bool:
    try:
        inspect.signature(transform).bind(None)
    except TypeError:
        return False
    except ValueError:  # it does not say what it takes
        return True
    return True


_LINES: Mapping[type, str] = {
    list: ": write torchvision.transforms.v2.Compose([...])",
    dict: ": give one of them to each loader or data set",
    str: ": write preprocess=frostline.preprocess.imagenet(224)",
}


def _to_call_first(transform: Callable[..., Any]) -> str:
    """The call by which something makes a transform, which it is not itself; empty where it may be one."""
    if isinstance(transform, partial) and isinstance(transform.func, type):  # as torchvision's weights have it
        return "weights.transforms()"
    if isinstance(transform, type) and any("__call__" in vars(kind) for kind in transform.__mro__):
        return f"{transform.__name__}(...)"
    is_timms = getattr(transform, "__module__", "").startswith("timm.data.")
    return "timm.data.create_transform(224)" if is_timms and name_of(transform) == "create_transform" else ""


def _line_for(transform: object) -> str:
    """What to write instead of something that cannot be called, to end a sentence."""
    if hasattr(transform, "transforms"):  # weights of torchvision
        return f": write {transform}.transforms()"
    if isinstance(transform, dict) and "input_size" in transform:
        return ": write timm.data.create_transform(**config)"
    return _LINES.get(type(transform), "")


def from_transform(transform: Transform) -> Preprocess:
    """The steps of a transform of torchvision or timm, or of an image processor of transformers.

    Args:
        transform: transform of an image of Pillow to ``float32[C, H, W]``.

    Raises:
        SettingError: A part of it cannot be said in steps; the sentence names the part.
    """
    found = declare(transform)
    if found.is_whole and found.preprocess is not None:
        return found.preprocess
    if not found.rest:
        raise SettingError(
            f"transform ends with {found.form}: end it with ToTensor() and Normalize(mean, std), which make what a "
            "network takes"
        )
    name = name_of(found.rest[0])
    if name in ("PILToTensor", "Resize", "ToImage", "ToTensor"):  # which steps say where images have one size
        raise SettingError(
            f"{name} of transform leaves images of several sizes, and a network takes one: write "
            "transform=Compose([Resize(256), CenterCrop(224), ToTensor()])"
        )
    raise SettingError(
        f"{name} of transform cannot run before frozen layers, where a node runs resizing, cropping, flipping, colours "
        "and normalisation alone and no code of yours: leave it out, or write preprocess=frostline.preprocess."
        "imagenet(224, augment=True)"
    )


def as_function(transform: Transform) -> Callable[[Any], Any]:
    """A transform that is no preprocessing, as a function of one image of Pillow."""
    assert not isinstance(transform, Preprocess)
    processor = getattr(transform, "image_processor", transform)
    return ProcessedImage(processor) if _is_processor(processor) else transform


def name_of(part: object) -> str:
    """A part of a transform by the name of its function or class."""
    return getattr(part, "__name__", None) or type(part).__name__


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as a processor of transformers makes it, which gives a dictionary of batches."""

    processor: Any

    @property
    def __name__(self) -> str:
        return type(self.processor).__name__

    def __call__(self, image: Any) -> Any:
        """The pixels of one image."""
        return self.processor(image, return_tensors="np")["pixel_values"][0]


def _is_processor(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "preprocess") and hasattr(value, "image_mean")


def _of_processor(processor: Any) -> Declared:
    says = processor.to_dict()
    own = Declared(preprocess=None, rest=(ProcessedImage(processor),))
    if not says.get("do_resize", True):
        return own
    try:
        found = processor_from_json(says)
    except (LookupError, TypeError, ValueError, SettingError):
        return own
    name = type(processor).__name__
    return Declared(preprocess=found.preprocess, parts=(name,), form=Form.NORMALISED, otherwise=found.otherwise)


def _parts(transform: Any) -> Iterable[Any]:
    """The parts of a transform, one after another, those of compositions inside it too."""
    if type(transform).__name__ in ("Compose", "Sequential"):
        inner = getattr(transform, "transforms", None) or transform
        for part in inner:
            yield from _parts(part)
    elif type(transform).__name__ == "ImageClassification" and _is_of_library(transform):
        yield from _of_preset(transform)
    else:
        yield transform


@dataclass(frozen=True, slots=True)
class _Said:
    """A part of a preset, as the class of torchvision that does the same."""

    name: str
    values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None


def _of_preset(preset: Any) -> Iterable[Any]:
    scaled = {"size": preset.resize_size, "interpolation": preset.interpolation, "max_size": None}
    yield _Said("Resize", scaled)
    yield _Said("CenterCrop", {"size": preset.crop_size})
    yield _Said("ToTensor", {})
    yield _Said("Normalize", {"mean": preset.mean, "std": preset.std})


def _of_parts(transform: Any) -> Declared:
    parts = list(_parts(transform))
    form, steps, count, last = Form.IMAGE, list[Step](), 0, None
    for part in parts:
        found = _said(part, form)
        if found is None:
            break
        step, form = found
        if isinstance(step, Normalize):
            last = step
        elif step is not None:
            steps.append(step)
        count += 1
    rest = tuple(parts[count:])
    has_presets = any(isinstance(part, _Said) for part in parts)
    try:
        preprocess = Preprocess(steps=(Decode(), *steps, last or _levels(form)))
    except SettingError:  # no fixed size, or steps in an order that they cannot have
        return Declared(preprocess=None, rest=(transform,) if has_presets else tuple(parts))
    if any(isinstance(part, _Said) for part in rest):
        return Declared(preprocess=None, rest=(transform,))
    return Declared(preprocess=preprocess, parts=tuple(map(_label, parts[:count])), rest=rest, form=form)


def _label(part: Any) -> str:
    return part.name if isinstance(part, _Said) else name_of(part)


def _levels(form: Form) -> Normalize:
    """The last step, where the transform does not normalise."""
    scale = 255.0 if form is Form.UNIT else 1.0
    return Normalize(mean=(0.0,) * 3, std=(scale,) * 3)


def _is_of_library(part: Any) -> bool:
    return type(part).__module__.startswith(("torchvision.transforms", "timm.data"))


def _said(part: Any, form: Form) -> tuple[Step | None, Form] | None:
    """The step of a part and the form behind it; None where no step says it."""
    if not isinstance(part, _Said) and not _is_of_library(part):
        return None
    name = _label(part)
    if (behind := _form_behind(name, part, form)) is not None:
        return None, behind
    if name == "Normalize" and form is Form.UNIT:
        mean, std = (tuple(255 * float(value) for value in values) for values in (part.mean, part.std))
        return (Normalize(mean=mean, std=std), Form.NORMALISED) if len(mean) == len(std) == 3 else None
    if form not in (Form.IMAGE, Form.PIXELS):
        return None
    try:
        step = _geometry(name, part)
    except (AttributeError, IndexError, TypeError, ValueError, SettingError):
        return None
    return None if step is None else (step, form)


def _form_behind(name: str, part: Any, form: Form) -> Form | None:
    """The form behind a part that changes nothing else; None where it is no such part."""
    match name:
        case "Identity":
            return form
        case "ToTensor" | "MaybeToTensor" if form is Form.IMAGE:
            return Form.UNIT
        case "PILToTensor" | "MaybePILToTensor" | "ToImage" if form in (Form.IMAGE, Form.PIXELS):
            return Form.PIXELS
        case "ToDtype" | "ConvertImageDtype" | "ConvertDtype" if form is Form.PIXELS:
            if str(part.dtype) != "torch.float32":
                return None
            return Form.UNIT if getattr(part, "scale", True) else Form.LEVELS
        case "ToPureTensor" if form is not Form.IMAGE:
            return form
        case _:
            return None


def _geometry(name: str, part: Any) -> Step | None:
    match name:
        case "Resize":
            return _resize(part)
        case "CenterCrop":
            return CenterCrop(size=_side(part.size))
        case "RandomResizedCrop" | "RandomResizedCropAndInterpolation":
            (least, most), (narrow, wide) = part.scale, part.ratio
            side, kernel = _side(part.size), _filter(part.interpolation)
            return RandomResizedCrop(side, float(least), float(most), float(narrow), float(wide), kernel)
        case "RandomHorizontalFlip":
            return RandomHorizontalFlip(p=float(part.p))
        case "ColorJitter":
            brightness, contrast, saturation = map(_amount, (part.brightness, part.contrast, part.saturation))
            return ColorJitter(brightness, contrast, saturation, _hue(part.hue))
        case _:
            return None


def _resize(part: Any) -> Step | None:
    if getattr(part, "max_size", None) is not None:
        return None
    size = part.size
    if isinstance(size, int) or len(size) == 1:
        return Resize(shorter=size if isinstance(size, int) else int(size[0]), filter=_filter(part.interpolation))
    return Squeeze(size=_side(size), filter=_filter(part.interpolation))


def _side(size: Any) -> int:
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))
    if height != width:
        raise ValueError(f"{height} x {width} is no square")
    return int(height)


def _filter(interpolation: Any) -> Filter:
    value = str(getattr(interpolation, "value", interpolation))
    if value not in ("bilinear", "bicubic"):
        raise ValueError(f"filter {value}")
    return "bilinear" if value == "bilinear" else "bicubic"


def _amount(bounds: Any) -> float:
    """The amount around 1 that bounds of a factor say."""
    if bounds is None:
        return 0.0
    least, most = map(float, bounds)
    if abs(max(0.0, 2 - most) - least) > 1e-6:
        raise ValueError(f"{bounds} is not even around 1")
    return most - 1


def _hue(bounds: Any) -> float:
    if bounds is None:
        return 0.0
    least, most = map(float, bounds)
    if abs(least + most) > 1e-6:
        raise ValueError(f"{bounds} is not even around 0")
    return most


_FILTERS: Mapping[int, Filter] = {2: "bilinear", 3: "bicubic"}
_SQUEEZED_FROM = 384
"""From this side on ConvNeXt's processor crops nothing."""
_MODES: Mapping[int, Mode] = {CHANNELS[mode]: mode for mode in CHANNELS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """How a network's images are prepared.

    Attributes:
        preprocess: steps that come nearest to what the processor says.
        otherwise: sentences on where they differ from it; mostly none.
    """

    preprocess: Preprocess
    otherwise: tuple[str, ...] = ()


def processor_from_json(says: Mapping[str, Any]) -> Processor:
    """The steps of an image processor of transformers, as its ``to_dict`` and ``preprocessor_config.json`` have it.

    Raises:
        LookupError, TypeError, ValueError, SettingError: The processor does something that no step can do.
    """
    kernel = int(says.get("resample", 2))
    otherwise = []
    if kernel not in _FILTERS:
        otherwise.append(f"its images are resized by filter {kernel} of Pillow where it was made, and here by bicubic")
    levels = _normalised(says)
    scaled = _scaled(says, _FILTERS.get(kernel, "bicubic"))
    steps = (Decode(mode=_MODES.get(len(levels.mean), "RGB")), *scaled, levels)
    return Processor(preprocess=Preprocess(steps=steps), otherwise=tuple(otherwise))


def _scaled(says: Mapping[str, Any], kernel: Filter) -> tuple[Step, ...]:
    """How an image becomes a square: its shorter side is scaled and the middle cut out, or all of it is squeezed."""
    size = says.get("size")
    shortest = size.get("shortest_edge") if isinstance(size, Mapping) else None
    if says.get("do_center_crop"):
        crop = CenterCrop(size=_square_of(says["crop_size"]))
        if shortest:
            return Resize(shorter=int(shortest), filter=kernel), crop
        whole = Squeeze(size=_square_of(size), filter=kernel)
        return (whole,) if whole.size == crop.size else (whole, crop)
    if shortest and "crop_pct" in says and int(shortest) < _SQUEEZED_FROM:
        shorter = int(int(shortest) / float(says["crop_pct"] or 0.875))
        return Resize(shorter=shorter, filter=kernel), CenterCrop(size=int(shortest))
    return (Squeeze(size=int(shortest) if shortest else _square_of(size), filter=kernel),)


def _square_of(size: object) -> int:
    if isinstance(size, int):
        return size
    if not isinstance(size, Mapping) or size.get("height") != size.get("width"):
        raise ValueError(f"images become squares here, and its size is {size}")
    return int(size["height"])


def _normalised(says: Mapping[str, Any]) -> Normalize:
    """Mean and standard deviation on the scale of pixels, which the file says on a scale of its own."""
    factor = float(says.get("rescale_factor", 1 / 255)) if says.get("do_rescale", True) else 1.0
    moved = 1.0 if says.get("rescale_offset") else 0.0
    normalised = bool(says.get("do_normalize", True))
    mean = says["image_mean"] if normalised else [0.0, 0.0, 0.0]
    std = says["image_std"] if normalised else [1.0, 1.0, 1.0]
    return Normalize(
        mean=tuple((float(value) + moved) / factor for value in mean), std=tuple(float(value) / factor for value in std)
    )
