"""When a node tries engines, and for whom by turns, while other requests wait."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

from frostline.batching import ROWS
from frostline.core import REFERENCE
from frostline.core.config import NodeSettings, devices_of
from frostline.core.units import in_bytes
from frostline.engines.machine import keeps_freed_memory
from frostline.node.memory import Cancelled
from frostline.profiles import Trial

__all__ = ("NOBODY", "EngineMemory", "Requester", "TrialPolicy", "TrialQueue", "policy_of")


# A trial takes about a gigabyte beside the engine. A node's engine can take at most five sixteenths of its memory
# (``node.memory.Shares``), so half of a large memory is enough for a trial.
_TRIAL_BYTES = 2 << 30
# On one core so few take no longer a sample than eight, which a trial has timed (docs/decisions/0055).
_MIN_ROWS = ROWS // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPolicy:
    """How engines are tried: in the same way as the node would run them.

    Attributes:
        device: device in torch's notation.
        rows: batch sizes to try.
        threads: numbers of threads to try, the node's own first.
        keeps_freed: True if the node's process keeps freed memory.
        max_bytes: memory limit of one trial.
        niceness: niceness added to a trial, so that serving goes first.
        here: True if engines that are ready in a moment are tried in the node's own process.
        max_run_s: the longest run of an engine other than eager torch, whose runs can be interrupted; infinite where no
            other tenant waits.
    """

    device: str
    rows: tuple[int, ...]
    threads: tuple[int, ...]
    keeps_freed: bool
    max_bytes: int
    niceness: int = 0
    here: bool = False
    max_run_s: float = math.inf

    def limit_rows(self, trial: Trial) -> Trial:
        """The trial with so few rows that a run ends in time; failed if the fewest take too long.

        Below ``ROWS`` a run is divided into parts of so many rows, between which others go first.

        Args:
            trial: trial of an engine that runs a batch as a whole.
        """
        rows = self.max_run_s / trial.seconds if trial.seconds else math.inf
        if rows < _MIN_ROWS:
            why_not = (
                f"takes {_MIN_ROWS * trial.seconds:.2g} s for {_MIN_ROWS} samples, during which no other tenant "
                f"is served, and this node allows {self.max_run_s:g} s: start it with more --max-operation"
            )
            return replace(trial, seconds=0.0, why_not=why_not)
        if trial.rows <= rows:
            return trial
        eights = ROWS * int(rows // ROWS)
        return replace(trial, rows=eights or next(size for size in (ROWS // 2, _MIN_ROWS) if size <= rows))

    def admit(self, trial: Trial, memory: "EngineMemory", tenant_bytes: float) -> Trial:
        """The trial, failed if the node has no memory or time for the engine; the reference is bounded elsewhere.

        Args:
            trial: trial of an engine, with its measured memory.
            memory: memory that the engine must fit.
            tenant_bytes: memory for weights that its tenant may use beside the prefix.
        """
        if trial.engine == REFERENCE:
            return trial
        why_not = memory.lacks(trial, tenant_bytes)
        return self.limit_rows(trial) if why_not is None else replace(trial, seconds=0.0, why_not=why_not)


def policy_of(settings: NodeSettings) -> TrialPolicy:
    """The trial policy of a node with these settings."""
    return TrialPolicy(
        device=devices_of(settings.device)[0],
        # Each run has a fixed cost beside the engine, so a few large runs are better than many small ones of the same
        # speed: ResNet-18 in 8 bits processes 1.3 times as many images per second with 32 rows as with 8.
        rows=tuple(dict.fromkeys((settings.device_batch, ROWS))),
        threads=_threads(settings),
        keeps_freed=keeps_freed_memory(),
        max_bytes=max(settings.memory_bytes // 2, min(settings.memory_bytes, _TRIAL_BYTES)),
        niceness=settings.trial_niceness,
        here=settings.trials_in_process,
        max_run_s=settings.max_operation_s if _is_shared(settings) else math.inf,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """The node's memory for engines.

    Attributes:
        weights_bytes: memory for all resident weights.
        run_bytes: memory for one run.
    """

    weights_bytes: int
    run_bytes: int

    def lacks(self, trial: Trial, tenant_bytes: float = math.inf) -> str | None:
        """The reason why an engine does not fit; None if it fits.

        Args:
            trial: trial of the engine, with its measured memory.
            tenant_bytes: memory for weights that its tenant may use beside the prefix.
        """
        run_bytes = trial.fixed_bytes + ROWS * trial.bytes_per_sample
        if trial.load_bytes > self.weights_bytes:
            needs = f"{in_bytes(trial.load_bytes)} to be made ready, and the node has {in_bytes(self.weights_bytes)}"
        elif run_bytes > self.run_bytes:
            needs = f"{in_bytes(run_bytes)} for {ROWS} samples, and the node has {in_bytes(self.run_bytes)}"
        elif trial.weight_bytes > tenant_bytes:
            return (
                f"takes {in_bytes(trial.weight_bytes)}, and its tenant may have {in_bytes(max(0.0, tenant_bytes))} "
                "beside the prefix: raise its weight_bytes"
            )
        else:
            return None
        return f"needs {needs} for that: start it with more --memory"


def _is_shared(settings: NodeSettings) -> bool:
    """Whether somebody else may wait for a tenant's run."""
    return len(settings.tenants) > 1 or (not settings.tenants and settings.allow_anonymous)


