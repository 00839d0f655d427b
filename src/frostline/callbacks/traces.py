"""Writes what a job does as a trace of spans: to a file that Perfetto opens, or to OpenTelemetry."""

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, Protocol, Self

from frostline.core.errors import SettingError
from frostline.core.events import (
    BatchDelivered,
    EpochFinished,
    EpochStarted,
    Event,
    Observer,
    PhaseStarted,
    ProgressMade,
    RequestFinished,
    StepFinished,
    WaitingForRows,
    event_name,
)
from frostline.core.files import open_private, warn_not_kept, with_schema
from frostline.jobs.statistics import warn_user

__all__ = ("EPOCH", "REQUEST", "OpenTelemetryTrace", "Span", "SpanMaker", "TraceFile")


_FORMAT = 1

EPOCH, REQUEST = "epoch", "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A period of work, or a moment, whose two times are equal.

    Attributes:
        name: ``epoch``, ``wait`` (of the loop for a batch), ``step`` (of the loop, from one batch to when it asks for
            the next), ``request``, the name of a phase such as ``tracing the network``, or that of an event.
        began_s: seconds since 1970.
        ended_s: end, in seconds since 1970.
        attributes: figures of it, by name. No text that somebody else wrote is among them, since traces are shown
            around.
    """

    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, int | float | str] = field(default_factory=dict)


class SpanMaker:
    """Takes a job's events one after another, and returns the spans that have ended.

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
                yield Span(name=event_name(event), began_s=now_s, ended_s=now_s, attributes=_figures(event))

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


class _Trace(ABC):
    """An observer that makes spans of events. Use it as a context manager around the job.

    Args:
        on_event: function that is called with each event too; by default warnings reach the user, as without a trace.
        clock: seconds since 1970.
    """

    def __init__(self, *, on_event: Observer = warn_user, clock: Callable[[], float] = time.time) -> None:
        self._on_event = on_event
        self._clock = clock
        self._spans = SpanMaker()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Take an event, from whatever thread."""
        with self._lock:
            now_s = self._clock()
            for span in self._spans.take(event, now_s):
                self._write(span)
            if isinstance(event, EpochStarted):
                self._begin_epoch(event, now_s)
        self._on_event(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for span in self._spans.end(self._clock()):
                self._write(span)
            self._close()

    @abstractmethod
    def _begin_epoch(self, event: EpochStarted, now_s: float) -> None: ...

    @abstractmethod
    def _write(self, span: Span) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


_LOOP = 1


class TraceFile(_Trace):
    """Writes a job's events as JSON that Perfetto and ``chrome://tracing`` open. Use it as a context manager.

    The loop's waiting and its steps lie within their epochs on one line; requests, which overlap, have lines of their
    own. The format is the Trace Event Format of Chromium. A file that a kill broke off is opened too; one that a full
    disk breaks off costs the job nothing, and is logged.

    Args:
        path: the file, made for its user alone; one that is there is replaced.
        on_event: function that is called with each event too; by default warnings reach the user, as without a trace.
        clock: seconds since 1970.

    Raises:
        SettingError: The file at ``path`` cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, on_event: Observer = warn_user, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(on_event=on_event, clock=clock)
        try:
            self._file: IO[str] = TextIOWrapper(open_private(Path(path), "wb"), encoding="utf-8")
        except OSError as error:
            raise SettingError(f"the trace cannot be written to {path}: {error.strerror}") from error
        self._path = Path(path)
        self._is_broken_off = False
        self._count = 0
        self._say("[\n")
        self._put(ph="M", name="process_name", args=with_schema({"name": "Frostline"}, _FORMAT))
        self._put(ph="M", name="thread_name", tid=_LOOP, args={"name": "training loop"})

    def _begin_epoch(self, event: EpochStarted, now_s: float) -> None:
        pass  # it is written when it has ended

    def _write(self, span: Span) -> None:
        began_us, took_us = span.began_s * 1e6, (span.ended_s - span.began_s) * 1e6
        about = {"name": span.name, "cat": "frostline", "ts": began_us, "args": dict(span.attributes)}
        if span.name == REQUEST:
            name = f"{self._count}"
            self._put(ph="b", id=name, **about)
            self._put(ph="e", id=name, name=span.name, cat="frostline", ts=began_us + took_us)
        elif took_us:
            self._put(ph="X", tid=_LOOP, dur=took_us, **about)
        else:
            self._put(ph="i", tid=_LOOP, s="p", **about)

    def _put(self, **event: Any) -> None:
        self._say(f"{',' if self._count else ''}{json.dumps({'pid': os.getpid(), **event})}\n")
        self._count += 1

    def _close(self) -> None:
        self._say("]\n")
        with self._survived():
            self._file.close()

    def _say(self, text: str) -> None:
        if not self._is_broken_off:
            with self._survived():
                self._file.write(text)

    @contextmanager
    def _survived(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._is_broken_off = True
            warn_not_kept(self._path, error)


class _OpenSpan(Protocol):
    def set_attributes(self, attributes: Any) -> Any: ...

    def end(self, end_time: int | None = None) -> Any: ...


class _Tracer(Protocol):
    def start_span(
        self, name: str, context: Any = None, *, attributes: Any = None, start_time: int | None = None
    ) -> Any:
        """As ``opentelemetry.trace.Tracer`` has it."""


class OpenTelemetryTrace(_Trace):
    """Sends a job's events to OpenTelemetry as spans, those of an epoch as its children.

    Needs ``opentelemetry-api``, which whoever has a tracer has. Use it as a context manager around the job.

    Args:
        tracer: a tracer, as ``opentelemetry.trace.get_tracer(...)`` gives it; where its spans go is its own affair.
        on_event: function that is called with each event too; by default warnings reach the user, as without a trace.
        clock: seconds since 1970.
    """

    def __init__(
        self, tracer: _Tracer, *, on_event: Observer = warn_user, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(on_event=on_event, clock=clock)
        self._tracer = tracer
        self._epoch: _OpenSpan | None = None

    def _begin_epoch(self, event: EpochStarted, now_s: float) -> None:
        self._epoch = self._tracer.start_span(EPOCH, attributes={"epoch": event.epoch}, start_time=_nanoseconds(now_s))

    def _write(self, span: Span) -> None:
        if span.name == EPOCH:
            opened, self._epoch = self._epoch, None
        else:
            start = _nanoseconds(span.began_s)
            opened = self._tracer.start_span(span.name, self._context(), start_time=start)
        if opened is not None:
            opened.set_attributes(dict(span.attributes))
            opened.end(end_time=_nanoseconds(span.ended_s))

    def _context(self) -> Any:
        from opentelemetry.trace import set_span_in_context

        return None if self._epoch is None else set_span_in_context(self._epoch)  # type: ignore[arg-type]

    def _close(self) -> None:
        pass


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
