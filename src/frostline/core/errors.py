"""Every exception of Frostline, the tree drawn on top.

FrostlineError
├── UserError                 the caller can put it right; a verb exits with 2
│   ├── SettingError          a setting, flag or argument does not make sense
│   ├── DataError             the data set cannot be used as it is
│   │   ├── DataChanged       objects are not what they were when they were listed, and the job refuses that
│   │   ├── DataNotFound      nothing at that URL, or nothing that can be read
│   │   ├── EmptyDataset      a place without one labelled sample
│   │   └── TooManySkipped    more unreadable samples than the job allows
│   ├── ModelError            the network cannot be used as it is
│   │   ├── UnknownModel      no such model; carries the nearest names
│   │   ├── UnknownLayer      no such layer; carries the nearest names
│   │   ├── WeightsMismatch   a weights file that does not fit the network
│   │   ├── WeightsMissing    no pretrained weights on this machine, and none to be fetched
│   │   ├── NotTraceable      no graph can say what the network does
│   │   ├── NothingFrozen     no computation stands before the first trainable layer
│   │   ├── NetworkChanged    frozen layers are not what they were when the job was made
│   │   ├── FrozenInTrainMode a frozen layer would behave differently in train mode
│   │   └── NotFinite         the frozen layers gave Inf or NaN for a sample, and the job does not allow that
│   ├── OrderMismatch         a saved state, or another rank, follows another order of samples
│   ├── AddressInUse          the port is taken
│   └── OutOfSpace            the disk is full
├── StoreError                the store did not give the bytes
│   ├── ObjectNotFound        no such object
│   ├── AccessDenied          the store refused the credentials
│   └── StoreUnavailable      worth trying again
│       └── StoreThrottled    it has more requests than it takes; carries how long to wait
├── SampleError               one sample cannot be decoded; it is counted and skipped
├── Refused                   the node will not do this, however often it is asked
│   ├── BadRequest            the request does not make sense
│   ├── Unauthenticated       the node does not know who asks
│   ├── Untrusted             one side has no certificate that the other one trusts
│   ├── Forbidden             this node does not do that: its operator has to allow it
│   ├── UnknownName           there is no tenant or job of that name
│   ├── UnknownTraining       the node holds no such training, or nothing of it
│   ├── UnknownPrefix         the node does not hold this prefix: upload it
│   ├── EngineNotReady        the node has not made this engine ready: have it profiled
│   ├── UnsafeArtifact        a prefix that is malformed, or names what is not allowed
│   ├── EngineUnsupported     this engine cannot run the prefix; the reference engine can
│   └── OverBudget            it cannot fit the node's memory budget
└── Unavailable               worth trying again
    ├── NodeUnreachable       no connection, or it broke
    │   └── AnswerDamaged     what came is not what the node sent
    └── Overloaded            the node is busy; carries how long to wait
"""

from frostline.core.units import printable

__all__ = (
    "AccessDenied",
    "AddressInUse",
    "AnswerDamaged",
    "BadRequest",
    "DataChanged",
    "DataError",
    "DataNotFound",
    "EmptyDataset",
    "EngineNotReady",
    "EngineUnsupported",
    "Forbidden",
    "FrostlineError",
    "FrozenInTrainMode",
    "ModelError",
    "NetworkChanged",
    "NodeUnreachable",
    "NotFinite",
    "NotTraceable",
    "NothingFrozen",
    "ObjectNotFound",
    "OrderMismatch",
    "OutOfSpace",
    "OverBudget",
    "Overloaded",
    "Refused",
    "SampleError",
    "SettingError",
    "StoreError",
    "StoreThrottled",
    "StoreUnavailable",
    "TooManySkipped",
    "Unauthenticated",
    "Unavailable",
    "UnknownLayer",
    "UnknownModel",
    "UnknownName",
    "UnknownPrefix",
    "UnknownTraining",
    "UnsafeArtifact",
    "Untrusted",
    "UserError",
    "WeightsMismatch",
    "WeightsMissing",
)


