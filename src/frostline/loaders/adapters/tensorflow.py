"""Batches as a ``tf.data.Dataset`` with static shapes, for loops of TensorFlow and for Keras."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from frostline.core.errors import SettingError
from frostline.datasets import TargetSpec
from frostline.datasets.targets import MASK
from frostline.loaders.adapters.base import Fed, FrameworkIterator, Parts
from frostline.loaders.arguments import Ranks

__all__ = ("TensorFlowLoader", "ranks")


def ranks(strategy: "tf.distribute.Strategy | None" = None) -> Ranks:
    """The workers of a strategy, each a rank whatever devices it has; one where it has a single process.

    They tell each other what they are about to read by a collective of the strategy, so all must begin their passes
    together.

    Args:
        strategy: the strategy, such as ``tf.distribute.MultiWorkerMirroredStrategy()``; the one of the scope by
            default.
    """
    strategy = strategy or tf.distribute.get_strategy()
    resolver = strategy.cluster_resolver
    tasks = [] if resolver is None else _tasks(resolver.cluster_spec())
    if len(tasks) < 2:
        return Ranks()
    own = (resolver.task_type, resolver.task_id)
    return Ranks(rank=tasks.index(own), world_size=len(tasks), gather=partial(_gather, strategy))


_HANDED_OUT = {"object": tf.string, "bfloat16": tf.float32}
"""What arrays hold where tensors have a dtype that NumPy has not."""


class TensorFlowLoader:
    """A loader as a data set of TensorFlow, and how far the loop over it is.

    ``tf.data`` cannot save where a generator is; ``state_dict`` can. It counts batches that TensorFlow took, and where
    some are prefetched those that the loop has: in a loop over this object, and in Keras by ``callback``.

    Args:
        loader: loader of an epoch, so that each iteration is that epoch; or several epochs, one an iteration, as Keras
            asks for them.
        columns: an element's parts, of ``features``, ``labels``, ``ids`` and ``targets``. Where several tensors cross
            the frost line, its features are a tuple; several declared targets are a dict, and those whose length
            differs from sample to sample ragged tensors.
        prefetch: batches that TensorFlow holds. Frostline prefetches already; 1 or 2 hide the copy into TensorFlow's
            own memory too.
        ahead: batches that TensorFlow holds beside these before the loop has them: 2 for each device of a strategy of
            ``tf.distribute``.

    Raises:
        SettingError: there is no such column, ``prefetch`` or ``ahead`` is negative, or the batches are no arrays.
    """

    def __init__(
        self,
        loader: Fed,
        *,
        columns: Sequence[str] = ("features", "labels"),
        prefetch: int = 0,
        ahead: int = 0,
    ) -> None:
        self._columns = tuple(columns)
        self._prefetch = prefetch
        if min(prefetch, ahead) < 0:
            raise SettingError(f"TensorFlow can hold 0 batches or more, not {min(prefetch, ahead)}")
        self._feed = FrameworkIterator(loader, columns, prefetch + ahead, self._fit)
        self._one = self._feed.one

    def dataset(self) -> "tf.data.Dataset":
        """The data set; it has one iteration at a time.

        Its batch dimension is static where every batch is whole: with ``last="drop"`` of one rank.
        """
        found = tf.data.Dataset.from_generator(self._feed.batches, output_signature=self._signature())
        options = tf.data.Options()
        # Each rank's loader gives that rank's share: TensorFlow must not divide it again.
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        # What it would hold by itself could not be told from what the loop has.
        options.experimental_optimization.inject_prefetch = False
        # Its tuner has nothing to set here, and sleeps twice as long each time, up to a minute. Whoever leaves an
        # iteration waits for that at times: one that was left after 40 seconds took 41 more.
        options.autotune.enabled = False
        found = found.with_options(options)
        return found.prefetch(self._prefetch) if self._prefetch else found

    def __iter__(self) -> Iterator[Any]:
        """The elements of one iteration, counted as the loop has them.

        Raises:
            FrostlineError: Any error of the loader; TensorFlow's own error would hide it.
        """
        elements, own = iter(self.dataset()), None
        try:
            while (element := next(elements, None)) is not None:
                own = own or self._feed.under_way
                self._feed.count_taken(own=own)
                yield element
        except tf.errors.OpError as error:
            raise self._feed.failure or error from error
        finally:
            self._feed.leave(own)

    def callback(self) -> keras.callbacks.Callback:
        """Counts what ``fit`` has, where some batches are prefetched."""
        return _Counting(self)

    def count_taken(self, batches: int = 1) -> None:
        """The loop has so many more batches, where it iterates over the data set itself."""
        self._feed.count_taken(batches)

    def begin_again(self) -> None:
        """Begin the iteration again of which batches were taken and the loop has none, where it counts them."""
        self._feed.begin_again()

    def state_dict(self) -> dict[str, Any]:
        """How far the loop is; see ``ArrayLoader.state_dict``.

        Raises:
            SettingError: batches were prefetched and nobody counted those that the loop has.
        """
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from there; see ``ArrayLoader.load_state_dict``."""
        self._feed.load_state_dict(state)

    def _fit(self, parts: Parts) -> Parts:
        """What TensorFlow takes; a batch that the data set has no place for is refused, which it does without a why."""
        found = tuple(map(_fitted, parts))
        signature = self._signature()
        try:
            tf.nest.assert_same_structure(signature, found)
        except (TypeError, ValueError) as error:
            raise SettingError("map made other targets than the data set declares: keep their names there") from error
        for spec, part in zip(tf.nest.flatten(signature), tf.nest.flatten(found), strict=True):
            shown = part if isinstance(part, tf.RaggedTensor) else tf.TensorSpec(part.shape, part.dtype)
            if not spec.is_compatible_with(shown):
                raise SettingError(
                    f"augment or map made {part.dtype} {list(part.shape)}, and the data set has {_type_of(spec)}: keep "
                    "shapes and types there, and change them by dataset().map"
                )
        return found

    def _signature(self) -> tuple[Any, ...]:
        rows = self._one.whole_rows
        features = [
            tf.TensorSpec((rows, *tensor.shape), _HANDED_OUT.get(tensor.dtype, tensor.dtype))
            for tensor in self._one.tensors
        ]
        specs = {
            "features": features[0] if len(features) == 1 else tuple(features),
            "labels": tf.TensorSpec((rows,), tf.int64),
            "ids": tf.TensorSpec((rows,), tf.int64),
            "targets": self._targets(rows),
        }
        return tuple(specs[name] for name in self._columns)

    def _targets(self, rows: int | None) -> Any:
        targets = self._one.targets
        if targets is None:
            return tf.TensorSpec((rows, None, None), tf.int64)
        specs = {spec.name: _spec_of(spec, rows) for spec in targets.specs}
        return specs[targets.specs[0].name] if targets.is_single else specs


