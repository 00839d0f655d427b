"""A link, a store and a loop as queues in simulated time, for rules of tuning: nothing runs but arithmetic."""

import heapq
import math
import random
from dataclasses import dataclass, field

from frostline.tuning import Observation

__all__ = ("Queues", "Run")

_LOOK_S = 0.01


@dataclass(kw_only=True)
class Run:
    """What happened: ``changes`` as (second, change), ``arrivals`` as (second, bytes)."""

    changes: list = field(default_factory=list)
    arrivals: list = field(default_factory=list)
    settings: list = field(default_factory=list)
    stalls: list = field(default_factory=list)
    max_held: int = 0

    def rate(self, start, stop):
        """Bytes a second in a stretch of time."""
        return sum(nbytes for at, nbytes in self.arrivals if start <= at < stop) / (stop - start)

    def stalled(self, start, stop):
        return sum(seconds for at, seconds in self.stalls if start <= at < stop) / (stop - start)


class Queues:
    """Requests go to a store of some servers, their answers through a link one after another, and out in order.

    ``bytes_per_s``, ``round_trip_s``, ``servers``, ``service_s``, ``spread`` (of the time in the store, as the
    deviation of a logarithm), ``loop_bytes_per_s`` and ``refuses_above`` may be changed between runs.
    """

    def __init__(self, rule, *, request_bytes=160_000, seed=0, **figures):
        self.rule = rule
        self.request_bytes = request_bytes
        self.bytes_per_s, self.round_trip_s = 125e6, 0.0
        self.servers, self.service_s, self.spread = 1000, 0.0005, 0.0
        self.loop_bytes_per_s, self.refuses_above = math.inf, None
        self.change(**figures)
        self.now = 0.0
        self._random = random.Random(seed)
        self._events, self._order = [], 0
        self._free_at = []
        self._link_free = 0.0
        self._issued = self._out = 0
        self._came, self._flights = set(), {}
        self._allowed = 2
        self._loop_free = 0.0
        self._waits_since = 0.0
        self._looked = 0.0
        self._since = self._nothing()
        self.result = Run()

    def change(self, **figures):
        for name, value in figures.items():
            assert name == "request_bytes" or hasattr(self, name), name
            setattr(self, name, value)

    def run(self, seconds, **figures):
        """Go on for so long, with other figures if there are any."""
        self.change(**figures)
        stop = self.now + seconds
        self._ask()
        while self._events and self._events[0][0] < stop:
            self.now, _, what, number = heapq.heappop(self._events)
            getattr(self, what)(number)
            self._hand_out()
            self._ask()
            self._look()
        self.now = stop
        return self.result

    def _nothing(self):
        return {"bytes_arrived": 0, "bytes_handed_out": 0, "stalled_s": 0.0, "took_s": [], "failures": 0}

    def _later(self, at, what, number=0):
        self._order += 1
        heapq.heappush(self._events, (at, self._order, what, number))

    @property
    def _held(self):
        return (self._issued - self._out) * self.request_bytes

    @property
    def _is_full(self):
        return self._held > 0 and self._held + self.request_bytes > self.rule.setting.window_bytes

    def _ask(self):
        self._allowed = min(self._allowed, self.rule.setting.requests)
        while len(self._flights) < self._allowed and not self._is_full:
            number, self._issued = self._issued, self._issued + 1
            self._flights[number] = self.now
            self.result.max_held = max(self.result.max_held, self._held)
            self._send(number)

    def _send(self, number):
        self._later(self._answered_at(), "_arrive", number)

    def _answered_at(self):
        reached = self.now + self.round_trip_s / 2
        while len(self._free_at) >= self.servers:
            reached = max(reached, heapq.heappop(self._free_at))
        served = reached + self.service_s * math.exp(self._random.gauss(0, self.spread))
        heapq.heappush(self._free_at, served)
        self._link_free = max(self._link_free, served) + self.request_bytes / self.bytes_per_s
        return self._link_free + self.round_trip_s / 2

    def _arrive(self, number):
        if self.refuses_above is not None and len(self._flights) > self.refuses_above:
            self._allowed = 1
            self._since["failures"] += 1
            self._flights.pop(number)
            self._later(self.now + 0.1, "_again", number)
            return
        self._since["took_s"].append(self.now - self._flights.pop(number))
        self._since["bytes_arrived"] += self.request_bytes
        self.result.arrivals.append((self.now, self.request_bytes))
        self._came.add(number)
        self._allowed = min(self._allowed + 1, self.rule.setting.requests)

    def _again(self, number):
        self._flights[number] = self.now
        self._send(number)

    def _free(self, _):
        self._waits_since = self.now

    def _hand_out(self):
        while self.now >= self._loop_free and self._out in self._came:
            self._stall()
            self._came.remove(self._out)
            self._out += 1
            self._since["bytes_handed_out"] += self.request_bytes
            self._loop_free = self.now + self.request_bytes / self.loop_bytes_per_s
            if self._loop_free > self.now:
                self._later(self._loop_free, "_free")

    def _stall(self):
        if self.now >= self._loop_free:
            self._since["stalled_s"] += self.now - self._waits_since
            self.result.stalls.append((self.now, self.now - self._waits_since))
            self._waits_since = self.now

    def _look(self):
        if self.now - self._looked < _LOOK_S:
            return
        self._stall()
        since, self._since = self._since, self._nothing()
        look = Observation(
            now_s=self.now,
            seconds=self.now - self._looked,
            ready_bytes=len(self._came) * self.request_bytes,
            expected_bytes=len(self._flights) * self.request_bytes,
            requests_in_flight=len(self._flights),
            requests_allowed=self._allowed,
            is_full=self._is_full and len(self._flights) < self._allowed,
            is_ending=False,
            **{**since, "took_s": tuple(since["took_s"])},
        )
        self._looked = self.now
        change = self.rule.look(look)
        self.result.settings.append((self.now, self.rule.setting))
        if change is not None:
            self.result.changes.append((self.now, change))
            self._ask()
