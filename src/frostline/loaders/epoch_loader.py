"""The batches of one epoch as NumPy arrays: order, ranks, states and records, for every framework alike."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from frostline.core import TensorSpec, View
from frostline.core.errors import OrderMismatch, SettingError
from frostline.core.events import BatchDelivered, EpochFinished, EpochStarted, SetupWarning
from frostline.core.hints import Hinting
from frostline.datasets.targets import TargetColumns
from frostline.loaders.arguments import ALONE, DatasetView, Ranks
from frostline.loaders.batches import Arrivals, BatchFiller, FilledBatch
from frostline.loaders.epoch import Epochs, EpochStream, NextPass
from frostline.loaders.row_source import Arrays, RowSource
from frostline.ordering import (
    BlockOrder,
    EpochOrder,
    MixtureOrder,
    Order,
    OrderState,
    Progress,
    RecordedOrder,
    Resumed,
    Shard,
    Weighted,
)
from frostline.prefetch.requests import BatchAssembler

__all__ = (
    "ArrayLoader",
    "Change",
    "LoaderSpec",
    "PassGuard",
    "PassStart",
    "WorkerState",
    "merge_worker_states",
)


_KEY = "frostline_worker"
# Batches that torchdata's loader handed out since its workers told it how far they were.
_SINCE = "_steps_since_snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStart:
    """Where the next pass of a loader begins.

    Attributes:
        state: the state from which all workers take their turns; None is the beginning of the epoch.
        given: number of its own turns from there that a worker had before.
    """

    state: OrderState | None = None
    given: int = 0


class PassGuard(Protocol):
    """Stops passes over what a job no longer is, and makes its loaders anew. For the thread of the loop."""

    @property
    def generation(self) -> int:
        """How often the job's frozen part was made anew."""

    def make(self) -> "ArrayLoader":
        """A loader made with the same options, of the job as it is now."""

    def begin(self) -> Callable[[], None]:
        """Look at all that may have changed since the job was made, as a pass begins.

        Returns:
            A function to call with each batch of the pass, at hardly any cost. It raises ``NetworkChanged`` if the
            network has changed, or the frozen part was made anew, since the pass began.

        Raises:
            NetworkChanged: The network has changed since the job was made; the sentence says in what.
        """

    def end(self) -> None:
        """Look again as a pass has come to its end; raises as ``begin``."""

    @property
    def note(self) -> Callable[[Sequence[Any]], None]:
        """Function that notes features of the pass that begins as those of the frozen part as it is now."""


class LoaderSpec(Protocol):
    """Makes the same loader again, in the process that calls it."""

    def make(self, epoch: int, ranks: Ranks, workers: int) -> "ArrayLoader":
        """Make the loader of an epoch, as one of so many workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A loader as values.

    Attributes:
        maker: description that makes the loader again.
        epoch: epoch of the loader.
        ranks: ranks that share it. Those of another process cannot speak to each other: who sends it there compares
            (``ArrayLoader.agree``).
        begin: point where the next pass begins.
    """

    maker: LoaderSpec
    epoch: int
    ranks: Ranks
    begin: PassStart

    def open(self, worker: int = 0, workers: int = 1) -> "ArrayLoader":
        """The loader, in this process, as one of its rank's workers, who take its steps in turn."""
        ranks = replace(self.ranks, gather=None, worker=worker, workers=workers)
        found = self.maker.make(self.epoch, ranks, workers)
        found.begin_at(self.begin)
        return found


_AGAIN = (
    "each pass over this loader has the order and the random augmentations of epoch {}, while PyTorch's DataLoader "
    "shuffles anew: call loader.set_epoch(epoch) before each pass, or make a loader with epoch=epoch"
)


def _nothing(*_: object) -> None:
    """What looks at a network where there is none."""


def _open_in_worker(state: WorkerState) -> "ArrayLoader":
    """A loader that travelled alone."""
    return state.open()


