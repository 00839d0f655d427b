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
    """A request was answered whole, ``seconds`` after it was sent; ``payload_bytes`` are those at the frost line."""

    samples: int
    payload_bytes: int
    seconds: float
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHedged:
    """A request is later than nearly all before it, and is made a second time; the first answer is taken."""

    samples: int
    route: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRetried:
    """A request failed and is made again after ``delay_s`` seconds."""

    samples: int
    attempt: int
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """Samples that were not asked for yet take other ways from now on.

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
    """The node runs the frozen layers by another engine from now on, for samples that were not asked for yet.

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
    """The job could not measure what its plan and its engine could be chosen by, and goes on as it began."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The window of a loader has other bounds from now on; samples and their order stay as they are.

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
    """What is made of a data set at ``url`` has no place for these metadata columns; said before it is begun."""

    url: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSkipped:
    """A sample could not be read, or ``changed`` since it was listed; it is left out of this job from now on."""

    id: int
    object: str
    reason: str
    changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsNotFinite:
    """Rows with Inf or NaN came out of the frozen layers, which ``allow_nonfinite`` lets pass.

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
    """Of a data set that was listed, or of a pass that ended, ``count`` objects or rows are left out; once each.

    Attributes:
        count: number of them.
        reason: one line: what they are, why, and the first names.
    """

    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitsChosen:
    """Which split a run trains on and which it scores; None where a side is a share, or all, of what is there."""

    train: str | None
    train_samples: int
    held_out: str | None
    held_out_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFinished:
    """A pass over an epoch ended, whole or early: ``samples`` handed out, ``from_cache`` of them not fetched again."""

    epoch: int
    samples: int
    from_cache: int
    seconds: float
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    """A job begins something that takes a while before or between epochs, such as tracing the network."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMade:
    """So many of a phase's things are done, such as rows written; ``total`` is 0 where nobody knows it."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """The optimiser took a step: number ``step`` of the ``steps`` that the whole run has; 0 where nobody knows yet."""

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
    """A training begins that nobody told how many epochs it has: so many at most, for a ``reason`` in words."""

    epochs: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed:
    """A run that was broken off goes on after so many steps, with the epoch of that number."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSelected:
    """Training ended, and the head is that of ``epoch``, whose held-out loss was the lowest of these ``epochs``."""

    epoch: int
    epochs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersUnfrozen:
    """Further layers are trained from an epoch on, counted from 0, and the frost line lies at another place."""

    epoch: int
    layers: str
    frost_line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFull:
    """A node takes nothing more just now, and a job that begins asks it again after ``delay_s`` seconds."""

    attempt: int
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """Another node takes part in a job that runs; it has what the others were given."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """A node takes part in a job no more, and why; others own its blocks."""

    url: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """One of several nodes is asked nothing for now, and why: it is silent, cannot be reached, or refuses."""

    url: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBack:
    """A node that was lost answers again."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeExcluded:
    """One of several nodes gets no more of the work that an engine does, since it cannot run that engine."""

    url: str
    engine: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRestarted:
    """The job's own node had died and was started again at the same address."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupWarning:
    """A job is not what was likely meant: another frost line, frozen layers that run elsewhere, or splits mixed."""

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
