"""Reports a job's window to the control plane each second, and has the job keep to what it is answered."""

import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, urlsplit

from frostline.config import LoaderSettings
from frostline.control.amounts import Amounts
from frostline.control.messages import ControlAnswer, StageReport
from frostline.control.pace import Pace, Used
from frostline.control.stage import ControlledStage
from frostline.core import FeatureBatch
from frostline.errors import FrostlineError, SettingError
from frostline.prefetch.tuner import Tuner
from frostline.tuning import Setting
from frostline.wire.http.exchange import Exchange, Message
from frostline.wire.http.pool import Connections, address_of
from frostline.wire.refusals import error_from_answer

__all__ = ("ControlFollower", "ControlLink", "PacedRows")

_LOG = logging.getLogger("frostline.control")
# Longest silence of a control plane before a report counts as lost; a job's first request waits no longer for it.
_DEADLINE_S = 1.0
_TIMES = 2  # a report is sent at most, as it is a loss of a message that is usual and a second one that is not
_OK = 200
# A job that is not held back may come to want half as much again before it is asked next.
_AMPLE = 1.5


class ControlLink:
    """The way to a control plane, and the name of the job there.

    Args:
        url: such as ``http://store-1:7075?job=night``; without a name the job is the process group on this host.
        token: token that identifies the job's tenant; None where the control plane knows none.

    Raises:
        SettingError: The URL is none.
    """

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        named = parse_qs(parts.query).get("job", [f"{socket.gethostname()}-{os.getpgrp()}"])
        base = parts._replace(query="", fragment="").geturl()
        host, port = address_of(base)
        self._url = base
        self._identity = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connections = Connections(host, port, deadline_s=_DEADLINE_S, max_idle=1)
        self.job = named[0]
        try:
            StageReport.from_json({"stage": "any", "job": self.job, "sequence": 0})
        except FrostlineError as error:
            raise SettingError(f"control={url!r}: {error}") from error

    def send(self, report: StageReport) -> ControlAnswer:
        """Send a report.

        Raises:
            FrostlineError: It was not answered, or refused.
        """
        body = json.dumps(report.to_json()).encode()
        exchange = Exchange(self._connections, self._url)
        message = Message(method="POST", path="/v1/stages", body=body, headers=self._identity, may_repeat=True)
        status = exchange.send(message)
        answer = exchange.read_all()
        if status != _OK:
            raise error_from_answer(status, answer)
        return ControlAnswer.from_json(json.loads(answer))

    def close(self) -> None:
        """Close the connection."""
        self._connections.drop_idle()


