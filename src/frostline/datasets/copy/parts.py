"""Makes the parts of a copy in this process: what is there is looked at first, and then what is missing is written."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol, TypeVar

from frostline.core import Skipped
from frostline.errors import TooManySkipped
from frostline.events import Observer, ProgressMade, SampleSkipped

__all__ = ("CopyPart", "CopyPlan", "PartCopier", "PartRunner", "PartTally", "finished", "made_here", "whole_parts")


class PartResult(Protocol):
    """What is known of a part that is whole."""

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Samples of it that could not be read."""


T = TypeVar("T", bound=PartResult)


class CopyPart(NamedTuple):
    """A part of a copy.

    Attributes:
        number: its place among the parts.
        rows: the rows of the source that are its samples.
    """

    number: int
    rows: range


class PartCopier(Protocol):
    """Writes the parts of one copy. A part that is made again is written to the same names, with the same bytes."""

    def look(self, part: CopyPart) -> Any:
        """What the destination holds of a part before it is written; a value that may travel to another process."""

    def make(self, part: CopyPart, before: Any) -> Future[Any]:
        """Write what is missing of a part; the result counts it against what was there before.

        Args:
            part: the part to write.
            before: answer of ``look`` for it. Where this is called again, because nobody heard how it ended, it is
                the same, so that the result is too.
        """


class CopyPlan(Protocol):
    """All that a process needs to write parts of one copy, as values that may travel there."""

    def open(self, stack: ExitStack) -> PartCopier:
        """Begin in this process; ``stack`` ends its threads."""


PartRunner = Callable[[CopyPlan, Iterable[CopyPart]], Iterator[tuple[CopyPart, Any]]]
"""Has parts made, and gives each with its result once, in any order."""


def made_here(plan: CopyPlan, parts: Iterable[CopyPart]) -> Iterator[tuple[CopyPart, Any]]:
    """Make parts one after another in this process; one may be written while the next one is read, and no third."""
    with ExitStack() as stack:
        copier = plan.open(stack)
        waiting: list[tuple[CopyPart, Future[Any]]] = []
        for part in parts:
            made = copier.make(part, copier.look(part))
            yield from _results(waiting)
            waiting = [(part, made)]
        yield from _results(waiting)


def _results(waiting: Iterable[tuple[CopyPart, Future[Any]]]) -> Iterator[tuple[CopyPart, Any]]:
    for part, made in waiting:
        yield part, made.result()


class PartTally:
    """Counts the samples of parts that are whole, and ends where too many of them could not be read.

    Args:
        samples: number of samples of all parts.
        max_skipped: maximum number of them that may be left out.
        observe: told what was skipped now, and how far the copy is.
    """

    def __init__(self, samples: int, max_skipped: int, observe: Observer) -> None:
        self._samples = samples
        self._max_skipped = max_skipped
        self._observe = observe
        self._done = self._skipped = 0

    def tell(self, skipped: Iterable[Skipped]) -> None:
        """Tell of samples that could not be read now."""
        for lost in skipped:
            self._observe(SampleSkipped(id=lost.id, object=lost.object, reason=lost.reason, changed=lost.changed))

    def add(self, part: CopyPart, skipped: tuple[Skipped, ...]) -> None:
        """Count a part that is whole.

        Raises:
            TooManySkipped: More samples were left out than may be.
        """
        self._done += len(part.rows)
        self._skipped += len(skipped)
        if self._skipped > self._max_skipped:
            lost = skipped[-1]
            raise TooManySkipped(
                f"{self._skipped} of {self._samples} samples cannot be read, and at most {self._max_skipped} may be "
                f"left out: {lost.object} is the last ({lost.reason}); allow more with --skip-allowance"
            )
        self._observe(ProgressMade(done=self._done, total=self._samples))


def whole_parts(
    runner: PartRunner,
    plan: CopyPlan,
    parts: Iterable[CopyPart],
    tally: PartTally,
    *,
    found: Callable[[CopyPart], T | None] | None = None,
    keep: Callable[[T], T] | None = None,
) -> tuple[list[T], int]:
    """Every part in order, and how many of them were made now.

    Args:
        runner: has parts made that are missing.
        plan: how they are made.
        parts: all of the copy.
        tally: counts them.
        found: gives what is known of a part that is there from before; None where it is not, or not whole.
        keep: writes down what is known of a part that was made.
    """
    whole: dict[int, T] = {}
    made = 0

    def missing() -> Iterator[CopyPart]:
        for part in parts:
            there = None if found is None else found(part)
            if there is None:
                yield part
            else:
                whole[part.number] = there
                tally.add(part, there.skipped)

    for part, result in runner(plan, missing()):
        tally.tell(result.skipped)
        whole[part.number] = result if keep is None else keep(result)
        made += 1
        tally.add(part, result.skipped)
    return [whole[number] for number in sorted(whole)], made


def finished(result: Any) -> Future[Any]:
    """What ``PartCopier.make`` gives where nothing is under way any more."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future
