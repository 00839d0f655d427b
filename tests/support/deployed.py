"""Reads what the folder ``deploy`` starts: the options of each command as ``frostline serve`` takes them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from frostline.cli.serve import serve

__all__ = ("DEPLOY", "OPTIONS", "ROOT", "gibibytes", "options_of", "refusal", "served_by")

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OPTIONS = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}
"""All options of ``frostline serve``."""

_UNITS = {"Gi": 1, "g": 1, "G": 1, "GiB": 1, "Mi": 1 / 1024}


def served_by(command: Sequence[str]) -> dict[str, Any]:
    """The values that ``frostline serve`` takes from a command, as it parses and checks them."""
    verb, *arguments = command
    assert verb == "serve"
    with serve.make_context("serve", list(arguments)) as context:
        return dict(context.params)


def options_of(text: str) -> list[str]:
    """Everything in a text that looks like an option of two dashes."""
    return re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)


def gibibytes(text: str) -> float:
    """A size as Kubernetes, Docker, systemd and Frostline write it."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]+)", text).groups()
    return float(number) * _UNITS[unit]


def refusal(command: Sequence[str]) -> str:
    """What ``frostline serve`` says of a command that it refuses."""
    try:
        served_by(command)
    except click.ClickException as error:
        return error.format_message()
    raise AssertionError("it was taken")
