"""The device: runs what waits for it by the node's rule, one run after another, rows of several requests together."""

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

from frostline.batching import BatchingRule, Merging, QueueHead, Turn
from frostline.engines.base.protocols import Between, Dividing, Engine, Queueing, RunningBatch
from frostline.engines.machine.isolation import resting
from frostline.node.request.pipeline import Slab
from frostline.node.request.work_queue import ExclusiveCall, Outputs, QueuedRows, RowWork
from frostline.node.scheduling.fair_queue import FairQueue
from frostline.node.scheduling.memory_pool import Abandoned, Pool, Reservation
from frostline.node.scheduling.statistics import Counters

__all__ = ("Device",)

# What a run is taken for before there was one: long, so that what is not known does not crowd others out.
_UNKNOWN_S = 1.0
# The part of the latest run in what the next is expected to take.
_LATEST = 0.5
# How often a run is looked at: what it took is charged, and it may be given up or make way.
_SLICE_S = 0.05

Queued = QueuedRows | ExclusiveCall


class Device:
    """Runs prefixes and whatever else needs the device, in one thread, so that an engine keeps one team of threads.

    Args:
        name: in torch's words.
        memory: for the activations of the run, and of the one that begins in its last pieces.
        rule: decides what runs next.
        turns: where the tenants stand; told what each took.
        counters: told what was done.
    """

    def __init__(self, *, name: str, memory: Pool, rule: BatchingRule, turns: FairQueue, counters: Counters) -> None:
        self.name = name
        self.memory = memory
        self._rule = rule
        self._turns = turns
        self._counters = counters
        self._thread = ThreadPoolExecutor(1, "frostline-device")
        self._lock = threading.Lock()
        self._queue: dict[int, Queued] = {}  # first come first
        self._count = 0
        self._free_at = 0.0  # when the run before ended
        self._run_s: WeakKeyDictionary[Engine, dict[tuple[int, int], float]] = WeakKeyDictionary()
        # What runs now, and what goes before it for a while; the thread's own.
        self._running: list[_Run] = []

    @property
    def waiting(self) -> int:
        """Batches and calls that wait or run."""
        return len(self._queue)

    def expected_s(self, work: RowWork) -> float:
        """What a run will probably take."""
        with self._lock:
            return self._expected_s(work)

    def _expected_s(self, work: RowWork) -> float:
        return self._run_s.get(work.engine, {}).get((work.cut, work.run_rows), _UNKNOWN_S)

    def enqueue(self, one: Queued) -> None:
        """Have it done; its future tells when."""
        with self._lock:
            self._count += 1
            # A call goes before the rows of its tenant that wait: somebody measures by it while a job has filled the
            # queue for half a minute, and the sooner that is done, the sooner the job has its engine.
            self._queue[-self._count if isinstance(one, ExclusiveCall) else self._count] = one
            self._turns.arrive(one.account.name)
        # One job may run all that waits; those after it find nothing to do.
        self._thread.submit(self._serve)

    def between(self) -> None:
        """Look at what runs now, between two of its operations; called in the device's thread.

        What it took is charged while it runs, so that its tenant stands where it should, and others whose turn it is
        go first where there is memory for both.

        Raises:
            Abandoned: Nobody wants it any more, or its deadline has passed.
        """
        run, now = self._running[-1], time.perf_counter()
        if now - run.charged_at < _SLICE_S:
            return
        if all(map(_is_unwanted, run.entries)):
            raise Abandoned
        self._pay(run, now)
        if len(self._running) == 1 and isinstance(self._rule, Merging):
            self._make_way(run)

    def _make_way(self, run: "_Run") -> None:
        """Run what waits and whose turn comes before the rest of this run."""
        while (other := self._before(run)) is not None:
            with resting():
                with _Telling(self, other):
                    other.begin(self.memory)
                if not other.has_failed:
                    self._end(other)
            run.charged_at = time.perf_counter()

    def _before(self, run: "_Run") -> "_Run | None":
        """The next run of other tenants that stand before those of this one, if there is memory for it too."""
        mine = {entry.account.name for entry in run.entries}
        tag = min(map(self._turns.tag, mine))
        with self._lock:
            free = {number: one for number, one in self._queue.items() if isinstance(one, QueuedRows)}
            waiting = [
                one.waiting(number)
                for number, one in free.items()
                if not (one.account.name in mine or _is_unwanted(one)) and self._turns.tag(one.account.name) < tag
            ]
            if not waiting:
                return None
            turn = self._rule.next(waiting, self._turns.tag)
            other = _Run(turn=turn, entries=[self._queue[part.number] for part in turn.parts])
        if not other.fits(self.memory):
            return None
        if not all(map(_begins, other.entries)):
            other.give_up()
            return None
        self._turns.begin(other.entries[0].account.name)
        return other

    def close(self) -> None:
        """Wait until nothing is left to do, and stop the thread."""
        self._thread.shutdown()

    def _serve(self) -> None:
        """Run until nothing waits. A run that its engine takes behind another begins in the last pieces of that one."""
        before: _Run | None = None
        while True:
            if before is not None:
                before.drain()
            run = self._next(before)
            if before is not None and (run is None or not run.fits_behind(before, self.memory)):
                self._end(before)
                before = None
                if run is None:
                    continue  # some of what it ran may have to run on, or apart
            if run is None:
                return
            with _Telling(self, run):
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
        for one in dropped:  # a future tells others, who may ask for this lock
            if one.has_begun:
                one.future.set_exception(Abandoned())
        return run

    def _chosen(self, before: "_Run | None", dropped: list[Queued]) -> "_Run | None":
        running = () if before is None else before.entries
        while True:
            free = {number: one for number, one in self._queue.items() if one not in running}
            dropped += self._drop([number for number, one in free.items() if _is_unwanted(one)])
            waiting = [one.waiting(number) for number, one in free.items() if number in self._queue]
            if not waiting:
                return None
            turn = self._rule.next(waiting, self._tag(before))
            run = _Run(turn=turn, entries=[self._queue[part.number] for part in turn.parts])
            if all(map(_begins, run.entries)):
                self._turns.begin(run.entries[0].account.name)
                return run

    def _tag(self, before: "_Run | None") -> Callable[[str], float]:
        """Where tenants stand, with what they will be charged for the run under way."""
        if before is None:
            return self._turns.tag
        owed_s: dict[str, float] = {}
        for one, mine_s in before.shared(self._expected_s(before.work)):
            owed_s[one.account.name] = owed_s.get(one.account.name, 0.0) + mine_s
        return lambda name: self._turns.tag(name) + owed_s.get(name, 0.0) / self._turns.weight(name)

    def _drop(self, numbers: Sequence[int]) -> list[Queued]:
        gone = [self._queue.pop(number) for number in numbers]
        for one in gone:
            self._turns.depart(one.account.name)
        return gone

    def _end(self, run: "_Run") -> None:
        with _Telling(self, run):
            self._finish(run)

    def _finish(self, run: "_Run") -> None:
        outputs = None
        self._running.append(run)
        try:
            outputs = run.compute(self.between)
        finally:
            self._running.pop()
            now = time.perf_counter()
            # A run that fails is paid for too, but not by those whose rows only stood beside the broken ones.
            if outputs is not None or len(run.entries) == 1:
                self._pay(run, now)
                self._counted(run)
            self._free_at = now
        self._learn(run)
        run.take(outputs)
        # The outputs lie in the memory of the one whose turn it was, so that it is told last.
        for part, one in reversed(run.pairs):
            if one.left:
                continue
            with self._lock:
                self._drop([part.number])
            one.finish()

    def failed(self, run: "_Run", error: BaseException) -> None:
        """Tell those whose rows ran; where there were several, each runs apart first, since only one may be broken."""
        run.has_failed = True
        if len(run.entries) == 1:
            with self._lock:
                self._drop([run.turn.parts[0].number])
            run.entries[0].future.set_exception(error)
            return
        for entry in run.entries:
            assert isinstance(entry, QueuedRows), "a call has the device alone"
            entry.is_apart = True

    def _pay(self, run: "_Run", now: float) -> None:
        """Charge what a run took since it was charged last. While two run, the device's time is that of the first."""
        took_s = now - max(run.charged_at, self._free_at)
        run.charged_at = now
        run.took_s += took_s
        for one, mine_s in run.shared(took_s):
            self._turns.charge(one.account.name, mine_s)
            one.pay(mine_s)

    def _counted(self, run: "_Run") -> None:
        self._counters.add(runs=1, rows_run=run.turn.rows, rows_merged=run.live_rows - run.turn.parts[0].rows)

    def _learn(self, run: "_Run") -> None:
        lead = run.entries[0]
        if isinstance(lead, QueuedRows) and run.turn.rows == lead.work.run_rows:
            with self._lock:
                known = self._run_s.setdefault(lead.work.engine, {})
                key = (lead.work.cut, lead.work.run_rows)
                known[key] = _LATEST * run.took_s + (1 - _LATEST) * known.get(key, run.took_s)


