"""Measures in a thread of its own once that pays, keeps what was found for later jobs, and has the job follow it."""

import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from frostline.core.declared import parse_json
from frostline.core.errors import FrostlineError, SettingError, Unavailable, UnknownPrefix
from frostline.core.events import BatchDelivered, EngineChanged, EpochStarted, Event, MeasurementFailed, SetupWarning
from frostline.core.files import FileCache, with_schema, without_schema
from frostline.core.system import __version__
from frostline.jobs.router import Router
from frostline.loaders.fetch import EngineChoice, Fetcher, Shipment
from frostline.planning import Situation, make_plan
from frostline.profiles import Trial
from frostline.transport import Cancellation, Transport

if TYPE_CHECKING:  # of PyTorch, which jobs without a model do without
    from frostline.jobs.context import JobContext

__all__ = (
    "FoundHere",
    "Measure",
    "MeasurementCache",
    "Measurements",
    "Measuring",
    "Shipping",
    "Stage",
    "UploadAhead",
    "doing_after",
    "wait_for_bytes",
)

_FORMAT = 1
# Until the first samples are there, or until it may be that no loop has begun; and between two looks at that.
_FIRST_S, _LOOK_S = 1.0, 0.005
# A link's rate is known from so many bytes. An upload that takes longer has to pay, of which is asked so often.
_TELLING_BYTES, _SHORT_S, _ASK_S = 256 << 10, 10.0, 0.2
_TOO_LONG = (
    "the frozen layers run here: the node lacks their weights, {:.0f} MB, which take {:.0f} s on this link, and the "
    "job is done before; name a network whose weights the node has, or give it a folder of them (serve --weights)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What measuring found.

    Attributes:
        choice: the node's engine.
        situation: situation that a plan is made from; None where the engine alone was looked for, as where both sides
            share their cores, so that no plan gains anything.
    """

    choice: EngineChoice = field(default_factory=EngineChoice)
    situation: Situation | None = None


class MeasurementCache:
    """``Measurements`` as JSON files in a folder. Whatever cannot be read or written there is measured again.

    Args:
        folder: the folder, made when something is kept.
        asked: values that the findings depend on.
    """

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        named = json.dumps({"frostline": __version__, **asked}, sort_keys=True, default=str)
        self._files = FileCache(folder, ".json")
        self._key = hashlib.sha256(named.encode()).hexdigest()[:40]

    def get(self) -> Measurements | None:
        """What was kept."""
        body = self._files.get(self._key)
        if body is None:
            return None
        try:
            value = without_schema(parse_json(body), _FORMAT, "a kept measurement", ("choice", "situation"))
            choice, situation = value["choice"], value["situation"]
            trials = tuple(Trial(**trial) for trial in choice["trials"])
            return Measurements(
                choice=EngineChoice(**{**choice, "trials": trials}),
                situation=None if situation is None else Situation.from_json(situation),
            )
        except (AssertionError, ValueError, LookupError, TypeError, SettingError):
            return None

    def put(self, found: Measurements) -> None:
        """Keep it."""
        situation = None if found.situation is None else found.situation.to_json()
        value = with_schema({"choice": asdict(found.choice), "situation": situation}, _FORMAT)
        self._files.put(self._key, json.dumps(value).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What a job has still to do.

    Attributes:
        samples: number of samples that are still to be computed, as far as it is known.
        samples_per_s: the rate at which they were computed until now; None before the first batch.
    """

    samples: int
    samples_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundHere:
    """What is known once engines were tried at the trainer.

    Attributes:
        samples_per_s: samples a second of the engine that runs, in its trial; 0 if nobody knows.
        speed_up: speed of that engine, times eager torch's, 1 where eager torch is the fastest; None where no other
            one was tried.
    """

    samples_per_s: float = 0.0
    speed_up: float | None = None


Measure = Callable[[Cancellation, Callable[[], Left]], Measurements | None]
"""Measures, unless somebody cancels it; told what is left whenever it asks. None where nothing is to be found."""

_END_S = 10.0


class IsWorth(Protocol):
    """Whether measuring pays."""

    def __call__(self, *, samples_left: int, samples_per_s: float) -> bool:
        """By the samples that are still to be computed, and those a second until now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Something that is measured once.

    Attributes:
        is_worth: True if that pays, by the samples that are left and the samples a second until now.
        measure: function that takes the measurement.
    """

    is_worth: IsWorth
    measure: Measure


class Measuring:
    """Stages, one after another, each begun when batches arrive and what is left of the job is worth it.

    Args:
        samples: number of samples that the job computes in all, as far as it is known. A job that goes on behind these
            is expected to compute as many again as it has.
        stages: measurements, in order.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, *, samples: int, stages: Sequence[Stage], clock: Callable[[], float] = time.monotonic) -> None:
        self._samples_left = samples
        self._stages = deque(stages)
        self._clock = clock
        self._began: float | None = None
        self._elapsed_s = 0.0
        self._computed = self._computed_in_all = 0
        self._cancellation = Cancellation()
        self._thread: threading.Thread | None = None
        self._found: Measurements | None = None
        self._failed: MeasurementFailed | None = None
        self._told: deque[Event] = deque()

    def tell(self, event: Event) -> None:
        """Have the loop's thread tell of something, with its next event. Safe for threads."""
        self._told.append(event)

    def begin(self, *, wait_s: float) -> Measurements | MeasurementFailed | None:
        """Begin the first stage now, and give what it finds if that comes soon; ``take_result`` tells the rest later.

        Args:
            wait_s: The longest to wait.
        """
        self._start(self._stages.popleft()).join(wait_s)
        return self.take_result()

    def on_event(self, event: Event) -> None:
        """Take an event of the job's loop, and begin where it is time."""
        match event:
            case EpochStarted():
                self._began, self._computed = self._clock(), 0
                if self._samples_left <= 0:
                    self._samples_left = self._computed_in_all
            case BatchDelivered() if self._began is not None:
                computed = event.samples - event.from_cache
                self._computed += computed
                self._computed_in_all += computed
                self._samples_left -= computed
                self._elapsed_s = self._clock() - self._began
                if self._stages and (self._thread is None or not self._thread.is_alive()):
                    self._consider()
            case _:
                pass

    def take_result(self) -> Measurements | MeasurementFailed | None:
        """What was found since this was asked last; None where nothing was."""
        found, self._found = self._found, None
        if found is None:
            failed, self._failed = self._failed, None
            return failed
        return found

    def changes(self, event: Event, *, fetcher: Fetcher, router: Router) -> list[Event]:
        """Take an event, have the job use what was found since the last one, and tell what that changes."""
        self.on_event(event)
        told = [self._told.popleft() for _ in range(len(self._told))]
        found = self.take_result()
        if not isinstance(found, Measurements):
            return told if found is None else [*told, found]
        return told + _follow(found, fetcher, router)

    def close(self) -> None:
        """Give up what is under way."""
        self._cancellation.cancel()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _left(self) -> Left:
        known = self._computed > 0 and self._elapsed_s > 0
        return Left(samples=self._samples_left, samples_per_s=self._computed / self._elapsed_s if known else None)

    def _consider(self) -> None:
        left = self._left()
        if left.samples_per_s is None or left.samples <= 0:
            return
        if self._stages[0].is_worth(samples_left=left.samples, samples_per_s=left.samples_per_s):
            self._start(self._stages.popleft())

    def _start(self, stage: Stage) -> threading.Thread:
        self._thread = threading.Thread(target=self._run, args=(stage,), name="frostline-measuring", daemon=True)
        self._thread.start()
        return self._thread

    def _run(self, stage: Stage) -> None:
        try:
            self._found = stage.measure(self._cancellation, self._left)
        except FrostlineError as error:  # the job goes on as it is
            self._failed = MeasurementFailed(reason=str(error))


def _follow(found: Measurements, fetcher: Fetcher, router: Router) -> list[Event]:
    """Use what was found for all that was not asked for yet, and tell what has changed."""
    changes: list[Event] = []
    before, engine = fetcher.engine.choice, found.choice
    fetcher.engine.choice = engine
    fetcher.unfit.clear()
    if engine.engine != before.engine:
        changes.append(
            EngineChanged(
                at_s=router.age_s,
                before=before.engine,
                after=engine.engine,
                error=engine.error,
                samples_per_s=engine.samples_per_s,
            )
        )
    if found.situation is not None:
        replanned = router.begin_plan(found.situation, make_plan(found.situation))
        changes += [] if replanned is None else [replanned]
    return changes


class Shipped(Protocol):
    """The network of a job, of which the frozen part is brought to the nodes; see ``partition.PartitionedModel``."""

    def ship(self, context: "JobContext", before_upload: Callable[[], None]) -> str | None:
        """Bring it there. Returns why it cannot be; None if it is."""

    def lacking_memory(self, context: "JobContext") -> str | None:
        """Find out why the nodes, which have it, have no memory to run it; None where they do."""

    def settle(self, context: "JobContext", find: Callable[[], str | None]) -> str | None:
        """Find out why the nodes do not run it, None where they do, and let those go on who wait for that."""


class Shipping:
    """Brings the frozen part to a node beside the loop, and asks whether it runs there; in a thread of its own.

    Args:
        context: context of the job.
        network: network of the job.
        cancellation: cancellation of the job's work beside its loop.
        first_bytes: bytes of samples that go before an upload; 0 where no loop waits for them yet.
        is_worth: function that says by the seconds of a long upload whether it pays; None as long as nobody knows. What
            does not pay is not sent as long as that is so: a loop may go on for longer than it seemed.
    """

    def __init__(
        self,
        context: "JobContext",
        network: Shipped,
        cancellation: Cancellation,
        *,
        first_bytes: int,
        is_worth: Callable[[float], bool | None],
    ) -> None:
        self._context = context
        self._network = network
        self._cancellation = cancellation
        self._first_bytes = first_bytes
        self._is_worth = is_worth
        self._sent: Future[bool] = Future()
        self._refused: Future[str | None] = Future()
        threading.Thread(target=self._run, name="frostline-shipping", daemon=True).start()

    def is_sent(self) -> bool:
        """Wait until the node has it, or does not get it."""
        return self._sent.result()

    def is_run(self) -> bool:
        """Wait until it is known whether the node runs it."""
        return self._refused.result() is None

    def _run(self) -> None:
        try:
            self._refused.set_result(self._network.settle(self._context, self._ask))
        except FrostlineError as error:
            self._context.asking.on_event(SetupWarning(reason=f"the frozen layers run here: {error}"))
            self._refused.set_result(str(error))
        except BaseException as error:  # noqa: BLE001 -- raised to whoever asks
            self._refused.set_exception(error)
        finally:
            if not self._sent.done():
                self._sent.set_result(False)

    def _ask(self) -> str | None:
        with self._cancellation.ends(self._context.transport.break_off):  # a job that is over sends no weights
            if refused := self._network.ship(self._context, self._let_pass):
                return refused
            self._sent.set_result(True)
            return self._network.lacking_memory(self._context)

    def _let_pass(self) -> None:
        is_judged = self._judge()  # as soon as may be: what has come here may wait for the node until then
        wait_for_bytes(
            self._first_bytes, lambda: self._context.transport.statistics().bytes_received, self._cancellation
        )
        if not is_judged:
            self._judge()

    def _judge(self) -> bool:
        """Wait until an upload that takes long pays, if the link's rate is known; return whether it is."""
        link, shipment = self._context.transport.statistics(), self._context.shipment
        if shipment is None or link.transfer_bytes < _TELLING_BYTES:
            return False
        self._wait_until_worth(len(shipment.artifact), link.transfer_bytes / link.transfer_s)
        return True

    def _wait_until_worth(self, nbytes: int, bytes_per_s: float) -> None:
        """Wait as long as the job is done before its weights would be there, which is told once.

        Raises:
            FrostlineError: The job is over.
        """
        needed_s, is_told, is_over = nbytes / bytes_per_s, False, threading.Event()
        if needed_s <= _SHORT_S:
            return
        with suppress(Unavailable), self._cancellation.ends(is_over.set):
            while not is_over.is_set() and not (pays := self._is_worth(needed_s)):
                if pays is False and not is_told:
                    is_told = True
                    self._context.asking.on_event(SetupWarning(reason=_TOO_LONG.format(nbytes / 1e6, needed_s)))
                is_over.wait(_ASK_S)
        if is_over.is_set():
            raise FrostlineError("the job ended before its weights were sent")


class UploadAhead:
    """Brings a frozen part to the nodes while the network is still compared with it, for a few seconds at most.

    Nodes are asked what they have of it in any case. Weights that would take longer, or nobody can tell how long, are
    left to ``Shipping``, which asks whether they pay. So is what fails here: it is sent again there, and told. If the
    network turns out to be cut elsewhere, it was sent in vain.

    Args:
        transport: way to the job's nodes, on which samples have come by then.
        first_bytes: bytes of samples that are to have come: behind an upload what confirms them would queue.
    """

    def __init__(self, transport: Transport, *, first_bytes: int) -> None:
        self._transport = transport
        self._first_bytes = max(_TELLING_BYTES, first_bytes)
        self._ended: threading.Event | None = None
        self._is_put_off = False

    def begin(self, shipment: Shipment) -> None:
        """Send what nodes lack of it, if that is short."""
        shipment.under_way = self._ended = threading.Event()
        sends = partial(self._send, shipment, self._ended)
        threading.Thread(target=sends, name="frostline-upload-ahead", daemon=True).start()

    def close(self) -> None:
        """Break off what is under way."""
        if self._ended is not None and not self._ended.is_set():
            self._transport.break_off()
            self._ended.wait(_END_S)

    def _send(self, shipment: Shipment, ended: threading.Event) -> None:
        try:
            with suppress(FrostlineError):
                short = partial(self._require_short, len(shipment.artifact))
                self._transport.put_prefix(shipment.digest, shipment.artifact, short)
                shipment.is_there = not self._is_put_off  # by any of several nodes
        finally:
            ended.set()

    def _require_short(self, nbytes: int) -> None:
        """Put an upload off that may take long: the node goes without it, which is nothing wrong with it."""
        seen = self._transport.statistics()
        is_known = seen.transfer_bytes >= _TELLING_BYTES and seen.bytes_received >= self._first_bytes
        if not is_known or nbytes * seen.transfer_s > _SHORT_S * seen.transfer_bytes:
            self._is_put_off = True
            raise UnknownPrefix("its weights are not sent yet")


@contextmanager
def doing_after(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call something in another thread if what is done here takes longer than so many seconds."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def wait_for_bytes(nbytes: int, received: Callable[[], int], cancellation: Cancellation) -> None:
    """Wait for the samples of a first batch: behind an upload what asks for them, and confirms them, would queue.

    A loop that has not begun is not waited for.

    Args:
        nbytes: bytes of these samples.
        received: function that gives the bytes that came in all.
        cancellation: cancellation of the job's work beside its loop, which ends this too.
    """
    wanted, until, is_over = received() + nbytes, time.monotonic() + _FIRST_S, threading.Event()
    with suppress(Unavailable), cancellation.ends(is_over.set):
        while received() < wanted and time.monotonic() < until and not is_over.wait(_LOOK_S):
            pass