class ControlFollower:
    """Has one job in one process keep to its share. Safe for threads; it starts with the first request.

    It never raises what the control plane does or fails to do: a job goes on with what it heard last, and a log line
    says so.

    Args:
        link: way to the control plane.
        tuner: tuner of the job's windows.
        settings: bounds of the job itself, which a share never exceeds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        link: ControlLink,
        tuner: Tuner,
        settings: LoaderSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._link = link
        self._tuner = tuner
        self._maximum = Setting(requests=settings.last_requests, window_bytes=settings.window_bytes)
        self._clock = clock
        self._stage = ControlledStage(stage=name, job=link.job)
        self._changed = threading.Condition()
        self._pace = Pace(clock())
        self._round_s = 1.0
        self._is_lost = False
        self._has_reported = False
        self._is_closed = False
        self._said: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None
        self._beginning = threading.Lock()

    def begin(self) -> None:
        """Report once and wait for the answer, then report each second in a thread. Calling it again does nothing."""
        with self._beginning:
            if self._thread is not None or self._is_closed:
                return
            self.report()
            self._thread = threading.Thread(target=self._run, name="frostline-control", daemon=True)
            self._thread.start()

    def report(self, *, has_ended: bool = False) -> None:
        """Report, and keep to the answer from now on."""
        while self._reported(has_ended=has_ended) and not has_ended:
            pass  # it may use less than before: others wait until it says that it does

    def ask(self) -> float:
        """See ``Pace.ask``."""
        with self._changed:
            return self._pace.ask(self._clock())

    def came(self, nbytes: int) -> None:
        """See ``Pace.came``."""
        with self._changed:
            self._pace.came(nbytes, self._clock())

    def wait(self, is_over: Callable[[], bool]) -> bool:
        """Wait until a request may go, and return whether it may: not where it is over, or the job closed."""
        with self._changed:
            while not (is_over() or self._is_closed):
                wait_s = self._pace.ask(self._clock())
                if wait_s <= 0:
                    return True
                self._changed.wait(None if wait_s == math.inf else wait_s)
            return False

    def wake(self) -> None:
        """Have everybody who waits look whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def paced(self, fetch: Callable[[], Iterator[FeatureBatch]]) -> "PacedRows":
        """A request that goes when it may.

        Args:
            fetch: makes it.
        """
        self.begin()
        return PacedRows(self, fetch)

    def close(self) -> None:
        """Say that the stage has ended, and stop the thread. Calling it again does nothing."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._changed.notify_all()
        if was_closed:
            return
        with self._beginning:
            thread = self._thread
        if thread is not None:
            thread.join()
        if self._has_reported and not self._is_lost:
            self.report(has_ended=True)
        self._link.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                until_s = time.monotonic() + self._round_s
                while not self._is_closed and (left_s := until_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                if self._is_closed:
                    return
            self.report()

    def _reported(self, *, has_ended: bool) -> bool:
        """Report once; return whether to report again at once."""
        with self._changed:
            demand = self._demand(self._pace.used(self._clock()))
            report = self._stage.report(demand, self._pace.moved_bytes, has_ended=has_ended)
        answer = self._answered(report)
        with self._changed:
            is_less = answer is not None and self._stage.take(answer, self._clock())
            self._keep_to(self._stage.bounds(self._clock()))
            if answer is not None:
                self._round_s, self._has_reported = answer.round_s, True
            # What is said differs from report to report by its figures: once is enough while anything is said.
            notices = () if self._said else self._stage.notices
            self._said = self._stage.notices
            self._changed.notify_all()
        for sentence in notices:
            _LOG.warning("%s", sentence)
        return is_less

    def _answered(self, report: StageReport) -> ControlAnswer | None:
        for left in reversed(range(_TIMES)):
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
        if not self._is_lost:
            _LOG.warning("the control plane does not answer, and the job goes on with what it heard last: %s", error)
        self._is_lost = True

    def _demand(self, used: Used) -> Amounts:
        own = {"requests": float(self._maximum.requests), "memory_bytes": float(self._maximum.window_bytes)}
        if not self._has_reported or used.seconds <= 0:
            return Amounts(compute_s_per_s=math.inf, **own)
        requests, nbytes = (_AMPLE * amount / used.seconds for amount in (used.requests, used.nbytes))
        return Amounts(
            requests_per_s=math.inf if used.waited_requests else requests,
            bytes_per_s=math.inf if used.waited_bytes else nbytes,
            **own,
        )

    def _keep_to(self, share: Amounts) -> None:
        self._pace.change(share, self._clock())
        maximum = self._maximum
        requests = int(max(1.0, min(share.requests, maximum.requests)))
        window_bytes = int(max(1.0, min(share.memory_bytes, maximum.window_bytes)))
        self._tuner.limit(Setting(requests=requests, window_bytes=window_bytes))


class PacedRows:
    """The rows of a request that goes when its job may make it. ``close`` may be called from any thread.

    Args:
        follower: follower of the job.
        fetch: makes the request.
    """

    def __init__(self, follower: ControlFollower, fetch: Callable[[], Iterator[FeatureBatch]]) -> None:
        self._follower = follower
        self._fetch = fetch
        self._rows: Iterator[FeatureBatch] | None = None
        self._is_over = False

    def __iter__(self) -> Iterator[FeatureBatch]:
        return self

    def __next__(self) -> FeatureBatch:
        if self._rows is None:
            if not self._follower.wait(lambda: self._is_over):
                raise StopIteration
            self._rows = self._fetch()
        batch = next(self._rows)
        self._follower.came(batch.nbytes)
        return batch

    def close(self) -> None:
        """Give the request up; who waits for its turn goes on at once."""
        self._is_over = True
        self._follower.wake()
        close = getattr(self._rows, "close", None)  # an iterator need not have one
        if close is not None:
            close()
