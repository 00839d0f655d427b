"""The verb ``serve``: run a node beside the data."""

import click

from frostline.cli.options import as_json, node_options

__all__ = ("serve",)


@click.command(epilog="Example: frostline serve --data-root s3://photos --listen 0.0.0.0:7070 --memory 8GiB")
@click.option(
    "--data-root",
    "roots",
    required=True,
    multiple=True,
    metavar="URL",
    help="Serve data under this URL; may be repeated.",
)
@click.option(
    "--listen", default="127.0.0.1:7070", show_default=True, metavar="HOST:PORT", help="Address; port 0 picks one."
)
@node_options
@as_json
def serve(roots: tuple[str, ...], listen: str, memory: int, device: str, as_json: bool) -> None:
    """Run a node beside the data, until Ctrl-C.

    Whoever can reach the address can run networks on the data under the roots: listen where only trainers can reach.
    """
    raise NotImplementedError
