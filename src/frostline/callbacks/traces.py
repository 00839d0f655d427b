"""Writes what a job does as a trace: to a file that Perfetto opens, or to OpenTelemetry."""

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from frostline.callbacks.spans import EPOCH, REQUEST, Span, SpanMaker
from frostline.errors import SettingError
from frostline.events import EpochStarted, Event, Observer
from frostline.jobs.statistics import warn_user

__all__ = ("OpenTelemetryTrace", "TraceFile")


class _Trace(ABC):
    """An observer that makes spans of events. Use it as a context manager around the job.

    Args:
        observe: told of each event too; by default warnings reach the user, as without a trace.
        clock: seconds since 1970.
    """

    def __init__(self, *, observe: Observer = warn_user, clock: Callable[[], float] = time.time) -> None:
        self._observe = observe
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
        self._observe(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """Writes the events of a job in the JSON that Perfetto and ``chrome://tracing`` open. Use it as a context manager.

    The loop's waiting and its steps lie within their epochs on one line; requests, which overlap, have lines of their
    own. The format is the Trace Event Format of Chromium. A file that a kill broke off is opened too.

    Args:
        path: the file; one that is there is replaced.
        observe: told of each event too; by default warnings reach the user, as without a trace.
        clock: seconds since 1970.

    Raises:
        SettingError: There is no writing to ``path``.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, observe: Observer = warn_user, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(observe=observe, clock=clock)
        try:
            self._file: IO[str] = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed with the trace
        except OSError as error:
            raise SettingError(f"the trace cannot be written to {path}: {error.strerror}") from error
        self._file.write("[\n")
        self._count = 0
        self._put(ph="M", name="process_name", args={"name": "Frostline"})
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
        self._file.write(f"{',' if self._count else ''}{json.dumps({'pid': os.getpid(), **event})}\n")
        self._count += 1

    def _close(self) -> None:
        self._file.write("]\n")
        self._file.close()


class _OpenSpan(Protocol):
    def set_attributes(self, attributes: Any) -> Any: ...

    def end(self, end_time: int | None = None) -> Any: ...


class _Tracer(Protocol):
    def start_span(
        self, name: str, context: Any = None, *, attributes: Any = None, start_time: int | None = None
    ) -> Any:
        """As ``opentelemetry.trace.Tracer`` has it."""


class OpenTelemetryTrace(_Trace):
    """Gives the events of a job to OpenTelemetry as spans: those of an epoch are its children.

    Needs ``opentelemetry-api``, which whoever has a tracer has. Use it as a context manager around the job.

    Args:
        tracer: a tracer, as ``opentelemetry.trace.get_tracer(...)`` gives it; where its spans go is its own affair.
        observe: told of each event too; by default warnings reach the user, as without a trace.
        clock: seconds since 1970.
    """

    def __init__(
        self, tracer: _Tracer, *, observe: Observer = warn_user, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(observe=observe, clock=clock)
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