def _threads(settings: NodeSettings) -> tuple[int, ...]:
    """All threads, and half of them: threads that share a core gain little or slow each other down."""
    threads = settings.compute_threads
    is_worth_it = threads > 1 and settings.device.partition(":")[0] == "cpu"
    return (threads, threads // 2) if is_worth_it else (threads,)


def _nobody_pays(_: float) -> None:
    pass


def _nobody_owes() -> None:
    pass


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requester:
    """The tenant and request for which engines are tried.

    Attributes:
        name: name of the tenant.
        check: function that is called before the first trial; raises ``Overloaded`` if the tenant has used up its trial
            time.
        is_abandoned: True if the request was cancelled; ``Trials.wake`` has it checked.
        spent: function that is called with the seconds of each trial.
        max_engine_bytes: maximum memory of an engine for it.
    """

    name: str = ""
    check: Callable[[], None] = _nobody_owes
    is_abandoned: Callable[[], bool] = _never
    spent: Callable[[float], None] = _nobody_pays
    max_engine_bytes: float = math.inf


NOBODY = Requester()
"""A requester that pays nothing and is limited by the node alone."""


class TrialQueue:
    """Grants one turn at a time, to the tenant that had the least trial time so far. Safe for threads.

    Args:
        clock: clock that returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._numbers = count()
        self._waiting: dict[int, str] = {}
        self._had_s: defaultdict[str, float] = defaultdict(float)
        self._is_taken = False

    @contextmanager
    def turn(self, tenant: str, is_abandoned: Callable[[], bool]) -> Iterator[None]:
        """Wait for a turn, which lasts as long as the context.

        Args:
            tenant: name of the tenant.
            is_abandoned: function that is called after every change and ``wake``; True cancels the wait.

        Raises:
            Cancelled: The wait was cancelled.
        """
        self._take(tenant, is_abandoned)
        began_s = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._had_s[tenant] += self._clock() - began_s
                self._is_taken = False
                self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    def wake(self) -> None:
        """Make all waiting threads check whether they are still wanted."""
        with self._changed:
            self._changed.notify_all()

    def _take(self, tenant: str, is_abandoned: Callable[[], bool]) -> None:
        with self._changed:
            number = next(self._numbers)
            self._waiting[number] = tenant
            try:
                self._changed.wait_for(lambda: is_abandoned() or self._is_next(number))
                if is_abandoned():
                    raise Cancelled
                self._is_taken = True
            finally:
                del self._waiting[number]
                self._changed.notify_all()

    def _is_next(self, number: int) -> bool:
        return not self._is_taken and number == min(self._waiting, key=self._place)

    def _place(self, number: int) -> tuple[float, int]:
        return self._had_s[self._waiting[number]], number
