"""The engines that there are, why this machine cannot have one, and how each is built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from frostline.core import REFERENCE, Cut, Graph, Levels
from frostline.core.errors import EngineUnsupported
from frostline.core.hints import suggest_names
from frostline.engines.machine import is_installed
from frostline.engines.onnx import OnnxEngine, providers
from frostline.engines.openvino import OpenVinoEngine
from frostline.engines.protocols import Engine, Footprint, Pixels, calibration_of, levels_of, offer_name
from frostline.engines.recipe import EngineRecipe
from frostline.engines.torch import COMPILER, TorchCompiled, TorchEngine, TorchVariant, has_compiler
from frostline.profiles import PRECISIONS

__all__ = ("OFFERS", "Offer", "absence", "build", "offer_of")


_16_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An engine that can be built where its parts are.

    Attributes:
        name: the name as jobs, messages and reports have it.
        precision: one of ``profiles.PRECISIONS``.
        title: the title for people.
        takes_pixels: True if it takes pixels as they are kept, and computes what they mean itself, where they can be
            had; else they are made ready before.
        takes_threads: True if it runs on as many threads as it is told, where it runs on the CPU; else it keeps to
            those of the process.
    """

    name: str
    precision: str
    title: str
    takes_pixels: bool = True
    takes_threads: bool = True

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {self.precision!r}")


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """An offer with what it needs.

    Attributes:
        offer: the offer.
        make: function that builds the engine, from its name and what it is to be made from.
        devices: kinds of device that it runs on.
        packages: packages that it needs beside torch.
        extra: extra of Frostline, which brings them.
        needs: function that returns a sentence about anything else that is missing.
        holds_16_bits: True if it computes a network that has 16-bit weights in these, as its owner does.
    """

    offer: Offer
    make: Callable[[str, EngineRecipe], Engine]
    devices: tuple[str, ...] = ("cpu", "cuda")
    packages: tuple[str, ...] = ()
    extra: str = ""
    needs: Callable[[], str | None] = _nothing
    holds_16_bits: bool = True


def offer_of(name: str) -> Offer:
    """The offer that an engine is of.

    Raises:
        EngineUnsupported: No offer has that name.
    """
    return _entry(name).offer


def absence(name: str, device: str) -> str | None:
    """Why this machine cannot have an engine, in a sentence that says what would help; None where it can.

    Raises:
        EngineUnsupported: No offer has that name.
    """
    entry = _entry(name)
    kind = torch.device(device).type
    if kind not in entry.devices:
        return f"{entry.offer.title} runs on {' and '.join(entry.devices)}, and this node computes on {kind}"
    missing = [package for package in entry.packages if not is_installed(package)]
    if missing:
        return f"{' and '.join(missing)} is not installed: pip install 'frostline[{entry.extra}]'"
    return entry.needs()


def build(
    name: str,
    graph: Graph,
    cuts: Sequence[Cut],
    tensors: Mapping[str, torch.Tensor],
    *,
    cut: int,
    device: str = "cpu",
    max_rows: int = 32,
    threads: int = 1,
    levels: Levels | None = None,
    calibration: Pixels | None = None,
    folder: Path | None = None,
    checked: Footprint | None = None,
) -> Engine:
    """An engine that is ready to run up to one cut.

    A first build may convert the network, for which it has the process to itself (``engines.machine``) for
    seconds; do that in a process of its own. A build from a folder that holds the converted files only loads them.

    The name is that of an offer, or of an engine that is calibrated or takes pixels as they are kept
    (``engines.protocols``); without such pixels in it, ``levels`` are ignored. All else is as in ``EngineRecipe``.
    For its first build, int8 needs ``calibration``; a folder is of this prefix and cut, and of no other.

    Raises:
        EngineUnsupported: There is no such offer, this machine cannot have it, or it cannot take the network.
        UnsafeArtifact: The graph names what is not allowed, or does not give what its cuts declare.
    """
    why_not = absence(name, device)
    if why_not is not None:
        raise EngineUnsupported(why_not)
    if levels_of(name) and not _entry(name).offer.takes_pixels:
        raise EngineUnsupported(f"{offer_name(name)} takes no pixels as they are kept")
    if levels_of(name) and (levels is None or levels.digest != levels_of(name)):
        raise EngineUnsupported(f"{name} takes pixels that mean something else than those of this preprocessing")
    if not _entry(name).holds_16_bits and any(tensor.dtype in _16_BITS for tensor in tensors.values()):
        raise EngineUnsupported(f"{_entry(name).offer.title} computes networks of 16-bit weights in another precision")
    order = EngineRecipe(
        graph=graph,
        cuts=cuts,
        tensors=tensors,
        cut=cut,
        device=device,
        max_rows=max_rows,
        threads=threads,
        levels=levels if levels_of(name) else None,
        calibration=calibration,
        calibrated_on=calibration_of(name),
        folder=folder,
        checked=checked,
    )
    return _entry(name).make(name, order)


