"""The device: runs waiting work by the node's batching rule, one run at a time, and merges rows of several requests."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from frostline.batching import BatchingRule, FairMerging, QueueHead, Turn
from frostline.engines.base.protocols import Between, Dividing, Engine, Queueing, RunningBatch
from frostline.engines.machine.isolation import resting
from frostline.node.request.pipeline import Slab
from frostline.node.request.work_queue import ExclusiveCall, Outputs, QueuedRows, RowWork, first_waits
from frostline.node.scheduling.fair_shares import LockedFairShares
from frostline.node.scheduling.memory_pool import Cancelled, Pool, Reservation
from frostline.node.scheduling.statistics import Counters

__all__ = ("Device",)

# Assumed seconds of a run before the first one: long, so that unknown work does not crowd out others.
_UNKNOWN_S = 1.0
# Weight of the latest run in the moving average of a run's seconds.
_LATEST = 0.5
# Seconds between two looks at a run: its time is charged, and it may be cancelled or interrupted.
_SLICE_S = 0.05

Queued = QueuedRows | ExclusiveCall


class Device:
    """Runs prefixes and other device work in one thread, so that an engine keeps one team of threads.

    Args:
        name: device in torch's notation.
        memory: pool for the activations of the run, and of the next run that begins during its last pieces.
        rule: decides what runs next.
        fair_shares: order between tenants; charged for every run.
        counters: counters of the node.
    """

    def __init__(
        self, *, name: str, memory: Pool, rule: BatchingRule, fair_shares: LockedFairShares, counters: Counters
    ) -> None:
        self.name = name
        self.memory = memory
        self._rule = rule
        self._fair_shares = fair_shares
        self._counters = counters
        self._thread = ThreadPoolExecutor(1, "frostline-device")
        self._lock = threading.Lock()
        self._queue: dict[int, Queued] = {}  # in order of arrival
        self._count = 0
        self._free_at = 0.0  # when the previous run ended
        self._run_s: WeakKeyDictionary[Engine, dict[tuple[int, int], float]] = WeakKeyDictionary()
        # The current run, and a run that interrupts it; used by the device's thread only.
        self._running: list[_Run] = []

    @property
    def waiting(self) -> int:
        """The number of batches and calls that wait or run."""
        return len(self._queue)

    def expected_s(self, work: RowWork) -> float:
        """The expected seconds of a run."""
        with self._lock:
            return self._expected_s(work)

    def known_s(self, work: RowWork) -> float | None:
        """The measured seconds of a run; None before the first one."""
        with self._lock:
            return self._run_s.get(work.engine, {}).get((work.cut, work.run_rows))

    def _expected_s(self, work: RowWork) -> float:
        return self._run_s.get(work.engine, {}).get((work.cut, work.run_rows), _UNKNOWN_S)

    def enqueue(self, entry: Queued) -> None:
        """Queue rows or a call; the future of the entry reports the result."""
        with self._lock:
            self._count += 1
            # A call goes before the waiting rows of its tenant: it measures for a job that may have queued half a
            # minute of rows, and the sooner it is done, the sooner the job gets its engine.
            self._queue[-self._count if isinstance(entry, ExclusiveCall) else self._count] = entry
            self._fair_shares.arrive(entry.account.name)
        # One task may run everything that waits; the tasks after it then find nothing to do.
        self._thread.submit(self._serve)

    def between(self) -> None:
        """Check on the current run between two of its operations; called in the device's thread.

        Its time so far is charged, so that the fair shares are up to date. Tenants that are due before this run go
        first if there is memory for both.

        Raises:
            Cancelled: if all its requests were cancelled.
        """
        run, now = self._running[-1], time.perf_counter()
        if now - run.charged_at < _SLICE_S:
            return
        if all(map(_is_unwanted, run.entries)):
            raise Cancelled
        self._pay(run, now)
        if len(self._running) == 1 and isinstance(self._rule, FairMerging):
            self._make_way(run)

    def _make_way(self, run: "_Run") -> None:
        """Run the waiting work of tenants that are due before the rest of this run."""
        while (other := self._before(run)) is not None:
            with resting():
                with _FailureReporter(self, other):
                    other.begin(self.memory)
                if not other.has_failed:
                    self._end(other)
            run.charged_at = time.perf_counter()

    def _before(self, run: "_Run") -> "_Run | None":
        """The next run of tenants that are due before those of this run, if there is memory for both."""
        mine = {entry.account.name for entry in run.entries}
        tag = min(map(self._fair_shares.tag, mine))
        with self._lock:
            free = {number: entry for number, entry in self._queue.items() if isinstance(entry, QueuedRows)}
            waiting = [
                entry.waiting(number)
                for number, entry in free.items()
                if not (entry.account.name in mine or _is_unwanted(entry))
                and self._fair_shares.tag(entry.account.name) < tag
            ]
            if not waiting:
                return None
            turn = self._rule.next(waiting, self._fair_shares.tag)
            other = _Run(turn=turn, entries=[self._queue[part.number] for part in turn.parts])
        if not other.fits(self.memory):
            return None
        if not all(map(_begins, other.entries)):
            other.give_up()
            return None
        self._fair_shares.begin(other.entries[0].account.name)
        return other

    def close(self) -> None:
        """Wait until all work is done, and stop the thread."""
        self._thread.shutdown()

    def _serve(self) -> None:
        """Run until nothing waits. If the engine can queue runs, the next one begins during the last pieces of this."""
        before: _Run | None = None
        while True:
            if before is not None:
                before.drain()
            run = self._next(before)
            if before is not None and (run is None or not run.fits_behind(before, self.memory)):
                self._end(before)
                before = None
                if run is None:
                    continue  # the ended run may have put entries back into the queue
            if run is None:
                return
            with _FailureReporter(self, run):
                run.begin(self.memory)
            if before is not None:
                self._end(before)
            before = run if run.is_queued else None
            if before is None and not run.has_failed:
                self._end(run)

    def _next(self, before: "_Run | None") -> "_Run | None":
        dropped: list[Queued] = []
        with self._lock:
            run = self._chosen(before, dropped)
        for entry in dropped:  # outside the lock: callbacks of a future may ask for it
            if entry.has_begun:
                entry.future.set_exception(Cancelled())
        return run

    def _chosen(self, before: "_Run | None", dropped: list[Queued]) -> "_Run | None":
        running = () if before is None else before.entries
        while True:
            free = {number: entry for number, entry in self._queue.items() if entry not in running}
            dropped += self._drop([number for number, entry in free.items() if _is_unwanted(entry)])
            waiting = [entry.waiting(number) for number, entry in free.items() if number in self._queue]
            if not waiting:
                return None
            turn = self._rule.next(waiting, self._tag(before))
            run = _Run(turn=turn, entries=[self._queue[part.number] for part in turn.parts])
            if all(map(_begins, run.entries)):
                self._fair_shares.begin(run.entries[0].account.name)
                return run

    def _tag(self, before: "_Run | None") -> Callable[[str], float]:
        """The tag of each tenant, with the expected cost of the current run added."""
        if before is None:
            return self._fair_shares.tag
        owed_s: dict[str, float] = {}
        for entry, mine_s in before.shared(self._expected_s(before.work)):
            owed_s[entry.account.name] = owed_s.get(entry.account.name, 0.0) + mine_s
        return lambda name: self._fair_shares.tag(name) + owed_s.get(name, 0.0) / self._fair_shares.weight(name)

    def _drop(self, numbers: Sequence[int]) -> list[Queued]:
        gone = [self._queue.pop(number) for number in numbers]
        for entry in gone:
            self._fair_shares.depart(entry.account.name)
        return gone

    def _end(self, run: "_Run") -> None:
        with _FailureReporter(self, run):
            self._finish(run)

    def _finish(self, run: "_Run") -> None:
        outputs = None
        self._running.append(run)
        try:
            outputs = run.compute(self.between)
        finally:
            self._running.pop()
            now = time.perf_counter()
            # A failed run is charged too, but not to tenants whose rows only ran beside the broken ones.
            if outputs is not None or len(run.entries) == 1:
                self._pay(run, now)
                self._counted(run)
            self._free_at = now
        self._learn(run)
        run.take(outputs)
        # The outputs lie in the slab of the first entry, so it is finished last.
        for part, entry in reversed(run.pairs):
            if entry.left:
                continue
            with self._lock:
                self._drop([part.number])
            entry.finish()

    def failed(self, run: "_Run", error: BaseException) -> None:
        """Report an error to a single entry; if there are several, let each run alone, as only one may be broken."""
        run.has_failed = True
        if len(run.entries) == 1:
            with self._lock:
                self._drop([run.turn.parts[0].number])
            run.entries[0].future.set_exception(error)
            return
        for entry in run.entries:
            assert isinstance(entry, QueuedRows), "a call runs alone"
            entry.is_apart = True

    def _pay(self, run: "_Run", now: float) -> None:
        """Charge the time since the last charge. While two runs overlap, the device's time belongs to the first."""
        took_s = now - max(run.charged_at, self._free_at)
        run.charged_at = now
        run.took_s += took_s
        for entry, mine_s in run.shared(took_s):
            self._fair_shares.charge(entry.account.name, mine_s)
            entry.pay(mine_s)

    def _counted(self, run: "_Run") -> None:
        self._counters.add(runs=1, rows_run=run.turn.rows, rows_merged=run.live_rows - run.turn.parts[0].rows)
        self._counters.observe("device_wait", *first_waits(run.entries, run.began_at))
        self._counters.observe("compute", run.took_s)

    def _learn(self, run: "_Run") -> None:
        lead = run.entries[0]
        if isinstance(lead, QueuedRows) and run.turn.rows == lead.work.run_rows:
            with self._lock:
                known = self._run_s.setdefault(lead.work.engine, {})
                key = (lead.work.cut, lead.work.run_rows)
                known[key] = _LATEST * run.took_s + (1 - _LATEST) * known.get(key, run.took_s)


