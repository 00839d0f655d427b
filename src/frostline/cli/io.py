"""The verb ``io``: run the I/O service that jobs of this machine share, or say how it stands."""

import faulthandler
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from frostline.cli.logs import log, log_format_option
from frostline.cli.options import (
    NODE_MEMORY,
    allowed_hosts_option,
    as_json,
    command,
    control_link,
    control_option,
    node_setting,
    roots_there,
    setting_option,
    settings_of,
)
from frostline.cli.show import print_json, print_json_line, print_table, say
from frostline.core.config import IoSettings, NodeSettings, check_hosts, default_node_memory_bytes, io_socket

if TYPE_CHECKING:
    from frostline.control.reporter import ControlLink
    from frostline.io_service.service import IoService
    from frostline.transport import Transport

__all__ = ("io",)

# Answers under way are broken off, so an end takes tenths of a second; a disk that must be written may take some more.
_END_S = 30.0
_setting = partial(setting_option, IoSettings)


@command(epilog="Example: frostline io --data-root s3://photos --memory 8GiB")
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Socket to listen on, in a folder of your own with mode 0700; by default in the user's runtime folder.",
)
@click.option(
    "--near",
    multiple=True,
    metavar="URL",
    help="URL of a node to ask, such as http://store-1:7070; may be repeated, to share the work.",
)
@click.option(
    "--data-root",
    "roots",
    multiple=True,
    callback=roots_there,
    metavar="URL",
    help="Read data under this URL directly, without a node.",
)
@_setting(
    "memory_bytes",
    "--memory",
    help="Memory for samples that are cached or being fetched. The process itself and --node-memory come on top.",
)
@_setting(
    "window_bytes",
    "--window",
    default=0,
    show_default="a quarter of --memory",
    help="Maximum bytes being fetched or held by jobs at once, a part of --memory that all jobs share.",
)
@node_setting(
    "memory_bytes",
    "--node-memory",
    default=default_node_memory_bytes,
    show_default=NODE_MEMORY,
    help="Memory for reading and decoding when --data-root is given.",
)
@node_setting(
    "read_threads",
    "--read-threads",
    type=click.IntRange(min=1),
    help="Number of samples requested from a store at once when --data-root is given; more hides a longer round trip.",
)
@click.option("--status", is_flag=True, help="Show the running service: jobs, bytes being fetched, hits and nodes.")
@click.option(
    "--metrics",
    "metrics_address",
    metavar="HOST:PORT",
    help="Address at which to serve Prometheus metrics, such as 127.0.0.1:9101; anyone who can reach it can read them.",
)
@allowed_hosts_option
@control_option
@log_format_option
@as_json
def io(
    path: Path | None,
    near: tuple[str, ...],
    roots: tuple[str, ...],
    status: bool,
    metrics_address: str | None,
    allowed_hosts: tuple[str, ...],
    control: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run the I/O service that the jobs on this machine share.

    It runs until Ctrl-C. Jobs use it by near="unix://PATH" or FROSTLINE_IO. Samples that several jobs read are
    fetched once, and the bytes being fetched have one limit for all jobs. Only processes of the same user can
    connect. With --json, one line on stdout gives the address once the service is ready.
    """
    url = f"unix://{(path or io_socket()).absolute()}"
    if status:
        _say_status(url, as_json=as_json)
        return
    from frostline.io_service.handler import Upstream
    from frostline.io_service.start import listen_at

    check_hosts(allowed_hosts)
    settings = IoSettings(**settings_of(IoSettings, options))
    link = control_link(control)
    node = NodeSettings(**settings_of(NodeSettings, options), max_requests=settings.max_connections)
    with (
        _until_told() as wait,
        Upstream(near=near, roots=roots, node=node).connect() as upstream,
        listen_at(url) as listening,
        _service(upstream, settings, listening, link) as service,
        nullcontext() if metrics_address is None else _served(metrics_address, service, allowed_hosts),
    ):
        _say(url, near or roots, as_json=as_json)
        wait()
        log("io_service_stopping", url=url)


def _service(
    upstream: "Transport", settings: IoSettings, listening: socket.socket, link: "ControlLink | None"
) -> AbstractContextManager["IoService"]:
    """The service, which keeps to what a control plane says where there is a way to one."""
    if link is None:
        from frostline.io_service.service import IoService

        return IoService(upstream, settings, listening)
    from frostline.io_service.start import controlled_service

    return controlled_service(upstream, settings, listening, link)


def _served(metrics: str, service: "IoService", names: tuple[str, ...]) -> AbstractContextManager[None]:
    from frostline.io_service.start import serve_metrics

    return serve_metrics(metrics, service.statistics, names)


@contextmanager
def _until_told() -> Iterator[Callable[[], None]]:
    """A call that waits for SIGTERM; the signal takes its usual effect once all has been put away.

    A lock would wait on where another thread is the one that gets the signal; a byte in a pipe wakes whoever reads it.
    """
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    came: list[int] = []

    def wait() -> None:
        while signal.SIGTERM not in came:
            came.extend(os.read(woken, 1024))
        # Whoever says SIGTERM wants an end: what hangs all the same is named on stderr, and ends with the process.
        faulthandler.dump_traceback_later(_END_S, exit=True)

    wakes_before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    handles_before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield wait
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGTERM, handles_before)
        signal.set_wakeup_fd(wakes_before)
        os.close(woken)
        os.close(wakes)
    if signal.SIGTERM in came:
        os.kill(os.getpid(), signal.SIGTERM)


def _say(url: str, asks: tuple[str, ...], *, as_json: bool) -> None:
    log("io_service_ready", url=url, asks=asks)
    if as_json:
        print_json_line({"url": url, "asks": list(asks)})
    else:
        say(f"I/O service ready at {url}, asking {', '.join(asks)}; set FROSTLINE_IO={url} for jobs to use it")


def _say_status(url: str, *, as_json: bool) -> None:
    from frostline.io_service.client import IoTransport

    with closing(IoTransport(url)) as transport:
        found = transport.service_statistics()
        own = transport.job
    found["jobs"] = {job: state for job, state in found["jobs"].items() if job != own}
    if as_json:
        print_json(found)
        return
    print_table(f"I/O service at {url}", ("", ""), list(_totals(found)))
    rows = [
        (job, ", ".join(map(str, state["processes"])), *(f"{state[name]:,}" for name in _COLUMNS))
        for job, state in found["jobs"].items()
    ]
    print_table("Jobs", ("job", "processes", "expected bytes", "held bytes", "waiting"), rows, left=(0, 1))
    if found["nodes"]:
        rows = [(use["url"], *(f"{use[name]:,}" for name in _OF_NODES), use["trouble"]) for use in found["nodes"]]
        print_table("Nodes", ("node", *_OF_NODES, "trouble"), rows, left=(0, len(_OF_NODES) + 1))


_COLUMNS = ("expected_bytes", "lent_bytes", "waiting")
_OF_NODES = ("requests", "samples", "retries", "failures", "unreadable", "damaged")


def _totals(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    window, cache, totals = found["window"], found["cache"], found["totals"]
    asked = cache["hits"] + cache["joined"] + cache["misses"]
    yield "bytes under way", f"{window['used_bytes']:,} of {window['budget_bytes']:,} (most {window['peak_bytes']:,})"
    yield "bytes kept", f"{cache['bytes']:,} of {cache['budget_bytes']:,}, {cache['rows']:,} samples"
    yield "samples asked for", f"{asked:,}"
    yield "of them kept already", f"{cache['hits']:,}"
    yield "of them under way for another job", f"{cache['joined']:,}"
    yield "of them read", f"{cache['misses']:,}"
    yield "bytes read", f"{totals['bytes_read']:,}"
    yield "bytes given to jobs", f"{totals['bytes_sent']:,}"
