"""Parts of a report that come from elsewhere: the plan's candidates and the versions that decide the numbers."""

import platform
from importlib.metadata import version

import torch

from frostline.planning import Candidate, Plan
from frostline.training.report import CutReport, PlanReport
from frostline.version import __version__

__all__ = ("plan_report", "versions")

_DECIDING = ("numpy", "pillow", "pyarrow")


def plan_report(plan: Plan) -> PlanReport:
    """The plan as a report shows it: every cut with what it would cost, and why it was not taken."""
    return PlanReport(cut=plan.cut, candidates=tuple(_cut(candidate) for candidate in plan.candidates))


def _cut(candidate: Candidate) -> CutReport:
    return CutReport(
        cut=candidate.cut,
        name=candidate.name,
        wire_bytes_per_sample=candidate.wire_bytes_per_sample,
        store_s=candidate.store_s,
        trainer_s=candidate.trainer_s,
        memory_bytes=candidate.memory_bytes,
        samples_per_s=candidate.samples_per_s,
        rejected=candidate.rejected,
    )


def versions() -> dict[str, str]:
    """Of Frostline, Python and the libraries that decide the numbers."""
    found = {"frostline": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**found, **{name: version(name) for name in _DECIDING}}
