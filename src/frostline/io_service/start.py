"""Starts an I/O service: where it listens, its own process, what a control plane says to it, and its metrics."""

import errno
import json
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from anyio import to_thread
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from frostline.control.follower import ControlFollower, PacedTransport
from frostline.control.reporter import CacheStage, ControlLink
from frostline.core.audit import AuditLog
from frostline.core.config import IoSettings, LoaderSettings
from frostline.core.errors import AddressInUse, SettingError, UserError
from frostline.core.files import lock
from frostline.core.system import STARTED
from frostline.io_service.client import IoTransport, socket_address
from frostline.io_service.handler import Upstream
from frostline.io_service.service import IoService
from frostline.node.http.pages import LiveAnswers
from frostline.node.http.requests import METRICS_TYPE, REFUSALS, check_parameters
from frostline.node.http.server import AppServer, listen
from frostline.node.process import Subprocess
from frostline.transport import NODE_COUNTS, Transport
from frostline.tuning import Setting

__all__ = (
    "IoCollector",
    "IoProcess",
    "controlled_service",
    "listen_at",
    "serve_metrics",
    "start_io",
    "unnamed_address",
)


_BACKLOG = 256


def unnamed_address() -> str:
    """An address that nobody has and that leaves no file behind, whatever becomes of the service."""
    return f"unix:@frostline-{secrets.token_hex(16)}"


@contextmanager
def listen_at(url: str) -> Iterator[socket.socket]:
    """Listen at an address; where it is a file, that is gone afterwards.

    A file that a service left which was killed is taken over.

    Raises:
        AddressInUse: Another process listens at the address.
        SettingError: The address cannot be listened at, or other users could write to its folder.
    """
    address = socket_address(url)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            if address.startswith("\0"):
                listening.bind(address)
                listening.listen(_BACKLOG)
            else:
                _bind(listening, Path(address))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"an I/O service listens at {url} already: use it, or name another --socket"
                ) from error
            raise SettingError(f"cannot listen at {url}: {error.strerror or error}") from error
        try:
            yield listening
        finally:
            if not address.startswith("\0"):
                Path(address).unlink(missing_ok=True)


