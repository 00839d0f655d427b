"""Gathers how a run learned from its events, wherever the head was trained."""

import time

from frostline.events import EpochTrained, Evaluated, Event, HeadKept, Observer, StepFinished

__all__ = ("Record",)


class Record:
    """An observer that keeps losses and scores, and passes every event on.

    Attributes:
        losses: one for each step.
        epoch_losses: mean over the steps of each epoch that was trained to its end.
        scores: of the held-out samples, one an epoch.
        samples: handed to the head.
        first_step_at: when the first step was taken, as ``time.perf_counter`` counts; None before.
        kept: which epoch's head was kept where held-out loss decided; None else.
    """

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self.losses: list[float] = []
        self.epoch_losses: list[float] = []
        self.scores: list[Evaluated] = []
        self.samples = 0
        self.first_step_at: float | None = None
        self.kept: HeadKept | None = None

    @property
    def accuracy(self) -> float | None:
        """Of the head that was kept; None where nothing was scored."""
        if not self.scores:
            return None
        return self.scores[-1 if self.kept is None else self.kept.epoch].accuracy

    def __call__(self, event: Event) -> None:
        """Keep what it says, and pass it on."""
        match event:
            case StepFinished():
                self.first_step_at = self.first_step_at or time.perf_counter()
                self.losses.append(event.loss)
                self.samples += event.samples
            case EpochTrained():
                self.epoch_losses.append(event.loss)
            case Evaluated():
                self.scores.append(event)
            case HeadKept():
                self.kept = event
            case _:
                pass
        self._observe(event)
