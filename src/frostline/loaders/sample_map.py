"""What a request's samples are at the trainer: encoded, with masks, or changed by a function of the user's own."""

import inspect
import pickle
import pickletools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from frostline.core import FeatureBatch, Route, Samples, Skipped, TensorSpec, View
from frostline.core.errors import SampleError, SettingError
from frostline.datasets import Dataset
from frostline.datasets.targets import TargetColumns
from frostline.loaders.fetch import Fetcher, FetchRows
from frostline.prefetch import NextRequest, RequestSource
from frostline.preprocess import Preprocess
from frostline.preprocess.apply import MASK_DTYPE, MAX_PIXELS, mask_into
from frostline.preprocess.images import decode_image
from frostline.preprocess.steps import Decode
from frostline.preprocess.transforms import Declared, Form

__all__ = (
    "ENCODED",
    "EncodedRequests",
    "EncodedRowStream",
    "Masked",
    "MaskedRequests",
    "PicklableFunction",
    "RestOfTransform",
    "Sample",
    "SampleFunction",
    "SampleMap",
    "declared_targets",
    "fetch_encoded",
    "fetch_of",
    "join_targets",
    "mask_bytes",
    "refuse_encoded",
    "require_portable",
    "stack_values",
    "with_targets",
)


# Tells these draws from those of augmentation, which are seeded alike.
_KIND = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A sample before it is put into a batch, as ``map`` receives it; return ``dataclasses.replace`` of it.

    Attributes:
        features: activations at the frost line, or without a model the preprocessed pixels, as a NumPy array; a tuple
            of arrays if several tensors cross the frost line; ``bytes`` with ``encoded=True``. Writing to it changes
            this sample only.
        label: number of the sample's class; -1 if it has none.
        id: number of the sample in its data set; the sample that ``map`` returns must have the same.
        target: the declared target: a number, an array, a text, a list of texts, or a dict of these by name. Without
            declared targets, the mask if the data has masks, else None.
    """

    features: Any
    label: int
    id: int
    target: Any = None


SampleFunction = Callable[..., Sample]
"""Called as ``function(sample)``, or as ``function(sample, rng)`` where it takes two arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMap:
    """A user's function of samples, with the seed of its random numbers.

    Attributes:
        function: function to call for each sample.
        takes_rng: True if it is given a ``numpy.random.Generator`` too.
        view: seed and epoch of the draws.
    """

    function: SampleFunction
    takes_rng: bool
    view: View

    @classmethod
    def of(cls, function: SampleFunction, view: View) -> "SampleMap":
        """The map of a function, which says by its arguments whether it takes a generator.

        Raises:
            SettingError: The function cannot be called with a sample.
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
class PicklableFunction:
    """A user's function that can be sent to other processes, or an error that says why not."""

    function: SampleFunction

    def __reduce__(self) -> tuple[Any, ...]:
        require_portable("map", self.function)
        return _travelled, (self.function,)


