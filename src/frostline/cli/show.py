"""How results look on a terminal: JSON alone on stdout, and tables for people."""

import json
from collections.abc import Sequence
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = ("print_json", "print_table")


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, and nothing else."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int = 1) -> None:
    """Print a table on stdout; columns from ``numbers_from`` on stand to the right."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place >= numbers_from else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
