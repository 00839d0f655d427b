"""Batches as arrays of JAX, over the devices of a sharding; their iterators give and take states as Grain's do."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from frostline.core.errors import OrderMismatch, SettingError
from frostline.loaders.adapters.base import Fed, checked_columns, checked_loader, columns_of
from frostline.loaders.arguments import Ranks
from frostline.loaders.epoch_loader import ArrayLoader
from frostline.loaders.row_source import Arrays
from frostline.loaders.sample_map import ENCODED
from frostline.ordering import RecordedOrder

__all__ = ("JaxIterator", "JaxLoader", "State", "ranks")


def ranks() -> Ranks:
    """The processes of ``jax.distributed``, each a rank; one where it is not initialised.

    They tell each other what they are about to read by a collective of JAX, so all must begin their passes together.
    """
    return Ranks(rank=jax.process_index(), world_size=jax.process_count(), gather=_gather)


class JaxLoader:
    """Batches of ``jax.Array``s. Each iteration is a pass with a state of its own, as in Grain.

    The first one begins where the loader stands, which a state may have put somewhere; the others are whole.

    Args:
        loader: the batches of this process, of one epoch or of several one after the other.
        sharding: the way that the global batch lies over devices, with its rows divided; the default device's where it
            is None. Where there are several processes, each brings the rows of its devices: make the loader with
            ``ranks=ranks()``.
        columns: parts of a batch to give, of ``features``, ``labels``, ``ids`` and ``targets``.

    Raises:
        SettingError: there is no such column, or the loader's batches are no arrays that JAX has.
    """

    def __init__(
        self,
        loader: Fed,
        *,
        sharding: "jax.sharding.Sharding | None" = None,
        columns: Sequence[str] = ("features", "labels"),
    ) -> None:
        if ENCODED in checked_loader(loader).tensors:
            raise SettingError("JAX has no arrays of encoded samples: make the loader without encoded=True")
        self._loader = loader
        self._sharding = sharding
        self._columns = checked_columns(columns)

    def __iter__(self) -> "JaxIterator":
        """A pass, of which nothing is asked for before its first batch."""
        return JaxIterator(self._loader.set_apart(), self._sharding, self._columns)


class JaxIterator:
    """One pass over a ``JaxLoader``: dicts of arrays by column. It is for one thread at a time.

    Targets of several columns are a dict, and those that are lists, such as boxes and texts, stay lists of NumPy arrays
    and texts. Whole numbers are narrowed to 32 bits unless ``jax_enable_x64`` is set, as JAX does it; ``ids`` stay as
    they are, as NumPy arrays.
    """

    def __init__(
        self,
        loader: Fed,
        sharding: "jax.sharding.Sharding | None",
        columns: tuple[str, ...],
    ) -> None:
        self._loader = loader
        self._sharding = sharding
        self._columns = columns
        self._batches: Iterator[Arrays] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = _stream(self._loader)
        arrays = next(self._batches)
        found = zip(self._columns, columns_of(arrays, self._columns), strict=True)
        return {name: value if name == "ids" else self._placed(value) for name, value in found}

    def get_state(self) -> "State":
        """How far the pass is, after the batch that was handed out last; see ``ArrayLoader.state_dict``."""
        return State(self._loader.state_dict())

    def set_state(self, state: Mapping[str, Any] | bytes) -> None:
        """Go on from there; see ``ArrayLoader.load_state_dict``.

        Args:
            state: State from ``get_state``, or the bytes of its JSON, as Grain's ``CheckpointHandler`` keeps it.

        Raises:
            OrderMismatch: The value is no state, or one of another loader.
        """
        self.close()
        self._loader.load_state_dict(_parsed(state) if isinstance(state, bytes) else state)
        self._batches = None

    def start_prefetch(self) -> None:
        """Do nothing: a pass reads ahead from its first batch on. Grain's ``CheckpointHandler`` asks for it."""

    def recorded_order(self) -> RecordedOrder:
        """The order in which the samples of the epoch under way were handed out; see ``ArrayLoader.recorded_order``."""
        return self._loader.recorded_order()

    def close(self) -> None:
        """Cancel what was asked for: the pass ends here, unless ``set_state`` begins it again."""
        batches, self._batches = self._batches, iter(())
        if isinstance(batches, Generator):
            batches.close()

    def _placed(self, value: Any) -> Any:
        """The global array of which this process has these rows."""
        if isinstance(value, tuple):
            return tuple(map(self._placed, value))
        if isinstance(value, dict):
            return {name: self._placed(part) for name, part in value.items()}
        if isinstance(value, list):
            return value
        if self._sharding is None:
            return jax.device_put(value)
        try:
            return jax.make_array_from_process_local_data(self._sharding, value)
        except ValueError as error:
            raise SettingError(
                f"{len(value)} rows cannot be divided as {self._sharding} asks for: choose a batch_size that its "
                f"devices share evenly, and last='drop'; JAX says: {error}"
            ) from error


class State(dict[str, Any]):
    """A state as plain JSON; Grain's ``CheckpointHandler`` takes an iterator's state for the bytes of such."""

    def decode(self) -> str:
        """The state's text."""
        return json.dumps(self)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise OrderMismatch("this is no state of a loader: it is no JSON") from error


def _stream(loader: Fed) -> Generator[Arrays]:
    """The batches of all epochs."""
    epochs: Iterator[ArrayLoader] = iter((loader,)) if isinstance(loader, ArrayLoader) else iter(loader)
    for epoch in epochs:
        with closing(iter(epoch)) as batches:
            yield from batches


def _gather(record: bytes) -> list[bytes]:
    gathered = multihost_utils.process_allgather(np.frombuffer(record, np.uint8))
    return [row.tobytes() for row in np.asarray(gathered).reshape(-1, len(record))]
