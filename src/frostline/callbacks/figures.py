"""The figures of a job that are logged while it runs, from what it did until two moments."""

import time
from collections.abc import Callable, Mapping

from frostline.jobs import Job, JobStatistics
from frostline.jobs.activity import saved_bytes

__all__ = ("DIAGNOSIS", "JobMeter", "figures_between")

DIAGNOSIS = "frostline/diagnosis"
"""Name under which trackers keep what held the job back."""


def figures_between(
    before: JobStatistics, now: JobStatistics, *, seconds: float, sample_bytes: float
) -> dict[str, float]:
    """What is logged at a step, by name.

    Shares and the rate are those since the last step that was logged, so that a slow hour shows. Bytes are sums since
    the job began.

    Args:
        before: the statistics at the time that figures were logged last.
        now: the statistics by now.
        seconds: seconds between both.
        sample_bytes: mean size in bytes of a sample as it is stored.

    Returns:
        Nothing where the loop took no sample meanwhile; else ``stall_share``, ``samples_per_s``, ``cache_share``,
        ``bytes_crossed`` and ``bytes_saved`` after ``frostline/``. ``bytes_saved`` is what all samples would have
        crossed as they are stored, less what did; it falls below 0 where features are larger than the samples.
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
    """Reads a job's figures now and then; its own methods are called by one thread.

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
