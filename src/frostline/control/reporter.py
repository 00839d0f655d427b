"""Reports stages of this process to the control plane each second, and has each keep to what it is answered."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from frostline.control.activity.job_activity import JobActivity
from frostline.control.amounts import Amounts
from frostline.control.link import ControlLink
from frostline.control.messages import ControlAnswer, StageReport
from frostline.control.stage import ControlledStage
from frostline.errors import FrostlineError

__all__ = ("ControlReporter", "Measured", "ReportedStage")

_LOG = logging.getLogger("frostline.control")
_TIMES = 2  # a report is sent at most, as it is a loss of a message that is usual and a second one that is not
_TURNS = 8  # in one round that a stage says that it has taken less, whatever it is answered then
_MIN_ROUND_S, _MAX_ROUND_S = 1.0, 60.0  # of a control plane that nobody named; the longest while it does not answer
_ENDS_WITHIN_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a stage says of itself in one report.

    Attributes:
        demand: amounts that it would use if it might; 0 of what it never uses.
        used: amounts that it used since the report before, or holds now; infinite where it does not count them.
        moved_bytes: bytes that it has moved since it began.
        activity: account that its process gives of its job.
    """

    demand: Amounts
    used: Amounts = field(default_factory=Amounts)
    moved_bytes: int = 0
    activity: JobActivity | None = None


class ReportedStage(Protocol):
    """A part of this process that keeps to a share. Called from one thread at a time.

    Attributes:
        kind: one of ``KINDS``.
        job: name of the job that it works for.
    """

    kind: str
    job: str

    def measure(self, *, is_first: bool) -> Measured:
        """Say what it used and wants; it was never answered where ``is_first`` is true."""

    def keep_to(self, share: Amounts) -> None:
        """Use no more than this from now on."""


class ControlReporter:
    """Reports all stages of one process from one thread. Safe for threads; it starts with ``begin``.

    It never raises what the control plane does or fails to do: the stages go on with what they heard last, and a log
    line says so.

    Args:
        link: way to the control plane, which is closed with the reporter.
        stages: stages of this process.
        clock: monotonic seconds.
        was_named: whether somebody named the control plane. One that nobody did is a node's, which is there or not:
            nobody waits for it, and nothing is logged where it does not answer; then it is asked more and more rarely.
    """

    def __init__(
        self,
        link: ControlLink,
        stages: Sequence[ReportedStage],
        clock: Callable[[], float] = time.monotonic,
        *,
        was_named: bool = True,
    ) -> None:
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._link = link
        self._clock = clock
        self._was_named = was_named
        self._stages = [
            _Reported(stage, ControlledStage(stage=f"{name}-{number}", job=stage.job, kind=stage.kind))
            for number, stage in enumerate(stages)
        ]
        self._round_s = 1.0
        self._is_lost = False
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._beginning = threading.Lock()

    def begin(self) -> None:
        """Report once and wait for the answer, then report each second in a thread. Calling it again does nothing.

        Where nobody named the control plane, the first report is the thread's too.
        """
        with self._beginning:
            if self._thread is not None or self._ending.is_set():
                return
            if self._was_named:
                self.report()
            self._thread = threading.Thread(target=self._run, name="frostline-control", daemon=True)
            self._thread.start()

    def report(self, *, has_ended: bool = False) -> None:
        """Report every stage, and have it keep to its answer from now on."""
        is_lost = False
        for stage in self._stages:
            for _ in range(_TURNS):
                report = stage.reported(has_ended=has_ended)
                answer = None if is_lost else self._answered(report)
                is_lost = answer is None  # the others need not wait for the same silence
                self._keep_time(answer)
                if not stage.took(answer, self._clock()) or has_ended:
                    break  # else it may use less than before: others wait until it says that it does

    def close(self) -> None:
        """Say that the stages have ended, and stop the thread. Calling it again does nothing."""
        was_closed = self._ending.is_set()
        self._ending.set()
        if was_closed:
            return
        with self._beginning:
            thread = self._thread
        if thread is not None:
            thread.join(_ENDS_WITHIN_S)
            if thread.is_alive():  # whatever answers does so byte by byte, and the process need not wait for it
                return
        if not self._is_lost and any(stage.was_answered for stage in self._stages):
            self.report(has_ended=True)
        self._link.close()

    def _keep_time(self, answer: ControlAnswer | None) -> None:
        if self._was_named:
            self._round_s = self._round_s if answer is None else answer.round_s
        elif answer is None:
            self._round_s = min(_MAX_ROUND_S, 2 * self._round_s)
        else:
            self._round_s = min(_MAX_ROUND_S, max(_MIN_ROUND_S, answer.round_s))

    def _run(self) -> None:
        if not self._was_named:
            self.report()
        while not self._ending.wait(self._round_s):
            self.report()

    def _answered(self, report: StageReport) -> ControlAnswer | None:
        for left in reversed(range(_TIMES if self._was_named else 1)):
            try:
                answer = self._link.send(report)
            except (FrostlineError, ValueError) as error:
                if not left:
                    self._lost(error)
            else:
                self._is_lost = False
                return answer
        return None

    def _lost(self, error: Exception) -> None:
        if not self._is_lost and self._was_named:
            _LOG.warning("the control plane does not answer, and all goes on with what was heard last: %s", error)
        self._is_lost = True


class _Reported:
    """One stage with its side of the control plane."""

    def __init__(self, stage: ReportedStage, controlled: ControlledStage) -> None:
        self._stage = stage
        self._controlled = controlled
        self._said: tuple[str, ...] = ()
        self.was_answered = False

    def reported(self, *, has_ended: bool) -> StageReport:
        found = self._stage.measure(is_first=not self.was_answered)
        return self._controlled.report(
            found.demand, found.moved_bytes, used=found.used, activity=found.activity, has_ended=has_ended
        )

    def took(self, answer: ControlAnswer | None, now_s: float) -> bool:
        """Keep to the answer, or without one to what was heard last; return whether to report again at once."""
        is_less = answer is not None and self._controlled.take(answer, now_s)
        self.was_answered |= answer is not None
        self._stage.keep_to(self._controlled.bounds(now_s))
        # What is said differs from report to report by its figures: once is enough while anything is said.
        notices = () if self._said else self._controlled.notices
        self._said = self._controlled.notices
        for sentence in notices:
            _LOG.warning("%s", sentence)
        return is_less
