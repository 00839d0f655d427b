"""Reports the stages of this process to the control plane each second, and has each keep to what it is answered."""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from frostline.control.messages import ControlAnswer, ControlledStage, JobActivity, StageReport, checked_job
from frostline.control.shares import Amounts
from frostline.core.config import TlsFiles
from frostline.core.errors import BadRequest, FrostlineError, SettingError
from frostline.core.units import log_named
from frostline.node import Node
from frostline.node.tenants import TenantLimits
from frostline.wire.connection import Connections, Exchange, Message, time_limit
from frostline.wire.messages import error_from_answer

__all__ = (
    "CacheStage",
    "ControlLink",
    "ControlReporter",
    "Measured",
    "NodeTenantStage",
    "ReportedStage",
    "follow_control",
    "node_reporter",
)


# Longest silence of a control plane before a report counts as lost; its whole answer has twice as long. A job's first
# request waits no longer for it.
_DEADLINE_S = 1.0
_OK = 200
_WHAT = "control plane"
_MAX_ANSWER_BYTES = 64 << 10


class ControlLink:
    """The way to a control plane, and the name of the job there.

    Args:
        url: address, such as ``http://store-1:7075?job=night``; without a name the job is the process group on this
            host.
        token: token that identifies the job's tenant; None where the control plane knows none.
        tls: files of TLS where the URL is an ``https://``; None takes those of the environment.

    Raises:
        SettingError: The URL is none.
    """

    def __init__(self, url: str, token: str | None, tls: TlsFiles | None = None) -> None:
        parts = urlsplit(url)
        named = parse_qs(parts.query).get("job", [f"{socket.gethostname()}-{os.getpgrp()}"])
        base = parts._replace(query="").geturl()
        self._url = base
        self._identity = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connections = Connections(base, deadline_s=_DEADLINE_S, max_idle=1, tls=tls)
        try:
            self.job = checked_job(named[0])
        except BadRequest as error:
            raise SettingError(f"control={url!r}: {error}") from error

    def send(self, report: StageReport) -> ControlAnswer:
        """Send a report.

        Raises:
            FrostlineError: The control plane refused the report, or did not answer.
        """
        status, answer = self._asked(json.dumps(report.to_json()).encode())
        if status != _OK:
            raise error_from_answer(status, answer, _WHAT)
        try:
            return ControlAnswer.from_json(json.loads(answer))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{self._url} does not answer as a control plane does: {error}") from error

    def check(self) -> None:
        """Do nothing where a control plane answers that knows this token. It hears of no stage.

        Raises:
            FrostlineError: No control plane answers, or the token is refused.
        """
        # A report of nothing is refused as that, by whoever takes reports.
        error = error_from_answer(*self._asked(b"{}"), _WHAT)
        if not isinstance(error, BadRequest):
            raise error

    def _asked(self, body: bytes) -> tuple[int, bytes]:
        exchange = Exchange(self._connections, self._url, _WHAT)
        message = Message(method="POST", path="/v1/stages", body=body, headers=self._identity, may_repeat=True)
        with time_limit(2 * _DEADLINE_S, exchange.break_off, self._url):
            status = exchange.send(message)
            answer = bytes(exchange.read(_MAX_ANSWER_BYTES))
        exchange.end()
        return status, answer

    def close(self) -> None:
        """Close the connection."""
        self._connections.drop_idle(for_good=True)


_LOG = log_named("frostline.control")
_TIMES = 2  # a report is sent at most, as it is a loss of a message that is usual and a second one that is not
_TURNS = 8  # in one round that a stage says that it has taken less, whatever it is answered then
_MIN_ROUND_S, _MAX_ROUND_S = 1.0, 60.0  # of a control plane that nobody named; the longest while it does not answer
# A job waits no longer for its first share, nor at its end: one that hangs is asked on while the job works.
_BEGINS_WITHIN_S, _ENDS_WITHIN_S = 1.5, 1.5


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
        clock: seconds of a monotonic clock.
        was_named: True if somebody named the control plane. One that nobody did is a node's, which is there or not:
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
        self._was_heard = threading.Event()

    def begin(self) -> None:
        """Report each second in a thread, and wait for the first answer, but not long. Calling it again does nothing.

        Nobody waits for a control plane that nobody named.
        """
        with self._beginning:
            if self._thread is not None or self._ending.is_set():
                return
            self._thread = threading.Thread(target=self._run, name="frostline-control", daemon=True)
            self._thread.start()
            if self._was_named:
                self._was_heard.wait(_BEGINS_WITHIN_S)

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
        if thread is None:
            self._end()
        else:
            thread.join(_ENDS_WITHIN_S)  # what hangs, or answers byte by byte, need not be waited for

    def _end(self) -> None:
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
        try:
            self.report()
            self._was_heard.set()
            while not self._ending.wait(self._round_s):
                self.report()
        finally:
            self._was_heard.set()
            self._end()

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


