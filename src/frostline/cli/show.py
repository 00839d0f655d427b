"""How results and progress look on a terminal: JSON alone on stdout, tables for people, bars on stderr, exit codes."""

import json
import math
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, Self

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from frostline.core.events import (
    BatchDelivered,
    ColumnsDropped,
    EngineChanged,
    EpochFinished,
    EpochsChosen,
    EpochStarted,
    EpochTrained,
    Evaluated,
    Event,
    HeadSelected,
    LayersUnfrozen,
    MeasurementFailed,
    NodeBack,
    NodeExcluded,
    NodeFull,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRestarted,
    PhaseStarted,
    ProgressMade,
    Replanned,
    RequestFinished,
    RequestHedged,
    RequestRetried,
    RowsNotFinite,
    RunResumed,
    SampleSkipped,
    SamplesLeftOut,
    SetupWarning,
    SplitsChosen,
    StepFinished,
    Tuned,
    WaitingForRows,
    WeightsLoaded,
)
from frostline.core.units import METRICS, in_rate, in_score, printable

__all__ = (
    "DIFFERENT",
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "MISTAKEN",
    "ProgressBar",
    "bar",
    "on_ray",
    "print_json",
    "print_json_line",
    "print_table",
    "say",
    "text",
)


_WIDE = 1000
_BAR = 24


def bar(count: float, maximum: float) -> str:
    """A bar as long as its share of the largest, at most 24 characters."""
    eighths = round(8 * _BAR * count / maximum) if maximum else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


@contextmanager
def on_ray() -> Iterator[Any]:
    """Give Ray's package while this process has joined it; what Ray prints on stdout meanwhile goes to stderr."""
    from frostline.ray.control import ray_session

    # Left before the result is printed: its threads tell of what died whenever they hear of it.
    with redirect_stdout(sys.stderr), ray_session() as ray:
        yield ray


def say(*lines: str, sign: str = "", err: bool = False) -> None:
    """Print lines for people.

    Args:
        *lines: lines, each of which may have names and words of others in it.
        sign: the styled text before the first line.
        err: print on stderr.
    """
    click.echo(sign + "\n".join(map(printable, lines)), err=err)


def text(said: str, style: str = "") -> Text:
    """A cell of a table, or a line beside one."""
    return Text(printable(said), style)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, and nothing else."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def print_json_line(value: Any) -> None:
    """Print a JSON document as one line on stdout, for whoever waits for the line."""
    click.echo(json.dumps(value, allow_nan=False))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)
) -> None:
    """Print a table on stdout; of one without rows the title alone.

    Args:
        title: the title above it.
        columns: the names.
        rows: rows of cells.
        left: places of the columns that stand to the left and may be folded; the others hold numbers.
    """
    table = Table(box=SIMPLE_HEAD, show_header=any(columns))
    for place, column in enumerate(columns):
        if place in left:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(text, row))
    # Who reads a file or a pipe wants whole lines; a table takes no more width than it needs.
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDE)
    # Not the table's own title, which would be folded to the table's width.
    console.print(text(title), style="bold", soft_wrap=True)
    if rows:
        console.print(table)


DONE = 0
FAILED = 1
MISTAKEN = 2
"""The user can put it right."""
DIFFERENT = 3
"""A run was computed again, and something is another one."""
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


_LINE_EVERY_S = 10.0
# Epochs on kept features take milliseconds: the first few are said, and then one a second.
_EPOCHS_SAID = 5
_EPOCH_EVERY_S = 1.0

# Nobody reads these as sentences. An event that neither stands here nor has a case is found by mypy.
_Unsaid = EpochFinished | EpochTrained | RequestFinished | RequestHedged | WaitingForRows