def _spec_of(spec: TargetSpec, rows: int | None) -> Any:
    dtype = tf.string if spec.dtype == "object" else tf.as_dtype(spec.dtype)
    if None in spec.shape and spec.kind != MASK:
        return tf.RaggedTensorSpec((rows, *spec.shape), dtype, ragged_rank=1)
    return tf.TensorSpec((rows, *spec.shape), dtype)


def _type_of(spec: Any) -> str:
    if isinstance(spec, tf.TensorSpec):
        return f"{spec.dtype.name} {spec.shape.as_list()}"
    return str(spec)


def _fitted(part: Any) -> Any:
    """A column as TensorFlow takes it: lists of arrays ragged, texts as bytes."""
    if isinstance(part, dict):
        return {name: _fitted(value) for name, value in part.items()}
    if not isinstance(part, list):
        return part
    if all(isinstance(value, str) for value in part):
        return _texts(part)
    rows = [_texts(value) if isinstance(value, list) else value for value in part]
    return tf.RaggedTensor.from_row_lengths(np.concatenate(rows), [len(row) for row in rows])


def _texts(values: list[str]) -> Any:
    found = np.empty(len(values), object)
    found[:] = [value.encode() for value in values]
    return found


class _Counting(keras.callbacks.Callback):  # type: ignore[misc]
    """Tells a loader which batches of an epoch are trained on."""

    def __init__(self, loader: TensorFlowLoader) -> None:
        super().__init__()
        self._loader = loader
        self._seen = 0

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        """Under a strategy Keras has looked at a batch, to build the network."""
        self._loader.begin_again()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        """Begin to count."""
        self._seen = 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        """Count it, and those before it where Keras takes several steps at once."""
        self._loader.count_taken(batch + 1 - self._seen)
        self._seen = batch + 1


def _tasks(cluster: "tf.train.ClusterSpec") -> list[tuple[str, int]]:
    """Those that train, in the order of their ranks: an evaluator reads on its own."""
    return [(job, task) for job in ("chief", "worker") if job in cluster.jobs for task in cluster.task_indices(job)]


def _gather(strategy: "tf.distribute.Strategy", record: bytes) -> list[bytes]:
    # Collectives on processors take whole numbers of 32 bits and no bytes; each device of a worker brings its own.
    own = np.frombuffer(record, np.uint8).astype(np.int32)[None]
    values = strategy.experimental_distribute_values_from_function(lambda _: tf.constant(own))
    devices = len(strategy.experimental_local_results(values))
    gathered = strategy.gather(values, axis=0).numpy()
    return [row.astype(np.uint8).tobytes() for row in gathered[::devices]]
