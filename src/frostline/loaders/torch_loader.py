"""Batches for a PyTorch training loop: an iterable, a ``DataLoader``'s data set, augmented, in pinned memory.

Augmented pixels need a pass through the frozen layers for each view. Noise on features and mixtures of two samples'
features need none, so they go with features that are computed once (DeVries and Taylor, "Dataset Augmentation in
Feature Space", 2017; Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018; Verma et al., "Manifold Mixup",
2019).
"""

import inspect
import mmap
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from frostline.core import View
from frostline.core.config import describe_value
from frostline.core.errors import OrderMismatch, SettingError
from frostline.core.hints import Hinting, add_field_hints, add_hints
from frostline.engines.graph_runner import as_array, as_tensor
from frostline.loaders.epoch import Epochs, EpochStream, NextPass
from frostline.loaders.epoch_loader import ArrayLoader, Change, WorkerState
from frostline.loaders.row_source import Arrays, MixedArrays, Unpackable, widened_batch
from frostline.loaders.sample_map import require_portable
from frostline.ordering import RecordedOrder

__all__ = (
    "Augment",
    "Batch",
    "BatchTargets",
    "FeatureMixup",
    "FeatureNoise",
    "Features",
    "Loader",
    "Mixed",
    "Pass",
    "PassOwner",
    "Skippable",
    "arrays_of",
    "batch_of",
    "end_with_trainer",
    "in_arrays",
)


Features = torch.Tensor | tuple[torch.Tensor, ...]
BatchTargets = torch.Tensor | list[Any] | dict[str, torch.Tensor | list[Any]]
"""Targets of a batch: lists hold a tensor, a text or a list of texts for each sample."""


@dataclass(slots=True, kw_only=True, eq=False)
class Mixed:
    """What was mixed into a batch's features.

    Attributes:
        labels: ``int64[batch]``, of the samples that were mixed in.
        weights: ``float32[batch]``, of the batch's own samples; the others have the rest.
    """

    labels: torch.Tensor
    weights: torch.Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class Batch(Unpackable):
    """One batch, in CPU memory that belongs to the caller, who may put others in the place of its tensors.

    Attributes:
        features: activations at the frost line ``[batch, ...]``; a tuple of them if several tensors cross it. Without
            a model, the preprocessed pixels ``float32[batch, C, H, W]``.
        labels: ``int64[batch]``, the index of each sample's class in the data set's classes.
        ids: ``int64[batch]``, the ids of the samples.
        mixed: labels and weights of the other samples that ``FeatureMixup`` mixed in; None without it.
        targets: the declared targets of the data set: a tensor ``[batch, ...]``; a list with one value per sample if
            shapes differ or values are texts; or a dict of these by name. If none are declared and the data set has
            masks, ``int64[batch, H, W]``, the class of each pixel of the network's input, with 255 for pixels to
            ignore. Otherwise None.
        are_images: True if the features are the pixels of images, which ``batch.images`` gives too.
    """

    features: Features
    labels: torch.Tensor
    ids: torch.Tensor
    mixed: Mixed | None = None
    targets: BatchTargets | None = None
    are_images: bool = False

    @add_hints
    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> "Batch":
        """The same batch on another device; ids stay in CPU memory.

        Args:
            device: device to copy to, such as ``"cuda"``.
            non_blocking: True lets the loop continue while page-locked memory is copied, as in PyTorch.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"a batch goes to a device: write x = batch.features.to({device}), or torch.autocast")
        if isinstance(self.features, torch.Tensor):
            features: Features = self.features.to(device, non_blocking=non_blocking)
        else:
            features = tuple(feature.to(device, non_blocking=non_blocking) for feature in self.features)
        mixed = self.mixed
        if mixed is not None:
            mixed = Mixed(labels=mixed.labels.to(device), weights=mixed.weights.to(device))
        labels = self.labels.to(device, non_blocking=non_blocking)
        targets = _each(self.targets, torch.Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking))
        return replace(self, features=features, labels=labels, mixed=mixed, targets=targets)


def batch_of(arrays: Arrays) -> Batch:
    """The same batch as tensors, in the same memory."""
    features, mixed = arrays.features, arrays.mixed
    return Batch(
        features=tuple(map(_tensor, features)) if isinstance(features, tuple) else _tensor(features),
        labels=torch.from_numpy(arrays.labels),
        ids=torch.from_numpy(arrays.ids),
        mixed=None if mixed is None else _mixed(mixed),
        targets=_each(arrays.targets, np.ndarray, torch.from_numpy),
        are_images=arrays.are_images,
    )


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array) if array.dtype != np.uint16 else as_tensor(array)  # bits of bfloat16


def arrays_of(batch: Batch) -> Arrays:
    """The same batch as arrays, in the same memory where it is in CPU memory."""
    features, mixed = batch.features, batch.mixed
    return Arrays(
        features=tuple(map(as_array, features)) if isinstance(features, tuple) else as_array(features),
        labels=_array(batch.labels),
        ids=_array(batch.ids),
        mixed=None if mixed is None else MixedArrays(labels=_array(mixed.labels), weights=_array(mixed.weights)),
        targets=_each(batch.targets, torch.Tensor, _array),
        are_images=batch.are_images,
    )


def _each(targets: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Targets of which each array or tensor is changed, wherever it stands; texts stay."""
    if isinstance(targets, dict):
        return {name: _each(values, kind, change) for name, values in targets.items()}
    if isinstance(targets, list):
        return [_each(value, kind, change) for value in targets]
    return change(targets) if isinstance(targets, kind) else targets


