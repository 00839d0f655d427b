"""Asks again where a node is full while a job begins, as the window does later: after as long as the node asked for."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import SystemRandom
from typing import TypeVar

from frostline.errors import Overloaded
from frostline.events import NodeFull, Observer
from frostline.prefetch.in_flight import Failing, delay_s

__all__ = ("RetryPolicy", "jitter")

T = TypeVar("T")

# Of the system, since forked workers would all have the same of a generator with a state.
jitter = SystemRandom().random
"""From 0 to below 1; see ``delay_s``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RetryPolicy:
    """How long a node that is full is asked again.

    Only ``Overloaded`` is waited out: the node is there, and says when to come back. A node that cannot be reached at
    the start of a job is more likely a wrong address.

    Attributes:
        retry_for_s: for each thing that is asked for, from its first refusal on.
        observe: told of every wait, before it.
        clock: monotonic seconds.
        wait: lets so many seconds pass.
        jitter: see ``delay_s``.
    """

    retry_for_s: float
    observe: Observer
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = jitter

    def __call__(self, ask: Callable[[], T]) -> T:
        """What ``ask`` gives, which is called until a node is not full.

        Raises:
            NodeUnreachable: It was full for ``retry_for_s``, or would be before it wants to be asked again.
        """
        failures, since = 0, 0.0
        while True:
            try:
                return ask()
            except Overloaded as reason:
                now = self.clock()
                failures, since = failures + 1, since if failures else now
                failing = Failing(samples=0, failures=failures, since=since)
                pause_s = delay_s(failing, reason, now, self.retry_for_s, self.jitter())
                self.observe(NodeFull(attempt=failures + 1, delay_s=pause_s, reason=str(reason)))
            self.wait(pause_s)
