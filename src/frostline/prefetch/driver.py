"""Runs the window against a fetch function on a few threads, hands out its rows, and tunes its bounds."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Self

from frostline.core import FeatureBatch
from frostline.core.errors import StoreUnavailable, Unavailable
from frostline.core.events import Event, Observer, RequestFinished, RequestHedged, SampleSkipped, Tuned, WaitingForRows
from frostline.core.system import in_background
from frostline.prefetch.requests import Ask, Delivery
from frostline.prefetch.window import Window, WindowStatistics
from frostline.tuning import NewBounds, Observation, Setting, TuningRule

__all__ = (
    "Fetch",
    "Prefetcher",
    "Tuner",
)


# A look takes tens of microseconds; PRISMA's rule wants ten of them in 100 ms.
_MIN_S = 0.01


class Tuner:
    """One rule for all of a job's windows, one after another: what it learned in an epoch holds in the next.

    Of several windows at once the first is looked at; the others take the bounds in force when they begin. Safe for
    several threads.

    Args:
        rule: rule that chooses the bounds.
        now: seconds of a monotonic clock when the job was made.
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

    def record_request(self, window: Window, seconds: float) -> None:
        """A request was answered whole after so long."""
        with self._lock:
            if self._window is window:
                self._took_s.append(seconds)

    def look(self, window: Window, *, stalled_s: float, now: float) -> Tuned | None:
        """Show the rule what the window did, if the last time is long enough ago.

        Args:
            window: window that was just asked what to ask for.
            stalled_s: seconds that the loop has waited since the window began.
            now: seconds of a monotonic clock.

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


_THREADS = "frostline-prefetch"
# Observers of a loop that waits for long may want to know before rows arrive.
_WAIT_S = 1.0

Fetch = Callable[[Ask], Iterator[FeatureBatch]]


class Prefetcher:
    """An iterator over the window's deliveries; use it as a context manager, in one thread.

    Or ``listen``, and take what may be handed out on the threads on which rows arrive: ``take_ready``.

    Requests go out from the moment it is entered, and go on while the consumer computes. Nothing polls: threads
    wait for an arrival, or until the time that the window names. An attempt that the window gives up is closed.
    Where ``fetch`` raises ``Unavailable`` or ``StoreUnavailable`` the window decides; anything else reaches the
    consumer at once.

    Closing abandons what is under way and joins the threads. ``close()`` is called on each answer from the closing
    thread; an answer whose ``close`` is safe there frees a thread that is blocked in its ``next``. A plain generator
    cannot be closed while it runs: closing waits for its read, at the longest for its transport's deadline.

    Args:
        window: window that says what to ask and what to hand out; the prefetcher's alone from now on.
        fetch: function that makes one request, usually ``Transport.features``; called from several threads. An answer
            may have a method ``when_received``: it gets a function to call once all has come of which it makes its
            rows.
        threads: the most requests under way at once, whatever the tuner chooses; each is made when it is first needed.
        clock: seconds of a monotonic clock.
        on_event: function that is called with each event, in the thread of who iterates; whoever listens finds it in
            ``happened``.
        tuner: tuner that gives the window other bounds while it runs; None leaves them.

    Attributes:
        happened: events for ``on_event``; None where something else may have changed, such as the end.
    """

    def __init__(
        self,
        window: Window,
        fetch: Fetch,
        *,
        threads: int,
        clock: Callable[[], float],
        on_event: Observer,
        tuner: Tuner | None = None,
    ) -> None:
        self._window = window
        self._tuner = tuner
        self._fetch = fetch
        self._clock = clock
        self._on_event = on_event
        # One more, to wait until a time; and where each request was made twice, one reads its loser, one ends that.
        self._pool = ThreadPoolExecutor(3 * threads + 1, _THREADS, in_background)
        # The consumer takes a bare lock and waits on a queue: both are whole in C, so that an interrupt in its thread
        # cannot leave the lock held, as it can between the lines of Condition.
        self._lock = threading.RLock()  # guards the window and all below
        self._changed = threading.Condition(self._lock)
        self.happened: SimpleQueue[Event | None] = SimpleQueue()
        self._listener: Callable[[], None] | None = None
        self._answers: dict[int, Iterator[FeatureBatch]] = {}
        self._failure: BaseException | None = None
        self._is_closed = False
        self._waits_until: float | None = None
        self._given_up: set[int] = set()
        self._stalled_s = 0.0
        self._stalled_since: float | None = None

    def __enter__(self) -> Self:
        try:
            with self._lock:
                if self._tuner is not None:
                    self._tuner.begin(self._window, self._clock())
                self._ask()
        except BaseException:  # an interrupt between the first request and the with block
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delivery:
        try:
            while (delivery := self.take()) is None:
                if self.is_done:
                    raise StopIteration
                self.stall_begins()
                self._tell(self.next_event())
        finally:
            self.stall_ends()
            while not self.happened.empty():
                self._tell(self.happened.get())
        return delivery

    @property
    def is_done(self) -> bool:
        """All was taken, and no request is under way. Safe from any thread."""
        with self._lock:
            return self._window.is_done

    @property
    def bytes_taken(self) -> int:
        """So far. Safe from any thread."""
        return self._window.bytes_taken

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have a function called on the thread on which rows arrived, each time; None calls none."""
        self._listener = listener

    def take_ready(self) -> Iterator[Delivery | None]:
        """What may be handed out, to its end; None where nothing may be now. Waits for nothing; for any thread."""
        while (delivery := self.take()) is not None or not self.is_done:
            yield delivery

    def hold_after(self, bytes_taken: int | None) -> None:
        """See ``Window.hold_after``; what then fits is asked for when something is taken. Safe from any thread."""
        with self._lock:
            self._window.hold_after(bytes_taken)

    def close(self) -> None:
        """Abandon what is under way and join the threads. Calling it again does nothing."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            answers = list(self._answers.values())
        for answer in answers:
            _close(answer)
        # A pass that was dropped in a cycle is closed by the garbage collector, which may run in such a thread itself.
        self._pool.shutdown(wait=not threading.current_thread().name.startswith(_THREADS), cancel_futures=True)
        if self._tuner is not None:
            self._tuner.end(self._window)

    def statistics(self) -> WindowStatistics:
        """Where the window stands. Safe from any thread."""
        with self._lock:
            return self._window.statistics()

    def take(self) -> Delivery | None:
        """What may be handed out now. Safe from any thread.

        Raises:
            FrostlineError: Error of the window or of ``fetch``.
            ValueError: the prefetcher is closed.
        """
        with self._lock:
            if self._is_closed:
                raise ValueError("the prefetcher is closed")
            if self._failure is not None:
                raise self._failure
            delivery = self._window.take()
            self._ask()  # what was taken freed a part of the window
        if delivery is not None:
            for lost in delivery.batch.skipped:
                skipped = SampleSkipped(id=lost.id, object=lost.object, reason=lost.reason, changed=lost.changed)
                self.happened.put(skipped)
        return delivery

    def stall_begins(self) -> None:
        """The training loop waits for rows to arrive from now on. Safe from any thread."""
        with self._lock:
            if self._stalled_since is None:
                self._stalled_since = self._clock()

    def stall_ends(self) -> None:
        """Note that the loop has what it waited for, or waits for something else. Safe from any thread."""
        with self._lock:
            if self._stalled_since is not None:
                self._stalled_s += self._clock() - self._stalled_since
                self._stalled_since = None

    def next_event(self) -> Event | None:
        """Wait for what happens next."""
        try:
            return self.happened.get(timeout=_WAIT_S)
        except Empty:
            return WaitingForRows(requests_in_flight=self.statistics().requests_in_flight)

    def _tell(self, event: Event | None) -> None:
        if event is not None:
            self._on_event(event)

    def _ask(self) -> None:
        if self._is_closed or self._failure:
            return
        self._send()
        if self._tuner is None:
            return
        now = self._clock()
        stalled_s = self._stalled_s + (0.0 if self._stalled_since is None else now - self._stalled_since)
        tuned = self._tuner.look(self._window, stalled_s=stalled_s, now=now)
        if tuned is not None:
            self.happened.put(tuned)
            self._send()

    def _send(self) -> None:
        for ask in self._window.asks(self._clock()):
            if ask.is_hedge:
                self.happened.put(RequestHedged(samples=len(ask.samples), route=ask.route))
            self._pool.submit(self._answer, ask).add_done_callback(self._ended)
        wakeup = self._window.next_wakeup()
        if wakeup is None:
            return
        if self._waits_until is None:
            self._waits_until = wakeup
            self._pool.submit(self._wait).add_done_callback(self._ended)
        elif wakeup < self._waits_until:
            self._changed.notify_all()

    def _wait(self) -> None:
        """Ask at the times that the window names."""
        with self._lock:
            while not (self._is_closed or self._failure) and (wakeup := self._window.next_wakeup()) is not None:
                self._waits_until = wakeup
                if self._changed.wait(wakeup - self._clock()):
                    continue
                self._ask()
            self._waits_until = None

    def _answer(self, ask: Ask) -> None:
        """Make one request and tell the window what came of it."""
        started = self._clock()
        try:
            payload_bytes = self._receive(ask)
        except (Unavailable, StoreUnavailable) as reason:
            with self._lock:
                left = self._go_on(self._window.fail(ask, reason, self._clock()))
        else:
            with self._lock:
                now = self._clock()
                happened: Event | None = self._window.finish(ask, now)
                if happened is None and ask.number not in self._given_up:
                    self._took(ask, now - started)
                    happened = RequestFinished(
                        samples=len(ask.samples), payload_bytes=payload_bytes, seconds=now - started, route=ask.route
                    )
                left = self._go_on(happened)
        # Ending an answer may wait for a read that is under way. Nobody else waits for that.
        for answer in left:
            _close(answer)

    def _took(self, ask: Ask, seconds: float) -> None:
        if self._tuner is not None and ask.attempt == 1:
            self._tuner.record_request(self._window, seconds)

    def _go_on(self, happened: Event | None) -> list[Iterator[FeatureBatch]]:
        """Ask for what may be asked for now.

        Returns:
            Answers that were given up, to be closed.
        """
        if happened is not None:
            self.happened.put(happened)
        given_up = self._window.take_abandoned()
        self._given_up.update(given_up)
        self._ask()
        return [self._answers[number] for number in given_up if number in self._answers]

    def _receive(self, ask: Ask) -> int:
        answer = self._fetch(ask)
        with self._lock:
            self._answers[ask.number] = answer
        if (when_received := getattr(answer, "when_received", None)) is not None:
            when_received(partial(self._received, ask))
        payload_bytes = 0
        try:
            while not self._is_over(ask) and (batch := next(answer, None)) is not None:
                payload_bytes += batch.nbytes
                with self._lock:
                    self._window.take_rows(ask, batch)
                if (listener := self._listener) is None:
                    self.happened.put(None)
                else:
                    listener()
        finally:
            with self._lock:
                del self._answers[ask.number]
            _close(answer)
        return payload_bytes

    def _received(self, ask: Ask) -> None:
        with self._lock:
            self._window.mark_received(ask, self._clock())
            self._ask()

    def _is_over(self, ask: Ask) -> bool:
        return self._is_closed or ask.number in self._given_up

    def _ended(self, future: Future[None]) -> None:
        """Pass on what the window does not decide, and wake the consumer."""
        with self._lock:
            if not future.cancelled() and self._failure is None:
                self._failure = future.exception()
            self._changed.notify_all()
        self.happened.put(None)


def _close(answer: Iterator[FeatureBatch]) -> None:
    close = getattr(answer, "close", None)  # an iterator need not have one
    if close is None:
        return
    try:
        close()
    except ValueError:  # a generator that is running in another thread: that thread closes it
        return
