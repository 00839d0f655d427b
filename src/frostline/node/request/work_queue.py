"""What waits for the device: rows of a request, of which a run may take some, or one call that has it alone."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.batching import QueuedRequest
from frostline.engines.base.protocols import Engine
from frostline.node.request.pipeline import Slab
from frostline.node.scheduling.tenants import Account

__all__ = ("HEADROOM", "ExclusiveCall", "Outputs", "QueuedRows", "RowWork")

HEADROOM = 1.25
"""What a run may take for each byte of the dry run's count, for the workspaces of kernels.

ResNet-18 takes 1.0 to 1.2 at its peak; ``tests/node/test_node_memory.py`` holds a whole node to its budget.
"""

Outputs = list[npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """What is done with rows. Rows of equal work may run together.

    Attributes:
        engine: runs them.
        cut: up to which.
        run_rows: of every run, whatever is asked: kernels may round otherwise for others.
    """

    engine: Engine
    cut: int
    run_rows: int

    def nbytes(self, rows: int) -> int:
        """What a run of so many rows takes beside the weights."""
        return int(self.engine.footprint(self.cut).at(rows) * HEADROOM)


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedRows:
    """Rows of one request. All but ``future`` and ``is_abandoned`` belong to the device.

    Attributes:
        account: whose they are.
        is_abandoned: nobody wants them any more. Safe for threads.
        work: what is done with them.
        slab: ``[work.run_rows, ...]``, its first ``rows`` the request's. Rows of others may be put where it has none
            that still have to run.
        rows: of the request.
        future: what crosses the cut: tensors with at least these rows, which come first.
        served: told of the device seconds that it took, divided by its tenant's weight.
        is_apart: it runs with no rows of others, as after a run with others that failed.
        has_begun: some of it runs or has run, so that its future cannot be cancelled any more.
        ran: rows that have run.
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
    _row_bytes: int = field(init=False)
    _model_bytes: int = field(init=False)
    _next: int = field(default=0, init=False)
    _made: Outputs = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        # Once: every run looks at everything that waits, and an engine may have to add its weights up.
        fixed_bytes = self.work.nbytes(0)
        self._row_bytes = self.work.nbytes(1) - fixed_bytes
        self._model_bytes = self.work.engine.weight_bytes + fixed_bytes

    @property
    def left(self) -> int:
        """Rows that still have to run."""
        return self.rows - self.ran

    def waiting(self, number: int) -> QueuedRequest:
        """What a rule sees of it."""
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
        """The slab with its own next rows in front, and behind them so many rows of each of the others."""
        for place in range(self.left if self._next else 0):
            self.slab[place] = self.slab[self._next + place]
        self._next = 0
        at = rows
        for other, count in others:
            self.slab[at : at + count] = other.slab[other._next : other._next + count]  # noqa: SLF001 (of this class)
            at += count
        if self.is_apart or self.ran:  # rows of others may be left from a run before
            self.slab[max(at, self.left) :] = 0
        return self.slab

    def take(self, outputs: Outputs, at: int, rows: int) -> None:
        """So many of its rows ran, and came out from there on. Whose slab it was keeps the outputs; others copy."""
        if at == 0 and rows == self.rows:
            self._made = [_apart(output, self.slab) for output in outputs]
        else:
            self._made = self._made or [np.empty((self.rows, *output.shape[1:]), output.dtype) for output in outputs]
            for made, output in zip(self._made, outputs, strict=True):
                made[self.ran : self.ran + rows] = output[at : at + rows]
        self.ran += rows
        self._next += rows

    def pay(self, device_s: float) -> None:
        """Some of its rows took so much of the device."""
        self.account.used(device_s)
        self.served(device_s / self.account.settings.weight)

    def finish(self) -> None:
        """Tell who waits that all has run."""
        self.future.set_result(self._made)


@dataclass(slots=True, kw_only=True, eq=False)
class ExclusiveCall:
    """One call that has the device alone.

    Attributes:
        account: whose it is.
        is_abandoned: nobody wants it any more. Safe for threads.
        call: what is done.
        future: what it gives.
        has_begun: it runs, so that its future cannot be cancelled any more.
        left: 1 until it has been called.
    """

    account: Account
    is_abandoned: Callable[[], bool]
    call: Callable[[], Any]
    future: "Future[Any]" = field(default_factory=Future)
    has_begun: bool = False
    left: int = 1
    _made: Any = field(default=None, init=False)

    def waiting(self, number: int) -> QueuedRequest:
        """What a rule sees of it."""
        return QueuedRequest(number=number, tenant=self.account.name, kind=self.future, rows=1, run_rows=1)

    def run(self) -> None:
        """Do it."""
        self._made = self.call()
        self.left = 0

    def pay(self, device_s: float) -> None:
        """It took so much of the device."""
        self.account.used(device_s)

    def finish(self) -> None:
        """Tell who waits that it was done."""
        self.future.set_result(self._made)


def _apart(tensor: npt.NDArray[np.generic], slab: Slab) -> npt.NDArray[np.generic]:
    # An answer that views the pixels would keep them all while it waits to be sent.
    return tensor.copy() if np.may_share_memory(tensor, slab) else tensor
