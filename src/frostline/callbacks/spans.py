"""Makes spans, each with its beginning and its end, of what a job tells of itself. Pure but for what it remembers."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from frostline.events import (
    BatchDelivered,
    EpochFinished,
    EpochStarted,
    Event,
    PhaseStarted,
    ProgressMade,
    RequestFinished,
    StepFinished,
    WaitingForRows,
)

__all__ = ("EPOCH", "REQUEST", "Span", "SpanMaker")

EPOCH, REQUEST = "epoch", "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took a while, or happened in a moment: then both times are equal.

    Attributes:
        name: ``epoch``, ``wait`` (of the loop for a batch), ``step`` (of the loop, from one batch to when it asks for
            the next), ``request``, the name of a phase such as ``tracing the network``, or that of an event.
        began_s: seconds since 1970.
        ended_s: likewise.
        attributes: figures of it, by name. No text that somebody else wrote is among them, since traces are shown
            around.
    """

    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, int | float | str] = field(default_factory=dict)


class SpanMaker:
    """Takes a job's events one after another, and gives the spans that have ended by then.

    Requests overlap each other. All other spans lie within an epoch or before one, and behind each other.
    """

    def __init__(self) -> None:
        self._phase: tuple[str, float] | None = None
        self._epoch_s: float | None = None
        self._taken_s: float | None = None

    def take(self, event: Event, now_s: float) -> Iterator[Span]:
        """The spans that an event ends.

        Args:
            event: the event.
            now_s: time of the event, in seconds since 1970.
        """
        match event:
            case WaitingForRows() | StepFinished() | ProgressMade():
                pass
            case PhaseStarted():
                yield from self.end(now_s)
                self._phase = (event.name, now_s)
            case EpochStarted():
                yield from self.end(now_s)
                self._epoch_s = now_s
            case BatchDelivered():
                yield from self._delivered(event, now_s)
            case RequestFinished():
                yield Span(
                    name=REQUEST,
                    began_s=now_s - event.seconds,
                    ended_s=now_s,
                    attributes={
                        "samples": event.samples,
                        "bytes": event.payload_bytes,
                        "cut": event.route.cut,
                        "codec": event.route.codec,
                    },
                )
            case EpochFinished():
                yield from self._epoch_ended(now_s, _figures(event))
            case _:
                yield Span(name=_snake(event), began_s=now_s, ended_s=now_s, attributes=_figures(event))

    def end(self, now_s: float) -> Iterator[Span]:
        """The phase or the epoch that goes on still; then nothing does."""
        if self._phase is not None:
            name, began_s = self._phase
            yield Span(name=name, began_s=began_s, ended_s=now_s)
        yield from self._epoch_ended(now_s, {})
        self._phase = None

    def _delivered(self, event: BatchDelivered, now_s: float) -> Iterator[Span]:
        asked_s = now_s - event.stall_s
        if self._taken_s is not None and self._taken_s < asked_s:
            yield Span(name="step", began_s=self._taken_s, ended_s=asked_s)
        begun_s = max(asked_s, self._taken_s or self._epoch_s or asked_s)
        attributes = {"samples": event.samples, "from_cache": event.from_cache}
        yield Span(name="wait", began_s=begun_s, ended_s=now_s, attributes=attributes)
        self._taken_s = now_s

    def _epoch_ended(self, now_s: float, figures: Mapping[str, int | float]) -> Iterator[Span]:
        if self._taken_s is not None:
            yield Span(name="step", began_s=self._taken_s, ended_s=now_s)
        if self._epoch_s is not None:
            yield Span(name=EPOCH, began_s=self._epoch_s, ended_s=now_s, attributes=figures)
        self._taken_s = self._epoch_s = None


def _figures(event: Event) -> dict[str, int | float]:
    values = {item.name: getattr(event, item.name) for item in fields(event)}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _snake(event: Event) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
