"""Gathers how a run learned from its events, wherever the head was trained."""

from frostline.events import EpochTrained, Evaluated, Event, Observer, StepFinished

__all__ = ("Record",)


class Record:
    """An observer that keeps losses and scores, and passes every event on.

    Attributes:
        losses: one for each step.
        epoch_losses: mean over the steps of each epoch that was trained to its end.
        scores: of the held-out samples, one an epoch.
        samples: handed to the head.
    """

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self.losses: list[float] = []
        self.epoch_losses: list[float] = []
        self.scores: list[Evaluated] = []
        self.samples = 0

    def __call__(self, event: Event) -> None:
        """Keep what it says, and pass it on."""
        match event:
            case StepFinished():
                self.losses.append(event.loss)
                self.samples += event.samples
            case EpochTrained():
                self.epoch_losses.append(event.loss)
            case Evaluated():
                self.scores.append(event)
            case _:
                pass
        self._observe(event)