def _mixed(mixed: MixedArrays) -> Mixed:
    return Mixed(labels=torch.from_numpy(mixed.labels), weights=torch.from_numpy(mixed.weights))


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()


def _refuse_to_collate(_: list[Batch], **__: Any) -> NoReturn:
    raise SettingError("the loader makes the batches: give DataLoader batch_size=None")


# As the documentation of ``torch.utils.data.default_collate`` has it.
default_collate_fn_map[Batch] = _refuse_to_collate


Augment = Callable[[Batch, View], Batch]
"""Changes a batch: a function of the batch and of seed and epoch alone, so that an epoch can be had again."""


@add_field_hints
@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureNoise:
    """Adds Gaussian noise to every feature.

    A sample's noise depends on seed, epoch and sample id alone, not on the batch that the sample is in.

    Attributes:
        share: standard deviation of the noise, relative to the root mean square of the sample's own features.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.share < np.inf:
            raise SettingError(f"share must be 0 or more, not {self.share}")

    def __call__(self, batch: Batch, view: View) -> Batch:
        """The same batch with noise; tensors that are not floats, such as masks, stay as they are."""
        draws = [_generator(view, 0, id) for id in batch.ids.tolist()]
        return replace(batch, features=_changed_features(batch.features, lambda features: self._noisy(features, draws)))

    def _noisy(self, features: torch.Tensor, draws: list[np.random.Generator]) -> torch.Tensor:
        shape = tuple(features.shape[1:])
        noise = torch.from_numpy(np.stack([draw.standard_normal(shape, np.float32) for draw in draws]))
        scale = features.float().flatten(1).square().mean(1).sqrt() * self.share
        noise *= scale.reshape(-1, *[1] * len(shape))
        return features + noise.to(features.dtype)


@add_field_hints
@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureMixup:
    """Mixes each sample's features with those of another sample in the batch (mixup, at the frost line).

    The loss is then ``w * loss(scores, labels) + (1 - w) * loss(scores, batch.mixed.labels)`` for each sample, with
    ``w`` from ``batch.mixed.weights``. Pairs and weights are drawn from seed, epoch and the batch's ids.

    Attributes:
        alpha: parameter of the distribution Beta(alpha, alpha) of the mixing weights, above 0; small values mix little.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.alpha < np.inf:
            raise SettingError(f"alpha must be above 0, not {self.alpha}")

    def __call__(self, batch: Batch, view: View) -> Batch:
        """The mixtures, with the other samples' labels and the weights in ``mixed``; masks of tokens stay as they are.

        Raises:
            SettingError: The batch has targets, which have no mixture.
        """
        if batch.targets is not None:
            raise SettingError("FeatureMixup mixes labels: for batches with targets, ask the loader for targets=False")
        draw = _generator(view, 1, *batch.ids.tolist())
        other = torch.from_numpy(draw.permutation(len(batch)))
        weights = torch.from_numpy(draw.beta(self.alpha, self.alpha, len(batch)).astype(np.float32))

        def mixture(features: torch.Tensor) -> torch.Tensor:
            share = weights.reshape(-1, *[1] * (features.ndim - 1)).to(features.dtype)
            return features * share + features[other] * (1 - share)

        mixed = Mixed(labels=batch.labels[other], weights=weights)
        return replace(batch, features=_changed_features(batch.features, mixture), mixed=mixed)


