"""A function of the user's own, called for each sample of a batch at the trainer, and the batch of what it gives."""

import inspect
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from frostline.core import View
from frostline.errors import SettingError

__all__ = ("Sample", "SampleFunction", "SampleMap", "TravellingFunction", "joined_targets", "stacked")

# Tells these draws from those of augmentation, which are seeded alike.
_KIND = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A sample on its way into a batch, as ``map`` takes it; ``dataclasses.replace`` makes the one that it gives.

    Attributes:
        features: activations at the frost line or the preprocessed pixels, an array; a tuple of arrays where several
            tensors cross the frost line; the encoded ``bytes`` of ``encoded=True``. Its memory is the sample's own.
        label: number of its class; -1 where it has none.
        id: its id, which stays.
        target: its declared target: a number, an array, a text, a list of texts, or a dict of these by
            name; the mask where the data has masks; None where there is none.
    """

    features: Any
    label: int
    id: int
    target: Any = None


SampleFunction = Callable[..., Sample]
"""Called as ``function(sample)``, or as ``function(sample, rng)`` where it takes two arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMap:
    """A function of samples, and the seed of what it draws.

    Attributes:
        function: function to call for each sample.
        takes_rng: it is given a ``numpy.random.Generator`` too.
        view: seed and epoch of the draws.
    """

    function: SampleFunction
    takes_rng: bool
    view: View

    @classmethod
    def of(cls, function: SampleFunction, view: View) -> "SampleMap":
        """The map of a function, which says by its arguments whether it takes a generator.

        Raises:
            SettingError: it cannot be called with a sample.
        """
        return cls(function=function, takes_rng=_takes_rng(function), view=view)

    def __call__(self, samples: Sequence[Sample]) -> list[Sample]:
        """The same samples as the function gives them. Safe for several threads, if the function is.

        Raises:
            SettingError: the function gives something else than the sample.
        """
        return [self._mapped(sample) for sample in samples]

    def _mapped(self, sample: Sample) -> Sample:
        found: object = self.function(sample, self._rng(sample.id)) if self.takes_rng else self.function(sample)
        if not isinstance(found, Sample) or found.id != sample.id:
            raise SettingError(
                "map gives the sample that it takes, changed by dataclasses.replace and with the same id, and for "
                f"sample {sample.id} it gave {type(found).__name__}"
            )
        return found

    def _rng(self, id: int) -> np.random.Generator:
        return np.random.Generator(
            np.random.Philox(np.random.SeedSequence([self.view.seed, self.view.epoch, _KIND, id]))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TravellingFunction:
    """A function that may go to other processes, with a sentence where it cannot.

    Attributes:
        function: function of the user's own.
    """

    function: SampleFunction

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.dumps(self.function)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise SettingError(
                f"map cannot go to worker processes that are spawned: {error}; make it a function of a module, or "
                "start workers by fork"
            ) from error
        return _travelled, (self.function,)


def _travelled(function: SampleFunction) -> TravellingFunction:
    return TravellingFunction(function=function)


def _takes_rng(function: object) -> bool:
    if not callable(function):
        raise SettingError(f"map takes a function of a sample, not {type(function).__name__}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one that is written in C says nothing
        return False
    positional = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    needed = [item for item in positional if item.default is item.empty or item.name == "rng"]
    if not positional or len(needed) > 2:
        raise SettingError(
            f"map is called as map(sample) or map(sample, rng), and this one needs {len(needed)} arguments"
        )
    return len(needed) == 2


def stacked(name: str, values: Sequence[Any], ids: Sequence[int]) -> Any:
    """Samples' values as one array, ``[batch, ...]``; tuples of them part by part.

    Args:
        name: name of the values, for sentences.
        values: one a sample.
        ids: ids of the samples.

    Raises:
        SettingError: shapes or types differ.
    """
    if isinstance(values[0], tuple):
        return tuple(stacked(name, part, ids) for part in zip(*values, strict=True))
    if isinstance(values[0], bytes):
        encoded = np.empty(len(values), object)
        encoded[:] = values
        return encoded
    arrays = [np.asarray(value) for value in values]
    first = arrays[0]
    for id, array in zip(ids, arrays, strict=True):
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            raise SettingError(
                f"map gave {name} of {first.dtype} {list(first.shape)} for sample {ids[0]} and of {array.dtype} "
                f"{list(array.shape)} for sample {id}: those of a batch have one shape and type"
            )
    return np.stack(arrays)


def _as_target(value: Any) -> Any:
    """A target in the types of targets: whole numbers as ``int64``, others as ``float32``, texts and lists as is."""
    if value is None or isinstance(value, str | list):
        return value
    array = np.asarray(value)
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64, copy=False)


def joined_targets(targets: Sequence[Any], before: Any, ids: Sequence[int]) -> Any:
    """The targets of a batch from those of its samples.

    Args:
        targets: one a sample.
        before: targets of the batch before they were mapped; those that were lists stay lists.
        ids: ids of the samples.

    Raises:
        SettingError: they do not go together.
    """
    first = targets[0]
    if isinstance(first, dict):
        if any(not isinstance(target, dict) or target.keys() != first.keys() for target in targets):
            raise SettingError("map gave some samples of a batch targets of other names than the others")
        known = before if isinstance(before, dict) else {}
        return {name: joined_targets([target[name] for target in targets], known.get(name), ids) for name in first}
    if any((target is None) != (first is None) for target in targets):
        raise SettingError("map gave some samples of a batch a target, and others none")
    if first is None:
        return None
    values = [_as_target(target) for target in targets]
    return values if isinstance(before, list) or isinstance(first, str | list) else stacked("targets", values, ids)
