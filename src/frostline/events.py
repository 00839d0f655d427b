"""What happened, as values. Progress bars, reports, logs and metrics read these and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = (
    "BatchTaken",
    "Counted",
    "EpochFinished",
    "EpochStarted",
    "Evaluated",
    "Event",
    "NodeRestarted",
    "Observer",
    "PhaseStarted",
    "RequestFinished",
    "RequestRetried",
    "SampleSkipped",
    "StepFinished",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStarted:
    """A loader starts to hand out the samples of one epoch."""

    epoch: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """The training loop took a batch after waiting ``stall_s`` seconds for it."""

    epoch: int
    samples: int
    from_cache: int
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request was answered whole, ``seconds`` after it was sent."""

    samples: int
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRetried:
    """A request failed and is made again after ``delay_s`` seconds."""

    samples: int
    attempt: int
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSkipped:
    """A sample could not be read; it is left out of this job from now on."""

    id: int
    object: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFinished:
    """A pass over an epoch ended: whole, or left early with ``samples`` handed out."""

    epoch: int
    samples: int
    seconds: float
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    """A job begins something that takes a while before or between epochs, such as tracing the network."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """So many of a phase's things are done, such as photographs made or rows written."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """The optimiser took a step: number ``step`` of the ``steps`` that the whole run has."""

    epoch: int
    step: int
    steps: int
    samples: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The held-out samples were scored after an epoch."""

    epoch: int
    samples: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRestarted:
    """The job's own node had died and was started again at the same address."""

    url: str


Event = (
    BatchTaken
    | Counted
    | EpochFinished
    | EpochStarted
    | Evaluated
    | NodeRestarted
    | PhaseStarted
    | RequestFinished
    | RequestRetried
    | SampleSkipped
    | StepFinished
)
Observer = Callable[[Event], None]
