"""Several epochs one after the other, each asked for while the one before it ends."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

from frostline.errors import OrderMismatch, SettingError
from frostline.loaders.epoch.arguments import check_epochs
from frostline.loaders.epoch.next_epoch import NextEpochPrefetch
from frostline.loaders.epoch.rows import EpochStream, Following
from frostline.ordering import OrderState, RecordedOrder

__all__ = ("Epochs", "OneEpoch")


class OneEpoch(Protocol):
    """A loader of one epoch, whatever it makes of the batches."""

    def in_epoch(self, epoch: int) -> Self:
        """The same kind of loader of another epoch."""

    def rows(self) -> EpochStream:
        """The rows of the next pass."""

    def follow(self, rows: Following) -> None:
        """Let somebody else ask for the rows of the next pass."""

    def state_dict(self) -> dict[str, Any]:
        """How far it is."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Let the next pass go on from there."""

    def recorded(self) -> RecordedOrder:
        """In which order its samples were handed out."""


L = TypeVar("L", bound=OneEpoch)


class Epochs(Generic[L]):
    """Several epochs one after the other: each is a loader, asked for while the one before it ends.

    Leaving an epoch early, or this iteration, cancels what was asked for. It is for one thread at a time.

    Args:
        loader: of any epoch.
        numbers: of the epochs, in the order in which they come; none twice, since a state tells them apart by it.

    Attributes:
        loader: as given.

    Raises:
        SettingError: there is no epoch, or one comes twice.
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

    def recorded(self) -> RecordedOrder:
        """In which order the samples of the epoch under way were handed out; see ``ArrayLoader.recorded``."""
        return self._now.recorded()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from there, with that epoch; with the one after it where it was over.

        Raises:
            OrderMismatch: as ``ArrayLoader.load_state_dict``, or the epoch is none of these.
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


def _first_repeated(numbers: Sequence[int]) -> int | None:
    seen: set[int] = set()
    for number in numbers:
        if number in seen:
            return number
        seen.add(number)
    return None