def require_portable(name: str, function: object) -> None:
    """Do nothing if a user's function can be sent to another process.

    Args:
        name: option that it was given as.
        function: the function; None where none was given.

    Raises:
        SettingError: The function cannot be pickled; or it is defined in a notebook, and the process is spawned without
            that.
    """
    try:
        body, why = pickle.dumps(function), None
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        body, why = b"", str(error)
    if body and get_spawning_popen() is not None and not hasattr(sys.modules["__main__"], "__file__"):
        texts = [text for _, text, _ in pickletools.genops(body) if isinstance(text, str)]
        own = next((text for owner, text in pairwise(texts) if owner == "__main__"), None)
        why = own and f"{own} is defined in a notebook, and is in no file that they could import"
    if why:
        raise SettingError(
            f"{name} cannot go to worker processes that are spawned: {why}; make it a function of a module, or start "
            "workers by fork"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestOfTransform:
    """The parts of a transform that no step says, as a function of a sample.

    What they draw at random is drawn as the user's own code draws it, by no seed of the loader's.

    Attributes:
        declared: the transform, of which something is left.
        then: function of a sample that comes after it; None where there is none.
        takes_rng: the function is given a generator too.
        is_turned: images are turned as their EXIF data says, since the data's own reader does.
    """

    declared: Declared
    then: SampleFunction | None
    takes_rng: bool
    is_turned: bool

    @classmethod
    def of(cls, declared: Declared, then: SampleFunction | None, *, is_turned: bool = False) -> "RestOfTransform":
        """What is left of a transform, and a function of the user's own behind it.

        Raises:
            SettingError: The function cannot be called with a sample.
        """
        takes_rng = then is not None and _takes_rng(then)
        return cls(declared=declared, then=then, takes_rng=takes_rng, is_turned=is_turned)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """The sample with what the transform gives of it.

        Raises:
            SampleError: The sample's image cannot be decoded.
            SettingError: the transform gives no tensor.
        """
        image = self._begun(sample.features)
        for function in self.declared.rest:
            image = function(image)
        if not hasattr(image, "shape"):
            raise SettingError(
                f"transform gives {type(image).__name__}, and a loader takes tensors: end it with ToTensor(), or with "
                "v2.ToImage() and v2.ToDtype(torch.float32, scale=True)"
            )
        sample = replace(sample, features=np.asarray(image))
        if self.then is None:
            return sample
        return self.then(sample, rng) if self.takes_rng else self.then(sample)

    def _begun(self, features: Any) -> Any:
        """What the first function that is left takes."""
        if self.declared.preprocess is None:
            step = Decode(orientation="exif" if self.is_turned else "stored")
            return decode_image(features, step, max_pixels=MAX_PIXELS)
        if self.declared.form is Form.IMAGE:
            return Image.fromarray(np.ascontiguousarray(features.transpose(1, 2, 0)).astype(np.uint8))
        import torch

        return torch.from_numpy(features.astype(np.uint8) if self.declared.form is Form.PIXELS else features)


def _travelled(function: SampleFunction) -> PicklableFunction:
    return PicklableFunction(function=function)


def _takes_rng(function: object) -> bool:
    if not callable(function):
        raise SettingError(f"map takes a function of a sample, not {type(function).__name__}")
    if type(function).__module__.startswith(("torchvision.", "timm.")):
        raise SettingError(
            f"map takes a function of a sample, with its label, and {type(function).__name__} takes an image: write "
            "transform=v2.Compose([...]) of Dataset, loader or offload"
        )
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


def stack_values(name: str, values: Sequence[Any], ids: Sequence[int]) -> Any:
    """Samples' values as one array, ``[batch, ...]``; tuples of them part by part.

    Raises:
        SettingError: shapes or types differ.
    """
    if isinstance(values[0], tuple):
        return tuple(stack_values(name, part, ids) for part in zip(*values, strict=True))
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


def join_targets(targets: Sequence[Any], before: Any, ids: Sequence[int]) -> Any:
    """The targets of a batch from those of its samples.

    Args:
        targets: target of each sample.
        before: targets of the batch before they were mapped; those that were lists stay lists.
        ids: ids of the samples.

    Raises:
        SettingError: The samples' targets differ in shape or type.
    """
    first = targets[0]
    if isinstance(first, dict):
        if any(not isinstance(target, dict) or target.keys() != first.keys() for target in targets):
            raise SettingError("map gave some samples of a batch targets of other names than the others")
        known = before if isinstance(before, dict) else {}
        return {name: join_targets([target[name] for target in targets], known.get(name), ids) for name in first}
    if any((target is None) != (first is None) for target in targets):
        raise SettingError("map gave some samples of a batch a target, and others none")
    if first is None:
        return None
    values = [_as_target(target) for target in targets]
    return values if isinstance(before, list) or isinstance(first, str | list) else stack_values("targets", values, ids)


def with_targets(data: Dataset, declared: TargetColumns | None, targets: bool | None) -> bool:
    """Whether a loader gives masks: where it is asked to, or the data set has them.

    Args:
        data: data set.
        declared: the declared targets that the loader gives.
        targets: see ``Job.loader``.

    Raises:
        SettingError: masks are asked for, and the data set has none.
    """
    if data.declares_targets:
        return declared is not None and declared.has_masks
    if targets and not data.has_targets:
        raise SettingError(
            f"{data.url} has no masks: targets need data that has some, such as images/1.jpg and masks/1.png, members "
            "1.jpg and 1.mask.png of a tar, or a column called mask; those of other kinds are declared, such as "
            "Dataset(url, targets='label')"
        )
    return data.has_targets if targets is None else targets


def declared_targets(data: Dataset, targets: bool | None) -> TargetColumns | None:
    """The declared targets that a loader gives: all, unless it is asked for none.

    Raises:
        DataError: a column's values cannot be targets, or samples have none where they must.
        SettingError: A target names no column; or targets are asked for, though the data set was declared to have none.
    """
    found = None if targets is False else data.target_columns
    if targets and data.declares_targets and found is None:
        raise SettingError(f"{data.url} was declared to have no targets, targets=(): leave out targets=True")
    return found


def fetch_of(fetcher: Fetcher, view: View | None, *, has_targets: bool, decodes: bool = True) -> FetchRows:
    """What makes a loader's requests for one view; see ``Fetcher.fetch``."""
    make = partial(Masked, fetcher) if has_targets else fetcher.fetch
    return partial(make, view=view, decodes=decodes)


def mask_bytes(preprocess: Preprocess) -> int:
    """Bytes that a sample's mask takes beside its features."""
    _, height, width = preprocess.shape
    return height * width * np.dtype(MASK_DTYPE).itemsize


class MaskedRequests:
    """The requests of another source, with memory for masks.

    Args:
        request_source: source that chooses the cut and codec of the next samples.
        nbytes: bytes of a mask.
    """

    def __init__(self, request_source: RequestSource, nbytes: int) -> None:
        self._request_source = request_source
        self._nbytes = nbytes

    def next_request(self, left: int, again: Route | None = None) -> NextRequest:
        """See ``RequestSource``."""
        following = self._request_source.next_request(left, again)
        return (
            replace(following, bytes_per_sample=following.bytes_per_sample + self._nbytes)
            if following.bytes_per_sample
            else following
        )


class Masked:
    """The rows of one request, each with its sample's mask as the last tensor: ``uint16[n, H, W]``.

    Masks come encoded, whatever way the images take: they are small, and classes must not be computed with. A sample
    whose mask is missing, or cannot be used, is skipped as one whose image cannot be read. ``close`` may be called
    from another thread, as that of ``Answer``.
    """

    def __init__(self, fetcher: Fetcher, samples: Samples, route: Route, view: View | None, *, decodes: bool) -> None:
        self._fetcher = fetcher
        self._samples = samples
        self._view = view
        self._masks = _Masks(samples)
        self._encoded: Iterator[FeatureBatch] = iter(())
        if len(self._masks.asked):
            request = fetcher.request(self._masks.asked, Route(0), view)
            self._encoded = fetcher.features(request)
        self._features = fetcher.fetch(samples, route, view, decodes=decodes)
        self._is_fetched = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        if not self._is_fetched:  # first, because a node that fails has then computed nothing in vain
            for batch in self._encoded:
                self._masks.take(batch, self._fetcher.preprocess, self._view)
            self._is_fetched = True
        return self._masks.joined(next(self._features), self._fetcher.preprocess)

    def close(self) -> None:
        """Abandon the rest of both answers."""
        close = getattr(self._encoded, "close", None)
        if close is not None:
            close()
        self._features.close()


class _Masks:
    """The masks of some samples, by id."""

    def __init__(self, samples: Samples) -> None:
        targets = samples.targets
        assert targets is not None, "masks are asked for where the data set has them"
        there, self.asked = samples.masks
        sizes = zip(targets.widths[there].tolist(), targets.heights[there].tolist(), strict=True)
        self._sizes = dict(zip(self.asked.ids.tolist(), sizes, strict=True))
        self._objects = dict(zip(self.asked.ids.tolist(), self.asked.objects, strict=True))
        self._images = dict(zip(samples.ids.tolist(), samples.objects, strict=True))
        self._masks: dict[int, npt.NDArray[np.uint16]] = {}
        self._lost: dict[int, Skipped] = {}

    def take(self, batch: FeatureBatch, preprocess: Preprocess, view: View | None) -> None:
        """Decode what arrived."""
        self._lost |= {skipped.id: skipped for skipped in batch.skipped}
        for id, encoded in zip(batch.ids.tolist(), batch.encoded, strict=True):
            mask = np.empty(preprocess.shape[1:], MASK_DTYPE)
            try:
                mask_into(preprocess, encoded, mask, id=id, view=view, size=self._sizes[id])
            except SampleError as error:
                self._lost[id] = Skipped(id=id, object=self._objects[id], reason=str(error))
            else:
                self._masks[id] = mask

    def joined(self, batch: FeatureBatch, preprocess: Preprocess) -> FeatureBatch:
        """The rows that have a mask, with it; the others are skipped."""
        ids = batch.ids.tolist()
        kept = [row for row, id in enumerate(ids) if id in self._masks]
        masks = np.empty((len(kept), *preprocess.shape[1:]), MASK_DTYPE)
        for place, row in enumerate(kept):
            masks[place] = self._masks[ids[row]]
        lost = tuple(self._why(id) for id in ids if id not in self._masks)
        tensors = batch.tensors if not lost else tuple(tensor[kept] for tensor in batch.tensors)
        encoded = batch.encoded if not lost or not batch.encoded else [batch.encoded[row] for row in kept]
        return replace(
            batch,
            ids=batch.ids if not lost else batch.ids[kept],
            tensors=(*tensors, masks),
            encoded=encoded,
            skipped=(*batch.skipped, *lost),
        )

    def _why(self, id: int) -> Skipped:
        return self._lost.get(id) or Skipped(id=id, object=self._images[id], reason="it has no mask")


ENCODED = TensorSpec((), "object")
"""A row of encoded samples, ``bytes``."""


def refuse_encoded(fetcher: Fetcher, *, targets: bool | None) -> None:
    """Refuse to give encoded samples where a job has none, or something is asked for that only pixels have.

    Raises:
        SettingError: the job has a model or a ready format, or targets are asked for.
    """
    if fetcher.shipment is not None:
        raise SettingError("encoded samples are for a job without a model: this one gives features of its network")
    if fetcher.preprocess.stored is not None:
        raise SettingError(
            "this data set is a ready format, which keeps pixels: take encoded samples from the one it was made of"
        )
    if targets:
        raise SettingError("targets are classes of decoded pixels: ask for them, or for encoded samples")


def fetch_encoded(fetcher: Fetcher) -> FetchRows:
    """What makes requests for samples as they lie in the store."""
    return lambda samples, route: EncodedRowStream(fetcher, samples, route)


class EncodedRequests:
    """The requests of another source, for encoded samples.

    Args:
        request_source: source that chooses the number of samples of a request.
    """

    def __init__(self, request_source: RequestSource) -> None:
        self._request_source = request_source

    def next_request(self, left: int, again: Route | None = None) -> NextRequest:
        """See ``RequestSource``."""
        return replace(self._request_source.next_request(left, again), route=Route(0), bytes_per_sample=0)


class EncodedRowStream:
    """The rows of one request. ``close`` may be called from another thread, as that of ``Answer``."""

    def __init__(self, fetcher: Fetcher, samples: Samples, route: Route) -> None:
        self._arrived = fetcher.arrived
        self._route = route
        self._batches: Iterator[FeatureBatch] = fetcher.features(fetcher.request(samples, route, None))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        batch = next(self._batches)
        for count in self._arrived:
            count(self._route, batch)
        rows = np.empty(len(batch), object)
        for place, encoded in enumerate(batch.encoded):
            rows[place] = bytes(encoded)  # a view would keep the whole answer in memory
        return FeatureBatch(ids=batch.ids, tensors=(rows,), skipped=batch.skipped)

    def close(self) -> None:
        """Abandon the rest of the answer."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