class FrostlineError(Exception):
    """The root: its message is one sentence that a user can act on.

    Its text is printable, whatever names or words of others the sentence has.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(FrostlineError):
    """The user can correct the cause; a command prints the message and exits with 2."""


class SettingError(UserError):
    """A setting, flag or argument does not make sense; the message names it."""


class DataError(UserError):
    """The data set cannot be used as it is."""


class DataChanged(DataError):
    """Objects have changed since they were listed, and the job is set to refuse that; the message names them."""


class DataNotFound(DataError):
    """Nothing is at that URL, or nothing there can be read."""


class EmptyDataset(DataError):
    """The folder or bucket exists, but has no labelled sample."""


class TooManySkipped(DataError):
    """More samples were unreadable than ``max_skipped_fraction`` allows."""


class ModelError(UserError):
    """The network cannot be used as it is."""


class UnknownModel(ModelError):
    """No model of that name; the message carries the nearest names."""


class UnknownLayer(ModelError):
    """No layer of that name; the message carries the nearest names."""


class WeightsMismatch(ModelError):
    """A weights file does not fit the network."""


class WeightsMissing(ModelError):
    """The pretrained weights are not on this machine and cannot be fetched; the message names the file to bring."""


class NotTraceable(ModelError):
    """The network cannot be traced: it decides by values, or uses an operation that a graph cannot hold."""


class NothingFrozen(ModelError):
    """No operation comes before the first trainable layer, so nothing can run beside the data."""


class NetworkChanged(ModelError):
    """The network is not what it was when its job was made; the message names the first change and what to do."""


class FrozenInTrainMode(ModelError):
    """A frozen layer would behave differently in train mode (BatchNorm, dropout)."""


class NotFinite(ModelError):
    """The frozen layers gave Inf or NaN for a sample; the message names the sample, the place and the setting."""


class OrderMismatch(UserError):
    """A saved state or another rank has another order of samples than this loader; the message says in what."""


class AddressInUse(UserError):
    """The address to listen on is taken."""


class OutOfSpace(UserError):
    """The disk is full; nothing half-written was left behind."""


class StoreError(FrostlineError):
    """The store did not return the bytes."""


class ObjectNotFound(StoreError):
    """The store has no such object."""


class AccessDenied(StoreError):
    """The store refused the credentials."""


class StoreUnavailable(StoreError):
    """The store did not answer or was too busy; trying again may help."""


class StoreThrottled(StoreUnavailable):
    """The store gets too many requests; ``retry_after_s`` is the time to wait, 0 if the store did not say."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SampleError(FrostlineError):
    """One sample cannot be decoded; it is counted, listed and skipped."""


class Refused(FrostlineError):
    """The node refuses the request, and trying again does not help."""


class BadRequest(Refused):
    """The request does not make sense; the message names the field."""


class Unauthenticated(Refused):
    """The request carries no token, or one that the node does not know."""


class Untrusted(Refused):
    """One side of a connection has no certificate that the other side trusts; the message says which, and why."""


class Forbidden(Refused):
    """This node does not allow that; the message names the setting with which its operator can."""


class UnknownName(Refused):
    """There is no tenant or job of that name."""


class UnknownTraining(Refused):
    """The node holds no training of that name, or no result of it."""


class UnknownPrefix(Refused):
    """The node does not hold these frozen layers: upload them and ask again."""


class EngineNotReady(Refused):
    """The node has not prepared this engine for these frozen layers and cut: profile them and ask again."""


class UnsafeArtifact(Refused):
    """Uploaded frozen layers are malformed, or use an operator that is not allowed."""


class EngineUnsupported(Refused):
    """This engine is not installed or cannot run these frozen layers; the reference engine can."""


class OverBudget(Refused):
    """The work can never fit the node's memory budget."""


class Unavailable(FrostlineError):
    """The request failed for now; trying again after a while may help."""


class NodeUnreachable(Unavailable):
    """There is no connection to the node, or it broke during an answer."""


class AnswerDamaged(NodeUnreachable):
    """An answer differs from what the node sent: its checksum is wrong, or it makes no sense."""


class Overloaded(Unavailable):
    """The node refused the request before any work; ``retry_after_s`` is the time to wait."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
