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
│   ├── Unauthenticated          the node does not know who asks
│   ├── Untrusted             one side has no certificate that the other one trusts
│   ├── Forbidden            this node does not do that: its operator has to allow it
│   ├── UnknownName           there is no tenant or job of that name
│   ├── UnknownTraining       the node holds no such training, or nothing of it
│   ├── UnknownPrefix         the node does not hold this prefix: upload it
│   ├── EngineNotReady        the node has not made this engine ready: have it profiled
│   ├── UnsafeArtifact        a prefix that is malformed, or names what is not allowed
│   ├── EngineUnsupported           this engine cannot run the prefix; the reference engine can
│   └── OverBudget            it cannot fit the node's memory budget
└── Unavailable               worth trying again
    ├── NodeUnreachable       no connection, or it broke
    │   └── AnswerDamaged     what came is not what the node sent
    └── Overloaded            the node is busy; carries how long to wait
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

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
    "add_hints",
    "hint_for",
    "suggest_names",
    "synonym",
)


class FrostlineError(Exception):
    """The root: its message is one sentence that a user can act on.

    Its text is printable, whatever names or words of others the sentence has.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(FrostlineError):
    """The caller can put it right; a verb prints the sentence and exits with 2."""


class SettingError(UserError):
    """A setting, flag or argument does not make sense; the message names it."""


class DataError(UserError):
    """The data set cannot be used as it is."""


class DataChanged(DataError):
    """Objects are not what they were when they were listed, and whoever asked refuses that; the message names them."""


class DataNotFound(DataError):
    """Nothing is at that URL, or nothing that can be read."""


class EmptyDataset(DataError):
    """The place exists and holds not one labelled sample."""


class TooManySkipped(DataError):
    """More samples were unreadable than the job's allowance."""


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
    """No graph can say what the network does: it decides by values, or uses what Frostline cannot carry."""


class NothingFrozen(ModelError):
    """No computation stands before the first trainable layer, so nothing can run beside the data."""


class NetworkChanged(ModelError):
    """The network is not what it was when its job was made; the message names the first change and what to do."""


class FrozenInTrainMode(ModelError):
    """A frozen layer would behave differently in train mode (BatchNorm, dropout)."""


class NotFinite(ModelError):
    """The frozen layers gave Inf or NaN for a sample; the message names it, where it came from, and the setting."""


class OrderMismatch(UserError):
    """A saved state, or another rank, follows another order of samples than this loader; the message says in what."""


class AddressInUse(UserError):
    """The address to listen on is taken."""


class OutOfSpace(UserError):
    """The disk is full; nothing half-written was left behind."""


class StoreError(FrostlineError):
    """The store did not give the bytes."""


class ObjectNotFound(StoreError):
    """The store has no such object."""


class AccessDenied(StoreError):
    """The store refused the credentials."""


class StoreUnavailable(StoreError):
    """The store did not answer, or was too busy: worth trying again."""


class StoreThrottled(StoreUnavailable):
    """The store has more requests than it takes; ``retry_after_s`` says how long to wait; 0 where it did not say."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SampleError(FrostlineError):
    """One sample cannot be decoded; it is counted, listed and skipped."""


class Refused(FrostlineError):
    """The node will not do this, however often it is asked."""


class BadRequest(Refused):
    """The request does not make sense; the message names the field."""


class Unauthenticated(Refused):
    """The node does not know who asks: no token came, or one that it does not know."""


class Untrusted(Refused):
    """One side of a connection has no certificate that the other one trusts; the message says whose, and why."""


class Forbidden(Refused):
    """This node does not do that; the message names the setting with which its operator allows it."""


class UnknownName(Refused):
    """There is no tenant or job of that name."""


class UnknownTraining(Refused):
    """The node holds no training of that name, or nothing that it left."""


class UnknownPrefix(Refused):
    """The node does not hold this prefix: upload it and ask again."""


class EngineNotReady(Refused):
    """The node has not made this engine ready for the prefix and cut: have them profiled and ask again."""


class UnsafeArtifact(Refused):
    """A prefix that is malformed, or names an operator that is not allowed."""


class EngineUnsupported(Refused):
    """This engine is not there, or cannot run the prefix; the reference engine can."""


class OverBudget(Refused):
    """The work cannot fit the node's memory budget, whatever it waits for."""


class Unavailable(FrostlineError):
    """Worth trying again after a while."""


class NodeUnreachable(Unavailable):
    """No connection to the node, or it broke in the middle of an answer."""


class AnswerDamaged(NodeUnreachable):
    """What came of an answer is not what the node sent: its checksum differs, or it makes no sense."""


