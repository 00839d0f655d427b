"""The command line: verbs; the only place that prints or exits."""

from frostline.cli.main import main

__all__ = ("main",)
