"""How results look on a terminal: JSON alone on stdout, tables for people, and the exit codes."""

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ("DONE", "FAILED", "INTERRUPTED", "MISTAKEN", "bar", "on_ray", "print_json", "print_json_line", "print_table")

_WIDE = 1000
_BAR = 24


def bar(count: float, maximum: float) -> str:
    """A bar as long as its share of the largest, at most 24 characters."""
    eighths = round(8 * _BAR * count / maximum) if maximum else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


@contextmanager
def on_ray() -> Iterator[Any]:
    """Give Ray's package while this process has joined it; what Ray prints on stdout meanwhile goes to stderr."""
    from frostline.cluster.connect import joined

    # Left before the result is printed: its threads tell of what died whenever they hear of it.
    with redirect_stdout(sys.stderr), joined() as ray:
        yield ray


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, and nothing else."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def print_json_line(value: Any) -> None:
    """Print a JSON document as one line on stdout, for whoever waits for the line."""
    click.echo(json.dumps(value, allow_nan=False))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)
) -> None:
    """Print a table on stdout.

    Args:
        title: above it.
        columns: their names.
        rows: rows of cells, shown as they are.
        left: places of the columns that stand to the left and may be folded; the others hold numbers.
    """
    table = Table(
        title=Text(title), box=SIMPLE_HEAD, title_justify="left", title_style="bold", show_header=any(columns)
    )
    for place, column in enumerate(columns):
        if place in left:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    # Who reads a file or a pipe wants whole lines; a table takes no more room than it needs.
    console = Console()
    (console if console.is_terminal else Console(width=_WIDE)).print(table)


DONE = 0
FAILED = 1
MISTAKEN = 2
"""The user can put it right."""
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