def _worker_state(state: OrderState, begin: PassStart, given: int, workers: int) -> dict[str, Any]:
    """The state of a worker: how far it is, and which of its turns it has had since the workers began.

    Args:
        state: state of the worker.
        begin: point where its pass began.
        given: turns that it had in the pass.
        workers: the number of workers.
    """
    began = None if begin.state is None else begin.state.to_json()
    return {**state.to_json(), _KEY: {"began": began, "given": begin.given + given, "workers": workers}}


def _begin_of(state: Mapping[str, Any], workers: int, at_once: int) -> PassStart:
    """Where one of so many workers goes on: after its own turns, where the state is one of as many workers.

    Args:
        state: state of a worker, or of a whole run.
        workers: the number of workers now.
        at_once: samples of a step of all ranks now.

    Raises:
        OrderMismatch: The state is no state of a worker, is damaged, or comes from workers of another number or with
            other turns.
    """
    own = state.get(_KEY)
    if own is None or workers == 1:
        return PassStart(state=OrderState.from_json(_of_a_run(state)))
    given = own.get("given") if isinstance(own, Mapping) else None
    if not isinstance(given, int) or given < 0:
        raise OrderMismatch(f"this state of a loader's worker is damaged: {_KEY!r} makes no sense")
    if own.get("workers") != workers:
        raise OrderMismatch(
            f"this is the state of one of {own.get('workers')} workers, and there are {workers}: go on from the state "
            "of the whole run, which frostline.loaders.merge_worker_states finds"
        )
    if state.get("batch_size") != at_once:
        raise OrderMismatch(
            f"this is the state of a worker whose turns were steps of {state.get('batch_size')} samples, and they are "
            f"of {at_once} now: go on from the state of the whole run, which frostline.loaders.merge_worker_states "
            "finds"
        )
    began = own.get("began")
    return PassStart(state=None if began is None else OrderState.from_json(began), given=given)


def merge_worker_states(state: Any) -> dict[str, Any]:
    """The state of a whole run, from that of anything that holds the states of its workers.

    It is plain JSON, and any number of workers and ranks, and any framework, goes on from it.

    Args:
        state: the state, such as that of torchdata's ``StatefulDataLoader``.

    Raises:
        OrderMismatch: The value holds no state of a loader, or one that does not say how many batches workers were
            ahead.
    """
    found = list(_states(state))
    if not found:
        raise OrderMismatch("there is no state of a loader in this")
    last = max(found, key=lambda item: int(item["position"]))
    return cast(dict[str, Any], _of_a_run(last))


def _of_a_run(state: Any) -> Any:
    """The state without what a worker says of its turns; what is no state stays as it is, and is refused as that."""
    return {name: value for name, value in state.items() if name != _KEY} if isinstance(state, Mapping) else state


