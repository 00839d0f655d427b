"""Looks for one job's engine: among those that are known, and those whose trial pays, the best prospects first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from frostline.engines.base.identity import offer_name
from frostline.engines.choice.choice import Choice, choose
from frostline.engines.choice.prospects import Prospect, compared, not_worth
from frostline.node.trials.accuracy_check import Judging
from frostline.profiles import Trial

__all__ = ("Search",)


class Search:
    """One job's way to its engine, up to one cut.

    Args:
        own: the reference, as it was measured for this job.
        kept: the reference, as it was measured with what is known of the others; None where nothing is.
        keep: keeps the reference's trial beside those that were made with it.
        known: trials of other engines, from earlier jobs.
        refused: of engines that cannot be used here, with the reason.
        empty: by an offer's name, what is to be known of its engine.
        left: engines that may be tried, the best first.
        accuracy: that the job allows.
        samples: that the job has still to compute; None where trials need not pay.
        here: engines that are ready in a moment are tried in the node's own process.
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

    def run(self, judging: Judging, tried: Callable[[str], Trial]) -> Choice:
        """Find it.

        Args:
            judging: knows errors on the job's samples.
            tried: has the engine of an offer tried, by the offer's name.
        """
        while True:
            choice = self._choice(judging)
            chosen = next(trial for trial in self._trials if trial.engine == choice.engine)
            spent_s = judging.workshop.spent_s
            if unknown := judging.unknown([chosen]):
                self._compare(unknown, judging, spent_s)
                continue
            reasons = {one.engine: self._why_not(one, chosen.seconds, spent_s) for one in self._left}
            worth = next((name for name, why_not in reasons.items() if why_not is None), None)
            if worth is None:
                self._refused += [replace(self._empty[name], why_not=why_not) for name, why_not in reasons.items()]
                return judging.said(self._choice(judging), self._trials)
            self._try(worth, judging, tried)

    @property
    def _trials(self) -> list[Trial]:
        return [self._reference, *self._known]

    def _choice(self, judging: Judging) -> Choice:
        return choose([*map(judging.here, self._trials), *self._refused], self._accuracy)

    def _try(self, name: str, judging: Judging, tried: Callable[[str], Trial]) -> None:
        before_s = judging.workshop.spent_s
        self._left = [one for one in self._left if one.engine != name]
        self._known.append(tried(name))
        if judging.workshop.spent_s > before_s and not self._is_own_kept:
            self._reference = self._own  # speeds that are compared were measured at the same time
            self._keep(self._own)
            self._is_own_kept = True

    def _compare(self, unknown: Sequence[Trial], judging: Judging, spent_s: float) -> None:
        """Have errors measured on this job's samples, where that pays."""
        speed_up = self._reference.seconds / unknown[0].seconds
        gain = compared(offer_name(unknown[0].engine), speed_up, here=self._here)
        why_not = self._why_not(gain, self._reference.seconds, spent_s)
        if why_not is None:
            judging.measure(unknown)
            return
        self._known = [one for one in self._known if one not in unknown]
        self._refused += [replace(one, seconds=0.0, why_not=why_not) for one in unknown]

    def _why_not(self, one: Prospect, best_s: float, spent_s: float) -> str | None:
        reference_s = self._reference.seconds
        return not_worth(one, reference_s=reference_s, best_s=best_s, samples=self._samples, spent_s=spent_s)