def _entry(name: str) -> _Entry:
    found = next((entry for entry in _ENTRIES if entry.offer.name == offer_name(name)), None)
    if found is None:
        names = [entry.offer.name for entry in _ENTRIES]
        raise EngineUnsupported(f"there is no engine {name!r}{suggest_names(name, names)}")
    return found


def _reference(_: str, order: EngineRecipe) -> Engine:
    return TorchEngine(order.graph, order.cuts, order.tensors, device=order.device, max_rows=order.max_rows)


def _compiler() -> str | None:
    """Why inductor has no compiler here."""
    return None if has_compiler() else f"torch compiles with {COMPILER}, which is not installed"


def _provider(name: str) -> str | None:
    """Why ONNX Runtime cannot run on an accelerator here."""
    return None if name in providers() else f"this ONNX Runtime has no {name}: install onnxruntime-gpu in its place"


def _onnx(name: str, precision: str, title: str, variant: str, *, provider: str | None = None) -> _Entry:
    """On the CPU, or on an accelerator where a provider of it is named."""
    return _Entry(
        # It computes a cast, a product and a sum one after another over the whole batch, which takes 0.2 ms of a core
        # more for an image of 224 x 224 than floats that are ready; making them ready takes half of that.
        offer=Offer(name=name, precision=precision, title=title, takes_pixels=False),
        make=partial(OnnxEngine, variant=variant),
        devices=("cpu",) if provider is None else ("cuda",),
        packages=("onnx", "onnxruntime", "onnxscript"),
        extra="onnxruntime",
        needs=_nothing if provider is None else partial(_provider, provider),
        holds_16_bits=False,
    )


def _openvino(name: str, precision: str, title: str, variant: str, *packages: str) -> _Entry:
    return _Entry(
        offer=Offer(name=name, precision=precision, title=title),
        make=partial(OpenVinoEngine, variant=variant),
        devices=("cpu",),
        packages=(*packages, "openvino"),
        extra="openvino",
        holds_16_bits=False,
    )


_ENTRIES = (
    _Entry(
        offer=Offer(name=REFERENCE, precision="fp32", title="torch", takes_pixels=False, takes_threads=False),
        make=_reference,
        devices=("cpu", "cuda", "mps", "xpu"),
    ),
    _Entry(
        offer=Offer(name="torch-channels-last", precision="fp32", title="torch, channels last"),
        make=TorchVariant,
    ),
    _Entry(
        # The number of threads stands in its kernels, and to compile for another takes minutes.
        offer=Offer(name="torch-compiled", precision="fp32", title="compiled torch", takes_threads=False),
        make=TorchCompiled,
        needs=_compiler,
    ),
    _Entry(
        offer=Offer(name="torch-bf16", precision="bf16", title="torch, bfloat16"),
        make=partial(TorchVariant, dtype=torch.bfloat16),
    ),
    _Entry(
        offer=Offer(name="torch-fp16", precision="fp16", title="torch, float16"),
        make=partial(TorchVariant, dtype=torch.float16),
        devices=("cuda",),
    ),
    _Entry(
        offer=Offer(
            name="torch-compiled-bf16", precision="bf16", title="compiled torch, bfloat16", takes_threads=False
        ),
        make=partial(TorchCompiled, dtype=torch.bfloat16),
        needs=_compiler,
    ),
    _onnx("onnxruntime", "fp32", "ONNX Runtime", "f32"),
    _onnx("onnxruntime-int8", "int8", "ONNX Runtime, 8 bits", "int8"),
    _onnx("onnxruntime-cuda", "fp32", "ONNX Runtime on CUDA", "cuda", provider="CUDAExecutionProvider"),
    _onnx("tensorrt", "fp16", "TensorRT, float16", "tensorrt", provider="TensorrtExecutionProvider"),
    _openvino("openvino", "fp32", "OpenVINO", "f32"),
    _openvino("openvino-bf16", "bf16", "OpenVINO, bfloat16", "bf16"),
    _openvino("openvino-int8", "int8", "OpenVINO, 8 bits", "int8", "nncf"),
)

OFFERS: tuple[Offer, ...] = tuple(entry.offer for entry in _ENTRIES)
"""Every engine that is known, the reference first."""
