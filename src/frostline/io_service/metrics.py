"""The statistics of an I/O service as metrics of Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frostline.errors import SettingError

__all__ = ("IoCollector", "serving_metrics")

_CACHE_GAUGES = ("rows", "bytes", "budget_bytes")


class IoCollector(Collector):
    """Metrics of an I/O service, with ``frostline_io_`` in front. Safe for threads.

    Args:
        statistics: gives what ``IoService.statistics`` does.
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


@contextmanager
def serving_metrics(address: str, statistics: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Serve the metrics over HTTP meanwhile.

    Args:
        address: ``HOST:PORT`` to listen on.
        statistics: gives what ``IoService.statistics`` does.

    Raises:
        SettingError: The address makes no sense, or nobody may listen there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise SettingError(f"--metrics takes HOST:PORT, such as 127.0.0.1:9101, not {address!r}")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(IoCollector(statistics))
    try:
        server, thread = start_http_server(int(port), addr=host.strip("[]"), registry=registry)
    except (OSError, OverflowError) as error:
        raise SettingError(f"metrics cannot be served at {address}: {error}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