@dataclass(slots=True, kw_only=True, eq=False)
class _Run:
    """A turn and the entries that it runs."""

    turn: Turn
    entries: Sequence[Queued]
    has_failed: bool = False
    began_at: float = 0.0
    charged_at: float = 0.0
    took_s: float = 0.0
    _slab: Slab | None = None
    _room: Reservation | None = None
    _begun: RunningBatch | None = None

    @property
    def pairs(self) -> "list[tuple[QueueHead, Queued]]":
        return list(zip(self.turn.parts, self.entries, strict=True))

    @property
    def live_rows(self) -> int:
        return sum(part.rows for part in self.turn.parts)

    @property
    def is_queued(self) -> bool:
        """Whether its engine accepts another run behind it."""
        return self._begun is not None

    @property
    def work(self) -> RowWork:
        lead = self.entries[0]
        assert isinstance(lead, QueuedRows), "a call is not queued"
        return lead.work

    def shared(self, seconds: float) -> "list[tuple[Queued, float]]":
        """Each entry's part of some seconds, divided by rows."""
        rows = self.live_rows
        return [(entry, seconds * part.rows / rows) for part, entry in self.pairs]

    def fits_behind(self, before: "_Run", memory: Pool) -> bool:
        """Reserve memory if the same engine runs both; False if it does not, or there is not enough memory."""
        if isinstance(self.entries[0], ExclusiveCall) or self.work.engine is not before.work.engine:
            return False
        return self.fits(memory)

    def fits(self, memory: Pool) -> bool:
        """Reserve memory for it; False if there is not enough now."""
        self._room = memory.take(self.work.nbytes(self.turn.rows))
        return self._room is not None

    def give_up(self) -> None:
        """Release the memory that ``fits`` has reserved; the run does not begin."""
        assert self._room is not None, "it fitted"
        self._room.release()

    def begin(self, memory: Pool) -> None:
        self.began_at = self.charged_at = time.perf_counter()
        lead = self.entries[0]
        if isinstance(lead, ExclusiveCall):
            return
        self._room = self._room or memory.take(self.work.nbytes(self.turn.rows))
        assert self._room is not None, "one run always fits, and no other runs"
        with ExitStack() as failing:
            failing.enter_context(self._room)
            (first, _), *others = self.pairs
            slab = lead.lead(
                first.rows, [(entry, part.rows) for part, entry in others if isinstance(entry, QueuedRows)]
            )
            self._slab = slab[: self.turn.rows]
            engine = self.work.engine
            self._begun = engine.begin(self._slab, self.work.cut) if isinstance(engine, Queueing) else None
            failing.pop_all()

    def drain(self) -> None:
        """Wait until its last pieces run."""
        assert self._begun is not None, "it is queued"
        self._begun.drain()

    def compute(self, between: Between) -> Outputs:
        lead = self.entries[0]
        if isinstance(lead, ExclusiveCall):
            lead.run()
            return []
        assert self._room is not None, "it has begun"
        assert self._slab is not None, "it has begun"
        with self._room:
            return list(self._begun.outputs() if self._begun else self._computed(self._slab, between))

    def _computed(self, slab: Slab, between: Between) -> Sequence[npt.NDArray[np.generic]]:
        engine, cut = self.work.engine, self.work.cut
        return engine.run_divided(slab, cut, between) if isinstance(engine, Dividing) else engine.run(slab, cut)

    def take(self, outputs: Outputs) -> None:
        at = 0
        for part, entry in self.pairs:
            if isinstance(entry, QueuedRows):
                entry.take(outputs, at, part.rows)
            at += part.rows


class _FailureReporter:
    """Passes any error of a run to the entries that wait for it."""

    def __init__(self, device: Device, run: _Run) -> None:
        self._device = device
        self._run = run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self._device.failed(self._run, error)
        return error is not None


def _is_unwanted(entry: Queued) -> bool:
    # A future that is running cannot be cancelled, but the rest of its rows need not run.
    return entry.future.cancelled() or (entry.has_begun and entry.is_abandoned())


def _begins(entry: Queued) -> bool:
    entry.has_begun = entry.has_begun or entry.future.set_running_or_notify_cancel()
    return entry.has_begun
