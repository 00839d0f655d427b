"""Takes the options of a run that goes on from its folder, and refuses those that would make it another run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from frostline.errors import SettingError
from frostline.planning import ALL_IN_STORE
from frostline.training.run_config import RunConfig

__all__ = ("options_now", "refuse_changes", "resume_option")

_NOT_OF_THE_RUN = ("as_json", "resume")
# Where and with how much a run is computed may change while it is away; what is computed may not.
_FREE = (
    "cache_folder",
    "cache_size",
    "checkpoint_every",
    "device",
    "list_locally",
    "local_tier",
    "local_tier_size",
    "memory",
    "near",
    "read_threads",
    "relist",
    "trials",
)


def options_now() -> Mapping[str, Any]:
    """The options of the running command, as plain values."""
    params = click.get_current_context().params
    return {name: _plain(value) for name, value in params.items() if name not in _NOT_OF_THE_RUN}


def refuse_changes(folder: Path) -> None:
    """Do nothing if no option was given that differs from the run's.

    Raises:
        SettingError: one does, or the run keeps no checkpoints.
    """
    context, began = click.get_current_context(), RunConfig.read(folder).options
    for param in context.command.params:
        name = str(param.name)
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        value = _plain(context.params.get(name))
        if given and name not in (*_FREE, *_NOT_OF_THE_RUN) and value != began.get(name):
            raise SettingError(
                f"the run in {folder} began with {param.opts[0]} {began.get(name)}, and {value} is given now: leave it "
                "out, or begin another run (--out)"
            )
    if began.get("policy") == ALL_IN_STORE:
        raise SettingError(f"the run in {folder} trains beside the store, where no checkpoints are kept: begin it anew")


def _take_options(context: click.Context, _: click.Parameter, folder: Path | None) -> Path | None:
    if folder is not None:
        options = {name: value for name, value in RunConfig.read(folder).options.items() if value is not None}
        context.default_map = {**options, "out": str(folder)}
    return folder


resume_option = click.option(
    "--resume",
    type=click.Path(path_type=Path, file_okay=False),
    is_eager=True,
    callback=_take_options,
    metavar="DIR",
    help="Go on with the run in this folder from its last checkpoint, with its options; no other is needed.",
)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
