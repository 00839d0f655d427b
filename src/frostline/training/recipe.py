"""Reads a recipe's texts: low-rank adapters, layers that are unfrozen later; and confusion of classes as values."""

import re
from dataclasses import dataclass

from frostline.core.errors import SettingError

__all__ = (
    "ConfusedPair",
    "Confusion",
    "LowRank",
    "Mistake",
    "UnfreezeStep",
    "Unfreezing",
)


_MODULE = re.compile(r"[\w.]*\w(-\d+)?")
_RANGE = re.compile(r"(.*?)(\d+)-(\d+)")
_LORA_SHAPE = "LAYER[,LAYER...]:r=RANK[,alpha=NUMBER][,dropout=SHARE], such as layers.10-11:r=8"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Low-rank adapters (LoRA, arXiv 2106.09685) of a network's layers.

    Attributes:
        modules: paths of modules, whole or their ends: ``layers.10`` is ``vit.layers.10`` too.
        rank: rank of every adapter's two matrices.
        alpha: scale of what an adapter adds, times the rank.
        dropout: share of an adapter's input that is dropped in training.
    """

    modules: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "LowRank":
        """Read ``layers.10-11:r=8``, or with ``,alpha=16,dropout=0.1`` behind it; alpha is the rank by default.

        Raises:
            SettingError: the text says something else.
        """
        named, _, how = text.partition(":")
        values = dict(pair.strip().partition("=")[::2] for pair in how.split(",") if pair.strip())
        modules = tuple(module for part in named.split(",") for module in _modules(part.strip(), text))
        try:
            rank = int(values.pop("r"))
            found = cls(
                modules=modules,
                rank=rank,
                alpha=float(values.pop("alpha", rank)),
                dropout=float(values.pop("dropout", 0.0)),
            )
        except (KeyError, ValueError):
            raise _unreadable_lora(text) from None
        if values or found.rank < 1 or found.alpha <= 0 or not 0 <= found.dropout < 1:
            raise _unreadable_lora(text)
        return found

    def has(self, path: str) -> bool:
        """Whether a module of that path is one of the modules, or inside one."""
        return any(f".{module}." in f".{path}." for module in self.modules)


def _modules(part: str, text: str) -> list[str]:
    if not _MODULE.fullmatch(part):
        raise _unreadable_lora(text)
    match = _RANGE.fullmatch(part)
    if match is None:
        return [part]
    first, last = int(match[2]), int(match[3])
    if first > last:
        raise _unreadable_lora(text)
    return [f"{match[1]}{number}" for number in range(first, last + 1)]


def _unreadable_lora(text: str) -> SettingError:
    return SettingError(f"lora is {_LORA_SHAPE}; it is not {text!r}")


_UNFREEZING_SHAPE = (
    'EPOCH:LAYER[+LAYER...][,EPOCH:LAYER...] with epochs that rise from 2 on, such as "3:layer4,6:layer3"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfreezeStep:
    """From ``epoch``, counted from 1, these modules are trained too."""

    epoch: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfreezing:
    """Layers that are trained later than the others.

    Attributes:
        steps: the steps in the order of their epochs; none where all stays as it is.
    """

    steps: tuple[UnfreezeStep, ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> "Unfreezing":
        """Read ``3:layer4,6:layer3``; None is nothing.

        Raises:
            SettingError: the text says something else.
        """
        steps = tuple(_step(part, text) for part in text.split(",")) if text is not None else ()
        epochs = [step.epoch for step in steps]
        if epochs != sorted(set(epochs)) or any(epoch < 2 for epoch in epochs):
            raise _unreadable_unfreezing(text)
        return cls(steps=steps)

    def until_next(self, epoch: int, epochs: int) -> int:
        """The number of epochs from one, counted from 0, until further layers are trained or all epochs are over."""
        later = [step.epoch - 1 for step in self.steps if step.epoch - 1 > epoch]
        return min([*later, epochs]) - epoch

    @property
    def last_epoch(self) -> int:
        """The epoch from which on nothing more is unfrozen, counted from 0."""
        return self.steps[-1].epoch - 1 if self.steps else 0

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers that are trained in the end beside those from the beginning."""
        return tuple(layer for step in self.steps for layer in step.layers)


def _step(part: str, text: str | None) -> UnfreezeStep:
    epoch, _, named = part.strip().partition(":")
    layers = tuple(layer.strip() for layer in named.split("+"))
    if not epoch.isascii() or not epoch.isdecimal() or not all(layers):
        raise _unreadable_unfreezing(text)
    return UnfreezeStep(epoch=int(epoch), layers=layers)


def _unreadable_unfreezing(text: str | None) -> SettingError:
    return SettingError(f"unfreeze is {_UNFREEZING_SHAPE}; it is not {text!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A held-out sample that was taken for another class.

    Attributes:
        id: id of the sample.
        name: name of the sample in its data set; empty where nobody looked it up.
        true: index of its class.
        said: index of the class that it was taken for.
        confidence: probability that the network gave that class.
    """

    id: int
    name: str = ""
    true: int
    said: int
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfusedPair:
    """How many held-out samples of the class ``true`` were taken for ``said``, both as indices."""

    true: int
    said: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Confusion:
    """What a head said of the held-out samples.

    Attributes:
        samples: number of samples that were scored.
        wrong: number of those that were taken for another class.
        matrix: samples by true class (rows) and by the class that was said (columns); empty for more than 100 classes.
        pairs: the at most 20 pairs of classes that were confused, the most frequent first; empty for more than 1000.
        mistakes: the at most 24 samples that were got wrong, those said with most confidence first.
    """

    samples: int = 0
    wrong: int = 0
    matrix: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[ConfusedPair, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