class CacheStage:
    """A cache as a stage of kind ``cache``.

    Args:
        job: name of the job that it works for.
        max_bytes: bytes that it may take by its own settings, which a share never exceeds.
        held_bytes: function that returns the number of bytes that the cache holds.
        bound: function that sets the maximum bytes that it keeps from now on.
    """

    kind = "cache"

    def __init__(self, job: str, max_bytes: int, held_bytes: Callable[[], int], bound: Callable[[int], None]) -> None:
        self.job = job
        self._max_bytes = max_bytes
        self._held_bytes = held_bytes
        self._bound = bound

    def measure(self, *, is_first: bool) -> Measured:  # noqa: ARG002  # as of ReportedStage
        """All that it may keep is wanted: what is not kept is read again."""
        return Measured(
            demand=Amounts(
                compute_s_per_s=0.0,
                bytes_per_s=0.0,
                requests_per_s=0.0,
                requests=0.0,
                memory_bytes=float(self._max_bytes),
            ),
            used=Amounts(memory_bytes=float(self._held_bytes())),
        )

    def keep_to(self, share: Amounts) -> None:
        """Keep no more than this from now on."""
        self._bound(int(min(share.memory_bytes, self._max_bytes)))


# A tenant that is not held back may come to want half as much again before it is asked next.
_AMPLE = 1.5
# Of each device, a tenant that is idle still wants this part, so that it has one of what nobody asks for.
_IDLE = 0.01


class NodeTenantStage:
    """One tenant of a node as a stage of kind ``node``.

    Args:
        job: name of the job that it is in the control plane.
        limits: limits of the tenant, and its use.
        clock: seconds of a monotonic clock.
    """

    kind = "node"

    def __init__(self, job: str, limits: TenantLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.job = job
        self._limits = limits
        self._clock = clock
        self._since_s = clock()
        self._device_s = limits.usage().device_s

    def measure(self, *, is_first: bool) -> Measured:
        """Measure device seconds since the last report, and what the tenant holds of the memory for work."""
        usage, now_s = self._limits.usage(), self._clock()
        passed_s = now_s - self._since_s
        per_s = 0.0 if passed_s <= 0 else (usage.device_s - self._device_s) / passed_s
        self._since_s, self._device_s = now_s, usage.device_s
        most = float(usage.devices)
        wanted = most if is_first or usage.is_held_back else min(most, max(_IDLE * most, _AMPLE * per_s))
        return Measured(
            demand=Amounts(
                compute_s_per_s=wanted,
                bytes_per_s=0.0,
                requests_per_s=0.0,
                requests=0.0,
                memory_bytes=float(usage.max_work_bytes),
            ),
            used=Amounts(compute_s_per_s=per_s, memory_bytes=float(usage.work_bytes)),
        )

    def keep_to(self, share: Amounts) -> None:
        """Bind the tenant to this share."""
        self._limits.bound(device_s_per_s=share.compute_s_per_s, work_bytes=share.memory_bytes)


def node_reporter(node: Node, link: ControlLink, clock: Callable[[], float] = time.monotonic) -> ControlReporter:
    """Make what has a node keep to a control plane; the caller begins and closes it.

    A node is one tenant of the control plane, and each of its own tenants is a job there, of the tenant's name. A node
    without tenants is one job.

    Args:
        node: node, which runs.
        link: way to the control plane, which is closed with the reporter.
        clock: seconds of a monotonic clock.

    Raises:
        SettingError: A tenant's name cannot be a job's.
    """
    try:
        stages = [
            NodeTenantStage(checked_job(limits.name) if node.settings.tenants else link.job, limits, clock)
            for limits in node.limits()
        ]
    except BadRequest as error:
        raise SettingError(f"a tenant of this node cannot be a job of the control plane: {error}") from error
    return ControlReporter(link, stages, clock)


@contextmanager
def follow_control(node: Node, link: ControlLink | None) -> Iterator[None]:
    """Have a node keep to its control plane meanwhile, where there is one.

    Args:
        node: node, which runs.
        link: way to the control plane, which is closed at the end; None leaves the node alone.

    Raises:
        SettingError: A tenant's name cannot be a job's.
    """
    if link is None:
        yield
        return
    with closing(node_reporter(node, link)) as reporter:
        reporter.begin()
        yield
