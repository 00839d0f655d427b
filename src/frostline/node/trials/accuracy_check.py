"""Knows the errors of engines on the samples of one job, and has those measured that it does not know."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from frostline.core import REFERENCE
from frostline.engines.choice.choice import Choice, inexact
from frostline.node.trials.trial_processes import Workshop
from frostline.node.trials.trial_store import TrialShelf
from frostline.profiles import Trial

__all__ = ("Judging",)


class Judging:
    """Errors on one job's samples; speed and memory are the prefix's and the hardware's, whatever the samples.

    Args:
        shelf: keeps trials and errors.
        digest: of the prefix.
        samples: what names those of the job that judge (``engines.base.identity.judged_on``).
        workshop: tries engines on them.
        turn: lasts while anything is tried.

    Attributes:
        workshop: tries engines on them.
    """

    def __init__(
        self,
        shelf: TrialShelf,
        digest: str,
        samples: str,
        workshop: Workshop,
        turn: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.workshop = workshop
        self._shelf = shelf
        self._turn = turn
        self._digest = digest
        self._samples = samples
        self._found: dict[tuple[str, int], Trial] = {}

    def keep(self, trial: Trial) -> None:
        """Keep the error of a trial that was made on these samples.

        Raises:
            OSError: It cannot be written.
        """
        self._found[trial.engine, trial.cut] = trial
        if trial.why_not is None:
            self._shelf.put_error(self._digest, trial, self._samples)

    def unknown(self, trials: Sequence[Trial]) -> list[Trial]:
        """Those that ran, and of which nobody knows how far they are from the reference on these samples."""
        return [trial for trial in trials if trial.samples_per_s is not None and self._known(trial) is None]

    def measure(self, trials: Sequence[Trial]) -> None:
        """Measure the error of one engine at some cuts, in one process.

        Raises:
            Unavailable: The node is stopping.
        """
        with self._turn():
            compared = self.workshop.compared(trials)
        for found in compared:
            try:
                self.keep(found)
            except OSError as error:
                self._found[found.engine, found.cut] = replace(found, why_not=f"cannot be tried here: {error}")

    def here(self, one: Trial) -> Trial:
        """The trial with its error on these samples; 0 where nobody knows it yet, so that it is looked at."""
        known = one if one.samples_per_s is None else self._known(one)
        if known is None:
            return replace(one, error=0.0)
        if known.why_not is not None:
            return replace(one, seconds=0.0, why_not=known.why_not)
        return replace(one, error=known.error)

    def allowed(self, one: Trial, accuracy: str | float) -> Trial:
        """The trial as a job of this accuracy has it, which is to use that engine and no other.

        Raises:
            Unavailable: The node is stopping.
        """
        if unknown := self.unknown([one]):
            self.measure(unknown)
        here = self.here(one)
        return here if here.samples_per_s is None else replace(here, why_not=inexact(here, accuracy))

    def said(self, choice: Choice, trials: Sequence[Trial]) -> Choice:
        """The choice, where engines that nobody looked at on these samples have the errors of others."""
        unseen = {(one.engine, one.cut): one.error for one in self.unknown(trials)}
        said = (replace(trial, error=unseen.get((trial.engine, trial.cut), trial.error)) for trial in choice.trials)
        return replace(choice, trials=tuple(said))

    def _known(self, one: Trial) -> Trial | None:
        if one.engine == REFERENCE:
            return one
        found = self._found.get((one.engine, one.cut))
        if found is None:
            error = self._shelf.error(self._digest, one, self._samples)
            found = None if error is None else replace(one, error=error)
        return found
