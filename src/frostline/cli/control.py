"""The verb ``control``: run a control plane, which says what jobs that share a store may use of it."""

import time
from contextlib import closing
from pathlib import Path

import click

from frostline.cli.options import as_json
from frostline.cli.show import print_json_line

__all__ = ("control",)

_ADVICE = (
    "name its users with tables [[tenant]] in --config, or start it with --open if only your trainers can reach it"
)


@click.command(epilog="Example: frostline control --config control.toml --listen 10.0.0.5:7075")
@click.option(
    "--config",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file of what is divided, between whom and by which policies.",
)
@click.option(
    "--listen",
    "address",
    default="127.0.0.1:7075",
    show_default=True,
    metavar="HOST:PORT",
    help="Port 0 takes a free one. A host that others can reach takes tenants in --config, or --open.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of what stages hold, which outlives the process; by default beside --config, with the suffix .state.",
)
@click.option("--open", "is_open", is_flag=True, help="Listen beyond this machine without tenants.")
@as_json
def control(config: Path, address: str, state: Path | None, is_open: bool, as_json: bool) -> None:
    """Run the control plane of jobs that share a store, until Ctrl-C.

    Jobs name it by LoaderSettings.control or FROSTLINE_CONTROL, report to it each second and keep to what it answers;
    without it they go on with what they heard last. With --json one line on stdout tells the address once it is ready.
    """
    from frostline.cli.serve import address_of
    from frostline.control.app import ControlPlane, make_control_app
    from frostline.control.config_file import read_control_settings
    from frostline.control.state import ControlState
    from frostline.control.store import RecordStore
    from frostline.node.http.server import AppServer, listen

    host, port = address_of(address)
    settings = read_control_settings(config)
    with (
        closing(listen(host, port, for_others=bool(settings.tenants) or is_open, advice=_ADVICE)) as listening,
        closing(RecordStore(state or config.with_suffix(".state"))) as store,
    ):
        kept = ControlState(settings, store.records(), now_s=time.time())
        server = AppServer(make_control_app(ControlPlane(kept, store)), listening)
        server.run(on_ready=lambda: _say(server.url, as_json=as_json))


def _say(url: str, *, as_json: bool) -> None:
    if as_json:
        print_json_line({"url": url})
    else:
        click.echo(f"control plane ready at {url}; FROSTLINE_CONTROL={url} has jobs keep to it; Ctrl-C stops it")
