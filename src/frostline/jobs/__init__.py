"""The job: what ``offload`` makes of a network and its data."""

from frostline.jobs.job import Job
from frostline.jobs.offload import loader, offload
from frostline.jobs.statistics import JobStatistics

__all__ = ("Job", "JobStatistics", "loader", "offload")
