"""The node's statistics in the text form that Prometheus reads."""

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frostline.node.statistics import NodeStatistics

__all__ = ("metrics_text",)


def metrics_text(statistics: NodeStatistics) -> bytes:
    """One sample of every figure; seconds and bytes are named as Prometheus wants them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Statistics(statistics))
    return generate_latest(registry)


class _Statistics(Collector):
    def __init__(self, statistics: NodeStatistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        for name, value in asdict(self._statistics.totals).items():
            unit = "seconds" if name.endswith("_s") else ""
            plain = f"{name.removesuffix('_s')}_{unit}" if unit else name
            yield CounterMetricFamily(f"frostline_node_{plain}", f"{name} since the start", value=value)
        for name in ("uptime_s", "requests_in_work", "prefixes"):
            plain = "uptime_seconds" if name == "uptime_s" else name
            yield GaugeMetricFamily(f"frostline_node_{plain}", f"{name} now", value=getattr(self._statistics, name))
        yield from self._memory()

    def _memory(self) -> Iterator[Metric]:
        for name in ("total_bytes", "reserved_bytes", "peak_bytes", "waiting"):
            family = GaugeMetricFamily(f"frostline_node_memory_{name}", f"{name} of a share", labels=["share"])
            for share, pool in self._statistics.memory.items():
                family.add_metric([share], getattr(pool, name))
            yield family
