"""Asks for the next epoch while one ends, through one window, and hands out nothing of it before: the epoch fence."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Self

from frostline.core import FeatureBatch
from frostline.loaders.epoch.batch_filler import Arrivals
from frostline.loaders.epoch.retry import jitter
from frostline.loaders.epoch.rows import EpochStream
from frostline.prefetch.driver import Prefetcher
from frostline.prefetch.requests import Ask, Delivery, Stretch
from frostline.prefetch.window import Window

__all__ = ("NextEpochPrefetch",)


class NextEpochPrefetch:
    """A run of epochs. Use it as a context manager, in one thread.

    Where an epoch's features are kept for the next one, that one is not asked for before they are: it finds them.

    Args:
        make: gives the rows of the epoch at a place of the run, from 0; None after the last.
    """

    def __init__(self, make: Callable[[int], EpochStream | None]) -> None:
        self._make = make
        self._begun: dict[int, EpochStream] = {}
        self._offsets: dict[int, int] = {}
        self._asked: set[int] = set()
        self._drawing = 0
        self._stretches: Iterator[Stretch] = iter(())
        self._following: EpochStream | None = None
        self._now = -1
        self._is_handed_out = False
        self._prefetcher: Prefetcher | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self, place: int) -> tuple[EpochStream, AbstractContextManager[Arrivals]]:
        """The rows of the epoch there, and what arrives of it.

        What was asked for of it is used where the epoch before was handed out whole, and abandoned where it was left.
        """
        if not (self._is_handed_out and place == self._now + 1 and place in self._begun):
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
        source = self._first(place).source
        window = Window(_Drawn(self._draw), source.settings, jitter=jitter)
        if not window.is_done:
            prefetcher = Prefetcher(
                window,
                self._fetch,
                threads=source.settings.last_requests,
                clock=time.monotonic,
                observe=source.observe,
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
        self._stretches = rows.stretches(begins=offset == 0)

    def _draw(self) -> Stretch | None:
        """The next stretch of the run; None where there is none now. Called as the window has room, in any thread."""
        while True:
            place = self._drawing
            stretch = next(self._stretches, None)
            if stretch is not None:
                return replace(stretch, positions=stretch.positions + self._offsets[place], epoch=place)
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
        waits = self._following is not None and self._following.waits_for(self._begun[place])
        return None if waits and not (self._is_handed_out and place == self._now) else self._following

    def _fetch(self, ask: Ask) -> Iterator[FeatureBatch]:
        return self._begun[ask.epoch].fetch(ask)

    def _deliveries(self, place: int, rows: EpochStream) -> Iterator[Delivery | None]:
        """What the window hands out of one epoch, by the places in it."""
        done, offset = 0, self._offsets[place]
        # Its stretches end before the last of them is asked for, so that what is missing is known when that arrives.
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

    def __init__(self, draw: Callable[[], Stretch | None]) -> None:
        self._draw = draw

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Stretch:
        drawn = self._draw()
        if drawn is None:
            raise StopIteration
        return drawn
