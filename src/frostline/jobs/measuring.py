"""Measures for a job in a thread of its own, once that pays; the job's loop takes what was found."""

import threading
from collections.abc import Callable

from frostline.errors import FrostlineError
from frostline.events import BatchTaken, EpochStarted, Event, MeasuringFailed
from frostline.jobs.findings import Findings
from frostline.transport.cancellation import Cancellation

__all__ = ("Measure", "Measuring")

Measure = Callable[[Cancellation, int], Findings | None]
"""Measures, unless somebody cancels it, given the samples that are left. None where nothing is to be found."""

_END_S = 10.0


class Measuring:
    """Begins when batches arrive and what is left of the job is worth it; then it is done once.

    Args:
        samples: that the job computes in all, as far as it is known.
        is_worth: whether measuring pays, by the samples that are left and the samples a second until now.
        measure: does it.
        clock: monotonic seconds.
    """

    def __init__(
        self, *, samples: int, is_worth: Callable[[int, float], bool], measure: Measure, clock: Callable[[], float]
    ) -> None:
        self._samples_left = samples
        self._is_worth = is_worth
        self._measure = measure
        self._clock = clock
        self._began: float | None = None
        self._computed = 0
        self._cancellation = Cancellation()
        self._thread: threading.Thread | None = None
        self._found: Findings | None = None
        self._failed: MeasuringFailed | None = None

    def begin(self, *, wait_s: float) -> Findings | MeasuringFailed | None:
        """Begin now, and give what is found if that comes soon; the rest is told later, as by ``found``.

        Args:
            wait_s: The longest to wait.
        """
        self._start().join(wait_s)
        return self.found()

    def observe(self, event: Event) -> None:
        """Take an event of the job's loop, and begin where it is time."""
        match event:
            case EpochStarted():
                self._began, self._computed = self._clock(), 0
            case BatchTaken() if self._thread is None and self._began is not None:
                computed = event.samples - event.from_cache
                self._computed += computed
                self._samples_left -= computed
                self._consider(self._clock() - self._began)
            case _:
                pass

    def found(self) -> Findings | MeasuringFailed | None:
        """What was found since this was asked last; None where nothing was."""
        found, self._found = self._found, None
        if found is None:
            failed, self._failed = self._failed, None
            return failed
        return found

    def close(self) -> None:
        """Give up what is under way."""
        self._cancellation.cancel()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _consider(self, elapsed_s: float) -> None:
        if not self._computed or elapsed_s <= 0 or self._samples_left <= 0:
            return
        samples_per_s = self._computed / elapsed_s
        if self._is_worth(self._samples_left, samples_per_s):
            self._start()

    def _start(self) -> threading.Thread:
        left = self._samples_left
        thread = threading.Thread(target=self._run, args=(left,), name="frostline-measuring", daemon=True)
        self._thread = thread
        thread.start()
        return thread

    def _run(self, samples_left: int) -> None:
        try:
            self._found = self._measure(self._cancellation, samples_left)
        except FrostlineError as error:  # the job goes on as it is
            self._failed = MeasuringFailed(reason=str(error))
