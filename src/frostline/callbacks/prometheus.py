"""A job's statistics as metrics of Prometheus, for a trainer that serves or pushes metrics of its own."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from frostline.jobs import Job, JobStatistics

__all__ = ("JobCollector",)

_COUNTERS = {
    "wire_bytes": "bytes from the store side to the trainer, bodies and headers",
    "payload_bytes": "bytes of the batches that arrived, as they were packed",
    "requests": "exchanges with the node",
    "retries": "requests made again, because they failed",
    "hedges": "requests made a second time, because they were late",
    "answered": "requests whose answers came whole",
    "answering_s": "seconds from sending those to the ends of their answers, summed",
    "quota_refusals": "requests that a quota of the node refused",
    "samples": "samples handed to the training loop",
    "from_cache": "samples of these that did not cross the network",
    "stall_s": "seconds in which the loop waited for a batch",
    "loading_s": "seconds of all passes over loaders, training included",
}


class JobCollector(Collector):
    """Metrics of a job, named as a node's are, with ``frostline_job_`` in front.

    Register it with the registry that the trainer serves:
    ``prometheus_client.REGISTRY.register(JobCollector(job))``. Safe for threads: a scrape reads ``job.statistics()``.

    Args:
        job: the job; after it is closed its last figures stay.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        done = self._job.statistics()
        for name, meaning in _COUNTERS.items():
            yield CounterMetricFamily(f"frostline_job_{_plain(name)}", meaning, value=getattr(done, name))
        yield CounterMetricFamily("frostline_job_skipped", "samples that could not be read", value=len(done.skipped))
        yield _routed(done)


def _routed(done: JobStatistics) -> Metric:
    family = CounterMetricFamily(
        "frostline_job_routed_samples", "samples that arrived, by the way that they took", labels=["cut", "codec"]
    )
    for route, samples in done.routed:
        family.add_metric([str(route.cut), route.codec], samples)
    return family


def _plain(name: str) -> str:
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