class Overloaded(Unavailable):
    """The node refused the request before any work; ``retry_after_s`` says how long to wait."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


# The field's own words, by the first of our names that the function or table in question knows.
_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("address", "endpoint", "node_address", "node_url", "nodes", "server"), ("near",)),
    **dict.fromkeys(("freeze_to", "freeze_until", "frozen_until", "layer", "layers"), ("until", "freeze")),
    **dict.fromkeys(("data_dir", "data_path", "dataset", "path", "root", "uri"), ("url", "data")),
    **dict.fromkeys(("feature_extractor", "image_processor", "processor"), ("transform",)),
    **dict.fromkeys(("callback", "callbacks", "on_event"), ("observe",)),
    **dict.fromkeys(("dtype", "precision"), ("accuracy",)),
    **dict.fromkeys(("DataLoader", "StreamingDataLoader", "dataloader"), ("loader",)),
    **dict.fromkeys(("ImageFolder", "StreamingDataset", "WebDataset", "load_dataset", "load_from_disk"), ("Dataset",)),
    **dict.fromkeys(("class_names", "features"), ("classes",)),
    **dict.fromkeys(("column_names", "info", "schema"), ("columns",)),
    **dict.fromkeys(("augmentation", "transforms"), ("transform", "preprocess")),
    "bs": ("batch_size",),
    "limit": ("num_samples",),
    "network": ("model",),
    "random_state": ("seed",),
    "target_column": ("targets",),
}
# The line to write with one of our names.
_EXAMPLES: Mapping[str, str] = {
    "Dataset": 'Dataset("photos")',
    "classes": "data.classes",
    "columns": "data.columns",
    "freeze": 'freeze(model, until="layer4")',
    "loader": 'loader("photos", batch_size=32, shuffle=True)',
    "near": 'near="http://store-1:7070"',
    "until": 'freeze(model, until="layer4")',
}
# Arguments of other loaders that have no counterpart here, and what to do instead.
_OF_WORKERS = (
    "threads read ahead by themselves, so leave {name} out; processes of PyTorch's own take the loader as "
    "DataLoader(loader, batch_size=None, num_workers=2)"
)
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        ("multiprocessing_context", "num_workers", "persistent_workers", "timeout", "worker_init_fn", "workers"),
        _OF_WORKERS,
    ),
    "batch_sampler": "the order is drawn from shuffle=True, seed=0 and epoch=0, so leave batch_sampler out",
    **dict.fromkeys(
        ("batch", "iter", "to_iterable_dataset", "to_tf_dataset"),
        "batches are a loader's: write loader(data, batch_size=32, shuffle=True)",
    ),
    **dict.fromkeys(
        ("set_format", "with_format"),
        "samples are arrays and a loader's batches are tensors, so leave {name} out; job.arrays(32) gives NumPy",
    ),
    **dict.fromkeys(
        ("Subset", "random_split"), "parts are data sets: write train, held_out = data.split(0.2), or data.take(rows)"
    ),
    **dict.fromkeys(("imgs", "image_paths", "filenames", "paths"), "write zip(data.names, data.targets)"),
    **dict.fromkeys(("num_rows", "num_samples", "shape"), "write len(data)"),
    **dict.fromkeys(("n_classes", "nclasses", "num_classes"), "write len(data.classes)"),
    "add_column": 'write data.with_columns({{"patient": values}})',
    "collate_fn": "batches are made here: change each sample by map=function, or each batch by augment=function",
    "device": "batches come in CPU memory: write batch = batch.to(device) in the loop",
    "download": "data is read where it lies, so leave download out",
    "filter": "write data.select(\"label == 'cat'\"), or data.take(mask) with a value for each sample",
    "generator": "the order is drawn from numbers: give seed=0 and epoch=0",
    "map": "a function changes samples as they are loaded: write loader(data, batch_size=32, map=function)",
    "cuda": 'write batch = batch.to("cuda")',
    "pin_memory": "batches for a model on a GPU are pinned by themselves, so leave pin_memory out; "
    "settings=LoaderSettings(pin_memory=True) forces it",
    "prefetch_factor": "the window of what is read ahead tunes itself, so leave prefetch_factor out; "
    "settings=LoaderSettings(window_bytes=1 << 28) bounds its bytes",
    "sampler": "the order is drawn from shuffle=True, seed=0 and epoch=0; weights=[...] draws by weights, and "
    "torch.distributed or ranks=Ranks(...) shares an epoch",
    "save_to_disk": "write frostline ingest photos copy --format parquet on the command line",
    "set_transform": "write data.transform = transform, or data.with_transform(transform)",
    "shard": "ranks share an epoch by themselves under torch.distributed, or by ranks=Ranks(...) of a loader",
    "skip": "write data[100:]",
    "sort": "write data.take(numpy.argsort(data.targets))",
    "split": 'splits are asked for by name: Dataset("photos")["train"]',
    "streaming": "data is read where it lies, so leave streaming out",
    **dict.fromkeys(
        ("preprocess", "transform"),
        "{name} is said where the data is named, as in offload(model, data, {name}=...); a loader has map=function for "
        "samples and augment=function for batches",
    ),
    "target_transform": "map=function changes a sample with its label",
    "unique": "write set(data.column(name).to_pylist()), or data.classes",
    "train": 'splits are asked for by name: Dataset("photos")["train"]',
}


def synonym(name: str, known: Iterable[str]) -> str:
    """Our own name for a word that other libraries have for the same thing; nothing where we have none."""
    names = set(known)
    return next((ours for ours in _SYNONYMS.get(name, ()) if ours in names), "")


def suggest_names(name: str, known: Iterable[str]) -> str:
    """End a sentence about an unknown name: ``"; did you mean a, b or c?"``, or nothing if none is near.

    Words that other libraries have for the same thing are near, however they are spelt.
    """
    known = list(dict.fromkeys(known))
    meant = synonym(name, known)
    matches = [meant] if meant else difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if not matches:
        return ""
    *others, last = matches
    return f"; did you mean {', '.join(others)} or {last}?" if others else f"; did you mean {last}?"


def hint_for(name: str, known: Iterable[str]) -> str:
    """End a sentence about an unknown argument or function by the line to write, where other libraries have it."""
    known = list(known)
    if name in _INSTEAD:
        return f": {_INSTEAD[name].format(name=name)}"
    meant = synonym(name, known)
    return f"; write {_EXAMPLES[meant]}" if meant in _EXAMPLES else suggest_names(name, known)


F = TypeVar("F", bound=Callable[..., Any])


def add_hints(function: F) -> F:
    """Have a function refuse arguments that it does not know with the line to write instead."""
    name = function.__qualname__.removesuffix(".__init__")
    parameters = inspect.signature(function).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for given in kwargs.keys() - known:
            raise TypeError(f"{name}() got an unexpected keyword argument {given!r}{hint_for(given, known)}")
        return function(*args, **kwargs)

    return cast(F, checked)
