"""The node's statistics in the text format of Prometheus."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, fields
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from frostline.node.scheduling.statistics import BOUNDS_S, NodeStatistics, Totals

__all__ = ("metrics_text",)


def metrics_text(statistics: NodeStatistics) -> bytes:
    """Render statistics as Prometheus text; names of seconds and bytes follow its conventions."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Statistics(statistics))
    return generate_latest(registry)


_GAUGES = ("uptime_s", "requests_in_progress", "prefixes", "waiting_for_device", "devices_in_service")


class _Statistics(Collector):
    def __init__(self, statistics: NodeStatistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        for name, value in asdict(self._statistics.totals).items():
            yield CounterMetricFamily(f"frostline_node_{_plain(name)}", f"{name} since the start", value=value)
        yield CounterMetricFamily("frostline_node_cpu_seconds", "cpu_s since the start", value=self._statistics.cpu_s)
        for name in _GAUGES:
            value = getattr(self._statistics, name)
            yield GaugeMetricFamily(f"frostline_node_{_plain(name)}", f"{name} now", value=value)
        yield from self._memory()
        yield self._stages()
        yield from self._tenants()

    def _stages(self) -> Metric:
        family = HistogramMetricFamily("frostline_node_stage_seconds", "latencies by stage", labels=["stage"])
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        for stage, latency in self._statistics.latencies.items():
            family.add_metric([stage], list(zip(bounds, accumulate(latency.counts), strict=True)), latency.seconds)
        return family

    def _tenants(self) -> Iterator[Metric]:
        tenants = self._statistics.tenants
        for field in fields(Totals):
            plain = f"frostline_node_tenant_{_plain(field.name)}"
            counter = CounterMetricFamily(plain, f"{field.name} of a tenant since the start", labels=["tenant"])
            for tenant, statistics in tenants.items():
                counter.add_metric([tenant], getattr(statistics.totals, field.name))
            yield counter
        for name in ("weight", "requests_in_progress", "work_bytes", "weight_bytes"):
            gauge = GaugeMetricFamily(f"frostline_node_tenant_{name}", f"{name} of a tenant", labels=["tenant"])
            for tenant, statistics in tenants.items():
                gauge.add_metric([tenant], getattr(statistics, name))
            yield gauge
        yield from self._cache()

    def _cache(self) -> Iterator[Metric]:
        disk, shared = self._statistics.cache, self._statistics.shared_cache
        if disk is not None:  # the node itself counts hits and misses
            counted = {name: value for name, value in asdict(disk).items() if name not in ("hits", "misses")}
            yield from _figures("cache", counted, gauges=("bytes", "budget_bytes"))
        if (tier := self._statistics.local_tier) is not None:
            yield from _figures("local_tier", asdict(tier), gauges=("bytes", "budget_bytes"))
        if shared is not None:
            yield from _figures("shared_cache", asdict(shared), gauges=("bytes", "budget_bytes", "indexed_rows"))

    def _memory(self) -> Iterator[Metric]:
        for name in ("total_bytes", "reserved_bytes", "peak_bytes", "waiting"):
            family = GaugeMetricFamily(f"frostline_node_memory_{name}", f"{name} of a share", labels=["share"])
            for share, pool in self._statistics.memory.items():
                family.add_metric([share], getattr(pool, name))
            yield family


def _figures(what: str, values: Mapping[str, float], *, gauges: Collection[str]) -> Iterator[Metric]:
    for name, value in values.items():
        family = GaugeMetricFamily if name in gauges else CounterMetricFamily
        yield family(f"frostline_node_{what}_{name}", f"{name} of the {what.replace('_', ' ')}", value=value)


def _plain(name: str) -> str:
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
