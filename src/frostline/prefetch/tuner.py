"""Shows a rule of tuning what a window does, and gives the window the bounds that the rule answers."""

import threading

from frostline.events import Tuned
from frostline.prefetch.window import Window, WindowStatistics
from frostline.tuning import NewBounds, Observation, Setting, TuningRule

__all__ = ("Tuner",)

# A look takes tens of microseconds; PRISMA's rule wants ten of them in 100 ms.
_MIN_S = 0.01


class Tuner:
    """One rule for all of a job's windows, one after another: what it learned in an epoch holds in the next.

    Of several windows at once the first is looked at; the others take the bounds in force when they begin. Safe for
    several threads.

    Args:
        rule: chooses the bounds.
        now: monotonic seconds when the job was made.
    """

    def __init__(self, rule: TuningRule, now: float) -> None:
        self._rule = rule
        self._born = now
        self._lock = threading.Lock()
        self._window: Window | None = None
        self._took_s: list[float] = []
        self._looked_at = now
        self._stalled_s = 0.0
        self._seen: WindowStatistics | None = None
        self._limit: Setting | None = None
        self._in_force = rule.setting

    def limit(self, limit: Setting) -> None:
        """Bound all windows from their next look on, whatever the rule chooses.

        Args:
            limit: bounds that the job may use, such as a control plane's.
        """
        with self._lock:
            self._limit = limit
            self._decide()

    def begin(self, window: Window, now: float) -> None:
        """Give a window the bounds in force; it is looked at if no other one is."""
        with self._lock:
            self._decide()
            self._bound(window)
            if self._window is None:
                self._window, self._seen = window, window.statistics()
                self._looked_at, self._stalled_s = now, 0.0
                self._took_s.clear()

    def end(self, window: Window) -> None:
        """Look at the window no more. Calling it again does nothing."""
        with self._lock:
            if self._window is window:
                self._window = None

    def took(self, window: Window, seconds: float) -> None:
        """A request was answered whole after so long."""
        with self._lock:
            if self._window is window:
                self._took_s.append(seconds)

    def look(self, window: Window, *, stalled_s: float, now: float) -> Tuned | None:
        """Show the rule what the window did, if the last time is long enough ago.

        Args:
            window: window that was just asked what to ask for.
            stalled_s: seconds that the loop has waited since the window began.
            now: monotonic seconds.

        Returns:
            The change, which is in force already.
        """
        with self._lock:
            if self._limit is not None:  # another window's look, or a limit, may have changed the bounds
                self._bound(window)
            if self._window is not window or now - self._looked_at < _MIN_S:
                return None
            change = self._rule.look(self._seen_now(window, stalled_s, now))
            if change is None:
                return None
            self._decide()
            self._bound(window)
            return self._event(change, now)

    def _decide(self) -> None:
        setting, limit = self._rule.setting, self._limit or self._rule.setting
        self._in_force = Setting(
            requests=min(setting.requests, limit.requests), window_bytes=min(setting.window_bytes, limit.window_bytes)
        )

    def _bound(self, window: Window) -> None:
        window.bound(requests=self._in_force.requests, window_bytes=self._in_force.window_bytes)

    def _seen_now(self, window: Window, stalled_s: float, now: float) -> Observation:
        before, stands = self._seen, window.statistics()
        assert before is not None
        look = Observation(
            now_s=now,
            seconds=now - self._looked_at,
            bytes_arrived=stands.bytes_arrived - before.bytes_arrived,
            bytes_handed_out=stands.bytes_handed_out - before.bytes_handed_out,
            stalled_s=stalled_s - self._stalled_s,
            took_s=tuple(self._took_s),
            failures=stands.retries - before.retries,
            ready_bytes=stands.ready_bytes,
            expected_bytes=stands.expected_bytes,
            requests_in_flight=stands.requests_in_flight,
            requests_allowed=stands.requests_allowed,
            is_full=stands.is_full,
            is_ending=stands.is_ending,
        )
        self._seen, self._looked_at, self._stalled_s = stands, now, stalled_s
        self._took_s.clear()
        return look

    def _event(self, change: NewBounds, now: float) -> Tuned:
        return Tuned(
            at_s=now - self._born,
            requests_before=change.before.requests,
            requests=change.after.requests,
            window_bytes_before=change.before.window_bytes,
            window_bytes=change.after.window_bytes,
            is_trial=change.is_trial,
            reason=change.reason,
        )