def _changed_features(features: Features, change: Callable[[torch.Tensor], torch.Tensor]) -> Features:
    if isinstance(features, torch.Tensor):
        return change(features)
    return tuple(change(feature) if feature.is_floating_point() else feature for feature in features)


def _generator(view: View, kind: int, *numbers: int) -> np.random.Generator:
    seed: npt.NDArray[np.uint64] = np.array([view.seed, view.epoch, kind, *numbers], np.uint64)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed.tolist())))


class _Passed(Protocol):
    """What is asked of a loader that can be skipped into."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def set_epoch(self, epoch: int) -> None: ...

    def state_after(self, batches: int) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Skippable:
    """The parts of a ``DataLoader`` of which Accelerate makes one that begins later, as transformers' trainer does it.

    The batches of that one are steps of a pass over this loader; the first step that is not skipped begins the pass.
    Parts are made when they are asked for, so that nothing is changed by a trainer that only looks at them.
    """

    prefetch_factor = None  # there is no worker to prefetch
    num_workers = 0

    @property
    def dataset(self: _Passed) -> Dataset[Any]:
        """A data set as long as the epoch's samples, which gives a batch for a step."""
        return _Epoch(self)

    @property
    def sampler(self: _Passed) -> "_BatchSequence":
        """A sampler of batches, which come in the loader's order; ``set_epoch`` is the loader's own."""
        return _BatchSequence(self)

    @property
    def batch_sampler(self: _Passed) -> "_Steps":
        """The steps of passes over this loader."""
        return _Steps(self)

    @staticmethod
    def collate_fn(batches: list[Any]) -> Any:
        """The batch of a step, which is made already."""
        (batch,) = batches
        return batch


class _Step(Protocol):
    def __call__(self) -> Any:
        """Its batch."""


class _Epoch(Hinting, Dataset[Any]):
    def __init__(self, loader: _Passed) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return int(self._loader.state_after(0)["samples"])

    def __getitem__(self, step: _Step) -> Any:
        if not callable(step):
            raise TypeError("a loader's dataset gives batches to trainers alone: samples are those of Dataset(...)[0]")
        return step()


class _BatchSequence(SequentialSampler):
    """The order of the batches of a loader, which loops give the epoch as they give it to a ``DistributedSampler``."""

    def __init__(self, loader: _Passed) -> None:
        super().__init__(range(len(loader)))
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        with suppress(OrderMismatch):  # a recorded order is that of one epoch, in whichever a trainer takes it
            self._loader.set_epoch(epoch)


class _Steps:
    """A batch sampler whose indices are steps. ``set_epoch`` is for who skips before the epoch is set too."""

    def __init__(self, loader: _Passed) -> None:
        self._loader = loader
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[_Step]]:
        with closing(_Pass(self._loader, self._epoch)) as own:
            for number in range(len(self)):
                yield [partial(own.batch, number)]


class _Pass:
    """A pass that begins with the first batch that is asked for."""

    def __init__(self, loader: _Passed, epoch: int | None) -> None:
        self._loader = loader
        self._epoch = epoch
        self._batches: Iterator[Any] | None = None

    def batch(self, number: int) -> Any:
        if self._batches is None:
            if self._epoch is not None:
                self._loader.set_epoch(self._epoch)
            self._loader.load_state_dict(self._loader.state_after(number))
            self._batches = iter(self._loader)
        return next(self._batches)

    def close(self) -> None:
        self._batches = iter(())


# Between looks whether the training process is still the parent.
_WATCH_S = 0.5


