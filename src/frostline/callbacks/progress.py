"""Shows how far a job's passes are: a line of text in a terminal, a live bar in a notebook."""

import html
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TextIO

from frostline.core.events import (
    BatchDelivered,
    EpochFinished,
    EpochStarted,
    Event,
    PhaseStarted,
    ProgressMade,
    SetupWarning,
)
from frostline.core.units import in_percent, in_samples_per_s, in_seconds, printable
from frostline.jobs.statistics import warn_user

__all__ = ("JobProgress",)

_WIDTH = 30
_TERMINAL_S = 0.1
# Each update of a notebook is a message to a browser, which may be far away.
_NOTEBOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """How far one pass or phase is."""

    name: str
    began_s: float
    done: int = 0
    total: int = 0
    stall_s: float = 0.0
    has_waits: bool = False
    is_over: bool = False

    def text(self, now_s: float) -> str:
        filled = int(_WIDTH * min(1.0, self.done / self.total)) if self.total else 0
        bar = f" [{'#' * filled}{'.' * (_WIDTH - filled)}]" if self.total else ""
        return f"{self.name}:{bar} {self.figures(now_s)}".rstrip(" :")

    def as_html(self, now_s: float) -> str:
        value = f' value="{self.done}" max="{self.total}"' if self.total else ""
        bar = f"<progress{value}></progress> " if self.total or not self.is_over else ""
        return f"<div>{html.escape(self.name)} {bar}{html.escape(self.figures(now_s))}</div>"

    def figures(self, now_s: float) -> str:
        seconds = max(1e-9, now_s - self.began_s)
        found = []
        if self.done:
            found.append(f"{self.done:,}{f' of {self.total:,}' if self.total else ''}")
            found.append(in_samples_per_s(self.done / seconds) if self.has_waits else "")
            found.append(
                f"waiting {in_percent(min(1.0, self.stall_s / seconds))} of the time" if self.has_waits else ""
            )
        if self.is_over:
            found.append(in_seconds(seconds))
        elif self.done and self.total > self.done:
            found.append(f"{in_seconds(seconds * (self.total - self.done) / self.done)} left")
        return ", ".join(filter(None, found))


class _Screen(Protocol):
    """Where a bar is shown."""

    every_s: float

    def show(self, bar: _Bar, now_s: float) -> None: ...


class _Terminal:
    """One line, written over while it grows where the stream is a terminal, and once at its end elsewhere."""

    every_s = _TERMINAL_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._width = 0

    def show(self, bar: _Bar, now_s: float) -> None:
        if not bar.is_over and not self._stream.isatty():
            return
        text = printable(bar.text(now_s))
        lead = "\r" if self._stream.isatty() else ""
        end = "\n" if bar.is_over else ""
        self._stream.write(f"{lead}{text.ljust(self._width)}{end}")
        self._width = 0 if bar.is_over else len(text)
        self._stream.flush()


class _Notebook:
    """One output for each pass or phase, which is written anew as it grows."""

    every_s = _NOTEBOOK_S

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, bar: _Bar, now_s: float) -> None:
        data = {"text/plain": bar.text(now_s), "text/html": bar.as_html(now_s)}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        if bar.is_over:
            self._handle = None


class JobProgress:
    """An observer that shows each pass over a loader, and what a job does before it, with rate and waiting.

    In a notebook it is a live bar, in a terminal a line that is written over, and elsewhere a line at the end of each.
    It needs no widgets. Events of one thread at a time. What a job warns of is warned of as without an observer.

    Args:
        stream: the place where text goes; None is the standard error.
        display: function that shows and updates an output; None takes ``IPython.display.display`` where it is in a
            notebook.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        display: Callable[..., Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        display = display or (_notebook_display() if stream is None else None)
        self._screen: _Screen = _Terminal(stream or sys.stderr) if display is None else _Notebook(display)
        self._clock = clock
        self._bar: _Bar | None = None
        self._shown_s = 0.0

    def __call__(self, event: Event) -> None:
        """Show an event."""
        match event:
            case SetupWarning():
                warn_user(event)
            case PhaseStarted():
                self._begin(event.name, 0)
            case ProgressMade():
                self._grow(done=event.done, total=event.total)
            case EpochStarted():
                self._begin(f"epoch {event.epoch + 1}", event.samples)
            case BatchDelivered() if self._bar is not None:
                done, stall_s = self._bar.done + event.samples, self._bar.stall_s + event.stall_s
                self._grow(done=done, stall_s=stall_s, has_waits=True)
            case EpochFinished():
                self._end()
            case _:
                pass

    def _begin(self, name: str, total: int) -> None:
        self._end()
        self._bar = _Bar(name=name, began_s=self._clock(), total=total)
        self._show()

    def _grow(self, **changes: Any) -> None:
        if self._bar is not None:
            self._bar = replace(self._bar, **changes)
            if self._clock() >= self._shown_s + self._screen.every_s:
                self._show()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar = replace(self._bar, is_over=True)
            self._show()
            self._bar = None

    def _show(self) -> None:
        assert self._bar is not None
        self._shown_s = self._clock()
        self._screen.show(self._bar, self._shown_s)


def _notebook_display() -> Callable[..., Any] | None:
    """IPython's ``display`` where this process is the kernel of a notebook; a terminal's IPython has none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    display: Callable[..., Any] = importlib.import_module("IPython.display").display  # it is there where its shell is
    return display
