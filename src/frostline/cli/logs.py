"""Structured logs of the verbs that run for long: one JSON object a line on stderr, with what ``logging`` is told."""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from frostline.cli.show import ProgressBar, say
from frostline.core.events import (
    BatchDelivered,
    Event,
    MeasurementFailed,
    NodeExcluded,
    NodeFull,
    NodeLeft,
    NodeLost,
    NodeRestarted,
    Observer,
    ProgressMade,
    RequestFinished,
    RequestRetried,
    RowsNotFinite,
    SampleSkipped,
    SamplesLeftOut,
    SetupWarning,
    StepFinished,
    WaitingForRows,
    event_name,
)
from frostline.core.units import cut_for_log, log_named

__all__ = (
    "EventLog",
    "begin_logs",
    "end_logs",
    "log",
    "log_format_option",
    "log_or_say",
    "note",
    "progress",
    "trace_option",
)

_LOG_FORMATS = ("text", "json")
_LOG = log_named("frostline")
_EVERY_S = 10.0
_WAITING_S = 1.0  # between two ``WaitingForRows``
_TRACE = "frostline.trace"
_WARNINGS = (
    MeasurementFailed,
    NodeExcluded,
    NodeFull,
    NodeLeft,
    NodeLost,
    NodeRestarted,
    RequestRetried,
    RowsNotFinite,
    SampleSkipped,
    SamplesLeftOut,
    SetupWarning,
)
# Passwords in addresses, and signatures of those that a store has signed.
_USER_INFO = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
_QUERY = re.compile(r"(://[^\s?'\"]*\?)[^\s'\"]+")
_HIDDEN = "..."


def log(event: str, *, level: int = logging.INFO, **values: object) -> None:
    """Log an event; without structured logs what is no warning is said nowhere.

    Args:
        event: name of the event, in snake_case.
        level: the level as ``logging`` has it.
        **values: the event's fields.
    """
    _LOG.log(level, event, extra={"fields": values})


def log_or_say(sentence: str) -> None:
    """Say a failure as the command line does, or log it where logs are structured."""
    if _handlers():
        log("failed", level=logging.ERROR, message=sentence)
    else:
        say(f"frostline: {sentence}", err=True)


def note(sentence: str) -> None:
    """Say on stderr what is good to know before a verb begins, or log it where logs are structured."""
    if _handlers():
        log("note", message=sentence)
    else:
        say(sentence, err=True)


def progress() -> AbstractContextManager[Observer]:
    """An observer of a job: a progress bar, or a log of events where logs are structured; ``--trace`` adds a file."""
    observing: AbstractContextManager[Observer] = nullcontext(EventLog()) if _handlers() else ProgressBar()
    path = click.get_current_context().meta.get(_TRACE)
    return observing if path is None else _traced(observing, path)


@contextmanager
def _traced(observing: AbstractContextManager[Observer], path: Path) -> Iterator[Observer]:
    from frostline.callbacks.traces import TraceFile

    with observing as on_event, TraceFile(path, on_event=on_event) as trace:
        yield trace


class EventLog:
    """An observer that logs events. Those of each batch are summed, and logged every ten seconds as ``progress``.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits_s = self._told_s = 0.0  # of the wait that is under way: not logged yet, and logged
        self._begin()
        self._step: dict[str, object] = {}
        self._nonfinite = 0

    def __call__(self, event: Event) -> None:
        """Log an event, or count it."""
        match event:
            case BatchDelivered():
                self._samples += event.samples
                self._stall_s += max(0.0, event.stall_s - self._told_s)
                self._waits_s = self._told_s = 0.0
            case StepFinished():
                self._step = _fields(event)
            case ProgressMade():
                self._step = {**self._step, **_fields(event)}
            case WaitingForRows():
                self._waits_s += _WAITING_S
            case RequestFinished():
                pass
            case RowsNotFinite() if event.total > event.rows:
                self._nonfinite = event.total
            case _:
                log(event_name(event), level=_level(event), **_fields(event))
        if self._clock() >= self._since_s + _EVERY_S:
            self._progress()

    def _progress(self) -> None:
        seconds = self._clock() - self._since_s
        self._stall_s += self._waits_s
        self._waits_s, self._told_s = 0.0, self._told_s + self._waits_s
        done: dict[str, Any] = {
            **self._step,
            "samples_per_s": self._samples / seconds,
            "stall_share": min(1.0, self._stall_s / seconds),
        }
        if self._nonfinite:
            done["nonfinite"] = self._nonfinite
        log("progress", **done)
        self._begin()

    def _begin(self) -> None:
        self._since_s, self._samples, self._stall_s = self._clock(), 0, 0.0


def _fields(event: Event) -> dict[str, object]:
    return {field.name: getattr(event, field.name) for field in fields(event)}


def _level(event: Event) -> int:
    return logging.WARNING if isinstance(event, _WARNINGS) else logging.INFO


class _JsonLines(logging.Formatter):
    """One JSON object for each record: ``time`` (ISO 8601, UTC), ``level``, ``event``, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """A line, without its end."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        values: Mapping[str, object] | None = getattr(record, "fields", None)
        if values is None:  # of another package, or a sentence
            line |= {"event": "message", "logger": record.name, "message": _plain(record.getMessage())}
        else:
            # What every line has stays what it is.
            line |= {"event": record.msg, **{name: _plain(value) for name, value in values.items() if name not in line}}
        if record.exc_info:
            line["exception"] = _plain(self.formatException(record.exc_info))
        return json.dumps(line, allow_nan=False)


def _plain(value: object) -> object:
    match value:
        case str():
            return cut_for_log(_QUERY.sub(rf"\1{_HIDDEN}", _USER_INFO.sub(_HIDDEN, value)))
        case float() if not math.isfinite(value):
            return str(value)
        case bool() | int() | float() | None:
            return value
        case Mapping():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return _plain(str(value))


class _JsonHandler(logging.Handler):
    """Writes lines to what stderr is now; where nobody reads them any more, the work goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        with suppress(OSError):
            click.echo(self.format(record), err=True)


def _handlers() -> list[logging.Handler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, _JsonHandler)]


def begin_logs(kind: str) -> None:
    """Log to stderr from here on, where ``kind`` is ``json``; ``text`` changes nothing."""
    if kind == "json" and not _handlers():
        handler = _JsonHandler()
        handler.setFormatter(_JsonLines())
        logging.getLogger().addHandler(handler)
        logging.captureWarnings(capture=True)
        _LOG.setLevel(logging.INFO)


def end_logs() -> None:
    """Log no more; a process that goes on is as it was before."""
    for handler in _handlers():
        logging.getLogger().removeHandler(handler)
        logging.captureWarnings(capture=False)
        _LOG.setLevel(logging.NOTSET)


log_format_option = click.option(
    "--log-format",
    type=click.Choice(_LOG_FORMATS),
    default=_LOG_FORMATS[0],
    show_default=True,
    expose_value=False,
    is_eager=True,
    callback=lambda _, __, kind: begin_logs(kind),
    help="Format of messages on stderr: sentences for people, or one JSON object a line for log collectors.",
)


def _keep_trace(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    context.meta[_TRACE] = path


trace_option = click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    expose_value=False,
    callback=_keep_trace,
    metavar="FILE",
    help="Write a timeline of steps, waits and requests to this file, as JSON that ui.perfetto.dev shows.",
)
