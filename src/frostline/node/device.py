"""The device: runs waiting work by the node's batching rule, merges rows of several requests, on one device or more.

What waits is rows of requests, which may share runs, and calls that need it alone. Each batch goes to one of several.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from frostline.batching import (
    BatchingRule,
    DeviceLoad,
    FairMerging,
    QueuedRequest,
    QueueHead,
    Turn,
    batch_seconds,
    combined_speed,
    first_to_finish,
)
from frostline.core.units import log_named
from frostline.engines.machine import pause_compute
from frostline.engines.protocols import Between, Engine, PipelinedEngine, PreemptibleEngine, RunningBatch
from frostline.node.memory import Cancelled, CancelScope, LockedFairShares, Pool, PoolStatistics, Reservation
from frostline.node.pipeline import Slab
from frostline.node.statistics import Counters
from frostline.node.tenants import Account

__all__ = (
    "HEADROOM",
    "Device",
    "Devices",
    "ExclusiveCall",
    "Outputs",
    "QueuedRows",
    "RowWork",
)


HEADROOM = 1.25
"""Allowed memory of a run per byte of the dry run: kernels have workspaces (``tests/node/test_memory.py``)."""

Outputs = list[npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """The work to be done on rows. Rows of equal work may run together.

    Attributes:
        engine: engine that runs them.
        cut: number of the cut up to which it runs.
        run_rows: rows of every run, always the same because kernels may round differently for others.
    """

    engine: Engine
    cut: int
    run_rows: int

    def nbytes(self, rows: int) -> int:
        """The memory of a run of so many rows, without the weights."""
        return int(self.engine.footprint(self.cut).at(rows) * HEADROOM)


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedRows:
    """Rows of one request. All but ``future`` and ``is_abandoned`` belong to the device.

    Attributes:
        account: account of the tenant that asks.
        is_abandoned: True if the request was cancelled. Safe for threads.
        work: work to be done on them.
        slab: ``[work.run_rows, ...]``, whose first ``rows`` belong to the request. Rows of others may be put behind
            those that still have to run.
        rows: number of rows of the request.
        future: future that resolves to the tensors at the cut, with at least these rows, which come first.
        served: function that is called with device seconds that were used, divided by the tenant's weight.
        is_apart: True to run without rows of others, because a shared run has failed.
        has_begun: True if some rows run or have run, so that the future cannot be cancelled any more.
        ran: number of rows that have run.
        queued_at: the time when it began to wait, as ``time.perf_counter`` counts.
    """

    account: Account
    is_abandoned: Callable[[], bool]
    work: RowWork
    slab: Slab
    rows: int
    served: Callable[[float], None]
    future: "Future[Outputs]" = field(default_factory=Future)
    is_apart: bool = False
    has_begun: bool = False
    ran: int = 0
    queued_at: float = field(default_factory=time.perf_counter)
    _row_bytes: int = field(init=False)
    _model_bytes: int = field(init=False)
    _next: int = field(default=0, init=False)
    _made: Outputs = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        # Computed once: every run looks at all waiting entries, and an engine may have to sum up its weights.
        fixed_bytes = self.work.nbytes(0)
        self._row_bytes = self.work.nbytes(1) - fixed_bytes
        self._model_bytes = self.work.engine.weight_bytes + fixed_bytes

    @property
    def left(self) -> int:
        """The number of rows that still have to run."""
        return self.rows - self.ran

    def queued_request(self, number: int) -> QueuedRequest:
        """The entry as the batching rule sees it."""
        work = self.work
        return QueuedRequest(
            number=number,
            tenant=self.account.name,
            kind=work,
            rows=self.left,
            run_rows=work.run_rows,
            is_apart=self.is_apart,
            bytes_per_row=self._row_bytes,
            model_bytes=self._model_bytes,
        )

    def lead(self, rows: int, others: "Sequence[tuple[QueuedRows, int]]") -> Slab:
        """The slab with its own next rows in front, followed by so many rows of each other entry."""
        for place in range(self.left if self._next else 0):
            self.slab[place] = self.slab[self._next + place]
        self._next = 0
        at = rows
        for other, count in others:
            self.slab[at : at + count] = other.slab[other._next : other._next + count]  # noqa: SLF001 (of this class)
            at += count
        if self.is_apart or self.ran:  # rows of others may be left from an earlier run
            self.slab[max(at, self.left) :] = 0
        return self.slab

    def take(self, outputs: Outputs, at: int, rows: int) -> None:
        """Take ``rows`` rows of a run's outputs from ``at`` on. The owner of the slab keeps them; others copy."""
        if at == 0 and rows == self.rows:
            self._made = [_apart(output, self.slab) for output in outputs]
        else:
            self._made = self._made or [np.empty((self.rows, *output.shape[1:]), output.dtype) for output in outputs]
            for made, output in zip(self._made, outputs, strict=True):
                made[self.ran : self.ran + rows] = output[at : at + rows]
        self.ran += rows
        self._next += rows

    def pay(self, device_s: float) -> None:
        """Charge device seconds to the tenant and to the prefix."""
        self.account.charge_device(device_s)
        self.served(device_s / self.account.settings.weight)

    def begin_again(self) -> None:
        """Wait once more with the rows that have not run, after they have failed on a device."""
        self.future, self.has_begun, self.queued_at = Future(), False, time.perf_counter()

    def finish(self) -> None:
        """Resolve the future: all rows have run."""
        self.future.set_result(self._made)