def _bind(listening: socket.socket, path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(path.parent, os.fstat(folder))
        # Of two that find the file of a killed service, one takes its place and the other finds it in use.
        lock(folder)
        if path.is_socket() and not _answers(path):
            path.unlink()
        listening.bind(str(path))
        listening.listen(_BACKLOG)
    finally:
        os.close(folder)


def _check(folder: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SettingError(
            f"the socket of an I/O service lies in a folder of your own that nobody else may enter, and {folder} is "
            "none: chmod it to 0700, or name another --socket"
        )


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


class IoProcess:
    """An I/O service that runs as a child of this process and ends with it, however it ends. A context manager.

    Args:
        upstream: node that it asks.
        settings: bounds of the service.
        url: the place where it listens; by default at a name that no file has, so that nothing stays behind.
    """

    def __init__(self, upstream: Upstream, settings: IoSettings, url: str | None = None) -> None:
        self.url = url or unnamed_address()
        self._wanted: dict[str, Any] = {"url": self.url, "upstream": asdict(upstream), "settings": asdict(settings)}
        self._child: Subprocess | None = None

    @property
    def pid(self) -> int:
        """The process id of the service; 0 where it is not running."""
        child = self._child
        return 0 if child is None or child.has_ended else child.pid

    def transport(self, settings: LoaderSettings | None = None) -> IoTransport:
        """A way to it, which can be pickled and used after a fork; the caller closes it."""
        return IoTransport(self.url, settings)

    def start(self) -> None:
        """Start it and wait until it takes requests; again at the same address where it has died.

        Raises:
            AddressInUse: Another process listens at the address.
            SettingError: The service cannot listen at the address, or does not understand an address or a root.
            NodeUnreachable: The service did not start; the message holds the end of its stderr.
        """
        self.stop()
        child = Subprocess(STARTED["I/O service"], json.dumps(self._wanted), "the I/O service")
        child.wait_ready()
        self._child = child

    def stop(self) -> None:
        """Return when it is gone. Calling it again does nothing."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_io(upstream: Upstream, settings: IoSettings | None = None, url: str | None = None) -> IoProcess:
    """Start an I/O service in a process of its own and wait until it takes requests.

    It ends when it is stopped, and also when this process dies, even by SIGKILL. Ctrl-C in the terminal does not reach
    it: this process decides when it stops.

    Its arguments are those of ``IoProcess``, and it raises what ``IoProcess.start`` raises.
    """
    service = IoProcess(upstream, settings or IoSettings(), url)
    service.start()
    return service


@contextmanager
def controlled_service(
    upstream: Transport, settings: IoSettings, listening: socket.socket, link: ControlLink
) -> Iterator[IoService]:
    """Serve until the end, as one stage of kind ``io`` and one of kind ``cache``.

    Args:
        upstream: way to the nodes or the store, which the caller closes; its requests go when they may.
        settings: bounds of the service, which a share never exceeds.
        listening: socket that it listens on; the caller closes it.
        link: way to the control plane, which is closed at the end.
    """

    def limit(setting: Setting) -> None:
        service.bound(requests=setting.requests, window_bytes=setting.window_bytes)

    def limit_cache(nbytes: int) -> None:
        service.bound_cache(nbytes)

    def cached_bytes() -> int:
        return service.cached_bytes()

    cache = CacheStage(link.job, settings.memory_bytes - settings.window_bytes, cached_bytes, limit_cache)
    maximum = Setting(requests=settings.max_connections, window_bytes=settings.window_bytes)
    with closing(ControlFollower(link, limit, maximum, kind="io", beside=[cache])) as follower:
        service = IoService(PacedTransport(upstream, follower), settings, listening, reports_requests=True)
        with service:
            follower.begin()
            yield service


_CACHE_GAUGES = ("rows", "bytes", "budget_bytes")


class IoCollector(Collector):
    """Metrics of an I/O service, with ``frostline_io_`` in front. Safe for threads.

    Args:
        statistics: function that gives what ``IoService.statistics`` does.
    """

    def __init__(self, statistics: Callable[[], Mapping[str, Any]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        now = self._statistics()
        yield GaugeMetricFamily("frostline_io_uptime_seconds", "seconds since it started", value=now["uptime_s"])
        for name, value in now["totals"].items():
            yield CounterMetricFamily(f"frostline_io_{name}", f"{name} since the start", value=value)
        for name, value in now["window"].items():
            yield GaugeMetricFamily(f"frostline_io_window_{name}", f"{name} of what is under way", value=value)
        for name, value in now["cache"].items():
            family = GaugeMetricFamily if name in _CACHE_GAUGES else CounterMetricFamily
            yield family(f"frostline_io_cache_{name}", f"{name} of the cache", value=value)
        processes = GaugeMetricFamily("frostline_io_job_processes", "processes of a job", labels=["job"])
        for job, about in now["jobs"].items():
            processes.add_metric([job], len(about["processes"]))
        yield processes
        for name, meaning in NODE_COUNTS.items():
            counted = CounterMetricFamily(f"frostline_io_node_{name}", meaning, labels=["node"])
            for use in now["nodes"]:
                counted.add_metric([use["url"]], use[name])
            yield counted
        meaning = "whether one of several nodes is asked nothing now"
        lost = GaugeMetricFamily("frostline_io_node_lost", meaning, labels=["node"])
        for use in now["nodes"]:
            lost.add_metric([use["url"]], bool(use["trouble"]))
        yield lost


@contextmanager
def serve_metrics(
    address: str, statistics: Callable[[], Mapping[str, Any]], names: tuple[str, ...] = ()
) -> Iterator[None]:
    """Serve the metrics over HTTP meanwhile, to whoever reaches the address, within the limits of untrusted clients.

    Args:
        address: ``HOST:PORT`` to listen on.
        statistics: function that gives what ``IoService.statistics`` does.
        names: names by which it may be asked beside its address (``requests.OwnNames``).

    Raises:
        SettingError: The address makes no sense, or nobody may listen there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise SettingError(f"--metrics takes HOST:PORT, such as 127.0.0.1:9101, not {address!r}")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(IoCollector(statistics))
    try:
        listening = listen(host.strip("[]"), int(port), for_others=True)
    except UserError as error:
        raise SettingError(f"metrics cannot be served at {address}: {error}") from error
    server, ready = AppServer(_metrics_app(registry), listening, names=names), threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), name="frostline-io-metrics")
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        server.stop()
        thread.join()


def _metrics_app(registry: CollectorRegistry) -> Starlette:
    async def measured(_: None) -> bytes:
        return await to_thread.run_sync(generate_latest, registry)

    async def metrics(request: Request) -> ASGIApp:
        check_parameters(request)
        return await answers.answer(request, None)

    answers = LiveAnswers(measured, 0, media_type=METRICS_TYPE)
    app = Starlette(routes=[Route("/metrics", metrics, methods=["GET"])], exception_handlers=REFUSALS)
    app.state.audit = AuditLog(None)
    return app
