"""Searches for one job's engine: among known trials, and among new ones that pay, the best prospects first."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from frostline.core import REFERENCE, Levels
from frostline.engines.backends.catalog import Offer
from frostline.engines.base.identity import Pixels, identity, offer_name
from frostline.engines.choice.choice import Choice, choose, inexact
from frostline.engines.choice.prospects import Prospect, compared, not_worth
from frostline.node.trials.trial_processes import TrialRunner
from frostline.node.trials.trial_store import TrialStore
from frostline.profiles import Trial

__all__ = ("AccuracyCheck", "Search", "empty_trial")


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


class Search:
    """One job's search for its engine, up to one cut.

    Args:
        own: trial of the reference, measured for this job.
        kept: trial of the reference, measured with the known trials; None if there are none.
        keep: stores the reference's trial beside those made with it.
        known: trials of other engines, from earlier jobs.
        refused: trials of engines that cannot be used here, with the reason.
        empty: unfilled trials by name of the engine's offer.
        left: engines that may be tried, the best prospect first.
        accuracy: accuracy that the job needs.
        samples: number of samples that the job still has to compute; None if trials need not pay.
        here: whether engines that are ready in a moment are tried in the node's own process.
    """

    def __init__(
        self,
        *,
        own: Trial,
        kept: Trial | None,
        keep: Callable[[Trial], None],
        known: Sequence[Trial],
        refused: Sequence[Trial],
        empty: Mapping[str, Trial],
        left: Sequence[Prospect],
        accuracy: str | float,
        samples: int | None,
        here: bool = False,
    ) -> None:
        self._own = own
        self._here = here
        self._keep = keep
        self._reference = kept or own
        self._is_own_kept = False
        self._known = list(known)
        self._refused = list(refused)
        self._empty = empty
        self._left = list(left)
        self._accuracy = accuracy
        self._samples = samples

    def run(self, accuracy_check: AccuracyCheck, tried: Callable[[str], Trial]) -> Choice:
        """Choose the engine.

        Args:
            accuracy_check: provides the errors on the job's samples.
            tried: tries the engine of an offer, by the offer's name.
        """
        while True:
            choice = self._choice(accuracy_check)
            chosen = next(trial for trial in self._trials if trial.engine == choice.engine)
            spent_s = accuracy_check.runner.spent_s
            if unknown := accuracy_check.unknown([chosen]):
                self._compare(unknown, accuracy_check, spent_s)
                continue
            reasons = {prospect.engine: self._why_not(prospect, chosen.seconds, spent_s) for prospect in self._left}
            worth = next((name for name, why_not in reasons.items() if why_not is None), None)
            if worth is None:
                self._refused += [replace(self._empty[name], why_not=why_not) for name, why_not in reasons.items()]
                return accuracy_check.said(self._choice(accuracy_check), self._trials)
            self._try(worth, accuracy_check, tried)

    @property
    def _trials(self) -> list[Trial]:
        return [self._reference, *self._known]

    def _choice(self, accuracy_check: AccuracyCheck) -> Choice:
        return choose([*map(accuracy_check.here, self._trials), *self._refused], self._accuracy)

    def _try(self, name: str, accuracy_check: AccuracyCheck, tried: Callable[[str], Trial]) -> None:
        before_s = accuracy_check.runner.spent_s
        self._left = [prospect for prospect in self._left if prospect.engine != name]
        self._known.append(tried(name))
        if accuracy_check.runner.spent_s > before_s and not self._is_own_kept:
            self._reference = self._own  # compared speeds must be measured at the same time
            self._keep(self._own)
            self._is_own_kept = True

    def _compare(self, unknown: Sequence[Trial], accuracy_check: AccuracyCheck, spent_s: float) -> None:
        """Have errors measured on this job's samples, if that pays."""
        speed_up = self._reference.seconds / unknown[0].seconds
        gain = compared(offer_name(unknown[0].engine), speed_up, here=self._here)
        why_not = self._why_not(gain, self._reference.seconds, spent_s)
        if why_not is None:
            accuracy_check.measure(unknown)
            return
        self._known = [trial for trial in self._known if trial not in unknown]
        self._refused += [replace(trial, seconds=0.0, why_not=why_not) for trial in unknown]

    def _why_not(self, prospect: Prospect, best_s: float, spent_s: float) -> str | None:
        reference_s = self._reference.seconds
        return not_worth(prospect, reference_s=reference_s, best_s=best_s, samples=self._samples, spent_s=spent_s)


def empty_trial(offer: Offer, cut: int, pixels: Pixels, levels: Levels | None) -> Trial:
    """An unfilled trial of an engine at one cut.

    Args:
        offer: the engine.
        cut: cut of the prefix.
        pixels: samples on which it is to be tried.
        levels: meaning of the pixels if they are unprocessed; else None.
    """
    name = identity(offer.name, offer.precision, pixels, levels, takes_pixels=offer.takes_pixels)
    return Trial(engine=name, precision=offer.precision, cut=cut)
