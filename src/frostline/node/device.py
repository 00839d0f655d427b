"""The device: runs what waits for it by the node's rule, one run at a time, rows of several requests together."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

from frostline.batching import Part, Rule, Turn
from frostline.engines.faces import Engine
from frostline.node.memory import Abandoned, Pool
from frostline.node.queued import Batch, Call, Outputs, Work
from frostline.node.statistics import Counters
from frostline.node.turns import Turns

__all__ = ("Device",)

# What a run is taken for before there was one: long, so that what is not known does not crowd others out.
_UNKNOWN_S = 1.0
# The part of the latest run in what the next is expected to take.
_LATEST = 0.5

Queued = Batch | Call


class Device:
    """Runs prefixes and whatever else needs the device, in one thread, so that an engine keeps one team of threads.

    Args:
        name: in torch's words.
        memory: for the activations of the one run.
        rule: decides what runs next.
        turns: where the tenants stand; told what each took.
        counters: told what was done.
    """

    def __init__(self, *, name: str, memory: Pool, rule: Rule, turns: Turns, counters: Counters) -> None:
        self.name = name
        self.memory = memory
        self._rule = rule
        self._turns = turns
        self._counters = counters
        self._thread = ThreadPoolExecutor(1, "frostline-device")
        self._lock = threading.Lock()
        self._queue: dict[int, Queued] = {}  # first come first
        self._count = 0
        self._run_s: WeakKeyDictionary[Engine, dict[tuple[int, int], float]] = WeakKeyDictionary()

    @property
    def waiting(self) -> int:
        """Batches and calls that wait or run."""
        return len(self._queue)

    def expected_s(self, work: Work) -> float:
        """What a run will probably take."""
        with self._lock:
            return self._run_s.get(work.engine, {}).get((work.cut, work.run_rows), _UNKNOWN_S)

    def enqueue(self, one: Queued) -> None:
        """Have it done; its future tells when."""
        with self._lock:
            self._count += 1
            self._queue[self._count] = one
            self._turns.arrive(one.account.name)
        # There are always as many jobs as there are entries: each ends one, or finds nothing to do.
        self._thread.submit(self._serve)

    def close(self) -> None:
        """Wait until nothing is left to do, and stop the thread."""
        self._thread.shutdown()

    def _serve(self) -> None:
        dropped: list[Queued] = []
        with self._lock:
            run = self._chosen(dropped)
        for one in dropped:  # a future tells others, who may ask for this lock
            if one.has_begun:
                one.future.set_exception(Abandoned())
        if run is not None:
            with _Telling(self, run):
                self._do(run)

    def _chosen(self, dropped: list[Queued]) -> "_Run | None":
        while True:
            dropped += self._drop([number for number, one in self._queue.items() if _is_unwanted(one)])
            if not self._queue:
                return None
            turn = self._rule.next([one.waiting(number) for number, one in self._queue.items()], self._turns.tag)
            run = _Run(turn=turn, entries=[self._queue[part.number] for part in turn.parts])
            if all(map(_begins, run.entries)):
                self._turns.begin(run.entries[0].account.name)
                return run

    def _drop(self, numbers: Sequence[int]) -> list[Queued]:
        gone = [self._queue.pop(number) for number in numbers]
        for one in gone:
            self._turns.depart(one.account.name)
        return gone

    def _do(self, run: "_Run") -> None:
        started = time.perf_counter()
        outputs = None
        try:
            outputs = run.compute(self.memory)
        finally:
            # A run that fails is paid for too, but not by those whose rows only stood beside the broken ones.
            if outputs is not None or len(run.entries) == 1:
                self._charge(run, time.perf_counter() - started)
        run.take(outputs)
        # The outputs lie in the memory of the one whose turn it was, so that it is told last.
        for part, one in reversed(run.pairs):
            if one.left:
                continue
            with self._lock:
                self._drop([part.number])
            one.finish()
        if run.entries[0].left:
            self._thread.submit(self._serve)

    def failed(self, run: "_Run", error: BaseException) -> None:
        """Tell those whose rows ran; where there were several, each runs apart first, since only one may be broken."""
        if len(run.entries) == 1:
            with self._lock:
                self._drop([run.turn.parts[0].number])
            run.entries[0].future.set_exception(error)
            return
        for one in run.entries:
            assert isinstance(one, Batch), "a call has the device alone"
            one.is_apart = True
        self._thread.submit(self._serve)

    def _charge(self, run: "_Run", took_s: float) -> None:
        rows = run.live_rows
        for part, one in run.pairs:
            mine_s = took_s * part.rows / rows
            self._turns.charge(one.account.name, mine_s)
            one.account.used(mine_s)
        self._counters.add(runs=1, rows_run=run.turn.rows, rows_merged=rows - run.turn.parts[0].rows)
        lead = run.entries[0]
        if isinstance(lead, Batch) and run.turn.rows == lead.work.run_rows:
            self._learn(lead.work, took_s)

    def _learn(self, work: Work, took_s: float) -> None:
        with self._lock:
            known = self._run_s.setdefault(work.engine, {})
            key = (work.cut, work.run_rows)
            known[key] = _LATEST * took_s + (1 - _LATEST) * known.get(key, took_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """A turn, and whose it is."""

    turn: Turn
    entries: Sequence[Queued]

    @property
    def pairs(self) -> "list[tuple[Part, Queued]]":
        return list(zip(self.turn.parts, self.entries, strict=True))

    @property
    def live_rows(self) -> int:
        return sum(part.rows for part in self.turn.parts)

    def compute(self, memory: Pool) -> Outputs:
        lead = self.entries[0]
        if isinstance(lead, Call):
            lead.run()
            return []
        (first, _), *others = self.pairs
        slab = lead.lead(first.rows, [(one, part.rows) for part, one in others if isinstance(one, Batch)])
        activations = memory.take(lead.work.nbytes(self.turn.rows))
        assert activations is not None, "one batch runs at a time, and it was made to fit"
        with activations:
            return list(lead.work.engine.run(slab[: self.turn.rows], lead.work.cut))

    def take(self, outputs: Outputs) -> None:
        at = 0
        for part, one in self.pairs:
            if isinstance(one, Batch):
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
