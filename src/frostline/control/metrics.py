"""What a control plane divides, as metrics of Prometheus."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ("metrics_text",)


def metrics_text(view: Mapping[str, Any]) -> bytes:
    """Render what a tenant may see as Prometheus text.

    Args:
        view: as ``control.view.view_of`` gives it.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_View(view))
    return generate_latest(registry)


class _View(Collector):
    def __init__(self, view: Mapping[str, Any]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        stages, jobs = self._view["stages"], self._view["jobs"]
        yield _gauges("capacity", "what there is", ["resource"], _amounts(self._view["capacity"]))
        held = _amounts(self._view["held"] or {})
        yield _gauges("held", "what all stages may use", ["resource"], held)
        shares = [
            ([stage["tenant"], stage["job"], stage["stage"], resource], amount)
            for stage in stages
            for (resource,), amount in _amounts(stage["in_force"])
        ]
        yield _gauges("share", "what a stage may use", ["tenant", "job", "stage", "resource"], shares)
        silent = [([stage["tenant"], stage["job"], stage["stage"]], stage["silent_s"]) for stage in stages]
        yield _gauges("silent_seconds", "time since a stage was heard", ["tenant", "job", "stage"], silent)
        moved = CounterMetricFamily("frostline_control_moved_bytes", "bytes of a job", labels=["tenant", "job"])
        for job in jobs:
            moved.add_metric([job["tenant"], job["job"]], job["moved_bytes"])
        yield moved
        samples = CounterMetricFamily("frostline_control_samples", "samples of a job", labels=["tenant", "job"])
        told = [([job["tenant"], job["job"]], job["activity"]) for job in jobs if job["activity"] is not None]
        for labels, activity in told:
            samples.add_metric(labels, activity["samples"])
        yield samples
        stalls = [(labels, activity["stall_share"]) for labels, activity in told]
        yield _gauges("stall_share", "time that a job waited", ["tenant", "job"], stalls)
        spared = [(labels, activity["saved"]["bytes"]) for labels, activity in told]
        yield _gauges("saved_bytes", "bytes that did not cross", ["tenant", "job"], spared)
        notices = [([job["tenant"], job["job"]], float(len(job["notices"]))) for job in jobs]
        yield _gauges("notices", "what a job was told that cannot be", ["tenant", "job"], notices)


def _amounts(amounts: Mapping[str, float]) -> list[tuple[list[str], float]]:
    return [([resource], amount) for resource, amount in amounts.items()]


def _gauges(name: str, meaning: str, labels: list[str], values: list[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(f"frostline_control_{name}", meaning, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
