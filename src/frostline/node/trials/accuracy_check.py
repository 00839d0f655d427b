"""Looks up the errors of engines on the samples of one job, and has missing ones measured."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from frostline.core import REFERENCE
from frostline.engines.choice.choice import Choice, inexact
from frostline.node.trials.trial_processes import TrialRunner
from frostline.node.trials.trial_store import TrialStore
from frostline.profiles import Trial

__all__ = ("AccuracyCheck",)


class AccuracyCheck:
    """Errors of engines on one job's samples; speed and memory do not depend on the samples.

    Args:
        store: keeps trials and errors.
        digest: digest of the prefix.
        samples: digest of the job's test samples (``engines.base.identity.judged_on``).
        runner: tries engines on the samples.
        turn: returns a context that lasts while anything is tried.

    Attributes:
        runner: tries engines on the samples.
    """

    def __init__(
        self,
        store: TrialStore,
        digest: str,
        samples: str,
        runner: TrialRunner,
        turn: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.runner = runner
        self._store = store
        self._turn = turn
        self._digest = digest
        self._samples = samples
        self._found: dict[tuple[str, int], Trial] = {}

    def keep(self, trial: Trial) -> None:
        """Store the error of a trial that was made on these samples.

        Raises:
            OSError: if it cannot be written.
        """
        self._found[trial.engine, trial.cut] = trial
        if trial.why_not is None:
            self._store.put_error(self._digest, trial, self._samples)

    def unknown(self, trials: Sequence[Trial]) -> list[Trial]:
        """The successful trials whose error on these samples is unknown."""
        return [trial for trial in trials if trial.samples_per_s is not None and self._known(trial) is None]

    def measure(self, trials: Sequence[Trial]) -> None:
        """Measure the error of one engine at some cuts, in one process.

        Raises:
            Unavailable: if the node is stopping.
        """
        with self._turn():
            compared = self.runner.compared(trials)
        for found in compared:
            try:
                self.keep(found)
            except OSError as error:
                self._found[found.engine, found.cut] = replace(found, why_not=f"cannot be tried here: {error}")

    def here(self, trial: Trial) -> Trial:
        """The trial with its error on these samples; an unknown error is 0, so that the engine is considered."""
        known = trial if trial.samples_per_s is None else self._known(trial)
        if known is None:
            return replace(trial, error=0.0)
        if known.why_not is not None:
            return replace(trial, seconds=0.0, why_not=known.why_not)
        return replace(trial, error=known.error)

    def allowed(self, trial: Trial, accuracy: str | float) -> Trial:
        """The trial with its error on these samples, measured if needed; failed if the error is too large.

        Raises:
            Unavailable: if the node is stopping.
        """
        if unknown := self.unknown([trial]):
            self.measure(unknown)
        here = self.here(trial)
        return here if here.samples_per_s is None else replace(here, why_not=inexact(here, accuracy))

    def said(self, choice: Choice, trials: Sequence[Trial]) -> Choice:
        """The choice with errors from other samples for the engines that were not measured on these."""
        unseen = {(trial.engine, trial.cut): trial.error for trial in self.unknown(trials)}
        said = (replace(trial, error=unseen.get((trial.engine, trial.cut), trial.error)) for trial in choice.trials)
        return replace(choice, trials=tuple(said))

    def _known(self, trial: Trial) -> Trial | None:
        if trial.engine == REFERENCE:
            return trial
        found = self._found.get((trial.engine, trial.cut))
        if found is None:
            error = self._store.error(self._digest, trial, self._samples)
            found = None if error is None else replace(trial, error=error)
        return found