class PassOwner:
    """Told of each pass, in whichever process it begins. For one thread at a time."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._renew()

    def __bool__(self) -> bool:
        """True where the latest pass began in a child of this process, forked or started by multiprocessing."""
        return self._process == os.getpid() and self._mark[0] != 0

    def begin(self) -> None:
        """A pass begins in the process that calls this, or it was said there where the next one does."""
        if self._process == os.getpid():
            self._renew()
        else:
            self._mark[0] = 1

    def travels(self) -> None:
        """The loader is being pickled: to a process that makes passes of it, where multiprocessing starts one."""
        if get_spawning_popen() is not None:
            self._mark[0] = 1

    def _renew(self) -> None:
        # Forked processes share these pages with the one that made them. Those of an older pass, which may still run,
        # have the mark of that one.
        self._mark = mmap.mmap(-1, 1)


def end_with_trainer() -> None:
    """Let this process, a worker of a loader, end when its training process does, however that ends.

    PyTorch's workers look whether they have another parent than at first, but only while they wait for something to
    do: one that asks for samples would go on asking until ``retry_for_s`` ends. A child of a fork server has the server
    for its parent, which lives as long as one of its children does. It is told by a pipe, that its training process
    alone holds open; of a forked child others may hold that pipe, so it looks at its parent.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        threading.Thread(target=_end_after, args=(trainer,), name="frostline-trainer-watch", daemon=True).start()


def _end_after(trainer: BaseProcess) -> None:
    if trainer.pid != os.getppid():
        trainer.join()
    while trainer.pid == os.getppid():
        time.sleep(_WATCH_S)
    os._exit(1)  # nobody is left who would take a batch, or be told why


class Loader(Skippable, Hinting, IterableDataset[Batch]):
    """The batches of one epoch, in the seeded order. Every iteration gives the same epoch again.

    Leaving an iteration early cancels its requests. Use it from one thread at a time.

    Args:
        arrays: the same batches as NumPy arrays, which become tensors without a copy.
        augment: augmentation of each batch, by seed and epoch; None leaves batches as they are.

    In a worker of ``DataLoader`` (``batch_size=None``) it makes connections of its own, and the workers take its steps
    in turn, so that together they give its batches in its order. The loader in the process that made them learns
    nothing of that, and refuses to give a state then: ``state_after`` says how far so many batches are.
    """

    def __init__(self, arrays: ArrayLoader, *, augment: Augment | None = None) -> None:
        self._arrays: ArrayLoader | None = arrays
        self._worker_state: WorkerState | None = None
        self._process = os.getpid()
        _check_augment(augment)
        self._augment = augment
        self._elsewhere = PassOwner()

    def _become(self, state: WorkerState, augment: Augment | None) -> None:
        self._arrays, self._worker_state, self._process, self._augment = None, state, os.getpid(), augment
        self._elsewhere = PassOwner()

    def __reduce__(self) -> tuple[Any, ...]:
        self._elsewhere.travels()
        require_portable("augment", self._augment)
        return _travelled, (self.arrays.for_worker(), self._augment)

    def __repr__(self) -> str:
        return repr(self.arrays).replace("ArrayLoader", "Loader", 1)

    def __getitem__(self, _: object) -> NoReturn:
        raise TypeError("batches come in their order: write next(iter(loader)), or Dataset(...)[0] for a sample")

    @property
    def arrays(self) -> ArrayLoader:
        """The same batches as NumPy arrays; in a worker process, the batches of this worker."""
        if self._arrays is None or self._process != os.getpid():
            state = self._worker_state if self._arrays is None else self._arrays.for_worker()
            assert state is not None
            info = get_worker_info()
            self._arrays = state.open() if info is None else state.open(info.id, info.num_workers)
            self._process = os.getpid()
            if info is not None:
                end_with_trainer()
        return self._arrays

    @property
    def epoch(self) -> int:
        """The number of the epoch, which decides its order and random preprocessing."""
        return self.arrays.epoch

    @property
    def batch_size(self) -> int:
        """Number of samples of every batch but perhaps the last."""
        return self.arrays.batch_size

    def __len__(self) -> int:
        """Batches in the whole epoch; for one rank, if no further sample turns out to be unreadable."""
        return len(self.arrays)

    def __iter__(self) -> "Pass":
        """A pass over the epoch; see ``ArrayLoader.__iter__``."""
        self._elsewhere.begin()
        return Pass(self._batches(iter(self.arrays), self.arrays.view), self.arrays)

    def in_epoch(self, epoch: int) -> "Loader":
        """A loader of another epoch, with the same options."""
        return Loader(self.arrays.in_epoch(epoch), augment=self._augment)

    def epochs(self, numbers: Sequence[int]) -> "Epochs[Loader]":
        """Several epochs like this one, such as ``range(10)``: each asked for while the one before it ends.

        Raises:
            SettingError: No epoch is named, or one is named twice.
        """
        return Epochs(self, numbers)

    def rows(self) -> EpochStream:
        """The samples of the next iteration, before they are put into batches; for other parts of Frostline."""
        return self.arrays.rows()

    def follow(self, rows: NextPass) -> None:
        """Let the next iteration take samples that were requested already; for other parts of Frostline."""
        self.arrays.follow(rows)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch after the batches that were handed out, as plain JSON for a checkpoint.

        Raises:
            SettingError: workers make the latest pass, and this process does not see how far they are.
        """
        self._require_here("state")
        return self.arrays.state_dict()

    def state_after(self, batches: int) -> dict[str, Any]:
        """See ``ArrayLoader.state_after``."""
        return self.arrays.state_after(batches)

    def set_epoch(self, epoch: int) -> None:
        """Switch to another epoch, for trainers that iterate one loader again and again."""
        if epoch != self.epoch:
            self._arrays = self.arrays.in_epoch(epoch)
            self._elsewhere.begin()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue from a state that ``state_dict`` returned."""
        self.arrays.load_state_dict(state)
        self._elsewhere.begin()

    def recorded_order(self) -> RecordedOrder:
        """The order in which the samples of the last iteration were handed out, for ``replay``.

        Raises:
            SettingError: The order was not recorded, several ranks shared the epoch, or workers make the latest pass.
        """
        self._require_here("recorded order")
        return self.arrays.recorded_order()

    def _require_here(self, what: str) -> None:
        if self._elsewhere:
            raise SettingError(
                f"this loader has no {what}: workers make its latest pass, and it does not see how far they are; for a "
                "state use torchdata's StatefulDataLoader or frostline.loaders.WorkerLoader in place of DataLoader, or "
                "count batches and ask for state_after"
            )

    def _batches(self, arrays: Generator[Arrays], view: View) -> Generator[Batch]:
        with closing(arrays):
            for array in arrays:
                batch = batch_of(array)
                features = batch.features
                self.arrays.note(features if isinstance(features, tuple) else (features,))
                yield batch if self._augment is None else self._augment(batch, view)


