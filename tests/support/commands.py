"""The command line, run in this process as a user runs it."""

import json

import pytest

from frostline.cli import main

__all__ = ("run", "run_json", "trained")


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def run_json(capsys, *arguments: object):
    """What a command that ends well says with ``--json``."""
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def trained(out, *arguments: object):
    """A run's folder, trained where no test captures what is printed."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, arguments), "--out", str(out)])
    assert not ended.value.code
    return out
