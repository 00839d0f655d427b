"""The verb ``top``: what nodes do now, from the difference between two looks at their statistics."""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from frostline.cli.options import as_json, command
from frostline.cli.show import DONE, FAILED, print_json_line, text
from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings
from frostline.core.errors import FrostlineError
from frostline.core.units import in_bytes, in_percent, in_rate

__all__ = ("NodeActivity", "top", "view_of")

_NEAR = "http://127.0.0.1:7070"
_WIDE = 200
# A node that says nothing for so long is shown as silent; the others are not kept waiting for it.
_SILENCE_S = 3.0
_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeActivity:
    """What a node did between two looks, and how it stands at the second.

    Attributes:
        url: the URL.
        error: the reason why it did not answer, in a sentence; None where it did, and the rest is nothing where it did
            not.
        device: name of its hardware.
        samples_per_s: the answered samples a second.
        read_bytes_per_s: bytes a second that it read from the store.
        sent_bytes_per_s: bytes a second of its answers.
        device_share: share of the time in which its devices ran.
        requests: requests in progress.
        waiting: batches and measurements that wait for a device or run on one.
        memory: share in use of each pool of memory.
        cache_share: share of the samples asked of its cache that were there; None where none was asked for.
        tenants: samples a second of each tenant that the asker may see.
    """

    url: str
    error: str | None = None
    device: str = ""
    samples_per_s: float = 0.0
    read_bytes_per_s: float = 0.0
    sent_bytes_per_s: float = 0.0
    device_share: float = 0.0
    requests: int = 0
    waiting: int = 0
    memory: Mapping[str, float] = field(default_factory=dict)
    cache_share: float | None = None
    tenants: Mapping[str, float] = field(default_factory=dict)


def view_of(url: str, device: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> NodeActivity:
    """What a node did between two looks, by its own clock.

    Args:
        url: the URL.
        device: name of its hardware.
        before: the statistics at the first look; none counts from its start, as where it was started again since.
        now: the statistics at the second look.
    """
    seconds = now["uptime_s"] - before.get("uptime_s", 0.0)
    if seconds <= 0:
        before, seconds = {}, now["uptime_s"]
    done = _grown(before.get("totals", {}), now["totals"])
    tenants_before = before.get("tenants", {})
    asked = done["cache_hits"] + done["cache_misses"]
    return NodeActivity(
        url=url,
        device=device,
        samples_per_s=done["samples"] / seconds,
        read_bytes_per_s=done["bytes_read"] / seconds,
        sent_bytes_per_s=done["bytes_sent"] / seconds,
        device_share=min(1.0, done["compute_s"] / seconds / max(1, now["devices_in_service"])),
        requests=now["requests_in_progress"],
        waiting=now["waiting_for_device"],
        memory={
            name: pool["reserved_bytes"] / pool["total_bytes"]
            for name, pool in now["memory"].items()
            if pool["total_bytes"]
        },
        cache_share=done["cache_hits"] / asked if asked else None,
        tenants={
            name: _grown(tenants_before.get(name, {}).get("totals", {}), tenant["totals"])["samples"] / seconds
            for name, tenant in now["tenants"].items()
        },
    )


def _grown(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


@command(epilog="Example: frostline top --near http://store-1:7070 --near http://store-2:7070")
@click.option(
    "--near",
    multiple=True,
    default=(_NEAR,),
    show_default=True,
    metavar="URL",
    help="URL of a node, such as http://store-1:7070; may be repeated.",
)
@click.option(
    "--every",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between updates; rates are averaged over them.",
)
@click.option("--once", is_flag=True, help="Measure once over --every seconds, print it and exit, for scripts.")
@as_json
def top(near: Sequence[str], every: float, once: bool, as_json: bool) -> int:
    """Show the activity of nodes: rates, devices, memory, tenants.

    It runs until Ctrl-C. With --json each update is one line, a list of nodes. With --once the exit code is 1 if a
    node did not answer.
    """
    with ExitStack() as stack:
        nodes = [_Watched(url, stack) for url in near]
        looks = _looks(nodes, every)
        if once:
            views = next(looks)
            _show(views, as_json=as_json)
            return FAILED if any(view.error for view in views) else DONE
        with suppress(KeyboardInterrupt):
            _follow(looks, as_json=as_json)
    return DONE


class _Watched:
    """A node that is looked at again and again; one that went away is asked each time."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._url = url
        settings = LoaderSettings()
        settings = replace(settings, deadline_s=min(_SILENCE_S, settings.deadline_s))
        self._transport = stack.enter_context(closing(HttpTransport(url, settings)))
        self._device = ""
        self._before: Mapping[str, Any] | None = None

    def look(self) -> NodeActivity:
        """What it did since the last look; at the first, since it started."""
        try:
            self._device = self._device or self._transport.health().hardware
            now = self._transport.node_statistics()
        except FrostlineError as error:
            self._before = None
            return NodeActivity(url=self._url, error=str(error))
        before, self._before = self._before or {}, now
        return view_of(self._url, self._device, before, now)


def _looks(nodes: Sequence[_Watched], every_s: float) -> Iterator[list[NodeActivity]]:
    with ThreadPoolExecutor(_AT_ONCE, "frostline-top") as threads:
        list(threads.map(_Watched.look, nodes))
        while True:
            _pause(every_s)
            yield list(threads.map(_Watched.look, nodes))


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def _follow(looks: Iterator[list[NodeActivity]], *, as_json: bool) -> None:
    if as_json or not sys.stdout.isatty():
        for views in looks:
            _show(views, as_json=as_json)
        return
    with Live(screen=True, auto_refresh=False) as live:
        for views in looks:
            live.update(_tables(views), refresh=True)


def _show(views: Sequence[NodeActivity], *, as_json: bool) -> None:
    if as_json:
        print_json_line([asdict(view) for view in views])
    else:
        console = Console()
        (console if console.is_terminal else Console(width=_WIDE)).print(_tables(views))


_COLUMNS = ("node", "samples/s", "read/s", "sent/s", "device", "requests", "waiting", "memory", "cache")


def _tables(views: Sequence[NodeActivity]) -> Group:
    nodes, tenants = Table(box=SIMPLE_HEAD), Table(box=SIMPLE_HEAD)
    for number, column in enumerate(_COLUMNS):
        nodes.add_column(column, justify="right" if number else "left")
    for view in views:
        nodes.add_row(*map(text, _cells(view)))
    tenants.add_column("tenant")
    tenants.add_column("samples/s", justify="right")
    for name, rate in sorted(_by_tenant(views).items()):
        tenants.add_row(text(name), in_rate(rate))
    errors = [text(f"{view.url}: {view.error}") for view in views if view.error]
    return Group(nodes, *([tenants] if tenants.row_count else []), *errors)


def _cells(view: NodeActivity) -> Sequence[str]:
    if view.error is not None:
        return (view.url, "no answer")
    pool, used = max(view.memory.items(), key=lambda item: item[1], default=("", 0.0))
    return (
        f"{view.url} ({view.device})",
        in_rate(view.samples_per_s),
        in_bytes(view.read_bytes_per_s),
        in_bytes(view.sent_bytes_per_s),
        in_percent(view.device_share),
        f"{view.requests}",
        f"{view.waiting}",
        f"{pool} {in_percent(used)}",
        "-" if view.cache_share is None else in_percent(view.cache_share),
    )


def _by_tenant(views: Sequence[NodeActivity]) -> dict[str, float]:
    rates: dict[str, float] = {}
    for view in views:
        for name, rate in view.tenants.items():
            rates[name] = rates.get(name, 0.0) + rate
    return rates