class Pass(Iterator[Batch]):
    """One pass over a loader: an iterator of batches, which whoever leaves it early may close.

    Its state is for torchdata's ``StatefulDataLoader`` alone, which saves it beside the loader's and begins a whole
    pass after one that was over. With workers it asks the loader of the training process for that, which was put
    nowhere. Without any it asks the loader that was just put to the end, and says so only here.
    """

    def __init__(self, batches: Generator[Batch], arrays: ArrayLoader) -> None:
        self._batches = batches
        self._arrays = arrays
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch."""
        try:
            return next(self._batches)
        except StopIteration:
            self._is_over = True
            raise

    def close(self) -> None:
        """Cancel what it had asked for. Closing it again does nothing."""
        self._batches.close()

    def state_dict(self) -> dict[str, bool]:
        """Whether the loop was told that the pass is over, which is one step after the last batch."""
        return {"is_over": self._is_over}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Let the pass after this one be whole, where this one is over before it begins."""
        self._is_over = state["is_over"]
        if self._is_over:
            self._arrays.begin_whole()


def _check_augment(augment: object) -> None:
    """Make sure that this may be called with a batch and its view; transforms of images take whatever is given."""
    if augment is None:
        return
    if not callable(augment) or type(augment).__module__.startswith(("torchvision.", "timm.")):
        raise SettingError(
            f"augment takes a function of a batch and its view, such as FeatureMixup(alpha=0.2), not "
            f"{describe_value(augment)}: images are augmented by transform=, or preprocess=imagenet(224, augment=True)"
        )
    with suppress(ValueError):  # of what is built in nothing is known
        try:
            inspect.signature(augment).bind(None, None)
        except TypeError:
            raise SettingError("augment is called with a batch and its view: write def augment(batch, view)") from None


def in_arrays(augment: Augment | None) -> Change:
    """The same change, of arrays; as these are handed out they hold no bfloat16."""
    _check_augment(augment)

    def change(arrays: Arrays, view: View) -> Arrays:
        return widened_batch(arrays if augment is None else arrays_of(augment(batch_of(arrays), view)))

    return change


def _travelled(state: WorkerState, augment: Augment | None) -> Loader:
    """A loader that came to another process, where nothing is opened before it is asked for."""
    loader = Loader.__new__(Loader)
    loader._become(state, augment)  # noqa: SLF001
    return loader
