"""A line that connections share, in simulated time: they start slowly, take turns unevenly, and meet other traffic."""

import math
import random

from support.queues import Queues

__all__ = ("SharedLine", "hundred_mbit")

_TICK_S = 0.01
# TCP's first window, and what a connection may take of a line above its even share before it has asked for more.
_FIRST_WINDOW, _ABOVE_SHARE = 14_600, 1.65
# The line's rate wanders: it is another one every fifth of a second, most of which is that of the one before.
_WEATHER_S, _LASTS = 0.2, 0.8


class SharedLine(Queues):
    """``Queues`` whose answers come together, each over a connection of its own, and not one after another.

    A connection's window grows by what it delivers, as in slow start, so it is slow at first. One that is used takes
    at most half as much again as an even share, as BBR does while it probes, so a line of long round trips is not full
    with few of them. Answers differ in length, and what the line carries differs from one fifth of a second to another.

    Args:
        rule: of tuning.
        size_spread: deviation of answers' lengths, as a share of ``request_bytes``.
        weather: deviation of the line's rate, as a share of it.
        figures: as for ``Queues``.
    """

    def __init__(self, rule, *, size_spread=0.0, weather=0.0, **figures):
        super().__init__(rule, **figures)
        self.size_spread, self.weather = size_spread, weather
        self.carried = []
        self._answers = {}
        self._idle, self._delivered = [], {}
        self._sky = random.Random(figures.get("seed", 0))  # of its own: the same over whatever rule
        self._wind, self._carries = 0.0, 1.0
        self._later(_TICK_S, "_carry")
        self._later(0.0, "_change_weather")

    def carried_rate(self, start, stop):
        """Bytes a second on the line in a stretch of time, whole answers or not."""
        return sum(nbytes for at, nbytes in self.carried if start <= at < stop) / (stop - start)

    def _send(self, number):
        at = self.now + self.round_trip_s / 2 + self.service_s * math.exp(self._random.gauss(0, self.spread))
        self._later(at, "_begin", number)

    def _begin(self, number):
        connection = self._idle.pop() if self._idle else len(self._delivered)
        self._delivered.setdefault(connection, 0.0)
        length = self.request_bytes * max(0.2, self._random.gauss(1, self.size_spread))
        self._answers[number] = [length, connection]

    def _change_weather(self, _):
        self._wind = _LASTS * self._wind + math.sqrt(1 - _LASTS**2) * self._sky.gauss(0, self.weather)
        self._carries = max(0.2, 1 + self._wind)
        self._later(self.now + _WEATHER_S, "_change_weather")

    def _carry(self, _):
        """One step of the line: every answer gets its share, and what one cannot take the others do."""
        left = self.bytes_per_s * self._carries * _TICK_S
        maximum = _ABOVE_SHARE * left / max(1, len(self._flights))
        round_trip_s = max(self.round_trip_s, 0.001)
        takes = {}
        for number, (nbytes, connection) in self._answers.items():
            window = (_FIRST_WINDOW + self._delivered[connection]) * _TICK_S / round_trip_s
            takes[number] = min(nbytes, maximum, window)
        before = left
        waiting = sorted(takes, key=takes.get)
        for place, number in enumerate(waiting):
            given = min(takes[number], left / (len(waiting) - place))
            left -= given
            self._give(number, given)
        self.carried.append((self.now, before - left))
        self._later(self.now + _TICK_S, "_carry")

    def _give(self, number, nbytes):
        answer = self._answers[number]
        answer[0] -= nbytes
        self._delivered[answer[1]] += nbytes
        if answer[0] < 1:
            del self._answers[number]
            self._idle.append(answer[1])
            self._later(self.now + self.round_trip_s / 2, "_arrive", number)


def hundred_mbit(rule, photographs, round_trip_ms, seed, mbit=100):
    """A line of 100 Mbit/s, or so many, less what frames take; its rate wanders by an eighth. Photographs cross it."""
    return SharedLine(
        rule,
        request_bytes=57_000 * photographs,
        size_spread=0.33 / photographs**0.5,
        bytes_per_s=0.952 * mbit * 1e6 / 8,
        round_trip_s=round_trip_ms / 1000,
        service_s=0.001 * photographs**0.5,
        spread=0.5,
        weather=0.12,
        seed=seed,
    )
