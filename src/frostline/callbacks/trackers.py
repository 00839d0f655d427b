"""Logs a job's figures to TensorBoard, MLflow, W&B and Prometheus, none of which is imported here.

Each is given what it writes to, and uses no more of it than its protocol here names.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frostline.core.config import check_minimums
from frostline.core.units import metric_name
from frostline.jobs import Job, JobStatistics
from frostline.jobs.activity import saved_bytes
from frostline.transport import NODE_COUNTS

__all__ = (
    "DIAGNOSIS",
    "JobCollector",
    "JobMeter",
    "MlflowLog",
    "TensorBoardLog",
    "WandbLog",
    "figures_between",
)


DIAGNOSIS = "frostline/diagnosis"
"""Name under which trackers keep what held the job back."""


def figures_between(
    before: JobStatistics, now: JobStatistics, *, seconds: float, sample_bytes: float
) -> dict[str, float]:
    """The figures to log at a step, by name.

    Shares and the rate are those since the last step that was logged, so that a slow hour shows. Bytes are sums since
    the job began.

    Args:
        before: the statistics at the time that figures were logged last.
        now: the statistics by now.
        seconds: seconds between both.
        sample_bytes: mean size in bytes of a sample as it is stored.

    Returns:
        Figures by name; empty if the loop has taken no sample since the last step. Else ``frostline/`` and one of
        ``stall_share``, ``samples_per_s``, ``cache_share``, ``bytes_crossed`` and ``bytes_saved``. ``bytes_saved`` is
        the size of the encoded samples less the bytes that crossed, so it is negative if features are larger than
        samples.
    """
    samples = now.samples - before.samples
    if not samples or seconds <= 0:
        return {}
    return {
        "frostline/stall_share": min(1.0, (now.stall_s - before.stall_s) / seconds),
        "frostline/samples_per_s": samples / seconds,
        "frostline/cache_share": (now.from_cache - before.from_cache) / samples,
        "frostline/bytes_crossed": float(now.wire_bytes),
        "frostline/bytes_saved": saved_bytes(now.samples, sample_bytes, now.wire_bytes),
    }


class JobMeter:
    """Reads a job's figures from time to time; for one thread.

    Args:
        job: the job.
        clock: seconds that only grow.
    """

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._clock = clock
        self._sample_bytes = job.data.samples.encoded_bytes / max(1, len(job.data))
        self.restart()

    def restart(self) -> None:
        """Let the next figures begin here, such as where a training begins long after its job was made."""
        self._before, self._at_s = self._job.statistics(), self._clock()

    def figures(self) -> Mapping[str, float]:
        """What is logged now, by name; nothing, and no new beginning, where the loop took no sample since."""
        now, at_s = self._job.statistics(), self._clock()
        found = figures_between(self._before, now, seconds=at_s - self._at_s, sample_bytes=self._sample_bytes)
        if found:
            self._before, self._at_s = now, at_s
        return found

    def diagnosis(self) -> str:
        """What holds the job back, in a sentence."""
        return str(self._job.diagnosis())


class _StepLog(ABC):
    """Logs a job's figures every so many steps, and the diagnosis at the end. Use it as a context manager.

    Args:
        job: the job whose loader the loop takes.
        every_steps: steps from one time that figures are logged to the next.

    Raises:
        SettingError: ``every_steps`` is below 1.
    """

    def __init__(self, job: Job, *, every_steps: int = 50) -> None:
        self.every_steps = every_steps
        check_minimums(self, every_steps=1)
        self._meter = JobMeter(job)
        self._last_step = 0

    def __enter__(self) -> Self:
        self._meter.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self._log()
        self._write_diagnosis(self._meter.diagnosis())

    def step(self, step: int) -> None:
        """Say that the step of this number was taken; call it after each."""
        self._last_step = step
        if not step % self.every_steps:
            self._log()

    def _log(self) -> None:
        if figures := self._meter.figures():
            self._write(figures, self._last_step)

    @abstractmethod
    def _write(self, figures: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def _write_diagnosis(self, diagnosis: str) -> None: ...


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...

    def add_text(self, tag: str, text_string: str, global_step: int) -> Any: ...


class TensorBoardLog(_StepLog):
    """Logs a job's figures as scalars, and the diagnosis as a text. Use it as a context manager.

    Args:
        job: the job whose loader the loop takes.
        writer: a ``SummaryWriter`` of ``torch.utils.tensorboard`` or of ``tensorboardX``; it stays open.
        every_steps: steps from one time that figures are logged to the next.

    Raises:
        SettingError: ``every_steps`` is below 1.
    """

    def __init__(self, job: Job, writer: _Writer, *, every_steps: int = 50) -> None:
        super().__init__(job, every_steps=every_steps)
        self._writer = writer

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def _write_diagnosis(self, diagnosis: str) -> None:
        self._writer.add_text(DIAGNOSIS, diagnosis, self._last_step)


class _Mlflow(Protocol):
    def log_metrics(self, metrics: dict[str, float], step: int) -> Any: ...

    def set_tag(self, key: str, value: str) -> Any: ...


class MlflowLog(_StepLog):
    """Logs a job's figures as metrics of the active run, and the diagnosis as a tag. Use it as a context manager.

    Args:
        job: the job whose loader the loop takes.
        mlflow: the module ``mlflow``, in which a run was started.
        every_steps: steps from one time that figures are logged to the next.

    Raises:
        SettingError: ``every_steps`` is below 1.
    """

    def __init__(self, job: Job, mlflow: _Mlflow, *, every_steps: int = 50) -> None:
        super().__init__(job, every_steps=every_steps)
        self._mlflow = mlflow

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def _write_diagnosis(self, diagnosis: str) -> None:
        self._mlflow.set_tag(DIAGNOSIS, diagnosis)


class _Run(Protocol):
    @property
    def summary(self) -> Any: ...

    def log(self, data: dict[str, Any]) -> Any: ...

    def define_metric(self, name: str, step_metric: str) -> Any: ...


class WandbLog(_StepLog):
    """Logs a job's figures to a run of W&B, and the diagnosis to its summary. Use it as a context manager.

    They have a step of their own, ``frostline/step``, since W&B drops what comes for a step before its last.

    Args:
        job: the job whose loader the loop takes.
        run: a run, as ``wandb.init`` returns it; it stays open.
        every_steps: steps from one time that figures are logged to the next.

    Raises:
        SettingError: ``every_steps`` is below 1.
    """

    def __init__(self, job: Job, run: _Run, *, every_steps: int = 50) -> None:
        super().__init__(job, every_steps=every_steps)
        self._run = run
        run.define_metric("frostline/*", step_metric="frostline/step")

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({**figures, "frostline/step": step})

    def _write_diagnosis(self, diagnosis: str) -> None:
        self._run.summary[DIAGNOSIS] = diagnosis


_COUNTERS = {
    "wire_bytes": "bytes from the store side to the trainer, bodies and headers",
    "payload_bytes": "bytes of the batches that arrived, as they were packed",
    "requests": "exchanges with the node",
    "retries": "requests made again, because they failed",
    "hedges": "requests made a second time, because they were late",
    "answered": "requests whose answers came whole",
    "answering_s": "seconds from sending those to the ends of their answers, summed",
    "damaged": "answers that did not come as they were sent, and were asked for again",
    "quota_refusals": "requests that a quota of the node refused",
    "samples": "samples handed to the training loop",
    "from_cache": "samples of these that did not cross the network",
    "nonfinite": "samples for which the frozen layers gave Inf or NaN, counted each time that they came",
    "stall_s": "seconds in which the loop waited for a batch",
    "loading_s": "seconds of all passes over loaders, training included",
}


class JobCollector(Collector):
    """Metrics of a job for Prometheus, named like a node's, with the prefix ``frostline_job_``.

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
            yield CounterMetricFamily(f"frostline_job_{metric_name(name)}", meaning, value=getattr(done, name))
        yield CounterMetricFamily("frostline_job_skipped", "samples that could not be read", value=len(done.skipped))
        yield _routed(done)
        for name, meaning in NODE_COUNTS.items():
            family = CounterMetricFamily(f"frostline_job_node_{name}", meaning, labels=["node"])
            for use in done.nodes:
                family.add_metric([use.url], getattr(use, name))
            yield family
        meaning = "whether one of several nodes is asked nothing now"
        lost = GaugeMetricFamily("frostline_job_node_lost", meaning, labels=["node"])
        for use in done.nodes:
            lost.add_metric([use.url], bool(use.trouble))
        yield lost


def _routed(done: JobStatistics) -> Metric:
    family = CounterMetricFamily(
        "frostline_job_routed_samples", "samples that arrived, by the way that they took", labels=["cut", "codec"]
    )
    for route, samples in done.routed:
        family.add_metric([str(route.cut), route.codec], samples)
    return family
