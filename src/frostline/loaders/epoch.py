"""One pass over an epoch's rows: planned, asked for, decoded and built into batches; and passes one after another."""

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

from frostline.core import FeatureBatch, SampleTable
from frostline.core.errors import OrderMismatch, SettingError
from frostline.core.nouns import Closing, array_dtype
from frostline.core.system import usable_cores
from frostline.loaders.arguments import check_epochs
from frostline.loaders.batches import Arrivals, BatchBuilder, CachedRows, FilledBatch
from frostline.loaders.fetch import fetch_asked, jitter
from frostline.loaders.local_stage import DecodePool, DeliveryDecoder
from frostline.loaders.requests import RequestPlanner, prefetcher_of
from frostline.loaders.row_source import RowSource
from frostline.ordering import EpochOrder, OrderState, RecordedOrder, Shard
from frostline.prefetch.driver import Prefetcher
from frostline.prefetch.requests import Ask, BatchAssembler, Delivery, PlannedRequest, deal_again
from frostline.prefetch.window import Window

__all__ = (
    "EpochSource",
    "EpochStream",
    "Epochs",
    "NextEpochPrefetch",
    "NextPass",
    "in_turn",
)


# Of pixels that a thread decodes at a time: as few as take far longer to decode than to hand on.
_PIECE_BYTES = 2 << 20

NextPass = Callable[[RowSource], tuple["EpochStream", AbstractContextManager[Arrivals]]]
"""Gives the rows of a pass from a source, and what arrives of them."""