@dataclass(slots=True, kw_only=True, eq=False)
class _Run:
    """A turn, and whose it is."""

    turn: Turn
    entries: Sequence[Queued]
    has_failed: bool = False
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
        """Its engine takes another behind it."""
        return self._begun is not None

    @property
    def work(self) -> RowWork:
        lead = self.entries[0]
        assert isinstance(lead, QueuedRows), "a call is not queued"
        return lead.work

    def shared(self, seconds: float) -> "list[tuple[Queued, float]]":
        """What of some seconds each pays, by its rows."""
        rows = self.live_rows
        return [(one, seconds * part.rows / rows) for part, one in self.pairs]

    def fits_behind(self, before: "_Run", memory: Pool) -> bool:
        """Whether the same engine takes it, and there is memory for both, which is taken then."""
        if isinstance(self.entries[0], ExclusiveCall) or self.work.engine is not before.work.engine:
            return False
        return self.fits(memory)

    def fits(self, memory: Pool) -> bool:
        """Whether there is memory for it now, which is taken then."""
        self._room = memory.take(self.work.nbytes(self.turn.rows))
        return self._room is not None

    def give_up(self) -> None:
        """Give back what ``fits`` has taken; it does not begin."""
        assert self._room is not None, "it fitted"
        self._room.release()

    def begin(self, memory: Pool) -> None:
        self.charged_at = time.perf_counter()
        lead = self.entries[0]
        if isinstance(lead, ExclusiveCall):
            return
        self._room = self._room or memory.take(self.work.nbytes(self.turn.rows))
        assert self._room is not None, "one batch runs where there is no room for two, and it was made to fit"
        with ExitStack() as failing:
            failing.enter_context(self._room)
            (first, _), *others = self.pairs
            slab = lead.lead(first.rows, [(one, part.rows) for part, one in others if isinstance(one, QueuedRows)])
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
        for part, one in self.pairs:
            if isinstance(one, QueuedRows):
                one.take(outputs, at, part.rows)
            at += part.rows


class _Telling:
    """Hands whatever goes wrong in a run to those who wait for it."""

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


def _is_unwanted(one: Queued) -> bool:
    # One that has begun cannot be cancelled, but what is left of it need not run.
    return one.future.cancelled() or (one.has_begun and one.is_abandoned())


def _begins(one: Queued) -> bool:
    one.has_begun = one.has_begun or one.future.set_running_or_notify_cancel()
    return one.has_begun