@dataclass(slots=True, kw_only=True, eq=False)
class ExclusiveCall:
    """A call that has the device to itself.

    Attributes:
        account: account of the tenant that asks.
        is_abandoned: True if the request was cancelled. Safe for threads.
        call: call to run.
        future: future that resolves to the result of the call.
        has_begun: True if it runs, so that the future cannot be cancelled any more.
        left: 1 until the call has run.
        nbytes: memory that is taken for it; it may then run between two operations of another tenant's run. None where
            it takes its own, and measures time, so that nothing else may be under way.
    """

    account: Account
    is_abandoned: Callable[[], bool]
    call: Callable[[], Any]
    nbytes: int | None = None
    future: "Future[Any]" = field(default_factory=Future)
    has_begun: bool = False
    left: int = 1
    _made: Any = field(default=None, init=False)

    def queued_request(self, number: int) -> QueuedRequest:
        """The call as the batching rule sees it."""
        return QueuedRequest(number=number, tenant=self.account.name, kind=self.future, rows=1, run_rows=1)

    def run(self) -> None:
        """Run the call."""
        self._made = self.call()
        self.left = 0

    def pay(self, device_s: float) -> None:
        """Charge device seconds to the tenant."""
        self.account.charge_device(device_s)

    def finish(self) -> None:
        """Resolve the future with the result."""
        self.future.set_result(self._made)


def _apart(tensor: npt.NDArray[np.generic], slab: Slab) -> npt.NDArray[np.generic]:
    # A view of the slab would keep all its pixels while the answer waits to be sent.
    return tensor.copy() if np.may_share_memory(tensor, slab) else tensor


def _first_waits(entries: Iterable[QueuedRows | ExclusiveCall], began_at: float) -> list[float]:
    return [began_at - entry.queued_at for entry in entries if isinstance(entry, QueuedRows) and not entry.ran]


_UNKNOWN_S = 1.0  # of a run before the first one: long, so that unknown work does not crowd out others
_LATEST = 0.5  # weight of the latest run in the moving average of a run's seconds
# Seconds between two looks at a run: its time is charged, and it may be cancelled or interrupted.
_SLICE_S = 0.05

Queued = QueuedRows | ExclusiveCall