class ProgressBar:
    """An observer that shows a job as it runs. Use it as a context manager.

    Args:
        line_every_s: seconds from one line of what was counted to the next, where there is no terminal.
    """

    def __init__(self, *, line_every_s: float = _LINE_EVERY_S) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None, figures="")
        self._phase = ""
        self._line_every_s = line_every_s
        self._line_at = time.monotonic()
        self._epoch_at = -math.inf
        self._started: float | None = None
        self._samples = 0
        self._stall_s = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        match event:
            case PhaseStarted():
                self._phase = event.name
                self._progress.update(self._task, description=printable(event.name), completed=0, total=None)
            case EpochStarted():
                self._started = time.monotonic() if self._started is None else self._started
            case BatchDelivered():
                self._samples += event.samples
                self._stall_s += event.stall_s
            case ProgressMade():
                self._progress.update(
                    self._task, completed=event.done, total=event.total or None, figures=self._figures()
                )
                self._line(event)
            case StepFinished():
                self._step(event)
            case Evaluated():
                self._epoch(event)
            case (
                EpochsChosen()
                | HeadSelected()
                | LayersUnfrozen()
                | SetupWarning()
                | RunResumed()
                | SplitsChosen()
                | WeightsLoaded()
            ):
                self._say(_of_the_job(event))
            case Tuned() if event.is_trial or event.requests == event.requests_before:
                pass  # what is tried, and bytes alone, would fill the screen
            case (
                ColumnsDropped()
                | NodeFull()
                | NodeJoined()
                | NodeLeft()
                | NodeLost()
                | NodeBack()
                | NodeExcluded()
                | NodeRestarted()
                | Replanned()
                | RequestRetried()
                | SampleSkipped()
                | Tuned()
            ):
                self._say(_in_words(event))
            case _:
                self._measured(event)

    def _line(self, event: ProgressMade) -> None:
        """Say how far it is to whoever reads a log, for a copy may take hours."""
        now = time.monotonic()
        if not self._console.is_terminal and now >= self._line_at + self._line_every_s:
            self._line_at = now
            self._say(f"{self._phase}: {event.done:,}{f' of {event.total:,}' if event.total else ''}".lstrip(": "))

    def _epoch(self, event: Evaluated) -> None:
        now = time.monotonic()
        if event.epoch < _EPOCHS_SAID or now >= self._epoch_at + _EPOCH_EVERY_S:
            self._epoch_at = now
            scores = "".join(f"{METRICS[name]} {in_score(name, value)}, " for name, value in event.scores.items())
            self._say(f"epoch {event.epoch + 1}: held-out {scores}loss {event.loss:.3f} ({self._figures()})")
            # The next figures are of what comes from here on: later epochs on kept features are much faster.
            self._started, self._samples, self._stall_s = now, 0, 0.0

    def _step(self, event: StepFinished) -> None:
        self._progress.update(
            self._task,
            description=f"epoch {event.epoch + 1}",
            completed=event.step,
            total=event.steps or None,
            figures=f"loss {event.loss:.3f}  {self._figures()}",
        )

    def _figures(self) -> str:
        if self._started is None or not self._samples:
            return ""
        elapsed = time.monotonic() - self._started
        return f"{self._samples / elapsed:.0f} samples/s, waiting {self._stall_s / elapsed:.0%}"

    def _measured(self, event: EngineChanged | MeasurementFailed | RowsNotFinite | SamplesLeftOut | _Unsaid) -> None:
        match event:
            case EngineChanged():
                rate = "" if event.samples_per_s is None else f" at {in_rate(event.samples_per_s)} samples/s"
                error = f"error up to {event.error:.1g}"
                self._say(f"the node runs the frozen layers by {event.after} from now on{rate} ({error})")
            case MeasurementFailed():
                self._say(f"nothing could be measured for a better plan, and the job goes on: {event.reason}")
            case RowsNotFinite() if event.total == event.rows:
                self._say(f"{event.first}; more are counted")
            case SamplesLeftOut():
                self._say(event.reason)
            case _:
                pass

    def _say(self, sentence: str) -> None:
        if sentence:
            # Who reads a file or a pipe wants whole lines.
            is_folded = self._console.is_terminal
            self._console.print(printable(sentence), markup=False, highlight=False, soft_wrap=not is_folded)


def _of_the_job(
    event: EpochsChosen | HeadSelected | LayersUnfrozen | SetupWarning | RunResumed | SplitsChosen | WeightsLoaded,
) -> str:
    match event:
        case EpochsChosen():
            return f"at most {event.epochs} epochs: {event.reason} (--epochs takes another number)"
        case HeadSelected():
            return f"the head of epoch {event.epoch + 1} of {event.epochs} is kept: its held-out loss was the lowest"
        case LayersUnfrozen():
            return (
                f"{event.layers} is trained too from epoch {event.epoch + 1} on: the frost line is {event.frost_line}"
            )
        case SetupWarning():
            return f"not as it was asked for: {event.reason}"
        case RunResumed():
            return f"going on after step {event.step:,}, in epoch {event.epoch + 1}"
        case SplitsChosen():
            return _sides(event) if event.train or event.held_out else ""
        case WeightsLoaded():
            return f"weights of {event.model}: {event.source}"


def _sides(event: SplitsChosen) -> str:
    train = f"{f'the split {event.train}, ' if event.train else ''}{event.train_samples:,} samples"
    scored = f"the split {event.held_out}" if event.held_out else "a share of it"
    held_out = f"{scored}, {event.held_out_samples:,} samples" if event.held_out_samples else "nothing"
    return f"training on {train}, and scoring {held_out}; --split and --val-split choose others"


def _of_a_node(event: NodeJoined | NodeLeft | NodeLost | NodeBack | NodeExcluded | NodeRestarted) -> str:
    match event:
        case NodeJoined():
            return f"{event.url} takes part"
        case NodeLeft():
            return f"{event.url} takes part no more: {event.reason}"
        case NodeLost():
            return event.sentence
        case NodeBack():
            return f"{event.url} answers again"
        case NodeExcluded():
            return f"{event.url} is left out of what {event.engine} computes: {event.reason}"
        case NodeRestarted():
            return f"the node had died; it was started again at {event.url}"


def _in_words(
    event: ColumnsDropped
    | NodeFull
    | NodeJoined
    | NodeLeft
    | NodeLost
    | NodeBack
    | NodeExcluded
    | NodeRestarted
    | Replanned
    | RequestRetried
    | SampleSkipped
    | Tuned,
) -> str:
    match event:
        case ColumnsDropped():
            return f"the copy cannot hold these columns, which stay with {event.url}: {', '.join(event.columns)}"
        case NodeFull():
            return f"the node is full, asking again in {event.delay_s:.1f} s (attempt {event.attempt}): {event.reason}"
        case NodeJoined() | NodeLeft() | NodeLost() | NodeBack() | NodeExcluded() | NodeRestarted():
            return _of_a_node(event)
        case Replanned():
            return f"another plan after {event.samples} samples: {event.after}; {event.reason}"
        case RequestRetried():
            return f"asking again in {event.delay_s:.1f} s (attempt {event.attempt}): {event.reason}"
        case SampleSkipped():
            return f"skipped {event.object}: {event.reason}"
        case Tuned():
            return f"{event.requests} requests under way at most: {event.reason}"