def _states(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if value.get(_SINCE):
            raise OrderMismatch(
                f"this state says how far workers were {value[_SINCE]} batches before it: make the StatefulDataLoader "
                "with snapshot_every_n_steps=1, its default"
            )
        if "frostline_order" in value and isinstance(value.get("position"), int):
            yield value
            return
        for item in value.values():
            yield from _states(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _states(item)


Change = Callable[[Arrays, View], Arrays]
"""Changes a batch: a function of the batch and of seed and epoch alone."""


class _Handed:
    """What a pass handed out so far: batches since it began, and how far that is, and its positions where recorded."""

    def __init__(self, began: PassStart, progress: Progress) -> None:
        self.began = began
        self.progress = progress
        self.batches = 0
        self.positions: list[npt.NDArray[np.int64]] = []


class ArrayLoader(Hinting):
    """The batches of one epoch, in the seeded order. Iterate it once or again: each pass is the same epoch.

    Leaving a pass early cancels what it had asked for. It is for one thread at a time. Where several passes are under
    way, states and records are those of the one that was begun last.

    One rank alone fills every batch but the last: where a sample cannot be read, the next one takes its place. Of
    several ranks each takes the same positions whatever can be read, so that all keep step; a batch is then shorter, or
    with ``drop`` and ``pad`` some of its rows come again.

    Args:
        sources: function that returns the source of the rows of an epoch, by its number.
        data: the samples.
        order: order of the epoch.
        batch_size: rows of every batch but perhaps the last.
        last: rule for samples that fill no batch; see ``ordering.Shard``.
        ranks: ranks that share the epoch.
        change: the change, made to each batch, by seed and epoch; None leaves it as it is.
        record: keep in which order the samples of a pass were handed out, 8 bytes each; see ``recorded_order``.

    Raises:
        SettingError: a figure that makes no sense; or several ranks are to be recorded.
    """

    def __init__(
        self,
        sources: Callable[[int], RowSource],
        data: DatasetView,
        *,
        order: EpochOrder,
        batch_size: int,
        last: str = "keep",
        ranks: Ranks = ALONE,
        change: Change | None = None,
        record: bool = False,
    ) -> None:
        if record and ranks.world_size > 1:
            raise SettingError(
                f"{ranks.world_size} ranks keep the epoch's order, and none of them sees the whole of it: leave out "
                "record=True, since seed and epoch say the order"
            )
        self._sources = sources
        self._source = sources(order.epoch)
        self._data = data
        self._order = order
        self._batch_size = batch_size
        self._last = last
        self._ranks = ranks
        self._change = change
        self._record = record
        self._begin = PassStart()
        self._handed = _Handed(self._begin, Progress())
        self._made_by: LoaderSpec | None = None
        self._followed: NextPass | None = None
        self._guard: PassGuard | None = None
        self.note: Callable[[Sequence[Any]], None] = _nothing  # of the latest pass; see PassGuard
        self._generation = 0
        # Passes that came to their end, by order; loaders of a job that are made without an epoch count together.
        self.passes: Counter[tuple[str, str, int]] = Counter()
        self._shard(self._resumed(), PassStart())

    def __repr__(self) -> str:
        return f"ArrayLoader(epoch {self.epoch}, {len(self):,} batches of {self._batch_size})"

    @property
    def epoch(self) -> int:
        """The number of the loader's epoch."""
        return self._order.epoch

    @property
    def view(self) -> View:
        """What seeds the changes made to its batches."""
        return View(seed=self._order.seed, epoch=self._order.epoch)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """What a row's features are, before they are changed."""
        self._renew()
        return self._source.tensors

    @property
    def targets(self) -> TargetColumns | None:
        """Declared targets of the data set, before they are changed; None where none are declared, or asked for."""
        finisher = self._source.finisher
        return None if finisher is None else finisher.targets

    @property
    def batch_size(self) -> int:
        """The most rows of a batch."""
        return self._batch_size

    @property
    def whole_rows(self) -> int | None:
        """Rows of every batch; None where one may have fewer, as the last one."""
        return self._batch_size if self._last == "drop" else None

    def __len__(self) -> int:
        """Batches in the whole epoch; for one rank, if no further sample turns out to be unreadable."""
        if self._ranks.are_several or not isinstance(self._order, Order | BlockOrder):
            return self._shard(self._resumed(PassStart()), PassStart()).steps
        lost, samples = self._source.unreadable(), self._data.samples
        readable = len(samples) - (int(np.isin(samples.ids, lost).sum()) if len(lost) else 0)
        return readable // self._batch_size if self._last == "drop" else -(-readable // self._batch_size)

    def __iter__(self) -> Generator[Arrays]:
        """A pass over the epoch, from where ``load_state_dict`` put it; the next pass is whole again.

        A pass of which no batch is taken is none: trainers make one to see whether a loader can be iterated.

        Raises:
            NetworkChanged: the job's network is another one than its features are of, when its first batch is taken or
                later; the sentence names what changed.
            OrderMismatch: the ranks would not read the same epoch.
            Unavailable: a rank did not say what it is about to read.
        """
        handed = self._handed = _Handed(self._begin, self._reached(self._begin))
        self.agree()
        return self._pass(self._resumed(), handed)

    def agree(self) -> None:
        """Make sure that all ranks are about to read the same epoch, as a pass does; each must call it as often.

        It is for whoever has workers make the passes: those cannot ask other ranks.

        Raises:
            OrderMismatch: The ranks differ; the sentence says in what, and which ranks.
            Unavailable: a rank did not say what it is about to read.
        """
        self._ranks.agree(self._resumed().state)

    def catch_up(self) -> None:
        """Let the job count, and tell its observer, what workers that make passes of this loader could not read."""
        self._source.catch_up()

    def in_epoch(self, epoch: int) -> "ArrayLoader":
        """The same kind of loader of another epoch."""
        self._renew()
        found = ArrayLoader(
            self._sources,
            self._data,
            order=self._order.in_epoch(epoch),
            batch_size=self._batch_size,
            last=self._last,
            ranks=self._ranks,
            change=self._change,
            record=self._record,
        )
        found._made_by, found._guard, found._generation = self._made_by, self._guard, self._generation
        return found

    def set_guard(self, guard: PassGuard) -> Self:
        """Say what stops its passes where the job's network changes, and makes it anew with the job."""
        self._guard, self._generation = guard, guard.generation
        return self

    def require_unchanged(self) -> Callable[[], None]:
        """Do nothing if the job's network is what its features are of; also where workers are about to make a pass.

        Returns:
            A function that checks the same at each batch of a pass that begins now.

        Raises:
            NetworkChanged: The network has changed since its features were computed; the sentence names what changed.
        """
        if self._guard is None:
            return _nothing
        look, self.note = self._guard.begin(), self._guard.note
        self._renew()
        return look

    def _renew(self) -> None:
        """Be a loader of the job as it is now, where its frozen part was made anew."""
        if self._guard is None or self._guard.generation == self._generation:
            return
        made = self._guard.make()
        self._sources, self._made_by = made._sources, made._made_by  # noqa: SLF001
        self._generation = self._guard.generation
        self._source = self._sources(self._order.epoch)

    def set_maker(self, maker: LoaderSpec) -> Self:
        """Say how it was made, so that other processes can make it too."""
        self._made_by = maker
        return self

    def for_worker(self) -> WorkerState:
        """What takes it into another process; its ranks are not compared there.

        Raises:
            NetworkChanged: The network has changed since its features were computed; the sentence names what changed.
            SettingError: the loader was not made by a job.
        """
        self.require_unchanged()
        if self._made_by is None:
            raise SettingError("only a loader that a job made can go to another process")
        ranks = replace(self._ranks, gather=None)
        return WorkerState(maker=self._made_by, epoch=self.epoch, ranks=ranks, begin=self._begin)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_in_worker, (self.for_worker(),)

    @property
    def begin(self) -> PassStart:
        """Where the next pass begins."""
        return self._begin

    def begin_at(self, begin: PassStart) -> None:
        """Let the next pass begin there."""
        self._begin = begin
        self._handed = _Handed(begin, self._reached(begin))

    def begin_whole(self) -> None:
        """Let the next pass be the whole epoch; its state is what it was till then."""
        self._begin = PassStart()

    def set_apart(self) -> "ArrayLoader":
        """A loader of its own for what would be the next pass over this one; the pass after it is whole again."""
        found = self.in_epoch(self._order.epoch)
        found.begin_at(self._begin)
        self.begin_whole()
        return found

    def epochs(self, numbers: Sequence[int]) -> "Epochs[ArrayLoader]":
        """Several epochs like this one, such as ``range(10)``: each asked for while the one before it ends.

        Raises:
            SettingError: No epoch is named, or one is named twice.
        """
        return Epochs(self, numbers)

    def rows(self) -> EpochStream:
        """The rows of the next pass."""
        self._renew()
        return self._rows(self._resumed(), self._begin)

    def _rows(self, order: Resumed, begin: PassStart) -> EpochStream:
        return EpochStream(self._source, self._data.samples, order, self._shard(order, begin))

    def _begun(self, order: Resumed, begin: PassStart) -> tuple[EpochStream, AbstractContextManager[Arrivals]]:
        """The rows of a pass from there."""
        followed, self._followed = self._followed, None
        if followed is None:
            rows = self._rows(order, begin)
            found: tuple[EpochStream, AbstractContextManager[Arrivals]] = rows, rows.arrivals()
        else:
            found = followed(self._source)  # which may ask for ``rows``
        return found

    def follow(self, rows: NextPass) -> None:
        """Let somebody else ask for the rows of the next pass."""
        self._followed = rows

    def state_dict(self) -> dict[str, Any]:
        """How far this loader is, by what it handed out, the same at all ranks that are equally far: plain JSON.

        Where samples came ahead of others by ``max_reorder`` it names them, so that none comes again.
        """
        state, handed, workers = self._state_now(), self._handed, self._ranks.workers
        return state.to_json() if workers == 1 else _worker_state(state, handed.began, handed.batches, workers)

    def state_after(self, batches: int, begin: PassStart | None = None) -> dict[str, Any]:
        """How far it is when workers have handed out so many batches, which they cannot say here.

        Args:
            batches: the batches since the pass began.
            begin: the place where it did; by default where the next one will.
        """
        begin = self._begin if begin is None else begin
        progress = self._reached(begin, batches)
        return replace(self._state(progress.position), ahead=progress.ahead).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from there, whatever the number of ranks and the batch size were.

        Raises:
            OrderMismatch: the state is of other samples, another seed, order or epoch, or of a newer Frostline.
        """
        found = OrderState.from_json(_of_a_run(state))
        found.require(self._state(0))
        if found.epoch != self._order.epoch:
            raise OrderMismatch(
                f"this state stands in epoch {found.epoch}, and this loader is of epoch {self._order.epoch}: make it "
                f"with epoch={found.epoch}"
            )
        self.begin_at(_begin_of(state, self._ranks.workers, self._at_once))

    def recorded_order(self) -> RecordedOrder:
        """The order in which the last pass handed out samples so far, as a value that can be kept and replayed.

        Raises:
            SettingError: The order was not recorded, or several ranks shared the epoch, which keep its order.
        """
        if not self._record or self._ranks.are_several:
            raise SettingError("only what one rank hands out is recorded, where its loader is made with record=True")
        positions = np.concatenate([np.zeros(0, np.int64), *self._handed.positions])
        return RecordedOrder(state=self._state_now(), positions=positions)

    def _resumed(self, begin: PassStart | None = None) -> Resumed:
        """The order with what was handed out before the next pass, or before another one, at its beginning."""
        state = (self._begin if begin is None else begin).state
        start = self._state(0) if state is None else replace(self._state(state.position), ahead=state.ahead)
        return Resumed(order=self._order, state=start)

    def _reached(self, begin: PassStart, steps: int = 0) -> Progress:
        """How far the epoch is after so many of the rank's steps from there; a worker's own turns before count too."""
        order = self._resumed(begin)
        shard = self._shard(order, replace(begin, given=0))
        if begin.given:
            steps += shard.step_of(begin.given - 1) + 1
        progress = Progress(order.state.position, order.state.ahead)
        if steps:
            progress.give(np.zeros(0, np.int64), int(order.original_positions(np.array([shard.after(steps)]))[0]))
        return progress

    def _shard(self, order: Resumed, begin: PassStart) -> Shard:
        """This rank's part from there on. One rank alone drops what it could not fill, which it learns last."""
        shard = Shard(
            size=len(self._order),
            batch_size=self._batch_size,
            start=order.start,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            last="keep" if self._last == "drop" and not self._ranks.are_several else self._last,
            worker=self._ranks.worker,
            workers=self._ranks.workers,
        )
        if not begin.given:
            return shard
        return replace(shard, start=shard.after(shard.step_of(begin.given)), worker=0)

    def _state_now(self) -> OrderState:
        progress = self._handed.progress
        return replace(self._state(progress.position), ahead=progress.ahead)

    @property
    def _at_once(self) -> int:
        """Samples of a step of all ranks."""
        return self._batch_size * self._ranks.world_size

    def _state(self, position: int) -> OrderState:
        return OrderState(
            manifest=self._data.digest,
            order=self._order.name,
            seed=self._order.seed,
            epoch=self._order.epoch,
            position=position,
            samples=len(self._order),
            batch_size=self._at_once,
            last=self._last,
        )

    def _pass(self, order: Resumed, handed: _Handed) -> Generator[Arrays]:
        self._source.require_open()
        look = self.require_unchanged()
        self._say_if_again()
        epoch, asking = self._begun(order, handed.began)
        on_event, number = self._source.on_event, self._order.epoch
        on_event(EpochStarted(epoch=number, samples=len(epoch)))
        started = waiting = time.perf_counter()
        taken, from_cache, stall_s = 0, 0, 0.0
        try:
            for found in self._filled(epoch, asking, partial(self._begins, look, handed.began)):
                look()
                waited = time.perf_counter() - waiting
                batch = found.arrays
                rows, cached = len(batch.ids), found.kept
                taken, from_cache, stall_s = taken + rows, from_cache + cached, stall_s + waited
                on_event(BatchDelivered(epoch=number, samples=rows, from_cache=cached, stall_s=waited))
                given = order.original_positions(order.start + found.places)
                handed.batches += 1
                handed.progress.give(given, int(order.original_positions(np.array([found.position]))[0]))
                if self._record:
                    handed.positions.append(given)
                yield batch if self._change is None else self._change(batch, self.view)
                waiting = time.perf_counter()
            if self._guard is not None:
                self._guard.end()
            self.passes[self._order_key] += 1
            if self._ranks.workers == 1:  # else others may not be as far
                handed.progress = Progress(len(self._order))
        finally:
            seconds = time.perf_counter() - started
            on_event(
                EpochFinished(epoch=number, samples=taken, from_cache=from_cache, seconds=seconds, stall_s=stall_s)
            )

    @property
    def _order_key(self) -> tuple[str, str, int]:
        return self._data.digest, self._order.name, self._order.seed

    def _say_if_again(self) -> None:
        """Say once that a second pass is the first one again: other loaders shuffle anew."""
        drawn = Order | BlockOrder | Weighted | MixtureOrder
        is_shuffled = isinstance(self._order, drawn) and getattr(self._order, "shuffle", True)
        if is_shuffled and self.passes[self._order_key] == 1:
            self._source.on_event(SetupWarning(reason=_AGAIN.format(self.epoch)))

    def _begins(self, look: Callable[[], None], begin: PassStart) -> None:
        """A pass begins there, unless the network turns out to be another one while its first rows are on their way."""
        look()
        if self._begin is begin:
            self.begin_whole()

    def _filled(
        self, epoch: EpochStream, asking: AbstractContextManager[Arrivals], begins: Callable[[], None]
    ) -> Generator[FilledBatch]:
        drop_last = self._last == "drop" and not self._ranks.are_several
        memory = self._source.memory
        assembler = BatchAssembler(batch_size=self._batch_size, drop_last=drop_last, memory=memory)
        with asking as arrived, epoch.decode(arrived) as arrivals:
            begins()
            steps, maximum = epoch.batches(assembler, arrivals), self._source.max_finished_bytes
            with BatchFiller(steps, arrivals, self._source.on_event, epoch.interrupt, maximum) as filling:
                yield from filling
