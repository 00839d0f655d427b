"""The work that waits for the device: rows of requests, which may share runs, and calls that need the device alone."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.batching import QueuedRequest
from frostline.engines.base.protocols import Engine
from frostline.node.request.pipeline import Slab
from frostline.node.scheduling.tenants import Account

__all__ = ("HEADROOM", "ExclusiveCall", "Outputs", "QueuedRows", "RowWork", "first_waits")

HEADROOM = 1.25
"""Allowed memory of a run per byte that the dry run counted; the rest is for the workspaces of kernels.

ResNet-18 takes 1.0 to 1.2 at its peak; ``tests/node/test_node_memory.py`` checks a whole node against its budget.
"""

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
        is_abandoned: whether the request was cancelled. Safe for threads.
        work: work to be done on them.
        slab: ``[work.run_rows, ...]``, whose first ``rows`` belong to the request. Rows of others may be put behind
            those that still have to run.
        rows: number of rows of the request.
        future: resolves to the tensors at the cut, with at least these rows, which come first.
        served: called with device seconds that were used, divided by the tenant's weight.
        is_apart: whether to run without rows of others, because a shared run has failed.
        has_begun: whether some rows run or have run, so that the future cannot be cancelled any more.
        ran: number of rows that have run.
        queued_at: when it began to wait, as ``time.perf_counter`` counts.
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

    def waiting(self, number: int) -> QueuedRequest:
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
        self.account.used(device_s)
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
        is_abandoned: whether the request was cancelled. Safe for threads.
        call: call to run.
        future: resolves to the result of the call.
        has_begun: whether it runs, so that the future cannot be cancelled any more.
        left: 1 until the call has run.
    """

    account: Account
    is_abandoned: Callable[[], bool]
    call: Callable[[], Any]
    future: "Future[Any]" = field(default_factory=Future)
    has_begun: bool = False
    left: int = 1
    _made: Any = field(default=None, init=False)

    def waiting(self, number: int) -> QueuedRequest:
        """The call as the batching rule sees it."""
        return QueuedRequest(number=number, tenant=self.account.name, kind=self.future, rows=1, run_rows=1)

    def run(self) -> None:
        """Run the call."""
        self._made = self.call()
        self.left = 0

    def pay(self, device_s: float) -> None:
        """Charge device seconds to the tenant."""
        self.account.used(device_s)

    def finish(self) -> None:
        """Resolve the future with the result."""
        self.future.set_result(self._made)


def _apart(tensor: npt.NDArray[np.generic], slab: Slab) -> npt.NDArray[np.generic]:
    # A view of the slab would keep all its pixels while the answer waits to be sent.
    return tensor.copy() if np.may_share_memory(tensor, slab) else tensor


def first_waits(entries: Iterable[QueuedRows | ExclusiveCall], began_at: float) -> list[float]:
    """Seconds that those of the entries whose first rows run now have waited until ``began_at``."""
    return [began_at - entry.queued_at for entry in entries if isinstance(entry, QueuedRows) and not entry.ran]
