"""Decides what a stage reports, and what it keeps to: the last settings that it heard, while it hears nothing."""

import math
from dataclasses import replace

from frostline.control.activity.job_activity import JobActivity
from frostline.control.amounts import Amounts
from frostline.control.messages import ControlAnswer, StageReport

__all__ = ("ControlledStage",)


_UNCOUNTED = Amounts()


class ControlledStage:
    """A stage's side of the control plane. Not for several threads.

    Before it has heard anything it keeps to nothing but its own settings. Afterwards it keeps the last settings, also
    where the control plane is gone. Only a share of nothing ends with its lease, because waiting for more would stop
    the job; then one request at a time is allowed, and computing.

    Args:
        stage: name of the stage, which no other process of its tenant ever has.
        job: name of the job that it works for.
        kind: one of ``KINDS``.
    """

    def __init__(self, *, stage: str, job: str, kind: str = "window") -> None:
        self._base = StageReport(stage=stage, job=job, kind=kind, sequence=0)
        self._heard_s = -math.inf
        self._lease_s = math.inf
        self.version = 0
        self.in_force = Amounts()
        self.notices: tuple[str, ...] = ()

    def report(
        self,
        demand: Amounts,
        moved_bytes: int = 0,
        *,
        used: Amounts = _UNCOUNTED,
        activity: JobActivity | None = None,
        has_ended: bool = False,
    ) -> StageReport:
        """Make the next report.

        Args:
            demand: amounts that it would use if it might.
            moved_bytes: bytes that it has moved since it began.
            used: amounts that it used since the last one.
            activity: account that its process gives of the job.
            has_ended: whether it is the last one.
        """
        self._base = replace(self._base, sequence=self._base.sequence + 1)
        return replace(
            self._base,
            version=self.version,
            in_force=self.in_force,
            demand=demand,
            used=used,
            moved_bytes=moved_bytes,
            activity=activity,
            has_ended=has_ended,
        )

    def take(self, answer: ControlAnswer, now_s: float) -> bool:
        """Take an answer; return whether something is in force now that should be reported at once.

        That is the case where it may use less than before: others wait until it says so.

        Args:
            answer: the answer, which may be older than others that came.
            now_s: monotonic seconds.
        """
        self._heard_s, self._lease_s, self.notices = now_s, answer.lease_s, answer.notices
        if answer.version <= self.version:
            return False
        pairs = zip(answer.settings.row, self.in_force.row, strict=True)
        is_less = self.version > 0 and any(amount < before for amount, before in pairs)
        self.version, self.in_force = answer.version, answer.settings
        return is_less

    def bounds(self, now_s: float) -> Amounts:
        """Say what it may use now.

        Args:
            now_s: monotonic seconds.
        """
        is_alone = now_s - self._heard_s > self._lease_s
        if not is_alone:
            return self.in_force
        bounds = self.in_force
        if bounds.compute_s_per_s == 0:
            bounds = replace(bounds, compute_s_per_s=math.inf)
        if min(bounds.bytes_per_s, bounds.requests_per_s) > 0:
            return bounds
        return replace(bounds, bytes_per_s=math.inf, requests_per_s=math.inf, requests=1.0)