class Device:
    """Runs prefixes and other device work in one thread, so that an engine keeps one team of threads.

    Args:
        name: device in torch's notation.
        memory: pool for the activations of the run, and of the next run that begins during its last pieces.
        rule: rule that decides what runs next.
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
        self._is_asked = False  # the thread, which has not begun yet
        self._free_at = 0.0  # when the previous run ended
        self._run_s: WeakKeyDictionary[Engine, dict[tuple[int, int], float]] = WeakKeyDictionary()
        self._running: list[_Run] = []  # now, and what interrupts it; used by the device's thread only

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
            if not self._is_asked:  # once is enough: it runs everything that waits
                self._thread.submit(self._serve)
                self._is_asked = True

    def between(self) -> None:
        """Check on the current run between two of its operations; called in the device's thread.

        Its time so far is charged, so that the fair shares are up to date. Tenants that are due before this run go
        first if there is memory for both.

        Raises:
            Cancelled: All its requests were cancelled.
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
            with pause_compute():
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
            free = {
                number: entry
                for number, entry in self._queue.items()
                if isinstance(entry, QueuedRows) or entry.nbytes is not None
            }
            waiting = [
                entry.queued_request(number)
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
        with self._lock:
            self._is_asked = False
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
            waiting = [entry.queued_request(number) for number, entry in free.items() if number in self._queue]
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

    def report_failure(self, run: "_Run", error: BaseException) -> None:
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
            # Whose run was under way when the whole node was stopped does not pay for that.
            self._fair_shares.charge(entry.account.name, min(mine_s, 10.0))
            entry.pay(mine_s)

    def _counted(self, run: "_Run") -> None:
        self._counters.add(runs=1, rows_run=run.turn.rows, rows_merged=run.live_rows - run.turn.parts[0].rows)
        self._counters.observe("device_wait", *_first_waits(run.entries, run.began_at))
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
    _reservation: Reservation | None = None
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
        self._reservation = memory.take(self._nbytes)
        return self._reservation is not None

    @property
    def _nbytes(self) -> int:
        lead = self.entries[0]
        return (lead.nbytes or 0) if isinstance(lead, ExclusiveCall) else self.work.nbytes(self.turn.rows)

    def give_up(self) -> None:
        """Release the memory that ``fits`` has reserved; the run does not begin."""
        assert self._reservation is not None, "it fitted"
        self._reservation.release()

    def begin(self, memory: Pool) -> None:
        self.began_at = self.charged_at = time.perf_counter()
        lead = self.entries[0]
        self._reservation = self._reservation or memory.take(self._nbytes)
        assert self._reservation is not None, "one run always fits, and no other runs"
        if isinstance(lead, ExclusiveCall):
            return
        with ExitStack() as failing:
            failing.enter_context(self._reservation)
            (first, _), *others = self.pairs
            slab = lead.lead(
                first.rows, [(entry, part.rows) for part, entry in others if isinstance(entry, QueuedRows)]
            )
            self._slab = slab[: self.turn.rows]
            engine = self.work.engine
            self._begun = engine.begin(self._slab, self.work.cut) if isinstance(engine, PipelinedEngine) else None
            failing.pop_all()

    def drain(self) -> None:
        """Wait until its last pieces run."""
        assert self._begun is not None, "it is queued"
        self._begun.drain()

    def compute(self, between: Between) -> Outputs:
        lead = self.entries[0]
        assert self._reservation is not None, "it has begun"
        with self._reservation:
            if isinstance(lead, ExclusiveCall):
                lead.run()
                return []
            assert self._slab is not None, "it has begun"
            return list(self._begun.outputs() if self._begun else self._computed(self._slab, between))

    def _computed(self, slab: Slab, between: Between) -> Sequence[npt.NDArray[np.generic]]:
        engine, cut = self.work.engine, self.work.cut
        return (
            engine.run_divided(slab, cut, between) if isinstance(engine, PreemptibleEngine) else engine.run(slab, cut)
        )

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
            self._device.report_failure(self._run, error)
        return error is not None


def _is_unwanted(entry: Queued) -> bool:
    # A future that is running cannot be cancelled, but the rest of its rows need not run.
    return entry.future.cancelled() or (entry.has_begun and entry.is_abandoned())


def _begins(entry: Queued) -> bool:
    entry.has_begun = entry.has_begun or entry.future.set_running_or_notify_cancel()
    return entry.has_begun


T = TypeVar("T")

_LOG = log_named("frostline.node")


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    """A device, and what is known of it.

    Attributes:
        device: device that runs what it is given.
        waiting_s: the expected seconds of what it was given and has not finished.
        is_out: True if it failed, so that it is given no more.
        failed: names of tenants whose work failed on it, and not on another one.
        measured_s: seconds that it took for what was last measured on all devices; None before that.
    """

    device: Device
    waiting_s: float = 0.0
    is_out: bool = False
    failed: set[str] = field(default_factory=set)
    measured_s: float | None = None


class Devices:
    """The devices of a node. They share its requests and its tenants' fair shares. Safe for threads.

    A device on which a batch fails that another one computes is given no more work, and the log says so; the last one
    stays. A batch of a tenant that may not see all may be made to fail: it takes a device from that tenant alone, and
    from all with one of another. A batch that fails on all of them is refused, as on a node with one device.

    Args:
        devices: devices, each with its own memory for activations.

    Attributes:
        only: the device of a node that has one, to which its batches go without a choice; None if there are several.
        memory: memory for activations of the first device; that of the others has the same size.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.only = devices[0] if len(devices) == 1 else None
        self.memory: Pool = devices[0].memory
        self._members = [_Member(device=device) for device in devices]
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """The number of batches and calls that wait or run."""
        return sum(member.device.waiting for member in self._members)

    @property
    def speed(self) -> float:
        """How many times as fast those in service are together as the first of them, by what was last measured."""
        return combined_speed([self._members[number].measured_s for number in self.in_service()])

    def in_service(self) -> tuple[int, ...]:
        """The numbers of the devices that are given work."""
        with self._lock:
            return tuple(number for number, member in enumerate(self._members) if not member.is_out)

    def device(self, number: int) -> Device:
        """The device of that number."""
        return self._members[number].device

    def expected_s(self, works: Sequence[RowWork]) -> float:
        """The expected seconds of a run, on the fastest device in service."""
        known = [self._members[number].device.known_s(works[number]) for number in self.in_service()]
        return min(batch_seconds([DeviceLoad(waiting_s=0.0, batch_s=seconds) for seconds in known]))

    def run(self, batch: QueuedRows, works: Sequence[RowWork], scope: CancelScope) -> Outputs:
        """Run a batch on the device that is expected to finish it first; if it fails there, on another one.

        Raises:
            Cancelled: The request was cancelled.
        """
        failures: dict[int, BaseException] = {}
        while True:
            number, cost_s = self._give(batch, works, failures)
            member, batch.work = self._members[number], works[number]
            try:
                future = scope.follow(batch.future, partial(member.device.enqueue, batch))
                error = future.exception()
            finally:
                with self._lock:
                    member.waiting_s -= cost_s
            if error is None:
                self._take_out(failures, batch.account)
                return future.result()
            failures[number] = error
            if isinstance(error, Cancelled) or not set(self.in_service()) - failures.keys():
                raise next(iter(failures.values()))
            batch.begin_again()

    def run_exclusive(
        self, number: int, call: Callable[[], T], account: Account, scope: CancelScope, *, nbytes: int | None = None
    ) -> T:
        """Run a call that has one device to itself, and return its result; see ``run_on_each``."""
        return self.run_on_each({number: call}, account, scope, nbytes=nbytes)[number]

    def run_on_each(
        self, calls: Mapping[int, Callable[[], T]], account: Account, scope: CancelScope, *, nbytes: int | None = None
    ) -> dict[int, T]:
        """Run a call on each of some devices at the same time; a device whose call fails is taken out.

        Args:
            calls: calls by the numbers of the devices.
            account: account of the tenant that asks.
            scope: scope that cancels the calls.
            nbytes: memory that each takes; see ``ExclusiveCall``.

        Returns:
            The result of each device that has one.

        Raises:
            Exception: Error of the call, if it failed on all devices.
        """
        entries = {
            number: ExclusiveCall(account=account, is_abandoned=scope.is_cancelled, call=call, nbytes=nbytes)
            for number, call in calls.items()
        }
        for number, entry in entries.items():
            scope.follow(entry.future, partial(self._members[number].device.enqueue, entry))
        errors = {number: entry.future.exception() for number, entry in entries.items()}
        failures = {number: error for number, error in errors.items() if error is not None}
        cancelled = [error for error in failures.values() if isinstance(error, Cancelled)]
        if cancelled or len(failures) == len(calls):
            raise next(iter(cancelled or failures.values()))
        self._take_out(failures, account)
        return {number: entry.future.result() for number, entry in entries.items() if number not in failures}

    def record_seconds(self, seconds: Mapping[int, float]) -> None:
        """Take what the same work took on each device, by its number; see ``speed``."""
        with self._lock:
            for number, member in enumerate(self._members):
                member.measured_s = seconds.get(number)

    def memory_statistics(self) -> PoolStatistics:
        """The state of the memory for activations of all devices together."""
        each = [member.device.memory.statistics() for member in self._members]
        return PoolStatistics(
            total_bytes=sum(pool.total_bytes for pool in each),
            reserved_bytes=sum(pool.reserved_bytes for pool in each),
            peak_bytes=sum(pool.peak_bytes for pool in each),
            waiting=sum(pool.waiting for pool in each),
        )

    def close(self) -> None:
        """Wait until all work is done, and stop the threads."""
        for member in self._members:
            member.device.close()

    def _give(self, batch: QueuedRows, works: Sequence[RowWork], failed: Collection[int]) -> tuple[int, float]:
        """The device that takes a batch, and the seconds that are now expected to wait there for it."""
        known = [member.device.known_s(work) for member, work in zip(self._members, works, strict=True)]
        share = batch.left / batch.work.run_rows  # rows of others may fill the run up
        with self._lock:
            able = [number for number, member in enumerate(self._members) if not (member.is_out or number in failed)]
            able = [number for number in able if batch.account.name not in self._members[number].failed] or able
            loads = [
                DeviceLoad(
                    waiting_s=member.waiting_s,
                    batch_s=None if run_s is None else share * run_s,
                    may_take=number in able,
                )
                for number, (member, run_s) in enumerate(zip(self._members, known, strict=True))
            ]
            chosen = first_to_finish(loads)
            cost_s = batch_seconds(loads)[chosen]
            self._members[chosen].waiting_s += cost_s
        return chosen, cost_s

    def _take_out(self, failures: Mapping[int, BaseException], account: Account) -> None:
        """Give no more to devices on which something of an account failed that another one did."""
        for number, error in failures.items():
            member = self._members[number]
            with self._lock:
                is_news = not member.is_out and account.name not in member.failed
                member.failed.add(account.name)
                member.is_out |= account.settings.sees_all or len(member.failed) > 1
            if is_news:
                whose = "work" if member.is_out else f"work of {account.name}"
                said = "device %s failed where another did not, and gets no more %s until the node is started again: %s"
                _LOG.warning(said, member.device.name, whose, error)