class EpochStream:
    """One pass over one order: its planner, its decoder and its builder, each for threads of one kind.

    The window's threads draw requests from the planner, one at a time; the threads of a pool decode what arrives; and
    one thread at a time builds batches. It is made of the same as its ``RequestPlanner``.
    """

    def __init__(self, source: RowSource, samples: SampleTable, order: EpochOrder, shard: Shard) -> None:
        self.source = source
        self._samples = samples
        self._shard = shard
        self._planner = RequestPlanner(source, samples, order, shard)
        self._cached = CachedRows(source, samples, self._planner.segments)

    def __len__(self) -> int:
        return len(self._shard)

    @property
    def asked(self) -> int:
        """All places below this that must be asked for were drawn from ``plan_requests``."""
        return self._planner.asked

    @property
    def nodes(self) -> int:
        """Nodes among which its requests choose by owner; 1 where any node will do."""
        return 1 if self._planner.owned is None else self._planner.owned.nodes

    def plan_requests(self, *, begins: bool = True) -> Iterator[PlannedRequest]:
        """What the epoch must ask for; see ``RequestPlanner``."""
        return self._planner.requests(begins=begins)

    def deal_again(self, request: PlannedRequest) -> PlannedRequest:
        """A request that nobody made yet, on the way that is best now."""
        return deal_again(request, self.source.request_source)

    def waits_for(self, before: "EpochStream") -> bool:
        """Whether its features are found where those of the epoch before are kept, if it is asked for after that."""
        cache = self.source.cache
        return cache is not None and cache is before.source.cache and cache.has_space

    def fetch(self, ask: Ask) -> Iterator[FeatureBatch]:
        """Make a request for some of its rows."""
        return fetch_asked(self.source.fetch, ask, self.source.fetch_from)

    @contextmanager
    def arrivals(self) -> Iterator[Arrivals]:
        """What the epoch must ask for, asked for by a window of its own."""
        source = self.source
        window = Window(
            self.plan_requests(),
            source.settings,
            jitter=jitter,
            nodes=self.nodes,
            has_choice=source.has_choice,
            deal_again=self.deal_again,
        )
        if window.is_done:
            yield Arrivals()
            return
        with prefetcher_of(source, window, source.on_event) as prefetcher:
            yield Arrivals.of(prefetcher, prefetcher.take_ready())

    @contextmanager
    def decode(self, arrivals: Arrivals) -> Iterator[Arrivals]:
        """The same decoded, as ``batches`` takes them."""
        arrivals = arrivals.in_order(self._planner.owned)
        if self.source.decode is None:
            yield arrivals
            return
        row_bytes = sum(math.prod(tensor.shape) * array_dtype(tensor.dtype).itemsize for tensor in self.source.tensors)
        rows = max(1, _PIECE_BYTES // max(1, row_bytes))
        decoder = DeliveryDecoder(self.source.decode, self._planner.segments.samples_at, arrivals.happened.put)
        with DecodePool(decoder.decode_rows, threads=len(usable_cores()), rows=rows) as decoding:
            yield replace(arrivals, deliveries=decoding.deliveries(arrivals.deliveries), decoding=decoding)

    def batches(self, assembler: BatchAssembler, arrivals: Arrivals) -> Generator[FilledBatch | None]:
        """The batches as their rows arrive; see ``BatchBuilder``. For any thread, one at a time.

        Args:
            assembler: assembler of the batches; empty.
            arrivals: arrivals of what ``plan_requests`` asked for, in order: ``arrivals``, or from a window
                that asks for more.
        """
        tell = arrivals.happened.put
        builder = BatchBuilder(self.source, self._samples, self._shard, self._planner, self._cached, assembler, tell)
        return builder.batches(arrivals.deliveries)

    def interrupt(self) -> None:
        """Free a thread that waits in ``batches`` for rows that were gone from the disk. Safe from any thread."""
        self._cached.interrupt()


class NextEpochPrefetch(Closing):
    """A run of epochs. Use it as a context manager, in one thread.

    Where an epoch's features are kept for the next one, that one is not asked for before they are: it finds them.

    Args:
        make: function that gives the rows of the epoch at a place of the run, from 0; None after the last.
        are_apart: True if no epoch has samples of the one before it, and so finds none that was kept.
    """

    def __init__(self, make: Callable[[int], EpochStream | None], *, are_apart: bool = False) -> None:
        self._make = make
        self._are_apart = are_apart
        self._begun: dict[int, EpochStream] = {}
        self._offsets: dict[int, int] = {}
        self._asked: set[int] = set()
        self._drawing = 0
        self._planned: Iterator[PlannedRequest] = iter(())
        self._following: EpochStream | None = None
        self._now = -1
        self._is_handed_out = False
        self._prefetcher: Prefetcher | None = None

    def rows(self, place: int, source: RowSource) -> tuple[EpochStream, AbstractContextManager[Arrivals]]:
        """The rows of the epoch there, and what arrives of it.

        What was asked for of it is used where the epoch before was handed out whole, and abandoned where it was left,
        or where the rows now come from another source.
        """
        is_next = self._is_handed_out and place == self._now + 1 and place in self._begun
        if not is_next or self._begun[place].source is not source:
            self._begin(place)
        self._now, self._is_handed_out = place, False
        self._begun.pop(place - 2, None)  # the one before may still have late answers
        found = self._begun[place]
        deliveries = self._deliveries(place, found)
        if self._prefetcher is None:
            return found, nullcontext(Arrivals(deliveries=deliveries))
        return found, nullcontext(Arrivals.of(self._prefetcher, deliveries))

    def close(self) -> None:
        """Abandon what is under way. Calling it again does nothing."""
        prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher is not None:
            prefetcher.close()

    def _begin(self, place: int) -> None:
        """Ask from the epoch there on."""
        self.close()
        self._begun, self._offsets, self._asked = {}, {}, set()
        self._now, self._is_handed_out = place, False
        first = self._first(place)
        source = first.source
        window = Window(
            _Drawn(self._draw),
            source.settings,
            jitter=jitter,
            nodes=first.nodes,
            has_choice=source.has_choice,
            deal_again=lambda request: self._begun[request.epoch].deal_again(request),
        )
        if not window.is_done:
            prefetcher = Prefetcher(
                window,
                self._fetch,
                threads=source.settings.last_requests,
                clock=time.monotonic,
                on_event=source.on_event,
                tuner=source.tuner,
            )
            self._prefetcher = prefetcher.__enter__()

    def _first(self, place: int) -> EpochStream:
        rows = self._make(place)
        assert rows is not None, "the run has such an epoch"
        self._start_drawing(place, rows, offset=0)
        return rows

    def _start_drawing(self, place: int, rows: EpochStream, *, offset: int) -> None:
        self._begun[place], self._offsets[place] = rows, offset
        self._drawing, self._following = place, None
        self._planned = rows.plan_requests(begins=offset == 0)

    def _draw(self) -> PlannedRequest | None:
        """The next request of the run; None where there is none now. Called as the window allows, in any thread."""
        while True:
            place = self._drawing
            request = next(self._planned, None)
            if request is not None:
                return replace(request, positions=request.positions + self._offsets[place], epoch=place)
            self._asked.add(place)
            following = self._next(place)
            if following is None:
                return None
            self._start_drawing(place + 1, following, offset=self._offsets[place] + len(self._begun[place]))

    def _next(self, place: int) -> EpochStream | None:
        """The epoch after, where it may be asked for now: never more than one ahead of the one that is handed out."""
        if place > self._now:
            return None
        if self._following is None:
            self._following = self._make(place + 1)
        following = self._following
        waits = following is not None and not self._are_apart and following.waits_for(self._begun[place])
        return None if waits and not (self._is_handed_out and place == self._now) else self._following

    def _fetch(self, ask: Ask) -> Iterator[FeatureBatch]:
        return self._begun[ask.epoch].fetch(ask)

    def _deliveries(self, place: int, rows: EpochStream) -> Iterator[Delivery | None]:
        """What the window hands out of one epoch, by the places in it."""
        done, offset = 0, self._offsets[place]
        # Its requests end before the last of them is asked for, so that what is missing is known when that arrives.
        while place not in self._asked or done < rows.asked:
            assert self._prefetcher is not None
            delivery = self._prefetcher.take()
            if delivery is None:
                yield None
                continue
            done = delivery.stop - offset
            yield replace(
                delivery,
                positions=delivery.positions - offset,
                stop=min(done, len(rows)),
                reach=min(delivery.reach - offset, len(rows)),
            )
        self._is_handed_out = True


class _Drawn:
    """An iterator over what a function gives; None is no more now."""

    def __init__(self, draw: Callable[[], PlannedRequest | None]) -> None:
        self._draw = draw

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PlannedRequest:
        drawn = self._draw()
        if drawn is None:
            raise StopIteration
        return drawn


class EpochSource(Protocol):
    """A loader of one epoch, whatever it makes of the batches."""

    def in_epoch(self, epoch: int) -> Self:
        """The same kind of loader of another epoch."""

    def rows(self) -> EpochStream:
        """The rows of the next pass."""

    def follow(self, rows: NextPass) -> None:
        """Let somebody else ask for the rows of the next pass."""

    def state_dict(self) -> dict[str, Any]:
        """How far it is."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Let the next pass go on from there."""

    def recorded_order(self) -> RecordedOrder:
        """The order in which its samples were handed out."""


L = TypeVar("L", bound=EpochSource)


class Epochs(Generic[L]):
    """Several epochs one after the other: each is a loader, which begins to fetch while the previous epoch ends.

    Leaving an epoch or this iteration early cancels its requests. Use it from one thread at a time.

    Args:
        loader: loader of any epoch.
        numbers: numbers of the epochs in the order in which they come. None may come twice, because a saved state
            identifies the epoch by its number.

    Raises:
        SettingError: No epoch is named, or one is named twice.
    """

    def __init__(self, loader: L, numbers: Sequence[int]) -> None:
        check_epochs(numbers)
        if not numbers:
            raise SettingError("epochs names the epochs to come, such as range(10), and there is none in it")
        twice = None if isinstance(numbers, range) else _first_repeated(numbers)
        if twice is not None:
            raise SettingError(
                f"epochs names epoch {twice} twice, and a state could not say which of them it stands in: give each "
                "number once, or make another epochs for the next round"
            )
        self.loader = loader
        self._numbers = numbers
        self._now = loader.in_epoch(numbers[0])
        self._loaded: OrderState | None = None

    def __len__(self) -> int:
        """How many epochs."""
        return len(self._numbers)

    def __iter__(self) -> Iterator[L]:
        """The epochs, from where ``load_state_dict`` put them; the next iteration has all again."""
        state, self._loaded = self._loaded, None
        if state is None:
            return self._run(0, self._now.in_epoch(self._numbers[0]))
        place = self._numbers.index(state.epoch)
        self._now = first = self._now.in_epoch(state.epoch)
        first.load_state_dict(state.to_json())
        if state.is_over:
            place += 1
            first = first if place == len(self._numbers) else first.in_epoch(self._numbers[place])
        return self._run(place, first)

    def set_apart(self) -> "Epochs[L]":
        """Epochs of their own for what would be the next iteration of these; the one after it has all again."""
        found, state = Epochs(self.loader, self._numbers), self._loaded
        self._loaded = None
        if state is not None:
            found.load_state_dict(state.to_json())
        return found

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch is that is under way; see ``ArrayLoader.state_dict``."""
        return self._now.state_dict() if self._loaded is None else self._loaded.to_json()

    def recorded_order(self) -> RecordedOrder:
        """The order in which the samples of the epoch under way were handed out; see ``ArrayLoader.recorded_order``."""
        return self._now.recorded_order()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from there, with that epoch; with the one after it where it was over.

        Raises:
            OrderMismatch: The state does not fit (see ``ArrayLoader.load_state_dict``), or its epoch is none of these.
        """
        found = OrderState.from_json(state)
        if found.epoch not in self._numbers:
            raise OrderMismatch(
                f"this state stands in epoch {found.epoch}, which is none of those to come: name it in epochs"
            )
        self._now.in_epoch(found.epoch).load_state_dict(state)
        self._loaded = found

    def _run(self, start: int, first: L) -> Iterator[L]:
        loaders = {start: first}

        def loader_at(place: int) -> L | None:
            if place not in loaders and place < len(self._numbers):
                loaders[place] = first.in_epoch(self._numbers[place])
            return loaders.get(place)

        def rows_at(place: int) -> EpochStream | None:
            found = loader_at(place)
            return None if found is None else found.rows()

        with NextEpochPrefetch(rows_at) as ahead:
            for place in range(start, len(self._numbers)):
                loader = loader_at(place)
                loader_at(place + 1)  # made here, and only found by the window's threads
                assert loader is not None
                loader.follow(partial(ahead.rows, place))
                self._now = loader
                yield loader
                loaders.pop(place)


def in_turn(loaders: Sequence[L]) -> Generator[L]:
    """Loaders of different samples, one after another: each is asked for while the one before it ends.

    Args:
        loaders: loaders of which none has samples of the one before it.
    """

    def rows_at(place: int) -> EpochStream | None:
        return loaders[place].rows() if place < len(loaders) else None

    with NextEpochPrefetch(rows_at, are_apart=True) as ahead:
        for place, loader in enumerate(loaders):
            loader.follow(partial(ahead.rows, place))
            yield loader


def _first_repeated(numbers: Sequence[int]) -> int | None:
    seen: set[int] = set()
    for number in numbers:
        if number in seen:
            return number
        seen.add(number)
    return None
