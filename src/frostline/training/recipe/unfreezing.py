"""Reads from which epoch on which layers of a network are trained too."""

from dataclasses import dataclass

from frostline.errors import SettingError

__all__ = ("ThawStep", "Unfreezing")

_SHAPE = 'EPOCH:LAYER[+LAYER...][,EPOCH:LAYER...] with epochs that rise from 2 on, such as "3:layer4,6:layer3"'


@dataclass(frozen=True, slots=True, kw_only=True)
class ThawStep:
    """From ``epoch``, counted from 1, these modules are trained too."""

    epoch: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfreezing:
    """Layers that are trained later than the others.

    Attributes:
        steps: in the order of their epochs; none where all stays as it is.
    """

    steps: tuple[ThawStep, ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> "Unfreezing":
        """Read ``3:layer4,6:layer3``; None is nothing.

        Raises:
            SettingError: the text says something else.
        """
        steps = tuple(_step(part, text) for part in text.split(",")) if text is not None else ()
        epochs = [step.epoch for step in steps]
        if epochs != sorted(set(epochs)) or any(epoch < 2 for epoch in epochs):
            raise _unreadable(text)
        return cls(steps=steps)

    def until_next(self, epoch: int, epochs: int) -> int:
        """The number of epochs from one, counted from 0, until further layers are trained or all epochs are over."""
        later = [step.epoch - 1 for step in self.steps if step.epoch - 1 > epoch]
        return min([*later, epochs]) - epoch

    @property
    def last_epoch(self) -> int:
        """The epoch from which on nothing more thaws, counted from 0."""
        return self.steps[-1].epoch - 1 if self.steps else 0

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers that are trained in the end beside those from the beginning."""
        return tuple(layer for step in self.steps for layer in step.layers)


def _step(part: str, text: str | None) -> ThawStep:
    epoch, _, named = part.strip().partition(":")
    layers = tuple(layer.strip() for layer in named.split("+"))
    if not epoch.isascii() or not epoch.isdecimal() or not all(layers):
        raise _unreadable(text)
    return ThawStep(epoch=int(epoch), layers=layers)


def _unreadable(text: str | None) -> SettingError:
    return SettingError(f"unfreeze is {_SHAPE}; it is not {text!r}")
