"""What happened, as values. Progress bars, reports, logs and metrics read these and nothing else."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from frostline.core import Route

__all__ = (
    "BatchDelivered",
    "ColumnsDropped",
    "EngineChanged",
    "EpochFinished",
    "EpochStarted",
    "EpochTrained",
    "EpochsChosen",
    "Evaluated",
    "Event",
    "HeadSelected",
    "LayersUnfrozen",
    "MeasurementFailed",
    "NodeBack",
    "NodeExcluded",
    "NodeFull",
    "NodeJoined",
    "NodeLeft",
    "NodeLost",
    "NodeRestarted",
    "Observer",
    "PhaseStarted",
    "ProgressMade",
    "Replanned",
    "RequestFinished",
    "RequestHedged",
    "RequestRetried",
    "RowsNotFinite",
    "RunResumed",
    "SampleSkipped",
    "SamplesLeftOut",
    "SetupWarning",
    "SplitsChosen",
    "StepFinished",
    "Tuned",
    "WaitingForRows",
    "WeightsLoaded",
    "event_name",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStarted:
    """A loader starts to hand out the samples of one epoch."""

    epoch: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDelivered:
    """The training loop took a batch after waiting ``stall_s`` seconds for it."""

    epoch: int
    samples: int
    from_cache: int
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingForRows:
    """The training loop waits for its next rows; said once a second while it does."""

    requests_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request was answered completely, ``seconds`` after it was sent, with ``payload_bytes`` of features."""

    samples: int
    payload_bytes: int
    seconds: float
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHedged:
    """A request took longer than nearly all earlier ones and was sent again; the first answer counts."""

    samples: int
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRetried:
    """A request failed and will be sent again after ``delay_s`` seconds."""

    samples: int
    attempt: int
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The plan changed: samples that were not requested yet take other cuts or codecs from now on.

    Attributes:
        at_s: seconds since the job was made.
        samples: the samples, asked for before.
        before: the mixture until now, in words.
        after: the mixture from now on.
        reason: measurement behind it, and what the change should gain.
    """

    at_s: float
    samples: int
    before: str
    after: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChanged:
    """The node runs the frozen layers with another engine, for samples that were not requested yet.

    Attributes:
        at_s: seconds since the job was made.
        before: name of the engine until now.
        after: the value from now on.
        error: the largest relative error against the reference, on samples of the job.
        samples_per_s: the rate by its trial, alone on the node; None where it is not known.
    """

    at_s: float
    before: str
    after: str
    error: float
    samples_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementFailed:
    """The measurements for a plan or an engine failed; the job continues as it began."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The limits of a loader's window changed; samples and their order stay the same.

    Attributes:
        at_s: seconds since the job was made.
        requests_before: the most requests under way that were kept until now.
        requests: the requests from now on.
        window_bytes_before: the most bytes asked for and not handed out until now.
        window_bytes: the bytes from now on.
        is_trial: True if they are only tried; another event says what came of it.
        reason: measurement behind it.
    """

    at_s: float
    requests_before: int
    requests: int
    window_bytes_before: int
    window_bytes: int
    is_trial: bool
    reason: str

    @property
    def is_kept(self) -> bool:
        """Whether this is a change that lasts: neither a trial, nor the way back from one."""
        before = self.requests_before, self.window_bytes_before
        return not self.is_trial and before != (self.requests, self.window_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsDropped:
    """A copy of the data set at ``url`` cannot hold these metadata columns; said before it is written."""

    url: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSkipped:
    """A sample could not be read, or ``changed`` since it was listed; this job leaves it out from now on."""

    id: int
    object: str
    reason: str
    changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsNotFinite:
    """Frozen layers gave rows with Inf or NaN, which ``allow_nonfinite`` permits.

    Attributes:
        rows: number of those that came together.
        total: number of all so far, by the count of the process that tells it; equal to ``rows`` for the first.
        first: the first row with Inf or NaN, in words: its sample, frost line, dtype and engine.
    """

    rows: int
    total: int
    first: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesLeftOut:
    """A listing or a pass left out ``count`` objects or rows for one reason; said once each.

    Attributes:
        count: number of them.
        reason: one line: what they are, why, and the first names.
    """

    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitsChosen:
    """A run trains on one split and scores another; None if a part is a share of the samples, or all of them."""

    train: str | None
    train_samples: int
    held_out: str | None
    held_out_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFinished:
    """A pass over an epoch ended, complete or early: ``samples`` handed out, ``from_cache`` of them from a cache."""

    epoch: int
    samples: int
    from_cache: int
    seconds: float
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    """A job begins work that takes a while outside of epochs, such as tracing the network."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMade:
    """A phase has done ``done`` of ``total`` units, such as rows written; ``total`` is 0 if it is unknown."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """The optimiser took step ``step`` of the ``steps`` of the whole run; ``steps`` is 0 if it is unknown."""

    epoch: int
    step: int
    steps: int
    samples: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTrained:
    """All steps of an epoch were taken; ``loss`` is their mean."""

    epoch: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The held-out samples were scored after an epoch.

    Attributes:
        epoch: number of the epoch.
        samples: number of samples that were scored.
        loss: mean loss of the samples.
        scores: metrics of the samples by their names, the first of them the main one (``core.units.METRICS``).
    """

    epoch: int
    samples: int
    loss: float
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochsChosen:
    """A training without a given number of epochs begins; it makes at most this many, for a ``reason`` in words."""

    epochs: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """An interrupted run continues after its last saved step, in the epoch of that number."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSelected:
    """Training ended with the head of ``epoch``, whose held-out loss was the lowest of these ``epochs``."""

    epoch: int
    epochs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersUnfrozen:
    """Further layers are trained from an epoch on (counted from 0), which moves the frost line."""

    epoch: int
    layers: str
    frost_line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFull:
    """A node accepts no more requests now; a job that begins asks it again after ``delay_s`` seconds."""

    attempt: int
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A new node takes part in a running job; it was sent the frozen layers that the others have."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """A node takes no part in a job any more, for the given reason; other nodes own its blocks."""

    url: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node gets no requests for now, for the given reason: it is silent, unreachable, or refuses.

    The only node of a job is waited for instead.
    """

    url: str
    reason: str
    is_only: bool = False

    @property
    def sentence(self) -> str:
        """What a user is told."""
        return f"{self.url} is {'waited for' if self.is_only else 'asked nothing for now'}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBack:
    """A node that was lost answers again."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExcluded:
    """A node gets no more requests for features, because it cannot run the job's engine."""

    url: str
    engine: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRestarted:
    """The job's own node died and was started again at the same address."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupWarning:
    """A job differs from what was likely meant: another frost line, frozen layers at the trainer, or mixed splits."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """A network was built; ``source`` says where its weights came from."""

    model: str
    source: str


Event = (
    BatchDelivered
    | ColumnsDropped
    | ProgressMade
    | EngineChanged
    | EpochFinished
    | EpochStarted
    | EpochTrained
    | EpochsChosen
    | Evaluated
    | HeadSelected
    | LayersUnfrozen
    | MeasurementFailed
    | NodeFull
    | NodeJoined
    | NodeLeft
    | NodeLost
    | NodeBack
    | NodeExcluded
    | NodeRestarted
    | SetupWarning
    | PhaseStarted
    | Replanned
    | RequestFinished
    | RequestHedged
    | RequestRetried
    | RunResumed
    | RowsNotFinite
    | SampleSkipped
    | SamplesLeftOut
    | SplitsChosen
    | StepFinished
    | Tuned
    | WaitingForRows
    | WeightsLoaded
)
Observer = Callable[[Event], None]


def event_name(event: Event) -> str:
    """The name of an event's kind in logs and traces: ``"epoch_finished"`` of ``EpochFinished``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
